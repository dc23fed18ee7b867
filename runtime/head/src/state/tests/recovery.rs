//! What a head that was started again does with those that may still come back.

use super::*;

/// How long those that were there before have to come back.
const GRACE: Millis = 10_000;

/// A head that knows one detached actor from the last one, and a driver that looks for it.
fn recovered(life: u32) -> Bench {
    let spec = ActorSpec { detached: true, max_restarts: 10, ..named(actor_of(OTHER, 5), "keeper") };
    let mut job = job_of(OTHER);
    job.executable.hash = "program".into();
    let facts = vec![Fact::Job(Box::new(job)), Fact::Actor(Box::new(spec), Some(Incarnation(life)))];
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
    let found = bench.state.find_actor(&ScopedName { namespace: "test".into(), name: "keeper".into() }).unwrap();
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
        Fact::Job(Box::new(job_of(OTHER))),
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
    let running =
        RunningLease { worker: Some((address(worker_of(start.lease)), 77)), start, started: None, is_ending: false };

    let facts = vec![Fact::Job(Box::new(job_of(DRIVER))), Fact::Quota("test".into(), cpus(2.0))];
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
