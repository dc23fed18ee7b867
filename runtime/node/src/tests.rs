//! A node between a random head and a random machine.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use wingbeat_core::error::Error;
use wingbeat_core::memory::{EndedBy, MemoryShortage, MemoryUsage};
use wingbeat_core::spec::{Address, Executable, JobSpec, MachineId, Shape};
use wingbeat_core::{Amount, JobId, LeaseId, NodeId, ProcessId, ResourceSet};
use wingbeat_net::messages::{HeadMessage, LeaseHolder, LeaseStart, NodeMessage, WorkerCommand};

use super::memory::Work;
use super::*;

const HEAD: ProcessId = ProcessId(1);
const JOB: JobId = JobId(1);

fn address(process: ProcessId) -> Address {
    Address { process, machine: MachineId(1), unix: String::new(), tcp: None, steward: None }
}

fn job() -> Arc<JobSpec> {
    Arc::new(JobSpec {
        id: JOB,
        name: "test".into(),
        driver: address(ProcessId(2)),
        executable: Executable::default(),
        working_dir: String::new(),
        env: BTreeMap::new(),
        local_env: BTreeMap::new(),
        namespace: String::new(),
        priority: 0,
    })
}

fn lease(number: u64, device: Option<u32>) -> NodeMessage {
    NodeMessage::StartLease(Box::new(LeaseStart {
        lease: LeaseId(number),
        job: JOB,
        resources: ResourceSet::new(),
        gpus: device.map(|device| (device, Amount::whole(1))).into_iter().collect(),
        bundle: None,
        captures: None,
        holder: LeaseHolder::Tasks(ProcessId(2), Arc::new(Shape::default())),
    }))
}

fn node() -> State {
    let mut state =
        State::new(Config { node: NodeId(1), cpus: 1, idle: 100, start: 1_000, first_process: ProcessId(1_000) });
    assert!(matches!(state.step(0, says(NodeMessage::BeginJob(job())))[..], [Action::BeginJob(_)]));
    state
}

fn says(message: NodeMessage) -> Event {
    Event::Says(HEAD, message)
}

fn kill(lease: u64) -> Event {
    says(NodeMessage::EndLease { lease: LeaseId(lease), kill: Some("the test".into()) })
}

fn reported(process: ProcessId) -> Event {
    Event::Reported { process, address: address(process), pid: 7 }
}

fn exited(process: ProcessId) -> Event {
    Event::Exited { process, code: None, signal: Some(9) }
}

fn rest_read(process: ProcessId) -> Event {
    Event::RestRead { process, stderr: Vec::new(), started: 0 }
}

/// A node with one worker process that serves lease 1.
fn serving(device: Option<u32>) -> (State, ProcessId) {
    let mut state = node();
    let [Action::Launch { process, .. }] = state.step(1, says(lease(1, device)))[..] else { panic!("it is launched") };
    assert!(state.is_wanted(process));
    assert!(state.step(2, Event::HandedToGuard(process)).is_empty());
    assert!(state.step(3, Event::Started { process, pid: 7 }).is_empty());
    let [Action::Order { then: Some(HeadMessage::LeaseReady { lease: LeaseId(1), pid: 7, .. }), .. }] =
        &state.step(4, reported(process))[..]
    else {
        panic!("it gets its orders")
    };
    (state, process)
}

/// Another worker process there, which serves lease 2.
fn another(state: &mut State) -> ProcessId {
    let [Action::Launch { process, .. }] = state.step(5, says(lease(2, None)))[..] else { panic!("it is launched") };
    state.step(6, Event::HandedToGuard(process));
    state.step(7, reported(process));
    process
}

#[test]
fn a_process_that_is_told_to_die_before_the_guard_has_it_is_never_wanted_again() {
    let mut state = node();
    let [Action::Launch { process, .. }] = state.step(1, says(lease(1, None)))[..] else { panic!("it is launched") };
    let actions = state.step(2, kill(1));
    assert!(
        matches!(actions[..], [Action::ToHead(HeadMessage::LeaseEnded(LeaseId(1))), Action::Forget(forgotten)] if forgotten == process)
    );
    assert!(!state.is_wanted(process));
    assert!(state.step(3, reported(process)).is_empty());
}

#[test]
fn a_process_that_was_asked_to_exit_meets_no_lease() {
    let (mut state, first) = serving(None);
    let second = another(&mut state);
    for lease in [1, 2] {
        state.step(8, says(NodeMessage::EndLease { lease: LeaseId(lease), kill: None }));
    }
    // One more than there are CPUs, and for long.
    let [Action::Tell(asked, WorkerCommand::Exit)] = state.step(200, Event::Tick)[..] else {
        panic!("nobody is asked")
    };
    for lease_number in [3, 4] {
        let actions = state.step(201, says(lease(lease_number, None)));
        let to = match actions[..] {
            [Action::Order { process, .. }] | [Action::Launch { process, .. }] => process,
            _ => panic!("{actions:?}"),
        };
        assert_ne!(to, asked);
        assert!(to == first || to == second || lease_number == 4);
    }
}

