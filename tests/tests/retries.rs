//! What is tried again: errors of some types, calls that were in flight when their actor's process ended, and streams.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::io::Write;
use std::path::{Path, PathBuf};

use common::Local;
use serde::{Deserialize, Serialize};
use wingbeat::{CallOptions, Error, ObjectStream, UNLIMITED, get_all_blocking};
use wingbeat_tests::poll;

/// Only something that hangs takes so long.
const LIMIT: std::time::Duration = std::time::Duration::from_secs(120);

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, thiserror::Error)]
#[error("busy for {0} s")]
struct Busy(u64);

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, thiserror::Error)]
#[error("broken")]
struct Broken;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, thiserror::Error)]
enum Either {
    #[error("busy for {0} s")]
    Busy(u64),
    #[error("broken")]
    Broken,
}

fn is_busy(error: &Either) -> bool {
    matches!(error, Either::Busy(_))
}

/// Adds a line to a file. Answers with how many there were before.
fn note(file: &Path, line: &str) -> usize {
    let before = lines(file).len();
    let mut file = std::fs::OpenOptions::new().create(true).append(true).open(file).unwrap();
    // At once: whoever has read the line may kill this process.
    file.write_all(format!("{line}\n").as_bytes()).unwrap();
    before
}

fn lines(file: &Path) -> Vec<String> {
    std::fs::read_to_string(file).unwrap_or_default().lines().map(str::to_owned).collect()
}

fn dies_here() {
    let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
}

/// Fails as often as it is to, and then says which attempt it is.
#[wingbeat::remote(max_retries = 5, retry_errors)]
fn which_attempt(failures: u32) -> Result<u32, String> {
    let attempt = wingbeat::current_attempt().unwrap();
    if attempt < failures { Err("not yet".to_owned()) } else { Ok(attempt) }
}

#[test]
fn a_task_knows_how_often_it_was_tried_before() {
    let _local = Local::start(1);
    assert_eq!(wingbeat::current_attempt(), None);
    for failures in [0, 3] {
        assert_eq!(which_attempt::remote(failures).get_blocking().unwrap(), failures);
    }
}

#[wingbeat::remote]
fn busy(file: PathBuf, times: usize) -> Result<u64, Busy> {
    if note(&file, "busy") < times { Err(Busy(1)) } else { Ok(7) }
}

#[wingbeat::remote(max_retries = 5, retry_on(Busy, Broken))]
fn busy_as_declared(file: PathBuf, times: usize) -> Result<u64, Busy> {
    if note(&file, "busy") < times { Err(Busy(1)) } else { Ok(7) }
}

#[wingbeat::remote]
fn broken(file: PathBuf) -> Result<u64, Broken> {
    note(&file, "broken");
    Err(Broken)
}

#[wingbeat::remote(max_retries = 5, retry_if = is_busy)]
fn busy_then_broken(file: PathBuf, times: usize) -> Result<u64, Either> {
    if note(&file, "either") < times { Err(Either::Busy(1)) } else { Err(Either::Broken) }
}

#[wingbeat::remote(retry_on(Busy))]
fn passes_on(file: PathBuf, inner: PathBuf) -> Result<u64, Error> {
    let times = 2usize.saturating_sub(note(&file, "outer"));
    busy::remote(inner, if times > 0 { usize::MAX } else { 0 }).get_blocking()
}

