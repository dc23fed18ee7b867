//! The operations over connections.
//!
//! `all_reduce` is the ring of Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
//! workstations" (2009): of n members each sends 2 (n-1)/n of the data. It is pipelined: what is received and reduced is
//! sent on at once, without waiting for the end of a step.

use std::time::Instant;

use crate::element::{Element, Op, bytes_of, bytes_of_mut};
use crate::error::{CollectiveError, Result};
use crate::header::{Header, SIZE};
use crate::mesh::{Mesh, Moved};

/// What is received of a part before it is reduced.
const STAGE: usize = 256 << 10;

/// Tells every other member what is called here, and hears what is called there.
///
/// Also where one is gone all others are told, and heard: whoever is not heard then has not come so far. One that was heard
/// and is gone has failed since, as this one will.
pub(crate) fn agree(mesh: &Mesh, header: &Header) -> Result<()> {
    let bytes = header.to_bytes();
    let others = || (0..mesh.members() as u32).filter(|peer| *peer != mesh.rank);
    let mut agreed = Ok(());
    for peer in others() {
        match mesh.send_to(peer, &bytes) {
            Err(lost @ CollectiveError::PeerLost { .. }) => agreed = agreed.and(Err(lost)),
            sent => sent?,
        }
    }
    let mut same = Ok(());
    for peer in others() {
        let mut theirs = [0; SIZE];
        mesh.recv_with_all(peer, &mut theirs, |other| other < peer)?;
        same = same.and(header.check(&Header::from_bytes(theirs), peer, mesh.rank));
    }
    same.and(agreed)
}

pub(crate) fn all_reduce<T: Element>(mesh: &Mesh, data: &mut [T], op: Op) -> Result<()> {
    let (n, rank) = (mesh.members(), mesh.rank as usize);
    if n == 1 || data.is_empty() {
        return Ok(());
    }
    let (to, from) = (((rank + 1) % n) as u32, ((rank + n - 1) % n) as u32);
    let length = data.len();
    // As elements: the part of the data that a step is about, of the sender's rank.
    let part = |owner: usize, step: usize| {
        let index = (owner + 2 * n - step) % n;
        let at = |index: usize| length * index / n;
        at(index)..at(index + 1)
    };
    let steps = 2 * (n - 1);
    let size = size_of::<T>();
    let mut sending = Cursor::new((0..steps).map(|step| part(rank, step)).collect(), size);
    let mut hearing = Cursor::new((0..steps).map(|step| part(rank + n - 1, step)).collect(), size);
    let first = part(rank, 0).len() * size;
    let mut stage = vec![data[0]; STAGE.div_ceil(size).min(data.len())];
    // Bytes of the stage that hold less than what is to be reduced next.
    let mut staged = 0;
    let mut since = Instant::now();
    loop {
        let mut moved = false;
        // What is sent in a step was heard in the step before.
        let ready = (first + hearing.done).saturating_sub(sending.done);
        if let Some(range) = sending.next(ready) {
            let count = match mesh.try_send(to, &bytes_of(data)[range])? {
                Moved::Bytes(count) => count,
                Moved::Blocked => 0,
            };
            sending.advance(count);
            moved |= count > 0;
        }
        let reduces = hearing.step < n - 1;
        let limit = if reduces { stage.len() * size } else { usize::MAX };
        if let Some(range) = hearing.next(limit) {
            let heard = if reduces {
                mesh.try_recv(from, &mut bytes_of_mut(&mut stage)[staged..range.len()])?
            } else {
                mesh.try_recv(from, &mut bytes_of_mut(data)[range.clone()])?
            };
            if let Moved::Bytes(count) = heard {
                moved = true;
                if reduces {
                    staged += count;
                    let whole = staged / size;
                    let at = range.start / size;
                    T::combine(op, &mut data[at..at + whole], &stage[..whole]);
                    bytes_of_mut(&mut stage).copy_within(whole * size..staged, 0);
                    staged -= whole * size;
                    hearing.advance(whole * size);
                } else {
                    hearing.advance(count);
                }
            }
        }
        let (has_sent, has_heard) = (sending.is_done(), hearing.is_done());
        if has_sent && has_heard {
            break;
        }
        if moved {
            since = Instant::now();
        } else {
            let can_send = sending.next((first + hearing.done).saturating_sub(sending.done)).is_some();
            mesh.wait(can_send.then_some(to), (!has_heard).then_some(from), since)?;
        }
    }
    if op == Op::Avg {
        T::divide(data, n as u32);
    }
    Ok(())
}

/// Where a stream of parts is, in bytes of the data.
struct Cursor {
    parts: Vec<std::ops::Range<usize>>,
    step: usize,
    within: usize,
    done: usize,
    size: usize,
}

impl Cursor {
    fn new(parts: Vec<std::ops::Range<usize>>, size: usize) -> Self {
        let mut cursor = Cursor { parts, step: 0, within: 0, done: 0, size };
        cursor.skip();
        cursor
    }

