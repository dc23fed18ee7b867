//! What programs pass: values that say whose they are, and the plans of tasks and calls.

use bytes::Bytes;
use wingbeat_core::{ActorId, ObjectId, ProcessId, TaskId};

use crate::owner::object::Handle;

/// A ref that a program holds: of a value, or of an actor.
#[derive(Clone)]
pub(super) struct Ref {
    pub handle: Handle,
    pub actor: Option<ActorId>,
}

/// A ref as it is written.
#[derive(Clone, Copy, Debug)]
pub(super) struct Written {
    pub id: ObjectId,
    pub actor: Option<ActorId>,
}

/// What a task or call is to do. Everything random in it comes from its seed.
#[derive(Clone, Debug, Default)]
pub(super) struct Plan {
    pub seed: u64,
    /// How many tasks may be one inside the other.
    pub depth: u64,
    /// The number of a call among those of its caller and actor; 0 for a task.
    pub number: u64,
    /// Later plans have a higher one.
    pub order: u64,
    /// Where the refs of a call go.
    pub kind: Kind,
    /// Whose values the arguments after this one are.
    pub expects: Vec<ObjectId>,
    pub refs: Vec<Written>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum Kind {
    #[default]
    Work,
    /// Keeps the refs in it.
    Keep,
    /// Gives back what was kept by then.
    Fetch,
    /// Of a task: waits for nobody.
    Busy,
    /// Of a task: ends its process.
    Fatal,
}

impl Ref {
    pub(super) fn of(handle: Handle) -> Ref {
        Ref { handle, actor: None }
    }

    pub(super) fn written(&self) -> Written {
        Written { id: self.handle.id(), actor: self.actor }
    }
}

/// A number that belongs to an object alone.
fn stamp(id: ObjectId) -> u64 {
    let mut stamp = 0xcbf2_9ce4_8422_2325_u64;
    for part in [id.task.owner.0, id.task.seq, u64::from(id.index)] {
        stamp = (stamp ^ part).wrapping_mul(0x0100_0000_01b3).rotate_left(17);
    }
    stamp
}

struct Words<'a>(&'a [u8]);

impl Words<'_> {
    fn next(&mut self) -> u64 {
        let (word, rest) = self.0.split_at(8);
        self.0 = rest;
        u64::from_le_bytes(word.try_into().expect("it has eight bytes"))
    }

    fn id(&mut self) -> ObjectId {
        let (owner, seq) = (ProcessId(self.next()), self.next());
        TaskId { owner, seq }.output(self.next() as u32)
    }

    fn refs(&mut self) -> Vec<Written> {
        let count = self.next();
        let one = |_| Written { id: self.id(), actor: Some(self.next()).filter(|id| *id != 0).map(ActorId) };
        (0..count).map(one).collect()
    }
}

fn put_id(id: ObjectId, words: &mut Vec<u64>) {
    words.extend([id.task.owner.0, id.task.seq, u64::from(id.index)]);
}

fn put_refs(refs: &[Written], words: &mut Vec<u64>) {
    words.push(refs.len() as u64);
    for written in refs {
        put_id(written.id, words);
        words.push(written.actor.map_or(0, |actor| actor.0));
    }
}

fn bytes(words: &[u64]) -> Bytes {
    words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>().into()
}

/// The value of an object, with these refs in it.
pub(super) fn value_of(id: ObjectId, refs: &[Ref]) -> Bytes {
    let mut words = vec![stamp(id)];
    put_id(id, &mut words);
    put_refs(&refs.iter().map(Ref::written).collect::<Vec<_>>(), &mut words);
    bytes(&words)
}

/// The refs in a value, which must be that of this object.
pub(super) fn refs_in(value: &[u8], expected: ObjectId) -> Vec<Written> {
    let mut words = Words(value);
    let (stamped, id) = (words.next(), words.id());
    assert_eq!((stamped, id), (stamp(expected), expected), "somebody reads {expected}, and it is {id}");
    words.refs()
}

impl Plan {
    pub(super) fn bytes(&self) -> Bytes {
        let mut words =
            vec![self.seed, self.depth, self.number, self.order, self.kind as u64, self.expects.len() as u64];
        for id in &self.expects {
            put_id(*id, &mut words);
        }
        put_refs(&self.refs, &mut words);
        bytes(&words)
    }

    pub(super) fn read(bytes: &[u8]) -> Plan {
        let mut words = Words(bytes);
        let (seed, depth, number, order) = (words.next(), words.next(), words.next(), words.next());
        let kind = [Kind::Work, Kind::Keep, Kind::Fetch, Kind::Busy, Kind::Fatal][words.next() as usize];
        let count = words.next();
        let expects = (0..count).map(|_| words.id()).collect();
        Plan { seed, depth, number, order, kind, expects, refs: words.refs() }
    }
}
