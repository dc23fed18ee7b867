//! Who would wait for ever: groups that are gone, quotas, nodes that are lost.

use super::*;
use wingbeat_net::messages::PendingRow;

/// As an owner that has nothing more to do with a lease whose process was killed.
fn killed(bench: &mut Bench, lease: LeaseId) {
    bench.says(NodeId(1), HeadMessage::LeaseEnded(lease));
}

#[test]
fn a_task_whose_group_is_removed_before_its_process_is_ready_is_refused() {
    let mut bench = Bench::new(cpus(4.0));
    bench.group(group_of(DRIVER, 1, PlacementStrategy::Pack, &[cpus(2.0)])).unwrap();
    bench.wants(DRIVER, inside(1, None, cpus(1.0)), 1);
    let lease = bench.starts()[0].lease;
    bench.remove_group(1);
    assert!(matches!(bench.refused(DRIVER)[..], [Error::PlacementGroupGone { .. }]));
    bench.says(NodeId(1), HeadMessage::LeaseReady { lease, worker: address(worker_of(lease)), pid: 7 });
    killed(&mut bench, lease);
    assert!(bench.state.picture().pending.is_empty(), "{:?}", bench.state.picture().pending);
    // What its owner says next, before it knows, is refused as well.
    bench.wants(DRIVER, inside(1, None, cpus(1.0)), 1);
    assert_eq!(bench.refused(DRIVER).len(), 1);
    bench.state.audit_all().unwrap();
    assert_eq!(bench.free(), cpus(4.0));
}

#[test]
fn who_is_set_aside_when_its_group_is_removed_is_refused() {
    let mut bench = Bench::new(cpus(4.0));
    bench.group(group_of(DRIVER, 1, PlacementStrategy::Pack, &[cpus(2.0)])).unwrap();
    // Its node has not said yet for which job it works.
    let unknown = ProcessId(77);
    bench.step(Event::ProcessConnected(unknown));
    bench.wants(unknown, inside(1, None, cpus(1.0)), 1);
    bench.remove_group(1);
    assert_eq!(bench.refused(unknown).len(), 1);
    assert!(bench.state.picture().pending.is_empty());
}

#[test]
fn nested_tasks_use_the_cpus_of_those_that_wait_for_them_under_a_quota_too() {
    let mut bench = Bench::new(cpus(4.0));
    bench.quota("test", Some(cpus(2.0)));
    bench.demand(DRIVER, cpus(1.0), 2);
    let parents = bench.ready();
    let workers = [worker_of(parents[0]), worker_of(parents[1])];
    for (worker, lease) in workers.into_iter().zip(&parents) {
        bench.step(Event::ProcessConnected(worker));
        bench.demand(worker, cpus(1.0), 1);
        bench.wait(worker, *lease, 1);
    }
    let children = bench.ready();
    assert_eq!(children.len(), 2, "the children wait for CPUs that their parents do not use");
    bench.state.audit_all().unwrap();
    // A parent that goes on is above the quota; nothing new begins until that is over.
    bench.resume(workers[0], parents[0], 1);
    bench.demand(OTHER, cpus(1.0), 1);
    assert_eq!(bench.starts().len(), 0);
    bench.return_and_end(workers[0], children[0]);
    assert_eq!(bench.starts().len(), 0);
    bench.return_and_end(DRIVER, parents[0]);
    bench.demand(DRIVER, cpus(1.0), 1);
    assert_eq!(bench.starts().len(), 1);
    bench.resume(workers[1], parents[1], 1);
    bench.state.audit_all().unwrap();
    bench.return_and_end(workers[1], children[1]);
    bench.return_and_end(DRIVER, parents[1]);
    bench.state.audit_all().unwrap();
}

fn memory(gib: u64) -> Shape {
    Shape { gpu_memory: gib << 30, ..shape(ResourceSet::new()) }
}

#[test]
fn memory_of_a_device_counts_against_a_quota_of_gpus() {
    let mut bench = Bench::empty();
    bench.driver(DRIVER);
    bench.labelled(1, cpus(4.0).with(GPU, amount(4.0)), &[]);
    bench.quota("test", Some(gpus(1.0)));
    bench.wants(DRIVER, memory(80), 4);
    let leases = bench.ready();
    assert_eq!(leases.len(), 1, "each needs a whole GPU");
    let why = bench.state.picture().pending[0].why.clone();
    assert!(why.contains("namespace `test` may hold 1 GPU"), "{why}");
    // Actors and groups, too.
    let placement = memory(80);
    bench.create(ActorSpec { placement, ..actor_of(DRIVER, 5) }, false).unwrap();
    let bundle = BundleSpec { gpu_memory: 80 << 30, ..BundleSpec::default() };
    let mut group = group_of(DRIVER, 1, PlacementStrategy::Pack, &[]);
    group.bundles = vec![bundle; 1];
    bench.group(group.clone()).unwrap();
    assert_eq!((bench.starts().len(), bench.places(1)), (0, None));
    bench.state.audit_all().unwrap();
    bench.return_and_end(DRIVER, leases[0]);
    bench.wants(DRIVER, memory(80), 0);
    assert_eq!(bench.starts().len() + usize::from(bench.places(1).is_some()), 1);
    // What could never be allowed is an error at once.
    (group.id, group.bundles) = (PlacementGroupId(2), vec![group.bundles[0].clone(); 2]);
    let error = bench.group(group).unwrap_err();
    assert!(error.to_string().contains("quota of namespace `test` is 1 GPU"), "{error}");
    bench.state.audit_all().unwrap();
}

