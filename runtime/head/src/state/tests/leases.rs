//! Demands, grants, recalls.

use super::*;

#[test]
fn as_many_leases_are_granted_as_are_wanted_and_fit() {
    let mut bench = Bench::new(cpus(2.0));
    bench.demand(DRIVER, cpus(1.0), 5);
    bench.ready();
    assert_eq!(bench.granted(DRIVER).len(), 2);
    assert_eq!(bench.free(), ResourceSet::new());
}

#[test]
fn saying_the_same_demand_again_grants_nothing_more() {
    let mut bench = Bench::new(cpus(8.0));
    for _ in 0..3 {
        bench.demand(DRIVER, cpus(1.0), 2);
    }
    bench.ready();
    bench.demand(DRIVER, cpus(1.0), 2);
    assert_eq!(bench.ready().len(), 0);
    assert_eq!(bench.granted(DRIVER).len(), 2);
}

#[test]
fn what_is_free_goes_round_among_those_who_ask() {
    let mut bench = Bench::empty();
    bench.driver(DRIVER);
    bench.driver(OTHER);
    bench.demand(DRIVER, cpus(1.0), 10);
    bench.demand(OTHER, cpus(1.0), 10);
    bench.node(1, cpus(4.0));
    bench.ready();
    assert_eq!((bench.granted(DRIVER).len(), bench.granted(OTHER).len()), (2, 2));
}

#[test]
fn a_starved_owner_gets_a_lease_of_one_that_has_several_once_it_had_its_time() {
    let mut bench = Bench::new(cpus(2.0));
    bench.demand(DRIVER, cpus(1.0), 10);
    bench.ready();
    bench.granted(DRIVER);
    bench.demand(OTHER, cpus(1.0), 10);
    assert!(bench.state.next_tick().is_some());
    bench.tick(25);
    assert_eq!(bench.recalled(DRIVER), []);
    bench.tick(25);
    let recalled = bench.recalled(DRIVER);
    assert_eq!(recalled.len(), 1);
    bench.tick(25);
    assert_eq!(bench.recalled(DRIVER), [], "one is on its way back");
    bench.return_and_end(DRIVER, recalled[0]);
    bench.ready();
    assert_eq!((bench.granted(DRIVER).len(), bench.granted(OTHER).len()), (0, 1));
    // One each: nobody is recalled for anybody.
    bench.tick(1_000);
    assert_eq!((bench.recalled(DRIVER), bench.recalled(OTHER)), (vec![], vec![]));
}

#[test]
fn a_waiting_process_gives_back_its_cpus_and_nothing_else() {
    let all = cpus(1.0).with(GPU, Amount::ONE).with("memory", amount(8.0));
    let mut bench = Bench::new(all.clone());
    bench.demand(DRIVER, all.clone(), 1);
    let lease = bench.ready()[0];
    let worker = worker_of(lease);
    bench.wait(worker, lease, 1);
    assert_eq!(bench.free(), cpus(1.0));
    // A second execution on the lease waits too: its CPUs are not given twice.
    bench.wait(worker, lease, 2);
    assert_eq!(bench.free(), cpus(1.0));
    bench.demand(OTHER, cpus(1.0), 2);
    assert_eq!(bench.ready().len(), 1);
    bench.resume(worker, lease, 1);
    bench.resume(worker, lease, 2);
    assert_eq!(bench.free().get(CPU).units(), -Amount::ONE.units());
    // Over-committed: nothing is granted until balance returns.
    let others = bench.granted(OTHER)[0];
    bench.return_and_end(OTHER, others);
    assert_eq!(bench.starts().len(), 0);
    bench.return_and_end(DRIVER, lease);
    assert_eq!(bench.ready().len(), 1);
}

#[test]
fn fractions_share_a_device_and_whole_gpus_get_their_own() {
    let mut bench = Bench::new(gpus(2.0));
    bench.demand(DRIVER, gpus(0.5), 1);
    bench.demand(DRIVER, gpus(0.25), 1);
    bench.demand(OTHER, gpus(1.0), 2);
    let starts = bench.starts();
    let devices: Vec<_> = starts.iter().map(|start| start.gpus.clone()).collect();
    assert_eq!(devices, [vec![(0, amount(0.5))], vec![(0, amount(0.25))], vec![(1, Amount::ONE)]]);
}

