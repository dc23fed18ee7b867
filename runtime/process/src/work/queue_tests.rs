use wingbeat_core::spec::{Address, MachineId, Outputs, Shape};
use wingbeat_core::{Amount, FunctionId, JobId, ResourceSet};

use super::super::group::{Place, Room};
use super::*;

const OWNER: ProcessId = ProcessId(1);
const OTHER: ProcessId = ProcessId(2);
const LEASE: LeaseId = LeaseId(1);
const ACTOR: Actor = Actor { id: ActorId(7), incarnation: Incarnation(1) };

fn id(owner: ProcessId, seq: u64) -> TaskId {
    TaskId { owner, seq }
}

fn spec(owner: ProcessId, seq: u64, group: Option<&str>) -> Arc<TaskSpec> {
    Arc::new(TaskSpec {
        id: id(owner, seq),
        function: FunctionId(1),
        name: None,
        args: Vec::new(),
        outputs: Outputs::Fixed(1),
        attempt: 0,
        remakes: false,
        yields_memory: false,
        shares_process: false,
        group: group.map(Into::into),
        parent: None,
    })
}

fn tasks(seqs: impl IntoIterator<Item = u64>) -> Vec<Arc<TaskSpec>> {
    seqs.into_iter().map(|seq| spec(OWNER, seq, None)).collect()
}

/// A queue that has a lease; what runs is known by a number.
fn leased() -> Queue<u32> {
    let mut queue = Queue::default();
    queue.lease(LEASE);
    queue
}

fn actor() -> Queue<u32> {
    actor_that_runs(2)
}

fn actor_that_runs(max_concurrency: u32) -> Queue<u32> {
    let mut queue = Queue::default();
    let owner = Address { process: OWNER, machine: MachineId(1), unix: String::new(), tcp: None, steward: None };
    let spec = ActorSpec {
        id: ACTOR.id,
        job: JobId(1),
        class: FunctionId(1),
        class_name: "Actor".into(),
        args: Vec::new(),
        placement: Shape::of(ResourceSet::cpus(Amount::ONE)),
        holds: ResourceSet::default(),
        max_restarts: 0,
        max_concurrency,
        max_task_retries: 0,
        max_pending_calls: None,
        groups: [("io".to_owned(), 2)].into(),
        name: None,
        detached: false,
        yields_to_drain: false,
        handle: id(OWNER, 1).output(0),
        owner,
    };
    queue.start_actor(Become { lease: LEASE, spec: Arc::new(spec), incarnation: ACTOR.incarnation });
    queue
}

/// Of what is next: the number of the task or call.
fn next(queue: &mut Queue<u32>, group: Option<&str>) -> Option<u64> {
    let next = match group {
        None => queue.next_task(),
        Some(group) => queue.next_call(group, EMPTY),
    };
    match next? {
        Next::Task { spec, .. } | Next::Call { spec, .. } => Some(spec.id.seq),
        Next::Become(_) => Some(0),
        Next::End => None,
    }
}

fn gave(tasks: impl IntoIterator<Item = u64>, waiting: bool) -> GaveBack {
    GaveBack { to: OWNER, lease: LEASE, tasks: tasks.into_iter().map(|seq| id(OWNER, seq)).collect(), waiting }
}

#[test]
fn tasks_run_in_order_and_have_their_numbers_on_the_lease() {
    let mut queue = leased();
    assert!(queue.add_tasks(OWNER, LEASE, 5, tasks([1, 2])).is_none());
    for (seq, expected) in [(1, 5), (2, 6)] {
        let Some(Next::Task { number, spec, lease }) = queue.next_task() else { panic!("no task") };
        assert_eq!((spec.id.seq, number, lease), (seq, expected, LEASE));
    }
    assert!(queue.next_task().is_none());
}

