//! What ranks that are Rust functions report: metrics, checkpoints, and what they are told.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::error::Error;
use std::future::IntoFuture;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use wingbeat::{Init, Session, SessionGuard};
use wingbeat_tests::TestCluster;
use wingbeat_train::{
    BestCheckpoints, CheckpointConfig, Progress, RankContext, Ranks, ReportError, Returned, Scaling, ScoreOrder,
    TorchTrainer, TrainError,
};

type Failure = Box<dyn Error + Send + Sync>;

struct Local {
    session: Session,
    _entered: SessionGuard,
    dir: tempfile::TempDir,
}

impl Local {
    fn start() -> Local {
        Local::of(wingbeat::init().num_cpus(2))
    }

    fn at(cluster: &TestCluster) -> Local {
        Local::of(wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap()))
    }

    fn of(init: Init) -> Local {
        let session = wingbeat::block_on(init.global(false).into_future()).unwrap();
        Local { _entered: session.enter(), session, dir: tempfile::tempdir().unwrap() }
    }

    fn storage(&self) -> String {
        self.dir.path().join("storage").display().to_string()
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        wingbeat::block_on(self.session.shutdown());
    }
}

fn fit<T>(ranks: Ranks<T>) -> Result<Returned<T>, TrainError> {
    wingbeat::block_on(ranks.fit())
}

/// A folder of this process in `dir`, with a file of this name and text.
fn folder(dir: &Path, name: &str, text: &str) -> PathBuf {
    let folder = dir.join(std::process::id().to_string());
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join(name), text).unwrap();
    folder
}

/// The step after that of the checkpoint.
fn first_step(context: &RankContext) -> Result<u32, Failure> {
    match context.checkpoint()? {
        Some(checkpoint) => Ok(std::fs::read_to_string(checkpoint.join("step"))?.parse::<u32>()? + 1),
        None => Ok(0),
    }
}

#[wingbeat::remote]
fn reports_twice(context: RankContext) -> Result<Vec<u32>, ReportError> {
    for step in 0..2 {
        context.report([("step", f64::from(step)), ("rank", f64::from(context.rank))], None)?;
    }
    Ok(wingbeat::gpu_ids())
}

#[test]
fn reports_reach_progress_and_the_last_metrics_are_the_result_s() {
    let local = Local::of(wingbeat::init().num_cpus(2).pretend_gpus(2));
    let seen: Arc<Mutex<Vec<Progress>>> = Arc::default();
    let seeing = seen.clone();
    let trainer = TorchTrainer::function(reports_twice::remote)
        .scaling(Scaling::workers(2).gpus_per_worker(1.0))
        .on_progress(move |progress| seeing.lock().unwrap().push(progress.clone()));
    let returned = fit(trainer).unwrap();
    let seen = seen.lock().unwrap();
    assert_eq!(seen.iter().map(|progress| progress.reports).collect::<Vec<_>>(), [0, 1, 2]);
    let last = seen.last().unwrap();
    for (rank, progress) in last.ranks.iter().enumerate() {
        assert_eq!((progress.metrics["step"], progress.metrics["rank"]), (1.0, rank as f64));
        assert_eq!(progress.gpus, returned.values[rank], "the devices of its function");
    }
    assert_eq!((returned.result.metrics["rank"], returned.result.ranks), (0.0, 2));
    drop(local);
}

/// Each rank saves a file of its own in each step. Rank 1 is killed after the third step of the first attempt. Gives its first step.
#[wingbeat::remote]
fn saves(context: RankContext, dir: PathBuf, steps: u32, dies: bool) -> Result<u32, Failure> {
    let first = first_step(&context)?;
    for step in first..steps {
        let folder = match context.rank {
            0 => folder(&dir, "step", &step.to_string()),
            rank => folder(&dir, &format!("rank-{rank}"), "its own"),
        };
        // As far as the losses are not at an end: 3, 1, 2, 4, …
        let loss = [3.0, 1.0, 2.0].get(step as usize).copied().unwrap_or(f64::from(step + 1));
        context.report([("loss", loss)], Some(&folder))?;
        if dies && step == 2 && context.rank == 1 && context.attempt == 0 {
            std::process::abort();
        }
    }
    Ok(first)
}

impl Local {
    /// Ranks that save so many steps.
    fn saving(&self, steps: u32, dies: bool) -> Ranks<u32> {
        let dir = self.dir.path().to_owned();
        TorchTrainer::function(move |context| saves::remote(context, dir.clone(), steps, dies)).storage(&self.storage())
    }
}

