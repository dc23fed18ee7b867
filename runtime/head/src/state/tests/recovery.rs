//! What a head that was started again does with those that may still come back.

use super::*;

/// How long those that were there before have to come back.
const GRACE: Millis = 10_000;

/// When it is looked whether everybody is back.
const LOOKS: Millis = 250;

/// A head that knows one detached actor from the last one, and a driver that looks for it.
fn recovered(life: u32) -> Bench {
    let spec = ActorSpec { detached: true, max_restarts: 10, ..named(actor_of(OTHER, 5), "keeper") };
    let mut job = job_of(OTHER);
    job.executable.hash = "program".into();
    let facts = vec![Fact::Job(Box::new(job), true), kept(spec, life)];
    let mut bench = Bench { state: State::recover(ClusterId(1), 1 << 32, facts, GRACE), ..Bench::empty() };
    bench.state.keep_facts();
    bench.driver(DRIVER);
    bench
}

fn keeper() -> ActorId {
    ActorId(5)
}

#[test]
fn whoever_asks_for_an_actor_that_may_come_back_hears_of_its_next_life() {
    let mut bench = recovered(0);
    let found = bench
        .state
        .find_actor(&ScopedName { namespace: "test".into(), name: "keeper".into() }, job_of(DRIVER).id)
        .unwrap();
    assert_eq!(found.id, keeper());
    bench.says(DRIVER, HeadMessage::WatchActor(keeper()));
    assert!(bench.actor_states(DRIVER, 5).is_empty(), "it may live");
    bench.node(1, cpus(1.0));
    bench.tick(10_000);
    bench.start_actor(keeper(), 1);
    assert!(matches!(
        bench.actor_states(DRIVER, 5).last(),
        Some(ActorState::Alive { incarnation: Incarnation(1), .. })
    ));
}

#[test]
fn an_actor_that_is_killed_before_it_is_back_stays_dead_and_says_so() {
    for end in [
        Event::Says(DRIVER.into(), HeadMessage::KillActor { actor: keeper(), may_restart: false }),
        Event::Says(DRIVER.into(), HeadMessage::TerminateActor { actor: keeper(), by: "its user".into() }),
    ] {
        let mut bench = recovered(0);
        bench.says(DRIVER, HeadMessage::WatchActor(keeper()));
        bench.step(end);
        bench.node(1, cpus(1.0));
        bench.tick(10_000);
        assert!(matches!(bench.actor_states(DRIVER, 5).last(), Some(ActorState::Dead { .. })));
        let facts = bench.state.take_facts();
        assert!(facts.iter().any(|fact| matches!(fact, Fact::ActorGone(id) if *id == keeper())), "{facts:?}");
        assert_eq!(bench.starts().len(), 0);
    }
}

#[test]
fn a_program_is_needed_as_long_as_a_detached_actor_of_it() {
    let mut bench = recovered(0);
    let needed = |bench: &Bench| bench.state.programs().into_iter().collect::<Vec<_>>();
    assert_eq!(needed(&bench), ["program"], "it may come back");
    bench.node(1, cpus(1.0));
    let before = bench.state.programs_version();
    bench.tick(10_000);
    bench.start_actor(keeper(), 1);
    assert_eq!(needed(&bench), ["program"]);
    assert_ne!(bench.state.programs_version(), before);
    let before = bench.state.programs_version();
    bench.says(DRIVER, HeadMessage::KillActor { actor: keeper(), may_restart: false });
    assert_eq!(needed(&bench), [""; 0]);
    assert_ne!(bench.state.programs_version(), before);
}

#[test]
fn a_job_that_has_ended_is_shown_as_that_while_a_detached_actor_is_left() {
    let mut bench = Bench::new(cpus(2.0));
    bench.alive(ActorSpec { detached: true, ..named(actor_of(DRIVER, 5), "keeper") });
    bench.alive(actor_of(DRIVER, 6));
    let processes = bench.state.processes_of_job(JobId(DRIVER.0)).unwrap();
    assert_eq!(processes.len(), 1, "a detached actor outlives the job");
    bench.step(Event::ProcessLost(DRIVER, Some(JobId(DRIVER.0))));
    let jobs = bench.state.picture().jobs;
    let shown = |of: ProcessId| {
        jobs.iter().find(|job| job.id.0 == of.0).map(|job| (job.state.as_str(), job.namespace.as_str(), job.priority))
    };
    assert_eq!(shown(DRIVER), Some(("ended", "test", 0)));
    assert_eq!(shown(OTHER), Some(("running", "test", 0)));
    assert_eq!(bench.state.processes_of_job(JobId(99)), None);
}

