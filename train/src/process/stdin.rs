//! What a rank reads: the driver's standard input, where both are on one machine.
//!
//! The rank opens the same pipe, file or terminal, and nothing goes through Wingbeat: a debugger's prompt is answered, a
//! pipe is read to its end, and what nobody reads stays with the driver.

use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};

use rustix::fs::{FileType, OFlags, fcntl_getfl, fcntl_setfl};
use serde::{Deserialize, Serialize};

/// The driver's standard input, to be opened by another process of its machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Stdin {
    process: u32,
    /// Another machine or container may have a process of the same id.
    file: Identity,
}

/// Which file it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Identity {
    device: u64,
    inode: u64,
    /// The terminal's number, of a terminal.
    terminal: u64,
}

impl Identity {
    fn of(file: &File) -> std::io::Result<Identity> {
        let stat = file.metadata()?;
        Ok(Identity { device: stat.dev(), inode: stat.ino(), terminal: stat.rdev() })
    }
}

impl Stdin {
    /// That of this process. None for a terminal in whose background it runs: what is typed there is for somebody else.
    pub(crate) fn own() -> Option<Stdin> {
        let stdin = std::io::stdin();
        // Of what is no terminal of this session, there is no group to be told.
        if rustix::termios::tcgetpgrp(&stdin).is_ok_and(|in_front| in_front != rustix::process::getpgrp()) {
            return None;
        }
        let file = Identity::of(&File::from(stdin.as_fd().try_clone_to_owned().ok()?)).ok()?;
        Some(Stdin { process: std::process::id(), file })
    }

    /// Whether this process reads a socket, which no other process can open.
    pub(crate) fn is_out_of_reach() -> bool {
        rustix::fs::fstat(std::io::stdin()).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Socket)
    }

    /// Opens it where the driver has come to; none on another machine, for another user, or when the driver has ended.
    pub(crate) fn open(&self) -> Option<OwnedFd> {
        let process = self.process;
        // A named pipe without a writer would be waited for.
        let flags = OFlags::NOCTTY | OFlags::NONBLOCK;
        let mut options = OpenOptions::new();
        let mut file =
            options.read(true).custom_flags(flags.bits() as i32).open(format!("/proc/{process}/fd/0")).ok()?;
        if Identity::of(&file).ok()? != self.file {
            return None;
        }
        fcntl_setfl(&file, fcntl_getfl(&file).ok()? - OFlags::NONBLOCK).ok()?;
        if file.metadata().ok()?.is_file() {
            let info = std::fs::read_to_string(format!("/proc/{process}/fdinfo/0")).ok()?;
            let position = info.lines().find_map(|line| line.strip_prefix("pos:")?.trim().parse().ok())?;
            file.seek(SeekFrom::Start(position)).ok()?;
        }
        Some(file.into())
    }
}
