//! Sums numbers between the GPUs of this machine, or of the cluster at `$WINGBEAT_ADDRESS`:
//! `cargo run --release -p wingbeat-nccl --example gpus -- 2 64`, for 2 ranks and 64 MiB.

use std::time::Instant;

use wingbeat::prelude::*;
use wingbeat_collective::{Group, Meeting, MeetingHandle, Op};
use wingbeat_nccl::{DeviceGroup, Library, NcclError, device};

const TRIES: u32 = 20;

struct Rank;

#[wingbeat::actor]
impl Rank {
    fn new() -> Self {
        Rank
    }

    fn sum(&self, meeting: MeetingHandle, rank: u32, elements: usize) -> Result<String, String> {
        summed(&meeting, rank, elements).map_err(|error| format!("rank {rank}: {error}"))
    }
}

fn summed(meeting: &MeetingHandle, rank: u32, elements: usize) -> Result<String, NcclError> {
    let library = Library::get()?;
    let stream = device(0)?.default_stream();
    let mut group = DeviceGroup::join(Group::join(meeting, rank)?, stream.clone())?;
    let members = group.size();
    let mut data = stream.clone_htod(&vec![rank as f32 + 1.0; elements])?;
    group.all_reduce(&mut data, Op::Sum)?;
    group.wait()?;
    let sum = (members * (members + 1) / 2) as f32;
    let right = stream.clone_dtoh(&data)?.iter().all(|value| *value == sum);
    let begun = Instant::now();
    for _ in 0..TRIES {
        group.all_reduce(&mut data, Op::Avg)?;
    }
    group.wait()?;
    let each = begun.elapsed().as_secs_f64() / f64::from(TRIES);
    let rate = (elements * size_of::<f32>()) as f64 / each / 1e9;
    Ok(format!(
        "rank {rank} of {members}: NCCL {} of {}, {}: sums are {}, {:.1} us each, {rate:.2} GB/s",
        library.version(),
        library.path().display(),
        stream.context().name()?,
        if right { "right" } else { "WRONG" },
        each * 1e6,
    ))
}

#[wingbeat::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let ranks: u32 = args.next().map_or(Ok(2), |text| text.parse())?;
    let mebibytes: usize = args.next().map_or(Ok(64), |text| text.parse())?;
    // The share of a GPU that a rank has: less than 1 puts several on one, where NCCL can do that.
    let share: f64 = args.next().map_or(Ok(1.0), |text| text.parse())?;
    wingbeat::init().await?;
    let meeting = Meeting::of(ranks);
    let actors: Vec<RankHandle> = (0..ranks).map(|_| Rank::options().num_gpus(share).remote()).collect();
    let said: Vec<_> = (0..ranks)
        .map(|rank| actors[rank as usize].sum(meeting.clone(), rank, mebibytes * (1 << 20) / size_of::<f32>()))
        .collect();
    for said in said {
        println!("{}", said.get().await?);
    }
    Ok(())
}
