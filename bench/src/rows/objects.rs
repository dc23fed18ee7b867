//! Values on one node.

use anyhow::ensure;
use wingbeat::{ObjectRef, get_all, put, wait};

use super::Figures;
use super::tasks::nop;
use crate::measure::{repeated, times};
use crate::report::{Figure, Must};

const LARGE: usize = 256 << 20;

#[wingbeat::remote]
fn large(byte: u8) -> Vec<u8> {
    vec![byte; LARGE]
}

pub(crate) struct Reader;

#[wingbeat::actor]
impl Reader {
    fn new() -> Self {
        Reader
    }
    /// Its length and its last byte, read where it lies.
    fn end_of(&self, object: Vec<ObjectRef<Vec<u8>>>) -> Result<(u64, u8), String> {
        let view = object[0].view_blocking().map_err(|error| error.to_string())?;
        Ok((view.len() as u64, view[view.len() - 1]))
    }
}

pub(super) async fn put_small() -> Figures {
    const COUNT: u64 = 200_000;
    let seconds = repeated(async || {
        for i in 0..COUNT {
            put(&i)?;
        }
        ensure!(put(&COUNT)?.get().await? == COUNT);
        Ok(())
    })
    .await?;
    Ok(vec![Figure::rate("put_small", COUNT, &seconds, Must::Reach(1e6))])
}

pub(super) async fn get_small() -> Figures {
    const COUNT: u64 = 200_000;
    let object = put(&7u64)?;
    let seconds = repeated(async || {
        for _ in 0..COUNT {
            ensure!(object.get().await? == 7);
        }
        Ok(())
    })
    .await?;
    Ok(vec![Figure::rate("get_small", COUNT, &seconds, Must::Reach(2e6))])
}

pub(super) async fn put_bandwidth() -> Figures {
    const COUNT: u64 = 4;
    let data = vec![7u8; LARGE];
    let reader = Reader::remote();
    let seconds = repeated(async || {
        for _ in 0..COUNT {
            // Once this answers, the object is sealed: every process of the node can read it.
            drop(put(&data)?);
        }
        Ok(())
    })
    .await?;
    ensure!(reader.end_of(vec![put(&data)?]).get().await? == (LARGE as u64, 7));
    Ok(vec![Figure::bandwidth("put_bandwidth", COUNT * LARGE as u64, &seconds, Must::Of("limit_memcpy", 0.9))])
}

pub(super) async fn task_return() -> Figures {
    let mut byte = 0;
    let seconds = repeated(async || {
        byte += 1;
        let view = large::remote(byte).view().await?;
        ensure!(view.len() == LARGE && view[LARGE - 1] == byte);
        Ok(())
    })
    .await?;
    Ok(vec![Figure::bandwidth("task_return_256MiB", LARGE as u64, &seconds, Must::Nothing)])
}

pub(super) async fn get_view() -> Figures {
    let object = large::remote(7);
    let seconds = times(50, async || {
        ensure!(object.view().await?.len() == LARGE);
        Ok(())
    })
    .await?;
    ensure!(object.view().await?[LARGE - 1] == 7);
    Ok(vec![Figure::of("get_view_256MiB", "s", true, seconds, Must::Reach(100e-6))])
}

pub(super) async fn get_object_with_10k_refs() -> Figures {
    const COUNT: u64 = 10_000;
    let refs = (0..COUNT).map(|i| put(&i)).collect::<Result<Vec<_>, _>>()?;
    let holder = put(&refs)?;
    let mut got = Vec::new();
    let seconds = times(20, async || {
        got = holder.get().await?;
        Ok(())
    })
    .await?;
    ensure!(get_all(&got).await?.iter().enumerate().all(|(i, value)| i as u64 == *value));
    Ok(vec![Figure::rate("get_object_with_10k_refs", 1, &seconds, Must::Reach(400.0))])
}

pub(super) async fn wait_1k_refs() -> Figures {
    const COUNT: u64 = 1_000;
    let seconds = times(10, async || {
        let mut left: Vec<_> = (0..COUNT).map(nop::remote).collect();
        let mut sum = 0;
        while !left.is_empty() {
            let (ready, rest) = wait(left, 1, None).await?;
            sum += ready[0].get().await?;
            left = rest;
        }
        ensure!(sum == COUNT * (COUNT - 1) / 2);
        Ok(())
    })
    .await?;
    Ok(vec![Figure::rate("wait_1k_refs", 1, &seconds, Must::Reach(150.0))])
}
