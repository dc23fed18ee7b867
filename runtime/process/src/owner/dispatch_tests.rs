use std::collections::BTreeMap;

use wingbeat_core::JobId;
use wingbeat_core::memory::{EndedBy, MemoryShortage};
use wingbeat_core::spec::{Arg, Exit, MachineId};
use wingbeat_core::value::Stored;
use wingbeat_core::{Amount, FunctionId, ResourceSet};
use wingbeat_net::messages::WorkerDeath;

use super::*;
use crate::owner::retrying::UNLIMITED;

fn shape() -> Arc<Shape> {
    Arc::new(Shape::of(ResourceSet::cpus(Amount::ONE)))
}

pub(super) fn task(seq: u64) -> Task {
    let spec = TaskSpec {
        id: TaskId { owner: ProcessId(1), seq },
        function: FunctionId(1),
        name: None,
        args: Vec::new(),
        outputs: Outputs::Fixed(1),
        attempt: 0,
        remakes: false,
        yields_memory: false,
        shares_process: false,
        group: None,
        parent: None,
    };
    Task {
        spec: Arc::new(spec),
        shape: shape(),
        name: Name::Path("task"),
        retries: 3,
        failures: 0,
        memory_retries: MemoryRetries::of(2, 3),
        retry_on: RetryOn::Nothing,
        cancelled: false,
        remaking: None,
        held: Default::default(),
        bytes: Default::default(),
    }
}

pub(super) fn id(seq: u64) -> TaskId {
    TaskId { owner: ProcessId(1), seq }
}

pub(super) fn grant(lease: u64) -> Grant {
    Grant {
        shape: shape(),
        lease: LeaseId(lease),
        worker: Address {
            process: ProcessId(100 + lease),
            machine: MachineId(1),
            unix: String::new(),
            tcp: None,
            steward: None,
        },
        node: node(),
        pid: 1,
    }
}

fn node() -> StoreNode {
    let address =
        Address { process: ProcessId(99), machine: MachineId(1), unix: String::new(), tcp: None, steward: None };
    StoreNode { node: NodeId(1), address }
}

/// What the actions say, in short.
#[derive(Default)]
pub(super) struct Said {
    pub pushed: BTreeMap<u64, Vec<u64>>,
    pub wanted: Option<u32>,
    pub returned: Vec<u64>,
    pub abandoned: Vec<u64>,
    pub taken_back: Vec<(u64, u32)>,
    pub failed: Vec<(u64, Error)>,
    /// What an attempt that does not count may have stored.
    pub left: Vec<u64>,
    pub stopped: Vec<u64>,
    pub offers_home: bool,
}

pub(super) fn said(out: Vec<Action>) -> Said {
    let mut said = Said::default();
    for action in out {
        match action {
            Action::Push { lease, tasks, .. } => {
                said.pushed.entry(lease.0).or_default().extend(tasks.iter().map(|task| task.id.seq));
            }
            Action::Demand { wanted, .. } => said.wanted = Some(wanted),
            Action::Return { lease } => said.returned.push(lease.0),
            Action::Abandon { lease } => said.abandoned.push(lease.0),
            Action::TakeBack { lease, most, .. } => said.taken_back.push((lease.0, most)),
            Action::Cancel { .. } => {}
            Action::Left { task, at, .. } => {
                assert_eq!(at, node());
                said.left.push(task.seq);
            }
            Action::Fail { task, error } => said.failed.push((task.spec.id.seq, error)),
            Action::CancelAtHome { task, .. } => said.stopped.push(task.seq),
            Action::AtHome => said.offers_home = true,
            Action::ArgumentLost { .. } => {}
        }
    }
    said
}

fn submitted(count: u64) -> Dispatch {
    let mut dispatch = Dispatch::default();
    let mut out = Vec::new();
    for seq in 0..count {
        dispatch.submit(task(seq), &mut out);
    }
    dispatch
}

pub(super) fn settle(dispatch: &mut Dispatch, now: u64) -> Said {
    let mut out = Vec::new();
    dispatch.settle(now, &mut out);
    said(out)
}

fn finish(dispatch: &mut Dispatch, lease: u64, seq: u64, nanos: u64, now: u64) -> Settled {
    dispatch.finished(ProcessId(100 + lease), id(seq), None, nanos, now, &mut Vec::new())
}

pub(super) fn death(lease: u64, started: u64) -> WorkerDeath {
    WorkerDeath {
        process: ProcessId(100 + lease),
        pid: 1,
        job: JobId(1),
        node: NodeId(1),
        lease: Some(LeaseId(lease)),
        exit: Exit { code: None, signal: Some(9), stderr: Vec::new(), reason: None, memory: None },
        started,
        is_moved: false,
    }
}

