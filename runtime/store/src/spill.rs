//! Spilled objects on disk: one file without a name, in which objects lie beside each other.
//!
//! The file is unlinked from its beginning, so it ends with the daemon's descriptor, however that ends: nothing can be
//! left behind, and nobody else can open it. It costs one descriptor however many objects are spilled. What is removed
//! is punched out; where the file system cannot do that, the space is used again for what is spilled later. The checksum of each
//! object (CRC-32C, RFC 3720 appendix B.4) stays in memory: what the disk gives back must be what was written.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crc32c::crc32c;
use parking_lot::Mutex;
use rustix::fs::{FallocateFlags, Mode, OFlags, fallocate, open};

use crate::error::SpillError;
use crate::extent::Extent;
use crate::ranges::Ranges;
use crate::table::SpillFile;

/// Objects begin at multiples of this, the block of most file systems: only whole blocks can be punched out.
const BLOCK: u64 = 4096;

/// Where one daemon's spilled objects lie. Touches no disk before the first one is written.
#[derive(Debug)]
pub struct SpillSpace {
    /// The directory on whose disk it is.
    parent: PathBuf,
    /// Nobody holds this lock during IO, but for making the file and for shortening it when it is empty.
    layout: Mutex<Layout>,
}

#[derive(Debug, Default)]
struct Layout {
    /// Once it was needed.
    file: Option<Arc<File>>,
    /// Where complete objects lie.
    written: BTreeMap<SpillFile, Written>,
    /// Bytes before `end` that belong to nothing.
    free: Ranges,
    /// The first byte behind everything.
    end: u64,
}

/// An object in the file.
#[derive(Clone, Copy, Debug)]
struct Written {
    extent: Extent,
    checksum: u32,
}

impl Layout {
    /// The shortest free run that is long enough, or behind everything.
    fn take(&mut self, len: u64) -> Extent {
        let taken = len.next_multiple_of(BLOCK);
        let run = self.free.at_least(taken).next().map(|run| run.offset);
        let offset = match run {
            Some(offset) => {
                self.free.remove(Extent { offset, len: taken });
                offset
            }
            None => {
                self.end += taken;
                self.end - taken
            }
        };
        Extent { offset, len }
    }

    /// Takes back what was punched out, or never written.
    fn give_back(&mut self, extent: Extent) {
        self.free.insert(blocks(extent));
        if self.free.total() == self.end
            && let Some(file) = &self.file
            && file.set_len(0).is_ok()
        {
            self.free = Ranges::default();
            self.end = 0;
        }
    }
}

fn blocks(extent: Extent) -> Extent {
    Extent { offset: extent.offset, len: extent.len.next_multiple_of(BLOCK) }
}

impl SpillSpace {
    /// On the disk of the directory `parent`, which is made if it is needed and not there.
    pub fn new(parent: impl Into<PathBuf>) -> Self {
        Self { parent: parent.into(), layout: Mutex::default() }
    }

    /// Writes an object's bytes. If that fails, nothing of it is kept.
    pub fn write(&self, object: SpillFile, bytes: &[u8]) -> Result<(), SpillError> {
        let (file, extent) = {
            let mut layout = self.layout.lock();
            let file = match &layout.file {
                Some(file) => file.clone(),
                None => {
                    let made = make(&self.parent).map_err(|error| self.failed("make a spill file in", error))?;
                    layout.file.insert(Arc::new(made)).clone()
                }
            };
            (file, layout.take(bytes.len() as u64))
        };
        match file.write_all_at(bytes, extent.offset) {
            Ok(()) => {
                let written = Written { extent, checksum: crc32c(bytes) };
                self.layout.lock().written.insert(object, written);
                Ok(())
            }
            Err(error) => {
                self.punch(&file, extent);
                Err(self.failed("write to the spill file in", error))
            }
        }
    }

    /// Reads an object's bytes back; they stay. `into` has the object's size.
    pub fn read(&self, object: SpillFile, into: &mut [u8]) -> Result<(), SpillError> {
        let (file, written) = {
            let layout = self.layout.lock();
            (layout.file.clone(), layout.written.get(&object).copied())
        };
        let read = match (file, written) {
            (Some(file), Some(written)) => file.read_exact_at(into, written.extent.offset).and_then(|()| {
                let other = || io::Error::new(io::ErrorKind::InvalidData, "it is not what was written: the disk fails");
                (crc32c(into) == written.checksum).then_some(()).ok_or_else(other)
            }),
            _ => Err(io::ErrorKind::NotFound.into()),
        };
        read.map_err(|error| self.failed("read from the spill file in", error))
    }

    /// Gives an object's space back to the disk.
    pub fn remove(&self, object: SpillFile) {
        let (file, written) = {
            let mut layout = self.layout.lock();
            (layout.file.clone(), layout.written.remove(&object))
        };
        if let (Some(file), Some(written)) = (file, written) {
            self.punch(&file, written.extent);
        }
    }