#[test]
fn tasks_of_a_lease_that_is_over_go_back() {
    let mut queue = leased();
    queue.lease(LeaseId(2));
    assert_eq!(queue.add_tasks(OWNER, LEASE, 0, tasks([1, 2])), Some(gave([1, 2], true)));
    assert!(queue.next_task().is_none());
}

#[test]
fn the_last_tasks_are_taken_back_and_only_those_of_the_lease() {
    let mut queue = leased();
    queue.add_tasks(OWNER, LEASE, 0, tasks(1..=4));
    assert_eq!(queue.take_back(OWNER, LEASE, 2), gave([3, 4], false));
    let other = GaveBack { to: OTHER, lease: LeaseId(9), tasks: Vec::new(), waiting: true };
    assert_eq!(queue.take_back(OTHER, LeaseId(9), 10), other);
    assert_eq!(next(&mut queue, None), Some(1));
}

#[test]
fn while_what_runs_waits_nothing_is_taken_and_its_owner_hears_when_it_goes_on() {
    let mut queue = leased();
    queue.add_tasks(OWNER, LEASE, 0, tasks(1..=3));
    assert_eq!(next(&mut queue, None), Some(1));
    assert_eq!(queue.begin_wait(), Some(gave([2, 3], true)));
    assert_eq!(queue.begin_wait(), None);
    assert_eq!(queue.add_tasks(OWNER, LEASE, 3, tasks([4])), Some(gave([4], true)));
    assert_eq!(queue.end_wait(), None);
    assert_eq!(queue.end_wait(), Some((OWNER, LEASE)));
    assert!(queue.add_tasks(OWNER, LEASE, 3, tasks([4])).is_none());
}

/// A queue whose task of this number runs, and shares its process.
fn shared(seq: u64) -> Queue<u32> {
    let mut queue = leased();
    let mut spec = spec(OWNER, seq, None);
    Arc::make_mut(&mut spec).shares_process = true;
    queue.add_tasks(OWNER, LEASE, 0, vec![spec]);
    assert_eq!(next(&mut queue, None), Some(seq));
    queue
}

#[test]
fn a_task_begins_at_home_when_all_others_wait() {
    let mut queue = shared(1);
    assert!(!queue.takes_home());
    queue.begin_wait();
    assert!(queue.takes_home());
    let (first, second) = (id(OTHER, 1), id(OTHER, 2));
    queue.took_home(first);
    assert!(queue.started(first, 10).is_none());
    assert!(!queue.takes_home() && !queue.all_wait());
    queue.waits_at_home(first, true);
    assert!(queue.takes_home());
    queue.took_home(second);
    assert!(queue.started(second, 11).is_none());
    assert_eq!(queue.at_home(), 2);
    queue.done(second, |running| *running == 11);
    assert!(queue.takes_home());
    queue.end_wait();
    assert!(!queue.takes_home(), "the task that was sent here goes on");
    queue.waits_at_home(first, false);
    queue.begin_wait();
    assert!(!queue.takes_home());
    queue.done(first, |running| *running == 10);
    assert!(queue.takes_home() && queue.at_home() == 0);
}

#[test]
fn nothing_begins_at_home_under_a_lease_that_others_need() {
    let mut queue = shared(1);
    queue.begin_wait();
    queue.recalled(LeaseId(9));
    assert!(queue.takes_home());
    queue.recalled(LEASE);
    assert!(!queue.takes_home() && queue.all_wait());
}

#[test]
fn one_that_is_cancelled_by_force_at_home_holds_nobody_up_and_ends_no_process() {
    let mut queue = shared(1);
    queue.begin_wait();
    let task = id(OTHER, 1);
    queue.took_home(task);
    assert!(queue.started(task, 10).is_none());
    assert!(matches!(queue.cancel(task, true), Cancelled::Running(10)));
    assert!(queue.takes_home());
    queue.done(task, |running| *running == 10);
    queue.end_wait();
    queue.add_tasks(OWNER, LEASE, 1, tasks([2]));
    assert_eq!(next(&mut queue, None), Some(2));
}

