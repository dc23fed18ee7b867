//! Placement groups: where their bundles go, who may use them, and how they end.

use super::*;
use PlacementStrategy::{Pack, Spread, StrictPack, StrictSpread};

fn cluster(nodes: u64, each: ResourceSet) -> Bench {
    let mut bench = Bench::empty();
    for id in 1..=nodes {
        bench.node(id, each.clone());
    }
    bench.driver(DRIVER);
    bench.driver(OTHER);
    bench
}

fn distinct(places: &[u64]) -> usize {
    places.iter().collect::<std::collections::BTreeSet<_>>().len()
}

#[test]
fn bundles_lie_as_their_strategy_says() {
    for (strategy, count, nodes) in
        [(Pack, 4, 1), (Pack, 6, 2), (Spread, 3, 3), (Spread, 6, 4), (StrictPack, 4, 1), (StrictSpread, 4, 4)]
    {
        let mut bench = cluster(4, cpus(4.0));
        bench.group(group_of(DRIVER, 1, strategy, &vec![cpus(1.0); count])).unwrap();
        let places = bench.places(1).unwrap();
        assert_eq!((places.len(), distinct(&places)), (count, nodes), "{strategy:?}: {places:?}");
    }
}

#[test]
fn all_of_a_group_is_reserved_or_nothing() {
    let mut bench = cluster(2, cpus(4.0));
    bench.demand(OTHER, cpus(4.0), 1);
    let lease = bench.ready()[0];
    bench.group(group_of(DRIVER, 1, StrictSpread, &[cpus(2.0), cpus(2.0)])).unwrap();
    assert_eq!(bench.places(1), None);
    let free: f64 = bench.state.picture().nodes.iter().map(|node| node.available.get(CPU).as_f64()).sum();
    assert_eq!(free, 4.0, "nothing is held by a group that waits");
    bench.return_and_end(OTHER, lease);
    assert_eq!(distinct(&bench.places(1).unwrap()), 2);
}

#[test]
fn nothing_outside_may_use_what_is_reserved_and_what_is_inside_may() {
    let mut bench = cluster(1, cpus(4.0));
    bench.group(group_of(DRIVER, 1, Pack, &[cpus(3.0)])).unwrap();
    bench.demand(OTHER, cpus(2.0), 1);
    assert_eq!(bench.starts().len(), 0);
    bench.wants(OTHER, inside(1, None, cpus(2.0)), 2);
    let starts = bench.starts();
    assert_eq!(starts.len(), 1, "the bundle has room for one");
    assert_eq!(starts[0].bundle, Some((PlacementGroupId(1), 0)));
}

#[test]
fn a_bundle_by_its_number_or_any_with_room() {
    let mut bench = cluster(2, cpus(2.0));
    bench.group(group_of(DRIVER, 1, StrictSpread, &[cpus(2.0), cpus(2.0)])).unwrap();
    bench.wants(DRIVER, inside(1, Some(1), cpus(2.0)), 1);
    bench.wants(DRIVER, inside(1, None, cpus(2.0)), 1);
    let bundles: Vec<_> = bench.starts().iter().filter_map(|start| start.bundle).map(|(_, index)| index).collect();
    assert_eq!(bundles, [1, 0]);
}

#[test]
fn devices_of_a_bundle_are_used_by_what_runs_in_it() {
    let mut bench = cluster(1, cpus(8.0).with(GPU, amount(4.0)));
    let each = cpus(1.0).with(GPU, amount(1.0));
    bench.group(group_of(DRIVER, 1, StrictPack, &[each.clone(), each.clone()])).unwrap();
    bench.demand(OTHER, gpus(1.0), 4);
    let outside: Vec<u32> =
        bench.starts().iter().flat_map(|start| start.gpus.clone()).map(|(device, _)| device).collect();
    assert_eq!(outside, [2, 3]);
    for index in 0..2 {
        bench.wants(DRIVER, inside(1, Some(index), each.clone()), 1);
    }
    let used: Vec<u32> = bench.starts().iter().flat_map(|start| start.gpus.clone()).map(|(device, _)| device).collect();
    assert_eq!(used, [0, 1]);
}

