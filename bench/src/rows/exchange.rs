//! Values that tasks give to tasks, through the shared memory of one node.

use anyhow::ensure;
use wingbeat::{Buffer, ObjectRef, get_all, put};

use super::Figures;
use crate::measure::times;
use crate::report::{Figure, Must};

const A_PAGE: usize = 4096;
const REPEAT: usize = 3;

/// Values of [`map_1000x1mib`], and the bytes of each.
pub(super) const MAPPED: usize = 1_000;
pub(super) const MAPPED_SIZE: usize = 1 << 20;

/// Each byte one more.
pub(super) fn plus_one_of(bytes: &[u8]) -> Vec<u8> {
    bytes.iter().map(|byte| byte.wrapping_add(1)).collect()
}

#[wingbeat::remote]
fn plus_one(bytes: Buffer<u8>) -> Buffer<u8> {
    plus_one_of(&bytes).into()
}

/// 1,000 values are put, each is mapped by a task, and each result is read once a page. Counted is what is written into shared
/// memory: values and results.
pub(super) async fn map_1000x1mib() -> Figures {
    let seconds = times(REPEAT, async || {
        let inputs: Result<Vec<_>, _> = (0..MAPPED).map(|i| put(&Buffer::from(vec![i as u8; MAPPED_SIZE]))).collect();
        let mapped: Vec<_> = inputs?.into_iter().map(plus_one::remote).collect();
        for (i, result) in mapped.iter().enumerate() {
            let got = result.get().await?;
            ensure!(
                got.len() == MAPPED_SIZE && got.iter().step_by(A_PAGE).all(|byte| *byte == (i as u8).wrapping_add(1))
            );
        }
        Ok(())
    })
    .await?;
    let bytes = 2 * (MAPPED * MAPPED_SIZE) as u64;
    Ok(vec![Figure::bandwidth("map_1000x1MiB", bytes, &seconds, Must::Of("limit_memcpy", 0.5))])
}

const MAPS: usize = 64;
const PARTS: usize = 64;
const PART: usize = 256 << 10;

/// One part for each reducer.
#[wingbeat::remote]
fn parts(map: u8) -> Result<Vec<ObjectRef<Buffer<u8>>>, wingbeat::Error> {
    (0..PARTS).map(|_| put(&Buffer::from(vec![map; PART]))).collect()
}

/// The sum of one byte of each page of all parts.
#[wingbeat::remote]
async fn reduced(parts: Vec<ObjectRef<Buffer<u8>>>) -> Result<u64, wingbeat::Error> {
    let parts = get_all(&parts).await?;
    Ok(parts.iter().flat_map(|part| part.iter().step_by(A_PAGE)).map(|byte| u64::from(*byte)).sum())
}

/// Each of 64 tasks puts 64 parts, and each of 64 others reads one part of each. Counted is what is written.
pub(super) async fn shuffle_64x64() -> Figures {
    let seconds = times(REPEAT, async || {
        let maps: Vec<_> = (0..MAPS).map(|map| parts::remote(map as u8)).collect();
        let made = get_all(&maps).await?;
        let of_part = |part: usize| made.iter().map(|parts| parts[part].clone()).collect::<Vec<_>>();
        let reducers: Vec<_> = (0..PARTS).map(|part| reduced::remote(of_part(part))).collect();
        let expected = (0..MAPS as u64).sum::<u64>() * (PART / A_PAGE) as u64;
        ensure!(get_all(&reducers).await? == [expected; PARTS]);
        Ok(())
    })
    .await?;
    let bytes = (MAPS * PARTS * PART) as u64;
    Ok(vec![Figure::bandwidth("shuffle_64x64", bytes, &seconds, Must::Of("limit_memcpy", 0.5))])
}
