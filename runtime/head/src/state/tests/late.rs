//! What a head that was started again is told late, twice, or wrongly by somebody who did not know better.

use std::sync::Arc;

use super::*;

/// How long those that were there before have to come back, and when it is looked whether everybody is.
const GRACE: Millis = 10_000;
const LOOKS: Millis = 250;

const WORKER: ProcessId = ProcessId(77);

fn recovered(facts: Vec<Fact>) -> Bench {
    let state = State::recover(ClusterId(1), 1 << 32, facts, GRACE);
    let mut bench = Bench { state, ..Bench::empty() };
    bench.state.keep_facts();
    bench
}

fn job(driver: ProcessId) -> Fact {
    Fact::Job(Box::new(job_of(driver)), true)
}

fn node(id: u64) -> NodeInfo {
    let mut bench = Bench::empty();
    bench.node(id, cpus(4.0));
    bench.state.nodes.get(NodeId(id)).unwrap().info.clone()
}

fn start(lease: u64, holder: LeaseHolder) -> LeaseStart {
    let (lease, job, resources) = (LeaseId(lease), JobId(DRIVER.0), cpus(1.0));
    LeaseStart { lease, job, resources, gpus: Vec::new(), bundle: None, captures: None, holder }
}

/// A life of an actor, as a node reports it.
fn life(spec: &ActorSpec, life: u32, lease: u64) -> RunningLease {
    let start = start(lease, LeaseHolder::Actor(Arc::new(spec.clone()), Incarnation(life), 0));
    let worker = Some((address(worker_of(start.lease)), 77));
    RunningLease { start, worker, started: Some(Ok(())), terminated: None, is_ending: false }
}

fn tasks(lease: u64, worker: Option<ProcessId>) -> RunningLease {
    let start = start(lease, LeaseHolder::Tasks(DRIVER, Arc::new(shape(cpus(1.0)))));
    let worker = worker.map(|worker| (address(worker), 77));
    RunningLease { start, worker, started: None, terminated: None, is_ending: false }
}

impl Bench {
    fn comes_back(&mut self, id: u64, leases: Vec<RunningLease>, workers: Vec<(ProcessId, JobId)>) {
        let running = Running { leases, workers, ..Running::default() };
        self.step(Event::NodeJoined(Box::new(node(id)), running));
    }

    fn holds(&mut self, process: ProcessId, leases: Vec<LeaseId>, actors: Vec<ActorId>) {
        self.says(process, HeadMessage::Holds { leases, actors, is_all: true });
    }

    fn ended(&self) -> Vec<LeaseId> {
        let ended = self.ordered.iter().filter_map(|(_, order)| match order {
            NodeMessage::EndLease { lease, .. } => Some(*lease),
            _ => None,
        });
        ended.collect()
    }
}

fn keeper() -> ActorSpec {
    ActorSpec { detached: true, max_restarts: 10, ..named(actor_of(DRIVER, 5), "keeper") }
}

/// A head to which all have come back that it knew of; a worker process that has made an actor was not among them.
fn all_back_but_the_maker() -> Bench {
    let mut bench = recovered(vec![job(DRIVER), Fact::Node(Box::new(node(1)), None)]);
    bench.driver(DRIVER);
    bench.comes_back(1, Vec::new(), vec![(WORKER, JobId(DRIVER.0))]);
    bench.says(DRIVER, HeadMessage::WatchActor(ActorId(5)));
    bench.holds(DRIVER, Vec::new(), Vec::new());
    bench
}

fn made() -> HeadMessage {
    let spec = ActorSpec { job: JobId(DRIVER.0), ..actor_of(WORKER, 5) };
    HeadMessage::Made { spec: Arc::new(spec), life: None, moves: 0, place: None }
}

#[test]
fn an_actor_is_not_called_dead_before_its_maker_had_time_to_say_what_it_was() {
    let mut bench = all_back_but_the_maker();
    bench.tick(LOOKS);
    assert!(!bench.state.is_recovering());
    assert!(bench.actor_states(DRIVER, 5).is_empty(), "its maker may still come back");
    bench.step(Event::ProcessConnected(WORKER));
    bench.says(WORKER, made());
    bench.start_actor(ActorId(5), 0);
    assert!(matches!(bench.actor_states(DRIVER, 5).last(), Some(ActorState::Alive { .. })));
}

#[test]
fn an_actor_of_which_nobody_has_told_in_time_is_dead() {
    let mut bench = all_back_but_the_maker();
    bench.tick(LOOKS);
    assert!(bench.state.next_tick().is_some());
    bench.tick(GRACE);
    assert!(matches!(bench.actor_states(DRIVER, 5).last(), Some(ActorState::Dead { .. })));
}