#[test]
fn devices_are_free_only_when_the_node_says_so() {
    let mut bench = Bench::new(gpus(1.0));
    bench.demand(DRIVER, gpus(1.0), 1);
    let lease = bench.ready()[0];
    bench.demand(OTHER, gpus(1.0), 1);
    bench.says(DRIVER, HeadMessage::ReturnLease(lease));
    bench.demand(DRIVER, gpus(1.0), 0);
    assert_eq!(bench.starts().len(), 0);
    bench.says(NodeId(1), HeadMessage::LeaseEnded(lease));
    assert_eq!(bench.starts().len(), 1);
}

#[test]
fn what_no_node_could_ever_hold_is_refused_with_the_nearest_node() {
    let mut bench = Bench::new(cpus(2.0));
    bench.demand(DRIVER, cpus(8.0), 1);
    let errors = bench.refused(DRIVER);
    let text = errors[0].to_string();
    assert!(text.contains("host1") && text.contains("2 CPU of the 8 asked for"), "{text}");
}

#[test]
fn a_dead_owner_leaves_nothing_behind() {
    let mut bench = Bench::new(cpus(4.0));
    bench.demand(DRIVER, cpus(1.0), 4);
    let leases = bench.ready();
    bench.step(Event::ProcessLost(DRIVER, Some(JobId(DRIVER.0))));
    let ended = bench.ordered.iter().filter(
        |(_, message)| matches!(message, NodeMessage::EndLease { kill: Some(why), .. } if why.contains("owner")),
    );
    assert_eq!(ended.count(), 4);
    assert!(bench.ordered.iter().any(|(_, message)| matches!(message, NodeMessage::EndJob { .. })));
    for lease in leases {
        bench.says(NodeId(1), HeadMessage::LeaseEnded(lease));
    }
    assert_eq!(bench.free(), cpus(4.0));
    assert_eq!(bench.state.picture().jobs.len(), 1);
}

#[test]
fn a_dead_node_is_told_to_everybody_and_its_leases_are_granted_elsewhere() {
    let mut bench = Bench::new(cpus(1.0));
    bench.demand(DRIVER, cpus(1.0), 1);
    bench.ready();
    bench.node(2, cpus(1.0));
    bench.step(Event::NodeLost(NodeId(1), "it is gone".into()));
    let heard = |bench: &mut Bench, process| {
        bench.told_to(process, |event| matches!(event, HeadEvent::NodeDied { .. }).then_some(())).len()
    };
    assert_eq!((heard(&mut bench, DRIVER), heard(&mut bench, OTHER)), (1, 1));
    let told = |(node, message): &(NodeId, NodeMessage)| {
        *node == NodeId(2) && matches!(message, NodeMessage::NodeDied(NodeId(1)))
    };
    assert!(bench.ordered.iter().any(told));
    assert_eq!(bench.starts().len(), 1);
}

// What follows was written because it did not hold.

#[test]
fn a_returned_lease_is_not_replaced_before_its_owner_says_what_it_wants_now() {
    let mut bench = Bench::new(cpus(2.0));
    bench.demand(DRIVER, cpus(1.0), 2);
    let leases = bench.ready();
    bench.says(DRIVER, HeadMessage::ReturnLease(leases[0]));
    assert_eq!(bench.starts().len(), 0);
    bench.demand(DRIVER, cpus(1.0), 2);
    assert_eq!(bench.starts().len(), 1);
}

#[test]
fn what_a_lost_worker_process_may_still_use_is_free_only_when_it_has_ended() {
    let mut bench = Bench::new(cpus(1.0));
    bench.demand(DRIVER, cpus(1.0), 1);
    let lease = bench.ready()[0];
    bench.demand(OTHER, cpus(1.0), 1);
    let is_ended = |bench: &Bench| {
        bench.ordered.iter().any(|(_, message)| {
            matches!(message, NodeMessage::EndLease { lease: ended, kill: Some(why) }
                if *ended == lease && why.contains("lost contact"))
        })
    };
    bench.says(OTHER, HeadMessage::AbandonLease(lease));
    assert!(!is_ended(&bench), "it is not theirs");
    bench.says(DRIVER, HeadMessage::AbandonLease(lease));
    assert!(is_ended(&bench));
    assert_eq!(bench.starts().len(), 0, "its CPU may still be in use");
    bench.says(NodeId(1), HeadMessage::LeaseEnded(lease));
    assert_eq!(bench.starts().len(), 1);
}

