//! What the operations do, on both sides.

use std::time::Duration;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use wingbeat::{Bundle, Error, ObjectRef, ObjectStream, Result, get_all_blocking, placement_group, put, wait};

use crate::cell::{Cell, Operation, Pace};
use crate::run::Tally;

/// How long a slow side pauses, every so many values.
const PAUSE: Duration = Duration::from_millis(2);
const EVERY: usize = 8;

/// The value of a number: as many bytes as asked for, all the same.
fn bytes(number: usize, len: usize) -> Vec<u8> {
    vec![(number % 251) as u8 + 1; len]
}

/// What a value comes to, from its length and some of its bytes.
pub(crate) fn digest(data: &[u8]) -> u64 {
    let at =
        |part: usize| data.get((data.len() / 4 * part).min(data.len().saturating_sub(1))).map_or(0, |x| u64::from(*x));
    (0..5).map(at).sum::<u64>() + data.len() as u64 * 1_000
}

/// The digest of the value of a number.
pub(crate) fn expected(number: usize, len: usize) -> u64 {
    let byte = if len == 0 { 0 } else { (number % 251) as u64 + 1 };
    byte * 5 + len as u64 * 1_000
}

fn pause_now_and_then(number: usize, slow: bool) {
    if slow && number % EVERY == EVERY - 1 {
        std::thread::sleep(PAUSE);
    }
}

#[wingbeat::remote]
fn digests(data: Vec<u8>, number: usize, slow: bool) -> u64 {
    pause_now_and_then(number, slow);
    digest(&data)
}

#[wingbeat::remote]
fn makes(number: usize, len: usize, slow: bool) -> Vec<u8> {
    pause_now_and_then(number, slow);
    bytes(number, len)
}

#[wingbeat::remote]
fn passes(data: Vec<u8>, number: usize, slow: bool) -> Vec<u8> {
    pause_now_and_then(number, slow);
    data
}

#[wingbeat::remote]
fn digests_all(refs: Vec<ObjectRef<Vec<u8>>>) -> Result<u64, String> {
    let values = get_all_blocking(&refs).map_err(|error| error.to_string())?;
    Ok(values.iter().map(|data| digest(data)).sum())
}

#[wingbeat::remote]
fn nests(level: u8, data: Vec<u8>) -> Result<u64, String> {
    if level == 0 {
        return Ok(digest(&data));
    }
    nests::remote(level - 1, data).get_blocking().map_err(|error| error.to_string())
}

#[wingbeat::remote]
fn goes_down(level: u8, refs: Vec<ObjectRef<Vec<u8>>>) -> Result<u64, String> {
    if level == 0 {
        let values = get_all_blocking(&refs).map_err(|error| error.to_string())?;
        return Ok(values.iter().map(|data| digest(data)).sum());
    }
    goes_down::remote(level - 1, refs).get_blocking().map_err(|error| error.to_string())
}

/// The given refs, and one of a task that the innermost level submits.
#[wingbeat::remote]
fn comes_up(level: u8, len: usize, mut refs: Vec<ObjectRef<Vec<u8>>>) -> Result<Vec<ObjectRef<Vec<u8>>>, String> {
    if level == 0 {
        refs.push(makes::remote(1, len, false));
        return Ok(refs);
    }
    comes_up::remote(level - 1, len, refs).get_blocking().map_err(|error| error.to_string())
}

/// The given handle, and one of an actor that the innermost level makes.
#[wingbeat::remote]
fn hires(level: u8, mut handles: Vec<EchoHandle>) -> Result<Vec<EchoHandle>, String> {
    if level == 0 {
        handles.push(Echo::options().num_cpus(0.0).remote(false));
        return Ok(handles);
    }
    hires::remote(level - 1, handles).get_blocking().map_err(|error| error.to_string())
}

#[wingbeat::remote]
fn streams(count: usize, len: usize, slow: bool) -> impl Iterator<Item = Vec<u8>> {
    (0..count).map(move |number| {
        pause_now_and_then(number, slow);
        bytes(number, len)
    })
}

#[wingbeat::remote]
fn lingers(data: Vec<u8>) -> u64 {
    while !wingbeat::is_cancelled() {
        std::thread::sleep(Duration::from_micros(200));
    }
    digest(&data)
}

