//! The order of calls, whatever happens between.

use proptest::prelude::*;
use wingbeat_core::spec::{Arg, MachineId, Outputs};
use wingbeat_core::{FunctionId, NodeId, ProcessId};

use super::*;

const ACTOR: ActorId = ActorId(7);

/// What may happen to one caller's calls.
#[derive(Clone, Debug)]
enum Step {
    /// A call; whether its arguments are there, and how often it may be tried again.
    Call(bool, u32),
    /// The arguments of one of those that wait are there now.
    Resolve(usize),
    /// One of those that were sent returns.
    Return(usize),
    /// The actor's process ends, and another life begins.
    Restart,
    /// Contact is lost.
    Break,
    /// So much time passes that the head would have reported the end of the process.
    Wait,
    Cancel(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (any::<bool>(), 0..3u32).prop_map(|(resolved, retries)| Step::Call(resolved, retries)),
        4 => any::<usize>().prop_map(Step::Resolve),
        4 => any::<usize>().prop_map(Step::Return),
        1 => Just(Step::Restart),
        1 => Just(Step::Break),
        1 => Just(Step::Wait),
        1 => any::<usize>().prop_map(Step::Cancel),
    ];
    proptest::collection::vec(step, 0..120)
}

fn address(life: u32) -> Address {
    let process = ProcessId(100 + u64::from(life));
    Address { process, machine: MachineId(1), unix: String::new(), tcp: None, steward: None }
}

fn task(seq: u64) -> TaskId {
    TaskId { owner: ProcessId(1), seq }
}

fn wanted(seq: u64, force: bool) -> Wanted {
    let mut wanted = Wanted::default();
    wanted.insert(task(seq), force);
    wanted
}