#[test]
fn an_actor_that_is_killed_before_its_maker_has_told_of_it_never_begins() {
    let mut bench = all_back_but_the_maker();
    bench.tick(LOOKS);
    bench.says(DRIVER, HeadMessage::KillActor { actor: ActorId(5), may_restart: false });
    bench.step(Event::ProcessConnected(WORKER));
    bench.says(WORKER, made());
    assert!(matches!(bench.actor_states(DRIVER, 5).last(), Some(ActorState::Dead { .. })));
    assert_eq!(bench.starts().len(), 0);
}

/// A head to which node 1 is not back, where life 1 of an actor of the driver runs under lease 9.
fn before_the_node_of_an_actor() -> Bench {
    let mut bench = recovered(vec![job(DRIVER), Fact::Node(Box::new(node(1)), None)]);
    bench.driver(DRIVER);
    bench
}

fn of_driver() -> ActorSpec {
    ActorSpec { max_restarts: 10, ..actor_of(DRIVER, 5) }
}

#[test]
fn an_actor_that_is_killed_before_it_is_back_ends_when_it_is() {
    let over = |life| HeadMessage::LifeOver { actor: ActorId(5), life: Incarnation(life) };
    let killed = HeadMessage::KillActor { actor: ActorId(5), may_restart: true };
    // Others have heard of the end of an earlier life only.
    for words in [vec![over(1)], vec![over(1), over(0)], vec![killed.clone()], vec![killed, over(0)]] {
        let mut bench = before_the_node_of_an_actor();
        for word in words {
            bench.says(DRIVER, word);
        }
        bench.comes_back(1, vec![life(&of_driver(), 1, 9)], Vec::new());
        assert_eq!(bench.ended(), [LeaseId(9)]);
    }
    let mut bench = before_the_node_of_an_actor();
    bench.says(DRIVER, over(0));
    bench.comes_back(1, vec![life(&of_driver(), 1, 9)], Vec::new());
    assert_eq!(bench.ended(), []);
}

#[test]
fn the_next_life_of_an_actor_that_is_killed_while_nodes_come_back_begins_when_the_last_one_has_ended() {
    let nodes = [1, 2].map(|id| Fact::Node(Box::new(node(id)), None));
    let mut bench = recovered(vec![job(DRIVER)].into_iter().chain(nodes).collect());
    bench.driver(DRIVER);
    bench.comes_back(1, vec![life(&of_driver(), 0, 9)], Vec::new());
    bench.holds(DRIVER, Vec::new(), vec![ActorId(5)]);
    // Its node is cut off, and goes on for a while.
    bench.step(Event::NodeAway(NodeId(1)));
    bench.says(DRIVER, HeadMessage::LifeOver { actor: ActorId(5), life: Incarnation(0) });
    bench.step(Event::NodeLost(NodeId(2), "a test".into()));
    bench.node(3, cpus(4.0));
    bench.tick(LOOKS);
    assert!(!bench.state.is_recovering());
    assert_eq!(bench.starts().len(), 0, "its last life may still run");
    bench.says(NodeId(1), HeadMessage::LeaseEnded(LeaseId(9)));
    bench.start_actor(ActorId(5), 1);
}

#[test]
fn the_next_life_of_an_actor_waits_also_for_one_that_was_over_before_the_head_was_started_again() {
    let facts = vec![job(DRIVER), Fact::Node(Box::new(node(1)), None), kept(keeper(), 1)];
    let mut bench = recovered(facts);
    bench.driver(DRIVER);
    bench.comes_back(1, vec![life(&keeper(), 0, 9)], Vec::new());
    bench.holds(DRIVER, Vec::new(), vec![ActorId(5)]);
    bench.tick(LOOKS);
    assert!(!bench.state.is_recovering());
    assert_eq!(bench.ended(), [LeaseId(9)]);
    assert_eq!(bench.starts().len(), 0, "its last life may still run");
    bench.says(NodeId(1), HeadMessage::LeaseEnded(LeaseId(9)));
    assert_eq!(bench.starts().len(), 1);
}

#[test]
fn an_actor_that_is_killed_for_good_before_it_is_back_does_not_finish_what_it_does() {
    let mut bench = before_the_node_of_an_actor();
    bench.says(DRIVER, HeadMessage::KillActor { actor: ActorId(5), may_restart: false });
    // Its last handle was dropped then.
    bench.says(DRIVER, HeadMessage::TerminateActor { actor: ActorId(5), by: "the drop of its last handle".into() });
    bench.says(
        DRIVER,
        HeadMessage::Made { spec: Arc::new(of_driver()), life: Some(Incarnation(1)), moves: 0, place: None },
    );
    bench.comes_back(1, vec![life(&of_driver(), 1, 9)], Vec::new());
    assert_eq!(bench.ended(), [LeaseId(9)]);
    assert!(!bench.ordered.iter().any(|(_, order)| matches!(order, NodeMessage::DrainActor { .. })));
}

