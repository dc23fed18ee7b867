//! Queues, pools, and callers that have much to do for one actor.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::future::Future;
use std::path::PathBuf;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use common::{Local, Started, wait_for};
use wingbeat::{ActorPool, Error, ObjectRef, Queue, QueueError, put};

/// Only what hangs takes so long.
const LIMIT: Duration = Duration::from_secs(60);

/// Begins a wait, and stops it: what `tokio::time::timeout` or `select!` does.
fn begin_and_drop<F: Future>(wait: F, polls: usize) -> Option<F::Output> {
    let mut wait = Box::pin(wait);
    let mut cx = Context::from_waker(Waker::noop());
    for _ in 0..polls {
        if let Poll::Ready(done) = wait.as_mut().poll(&mut cx) {
            return Some(done);
        }
        std::thread::yield_now();
    }
    None
}

fn get<T: serde::Serialize + serde::de::DeserializeOwned + 'static>(queue: &Queue<T>) -> T {
    wingbeat::block_on(queue.get_timeout(LIMIT)).unwrap()
}

#[test]
fn a_get_that_is_dropped_takes_no_item() {
    let _local = Local::start(1);
    let queue = Queue::<u64>::unbounded();
    for i in 0..100 {
        assert!(begin_and_drop(queue.get(), 1).is_none());
        if i % 2 == 0 {
            // So that the get is there before the item.
            wingbeat::block_on(queue.size()).unwrap();
        }
        queue.put_blocking(&i).unwrap();
        assert_eq!(get(&queue), i);
    }
}