#[test]
fn tasks_of_unknown_length_go_one_at_a_time_and_short_ones_ahead_of_need() {
    let mut dispatch = submitted(5000);
    assert_eq!(settle(&mut dispatch, 0).wanted, Some(8192.min(WANTED_LIMIT as u32)));
    dispatch.granted(grant(1), 0, &mut Vec::new());
    assert_eq!(settle(&mut dispatch, 0).pushed[&1], [0]);
    assert!(matches!(finish(&mut dispatch, 1, 0, 500, 1), Settled::Done(_)));
    let ahead = settle(&mut dispatch, 1).pushed[&1].len();
    assert!(ahead > 1000 && ahead <= AHEAD_TASKS, "{ahead}");
}

#[test]
fn long_tasks_are_dealt_one_to_a_lease() {
    let mut dispatch = submitted(4);
    for lease in 1..=2 {
        dispatch.granted(grant(lease), 0, &mut Vec::new());
    }
    let first = settle(&mut dispatch, 0);
    assert_eq!((first.pushed[&1].len(), first.pushed[&2].len()), (1, 1));
    finish(&mut dispatch, 1, first.pushed[&1][0], 50_000_000, 50);
    assert_eq!(settle(&mut dispatch, 50).pushed[&1].len(), 1);
}

/// A lease on which tasks have taken no time, and which now has one task that does not end.
fn stuck_behind(lease: u64) -> Dispatch {
    let mut dispatch = submitted(100);
    dispatch.granted(grant(lease), 0, &mut Vec::new());
    settle(&mut dispatch, 0);
    for seq in 0..100 {
        finish(&mut dispatch, lease, seq, 1_000, 0);
        settle(&mut dispatch, 0);
    }
    dispatch.submit(task(100), &mut Vec::new());
    assert_eq!(settle(&mut dispatch, 10).pushed[&lease], [100]);
    dispatch
}

#[test]
fn what_stands_behind_a_task_that_does_not_end_starts_elsewhere() {
    let mut dispatch = stuck_behind(1);
    dispatch.submit(task(101), &mut Vec::new());
    let said = settle(&mut dispatch, 10);
    assert_eq!((&said.pushed[&1], said.wanted), (&vec![101], None), "they are short as a rule");
    // Whoever has it run is told when to look again, as soon as it has sent them.
    assert_eq!(dispatch.next_tick(10), Some(STUCK_MS));
    dispatch.tick(10 + STUCK_MS, &mut Vec::new());
    assert_eq!(settle(&mut dispatch, 10 + STUCK_MS).wanted, Some(2));
    dispatch.granted(grant(2), 31, &mut Vec::new());
    assert_eq!(settle(&mut dispatch, 31).taken_back, [(1, 1)]);
}

#[test]
fn nothing_more_goes_behind_a_task_that_has_run_for_long() {
    let mut dispatch = stuck_behind(1);
    dispatch.submit(task(101), &mut Vec::new());
    let said = settle(&mut dispatch, 10 + STUCK_MS);
    assert!(said.pushed.is_empty());
    assert_eq!(said.wanted, Some(2));
    finish(&mut dispatch, 1, 100, 30_000_000, 40);
    assert_eq!(settle(&mut dispatch, 40).pushed[&1], [101], "unless it ends first");
}

#[test]
fn an_idle_lease_takes_what_a_busy_one_has_not_started() {
    let mut dispatch = submitted(9);
    dispatch.granted(grant(1), 0, &mut Vec::new());
    settle(&mut dispatch, 0);
    finish(&mut dispatch, 1, 0, 1_000, 0);
    assert_eq!(settle(&mut dispatch, 0).pushed[&1].len(), 8);
    dispatch.granted(grant(2), 10, &mut Vec::new());
    assert_eq!(settle(&mut dispatch, 10).taken_back, [(1, 4)]);
    dispatch.gave_back(LeaseId(1), &[id(5), id(6), id(7), id(8)], false, 11, &mut Vec::new());
    assert_eq!(settle(&mut dispatch, 11).pushed[&2], [5, 6, 7, 8]);
}

