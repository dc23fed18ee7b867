//! The guard of a node's worker processes is killed, as the kernel does when memory runs out: the node ends and says why,
//! nobody waits for ever, and nothing that user code had started is left.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::ffi::CString;
use std::future::IntoFuture;
use std::path::PathBuf;
use std::time::Duration;

use common::{Local, Started, runs_again_with};
use rustix::process::{Pid, Signal, kill_process};
use wingbeat::{Error, ObjectRef};
use wingbeat_tests::{TestCluster, is_alive, is_root, poll, wait_for_end};

/// Only something that hangs takes so long.
const LIMIT: Duration = Duration::from_secs(60);

/// Starts processes that leave their session, one of them without its environment, whose parents are gone; tells their ids
/// after its own, and stays.
#[wingbeat::remote]
fn starts_orphans_and_stays(started: PathBuf) -> u64 {
    let list = started.with_extension("list");
    let script = "setsid sh -c 'echo $$ >> $LIST; exec sleep 1000' & \
                  env -i LIST=$LIST setsid sh -c 'echo $$ >> $LIST; exec sleep 1000' & exit";
    let status = std::process::Command::new("sh").args(["-c", script]).env("LIST", &list).status().unwrap();
    assert!(status.success());
    let are_all = |pids: &String| pids.lines().count() == 2 && pids.ends_with('\n');
    let pids = poll(LIMIT, || std::fs::read_to_string(&list).ok().filter(are_all))
        .unwrap_or_else(|| panic!("not all of them begin"));
    std::fs::write(started.with_extension("tmp"), format!("{}\n{pids}", std::process::id())).unwrap();
    std::fs::rename(started.with_extension("tmp"), started).unwrap();
    loop {
        std::thread::park();
    }
}

#[wingbeat::remote]
fn square(x: u64) -> u64 {
    x * x
}

fn parent_of(pid: u32) -> u32 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    stat.rsplit(')').next().unwrap().split_whitespace().nth(1).unwrap().parse().unwrap()
}

fn kill(pid: u32) {
    kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::KILL).unwrap();
}

/// A task that runs and has started processes, with the ids of those and its own, of its guard and of who watches that.
struct Running {
    task: ObjectRef<u64>,
    pids: Vec<u32>,
    guard: u32,
    watch: u32,
}

fn run() -> Running {
    let started = Started::new();
    let task = starts_orphans_and_stays::options().max_retries(0).remote(started.path());
    started.wait();
    let pids = std::fs::read_to_string(started.path()).unwrap();
    let pids: Vec<u32> = pids.lines().map(|pid| pid.parse().unwrap()).collect();
    let keeper = parent_of(pids[0]);
    assert_eq!(parent_of(pids[1]), keeper, "orphans fall to the keeper");
    let guard = parent_of(keeper);
    Running { task, pids, guard, watch: parent_of(guard) }
}

/// What the task's owner is told within the limit.
fn told(task: &ObjectRef<u64>) -> Error {
    let error = wingbeat::block_on(task.get_timeout(LIMIT)).unwrap_err();
    assert!(!matches!(error, Error::TimedOut { .. }), "the task's owner waits for ever: {error}");
    error
}

fn names_the_guard(error: &Error) -> bool {
    let text = error.to_string();
    matches!(error, Error::NodeDied { .. } | Error::SessionEnded { .. })
        && text.contains("wingbeat-guard (pid ")
        && text.contains("was killed by signal 9")
}

fn a_private_cluster_ends_when(kills: impl Fn(&Running)) -> Running {
    let _local = Local::start(2);
    let running = run();
    kills(&running);
    let error = told(&running.task);
    assert!(names_the_guard(&error), "{error}");
    // Nothing will run any more, and whoever asks for it hears so.
    told(&square::remote(3));
    running
}

#[test]
fn a_private_cluster_whose_guard_is_killed_ends_and_leaves_nothing() {
    let running = a_private_cluster_ends_when(|running| kill(running.guard));
    for pid in running.pids {
        assert!(wait_for_end(pid, LIMIT), "pid {pid} is left");
    }
}

