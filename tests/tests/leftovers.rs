//! Whoever of a cluster is killed, while processes are launched, nothing is left of what user code had started, however that had hidden itself.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::BTreeMap;
use std::future::IntoFuture;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use wingbeat_tests::{Process, TestCluster, parent, poll};

/// Only something that hangs takes so long.
const LIMIT: Duration = Duration::from_secs(90);

/// Says where the cluster is, and where the task tells what it has started, when the test starts itself again as a driver.
const DRIVER: &str = "WINGBEAT_TEST_LEFTOVERS";

/// What user code starts and leaves behind: `NOTE` writes the name and the process id down, and sleeps.
const KINDS: [(&str, &str); 5] = [
    ("child", "exec NOTE"),
    ("grandchild in a session of its own", "setsid NOTE & wait"),
    ("orphan in a session of its own", "setsid NOTE & exit"),
    ("orphan without its environment", "env -i setsid NOTE & exit"),
    ("orphan that becomes another program", "setsid BECOME & exit"),
];

/// Starts one process of each kind, and stays. Its own process id stands in the list, too.
#[wingbeat::remote(max_retries = 0)]
#[allow(clippy::zombie_processes, reason = "whoever ends the task must end its children too")]
fn leaves_behind(list: PathBuf) {
    let notes = list.with_extension("notes");
    for (number, (_, script)) in KINDS.iter().enumerate() {
        let note = |file: &str, then: &str| {
            let file = list.with_extension(format!("{number}.{file}"));
            std::fs::write(&file, format!("echo {number} $$ >> {}\n{then}\n", notes.display())).unwrap();
            format!("sh {}", file.display())
        };
        let again = list.with_extension("again");
        std::fs::write(&again, "exec sh \"$0\"\n").unwrap();
        let script = script.replace("NOTE", &note("note", "exec sleep 1000"));
        let script = script.replace("BECOME", &note("become", &format!("exec sh {}", again.display())));
        Command::new("sh").args(["-c", &script]).spawn().unwrap();
    }
    let are_all = |noted: &String| noted.lines().count() == KINDS.len() && noted.ends_with('\n');
    let noted = poll(LIMIT, || std::fs::read_to_string(&notes).ok().filter(are_all))
        .unwrap_or_else(|| panic!("not all of them begin"));
    std::fs::write(list.with_extension("tmp"), format!("{noted}process {}\n", std::process::id())).unwrap();
    std::fs::rename(list.with_extension("tmp"), list).unwrap();
    loop {
        std::thread::park();
    }
}

/// Has its process end, so that the next needs another.
#[wingbeat::remote(max_retries = 0)]
fn ends_its_process() {
    std::process::exit(0);
}

#[wingbeat::remote(num_gpus = 1)]
fn has_the_gpu() -> bool {
    true
}

/// In the environment of the worker processes of a driver: its list.
const MARK: &str = "WINGBEAT_TEST_MARK";

fn join(address: &str, token: &str, mark: &str) -> wingbeat::Session {
    let init = wingbeat::init_at(address).token(token).global(false).log_to_driver(false).env(MARK, mark);
    wingbeat::block_on(init.into_future()).unwrap()
}

/// The processes in whose environment this is.
fn with(variable: &str, value: &Path) -> Vec<Process> {
    let entry = format!("{variable}={}", value.display());
    let has_it = |pid: &u32| {
        let environ = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environ.split(|byte| *byte == 0).any(|other| other == entry.as_bytes())
    };
    let pids =
        std::fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(has_it).filter_map(Process::of).collect()
}

/// A cluster of one node and a driver whose task has left processes behind.
struct Scene {
    cluster: TestCluster,
    driver: Child,
    list: PathBuf,
    worker: Process,
    keeper: Process,
    guard: Process,
    watch: Process,
    node: Process,
    /// What the task has started, by kind.
    left: BTreeMap<&'static str, Process>,
}