#[test]
fn a_killed_process_costs_an_attempt_only_for_what_it_had_started() {
    let mut dispatch = submitted(4);
    dispatch.granted(grant(1), 0, &mut Vec::new());
    settle(&mut dispatch, 0);
    finish(&mut dispatch, 1, 0, 1_000, 0);
    assert_eq!(settle(&mut dispatch, 0).pushed[&1], [1, 2, 3]);
    // Task 1 had been started (its number on the lease is 1, so `started` is 2).
    let mut out = Vec::new();
    dispatch.worker_died(death(1, 2), 0, &mut out);
    dispatch.connection_lost(ProcessId(101), 1, &mut out);
    let said = said(out);
    assert!(said.failed.is_empty());
    assert_eq!(said.left, [1], "only what was started may have stored something");
    dispatch.granted(grant(2), 2, &mut Vec::new());
    let mut order = Vec::new();
    while order.len() < 3 {
        let said = settle(&mut dispatch, 2);
        for seq in said.pushed[&2].clone() {
            order.push(seq);
            let Settled::Done(task) = finish(&mut dispatch, 2, seq, 1_000, 3) else { panic!("{seq} is not done") };
            assert_eq!((task.spec.attempt, task.retries), if seq == 1 { (1, 2) } else { (0, 3) });
        }
    }
    assert_eq!(order, [1, 2, 3]);
}

#[test]
fn results_on_their_way_count_before_the_loss_does() {
    let mut dispatch = submitted(1);
    dispatch.granted(grant(1), 0, &mut Vec::new());
    settle(&mut dispatch, 0);
    // The news of the death overtakes the result.
    dispatch.worker_died(death(1, 1), 0, &mut Vec::new());
    assert!(matches!(finish(&mut dispatch, 1, 0, 1_000, 1), Settled::Done(_)));
    let mut out = Vec::new();
    dispatch.connection_lost(ProcessId(101), 2, &mut out);
    assert!(said(out).failed.is_empty());
}

#[test]
fn a_task_without_attempts_left_fails_with_the_cause() {
    let mut dispatch = Dispatch::default();
    let mut only = task(0);
    only.retries = 0;
    dispatch.submit(only, &mut Vec::new());
    dispatch.granted(grant(1), 0, &mut Vec::new());
    settle(&mut dispatch, 0);
    let mut out = Vec::new();
    dispatch.connection_lost(ProcessId(101), 1, &mut out);
    dispatch.worker_died(death(1, 1), 0, &mut out);
    let failed = said(out).failed;
    assert!(matches!(&failed[..], [(0, Error::WorkerCrashed { exit, .. })] if exit.signal == Some(9)));
}

/// The end of a worker process for which memory was short.
fn end_for_memory(lease: u64) -> WorkerDeath {
    let shortage = MemoryShortage {
        node: NodeId(1),
        hostname: "here".into(),
        by: EndedBy::Node,
        usage: Default::default(),
        largest: Vec::new(),
    };
    let death = death(lease, 1);
    WorkerDeath { exit: Exit { memory: Some(Box::new(shortage)), ..death.exit }, ..death }
}

#[test]
fn a_task_that_was_ended_for_want_of_memory_rests_and_has_retries_of_its_own() {
    let mut dispatch = submitted(1);
    let mut now = 0;
    for (lease, pause) in [(1, 500), (2, 1_000)] {
        dispatch.granted(grant(lease), now, &mut Vec::new());
        assert_eq!(settle(&mut dispatch, now).pushed[&lease], [0]);
        let mut out = Vec::new();
        dispatch.connection_lost(ProcessId(100 + lease), now, &mut out);
        dispatch.worker_died(end_for_memory(lease), now, &mut out);
        assert!(said(out).failed.is_empty());
        let (_, standing) = dispatch.standing(id(0)).unwrap();
        assert!(
            matches!(standing, DispatchStanding::Resting { why, pause_ms } if why.contains("memory ran out") && pause_ms == pause)
        );
        assert!(!dispatch.is_done());
        assert_eq!(dispatch.next_tick(now), Some(pause));
        dispatch.tick(now + pause - 1, &mut Vec::new());
        assert!(settle(&mut dispatch, now).wanted.is_none_or(|wanted| wanted == 0), "it rests");
        now += pause;
        dispatch.tick(now, &mut Vec::new());
        assert_eq!(settle(&mut dispatch, now).wanted, Some(1));
        let again = &dispatch.queues.values().next().unwrap().ready[0];
        assert_eq!((again.retries, u64::from(again.spec.attempt)), (3, lease));
        assert_eq!(again.spec.yields_memory, lease == 1, "without retries left, it is ended last");
    }
    dispatch.granted(grant(3), now, &mut Vec::new());
    settle(&mut dispatch, now);
    let mut out = Vec::new();
    dispatch.connection_lost(ProcessId(103), now, &mut out);
    dispatch.worker_died(end_for_memory(3), now, &mut out);
    assert!(matches!(&said(out).failed[..], [(0, Error::OutOfMemory { .. })]));
}

