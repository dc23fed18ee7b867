//! Values between nodes: daemons of this machine that share no memory. They talk over a unix socket, as those of one
//! machine do; between machines it is TCP.

use anyhow::{Result, ensure};
use wingbeat::{ObjectRef, get_all};
use wingbeat_tests::TestCluster;

use super::Figures;
use crate::measure::times;
use crate::report::{Figure, Must};

#[wingbeat::remote]
pub(super) fn made(bytes: u64, byte: u8) -> Vec<u8> {
    vec![byte; bytes as usize]
}

/// Its length and its last byte, read where it lies.
#[wingbeat::remote]
async fn end_of(object: Vec<ObjectRef<Vec<u8>>>) -> Result<(u64, u8), String> {
    let view = object[0].view().await.map_err(|error| error.to_string())?;
    Ok((view.len() as u64, view[view.len() - 1]))
}

/// A cluster of so many nodes besides the driver's; the one of number `n` has the resource `node-n`.
fn nodes(count: usize, memory: &str) -> Result<TestCluster> {
    let mut cluster = TestCluster::start(0, 0)?;
    for n in 0..count {
        let resource = format!("node-{n}=1");
        cluster.add_node(&["--num-cpus", "1", "--resource", &resource, "--object-store-memory", memory])?;
    }
    Ok(cluster)
}

fn in_cluster(cluster: &TestCluster, row: impl AsyncFnOnce() -> Figures) -> Figures {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    runtime.block_on(async {
        let session = wingbeat::init_at(cluster.address()).token(&cluster.token()?).await?;
        let figures = row().await;
        session.shutdown().await;
        figures
    })
}

pub(super) fn is_read_on(node: usize, object: &ObjectRef<Vec<u8>>) -> ObjectRef<(u64, u8)> {
    end_of::options().num_cpus(1.0).resource(&format!("node-{node}"), 1.0).remote(vec![object.clone()])
}

pub(super) fn node_to_node() -> Figures {
    const BYTES: u64 = 1 << 30;
    let cluster = nodes(2, "3GiB")?;
    in_cluster(&cluster, async || {
        let mut seconds = Vec::new();
        for byte in 0..4u8 {
            let object = made::options().resource("node-0", 1.0).remote(BYTES, byte);
            let (_, _) = wingbeat::wait(vec![object.clone()], 1, None).await?;
            let begun = std::time::Instant::now();
            ensure!(is_read_on(1, &object).get().await? == (BYTES, byte));
            seconds.push(begun.elapsed().as_secs_f64());
        }
        seconds.remove(0);
        Ok(vec![Figure::bandwidth("node_to_node", BYTES, &seconds, Must::Of("limit_tcp", 0.9))])
    })
}

pub(super) fn broadcast_4() -> Figures {
    const BYTES: u64 = 256 << 20;
    let cluster = nodes(5, "1GiB")?;
    in_cluster(&cluster, async || {
        let mut byte = 0;
        let mut seconds = Vec::new();
        let all = times(3, async || {
            byte += 1;
            let object = made::options().resource("node-0", 1.0).remote(BYTES, byte);
            let (_, _) = wingbeat::wait(vec![object.clone()], 1, None).await?;
            let begun = std::time::Instant::now();
            let reads: Vec<_> = (1..=4).map(|node| is_read_on(node, &object)).collect();
            ensure!(get_all(&reads).await? == [(BYTES, byte); 4]);
            seconds.push(begun.elapsed().as_secs_f64());
            Ok(())
        })
        .await?;
        let seconds = seconds.split_off(seconds.len() - all.len());
        // 1.5 times the time of four transfers one after another.
        Ok(vec![Figure::bandwidth("broadcast_4", 4 * BYTES, &seconds, Must::Of("limit_tcp", 1.0 / 1.5))])
    })
}
