//! Spilled objects on disk: one file without a name, in which objects lie beside each other.
//!
//! The file is unlinked from its beginning, so it ends with the daemon's descriptor, however that ends: nothing can be
//! left behind, and nobody else can open it. It costs one descriptor however many objects are spilled. What is removed
//! is punched out; where the file system cannot do that, the space is used again for what is spilled later. The checksum of each
//! object (CRC-32C, RFC 3720 appendix B.4) stays in memory: what the disk gives back must be what was written.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crc32c::{crc32c, crc32c_append};
use parking_lot::Mutex;

use crate::error::SpillError;
use crate::extent::Extent;
use crate::ranges::Ranges;
use crate::table::SpillFile;

mod blocks;

use blocks::{BLOCK, BlockFile};

/// How long it is waited before what could not be read is read again, each time.
const PAUSES: [Duration; 2] = [Duration::from_millis(20), Duration::from_millis(200)];

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
    file: Option<Arc<BlockFile>>,
    /// Where complete objects lie.
    written: BTreeMap<SpillFile, SpilledObject>,
    /// Bytes before `end` that belong to nothing.
    free: Ranges,
    /// The first byte behind everything.
    end: u64,
}

/// An object in the file.
#[derive(Clone, Copy, Debug)]
struct SpilledObject {
    extent: Extent,
    checksum: u32,
}

impl Layout {
    /// The shortest free run that is long enough, or behind everything.
    fn take(&mut self, len: u64) -> Extent {
        let run = self.free.at_least(len.max(1)).next().map(|run| run.offset);
        let offset = match run {
            Some(offset) => {
                self.free.remove(Extent { offset, len });
                offset
            }
            None => {
                self.end += len;
                self.end - len
            }
        };
        Extent { offset, len }
    }

