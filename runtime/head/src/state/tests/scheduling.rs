//! Labels, affinity, priorities, quotas, draining, memory of devices.

use super::*;
use crate::state::{SLOW_TICK, TICK, TICKS_AT_SPEED};

fn labelled(rules: &[&str], resources: ResourceSet) -> Shape {
    Shape { labels: rules.iter().map(|rules| rules.parse().unwrap()).collect(), ..shape(resources) }
}

fn zones() -> Bench {
    let mut bench = Bench::empty();
    bench.driver(DRIVER);
    bench.driver(OTHER);
    for (id, zone) in [(1, "a"), (2, "b"), (3, "c")] {
        bench.labelled(id, cpus(2.0), &[("zone", zone)]);
    }
    bench.ordered.clear();
    bench
}

fn nodes_of(bench: &mut Bench) -> Vec<u64> {
    bench.starts().iter().map(|start| bench.started[&start.lease].0.0).collect()
}

#[test]
fn only_nodes_whose_labels_match_will_do_and_the_next_rules_where_the_first_find_no_room() {
    let mut bench = zones();
    bench.wants(DRIVER, labelled(&["zone=b"], cpus(1.0)), 3);
    assert_eq!(nodes_of(&mut bench), [2, 2]);
    bench.wants(OTHER, labelled(&["zone=b", "zone in (c)"], cpus(1.0)), 1);
    assert_eq!(nodes_of(&mut bench), [3]);
}

#[test]
fn labels_that_no_node_has_are_infeasible_unless_one_is_to_wait_for_them() {
    let mut bench = zones();
    bench.wants(DRIVER, labelled(&["zone=d"], cpus(1.0)), 1);
    let text = bench.refused(DRIVER)[0].to_string();
    assert!(text.contains("does not match `zone=d`"), "{text}");
    bench.wants(OTHER, Shape { patient: true, ..labelled(&["zone=d"], cpus(1.0)) }, 1);
    assert!(bench.refused(OTHER).is_empty());
    bench.labelled(4, cpus(1.0), &[("zone", "d")]);
    assert_eq!(nodes_of(&mut bench), [4]);
}

#[test]
fn hard_affinity_waits_for_its_node_and_soft_affinity_goes_elsewhere() {
    let mut bench = zones();
    let on = |soft| Shape { strategy: Strategy::Node { node: NodeId(2), soft }, ..shape(cpus(2.0)) };
    bench.wants(DRIVER, on(false), 1);
    assert_eq!(nodes_of(&mut bench), [2]);
    bench.wants(OTHER, on(false), 1);
    assert_eq!(nodes_of(&mut bench), [0; 0]);
    bench.wants(OTHER, on(true), 1);
    assert_eq!(nodes_of(&mut bench).len(), 1);
    bench.step(Event::NodeLost(NodeId(2), "test".into()));
    let text = bench.refused(OTHER)[0].to_string();
    assert!(text.contains("is not there"), "{text}");
}

#[test]
fn spread_goes_to_the_node_with_the_fewest_leases() {
    let mut bench = zones();
    bench.wants(DRIVER, Shape { strategy: Strategy::Spread, ..shape(cpus(0.5)) }, 3);
    let mut nodes = nodes_of(&mut bench);
    nodes.sort_unstable();
    assert_eq!(nodes, [1, 2, 3]);
}

#[test]
fn whoever_spreads_hears_how_many_leases_are_being_started() {
    let mut bench = zones();
    let spread = Shape { strategy: Strategy::Spread, ..shape(cpus(1.0)) };
    let starting = |bench: &mut Bench| {
        bench.told_to(DRIVER, |event| match event {
            HeadEvent::Starting { wanted, leases, .. } => Some((*wanted, *leases)),
            _ => None,
        })
    };
    bench.wants(DRIVER, spread.clone(), 9);
    assert_eq!(starting(&mut bench), [(9, 6)], "as many as there is room for");
    let first = bench.starts()[0].lease;
    bench.says(NodeId(1), HeadMessage::LeaseReady { lease: first, worker: address(worker_of(first)), pid: 77 });
    assert_eq!((bench.granted(DRIVER), starting(&mut bench)), (vec![first], vec![]), "its owner counts");
    bench.wants(DRIVER, spread.clone(), 10);
    assert_eq!(starting(&mut bench), [(10, 5)]);
    bench.step(Event::NodeLost(NodeId(3), "test".into()));
    assert_eq!(starting(&mut bench).last().map(|(_, leases)| *leases), Some(3));
    bench.wants(DRIVER, shape(cpus(1.0)), 1);
    assert_eq!(starting(&mut bench), [], "others need not know");
}

#[test]
fn work_without_devices_avoids_nodes_that_have_some() {
    let mut bench = Bench::empty();
    bench.driver(DRIVER);
    bench.node(1, cpus(8.0).with(GPU, amount(2.0)));
    bench.node(2, cpus(2.0));
    bench.ordered.clear();
    bench.demand(DRIVER, cpus(1.0), 3);
    assert_eq!(nodes_of(&mut bench), [2, 2, 1]);
}