#[test]
fn errors_of_a_type_are_tried_again_and_others_are_not() {
    let dir = tempfile::tempdir().unwrap();
    let _local = Local::start(1);
    let file = |name: &str| dir.path().join(name);

    let seven = busy::options().retry_on::<Busy>().remote(file("option"), 3);
    assert_eq!((seven.get_blocking().unwrap(), lines(&file("option")).len()), (7, 4));
    let error = busy::options().retry_on::<Busy>().max_retries(2).remote(file("limit"), 3).get_blocking().unwrap_err();
    assert_eq!((error.application(), lines(&file("limit")).len()), (Some(Busy(1)), 3));
    let seven = busy::options().retry_on::<Busy>().max_retries(UNLIMITED).remote(file("unlimited"), 6);
    assert_eq!((seven.get_blocking().unwrap(), lines(&file("unlimited")).len()), (7, 7));

    let error = broken::options().retry_on::<Busy>().remote(file("other")).get_blocking().unwrap_err();
    assert_eq!((error.application(), lines(&file("other")).len()), (Some(Broken), 1));
    let several = broken::options().retry_on::<Busy>().retry_on::<Broken>().remote(file("several"));
    assert!(several.get_blocking().is_err() && lines(&file("several")).len() == 4);

    assert_eq!(busy_as_declared::remote(file("declared"), 5).get_blocking().unwrap(), 7);
    // Options take the place of what the attribute says.
    assert!(busy_as_declared::options().retry_errors(false).remote(file("not"), 5).get_blocking().is_err());
    assert_eq!(lines(&file("not")).len(), 1);
    // Also what a task passes on that another one has failed with.
    assert_eq!(passes_on::remote(file("outer"), file("inner")).get_blocking().unwrap(), 7);
    assert_eq!(lines(&file("outer")).len(), 3);
}

#[test]
fn errors_are_tried_again_as_a_function_says() {
    let dir = tempfile::tempdir().unwrap();
    let local = Local::start(1);
    let file = |name: &str| dir.path().join(name);

    let error = busy_then_broken::remote(file("declared"), 3).get_blocking().unwrap_err();
    assert_eq!((error.application(), lines(&file("declared")).len()), (Some(Either::Broken), 4));
    let short = |error: &Busy| error.0 <= 1;
    assert_eq!(busy::options().retry_if(short).remote(file("option"), 3).get_blocking().unwrap(), 7);
    let long = |error: &Busy| error.0 > 1;
    assert!(busy::options().retry_if(long).remote(file("no"), 3).get_blocking().is_err());
    assert_eq!(lines(&file("no")).len(), 1);
    // It is no error of the function's.
    let panics = |_: &Busy| panic!("in a predicate");
    let error = busy::options().retry_if(panics).remote(file("panics"), 3).get_blocking().unwrap_err();
    assert_eq!(error.application(), Some(Busy(1)));

    // It may wait for the cluster; the task can be cancelled meanwhile, and the session may end.
    let (asked, session) = (dir.path().join("asked"), local.session.clone());
    let (open, gate) = std::sync::mpsc::channel::<()>();
    let (begun, gate) = (asked.clone(), std::sync::Mutex::new(gate));
    let waits = move |_: &Busy| {
        let _entered = session.enter();
        note(&begun, "asked");
        gate.lock().unwrap().recv().is_ok() && broken::remote(begun.clone()).get_blocking().is_err()
    };
    let task = busy::options().retry_if(waits).remote(file("waits"), 1);
    assert!(poll(LIMIT, || (!lines(&asked).is_empty()).then_some(())).is_some(), "the predicate was not asked");
    task.cancel();
    assert!(matches!(task.get_blocking(), Err(Error::Cancelled { .. })));
    open.send(()).unwrap();
}

struct Log {
    file: PathBuf,
}

#[wingbeat::actor(max_restarts = unlimited, max_task_retries = unlimited)]
impl Log {
    fn new(file: PathBuf) -> Self {
        Log { file }
    }
    /// Dies the first time, after its line.
    fn dies(&mut self, number: u64) -> u64 {
        let line = number.to_string();
        if !lines(&self.file).contains(&line) {
            note(&self.file, &line);
            dies_here();
        }
        note(&self.file, &line);
        number
    }
    fn add(&mut self, number: u64) -> u64 {
        note(&self.file, &number.to_string());
        number
    }
    /// Says that it has begun, and returns when it may.
    fn waits(&mut self, begun: PathBuf, go_on: PathBuf) {
        std::fs::write(begun, "").unwrap();
        poll(LIMIT, || go_on.exists().then_some(())).unwrap_or_else(|| panic!("it may never go on"));
    }
    fn numbers(&mut self, count: u64, dies_at: u64) -> impl Iterator<Item = u64> {
        (0..count).inspect(move |index| {
            if *index == dies_at && note(&self.file, "died") == 0 {
                dies_here();
            }
        })
    }
    #[method(max_retries = 0)]
    fn once(&mut self) {
        note(&self.file, "once");
        dies_here();
    }
}