#[test]
fn who_does_not_wait_is_answered_however_many_do() {
    let _local = Local::start(1);
    let queue = Queue::<u64>::unbounded();
    let mut waiting: Vec<_> = (0..1_100).map(|_| Box::pin(queue.get())).collect();
    for wait in &mut waiting {
        assert!(wait.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    }
    let empty = wingbeat::block_on(queue.try_get()).unwrap_err();
    assert_eq!(empty.application(), Some(QueueError::Empty), "{empty}");
}

#[test]
fn a_queue_has_room_where_actors_hold_every_cpu() {
    let _local = Local::start(1);
    let holder = Worker::options().num_cpus(1.0).remote(PathBuf::new());
    assert_eq!(holder.double(4).get_timeout_blocking(LIMIT).unwrap(), 8);
    let queue = Queue::<u64>::bounded(1);
    let empty = wingbeat::block_on(queue.try_get()).unwrap_err();
    assert_eq!(empty.application(), Some(QueueError::Empty));
    wingbeat::block_on(queue.try_put(&7)).unwrap();
    let full = wingbeat::block_on(queue.put_timeout(&8, Duration::from_millis(1))).unwrap_err();
    assert_eq!(full.application(), Some(QueueError::Full));
    assert_eq!(wingbeat::block_on(queue.get_timeout(LIMIT)).unwrap(), 7);
}

#[test]
fn gets_that_were_dropped_leave_their_places_to_others() {
    let _local = Local::start(1);
    let queue = Queue::<u64>::unbounded();
    for _ in 0..1_100 {
        assert!(begin_and_drop(queue.get(), 1).is_none());
    }
    queue.put_blocking(&7).unwrap();
    assert_eq!(get(&queue), 7);
}

#[test]
fn many_who_wait_for_an_item_do_not_keep_it_out() {
    let _local = Local::start(1);
    let queue = Queue::<u64>::unbounded();
    let mut waiting: Vec<_> = (0..1_050).map(|_| Box::pin(queue.get())).collect();
    let mut cx = Context::from_waker(Waker::noop());
    for get in &mut waiting {
        assert!(get.as_mut().poll(&mut cx).is_pending());
    }
    for i in 0..1_050 {
        queue.put_blocking(&i).unwrap();
    }
    let mut got: Vec<u64> = waiting.into_iter().map(|get| wingbeat::block_on(get).unwrap()).collect();
    got.sort_unstable();
    assert_eq!(got, (0..1_050).collect::<Vec<u64>>());
}

#[test]
fn every_item_is_got_once_whenever_gets_are_dropped() {
    let _local = Local::start(2);
    let queue = Queue::<ObjectRef<u64>>::bounded(3);
    let producing = queue.clone();
    let session = _local.session.clone();
    let producer = std::thread::spawn(move || {
        let _entered = session.enter();
        for i in 0..300u64 {
            // Some puts are begun and dropped; the item is then put or not.
            producing.put_blocking(&put(&i).unwrap()).unwrap();
        }
    });
    let mut got = Vec::new();
    for round in 0usize.. {
        if got.len() == 300 {
            break;
        }
        let item = match round % 4 {
            0 => Some(wingbeat::block_on(queue.get_timeout(LIMIT)).unwrap()),
            polls => begin_and_drop(queue.get(), polls * polls * 20).map(Result::unwrap),
        };
        got.extend(item.map(|object| object.get_timeout_blocking(LIMIT).unwrap()));
    }
    producer.join().unwrap();
    got.sort_unstable();
    assert_eq!(got, (0..300).collect::<Vec<u64>>());
    let rest = wingbeat::block_on(queue.try_get()).map(drop).unwrap_err();
    assert_eq!(rest.application::<QueueError>(), Some(QueueError::Empty));
}

fn wait_for_size<T>(queue: &Queue<T>, size: u64) {
    let begun = Instant::now();
    while wingbeat::block_on(queue.size()).unwrap() != size {
        assert!(begun.elapsed() < LIMIT, "the queue never had {size} items");
    }
}

#[test]
fn items_that_go_back_are_in_their_old_order() {
    let _local = Local::start(1);
    let queue = Queue::<u64>::unbounded();
    for round in 0..20 {
        for i in 0..10 {
            queue.put_blocking(&i).unwrap();
        }
        let mut gets: Vec<_> = (0..5).map(|_| Box::pin(queue.get())).collect();
        // One poll submits each call, so that items are on their way when all are dropped. One may be here at once.
        let mut cx = Context::from_waker(Waker::noop());
        let polled = gets.iter_mut().map(|get| get.as_mut().poll(&mut cx));
        let got: Vec<u64> =
            polled.filter_map(|poll| if let Poll::Ready(item) = poll { Some(item.unwrap()) } else { None }).collect();
        drop(gets);
        wait_for_size(&queue, 10 - got.len() as u64);
        let rest: Vec<u64> = (0..10).filter(|item| !got.contains(item)).collect();
        assert_eq!(rest.iter().map(|_| get(&queue)).collect::<Vec<_>>(), rest, "round {round}");
    }
}

#[wingbeat::remote]
async fn begins_a_get(queue: Queue<Vec<u8>>, count: usize, begun: PathBuf) {
    let get = queue.get_many(count);
    tokio::pin!(get);
    let _ = futures::poll!(&mut get);
    std::fs::write(begun, "").unwrap();
    // What the get answers is here, and nobody looks.
    std::future::pending::<()>().await;
}

#[test]
fn items_that_a_cancelled_task_did_not_wait_for_go_back() {
    let _local = Local::start(2);
    let queue = Queue::<Vec<u8>>::unbounded();
    let folder = tempfile::tempdir().unwrap();
    for round in 0..10u8 {
        let count = 1 + round % 3;
        let begun = folder.path().join(round.to_string());
        let task = begins_a_get::remote(queue.clone(), count as usize, begun.clone());
        wait_for(&begun);
        let items: Vec<Vec<u8>> = (0..4).map(|i| vec![4 * round + i; 3 << 20]).collect();
        wingbeat::block_on(queue.put_many(&items)).unwrap();
        // So that they are on their way.
        wait_for_size(&queue, 4 - u64::from(count));
        task.cancel();
        assert!(task.get_timeout_blocking(LIMIT).is_err());
        wait_for_size(&queue, 4);
        let got = wingbeat::block_on(queue.get_many(4)).unwrap();
        assert_eq!(got.iter().map(|item| item[0]).collect::<Vec<_>>(), [0, 1, 2, 3].map(|i| 4 * round + i));
    }
}

#[test]
fn a_put_that_is_dropped_while_it_waits_for_room_puts_nothing() {
    let _local = Local::start(1);
    let queue = Queue::<u64>::bounded(1);
    for i in 0..50 {
        queue.put_blocking(&i).unwrap();
        assert!(begin_and_drop(queue.put(&1_000), 1).is_none());
        assert_eq!(get(&queue), i);
        let rest = wingbeat::block_on(queue.try_get()).unwrap_err();
        assert_eq!(rest.application::<QueueError>(), Some(QueueError::Empty), "after {i}: {rest}");
    }
}

fn error_of<T>(result: wingbeat::Result<T>) -> Option<QueueError> {
    result.err().and_then(|error| error.application())
}

#[test]
fn a_batch_is_put_whole_or_not_at_all_and_got_as_far_as_there_is_one() {
    let _local = Local::start(1);
    let queue = Queue::<u64>::bounded(4);
    wingbeat::block_on(async {
        queue.put_many(&[1, 2]).await.unwrap();
        assert_eq!(error_of(queue.try_put_many(&[3, 4, 5]).await), Some(QueueError::Full));
        assert_eq!(queue.size().await.unwrap(), 2, "nothing of it is there");
        let error = queue.put_many(&[3, 4, 5, 6, 7]).await.unwrap_err();
        assert_eq!(error.application(), Some(QueueError::BatchTooLarge { items: 5, capacity: 4 }));
        assert!(error.to_string().contains("5 items never fits into a queue that holds 4"), "{error}");
        queue.put_many(&[]).await.unwrap();
        queue.try_put_many(&[3, 4]).await.unwrap();
        assert!(queue.get_many(0).await.unwrap().is_empty());
        assert_eq!(queue.get_many(3).await.unwrap(), [1, 2, 3]);
        assert_eq!(queue.get_many_timeout(usize::MAX, LIMIT).await.unwrap(), [4]);
        assert_eq!(error_of(queue.try_get_many(3).await), Some(QueueError::Empty));
        queue.put_many(&[5, 6, 7]).await.unwrap();
        queue.close().await.unwrap();
        assert_eq!(error_of(queue.put_many(&[8]).await), Some(QueueError::Closed));
        assert_eq!(queue.get_many(9).await.unwrap(), [5, 6, 7]);
        assert_eq!(error_of(queue.get_many(9).await), Some(QueueError::Closed));
    });
}

#[test]
fn more_than_is_sent_at_a_time_comes_in_several_batches() {
    // A store that has no room for all of them at once.
    let _local = Local::from(wingbeat::init().num_cpus(1).object_store_memory(64 << 20));
    let queue = Queue::<Vec<u8>>::unbounded();
    for item in 0..40 {
        queue.put_blocking(&vec![item; 2 << 20]).unwrap();
    }
    let mut got = Vec::new();
    while got.len() < 40 {
        let batch = wingbeat::block_on(queue.get_many(usize::MAX)).unwrap();
        assert!(batch.len() <= 8, "{} MiB at a time", 2 * batch.len());
        got.extend(batch.iter().map(|item| item[0]));
    }
    assert_eq!(got, (0..40).collect::<Vec<u8>>());
}

#[test]
fn a_batch_that_waits_for_room_is_not_overtaken_by_what_would_fit() {
    let _local = Local::start(1);
    let queue = Queue::<u64>::bounded(2);
    wingbeat::block_on(queue.put_many(&[0, 1])).unwrap();
    let mut batch = Box::pin(queue.put_many(&[2, 3]));
    assert!(batch.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    assert_eq!(get(&queue), 0);
    // There is room for one.
    assert_eq!(error_of(wingbeat::block_on(queue.try_put(&4))), Some(QueueError::Full));
    assert_eq!(get(&queue), 1);
    wingbeat::block_on(batch).unwrap();
    assert_eq!(wingbeat::block_on(queue.get_many(9)).unwrap(), [2, 3]);

    // One that is dropped, or has waited long enough, leaves its turn to the next.
    queue.put_blocking(&5).unwrap();
    assert!(begin_and_drop(queue.put_many(&[6, 7]), 1).is_none());
    let late = wingbeat::block_on(queue.put_many_timeout(&[6, 7], Duration::from_millis(1)));
    assert_eq!(error_of(late), Some(QueueError::Full));
    queue.put_blocking(&8).unwrap();
    assert_eq!(wingbeat::block_on(queue.get_many(9)).unwrap(), [5, 8]);
}

#[test]
fn every_item_is_got_once_whenever_gets_of_many_are_dropped() {
    let _local = Local::start(2);
    let queue = Queue::<ObjectRef<u64>>::bounded(30);
    let producing = queue.clone();
    let session = _local.session.clone();
    let producer = std::thread::spawn(move || {
        let _entered = session.enter();
        for first in (0..600u64).step_by(20) {
            let items: Vec<_> = (first..first + 20).map(|i| put(&i).unwrap()).collect();
            wingbeat::block_on(producing.put_many(&items)).unwrap();
        }
    });
    let mut got = Vec::new();
    for round in 0usize.. {
        if got.len() == 600 {
            break;
        }
        let items = match round % 4 {
            0 => wingbeat::block_on(queue.get_many_timeout(7, LIMIT)).unwrap(),
            polls => begin_and_drop(queue.get_many(9), polls * polls * 20).map(Result::unwrap).unwrap_or_default(),
        };
        got.extend(items.into_iter().map(|object| object.get_timeout_blocking(LIMIT).unwrap()));
    }
    producer.join().unwrap();
    got.sort_unstable();
    assert_eq!(got, (0..600).collect::<Vec<u64>>());
    assert_eq!(error_of(wingbeat::block_on(queue.try_get())), Some(QueueError::Empty));
}

/// An odd number: even ones cannot be read.
#[derive(serde::Serialize, Debug, PartialEq)]
struct Odd(u64);

impl<'de> serde::Deserialize<'de> for Odd {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match u64::deserialize(deserializer)? {
            odd if odd % 2 == 1 => Ok(Odd(odd)),
            even => Err(serde::de::Error::custom(format!("{even} is even"))),
        }
    }
}

#[test]
fn an_item_that_cannot_be_read_costs_no_other_of_its_batch() {
    let _local = Local::start(1);
    let queue = Queue::<Odd>::unbounded();
    wingbeat::block_on(queue.put_many(&[1, 3, 4, 5, 7].map(Odd))).unwrap();
    let many = || wingbeat::block_on(queue.get_many_timeout(9, LIMIT));
    assert_eq!(many().unwrap(), [Odd(1), Odd(3)]);
    let error = many().unwrap_err();
    assert!(matches!(error, Error::Decode { .. }) && error.to_string().contains("4 is even"), "{error}");
    assert_eq!(many().unwrap(), [Odd(5), Odd(7)]);
}

struct Worker {
    path: PathBuf,
}

#[wingbeat::actor]
impl Worker {
    fn new(path: PathBuf) -> Self {
        Worker { path }
    }
    fn double(&self, x: u64) -> u64 {
        x * 2
    }
    fn gate(&self) -> u64 {
        wait_for(&self.path);
        0
    }
    /// Fails at 0, and otherwise never ends.
    async fn fail_or_go_on(&self, x: u64) -> Result<u64, String> {
        if x == 0 {
            return Err("zero".to_owned());
        }
        std::future::pending().await
    }
    /// The most memory that the process has had, in KiB.
    fn peak(&self) -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }
}