#[test]
fn an_actor_that_was_to_end_in_order_does_not_live_again_under_the_next_head() {
    // Its process has ended meanwhile, or is about to, or still answers a call.
    let nobody: fn() -> Vec<RunningLease> = Vec::new;
    let ending = || vec![RunningLease { is_ending: true, ..life(&keeper(), 0, 9) }];
    for leases in [nobody, ending, || vec![life(&keeper(), 0, 9)]] {
        let mut before = recovered(vec![job(DRIVER), Fact::Node(Box::new(node(1)), None), kept(keeper(), 0)]);
        before.driver(DRIVER);
        before.comes_back(1, vec![life(&keeper(), 0, 9)], Vec::new());
        before.says(DRIVER, HeadMessage::TerminateActor { actor: ActorId(5), by: "its user".into() });
        let mut bench = recovered(before.state.durable());
        bench.driver(DRIVER);
        bench.comes_back(1, leases(), Vec::new());
        bench.tick(GRACE);
        let drained = bench.ordered.iter().any(|(_, order)| matches!(order, NodeMessage::DrainActor { .. }));
        assert_eq!(drained, leases().iter().any(|lease| !lease.is_ending));
        bench.says(NodeId(1), HeadMessage::LeaseEnded(LeaseId(9)));
        bench.tick(GRACE);
        assert_eq!(bench.starts().len(), 0);
        assert!(bench.state.picture().actors.is_empty());
    }
}

#[test]
fn an_actor_does_not_live_again_in_a_job_that_is_over() {
    let mut bench = recovered(vec![job(DRIVER), Fact::Node(Box::new(node(1)), None), kept(keeper(), 0)]);
    bench.step(Event::ProcessLost(DRIVER, Some(JobId(DRIVER.0))));
    bench.step(Event::ProcessConnected(WORKER));
    let spec = ActorSpec { max_restarts: 10, job: JobId(DRIVER.0), ..actor_of(WORKER, 6) };
    bench.says(WORKER, HeadMessage::Made { spec: Arc::new(spec), life: Some(Incarnation(0)), moves: 0, place: None });
    bench.says(WORKER, HeadMessage::WatchActor(ActorId(6)));
    bench.comes_back(1, vec![life(&keeper(), 0, 9)], vec![(WORKER, JobId(DRIVER.0))]);
    bench.tick(GRACE);
    assert!(matches!(bench.actor_states(WORKER, 6).last(), Some(ActorState::Dead { .. })));
    assert_eq!(bench.starts().len(), 0);
}

#[test]
fn a_lease_that_its_owner_never_heard_of_is_ended_and_not_granted() {
    for worker in [None, Some(WORKER)] {
        let mut bench = recovered(vec![job(DRIVER), Fact::Node(Box::new(node(1)), None)]);
        bench.driver(DRIVER);
        bench.comes_back(1, vec![tasks(9, worker)], Vec::new());
        bench.says(NodeId(1), HeadMessage::LeaseReady { lease: LeaseId(9), worker: address(WORKER), pid: 77 });
        // It was said before.
        bench.holds(DRIVER, Vec::new(), Vec::new());
        assert_eq!(bench.granted(DRIVER), []);
        assert_eq!(bench.ended().first(), Some(&LeaseId(9)));
    }
}

#[test]
fn nothing_is_granted_to_an_owner_that_has_not_said_what_it_wants() {
    let mut bench = recovered(vec![job(DRIVER), Fact::Node(Box::new(node(1)), None)]);
    bench.comes_back(1, vec![tasks(9, Some(WORKER))], Vec::new());
    bench.says(NodeId(1), HeadMessage::LeaseEnded(LeaseId(9)));
    assert_eq!(bench.starts().len(), 0, "it may want none");
    bench.driver(DRIVER);
    bench.holds(DRIVER, vec![LeaseId(9)], Vec::new());
    bench.demand(DRIVER, cpus(1.0), 1);
    assert_eq!(bench.starts().len(), 1);
}

/// Others of its job may still say that they refer to what it had, on nodes where it was stored in the name of a job that is over.
#[test]
fn of_a_process_that_ended_before_the_head_heard_of_it_the_job_is_known() {
    let mut bench = recovered(vec![job(DRIVER), Fact::Node(Box::new(node(1)), None)]);
    bench.driver(DRIVER);
    bench.holds(DRIVER, Vec::new(), Vec::new());
    let (own, over) = (JobId(DRIVER.0), JobId(99));
    // The end of one was taken in by the last head, and that of the other was not.
    let running = Running { ended: vec![(WORKER, own)], ..Running::default() };
    bench.step(Event::NodeJoined(Box::new(node(1)), running));
    let (lease, node, process, exit) = (None, NodeId(1), OTHER, exit());
    let death = WorkerDeath { lease, node, process, pid: 77, job: own, exit, started: 0, is_moved: false };
    bench.says(NodeId(1), HeadMessage::WorkerDied(death));
    bench.tick(GRACE);
    let unknown = ProcessId(98);
    bench.says(NodeId(1), HeadMessage::Owners(BTreeMap::from([(over, [WORKER, OTHER, unknown].into())])));
    let said = bench.ordered.iter().filter_map(|(_, message)| match message {
        NodeMessage::OwnersGone { owners, are_jobs_over } => Some((owners.clone(), *are_jobs_over)),
        _ => None,
    });
    let mut known = vec![WORKER, OTHER];
    known.sort_unstable();
    assert_eq!(said.collect::<Vec<_>>(), [(known, false), (vec![unknown], true)]);
}

