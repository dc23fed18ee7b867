//! The calls of one concurrency group of an actor: how many run, and on which of its threads.

use parking_lot::Mutex;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use wingbeat_core::ActorId;
use wingbeat_core::spec::TaskSpec;

/// The default concurrency group.
pub const DEFAULT_GROUP: &str = "";

/// Threads of one group at most. Synchronous calls beyond that wait; asynchronous ones need no thread of their own.
const THREADS: u32 = 64;

/// Calls that run beyond those that may: they began in place of streams that waited for their consumers and go on now.
#[derive(Default, Debug)]
struct Beyond {
    count: u32,
    /// Of how many the head was told last; none if it knows of nobody who waits there.
    told: Option<u32>,
}

/// Something of each concurrency group of an actor. Every call looks for its own, and most are of the default group.
pub struct ByGroup<T> {
    default: Option<T>,
    named: BTreeMap<String, T>,
}

impl<T> Default for ByGroup<T> {
    fn default() -> Self {
        ByGroup { default: None, named: BTreeMap::new() }
    }
}

impl<T> ByGroup<T> {
    /// That of a group.
    pub fn get(&self, group: &str) -> Option<&T> {
        if group == DEFAULT_GROUP { self.default.as_ref() } else { self.named.get(group) }
    }

    /// As [`ByGroup::get`].
    pub fn get_mut(&mut self, group: &str) -> Option<&mut T> {
        if group == DEFAULT_GROUP { self.default.as_mut() } else { self.named.get_mut(group) }
    }

    /// Takes that of a group, in place of another.
    pub fn insert(&mut self, group: &str, of: T) {
        match group {
            DEFAULT_GROUP => self.default = Some(of),
            _ => drop(self.named.insert(group.to_owned(), of)),
        }
    }

    /// All of them.
    pub fn values(&self) -> impl Iterator<Item = &T> {
        self.default.iter().chain(self.named.values())
    }

    /// All of them.
    pub fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.default.iter_mut().chain(self.named.values_mut())
    }

    /// All of them, by name.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (&str, &mut T)> {
        let named = self.named.iter_mut().map(|(name, of)| (name.as_str(), of));
        self.default.iter_mut().map(|of| (DEFAULT_GROUP, of)).chain(named)
    }
}

/// Where in an actor executions run. One for each concurrency group, as long as the actor's process lives.
#[derive(Debug)]
pub struct Place {
    /// The actor.
    pub actor: ActorId,
    /// The concurrency group; none of a constructor or `Drop`, beside which no call runs.
    pub group: Option<Box<str>>,
    /// How many calls may run there.
    pub room: Room,
    /// Whether other calls may run beside one of it, there or in another group.
    pub has_others: bool,
    beyond: Mutex<Beyond>,
}

impl Place {
    /// Of a constructor, or a `Drop`.
    pub fn alone(actor: ActorId) -> Place {
        Place::with(actor, None, Room { calls: 1, threads: 1 })
    }

    pub(super) fn with(actor: ActorId, group: Option<Box<str>>, room: Room) -> Place {
        Place { actor, group, room, has_others: room.calls > 1, beyond: Mutex::default() }
    }

    /// Of the calls of a group that may run so many.
    pub fn of(actor: ActorId, group: &str, most: u32) -> Place {
        Place::with(actor, Some(group.into()), Room { calls: most, threads: most.min(THREADS) })
    }

    /// The same, of an actor that has other groups.
    #[must_use]
    pub fn beside_other_groups(self) -> Place {
        Place { has_others: true, ..self }
    }

    /// So many calls run beyond those that may. Said under the lock under which that is known. Whether there is less room than the head knows for those
    /// that wait here: it may have missed a circle. Where there is more, it asks before it believes in one.
    pub fn runs_beyond(&self, beyond: u32) -> bool {
        let mut known = self.beyond.lock();
        known.count = beyond;
        known.told.is_some_and(|told| told > beyond)
    }

    /// How many executions that wait leave no room for another here, as the head is told now: as many as may run and those beyond, or, if it
    /// `blocks` its thread, as have a thread each.
    pub(super) fn room_told(&self, blocks: bool) -> u32 {
        if blocks {
            // Whoever runs beyond has no thread of its own.
            return self.room.threads;
        }
        let mut known = self.beyond.lock();
        known.told = Some(known.count);
        self.room.calls.saturating_add(known.count)
    }
}

/// How many calls run at a time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Room {
    /// As many as may.
    pub calls: u32,
    /// As many as have a thread each.
    pub threads: u32,
}

/// Which of its threads are to take a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Takes {
    /// One that has nothing under way.
    Empty,
    /// One on which no call counts.
    Idle,
    /// Any.
    Busy,
}

