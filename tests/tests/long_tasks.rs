//! Long synchronous code: one piece of user code that makes thousands of cluster calls without returning.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::time::Duration;

use common::Local;
use wingbeat::{ObjectRef, get_all_blocking, put, wait, wait_blocking};

/// Calls of each kind. Tokio's budget, after which nothing went on, is 128.
const CALLS: u64 = 10_000;
/// Of the kinds that go through shared memory, or start something: a hundred times slower.
const HEAVY: u64 = 300;
/// Over the limit for inline values.
const STORED: usize = 25_000;

#[wingbeat::remote]
fn plus_one(x: u64) -> u64 {
    x + 1
}

#[wingbeat::remote]
fn count_to(n: u64) -> impl Iterator<Item = u64> {
    0..n
}

#[wingbeat::remote]
async fn counts_asynchronously(n: u64) -> impl futures::Stream<Item = u64> {
    futures::stream::iter(0..n)
}

/// Every kind of call, blocking. Answers with a number that depends on all of them.
fn calls_of_every_kind(stored: &ObjectRef<Vec<u64>>) -> u64 {
    let mut sum = 0;
    for i in 0..CALLS {
        sum += put(&i).unwrap().get_blocking().unwrap();
    }
    let refs: Vec<_> = (0..CALLS).map(plus_one::remote).collect();
    for done in &refs {
        sum += done.get_blocking().unwrap();
    }
    sum += get_all_blocking(&refs).unwrap().len() as u64;
    let (ready, rest) = wait_blocking(refs, CALLS as usize, Some(Duration::from_secs(60))).unwrap();
    assert_eq!((ready.len(), rest.len()), (CALLS as usize, 0));
    for i in 0..HEAVY {
        assert_eq!(stored.get_blocking().unwrap().len(), STORED);
        let view = stored.view_blocking().unwrap();
        sum += view[i as usize];
        let other = put(&vec![i; STORED]).unwrap();
        sum += other.get_blocking().unwrap()[STORED - 1];
        let (ready, _) = wait_blocking(vec![plus_one::remote(i)], 1, None).unwrap();
        sum += ready[0].get_blocking().unwrap();
    }
    let mut stream = count_to::remote(CALLS);
    while let Some(item) = stream.next_blocking() {
        sum += item.unwrap();
    }
    let mut stream = counts_asynchronously::remote(HEAVY);
    while let Some(item) = stream.next_blocking() {
        sum += item.unwrap();
    }
    sum
}

/// The same, awaiting.
async fn awaits_of_every_kind(stored: &ObjectRef<Vec<u64>>) -> u64 {
    let mut sum = 0;
    for i in 0..CALLS {
        sum += put(&i).unwrap().get().await.unwrap();
    }
    let refs: Vec<_> = (0..CALLS).map(plus_one::remote).collect();
    for done in &refs {
        sum += done.get().await.unwrap();
    }
    sum += wingbeat::get_all(&refs).await.unwrap().len() as u64;
    let (ready, rest) = wait(refs, CALLS as usize, Some(Duration::from_secs(60))).await.unwrap();
    assert_eq!((ready.len(), rest.len()), (CALLS as usize, 0));
    for i in 0..HEAVY {
        assert_eq!(stored.get().await.unwrap().len(), STORED);
        let view = stored.view().await.unwrap();
        sum += view[i as usize];
        let other = put(&vec![i; STORED]).unwrap();
        sum += other.get().await.unwrap()[STORED - 1];
        let (ready, _) = wait(vec![plus_one::remote(i)], 1, None).await.unwrap();
        sum += ready[0].get().await.unwrap();
    }
    let mut stream = count_to::remote(CALLS);
    while let Some(item) = stream.next().await {
        sum += item.unwrap();
    }
    let mut stream = counts_asynchronously::remote(HEAVY);
    while let Some(item) = stream.next().await {
        sum += item.unwrap();
    }
    sum
}

fn expected() -> u64 {
    let below = |n: u64| n * (n - 1) / 2;
    let puts = below(CALLS);
    let tasks = below(CALLS) + CALLS + CALLS;
    let heavy = HEAVY * 7 + below(HEAVY) + below(HEAVY) + HEAVY;
    puts + tasks + heavy + below(CALLS) + below(HEAVY)
}

