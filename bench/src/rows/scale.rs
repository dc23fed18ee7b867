//! Many nodes, each a daemon of this machine: how fast they join, what a task costs then, and whether tasks that are to be spread are.
//! And the status of a cluster with many actors and many who wait, and for how long at a time others wait for the head meanwhile.

use std::collections::BTreeSet;
use std::time::Instant;

use anyhow::{Result, ensure};
use wingbeat::get_all;
use wingbeat_core::spec::Shape;
use wingbeat_core::{Amount, ProcessId, ResourceSet};
use wingbeat_tests::TestCluster;

use super::{Figures, tasks};
use crate::head::Head;
use crate::measure::{REPEAT, times};
use crate::report::{Figure, Must};

const NODES: usize = 300;

#[wingbeat::remote]
fn process() -> u32 {
    std::process::id()
}

/// What was measured with so many nodes of one CPU.
struct Measured {
    joined: f64,
    noops: Vec<f64>,
    /// Nodes that ran some of as many tasks as there are nodes.
    used: usize,
}

fn with_nodes(count: usize) -> Result<Measured> {
    let mut cluster = TestCluster::start(0, 0)?;
    let begun = Instant::now();
    cluster.add_nodes(count, &["--num-cpus", "1", "--object-store-memory", "32MiB"])?;
    let joined = begun.elapsed().as_secs_f64();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    runtime.block_on(async {
        let session = wingbeat::init_at(cluster.address()).token(&cluster.token()?).await?;
        let spread: Vec<_> = (0..count).map(|_| process::options().spread().remote()).collect();
        // Each node has one CPU, and so one process at a time.
        let used = get_all(&spread).await?.into_iter().collect::<BTreeSet<u32>>().len();
        let noops = times(3, async || {
            ensure!(tasks::all_right(100_000).await?);
            Ok(())
        })
        .await;
        session.shutdown().await;
        anyhow::Ok(Measured { joined, noops: noops?, used })
    })
}

pub(super) fn nodes_300() -> Figures {
    let few = with_nodes(20)?;
    let many = with_nodes(NODES)?;
    let best = few.noops.iter().copied().fold(f64::INFINITY, f64::min);
    let ratios = many.noops.iter().map(|seconds| seconds / best).collect();
    Ok(vec![
        Figure::of("nodes_300", "s", true, vec![many.joined], Must::Reach(1.5)),
        Figure::of("nodes_300_noops", "× of 20 nodes", true, ratios, Must::Reach(2.0)),
        Figure::of("nodes_300_spread", "nodes", false, vec![many.used as f64], Must::Reach(NODES as f64)),
    ])
}

pub(super) fn status_10000() -> Figures {
    const ACTORS: u64 = 10_000;
    const WAITERS: u64 = 1_000;
    // As many nodes of 64 CPUs as the actors need.
    let mut head = Head::with_nodes(ACTORS.div_ceil(64));
    for number in 1..=ACTORS {
        head.create(number)?;
    }
    // More than any node has, and a hundred different amounts.
    for number in 1..=WAITERS {
        head.driver(1_000 + number);
        let asked = ResourceSet::cpus(Amount::from_units(650_000 + number as i64 % 100));
        let shape = Shape { patient: true, ..Shape::of(asked) };
        head.demand(ProcessId(1_000 + number), &shape, 1);
    }
    let mut all = Vec::new();
    // What each part took at best: a part during which others had the CPU says nothing.
    let mut parts: Vec<f64> = Vec::new();
    for _ in 0..=REPEAT {
        let begun = Instant::now();
        let mut taking = head.state.begin_picture(1);
        for part in 0.. {
            let begun = Instant::now();
            let has_more = head.state.take_part(&mut taking, 1);
            let took = begun.elapsed().as_secs_f64() * 1e3;
            match parts.get_mut(part) {
                Some(best) => *best = best.min(took),
                None => parts.push(took),
            }
            if !has_more {
                break;
            }
        }
        let picture = taking.picture();
        all.push(begun.elapsed().as_secs_f64() * 1e3);
        ensure!((picture.actors.len() as u64, picture.pending.len() as u64) == (ACTORS, WAITERS));
    }
    all.remove(0);
    let longest = parts.into_iter().fold(0.0, f64::max);
    Ok(vec![
        Figure::of("status_10000", "ms", true, all, Must::Reach(100.0)),
        Figure::of("status_10000_lock", "ms", true, vec![longest], Must::Reach(1.0)),
    ])
}
