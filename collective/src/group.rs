//! The operations of a group.

use std::time::Duration;

use wingbeat::block_on;

use crate::element::{Element, Op, bytes_of, bytes_of_mut};
use crate::error::{CollectiveError, Result};
use crate::header::{Header, Kind, SIZE};
use crate::limits;
use crate::machines::Machines;
use crate::meeting::{Gathering, MeetingHandle};
use crate::mesh::{Card, Member, Mesh, Peers, own_ip};
use crate::ring;
use crate::shared::{Elsewhere, Shared};

/// What carries data between members.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// Shared memory between members of one machine, and TCP between machines.
    #[default]
    Auto,
    /// TCP, also on one machine.
    Tcp,
}

/// How data goes between members.
enum Way {
    /// All are on one machine.
    Shared(Shared),
    /// Some are.
    Machines(Machines),
    /// None is with another.
    Ring,
}

/// What is reduced in a wider type than its own goes the same ways.
impl Way {
    fn all_reduce<T: Element>(&mut self, mesh: &Mesh, header: &Header, data: &mut [T], op: Op) -> Result<()> {
        match self {
            Way::Shared(shared) => shared.all_reduce(mesh, header, data, op),
            Way::Machines(machines) => machines.all_reduce(header, data, op),
            Way::Ring => ring::all_reduce(mesh, data, op),
        }
    }

    fn reduce<T: Element>(&mut self, mesh: &Mesh, header: &Header, data: &mut [T], op: Op, root: u32) -> Result<()> {
        match self {
            Way::Shared(shared) => shared.reduce(mesh, header, data, op, root),
            Way::Machines(machines) => machines.reduce(header, data, op, root),
            Way::Ring => ring::reduce(mesh, data, op, root),
        }
    }

    fn reduce_scatter<T: Element>(
        &mut self,
        mesh: &Mesh,
        header: &Header,
        all: &[T],
        mine: &mut [T],
        op: Op,
    ) -> Result<()> {
        match self {
            Way::Shared(shared) => {
                shared.all_to_all(mesh, header, all, |rank, range, theirs| match rank {
                    0 => mine[range].copy_from_slice(theirs),
                    _ => T::combine(op, &mut mine[range], theirs),
                })?;
                if op == Op::Avg {
                    T::divide(mine, mesh.members() as u32);
                }
                Ok(())
            }
            Way::Machines(_) | Way::Ring => ring::reduce_scatter(mesh, all, mine, op),
        }
    }
}

#[doc(hidden)]
/// An operation between devices; see [`Group::agree`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// All members reduce, into all.
    AllReduce(Op),
    /// All members reduce, into this root.
    Reduce(Op, u32),
    /// This root gives to all.
    Broadcast(u32),
    /// All members get the parts of all.
    AllGather,
    /// All members reduce a part for each.
    ReduceScatter(Op),
    /// All members give a part to each.
    AllToAll,
    /// This member sends to that one.
    Send(u32),
    /// This member receives from that one.
    Recv(u32),
}

/// A member's view of its group. Its operations block until this member has done its part.
///
/// After an error the group is of no use: every later operation is [`CollectiveError::Broken`], and the others find this
/// member gone. What was refused before anything was sent ([`CollectiveError::Invalid`]) is no such error.
///
/// Members that die are noticed at once (while others have not come yet, within about ten seconds), those behind a cut link within about ten seconds, and one that does nothing for
/// half an hour is given up ([`Group::set_timeout`]).
///
/// ```no_run
/// # use wingbeat_collective::{CollectiveError, Group, MeetingHandle, Op};
/// fn average(meeting: &MeetingHandle, rank: u32, gradients: &mut [f32]) -> Result<(), CollectiveError> {
///     let mut group = Group::join(meeting, rank)?;
///     group.all_reduce(gradients, Op::Avg)
/// }
/// ```
pub struct Group {
    mesh: Mesh,
    way: Way,
    sequence: u64,
    is_broken: bool,
}

impl Group {
    /// Comes to a meeting, and waits for the other members, up to a minute.
    ///
    /// # Errors
    /// [`CollectiveError::Missing`], or another has this rank, or the system refuses a socket.
    pub fn join(meeting: &MeetingHandle, rank: u32) -> Result<Group> {
        Self::join_with(meeting, rank, Transport::Auto)
    }

