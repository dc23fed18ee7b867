//! The protocol in a pretended world: a few processes, links between them that keep order and know nothing of each other,
//! and every interleaving of their steps (or, where those are too many, many of them by chance, from a seed).
//!
//! What user code does stands in `program`, and who looks at the interleavings in `search`. The same world runs with the rules that were there
//! before (`old_rule`), to show that it finds what was wrong with them.

mod old_rule;
mod program;
mod search;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use self::old_rule::OldRule;
use self::program::{Scenario, Task};
use super::tests::{Pid, process};
use super::*;

/// What may happen next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    Deliver(Pid, Pid),
    Acknowledge(Pid, Pid),
    Run(Pid, u64),
    ReleaseLoop(Pid),
    /// The old rule: a message whose registrations were acknowledged goes on.
    GoOn(Pid, usize),
}

/// How it is decided what a confirmation waits for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Rule {
    /// [`Borrowing`].
    Numbers,
    /// As it was: whoever waits takes the list of what is not acknowledged, and who comes second finds it empty. Releases
    /// carry no number, and are checked against the table before they are sent.
    Taking,
}

/// A message. Where a task is concerned, its number stands for it.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) enum Message {
    Task { task: u64, args: Vec<ObjectId> },
    Result { task: u64, refs: Vec<ObjectId> },
    Received { task: u64 },
    Borrow(ObjectId, Registration),
    Release(ObjectId, Registration),
    Subscribe(ObjectId),
    Resolved { id: ObjectId, refs: Vec<ObjectId> },
}
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
struct Entry {
    handles: u32,
    registration: Registration,
    borrowers: Borrowers,
    /// The refs in its value, once that is there.
    value: Option<Vec<ObjectId>>,
    asked: bool,
}

/// A call that is not done: the refs in its arguments, and where its results go.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Pending {
    held: Vec<ObjectId>,
    into: (u64, usize),
    result: bool,
}
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
struct Process {
    table: BTreeMap<ObjectId, Entry>,
    borrowing: Borrowing<(Pid, Message)>,
    tasks: BTreeMap<u64, Task>,
    calls: BTreeMap<u64, Pending>,
    /// Refs in results, until `Received`.
    returned: BTreeMap<u64, Vec<ObjectId>>,
    kept: Vec<ObjectId>,
    /// The queue of the release loop.
    released: VecDeque<(ObjectId, Registration, Vec<ObjectId>)>,
    made: u64,
    old: OldRule,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct World {
    rule: Rule,
    processes: BTreeMap<Pid, Process>,
    links: BTreeMap<(Pid, Pid), VecDeque<Message>>,
    /// From the owner to the borrower: registrations up to here were taken in.
    acknowledgements: BTreeMap<(Pid, Pid), Registration>,
    broken: Option<Broken>,
}

type Broken = String;

impl World {
    fn new(rule: Rule, scenario: &Scenario) -> World {
        let pids: BTreeSet<Pid> = scenario.tasks.values().map(|(pid, _)| *pid).collect();
        let mut processes: BTreeMap<Pid, Process> = pids.iter().map(|pid| (*pid, Process::default())).collect();
        let driver = Task { caller: None, args: Vec::new(), places: BTreeMap::new(), at: 0 };
        processes.get_mut(&scenario.tasks[&0].0).unwrap().tasks.insert(0, driver);
        World { rule, processes, links: BTreeMap::new(), acknowledgements: BTreeMap::new(), broken: None }
    }

    fn of(&mut self, pid: Pid) -> &mut Process {
        self.processes.get_mut(&pid).unwrap()
    }

    fn send(&mut self, from: Pid, to: Pid, message: Message) {
        self.links.entry((from, to)).or_default().push_back(message);
    }

    // ---- handles, as in `object.rs` ----

    fn hold(&mut self, pid: Pid, id: ObjectId) {
        let rule = self.rule;
        let process = self.of(pid);
        if let Some(entry) = process.table.get_mut(&id) {
            entry.handles += 1;
            return;
        }
        let owner = id.owner();
        if owner.0 == pid {
            self.broken = Some(format!("{id} was freed, and its owner is passed it"));
            return;
        }
        let registration = process.borrowing.register(id);
        process.table.insert(id, Entry { handles: 1, registration, ..Entry::default() });
        if rule == Rule::Taking {
            process.old.registers(owner, registration);
        }
        for (owner, registrations) in process.borrowing.take_unsent() {
            for (id, number) in registrations {
                self.send(pid, owner.0, Message::Borrow(id, number));
            }
        }
    }

    fn drop_handle(&mut self, pid: Pid, id: ObjectId) {
        self.of(pid).table.get_mut(&id).expect("a handle keeps its object").handles -= 1;
        self.free_if_unneeded(pid, id);
    }