#[test]
fn a_checkpoint_is_kept_and_read_again_after_a_rank_was_killed() {
    let local = Local::start();
    let trainer = local.saving(5, true).scaling(Scaling::workers(2)).max_failures(1).on_notice(|_| {});
    let returned = fit(trainer).unwrap();
    assert_eq!((returned.values, returned.result.attempts), (vec![3, 3], 2));
    let numbers: Vec<u64> = returned.result.checkpoints.iter().map(|checkpoint| checkpoint.number).collect();
    assert_eq!(numbers, [4, 5], "the two newest of five");
    let mut files = returned.result.checkpoint.unwrap().files;
    files.sort();
    assert_eq!(files, ["rank-1", "step"], "of both ranks");
}

#[test]
fn a_run_goes_on_from_the_storage_of_an_earlier_one() {
    let local = Local::start();
    let until = |steps| fit(local.saving(steps, false).scaling(Scaling::workers(2))).unwrap();
    assert_eq!(until(2).values, [0, 0]);
    let returned = until(4);
    assert_eq!(returned.values, [2, 2]);
    assert_eq!(returned.result.checkpoint.unwrap().number, 4);
}

#[test]
fn the_best_checkpoint_is_kept_beside_the_newest() {
    let local = Local::start();
    let keep = CheckpointConfig::newest(1).best(BestCheckpoints::of("loss", ScoreOrder::Min));
    let result = fit(local.saving(4, false).checkpoints(keep)).unwrap().result;
    assert_eq!(result.checkpoints.iter().map(|checkpoint| checkpoint.number).collect::<Vec<_>>(), [2, 4]);
    assert_eq!(result.best_checkpoint.unwrap().metrics["loss"], 1.0);
}

#[test]
fn ranks_of_two_nodes_write_one_checkpoint() {
    let cluster = TestCluster::start(2, 1).unwrap();
    let local = Local::at(&cluster);
    let returned = fit(local.saving(1, false).scaling(Scaling::nodes(2, 1))).unwrap();
    assert_eq!(returned.values, [0, 0]);
    let mut files = returned.result.checkpoint.unwrap().files;
    files.sort();
    assert_eq!(files, ["rank-1", "step"]);
}

/// Reports until it is to stop, and then once more, with a checkpoint.
#[wingbeat::remote]
fn stops_when_asked(context: RankContext, dir: PathBuf) -> Result<(), Failure> {
    let mut step = 0;
    while !context.should_stop() {
        context.report([("step", f64::from(step))], None)?;
        step += 1;
    }
    context.report([("step", -1.0)], Some(&folder(&dir, "step", &step.to_string())))?;
    Ok(())
}

/// A trainer that stops itself when it has reports.
fn stopped_after<T>(ranks: Ranks<T>, reports: u64) -> Result<Returned<T>, TrainError> {
    let stopper = ranks.stopper();
    fit(ranks.on_progress(move |progress| {
        if progress.reports >= reports {
            stopper.stop();
        }
    }))
}

#[test]
fn a_stopped_run_gives_its_ranks_time_to_report_once_more() {
    let local = Local::start();
    let dir = local.dir.path().to_owned();
    let trainer = TorchTrainer::function(move |context| stops_when_asked::remote(context, dir.clone()));
    let trainer = trainer.storage(&local.storage());
    let Err(TrainError::Stopped { so_far }) = stopped_after(trainer, 3) else { panic!("it was stopped") };
    assert_eq!((so_far.ranks, so_far.metrics["step"]), (1, -1.0));
    assert_eq!(so_far.checkpoint.unwrap().files, ["step"]);
}

/// Reports in its first attempt, and fails. The second has nothing to do.
#[wingbeat::remote]
fn fails_after_a_report(context: RankContext) -> Result<(), Failure> {
    if context.attempt == 0 {
        context.report([("loss", 0.5)], None)?;
        return Err("no luck".into());
    }
    Ok(())
}

#[test]
fn a_run_that_is_stopped_between_two_attempts_tells_how_far_it_had_come() {
    let _local = Local::start();
    let trainer = TorchTrainer::function(fails_after_a_report::remote).scaling(Scaling::workers(2)).max_failures(1);
    let stopper = trainer.stopper();
    let trainer = trainer.on_notice(move |notice| {
        if notice.contains("trying again") {
            stopper.stop();
        }
    });
    let Err(TrainError::Stopped { so_far }) = fit(trainer) else { panic!("it was stopped") };
    assert_eq!((so_far.ranks, so_far.attempts, so_far.metrics.get("loss")), (2, 1, Some(&0.5)));
}

