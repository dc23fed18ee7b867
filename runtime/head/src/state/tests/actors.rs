//! Actors, their names and restarts.

use super::*;

fn cause(states: &[ActorState]) -> Option<&Error> {
    match states.last() {
        Some(ActorState::Dead { cause }) => Some(cause),
        _ => None,
    }
}

#[test]
fn an_actor_is_placed_where_it_fits_and_holds_only_what_it_holds() {
    let mut bench = Bench::new(cpus(1.0));
    bench.alive(actor_of(DRIVER, 5));
    assert_eq!(bench.free(), cpus(1.0));
    assert!(matches!(bench.actor_states(DRIVER, 5).last(), Some(ActorState::Alive { .. })));
    bench.demand(DRIVER, cpus(1.0), 1);
    bench.ready();
    bench.create(actor_of(DRIVER, 6), false).unwrap();
    assert_eq!(bench.starts().len(), 0, "it needs a CPU to be placed, and none is free");
}

#[test]
fn of_two_that_want_a_name_one_gets_it_and_it_is_free_again_at_death() {
    let mut bench = Bench::new(cpus(4.0));
    bench.create(named(actor_of(DRIVER, 5), "x"), false).unwrap();
    let taken = bench.create(named(actor_of(OTHER, 6), "x"), false).unwrap_err();
    assert!(matches!(taken, Error::ActorNameTaken { .. }));
    assert_eq!(bench.create(named(actor_of(OTHER, 7), "x"), true).unwrap().id, ActorId(5));
    let other_class = ActorSpec { class: FunctionId(8), ..named(actor_of(OTHER, 8), "x") };
    assert!(matches!(bench.create(other_class, true), Err(Error::InvalidArgument { .. })));
    bench.says(DRIVER, HeadMessage::KillActor { actor: ActorId(5), may_restart: false });
    assert_eq!(bench.create(named(actor_of(OTHER, 9), "x"), true).unwrap().id, ActorId(9));
}

#[test]
fn an_actor_lives_again_as_often_as_it_may() {
    let mut bench = Bench::new(cpus(4.0));
    let mut lease = bench.alive(ActorSpec { max_restarts: 2, ..actor_of(DRIVER, 5) });
    for life in 1..=2 {
        bench.tick(1_000);
        bench.crash(lease);
        assert!(bench.actor_states(DRIVER, 5).iter().any(|state| matches!(state, ActorState::Restarting { .. })));
        lease = bench.start_actor(ActorId(5), life);
        assert!(matches!(
            bench.actor_states(DRIVER, 5).last(),
            Some(ActorState::Alive { incarnation, .. }) if incarnation.0 == life
        ));
    }
    bench.crash(lease);
    assert!(matches!(cause(&bench.actor_states(DRIVER, 5)), Some(Error::WorkerCrashed { .. })));
    assert_eq!(bench.starts().len(), 0);
}

#[test]
fn the_next_life_of_a_killed_actor_begins_when_the_last_one_has_ended() {
    let mut bench = Bench::new(cpus(4.0));
    let lease = bench.alive(ActorSpec { max_restarts: 2, ..actor_of(DRIVER, 5) });
    bench.says(DRIVER, HeadMessage::KillActor { actor: ActorId(5), may_restart: true });
    bench.tick(60_000);
    assert_eq!(bench.starts().len(), 0, "its process was told to end, and may still run");
    let why = bench.state.explain(bench.now, Subject::Actor(ActorId(5)));
    assert_eq!(why.map(|why| why.state), Some("waits until its last life has ended".into()));
    bench.says(NodeId(1), HeadMessage::LeaseEnded(lease));
    bench.start_actor(ActorId(5), 1);
}