#[test]
fn a_task_that_rests_can_be_cancelled_and_ends_with_the_session() {
    let mut dispatch = submitted(2);
    for lease in [1, 2] {
        dispatch.granted(grant(lease), 0, &mut Vec::new());
    }
    settle(&mut dispatch, 0);
    for lease in [1, 2] {
        dispatch.connection_lost(ProcessId(100 + lease), 0, &mut Vec::new());
        dispatch.worker_died(end_for_memory(lease), 0, &mut Vec::new());
    }
    let mut wanted = Wanted::default();
    wanted.insert(id(0), false);
    let mut out = Vec::new();
    dispatch.cancel(&mut wanted, &mut out);
    assert!(matches!(&said(out).failed[..], [(0, Error::Cancelled { .. })]));
    let mut out = Vec::new();
    dispatch.end(&Error::NoSession, &mut out);
    assert!(matches!(&said(out).failed[..], [(1, Error::NoSession)]));
    assert!(dispatch.is_done());
}

#[test]
fn a_task_that_is_moved_begins_again_at_no_cost_as_another_attempt_and_leaves_nothing_behind() {
    let mut dispatch = submitted(1);
    let mut out = Vec::new();
    dispatch.granted(grant(1), 0, &mut out);
    dispatch.settle(0, &mut out);
    let retries = dispatch.leases.get(LeaseId(1)).unwrap().in_flight[0].1.retries;
    out.clear();
    dispatch.connection_lost(ProcessId(101), 1, &mut out);
    dispatch.worker_died(WorkerDeath { is_moved: true, ..death(1, 1) }, 0, &mut out);
    assert!(out.iter().any(|action| matches!(action, Action::Left { .. })), "what it had stored is deleted");
    let queue = dispatch.queues.values().next().unwrap();
    let again = &queue.ready[0];
    assert_eq!((again.retries, again.spec.attempt), (retries, 1));
}

#[test]
fn a_task_that_was_moved_has_not_failed_where_its_node_is_gone_before_its_connection_is() {
    let mut dispatch = submitted(1);
    dispatch.granted(grant(1), 0, &mut Vec::new());
    settle(&mut dispatch, 0);
    let mut out = Vec::new();
    dispatch.worker_died(WorkerDeath { is_moved: true, ..death(1, 1) }, 0, &mut out);
    dispatch.node_died(NodeId(1), "it was drained (new kernel)", 0, &mut out);
    dispatch.connection_lost(ProcessId(101), 1, &mut out);
    assert!(said(out).failed.is_empty());
    assert_eq!(dispatch.queues.values().next().unwrap().ready.len(), 1);
}

#[test]
fn a_task_that_may_run_once_is_moved_only_before_it_has_begun() {
    for started in [0, 1] {
        let mut dispatch = Dispatch::default();
        let mut only = task(0);
        only.retries = 0;
        dispatch.submit(only, &mut Vec::new());
        dispatch.granted(grant(1), 0, &mut Vec::new());
        settle(&mut dispatch, 0);
        let mut out = Vec::new();
        dispatch.connection_lost(ProcessId(101), 1, &mut out);
        dispatch.worker_died(WorkerDeath { is_moved: true, ..death(1, started) }, 0, &mut out);
        let is_moved = dispatch.queues.values().any(|queue| queue.ready.len() == 1);
        assert_eq!((is_moved, said(out).failed.len()), if started == 0 { (true, 0) } else { (false, 1) });
    }
}

#[test]
fn a_task_whose_argument_was_lost_is_given_back_to_be_resolved_again() {
    let mut dispatch = submitted(1);
    dispatch.granted(grant(1), 0, &mut Vec::new());
    settle(&mut dispatch, 0);
    let lost = Error::ObjectLost { object: id(7).output(0), why: "its node died".into() };
    match dispatch.finished(ProcessId(101), id(0), Some(&lost), 0, 1, &mut Vec::new()) {
        Settled::Done(task) => assert_eq!((task.retries, task.spec.attempt), (3, 0)),
        Settled::Retried | Settled::Asks(_) | Settled::Unknown => {
            panic!("it was pushed again with the argument that is lost")
        }
    }
}

/// A task that has failed, and of which user code says whether it is tried again.
fn asked() -> Dispatch {
    let mut dispatch = Dispatch::default();
    let mut only = task(0);
    only.retry_on = RetryOn::Nothing.or_if(Arc::new(|_| true));
    dispatch.submit(only, &mut Vec::new());
    dispatch.granted(grant(1), 0, &mut Vec::new());
    settle(&mut dispatch, 0);
    let own = wingbeat_core::error::ApplicationError {
        type_name: "Busy".into(),
        message: "busy".into(),
        payload: wingbeat_core::codec::Payload::default(),
    };
    let error = Error::Application { task: "task".into(), error: own, attempts: 1 };
    let settled = dispatch.finished(ProcessId(101), id(0), Some(&error), 0, 1, &mut Vec::new());
    assert!(matches!(settled, Settled::Asks(_)) && !dispatch.is_done());
    assert!(matches!(dispatch.standing(id(0)), Some((_, DispatchStanding::Undecided))));
    dispatch
}