#[test]
fn one_that_is_cancelled_by_force_before_it_is_found_ends_no_process_either() {
    let mut queue = shared(1);
    queue.begin_wait();
    let task = id(OTHER, 1);
    queue.took_home(task);
    assert!(matches!(queue.cancel(task, true), Cancelled::Nothing));
    assert_eq!(queue.started(task, 10), Some(true));
    assert!(queue.takes_home());
    queue.done(task, |running| *running == 10);
    queue.end_wait();
    queue.add_tasks(OWNER, LEASE, 1, tasks([2]));
    assert_eq!(next(&mut queue, None), Some(2));
}

#[test]
fn nothing_isolated_begins_beside_what_an_earlier_task_has_left() {
    let mut queue = shared(1);
    queue.begin_wait();
    let left = id(OTHER, 1);
    queue.took_home(left);
    assert!(queue.started(left, 10).is_none());
    queue.end_wait();
    queue.done(id(OWNER, 1), |_| true);
    assert_eq!(queue.add_tasks(OWNER, LEASE, 1, tasks([2])), Some(gave([2], true)));
    assert_eq!(queue.ready_after_home(), None);
    queue.done(left, |running| *running == 10);
    assert_eq!(queue.ready_after_home(), Some((OWNER, LEASE)));
    assert_eq!(queue.ready_after_home(), None);
    assert!(queue.add_tasks(OWNER, LEASE, 1, tasks([2])).is_none());
}

#[test]
fn nothing_isolated_begins_beside_one_that_was_given_up_and_runs_on() {
    let mut queue = shared(1);
    queue.begin_wait();
    let given_up = id(OTHER, 1);
    queue.took_home(given_up);
    assert!(queue.started(given_up, 10).is_none());
    assert!(matches!(queue.cancel(given_up, true), Cancelled::Running(10)));
    queue.end_wait();
    queue.done(id(OWNER, 1), |_| true);
    assert!(queue.goes_on_without_task());
    assert_eq!(queue.add_tasks(OWNER, LEASE, 1, tasks([2])), Some(gave([2], true)));
    assert_eq!(queue.ready_after_home(), None);
    // Another attempt at the same task ends sooner.
    queue.took_home(given_up);
    assert!(queue.started(given_up, 11).is_none());
    queue.done(given_up, |running| *running == 11);
    assert!(queue.goes_on_without_task());
    queue.done(given_up, |running| *running == 10);
    assert!(!queue.goes_on_without_task());
    assert_eq!(queue.ready_after_home(), Some((OWNER, LEASE)));
    assert!(queue.add_tasks(OWNER, LEASE, 1, tasks([2])).is_none());
    assert_eq!(next(&mut queue, None), Some(2));
}

#[test]
fn neither_an_isolated_task_nor_an_actor_gives_its_process_away() {
    let mut queue = leased();
    queue.add_tasks(OWNER, LEASE, 0, tasks([1]));
    assert_eq!(next(&mut queue, None), Some(1));
    queue.begin_wait();
    assert!(!queue.takes_home());
    let mut queue = actor();
    queue.begin_wait();
    assert!(!queue.takes_home() && !queue.computes_at_home());
}

#[test]
fn cancelling_takes_out_what_has_not_begun_and_finds_what_runs() {
    let mut queue = leased();
    queue.add_tasks(OWNER, LEASE, 0, tasks([1, 2]));
    assert_eq!(next(&mut queue, None), Some(1));
    assert!(queue.started(id(OWNER, 1), 11).is_none());
    assert!(matches!(queue.cancel(id(OWNER, 2), false), Cancelled::Unstarted(spec) if spec.id.seq == 2));
    assert!(matches!(queue.cancel(id(OWNER, 1), false), Cancelled::Running(11)));
    assert!(matches!(queue.cancel(id(OWNER, 3), false), Cancelled::Nothing));
    assert!(next(&mut queue, None).is_none());
}