    /// As [`Group::join`], with what is to carry the data. All members say the same.
    ///
    /// # Errors
    /// As [`Group::join`].
    pub fn join_with(meeting: &MeetingHandle, rank: u32, transport: Transport) -> Result<Group> {
        let member = Member::new(own_ip(), transport == Transport::Auto)?;
        let told = block_on(meeting.come(rank, member.card()).get());
        match told.map_err(|error| CollectiveError::io("meeting the other members", error))? {
            Gathering::All(cards) => Self::of(member, rank, &cards),
            Gathering::Refused(why) => Err(CollectiveError::Invalid(why)),
            Gathering::Missing(missing, members) => Err(CollectiveError::Missing {
                missing: missing.len() as u32,
                members,
                first: missing.first().copied().unwrap_or_default(),
                seconds: limits::MEETING.as_secs(),
            }),
        }
    }

    pub(crate) fn of(member: Member, rank: u32, cards: &[Card]) -> Result<Group> {
        let mesh = member.connect(rank, cards)?;
        let way = if cards.len() > 1 && mesh.machines().len() == 1 {
            Way::Shared(Shared::new(&mesh, Elsewhere::Nobody)?)
        } else {
            Machines::new(&mesh)?.map_or(Way::Ring, Way::Machines)
        };
        Ok(Group { mesh, way, sequence: 0, is_broken: false })
    }

    /// This member's rank.
    pub fn rank(&self) -> u32 {
        self.mesh.rank
    }

    /// The number of members.
    pub fn size(&self) -> u32 {
        self.mesh.members() as u32
    }

    /// For how long a member may do nothing that this one sees while it waits for it; half an hour if nothing is said.
    /// Another limit is for members that compute for longer between two operations, or to find sooner that one is stuck. It
    /// should be longer than the longest operation: what a member still does in one with others cannot be seen by those who
    /// wait for it in the next.
    pub fn set_timeout(&mut self, limit: Duration) {
        self.mesh.set_limit(limit);
    }

    /// Waits until all members have come as far.
    ///
    /// # Errors
    /// A member is gone, or calls something else.
    pub fn barrier(&mut self) -> Result<()> {
        let header = self.header::<u8>(Kind::Barrier, 0, None, None)?;
        self.run(&header, |mesh, way| match way {
            Way::Shared(shared) => shared.barrier(mesh, &header),
            // They have agreed.
            Way::Machines(_) | Way::Ring => Ok(()),
        })
    }

    /// Reduces the data of all members, element by element, into every member's: the same bits at all of them.
    ///
    /// # Errors
    /// A member is gone, or calls something else.
    pub fn all_reduce<T: Element>(&mut self, data: &mut [T], op: Op) -> Result<()> {
        let header = self.header::<T>(Kind::AllReduce, data.len(), Some(op), None)?;
        if self.needs_room::<T>(op) {
            let mut wide = T::widened(data);
            self.run(&header, |mesh, way| way.all_reduce(mesh, &header, &mut wide, op))?;
            T::narrow(&wide, data);
            return Ok(());
        }
        self.run(&header, |mesh, way| way.all_reduce(mesh, &header, data, op))
    }

    /// Reduces the data of all members into the root's; the others' stays as it is.
    ///
    /// # Errors
    /// A member is gone, or calls something else, or there is no such root.
    pub fn reduce<T: Element>(&mut self, data: &mut [T], op: Op, root: u32) -> Result<()> {
        let header = self.header::<T>(Kind::Reduce, data.len(), Some(op), Some(root))?;
        if self.needs_room::<T>(op) {
            let mut wide = T::widened(data);
            self.run(&header, |mesh, way| way.reduce(mesh, &header, &mut wide, op, root))?;
            if self.rank() == root {
                T::narrow(&wide, data);
            }
            return Ok(());
        }
        self.run(&header, |mesh, way| way.reduce(mesh, &header, data, op, root))
    }

    /// Gives the root's data to all members.
    ///
    /// # Errors
    /// A member is gone, or calls something else, or there is no such root.
    pub fn broadcast<T: Element>(&mut self, data: &mut [T], root: u32) -> Result<()> {
        let header = self.header::<T>(Kind::Broadcast, data.len(), None, Some(root))?;
        self.run(&header, |mesh, way| match way {
            Way::Shared(shared) => shared.broadcast(mesh, &header, data, root),
            Way::Machines(machines) => machines.broadcast(&header, data, root),
            Way::Ring => ring::broadcast(mesh, data, root),
        })
    }