#[test]
fn a_process_in_which_a_task_has_left_something_takes_no_other_lease() {
    let (mut state, first) = serving(None);
    let says_left = |is_left| Event::Says(first, NodeMessage::LeftBehind(is_left));
    state.step(5, says_left(true));
    state.step(6, says(NodeMessage::EndLease { lease: LeaseId(1), kill: None }));
    let [Action::Launch { process: second, .. }] = state.step(7, says(lease(2, None)))[..] else {
        panic!("it goes where something is left behind")
    };
    assert_ne!(second, first);
    assert!(state.step(8, says_left(false)).is_empty());
    let [Action::Order { process, .. }] = state.step(9, says(lease(3, None)))[..] else {
        panic!("the process is not used again")
    };
    assert_eq!(process, first);
}

#[test]
fn a_process_that_can_serve_nobody_is_asked_to_exit_and_others_are_kept_in_its_place() {
    let (mut state, first) = serving(None);
    another(&mut state);
    state.step(8, Event::Says(first, NodeMessage::LeftBehind(true)));
    for lease in [1, 2] {
        state.step(9, says(NodeMessage::EndLease { lease: LeaseId(lease), kill: None }));
    }
    // As many as there are CPUs are kept: not the older one, in which a task goes on that was given up.
    let asked = state.step(200, Event::Tick);
    assert!(matches!(asked[..], [Action::Tell(process, WorkerCommand::Exit)] if process == first), "{asked:?}");
}

#[test]
fn a_head_that_is_started_again_is_told_who_has_ended_as_long_as_the_job_goes_on() {
    let (mut state, process) = serving(None);
    assert_eq!(state.running().ended, []);
    state.step(5, exited(process));
    let actions = state.step(6, rest_read(process));
    let of = actions.iter().find_map(|action| match action {
        Action::ToHead(HeadMessage::WorkerDied(death)) => Some((death.process, death.job)),
        _ => None,
    });
    assert_eq!(of, Some((process, JOB)));
    assert_eq!(state.running().ended, [(process, JOB)]);
    state.step(7, says(NodeMessage::EndJob { job: JOB }));
    assert_eq!(state.running().ended, []);
}

/// Others may be about to say that they refer to what it owns.
#[test]
fn a_process_that_leaves_is_ended_for_memory_only_if_it_was_found_to_do_so_for_too_long() {
    let memory = |process, is_leaving| {
        let usage = MemoryUsage::default();
        let shortage =
            MemoryShortage { node: NodeId(1), hostname: "here".into(), by: EndedBy::Node, usage, largest: Vec::new() };
        Event::MemoryRanOut { process, lease: None, is_leaving, shortage: Box::new(shortage) }
    };
    let (mut state, process) = serving(None);
    state.step(5, says(NodeMessage::EndLease { lease: LeaseId(1), kill: None }));
    let works = |state: &State| state.users_of_memory().map(|(user, _)| user.work).collect::<Vec<_>>();
    assert_eq!(works(&state), [Work::Idle]);
    assert!(state.step(6, memory(process, true)).is_empty(), "it stays by now");
    let asked = state.step(7, memory(process, false));
    assert!(matches!(asked[..], [Action::Tell(_, WorkerCommand::Exit)]));
    assert_eq!(works(&state), [Work::Leaving]);
    assert!(state.step(8, memory(process, false)).is_empty(), "it was idle when it was looked at");
    assert!(!state.is_ending_for_memory());
    assert!(matches!(state.step(9, memory(process, true))[..], [Action::Kill(killed)] if killed == process));
    assert!(state.is_ending_for_memory());
}

#[test]
fn a_lease_of_devices_ends_when_they_are_free_and_until_then_somebody_has_them() {
    let (mut state, process) = serving(Some(3));
    // Not asked to kill it, but its devices cannot be taken from it otherwise.
    let over = says(NodeMessage::EndLease { lease: LeaseId(1), kill: None });
    assert!(matches!(state.step(5, over)[..], [Action::Kill(killed)] if killed == process));
    assert!(matches!(state.step(6, exited(process))[..], [Action::ReadRest(read)] if read == process));
    assert!(state.is_used(3));
    let actions = state.step(7, rest_read(process));
    let [Action::ToHead(HeadMessage::WorkerDied(death)), Action::FreeDevices { gpus, .. }, Action::Forget(_)] =
        &actions[..]
    else {
        panic!("{actions:?}")
    };
    assert_eq!((death.lease, &gpus[..]), (Some(LeaseId(1)), &[3][..]));
    assert!(!state.is_used(3), "nobody uses it any more; whether it is free, is looked at");
    let [running] = &state.running().leases[..] else { panic!("a head that asks must not give the device to others") };
    assert!(running.is_ending);
    assert!(state.step(8, kill(1)).is_empty(), "its end will be reported");
    assert!(matches!(
        state.step(9, Event::DevicesFree(process))[..],
        [Action::ToHead(HeadMessage::LeaseEnded(LeaseId(1)))]
    ));
    assert!(state.running().leases.is_empty());
}