#[test]
fn calls_of_a_pool_go_to_the_living() {
    let _local = Local::start(1);
    let workers: Vec<_> = (0..3).map(|_| Worker::remote(PathBuf::new())).collect();
    for worker in &workers {
        worker.double(0).get_blocking().unwrap();
    }
    let pool = ActorPool::new(workers.clone());
    workers[1].actor().kill();
    let mut work = pool.work();
    let (mut good, mut bad) = (0, 0);
    for x in 0..30 {
        wingbeat::block_on(work.submit(|worker| worker.double(x))).unwrap();
    }
    while let Some(result) = wingbeat::block_on(work.next()) {
        match result {
            Ok(_) => good += 1,
            Err(Error::ActorDied { .. }) => bad += 1,
            Err(other) => panic!("{other}"),
        }
    }
    assert_eq!((good, bad), (29, 1), "the dead one was found dead once");
    assert_eq!(pool.len(), 2);
    let doubled = wingbeat::block_on(pool.map(0..10u64, |worker, x| worker.double(x))).unwrap();
    assert_eq!(doubled, (0..10).map(|x| x * 2).collect::<Vec<u64>>());

    workers[0].actor().kill();
    workers[2].actor().kill();
    for _ in 0..2 {
        let error = wingbeat::block_on(pool.map(0..10u64, |worker, x| worker.double(x))).unwrap_err();
        assert!(matches!(error, Error::ActorDied { .. }), "{error}");
    }
    assert!(pool.is_empty());
}