#[test]
fn a_job_with_a_detached_actor_is_forgotten_everywhere_with_that() {
    let mut bench = Bench::new(cpus(4.0));
    let lease = bench.alive(ActorSpec { detached: true, ..named(actor_of(DRIVER, 5), "keeper") });
    bench.step(Event::ProcessLost(DRIVER, Some(job_of(DRIVER).id)));
    bench.ordered.clear();
    bench.says(DRIVER, HeadMessage::KillActor { actor: keeper(), may_restart: false });
    bench.says(NodeId(1), HeadMessage::LeaseEnded(lease));
    let job = job_of(DRIVER).id;
    assert!(
        bench.ordered.iter().any(|(_, message)| matches!(message, NodeMessage::EndJob { job: ended } if *ended == job))
    );
    assert!(bench.state.program_of(job).is_none());
}

#[test]
fn a_group_of_a_job_that_nobody_knows_is_forgotten() {
    let stray = group_of(DRIVER, 3, PlacementStrategy::Pack, &[cpus(1.0)]);
    let kept = group_of(OTHER, 4, PlacementStrategy::Pack, &[cpus(1.0)]);
    let facts = vec![
        Fact::Group(Box::new(stray), vec![None]),
        Fact::Job(Box::new(job_of(OTHER)), true),
        Fact::Group(Box::new(kept.clone()), vec![None]),
    ];
    let mut bench = Bench { state: State::recover(ClusterId(1), 1 << 32, facts, GRACE), ..Bench::empty() };
    bench.driver(OTHER);
    bench.node(1, cpus(1.0));
    bench.tick(10_000);
    assert!(bench.state.placed(kept.id), "it waits behind a group that nobody will ever remove");
    assert!(matches!(bench.state.take_facts()[..], [Fact::GroupGone(PlacementGroupId(3))]));
}

#[test]
fn a_namespace_with_a_quota_gets_nothing_until_it_is_known_what_it_holds() {
    let mut before = Bench::new(cpus(2.0));
    before.demand(DRIVER, cpus(1.0), 1);
    let start = before.starts().remove(0);
    let running = RunningLease {
        worker: Some((address(worker_of(start.lease)), 77)),
        start,
        started: None,
        terminated: None,
        is_ending: false,
    };

    let facts = vec![Fact::Job(Box::new(job_of(DRIVER)), true), Fact::Quota("test".into(), cpus(2.0))];
    let mut bench = Bench { state: State::recover(ClusterId(1), 2 << 32, facts, GRACE), ..Bench::empty() };
    bench.driver(DRIVER);
    bench.node(2, cpus(4.0));
    bench.demand(DRIVER, cpus(1.0), 4);
    assert_eq!(bench.starts().len(), 0, "node 1 may still come back with what runs on it");
    let waits = bench.state.explain(bench.now, Subject::Process(DRIVER)).unwrap();
    assert!(waits.reasons.iter().any(|reason| reason.contains("the head was started again")), "{waits:?}");
    let node = NodeInfo { id: NodeId(1), ..bench.state.nodes.get(NodeId(2)).unwrap().info.clone() };
    bench.step(Event::NodeJoined(Box::new(node), Running { leases: vec![running], ..Running::default() }));
    bench.tick(10_000);
    assert_eq!(bench.starts().len(), 1, "one of the two CPUs of the quota is in use");
    bench.state.audit_all().unwrap();
}

/// A head that knows a group with a bundle on each of two nodes, and its driver.
fn recovered_group() -> Bench {
    let group = group_of(DRIVER, 3, PlacementStrategy::Spread, &[cpus(1.0), cpus(1.0)]);
    let place = |node| Some(BundlePlace { node: NodeId(node), resources: cpus(1.0), devices: Vec::new() });
    let mut before = Bench::empty();
    before.node(1, cpus(1.0));
    before.node(2, cpus(1.0));
    let info = |node| before.state.nodes.get(NodeId(node)).unwrap().info.clone();
    let facts = vec![
        Fact::Job(Box::new(job_of(DRIVER)), true),
        Fact::Group(Box::new(group), vec![place(1), place(2)]),
        Fact::Node(Box::new(info(1)), None),
        Fact::Node(Box::new(info(2)), None),
    ];
    let mut bench = Bench { state: State::recover(ClusterId(1), 1 << 32, facts, GRACE), ..Bench::empty() };
    bench.driver(DRIVER);
    bench
}

#[test]
fn a_bundle_whose_node_may_come_back_is_not_moved_when_another_node_of_its_group_is_lost() {
    let mut bench = recovered_group();
    bench.says(DRIVER, HeadMessage::WatchPlacementGroup(PlacementGroupId(3)));
    bench.node(1, cpus(1.0));
    bench.node(4, cpus(1.0));
    bench.node(5, cpus(1.0));
    bench.step(Event::NodeLost(NodeId(1), "a test".into()));
    bench.node(2, cpus(1.0));
    bench.says(DRIVER, HeadMessage::Holds { leases: Vec::new(), actors: Vec::new(), is_all: true });
    bench.tick(LOOKS);
    assert!(!bench.state.is_recovering());
    let places = bench.places(3).expect("it is placed again");
    assert_eq!(places[1], 2, "{places:?}");
    bench.state.audit_all().unwrap();
}

