//! A file without a name that is written and read in whole blocks, past the page cache where the file system can do that:
//! what is spilled would be in memory twice otherwise, and a disk that refuses would say so long after the write.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{FallocateFlags, Mode, OFlags, fallocate, fcntl_getfl, fcntl_setfl, open};

use crate::extent::Extent;

/// Objects begin at multiples of this, the block of most file systems: only whole blocks can be punched out, or written
/// past the page cache.
pub(super) const BLOCK: u64 = 4096;

/// How much is gathered before it is written: large enough that a disk is as fast as it can be.
const PIECE: usize = 8 << 20;

/// From here on it costs less to write an object where it lies than to gather it with others.
const LARGE: usize = 1 << 20;

#[derive(Debug)]
pub(super) struct BlockFile(File);

impl BlockFile {
    /// Readable by this user alone, in a directory that is made if it is not there.
    pub(super) fn make(parent: &Path) -> io::Result<BlockFile> {
        fs::create_dir_all(parent)?;
        let flags = OFlags::TMPFILE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
        for flags in [flags | OFlags::DIRECT, flags] {
            if let Ok(file) = open(parent, flags, Mode::RUSR | Mode::WUSR) {
                return Ok(BlockFile(file.into()));
            }
        }
        // Some file systems (NFS, older overlays) only make files with names.
        let mut n = 0;
        loop {
            let path = parent.join(format!("wingbeat-spill-{}-{n}", std::process::id()));
            match OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path) {
                Ok(file) => {
                    fs::remove_file(&path)?;
                    return Ok(BlockFile(file));
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists && n < 1000 => n += 1,
                Err(error) => return Err(error),
            }
        }
    }

    /// Writes these one behind the other from `offset`, each from the beginning of a block.
    pub(super) fn write(&self, objects: &[&[u8]], offset: u64) -> io::Result<()> {
        let mut at = offset;
        let mut gathered = Gathered::new(objects.iter().map(|bytes| whole(bytes.len())).sum());
        for bytes in objects {
            let mut left = *bytes;
            if left.len() >= LARGE && is_aligned(left) {
                at += self.flush(&mut gathered, at)?;
                let (blocks, rest) = left.split_at(left.len() / BLOCK as usize * BLOCK as usize);
                self.write_blocks(blocks, at)?;
                (at, left) = (at + blocks.len() as u64, rest);
            }
            while !left.is_empty() {
                left = gathered.take(left);
                if gathered.is_full() {
                    at += self.flush(&mut gathered, at)?;
                }
            }
            gathered.end_block();
        }
        self.flush(&mut gathered, at)?;
        Ok(())
    }

    /// Reads what begins in the block at `offset`.
    pub(super) fn read(&self, into: &mut [u8], offset: u64) -> io::Result<()> {
        let (mut at, mut left) = (offset, into);
        if is_aligned(left) {
            let (blocks, rest) = left.split_at_mut(left.len() / BLOCK as usize * BLOCK as usize);
            self.read_blocks(blocks, at)?;
            (at, left) = (at + blocks.len() as u64, rest);
        }
        self.read_pieces(left.len(), at, |piece| {
            let (part, rest) = std::mem::take(&mut left).split_at_mut(piece.len());
            part.copy_from_slice(piece);
            left = rest;
            true
        })
    }

    /// Reads so many bytes, which begin in the block at `offset`, one piece after the other, until one is refused.
    pub(super) fn read_pieces(&self, len: usize, offset: u64, mut take: impl FnMut(&[u8]) -> bool) -> io::Result<()> {
        let mut gathered = Gathered::new(whole(len));
        let mut at = 0;
        while at < len {
            let piece = (len - at).min(gathered.capacity);
            let blocks = gathered.blocks(whole(piece));
            self.read_blocks(blocks, offset + at as u64)?;
            if !take(&blocks[..piece]) {
                break;
            }
            at += piece;
        }
        Ok(())
    }

    /// Gives blocks back to the disk.
    pub(super) fn punch(&self, blocks: Extent) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::io::retry_on_intr(|| fallocate(&self.0, flags, blocks.offset, blocks.len))?;
        Ok(())
    }

    /// Gives everything back to the disk.
    pub(super) fn shorten(&self) -> io::Result<()> {
        self.0.set_len(0)
    }

    /// Writes what was gathered. Answers how many bytes.
    fn flush(&self, gathered: &mut Gathered, at: u64) -> io::Result<u64> {
        let blocks = gathered.blocks(gathered.len);
        self.write_blocks(blocks, at)?;
        let written = blocks.len() as u64;
        gathered.len = 0;
        Ok(written)
    }

    fn write_blocks(&self, blocks: &[u8], at: u64) -> io::Result<()> {
        self.or_through_the_cache(|file| file.write_all_at(blocks, at))
    }

    fn read_blocks(&self, blocks: &mut [u8], at: u64) -> io::Result<()> {
        self.or_through_the_cache(|file| file.read_exact_at(blocks, at))
    }

    /// A disk may have larger blocks than this knows of. Then the page cache helps.
    fn or_through_the_cache(&self, mut io: impl FnMut(&File) -> io::Result<()>) -> io::Result<()> {
        match io(&self.0) {
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                // Another thread may have found this out at the same time.
                let flags = fcntl_getfl(&self.0)?;
                if flags.contains(OFlags::DIRECT) {
                    tracing::debug!(%error, "spilling goes through the page cache from now on");
                    fcntl_setfl(&self.0, flags - OFlags::DIRECT)?;
                }
                io(&self.0)
            }
            done => done,
        }
    }

    #[cfg(test)]
    pub(super) fn disk_bytes(&self) -> u64 {
        use std::os::unix::fs::MetadataExt;
        self.0.metadata().unwrap().blocks() * 512
    }
}

fn whole(len: usize) -> usize {
    len.next_multiple_of(BLOCK as usize)
}

fn is_aligned(bytes: &[u8]) -> bool {
    bytes.as_ptr().addr().is_multiple_of(BLOCK as usize)
}

/// Memory in whole blocks.
struct Gathered {
    memory: Vec<u8>,
    /// Where the first block begins.
    start: usize,
    capacity: usize,
    len: usize,
}

impl Gathered {
    fn new(bytes: usize) -> Self {
        let capacity = bytes.min(PIECE);
        let memory = vec![0; capacity + BLOCK as usize];
        let start = memory.as_ptr().addr().wrapping_neg() % BLOCK as usize;
        Gathered { memory, start, capacity, len: 0 }
    }

    /// The first of its bytes.
    fn blocks(&mut self, len: usize) -> &mut [u8] {
        &mut self.memory[self.start..self.start + len]
    }

    /// Takes in as much as there is room for. Answers the rest.
    fn take<'a>(&mut self, bytes: &'a [u8]) -> &'a [u8] {
        let (taken, rest) = bytes.split_at(bytes.len().min(self.capacity - self.len));
        let at = self.start + self.len;
        self.memory[at..at + taken.len()].copy_from_slice(taken);
        self.len += taken.len();
        rest
    }

    fn is_full(&self) -> bool {
        self.len == self.capacity
    }

    /// The next byte begins a block.
    fn end_block(&mut self) {
        let end = whole(self.len);
        let at = self.start + self.len;
        self.memory[at..self.start + end].fill(0);
        self.len = end;
    }
}