/// What follows from an answer.
fn decided(dispatch: &mut Dispatch, again: bool) -> Said {
    let mut out = Vec::new();
    dispatch.decided(id(0), again, Error::NoSession, 1, &mut out);
    said(out)
}

#[test]
fn a_task_of_which_user_code_is_asked_goes_on_or_fails_as_that_says() {
    let mut dispatch = asked();
    assert!(decided(&mut dispatch, true).failed.is_empty());
    let again = &dispatch.queues.values().next().unwrap().ready[0];
    assert_eq!((again.retries, again.spec.attempt), (2, 1));
    let mut dispatch = asked();
    assert!(matches!(&decided(&mut dispatch, false).failed[..], [(0, Error::NoSession)]));
    assert!(decided(&mut dispatch, true).failed.is_empty(), "it is done");
}

/// A task without a limit of retries, before its first attempt.
fn unlimited(retry_on: RetryOn) -> Dispatch {
    let mut dispatch = Dispatch::default();
    let spec = TaskSpec { attempt: u32::MAX - 2, ..(*task(0).spec).clone() };
    dispatch.submit(Task { spec: Arc::new(spec), retries: UNLIMITED, retry_on, ..task(0) }, &mut Vec::new());
    dispatch
}

/// Lets a task fail and be tried again until `now` as often as it may. Answers with when its attempts began.
fn attempts(dispatch: &mut Dispatch, until: u64, fails: impl Fn(&mut Dispatch, u64)) -> Vec<u64> {
    let mut began = Vec::new();
    let mut now = 0;
    while now < until {
        if dispatch.leases.is_empty() {
            dispatch.granted(grant(1), now, &mut Vec::new());
        }
        if settle(dispatch, now).pushed.contains_key(&1) {
            began.push(now);
            fails(dispatch, now);
        }
        match dispatch.standing(id(0)) {
            Some((_, DispatchStanding::Resting { .. })) => now += dispatch.next_tick(now).unwrap().max(1),
            other => assert!(matches!(other, Some((_, DispatchStanding::Ready { .. })))),
        }
        dispatch.tick(now, &mut Vec::new());
    }
    began
}

/// The pauses double from the second retry on.
const BEGAN: [u64; 11] = [0, 0, 10, 30, 70, 150, 310, 630, 1_270, 2_270, 3_270];

#[test]
fn a_task_that_fails_again_and_again_is_tried_at_once_the_first_time_and_then_ever_more_seldom() {
    let panicked =
        || Error::Panicked { task: "task".into(), message: "no".into(), backtrace: String::new(), attempts: 1 };
    let mut dispatch = unlimited(RetryOn::Everything);
    let began = attempts(&mut dispatch, 4_000, |dispatch, now| {
        let settled = dispatch.finished(ProcessId(101), id(0), Some(&panicked()), 0, now, &mut Vec::new());
        assert!(matches!(settled, Settled::Retried));
    });
    assert_eq!(began, BEGAN);
    let (name, standing) = dispatch.standing(id(0)).unwrap();
    assert!(
        matches!(standing, DispatchStanding::Resting { why, pause_ms: 1_000 } if why.contains("panicked")),
        "{name}"
    );

    let mut dispatch = unlimited(RetryOn::Nothing.or_if(Arc::new(|_| true)));
    let own = wingbeat_core::error::ApplicationError {
        type_name: "Busy".into(),
        message: "busy".into(),
        payload: wingbeat_core::codec::Payload::default(),
    };
    let busy = Error::Application { task: "task".into(), error: own, attempts: 1 };
    let began = attempts(&mut dispatch, 4_000, |dispatch, now| {
        let settled = dispatch.finished(ProcessId(101), id(0), Some(&busy), 0, now, &mut Vec::new());
        assert!(matches!(settled, Settled::Asks(_)));
        dispatch.decided(id(0), true, busy.clone(), now, &mut Vec::new());
    });
    assert_eq!(began, BEGAN);
}

#[test]
fn a_task_whose_process_ends_again_and_again_is_tried_ever_more_seldom() {
    let mut dispatch = unlimited(RetryOn::Nothing);
    let began = attempts(&mut dispatch, 4_000, |dispatch, now| {
        let mut out = Vec::new();
        dispatch.connection_lost(ProcessId(101), now, &mut out);
        dispatch.worker_died(death(1, u64::MAX), now, &mut out);
        assert!(said(out).failed.is_empty());
    });
    assert_eq!(began, BEGAN);
}