#[test]
fn a_lowered_quota_recalls_what_is_above_it() {
    let mut bench = Bench::new(cpus(8.0));
    bench.quota("test", Some(cpus(8.0)));
    bench.demand(DRIVER, cpus(1.0), 900);
    let leases = bench.ready();
    assert_eq!(leases.len(), 8);
    bench.granted(DRIVER);
    bench.quota("test", Some(cpus(1.0)));
    let recalled = bench.recalled(DRIVER);
    assert_eq!(recalled.len(), 7);
    bench.quota("test", Some(cpus(1.0)));
    assert_eq!(bench.recalled(DRIVER), [], "they are on their way back");
    for lease in recalled {
        bench.return_and_end(DRIVER, lease);
        bench.demand(DRIVER, cpus(1.0), 900);
    }
    assert_eq!(bench.starts().len(), 0);
    bench.tick(1_000);
    assert_eq!(bench.recalled(DRIVER), []);
    bench.state.audit_all().unwrap();
}

#[test]
fn a_lease_that_becomes_ready_above_a_lowered_quota_is_recalled() {
    let mut bench = Bench::new(cpus(2.0));
    bench.quota("test", Some(cpus(2.0)));
    bench.demand(DRIVER, cpus(1.0), 2);
    let starts = bench.starts();
    bench.quota("test", Some(cpus(1.0)));
    assert_eq!(bench.recalled(DRIVER), [], "its owner does not know it yet");
    for start in &starts {
        bench.says(
            NodeId(1),
            HeadMessage::LeaseReady { lease: start.lease, worker: address(worker_of(start.lease)), pid: 7 },
        );
    }
    assert_eq!(bench.recalled(DRIVER).len(), 1);
}

#[test]
fn what_was_possible_before_its_node_was_lost_waits_for_another_such_node() {
    let mut bench = Bench::new(cpus(2.0));
    bench.node(2, cpus(8.0));
    let large = shape(cpus(8.0));
    bench
        .create(ActorSpec { max_restarts: 1, placement: large.clone(), holds: cpus(8.0), ..actor_of(DRIVER, 5) }, false)
        .unwrap();
    bench.says(DRIVER, HeadMessage::WatchActor(ActorId(5)));
    bench.start_actor(ActorId(5), 0);
    bench.group(group_of(DRIVER, 1, PlacementStrategy::Pack, &[cpus(1.0)])).unwrap();
    bench.step(Event::NodeLost(NodeId(2), "it is gone".into()));
    // The actor, a task's retry (which says its demand anew), and a group.
    assert!(matches!(bench.actor_states(DRIVER, 5).last(), Some(ActorState::Restarting { .. })));
    bench.wants(OTHER, large.clone(), 1);
    bench.wants(OTHER, large.clone(), 0);
    bench.wants(OTHER, large.clone(), 1);
    assert_eq!(bench.refused(OTHER).len(), 0);
    let why = bench.state.explain(bench.now, Subject::Actor(ActorId(5))).unwrap().reasons.join("\n");
    assert!(why.contains("host2 (node-000000000002), which could hold it, is lost, as the head found"), "{why}");
    // What never was possible is an error at once, and so is what a node could have held that was lost before the job began.
    bench.wants(DRIVER, shape(cpus(9.0)), 1);
    assert!(matches!(bench.refused(DRIVER)[..], [Error::Infeasible { .. }]));
    let late = ProcessId(9);
    bench.now += 1;
    bench.driver(late);
    bench.wants(late, large, 1);
    assert!(matches!(bench.refused(late)[..], [Error::Infeasible { .. }]));
    // The last node dies, too, and a small one joins first.
    bench.step(Event::NodeLost(NodeId(1), "it is gone".into()));
    bench.node(3, cpus(1.0));
    assert_eq!(bench.refused(OTHER).len(), 0);
    bench.ordered.clear();
    bench.node(4, cpus(16.0));
    assert_eq!(bench.starts().len(), 2);
    bench.state.audit_all().unwrap();
}