#[test]
fn a_member_that_is_added_takes_what_waits_for_a_free_one() {
    let _local = Local::start(1);
    let open = Started::new();
    let pool = ActorPool::new([Worker::remote(open.path())]);
    let mut work = pool.work();
    wingbeat::block_on(async {
        work.submit(|worker| worker.gate()).await.unwrap();
        let added = async { pool.push(Worker::remote(PathBuf::new())) };
        let (submitted, ()) = futures::join!(work.submit(|worker| worker.double(3)), added);
        submitted.unwrap();
        assert_eq!(work.next_unordered().await.unwrap().unwrap(), 6);
        std::fs::write(open.path(), "").unwrap();
        assert_eq!(work.next().await.unwrap().unwrap(), 0);
        assert!(work.next().await.is_none());
    });
    assert_eq!(pool.len(), 2);
}

#[test]
fn members_are_removed_that_have_no_call() {
    let _local = Local::start(1);
    let open = Started::new();
    let pool = ActorPool::new((0..2).map(|_| Worker::remote(open.path())));
    let mut work = pool.work();
    wingbeat::block_on(work.submit(|worker| worker.gate())).unwrap();
    let removed = pool.pop_idle().unwrap();
    assert_eq!(removed.double(4).get_timeout_blocking(LIMIT).unwrap(), 8, "it lives as long as it has a handle");
    assert!(pool.pop_idle().is_none(), "the other one is busy");
    assert_eq!(pool.len(), 1);
    std::fs::write(open.path(), "").unwrap();
    assert_eq!(wingbeat::block_on(work.next()).unwrap().unwrap(), 0);
    assert!(pool.pop_idle().is_some() && pool.is_empty());
    let error = wingbeat::block_on(pool.map([1u64], |worker, x| worker.double(x))).unwrap_err();
    assert!(error.to_string().contains("the pool has no actors"), "{error}");
    pool.push(removed);
    assert_eq!(wingbeat::block_on(pool.map([1u64], |worker, x| worker.double(x))).unwrap(), [2]);
}