#[wingbeat::remote]
fn cancels(refs: Vec<ObjectRef<u64>>) -> usize {
    refs.iter().for_each(ObjectRef::cancel);
    refs.len()
}

/// Every kind of call, again and again, without returning.
#[wingbeat::remote]
fn is_busy(count: usize, len: usize) -> Result<u64, String> {
    let told = |error: Error| error.to_string();
    let mut sum = 0;
    let mut stream: ObjectStream<Vec<u8>> = streams::remote(count.div_ceil(6), len, false);
    for number in 0..count {
        sum += match number % 6 {
            0 => digest(&put(&bytes(number, len)).map_err(told)?.get_blocking().map_err(told)?),
            1 => digest(&put(&bytes(number, len)).map_err(told)?.view_blocking().map_err(told)?),
            2 => digests::remote(bytes(number, len), number, false).get_blocking().map_err(told)?,
            3 => {
                let made = makes::remote(number, len, false);
                let (ready, _) = wingbeat::wait_blocking(vec![made], 1, None).map_err(told)?;
                digest(&ready[0].get_blocking().map_err(told)?)
            }
            4 => {
                let item = stream.next_blocking().ok_or("the stream is over")?.map_err(told)?;
                digest(&item) - expected(number / 6, len) + expected(number, len)
            }
            _ => digest(&makes::remote(number, len, false).view_blocking().map_err(told)?),
        };
    }
    Ok(sum)
}

struct Echo;

#[wingbeat::actor(max_concurrency = 8)]
impl Echo {
    fn new(slow: bool) -> Self {
        // Calls pile up meanwhile.
        if slow {
            std::thread::sleep(Duration::from_millis(200));
        }
        Echo
    }

    fn takes(&mut self, data: Vec<u8>, number: usize, slow: bool) -> u64 {
        pause_now_and_then(number, slow);
        digest(&data)
    }

    async fn takes_beside_others(&self, data: Vec<u8>, number: usize, slow: bool) -> u64 {
        if slow && number % EVERY == EVERY - 1 {
            tokio::time::sleep(PAUSE).await;
        }
        digest(&data)
    }
}