#[test]
fn a_private_cluster_whose_guard_loses_its_watch_ends_and_leaves_nothing() {
    let running = a_private_cluster_ends_when(|running| kill(running.watch));
    for pid in running.pids {
        assert!(wait_for_end(pid, LIMIT), "pid {pid} is left");
    }
}

#[test]
fn a_node_whose_guard_is_killed_ends_and_its_tasks_are_told_why() {
    let mut cluster = TestCluster::start(1, 2).unwrap();
    let init = wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap());
    let session = wingbeat::block_on(init.global(false).log_to_driver(false).into_future()).unwrap();
    let _entered = session.enter();
    let running = run();
    kill(running.guard);
    let error = told(&running.task);
    assert!(names_the_guard(&error), "{error}");
    assert!(!cluster.wait_for_node_end(0).unwrap(), "it ended in order");
    for pid in running.pids {
        assert!(wait_for_end(pid, LIMIT), "pid {pid} is left");
    }
    // Another node serves the driver.
    cluster.add_node(&["--num-cpus", "1"]).unwrap();
    assert_eq!(square::remote(3).get_blocking().unwrap(), 9);
    wingbeat::block_on(session.shutdown());
}

#[test]
fn what_a_node_without_its_guard_was_to_start_runs_elsewhere() {
    let mut cluster = TestCluster::start(1, 2).unwrap();
    let init = wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap());
    let _driver = Local::from(init);
    let node = cluster.node_pid(0).unwrap();
    let signal = |pid: u32, signal| kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
    // What it is told meanwhile it hears together with the end of its guard.
    signal(node, Signal::STOP);
    for guard in children(node) {
        kill(guard);
    }
    let tasks: Vec<_> = (0..20).map(square::remote).collect();
    let has_leases = || (cluster.state().unwrap()["nodes"][0]["leases"] != 0).then_some(());
    assert!(poll(LIMIT, has_leases).is_some(), "the node has no lease");
    cluster.add_node(&["--num-cpus", "2"]).unwrap();
    signal(node, Signal::CONT);
    let results: Vec<u64> = tasks.iter().map(|task| wingbeat::block_on(task.get_timeout(LIMIT)).unwrap()).collect();
    assert_eq!(results, (0..20).map(|x| x * x).collect::<Vec<u64>>());
}

/// A file system that answers nothing, as of a file server that is away.
struct SilentFiles {
    at: tempfile::TempDir,
    _asked: std::fs::File,
}

impl SilentFiles {
    fn mount() -> SilentFiles {
        let asked = std::fs::File::options().read(true).write(true).open("/dev/fuse").unwrap();
        let at = tempfile::tempdir().unwrap();
        let path = CString::new(at.path().to_str().unwrap()).unwrap();
        let fd = std::os::fd::AsRawFd::as_raw_fd(&asked);
        let options = CString::new(format!("fd={fd},rootmode=40000,user_id=0,group_id=0")).unwrap();
        // SAFETY: texts that live until it returns.
        let mounted =
            unsafe { libc::mount(c"silent".as_ptr(), path.as_ptr(), c"fuse".as_ptr(), 0, options.as_ptr().cast()) };
        assert_eq!(mounted, 0, "{}", std::io::Error::last_os_error());
        SilentFiles { at, _asked: asked }
    }

    /// A driver whose worker processes are to begin there.
    fn driver(&self, cluster: &TestCluster) -> Local {
        let init = wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap());
        Local::from(init.working_dir(self.at.path()))
    }
}

impl Drop for SilentFiles {
    fn drop(&mut self) {
        let path = CString::new(self.at.path().to_str().unwrap()).unwrap();
        // SAFETY: a text that lives until it returns.
        unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) };
    }
}

/// The keepers of a node.
fn keepers(cluster: &TestCluster) -> Vec<u32> {
    let watches = children(cluster.node_pid(0).unwrap());
    let below = watches.into_iter().flat_map(children).flat_map(children);
    let is_keeper = |pid: &u32| {
        std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim_end() == "wingbeat-keeper")
    };
    below.filter(is_keeper).collect()
}