#[test]
fn the_last_metrics_are_the_result_s_also_when_the_last_attempt_had_nothing_to_do() {
    let _local = Local::start();
    let trainer = TorchTrainer::function(fails_after_a_report::remote).max_failures(1).on_notice(|_| {});
    let result = fit(trainer).unwrap().result;
    assert_eq!((result.attempts, result.metrics.get("loss")), (2, Some(&0.5)));
}

#[wingbeat::remote]
fn never_asks(context: RankContext) -> Result<(), ReportError> {
    context.report([("step", 0.0)], None)?;
    loop {
        std::thread::park();
    }
}

#[test]
fn a_function_that_never_asks_whether_to_stop_is_ended_at_once() {
    const GRACE: Duration = Duration::from_secs(300);
    let _local = Local::start();
    let trainer = TorchTrainer::function(never_asks::remote).scaling(Scaling::workers(2)).grace(GRACE);
    let Err(TrainError::Stopped { so_far }) = stopped_after(trainer, 1) else { panic!("it was stopped") };
    assert!(so_far.elapsed < GRACE, "{:?}", so_far.elapsed);
}

/// Asks, and does not care.
#[wingbeat::remote]
fn does_not_care(context: RankContext) -> Result<(), ReportError> {
    context.should_stop();
    context.report([("step", 0.0)], None)?;
    loop {
        std::thread::park();
    }
}

#[test]
fn a_function_that_does_not_end_in_its_grace_is_ended() {
    let _local = Local::start();
    let trainer = TorchTrainer::function(does_not_care::remote).grace(Duration::from_millis(100));
    assert!(matches!(stopped_after(trainer, 1), Err(TrainError::Stopped { .. })));
}

/// What its report gives; rank 1 makes none.
#[wingbeat::remote]
fn reports(context: RankContext, path: PathBuf) -> Option<ReportError> {
    if context.rank == 1 {
        return None;
    }
    context.report([("loss", 0.0)], Some(&path)).err()
}

#[test]
fn errors_of_reports_say_what_is_wrong() {
    let local = Local::start();
    let reported = |path: &Path, workers| {
        let path = path.to_owned();
        let trainer = TorchTrainer::function(move |context| reports::remote(context, path.clone()));
        fit(trainer.scaling(Scaling::workers(workers)).storage(&local.storage())).unwrap().values.remove(0).unwrap()
    };
    match reported(Path::new("/nowhere/at/all"), 1) {
        ReportError::CheckpointMissing { path, .. } => assert_eq!(path, "/nowhere/at/all"),
        other => panic!("{other}"),
    }
    let uneven = reported(&folder(local.dir.path(), "weights", ""), 2);
    assert!(
        matches!(&uneven, ReportError::Uneven(why) if why.contains("rank 1 ended without this report")),
        "{uneven}"
    );
    let with_socket = local.dir.path().join("with-socket");
    std::fs::create_dir(&with_socket).unwrap();
    let _socket = UnixListener::bind(with_socket.join("socket")).unwrap();
    let refused = reported(&with_socket, 1);
    assert!(matches!(&refused, ReportError::Storage(why) if why.contains("neither a file nor a folder")), "{refused}");
}

/// Rank 0 returns and leaves a thread that reports; rank 1 waits until that was answered.
#[wingbeat::remote]
fn leaves_a_thread(context: RankContext, answered: PathBuf) -> Result<String, Failure> {
    if context.rank == 0 {
        std::thread::spawn(move || {
            let said = context.report([("loss", 0.0)], None).unwrap_err().to_string();
            std::fs::write(answered.with_extension("new"), said).unwrap();
            std::fs::rename(answered.with_extension("new"), answered).unwrap();
        });
        return Ok(String::new());
    }
    let begun = Instant::now();
    while !answered.exists() {
        if begun.elapsed() > Duration::from_secs(60) {
            return Err("the report was not answered".into());
        }
        std::thread::yield_now();
    }
    Ok(std::fs::read_to_string(answered)?)
}

#[test]
fn a_report_after_the_rank_s_end_is_refused() {
    let local = Local::start();
    let answered = local.dir.path().join("answered");
    let trainer = TorchTrainer::function(move |context| leaves_a_thread::remote(context, answered.clone()));
    let values = fit(trainer.scaling(Scaling::workers(2))).unwrap().values;
    assert_eq!(values[1], ReportError::Over.to_string());
}

#[test]
fn a_storage_that_cannot_be_written_is_refused_before_anything_runs() {
    let _local = Local::start();
    let trainer = TorchTrainer::function(never_asks::remote).storage("/proc/no/storage");
    match fit(trainer).unwrap_err() {
        TrainError::Storage(why) => assert!(why.contains("/proc/no/storage"), "{why}"),
        other => panic!("{other}"),
    }
}