/// Does what the cell says, and notes every result.
pub(crate) async fn perform(cell: Cell, tally: &mut Tally<'_>) -> Result<()> {
    let Cell { operation, payload: len, count, pace, .. } = cell;
    let slow = pace == Pace::SlowProducer;
    match operation {
        Operation::Task => {
            let refs: Vec<_> = (0..count).map(|number| digests::remote(bytes(number, len), number, slow)).collect();
            sums(refs, len, tally).await;
        }
        Operation::Chain => {
            let mut last = makes::remote(count, len, slow);
            for number in 0..count {
                last = passes::remote(last, number, slow);
            }
            let digested = last.get().await.map(|data| digest(&data));
            tally.note(digested, expected(count, len)).await;
        }
        Operation::FanOut => {
            let object = put(&bytes(7, len))?;
            let refs: Vec<_> = (0..count).map(|number| digests::remote(&object, number, slow)).collect();
            for digested in refs {
                tally.note(digested.get().await, expected(7, len)).await;
            }
        }
        Operation::FanIn => {
            let refs: Vec<_> = (0..count).map(|number| makes::remote(number, len, slow)).collect();
            let all = (0..count).map(|number| expected(number, len)).sum();
            tally.note(digests_all::remote(refs).get().await, all).await;
        }
        Operation::Nested => {
            let refs: Vec<_> = (0..count).map(|number| nests::remote(3, bytes(number, len))).collect();
            sums(refs, len, tally).await;
        }
        Operation::RefsDown(levels) => {
            for number in 0..count {
                let refs = vec![put(&bytes(number, len))?, makes::remote(number, len, slow)];
                tally.note(goes_down::remote(levels, refs).get().await, expected(number, len) * 2).await;
            }
        }
        Operation::RefsUp(levels) => {
            for number in 0..count {
                let refs = comes_up::remote(levels, len, vec![put(&bytes(number, len))?]).get().await;
                let mut digested = refs;
                let mut sum = Ok(0);
                if let Ok(refs) = &mut digested {
                    for object in refs.drain(..) {
                        let value = object.get().await.map(|data| digest(&data));
                        sum = sum.and_then(|sum| value.map(|value| sum + value));
                    }
                }
                let outcome = digested.and(sum);
                tally.note(outcome, expected(number, len) + expected(1, len)).await;
            }
        }
        Operation::HandleUp => {
            for number in 0..count {
                let given = Echo::options().num_cpus(0.0).remote(false);
                let handles = hires::remote(2, vec![given]).get().await;
                let handles = match handles {
                    Ok(handles) => handles,
                    Err(error) => {
                        tally.note(Err(error), 0).await;
                        continue;
                    }
                };
                for handle in handles {
                    let answer = handle.takes(bytes(number, len), number, slow).get().await;
                    tally.note(answer, expected(number, len)).await;
                }
            }
        }
        Operation::Actor => {
            let echo = Echo::options().max_concurrency(1).remote(slow);
            let refs: Vec<_> = (0..count).map(|number| echo.takes(bytes(number, len), number, slow)).collect();
            sums(refs, len, tally).await;
        }
        Operation::AsyncActor => {
            let echo = Echo::remote(slow);
            let refs: Vec<_> =
                (0..count).map(|number| echo.takes_beside_others(bytes(number, len), number, slow)).collect();
            sums(refs, len, tally).await;
        }
        Operation::Put => {
            let refs = (0..count).map(|number| put(&bytes(number, len))).collect::<Result<Vec<_>>>()?;
            for (number, object) in refs.into_iter().enumerate() {
                tally.note(object.get().await.map(|data| digest(&data)), expected(number, len)).await;
            }
        }
        Operation::View => {
            let refs: Vec<_> = (0..count).map(|number| makes::remote(number, len, slow)).collect();
            for (number, object) in refs.into_iter().enumerate() {
                tally.note(object.view().await.map(|data| digest(&data)), expected(number, len)).await;
            }
        }
        Operation::Busy => {
            let all = (0..count).map(|number| expected(number, len)).sum();
            tally.note(is_busy::remote(count, len).get().await, all).await;
        }
        Operation::Stream => {
            let mut stream = streams::remote(count, len, slow);
            let mut number = 0;
            while let Some(item) = stream.next().await {
                let failed = item.is_err();
                tally.note(item.map(|data| digest(&data)), expected(number, len)).await;
                number += 1;
                if failed {
                    return Ok(());
                }
            }
            tally.note(Ok(number as u64), count as u64).await;
        }
        Operation::PlacementGroup => {
            let group = placement_group([Bundle::new().num_cpus(1.0)]).await?;
            let refs: Vec<_> = (0..count)
                .map(|number| digests::options().in_bundle(&group, 0).remote(bytes(number, len), number, slow))
                .collect();
            sums(refs, len, tally).await;
            group.remove().await?;
        }
        Operation::Cancel | Operation::CancelBorrowed => {
            let lingering: Vec<_> = (0..count).map(|number| lingers::remote(bytes(number, len))).collect();
            let quick = digests::remote(bytes(1, len), 1, slow);
            if operation == Operation::Cancel {
                lingering.iter().for_each(ObjectRef::cancel);
            } else {
                // It needs a CPU, and those that linger have them all.
                let cancelled = cancels::options().num_cpus(0.0).remote(lingering.clone());
                tally.note(cancelled.get().await.map(|count| count as u64), count as u64).await;
            }
            for object in lingering {
                tally.note_cancelled(object.get().await).await;
            }
            tally.note(quick.get().await, expected(1, len)).await;
        }
        Operation::Wait => {
            let mut waiting: Vec<_> = (0..count).map(|number| digests::remote(bytes(7, len), number, slow)).collect();
            while !waiting.is_empty() {
                let some = waiting.len().min(10);
                let (ready, others) = wait(waiting, some, None).await?;
                for object in ready {
                    tally.note(object.get().await, expected(7, len)).await;
                }
                waiting = others;
            }
        }
    }
    Ok(())
}

/// Every result of tasks that got the values of 0, 1, 2 …, in whatever order they come.
async fn sums(refs: Vec<ObjectRef<u64>>, len: usize, tally: &mut Tally<'_>) {
    let numbered = refs.into_iter().enumerate().map(|(number, object)| async move { (number, object.get().await) });
    let mut results: FuturesUnordered<_> = numbered.collect();
    while let Some((number, result)) = results.next().await {
        tally.note(result, expected(number, len)).await;
    }
}