#[test]
fn a_start_in_a_folder_that_does_not_answer_holds_up_nobody_else() {
    if !is_root().unwrap() {
        return;
    }
    let files = SilentFiles::mount();
    // Longer than the test.
    let cluster =
        TestCluster::with_env(1, 2, &[("WINGBEAT_SPAWN_MS", "3600000"), ("WINGBEAT_START_MS", "3600000")]).unwrap();
    let hangs = files.driver(&cluster);
    let task = square::options().max_retries(0).remote(2);
    let stands = poll(LIMIT, || keepers(&cluster).first().copied()).unwrap();
    {
        let _other = Local::from(wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap()));
        assert_eq!(wingbeat::block_on(square::remote(3).get_timeout(LIMIT)).unwrap(), 9);
        // Others are ended, too.
        let running = run();
        running.task.cancel_force();
        assert!(running.pids.iter().all(|pid| wait_for_end(*pid, LIMIT)));
    }
    assert!(is_alive(stands));
    // And so is the one that stands.
    drop((task, hangs));
    assert!(wait_for_end(stands, LIMIT));
    let is_free = || (cluster.state().unwrap()["nodes"][0]["leases"] == 0).then_some(());
    assert!(poll(LIMIT, is_free).is_some(), "its lease is not given back");
}

#[test]
fn a_start_in_a_folder_that_does_not_answer_fails_with_the_folder() {
    if !is_root().unwrap() {
        return;
    }
    let files = SilentFiles::mount();
    let cluster = TestCluster::with_env(1, 1, &[("WINGBEAT_SPAWN_MS", "100")]).unwrap();
    let _driver = files.driver(&cluster);
    let error = wingbeat::block_on(square::remote(2).get_timeout(LIMIT)).unwrap_err().to_string();
    let folder = files.at.path().to_str().unwrap();
    assert!(error.contains(folder) && error.contains("does not answer"), "{error}");
}

#[wingbeat::remote]
fn ends_at_first(begun: PathBuf) -> u32 {
    if !begun.exists() {
        std::fs::write(begun, "").unwrap();
        kill(std::process::id());
    }
    std::process::id()
}

/// As some supervisors and the entry points of some containers do.
#[test]
fn ends_of_worker_processes_are_noticed_also_where_sigchld_is_ignored() {
    if runs_again_with("ends_of_worker_processes_are_noticed_also_where_sigchld_is_ignored", &[]) {
        return;
    }
    // SAFETY: a plain call; nothing in this process waits for a child but what is tested.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
    let dir = tempfile::tempdir().unwrap();
    let _local = Local::start(1);
    let again = ends_at_first::remote(dir.path().join("begun"));
    assert!(wingbeat::block_on(again.get_timeout(LIMIT)).is_ok());
}

/// A supervisor sends it to all processes of a service; the guard and its keepers leave it to the daemon.
#[test]
fn a_sigterm_to_the_guard_and_its_keepers_ends_nobody() {
    let _local = Local::start(2);
    let running = run();
    let keeper = parent_of(running.pids[0]);
    for pid in [running.watch, running.guard, keeper] {
        // The keeper ends its worker process at a signal of the guard's, and of nobody else's.
        for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGRTMIN()] {
            // SAFETY: a plain call.
            assert_eq!(unsafe { libc::kill(pid as i32, signal) }, 0);
        }
    }
    // The guard goes on to start and to end processes.
    let dir = tempfile::tempdir().unwrap();
    let again = ends_at_first::remote(dir.path().join("begun"));
    assert!(wingbeat::block_on(again.get_timeout(LIMIT)).is_ok());
    assert!([running.watch, running.guard, keeper, running.pids[0]].into_iter().all(is_alive));
    running.task.cancel_force();
    told(&running.task);
    assert!(wait_for_end(running.pids[0], LIMIT), "the keeper does not end it");
}

/// What a process has started itself.
fn children(pid: u32) -> Vec<u32> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let children = threads.map(|thread| std::fs::read_to_string(thread.unwrap().path().join("children")).unwrap());
    children.flat_map(|pids| pids.split_whitespace().map(|pid| pid.parse().unwrap()).collect::<Vec<u32>>()).collect()
}