#[test]
fn an_owner_that_is_not_back_hears_later_how_its_worker_process_ended() {
    for is_ending in [false, true] {
        let mut bench = recovered(vec![job(DRIVER), Fact::Node(Box::new(node(1)), None)]);
        bench.comes_back(1, vec![RunningLease { is_ending, ..tasks(9, Some(WORKER)) }], Vec::new());
        let (lease, node) = (Some(LeaseId(9)), NodeId(1));
        let (process, pid, exit) = (WORKER, 77, exit());
        let death = WorkerDeath { lease, node, process, pid, job: JobId(DRIVER.0), exit, started: 0, is_moved: false };
        bench.says(NodeId(1), HeadMessage::WorkerDied(death));
        bench.driver(DRIVER);
        bench.holds(DRIVER, vec![LeaseId(9)], Vec::new());
        let died = bench.told_to(DRIVER, |event| match event {
            HeadEvent::WorkerDied(death) => death.lease,
            _ => None,
        });
        assert_eq!(died, [LeaseId(9)]);
    }
}

#[test]
fn what_a_process_gave_back_before_it_ended_is_no_reason_to_end_the_worker_process() {
    let mut bench = recovered(vec![job(DRIVER), Fact::Node(Box::new(node(1)), None)]);
    bench.driver(DRIVER);
    bench.step(Event::ProcessConnected(OTHER));
    bench.holds(OTHER, Vec::new(), Vec::new());
    bench.step(Event::ProcessLost(OTHER, None));
    let mut given_back = tasks(9, Some(WORKER));
    given_back.start.holder = LeaseHolder::Tasks(OTHER, Arc::new(shape(cpus(1.0))));
    bench.comes_back(1, vec![given_back], vec![(WORKER, JobId(DRIVER.0))]);
    let kills = bench.ordered.iter().filter_map(|(_, order)| match order {
        NodeMessage::EndLease { kill, .. } => Some(kill.is_some()),
        _ => None,
    });
    assert_eq!(kills.collect::<Vec<_>>(), [false], "others may read what it owns");
}

#[test]
fn nobody_waits_for_a_driver_that_is_dead_because_its_leases_were_there() {
    let mut bench = recovered(vec![job(DRIVER), Fact::Node(Box::new(node(1)), None)]);
    bench.step(Event::ProcessLost(DRIVER, Some(JobId(DRIVER.0))));
    bench.comes_back(1, vec![tasks(9, Some(WORKER))], vec![(WORKER, JobId(DRIVER.0))]);
    bench.tick(LOOKS);
    assert!(!bench.state.is_recovering());
    bench.state.audit_all().unwrap();
}

#[test]
fn an_actor_that_was_told_to_end_does_not_live_again() {
    let mut bench = recovered(vec![job(DRIVER), kept(keeper(), 0)]);
    bench.driver(DRIVER);
    bench.says(DRIVER, HeadMessage::WatchActor(ActorId(5)));
    let draining = RunningLease { terminated: Some("its user".into()), ..life(&keeper(), 0, 9) };
    bench.comes_back(1, vec![draining], Vec::new());
    bench.says(NodeId(1), HeadMessage::LeaseEnded(LeaseId(9)));
    assert!(matches!(bench.actor_states(DRIVER, 5).last(), Some(ActorState::Dead { .. })));
}

#[test]
fn a_node_that_was_away_brings_no_actor_back_that_was_killed_meanwhile() {
    let mut bench = recovered(vec![job(DRIVER), Fact::Node(Box::new(node(1)), None)]);
    bench.driver(DRIVER);
    bench.comes_back(1, vec![life(&keeper(), 0, 9)], Vec::new());
    assert_eq!(bench.ended(), [LeaseId(9)]);
    assert!(bench.state.find_actor(keeper().name.as_ref().unwrap(), job_of(DRIVER).id).is_err());
}