impl Scene {
    fn begin(dir: &Path, number: usize) -> Scene {
        let mut cluster = TestCluster::start(0, 1).unwrap();
        cluster.add_node(&["--num-cpus", "2", "--pretend-gpus", "1"]).unwrap();
        let list = dir.join(format!("list{number}"));
        let told = [cluster.address(), &cluster.token().unwrap(), list.to_str().unwrap()].join("\n");
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "nothing_is_left_whoever_is_killed"]).env(DRIVER, told);
        let mut driver = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let lines = poll(LIMIT, || match std::fs::read_to_string(&list) {
            Ok(lines) => Some(Some(lines)),
            Err(_) => driver.try_wait().unwrap().map(|_| None),
        });
        let lines = lines.flatten().unwrap_or_else(|| panic!("the task has started nothing"));
        let mut noted: BTreeMap<&str, Process> = lines
            .lines()
            .map(|line| {
                let (what, pid) = line.split_once(' ').unwrap();
                (what, there(pid.parse().unwrap()))
            })
            .collect();
        let worker = noted.remove("process").unwrap();
        let left = noted.into_iter().map(|(number, pid)| (KINDS[number.parse::<usize>().unwrap()].0, pid)).collect();
        let above = |process: Process| there(parent(process.pid));
        let keeper = above(worker);
        let guard = above(keeper);
        let (watch, node) = (above(guard), there(cluster.node_pid(0).unwrap()));
        assert_eq!(parent(watch.pid), node.pid);
        Scene { cluster, driver, list, worker, keeper, guard, watch, node, left }
    }

    /// What is alive after the limit of the task, and of its node where that has ended, but for what may be.
    fn what_is_left(&self, row: &Row) -> Vec<&'static str> {
        let of_node = [("guard", self.guard), ("watch", self.watch), ("node", self.node)];
        let of_node = of_node.into_iter().filter(|_| !row.node_lives);
        let of_task = [("worker process", self.worker), ("keeper", self.keeper)];
        let started = self.left.iter().map(|(kind, process)| (*kind, *process)).chain(of_task).chain(of_node);
        let started: Vec<_> = started.filter(|(kind, _)| !row.may_be_left.contains(kind)).collect();
        let alive = || started.iter().filter(|(_, process)| process.is_alive()).map(|(kind, _)| *kind);
        poll(LIMIT, || alive().next().is_none().then_some(()));
        alive().collect()
    }

    /// What is alive after the limit of a node that has ended and of what it had launched beside the task, also in the moment in
    /// which somebody was killed. Where the node goes on, the driver does, and has others launched.
    fn launched(&self, row: &Row) -> impl Iterator<Item = Process> + use<> {
        let known: Vec<Process> =
            self.left.values().copied().chain(self.cluster.head_pid().and_then(Process::of)).collect();
        let launched = || {
            let token = self.cluster.folder().join("token");
            let all = [with(MARK, &self.list), with("WINGBEAT_TOKEN_FILE", &token)].concat();
            all.into_iter().filter(|process| process.is_alive() && !known.contains(process)).collect::<Vec<_>>()
        };
        if !row.node_lives {
            poll(LIMIT, || launched().is_empty().then_some(()));
        }
        let left = if row.node_lives { Vec::new() } else { launched() };
        left.into_iter()
    }

    /// Whether the GPU of the node is given to somebody else.
    fn gpu_is_free(&self) -> bool {
        let session = join(self.cluster.address(), &self.cluster.token().unwrap(), "");
        let entered = session.enter();
        let has_it = wingbeat::block_on(has_the_gpu::remote().get_timeout(LIMIT)).unwrap_or(false);
        drop(entered);
        wingbeat::block_on(session.shutdown());
        has_it
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        let _ = self.driver.kill();
        let _ = self.driver.wait();
        for process in self.left.values().chain([&self.worker]) {
            process.signal(Signal::KILL);
        }
        let _ = std::fs::remove_file(&self.list);
    }
}

fn there(pid: u32) -> Process {
    Process::of(pid).unwrap_or_else(|| panic!("a process ended before anybody was killed"))
}

/// All at the same moment: nobody sees the end of another. Some may have ended by themselves when others were killed.
fn kill(processes: &[Process]) {
    for process in processes {
        process.signal(Signal::STOP);
    }
    for process in processes {
        process.signal(Signal::KILL);
    }
}

struct Row {
    killed: &'static str,
    who: fn(&Scene) -> Vec<Process>,
    /// The node goes on, and others get the GPU.
    node_lives: bool,
    /// What nobody can find.
    may_be_left: &'static [&'static str],
}

const ROWS: [Row; 11] = [
    Row { killed: "the worker process", who: |scene| vec![scene.worker], node_lives: true, may_be_left: &[] },
    Row { killed: "its keeper", who: |scene| vec![scene.keeper], node_lives: true, may_be_left: &[] },
    Row {
        killed: "the worker process and its keeper",
        who: |scene| vec![scene.worker, scene.keeper],
        node_lives: true,
        may_be_left: &[],
    },
    Row { killed: "the guard", who: |scene| vec![scene.guard], node_lives: false, may_be_left: &[] },
    Row { killed: "the guard's parent", who: |scene| vec![scene.watch], node_lives: false, may_be_left: &[] },
    Row {
        killed: "the guard and its parent",
        who: |scene| vec![scene.watch, scene.guard],
        node_lives: false,
        may_be_left: &[],
    },
    Row {
        killed: "the guard, its parent and the keeper",
        who: |scene| vec![scene.watch, scene.guard, scene.keeper],
        node_lives: false,
        // It belongs to nobody, and nothing in it says whose it was.
        may_be_left: &["orphan without its environment"],
    },
    Row { killed: "the node", who: |scene| vec![scene.node], node_lives: false, may_be_left: &[] },
    Row {
        killed: "the node, the guard and its parent",
        who: |scene| vec![scene.node, scene.watch, scene.guard],
        node_lives: false,
        may_be_left: &[],
    },
    Row {
        killed: "the head",
        who: |scene| vec![there(scene.cluster.head_pid().unwrap())],
        node_lives: false,
        may_be_left: &[],
    },
    Row { killed: "the driver", who: |scene| vec![there(scene.driver.id())], node_lives: true, may_be_left: &[] },
];