    fn punch(&self, file: &File, extent: Extent) {
        let Extent { offset, len } = blocks(extent);
        if len > 0
            && let Err(error) = rustix::io::retry_on_intr(|| {
                fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, len)
            })
        {
            tracing::debug!(%error, "this file system takes spilled space back when all is removed, and not before");
        }
        self.layout.lock().give_back(extent);
    }

    fn failed(&self, doing: &'static str, error: io::Error) -> SpillError {
        SpillError { doing, path: self.parent.clone(), error }
    }

    /// One bit of an object is another.
    #[cfg(test)]
    pub(crate) fn flip_a_bit(&self, of: wingbeat_core::ObjectId, at: u64) {
        let layout = self.layout.lock();
        let (_, written) = layout.written.iter().find(|(file, _)| file.id == of).unwrap();
        let (file, at) = (layout.file.as_ref().unwrap(), written.extent.offset + at);
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 1], at).unwrap();
    }

    #[cfg(test)]
    pub(crate) fn lose_everything(&self) {
        if let Some(file) = &self.layout.lock().file {
            file.set_len(0).unwrap();
        }
    }

    /// What it takes on the disk.
    #[cfg(test)]
    pub(crate) fn disk_bytes(&self) -> u64 {
        use std::os::unix::fs::MetadataExt;
        self.layout.lock().file.as_ref().map_or(0, |file| file.metadata().unwrap().blocks() * 512)
    }
}

/// A file that has no name, readable by this user alone.
fn make(parent: &Path) -> io::Result<File> {
    fs::create_dir_all(parent)?;
    let flags = OFlags::TMPFILE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
    if let Ok(file) = open(parent, flags, Mode::RUSR | Mode::WUSR) {
        return Ok(file.into());
    }
    // Some file systems (NFS, older overlays) only make files with names.
    let mut n = 0;
    loop {
        let path = parent.join(format!("wingbeat-spill-{}-{n}", std::process::id()));
        match OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path) {
            Ok(file) => {
                fs::remove_file(&path)?;
                return Ok(file);
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && n < 1000 => n += 1,
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use wingbeat_core::{ObjectId, ProcessId, TaskId};

    use super::*;

    fn file(number: u64) -> SpillFile {
        SpillFile { id: ObjectId { task: TaskId { owner: ProcessId(7), seq: 1 }, index: 0 }, number }
    }

    #[test]
    fn what_was_written_is_read_back_until_it_is_removed() {
        let parent = tempfile::tempdir().unwrap();
        let spill = SpillSpace::new(parent.path());
        spill.write(file(0), b"zero").unwrap();
        spill.write(file(1), b"one!").unwrap();
        spill.remove(file(1));
        let mut bytes = [0; 4];
        spill.read(file(0), &mut bytes).unwrap();
        assert_eq!(&bytes, b"zero");
        assert!(spill.read(file(1), &mut bytes).is_err());
    }

    #[test]
    fn what_a_failing_disk_gives_back_is_an_error() {
        let parent = tempfile::tempdir().unwrap();
        let spill = SpillSpace::new(parent.path());
        let (bytes, mut read) = (vec![7; 10_000], vec![0; 10_000]);
        spill.write(file(0), &bytes).unwrap();
        for at in [0, 4_096, 9_999] {
            spill.flip_a_bit(file(0).id, at);
            let error = spill.read(file(0), &mut read).unwrap_err();
            assert!(error.to_string().contains("not what was written"), "{error}");
            spill.flip_a_bit(file(0).id, at);
            spill.read(file(0), &mut read).unwrap();
        }
        spill.write(file(1), b"").unwrap();
        spill.read(file(1), &mut []).unwrap();
    }

    #[test]
    fn nothing_on_the_disk_has_a_name() {
        let parent = tempfile::tempdir().unwrap();
        let deeper = parent.path().join("deeper");
        let spill = SpillSpace::new(&deeper);
        assert!(!deeper.exists());
        spill.write(file(0), b"x").unwrap();
        assert_eq!(fs::read_dir(&deeper).unwrap().count(), 0);
    }

    #[test]
    fn space_that_was_removed_is_given_back_and_used_again() {
        const SIZE: u64 = 1 << 20;
        let parent = tempfile::tempdir().unwrap();
        let spill = SpillSpace::new(parent.path());
        let bytes = |n: u64| vec![n as u8; SIZE as usize];
        for n in 0..4 {
            spill.write(file(n), &bytes(n)).unwrap();
        }
        let full = spill.disk_bytes();
        spill.remove(file(1));
        spill.remove(file(2));
        assert!(spill.disk_bytes() <= full - 2 * SIZE);
        spill.write(file(9), &bytes(9)).unwrap();
        assert_eq!(spill.layout.lock().end, 4 * SIZE);
        let mut read = bytes(0);
        for n in [0, 3, 9] {
            spill.read(file(n), &mut read).unwrap();
            assert!(read == bytes(n));
        }
        for n in [0, 3, 9] {
            spill.remove(file(n));
        }
        assert_eq!((spill.disk_bytes(), spill.layout.lock().end), (0, 0));
    }

    #[test]
    fn a_failed_write_says_where_and_why() {
        let spill = SpillSpace::new("/proc/wingbeat-cannot-be-made");
        let error = spill.write(file(0), b"x").unwrap_err();
        assert!(error.to_string().contains("/proc/wingbeat-cannot-be-made"), "{error}");
        assert!(spill.layout.lock().file.is_none());
    }

    #[test]
    fn an_error_says_that_the_disk_is_full() {
        let spill = SpillSpace::new("/somewhere");
        let error = spill.failed("write to the spill file in", io::ErrorKind::StorageFull.into());
        assert!(error.to_string().contains("the disk is full"), "{error}");
    }
}