#[test]
fn the_latest_life_of_an_actor_is_the_one_that_counts_whichever_node_is_back_first() {
    let of = |latest| {
        let mut bench = recovered(vec![job(DRIVER), kept(keeper(), latest)]);
        bench.driver(DRIVER);
        bench.says(DRIVER, HeadMessage::WatchActor(ActorId(5)));
        bench
    };
    // As it was written down, or not yet.
    for latest in [1, 0] {
        for later_first in [false, true] {
            let mut bench = of(latest);
            let mut back = [(1, life(&keeper(), 0, 9)), (2, life(&keeper(), 1, 10))];
            if later_first {
                back.reverse();
            }
            for (node, life) in back {
                bench.comes_back(node, vec![life], Vec::new());
            }
            assert_eq!(bench.ended(), [LeaseId(9)], "{latest} was written down");
            assert!(matches!(
                bench.actor_states(DRIVER, 5).last(),
                Some(ActorState::Alive { incarnation: Incarnation(1), .. })
            ));
            bench.state.audit_all().unwrap();
        }
    }
}

#[test]
fn an_actor_that_is_told_of_late_and_could_never_be_placed_is_refused() {
    let mut bench = all_back_but_the_maker();
    bench.tick(LOOKS);
    bench.step(Event::ProcessConnected(WORKER));
    let spec = ActorSpec { job: JobId(DRIVER.0), placement: shape(gpus(1.0)), ..actor_of(WORKER, 5) };
    bench.says(WORKER, HeadMessage::Made { spec: Arc::new(spec), life: None, moves: 0, place: None });
    assert!(matches!(bench.actor_states(DRIVER, 5).last(), Some(ActorState::Dead { .. })));
}

#[test]
fn a_node_that_was_being_drained_has_its_time_again_unless_that_was_over() {
    for is_over in [false, true] {
        let mut before = Bench::new(cpus(4.0));
        before.state.keep_facts();
        before.step(Event::NodeJoined(Box::new(node(2)), Running::default()));
        before.drain(2, 60_000, false);
        if is_over {
            before.tick(60_000);
        }
        let mut bench = recovered(before.state.take_facts());
        bench.comes_back(2, Vec::new(), Vec::new());
        let drain = bench.state.nodes.get(NodeId(2)).unwrap().draining.clone().unwrap();
        assert_eq!(drain.deadline, if is_over { 0 } else { 60_000 });
        // And so with the head after that.
        let mut after = recovered(bench.state.durable());
        assert!(
            after.state.drain(0, NodeId(2), None, String::new(), false).0.unwrap_err().to_string().contains("not back")
        );
        after.comes_back(2, Vec::new(), Vec::new());
        assert!(after.state.nodes.get(NodeId(2)).unwrap().draining.is_some());
        after.state.drain(0, NodeId(2), None, String::new(), false).0.unwrap();
        let mut last = recovered(after.state.take_facts());
        last.comes_back(2, Vec::new(), Vec::new());
        assert!(last.state.nodes.get(NodeId(2)).unwrap().draining.is_none());
    }
}

#[test]
fn nodes_that_are_back_hear_which_others_are_lost_whenever_that_is_found_out() {
    let facts = (1..=3).map(|id| Fact::Node(Box::new(node(id)), None)).collect();
    let mut bench = recovered(facts);
    bench.comes_back(1, Vec::new(), Vec::new());
    bench.step(Event::NodeLost(NodeId(2), "a test".into()));
    bench.comes_back(3, Vec::new(), Vec::new());
    let told: Vec<NodeId> = bench
        .ordered
        .iter()
        .filter_map(|(to, order)| matches!(order, NodeMessage::NodeDied(NodeId(2))).then_some(*to))
        .collect();
    assert_eq!(told, [NodeId(1), NodeId(3)]);
}

#[test]
fn whoever_comes_back_hears_of_a_node_that_was_back_and_is_lost_and_that_node_does_not_come_back_again() {
    let mut bench =
        recovered(vec![job(DRIVER), Fact::Node(Box::new(node(1)), None), Fact::Node(Box::new(node(2)), None)]);
    assert!(!bench.state.will_not_come_back(NodeId(1)) && !bench.state.will_not_come_back(NodeId(2)));
    bench.comes_back(1, Vec::new(), Vec::new());
    for id in [1, 2] {
        bench.step(Event::NodeLost(NodeId(id), "a test".into()));
        assert!(bench.state.will_not_come_back(NodeId(id)), "others were told that it is lost");
    }
    let died = |event: &HeadEvent| match event {
        HeadEvent::NodeDied { node, .. } => Some(*node),
        _ => None,
    };
    bench.step(Event::ProcessConnected(OTHER));
    assert_eq!(bench.told_to(OTHER, died), [NodeId(1), NodeId(2)]);
    bench.tick(GRACE);
    bench.step(Event::ProcessConnected(WORKER));
    assert_eq!(bench.told_to(WORKER, died), [], "it knows of no such nodes");
}

