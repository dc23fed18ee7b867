//! Collective operations between two actors, beside gloo's.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use wingbeat::get_all;

use serde::{Deserialize, Serialize};
use wingbeat_collective::{CollectiveError, Element, Group, Meeting, MeetingHandle, Op, Transport, bf16, f16};

use super::Figures;
use super::launch::{script, timed, torchrun};
use crate::report::{Figure, Must};

const LARGE: usize = 64 << 20;
const SMALL: usize = 1 << 10;

struct Member;

#[wingbeat::actor]
impl Member {
    fn new() -> Self {
        Member
    }

    /// Seconds of each of so many all-reduces, in rounds, every result checked.
    fn all_reduce(&self, meeting: MeetingHandle, rank: u32, work: Work) -> Result<Vec<f64>, String> {
        let seconds = match work.number {
            Number::F32 => rounds(&meeting, rank, &work, |value| value),
            Number::F16 => rounds(&meeting, rank, &work, f16::from_f32),
            Number::Bf16 => rounds(&meeting, rank, &work, bf16::from_f32),
        };
        seconds.map_err(|error| error.to_string())
    }
}

/// What is reduced, and how.
#[derive(Clone, Copy, Serialize, Deserialize)]
struct Work {
    number: Number,
    tcp: bool,
    bytes: u64,
    times: u32,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
enum Number {
    F32,
    F16,
    Bf16,
}

fn rounds<T: Element + PartialEq>(
    meeting: &MeetingHandle,
    rank: u32,
    work: &Work,
    of: impl Fn(f32) -> T,
) -> Result<Vec<f64>, CollectiveError> {
    let transport = if work.tcp { Transport::Tcp } else { Transport::Auto };
    let mut group = Group::join_with(meeting, rank, transport)?;
    let own = of(rank as f32 + 1.0);
    let mut data = vec![own; work.bytes as usize / size_of::<T>()];
    let mut seconds = Vec::new();
    for _ in 0..6 {
        data.fill(own);
        group.barrier()?;
        let begun = Instant::now();
        for _ in 0..work.times {
            group.all_reduce(&mut data, Op::Max)?;
        }
        seconds.push(begun.elapsed().as_secs_f64() / f64::from(work.times));
        assert!(data.iter().all(|value| *value == of(2.0)), "a wrong result");
        data.fill(own);
        group.all_reduce(&mut data, Op::Sum)?;
        assert!(data.iter().all(|value| *value == of(3.0)), "a wrong result");
    }
    Ok(seconds)
}

async fn measured(number: Number, tcp: bool, bytes: usize, times: u32) -> Result<Vec<f64>> {
    let meeting = Meeting::of(2);
    let members = [Member::remote(), Member::remote()];
    let work = Work { number, tcp, bytes: bytes as u64, times };
    let asked: Vec<_> = (0..2).map(|rank| members[rank as usize].all_reduce(meeting.clone(), rank, work)).collect();
    let mut seconds = get_all(&asked).await?.swap_remove(0);
    ensure!(seconds.len() == 6);
    seconds.remove(0);
    Ok(seconds)
}

pub(super) fn limit_gloo() -> Figures {
    let (mut large, mut f16, mut bf16, mut small) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for _ in 0..3 {
        let mut command = torchrun()?;
        command.arg(script("gloo.py"));
        let (_, printed) = timed(command)?;
        let of = |name: &str| -> Result<f64> {
            let line = printed.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|rest| rest.trim().parse().ok()).with_context(|| format!("the script printed {printed:?}"))
        };
        large.push(of("large ")?);
        f16.push(of("f16 ")?);
        bf16.push(of("bf16 ")?);
        small.push(of("small ")? * 1e6);
    }
    Ok(vec![
        Figure::bandwidth("limit_gloo_64MiB", LARGE as u64, &large, Must::Nothing),
        Figure::bandwidth("limit_gloo_64MiB_f16", LARGE as u64, &f16, Must::Nothing),
        Figure::bandwidth("limit_gloo_64MiB_bf16", LARGE as u64, &bf16, Must::Nothing),
        Figure::of("limit_gloo_1KiB", "µs", true, small, Must::Nothing),
    ])
}

pub(super) async fn allreduce_64mib() -> Figures {
    let shared = measured(Number::F32, false, LARGE, 4).await?;
    let tcp = measured(Number::F32, true, LARGE, 4).await?;
    let f16 = measured(Number::F16, false, LARGE, 4).await?;
    let bf16 = measured(Number::Bf16, false, LARGE, 4).await?;
    let small = measured(Number::F32, false, SMALL, 5000).await?.into_iter().map(|seconds| seconds * 1e6).collect();
    let small_tcp = measured(Number::F32, true, SMALL, 1000).await?.into_iter().map(|seconds| seconds * 1e6).collect();
    Ok(vec![
        Figure::bandwidth("allreduce_64MiB", LARGE as u64, &shared, Must::Of("limit_gloo_64MiB", 2.0)),
        Figure::bandwidth("allreduce_64MiB_tcp", LARGE as u64, &tcp, Must::Of("limit_gloo_64MiB", 1.0)),
        Figure::bandwidth("allreduce_64MiB_f16", LARGE as u64, &f16, Must::Of("limit_gloo_64MiB_f16", 1.0)),
        Figure::bandwidth("allreduce_64MiB_bf16", LARGE as u64, &bf16, Must::Of("limit_gloo_64MiB_bf16", 1.0)),
        Figure::of("allreduce_1KiB", "µs", true, small, Must::Of("limit_gloo_1KiB", 1.0)),
        Figure::of("allreduce_1KiB_tcp", "µs", true, small_tcp, Must::Of("limit_gloo_1KiB", 1.0)),
    ])
}