#[test]
fn an_actor_that_dies_at_once_again_and_again_rests_in_between() {
    let mut bench = Bench::new(cpus(4.0));
    let mut lease = bench.alive(ActorSpec { max_restarts: u32::MAX, ..actor_of(DRIVER, 5) });
    // Once may be bad luck.
    bench.crash(lease);
    lease = bench.start_actor(ActorId(5), 1);
    let mut pause = 100;
    for life in 2..12 {
        bench.crash(lease);
        assert!(bench.state.next_tick().is_some());
        bench.tick(pause - 1);
        assert_eq!(bench.starts().len(), 0, "life {life} began early");
        bench.tick(1);
        lease = bench.start_actor(ActorId(5), life);
        pause = (2 * pause).min(10_000);
    }
    // A life that lasts is the end of it.
    bench.tick(1_000);
    bench.crash(lease);
    bench.start_actor(ActorId(5), 12);
}

#[test]
fn an_actor_whose_only_node_is_lost_while_it_rests_is_told_so_when_it_has_rested() {
    let mut bench = Bench::new(cpus(4.0));
    bench.node(2, cpus(4.0));
    let mut spec = ActorSpec { max_restarts: u32::MAX, ..actor_of(DRIVER, 5) };
    spec.placement.strategy = Strategy::Node { node: NodeId(1), soft: false };
    let lease = bench.alive(spec);
    bench.crash(lease);
    let lease = bench.start_actor(ActorId(5), 1);
    bench.crash(lease);
    bench.step(Event::NodeLost(NodeId(1), "it is gone".into()));
    assert!(cause(&bench.actor_states(DRIVER, 5)).is_none(), "it rests");
    bench.tick(100);
    assert!(matches!(cause(&bench.actor_states(DRIVER, 5)), Some(Error::Infeasible { .. })));
}

#[test]
fn an_actor_that_is_killed_again_while_it_rests_rests_once() {
    let mut bench = Bench::new(cpus(4.0));
    let mut lease = bench.alive(ActorSpec { max_restarts: u32::MAX, ..actor_of(DRIVER, 5) });
    for life in 1..3 {
        bench.crash(lease);
        bench.tick(100);
        lease = bench.start_actor(ActorId(5), life);
    }
    bench.crash(lease);
    assert_eq!(bench.starts().len(), 0, "it rests");
    bench.says(DRIVER, HeadMessage::KillActor { actor: ActorId(5), may_restart: true });
    bench.says(DRIVER, HeadMessage::KillActor { actor: ActorId(5), may_restart: false });
    for _ in 0..100 {
        bench.tick(100);
    }
    assert_eq!(bench.starts().len(), 0, "the dead are not started again");
    assert!(matches!(cause(&bench.actor_states(DRIVER, 5)), Some(Error::ActorEnded { .. })));
}

#[test]
fn what_a_worker_process_owned_that_died_idle_is_nobodys() {
    let mut bench = Bench::new(cpus(4.0));
    let idle = ProcessId(55);
    bench.state.worker_known(idle, JobId(DRIVER.0), NodeId(1));
    let owners = BTreeMap::from([(JobId(DRIVER.0), [idle, DRIVER].into())]);
    bench.says(NodeId(1), HeadMessage::Owners(owners.clone()));
    assert!(bench.ordered.is_empty(), "both live: {:?}", bench.ordered);
    let death = WorkerDeath {
        process: idle,
        pid: 7,
        job: JobId(DRIVER.0),
        node: NodeId(1),
        lease: None,
        exit: exit(),
        started: 3,
        is_moved: false,
    };
    bench.says(NodeId(1), HeadMessage::WorkerDied(death));
    bench.says(NodeId(1), HeadMessage::Owners(owners));
    let said = |bench: &Bench, gone: &[ProcessId], over: bool| {
        bench.ordered.iter().any(|(_, message)| {
            matches!(message, NodeMessage::OwnersGone { owners, are_jobs_over } if owners == gone && *are_jobs_over == over)
        })
    };
    assert!(said(&bench, &[idle], false), "{:?}", bench.ordered);
    bench.says(NodeId(1), HeadMessage::Owners(BTreeMap::from([(JobId(99), [ProcessId(98)].into())])));
    assert!(said(&bench, &[ProcessId(98)], true), "{:?}", bench.ordered);
}