#[test]
fn a_group_that_was_placed_waits_for_nodes_like_those_it_lost() {
    let mut bench = Bench::new(cpus(2.0));
    bench.node(2, cpus(8.0));
    bench.group(group_of(DRIVER, 1, PlacementStrategy::Pack, &[cpus(8.0)])).unwrap();
    assert_eq!(bench.places(1), Some(vec![2]));
    bench.step(Event::NodeLost(NodeId(2), "it is gone".into()));
    assert!(matches!(bench.group_states(1).last(), Some(PlacementGroupState::Pending)));
    bench.node(3, cpus(8.0));
    assert_eq!(bench.places(1), Some(vec![3]));
}

#[test]
fn nodes_of_before_have_time_to_come_back_before_anything_is_refused() {
    let mut bench = Bench::empty();
    bench.state = State::recover(ClusterId(1), 1 << 33, Vec::new(), 10_000);
    bench.node(1, cpus(1.0));
    bench.driver(DRIVER);
    bench.demand(DRIVER, cpus(8.0), 1);
    bench.demand(DRIVER, cpus(99.0), 1);
    assert_eq!(bench.refused(DRIVER).len(), 0);
    bench.ordered.clear();
    bench.node(2, cpus(8.0));
    assert_eq!(bench.starts().len(), 1);
    bench.tick(10_000);
    assert_eq!(bench.refused(DRIVER).len(), 1);
}

#[test]
fn a_picture_of_many_waiters_looks_at_the_nodes_once_for_each_of_the_first_shapes() {
    let mut bench = Bench::new(cpus(1.0));
    for id in 0..1_000 {
        bench.create(ActorSpec { holds: cpus(1.0), ..actor_of(DRIVER, 10 + id) }, false).unwrap();
        // Some of a shape of their own, and some that something else than room holds back.
        if id % 20 == 0 {
            let own = cpus(1.0).with("license", Amount::from_units(1 + id as i64));
            bench.wants(DRIVER, Shape { patient: true, ..shape(own) }, 1);
            bench.wants(ProcessId(1_000 + id), shape(cpus(1.0)), 1);
            bench.group(group_of(DRIVER, 10 + id, PlacementStrategy::Pack, &[cpus(1.0)])).unwrap();
        }
    }
    let pending = bench.state.picture().pending;
    assert!(pending.len() >= 1_099 && pending.iter().all(|row| !row.why.is_empty()));
    let of_actors = pending.iter().filter(|row| row.name.starts_with("actor") && row.why.contains("has 0 CPU free"));
    assert!(of_actors.count() >= 998, "one look is enough for all that ask for the same");
    let of_shapes = |pending: &[PendingRow]| {
        pending.iter().filter(|row| row.why.contains("license") && row.why.contains("host1")).count()
    };
    assert_eq!(of_shapes(&pending), 50);
    let of_groups = pending.iter().filter(|row| row.name.contains("group") && row.why.contains("nodes have room"));
    assert!(of_groups.count() <= 64);
    for id in 0..100 {
        let own = cpus(1.0).with("license", Amount::from_units(5_000 + id));
        bench.wants(DRIVER, Shape { patient: true, ..shape(own) }, 1);
    }
    let explained = of_shapes(&bench.state.picture().pending);
    assert!((50..=64).contains(&explained), "{explained}");
}

#[test]
fn nothing_new_is_placed_on_a_node_that_is_away_and_what_runs_there_goes_on() {
    let mut bench = Bench::new(cpus(2.0));
    bench.node(2, cpus(2.0));
    bench.demand(DRIVER, cpus(1.0), 4);
    let running = bench.ready();
    assert_eq!(running.len(), 4);
    bench.step(Event::NodeAway(NodeId(2)));
    let there: Vec<LeaseId> =
        running.iter().copied().filter(|lease| bench.state.node_of(*lease) == Some(NodeId(2))).collect();
    assert_eq!(there.len(), 2, "what runs there is not taken for lost");
    // Room on both nodes: only that of the other is given.
    for lease in running {
        bench.says(DRIVER, HeadMessage::ReturnLease(lease));
        bench.says(NodeId(1), HeadMessage::LeaseEnded(lease));
    }
    bench.demand(OTHER, cpus(1.0), 4);
    let started = bench.starts();
    assert_eq!(started.len(), 2);
    assert!(started.iter().all(|start| bench.state.node_of(start.lease) == Some(NodeId(1))));
    let why = bench.state.explain(bench.now, Subject::Node(NodeId(2))).unwrap();
    assert!(why.state.contains("is suspect: it has had no connection"), "{why:?}");
    bench.step(Event::NodeBack(NodeId(2)));
    assert_eq!(bench.starts().len(), 2, "those that wait are served at once");
    bench.state.audit_all().unwrap();
}