/// Reports and waits for ever where there are two; alone, gives its attempt.
#[wingbeat::remote]
fn waits_for_a_loss(context: RankContext) -> Result<u32, ReportError> {
    match context.world_size {
        1 => Ok(context.attempt),
        _ => {
            context.report([("step", 0.0)], None)?;
            loop {
                std::thread::park();
            }
        }
    }
}

/// Saves, waits until the run is to go elsewhere, and saves for the last time. Gives where it began, and whether it was then asked to stop.
#[wingbeat::remote]
fn saves_last(context: RankContext, dir: PathBuf) -> Result<(u32, bool), Failure> {
    let first = first_step(&context)?;
    if first == 0 {
        std::fs::write(dir.join("node"), context.node.to_string())?;
        context.report([("step", 0.0)], Some(&folder(&dir, "step", "0")))?;
        std::fs::write(dir.join("saved"), "")?;
        while !dir.join("goes").exists() {
            std::thread::yield_now();
        }
        context.report([("step", 1.0)], Some(&folder(&dir, "step", "1")))?;
    }
    // As a function that has something left to do.
    let saved = Instant::now();
    while !context.should_stop() && saved.elapsed() < Duration::from_millis(200) {
        std::thread::yield_now();
    }
    Ok((first, context.should_stop()))
}

/// What it gives and in how many attempts, if something else happens when it has saved once.
fn last_saved(local: &Local, scaling: Scaling, happens: impl FnOnce() + Send) -> (Vec<(u32, bool)>, u32) {
    let (dir, goes) = (local.dir.path().to_owned(), local.dir.path().join("goes"));
    let saved = dir.join("saved");
    let (report, reported) = mpsc::channel();
    let trainer = TorchTrainer::function(move |context| saves_last::remote(context, dir.clone()))
        .scaling(scaling)
        .storage(&local.storage())
        .on_notice(move |notice| {
            if notice.contains("is drained") || notice.contains("there is room for 2 ranks") {
                std::fs::write(&goes, "").unwrap();
            }
        })
        .on_progress(move |progress| {
            // Once there was one, nobody waits for more.
            let _ = report.send(progress.reports);
        });
    let returned = std::thread::scope(|scope| {
        scope.spawn(move || {
            assert!(reported.iter().any(|reports| reports == 1));
            // It is stored, so that the next is the first after what happens.
            while !saved.exists() {
                std::thread::yield_now();
            }
            happens();
        });
        fit(trainer).unwrap()
    });
    (returned.values, returned.result.attempts)
}

#[test]
fn a_run_that_ends_after_its_last_checkpoint_does_not_begin_again_on_another_node() {
    let cluster = TestCluster::start(2, 1).unwrap();
    let local = Local::at(&cluster);
    let node = local.dir.path().join("node");
    let drain = || {
        let drain = cluster.command().unwrap().args(["drain", &std::fs::read_to_string(node).unwrap()]).status();
        assert!(drain.unwrap().success());
    };
    assert_eq!(last_saved(&local, Scaling::workers(1), drain), (vec![(0, false)], 1));
}

#[test]
fn a_run_that_ends_after_its_last_checkpoint_does_not_begin_again_with_more_ranks() {
    let mut cluster = TestCluster::start(1, 1).unwrap();
    let local = Local::at(&cluster);
    let grown = &mut cluster;
    let grow = move || grown.add_node(&["--num-cpus", "1"]).map(drop).unwrap();
    assert_eq!(last_saved(&local, Scaling::workers(1).elastic(1..=2), grow), (vec![(0, false)], 1));
}

#[test]
fn an_elastic_group_goes_on_with_fewer_ranks_when_a_node_is_lost() {
    let mut cluster = TestCluster::start(2, 1).unwrap();
    let _local = Local::at(&cluster);
    let (report, reported) = mpsc::channel();
    let trainer = TorchTrainer::function(waits_for_a_loss::remote)
        .scaling(Scaling::workers(2).elastic(1..=2))
        .max_failures(1)
        .on_notice(|_| {})
        .on_progress(move |progress| {
            // Once there was one, nobody waits for more.
            let _ = report.send(progress.reports);
        });
    let lost = &mut cluster;
    let returned = std::thread::scope(|scope| {
        scope.spawn(move || {
            assert!(reported.iter().any(|reports| reports == 1));
            lost.kill_node(1).unwrap();
        });
        fit(trainer).unwrap()
    });
    assert_eq!((returned.values, returned.result.attempts), (vec![1], 2));
}

#[test]
fn a_run_may_be_awaited_in_a_runtime_of_the_program_s_own() {
    let local = Local::start();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    assert_eq!(runtime.block_on(local.saving(1, false).fit()).unwrap().result.checkpoints.len(), 1);
}
