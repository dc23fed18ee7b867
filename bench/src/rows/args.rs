//! Arguments that are not empty: tasks and calls that return the length of what they get, many under way at a time.

use anyhow::{Result, ensure};
use wingbeat::{ObjectRef, get_all};

use super::Figures;
use crate::measure::repeated;
use crate::report::{Figure, Must};

/// One size, and what is measured with it.
pub(crate) struct Size {
    pub bytes: usize,
    /// Tasks or calls of one repetition.
    pub count: u64,
    pub limit: &'static str,
    tasks: &'static str,
    calls: &'static str,
}

/// All of them travel inside of messages; larger ones are put into shared memory.
pub(crate) const SIZES: [Size; 4] = [
    Size { bytes: 1 << 10, count: 50_000, limit: "limit_stream_1KiB", tasks: "args_1KiB", calls: "args_1KiB_actor" },
    Size {
        bytes: 10 << 10,
        count: 20_000,
        limit: "limit_stream_10KiB",
        tasks: "args_10KiB",
        calls: "args_10KiB_actor",
    },
    Size { bytes: 50 << 10, count: 5_000, limit: "limit_stream_50KiB", tasks: "args_50KiB", calls: "args_50KiB_actor" },
    Size { bytes: 95 << 10, count: 3_000, limit: "limit_stream_95KiB", tasks: "args_95KiB", calls: "args_95KiB_actor" },
];

#[wingbeat::remote]
fn length(bytes: Vec<u8>) -> u64 {
    bytes.len() as u64
}

pub(super) struct Measure;

#[wingbeat::actor]
impl Measure {
    fn new() -> Self {
        Measure
    }
    fn length(&self, bytes: Vec<u8>) -> u64 {
        bytes.len() as u64
    }
}

async fn all(size: &Size, one: impl Fn(Vec<u8>) -> ObjectRef<u64>) -> Result<Vec<f64>> {
    repeated(async || {
        let refs: Vec<_> = (0..size.count).map(|_| one(vec![1; size.bytes])).collect();
        let lengths = get_all(&refs).await?;
        ensure!(lengths.len() as u64 == size.count && lengths.iter().all(|length| *length == size.bytes as u64));
        Ok(())
    })
    .await
}

pub(super) async fn args() -> Figures {
    let mut figures = Vec::new();
    for size in &SIZES {
        let must = Must::Of(size.limit, 0.5);
        let seconds = all(size, length::remote).await?;
        figures.push(Figure::rate(size.tasks, size.count, &seconds, must));
        let measure = Measure::remote();
        let seconds = all(size, |bytes| measure.length(bytes)).await?;
        figures.push(Figure::rate(size.calls, size.count, &seconds, must));
    }
    Ok(figures)
}