#[test]
fn who_comes_back_late_hears_which_nodes_did_not() {
    let mut bench = recovered_group();
    bench.step(Event::NodeLost(NodeId(1), "a test".into()));
    bench.step(Event::ProcessConnected(OTHER));
    let died = |event: &HeadEvent| match event {
        HeadEvent::NodeDied { node, .. } => Some(*node),
        _ => None,
    };
    assert_eq!(bench.told_to(OTHER, died), [NodeId(1)]);
}

#[test]
fn how_many_nodes_there_are_is_told_once_when_they_are_back() {
    let mut bench = recovered_group();
    let count = |event: &HeadEvent| match event {
        HeadEvent::Nodes(count) => Some(*count),
        _ => None,
    };
    assert_eq!(bench.told_to(DRIVER, count), [0]);
    bench.node(1, cpus(1.0));
    bench.node(2, cpus(1.0));
    bench.says(DRIVER, HeadMessage::Holds { leases: Vec::new(), actors: Vec::new(), is_all: true });
    bench.tick(LOOKS);
    assert_eq!(bench.told_to(DRIVER, count), [2]);
}

#[test]
fn a_driver_that_joins_while_nodes_come_back_is_told_of_those() {
    let bench = recovered_group();
    let known: Vec<NodeId> = bench.state.view().nodes.into_iter().map(|node| node.id).collect();
    assert_eq!(known, [NodeId(1), NodeId(2)]);
}

#[test]
fn nobody_waits_for_the_driver_of_a_job_that_is_over() {
    let mut before = Bench::new(cpus(4.0));
    before.state.keep_facts();
    before.step(Event::JobJoined(Box::new(job_of(OTHER))));
    before.alive(ActorSpec { detached: true, ..named(actor_of(OTHER, 5), "keeper") });
    before.step(Event::ProcessLost(OTHER, Some(job_of(OTHER).id)));
    let mut bench =
        Bench { state: State::recover(ClusterId(1), 1 << 32, before.state.take_facts(), GRACE), ..Bench::empty() };
    assert!(!bench.state.may_come_back(OTHER), "what it had was ended");
    bench.node(1, cpus(4.0));
    bench.tick(LOOKS);
    assert!(!bench.state.is_recovering());
}

#[test]
fn a_bundle_that_a_head_is_told_of_after_its_resources_were_granted_is_placed_elsewhere() {
    let mut bench = Bench::empty();
    bench.state.somebody_returns(0, GRACE);
    bench.driver(DRIVER);
    bench.node(1, cpus(1.0));
    bench.demand(DRIVER, cpus(1.0), 1);
    assert_eq!(bench.starts().len(), 1);
    let group = group_of(DRIVER, 3, PlacementStrategy::Spread, &[cpus(1.0)]);
    let place = BundlePlace { node: NodeId(1), resources: cpus(1.0), devices: Vec::new() };
    bench.state.remember(bench.now, vec![Fact::Group(Box::new(group), vec![Some(place)])]);
    bench.state.audit_all().unwrap();
    bench.says(DRIVER, HeadMessage::WatchPlacementGroup(PlacementGroupId(3)));
    bench.node(2, cpus(1.0));
    bench.says(DRIVER, HeadMessage::Holds { leases: Vec::new(), actors: Vec::new(), is_all: true });
    bench.tick(GRACE);
    assert_eq!(bench.places(3).expect("it is placed"), [2]);
    bench.state.audit_all().unwrap();
}

#[test]
fn an_actor_that_a_head_is_told_of_after_its_name_was_taken_does_not_live_again() {
    let mut bench = Bench::empty();
    bench.state.somebody_returns(0, GRACE);
    bench.state.keep_facts();
    bench.driver(DRIVER);
    let new = ActorSpec { detached: true, ..named(actor_of(DRIVER, 6), "keeper") };
    bench.create(new, false).unwrap();
    let old = ActorSpec { detached: true, max_restarts: 10, ..named(actor_of(OTHER, 5), "keeper") };
    bench.state.remember(bench.now, vec![Fact::Job(Box::new(job_of(OTHER)), false), kept(old, 0)]);
    bench.node(1, cpus(4.0));
    bench.tick(GRACE);
    let found = bench
        .state
        .find_actor(&ScopedName { namespace: "test".into(), name: "keeper".into() }, job_of(DRIVER).id)
        .unwrap();
    assert_eq!(found.id, ActorId(6));
    assert_eq!(bench.starts().len(), 1, "the new one alone");
    assert!(bench.state.take_facts().iter().any(|fact| matches!(fact, Fact::ActorGone(ActorId(5)))));
}