#[test]
fn a_task_of_which_user_code_is_asked_is_cancelled_and_fails_with_its_session_like_others() {
    let (mut dispatch, mut wanted, mut out) = (asked(), Wanted::default(), Vec::new());
    wanted.insert(id(0), false);
    dispatch.cancel(&mut wanted, &mut out);
    assert!(matches!(&said(out).failed[..], [(0, Error::Cancelled { .. })]));
    decided(&mut dispatch, true);
    assert!(dispatch.queues.values().all(|queue| queue.ready.is_empty()));
    let (mut dispatch, mut out) = (asked(), Vec::new());
    dispatch.end(&Error::NoSession, &mut out);
    assert!(matches!(&said(out).failed[..], [(0, Error::NoSession)]));
    assert!(decided(&mut dispatch, true).failed.is_empty() && dispatch.is_done());
}

#[test]
fn a_queued_task_does_not_look_for_its_argument_on_a_node_that_has_died_since() {
    let (argument, elsewhere) = (id(7).output(0), StoreNode { node: NodeId(2), ..node() });
    let stored = |nodes: Vec<StoreNode>| Arg::Stored(argument, Stored { size: 1, nodes, refs: None });
    let mut dispatch = Dispatch::default();
    for (seq, places) in [(0, vec![node()]), (1, vec![node(), elsewhere])] {
        let mut task = task(seq);
        Arc::make_mut(&mut task.spec).args.push(stored(places));
        dispatch.submit(task, &mut Vec::new());
    }
    dispatch.node_died(NodeId(1), "a test", 0, &mut Vec::new());
    // Of a node that has joined after that.
    dispatch.granted(Grant { node: StoreNode { node: NodeId(3), ..node() }, ..grant(1) }, 0, &mut Vec::new());
    let mut out = Vec::new();
    dispatch.settle(0, &mut out);
    let lost = out.iter().filter_map(|action| match action {
        Action::ArgumentLost { task, argument } => Some((task.spec.id, *argument, task.retries)),
        _ => None,
    });
    assert_eq!(lost.collect::<Vec<_>>(), [(id(0), argument, 3)]);
    assert_eq!(said(out).pushed[&1], [1], "what has a copy elsewhere is pushed");
}

#[test]
fn a_loss_that_nobody_explains_is_settled_after_a_while() {
    let mut dispatch = Dispatch::default();
    let mut only = task(0);
    only.retries = 0;
    dispatch.submit(only, &mut Vec::new());
    dispatch.granted(grant(1), 0, &mut Vec::new());
    settle(&mut dispatch, 0);
    let mut out = Vec::new();
    dispatch.connection_lost(ProcessId(101), 10, &mut out);
    assert_eq!(dispatch.next_tick(20), Some(CAUSE_LIMIT_MS - 10));
    dispatch.tick(10 + CAUSE_LIMIT_MS, &mut out);
    let said = said(out);
    assert!(matches!(&said.failed[..], [(0, Error::ContactLost { .. })]));
    assert_eq!(
        said.failed[0].1.to_string(),
        "task failed: lost contact with worker process 1 on node-000000000001: no exit was reported within 5 s. Check the network between the two machines"
    );
    assert_eq!((said.abandoned, said.returned), (vec![1], vec![]));
}

#[test]
fn a_loss_is_not_settled_while_nobody_could_explain_it() {
    let mut dispatch = submitted(1);
    dispatch.granted(grant(1), 0, &mut Vec::new());
    settle(&mut dispatch, 0);
    let mut out = Vec::new();
    dispatch.connection_lost(ProcessId(101), 0, &mut out);
    assert!(dispatch.waits_for_causes());
    dispatch.no_cause_is_told(3 * CAUSE_LIMIT_MS);
    dispatch.tick(4 * CAUSE_LIMIT_MS - 1, &mut out);
    dispatch.worker_died(death(1, 0), 4 * CAUSE_LIMIT_MS - 1, &mut out);
    let again = &dispatch.queues.values().next().unwrap().ready[0];
    assert_eq!((again.retries, again.spec.attempt), (3, 0), "it had not begun");
    assert!(!dispatch.waits_for_causes());
}

