//! Twice as much as the store holds: what is put goes to the disk, and is read back from there.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures::stream::{self, StreamExt, TryStreamExt};
use wingbeat::{ObjectRef, put};
use wingbeat_tests::TestCluster;

use super::Figures;
use crate::report::{Figure, Must};

const STORE: &str = "1GiB";
/// Twice the store.
const OBJECTS: usize = 256;
const SIZE: usize = 8 << 20;
/// How many objects a reader asks for before it needs them.
const AT_ONCE: usize = 8;
/// Repetitions after one that warms up.
const REPEAT: usize = 3;
const A_PAGE: usize = 4096;
/// A node that writes nothing for so long has written what it will.
const SETTLED: Duration = Duration::from_millis(300);

const NAMES: [&str; 3] = ["spill_write", "spill_read", "spill_reread"];
const MUST: [Must; 3] =
    [Must::Of("limit_disk_write", 0.8), Must::Of("limit_disk_read", 0.8), Must::Of("limit_disk_read", 0.8)];

/// Each is read where it lies, once a page.
async fn read_all(objects: &[ObjectRef<Vec<u8>>]) -> Result<()> {
    let views = stream::iter(objects).map(|object| object.view()).buffered(AT_ONCE).enumerate();
    views
        .map(|(number, view)| {
            let view = view?;
            ensure!(view.len() == SIZE && view.iter().step_by(A_PAGE).all(|byte| *byte == number as u8));
            Ok(())
        })
        .try_collect()
        .await
}

/// What a process has had written to disks, in bytes.
fn written_by(pid: u32) -> Result<u64> {
    let io = std::fs::read_to_string(format!("/proc/{pid}/io"))?;
    let bytes = io.lines().find_map(|line| line.strip_prefix("write_bytes:")).context("there is no write_bytes")?;
    Ok(bytes.trim().parse()?)
}

pub(super) fn spill() -> Figures {
    let mut cluster = TestCluster::start(0, 0)?;
    let node = cluster.add_node(&["--num-cpus", "1", "--object-store-memory", STORE])?;
    let node = cluster.node_pid(node).context("the node has ended")?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let seconds = runtime.block_on(async {
        let session = wingbeat::init_at(cluster.address()).token(&cluster.token()?).await?;
        let mut seconds = [const { Vec::new() }; 3];
        let mut data = vec![0; SIZE];
        for repetition in 0..=REPEAT {
            let mut objects = Vec::new();
            let mut begun = Instant::now();
            let mut lap = || std::mem::replace(&mut begun, Instant::now()).elapsed().as_secs_f64();
            for number in 0..OBJECTS {
                data.fill(number as u8);
                objects.push(put(&data)?);
            }
            let put = lap();
            read_all(&objects).await?;
            let read = lap();
            // What was put last may still be on its way to the disk.
            let mut before = written_by(node)?;
            loop {
                tokio::time::sleep(SETTLED).await;
                match written_by(node)? {
                    written if written == before => break,
                    written => before = written,
                }
            }
            lap();
            read_all(&objects).await?;
            let laps = [put, read, lap()];
            let written = written_by(node)? - before;
            ensure!(written < SIZE as u64, "reading again wrote {written} bytes");
            if repetition > 0 {
                seconds.iter_mut().zip(laps).for_each(|(all, lap)| all.push(lap));
            }
        }
        session.shutdown().await;
        anyhow::Ok(seconds)
    })?;
    cluster.stop()?;
    let bytes = (OBJECTS * SIZE) as u64;
    let figure = |(row, must): (usize, Must)| Figure::bandwidth(NAMES[row], bytes, &seconds[row], must);
    Ok(MUST.into_iter().enumerate().map(figure).collect())
}