#[test]
fn what_is_cancelled_between_being_taken_out_and_being_begun_hears_of_it() {
    let mut queue = leased();
    queue.add_tasks(OWNER, LEASE, 0, tasks([1, 2]));
    assert_eq!(next(&mut queue, None), Some(1));
    assert!(matches!(queue.cancel(id(OWNER, 1), false), Cancelled::Nothing));
    assert_eq!(queue.started(id(OWNER, 1), 11), Some(false));
    queue.done(id(OWNER, 1), |running| *running == 11);
    // A later attempt at what was cancelled before it came here begins.
    assert_eq!(next(&mut queue, None), Some(2));
    assert!(matches!(queue.cancel(id(OWNER, 5), true), Cancelled::Nothing));
    queue.done(id(OWNER, 2), |_| false);
    assert_eq!(queue.started(id(OWNER, 5), 12), None);
}

#[test]
fn of_two_early_cancels_the_forced_one_counts() {
    let mut queue = leased();
    queue.add_tasks(OWNER, LEASE, 0, tasks([1]));
    assert_eq!(next(&mut queue, None), Some(1));
    for force in [false, true] {
        assert!(matches!(queue.cancel(id(OWNER, 1), force), Cancelled::Nothing));
    }
    assert_eq!(queue.started(id(OWNER, 1), 11), Some(true));
}

#[test]
fn calls_of_another_life_and_of_unknown_groups_are_refused_and_the_others_taken() {
    let mut queue = actor();
    let later = Actor { incarnation: Incarnation(2), ..ACTOR };
    assert!(matches!(queue.add_calls(later, tasks([1])), Err(Refused::Another(calls)) if calls.len() == 1));
    let calls = vec![spec(OWNER, 1, None), spec(OWNER, 2, Some("io")), spec(OWNER, 3, Some("no such"))];
    let Err(Refused::UnknownGroup(unknown)) = queue.add_calls(ACTOR, calls) else { panic!("all are taken") };
    assert_eq!(unknown.iter().map(|spec| spec.id.seq).collect::<Vec<_>>(), [3]);
    assert_eq!(next(&mut queue, None), Some(0), "it becomes an actor first");
    assert!(queue.starts_thread("io"));
    assert_eq!((next(&mut queue, Some("io")), next(&mut queue, Some(DEFAULT_GROUP))), (Some(2), Some(1)));
}

/// An actor that may run so many calls at a time, and so many calls that wait.
fn crowd(most: u32, calls: u64) -> Queue<u32> {
    let mut queue = actor_that_runs(most);
    assert_eq!(next(&mut queue, None), Some(0));
    queue.add_calls(ACTOR, tasks(1..=calls)).ok();
    queue
}

/// The number of the next call, and whether a thread is started then.
fn take(queue: &mut Queue<u32>, thread: ThreadCalls) -> Option<(u64, bool)> {
    match queue.next_call(DEFAULT_GROUP, thread)? {
        Next::Call { spec, starts_thread } => Some((spec.id.seq, starts_thread)),
        _ => None,
    }
}

const EMPTY: ThreadCalls = ThreadCalls { counted: 0, paused: 0 };
const PAUSED: ThreadCalls = ThreadCalls { counted: 0, paused: 1 };
const BUSY: ThreadCalls = ThreadCalls { counted: 1, paused: 0 };