    /// Takes back what was punched out, or never written.
    fn give_back(&mut self, extent: Extent) {
        self.free.insert(blocks(extent));
        if self.free.total() == self.end
            && let Some(file) = &self.file
            && file.shorten().is_ok()
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

    /// Writes objects beside each other. If that fails, nothing of them is kept.
    pub fn write(&self, objects: &[(SpillFile, &[u8])]) -> Result<(), SpillError> {
        let (file, run) = {
            let mut layout = self.layout.lock();
            let file = match &layout.file {
                Some(file) => file.clone(),
                None => {
                    let made = BlockFile::make(&self.parent);
                    let made = made.map_err(|error| self.failed("make a spill file in", error))?;
                    layout.file.insert(Arc::new(made)).clone()
                }
            };
            let blocks = objects.iter().map(|(_, bytes)| (bytes.len() as u64).next_multiple_of(BLOCK)).sum();
            (file, layout.take(blocks))
        };
        let bytes: Vec<&[u8]> = objects.iter().map(|(_, bytes)| *bytes).collect();
        match file.write(&bytes, run.offset) {
            Ok(()) => {
                let mut offset = run.offset;
                let written = objects.iter().map(|(object, bytes)| {
                    let extent = Extent { offset, len: bytes.len() as u64 };
                    offset = blocks(extent).end();
                    (*object, SpilledObject { extent, checksum: crc32c(bytes) })
                });
                let written: Vec<_> = written.collect();
                self.layout.lock().written.extend(written);
                Ok(())
            }
            Err(error) => {
                self.punch(&file, run);
                Err(self.failed("write to the spill file in", error))
            }
        }
    }

    /// Reads an object's bytes back; they stay. `into` has the object's size. Blocks for a moment, and reads again, where that may help.
    pub fn read(&self, object: SpillFile, into: &mut [u8]) -> Result<(), SpillError> {
        let mut pauses = PAUSES.iter();
        loop {
            let read = self.read_checked(object, |file, written| {
                file.read(into, written.extent.offset)?;
                Ok(Some(crc32c(into)))
            });
            match (read, pauses.next()) {
                (Err(error), Some(pause)) if error.may_pass() => {
                    tracing::warn!(%error, "it is read again in a moment");
                    std::thread::sleep(*pause);
                }
                (read, _) => return read,
            }
        }
    }

    /// Reads an object's bytes one piece after the other, until one is refused. Only when all were read is it known that they
    /// are what was written, so the last piece is not given if they are not.
    pub fn read_pieces(&self, object: SpillFile, mut take: impl FnMut(&[u8]) -> bool) -> Result<(), SpillError> {
        self.read_checked(object, |file, written| {
            let (mut checksum, mut left) = (0, written.extent.len);
            file.read_pieces(written.extent.len as usize, written.extent.offset, |piece| {
                checksum = crc32c_append(checksum, piece);
                left -= piece.len() as u64;
                (left > 0 || checksum == written.checksum) && take(piece)
            })?;
            Ok((left == 0).then_some(checksum))
        })
    }

    /// `read` answers the checksum of the bytes, if it has read them all.
    fn read_checked(
        &self,
        object: SpillFile,
        read: impl FnOnce(&BlockFile, SpilledObject) -> io::Result<Option<u32>>,
    ) -> Result<(), SpillError> {
        let (file, written) = {
            let layout = self.layout.lock();
            (layout.file.clone(), layout.written.get(&object).copied())
        };
        let read = match (file, written) {
            (Some(file), Some(written)) => read(&file, written).and_then(|checksum| {
                let other = || io::Error::new(io::ErrorKind::InvalidData, "it is not what was written: the disk fails");
                checksum.is_none_or(|checksum| checksum == written.checksum).then_some(()).ok_or_else(other)
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

    fn punch(&self, file: &BlockFile, extent: Extent) {
        if extent.len > 0
            && let Err(error) = file.punch(blocks(extent))
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
        let (block, within) = (at / BLOCK * BLOCK, (at % BLOCK) as usize);
        let mut bytes = vec![0; BLOCK as usize];
        file.read(&mut bytes, block).unwrap();
        bytes[within] ^= 1;
        file.write(&[&bytes], block).unwrap();
    }

    /// What is there.
    #[cfg(test)]
    pub(crate) fn files(&self) -> Vec<SpillFile> {
        self.layout.lock().written.keys().copied().collect()
    }

    #[cfg(test)]
    pub(crate) fn lose_everything(&self) {
        if let Some(file) = &self.layout.lock().file {
            file.shorten().unwrap();
        }
    }

    /// What it takes on the disk.
    #[cfg(test)]
    pub(crate) fn disk_bytes(&self) -> u64 {
        self.layout.lock().file.as_ref().map_or(0, |file| file.disk_bytes())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use wingbeat_core::{ObjectId, ProcessId, TaskId};

    use super::*;

    fn file(number: u64) -> SpillFile {
        SpillFile { id: ObjectId { task: TaskId { owner: ProcessId(7), seq: 1 }, index: 0 }, number }
    }

    #[test]
    fn what_was_written_is_read_back_until_it_is_removed() {
        let parent = tempfile::tempdir().unwrap();
        let spill = SpillSpace::new(parent.path());
        spill.write(&[(file(0), b"zero")]).unwrap();
        spill.write(&[(file(1), b"one!")]).unwrap();
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
        spill.write(&[(file(0), &bytes)]).unwrap();
        for at in [0, 4_096, 9_999] {
            spill.flip_a_bit(file(0).id, at);
            let error = spill.read(file(0), &mut read).unwrap_err();
            assert!(error.to_string().contains("not what was written"), "{error}");
            spill.flip_a_bit(file(0).id, at);
            spill.read(file(0), &mut read).unwrap();
        }
        spill.write(&[(file(1), b"")]).unwrap();
        spill.read(file(1), &mut []).unwrap();
    }

    #[test]
    fn nothing_on_the_disk_has_a_name() {
        let parent = tempfile::tempdir().unwrap();
        let deeper = parent.path().join("deeper");
        let spill = SpillSpace::new(&deeper);
        assert!(!deeper.exists());
        spill.write(&[(file(0), b"x")]).unwrap();
        assert_eq!(fs::read_dir(&deeper).unwrap().count(), 0);
    }

    #[test]
    fn space_that_was_removed_is_given_back_and_used_again() {
        const SIZE: u64 = 1 << 20;
        let parent = tempfile::tempdir().unwrap();
        let spill = SpillSpace::new(parent.path());
        let bytes = |n: u64| vec![n as u8; SIZE as usize];
        for n in 0..4 {
            spill.write(&[(file(n), &bytes(n))]).unwrap();
        }
        let full = spill.disk_bytes();
        spill.remove(file(1));
        spill.remove(file(2));
        assert!(spill.disk_bytes() <= full - 2 * SIZE);
        spill.write(&[(file(9), &bytes(9))]).unwrap();
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
    fn objects_that_are_written_together_are_read_and_removed_alone() {
        let parent = tempfile::tempdir().unwrap();
        let spill = SpillSpace::new(parent.path());
        let sizes = [0, 1, BLOCK, 3 * BLOCK + 7, 2 << 20, (1 << 20) + 5, 100_000];
        let bytes: Vec<Vec<u8>> =
            sizes.iter().map(|size| (0..*size).map(|at| (at * 7 + size) as u8).collect()).collect();
        let objects: Vec<_> = (0..).map(file).zip(bytes.iter().map(Vec::as_slice)).collect();
        spill.write(&objects).unwrap();
        spill.remove(file(3));
        for (n, bytes) in (0..).zip(&bytes).filter(|(n, _)| *n != 3) {
            let mut read = vec![0; bytes.len()];
            spill.read(file(n), &mut read).unwrap();
            assert!(read == *bytes, "object {n}");
        }
        (0..7).for_each(|n| spill.remove(file(n)));
        assert_eq!((spill.disk_bytes(), spill.layout.lock().end), (0, 0));
    }

    #[test]
    fn a_failed_write_says_where_and_why() {
        let spill = SpillSpace::new("/proc/wingbeat-cannot-be-made");
        let error = spill.write(&[(file(0), b"x")]).unwrap_err();
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