    fn free_if_unneeded(&mut self, pid: Pid, id: ObjectId) {
        let process = self.of(pid);
        let needed = process.table.get(&id).is_none_or(|entry| entry.handles > 0 || !entry.borrowers.is_empty());
        if needed {
            return;
        }
        let entry = process.table.remove(&id).unwrap();
        let contained = entry.value.unwrap_or_default();
        if id.owner().0 != pid {
            process.released.push_back((id, entry.registration, contained.clone()));
        }
        for inner in contained {
            self.drop_handle(pid, inner);
        }
    }

    // ---- what waits for what ----

    fn confirm(&mut self, pid: Pid, to: Pid, refs: &[ObjectId], message: Message) {
        let rule = self.rule;
        let process = self.of(pid);
        match rule {
            Rule::Numbers => {
                if let Some((to, message)) = process.borrowing.confirm(ProcessId(to), refs, (to, message)) {
                    self.send(pid, to, message);
                }
            }
            Rule::Taking => self.confirm_by_taking(pid, to, message),
        }
    }

    fn release_loop(&mut self, pid: Pid) {
        let rule = self.rule;
        let process = self.of(pid);
        match rule {
            Rule::Numbers => {
                let (id, number, contained) = process.released.pop_front().unwrap();
                let mut ready = Vec::new();
                process.borrowing.release(id, number, &contained, &mut ready);
                self.send_ready(pid, ready);
            }
            Rule::Taking => self.release_by_taking(pid),
        }
    }

    fn send_ready(&mut self, pid: Pid, ready: Vec<Ready<(Pid, Message)>>) {
        for ready in ready {
            match ready {
                Ready::Message((to, message)) => self.send(pid, to, message),
                Ready::Release(id, number) => self.send(pid, id.owner().0, Message::Release(id, number)),
            }
        }
    }

    // ---- messages ----

    fn deliver(&mut self, from: Pid, to: Pid) -> Result<(), Broken> {
        let message = self.links.get_mut(&(from, to)).unwrap().pop_front().unwrap();
        match message {
            Message::Task { task, args } => {
                for id in &args {
                    self.hold(to, *id);
                }
                let places = args.iter().copied().enumerate().collect();
                self.of(to).tasks.insert(task, Task { caller: Some(from), args, places, at: 0 });
            }
            Message::Result { task, refs } => {
                // The object of the result, which the caller holds until it takes the refs over.
                for id in &refs {
                    self.hold(to, *id);
                }
                let process = self.of(to);
                let call = process.calls.get_mut(&task).unwrap();
                call.result = true;
                let (held, (caller, into)) = (std::mem::take(&mut call.held), call.into);
                let places = &mut process.tasks.get_mut(&caller).unwrap().places;
                places.extend((into..).zip(refs.iter().copied()));
                for id in held {
                    self.drop_handle(to, id);
                }
                if !refs.is_empty() {
                    self.confirm(to, from, &refs, Message::Received { task });
                }
            }
            Message::Received { task } => {
                for id in self.of(to).returned.remove(&task).unwrap_or_default() {
                    self.drop_handle(to, id);
                }
            }
            Message::Borrow(id, number) => {
                let acknowledged = self.acknowledgements.entry((to, from)).or_default();
                *acknowledged = number.max(*acknowledged);
                let needs_it = self.of(from).table.contains_key(&id);
                match self.of(to).table.get_mut(&id) {
                    Some(entry) => entry.borrowers.borrow(process(from), number),
                    None if needs_it => return Err(format!("{id} was freed, and {from} holds it")),
                    None => {}
                }
            }
            Message::Release(id, number) => {
                if let Some(entry) = self.of(to).table.get_mut(&id) {
                    entry.borrowers.release(process(from), number);
                }
                self.free_if_unneeded(to, id);
            }
            Message::Subscribe(id) => {
                let wants_it = self.of(from).table.contains_key(&id);
                match self.of(to).table.get(&id).map(|entry| entry.value.clone()) {
                    Some(value) => {
                        let refs = value.expect("values are there from the start");
                        self.send(to, from, Message::Resolved { id, refs });
                    }
                    None if wants_it => return Err(format!("{id} was freed, and {from} wants its value")),
                    None => {}
                }
            }
            Message::Resolved { id, refs } => {
                if self.of(to).table.get(&id).is_some_and(|entry| entry.value.is_none()) {
                    for inner in &refs {
                        self.hold(to, *inner);
                    }
                    self.of(to).table.get_mut(&id).unwrap().value = Some(refs);
                }
            }
        }
        Ok(())
    }

    fn acknowledge(&mut self, owner: Pid, borrower: Pid) {
        let Some(up_to) = self.acknowledgements.remove(&(owner, borrower)) else { return };
        let process = self.of(borrower);
        process.old.acknowledges(ProcessId(owner), up_to);
        let mut ready = Vec::new();
        process.borrowing.acknowledged(ProcessId(owner), up_to, &mut ready);
        self.send_ready(borrower, ready);
    }
}