#[test]
fn a_process_that_does_not_take_its_orders_is_ended_and_one_that_has_is_not() {
    let (mut state, process) = serving(None);
    // What it says late of another lease is not of this one.
    state.step(5, Event::OrdersTaken { process, lease: LeaseId(9) });
    assert!(state.step(1_004, Event::Tick).is_empty());
    assert!(matches!(state.step(1_005, Event::Tick)[..], [Action::Kill(_)]));
    state.step(1_006, exited(process));
    let actions = state.step(1_007, rest_read(process));
    let [Action::ToHead(HeadMessage::WorkerDied(death)), ..] = &actions[..] else { panic!("{actions:?}") };
    assert_eq!(death.exit.reason.as_deref(), Some("it did not take its orders within 1 s"));

    let (mut state, process) = serving(None);
    state.step(5, Event::OrdersTaken { process, lease: LeaseId(1) });
    assert!(state.step(10_000, Event::Tick).is_empty());
}

#[test]
fn a_process_that_never_reports_is_ended_and_its_lease_fails() {
    let mut state = node();
    let [Action::Launch { process, .. }] = state.step(1, says(lease(1, None)))[..] else { panic!("it is launched") };
    state.step(2, Event::HandedToGuard(process));
    assert!(state.step(1_002, Event::Tick).is_empty());
    assert!(matches!(state.step(1_003, Event::Tick)[..], [Action::Kill(_)]));
    state.step(1_004, exited(process));
    let actions = state.step(1_005, rest_read(process));
    let [Action::ToHead(HeadMessage::LeaseFailed { error, .. }), Action::Forget(_)] = &actions[..] else {
        panic!("{actions:?}")
    };
    assert!(error.to_string().contains("did not report"), "{error}");
}

#[test]
fn a_job_that_is_over_takes_its_processes_along_and_another_lease_of_it_fails() {
    let (mut state, process) = serving(None);
    let actions = state.step(5, says(NodeMessage::EndJob { job: JOB }));
    assert!(matches!(actions[..], [Action::Kill(killed), Action::ForgetJob(JOB)] if killed == process));
    let actions = state.step(6, says(lease(2, None)));
    assert!(matches!(actions[..], [Action::ToHead(HeadMessage::LeaseFailed { lease: LeaseId(2), .. })]));
}

/// What the machine around a node is yet to do or say.
#[derive(Default)]
struct Machine {
    /// To be handed to the guard, or to fail.
    launching: Vec<ProcessId>,
    /// Started, and not dead.
    alive: BTreeSet<ProcessId>,
    reported: BTreeSet<ProcessId>,
    /// Told to exit, and to answer.
    asked: BTreeSet<ProcessId>,
    dead: Vec<ProcessId>,
    to_read: Vec<ProcessId>,
    to_free: Vec<ProcessId>,
    /// Of which lease a process has orders.
    orders: BTreeMap<ProcessId, LeaseId>,
    ended: BTreeSet<LeaseId>,
    forgotten: BTreeSet<ProcessId>,
}

impl Machine {
    fn does(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Launch { process, .. } => self.launching.push(process),
                Action::Kill(process) => {
                    assert!(self.alive.remove(&process), "{process} is not alive");
                    self.dead.push(process);
                }
                Action::Order { process, command: WorkerCommand::Lease { lease, .. }, .. } => {
                    assert!(self.reported.contains(&process));
                    assert!(!self.asked.contains(&process), "{process} was asked to exit, and gets {lease}");
                    self.orders.insert(process, lease);
                }
                Action::Tell(process, WorkerCommand::Exit) => drop(self.asked.insert(process)),
                Action::ReadRest(process) => self.to_read.push(process),
                Action::FreeDevices { process, .. } => self.to_free.push(process),
                Action::Forget(process) => assert!(self.forgotten.insert(process)),
                Action::ToHead(HeadMessage::LeaseEnded(lease) | HeadMessage::LeaseFailed { lease, .. }) => {
                    assert!(self.ended.insert(lease), "{lease} ends twice");
                }
                Action::ToHead(HeadMessage::WorkerDied(_)) | Action::Warn(_) => {}
                other => panic!("{other:?}"),
            }
        }
    }

    fn dies(&mut self, process: ProcessId) {
        self.alive.remove(&process);
        self.dead.push(process);
    }
}

