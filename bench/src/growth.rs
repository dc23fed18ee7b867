//! How the cost of one operation grows with the size of the cluster: it should not, or slowly.

use std::hint::black_box;
use std::time::Instant;

use anyhow::{Result, ensure};
use wingbeat::{get_all, put};
use wingbeat_core::spec::{BundleSpec, PlacementGroupSpec, PlacementStrategy};
use wingbeat_core::{ActorId, Amount, JobId, PlacementGroupId, ProcessId, ResourceSet};
use wingbeat_head::state::Event;
use wingbeat_net::messages::HeadMessage;
use wingbeat_tests::TestCluster;

use crate::head::{DRIVER, Head, address};
use crate::rows::nop;
use crate::rows::scheduler::Decisions;

/// What an operation costs at each size.
pub(crate) struct Growth {
    pub name: &'static str,
    /// What the sizes count.
    pub of: &'static str,
    /// Size, and microseconds an operation.
    pub points: Vec<(u64, f64)>,
}

/// Every growth there is.
pub(crate) fn all() -> Result<Vec<Growth>> {
    Ok(vec![nodes()?, live_refs()?, live_actors()?, decisions()?, live_groups()?])
}

/// Seconds of so many no-op tasks, the best of three.
async fn tasks(count: u64) -> Result<f64> {
    let mut best = f64::INFINITY;
    for _ in 0..3 {
        let begun = Instant::now();
        let refs: Vec<_> = (0..count).map(nop::remote).collect();
        ensure!(get_all(&refs).await?.iter().enumerate().all(|(i, value)| i as u64 == *value));
        best = best.min(begun.elapsed().as_secs_f64());
    }
    Ok(best)
}

fn nodes() -> Result<Growth> {
    const COUNT: u64 = 50_000;
    let mut points = Vec::new();
    for nodes in [1, 2, 4, 8] {
        eprintln!("   growth: {nodes} nodes");
        let cluster = TestCluster::start(nodes, 1)?;
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let seconds = runtime.block_on(async {
            let session = wingbeat::init_at(cluster.address()).token(&cluster.token()?).await?;
            let seconds = tasks(COUNT).await;
            session.shutdown().await;
            seconds
        })?;
        points.push((nodes as u64, seconds * 1e6 / COUNT as f64));
    }
    Ok(Growth { name: "a no-op task, pipelined", of: "nodes of 1 CPU, all on this machine", points })
}

fn live_refs() -> Result<Growth> {
    const COUNT: u64 = 50_000;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let points = runtime.block_on(async {
        wingbeat::init().num_cpus(2).await?;
        let mut held = Vec::new();
        let mut points = Vec::new();
        for live in [1_000, 10_000, 100_000, 1_000_000] {
            eprintln!("   growth: {live} refs");
            while (held.len() as u64) < live {
                held.push(put(&1u64)?);
            }
            points.push((live, tasks(COUNT).await? * 1e6 / COUNT as f64));
        }
        wingbeat::shutdown().await;
        anyhow::Ok(points)
    })?;
    Ok(Growth { name: "a no-op task, pipelined", of: "live refs in the driver", points })
}

fn live_actors() -> Result<Growth> {
    const COUNT: u64 = 1_000;
    let mut head = Head::with_nodes(1_000);
    let mut points = Vec::new();
    let mut next = 1;
    for live in [1, 10, 100, 1_000, 10_000, 100_000] {
        eprintln!("   growth: {live} actors");
        while next <= live {
            head.create(next)?;
            next += 1;
        }
        let begun = Instant::now();
        for _ in 0..COUNT {
            head.create(next)?;
            head.step(Event::Says(
                ProcessId(1).into(),
                HeadMessage::KillActor { actor: ActorId(next), may_restart: false },
            ));
            head.orders.clear();
            next += 1;
        }
        points.push((live, begun.elapsed().as_secs_f64() * 1e6 / COUNT as f64));
    }
    black_box(&head.state);
    Ok(Growth {
        name: "an actor made and ended, in the head's state machine, with 1,000 nodes",
        of: "live actors",
        points,
    })
}

/// Leases granted, served and given back, of 64 owners and four shapes, in a cluster that is half full.
fn decisions() -> Result<Growth> {
    const ROUNDS: u64 = 100;
    let mut points = Vec::new();
    for nodes in [10, 100, 1_000, 10_000] {
        eprintln!("   growth: decisions with {nodes} nodes");
        let mut cluster = Decisions::with_nodes(nodes);
        cluster.round();
        let begun = Instant::now();
        let granted: u64 = (0..ROUNDS).map(|_| cluster.round()).sum();
        points.push((nodes, begun.elapsed().as_secs_f64() * 1e6 / granted as f64));
    }
    Ok(Growth {
        name: "a lease granted, started, returned and ended, in the head's state machine",
        of: "nodes of 64 CPUs",
        points,
    })
}

fn live_groups() -> Result<Growth> {
    const COUNT: u64 = 1_000;
    let mut head = Head::with_nodes(1_000);
    let mut points = Vec::new();
    let mut next = 1;
    let group = |id: u64| PlacementGroupSpec {
        id: PlacementGroupId(id),
        job: JobId(1),
        name: None,
        strategy: PlacementStrategy::Pack,
        bundles: vec![BundleSpec { resources: ResourceSet::cpus(Amount::from_units(10_000)), ..BundleSpec::default() }],
        detached: false,
        captures_children: false,
        patient: false,
        owner: address(DRIVER),
    };
    for live in [1, 10, 100, 1_000, 10_000] {
        eprintln!("   growth: {live} placement groups");
        while next <= live {
            head.create_group(group(next))?;
            next += 1;
        }
        let begun = Instant::now();
        for _ in 0..COUNT {
            head.create_group(group(next))?;
            head.remove_group(PlacementGroupId(next));
            next += 1;
        }
        points.push((live, begun.elapsed().as_secs_f64() * 1e6 / COUNT as f64));
    }
    black_box(&head.state);
    Ok(Growth {
        name: "a placement group made, placed and removed, in the head's state machine, with 1,000 nodes",
        of: "live placement groups",
        points,
    })
}
