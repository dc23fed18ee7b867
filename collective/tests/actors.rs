//! Groups of real actors, each in a process of its own.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::future::IntoFuture;
use std::sync::{Condvar, Mutex};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

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

#[test]
fn a_member_that_does_not_come_is_named_after_the_limit() {
    let init = wingbeat::init().num_cpus(2).global(false).env("WINGBEAT_MEETING_MS", "300");
    let session = wingbeat::block_on(init.into_future()).unwrap();
    let _entered = session.enter();
    let workers = [Worker::remote(), Worker::remote()];
    let meeting = Meeting::of(3);
    let came: Vec<_> = [0, 2].iter().zip(&workers).map(|(rank, own)| own.sum(meeting.clone(), *rank, false)).collect();
    for told in came {
        let error = told.get_timeout_blocking(LIMIT).unwrap_err().to_string();
        assert!(error.contains("rank 1"), "{error}");
    }
    wingbeat::block_on(session.shutdown());
}

/// Works with the others until that fails.
struct Busy {
    group: Mutex<Group>,
    rounds: Mutex<u32>,
    worked: Condvar,
}

#[wingbeat::actor(max_concurrency = 2)]
impl Busy {
    fn new(meeting: MeetingHandle, rank: u32, tcp: bool) -> Self {
        let transport = if tcp { Transport::Tcp } else { Transport::Auto };
        let mut group = Group::join_with(&meeting, rank, transport).unwrap();
        group.set_timeout(Duration::from_secs(5));
        Busy { group: Mutex::new(group), rounds: Mutex::default(), worked: Condvar::new() }
    }

    fn until_it_fails(&self) -> String {
        let mut group = self.group.lock().unwrap();
        let mut data = vec![1.0f32; 1 << 20];
        loop {
            if let Err(error) = group.all_reduce(&mut data, Op::Max) {
                return error.to_string();
            }
            *self.rounds.lock().unwrap() += 1;
            self.worked.notify_all();
        }
    }

    /// Its process, once it works.
    fn pid_when_busy(&self) -> u32 {
        let rounds = self.rounds.lock().unwrap();
        drop(self.worked.wait_while(rounds, |rounds| *rounds < 3).unwrap());
        std::process::id()
    }
}

/// What two members say when a signal meets the third, with their data in shared memory or on connections.
fn met_by(signal: Signal, tcp: bool) -> [String; 2] {
    let session = wingbeat::block_on(wingbeat::init().num_cpus(3).global(false).into_future()).unwrap();
    let _entered = session.enter();
    let meeting = Meeting::of(3);
    let members = [0, 1, 2].map(|rank: u32| Busy::remote(meeting.clone(), rank, tcp));
    let ends = members.each_ref().map(|member| member.until_it_fails());
    let pid = Pid::from_raw(members[1].pid_when_busy().get_timeout_blocking(LIMIT).unwrap() as i32).unwrap();
    kill_process(pid, signal).unwrap();
    let said = [0, 2].map(|rank: usize| ends[rank].get_timeout_blocking(LIMIT).unwrap());
    if signal != Signal::KILL {
        kill_process(pid, Signal::KILL).unwrap();
    }
    wingbeat::block_on(session.shutdown());
    said
}

#[test]
fn a_member_that_is_killed_at_work_is_gone_at_the_others() {
    for tcp in [false, true] {
        let said = met_by(Signal::KILL, tcp);
        assert!(said.iter().all(|error| error.contains("is gone")), "{said:?}");
        // Whoever heard it first is gone, too.
        assert!(said.iter().any(|error| error.starts_with("rank 1 ")), "{said:?}");
    }
}

#[test]
fn a_member_that_is_stopped_at_work_is_given_up() {
    for tcp in [false, true] {
        let said = met_by(Signal::STOP, tcp);
        assert!(said.iter().any(|error| error.contains("has done nothing for")), "{said:?}");
    }
}