#[test]
fn a_lease_whose_contact_broke_goes_back_and_its_tasks_run_on_the_next_even_of_the_same_process() {
    let mut dispatch = submitted(1);
    dispatch.granted(grant(1), 0, &mut Vec::new());
    assert_eq!(settle(&mut dispatch, 0).pushed[&1], [0]);
    let mut out = Vec::new();
    dispatch.connection_lost(ProcessId(101), 10, &mut out);
    // Every further attempt to reach it fails, and puts nothing off.
    dispatch.connection_lost(ProcessId(101), 10 + CAUSE_LIMIT_MS / 2, &mut out);
    dispatch.tick(10 + CAUSE_LIMIT_MS, &mut out);
    assert_eq!(said(out).abandoned, [1], "its worker process may still run the task");
    // Nothing is held, so that the head hears of a demand, and grants.
    assert_eq!(settle(&mut dispatch, 6_000).wanted, Some(1));
    let again = Grant { lease: LeaseId(2), ..grant(1) };
    dispatch.granted(again, 6_000, &mut Vec::new());
    assert_eq!(settle(&mut dispatch, 6_000).pushed[&2], [0]);
    let done = dispatch.finished(ProcessId(101), id(0), None, 1, 6_001, &mut Vec::new());
    assert!(matches!(done, Settled::Done(task) if task.spec.attempt == 1));
}

#[test]
fn an_idle_lease_whose_contact_broke_goes_back_too() {
    let mut dispatch = submitted(1);
    dispatch.granted(grant(1), 0, &mut Vec::new());
    settle(&mut dispatch, 0);
    finish(&mut dispatch, 1, 0, 1, 1);
    let mut out = Vec::new();
    dispatch.connection_lost(ProcessId(101), 2, &mut out);
    dispatch.tick(2 + CAUSE_LIMIT_MS, &mut out);
    assert_eq!(said(out).returned, [1]);
}

#[test]
fn results_that_arrive_over_the_next_connection_count() {
    let mut dispatch = submitted(1);
    dispatch.granted(grant(1), 0, &mut Vec::new());
    settle(&mut dispatch, 0);
    let mut out = Vec::new();
    dispatch.connection_lost(ProcessId(101), 1, &mut out);
    assert!(matches!(finish(&mut dispatch, 1, 0, 1_000, 2), Settled::Done(_)));
    dispatch.tick(1 + CAUSE_LIMIT_MS, &mut out);
    let said = said(out);
    assert!(said.failed.is_empty());
    assert_eq!(said.returned, [1]);
}

/// A task with an argument of so many bytes.
fn large(seq: u64, bytes: usize) -> Task {
    let mut large = task(seq);
    let value = wingbeat_core::value::Packed::plain(vec![0; bytes].into());
    Arc::make_mut(&mut large.spec).args = vec![wingbeat_core::spec::Arg::Value(value)];
    large
}

#[test]
fn tasks_ahead_are_bounded_by_bytes_and_each_is_pushed_in_the_end() {
    let mut dispatch = Dispatch::default();
    for seq in 0..1_000 {
        dispatch.submit(large(seq, 90_000), &mut Vec::new());
    }
    dispatch.granted(grant(1), 0, &mut Vec::new());
    let mut waiting: VecDeque<u64> = settle(&mut dispatch, 0).pushed[&1].clone().into();
    let mut done = 0;
    while let Some(seq) = waiting.pop_front() {
        assert!(matches!(finish(&mut dispatch, 1, seq, 500, 1), Settled::Done(_)));
        done += 1;
        waiting.extend(settle(&mut dispatch, 1).pushed.remove(&1).unwrap_or_default());
        assert!(waiting.len() * 90_000 <= AHEAD_BYTES, "{}", waiting.len());
    }
    assert_eq!(done, 1_000);
}

#[test]
fn a_task_over_every_bound_but_the_messages_goes_alone_and_a_larger_one_fails_with_advice() {
    let mut dispatch = Dispatch::default();
    let mut out = Vec::new();
    for seq in 0..3 {
        dispatch.submit(large(seq, 2 * AHEAD_BYTES), &mut out);
    }
    dispatch.submit(large(3, MESSAGE_LIMIT), &mut out);
    let failed = said(out).failed;
    assert!(matches!(&failed[..], [(3, Error::InvalidArgument { what })] if what.contains("`put`")));
    dispatch.granted(grant(1), 0, &mut Vec::new());
    for seq in 0..3 {
        assert_eq!(settle(&mut dispatch, 0).pushed[&1], [seq]);
        finish(&mut dispatch, 1, seq, 500, 1);
    }
}

