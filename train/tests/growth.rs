//! Elastic groups grow where there is room that they may have, and else stay as they are.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::error::Error;
use std::future::IntoFuture;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use wingbeat::{Bundle, Error as Lack, Init, PlacementGroup, Session, SessionGuard, placement_group};
use wingbeat_train::{RankContext, Ranks, Returned, Scaling, TorchTrainer};

type Failure = Box<dyn Error + Send + Sync>;

/// Longer than it takes a group to look for room and to leave.
const SEVERAL_LOOKS: Duration = Duration::from_secs(6);

/// Only a hang reaches it.
const DEADLINE: Duration = Duration::from_secs(300);

struct Local {
    other: Other,
    _entered: SessionGuard,
    _dir: tempfile::TempDir,
}

/// What another thread has of it.
#[derive(Clone)]
struct Other {
    session: Session,
    dir: PathBuf,
}

impl Local {
    fn of(init: Init) -> Local {
        let session = wingbeat::block_on(init.global(false).into_future()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let other = Other { session: session.clone(), dir: dir.path().to_owned() };
        Local { _entered: session.enter(), other, _dir: dir }
    }

    fn start(cpus: u32) -> Local {
        Local::of(wingbeat::init().num_cpus(cpus))
    }
}

impl Other {
    /// Bundles of a CPU each.
    fn asks_for(&self, cpus: usize) -> PlacementGroup {
        let _entered = self.session.enter();
        placement_group(vec![Bundle::new().num_cpus(1.0); cpus]).create_blocking().unwrap()
    }

    fn holds(&self, cpus: usize) -> PlacementGroup {
        let group = self.asks_for(cpus);
        wingbeat::block_on(group.ready().get()).unwrap();
        group
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        wingbeat::block_on(self.other.session.shutdown());
    }
}

fn wait_for(path: &Path) {
    let begun = Instant::now();
    while !path.exists() {
        assert!(begun.elapsed() < DEADLINE, "{} does not come", path.display());
        std::thread::yield_now();
    }
}

/// Runs one to so many of them while something else happens.
fn beside<T: DeserializeOwned + Send + 'static>(
    ranks: Ranks<T>,
    most: u32,
    happens: impl FnOnce() + Send,
) -> Returned<T> {
    std::thread::scope(|scope| {
        scope.spawn(happens);
        wingbeat::block_on(ranks.scaling(Scaling::workers(most).elastic(1..=most)).fit()).unwrap()
    })
}

/// Says how many ranks there are, and ends when there are `ranks`, or when there is a file `end`.
#[wingbeat::remote]
fn waits_for_more(context: RankContext, dir: PathBuf, ranks: u32) -> Result<u32, Failure> {
    std::fs::write(dir.join(format!("of-{}", context.world_size)), "")?;
    while context.world_size != ranks && !dir.join("end").exists() {
        std::thread::yield_now();
    }
    Ok(context.world_size)
}

#[test]
fn a_group_begins_and_grows_within_the_quota_of_its_namespace() {
    let local = Local::of(wingbeat::init().num_cpus(3).namespace("team"));
    let other = local.other.clone();
    let allow = |cpus: f64| wingbeat::block_on(other.session.set_quota("team", Some(&[("CPU", cpus)]))).unwrap();
    allow(1.0);
    let dir = other.dir.clone();
    let trainer = TorchTrainer::function(move |context| waits_for_more::remote(context, dir.clone(), 2));
    let returned = beside(trainer, 3, || {
        wait_for(&other.path("of-1"));
        allow(2.0);
    });
    assert_eq!((returned.values, returned.result.attempts), (vec![2, 2], 1));
}

#[test]
fn a_group_does_not_take_what_another_waits_for() {
    let local = Local::start(3);
    let other = local.other.clone();
    let (held, dir) = (other.holds(2), other.dir.clone());
    let trainer = TorchTrainer::function(move |context| waits_for_more::remote(context, dir.clone(), 3));
    let returned = beside(trainer, 3, || {
        wait_for(&other.path("of-1"));
        let waits = other.asks_for(3);
        wingbeat::block_on(held.remove()).unwrap();
        // Two are free, and the run holds the third: if it gave that away to grow, the other would have all.
        let placed = wingbeat::block_on(waits.ready().get_timeout(SEVERAL_LOOKS));
        if !matches!(placed, Err(Lack::TimedOut { .. })) {
            std::fs::write(other.path("end"), "").unwrap();
        }
        wingbeat::block_on(waits.remove()).unwrap();
        assert!(matches!(placed, Err(Lack::TimedOut { .. })), "{placed:?}");
    });
    assert_eq!((returned.values, returned.result.attempts), (vec![3, 3, 3], 1));
}