#[test]
fn who_has_passed_values_to_a_job_that_is_over_lives_on() {
    let mut bench = Bench::new(cpus(4.0));
    let (worker, idle, over) = (ProcessId(54), ProcessId(55), JobId(99));
    for process in [worker, idle] {
        bench.state.worker_known(process, JobId(DRIVER.0), NodeId(1));
    }
    bench.says(NodeId(1), HeadMessage::Owners(BTreeMap::from([(over, [DRIVER, worker].into())])));
    assert!(bench.ordered.is_empty(), "they are of another job, and live: {:?}", bench.ordered);
    let death = WorkerDeath {
        process: idle,
        pid: 7,
        job: JobId(DRIVER.0),
        node: NodeId(1),
        lease: None,
        exit: exit(),
        started: 3,
        is_moved: false,
    };
    bench.says(NodeId(1), HeadMessage::WorkerDied(death));
    // The node may have heard of it in the name of the other job only.
    bench.says(NodeId(1), HeadMessage::Owners(BTreeMap::from([(over, [idle].into())])));
    let said = bench.ordered.iter().filter_map(|(_, message)| match message {
        NodeMessage::OwnersGone { owners, are_jobs_over } => Some((owners.clone(), *are_jobs_over)),
        _ => None,
    });
    assert_eq!(said.collect::<Vec<_>>(), [(vec![idle], false)], "its own job may still refer to what it had");
}

#[test]
fn a_constructor_that_fails_is_not_tried_again() {
    let mut bench = Bench::new(cpus(4.0));
    bench.create(ActorSpec { max_restarts: 5, ..actor_of(DRIVER, 5) }, false).unwrap();
    bench.says(DRIVER, HeadMessage::WatchActor(ActorId(5)));
    bench.ready();
    bench.says(
        NodeId(1),
        HeadMessage::ActorStarted { actor: ActorId(5), incarnation: Incarnation(0), outcome: Err(Error::NoSession) },
    );
    assert!(matches!(cause(&bench.actor_states(DRIVER, 5)), Some(Error::NoSession)));
    assert!(bench.ordered.iter().any(|(_, m)| matches!(m, NodeMessage::EndLease { kill: Some(_), .. })));
    assert_eq!(bench.starts().len(), 0);
}

#[test]
fn actors_die_with_their_owner_and_detached_ones_do_not() {
    let mut bench = Bench::new(cpus(4.0));
    bench.alive(actor_of(DRIVER, 5));
    let lease = bench.alive(ActorSpec { detached: true, max_restarts: 1, ..actor_of(DRIVER, 6) });
    bench.says(OTHER, HeadMessage::WatchActor(ActorId(5)));
    bench.says(OTHER, HeadMessage::WatchActor(ActorId(6)));
    bench.step(Event::ProcessLost(DRIVER, Some(JobId(DRIVER.0))));
    assert!(matches!(cause(&bench.actor_states(OTHER, 5)), Some(Error::ActorEnded { .. })));
    assert!(cause(&bench.actor_states(OTHER, 6)).is_none());
    // And it is restarted with the job that is long over.
    bench.crash(lease);
    assert_eq!(bench.starts()[0].job, JobId(DRIVER.0));
}

#[test]
fn an_actor_that_was_told_to_finish_is_never_started_again() {
    let mut bench = Bench::new(cpus(4.0));
    let lease = bench.alive(ActorSpec { max_restarts: 9, ..actor_of(DRIVER, 5) });
    bench.says(DRIVER, HeadMessage::TerminateActor { actor: ActorId(5), by: "terminate".into() });
    assert!(bench.ordered.iter().any(|(_, m)| matches!(m, NodeMessage::DrainActor { .. })));
    bench.crash(lease);
    assert!(matches!(cause(&bench.actor_states(DRIVER, 5)), Some(Error::ActorEnded { by }) if by == "terminate"));
}