    /// Puts the parts of all members behind each other, in the order of ranks: `all` is as long as all parts together.
    ///
    /// # Errors
    /// A member is gone, or calls something else, or `all` is of another length.
    pub fn all_gather<T: Element>(&mut self, mine: &[T], all: &mut [T]) -> Result<()> {
        self.is_whole("all", all.len(), mine.len())?;
        let header = self.header::<T>(Kind::AllGather, mine.len(), None, None)?;
        self.run(&header, |mesh, way| match way {
            Way::Shared(shared) => shared.all_gather(mesh, &header, mine, all),
            Way::Machines(_) | Way::Ring => ring::all_gather(mesh, mine, all),
        })
    }

    /// Reduces a part for each member: `all` has one for each, in the order of ranks, and `mine` becomes this member's.
    ///
    /// # Errors
    /// A member is gone, or calls something else, or `all` is of another length.
    pub fn reduce_scatter<T: Element>(&mut self, all: &[T], mine: &mut [T], op: Op) -> Result<()> {
        self.is_whole("all", all.len(), mine.len())?;
        let header = self.header::<T>(Kind::ReduceScatter, mine.len(), Some(op), None)?;
        if self.needs_room::<T>(op) {
            let (all, mut wide) = (T::widened(all), T::widened(mine));
            self.run(&header, |mesh, way| way.reduce_scatter(mesh, &header, &all, &mut wide, op))?;
            T::narrow(&wide, mine);
            return Ok(());
        }
        self.run(&header, |mesh, way| way.reduce_scatter(mesh, &header, all, mine, op))
    }

    /// Gives each member the part that each other has for it: `out` has one for each, in the order of ranks, and `into`
    /// gets one from each.
    ///
    /// # Errors
    /// A member is gone, or calls something else, or a length is not a multiple of the number of members.
    pub fn all_to_all<T: Element>(&mut self, out: &[T], into: &mut [T]) -> Result<()> {
        let each = out.len() / self.mesh.members();
        self.is_whole("out", out.len(), each)?;
        self.is_whole("into", into.len(), each)?;
        let header = self.header::<T>(Kind::AllToAll, each, None, None)?;
        self.run(&header, |mesh, way| match way {
            Way::Shared(shared) => shared.all_to_all(mesh, &header, out, |rank, range, theirs| {
                into[rank * each..][range].copy_from_slice(theirs);
            }),
            Way::Machines(_) | Way::Ring => ring::all_to_all(mesh, out, into),
        })
    }

    /// Sends data to one other member, which calls [`Group::recv`]. Waits until it was taken in. Two members may send to each
    /// other first and receive then, for which each keeps what came in the meantime; and so may more in a ring, with up to
    /// 256 MiB each.
    ///
    /// # Errors
    /// It is gone, or there is no such member.
    pub fn send<T: Element>(&mut self, data: &[T], to: u32) -> Result<()> {
        self.is_another(to)?;
        let header = self.header::<T>(Kind::Send, data.len(), None, Some(to))?;
        self.between_two(|mesh| {
            mesh.send_hearing(to, &header.to_bytes())?;
            mesh.send_hearing(to, bytes_of(data))
        })
    }

    /// Receives what one other member sends with [`Group::send`], of the same type and length.
    ///
    /// # Errors
    /// It is gone, sends something else, or there is no such member.
    pub fn recv<T: Element>(&mut self, data: &mut [T], from: u32) -> Result<()> {
        self.is_another(from)?;
        let own = self.rank();
        let header = self.header::<T>(Kind::Send, data.len(), None, Some(own))?;
        self.between_two(|mesh| {
            hear(mesh, &header, from)?;
            mesh.recv_from(from, bytes_of_mut(data))
        })
    }

    #[doc(hidden)]
    /// The other members, for a thread that looks after what this one waits for.
    ///
    /// # Errors
    /// The process has no file descriptors left.
    pub fn peers(&self) -> Result<Peers> {
        self.mesh.peers()
    }

