//! Groups of ranks, with a script that needs no torch, and one that does.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::future::IntoFuture;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use wingbeat::{Session, SessionGuard};
use wingbeat_train::{Scaling, TorchTrainer, TrainError};

struct Local {
    session: Session,
    _entered: SessionGuard,
    dir: tempfile::TempDir,
}

impl Local {
    fn start() -> Local {
        let session = wingbeat::block_on(wingbeat::init().num_cpus(2).global(false).into_future()).unwrap();
        Local { _entered: session.enter(), session, dir: tempfile::tempdir().unwrap() }
    }

    fn script(&self, text: &str) -> PathBuf {
        let path = self.dir.path().join("script.py");
        std::fs::write(&path, text).unwrap();
        path
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        wingbeat::block_on(self.session.shutdown());
    }
}

fn run(trainer: TorchTrainer) -> (Result<wingbeat_train::TrainResult, TrainError>, Vec<String>) {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let seen = lines.clone();
    let trainer = trainer.on_output(move |rank, line| seen.lock().unwrap().push(format!("{rank}: {}", line.text)));
    let result = wingbeat::block_on(trainer.fit());
    let mut lines = lines.lock().unwrap().clone();
    lines.sort();
    (result, lines)
}

fn system_python() -> String {
    std::env::var("WINGBEAT_PYTHON").unwrap_or_else(|_| "python3".into())
}

#[test]
fn every_rank_has_torchruns_environment_and_its_arguments() {
    let local = Local::start();
    let script = local.script(
        "import os, sys\nprint(*[os.environ[k] for k in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'GROUP_RANK', 'WINGBEAT_BACKEND')], *sys.argv[1:])\n",
    );
    let (result, lines) =
        run(TorchTrainer::script(script).args(["--x", "1"]).scaling(Scaling::workers(2)).python(system_python()));
    assert_eq!(result.unwrap().ranks, 2);
    assert_eq!(lines, ["0: 0 0 2 0 gloo --x 1", "1: 1 1 2 0 gloo --x 1"]);
}

#[test]
fn one_failing_rank_ends_the_group_and_its_traceback_is_the_error() {
    let local = Local::start();
    let script = local
        .script("import os, signal\nif os.environ['RANK'] == '1':\n    raise ValueError('no luck')\nsignal.pause()\n");
    let (result, _) = run(TorchTrainer::script(script).scaling(Scaling::workers(2)).python(system_python()));
    match result.unwrap_err() {
        TrainError::RankFailed { rank, code, python_error, .. } => {
            let error = python_error.unwrap();
            assert_eq!((rank, code), (1, Some(1)));
            assert!(error.traceback.contains("no luck") && error.kind.contains("ValueError"), "{error:?}");
        }
        other => panic!("{other}"),
    }
}

#[test]
fn a_module_runs_as_with_python_m_and_its_traceback_is_the_error() {
    let local = Local::start();
    std::fs::write(local.dir.path().join("lucky.py"), "raise ValueError('no luck')\n").unwrap();
    let path = local.dir.path().display().to_string();
    let trainer = TorchTrainer::module("lucky").env("PYTHONPATH", &path).python(system_python());
    match run(trainer).0.unwrap_err() {
        TrainError::RankFailed { rank: 0, python_error: Some(error), .. } => {
            assert!(error.traceback.contains("no luck"))
        }
        other => panic!("{other}"),
    }
}

#[test]
fn a_rank_whose_actor_is_lost_is_named() {
    let local = Local::start();
    let script = local.script(
        "import os, signal\nif os.environ['RANK'] == '1':\n    os.kill(os.getppid(), signal.SIGKILL)\nsignal.pause()\n",
    );
    // Its actor is the parent of a rank that is not forked.
    let (result, _) = run(TorchTrainer::script(script).scaling(Scaling::workers(2)).cold().python(system_python()));
    match result.unwrap_err() {
        TrainError::RankLost { rank, node, cause } => {
            assert_eq!(rank, 1);
            assert!(!node.is_empty() && matches!(*cause, wingbeat::Error::ActorDied { .. }), "{cause}");
        }
        other => panic!("{other}"),
    }
}