#[test]
fn who_asks_late_still_learns_why_an_actor_died() {
    let mut bench = Bench::new(cpus(4.0));
    bench.alive(actor_of(DRIVER, 5));
    bench.says(DRIVER, HeadMessage::KillActor { actor: ActorId(5), may_restart: false });
    bench.says(OTHER, HeadMessage::WatchActor(ActorId(5)));
    assert!(matches!(cause(&bench.actor_states(OTHER, 5)), Some(Error::ActorEnded { by }) if by == "kill"));
    bench.says(OTHER, HeadMessage::WatchActor(ActorId(404)));
    assert!(cause(&bench.actor_states(OTHER, 404)).is_some());
}

// What follows was written because it did not hold.

#[test]
fn an_actor_that_is_given_up_before_it_is_asked_for_does_not_live() {
    let mut bench = Bench::new(cpus(4.0));
    bench.says(DRIVER, HeadMessage::TerminateActor { actor: ActorId(5), by: "the drop of its last handle".into() });
    let _ = bench.create(actor_of(DRIVER, 5), false);
    assert_eq!(bench.starts().len(), 0);
}

#[test]
fn an_actor_whose_worker_process_fails_to_start_once_is_tried_again() {
    let mut bench = Bench::new(cpus(4.0));
    bench.create(actor_of(DRIVER, 5), false).unwrap();
    bench.says(DRIVER, HeadMessage::WatchActor(ActorId(5)));
    let lease = bench.starts()[0].lease;
    bench.says(NodeId(1), HeadMessage::LeaseFailed { lease, error: Error::NoSession });
    assert_eq!(bench.starts().len(), 1);
    assert!(cause(&bench.actor_states(DRIVER, 5)).is_none());
}

#[test]
fn an_actor_whose_worker_process_never_starts_is_given_up_however_often_it_may_restart() {
    let mut bench = Bench::new(cpus(4.0));
    bench.create(ActorSpec { max_restarts: u32::MAX, ..actor_of(DRIVER, 5) }, false).unwrap();
    bench.says(DRIVER, HeadMessage::WatchActor(ActorId(5)));
    for _ in 0..10 {
        for start in bench.starts() {
            bench.says(NodeId(1), HeadMessage::LeaseFailed { lease: start.lease, error: Error::NoSession });
        }
    }
    assert!(cause(&bench.actor_states(DRIVER, 5)).is_some());
}

#[test]
fn an_actor_that_cannot_be_started_on_one_node_is_started_on_another() {
    let mut bench = Bench::new(cpus(4.0));
    bench.create(actor_of(DRIVER, 5), false).unwrap();
    bench.says(DRIVER, HeadMessage::WatchActor(ActorId(5)));
    bench.node(2, cpus(4.0));
    for _ in 0..10 {
        for start in bench.starts() {
            let node = bench.state.node_of(start.lease).unwrap();
            match node {
                NodeId(1) => bench.says(node, HeadMessage::LeaseFailed { lease: start.lease, error: Error::NoSession }),
                _ => bench.says(
                    node,
                    HeadMessage::LeaseReady { lease: start.lease, worker: address(worker_of(start.lease)), pid: 77 },
                ),
            }
        }
    }
    assert!(cause(&bench.actor_states(DRIVER, 5)).is_none());
    assert_eq!(bench.state.picture().actors[0].node, Some(NodeId(2)));
}