#[test]
fn a_gang_gets_the_node_whose_devices_are_joined() {
    let mut bench = Bench::empty();
    // On the first node, no island has four free devices any more.
    bench.labelled(1, cpus(8.0).with(GPU, amount(8.0)), &[("n", "1")]);
    bench.driver(DRIVER);
    bench.wants(DRIVER, Shape { labels: vec!["n=1".parse().unwrap()], ..shape(gpus(1.0)) }, 1);
    bench.wants(DRIVER, Shape { labels: vec!["n=1".parse().unwrap()], ..shape(gpus(2.0)) }, 2);
    assert_eq!(bench.ready().len(), 3);
    bench.labelled(2, cpus(8.0).with(GPU, amount(8.0)), &[("n", "2")]);
    bench.group(group_of(DRIVER, 1, StrictPack, &vec![gpus(1.0); 4])).unwrap();
    assert_eq!(bench.places(1), Some(vec![2; 4]));
    let why = bench.state.explain(0, Subject::PlacementGroup(PlacementGroupId(1))).unwrap();
    assert!(why.reasons.iter().any(|reason| reason.contains("joined by NVLink")), "{why:?}");
}

#[test]
fn bundles_of_a_dead_node_are_placed_again_and_the_others_stay() {
    let mut bench = cluster(3, cpus(2.0));
    bench.group(group_of(DRIVER, 1, StrictSpread, &[cpus(2.0), cpus(2.0)])).unwrap();
    let before = bench.places(1).unwrap();
    bench.step(Event::NodeLost(NodeId(before[0]), "test".into()));
    let after = bench.places(1).unwrap();
    assert_eq!(after[1], before[1]);
    assert!(after[0] != before[0] && after[0] != after[1], "{before:?} {after:?}");
}

#[test]
fn an_actor_of_a_lost_bundle_waits_for_it() {
    let mut bench = cluster(2, cpus(2.0));
    bench.group(group_of(DRIVER, 1, StrictSpread, &[cpus(2.0), cpus(2.0)])).unwrap();
    let places = bench.places(1).unwrap();
    let mut spec = actor_of(DRIVER, 5);
    (spec.placement, spec.max_restarts) = (inside(1, Some(0), cpus(1.0)), 1);
    bench.alive(spec);
    bench.step(Event::NodeLost(NodeId(places[0]), "test".into()));
    // The group cannot be placed on what is left: it waits for another node, and the actor for the group.
    let states = bench.actor_states(DRIVER, 5);
    assert!(matches!(states.last(), Some(ActorState::Restarting { .. })), "{states:?}");
    bench.node(9, cpus(2.0));
    bench.start_actor(ActorId(5), 1);
    let states = bench.actor_states(DRIVER, 5);
    assert!(matches!(states.last(), Some(ActorState::Alive { .. })), "{states:?}");
}

#[test]
fn removing_a_group_ends_what_runs_in_it_and_gives_everything_back() {
    let mut bench = cluster(1, cpus(4.0).with(GPU, amount(1.0)));
    bench.group(group_of(DRIVER, 1, Pack, &[cpus(4.0).with(GPU, amount(1.0))])).unwrap();
    bench.wants(DRIVER, inside(1, None, cpus(1.0).with(GPU, amount(1.0))), 3);
    let lease = bench.ready()[0];
    let mut spec = actor_of(DRIVER, 5);
    (spec.placement, spec.max_restarts) = (inside(1, None, cpus(1.0)), 10);
    bench.alive(spec);
    bench.ordered.clear();
    bench.remove_group(1);
    bench.remove_group(1);
    assert!(matches!(bench.actor_states(DRIVER, 5).last(), Some(ActorState::Dead { .. })));
    assert!(matches!(bench.refused(DRIVER)[..], [Error::PlacementGroupGone { .. }]), "what waited is told");
    assert_eq!(bench.ordered.len(), 2, "both are ended: {:?}", bench.ordered);
    // The device is free when its process is gone, and not before.
    bench.demand(OTHER, gpus(1.0), 1);
    assert_eq!(bench.starts().len(), 0);
    for lease in [lease, LeaseId(lease.0 + 1)] {
        bench.says(NodeId(1), HeadMessage::LeaseEnded(lease));
    }
    assert_eq!(bench.starts().len(), 1);
    bench.state.audit_all().unwrap();
}