#[test]
fn a_thread_with_a_call_under_way_takes_another_when_no_thread_is_idle_and_as_many_run_as_may() {
    let mut queue = crowd(66, 100);
    for number in 1..=64 {
        assert_eq!((take(&mut queue, BUSY), queue.wants(DEFAULT_GROUP)), (None, Some(Takes::Empty)));
        assert_eq!(take(&mut queue, EMPTY), Some((number, number < 64)));
    }
    assert_eq!(queue.wants(DEFAULT_GROUP), Some(Takes::Busy));
    assert_eq!([0; 3].map(|_| take(&mut queue, BUSY)), [Some((65, false)), Some((66, false)), None]);
    let first = spec(OWNER, 1, None);
    assert_eq!(queue.wants(DEFAULT_GROUP), None);
    queue.call_done(&first, BUSY);
    assert_eq!([0; 2].map(|_| take(&mut queue, BUSY)), [Some((67, false)), None]);
    // The other one of that thread ends, too.
    queue.call_done(&first, EMPTY);
    assert_eq!(queue.wants(DEFAULT_GROUP), Some(Takes::Empty));
    assert_eq!((take(&mut queue, BUSY), take(&mut queue, EMPTY)), (None, Some((68, false))));
}

#[test]
fn a_call_that_waits_for_its_consumer_makes_room_and_takes_it_again() {
    let mut queue = crowd(1, 3);
    let [first, second] = [1, 2].map(|number| spec(OWNER, number, None));
    assert_eq!(take(&mut queue, EMPTY), Some((1, false)));
    queue.pauses(&first, true, EMPTY);
    assert_eq!(take(&mut queue, PAUSED), Some((2, false)));
    queue.pauses(&first, false, BUSY);
    queue.call_done(&second, BUSY);
    assert_eq!([EMPTY, BUSY].map(|thread| take(&mut queue, thread)), [None; 2]);
    queue.call_done(&first, EMPTY);
    assert_eq!(take(&mut queue, EMPTY), Some((3, false)));
}

#[test]
fn a_thread_whose_call_waits_for_its_consumer_is_not_counted_on() {
    let mut queue = crowd(3, 3);
    let first = spec(OWNER, 1, None);
    assert_eq!(take(&mut queue, EMPTY), Some((1, true)));
    queue.pauses(&first, true, EMPTY);
    // What begins on it would stand in the way of the first.
    assert_eq!((take(&mut queue, PAUSED), take(&mut queue, EMPTY)), (None, Some((2, true))));
    queue.pauses(&first, false, EMPTY);
    assert_eq!((take(&mut queue, BUSY), take(&mut queue, EMPTY)), (None, Some((3, false))));
}

#[test]
fn nobody_is_wanted_for_a_call_while_nothing_may_begin() {
    let mut queue = crowd(2, 1);
    queue.hold(true);
    assert_eq!((queue.wants(DEFAULT_GROUP), take(&mut queue, EMPTY)), (None, None));
    queue.hold(false);
    assert_eq!(queue.wants(DEFAULT_GROUP), Some(Takes::Empty));
}

#[test]
fn a_group_has_room_for_more_calls_than_threads() {
    assert_eq!(Place::of(ACTOR.id, "io", 2).room, Room { calls: 2, threads: 2 });
    assert_eq!(Place::of(ACTOR.id, "io", 1_000).room, Room { calls: 1_000, threads: 64 });
}

#[test]
fn a_group_has_as_many_threads_as_calls_run_at_once_and_may() {
    let mut queue = actor();
    assert_eq!(next(&mut queue, None), Some(0));
    queue.add_calls(ACTOR, (1..=4).map(|number| spec(OWNER, number, Some("io"))).collect()).ok();
    let starts = |queue: &mut Queue<u32>, thread| match queue.next_call("io", thread)? {
        Next::Call { starts_thread, .. } => Some(starts_thread),
        _ => None,
    };
    assert!(queue.starts_thread("io") && !queue.starts_thread("io"), "one is empty");
    assert_eq!(starts(&mut queue, EMPTY), Some(true));
    assert_eq!(starts(&mut queue, BUSY), None, "a thread is started");
    assert_eq!(queue.has_no_thread("io"), 1);
    assert_eq!(starts(&mut queue, BUSY), Some(true), "it could not be; another is tried");
    queue.call_done(&spec(OWNER, 1, Some("io")), BUSY);
    assert_eq!(starts(&mut queue, EMPTY), Some(false), "two calls may run");
    assert!(!queue.starts_thread(DEFAULT_GROUP) && !queue.starts_thread("no such"), "the main thread is empty");
}

