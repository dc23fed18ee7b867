//! Files of a rank that are in memory: they are gone with the process that made them, however it ends.

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::fd::AsRawFd;

use rustix::fs::{MemfdFlags, memfd_create};

/// One such file. Other processes of this user open it by its path.
pub(super) struct Scratch {
    file: File,
}

impl Scratch {
    pub(super) fn new(name: &str) -> std::io::Result<Scratch> {
        Ok(Scratch { file: File::from(memfd_create(name, MemfdFlags::CLOEXEC)?) })
    }

    pub(super) fn with(name: &str, content: &[u8]) -> std::io::Result<Scratch> {
        let mut scratch = Scratch::new(name)?;
        scratch.file.write_all(content)?;
        Ok(scratch)
    }

    pub(super) fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd())
    }

    pub(super) fn len(&self) -> u64 {
        self.file.metadata().map_or(0, |metadata| metadata.len())
    }

    /// What is in it, from a byte on.
    pub(super) fn read(&self, from: u64) -> std::io::Result<String> {
        let mut file = File::open(self.path())?;
        file.seek(std::io::SeekFrom::Start(from))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn others_write_to_it_and_it_is_read_by_its_owner() {
        let scratch = Scratch::new("test").unwrap();
        std::fs::write(scratch.path(), "one").unwrap();
        assert_eq!((scratch.len(), scratch.read(1).unwrap().as_str()), (3, "ne"));
        assert_eq!(std::fs::read(Scratch::with("test", b"two").unwrap().path()).unwrap(), b"two");
    }
}