#[test]
fn memory_of_a_device_is_a_part_of_it() {
    let mut bench = Bench::empty();
    bench.driver(DRIVER);
    bench.labelled(1, gpus(1.0), &[]);
    let of = |gib: u64| Shape { gpu_memory: gib << 30, ..shape(ResourceSet::new()) };
    bench.wants(DRIVER, of(20), 5);
    let starts = bench.starts();
    assert_eq!(starts.len(), 4, "20 of 80 GiB each");
    assert!(starts.iter().all(|start| start.gpus == [(0, amount(0.25))]), "{starts:?}");
    bench.wants(DRIVER, of(100), 1);
    let text = bench.refused(DRIVER)[0].to_string();
    assert!(text.contains("no GPU that is known to have so much memory"), "{text}");
}

#[test]
fn the_more_important_job_is_served_first_and_gets_leases_of_the_other() {
    let mut bench = Bench::new(cpus(2.0));
    bench.demand(DRIVER, cpus(1.0), 2);
    bench.ready();
    let important = ProcessId(7);
    bench.step(Event::ProcessConnected(important));
    bench.step(Event::JobJoined(Box::new(JobSpec { priority: 10, ..job_of(important) })));
    bench.demand(OTHER, cpus(1.0), 1);
    bench.demand(important, cpus(1.0), 2);
    bench.tick(60);
    bench.tick(25);
    let recalled = bench.recalled(DRIVER);
    assert_eq!(recalled.len(), 2, "all of it, not only a fair share");
    bench.granted(DRIVER);
    for lease in recalled {
        bench.return_and_end(DRIVER, lease);
    }
    bench.ready();
    assert_eq!((bench.granted(important).len(), bench.granted(OTHER).len()), (2, 0));
    // And nobody takes it back.
    bench.tick(1_000);
    assert_eq!(bench.recalled(important), []);
}

#[test]
fn a_namespace_holds_no_more_than_its_quota() {
    let mut bench = Bench::new(cpus(8.0));
    bench.quota("test", Some(cpus(2.0)));
    bench.demand(DRIVER, cpus(1.0), 5);
    let leases = bench.ready();
    assert_eq!(leases.len(), 2);
    // Both drivers are of this namespace.
    bench.demand(OTHER, cpus(1.0), 1);
    bench.group(group_of(OTHER, 1, PlacementStrategy::Pack, &[cpus(1.0)])).unwrap();
    assert_eq!(bench.starts().len(), 0);
    bench.return_and_end(DRIVER, leases[0]);
    assert_eq!(bench.ready().len() + usize::from(bench.places(1).is_some()), 1);
    bench.quota("test", None);
    bench.ready();
    assert!(bench.state.picture().pending.is_empty());
    bench.state.audit_all().unwrap();
}

#[test]
fn what_exceeds_a_quota_for_ever_is_refused() {
    let mut bench = Bench::new(cpus(8.0));
    bench.quota("test", Some(cpus(2.0)));
    bench.demand(DRIVER, cpus(4.0), 1);
    let text = bench.refused(DRIVER)[0].to_string();
    assert!(text.contains("quota of namespace `test` is 2 CPU"), "{text}");
}

#[test]
fn a_lease_that_becomes_ready_on_a_node_that_is_drained_by_then_is_recalled() {
    let mut bench = Bench::new(cpus(2.0));
    bench.demand(DRIVER, cpus(1.0), 1);
    let start = bench.starts().remove(0);
    bench.node(2, cpus(4.0));
    bench.drain(1, 60_000, true);
    assert_eq!(bench.recalled(DRIVER), [], "its owner does not know it yet");
    let worker = address(worker_of(start.lease));
    bench.says(NodeId(1), HeadMessage::LeaseReady { lease: start.lease, worker, pid: 7 });
    assert_eq!(bench.granted(DRIVER), [start.lease]);
    assert_eq!(bench.recalled(DRIVER), [start.lease]);
}