#[test]
fn an_actor_that_drains_ends_when_its_calls_are_done() {
    let mut queue = actor();
    queue.add_calls(ACTOR, tasks([1, 2])).ok();
    assert_eq!(next(&mut queue, Some(DEFAULT_GROUP)), Some(1));
    queue.drain();
    assert_eq!(next(&mut queue, Some(DEFAULT_GROUP)), Some(2));
    queue.done(id(OWNER, 1), |_| true);
    assert!(queue.next_call("io", EMPTY).is_none(), "one call is under way");
    queue.done(id(OWNER, 2), |_| true);
    assert!(matches!(queue.next_call("io", EMPTY), Some(Next::End)));
    assert!(queue.has_ended());
    assert!(matches!(queue.next_call(DEFAULT_GROUP, EMPTY), Some(Next::End)));
    // The head says what becomes of calls that come then.
    assert!(queue.add_calls(ACTOR, tasks([3])).is_ok());
}

#[test]
fn an_actor_that_exits_begins_nothing_more_and_ends_when_it_is_drained() {
    let mut queue = actor();
    queue.add_calls(ACTOR, tasks([1, 2])).ok();
    assert_eq!(next(&mut queue, Some(DEFAULT_GROUP)), Some(1));
    assert_eq!(queue.exit_actor().len(), 1, "what waits is refused");
    assert!(matches!(queue.add_calls(ACTOR, tasks([3])), Err(Refused::Exits(calls)) if calls.len() == 1));
    assert!(queue.next_call(DEFAULT_GROUP, EMPTY).is_none());
    queue.done(id(OWNER, 1), |_| true);
    assert!(queue.next_call(DEFAULT_GROUP, EMPTY).is_none(), "the head may not know of it yet");
    queue.drain();
    assert!(matches!(queue.next_call(DEFAULT_GROUP, EMPTY), Some(Next::End)));
}

#[test]
fn nothing_begins_while_it_is_held_or_about_to_be_killed() {
    let mut queue = leased();
    queue.add_tasks(OWNER, LEASE, 0, tasks([1, 2]));
    queue.hold(true);
    assert!(queue.next_task().is_none());
    queue.hold(false);
    assert_eq!(next(&mut queue, None), Some(1));
    queue.kill();
    assert!(queue.next_task().is_none());
}

#[test]
fn nothing_begins_after_a_forced_cancel_found_what_runs_or_is_about_to() {
    for is_early in [false, true] {
        let mut queue = leased();
        queue.add_tasks(OWNER, LEASE, 0, tasks([1, 2]));
        assert_eq!(next(&mut queue, None), Some(1));
        if is_early {
            assert!(matches!(queue.cancel(id(OWNER, 1), true), Cancelled::Nothing));
            assert_eq!(queue.started(id(OWNER, 1), 11), Some(true));
        } else {
            assert!(queue.started(id(OWNER, 1), 11).is_none());
            assert!(matches!(queue.cancel(id(OWNER, 1), true), Cancelled::Running(11)));
        }
        queue.done(id(OWNER, 1), |running| *running == 11);
        assert!(queue.next_task().is_none());
    }
}

#[test]
fn what_a_lost_process_wanted_is_forgotten_and_what_runs_for_it_is_named() {
    let mut queue = actor();
    queue.add_calls(ACTOR, vec![spec(OTHER, 1, None), spec(OWNER, 2, None), spec(OTHER, 3, Some("io"))]).ok();
    assert_eq!(next(&mut queue, Some(DEFAULT_GROUP)), Some(1));
    assert!(queue.started(id(OTHER, 1), 11).is_none());
    assert_eq!(queue.peer_lost(OTHER), [11]);
    assert_eq!((next(&mut queue, Some("io")), next(&mut queue, Some(DEFAULT_GROUP))), (None, Some(2)));
}