#[test]
fn calls_in_flight_are_made_again_in_order_and_before_later_ones() {
    let dir = tempfile::tempdir().unwrap();
    let _local = Local::start(1);
    let file = dir.path().join("log");
    let log = Log::remote(file.clone());
    // All of them are in flight when the first dies, but for those that are made after that.
    let calls: Vec<_> =
        (0..200).map(|number| if number % 100 == 50 { log.dies(number) } else { log.add(number) }).collect();
    let first = get_all_blocking(&calls).unwrap();
    let later: Vec<_> = (200..210).map(|number| log.add(number)).collect();
    let all = [first, get_all_blocking(&later).unwrap()].concat();
    assert_eq!(all, (0..210).collect::<Vec<u64>>());
    // The present lives ran each call once and in order: what ran before a death may have run again after it.
    let ran: Vec<u64> = lines(&file).iter().map(|line| line.parse().unwrap()).collect();
    let died =
        ran.iter().enumerate().filter(|(at, number)| **number % 100 == 50 && ran.get(at + 1) != Some(&(**number + 1)));
    let mut begin = 0;
    for end in died.map(|(at, _)| at + 1).collect::<Vec<_>>().into_iter().chain([ran.len()]) {
        let life = &ran[begin..end];
        assert!(life.is_sorted_by(|a, b| a < b), "{life:?} of {ran:?}");
        begin = end;
    }
    let last: Vec<u64> = ran.iter().rev().take_while(|number| **number != 150).copied().collect();
    assert_eq!(last, (151..210).rev().collect::<Vec<_>>());
}

#[test]
fn what_a_call_says_of_retries_goes_before_what_its_actor_says() {
    let dir = tempfile::tempdir().unwrap();
    let _local = Local::start(1);
    let file = |name: &str| dir.path().join(name);
    let log = Log::remote(file("method"));
    assert!(matches!(log.once().get_blocking(), Err(Error::ActorUnavailable { .. })));
    assert_eq!(lines(&file("method")), ["once"]);
    let log = Log::options().max_task_retries(0).remote(file("actor"));
    assert!(matches!(log.dies(1).get_blocking(), Err(Error::ActorUnavailable { .. })));
    assert_eq!(log.dies(1).get_blocking().unwrap(), 1);
    let patient = log.with(CallOptions::new().max_retries(1));
    assert_eq!(patient.dies(2).get_blocking().unwrap(), 2);
    // Where something larger is started again, nothing of it is.
    let log = Log::remote(file("once"));
    let once = wingbeat::without_retries(|| log.dies(3));
    assert!(matches!(once.get_blocking(), Err(Error::ActorUnavailable { .. })));
    assert_eq!(log.dies(4).get_blocking().unwrap(), 4);
}

#[test]
fn each_end_of_an_actor_costs_every_call_in_flight_a_retry_also_if_it_had_not_begun() {
    let dir = tempfile::tempdir().unwrap();
    let _local = Local::start(1);
    for retries in [1, 2] {
        let file = |name: &str| dir.path().join(format!("{retries} {name}"));
        let log = Log::options().max_task_retries(retries).remote(file("log"));
        // Its result may be lost with the process, as that of any call in flight.
        let _waits = log.waits(file("begun"), file("go on"));
        assert!(poll(LIMIT, || file("begun").exists().then_some(())).is_some(), "the actor does not begin");
        // All of them are in flight before the first dies, and 50 and 150 end the process once each.
        let calls: Vec<_> =
            (0..200).map(|number| if number % 100 == 50 { log.dies(number) } else { log.add(number) }).collect();
        // What was submitted after them is done, and so they are sent.
        assert_eq!(busy::remote(file("later"), 0).get_blocking().unwrap(), 7);
        std::fs::write(file("go on"), "").unwrap();
        let results: Vec<_> = calls.iter().map(|call| call.get_blocking()).collect();
        // Some before 150 may have run, and their results not have arrived.
        let (_, not_begun) = results.split_at(150);
        let unavailable = |result: &Result<u64, Error>| matches!(result, Err(Error::ActorUnavailable { .. }));
        match retries {
            1 => assert!(not_begun.iter().all(unavailable), "{not_begun:?}"),
            _ => assert!(results.iter().zip(0..).all(|(result, number)| matches!(result, Ok(done) if *done == number))),
        }
        assert_eq!(log.add(200).get_blocking().unwrap(), 200);
    }
}