#[test]
fn a_group_is_started_again_within_its_budget() {
    let local = Local::start();
    let marker = local.dir.path().join("marker");
    let script = local.script(
        "import os, sys\nm = sys.argv[1]\nif os.environ['RANK'] == '0' and not os.path.exists(m):\n    open(m, 'w').close()\n    os._exit(7)\nprint('attempt', os.environ['TORCHELASTIC_RESTART_COUNT'])\n",
    );
    let trainer = TorchTrainer::script(&script)
        .args([marker.display().to_string()])
        .scaling(Scaling::workers(2))
        .python(system_python());
    let (result, lines) = run(trainer.max_failures(1));
    assert_eq!(result.unwrap().attempts, 2);
    assert!(lines.contains(&"0: attempt 1".to_owned()), "{lines:?}");
}

#[test]
fn what_is_missing_is_named() {
    let local = Local::start();
    let (result, _) = run(TorchTrainer::script("no/such/script.py").python(system_python()));
    assert!(matches!(result, Err(TrainError::ScriptNotFound { .. })), "{result:?}");
    let script = local.script("import torch\n");
    let (result, _) = run(TorchTrainer::script(&script).python("no-such-python"));
    assert!(matches!(result, Err(TrainError::PythonNotFound { .. })), "{result:?}");
    let (result, _) =
        run(TorchTrainer::script(&script).scaling(Scaling::workers(64).cpus_per_worker(64.0)).python(system_python()));
    assert!(matches!(result, Err(TrainError::NotEnoughResources { .. })), "{result:?}");
    // Each would fit, and all of them never do.
    let (result, _) = run(TorchTrainer::script(&script).scaling(Scaling::workers(3)).python(system_python()));
    match result.unwrap_err() {
        TrainError::NotEnoughResources { workers: 3, why, .. } => assert!(why.contains("have 2 CPU of the 3"), "{why}"),
        other => panic!("{other}"),
    }
    // An interpreter that is isolated from every installed package.
    let bare = local.dir.path().join("python");
    let text = format!("#!/bin/sh\nexec {} -S -E \"$@\"\n", which(&system_python()));
    std::fs::write(&bare, text).unwrap();
    std::fs::set_permissions(&bare, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let (result, _) = run(TorchTrainer::script(&script).python(bare.display().to_string()));
    assert!(matches!(result, Err(TrainError::TorchMissing { .. })), "{result:?}");
}

fn which(name: &str) -> String {
    let output = std::process::Command::new(name).args(["-c", "import sys; print(sys.executable)"]).output().unwrap();
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

#[test]
fn what_a_rank_leaves_behind_does_not_hold_up_its_end() {
    let local = Local::start();
    let script = local.script(
        "import os, signal, subprocess\nsubprocess.Popen(['sleep', '1000'])\nsubprocess.Popen(['timeout', '60', 'yes'], start_new_session=True)\nif os.environ['RANK'] == '1':\n    os.kill(os.getpid(), signal.SIGKILL)\nsignal.pause()\n",
    );
    let (result, _) = run(TorchTrainer::script(script).scaling(Scaling::workers(2)).python(system_python()));
    match result.unwrap_err() {
        TrainError::RankFailed { rank, code, exit, .. } => {
            assert_eq!((rank, code, exit.as_str()), (1, None, "was killed by signal 9"));
        }
        other => panic!("{other}"),
    }
}

#[test]
fn the_first_failure_is_the_error_though_it_is_heard_of_last() {
    let local = Local::start();
    // Rank 0 fails because rank 1 has ended, and rank 1 has printed much before it did.
    let script = local.script(
        "import os, socket, sys\npath = sys.argv[1]\nif os.environ['RANK'] == '0':\n    server = socket.socket(socket.AF_UNIX)\n    server.bind(path + '.new')\n    server.listen()\n    os.rename(path + '.new', path)\n    server.accept()[0].recv(1)\n    raise ConnectionError('the consequence')\npeer = socket.socket(socket.AF_UNIX)\nwhile True:\n    try:\n        peer.connect(path)\n        break\n    except OSError:\n        os.sched_yield()\nfor i in range(2000):\n    print(i)\nraise ValueError('the cause')\n",
    );
    let socket = local.dir.path().join("socket").display().to_string();
    let (result, lines) =
        run(TorchTrainer::script(script).args([socket]).scaling(Scaling::workers(2)).python(system_python()));
    let error = result.unwrap_err();
    assert!(
        matches!(&error, TrainError::RankFailed { rank: 1, .. }) && error.to_string().contains("the cause"),
        "{error}"
    );
    assert!(lines.contains(&"1: 1999".to_owned()));
}

#[test]
fn a_rank_that_ignores_sigterm_is_gone_when_the_run_is_over() {
    let local = Local::start();
    let script = local.script(
        "import fcntl, os, signal, sys\nlock = open(sys.argv[1], 'a')\nif os.environ['RANK'] == '0':\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    fcntl.flock(lock, fcntl.LOCK_EX)\n    open(sys.argv[1] + '.held', 'w').close()\n    while True:\n        signal.pause()\nwhile not os.path.exists(sys.argv[1] + '.held'):\n    os.sched_yield()\nsys.exit(9)\n",
    );
    let lock = local.dir.path().join("lock");
    let trainer = TorchTrainer::script(script).args([lock.display().to_string()]).scaling(Scaling::workers(2));
    let (result, _) = run(trainer.python(system_python()));
    assert!(matches!(result, Err(TrainError::RankFailed { rank: 1, code: Some(9), .. })), "{result:?}");
    std::fs::File::open(lock).unwrap().try_lock().unwrap();
}

#[test]
fn a_library_that_misses_torch_is_not_the_script() {
    let local = Local::start();
    let script = local.script(
        "import sys\nprint(\"optional: No module named 'torch'\", file=sys.stderr)\nraise KeyError('the cause')\n",
    );
    let (result, _) = run(TorchTrainer::script(script).python(system_python()));
    assert!(matches!(result, Err(TrainError::RankFailed { .. })), "{result:?}");
}

#[test]
fn ranks_reduce_with_gloo() {
    let made = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.venv/bin/python");
    let venv = std::env::var_os("WINGBEAT_PYTHON").map_or(made, PathBuf::from);
    assert!(venv.exists(), "{} is not there; `cargo xtask test` makes .venv with torch", venv.display());
    let local = Local::start();
    let script = local.script(
        "import torch, torch.distributed as d\nd.init_process_group('gloo')\nx = torch.ones(4)\nd.all_reduce(x)\nassert x[0] == d.get_world_size()\nd.barrier()\nd.destroy_process_group()\nprint('reduced')\n",
    );
    let (result, lines) =
        run(TorchTrainer::script(script).scaling(Scaling::workers(2)).python(venv.display().to_string()));
    result.unwrap();
    assert_eq!(lines.iter().filter(|line| line.ends_with("reduced")).count(), 2, "{lines:?}");
}

#[test]
fn a_run_is_watched_and_stopped_by_its_handle() {
    let local = Local::start();
    let script = local.script(
        "import itertools\nfrom wingbeat import train\nfor step in itertools.count():\n    train.report({'step': step, 'rank': train.get_context().world_rank})\n",
    );
    let trainer = TorchTrainer::script(script).scaling(Scaling::workers(2)).python(system_python());
    let mut run = trainer.start().unwrap();
    let seen = wingbeat::block_on(async {
        loop {
            let progress = run.changed().await.unwrap();
            if progress.reports >= 3 {
                return progress;
            }
        }
    });
    assert_eq!((seen.attempt, seen.ranks.len()), (0, 2));
    assert_eq!([seen.ranks[0].metrics["rank"], seen.ranks[1].metrics["rank"]], [0.0, 1.0]);
    assert!(seen.ranks[0].metrics["step"] >= 2.0);
    run.stop();
    let result = wingbeat::block_on(run.result());
    assert!(matches!(result, Err(TrainError::Stopped { .. })), "{result:?}");
}

/// Prints, and goes on until it is ended.
const ENDLESS: &str = "import signal\nprint('begun', flush=True)\nsignal.pause()\n";

fn on_this_thread<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

#[test]
fn a_run_that_is_dropped_gives_back_what_it_held() {
    let local = Local::start();
    let begun = Arc::new(tokio::sync::Notify::new());
    let told = begun.clone();
    let both = Scaling::workers(2);
    let endless = TorchTrainer::script(local.script(ENDLESS)).scaling(both.clone()).python(system_python());
    let endless = endless.on_output(move |_, _| told.notify_one());
    on_this_thread(async {
        tokio::select! {
            ended = endless.fit() => panic!("{ended:?}"),
            () = begun.notified() => {}
        }
    });
    let (result, _) = run(TorchTrainer::script(local.script("")).scaling(both).python(system_python()));
    assert_eq!(result.unwrap().ranks, 2);
}

#[test]
fn a_panic_in_a_function_of_the_user_s_is_theirs_and_gives_back_what_was_held() {
    let local = Local::start();
    let both = Scaling::workers(2);
    let trainer = || TorchTrainer::script(local.script(ENDLESS)).scaling(both.clone()).python(system_python());
    let printed = trainer().on_output(|_, line| panic!("on {}", line.text));
    let progressed = trainer().on_progress(|_| panic!("on progress"));
    for (trainer, expected) in [(printed, "on begun"), (progressed, "on progress")] {
        let run = trainer.start().unwrap();
        let waiting = std::panic::AssertUnwindSafe(|| wingbeat::block_on(run.result()));
        let panic = std::panic::catch_unwind(waiting).unwrap_err();
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        assert_eq!(text.as_deref(), Some(expected));
    }
    let (result, _) = run(TorchTrainer::script(local.script("")).scaling(both).python(system_python()));
    assert_eq!(result.unwrap().ranks, 2);
}

#[test]
fn a_run_that_was_stopped_tells_how_far_it_had_come() {
    let local = Local::start();
    let script = local.script(
        "import sys, tempfile\nfrom wingbeat import train\nfor step in range(1, 3):\n    with tempfile.TemporaryDirectory(dir=sys.argv[1]) as folder:\n        \
         train.report({'step': step}, checkpoint=folder)\nimport signal\nsignal.pause()\n",
    );
    let storage = local.dir.path().join("storage").display().to_string();
    let folder = local.dir.path().display().to_string();
    let trainer = TorchTrainer::script(script).args([folder]).python(system_python()).storage(&storage);
    let stopper = trainer.stopper();
    let trainer = trainer.on_progress(move |progress| {
        if progress.reports == 2 {
            stopper.stop();
        }
    });
    match run(trainer).0.unwrap_err() {
        TrainError::Stopped { so_far } => {
            assert_eq!((so_far.ranks, so_far.attempts, so_far.metrics["step"]), (1, 1, 2.0));
            assert!(so_far.checkpoint.is_some_and(|checkpoint| checkpoint.number >= 1));
        }
        other => panic!("{other}"),
    }
}

#[test]
fn clones_of_a_trainer_run_one_after_the_other() {
    let local = Local::start();
    let base = TorchTrainer::script(local.script("print('ran')\n")).python(system_python());
    for _ in 0..2 {
        wingbeat::block_on(base.clone().start().unwrap().result()).unwrap();
    }
    run(base).0.unwrap();
}
