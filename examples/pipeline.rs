//! A pipeline: a source streams readings, an actor keeps statistics of them, and a second stage looks for outliers. The
//! source runs only a few items ahead of what is taken, however fast it could go.

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};
use wingbeat::prelude::*;

const READINGS: u64 = 2_000;
/// Readings that the source may be ahead.
const AHEAD: u32 = 8;

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Reading {
    number: u64,
    value: f64,
}

/// A sine, with a spike now and then.
#[wingbeat::remote]
fn source(count: u64) -> impl Iterator<Item = Reading> {
    (0..count).map(|number| {
        let spike = if number % 250 == 249 { 50.0 } else { 0.0 };
        Reading { number, value: (number as f64 / 10.0).sin() + spike }
    })
}

/// Mean and variance so far, by Welford's method (Technometrics 4(3), 1962).
struct Statistics {
    count: f64,
    mean: f64,
    squares: f64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Scored {
    reading: Reading,
    /// Standard deviations from the mean.
    distance: f64,
}

#[wingbeat::actor]
impl Statistics {
    fn new() -> Self {
        Statistics { count: 0.0, mean: 0.0, squares: 0.0 }
    }

    fn score(&mut self, reading: Reading) -> Scored {
        let deviation = (self.squares / self.count.max(1.0)).sqrt();
        let distance = if deviation > 0.0 { (reading.value - self.mean).abs() / deviation } else { 0.0 };
        self.count += 1.0;
        let delta = reading.value - self.mean;
        self.mean += delta / self.count;
        self.squares += delta * (reading.value - self.mean);
        Scored { reading, distance }
    }
}

/// Keeps what is far from the mean.
#[wingbeat::remote]
fn outliers(scored: Vec<ObjectRef<Scored>>) -> wingbeat::Result<Vec<Reading>, String> {
    let scored = wingbeat::get_all_blocking(&scored).map_err(|error| error.to_string())?;
    Ok(scored.into_iter().filter(|scored| scored.distance > 5.0).map(|scored| scored.reading).collect())
}

#[wingbeat::main]
async fn main() -> Result<()> {
    wingbeat::init().await?;
    let statistics = Statistics::remote();
    let found = Queue::<Reading>::unbounded();
    let mut readings = source::options().stream_ahead(AHEAD).remote(READINGS);
    let mut batch = Vec::new();
    let mut batches = Vec::new();
    let mut count = 0;
    while let Some(reading) = readings.next().await {
        count += 1;
        batch.push(statistics.score(reading?));
        if batch.len() == 100 {
            batches.push(outliers::remote(std::mem::take(&mut batch)));
            eprintln!("   {count} of {READINGS} readings taken");
        }
    }
    for batch in batches {
        for reading in batch.get().await? {
            found.put(&reading).await?;
        }
    }
    let mut numbers = Vec::new();
    for _ in 0..found.size().await? {
        numbers.push(found.get().await?.number);
    }
    println!("{count} readings, outliers at {numbers:?}");
    ensure!(count == READINGS, "a reading was lost");
    ensure!(numbers == (0..READINGS).filter(|n| n % 250 == 249).collect::<Vec<_>>(), "the outliers are others");
    println!("pipeline: ok");
    Ok(())
}