/// The calls that a thread of an actor has under way.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct ThreadCalls {
    /// Those that run: that count.
    pub counted: u32,
    /// Those that wait for the consumers of their streams.
    pub paused: u32,
}

impl ThreadCalls {
    /// What such a thread is.
    pub fn takes(self) -> Takes {
        match self {
            ThreadCalls { counted: 0, paused: 0 } => Takes::Empty,
            ThreadCalls { counted: 0, .. } => Takes::Idle,
            ThreadCalls { .. } => Takes::Busy,
        }
    }

    fn is_idle(self) -> bool {
        self.counted == 0
    }

    fn is_empty(self) -> bool {
        self.takes() == Takes::Empty
    }
}

/// A concurrency group of an actor. Its calls are run by threads, each of which may have several under way. Lives as long as the actor's process.
#[derive(Default)]
pub(super) struct Group {
    /// Calls that have not begun, in order.
    pub(super) waiting: VecDeque<Arc<TaskSpec>>,
    /// Calls that run. One that waits for the consumer of its stream does not count, and goes on without asking.
    running: u32,
    /// How many may run.
    most: u32,
    /// Threads that take its calls.
    threads: u32,
    /// Those of them that are idle.
    idle: u32,
    /// Those of them that are empty. There is one until there are as many threads as may be, or one could not be started.
    empty: u32,
}

impl Group {
    /// One that may run so many calls, and has no thread yet.
    pub(super) fn new(most: u32) -> Group {
        Group { most, ..Group::default() }
    }

    /// If a call waits that may begin: which of its threads may take it. Each call has a thread for itself as long as that can be.
    pub(super) fn wants(&self) -> Option<Takes> {
        let may_begin = !self.waiting.is_empty() && self.running < self.most;
        may_begin.then_some(match (self.empty, self.idle) {
            (0, 0) => Takes::Busy,
            (0, _) => Takes::Idle,
            _ => Takes::Empty,
        })
    }

    /// The next call for one of its threads, which has others under way, and whether another thread is to be started; none if it is to be
    /// waited for.
    pub(super) fn take(&mut self, thread: ThreadCalls) -> Option<(Arc<TaskSpec>, bool)> {
        let may_take = match self.wants()? {
            Takes::Empty => thread.is_empty(),
            Takes::Idle => thread.is_idle(),
            Takes::Busy => true,
        };
        if !may_take {
            return None;
        }
        let spec = self.waiting.pop_front()?;
        self.counts(thread);
        self.empty -= u32::from(thread.is_empty());
        Some((spec, self.starts_thread()))
    }

    /// A call that was taken is done; `beside`: what else its thread has under way. How many run beyond those that may, if that has changed.
    pub(super) fn done(&mut self, beside: ThreadCalls) -> Option<u32> {
        self.empty += u32::from(beside.is_empty());
        self.changes(|group| group.counts_no_more(beside))
    }

    /// A call begins to wait for the consumer of its stream, and another one may run in its place, or it goes on; `beside`: what else its
    /// thread has under way. How many run beyond those that may, if that has changed.
    pub(super) fn pauses(&mut self, pauses: bool, beside: ThreadCalls) -> Option<u32> {
        self.changes(|group| if pauses { group.counts_no_more(beside) } else { group.counts(beside) })
    }

    fn changes(&mut self, change: impl FnOnce(&mut Group)) -> Option<u32> {
        let beyond = |group: &Group| group.running.saturating_sub(group.most);
        let before = beyond(self);
        change(self);
        Some(beyond(self)).filter(|beyond| *beyond != before)
    }

    /// A thread has taken a call, or one of its calls goes on; `beside`: what else it has.
    fn counts(&mut self, beside: ThreadCalls) {
        self.running += 1;
        self.idle -= u32::from(beside.is_idle());
    }

    /// One of its calls counts no more.
    fn counts_no_more(&mut self, beside: ThreadCalls) {
        self.running -= 1;
        self.idle += u32::from(beside.is_idle());
    }

    /// Another thread takes its calls from now on, unless one is empty, or there are as many as may be. Whether it is to be started.
    pub(super) fn starts_thread(&mut self) -> bool {
        let starts = self.empty == 0 && self.threads < self.most.min(THREADS);
        if starts {
            (self.threads, self.idle, self.empty) = (self.threads + 1, self.idle + 1, 1);
        }
        starts
    }

    /// That thread could not be started. How many there are.
    pub(super) fn has_no_thread(&mut self) -> u32 {
        (self.threads, self.idle, self.empty) = (self.threads - 1, self.idle - 1, self.empty - 1);
        self.threads
    }
}

/// The concurrency group of a call.
pub fn group_of(call: &TaskSpec) -> &str {
    call.group.as_deref().unwrap_or(DEFAULT_GROUP)
}