/// Two nodes are known, and the first brings an anonymous actor back of which a later life has begun on the second.
fn an_earlier_life_is_back() -> Bench {
    let facts = vec![job(DRIVER), Fact::Node(Box::new(node(1)), None), Fact::Node(Box::new(node(2)), None)];
    let mut bench = recovered(facts);
    bench.driver(DRIVER);
    bench.step(Event::ProcessConnected(OTHER));
    bench.says(OTHER, HeadMessage::WatchActor(ActorId(5)));
    bench.comes_back(1, vec![life(&restartable(), 0, 9)], Vec::new());
    bench
}

fn restartable() -> ActorSpec {
    ActorSpec { max_restarts: 2, ..actor_of(DRIVER, 5) }
}

/// What callers know of later lives: its maker, which life it is in; others, which life is over.
fn told_of_later_lives() -> [Event; 2] {
    let made = HeadMessage::Made { spec: Arc::new(restartable()), life: Some(Incarnation(1)), moves: 0, place: None };
    let over = HeadMessage::LifeOver { actor: ActorId(5), life: Incarnation(0) };
    [Event::Says(DRIVER.into(), made), Event::Says(OTHER.into(), over)]
}

#[test]
fn a_later_life_that_somebody_knows_of_is_awaited_and_not_started_a_second_time() {
    for told in told_of_later_lives() {
        let mut bench = an_earlier_life_is_back();
        bench.step(told);
        assert_eq!(bench.ended(), [LeaseId(9)]);
        bench.says(NodeId(1), HeadMessage::LeaseEnded(LeaseId(9)));
        bench.tick(LOOKS);
        assert_eq!(bench.starts().len(), 0, "it may live");
        bench.comes_back(2, vec![life(&restartable(), 1, 10)], Vec::new());
        bench.holds(DRIVER, Vec::new(), vec![ActorId(5)]);
        bench.holds(OTHER, Vec::new(), Vec::new());
        bench.tick(LOOKS);
        assert!(!bench.state.is_recovering());
        let states = bench.actor_states(OTHER, 5);
        assert!(matches!(states.last(), Some(ActorState::Alive { incarnation: Incarnation(1), .. })), "{states:?}");
        assert!(!states.iter().any(|state| matches!(state, ActorState::Restarting { .. })), "{states:?}");
        assert_eq!((bench.ended(), bench.starts().len()), (vec![LeaseId(9)], 0));
        bench.state.audit_all().unwrap();
    }
}

#[test]
fn a_later_life_that_is_not_back_in_time_is_followed_by_the_next() {
    let mut bench = an_earlier_life_is_back();
    bench.step(told_of_later_lives()[0].clone());
    bench.holds(DRIVER, Vec::new(), vec![ActorId(5)]);
    bench.tick(GRACE);
    bench.says(NodeId(1), HeadMessage::LeaseEnded(LeaseId(9)));
    bench.start_actor(ActorId(5), 2);
    let states = bench.actor_states(OTHER, 5);
    assert!(matches!(states.last(), Some(ActorState::Alive { incarnation: Incarnation(2), .. })), "{states:?}");
}

#[test]
fn a_life_of_which_somebody_tells_late_is_over_and_the_next_begins() {
    let later = HeadMessage::LifeOver { actor: ActorId(5), life: Incarnation(1) };
    let made = HeadMessage::Made { spec: Arc::new(restartable()), life: Some(Incarnation(1)), moves: 0, place: None };
    for told in [later, made] {
        let mut bench = an_earlier_life_is_back();
        bench.comes_back(2, Vec::new(), Vec::new());
        bench.holds(DRIVER, Vec::new(), vec![ActorId(5)]);
        bench.tick(LOOKS);
        assert!(!bench.state.is_recovering());
        bench.says(DRIVER, told);
        assert_eq!(bench.ended(), [LeaseId(9)]);
        bench.says(NodeId(1), HeadMessage::LeaseEnded(LeaseId(9)));
        bench.start_actor(ActorId(5), 2);
        bench.state.audit_all().unwrap();
    }
}

#[test]
fn a_life_that_is_back_is_the_one_that_goes_on_though_it_was_to_begin_elsewhere() {
    let mut bench = an_earlier_life_is_back();
    let (lease, node) = (Some(LeaseId(9)), NodeId(1));
    let (process, pid, exit) = (worker_of(LeaseId(9)), 77, exit());
    let death = WorkerDeath { lease, node, process, pid, job: JobId(DRIVER.0), exit, started: 1, is_moved: false };
    bench.says(NodeId(1), HeadMessage::WorkerDied(death));
    bench.says(NodeId(1), HeadMessage::LeaseEnded(LeaseId(9)));
    let second = bench.starts().pop().expect("its next life is placed").lease;
    bench.comes_back(2, vec![life(&restartable(), 1, 10)], Vec::new());
    assert_eq!(bench.ended(), [second]);
    bench.says(NodeId(1), HeadMessage::LeaseEnded(second));
    let states = bench.actor_states(OTHER, 5);
    assert!(matches!(states.last(), Some(ActorState::Alive { incarnation: Incarnation(1), .. })), "{states:?}");
    bench.state.audit_all().unwrap();
}