#[test]
fn a_group_that_waits_can_be_removed_and_one_that_is_gone_says_so() {
    let mut bench = cluster(1, cpus(2.0));
    bench.demand(OTHER, cpus(2.0), 1);
    bench.ready();
    bench.group(group_of(DRIVER, 1, Pack, &[cpus(2.0)])).unwrap();
    bench.wants(DRIVER, inside(1, None, cpus(1.0)), 1);
    bench.remove_group(1);
    assert!(matches!(bench.group_states(1).last(), Some(PlacementGroupState::Gone { .. })));
    bench.refused(DRIVER);
    bench.wants(DRIVER, inside(1, None, cpus(1.0)), 1);
    let errors = bench.refused(DRIVER);
    assert!(errors[0].to_string().contains("was removed"), "{}", errors[0]);
}

#[test]
fn the_creator_of_a_group_hears_that_somebody_else_has_removed_it() {
    for detached in [false, true] {
        let mut bench = cluster(1, cpus(4.0));
        let spec = PlacementGroupSpec { detached, ..group_of(DRIVER, 1, Pack, &[cpus(1.0)]) };
        let (made, actions) = bench.state.create_group(bench.now, spec);
        assert!(made.is_ok());
        bench.take_in(actions);
        bench.remove_group(1);
        let told = bench.told_to(DRIVER, |event| match event {
            HeadEvent::PlacementGroup { group, state: PlacementGroupState::Gone { .. } } => Some(*group),
            _ => None,
        });
        assert_eq!(told.is_empty(), detached, "it stays for one that ends with it: {told:?}");
    }
}

#[test]
fn a_group_that_could_not_be_written_can_be_asked_for_again() {
    let mut bench = cluster(1, cpus(4.0));
    let spec = group_of(DRIVER, 1, Pack, &[cpus(3.0)]);
    for _ in 0..2 {
        bench.group(spec.clone()).unwrap();
        assert!(bench.places(1).is_some(), "another has its place");
        let actions = bench.state.placement_group_not_written(bench.now, PlacementGroupId(1));
        bench.take_in(actions);
        assert!(!bench.group_states(1).iter().any(|state| matches!(state, PlacementGroupState::Gone { .. })));
    }
    assert!(bench.state.groups.get(PlacementGroupId(1)).is_none());
}

#[test]
fn a_group_that_was_asked_for_again_before_it_could_not_be_written_stays() {
    let mut bench = cluster(1, cpus(4.0));
    let spec = group_of(DRIVER, 1, Pack, &[cpus(3.0)]);
    bench.group(spec.clone()).unwrap();
    // The connection broke before the answer.
    bench.group(spec).unwrap();
    for is_there in [true, false] {
        let actions = bench.state.placement_group_not_written(bench.now, PlacementGroupId(1));
        bench.take_in(actions);
        assert_eq!(bench.state.groups.get(PlacementGroupId(1)).is_some(), is_there);
    }
}

#[test]
fn a_group_that_somebody_has_removed_is_not_made_again() {
    let mut bench = cluster(1, cpus(4.0));
    let spec = group_of(DRIVER, 1, Pack, &[cpus(3.0)]);
    bench.group(spec.clone()).unwrap();
    bench.remove_group(1);
    let error = bench.group(spec).unwrap_err();
    assert!(error.to_string().contains("was removed"), "{error}");
    bench.demand(OTHER, cpus(4.0), 1);
    assert_eq!(bench.ready().len(), 1, "nothing is held by it");
}

