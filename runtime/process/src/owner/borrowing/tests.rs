//! The protocol in a pretended world: a few processes, links between them that keep order and know nothing of each other,
//! and every interleaving of their steps (or, where those are too many, many of them by chance, from a seed).
//!
//! The same world runs with the rules that were there before, to show that it finds what was wrong with them.

use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};

use wingbeat_core::TaskId;

use super::*;

type Pid = u64;

fn process(pid: Pid) -> ProcessId {
    ProcessId(pid)
}

fn object(owner: Pid, seq: u64) -> ObjectId {
    TaskId { owner: process(owner), seq }.output(0)
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
enum Message {
    Task { task: u64, args: Vec<ObjectId> },
    Result { task: u64, refs: Vec<ObjectId> },
    Received { task: u64 },
    Borrow(ObjectId, Registration),
    Release(ObjectId, Registration),
    Subscribe(ObjectId),
    Resolved { id: ObjectId, refs: Vec<ObjectId> },
}

/// What user code does, one after the other. Refs are in numbered places of the task.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
enum Op {
    /// A new object with these refs in its value, into a place.
    Make(usize, Vec<usize>),
    /// Calls a task with these refs; its results go into the places from the second on.
    Call {
        task: u64,
        args: Vec<usize>,
        into: usize,
    },
    /// Waits for the result of a call.
    Await(u64),
    /// Reads the value of a ref; the refs in it go into the places from the second on.
    Read(usize, usize),
    Drop(usize),
    /// Keeps a ref beyond the end of the task.
    Keep(usize),
    Return(Vec<usize>),
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Task {
    caller: Option<Pid>,
    args: Vec<ObjectId>,
    places: BTreeMap<usize, ObjectId>,
    at: usize,
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

/// A message that waits by the old rule for each of these registrations.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Taken {
    needs: BTreeMap<ProcessId, Registration>,
    then: Later,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
enum Later {
    /// A task was spawned that will take the list and send this.
    Begin(Pid, Message),
    Send(Pid, Message),
    ReleaseBatch(Vec<(ObjectId, Registration)>),
    /// After the look at the table.
    SendReleases(Vec<(ObjectId, Registration)>),
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
    // The old rule.
    unacknowledged: BTreeMap<ProcessId, Registration>,
    acknowledged: BTreeMap<ProcessId, Registration>,
    taken: Vec<Taken>,
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

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    Deliver(Pid, Pid),
    Acknowledge(Pid, Pid),
    Run(Pid, u64),
    ReleaseLoop(Pid),
    /// The old rule: a message whose registrations were acknowledged goes on.
    GoOn(Pid, usize),
}

/// Who runs each task, and what it does. Task 0 is the driver's.
struct Scenario {
    tasks: BTreeMap<u64, (Pid, Vec<Op>)>,
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
            process.unacknowledged.insert(owner, registration);
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
            Rule::Taking => {
                process.forget_acknowledged();
                let is_result = matches!(message, Message::Result { .. });
                if is_result && process.unacknowledged.keys().all(|owner| owner.0 == to) {
                    return self.send(pid, to, message);
                }
                process.taken.push(Taken { needs: BTreeMap::new(), then: Later::Begin(to, message) });
            }
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
            Rule::Taking => {
                let batch = process.released.drain(..).map(|(id, number, _)| (id, number)).collect();
                let needs = std::mem::take(&mut process.unacknowledged);
                process.taken.push(Taken { needs, then: Later::ReleaseBatch(batch) });
            }
        }
    }

    fn go_on(&mut self, pid: Pid, which: usize) {
        let process = self.of(pid);
        match process.taken.remove(which).then {
            Later::Begin(to, message) => {
                let needs = std::mem::take(&mut process.unacknowledged);
                process.taken.push(Taken { needs, then: Later::Send(to, message) });
            }
            Later::Send(to, message) => self.send(pid, to, message),
            Later::ReleaseBatch(mut batch) => {
                batch.retain(|(id, _)| !process.table.contains_key(id));
                process.taken.push(Taken { needs: BTreeMap::new(), then: Later::SendReleases(batch) });
            }
            Later::SendReleases(batch) => {
                for (id, _) in batch {
                    // Without a number: it ends whatever the owner knows.
                    self.send(pid, id.owner().0, Message::Release(id, Registration(u64::MAX)));
                }
            }
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

    // ---- user code ----

    fn run(&mut self, pid: Pid, number: u64, scenario: &Scenario) {
        let process = self.of(pid);
        let task = process.tasks.get_mut(&number).unwrap();
        let op = scenario.tasks[&number].1[task.at].clone();
        task.at += 1;
        let places = task.places.clone();
        match op {
            Op::Make(place, contains) => {
                process.made += 1;
                let id = object(pid, process.made);
                task.places.insert(place, id);
                let value: Vec<ObjectId> = contains.iter().map(|place| places[place]).collect();
                for id in &value {
                    process.table.get_mut(id).unwrap().handles += 1;
                }
                process.table.insert(id, Entry { handles: 1, value: Some(value), ..Entry::default() });
            }
            Op::Call { task, args, into } => {
                let args: Vec<ObjectId> = args.iter().map(|place| places[place]).collect();
                for id in &args {
                    process.table.get_mut(id).unwrap().handles += 1;
                }
                process.calls.insert(task, Pending { held: args.clone(), into: (number, into), result: false });
                self.send(pid, scenario.tasks[&task].0, Message::Task { task, args });
            }
            Op::Await(call) => {
                process.calls.remove(&call);
            }
            Op::Read(place, into) => {
                let value = process.table[&places[&place]].value.clone().unwrap();
                for (place, id) in (into..).zip(value) {
                    self.hold(pid, id);
                    self.of(pid).tasks.get_mut(&number).unwrap().places.insert(place, id);
                }
            }
            Op::Drop(place) => {
                task.places.remove(&place);
                self.drop_handle(pid, places[&place]);
            }
            Op::Keep(place) => {
                task.places.remove(&place);
                process.kept.push(places[&place]);
            }
            Op::Return(refs) => {
                let refs: Vec<ObjectId> = refs.iter().map(|place| places[place]).collect();
                let task = process.tasks.remove(&number).unwrap();
                if !refs.is_empty() {
                    for id in &refs {
                        process.table.get_mut(id).unwrap().handles += 1;
                    }
                    process.returned.insert(number, refs.clone());
                }
                if let Some(caller) = task.caller {
                    self.confirm(pid, caller, &task.args, Message::Result { task: number, refs });
                }
                for id in task.places.into_values() {
                    self.drop_handle(pid, id);
                }
            }
        }
    }

    /// Whether a task can go on; one that reads asks for the value first.
    fn can_run(&mut self, pid: Pid, number: u64, scenario: &Scenario) -> bool {
        let process = self.of(pid);
        let task = &process.tasks[&number];
        match &scenario.tasks[&number].1[task.at] {
            Op::Await(call) => process.calls[call].result,
            Op::Read(place, _) => {
                let id = task.places[place];
                let entry = process.table.get_mut(&id).unwrap();
                let (ready, must_ask) = (entry.value.is_some(), !entry.asked);
                if !ready && must_ask {
                    entry.asked = true;
                    self.send(pid, id.owner().0, Message::Subscribe(id));
                }
                ready
            }
            _ => true,
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
        let known = process.acknowledged.entry(ProcessId(owner)).or_default();
        *known = up_to.max(*known);
        let mut ready = Vec::new();
        process.borrowing.acknowledged(ProcessId(owner), up_to, &mut ready);
        self.send_ready(borrower, ready);
    }

    // ---- exploring ----

    fn steps(&mut self, scenario: &Scenario) -> Vec<Step> {
        let mut steps = Vec::new();
        let pids: Vec<Pid> = self.processes.keys().copied().collect();
        for pid in pids {
            let numbers: Vec<u64> = self.of(pid).tasks.keys().copied().collect();
            for number in numbers {
                if self.can_run(pid, number, scenario) {
                    steps.push(Step::Run(pid, number));
                }
            }
            let process = self.of(pid);
            let in_loop = |taken: &Taken| matches!(taken.then, Later::ReleaseBatch(_) | Later::SendReleases(_));
            let loop_waits = process.taken.iter().any(in_loop);
            if !process.released.is_empty() && !loop_waits {
                steps.push(Step::ReleaseLoop(pid));
            }
            for (which, taken) in process.taken.iter().enumerate() {
                if taken.needs.iter().all(|(owner, number)| process.acknowledged.get(owner) >= Some(number)) {
                    steps.push(Step::GoOn(pid, which));
                }
            }
        }
        steps.extend(self.links.iter().filter(|(_, link)| !link.is_empty()).map(|((a, b), _)| Step::Deliver(*a, *b)));
        steps.extend(self.acknowledgements.keys().map(|(owner, who)| Step::Acknowledge(*owner, *who)));
        steps
    }

    fn take(&mut self, step: Step, scenario: &Scenario) -> Result<(), Broken> {
        match step {
            Step::Deliver(from, to) => self.deliver(from, to)?,
            Step::Acknowledge(owner, who) => self.acknowledge(owner, who),
            Step::Run(pid, number) => self.run(pid, number, scenario),
            Step::ReleaseLoop(pid) => self.release_loop(pid),
            Step::GoOn(pid, which) => self.go_on(pid, which),
        }
        self.broken.take().map_or(Ok(()), Err)
    }

    /// When nothing happens any more, exactly what somebody holds is there, and nothing waits.
    fn rests(&self) -> Result<(), Broken> {
        for (pid, process) in &self.processes {
            if !process.tasks.is_empty() || !process.calls.is_empty() || !process.returned.is_empty() {
                return Err(format!("{pid} is not done: {process:?}"));
            }
            if !process.borrowing.is_idle() || !process.taken.is_empty() {
                return Err(format!("{pid} waits for ever: {process:?}"));
            }
            for (id, entry) in &process.table {
                let owner = &self.processes[&id.owner().0];
                if !owner.table.contains_key(id) {
                    return Err(format!("{pid} holds {id}, which was freed"));
                }
                let in_values = process.table.values().flat_map(|entry| entry.value.iter().flatten());
                let uses = process.kept.iter().chain(in_values).filter(|used| *used == id).count();
                if entry.handles as usize != uses {
                    return Err(format!("{pid} has {} handles of {id} and uses {uses}", entry.handles));
                }
                let borrowed =
                    self.processes.iter().any(|(other, process)| other != pid && process.table.contains_key(id));
                if uses == 0 && !(id.owner().0 == *pid && borrowed) {
                    return Err(format!("{pid} keeps {id} for nobody"));
                }
            }
        }
        Ok(())
    }
}

impl Process {
    fn forget_acknowledged(&mut self) {
        let known = &self.acknowledged;
        self.unacknowledged.retain(|owner, number| known.get(owner) < Some(&*number));
    }
}

fn fingerprint(world: &World) -> u64 {
    let mut hasher = DefaultHasher::new();
    world.hash(&mut hasher);
    hasher.finish()
}

/// Every interleaving. Answers with the number of states, or what broke.
fn explore(rule: Rule, scenario: &Scenario) -> Result<usize, Broken> {
    let mut seen = HashSet::new();
    let mut stack = vec![World::new(rule, scenario)];
    while let Some(mut world) = stack.pop() {
        let steps = world.steps(scenario);
        if !seen.insert(fingerprint(&world)) {
            continue;
        }
        if steps.is_empty() {
            world.rests()?;
        }
        for step in steps {
            let mut next = world.clone();
            next.take(step, scenario)?;
            stack.push(next);
        }
    }
    Ok(seen.len())
}

/// One interleaving, by chance.
fn walk(rule: Rule, scenario: &Scenario, seed: u64) -> Result<(), Broken> {
    let mut chance = DefaultHasher::new();
    seed.hash(&mut chance);
    let mut world = World::new(rule, scenario);
    loop {
        let steps = world.steps(scenario);
        if steps.is_empty() {
            return world.rests().map_err(|why| format!("seed {seed}: {why}"));
        }
        steps.len().hash(&mut chance);
        let step = steps[(chance.finish() % steps.len() as u64) as usize];
        world.take(step, scenario).map_err(|why| format!("seed {seed}: {why}"))?;
    }
}

/// More than the default in a release build.
fn seeds() -> u64 {
    std::env::var("WINGBEAT_SEEDS").map_or(1_000, |text| text.parse().unwrap())
}

fn scenario(tasks: impl IntoIterator<Item = (u64, Pid, Vec<Op>)>) -> Scenario {
    Scenario { tasks: tasks.into_iter().map(|(task, pid, ops)| (task, (pid, ops))).collect() }
}

fn call(task: u64, args: &[usize], into: usize) -> Op {
    Op::Call { task, args: args.to_vec(), into }
}

/// The driver's ref goes down through `levels` tasks, each in a process of its own; the innermost makes an object, and its ref
/// comes up through all of them.
fn down_and_up(levels: u64) -> Scenario {
    let driver =
        vec![Op::Make(0, vec![]), call(1, &[0], 10), Op::Await(1), Op::Drop(0), Op::Keep(10), Op::Return(vec![])];
    let mut tasks = vec![(0, 0, driver)];
    for level in 1..levels {
        let ops = vec![call(level + 1, &[0], 10), Op::Drop(0), Op::Await(level + 1), Op::Return(vec![10])];
        tasks.push((level, level, ops));
    }
    tasks.push((levels, levels, vec![Op::Make(10, vec![]), Op::Return(vec![10])]));
    scenario(tasks)
}

/// A ref of somebody else's is passed to an actor that keeps it, while the actor gives up another one.
fn kept_by_an_actor() -> Scenario {
    scenario([
        (
            0,
            0,
            vec![
                call(1, &[], 10),
                Op::Await(1),
                Op::Make(0, vec![]),
                call(2, &[10, 0], 20),
                Op::Drop(0),
                Op::Drop(10),
                Op::Await(2),
                Op::Return(vec![]),
            ],
        ),
        (1, 1, vec![Op::Make(10, vec![]), Op::Return(vec![10])]),
        (2, 2, vec![Op::Drop(1), Op::Keep(0), Op::Return(vec![])]),
    ])
}

/// An actor is passed the same ref again and again, and keeps the last.
fn borrowed_again_and_again() -> Scenario {
    scenario([
        (
            0,
            0,
            vec![
                Op::Make(0, vec![]),
                call(1, &[0], 10),
                Op::Await(1),
                call(2, &[0], 10),
                Op::Await(2),
                Op::Drop(0),
                Op::Return(vec![]),
            ],
        ),
        (1, 1, vec![Op::Drop(0), Op::Return(vec![])]),
        (2, 1, vec![Op::Keep(0), Op::Return(vec![])]),
    ])
}

/// A ref inside a value: one process owns the inner object, another the outer one; a third reads, keeps the inner ref and
/// drops the outer one.
fn nested() -> Scenario {
    scenario([
        (
            0,
            0,
            vec![
                call(1, &[], 10),
                Op::Await(1),
                Op::Make(0, vec![10]),
                Op::Drop(10),
                call(2, &[0], 20),
                Op::Drop(0),
                Op::Await(2),
                Op::Return(vec![]),
            ],
        ),
        (1, 1, vec![Op::Make(10, vec![]), Op::Return(vec![10])]),
        (2, 2, vec![Op::Read(0, 1), Op::Drop(0), Op::Keep(1), Op::Return(vec![])]),
    ])
}

/// As [`nested`], but the reader is passed the outer ref twice at the same time.
fn nested_and_passed_twice() -> Scenario {
    let mut scenario = nested();
    scenario.tasks.insert(
        0,
        (
            0,
            vec![
                call(1, &[], 10),
                Op::Await(1),
                Op::Make(0, vec![10]),
                Op::Drop(10),
                call(2, &[0], 20),
                call(3, &[0], 20),
                Op::Drop(0),
                Op::Await(2),
                Op::Await(3),
                Op::Return(vec![]),
            ],
        ),
    );
    scenario.tasks.insert(3, (2, vec![Op::Drop(0), Op::Return(vec![])]));
    scenario
}

/// The result of one call is passed to the next by a process in the middle, which keeps nothing.
fn handed_on() -> Scenario {
    scenario([
        (
            0,
            0,
            vec![Op::Make(0, vec![]), call(1, &[0], 10), Op::Await(1), Op::Drop(0), Op::Keep(10), Op::Return(vec![])],
        ),
        (
            1,
            1,
            vec![
                Op::Drop(0),
                call(2, &[], 10),
                Op::Await(2),
                call(3, &[10], 20),
                Op::Drop(10),
                Op::Await(3),
                Op::Return(vec![20]),
            ],
        ),
        (2, 2, vec![Op::Make(10, vec![]), Op::Return(vec![10])]),
        (3, 0, vec![Op::Return(vec![0])]),
    ])
}

#[test]
fn no_interleaving_of_a_few_processes_frees_what_somebody_holds_or_keeps_what_nobody_does() {
    let scenarios = [
        ("a ref down and another up through two", down_and_up(2)),
        ("kept by an actor", kept_by_an_actor()),
        ("borrowed again and again", borrowed_again_and_again()),
        ("nested", nested()),
        ("nested and passed twice", nested_and_passed_twice()),
        ("handed on", handed_on()),
    ];
    for (name, scenario) in scenarios {
        let states = explore(Rule::Numbers, &scenario).unwrap_or_else(|why| panic!("{name}: {why}"));
        println!("{name}: {states} states");
    }
}

/// 640,776 states: a minute in a release build.
#[test]
#[ignore = "a minute in a release build; smaller worlds of the same kind run by default"]
fn no_interleaving_of_four_processes_does_so() {
    let states = explore(Rule::Numbers, &down_and_up(3)).unwrap();
    println!("{states} states");
}

#[test]
fn no_interleaving_by_chance_does_so_in_larger_worlds() {
    let scenarios = [
        ("a ref down and another up through three", down_and_up(3)),
        ("through four", down_and_up(4)),
        ("nested and passed twice", nested_and_passed_twice()),
        ("handed on", handed_on()),
    ];
    for (name, scenario) in scenarios {
        for seed in 0..seeds() {
            walk(Rule::Numbers, &scenario, seed).unwrap_or_else(|why| panic!("{name}: {why}"));
        }
    }
}

/// That the world would find what was wrong: with the old rules it does.
#[test]
fn taking_the_list_of_what_is_not_acknowledged_loses_refs() {
    let lost = |scenario: &Scenario| (0..20_000).find_map(|seed| walk(Rule::Taking, scenario, seed).err());
    for (name, scenario) in [
        ("a ref down and another up through three", down_and_up(3)),
        ("kept by an actor", kept_by_an_actor()),
        ("borrowed again and again", borrowed_again_and_again()),
    ] {
        let why = lost(&scenario);
        println!("{name}: {why:?}");
        assert!(why.is_some_and(|why| why.contains("freed")), "{name} loses nothing");
    }
}

#[test]
fn an_owner_that_stands_still_delays_only_what_is_about_its_objects() {
    let (still, lively, receiver) = (process(1), process(2), process(3));
    let mut borrowing = Borrowing::<&str>::default();
    let (a, b) = (object(1, 1), object(2, 1));
    let first = borrowing.register(a);
    let second = borrowing.register(b);
    borrowing.take_unsent();
    assert_eq!(borrowing.confirm(receiver, [&a], "about a"), None);
    assert_eq!(borrowing.confirm(receiver, [&b], "about b"), None);
    assert_eq!(borrowing.confirm(receiver, [], "about nothing"), Some("about nothing"));
    assert_eq!(
        borrowing.confirm(still, [&a], "to the owner, after the registration"),
        Some("to the owner, after the registration")
    );
    let mut ready = Vec::new();
    borrowing.acknowledged(lively, second, &mut ready);
    assert_eq!(ready, [Ready::Message("about b")]);
    ready.clear();
    borrowing.release(b, second, [], &mut ready);
    assert_eq!(ready, [Ready::Release(b, second)]);
    ready.clear();
    // Whoever comes second waits as well.
    assert_eq!(borrowing.confirm(receiver, [&a], "about a again"), None);
    borrowing.acknowledged(still, first, &mut ready);
    assert_eq!(ready.len(), 2);
    assert!(borrowing.is_idle());
}

#[test]
fn what_waits_for_an_owner_that_is_gone_goes_on_and_nothing_of_it_is_kept() {
    let mut borrowing = Borrowing::<&str>::default();
    let a = object(1, 1);
    borrowing.register(a);
    borrowing.take_unsent();
    assert_eq!(borrowing.confirm(process(3), [&a], "about a"), None);
    let mut ready = Vec::new();
    assert_eq!(borrowing.gone(process(1), &mut ready), [a]);
    assert_eq!(ready, [Ready::Message("about a")]);
    assert!(borrowing.is_idle() && borrowing.owners.is_empty());
}

/// Its steward may answer for its objects, and must know of this process before whoever gave the ref lets go of it.
#[test]
fn what_concerns_an_owner_with_whom_contact_was_lost_waits_until_it_is_known_who_answers_for_it() {
    let mut borrowing = Borrowing::<&str>::default();
    let (owner, holder) = (process(1), process(2));
    let (a, outer, b) = (object(1, 1), object(2, 1), object(1, 2));
    let [_, of_outer, of_b] = [a, outer, b].map(|id| borrowing.register(id));
    borrowing.take_unsent();
    borrowing.acknowledged(holder, of_outer, &mut Vec::new());
    let mut ready = Vec::new();
    assert_eq!(borrowing.lost(owner, &mut ready), [a, b]);
    borrowing.release(outer, of_outer, [&a], &mut ready);
    assert_eq!(borrowing.confirm(process(3), [&b], "about b"), None);
    assert!(ready.is_empty(), "{ready:?}");
    borrowing.release(b, of_b, [], &mut ready);
    assert_eq!(ready, [Ready::Release(b, of_b), Ready::Message("about b")], "this process relies on it no more");
    ready.clear();
    // Contact was lost once more before that.
    borrowing.lost(owner, &mut ready);
    borrowing.settled(owner, &mut ready);
    assert!(ready.is_empty());
    borrowing.settled(owner, &mut ready);
    assert_eq!(ready, [Ready::Release(outer, of_outer)]);
    assert!(borrowing.is_idle() && borrowing.unsettled.is_empty());
}

#[test]
fn a_release_ends_the_registration_that_it_names_and_no_later_one() {
    let mut borrowers = Borrowers::default();
    borrowers.borrow(process(1), Registration(1));
    borrowers.borrow(process(1), Registration(2));
    assert!(!borrowers.release(process(1), Registration(1)));
    assert!(!borrowers.is_empty());
    assert!(borrowers.release(process(1), Registration(2)));
    assert!(borrowers.is_empty());
}

#[test]
fn many_nested_objects_are_released_without_deep_recursion() {
    let mut borrowing = Borrowing::<()>::default();
    // Each in the value of the one before, and all of them with different owners: every release waits for the next.
    let objects: Vec<(ObjectId, Registration)> = (1..=100_000)
        .map(|owner| {
            let id = object(owner, 1);
            (id, borrowing.register(id))
        })
        .collect();
    borrowing.take_unsent();
    let mut ready = Vec::new();
    for pair in objects.windows(2) {
        borrowing.release(pair[0].0, pair[0].1, [&pair[1].0], &mut ready);
    }
    assert!(ready.is_empty());
    let (last, number) = objects[objects.len() - 1];
    borrowing.release(last, number, [], &mut ready);
    assert_eq!(ready.len(), objects.len());
    assert!(borrowing.is_idle() && borrowing.owners.is_empty());
}

#[test]
fn what_waited_for_a_ref_that_is_held_no_more_waits_for_the_refs_in_its_value() {
    let (outer, middle, inner) = (object(1, 1), object(2, 1), object(2, 2));
    let mut borrowing = Borrowing::<Message>::default();
    let mut ready = Vec::new();
    let registered = |borrowing: &mut Borrowing<Message>, id: ObjectId| {
        let number = borrowing.register(id);
        borrowing.take_unsent();
        borrowing.ask(id.owner());
        number
    };
    let first = registered(&mut borrowing, outer);
    borrowing.acknowledged(process(1), first, &mut ready);
    let second = registered(&mut borrowing, middle);
    // Its value came before that was acknowledged: from a steward, which was asked first.
    let third = registered(&mut borrowing, inner);
    borrowing.release(outer, first, &[middle], &mut ready);
    assert_eq!(ready, []);
    borrowing.release(middle, second, &[inner], &mut ready);
    assert_eq!(ready, [Ready::Release(middle, second)], "it is behind the others on its link");
    ready.clear();
    borrowing.acknowledged(process(2), second, &mut ready);
    assert_eq!(ready, [], "the value of the outer one may be all that keeps the inner one");
    borrowing.acknowledged(process(2), third, &mut ready);
    assert_eq!(ready, [Ready::Release(outer, first)]);
}