fn call(seq: u64, resolved: bool, retries: u32) -> Call {
    let spec = TaskSpec {
        id: task(seq),
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
    Call {
        spec: Arc::new(spec),
        name: Name::Path("call"),
        resolved,
        retries,
        limit: None,
        cancelled: false,
        held: Held::new(),
        bytes: Default::default(),
    }
}

/// One caller and one actor.
#[derive(Default)]
struct Bench {
    calls: Calls,
    life: u32,
    now_ms: u64,
    /// What each life was sent over each connection, in order. A new connection begins a new list.
    sent: Vec<Vec<u64>>,
    connections: usize,
    /// What was sent to this life and has not returned.
    running: Vec<u64>,
    /// Calls whose arguments are not there.
    unresolved: Vec<u64>,
    failed: Vec<u64>,
    returned: Vec<u64>,
}

impl Bench {
    fn take_in(&mut self, out: Vec<Action>) {
        for action in out {
            match action {
                Action::Push { calls, .. } => {
                    self.sent.resize(self.connections + 1, Vec::new());
                    for call in calls {
                        self.sent[self.connections].push(call.id.seq);
                        self.running.push(call.id.seq);
                    }
                }
                Action::Fail { call, .. } => self.failed.push(call.spec.id.seq),
                // The head answers with how the actor is.
                Action::Watch(_) => self.alive(),
                _ => {}
            }
        }
    }

    fn with(&mut self, change: impl FnOnce(&mut Calls, &mut Vec<Action>)) {
        let mut out = Vec::new();
        change(&mut self.calls, &mut out);
        self.calls.settle(ACTOR, &mut out);
        self.take_in(out);
    }

    fn alive(&mut self) {
        let node = StoreNode { node: NodeId(1), address: address(1) };
        let state =
            ActorState::Alive { address: address(self.life), node, incarnation: Incarnation(self.life), moves: 0 };
        self.with(|calls, out| calls.actor_is(ACTOR, state, out));
    }

    fn restarting(&mut self, life: u32) {
        self.with(|calls, out| calls.actor_is(ACTOR, restarting(life), out));
    }
}

/// An actor that 100,000 calls wait for, of which the first waits longest.
#[test]
fn calls_keep_their_order_when_the_arguments_of_the_first_come_last_and_many_leave_from_the_middle() {
    const COUNT: u64 = 100_000;
    let class: Arc<str> = "Counter".into();
    let mut bench = Bench::default();
    for seq in 1..=COUNT {
        bench.with(|calls, out| calls.submit(ACTOR, &class, call(seq, false, 0), out));
    }
    for seq in (2..=COUNT).rev() {
        bench.with(|calls, out| match seq % 4 {
            0 => calls.resolved(ACTOR, task(seq), Vec::new()),
            _ => calls.fail_unresolved(ACTOR, task(seq), Error::NoSession, out),
        });
    }
    bench.with(|calls, out| calls.submit(ACTOR, &class, call(COUNT + 1, true, 0), out));
    assert!(bench.sent.is_empty(), "the first holds back the others");
    bench.with(|calls, _| calls.resolved(ACTOR, task(1), Vec::new()));
    let expected: Vec<u64> = std::iter::once(1).chain((4..=COUNT).step_by(4)).chain([COUNT + 1]).collect();
    while bench.returned.len() < expected.len() {
        assert!(!bench.running.is_empty(), "{} of {} were sent", bench.returned.len(), expected.len());
        for seq in std::mem::take(&mut bench.running) {
            assert!(bench.calls.finished(address(0).process, task(seq), 0).is_some());
            bench.returned.push(seq);
        }
        bench.with(|_, _| {});
    }
    assert_eq!(bench.sent, [expected]);
}

fn alive(life: u32, process: u64) -> ActorState {
    let address = Address { process: ProcessId(process), ..address(life) };
    let node = StoreNode { node: NodeId(1), address: address.clone() };
    ActorState::Alive { address, node, incarnation: Incarnation(life), moves: 0 }
}

fn restarting(life: u32) -> ActorState {
    ActorState::Restarting { life: Incarnation(life), moves: 0, cause: Box::new(Error::NoSession) }
}

/// A caller that has made a call of an actor, of which the head has said this.
fn caller(said: impl IntoIterator<Item = ActorState>) -> Calls {
    let mut calls = Calls::default();
    calls.submit(ACTOR, &"Counter".into(), call(1, true, 1), &mut Vec::new());
    for state in said {
        calls.actor_is(ACTOR, state, &mut Vec::new());
    }
    calls
}

/// To which life and which process calls go, and how many.
fn pushed_to(out: &[Action]) -> Vec<(u32, u64, usize)> {
    let pushed = out.iter().filter_map(|action| match action {
        Action::Push { worker, incarnation, calls, .. } => Some((incarnation.0, worker.process.0, calls.len())),
        _ => None,
    });
    pushed.collect()
}

fn killed(calls: &mut Calls, life: Option<u32>) {
    let cause = Error::ActorEnded { by: "kill".into() };
    calls.killed(ACTOR, life.map(Incarnation), &cause, &mut Vec::new());
}

#[test]
fn a_kill_that_crosses_a_restart_leaves_the_next_life_alone() {
    let mut calls = caller([alive(0, 100), restarting(0), alive(1, 101)]);
    killed(&mut calls, Some(0));
    let mut out = Vec::new();
    calls.submit(ACTOR, &"Counter".into(), call(2, true, 0), &mut out);
    calls.settle(ACTOR, &mut out);
    assert_eq!(pushed_to(&out), [(1, 101, 1)]);
}

#[test]
fn a_life_that_was_killed_before_it_was_known_gets_no_calls() {
    let mut calls = caller([]);
    killed(&mut calls, None);
    let mut out = Vec::new();
    calls.actor_is(ACTOR, alive(0, 100), &mut out);
    assert_eq!(pushed_to(&out), []);
    assert!(matches!(out[..], [Action::Over(ACTOR, Incarnation(0))]), "the head may not have been asked yet");
    calls.actor_is(ACTOR, restarting(0), &mut out);
    calls.actor_is(ACTOR, alive(1, 101), &mut out);
    assert_eq!(pushed_to(&out), [(1, 101, 1)]);
}

#[test]
fn a_life_that_begins_after_a_kill_gets_calls_though_the_killed_one_was_never_known() {
    let mut calls = caller([]);
    killed(&mut calls, None);
    let mut out = Vec::new();
    calls.actor_is(ACTOR, restarting(0), &mut out);
    calls.actor_is(ACTOR, alive(1, 101), &mut out);
    assert_eq!(pushed_to(&out), [(1, 101, 1)]);
}

/// The head did not know of the first when it was started again.
#[test]
fn of_two_lives_of_one_number_the_one_that_the_head_knows_gets_the_calls() {
    for is_lost in [false, true] {
        let mut calls = caller([alive(1, 100)]);
        calls.settle(ACTOR, &mut Vec::new());
        if is_lost {
            calls.connection_lost(ProcessId(100), 0, &mut Vec::new());
        }
        let mut out = Vec::new();
        calls.actor_is(ACTOR, alive(1, 101), &mut out);
        assert_eq!(pushed_to(&out), [(1, 101, 1)], "what was in flight is tried again there");
        calls.connection_lost(ProcessId(100), 0, &mut out);
        assert_eq!(calls.life_of(ACTOR), Some(Incarnation(1)));
        calls.watch_anew(&mut out);
        assert!(!out.iter().any(|action| matches!(action, Action::Over(..))), "it is not over");
    }
}

proptest! {
    /// Each life is sent the calls of one caller in the order in which they were made, each at most once, and every call
    /// returns or fails.
    #[test]
    fn calls_of_one_caller_are_sent_in_order_in_every_life(steps in steps()) {
        let class: Arc<str> = "Counter".into();
        let mut bench = Bench::default();
        let mut made = 0;
        for step in steps {
            match step {
                Step::Call(resolved, retries) => {
                    made += 1;
                    if !resolved {
                        bench.unresolved.push(made);
                    }
                    let class = class.clone();
                    bench.with(|calls, out| calls.submit(ACTOR, &class, call(made, resolved, retries), out));
                }
                Step::Resolve(which) if !bench.unresolved.is_empty() => {
                    let at = which % bench.unresolved.len();
                    let seq = bench.unresolved.swap_remove(at);
                    bench.with(|calls, _| calls.resolved(ACTOR, task(seq), Vec::new()));
                }
                Step::Return(which) if !bench.running.is_empty() => {
                    let seq = bench.running.swap_remove(which % bench.running.len());
                    let worker = address(bench.life).process;
                    if bench.calls.finished(worker, task(seq), 0).is_some() {
                        bench.returned.push(seq);
                    }
                    bench.with(|_, _| {});
                }
                Step::Restart => {
                    bench.running.clear();
                    bench.restarting(bench.life);
                    bench.life += 1;
                    bench.connections += 1;
                    bench.alive();
                }
                Step::Break => {
                    let (worker, now) = (address(bench.life).process, bench.now_ms);
                    bench.with(|calls, out| calls.connection_lost(worker, now, out));
                }
                Step::Wait => {
                    bench.now_ms += contact_limit_ms();
                    if !bench.calls.lost.is_empty() {
                        bench.running.clear();
                        bench.connections += 1;
                    }
                    let now = bench.now_ms;
                    bench.with(|calls, out| {
                        calls.tick(now, |_| false, out);
                    });
                }
                Step::Cancel(which) if made > 0 => {
                    let seq = which as u64 % made + 1;
                    bench.with(|calls, out| {
                        calls.cancel(&mut wanted(seq, false), out);
                    });
                }
                _ => {}
            }
            for life in &bench.sent {
                prop_assert!(life.is_sorted_by(|a, b| a < b), "a life was sent {life:?}");
            }
        }
        // Everything that is still open ends with the actor.
        let cause = Box::new(Error::NoSession);
        bench.with(|calls, out| calls.actor_is(ACTOR, ActorState::Dead { cause }, out));
        let mut done: Vec<u64> = bench.failed.iter().chain(&bench.returned).copied().collect();
        done.sort_unstable();
        prop_assert_eq!(done, (1..=made).collect::<Vec<_>>());
    }
}

fn alive_with(calls: &[(u64, u32)]) -> Bench {
    let class: Arc<str> = "Counter".into();
    let mut bench = Bench::default();
    for (seq, retries) in calls {
        let class = class.clone();
        bench.with(|state, out| state.submit(ACTOR, &class, call(*seq, true, *retries), out));
    }
    bench.alive();
    bench
}

#[test]
fn calls_are_not_given_up_while_nobody_could_say_that_their_process_has_ended() {
    let mut bench = alive_with(&[(1, 0)]);
    let worker = address(0).process;
    bench.with(|calls, out| calls.connection_lost(worker, 0, out));
    let (limit, mut out) = (contact_limit_ms(), Vec::new());
    for turn in 1..4 {
        bench.calls.no_cause_is_told(turn * limit);
        bench.calls.tick(turn * limit, |_| false, &mut out);
    }
    assert!(out.is_empty() && bench.calls.waits_for_causes());
    bench.calls.tick(4 * limit, |_| false, &mut out);
    let is_given_up = out.iter().any(|action| matches!(action, Action::Fail { .. }));
    assert!(is_given_up, "contact is lost, and somebody would have said more");
}

#[test]
fn an_actor_whose_connection_broke_is_unavailable_to_what_was_in_flight_and_reached_by_what_comes_later() {
    let mut bench = alive_with(&[(1, 0), (2, 1)]);
    assert_eq!(bench.running, [1, 2]);
    let worker = address(0).process;
    bench.with(|calls, out| calls.connection_lost(worker, 100, out));
    let class: Arc<str> = "Counter".into();
    bench.with(|calls, out| calls.submit(ACTOR, &class, call(3, true, 0), out));
    // The head is given time to say that the process ended. It says that it lives, or nothing.
    bench.alive();
    assert_eq!(bench.running, [1, 2]);
    let mut out = Vec::new();
    assert_eq!(bench.calls.tick(101, |_| false, &mut out), Some(contact_limit_ms() - 1));
    assert_eq!(bench.calls.tick(100 + contact_limit_ms(), |_| false, &mut out), None);
    let error = out.iter().find_map(|action| match action {
        Action::Fail { call, error } => Some((call.spec.id.seq, error.clone())),
        _ => None,
    });
    let Some((1, Error::ActorUnavailable { cause, .. })) = error else { panic!("{error:?}") };
    assert!(cause.to_string().contains("lost contact"), "{cause}");
    bench.running.clear();
    bench.take_in(out);
    // The one with a retry goes again, and before the later one.
    assert_eq!(bench.running, [2, 3]);
    // What the attempt that was given up ends with is not its result.
    assert!(bench.calls.finished(worker, task(2), 0).is_none());
    for (seq, attempt) in [(2, 1), (3, 0)] {
        assert!(bench.calls.finished(worker, task(seq), attempt).is_some());
    }
}

#[test]
fn calls_of_an_actor_whose_process_is_gone_wait_until_the_head_says_what_becomes_of_it() {
    let mut bench = alive_with(&[(1, 0), (2, 3)]);
    let worker = address(0).process;
    bench.with(|calls, out| calls.connection_lost(worker, 0, out));
    let class: Arc<str> = "Counter".into();
    bench.with(|calls, out| calls.submit(ACTOR, &class, call(3, true, 0), out));
    bench.running.clear();
    for turn in 1..5 {
        bench.with(|calls, out| {
            calls.tick(turn * contact_limit_ms(), |process| process == worker, out);
        });
        bench.with(|calls, out| calls.connection_lost(worker, turn * contact_limit_ms(), out));
    }
    assert_eq!(bench.failed, [1], "what was in flight and is not tried again");
    assert_eq!(bench.running, [0; 0], "nothing is sent to who is gone");
    bench.restarting(0);
    (bench.life, bench.connections) = (1, 1);
    bench.alive();
    assert_eq!(bench.running, [2, 3]);
    assert!(bench.calls.finished(address(1).process, task(2), 1).is_some(), "it cost one retry");
}

#[test]
fn results_that_arrive_over_the_next_connection_count() {
    let mut bench = alive_with(&[(1, 0)]);
    let worker = address(0).process;
    bench.with(|calls, out| calls.connection_lost(worker, 100, out));
    assert!(bench.calls.finished(worker, task(1), 0).is_some());
}

#[test]
fn an_actor_that_ended_while_contact_was_lost_is_what_the_head_says() {
    let mut bench = alive_with(&[(1, 0), (2, 1)]);
    let worker = address(0).process;
    bench.with(|calls, out| calls.connection_lost(worker, 100, out));
    bench.restarting(0);
    assert_eq!(bench.failed, [1]);
    bench.life = 1;
    bench.connections = 1;
    bench.running.clear();
    bench.alive();
    assert_eq!(bench.running, [2]);
    // Nothing is left of the loss.
    let mut out = Vec::new();
    assert_eq!(bench.calls.tick(100 + contact_limit_ms(), |_| false, &mut out), None);
    assert!(out.is_empty());
}

#[test]
fn what_is_said_of_an_earlier_life_than_the_known_one_changes_nothing() {
    let mut bench = Bench { life: 1, ..Bench::default() };
    let class: Arc<str> = "Counter".into();
    bench.with(|calls, out| calls.submit(ACTOR, &class, call(1, true, 0), out));
    bench.alive();
    assert_eq!(bench.running, [1]);
    // A head that was started again has found it on a node that was away.
    bench.life = 0;
    bench.alive();
    bench.restarting(0);
    bench.life = 1;
    bench.alive();
    assert_eq!(bench.failed, [0; 0]);
    let worker = address(1).process;
    assert!(bench.calls.finished(worker, task(1), 0).is_some(), "it goes on");
    // And the head is told that the earlier one is over, when its end is known here.
    bench.restarting(1);
    bench.life = 0;
    bench.alive();
    let mut out = Vec::new();
    bench.calls.watch_anew(&mut out);
    assert!(matches!(out[..], [Action::Over(ACTOR, Incarnation(1)), Action::Watch(ACTOR)]));
}

#[test]
fn calls_in_flight_are_bounded_by_bytes_and_each_is_sent_in_the_end() {
    let class: Arc<str> = "Counter".into();
    let mut bench = Bench::default();
    for seq in 1..=1_000 {
        let mut large = call(seq, true, 0);
        let value = wingbeat_core::value::Packed::plain(vec![0; 95 << 10].into());
        Arc::make_mut(&mut large.spec).args = vec![wingbeat_core::spec::Arg::Value(value)];
        let class = class.clone();
        bench.with(|calls, out| calls.submit(ACTOR, &class, large, out));
    }
    bench.alive();
    let worker = address(0).process;
    let mut done = 0;
    while !bench.running.is_empty() {
        assert!(bench.running.len() * (95 << 10) <= IN_FLIGHT_BYTES);
        let seq = bench.running.remove(0);
        assert!(bench.calls.finished(worker, task(seq), 0).is_some());
        done += 1;
        bench.with(|_, _| {});
    }
    assert_eq!(done, 1_000);
}

#[test]
fn calls_in_flight_are_bounded_by_their_number_and_each_is_sent_in_the_end() {
    let class: Arc<str> = "Counter".into();
    let mut bench = Bench::default();
    let all = IN_FLIGHT as u64 + 10;
    for seq in 1..=all {
        bench.with(|calls, out| calls.submit(ACTOR, &class, call(seq, true, 0), out));
    }
    bench.alive();
    assert_eq!((IN_FLIGHT, bench.running.len()), (8_192, 8_192), "guarantees.md says so");
    let worker = address(0).process;
    for seq in 1..=10 {
        assert!(bench.calls.finished(worker, task(seq), 0).is_some());
    }
    bench.with(|_, _| {});
    assert_eq!(bench.running.last(), Some(&all));
}

#[test]
fn a_call_that_no_message_can_hold_fails_alone() {
    let mut huge = call(2, true, 0);
    let value = wingbeat_core::value::Packed::plain(vec![0; wingbeat_net::messages::MESSAGE_LIMIT].into());
    Arc::make_mut(&mut huge.spec).args = vec![wingbeat_core::spec::Arg::Value(value)];
    let class: Arc<str> = "Counter".into();
    let mut bench = alive_with(&[(1, 0)]);
    bench.with(|calls, out| calls.submit(ACTOR, &class, huge, out));
    bench.with(|calls, out| calls.submit(ACTOR, &class, call(3, true, 0), out));
    assert_eq!((bench.running, bench.failed), (vec![1, 3], vec![2]));
}

fn call_of(seq: u64, bytes: usize) -> Call {
    let mut call = call(seq, true, 0);
    let packed = wingbeat_core::value::Packed::plain(vec![0; bytes].into());
    Arc::make_mut(&mut call.spec).args = vec![Arg::Value(packed)];
    call
}

#[test]
fn calls_in_flight_are_bounded_by_their_bytes_and_keep_their_order() {
    let class: Arc<str> = "Counter".into();
    let mut bench = Bench::default();
    let of_each = IN_FLIGHT_BYTES / 4;
    for seq in 1..=10 {
        bench.with(|calls, out| calls.submit(ACTOR, &class, call_of(seq, of_each), out));
    }
    bench.alive();
    assert_eq!(bench.running, [1, 2, 3], "with what a call takes itself, the fourth is too much");
    // One that is larger than all that may be in flight goes alone.
    bench.with(|calls, out| calls.submit(ACTOR, &class, call_of(11, IN_FLIGHT_BYTES * 2), out));
    let worker = address(0).process;
    for seq in 1..=10 {
        assert!(bench.calls.finished(worker, task(seq), 0).is_some());
        bench.running.retain(|running| *running != seq);
        bench.with(|_, _| {});
        let most = if seq == 10 { 1 } else { 3 };
        assert!(bench.running.len() <= most, "{:?}", bench.running);
    }
    assert_eq!(bench.running, [11]);
    assert_eq!(bench.sent[0], (1..=11).collect::<Vec<u64>>());
}

#[test]
fn a_call_over_the_limit_of_pending_ones_fails_and_the_others_go_on() {
    let class: Arc<str> = "Counter".into();
    let mut bench = Bench::default();
    for seq in 1..=3 {
        let call = Call { limit: Some(2), ..call(seq, true, 0) };
        bench.with(|calls, out| calls.submit(ACTOR, &class, call, out));
    }
    bench.alive();
    assert_eq!((&bench.running[..], &bench.failed[..]), (&[1, 2][..], &[3][..]));
    assert!(bench.calls.finished(address(0).process, task(1), 0).is_some());
    let call = Call { limit: Some(2), ..call(4, true, 0) };
    bench.with(|calls, out| calls.submit(ACTOR, &class, call, out));
    assert_eq!(bench.sent[0], [1, 2, 4]);
}

#[test]
fn a_call_that_is_cancelled_by_force_is_answered_and_its_process_is_only_asked_to_stop_it() {
    let class: Arc<str> = "Counter".into();
    let mut bench = Bench::default();
    bench.with(|calls, out| calls.submit(ACTOR, &class, call(1, true, 5), out));
    bench.alive();
    let mut out = Vec::new();
    bench.calls.cancel(&mut wanted(1, true), &mut out);
    assert!(matches!(
        &out[..],
        [Action::Cancel { force: false, .. }, Action::Answer { error: Error::Cancelled { .. }, .. }]
    ));
    // It is not tried again in the next life.
    bench.restarting(0);
    bench.life += 1;
    bench.alive();
    assert_eq!(bench.failed, [1]);
    assert_eq!(bench.sent.len(), 1);
}
