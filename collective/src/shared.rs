//! The operations in shared memory, where all members are on one machine.
//!
//! Every member has a slot there, and a number that counts the phases it has come through. A member writes its part into
//! its slot and goes into the next phase; when all have, it reads the others' slots. Slots have two halves, used in
//! turn: one is written while slower members still read the other, so that each part of the data costs one phase.

use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, SealFlags, memfd_create};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};

use crate::element::{Element, Op, bytes_of};
use crate::error::{CollectiveError, Result};
use crate::header::Header;
use crate::memory::{Control, Memory, Moves};
use crate::mesh::Mesh;

/// Bytes of half a slot: it is to stay in the cache between the one who writes and the one who reads it.
const HALF: usize = 256 << 10;
/// How often a member looks for the others before it sleeps.
const SPINS: u32 = 20_000;
/// And when there are more members than CPUs.
const SPINS_CROWDED: u32 = 100;
/// How long it sleeps before it looks whether somebody is gone.
const NAP: Duration = Duration::from_millis(50);
/// How much longer than members of other machines those of this one are waited for: whoever gives up first names whom it
/// waited for.
const LATER: Duration = Duration::from_secs(1);

pub(crate) struct Shared {
    memory: Arc<Memory>,
    rank: usize,
    members: usize,
    phase: u32,
    spins: u32,
    /// How much longer than the group's limit a member may do nothing that can be seen here.
    slack: Duration,
}

/// Whether other machines have members, too.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Elsewhere {
    Nobody,
    /// What members wait for here takes so long that they better sleep.
    Others,
}

