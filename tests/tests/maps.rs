//! Maps: many items, a bounded number of them under way.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::fs::File;
use std::future::{Future, IntoFuture};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use common::Local;
use futures::{Stream, StreamExt};
use wingbeat::{Error, ErrorKind};

/// Only what hangs takes so long.
const LIMIT: Duration = Duration::from_secs(60);

/// Polls a wait once, and stops it.
fn begin_and_drop<F: Future>(wait: F) -> Option<F::Output> {
    let mut wait = Box::pin(wait);
    match wait.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(done) => Some(done),
        Poll::Pending => None,
    }
}

/// Until there is something at this place.
fn await_file(path: &Path) {
    let started = Instant::now();
    while !path.exists() {
        assert!(started.elapsed() < LIMIT, "{} is not there", path.display());
        std::thread::yield_now();
    }
}

/// Holds up whoever comes to it until it is opened.
struct Gate {
    dir: tempfile::TempDir,
}

impl Gate {
    fn new() -> Gate {
        let gate = Gate { dir: tempfile::tempdir().unwrap() };
        rustix::fs::mknodat(rustix::fs::CWD, gate.path(), rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0)
            .unwrap();
        gate
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("gate")
    }

    /// As long as the answer lives.
    fn open(&self) -> File {
        File::options().read(true).write(true).open(self.path()).unwrap()
    }
}

#[wingbeat::remote]
fn squared_unless_thirteen(x: u64) -> Result<u64, String> {
    if x == 13 { Err("thirteen".to_owned()) } else { Ok(x * x) }
}

#[wingbeat::remote]
async fn told_when_begun(number: u64, begun: PathBuf) -> u64 {
    std::fs::write(begun.join(number.to_string()), "").unwrap();
    std::future::pending().await
}

#[test]
fn a_map_of_endless_items_is_as_far_ahead_as_it_may_be() {
    let _local = Local::start(2);
    let mut taken = 0;
    let items = std::iter::from_fn(|| {
        taken += 1;
        (taken != 13).then_some(taken).or(Some(0))
    });
    let mut squares = wingbeat::map(items, squared_unless_thirteen::remote).in_flight(10);
    for x in 1..1_000u64 {
        let x = if x == 13 { 0 } else { x };
        assert_eq!(squares.next_blocking().unwrap().unwrap(), x * x);
    }
    drop(squares);
    // Of 999 that were taken, ten more were under way at most.
    assert!((999..=999 + 9).contains(&taken), "{taken}");
}

#[test]
fn a_failure_in_a_map_is_one_result_and_the_end_of_what_is_collected() {
    let _local = Local::start(2);
    let map = || wingbeat::map(0..20u64, squared_unless_thirteen::remote);
    let results: Vec<_> = wingbeat::block_on(StreamExt::collect::<Vec<_>>(map().in_flight(3)));
    assert_eq!(results.len(), 20);
    assert_eq!(results.iter().filter(|result| result.is_ok()).count(), 19);
    assert_eq!(results[13].as_ref().unwrap_err().application::<String>().unwrap(), "thirteen");
    assert_eq!(*results[19].as_ref().unwrap(), 361);
    assert!(map().collect_blocking().is_err());
    let mut unordered = wingbeat::block_on(StreamExt::collect::<Vec<_>>(map().unordered().in_flight(5)));
    unordered.retain(Result::is_ok);
    let mut unordered: Vec<u64> = unordered.into_iter().map(Result::unwrap).collect();
    unordered.sort_unstable();
    assert_eq!(unordered, (0..20).filter(|x| *x != 13).map(|x| x * x).collect::<Vec<u64>>());
    assert!(wingbeat::map(0..0u64, squared_unless_thirteen::remote).collect_blocking().unwrap().is_empty());
}

#[test]
fn a_map_that_is_dropped_cancels_what_is_under_way() {
    let _local = Local::start(2);
    let dir = tempfile::tempdir().unwrap();
    let begun = dir.path().to_owned();
    let mut objects = Vec::new();
    let mut map = wingbeat::map(0..100u64, |number| {
        let object = told_when_begun::remote(number, begun.clone());
        objects.push(object.clone());
        object
    })
    .in_flight(4);
    assert!(begin_and_drop(map.next()).is_none());
    let started = Instant::now();
    while std::fs::read_dir(dir.path()).unwrap().next().is_none() {
        assert!(started.elapsed() < LIMIT, "none has begun");
        std::thread::yield_now();
    }
    drop(map);
    assert_eq!(objects.len(), 4);
    for object in objects {
        let result = object.get_blocking();
        assert!(matches!(result, Err(Error::Cancelled { .. })), "{result:?}");
    }
}

#[wingbeat::remote]
fn held_up(number: u64, gate: PathBuf) -> u64 {
    drop(File::open(gate).unwrap());
    number
}

struct Loader {
    parts: Pin<Box<dyn Stream<Item = wingbeat::Result<u64>> + Send>>,
}

#[wingbeat::actor]
impl Loader {
    fn new(gate: PathBuf, free: u64) -> Self {
        let load = move |number| match number < free {
            true => squared_unless_thirteen::remote(number),
            false => held_up::remote(number, gate.clone()),
        };
        Loader { parts: Box::pin(wingbeat::map(0..6u64, load)) }
    }

    async fn next(&mut self, begun: PathBuf) -> Result<Option<u64>, Error> {
        std::fs::write(begun, "").unwrap();
        self.parts.next().await.transpose()
    }
}

