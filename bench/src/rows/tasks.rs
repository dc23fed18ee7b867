//! Tasks that do nothing.

use anyhow::{Result, ensure};
use wingbeat::{ObjectRef, get_all};

use super::Figures;
use crate::measure::{repeated, times};
use crate::memory;
use crate::report::{Figure, Must};

#[wingbeat::remote]
pub(crate) fn nop(x: u64) -> u64 {
    x
}

pub(crate) struct Client;

#[wingbeat::actor]
impl Client {
    fn new() -> Self {
        Client
    }
    /// Submits so many tasks, gets all, and says whether every result was right.
    async fn drive(&self, count: u64) -> Result<bool, String> {
        all_right(count).await.map_err(|error| error.to_string())
    }
}

pub(super) async fn all_right(count: u64) -> Result<bool> {
    let refs: Vec<_> = (0..count).map(nop::remote).collect();
    let values = get_all(&refs).await?;
    Ok(values.len() as u64 == count && values.iter().enumerate().all(|(i, value)| i as u64 == *value))
}

pub(super) async fn tasks_sync() -> Figures {
    const COUNT: u64 = 5_000;
    let seconds = repeated(async || {
        for i in 0..COUNT {
            ensure!(nop::remote(i).get().await? == i);
        }
        Ok(())
    })
    .await?;
    Ok(vec![Figure::rate("tasks_sync", COUNT, &seconds, Must::Of("limit_echo", 0.9))])
}

pub(super) async fn tasks_async() -> Figures {
    const COUNT: u64 = 100_000;
    let seconds = repeated(async || {
        ensure!(all_right(COUNT).await?);
        Ok(())
    })
    .await?;
    Ok(vec![Figure::rate("tasks_async", COUNT, &seconds, Must::Reach(200_000.0))])
}

pub(super) async fn task_chain_100() -> Figures {
    let seconds = times(20, async || {
        let mut last = nop::remote(3);
        for _ in 1..100 {
            last = nop::remote(last);
        }
        ensure!(last.get().await? == 3);
        Ok(())
    })
    .await?;
    Ok(vec![Figure::of("task_chain_100", "s", true, seconds, Must::Reach(0.01))])
}

pub(super) async fn tasks_multi_client_async() -> Figures {
    const COUNT: u64 = 50_000;
    let clients = [Client::remote(), Client::remote()];
    let seconds = repeated(async || {
        let both: Vec<ObjectRef<bool>> = clients.iter().map(|client| client.drive(COUNT)).collect();
        ensure!(get_all(&both).await? == [true, true]);
        Ok(())
    })
    .await?;
    let must = Must::Of("tasks_async", 0.9);
    Ok(vec![Figure::rate("tasks_multi_client_async", 2 * COUNT, &seconds, must)])
}

pub(super) async fn queue_1m() -> Figures {
    const COUNT: u64 = 1_000_000;
    let before = memory::own();
    let (mut seconds, mut each, mut kept) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..3 {
        let begun = std::time::Instant::now();
        let refs: Vec<_> = (0..COUNT).map(nop::remote).collect();
        each.push((memory::own() - before) / COUNT as f64);
        for (i, object) in refs.iter().enumerate() {
            ensure!(object.get().await? == i as u64);
        }
        seconds.push(begun.elapsed().as_secs_f64());
        drop(refs);
        // It is given back about a second later.
        tokio::time::sleep(std::time::Duration::from_secs(2)).await;
        kept.push((memory::own() - before).max(0.0) / f64::from(1 << 20));
    }
    Ok(vec![
        Figure::of("queue_1m", "s", true, seconds, Must::Reach(10.0)),
        Figure::of("queue_1m_bytes_per_task", "B", true, each, Must::Reach(1024.0)),
        Figure::of("queue_1m_kept", "MiB", true, kept, Must::Reach(64.0)),
    ])
}