#[test]
fn a_group_for_which_there_is_no_room_after_all_is_smaller() {
    // Of two GPUs, three ranks seem to fit: each GPU has room for one.
    let local = Local::of(wingbeat::init().num_cpus(4).pretend_gpus(2));
    let dir = local.other.dir.clone();
    let trainer = TorchTrainer::function(move |context| waits_for_more::remote(context, dir.clone(), 2));
    let trainer = trainer.scaling(Scaling::workers(3).elastic(1..=3).gpus_per_worker(0.6));
    assert_eq!(wingbeat::block_on(trainer.fit()).unwrap().values, [2, 2]);
}

/// Saves a step, and another one when there is a file `goes`. Then it reports until it is stopped, or until there is a file `end`. Gives
/// with which step it began.
#[wingbeat::remote]
fn saves_and_reports(context: RankContext, dir: PathBuf) -> Result<u32, Failure> {
    let first = match context.checkpoint()? {
        Some(checkpoint) => std::fs::read_to_string(checkpoint.join("step"))?.parse::<u32>()? + 1,
        None => 0,
    };
    let folder = dir.join(format!("made-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let save = |step: u32| -> Result<(), Failure> {
        std::fs::write(folder.join("step"), step.to_string())?;
        Ok(context.report([("step", f64::from(step))], Some(&folder))?)
    };
    if first == 0 {
        save(0)?;
        std::fs::write(dir.join("saved"), "")?;
        wait_for(&dir.join("goes"));
        save(1)?;
        while !dir.join("end").exists() && !context.should_stop() {
            context.report([("step", 2.0)], None)?;
        }
    } else {
        context.report([("step", f64::from(first))], None)?;
    }
    Ok(first)
}

/// What comes of it with two CPUs, of which one is free only after its first checkpoint. Gives also what was said.
fn grows_after_a_checkpoint(other: &Other, happens: impl Fn(&str) + Send + Sync) -> (Returned<u32>, Vec<String>) {
    let held = other.holds(1);
    let (say, said) = mpsc::channel();
    let dir = other.dir.clone();
    let trainer = TorchTrainer::function(move |context| saves_and_reports::remote(context, dir.clone()))
        .storage(&other.path("storage").display().to_string())
        .on_notice(move |notice| {
            // Once it has grown, nobody listens.
            let _ = say.send(notice.to_owned());
        });
    let mut notices = Vec::new();
    let returned = beside(trainer, 2, || {
        wait_for(&other.path("saved"));
        wingbeat::block_on(held.remove()).unwrap();
        for notice in said {
            happens(&notice);
            notices.push(notice);
        }
    });
    (returned, notices)
}

#[test]
fn a_group_that_has_grown_numbers_its_launches_within_an_attempt() {
    let local = Local::start(2);
    let other = local.other.clone();
    let (returned, _) = grows_after_a_checkpoint(&other, |notice| {
        if notice.contains("there is room for 2 ranks") {
            std::fs::write(other.path("goes"), "").unwrap();
        }
    });
    assert_eq!((returned.values, returned.result.attempts), (vec![2, 2], 1));
    let lines = std::fs::read_to_string(other.path("storage").join("metrics.jsonl")).unwrap();
    let numbers = lines.lines().map(|line| {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        ["attempt", "launch", "step"].map(|name| line[name].as_f64().unwrap())
    });
    let numbers: Vec<_> = numbers.collect();
    let (before, last) = numbers.split_at(numbers.len() - 1);
    assert_eq!(last, [[0.0, 1.0, 2.0]], "{numbers:?}");
    assert_eq!(before[..2], [[0.0, 0.0, 0.0], [0.0, 0.0, 1.0]], "{numbers:?}");
}

#[test]
fn a_group_stays_when_the_room_is_gone_before_it_leaves() {
    let local = Local::start(2);
    let other = local.other.clone();
    let (returned, notices) = grows_after_a_checkpoint(&other, |notice| {
        if notice.contains("there is room for 2 ranks") {
            // It is not given back before the run ends.
            drop(other.holds(1));
            std::fs::write(other.path("goes"), "").unwrap();
        } else if notice.contains("the room for more ranks is gone") {
            std::fs::write(other.path("end"), "").unwrap();
        }
    });
    assert_eq!((returned.values, returned.result.attempts), (vec![0], 1), "{notices:?}");
}