#[test]
fn an_actor_whose_arguments_cannot_be_had_has_another_life_as_far_as_it_may() {
    let mut bench = Bench::new(cpus(4.0));
    bench.create(ActorSpec { max_restarts: 1, ..actor_of(DRIVER, 5) }, false).unwrap();
    bench.says(DRIVER, HeadMessage::WatchActor(ActorId(5)));
    for life in 0..2 {
        let lease = bench.ready()[0];
        assert!(cause(&bench.actor_states(DRIVER, 5)).is_none());
        let outcome = Err(Error::StoreFull { what: "an argument".into(), why: "a test".into() });
        bench.says(NodeId(1), HeadMessage::ActorStarted { actor: ActorId(5), incarnation: Incarnation(life), outcome });
        assert!(bench.starts().is_empty(), "the last life is not over");
        bench.says(NodeId(1), HeadMessage::LeaseEnded(lease));
    }
    let died = cause(&bench.actor_states(DRIVER, 5)).unwrap().to_string();
    assert!(died.contains("a test"), "{died}");
}

#[test]
fn an_actor_whose_arguments_can_never_be_had_is_given_up_whatever_restarts_it_has() {
    let mut bench = Bench::new(cpus(4.0));
    bench.create(ActorSpec { max_restarts: u32::MAX, ..actor_of(DRIVER, 5) }, false).unwrap();
    bench.says(DRIVER, HeadMessage::WatchActor(ActorId(5)));
    let died = (0..40).find_map(|life| {
        // It rests between lives that were short.
        bench.now += 10_000;
        bench.step(Event::Tick);
        let lease = bench.ready()[0];
        let outcome = Err(Error::StoreFull { what: "an argument".into(), why: "a test".into() });
        bench.says(NodeId(1), HeadMessage::ActorStarted { actor: ActorId(5), incarnation: Incarnation(life), outcome });
        bench.says(NodeId(1), HeadMessage::LeaseEnded(lease));
        cause(&bench.actor_states(DRIVER, 5)).cloned()
    });
    assert!(matches!(died, Some(Error::StoreFull { .. })), "{died:?}");
}

#[test]
fn an_actor_whose_processes_die_before_its_constructor_begins_is_tried_again_and_then_given_up() {
    let mut bench = Bench::new(cpus(4.0));
    bench.create(actor_of(DRIVER, 5), false).unwrap();
    bench.says(DRIVER, HeadMessage::WatchActor(ActorId(5)));
    for _ in 0..2 {
        let lease = *bench.ready().last().unwrap();
        bench.crash(lease);
        assert!(cause(&bench.actor_states(DRIVER, 5)).is_none());
    }
    let lease = *bench.ready().last().unwrap();
    bench.crash(lease);
    assert!(matches!(cause(&bench.actor_states(DRIVER, 5)), Some(Error::WorkerCrashed { .. })));
}

#[test]
fn an_actor_whose_constructor_has_begun_dies_with_its_process() {
    let mut bench = Bench::new(cpus(4.0));
    bench.create(actor_of(DRIVER, 5), false).unwrap();
    bench.says(DRIVER, HeadMessage::WatchActor(ActorId(5)));
    let lease = *bench.ready().last().unwrap();
    bench.crash_in(lease, 1);
    assert!(matches!(cause(&bench.actor_states(DRIVER, 5)), Some(Error::WorkerCrashed { .. })));
}

#[test]
fn an_actor_of_an_unknown_job_is_refused_and_not_left_pending() {
    let mut bench = Bench::new(cpus(4.0));
    let stray = ActorSpec { job: JobId(404), ..actor_of(DRIVER, 5) };
    assert!(bench.create(stray, false).is_err());
}

#[test]
fn the_dead_keep_no_arguments() {
    let mut bench = Bench::new(cpus(4.0));
    let args = vec![Arg::Value(wingbeat_core::value::Packed::plain(vec![0; 1000].into()))];
    bench.alive(ActorSpec { args, ..actor_of(DRIVER, 5) });
    bench.says(DRIVER, HeadMessage::KillActor { actor: ActorId(5), may_restart: false });
    assert_eq!(bench.state.actors.arguments_kept(), 0);
}