    #[doc(hidden)]
    /// Checks that all members, or the two that it is between, call the same on their devices now: of as many elements,
    /// and in the same order. For operations that something else carries, which checks nothing, as NCCL. No data moves.
    ///
    /// # Errors
    /// A member is gone, or calls something else, or there is no such root.
    pub fn agree<T: Element>(&mut self, call: Call, count: usize) -> Result<()> {
        if let Call::Send(other) | Call::Recv(other) = call {
            self.is_another(other)?;
        }
        let (kind, op, root) = match call {
            Call::AllReduce(op) => (Kind::AllReduce, Some(op), None),
            Call::Reduce(op, root) => (Kind::Reduce, Some(op), Some(root)),
            Call::Broadcast(root) => (Kind::Broadcast, None, Some(root)),
            Call::AllGather => (Kind::AllGather, None, None),
            Call::ReduceScatter(op) => (Kind::ReduceScatter, Some(op), None),
            Call::AllToAll => (Kind::AllToAll, None, None),
            Call::Send(to) => (Kind::Send, None, Some(to)),
            Call::Recv(_) => (Kind::Send, None, Some(self.rank())),
        };
        let header = self.header::<T>(kind, count, op, root)?.on_devices();
        match call {
            Call::Send(to) => self.between_two(|mesh| mesh.send_hearing(to, &header.to_bytes())),
            Call::Recv(from) => self.between_two(|mesh| hear(mesh, &header, from)),
            _ => self.run(&header, |mesh, way| match way {
                Way::Shared(shared) => shared.barrier(mesh, &header),
                Way::Machines(_) | Way::Ring => Ok(()),
            }),
        }
    }

    /// What is called next.
    fn header<T: Element>(&mut self, kind: Kind, count: usize, op: Option<Op>, root: Option<u32>) -> Result<Header> {
        if self.is_broken {
            return Err(CollectiveError::Broken);
        }
        if let Some(root) = root.filter(|root| *root >= self.size()) {
            return Err(CollectiveError::Invalid(format!("there is no rank {root} in a group of {}", self.size())));
        }
        // What only two of them call is not counted.
        let counts = kind != Kind::Send;
        self.sequence += u64::from(counts);
        Ok(Header::new::<T>(if counts { self.sequence } else { 0 }, kind, count, op, root))
    }

    /// Whether the sum of all members could be more than the type holds, on the way to their mean.
    fn needs_room<T: Element>(&self, op: Op) -> bool {
        op == Op::Avg && T::IS_NARROW && self.size() > 1
    }

    fn is_another(&self, rank: u32) -> Result<()> {
        match rank == self.rank() {
            true => Err(CollectiveError::Invalid(format!("rank {rank} cannot send to itself"))),
            false => Ok(()),
        }
    }

    #[doc(hidden)]
    /// That a buffer, named so in the error, has a part of this length for each member.
    ///
    /// # Errors
    /// [`CollectiveError::Invalid`].
    pub fn is_whole(&self, name: &str, length: usize, part: usize) -> Result<()> {
        match length == part * self.mesh.members() {
            true => Ok(()),
            false => Err(CollectiveError::Invalid(format!(
                "`{name}` has {length} elements, and {} members with {part} each need {}",
                self.mesh.members(),
                part * self.mesh.members()
            ))),
        }
    }

    /// Runs an operation of all. In shared memory they agree on it with its first part, and else before.
    fn run(&mut self, header: &Header, operation: impl FnOnce(&Mesh, &mut Way) -> Result<()>) -> Result<()> {
        let agreed = match &self.way {
            Way::Shared(_) => Ok(()),
            Way::Machines(_) | Way::Ring => ring::agree(&self.mesh, header),
        };
        let done = agreed.and_then(|()| operation(&self.mesh, &mut self.way));
        self.ended(done)
    }

    fn between_two(&mut self, operation: impl FnOnce(&Mesh) -> Result<()>) -> Result<()> {
        let done = operation(&self.mesh);
        self.ended(done)
    }

    /// An operation has ended. Where one has failed, no other can succeed: those who wait for this member hear so now, and
    /// not when it lets go of the group.
    fn ended(&mut self, done: Result<()>) -> Result<()> {
        if done.is_err() {
            self.is_broken = true;
            self.mesh.close();
        }
        done
    }
}

/// Hears what a member sends next, which is to be this.
fn hear(mesh: &Mesh, header: &Header, from: u32) -> Result<()> {
    let mut theirs = [0; SIZE];
    mesh.recv_from(from, &mut theirs)?;
    header.check(&Header::from_bytes(theirs), from, mesh.rank)
}

#[cfg(test)]
#[path = "group_tests.rs"]
mod tests;