/// More than the threads that a driver could have for them.
const ASKED: u64 = 600;

#[test]
fn hundreds_of_errors_are_asked_about_on_one_thread() {
    let dir = tempfile::tempdir().unwrap();
    let _local = Local::start(2);
    let threads = std::sync::Arc::new(std::sync::Mutex::new(std::collections::HashSet::new()));
    let tasks: Vec<_> = (0..ASKED)
        .map(|number| {
            let threads = threads.clone();
            let asks = move |_: &Busy| {
                threads.lock().unwrap().insert(std::thread::current().id());
                true
            };
            busy::options().retry_if(asks).remote(dir.path().join(number.to_string()), 1)
        })
        .collect();
    assert!(get_all_blocking(&tasks).unwrap().iter().all(|seven| *seven == 7));
    assert_eq!(threads.lock().unwrap().len(), 1);
}

#[wingbeat::remote]
fn numbers(file: PathBuf, count: u64, dies_at: u64) -> impl Iterator<Item = u64> {
    (0..count).inspect(move |index| {
        if *index == dies_at && note(&file, "died") == 0 {
            dies_here();
        }
    })
}

#[wingbeat::remote]
fn reads(log: LogHandle, count: u64, dies_at: u64) -> Vec<u64> {
    collect(log.numbers(count, dies_at))
}

fn collect(mut stream: ObjectStream<u64>) -> Vec<u64> {
    std::iter::from_fn(|| stream.next_blocking()).map(Result::unwrap).collect()
}

#[test]
fn a_stream_has_every_item_once_wherever_its_producer_dies() {
    const COUNT: u64 = 6;
    let dir = tempfile::tempdir().unwrap();
    let _local = Local::start(2);
    for ahead in [1, 2, 16] {
        for dies_at in 0..COUNT {
            let file = |what: &str| dir.path().join(format!("{what}, {dies_at}, {ahead}"));
            let case = format!("dies before item {dies_at} with {ahead} ahead");
            let of_task = numbers::options().stream_ahead(ahead).remote(file("task"), COUNT, dies_at);
            let log = Log::remote(file("actor"));
            let of_actor = log.with(CallOptions::new().stream_ahead(ahead)).numbers(COUNT, dies_at);
            // A handle keeps what it was made with in other processes, too.
            let other = reads::remote(Log::remote(file("other")), COUNT, dies_at);
            let expected: Vec<u64> = (0..COUNT).collect();
            assert_eq!(collect(of_task), expected, "of a task that {case}");
            assert_eq!(collect(of_actor), expected, "of an actor that {case}");
            assert_eq!(other.get_blocking().unwrap(), expected, "of an actor that {case}, in another process");
            assert!(["task", "actor", "other"].iter().all(|what| file(what).exists()), "{case}");
        }
    }
}

#[wingbeat::remote]
fn notes_and_dies(file: PathBuf) {
    note(&file, "began");
    dies_here();
}

#[wingbeat::remote]
fn notes_and_panics(file: PathBuf) {
    note(&file, "began");
    panic!("once");
}

#[test]
fn a_task_has_three_retries_unless_told_otherwise_and_a_panic_uses_none() {
    let dir = tempfile::tempdir().unwrap();
    let _local = Local::start(1);
    let file = |name: &str| dir.path().join(name);
    let error = notes_and_dies::remote(file("default")).get_blocking().unwrap_err();
    assert!(matches!(error, Error::WorkerCrashed { .. }), "{error}");
    assert_eq!(lines(&file("default")).len(), 4);
    let error = notes_and_dies::options().max_retries(0).remote(file("once")).get_blocking().unwrap_err();
    assert!(matches!(error, Error::WorkerCrashed { .. }), "{error}");
    assert_eq!(lines(&file("once")).len(), 1);
    let error = notes_and_panics::remote(file("panic")).get_blocking().unwrap_err();
    assert!(matches!(error, Error::Panicked { .. }), "{error}");
    assert_eq!(lines(&file("panic")).len(), 1);
}