/// One of some, by chance.
fn taken<T>(random: &mut StdRng, from: &mut Vec<T>) -> Option<T> {
    (!from.is_empty()).then(|| from.swap_remove(random.random_range(0..from.len())))
}

fn one_of(random: &mut StdRng, from: &BTreeSet<ProcessId>) -> Option<ProcessId> {
    (!from.is_empty()).then(|| from.iter().nth(random.random_range(0..from.len())).copied()).flatten()
}

/// Whatever the head says and the machine does, every lease ends exactly once when it was ended or its process has, and at
/// the end nothing is left.
#[test]
fn every_lease_that_is_over_is_said_to_be_exactly_once() {
    for seed in 0..300 {
        let mut random = StdRng::seed_from_u64(seed);
        let (mut state, mut machine) = (node(), Machine::default());
        let mut open: BTreeSet<LeaseId> = BTreeSet::new();
        let mut devices: BTreeSet<u32> = (0..4).collect();
        let mut held: BTreeMap<LeaseId, u32> = BTreeMap::new();
        let mut next = 0;
        for now in 10..1_500 {
            let is_winding_down = now > 500;
            let event = match random.random_range(0..14) {
                0 | 1 if !is_winding_down => {
                    next += 1;
                    open.insert(LeaseId(next));
                    let device = random.random::<bool>().then(|| devices.pop_first()).flatten();
                    device.map(|device| held.insert(LeaseId(next), device));
                    Some(says(lease(next, device)))
                }
                2 => {
                    let lease = open.iter().nth(random.random_range(0..open.len().max(1))).copied();
                    let kill = random.random::<bool>().then(|| "the test".to_owned());
                    lease.filter(|lease| open.remove(lease)).map(|lease| says(NodeMessage::EndLease { lease, kill }))
                }
                3 => taken(&mut random, &mut machine.launching).and_then(|process| {
                    if !state.is_wanted(process) {
                        return None;
                    }
                    if random.random_range(0..20) == 0 {
                        return Some(Event::NotStarted { process, error: Error::NoSession });
                    }
                    machine.alive.insert(process);
                    Some(Event::HandedToGuard(process))
                }),
                4 | 5 => {
                    let silent = &machine.alive - &machine.reported;
                    one_of(&mut random, &silent).map(|process| {
                        machine.reported.insert(process);
                        reported(process)
                    })
                }
                6 if random.random_range(0..10) == 0 => one_of(&mut random, &machine.alive).map(|process| {
                    machine.dies(process);
                    exited(process)
                }),
                7 => taken(&mut random, &mut machine.dead).map(exited),
                8 => taken(&mut random, &mut machine.to_read).map(rest_read),
                9 => taken(&mut random, &mut machine.to_free).map(Event::DevicesFree),
                10 => machine.asked.pop_first().filter(|asked| machine.alive.contains(asked)).map(|process| {
                    if random.random() {
                        return Event::Says(process, NodeMessage::Stays);
                    }
                    machine.dies(process);
                    exited(process)
                }),
                11 if random.random_range(0..20) == 0 => {
                    one_of(&mut random, &machine.alive).map(|process| Event::Says(process, NodeMessage::LostHead))
                }
                12 if random.random_range(0..5) == 0 => one_of(&mut random, &machine.alive)
                    .map(|process| Event::Says(process, NodeMessage::LeftBehind(random.random()))),
                13 => machine.orders.pop_first().map(|(process, lease)| Event::OrdersTaken { process, lease }),
                _ => Some(Event::Tick),
            };
            let Some(event) = event else { continue };
            // Its end has been seen once: what the guard says of it again means nothing.
            let actions = state.step(now * 20, event);
            machine.does(actions);
            for lease in &machine.ended {
                held.remove(lease).map(|device| devices.insert(device));
                open.remove(lease);
            }
        }
        // What nobody has ended yet ends with the job.
        let mut actions = state.step(100_000, says(NodeMessage::EndJob { job: JOB }));
        actions.retain(|action| !matches!(action, Action::ForgetJob(_)));
        machine.does(actions);
        for round in 0..2 {
            for process in std::mem::take(&mut machine.dead) {
                machine.does(state.step(100_001 + round, exited(process)));
            }
            for process in std::mem::take(&mut machine.to_read) {
                machine.does(state.step(100_001 + round, rest_read(process)));
            }
            for process in std::mem::take(&mut machine.to_free) {
                machine.does(state.step(100_001 + round, Event::DevicesFree(process)));
            }
        }
        assert_eq!(machine.ended, (1..=next).map(LeaseId).collect(), "seed {seed}: leases without an end");
        assert_eq!(state.processes().count() + state.running().leases.len(), 0, "seed {seed}: something is left");
    }
}