#[test]
fn a_move_costs_no_restart_after_a_restart_of_the_head_either() {
    let once = |spec| ActorSpec { max_restarts: 1, ..spec };
    let kept = once(named(actor_of(DRIVER, 5), "moved"));
    let mut before = Bench::new(cpus(4.0));
    before.state.keep_facts();
    let life_before = before.alive(kept.clone());
    before.step(Event::NodeJoined(Box::new(node(2)), Running::default()));
    before.drain(1, 0, false);
    before.tick(1);
    before.says(NodeId(1), HeadMessage::LeaseEnded(life_before));
    let start = before.starts().pop().expect("it is moved");
    assert!(matches!(start.holder, LeaseHolder::Actor(_, Incarnation(1), 1)), "{:?}", start.holder);
    before.says(NodeId(2), HeadMessage::LeaseReady { lease: start.lease, worker: address(WORKER), pid: 77 });

    let is_over = |bench: &mut Bench| {
        bench.tick(LOOKS);
        assert!(!bench.state.is_recovering());
        bench.says(DRIVER, HeadMessage::WatchActor(ActorId(5)));
        let next = bench.start_actor(ActorId(5), 2);
        bench.crash(next);
        let states = bench.actor_states(DRIVER, 5);
        assert!(matches!(states.last(), Some(ActorState::Dead { .. })), "it has cost one by now: {states:?}");
    };
    // As it was written down; the driver, which has made it, holds it.
    let mut bench = recovered(before.state.durable());
    bench.driver(DRIVER);
    bench.step(Event::ProcessConnected(OTHER));
    bench.holds(OTHER, Vec::new(), Vec::new());
    bench.holds(DRIVER, Vec::new(), vec![ActorId(5)]);
    bench.comes_back(1, Vec::new(), Vec::new());
    bench.state.drain(0, NodeId(1), None, String::new(), false).0.unwrap();
    bench.step(Event::NodeLost(NodeId(2), "a test".into()));
    is_over(&mut bench);
    // As its node, or its maker, says.
    let anonymous = once(actor_of(DRIVER, 5));
    for has_node in [true, false] {
        let mut bench = recovered(vec![job(DRIVER), Fact::Node(Box::new(node(1)), None)]);
        bench.driver(DRIVER);
        let mut back = life(&anonymous, 1, 9);
        back.start.holder = LeaseHolder::Actor(Arc::new(anonymous.clone()), Incarnation(1), 1);
        bench.comes_back(1, if has_node { vec![back] } else { Vec::new() }, Vec::new());
        bench.holds(DRIVER, Vec::new(), vec![ActorId(5)]);
        let (spec, life) = (Arc::new(anonymous.clone()), Some(Incarnation(1)));
        bench.says(DRIVER, HeadMessage::Made { spec, life, moves: 1, place: None });
        if has_node {
            let (lease, node, process) = (Some(LeaseId(9)), NodeId(1), worker_of(LeaseId(9)));
            let death = WorkerDeath {
                lease,
                node,
                process,
                pid: 77,
                job: JobId(DRIVER.0),
                exit: exit(),
                started: 1,
                is_moved: false,
            };
            bench.says(NodeId(1), HeadMessage::WorkerDied(death));
            bench.says(NodeId(1), HeadMessage::LeaseEnded(LeaseId(9)));
        }
        is_over(&mut bench);
    }
}

#[test]
fn the_end_of_an_actor_while_the_head_was_away_says_how_and_where_it_ended() {
    let cause_of = |dies: &dyn Fn(&mut Bench)| {
        let facts = vec![job(DRIVER), Fact::Node(Box::new(node(1)), None), Fact::Node(Box::new(node(2)), None)];
        let mut bench = recovered(facts);
        bench.driver(DRIVER);
        bench.says(DRIVER, HeadMessage::WatchActor(ActorId(5)));
        bench.comes_back(1, Vec::new(), Vec::new());
        let (spec, life, place) = (Arc::new(actor_of(DRIVER, 5)), Some(Incarnation(0)), Some((NodeId(2), WORKER)));
        bench.says(DRIVER, HeadMessage::Made { spec, life, moves: 0, place });
        bench.holds(DRIVER, Vec::new(), vec![ActorId(5)]);
        dies(&mut bench);
        bench.tick(LOOKS);
        match bench.actor_states(DRIVER, 5).pop() {
            Some(ActorState::Dead { cause }) => cause.to_string(),
            other => panic!("{other:?}"),
        }
    };
    let crashed = cause_of(&|bench| {
        bench.comes_back(2, Vec::new(), Vec::new());
        let (lease, node, process) = (Some(LeaseId(9)), NodeId(2), WORKER);
        let death = WorkerDeath {
            lease,
            node,
            process,
            pid: 77,
            job: JobId(DRIVER.0),
            exit: exit(),
            started: 1,
            is_moved: false,
        };
        bench.says(NodeId(2), HeadMessage::WorkerDied(death));
    });
    assert!(crashed.contains("pid 77") && crashed.contains("SIGKILL"), "{crashed}");
    let lost = cause_of(&|bench| bench.step(Event::NodeLost(NodeId(2), "its machine is gone".into())));
    assert!(lost.contains("node-000000000002") && lost.contains("its machine is gone"), "{lost}");
    let unknown = cause_of(&|bench| bench.comes_back(2, Vec::new(), Vec::new()));
    assert!(unknown.contains("on node-000000000002 while the head was away"), "{unknown}");
}