    /// At most `limit` bytes of what comes next.
    fn next(&self, limit: usize) -> Option<std::ops::Range<usize>> {
        let part = self.parts.get(self.step)?;
        let (begin, end) = (part.start * self.size + self.within, part.end * self.size);
        let range = begin..end.min(begin.saturating_add(limit));
        (!range.is_empty()).then_some(range)
    }

    fn advance(&mut self, bytes: usize) {
        self.within += bytes;
        self.done += bytes;
        self.skip();
    }

    fn skip(&mut self) {
        while let Some(part) = self.parts.get(self.step)
            && self.within >= part.len() * self.size
        {
            self.within -= part.len() * self.size;
            self.step += 1;
        }
    }

    fn is_done(&self) -> bool {
        self.step == self.parts.len()
    }
}

/// Along a chain of members, from the root on, each sending on what it has heard.
pub(crate) fn broadcast<T: Element>(mesh: &Mesh, data: &mut [T], root: u32) -> Result<()> {
    let n = mesh.members() as u32;
    let place = (mesh.rank + n - root) % n;
    let next = (place + 1 < n).then(|| (mesh.rank + 1) % n);
    let before = (place > 0).then(|| (mesh.rank + n - 1) % n);
    let bytes = bytes_of_mut(data);
    let (mut sent, mut heard, mut since) = (0, if before.is_some() { 0 } else { bytes.len() }, Instant::now());
    while heard < bytes.len() || (next.is_some() && sent < bytes.len()) {
        let mut moved = false;
        if let Some(next) = next.filter(|_| sent < heard)
            && let Moved::Bytes(count) = mesh.try_send(next, &bytes[sent..heard])?
        {
            sent += count;
            moved = true;
        }
        if let Some(before) = before.filter(|_| heard < bytes.len())
            && let Moved::Bytes(count) = mesh.try_recv(before, &mut bytes[heard..])?
        {
            heard += count;
            moved = true;
        }
        if moved {
            since = Instant::now();
        } else {
            mesh.wait(next.filter(|_| sent < heard), before.filter(|_| heard < bytes.len()), since)?;
        }
    }
    Ok(())
}

/// To the root, from one member after the other.
pub(crate) fn reduce<T: Element>(mesh: &Mesh, data: &mut [T], op: Op, root: u32) -> Result<()> {
    // One after the other, while those who have been heard may leave.
    if mesh.rank != root {
        return mesh.send_to(root, bytes_of(data));
    }
    let mut theirs = data.to_vec();
    for peer in (0..mesh.members() as u32).filter(|peer| *peer != root) {
        mesh.recv_from(peer, bytes_of_mut(&mut theirs))?;
        T::combine(op, data, &theirs);
    }
    // What one has alone stays as it is, to the bit.
    if op == Op::Avg && mesh.members() > 1 {
        T::divide(data, mesh.members() as u32);
    }
    Ok(())
}

/// `all` has the parts of all members, `mine` is this one's.
pub(crate) fn all_gather<T: Element>(mesh: &Mesh, mine: &[T], all: &mut [T]) -> Result<()> {
    let (n, rank) = (mesh.members(), mesh.rank as usize);
    all[rank * mine.len()..][..mine.len()].copy_from_slice(mine);
    for step in 1..n {
        let (to, from) = ((rank + step) % n, (rank + n - step) % n);
        let into = &mut all[from * mine.len()..][..mine.len()];
        mesh.exchange(to as u32, bytes_of(mine), from as u32, bytes_of_mut(into))?;
    }
    Ok(())
}

/// `all` has a part for each member; `mine` becomes this one's part of all, reduced.
pub(crate) fn reduce_scatter<T: Element>(mesh: &Mesh, all: &[T], mine: &mut [T], op: Op) -> Result<()> {
    let (n, rank) = (mesh.members(), mesh.rank as usize);
    let part = mine.len();
    mine.copy_from_slice(&all[rank * part..][..part]);
    let mut theirs = mine.to_vec();
    for step in 1..n {
        let (to, from) = ((rank + step) % n, (rank + n - step) % n);
        mesh.exchange(to as u32, bytes_of(&all[to * part..][..part]), from as u32, bytes_of_mut(&mut theirs))?;
        T::combine(op, mine, &theirs);
    }
    if op == Op::Avg && n > 1 {
        T::divide(mine, n as u32);
    }
    Ok(())
}

/// Of what each member has for each, to whom it is for.
pub(crate) fn all_to_all<T: Element>(mesh: &Mesh, out: &[T], into: &mut [T]) -> Result<()> {
    let (n, rank) = (mesh.members(), mesh.rank as usize);
    let part = out.len() / n;
    into[rank * part..][..part].copy_from_slice(&out[rank * part..][..part]);
    for step in 1..n {
        let (to, from) = ((rank + step) % n, (rank + n - step) % n);
        let theirs = &mut into[from * part..][..part];
        mesh.exchange(to as u32, bytes_of(&out[to * part..][..part]), from as u32, bytes_of_mut(theirs))?;
    }
    Ok(())
}