#[test]
fn a_drained_node_gets_no_work_and_gives_its_work_away_at_the_deadline() {
    let mut bench = Bench::new(cpus(2.0));
    bench.demand(DRIVER, cpus(1.0), 1);
    let lease = bench.ready()[0];
    let mut spec = actor_of(DRIVER, 5);
    (spec.max_restarts, spec.placement) = (1, shape(cpus(1.0)));
    let life = bench.alive(spec);
    bench.node(2, cpus(4.0));
    bench.drain(1, 1_000, true);
    assert_eq!(bench.recalled(DRIVER), [lease], "what is queued there goes back to its owner");
    bench.demand(OTHER, cpus(1.0), 2);
    assert_eq!(nodes_of(&mut bench), [2, 2], "nothing new");
    bench.tick(999);
    assert!(!bench.ordered.iter().any(|(_, message)| matches!(message, NodeMessage::EndLease { .. })));
    bench.tick(1);
    let ended =
        bench.ordered.iter().filter(|(_, message)| matches!(message, NodeMessage::EndLease { kill: Some(_), .. }));
    assert_eq!(ended.count(), 2);
    // The actor lives again elsewhere when this life has ended, and it costs it nothing; the task is as if never begun.
    assert!(!bench.starts().iter().any(|start| matches!(start.holder, LeaseHolder::Actor(..))));
    bench.says(NodeId(1), HeadMessage::LeaseEnded(life));
    let again = bench.starts();
    let incarnations: Vec<_> = again
        .iter()
        .filter_map(|start| match &start.holder {
            LeaseHolder::Actor(_, incarnation, _) => Some((bench.started[&start.lease].0.0, incarnation.0)),
            LeaseHolder::Tasks(..) => None,
        })
        .collect();
    assert_eq!(incarnations, [(2, 1)]);
    let death = WorkerDeath {
        process: worker_of(lease),
        pid: 7,
        job: JobId(DRIVER.0),
        node: NodeId(1),
        lease: Some(lease),
        exit: exit(),
        started: 9,
        is_moved: false,
    };
    bench.says(NodeId(1), HeadMessage::WorkerDied(death));
    let told = bench.told_to(DRIVER, |event| match event {
        HeadEvent::WorkerDied(death) => Some((death.started, death.is_moved)),
        _ => None,
    });
    assert_eq!(told, [(9, true)]);
    bench.ordered.clear();
    bench.says(NodeId(1), HeadMessage::LeaseEnded(lease));
    let stopped =
        bench.ordered.iter().any(|(node, message)| *node == NodeId(1) && matches!(message, NodeMessage::Stop(_)));
    assert!(stopped, "nothing is left on it: {:?}", bench.ordered);
}

#[test]
fn a_drained_node_does_not_wait_for_an_actor_that_yields() {
    let mut bench = Bench::new(cpus(2.0));
    bench.alive(ActorSpec { yields_to_drain: true, ..actor_of(DRIVER, 5) });
    bench.demand(DRIVER, cpus(1.0), 1);
    let lease = bench.ready()[0];
    let is_stopped = |bench: &Bench| bench.ordered.iter().any(|(_, message)| matches!(message, NodeMessage::Stop(_)));
    bench.drain(1, 60_000, true);
    assert!(!is_stopped(&bench), "a task runs there");
    bench.says(DRIVER, HeadMessage::ReturnLease(lease));
    bench.says(NodeId(1), HeadMessage::LeaseEnded(lease));
    assert!(is_stopped(&bench), "{:?}", bench.ordered);
}

#[test]
fn bundles_leave_a_drained_node_and_it_can_be_taken_back() {
    let mut bench = Bench::new(cpus(2.0));
    bench.group(group_of(DRIVER, 1, PlacementStrategy::Pack, &[cpus(1.0)])).unwrap();
    assert_eq!(bench.places(1), Some(vec![1]));
    bench.drain(1, 0, false);
    bench.node(2, cpus(2.0));
    bench.tick(1);
    assert_eq!(bench.places(1), Some(vec![2]));
    bench.demand(OTHER, cpus(2.0), 1);
    assert_eq!(bench.starts().len(), 0);
    let (answer, actions) = bench.state.drain(bench.now, NodeId(1), None, String::new(), false);
    bench.take_in(actions);
    answer.unwrap();
    assert_eq!(nodes_of(&mut bench), [1]);
    bench.state.audit_all().unwrap();
}

#[test]
fn a_device_that_somebody_still_uses_is_given_to_nobody_until_it_is_free() {
    let mut bench = Bench::new(gpus(1.0));
    bench.says(NodeId(1), HeadMessage::DevicesHeld(vec![(0, "pid 7 (`python`) still uses it".into())]));
    bench.demand(DRIVER, gpus(1.0), 1);
    assert_eq!(bench.starts().len(), 0);
    assert_eq!(bench.state.picture().nodes[0].held_devices, ["GPU 0: pid 7 (`python`) still uses it"]);
    bench.says(NodeId(1), HeadMessage::DevicesHeld(Vec::new()));
    assert_eq!(bench.starts().len(), 1);
}

#[test]
fn whatever_is_said_from_outside_has_demand_looked_at_soon_again() {
    let mut bench = Bench::new(cpus(1.0));
    bench.demand(DRIVER, cpus(1.0), 2);
    let rest = |bench: &mut Bench| {
        (0..TICKS_AT_SPEED).for_each(|_| bench.tick(0));
        assert_eq!(bench.state.next_tick(), Some(SLOW_TICK));
    };
    rest(&mut bench);
    bench.state.remember(0, Vec::new());
    assert_eq!(bench.state.next_tick(), Some(TICK));
    rest(&mut bench);
    bench.state.quota(0, "other", None);
    assert_eq!(bench.state.next_tick(), Some(TICK));
}