#[test]
fn groups_end_with_their_creator_unless_they_are_detached() {
    let mut bench = cluster(1, cpus(4.0));
    bench.group(group_of(DRIVER, 1, Pack, &[cpus(1.0)])).unwrap();
    let name = ScopedName { namespace: "test".into(), name: "kept".into() };
    bench
        .group(PlacementGroupSpec {
            detached: true,
            name: Some(name.clone()),
            ..group_of(DRIVER, 2, Pack, &[cpus(1.0)])
        })
        .unwrap();
    bench.step(Event::ProcessLost(DRIVER, Some(JobId(DRIVER.0))));
    assert_eq!(bench.free(), cpus(3.0));
    assert_eq!(bench.state.find_group(&name).unwrap().id, PlacementGroupId(2));
    bench.remove_group(2);
    assert_eq!(bench.free(), cpus(4.0));
    assert!(bench.state.picture().jobs.iter().all(|job| job.id != JobId(DRIVER.0)), "nothing of the job is left");
}

#[test]
fn what_can_never_be_placed_is_refused_at_once_with_what_is_missing() {
    let mut bench = cluster(2, cpus(4.0));
    let mut refused = |id, strategy, bundles: &[ResourceSet]| {
        bench.group(group_of(DRIVER, id, strategy, bundles)).unwrap_err().to_string()
    };
    let text = refused(1, Pack, &[cpus(8.0)]);
    assert!(text.contains("for bundle 0") && text.contains("4 CPU of the 8"), "{text}");
    let text = refused(2, StrictSpread, &vec![cpus(1.0); 3]);
    assert!(text.contains("2 nodes"), "{text}");
    let text = refused(3, StrictPack, &[cpus(3.0), cpus(3.0)]);
    assert!(text.contains("on one node"), "{text}");
    let text = refused(4, Spread, &vec![cpus(2.0); 9]);
    assert!(text.contains("all nodes together have 8 CPU"), "{text}");
    let text = refused(5, Pack, &[]);
    assert!(text.contains("no bundles"), "{text}");
    let text = refused(6, Pack, &[ResourceSet::new()]);
    assert!(text.contains("reserves nothing"), "{text}");
    assert!(bench.state.next_tick().is_none());
}

#[test]
fn a_patient_group_waits_for_nodes_that_could_hold_it() {
    let mut bench = cluster(1, cpus(2.0));
    bench
        .group(PlacementGroupSpec { patient: true, ..group_of(DRIVER, 1, StrictSpread, &vec![cpus(2.0); 2]) })
        .unwrap();
    assert_eq!(bench.places(1), None);
    bench.node(7, cpus(2.0));
    assert_eq!(bench.places(1).map(|places| distinct(&places)), Some(2));
}

#[test]
fn a_place_is_found_for_every_bundle_where_taking_the_best_for_each_would_fail() {
    let mut bench = Bench::empty();
    bench.driver(DRIVER);
    bench.labelled(1, cpus(2.0), &[("zone", "a"), ("disk", "fast")]);
    bench.labelled(2, cpus(2.0), &[("zone", "b")]);
    bench.labelled(3, cpus(2.0), &[("disk", "fast")]);
    let mut spec = group_of(DRIVER, 1, StrictSpread, &vec![cpus(1.0); 3]);
    spec.bundles[1].labels = vec!["disk=fast".parse().unwrap()];
    spec.bundles[2].labels = vec!["zone in (a, b)".parse().unwrap()];
    bench.group(spec).unwrap();
    let places = bench.places(1).unwrap();
    assert!(distinct(&places) == 3 && [1, 3].contains(&places[1]) && [1, 2].contains(&places[2]), "{places:?}");
}