fn stored() -> ObjectRef<Vec<u64>> {
    put(&vec![7u64; STORED]).unwrap()
}

#[wingbeat::remote]
fn blocks(stored: Vec<ObjectRef<Vec<u64>>>) -> u64 {
    calls_of_every_kind(&stored[0])
}

#[wingbeat::remote]
async fn blocks_in_an_async_function(stored: Vec<ObjectRef<Vec<u64>>>) -> u64 {
    calls_of_every_kind(&stored[0])
}

#[wingbeat::remote]
async fn awaits(stored: Vec<ObjectRef<Vec<u64>>>) -> u64 {
    awaits_of_every_kind(&stored[0]).await
}

#[wingbeat::remote]
fn blocks_in_a_thread(stored: Vec<ObjectRef<Vec<u64>>>) -> u64 {
    std::thread::spawn(move || calls_of_every_kind(&stored[0])).join().unwrap()
}

#[wingbeat::remote]
fn yields_what_it_got(stored: Vec<ObjectRef<Vec<u64>>>) -> impl Iterator<Item = u64> {
    (0..HEAVY).map(move |i| stored[0].get_blocking().unwrap()[i as usize])
}

struct Caller;

#[wingbeat::actor]
impl Caller {
    fn new() -> Self {
        Caller
    }
    fn blocks(&mut self, stored: Vec<ObjectRef<Vec<u64>>>) -> u64 {
        calls_of_every_kind(&stored[0])
    }
    async fn awaits(&self, stored: Vec<ObjectRef<Vec<u64>>>) -> u64 {
        awaits_of_every_kind(&stored[0]).await
    }
    async fn blocks_in_an_async_method(&self, stored: Vec<ObjectRef<Vec<u64>>>) -> u64 {
        calls_of_every_kind(&stored[0])
    }
}

#[test]
fn a_task_makes_ten_thousand_calls_of_every_kind_without_returning() {
    let _local = Local::start(2);
    let stored = stored();
    assert_eq!(blocks::remote(vec![stored.clone()]).get_blocking().unwrap(), expected());
    assert_eq!(blocks_in_a_thread::remote(vec![stored.clone()]).get_blocking().unwrap(), expected());
}

#[test]
fn an_async_task_makes_ten_thousand_calls_awaiting_or_blocking() {
    let _local = Local::start(2);
    let stored = stored();
    assert_eq!(awaits::remote(vec![stored.clone()]).get_blocking().unwrap(), expected());
    assert_eq!(blocks_in_an_async_function::remote(vec![stored.clone()]).get_blocking().unwrap(), expected());
}

#[test]
fn an_actor_makes_ten_thousand_calls_of_every_kind_without_returning() {
    let _local = Local::start(2);
    let stored = stored();
    let caller = Caller::remote();
    assert_eq!(caller.blocks(vec![stored.clone()]).get_blocking().unwrap(), expected());
    assert_eq!(caller.awaits(vec![stored.clone()]).get_blocking().unwrap(), expected());
    assert_eq!(caller.blocks_in_an_async_method(vec![stored.clone()]).get_blocking().unwrap(), expected());
}

#[test]
fn a_driver_makes_ten_thousand_calls_blocking_or_in_a_runtime() {
    let local = Local::start(2);
    let stored = stored();
    assert_eq!(calls_of_every_kind(&stored), expected());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let entered = local.session.enter();
    assert_eq!(runtime.block_on(awaits_of_every_kind(&stored)), expected());
    // Blocking a runtime's thread is no good idea, and must not hang either.
    assert_eq!(runtime.block_on(async { calls_of_every_kind(&stored) }), expected());
    drop(entered);
}

#[test]
fn an_iterator_of_a_stream_makes_hundreds_of_calls() {
    let _local = Local::start(2);
    let mut stream = yields_what_it_got::remote(vec![stored()]);
    let mut sum = 0;
    while let Some(item) = stream.next_blocking() {
        sum += item.unwrap();
    }
    assert_eq!(sum, HEAVY * 7);
}

// A runtime of one's own.

fn runs_a_runtime() -> u64 {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async { tokio::spawn(async { 7 }).await.unwrap() })
}