#[test]
fn nothing_is_left_whoever_is_killed() {
    if let Ok(told) = std::env::var(DRIVER) {
        let told: Vec<&str> = told.lines().collect();
        let session = join(told[0], told[1], told[2]);
        let _entered = session.enter();
        let task = leaves_behind::options().num_gpus(1.0).remote(PathBuf::from(told[2]));
        // A launch is under way most of the time.
        while !task.is_ready() {
            let _ = ends_its_process::remote().get_blocking();
        }
        loop {
            std::thread::park();
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let mut wrong = Vec::new();
    for (number, row) in ROWS.iter().enumerate() {
        let scene = Scene::begin(dir.path(), number);
        kill(&(row.who)(&scene));
        let left = scene.what_is_left(row).into_iter();
        wrong.extend(left.map(|kind| format!("{} was killed, and left: {kind}", row.killed)));
        wrong.extend(scene.launched(row).map(|process| format!("{} was killed, and left: {process:?}", row.killed)));
        if row.node_lives && !scene.gpu_is_free() {
            wrong.push(format!("{} was killed, and the GPU is not free", row.killed));
        }
        let files: Vec<_> =
            std::fs::read_dir(scene.cluster.folder()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        if files != ["token"] {
            wrong.push(format!("{} was killed, and these files are there: {files:?}", row.killed));
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

/// Names a folder, when the test starts itself again as a user who is not root.
const UNPRIVILEGED: &str = "WINGBEAT_TEST_UNPRIVILEGED";

struct Leaves {
    dir: PathBuf,
}

#[wingbeat::actor(num_gpus = 1, max_restarts = unlimited, max_task_retries = unlimited)]
impl Leaves {
    fn new(dir: PathBuf) -> Self {
        Leaves { dir }
    }
    /// Starts a process that is root's. Answers with its own process id.
    #[allow(clippy::zombie_processes, reason = "it outlives this process, which may not end it")]
    fn leaves(&mut self) -> u32 {
        let mut become_root = Command::new(self.dir.join("setpriv"));
        let sleep = ["--reuid=0", "--regid=0", "--clear-groups", "sleep", "1000"];
        let root = become_root.args(sleep).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap().id();
        let is_root =
            || std::fs::read_to_string(format!("/proc/{root}/status")).ok()?.contains("Uid:\t0\t0\t0").then_some(());
        poll(LIMIT, is_root).unwrap_or_else(|| panic!("it does not become root"));
        let mut list = std::fs::OpenOptions::new().create(true).append(true).open(self.dir.join("list")).unwrap();
        writeln!(list, "{root}").unwrap();
        std::process::id()
    }
}

fn is_held_up_by_nobody(dir: &Path) {
    let session = wingbeat::init().num_cpus(2).pretend_gpus(1).global(false).log_to_driver(false);
    let session = wingbeat::block_on(session.into_future()).unwrap();
    let entered = session.enter();
    let leaves = Leaves::remote(dir.to_owned());
    // The next life needs the GPU.
    let live = || wingbeat::block_on(leaves.leaves().get_timeout(LIMIT)).unwrap();
    let first = there(live());
    kill(&[first]);
    let second = there(live());
    kill(&[there(parent(second.pid))]);
    // It ends with its keeper, a moment later, and may answer until then.
    poll(LIMIT, || (!second.is_alive()).then_some(())).unwrap();
    assert!(![first.pid, second.pid].contains(&live()));
    drop((leaves, entered));
    wingbeat::block_on(session.shutdown());
}

#[test]
fn what_may_not_be_ended_holds_nobody_up() {
    if let Some(dir) = std::env::var_os(UNPRIVILEGED) {
        return is_held_up_by_nobody(Path::new(&dir));
    }
    if !wingbeat_tests::is_root().unwrap() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let allow = |path: &Path, mode| {
        let permissions = <std::fs::Permissions as std::os::unix::fs::PermissionsExt>::from_mode(mode);
        std::fs::set_permissions(path, permissions).unwrap();
    };
    allow(dir.path(), 0o777);
    std::fs::copy("/usr/bin/setpriv", dir.path().join("setpriv")).unwrap();
    allow(&dir.path().join("setpriv"), 0o4755);
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(std::env::current_exe().unwrap());
    command.args(["--exact", "what_may_not_be_ended_holds_nobody_up", "--nocapture"]);
    command.env(UNPRIVILEGED, dir.path()).env("HOME", dir.path()).env("TMPDIR", dir.path());
    let mut driver = command.spawn().unwrap();
    let ended = poll(2 * LIMIT, || driver.try_wait().unwrap());
    let _ = driver.kill();
    let _ = driver.wait();
    let list = std::fs::read_to_string(dir.path().join("list")).unwrap_or_default();
    let left: Vec<Process> = list.lines().filter_map(|pid| Process::of(pid.parse().unwrap())).collect();
    let alive = left.iter().filter(|process| process.is_alive()).count();
    for process in left {
        process.signal(Signal::KILL);
    }
    assert!(ended.is_some_and(|status| status.success()), "{ended:?}");
    assert_eq!(alive, 3, "they could be ended, which shows nothing");
}
