//! The head's decisions alone, and placement groups through the whole of it.

use anyhow::ensure;
use futures::stream::{FuturesUnordered, StreamExt};
use wingbeat::{Bundle, placement_group};
use wingbeat_core::spec::Shape;
use wingbeat_core::{Amount, NodeId, ProcessId, ResourceSet};
use wingbeat_head::state::Event;
use wingbeat_net::messages::HeadMessage;
use wingbeat_tests::TestCluster;

use super::Figures;
use crate::head::Head;
use crate::measure::{repeated, repeated_blocking};
use crate::report::{Figure, Must};

/// Owners that ask, and how many leases each asks for at a time.
const OWNERS: u64 = 64;
const AT_A_TIME: u32 = 16;

/// A cluster of which half is held, and owners of four shapes.
pub(crate) struct Decisions {
    head: Head,
    shapes: [Shape; 4],
    round: u64,
}

impl Decisions {
    pub(crate) fn with_nodes(nodes: u64) -> Decisions {
        let mut head = Head::with_nodes(nodes);
        let shapes = [1, 2, 4, 8].map(|cpus| Shape::of(ResourceSet::cpus(Amount::whole(cpus))));
        for owner in 0..OWNERS {
            head.driver(10 + owner);
        }
        head.demand(ProcessId(10), &shapes[3], (nodes * 32 / 8) as u32);
        head.ready();
        Decisions { head, shapes, round: 0 }
    }

    /// Every owner gets what it asks for, and gives it back. Answers with the number of leases: each was decided on,
    /// granted, made ready, returned and ended.
    pub(crate) fn round(&mut self) -> u64 {
        self.round += 1;
        let mut granted = 0;
        for owner in 1..OWNERS {
            let process = ProcessId(10 + owner);
            let shape = &self.shapes[(owner + self.round) as usize % self.shapes.len()];
            self.head.demand(process, shape, AT_A_TIME);
            let leases = self.head.ready();
            granted += leases.len() as u64;
            for lease in leases {
                self.head.step(Event::Says(process.into(), HeadMessage::ReturnLease(lease)));
                self.head.step(Event::Says(NodeId(1).into(), HeadMessage::LeaseEnded(lease)));
            }
            self.head.orders.clear();
        }
        granted
    }
}

fn decisions(name: &'static str, nodes: u64, must: f64) -> Figures {
    const ROUNDS: u64 = 100;
    let mut cluster = Decisions::with_nodes(nodes);
    let expected = (OWNERS - 1) * u64::from(AT_A_TIME) * ROUNDS;
    let seconds = repeated_blocking(|| {
        let granted: u64 = (0..ROUNDS).map(|_| cluster.round()).sum();
        ensure!(granted == expected, "{granted} of {expected} leases were granted");
        Ok(())
    })?;
    Ok(vec![Figure::rate(name, expected, &seconds, Must::Reach(must))])
}

pub(super) fn decisions_100_nodes() -> Figures {
    decisions("decisions_100_nodes", 100, 500_000.0)
}

pub(super) fn decisions_10000_nodes() -> Figures {
    decisions("decisions_10000_nodes", 10_000, 200_000.0)
}

/// In a cluster of its own, whose head writes every group down before it says that it knows it.
pub(super) fn placement_group_create_remove() -> Figures {
    let cluster = TestCluster::with_journal(1, 2)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    runtime.block_on(async {
        let session = wingbeat::init_at(cluster.address()).token(&cluster.token()?).await?;
        let figures = create_and_remove().await;
        session.shutdown().await;
        figures
    })
}

async fn create_and_remove() -> Figures {
    const COUNT: u64 = 5_000;
    const AT_A_TIME: usize = 256;
    let seconds = repeated(async || {
        let mut running = FuturesUnordered::new();
        let mut made = 0;
        for _ in 0..COUNT {
            running.push(async {
                let group = placement_group([Bundle::new().num_cpus(0.001)]).await?;
                group.remove().await
            });
            if running.len() == AT_A_TIME {
                running.next().await.transpose()?;
                made += 1;
            }
        }
        while let Some(done) = running.next().await {
            done?;
            made += 1;
        }
        ensure!(made == COUNT);
        Ok(())
    })
    .await?;
    Ok(vec![Figure::rate("placement_group_create_remove", COUNT, &seconds, Must::Reach(6_000.0))])
}
