//! Groups of ranks that are Rust functions.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::future::IntoFuture;
use std::path::PathBuf;

use wingbeat::{Error, NodeId, Session};
use wingbeat_collective::Op;
use wingbeat_tests::TestCluster;
use wingbeat_train::{RankContext, Scaling, TorchTrainer, TrainError};

#[wingbeat::remote]
fn sum(context: RankContext, factor: u32) -> Result<Vec<u32>, String> {
    let mut group = context.join().map_err(|error| error.to_string())?;
    let mut data = [context.rank * factor];
    group.all_reduce(&mut data, Op::Sum).map_err(|error| error.to_string())?;
    Ok(vec![context.rank, data[0]])
}

/// Rank 1 fails in the first attempt, while the others wait for it.
#[wingbeat::remote]
fn fails_once(context: RankContext) -> Result<u32, String> {
    if context.rank == 1 && context.attempt == 0 {
        return Err("no luck".into());
    }
    let mut group = context.join().map_err(|error| error.to_string())?;
    group.barrier().map_err(|error| error.to_string())?;
    Ok(context.attempt)
}

fn session() -> Session {
    wingbeat::block_on(wingbeat::init().num_cpus(3).global(false).into_future()).unwrap()
}

#[test]
fn every_rank_knows_its_place_and_reduces_with_the_others() {
    let session = session();
    let _entered = session.enter();
    let trainer = TorchTrainer::function(|context| sum::remote(context, 10));
    let returned = wingbeat::block_on(trainer.scaling(Scaling::workers(3)).fit()).unwrap();
    assert_eq!((returned.values, returned.result.attempts), (vec![vec![0, 30], vec![1, 30], vec![2, 30]], 1));
    wingbeat::block_on(session.shutdown());
}

#[test]
fn the_first_that_fails_ends_the_others_and_the_group_starts_again() {
    let session = session();
    let _entered = session.enter();
    let run = |failures| {
        let trainer = TorchTrainer::function(fails_once::remote);
        wingbeat::block_on(trainer.scaling(Scaling::workers(3)).max_failures(failures).fit())
    };
    match run(0).unwrap_err() {
        TrainError::FunctionFailed { rank: 1, cause } => assert!(cause.to_string().contains("no luck"), "{cause}"),
        other => panic!("{other}"),
    }
    let returned = run(1).unwrap();
    assert_eq!((returned.values, returned.result.attempts), (vec![1, 1, 1], 2));
    wingbeat::block_on(session.shutdown());
}

#[wingbeat::remote]
fn is_killed(context: RankContext) -> Result<u32, String> {
    if context.rank == 1 && context.attempt == 0 {
        std::process::abort();
    }
    let mut group = context.join().map_err(|error| error.to_string())?;
    group.barrier().map_err(|error| error.to_string())?;
    Ok(context.attempt)
}

#[test]
fn a_rank_whose_process_dies_is_not_made_again_alone() {
    let session = session();
    let _entered = session.enter();
    let run = |failures| {
        let trainer = TorchTrainer::function(|context| is_killed::options().max_retries(5).remote(context));
        wingbeat::block_on(trainer.scaling(Scaling::workers(2)).max_failures(failures).fit())
    };
    match run(0).unwrap_err() {
        TrainError::FunctionFailed { rank: 1, cause } => {
            assert!(matches!(*cause, Error::WorkerCrashed { attempts: 1, .. }), "{cause}");
        }
        other => panic!("{other}"),
    }
    assert_eq!(run(1).unwrap().values, vec![1, 1]);
    wingbeat::block_on(session.shutdown());
}

/// Stays where it is first, and says where that is.
#[wingbeat::remote]
fn stays_at_first(context: RankContext, begun: PathBuf) -> NodeId {
    if !begun.exists() {
        std::fs::write(begun.with_extension("new"), context.node.to_string()).unwrap();
        std::fs::rename(begun.with_extension("new"), begun).unwrap();
        loop {
            std::thread::park();
        }
    }
    context.node
}

/// Begins, says so, and goes on until it may end. Never asks whether it is to end.
#[wingbeat::remote]
fn ends_when_it_may(context: RankContext, begun: PathBuf, may_end: PathBuf) -> u32 {
    std::fs::write(begun.with_extension("new"), context.node.to_string()).unwrap();
    std::fs::rename(begun.with_extension("new"), begun).unwrap();
    while !may_end.exists() {
        std::thread::yield_now();
    }
    context.attempt
}

#[test]
fn a_function_that_ends_by_itself_within_the_time_of_a_drain_is_not_called_again() {
    let cluster = TestCluster::start(2, 1).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let (begun, may_end) = (dir.path().join("begun"), dir.path().join("may_end"));
    let session = join(&cluster);
    let _entered = session.enter();
    let returned = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !begun.exists() {
                std::thread::yield_now();
            }
            let node = std::fs::read_to_string(&begun).unwrap();
            // Less than the grace: ranks are asked to end at once.
            let drain = cluster.command().unwrap().args(["drain", &node, "--within", "25s"]).status();
            if !drain.unwrap().success() {
                std::fs::write(&may_end, "not drained").unwrap();
            }
        });
        let (begun, known) = (begun.clone(), may_end.clone());
        let trainer =
            TorchTrainer::function(move |context| ends_when_it_may::remote(context, begun.clone(), known.clone()));
        let noticed = may_end.clone();
        let notices = move |text: &str| {
            if text.contains("is drained") {
                std::fs::write(&noticed, "").unwrap();
            }
        };
        wingbeat::block_on(trainer.on_notice(notices).fit()).unwrap()
    });
    assert_eq!((returned.values, returned.result.attempts), (vec![0], 1));
    wingbeat::block_on(session.shutdown());
}