#[test]
fn processes_that_never_start_fail_the_demand_however_many_are_wanted() {
    let mut bench = Bench::new(cpus(4.0));
    bench.demand(DRIVER, cpus(1.0), 4);
    let mut failures = 0;
    while bench.refused(DRIVER).is_empty() {
        let starts = bench.starts();
        assert!(!starts.is_empty(), "neither refused nor tried again");
        for start in starts {
            failures += 1;
            bench.says(NodeId(1), HeadMessage::LeaseFailed { lease: start.lease, error: Error::NoSession });
        }
        assert!(failures < 20, "it is tried for ever");
    }
}

/// The leases that are to be started, by node.
fn starts_by_node(bench: &mut Bench) -> Vec<(NodeId, LeaseId)> {
    let starts = bench.starts();
    starts.iter().map(|start| (bench.state.node_of(start.lease).unwrap(), start.lease)).collect()
}

#[test]
fn a_node_on_which_nothing_can_be_started_rests_while_another_can_serve() {
    let (sick, well) = (NodeId(1), NodeId(2));
    let mut bench = Bench::new(cpus(4.0));
    bench.demand(DRIVER, cpus(1.0), 4);
    let failed = |lease| HeadMessage::LeaseFailed { lease, error: Error::NoSession };
    bench.node(2, cpus(1.0));
    let mut failures = 0;
    loop {
        let starts = starts_by_node(&mut bench);
        if starts.is_empty() {
            break;
        }
        for (node, lease) in starts {
            if node == well {
                let ready = HeadMessage::LeaseReady { lease, worker: address(worker_of(lease)), pid: 77 };
                bench.says(well, ready);
            } else {
                failures += 1;
                bench.says(sick, failed(lease));
            }
        }
        assert!(failures < 20, "it is tried for ever");
    }
    assert_eq!((bench.refused(DRIVER).len(), bench.granted(DRIVER).len()), (0, 1), "the other node serves");
    let text = bench.state.explain(bench.now, Subject::Process(DRIVER)).unwrap().reasons.join("\n");
    assert!(text.contains("could not start the program") && text.contains("tried again in 30 s"), "{text}");
    // After its rest, one failure is enough.
    bench.now += bench.state.next_tick().map(|_| 30_000).unwrap();
    bench.step(Event::Tick);
    let again = starts_by_node(&mut bench);
    assert!(!again.is_empty() && again.iter().all(|(node, _)| *node == sick));
    for (_, lease) in again {
        bench.says(sick, failed(lease));
    }
    assert_eq!((bench.starts().len(), bench.refused(DRIVER).len()), (0, 0));
    bench.now += 30_000;
    bench.step(Event::Tick);
    for (_, lease) in starts_by_node(&mut bench) {
        bench.says(sick, HeadMessage::LeaseReady { lease, worker: address(worker_of(lease)), pid: 77 });
    }
    assert_eq!(bench.granted(DRIVER).len(), 3, "it is well again");
}

/// Has all starts on these nodes fail, and answers those elsewhere, until there are no more.
fn starts_fail_on(bench: &mut Bench, sick: &[NodeId]) -> Vec<(NodeId, LeaseId)> {
    let (mut elsewhere, mut failures) = (Vec::new(), 0);
    loop {
        let starts = starts_by_node(bench);
        if starts.is_empty() {
            return elsewhere;
        }
        let (failing, others): (Vec<_>, Vec<_>) = starts.into_iter().partition(|(node, _)| sick.contains(node));
        elsewhere.extend(others);
        for (node, lease) in failing {
            failures += 1;
            assert!(failures < 100, "it is tried for ever");
            bench.says(node, HeadMessage::LeaseFailed { lease, error: Error::NoSession });
        }
    }
}

#[test]
fn many_starts_that_fail_on_a_node_before_another_has_one_ready_fail_nothing() {
    let (sick, well) = (NodeId(1), NodeId(2));
    let mut bench = Bench::new(cpus(32.0));
    bench.node(2, cpus(2.0));
    bench.demand(DRIVER, cpus(1.0), 34);
    bench.create(actor_of(DRIVER, 5), false).unwrap();
    for (node, lease) in starts_fail_on(&mut bench, &[sick]) {
        bench.says(node, HeadMessage::LeaseReady { lease, worker: address(worker_of(lease)), pid: 77 });
    }
    assert_eq!((bench.refused(DRIVER).len(), bench.granted(DRIVER).len()), (0, 2), "{well} serves");
}