#[test]
fn bytes_of_tasks_that_were_given_back_are_free_for_others() {
    let mut dispatch = Dispatch::default();
    for seq in 0..200 {
        dispatch.submit(large(seq, 90_000), &mut Vec::new());
    }
    dispatch.granted(grant(1), 0, &mut Vec::new());
    settle(&mut dispatch, 0);
    finish(&mut dispatch, 1, 0, 500, 1);
    let pushed = settle(&mut dispatch, 1).pushed.remove(&1).unwrap();
    let back: Vec<TaskId> = pushed.iter().map(|seq| id(*seq)).collect();
    dispatch.gave_back(LeaseId(1), &back, false, 2, &mut Vec::new());
    assert_eq!(settle(&mut dispatch, 2).pushed.remove(&1).unwrap(), pushed);
}

#[test]
fn of_tasks_that_can_never_be_placed_each_is_named_in_its_own_error() {
    let mut dispatch = Dispatch::default();
    let mut out = Vec::new();
    for (seq, name) in (0..).zip(["one", "other"]) {
        dispatch.submit(Task { name: Name::Path(name), ..task(seq) }, &mut out);
    }
    let of_one = Error::Infeasible { what: "one".into(), asked: "1 CPU".into(), nearest: "no node".into() };
    dispatch.refused(&shape(), &of_one, &mut out);
    for ((seq, error), name) in said(out).failed.into_iter().zip(["one", "other"]) {
        assert!(error.to_string().starts_with(name), "{seq}: {error}");
    }
}

#[test]
fn a_recalled_lease_is_returned_when_what_runs_is_done() {
    let mut dispatch = submitted(2);
    dispatch.granted(grant(1), 0, &mut Vec::new());
    settle(&mut dispatch, 0);
    let mut out = Vec::new();
    dispatch.recalled(LeaseId(1), &mut out);
    assert!(said(out).returned.is_empty());
    let mut out = Vec::new();
    dispatch.finished(ProcessId(101), id(0), None, 1, 1, &mut out);
    assert_eq!(said(out).returned, [1]);
    assert!(settle(&mut dispatch, 1).pushed.is_empty());
}

#[test]
fn a_lease_that_is_recalled_while_tasks_are_taken_back_is_asked_for_all_of_them() {
    let mut dispatch = submitted(9);
    dispatch.granted(grant(1), 0, &mut Vec::new());
    settle(&mut dispatch, 0);
    finish(&mut dispatch, 1, 0, 1_000, 0);
    settle(&mut dispatch, 0);
    dispatch.granted(grant(2), 10, &mut Vec::new());
    assert_eq!(settle(&mut dispatch, 10).taken_back, [(1, 4)]);
    let mut out = Vec::new();
    dispatch.recalled(LeaseId(1), &mut out);
    assert_eq!(said(out).taken_back, [(1, 8)], "what runs may take hours, and nothing is asked for later");
}

#[test]
fn an_idle_lease_is_returned_after_a_moment() {
    let mut dispatch = submitted(1);
    dispatch.granted(grant(1), 0, &mut Vec::new());
    settle(&mut dispatch, 0);
    finish(&mut dispatch, 1, 0, 1, 5);
    let mut out = Vec::new();
    assert_eq!(dispatch.next_tick(5), Some(IDLE_KEEP_MS));
    dispatch.tick(5 + IDLE_KEEP_MS, &mut out);
    assert_eq!(said(out).returned, [1]);
}

#[test]
fn a_process_that_waits_gets_no_tasks_until_it_is_ready() {
    let mut dispatch = submitted(3);
    dispatch.granted(grant(1), 0, &mut Vec::new());
    settle(&mut dispatch, 0);
    dispatch.gave_back(LeaseId(1), &[], true, 1, &mut Vec::new());
    let waiting = settle(&mut dispatch, 1);
    assert!(waiting.pushed.is_empty());
    dispatch.ready(LeaseId(1));
    finish(&mut dispatch, 1, 0, 1_000, 2);
    assert_eq!(settle(&mut dispatch, 2).pushed[&1], [1, 2]);
}

#[test]
fn a_cancelled_task_that_was_not_pushed_fails_at_once() {
    let mut dispatch = submitted(2);
    let mut out = Vec::new();
    let mut wanted = Wanted::default();
    wanted.insert(id(1), false);
    dispatch.cancel(&mut wanted, &mut out);
    assert!(matches!(&said(out).failed[..], [(1, Error::Cancelled { .. })]));
}

#[test]
fn the_end_of_the_session_fails_everything() {
    let mut dispatch = submitted(3);
    dispatch.granted(grant(1), 0, &mut Vec::new());
    settle(&mut dispatch, 0);
    let mut out = Vec::new();
    dispatch.end(&Error::NoSession, &mut out);
    dispatch.submit(task(9), &mut out);
    let mut failed: Vec<u64> = said(out).failed.into_iter().map(|(seq, _)| seq).collect();
    failed.sort_unstable();
    assert_eq!(failed, [0, 1, 2, 9]);
}
