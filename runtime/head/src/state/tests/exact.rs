//! Groups on empty clusters, compared with all ways in which they could be placed.

use super::*;
use PlacementStrategy::{Pack, Spread, StrictPack, StrictSpread};

/// A small generator of numbers that are the same in every run.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

/// Whether bundles fit, by trying everything: `free` of each node are the resources and then each device.
fn fits(bundles: &[Vec<i64>], nodes: &mut [Vec<i64>], used: &mut Vec<usize>, strategy: PlacementStrategy) -> bool {
    let Some((bundle, rest)) = bundles.split_first() else { return true };
    for node in 0..nodes.len() {
        let is_allowed = match strategy {
            StrictPack => used.iter().all(|other| *other == node),
            StrictSpread => !used.contains(&node),
            Pack | Spread => true,
        };
        let covers = bundle.iter().zip(&nodes[node]).all(|(asked, free)| asked <= free);
        if !is_allowed || !covers {
            continue;
        }
        bundle.iter().zip(&mut nodes[node]).for_each(|(asked, free)| *free -= asked);
        used.push(node);
        if fits(rest, nodes, used, strategy) {
            return true;
        }
        used.pop();
        bundle.iter().zip(&mut nodes[node]).for_each(|(asked, free)| *free += asked);
    }
    false
}

fn is_placed(nodes: &[ResourceSet], bundles: &[ResourceSet], strategy: PlacementStrategy) -> bool {
    let mut bench = Bench::empty();
    for (id, node) in nodes.iter().enumerate() {
        bench.node(1 + id as u64, node.clone());
    }
    bench.driver(DRIVER);
    let is_refused = bench.group(group_of(DRIVER, 1, strategy, bundles)).is_err();
    bench.state.audit_all().unwrap();
    // What does not fit on an empty cluster never does: it is refused, and does not wait.
    assert_eq!(is_refused, bench.places(1).is_none(), "{strategy:?} of {bundles:?} on {nodes:?}");
    !is_refused
}

#[test]
fn a_group_is_placed_on_an_empty_cluster_whenever_there_is_a_way() {
    let mut dice = Dice(1);
    let mut feasible = 0;
    for round in 0..2_400 {
        let count = 2 + dice.below(3) as usize;
        let nodes: Vec<Vec<i64>> = (0..4).map(|_| vec![dice.below(5) as i64, dice.below(5) as i64]).collect();
        let bundles: Vec<Vec<i64>> =
            (0..count).map(|_| vec![dice.below(5) as i64, dice.below(4) as i64]).filter(|all| all != &[0, 0]).collect();
        if bundles.is_empty() {
            continue;
        }
        let strategy = [Pack, Spread, StrictPack, StrictSpread][round % 4];
        let of = |all: &Vec<i64>| cpus(all[0] as f64).with("x", amount(all[1] as f64));
        let is_possible = fits(&bundles, &mut nodes.clone(), &mut Vec::new(), strategy);
        let (shown, asked): (Vec<_>, Vec<_>) = (nodes.iter().map(of).collect(), bundles.iter().map(of).collect());
        assert_eq!(is_placed(&shown, &asked, strategy), is_possible, "{strategy:?} of {bundles:?} on {nodes:?}");
        feasible += usize::from(is_possible);
    }
    assert!(feasible > 300, "{feasible} were feasible");
}

#[test]
fn fractions_of_devices_are_put_together_so_that_all_fit() {
    let tenth = |count: i64| gpus(count as f64 / 10.0);
    let two = [gpus(2.0)];
    assert!(is_placed(&two, &[4, 4, 3, 3, 3, 3].map(tenth), StrictPack));
    assert!(!is_placed(&two, &[6, 6, 6].map(tenth), Pack), "1.8 GPUs of 2, but in pieces that do not go together");
    let odd = [0.51, 0.27, 0.22, 0.44, 0.37, 0.19].map(gpus);
    assert!(is_placed(&two, &odd, StrictPack));
    let mut dice = Dice(2);
    for _ in 0..300 {
        let bundles: Vec<i64> = (0..2 + dice.below(5)).map(|_| 1 + dice.below(7) as i64).collect();
        // Each device is a node of its own to the search that tries everything.
        let is_possible = fits(
            &bundles.iter().map(|tenths| vec![*tenths]).collect::<Vec<_>>(),
            &mut vec![vec![10]; 2],
            &mut Vec::new(),
            Pack,
        );
        let asked: Vec<ResourceSet> = bundles.iter().map(|tenths| tenth(*tenths)).collect();
        assert_eq!(is_placed(&two, &asked, StrictPack), is_possible, "{bundles:?}");
    }
}