#[test]
fn a_large_gang_is_not_starved_by_small_tasks_and_these_use_what_it_cannot() {
    let mut bench = cluster(2, cpus(4.0).with("license", amount(4.0)));
    for driver in [DRIVER, OTHER] {
        bench.demand(driver, cpus(1.0), 100);
    }
    let mut leases = bench.ready();
    bench.group(group_of(DRIVER, 1, StrictSpread, &vec![cpus(4.0); 2])).unwrap();
    for round in 0..400 {
        if bench.places(1).is_some() {
            bench.demand(OTHER, ResourceSet::new().with("license", amount(1.0)), 8);
            assert_eq!(bench.starts().len(), 8);
            return;
        }
        assert!(round < 399, "the gang was never placed");
        // One task after the other ends; their owners always want more.
        let lease = leases.remove(0);
        let owner = match &bench.started[&lease].1.holder {
            LeaseHolder::Tasks(owner, _) => *owner,
            LeaseHolder::Actor(..) => unreachable!(),
        };
        bench.return_and_end(owner, lease);
        bench.demand(owner, cpus(1.0), 100);
        leases.extend(bench.ready());
        bench.tick(25);
    }
}

/// Numbers that look random. (splitmix64, Steele, Lea and Flood 2014.)
fn random(seed: &mut u64, end: u64) -> u64 {
    *seed = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut x = *seed;
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    (x ^ (x >> 31)) % end
}

fn nodes(count: u64, each: &ResourceSet) -> Bench {
    let mut bench = Bench::new(each.clone());
    for id in 2..=count {
        bench.node(id, each.clone());
    }
    bench
}

/// The nodes of which nothing is used, and what is used of all.
fn whole_and_used(bench: &Bench) -> (usize, Amount) {
    let nodes = bench.state.picture().nodes;
    let whole = nodes.iter().filter(|node| node.available == node.info.resources).count();
    let used = nodes.iter().map(|node| node.info.resources.get(CPU) - node.available.get(CPU));
    (whole, used.fold(Amount::ZERO, |sum, amount| sum + amount))
}

#[test]
fn small_groups_leave_whole_nodes_to_large_ones() {
    for seed in 1..=10 {
        let (mut seed, mut id) = (seed, 0);
        let mut bench = nodes(100, &cpus(4.0));
        while whole_and_used(&bench).1 < amount(281.0) {
            id += 1;
            let tenths = 1 + random(&mut seed, 30);
            bench.group(group_of(DRIVER, id, PlacementStrategy::Pack, &[cpus(tenths as f64 / 10.0)])).unwrap();
        }
        let (whole, _) = whole_and_used(&bench);
        assert!(whole >= 20, "{whole} of 100 nodes are free, with 281 of 400 CPUs in use");
    }
}

#[test]
fn actors_that_hold_something_leave_whole_nodes_free_and_others_spread() {
    let mut bench = nodes(10, &cpus(4.0));
    for id in 1..=20 {
        bench.create(ActorSpec { holds: cpus(1.0), ..actor_of(DRIVER, id) }, false).unwrap();
    }
    assert_eq!(whole_and_used(&bench), (5, amount(20.0)));
    let mut bench = nodes(10, &cpus(4.0));
    for id in 1..=20 {
        bench.create(actor_of(DRIVER, id), false).unwrap();
        bench.ready();
    }
    let nodes = bench.state.picture().nodes;
    assert_eq!(nodes.iter().map(|node| node.leases).collect::<Vec<_>>(), [2; 10]);
}

#[test]
fn a_piece_of_a_device_is_taken_where_one_is_broken_already() {
    let mut bench = Bench::new(gpus(2.0));
    bench.node(2, gpus(1.0));
    bench.group(group_of(DRIVER, 1, PlacementStrategy::Pack, &[gpus(0.5)])).unwrap();
    bench.group(group_of(DRIVER, 2, PlacementStrategy::Pack, &[gpus(1.0)])).unwrap();
    bench.group(group_of(DRIVER, 3, PlacementStrategy::Pack, &[gpus(0.5)])).unwrap();
    // The first broke the only device of node 2; the third shares it, and node 1 keeps a whole one.
    assert_eq!((bench.places(1), bench.places(3)), (Some(vec![2]), Some(vec![2])));
    assert_eq!(bench.places(2), Some(vec![1]));
}