#[test]
fn a_map_in_an_actor_outlives_a_call_that_is_cancelled_while_it_waits() {
    let _local = Local::start(2);
    let gate = Gate::new();
    let loader = Loader::remote(gate.path(), 1);
    let begun = |number: u64| gate.dir.path().join(format!("begun-{number}"));
    assert_eq!(loader.next(begun(0)).get_blocking().unwrap(), Some(0));
    let cancelled = loader.next(begun(1));
    await_file(&begun(1));
    cancelled.cancel();
    let error = cancelled.get_blocking().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Cancelled, "{error}");
    let _open = gate.open();
    for number in 1..6 {
        assert_eq!(loader.next(begun(2)).get_blocking().unwrap(), Some(number));
    }
    assert_eq!(loader.next(begun(2)).get_blocking().unwrap(), None);
}

#[test]
fn a_map_that_an_actor_keeps_loses_nothing_when_its_first_call_is_cancelled() {
    let _local = Local::start(2);
    let gate = Gate::new();
    let loader = Loader::remote(gate.path(), 0);
    let begun = |number: u64| gate.dir.path().join(format!("begun-{number}"));
    let cancelled = loader.next(begun(0));
    await_file(&begun(0));
    cancelled.cancel();
    let error = cancelled.get_blocking().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Cancelled, "{error}");
    let _open = gate.open();
    for number in 0..6 {
        assert_eq!(loader.next(begun(1)).get_blocking().unwrap(), Some(number));
    }
}

#[wingbeat::remote]
fn goes_on_after_failures(gate: PathBuf, said: PathBuf) {
    let mut taken = 0;
    let items = (0..1_000_000u64).inspect(|_| taken += 1);
    let mut map = wingbeat::map(items, |number| held_up::remote(number, gate.clone())).in_flight(4);
    std::fs::write(said.with_extension("begun"), "").unwrap();
    let mut results = Vec::new();
    while let Some(result) = map.next_blocking() {
        results.push(result.map_err(|error| error.kind()));
    }
    drop(map);
    std::fs::write(said.with_extension("part"), format!("{taken} {results:?}")).unwrap();
    std::fs::rename(said.with_extension("part"), said).unwrap();
}

#[test]
fn a_map_in_a_task_that_is_cancelled_submits_no_more() {
    let _local = Local::start(2);
    let gate = Gate::new();
    let said = gate.dir.path().join("said");
    let task = goes_on_after_failures::remote(gate.path(), said.clone());
    await_file(&said.with_extension("begun"));
    task.cancel();
    await_file(&said);
    let text = std::fs::read_to_string(&said).unwrap();
    let (taken, results) = text.split_once(' ').unwrap();
    assert_eq!(results, "[Err(Cancelled)]");
    assert!(taken.parse::<u64>().unwrap() <= 4, "{text}");
    let _open = gate.open();
}

/// The first item is there at once, and the others when the gate is open.
#[wingbeat::remote]
fn items_behind(gate: PathBuf) -> impl Iterator<Item = u64> {
    (0..10).inspect(move |number| {
        if *number > 0 {
            drop(File::open(&gate).unwrap());
        }
    })
}

#[wingbeat::remote]
fn passes_over_errors_of_a_stream(gate: PathBuf, said: PathBuf) {
    let mut stream = items_behind::remote(gate);
    let mut results = Vec::new();
    while let Some(result) = stream.next_blocking() {
        results.push(result.map_err(|error| error.kind()));
        std::fs::write(said.with_extension("begun"), "").unwrap();
    }
    std::fs::write(said.with_extension("part"), format!("{results:?}")).unwrap();
    std::fs::rename(said.with_extension("part"), said).unwrap();
}

#[test]
fn to_a_task_that_is_cancelled_while_it_waits_for_an_item_that_is_the_last() {
    let _local = Local::start(2);
    let gate = Gate::new();
    let said = gate.dir.path().join("said");
    let task = passes_over_errors_of_a_stream::remote(gate.path(), said.clone());
    await_file(&said.with_extension("begun"));
    task.cancel();
    await_file(&said);
    let _open = gate.open();
    assert_eq!(std::fs::read_to_string(&said).unwrap(), "[Ok(0), Err(Cancelled)]");
}

#[derive(serde::Serialize)]
struct Picky(u64);

impl<'de> serde::Deserialize<'de> for Picky {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let number = u64::deserialize(deserializer)?;
        assert!(number != 3, "not three");
        Ok(Picky(number))
    }
}

#[wingbeat::remote]
fn picky(number: u64) -> Picky {
    Picky(number)
}

#[test]
fn a_result_whose_deserialize_panics_is_one_failure_among_others() {
    let _local = Local::start(2);
    let results: Vec<_> = wingbeat::block_on(StreamExt::collect(wingbeat::map(0..8u64, picky::remote).in_flight(4)));
    assert_eq!(results.len(), 8);
    for (number, result) in results.into_iter().enumerate() {
        match result {
            Ok(Picky(same)) => assert_eq!(same, number as u64),
            Err(error) => assert!(number == 3 && error.to_string().contains("not three"), "{error}"),
        }
    }
}

#[test]
fn a_map_belongs_to_the_session_in_which_it_was_made() {
    let session =
        wingbeat::block_on(wingbeat::init().num_cpus(1).global(false).log_to_driver(false).into_future()).unwrap();
    let entered = session.enter();
    let map = wingbeat::map(0..4u64, squared_unless_thirteen::remote);
    drop(entered);
    assert_eq!(map.collect_blocking().unwrap(), [0, 1, 4, 9]);
    wingbeat::block_on(session.shutdown());
}