#[test]
fn ranks_leave_a_drained_node_at_its_deadline_and_that_is_no_failure() {
    let cluster = TestCluster::start(2, 1).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let begun = dir.path().join("begun");
    let session = join(&cluster);
    let _entered = session.enter();
    let (first, returned) = std::thread::scope(|scope| {
        let known = begun.clone();
        let trainer = TorchTrainer::function(move |context| stays_at_first::remote(context, known.clone()));
        let stopper = trainer.stopper();
        let drained = scope.spawn(|| {
            let stopper = stopper;
            while !begun.exists() {
                std::thread::yield_now();
            }
            let node = std::fs::read_to_string(&begun).unwrap();
            let drain = cluster.command().unwrap().args(["drain", &node, "--within", "1s"]).status();
            if !drain.unwrap().success() {
                stopper.stop(); // the function would stay for ever
            }
            node
        });
        let returned = wingbeat::block_on(trainer.fit()).unwrap();
        (drained.join().unwrap(), returned)
    });
    assert_ne!(returned.values[0].to_string(), first);
    assert_eq!(returned.result.attempts, 1);
    wingbeat::block_on(session.shutdown());
}

fn join(cluster: &TestCluster) -> Session {
    let init = wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap()).global(false);
    wingbeat::block_on(init.into_future()).unwrap()
}

#[wingbeat::remote(num_cpus = 8, num_gpus = 1, memory = "1TiB")]
fn held(context: RankContext) -> (f64, f64) {
    let held = wingbeat::assigned_resources();
    let of = |name: &str| held.get(name).copied().unwrap_or_default();
    drop(context);
    (of("CPU"), of("license"))
}

#[test]
fn a_call_holds_what_is_reserved_for_its_rank_unless_it_says_otherwise() {
    let init = wingbeat::init().num_cpus(4).resource("license", 2.0).global(false);
    let session = wingbeat::block_on(init.into_future()).unwrap();
    let _entered = session.enter();
    let scaling = || Scaling::workers(2).cpus_per_worker(1.5).resource_per_worker("license", 1.0);
    let usual = TorchTrainer::function(held::remote).scaling(scaling());
    assert_eq!(wingbeat::block_on(usual.fit()).unwrap().values, [(1.5, 1.0), (1.5, 1.0)]);
    let own = TorchTrainer::function(|context| held::options().num_cpus(0.5).remote(context)).scaling(scaling());
    assert_eq!(wingbeat::block_on(own.fit()).unwrap().values, [(0.5, 1.0), (0.5, 1.0)]);
    wingbeat::block_on(session.shutdown());
}

#[wingbeat::remote]
fn place(context: RankContext) -> (bool, u32) {
    (wingbeat::current_node() == Some(context.node), context.local_rank)
}

#[test]
fn ranks_of_two_nodes_are_numbered_by_node_and_know_theirs() {
    let cluster = TestCluster::start(2, 2).unwrap();
    let session = join(&cluster);
    let _entered = session.enter();
    // What looks after a rank is in its place.
    let trainer =
        TorchTrainer::function(|context| place::options().spread().remote(context)).scaling(Scaling::nodes(2, 2));
    let places = wingbeat::block_on(trainer.fit()).unwrap().values;
    assert_eq!(places, [(true, 0), (true, 1), (true, 0), (true, 1)]);
    wingbeat::block_on(session.shutdown());
}

/// Says that it has begun, and never ends.
#[wingbeat::remote]
fn stays(context: RankContext, begun: PathBuf) -> u32 {
    std::fs::write(begun.join(context.rank.to_string()), "").unwrap();
    loop {
        std::thread::park();
    }
}

#[test]
fn a_run_whose_session_ends_says_that_and_accuses_no_rank() {
    let session = session();
    let _entered = session.enter();
    let begun = tempfile::tempdir().unwrap();
    let folder = begun.path().to_owned();
    let notices = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let said = notices.clone();
    let trainer = TorchTrainer::function(move |context| stays::remote(context, folder.clone()))
        .scaling(Scaling::workers(2))
        .on_notice(move |notice| said.lock().unwrap().push(notice.to_owned()));
    let error = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !(0..2).all(|rank: u32| begun.path().join(rank.to_string()).exists()) {
                std::thread::yield_now();
            }
            session.shutdown_blocking();
        });
        wingbeat::block_on(trainer.fit()).unwrap_err()
    });
    assert!(
        matches!(&error, TrainError::Runtime(Error::SessionEnded { .. })),
        "{error}: {:?}",
        notices.lock().unwrap()
    );
}
