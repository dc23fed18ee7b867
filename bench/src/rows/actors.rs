//! Calls of actors, and making them.

use anyhow::ensure;
use wingbeat::get_all;

use super::Figures;
use crate::measure::{repeated, times};
use crate::report::{Figure, Must};

pub(crate) struct Counter {
    n: u64,
}

#[wingbeat::actor]
impl Counter {
    pub(super) fn new() -> Self {
        Counter { n: 0 }
    }
    pub(super) fn incr(&mut self) -> u64 {
        self.n += 1;
        self.n
    }
    /// Calls each of `others` so often; answers with the sum of what they said.
    async fn drive(&mut self, others: Vec<CounterHandle>, count: u64) -> Result<u64, String> {
        let calls: Vec<_> = (0..count).flat_map(|_| others.iter().map(CounterHandle::zero)).collect();
        let answers = get_all(&calls).await.map_err(|error| error.to_string())?;
        Ok(answers.iter().map(|answer| answer + 1).sum())
    }
    fn zero(&mut self) -> u64 {
        0
    }
}

pub(super) async fn actor_sync() -> Figures {
    const COUNT: u64 = 5_000;
    let counter = Counter::remote();
    let mut count = counter.incr().get().await?;
    let seconds = repeated(async || {
        for _ in 0..COUNT {
            count += 1;
            ensure!(counter.incr().get().await? == count);
        }
        Ok(())
    })
    .await?;
    Ok(vec![Figure::rate("actor_sync", COUNT, &seconds, Must::Of("limit_echo", 0.9))])
}

pub(super) async fn actor_async() -> Figures {
    const COUNT: u64 = 100_000;
    let counter = Counter::remote();
    let mut count = counter.incr().get().await?;
    let seconds = repeated(async || {
        let calls: Vec<_> = (0..COUNT).map(|_| counter.incr()).collect();
        for value in get_all(&calls).await? {
            count += 1;
            ensure!(value == count);
        }
        Ok(())
    })
    .await?;
    Ok(vec![Figure::rate("actor_async", COUNT, &seconds, Must::Reach(300_000.0))])
}

pub(super) async fn actor_n_n_async() -> Figures {
    const COUNT: u64 = 25_000;
    let callers = [Counter::remote(), Counter::remote()];
    let called = vec![Counter::remote(), Counter::remote()];
    let seconds = repeated(async || {
        let driven: Vec<_> = callers.iter().map(|caller| caller.drive(called.clone(), COUNT)).collect();
        ensure!(get_all(&driven).await? == [2 * COUNT, 2 * COUNT]);
        Ok(())
    })
    .await?;
    Ok(vec![Figure::rate("actor_n_n_async", 4 * COUNT, &seconds, Must::Of("actor_async", 0.9))])
}

pub(super) async fn actor_create_to_first_reply() -> Figures {
    const COUNT: u64 = 100;
    let seconds = times(3, async || {
        let counters: Vec<_> = (0..COUNT).map(|_| Counter::remote()).collect();
        let first: Vec<_> = counters.iter().map(CounterHandle::incr).collect();
        ensure!(get_all(&first).await?.iter().all(|value| *value == 1));
        Ok(())
    })
    .await?;
    Ok(vec![Figure::rate("actor_create_to_first_reply", COUNT, &seconds, Must::Reach(240.0))])
}
