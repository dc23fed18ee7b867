//! Groups of real actors, each in a process of its own.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::future::IntoFuture;
use std::time::Duration;

use wingbeat::get_all_blocking;
use wingbeat_collective::{Group, Meeting, MeetingHandle, Op, Transport};

const LIMIT: Duration = Duration::from_secs(60);

struct Worker;

#[wingbeat::actor]
impl Worker {
    fn new() -> Self {
        Worker
    }

    fn sum(&self, meeting: MeetingHandle, rank: u32, tcp: bool) -> Result<Vec<f64>, String> {
        let transport = if tcp { Transport::Tcp } else { Transport::Auto };
        let mut group = Group::join_with(&meeting, rank, transport).map_err(|error| error.to_string())?;
        let mut data: Vec<f64> = (0..100_000).map(|index| f64::from(index) + f64::from(rank)).collect();
        group.all_reduce(&mut data, Op::Sum).map_err(|error| error.to_string())?;
        Ok(data)
    }

    /// Ends its process in the middle of an operation of the others.
    fn die(&self, meeting: MeetingHandle, rank: u32) {
        let _group = Group::join(&meeting, rank);
        std::process::abort();
    }

    fn wait_in_vain(&self, meeting: MeetingHandle, rank: u32) -> String {
        let mut group = Group::join(&meeting, rank).unwrap();
        group.all_reduce(&mut [1.0f32; 1024], Op::Sum).unwrap_err().to_string()
    }
}

#[test]
fn actors_reduce_in_shared_memory_and_over_tcp() {
    let session = wingbeat::block_on(wingbeat::init().num_cpus(3).global(false).into_future()).unwrap();
    let _entered = session.enter();
    let workers = [Worker::remote(), Worker::remote(), Worker::remote()];
    let expected: Vec<f64> = (0..100_000).map(|index| 3.0 * f64::from(index) + 3.0).collect();
    for tcp in [false, true] {
        let meeting = Meeting::of(3);
        let sums: Vec<_> = (0..3).map(|rank| workers[rank as usize].sum(meeting.clone(), rank, tcp)).collect();
        for sum in get_all_blocking(&sums).unwrap() {
            assert_eq!(sum, expected);
        }
    }
    wingbeat::block_on(session.shutdown());
}

#[test]
fn a_member_that_dies_is_an_error_at_the_others() {
    let session = wingbeat::block_on(wingbeat::init().num_cpus(3).global(false).into_future()).unwrap();
    let _entered = session.enter();
    let workers = [Worker::remote(), Worker::remote(), Worker::remote()];
    let meeting = Meeting::of(3);
    let left: Vec<_> = (0..2).map(|rank| workers[rank as usize].wait_in_vain(meeting.clone(), rank)).collect();
    let _dead = workers[2].die(meeting.clone(), 2);
    for error in left {
        let error = error.get_timeout_blocking(LIMIT).unwrap();
        assert!(error.starts_with("rank 2 is gone"), "{error}");
    }
    wingbeat::block_on(session.shutdown());
}