#[test]
fn what_runs_well_goes_on_however_many_other_nodes_are_sick() {
    let sick: Vec<NodeId> = (2..8).map(NodeId).collect();
    let mut bench = Bench::new(cpus(1.0));
    bench.demand(DRIVER, cpus(1.0), 20);
    for (node, lease) in starts_by_node(&mut bench) {
        bench.says(node, HeadMessage::LeaseReady { lease, worker: address(worker_of(lease)), pid: 77 });
    }
    assert_eq!(bench.granted(DRIVER).len(), 1);
    for node in 2..8 {
        bench.node(node, cpus(1.0));
    }
    assert!(starts_fail_on(&mut bench, &sick).is_empty());
    assert_eq!(bench.refused(DRIVER).len(), 0);
}

#[test]
fn a_node_that_turns_out_to_be_well_serves_at_once() {
    let mut bench = Bench::new(cpus(4.0));
    bench.node(2, cpus(1.0));
    bench.demand(DRIVER, cpus(1.0), 8);
    let (mut on_first, failed) = (Vec::new(), |lease| HeadMessage::LeaseFailed { lease, error: Error::NoSession });
    for (node, lease) in starts_by_node(&mut bench) {
        match node {
            NodeId(1) => on_first.push(lease),
            _ => bench.says(node, HeadMessage::LeaseReady { lease, worker: address(worker_of(lease)), pid: 77 }),
        }
    }
    let (last, others) = on_first.split_last().unwrap();
    others.iter().for_each(|lease| bench.says(NodeId(1), failed(*lease)));
    bench.says(NodeId(1), HeadMessage::LeaseReady { lease: *last, worker: address(worker_of(*last)), pid: 77 });
    assert!(!bench.starts().is_empty(), "what waits is placed there again");
}

#[test]
fn what_can_be_started_nowhere_fails_however_slowly_it_fails() {
    let mut bench = Bench::new(cpus(1.0));
    bench.node(2, cpus(1.0));
    bench.demand(DRIVER, cpus(1.0), 1);
    let mut failures = 0;
    while bench.refused(DRIVER).is_empty() {
        bench.now += 60_000;
        bench.step(Event::Tick);
        for (node, lease) in starts_by_node(&mut bench) {
            failures += 1;
            bench.says(node, HeadMessage::LeaseFailed { lease, error: Error::NoSession });
        }
        assert!(failures < 20, "it is tried for ever");
    }
}

#[test]
fn a_demand_that_waited_for_the_first_node_is_refused_if_that_can_never_hold_it() {
    let mut bench = Bench::empty();
    bench.driver(DRIVER);
    bench.demand(DRIVER, cpus(8.0), 1);
    bench.create(ActorSpec { placement: shape(cpus(8.0)), ..actor_of(DRIVER, 5) }, false).unwrap();
    bench.says(DRIVER, HeadMessage::WatchActor(ActorId(5)));
    assert_eq!(bench.refused(DRIVER).len(), 0);
    bench.node(1, cpus(2.0));
    assert!(matches!(bench.refused(DRIVER)[..], [Error::Infeasible { .. }]));
    assert!(matches!(bench.actor_states(DRIVER, 5).last(), Some(ActorState::Dead { .. })));
}

#[test]
fn a_demand_whose_last_possible_node_died_waits_for_another() {
    let mut bench = Bench::new(cpus(2.0));
    bench.node(2, cpus(8.0));
    bench.demand(DRIVER, cpus(8.0), 2);
    bench.ready();
    bench.step(Event::NodeLost(NodeId(2), "it is gone".into()));
    assert_eq!(bench.refused(DRIVER).len(), 0);
    bench.node(3, cpus(8.0));
    assert_eq!(bench.ready().len(), 1);
}

#[test]
fn an_asker_of_unknown_job_holds_back_nobody_else_of_the_same_shape() {
    let mut bench = Bench::new(cpus(1.0));
    let stray = ProcessId(0);
    bench.step(Event::ProcessConnected(stray));
    bench.demand(stray, cpus(1.0), 1);
    bench.demand(DRIVER, cpus(1.0), 1);
    assert_eq!(bench.starts().len(), 1);
}