#[derive(serde::Serialize, serde::Deserialize)]
struct RunsARuntimeWhenDropped(u64);

impl Drop for RunsARuntimeWhenDropped {
    fn drop(&mut self) {
        self.0 += runs_a_runtime();
    }
}

#[wingbeat::remote]
fn has_a_runtime_of_its_own(argument: RunsARuntimeWhenDropped) -> RunsARuntimeWhenDropped {
    // The handle of the thread's own runtime is there too.
    let _ = tokio::runtime::Handle::current();
    RunsARuntimeWhenDropped(argument.0 + runs_a_runtime())
}

#[wingbeat::remote]
fn yields_with_a_runtime_of_its_own(n: u64) -> impl Iterator<Item = u64> {
    (0..n).map(|_| runs_a_runtime())
}

struct Blocking(u64);

#[wingbeat::actor(max_concurrency = 100)]
impl Blocking {
    fn new() -> Self {
        Blocking(runs_a_runtime())
    }
    fn adds(&mut self) -> u64 {
        self.0 += runs_a_runtime();
        self.0
    }
    /// Holds the state for a while, so that the calls beside it have to wait for their turn.
    async fn holds(&mut self) -> u64 {
        tokio::time::sleep(Duration::from_millis(20)).await;
        self.0
    }
    fn items(&self, n: u64) -> impl Iterator<Item = u64> {
        (0..n).map(|_| self.0 + runs_a_runtime())
    }
    fn items_that_borrow_nothing(&self, n: u64) -> impl Iterator<Item = u64> + use<> {
        (0..n).map(|_| runs_a_runtime())
    }
}

impl Drop for Blocking {
    fn drop(&mut self) {
        runs_a_runtime();
    }
}

fn sum_of(mut stream: wingbeat::ObjectStream<u64>) -> u64 {
    let mut sum = 0;
    while let Some(item) = stream.next_blocking() {
        sum += item.unwrap();
    }
    sum
}

#[test]
fn a_synchronous_task_has_a_runtime_of_its_own() {
    let _local = Local::start(2);
    let result = has_a_runtime_of_its_own::remote(RunsARuntimeWhenDropped(1)).get_blocking().unwrap();
    assert_eq!(result.0, 8);
    assert_eq!(sum_of(yields_with_a_runtime_of_its_own::remote(100)), 700);
}

#[test]
fn synchronous_methods_have_a_runtime_of_their_own_also_when_they_waited_for_their_turn() {
    let _local = Local::start(2);
    let actor = Blocking::remote();
    let mut sums = Vec::new();
    for _ in 0..20 {
        drop(actor.holds());
        sums.push(actor.adds());
    }
    let last = get_all_blocking(&sums).unwrap().into_iter().max();
    assert_eq!(last, Some(7 + 20 * 7));
    assert_eq!(sum_of(actor.items(50)), 50 * (7 + 20 * 7 + 7));
    assert_eq!(sum_of(actor.items_that_borrow_nothing(50)), 350);
}

/// Computes for 50 us, or for as long as a file is not there.
struct Computes;

#[wingbeat::actor]
impl Computes {
    fn new() -> Self {
        Computes
    }
    fn shortly(&self, number: u64) -> u64 {
        let begun = std::time::Instant::now();
        while begun.elapsed() < Duration::from_micros(50) {
            std::hint::spin_loop();
        }
        number
    }
    fn until_there(&self, file: std::path::PathBuf) {
        while !file.exists() {
            std::thread::yield_now();
        }
    }
}

#[test]
fn results_of_short_calls_do_not_wait_for_a_long_one_behind_them() {
    let _local = Local::start(1);
    let computes = Computes::remote();
    let folder = tempfile::tempdir().unwrap();
    for round in 0..100 {
        let short: Vec<_> = (0..5).map(|number| computes.shortly(number)).collect();
        let file = folder.path().join(round.to_string());
        let long = computes.until_there(file.clone());
        let (ready, late) = wait_blocking(short, 5, Some(Duration::from_secs(60))).unwrap();
        assert!(late.is_empty(), "they wait for the long one");
        assert_eq!(get_all_blocking(&ready).unwrap().iter().sum::<u64>(), 10);
        std::fs::write(file, "").unwrap();
        long.get_blocking().unwrap();
    }
}