#[test]
fn works_that_share_a_pool_call_each_member_one_at_a_time() {
    let _local = Local::start(1);
    let workers = (0..3).map(|_| Worker::options().max_pending_calls(1).remote(PathBuf::new()));
    let pool = ActorPool::new(workers);
    // Nobody looks at this one while the others go on.
    let mut left_alone = pool.work();
    let calls = async {
        for x in 0..3 {
            left_alone.submit(|worker| worker.double(x)).await.unwrap();
        }
        let one = pool.map(0..100u64, |worker, x| worker.double(x));
        let other = pool.map_unordered(100..200u64, |worker, x| worker.double(x));
        futures::join!(one, other)
    };
    let (one, other) = wingbeat::block_on(calls);
    assert_eq!(one.unwrap(), (0..100).map(|x| x * 2).collect::<Vec<u64>>());
    let mut other = other.unwrap();
    other.sort_unstable();
    assert_eq!(other, (100..200).map(|x| x * 2).collect::<Vec<u64>>());
    for x in 0..3 {
        assert_eq!(wingbeat::block_on(left_alone.next()).unwrap().unwrap(), 2 * x);
    }
}

#[test]
fn calls_that_run_are_cancelled_after_a_failure_of_a_map_or_with_it() {
    let _local = Local::start(1);
    let workers: Vec<_> = (0..3).map(|_| Worker::remote(PathBuf::new())).collect();
    let pool = ActorPool::new(workers.clone());
    let error = wingbeat::block_on(pool.map(0..9u64, |worker, x| worker.fail_or_go_on(2 - x.min(2)))).unwrap_err();
    assert_eq!(error.application::<String>().as_deref(), Some("zero"));
    let all_answer = || {
        for worker in &workers {
            assert_eq!(worker.double(1).get_timeout_blocking(LIMIT).unwrap(), 2);
        }
    };
    all_answer();
    assert!(begin_and_drop(pool.map(1..9u64, |worker, x| worker.fail_or_go_on(x)), 3).is_none());
    all_answer();
    assert_eq!(wingbeat::block_on(pool.map(0..9u64, |worker, x| worker.double(x))).unwrap()[8], 16);
    assert_eq!(pool.len(), 3);
}

#[test]
fn a_member_lives_on_when_an_argument_came_from_an_actor_that_died() {
    let _local = Local::start(1);
    let dead = Worker::remote(PathBuf::new());
    dead.actor().kill();
    let pool = ActorPool::new((0..2).map(|_| Worker::remote(PathBuf::new())));
    for _ in 0..4 {
        let result = wingbeat::block_on(pool.map([1u64], |worker, x| worker.double(dead.double(x))));
        assert!(matches!(result, Err(Error::ActorDied { .. })), "{result:?}");
    }
    assert_eq!(pool.len(), 2);
    assert_eq!(wingbeat::block_on(pool.map(0..4u64, |worker, x| worker.double(x))).unwrap(), [0, 2, 4, 6]);
}