#[test]
fn a_recalled_lease_that_does_not_come_back_does_not_end_fairness() {
    let mut bench = Bench::new(cpus(2.0));
    bench.demand(DRIVER, cpus(1.0), 2);
    bench.ready();
    bench.demand(OTHER, cpus(1.0), 1);
    bench.tick(50);
    assert_eq!(bench.recalled(DRIVER).len(), 1);
    // Its task runs for an hour. The other lease's tasks are short.
    for _ in 0..100 {
        bench.tick(25);
    }
    assert_eq!(bench.recalled(DRIVER).len(), 1);
}

#[test]
fn a_large_request_is_not_starved_by_small_ones() {
    let mut bench = Bench::new(cpus(4.0));
    bench.demand(DRIVER, cpus(1.0), 4);
    bench.ready();
    bench.demand(OTHER, cpus(4.0), 1);
    // The owner of the small ones returns at once whatever is recalled, and wants as many as before.
    for _ in 0..200 {
        bench.tick(25);
        for lease in bench.recalled(DRIVER) {
            bench.return_and_end(DRIVER, lease);
            bench.demand(DRIVER, cpus(1.0), 4);
        }
        bench.ready();
        if !bench.granted(OTHER).is_empty() {
            return;
        }
    }
    panic!("4 CPUs were never free together");
}

#[test]
fn a_lease_is_not_recalled_where_it_would_not_help() {
    let mut bench = Bench::new(cpus(1.0));
    bench.node(2, cpus(1.0).with(GPU, Amount::ONE));
    // The GPU node is full for good, with an actor.
    let on_gpus = cpus(1.0).with(GPU, Amount::ONE);
    bench.alive(ActorSpec { holds: on_gpus.clone(), ..actor_of(DRIVER, 5) });
    bench.demand(DRIVER, cpus(1.0), 1);
    assert_eq!(bench.ready().len(), 1);
    bench.demand(OTHER, on_gpus, 1);
    bench.tick(1_000);
    assert_eq!(bench.recalled(DRIVER), [], "the lease on the node without GPUs was recalled for a GPU task");
}

#[test]
fn one_and_a_half_gpus_are_refused() {
    let mut bench = Bench::new(gpus(4.0));
    bench.demand(DRIVER, gpus(1.5), 1);
    assert_eq!(bench.starts().len(), 0);
    assert_eq!(bench.refused(DRIVER).len(), 1);
}

#[test]
fn a_job_ends_with_its_own_driver_only() {
    let mut bench = Bench::new(cpus(1.0));
    bench.step(Event::ProcessLost(OTHER, Some(job_of(DRIVER).id)));
    assert!(!bench.ordered.iter().any(|(_, message)| matches!(message, NodeMessage::EndJob { .. })));
    bench.step(Event::ProcessLost(DRIVER, Some(job_of(DRIVER).id)));
    assert!(bench.ordered.iter().any(|(_, message)| matches!(message, NodeMessage::EndJob { .. })));
}

#[test]
fn an_idle_worker_process_that_asks_for_the_first_time_is_served_however_many_others_were() {
    let mut bench = Bench::new(cpus(2.0));
    let of_driver = |bench: &mut Bench, process| bench.state.worker_known(process, JobId(DRIVER.0), NodeId(1));
    let idle = ProcessId(1_000_000);
    of_driver(&mut bench, idle);
    for other in 1..5_000 {
        of_driver(&mut bench, ProcessId(idle.0 + other));
    }
    bench.step(Event::ProcessConnected(idle));
    bench.demand(idle, cpus(1.0), 1);
    bench.ready();
    assert_eq!(bench.granted(idle).len(), 1);
}

#[test]
fn nothing_is_granted_while_the_journal_cannot_be_written_and_what_runs_goes_on() {
    let mut bench = Bench::empty();
    bench.node(1, cpus(2.0));
    bench.driver(DRIVER);
    bench.demand(DRIVER, cpus(1.0), 1);
    assert_eq!(bench.started.len(), 1);
    bench.step(Event::JournalFails(Some("no room".into())));
    bench.demand(DRIVER, cpus(1.0), 2);
    bench.tick(1_000);
    assert_eq!(bench.started.len(), 1, "the other CPU is free, and nobody gets it");
    let why = bench.state.picture().pending.first().map(|row| row.why.clone()).unwrap_or_default();
    assert!(why.contains("cannot write its journal") && why.contains("no room"), "{why}");
    bench.step(Event::JournalFails(None));
    assert_eq!(bench.started.len(), 2);
}
