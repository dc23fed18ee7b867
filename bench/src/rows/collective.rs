//! Collective operations between two actors, beside gloo's.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use wingbeat::get_all;
use wingbeat_collective::{Group, Meeting, MeetingHandle, Op, Transport};

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

    /// Seconds of each of so many all-reduces of as many bytes, in rounds, every result checked.
    fn all_reduce(
        &self,
        meeting: MeetingHandle,
        rank: u32,
        tcp: bool,
        bytes: u64,
        times: u32,
    ) -> Result<Vec<f64>, String> {
        let transport = if tcp { Transport::Tcp } else { Transport::Auto };
        let run = || {
            let mut group = Group::join_with(&meeting, rank, transport)?;
            let mut data = vec![1.0f32; bytes as usize / 4];
            let mut seconds = Vec::new();
            for _ in 0..6 {
                data.fill(rank as f32 + 1.0);
                group.barrier()?;
                let begun = Instant::now();
                for _ in 0..times {
                    group.all_reduce(&mut data, Op::Max)?;
                }
                seconds.push(begun.elapsed().as_secs_f64() / f64::from(times));
                assert!(data.iter().all(|value| *value == 2.0), "a wrong result");
                data.fill(rank as f32 + 1.0);
                group.all_reduce(&mut data, Op::Sum)?;
                assert!(data.iter().all(|value| *value == 3.0), "a wrong result");
            }
            Ok::<_, wingbeat_collective::CollectiveError>(seconds)
        };
        run().map_err(|error| error.to_string())
    }
}

async fn measured(tcp: bool, bytes: usize, times: u32) -> Result<Vec<f64>> {
    let meeting = Meeting::of(2);
    let members = [Member::remote(), Member::remote()];
    let asked: Vec<_> =
        (0..2).map(|rank| members[rank as usize].all_reduce(meeting.clone(), rank, tcp, bytes as u64, times)).collect();
    let mut seconds = get_all(&asked).await?.swap_remove(0);
    ensure!(seconds.len() == 6);
    seconds.remove(0);
    Ok(seconds)
}

pub(super) fn limit_gloo() -> Figures {
    let (mut large, mut small) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        let mut command = torchrun()?;
        command.arg(script("gloo.py"));
        let (_, printed) = timed(command)?;
        let of = |name: &str| -> Result<f64> {
            let line = printed.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|rest| rest.trim().parse().ok()).with_context(|| format!("the script printed {printed:?}"))
        };
        large.push(of("large")?);
        small.push(of("small")? * 1e6);
    }
    Ok(vec![
        Figure::bandwidth("limit_gloo_64MiB", LARGE as u64, &large, Must::Nothing),
        Figure::of("limit_gloo_1KiB", "µs", true, small, Must::Nothing),
    ])
}

pub(super) async fn allreduce_64mib() -> Figures {
    let shared = measured(false, LARGE, 4).await?;
    let tcp = measured(true, LARGE, 4).await?;
    let small = measured(false, SMALL, 5000).await?.into_iter().map(|seconds| seconds * 1e6).collect();
    let small_tcp = measured(true, SMALL, 1000).await?.into_iter().map(|seconds| seconds * 1e6).collect();
    Ok(vec![
        Figure::bandwidth("allreduce_64MiB", LARGE as u64, &shared, Must::Of("limit_gloo_64MiB", 2.0)),
        Figure::bandwidth("allreduce_64MiB_tcp", LARGE as u64, &tcp, Must::Of("limit_gloo_64MiB", 1.0)),
        Figure::of("allreduce_1KiB", "µs", true, small, Must::Of("limit_gloo_1KiB", 1.0)),
        Figure::of("allreduce_1KiB_tcp", "µs", true, small_tcp, Must::Of("limit_gloo_1KiB", 1.0)),
    ])
}
