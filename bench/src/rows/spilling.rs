//! Twice as much as the store holds: what is put goes to the disk, and is read back from there.

use std::time::Instant;

use anyhow::{Result, ensure};
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

pub(super) fn spill() -> Figures {
    let mut cluster = TestCluster::start(0, 0)?;
    cluster.add_node(&["--num-cpus", "1", "--object-store-memory", STORE])?;
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
            let mut laps = [lap(), 0.0, 0.0];
            for seconds in &mut laps[1..] {
                read_all(&objects).await?;
                *seconds = lap();
            }
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