impl Shared {
    /// Makes the memory, or gets it from rank 0.
    pub(crate) fn new(mesh: &Mesh, elsewhere: Elsewhere) -> Result<Shared> {
        let (members, rank) = (mesh.members(), mesh.rank as usize);
        let length = members * (size_of::<Control>() + 2 * HALF);
        let io = |error: Errno| CollectiveError::io("sharing memory with other members", error);
        let memory = if rank == 0 {
            let memory = memfd_create("wingbeat-group", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).map_err(io)?;
            rustix::fs::ftruncate(&memory, length as u64).map_err(io)?;
            // Memory that another could cut short would end whoever touches it.
            rustix::fs::fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).map_err(io)?;
            for peer in 1..members {
                send_fd(mesh, peer as u32, &memory)?;
            }
            memory
        } else {
            recv_fd(mesh)?
        };
        let flags = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, of memory that keeps its length.
        let base = unsafe { mmap(std::ptr::null_mut(), length, flags, MapFlags::SHARED, &memory, 0) }.map_err(io)?;
        let memory = Arc::new(Memory { base: base.cast(), length });
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let is_alone = elsewhere == Elsewhere::Nobody;
        let spins = if is_alone && members <= cpus { SPINS } else { SPINS_CROWDED };
        let slack = if is_alone { Duration::ZERO } else { LATER };
        Ok(Shared { memory, rank, members, phase: 0, spins, slack })
    }

    /// Where this member shows that something moves.
    pub(crate) fn moves(&self) -> Moves {
        Moves { memory: self.memory.clone(), rank: self.rank }
    }

    fn control(&self, rank: usize) -> &Control {
        self.memory.control(rank)
    }

    /// Half of a slot, by the phase that it is written before.
    fn half(&self, rank: usize, phase: u32) -> *mut u8 {
        let slots = self.members * size_of::<Control>();
        let parity = (phase & 1) as usize;
        // SAFETY: inside of the mapping.
        unsafe { self.memory.base.add(slots + (2 * rank + parity) * HALF) }
    }

    /// The first `count` elements of what a member has written before the phase that it is in now.
    ///
    /// # Safety
    /// All have come into this phase, and `count` elements are not longer than half a slot.
    unsafe fn written<T: Element>(&self, rank: usize, count: usize) -> &[T] {
        // SAFETY: nobody writes this half before all have left this phase; it is aligned to a page.
        unsafe { std::slice::from_raw_parts(self.half(rank, self.phase).cast(), count) }
    }

    /// Writes into this member's own slot, for the next phase.
    fn write<T: Element>(&mut self, at: usize, elements: &[T]) {
        let bytes = bytes_of(elements);
        assert!(at + bytes.len() <= HALF, "a part is longer than its slot");
        // SAFETY: whoever read this half has come into the phase after that, or this member would not be in it.
        unsafe {
            std::ptr::copy_nonoverlapping(
                bytes.as_ptr(),
                self.half(self.rank, self.phase.wrapping_add(1)).add(at),
                bytes.len(),
            );
        }
    }

    /// Goes into the next phase, and waits until all are in it.
    fn advance(&mut self, mesh: &Mesh) -> Result<()> {
        self.phase = self.phase.wrapping_add(1);
        self.control(self.rank).phase.enter(self.phase);
        for rank in (0..self.members).filter(|rank| *rank != self.rank) {
            self.wait_for(rank, mesh)?;
        }
        Ok(())
    }

    fn is_in_phase(&self, rank: usize) -> bool {
        self.control(rank).phase.is_in(self.phase)
    }

    fn wait_for(&self, rank: usize, mesh: &Mesh) -> Result<()> {
        for _ in 0..self.spins {
            if self.is_in_phase(rank) {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        let theirs = self.control(rank);
        let (mut since, mut moves) = (Instant::now(), theirs.moves.load(Ordering::Relaxed));
        loop {
            let is_late = theirs.phase.sleep_before(self.phase, NAP);
            if self.is_in_phase(rank) {
                return Ok(());
            }
            if is_late {
                // Whoever has not come so far waits for nobody here: it computes, hears from another machine, or is stuck.
                let moved = theirs.moves.load(Ordering::Relaxed);
                if moved != moves {
                    (since, moves) = (Instant::now(), moved);
                }
                // Who is gone may have come through this phase before; whoever has not never will. Who waits for somebody
                // on another machine sees itself when that is gone.
                let is_missed = |gone: &u32| mesh.member(*gone).is_some_and(|gone| !self.is_in_phase(gone as usize));
                if let Some(rank) = mesh.gone().into_iter().find(is_missed) {
                    return Err(CollectiveError::PeerLost { rank });
                }
                mesh.check_time(since + self.slack, rank as u32)?;
            }
        }
    }

    /// Says what is called here, with the first part; to be followed by [`Shared::advance`] and [`Shared::check`].
    fn announce(&mut self, header: &Header) {
        let next = self.phase.wrapping_add(1);
        let at = (next & 1) as usize;
        // SAFETY: as `write`: nobody reads this one of the two now.
        unsafe {
            let control = self.memory.base.cast::<Control>().add(self.rank);
            std::ptr::write_volatile(&raw mut (*control).headers[at], *header);
        }
    }

    /// That all others call the same.
    fn check(&self, mesh: &Mesh, header: &Header) -> Result<()> {
        for rank in (0..self.members).filter(|rank| *rank != self.rank) {
            let control = self.control(rank);
            // SAFETY: all have come into this phase after they wrote it.
            let theirs = unsafe { std::ptr::read_volatile(&raw const control.headers[(self.phase & 1) as usize]) };
            header.check(&theirs, mesh.rank_of(rank as u32), mesh.rank_of(mesh.rank))?;
        }
        Ok(())
    }

    /// Goes through data in parts of as many elements: what is written of each, and what is done when all have written.
    #[allow(clippy::too_many_arguments, reason = "what an operation is made of")]
    fn in_parts<D: ?Sized>(
        &mut self,
        mesh: &Mesh,
        header: &Header,
        length: usize,
        part: usize,
        data: &mut D,
        mut write: impl FnMut(&mut Self, &D, Range<usize>),
        mut read: impl FnMut(&mut Self, &mut D, Range<usize>) -> Result<()>,
    ) -> Result<()> {
        let mut at = 0;
        loop {
            let range = at..length.min(at + part);
            write(self, data, range.clone());
            if at == 0 {
                self.announce(header);
            }
            self.advance(mesh)?;
            if at == 0 {
                self.check(mesh, header)?;
            }
            read(self, data, range.clone())?;
            at = range.end;
            if at >= length {
                return Ok(());
            }
        }
    }

    pub(crate) fn barrier(&mut self, mesh: &Mesh, header: &Header) -> Result<()> {
        self.in_parts(mesh, header, 0, 1, &mut (), |_, (), _| {}, |_, (), _| Ok(()))
    }

    pub(crate) fn all_reduce<T: Element>(
        &mut self,
        mesh: &Mesh,
        header: &Header,
        data: &mut [T],
        op: Op,
    ) -> Result<()> {
        // With few members each reads all slots; with many, each reduces a share, and reads the others' results.
        match self.members > 2 {
            true => self.all_reduce_in_shares(mesh, header, data, op),
            false => self.reduce_at(mesh, header, data, op, |_| true),
        }
    }

    fn all_reduce_in_shares<T: Element>(&mut self, mesh: &Mesh, header: &Header, data: &mut [T], op: Op) -> Result<()> {
        let members = self.members;
        let part = HALF / size_of::<T>();
        let mut reduced: Vec<T> = Vec::new();
        self.in_parts(
            mesh,
            header,
            data.len(),
            part,
            data,
            |shared, data, range| shared.write(0, &data[range]),
            |shared, data, range| {
                let share = |rank: usize| range.len() * rank / members..range.len() * (rank + 1) / members;
                let own = share(shared.rank);
                reduced.clear();
                for rank in 0..members {
                    // SAFETY: all have come into this phase.
                    let theirs = &unsafe { shared.written::<T>(rank, range.len()) }[own.clone()];
                    match rank {
                        0 => reduced.extend_from_slice(theirs),
                        _ => T::combine(op, &mut reduced, theirs),
                    }
                }
                if op == Op::Avg {
                    T::divide(&mut reduced, members as u32);
                }
                shared.write(own.start * size_of::<T>(), &reduced);
                shared.advance(mesh)?;
                for rank in 0..members {
                    // SAFETY: all have come into this phase.
                    let theirs = &unsafe { shared.written::<T>(rank, range.len()) }[share(rank)];
                    data[range.clone()][share(rank)].copy_from_slice(theirs);
                }
                Ok(())
            },
        )
    }

    pub(crate) fn reduce<T: Element>(
        &mut self,
        mesh: &Mesh,
        header: &Header,
        data: &mut [T],
        op: Op,
        root: u32,
    ) -> Result<()> {
        self.reduce_at(mesh, header, data, op, |rank| rank == root as usize)
    }

    /// Reduces all slots into the data of those members that want it.
    fn reduce_at<T: Element>(
        &mut self,
        mesh: &Mesh,
        header: &Header,
        data: &mut [T],
        op: Op,
        wants: impl Fn(usize) -> bool,
    ) -> Result<()> {
        self.in_parts(
            mesh,
            header,
            data.len(),
            HALF / size_of::<T>(),
            data,
            |shared, data, range| shared.write(0, &data[range]),
            |shared, data, range| {
                if !wants(shared.rank) {
                    return Ok(());
                }
                let into = &mut data[range];
                for rank in (0..shared.members).filter(|rank| *rank != shared.rank) {
                    // SAFETY: all have come into this phase.
                    T::combine(op, into, unsafe { shared.written(rank, into.len()) });
                }
                if op == Op::Avg {
                    T::divide(into, shared.members as u32);
                }
                Ok(())
            },
        )
    }

    pub(crate) fn broadcast<T: Element>(
        &mut self,
        mesh: &Mesh,
        header: &Header,
        data: &mut [T],
        root: u32,
    ) -> Result<()> {
        self.give(mesh, header, data, root, true)
    }

    /// As `broadcast`, to those who want it.
    pub(crate) fn give<T: Element>(
        &mut self,
        mesh: &Mesh,
        header: &Header,
        data: &mut [T],
        root: u32,
        wants: bool,
    ) -> Result<()> {
        let is_root = self.rank == root as usize;
        self.in_parts(
            mesh,
            header,
            data.len(),
            HALF / size_of::<T>(),
            data,
            |shared, data, range| {
                if is_root {
                    shared.write(0, &data[range]);
                }
            },
            |shared, data, range| {
                if wants && !is_root {
                    // SAFETY: all have come into this phase.
                    let theirs = unsafe { shared.written(root as usize, range.len()) };
                    data[range].copy_from_slice(theirs);
                }
                Ok(())
            },
        )
    }

    pub(crate) fn all_gather<T: Element>(
        &mut self,
        mesh: &Mesh,
        header: &Header,
        mine: &[T],
        all: &mut [T],
    ) -> Result<()> {
        self.in_parts(
            mesh,
            header,
            mine.len(),
            HALF / size_of::<T>(),
            all,
            |shared, _, range| shared.write(0, &mine[range]),
            |shared, all, range| {
                for rank in 0..shared.members {
                    // SAFETY: all have come into this phase.
                    let theirs = unsafe { shared.written(rank, range.len()) };
                    all[rank * mine.len()..][range.clone()].copy_from_slice(theirs);
                }
                Ok(())
            },
        )
    }

    /// What each member has for each other: `take` gets a part of what a member has for this one.
    pub(crate) fn all_to_all<T: Element>(
        &mut self,
        mesh: &Mesh,
        header: &Header,
        out: &[T],
        mut take: impl FnMut(usize, Range<usize>, &[T]),
    ) -> Result<()> {
        let members = self.members;
        let each = out.len() / members;
        let part = (HALF / size_of::<T>() / members).max(1);
        self.in_parts(
            mesh,
            header,
            each,
            part,
            &mut (),
            |shared, (), range| {
                for rank in 0..members {
                    let piece = &out[rank * each..][range.clone()];
                    shared.write(rank * range.len() * size_of::<T>(), piece);
                }
            },
            |shared, (), range| {
                for rank in 0..members {
                    // SAFETY: all have come into this phase.
                    let theirs = unsafe { shared.written::<T>(rank, members * range.len()) };
                    take(rank, range.clone(), &theirs[shared.rank * range.len()..][..range.len()]);
                }
                Ok(())
            },
        )
    }
}

fn send_fd(mesh: &Mesh, to: u32, fd: &OwnedFd) -> Result<()> {
    let fds = [fd.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(&fds));
    let byte = [std::io::IoSlice::new(&[1])];
    rustix::net::sendmsg(mesh.peer(to)?, &byte, &mut ancillary, SendFlags::NOSIGNAL)
        .map_err(|error| CollectiveError::io("sharing memory with other members", error))?;
    Ok(())
}

fn recv_fd(mesh: &Mesh) -> Result<OwnedFd> {
    let peer = mesh.peer(0)?;
    let since = std::time::Instant::now();
    loop {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut byte = [0];
        let read = rustix::net::recvmsg(
            peer,
            &mut [std::io::IoSliceMut::new(&mut byte)],
            &mut ancillary,
            RecvFlags::CMSG_CLOEXEC,
        );
        match read {
            Ok(message) if message.bytes == 0 => return Err(CollectiveError::PeerLost { rank: mesh.rank_of(0) }),
            Ok(_) => {
                let fd = ancillary.drain().find_map(|message| match message {
                    RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
                    _ => None,
                });
                return fd.ok_or_else(|| {
                    CollectiveError::io("sharing memory with other members", "its first member sent none")
                });
            }
            Err(Errno::AGAIN | Errno::INTR) => mesh.wait(None, Some(0), since)?,
            Err(error) => return Err(CollectiveError::io("sharing memory with other members", error)),
        }
    }
}