/// Two processes asked for an actor of one name at a time, and the head ended when it had written both down.
fn both_of_one_name(lives: [Option<Incarnation>; 2]) -> Bench {
    let kept = |id, life| {
        let spec = ActorSpec { detached: true, max_restarts: 10, ..named(actor_of(DRIVER, id), "keeper") };
        Fact::Actor(KeptActor { life, ..KeptActor::new(spec) })
    };
    let mut bench = recovered(vec![job(DRIVER), kept(5, lives[0]), kept(6, lives[1])]);
    bench.node(1, cpus(4.0));
    bench.driver(DRIVER);
    bench
}

#[test]
fn of_two_actors_of_one_name_that_were_written_down_one_lives() {
    for (lives, lasts) in [([None, None], 5), ([None, Some(Incarnation(0))], 6), ([Some(Incarnation(0)), None], 5)] {
        let mut bench = both_of_one_name(lives);
        let gone = ActorId(11 - lasts);
        assert!(bench.state.take_facts().iter().any(|fact| matches!(fact, Fact::ActorGone(id) if *id == gone)));
        // Whoever asked for the other asks again.
        let spec = ActorSpec { detached: true, ..named(actor_of(DRIVER, gone.0), "keeper") };
        let (again, _) = bench.state.create_actor(0, spec.clone(), true);
        assert_eq!(again.unwrap().id, ActorId(lasts));
        assert!(matches!(bench.state.create_actor(0, spec, false).0, Err(Error::ActorNameTaken { .. })));
        bench.holds(DRIVER, Vec::new(), Vec::new());
        bench.tick(GRACE);
        assert!(!bench.state.is_recovering());
        let name = ScopedName { namespace: "test".into(), name: "keeper".into() };
        assert_eq!(bench.state.find_actor(&name, JobId(DRIVER.0)).unwrap().id, ActorId(lasts));
        bench.state.audit_all().unwrap();
    }
}

#[test]
fn an_actor_of_which_its_maker_tells_before_anybody_tells_of_its_job_begins() {
    let mut bench = Bench::empty();
    bench.state.keep_facts();
    let actions = bench.state.somebody_returns(0, GRACE);
    bench.take_in(actions);
    bench.comes_back(1, Vec::new(), vec![(WORKER, JobId(DRIVER.0))]);
    bench.step(Event::ProcessConnected(WORKER));
    bench.says(WORKER, made());
    bench.holds(WORKER, Vec::new(), vec![ActorId(5)]);
    bench.driver(DRIVER);
    bench.says(DRIVER, HeadMessage::WatchActor(ActorId(5)));
    bench.holds(DRIVER, Vec::new(), Vec::new());
    let actions = bench.state.remember(LOOKS, vec![job(DRIVER)]);
    bench.take_in(actions);
    bench.tick(GRACE);
    bench.start_actor(ActorId(5), 0);
    assert!(matches!(bench.actor_states(DRIVER, 5).last(), Some(ActorState::Alive { .. })));
    bench.state.audit_all().unwrap();
}

#[test]
fn a_named_actor_is_not_buried_with_a_maker_that_is_on_its_way_back() {
    let spec = ActorSpec { job: JobId(DRIVER.0), ..named(actor_of(WORKER, 5), "made") };
    let facts = vec![job(DRIVER), Fact::Node(Box::new(node(1)), None), Fact::Actor(KeptActor::new(spec))];
    let mut bench = recovered(facts);
    bench.driver(DRIVER);
    bench.comes_back(1, Vec::new(), vec![(WORKER, JobId(DRIVER.0))]);
    bench.says(DRIVER, HeadMessage::WatchActor(ActorId(5)));
    bench.holds(DRIVER, Vec::new(), Vec::new());
    bench.tick(LOOKS);
    assert!(bench.state.is_recovering(), "its maker lives, and has not said what it has");
    bench.step(Event::ProcessConnected(WORKER));
    bench.holds(WORKER, Vec::new(), vec![ActorId(5)]);
    bench.tick(LOOKS);
    bench.start_actor(ActorId(5), 0);
    assert!(matches!(bench.actor_states(DRIVER, 5).last(), Some(ActorState::Alive { .. })));
}
