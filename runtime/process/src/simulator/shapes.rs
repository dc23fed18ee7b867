//! What nodes have, and what programs ask for.
//!
//! Whatever is asked for fits an empty node, and what actors and groups hold for long leaves room beside it, so that everybody
//! who waits is served in the end. Only CPUs are lent while somebody waits: what holds anything else waits for nobody.

use std::collections::BTreeMap;

use rand::RngExt;
use rand::rngs::StdRng;
use wingbeat_core::resources::GPU;
use wingbeat_core::spec::{Address, BundleSpec, MachineId, Shape, Strategy};
use wingbeat_core::{Amount, NodeId, PlacementGroupId, ProcessId, ResourceSet};
use wingbeat_net::messages::{DeviceInfo, NodeInfo};

use super::execution::Shared;
use super::side::address;

/// Two drivers can reserve one each, and somebody who must be here has another.
const CPUS: u32 = 3;
/// Each node has as many devices: two drivers can reserve one each, and an actor of each use another.
const DEVICES: u32 = 4;
const GIB: u64 = 1 << 30;
const ZONES: [&str; 2] = ["a", "b"];

/// A quarter.
fn quarters(count: i64) -> Amount {
    Amount::from_units(count * Amount::ONE.units() / 4)
}

/// A new node; in a small cluster nodes are in both zones.
pub(super) fn node(id: NodeId, number: u64, machine: MachineId) -> NodeInfo {
    let device = |number: u32| DeviceInfo {
        memory: 80 * GIB,
        island: Some(number / 2),
        numa: Some(number / 2),
        ..DeviceInfo::default()
    };
    let resources = ResourceSet::cpus(Amount::whole(CPUS)).with(GPU, Amount::whole(DEVICES));
    NodeInfo {
        id,
        address: Address { machine, ..address(ProcessId(id.0)) },
        hostname: format!("host{}", id.0),
        resources: resources.with("license", Amount::whole(2)),
        devices: (0..DEVICES).map(device).collect(),
        labels: BTreeMap::from([("zone".to_owned(), ZONES[(number % 2) as usize].to_owned())]),
        store_bytes: GIB,
    }
}

/// What a driver has reserved.
#[derive(Clone, Copy)]
pub(super) struct Reserved {
    pub group: PlacementGroupId,
    /// A device in a second bundle, beside the CPU in the first.
    pub has_device: bool,
}

/// A CPU, and perhaps a device. There is always one more of each for whoever has to wait for others.
pub(super) fn bundles(has_device: bool) -> Vec<BundleSpec> {
    let cpu = ResourceSet::cpus(Amount::ONE);
    let device = ResourceSet::new().with(GPU, Amount::ONE);
    let each = std::iter::once(cpu).chain(has_device.then_some(device));
    each.map(|resources| BundleSpec { resources, gpu_memory: 0, labels: Vec::new() }).collect()
}

/// What an actor may hold for as long as it lives.
pub(super) fn of_actor() -> ResourceSet {
    ResourceSet::new().with(GPU, quarters(1))
}

/// What a task that may wait for others asks for.
pub(super) fn of_waiting(shared: &Shared, random: &mut StdRng, within: Option<Reserved>) -> Shape {
    let one = ResourceSet::cpus(Amount::ONE);
    if let Some(Reserved { group, .. }) = within {
        let index = (random.random_range(0..3) == 0).then_some(0);
        return Shape { strategy: Strategy::Bundle { group, index }, ..Shape::of(one) };
    }
    let mut shape = Shape { patient: random.random_range(0..2) == 0, ..Shape::of(one) };
    match random.random_range(0..16) {
        0 => shape.resources = ResourceSet::cpus(quarters(2)),
        1 => shape.strategy = Strategy::Spread,
        2 => {
            let nodes: Vec<NodeId> = shared.nodes.borrow().iter().copied().take(32).collect();
            let node = nodes[random.random_range(0..nodes.len())];
            shape.strategy = Strategy::Node { node, soft: random.random_range(0..3) > 0 };
        }
        3 => shape.labels = vec!["zone=a".parse().expect("it is a selector")],
        4 => shape.labels = ["zone in (b)", "zone != b"].map(|rule| rule.parse().expect("it is a selector")).into(),
        _ => {}
    }
    shape
}

/// What a task that waits for nobody asks for.
pub(super) fn of_busy(random: &mut StdRng, within: Option<Reserved>) -> Shape {
    if let Some(Reserved { group, has_device: true }) = within {
        let strategy = Strategy::Bundle { group, index: (random.random_range(0..2) == 0).then_some(1) };
        let held = [quarters(2), Amount::ONE][random.random_range(0..2)];
        return Shape { strategy, ..Shape::of(ResourceSet::new().with(GPU, held)) };
    }
    let shape = match random.random_range(0..6) {
        0 => Shape::of(ResourceSet::new().with(GPU, quarters(1))),
        1 => Shape::of(ResourceSet::cpus(Amount::ONE).with(GPU, Amount::ONE)),
        2 => Shape::of(ResourceSet::cpus(Amount::ONE).with(GPU, Amount::whole(2))),
        3 => Shape::of(ResourceSet::cpus(quarters(2)).with("license", Amount::ONE)),
        4 => Shape { gpu_memory: 20 * GIB, ..Shape::of(ResourceSet::new()) },
        _ => Shape { strategy: Strategy::BestFit, ..Shape::of(ResourceSet::new().with(GPU, Amount::ONE)) },
    };
    Shape { patient: random.random_range(0..2) == 0, ..shape }
}