#[test]
fn calls_that_failed_before_they_were_sent_are_several() {
    let _local = Local::start(1);
    let pool = ActorPool::new((0..2).map(|_| Worker::remote(PathBuf::new())));
    let result = wingbeat::block_on(pool.map(0..4u64, |worker, x| {
        let bad = wingbeat::CallOptions::new().name("a\nb");
        worker.with(bad).double(x)
    }));
    assert!(result.as_ref().is_err_and(|error| error.to_string().contains("name")), "{result:?}");
}

#[test]
fn calls_beyond_the_limit_of_their_actor_fail() {
    let _local = Local::start(1);
    let open = Started::new();
    let worker = Worker::options().max_pending_calls(3).remote(open.path());
    let waiting: Vec<_> = (0..3).map(|_| worker.gate()).collect();
    let error = worker.double(1).get_timeout_blocking(LIMIT).unwrap_err();
    assert!(matches!(error, Error::TooManyPendingCalls { limit: 3, .. }), "{error}");
    assert!(error.to_string().contains("max_pending_calls"), "{error}");
    // The limit is each caller's own, and goes with the handle.
    let other = doubles_with::remote(worker.clone());
    std::fs::write(open.path(), "").unwrap();
    for call in waiting {
        call.get_timeout_blocking(LIMIT).unwrap();
    }
    assert_eq!(other.get_timeout_blocking(LIMIT).unwrap(), 2);
    assert_eq!(worker.double(1).get_timeout_blocking(LIMIT).unwrap(), 2);
    let error = Worker::options().max_pending_calls(0).remote(open.path()).double(1).get_blocking().unwrap_err();
    assert!(matches!(error, Error::InvalidOption { .. }), "{error}");
}

#[wingbeat::remote]
fn doubles_with(worker: WorkerHandle) -> u64 {
    worker.double(1).get_blocking().unwrap()
}

#[test]
fn many_calls_wait_in_their_caller_and_not_in_the_actor() {
    let _local = Local::start(1);
    let open = Started::new();
    let worker = Worker::remote(open.path());
    let before = worker.peak().get_blocking().unwrap();
    let gate = worker.gate();
    let calls: Vec<_> = (0..60_000).map(|x| worker.double(x)).collect();
    std::fs::write(open.path(), "").unwrap();
    assert_eq!(gate.get_timeout_blocking(LIMIT).unwrap(), 0);
    let doubled = wingbeat::get_all_blocking(&calls).unwrap();
    assert!((0..60_000).map(|x| x * 2).eq(doubled), "in their order");
    let grown = worker.peak().get_blocking().unwrap() - before;
    // All of them there would be more than 40 MiB.
    assert!(grown < 24 << 10, "the actor took {grown} KiB more");
}

#[test]
fn text_can_be_given_where_a_string_is_taken() {
    let _local = Local::start(1);
    assert_eq!(shout::remote("hello").get_blocking().unwrap(), "HELLO");
    assert_eq!(shout::remote(String::from("hello")).get_blocking().unwrap(), "HELLO");
}

#[wingbeat::remote]
fn shout(text: String) -> String {
    text.to_uppercase()
}

#[derive(serde::Serialize)]
struct Explosive;

impl<'de> serde::Deserialize<'de> for Explosive {
    fn deserialize<D: serde::Deserializer<'de>>(_: D) -> Result<Self, D::Error> {
        panic!("boom")
    }
}

#[derive(serde::Deserialize)]
struct Unwilling;

impl serde::Serialize for Unwilling {
    fn serialize<S: serde::Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
        Err(serde::ser::Error::custom("will not"))
    }
}

#[wingbeat::remote]
fn takes(_explosive: Explosive) -> u64 {
    0
}

#[wingbeat::remote]
fn takes_unwilling(_unwilling: Unwilling) -> u64 {
    0
}

#[test]
fn an_argument_that_cannot_travel_is_the_error_of_the_ref_in_words() {
    let _local = Local::start(1);
    let error = takes::remote(Explosive).get_blocking().unwrap_err();
    assert!(matches!(error, Error::Encode { .. }) && error.to_string().contains("boom"), "{error}");
    let error = takes_unwilling::remote(Unwilling).get_blocking().unwrap_err().to_string();
    assert!(error.contains("cannot be sent: will not;"), "{error}");
    // What failed before leaves nothing behind in this thread.
    assert_eq!(shout::remote("x").get_blocking().unwrap(), "X");
}
