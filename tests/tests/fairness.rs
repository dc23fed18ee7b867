//! What somebody gets of a cluster that others keep busy. How soon, the bench measures; here, that it happens at all, and in
//! which parts.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::future::IntoFuture;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use common::Local;
use futures::stream::{FuturesUnordered, StreamExt};
use wingbeat::{Bundle, ObjectRef, Session, placement_group};
use wingbeat_tests::TestCluster;

/// Only something that hangs takes so long.
const LIMIT: Duration = Duration::from_secs(60);
/// CPUs that the node counts. Tasks sleep.
const CPUS: usize = 8;
const WORK: Duration = Duration::from_millis(20);

/// Works, and says that it did one piece.
#[wingbeat::remote]
fn work() -> u64 {
    std::thread::sleep(WORK);
    1
}

/// Has others do so many pieces.
#[wingbeat::remote]
async fn submit(pieces: usize) -> u64 {
    let tasks: Vec<ObjectRef<u64>> = (0..pieces).map(|_| work::remote()).collect();
    wingbeat::get_all(&tasks).await.unwrap().iter().sum()
}

#[wingbeat::remote]
fn alone() -> bool {
    true
}

/// A driver of its own that keeps tasks in flight until it is dropped, and counts the pieces that they did.
struct Stream {
    done: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    running: Option<JoinHandle<()>>,
}

impl Stream {
    /// One task at a time of each kind; `start` submits one.
    fn of(cluster: &TestCluster, kinds: usize, start: impl Fn(usize) -> ObjectRef<u64> + Send + 'static) -> Stream {
        let (done, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let session = join(cluster);
        let (count, stopped) = (done.clone(), stop.clone());
        let running = std::thread::spawn(move || {
            let _entered = session.enter();
            let begin = |kind: usize| {
                let task = start(kind);
                async move { (kind, task.await) }
            };
            wingbeat::block_on(async {
                let mut running: FuturesUnordered<_> = (0..kinds).map(begin).collect();
                while let Some((kind, pieces)) = running.next().await {
                    count.fetch_add(pieces.unwrap(), Ordering::Relaxed);
                    if !stopped.load(Ordering::Relaxed) {
                        running.push(begin(kind));
                    }
                }
                session.shutdown().await;
            });
        });
        Stream { done, stop, running: Some(running) }
    }

    /// Tasks of these many CPUs each.
    fn of_cpus(cluster: &TestCluster, cpus: Vec<f64>) -> Stream {
        Stream::of(cluster, cpus.len(), move |kind| work::options().num_cpus(cpus[kind]).remote())
    }

    fn count(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(running) = self.running.take() {
            assert!(running.join().is_ok() || std::thread::panicking(), "a stream failed");
        }
    }
}

fn join(cluster: &TestCluster) -> Session {
    let init = wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap());
    wingbeat::block_on(init.global(false).log_to_driver(false).into_future()).unwrap()
}

fn cluster() -> TestCluster {
    TestCluster::start(1, CPUS as u32).unwrap()
}

/// Waits until every stream has work done.
fn wait_for_all(streams: &[Stream]) {
    while streams.iter().any(|stream| stream.count() < 4) {
        std::thread::yield_now();
    }
}

/// What the first of two gets of the next 1,500 pieces, in percent.
fn part_of_first(streams: &[Stream; 2]) -> u64 {
    wait_for_all(streams);
    let counts = || streams.each_ref().map(Stream::count);
    let before = counts();
    loop {
        let after = counts();
        let (one, other) = (after[0] - before[0], after[1] - before[1]);
        if one + other >= 1_500 {
            return 100 * one / (one + other);
        }
        std::thread::yield_now();
    }
}

/// A cluster whose node many small askers keep busy, and another driver, entered by this thread.
fn kept_busy() -> (Local, Vec<Stream>, TestCluster) {
    let cluster = cluster();
    let streams: Vec<Stream> = (0..12).map(|_| Stream::of_cpus(&cluster, vec![0.5; 4])).collect();
    wait_for_all(&streams);
    let local = Local::from(wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap()));
    (local, streams, cluster)
}

#[test]
fn a_task_as_large_as_the_node_gets_its_turn_beside_many_small_askers() {
    let _busy = kept_busy();
    let large = alone::options().num_cpus(CPUS as f64).remote();
    assert!(large.get_timeout_blocking(LIMIT).unwrap());
}

#[test]
fn a_placement_group_as_large_as_the_node_gets_its_turn_beside_many_small_askers() {
    let _busy = kept_busy();
    for bundles in [vec![Bundle::new().num_cpus(CPUS as f64)], vec![Bundle::new().num_cpus(1.0); CPUS]] {
        let group = placement_group(bundles).create_blocking().unwrap();
        group.ready().get_timeout_blocking(LIMIT).unwrap();
        group.remove_blocking().unwrap();
    }
}

#[test]
fn two_equal_jobs_get_equal_parts_whatever_their_shapes() {
    let cluster = cluster();
    let varied = (0..32).map(|number| 1.0 - f64::from(number) / 10_000.0).collect();
    let streams = [Stream::of_cpus(&cluster, vec![1.0; 2 * CPUS]), Stream::of_cpus(&cluster, varied)];
    let part = part_of_first(&streams);
    assert!((35..=65).contains(&part), "{part} % for the job with one shape");
}

#[test]
fn a_job_with_many_submitters_gets_no_more_than_a_plain_one() {
    let cluster = cluster();
    let nested = Stream::of(&cluster, 16, |_| submit::options().num_cpus(0.0).remote(4));
    let streams = [Stream::of_cpus(&cluster, vec![1.0; 4 * CPUS]), nested];
    let part = part_of_first(&streams);
    assert!((35..=65).contains(&part), "{part} % for the plain job");
}
