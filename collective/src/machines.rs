//! The operations of a group on several machines, of which some have several members: in shared memory on each machine,
//! and between machines by the first member of each, so that data crosses the network once for each machine.
//!
//! All members have agreed on what is called before anything moves.

use crate::element::{Element, Op};
use crate::error::Result;
use crate::header::Header;
use crate::mesh::Mesh;
use crate::ring;
use crate::shared::{Elsewhere, Shared};

pub(crate) struct Machines {
    /// The members of this machine, and their memory if they are several.
    pub(crate) local: Mesh,
    pub(crate) shared: Option<Shared>,
    /// The first members of all machines, if this is one.
    firsts: Option<Mesh>,
    /// The first of each machine, by rank.
    first_of: Vec<u32>,
}

impl Machines {
    /// None where shared memory is of no use.
    pub(crate) fn new(mesh: &Mesh) -> Result<Option<Machines>> {
        let machines = mesh.machines();
        if machines.len() == 1 || machines.iter().all(|members| members.len() == 1) {
            return Ok(None);
        }
        let mut first_of = vec![0; mesh.members()];
        for members in &machines {
            for rank in members {
                first_of[*rank as usize] = members[0];
            }
        }
        let firsts = mesh.part(machines.iter().map(|members| members[0]).collect());
        let Some(local) = machines.into_iter().find_map(|members| mesh.part(members)) else { return Ok(None) };
        let shared = if local.members() > 1 { Some(Shared::new(&local, Elsewhere::Others)?) } else { None };
        let firsts = match &shared {
            Some(shared) => firsts.map(|firsts| firsts.showing(shared.moves())),
            None => firsts,
        };
        Ok(Some(Machines { local, shared, firsts, first_of }))
    }

    pub(crate) fn all_reduce<T: Element>(&mut self, header: &Header, data: &mut [T], op: Op) -> Result<()> {
        self.reduce_here(header, data, op)?;
        if let Some(firsts) = &self.firsts {
            ring::all_reduce(firsts, data, undivided(op))?;
        }
        self.divide(data, op);
        // The same bits at all: each machine's first has divided.
        self.share(header, data, self.local.rank_of(0))
    }

    pub(crate) fn reduce<T: Element>(&mut self, header: &Header, data: &mut [T], op: Op, root: u32) -> Result<()> {
        let (own, first) = (self.rank(), self.first_of[root as usize]);
        let mut sum;
        // Only the root's data changes, and a machine's first has its sum.
        let into = match self.firsts.is_some() && own != root {
            true => {
                sum = data.to_vec();
                &mut sum
            }
            false => data,
        };
        self.reduce_here(header, into, op)?;
        if let Some(firsts) = &self.firsts
            && let Some(first) = firsts.member(first)
        {
            ring::reduce(firsts, into, undivided(op), first)?;
        }
        if own == first {
            self.divide(into, op);
        }
        let (Some(shared), Some(first)) = (&mut self.shared, self.local.member(first)) else { return Ok(()) };
        match self.local.rank_of(first) == root {
            true => Ok(()),
            false => shared.give(&self.local, header, into, first, own == root),
        }
    }

    pub(crate) fn broadcast<T: Element>(&mut self, header: &Header, data: &mut [T], root: u32) -> Result<()> {
        let is_here = self.local.member(root).is_some();
        if is_here {
            self.share(header, data, root)?;
        }
        if let Some(firsts) = &self.firsts
            && let Some(root) = firsts.member(self.first_of[root as usize])
        {
            ring::broadcast(firsts, data, root)?;
        }
        match is_here {
            true => Ok(()),
            false => self.share(header, data, self.local.rank_of(0)),
        }
    }

    fn rank(&self) -> u32 {
        self.local.rank_of(self.local.rank)
    }

    /// Reduces what this machine's members have into its first's.
    fn reduce_here<T: Element>(&mut self, header: &Header, data: &mut [T], op: Op) -> Result<()> {
        match &mut self.shared {
            Some(shared) => shared.reduce(&self.local, header, data, undivided(op), 0),
            None => Ok(()),
        }
    }

    /// Gives what one member of this machine has to the others.
    fn share<T: Element>(&mut self, header: &Header, data: &mut [T], from: u32) -> Result<()> {
        match (&mut self.shared, self.local.member(from)) {
            (Some(shared), Some(from)) => shared.broadcast(&self.local, header, data, from),
            _ => Ok(()),
        }
    }

    /// The end of `Avg`, at a machine's first.
    fn divide<T: Element>(&self, data: &mut [T], op: Op) {
        if op == Op::Avg && self.local.rank == 0 {
            T::divide(data, self.first_of.len() as u32);
        }
    }
}

/// What comes before the end of `Avg`.
fn undivided(op: Op) -> Op {
    if op == Op::Avg { Op::Sum } else { op }
}
