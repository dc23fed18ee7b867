//! Whoever of a cluster is killed, nothing is left of what user code had started, however that had hidden itself.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::BTreeMap;
use std::future::IntoFuture;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use wingbeat_tests::{TestCluster, is_alive, parent};

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
    let noted = loop {
        let noted = std::fs::read_to_string(&notes).unwrap_or_default();
        if noted.lines().count() == KINDS.len() && noted.ends_with('\n') {
            break noted;
        }
        std::thread::yield_now();
    };
    std::fs::write(list.with_extension("tmp"), format!("{noted}process {}\n", std::process::id())).unwrap();
    std::fs::rename(list.with_extension("tmp"), list).unwrap();
    loop {
        std::thread::park();
    }
}

#[wingbeat::remote(num_gpus = 1)]
fn has_the_gpu() -> bool {
    true
}

fn join(address: &str, token: &str) -> wingbeat::Session {
    wingbeat::block_on(wingbeat::init_at(address).token(token).global(false).log_to_driver(false).into_future())
        .unwrap()
}

/// A cluster of one node and a driver whose task has left processes behind.
struct Scene {
    cluster: TestCluster,
    driver: Child,
    list: PathBuf,
    worker: u32,
    /// What the task has started, by kind.
    left: BTreeMap<&'static str, u32>,
}

impl Scene {
    fn begin(dir: &Path, number: usize) -> Scene {
        let mut cluster = TestCluster::start(0, 1).unwrap();
        cluster.add_node(&["--num-cpus", "2", "--num-gpus", "1"]).unwrap();
        let list = dir.join(format!("list{number}"));
        let told = [cluster.address(), &cluster.token().unwrap(), list.to_str().unwrap()].join("\n");
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "nothing_is_left_whoever_is_killed"]).env(DRIVER, told);
        let mut driver = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let begun = Instant::now();
        let lines = loop {
            match std::fs::read_to_string(&list) {
                Ok(lines) => break lines,
                Err(_) if begun.elapsed() < LIMIT && driver.try_wait().unwrap().is_none() => std::thread::yield_now(),
                Err(_) => panic!("the task has started nothing"),
            }
        };
        let mut noted: BTreeMap<&str, u32> = lines
            .lines()
            .map(|line| {
                let (what, pid) = line.split_once(' ').unwrap();
                (what, pid.parse().unwrap())
            })
            .collect();
        let worker = noted.remove("process").unwrap();
        let left = noted.into_iter().map(|(number, pid)| (KINDS[number.parse::<usize>().unwrap()].0, pid)).collect();
        Scene { cluster, driver, list, worker, left }
    }

    fn keeper(&self) -> u32 {
        parent(self.worker)
    }
    fn guard(&self) -> u32 {
        parent(self.keeper())
    }
    fn watch(&self) -> u32 {
        parent(self.guard())
    }
    fn node(&self) -> u32 {
        self.cluster.node_pid(0).unwrap()
    }

    /// What is alive of the task after the limit, but for what may be.
    fn what_is_left(&self, may_be_left: &[&str]) -> Vec<&'static str> {
        let begun = Instant::now();
        let started = self.left.iter().map(|(kind, pid)| (*kind, *pid)).chain([("worker process", self.worker)]);
        let started: Vec<_> = started.filter(|(kind, _)| !may_be_left.contains(kind)).collect();
        let all = || started.iter().copied();
        while all().any(|(_, pid)| is_alive(pid)) && begun.elapsed() < LIMIT {
            std::thread::yield_now();
        }
        all().filter(|(_, pid)| is_alive(*pid)).map(|(kind, _)| kind).collect()
    }

    /// Whether the GPU of the node is given to somebody else.
    fn gpu_is_free(&self) -> bool {
        let session = join(self.cluster.address(), &self.cluster.token().unwrap());
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
        for pid in self.left.values().chain([&self.worker]).filter(|pid| is_alive(**pid)) {
            signal(*pid, Signal::KILL);
        }
        let _ = std::fs::remove_file(&self.list);
    }
}

fn signal(pid: u32, signal: Signal) {
    // It may have ended by itself when others were killed.
    let _ = kill_process(Pid::from_raw(pid as i32).unwrap(), signal);
}

/// All at the same moment: nobody sees the end of another.
fn kill(pids: &[u32]) {
    for pid in pids {
        signal(*pid, Signal::STOP);
    }
    for pid in pids {
        signal(*pid, Signal::KILL);
    }
}

struct Row {
    killed: &'static str,
    who: fn(&Scene) -> Vec<u32>,
    /// The node goes on, and others get the GPU.
    node_lives: bool,
    /// What nobody can find.
    may_be_left: &'static [&'static str],
}

const ROWS: [Row; 10] = [
    Row { killed: "the worker process", who: |scene| vec![scene.worker], node_lives: true, may_be_left: &[] },
    Row { killed: "its keeper", who: |scene| vec![scene.keeper()], node_lives: true, may_be_left: &[] },
    Row {
        killed: "the worker process and its keeper",
        who: |scene| vec![scene.worker, scene.keeper()],
        node_lives: true,
        may_be_left: &[],
    },
    Row { killed: "the guard", who: |scene| vec![scene.guard()], node_lives: false, may_be_left: &[] },
    Row { killed: "the guard's parent", who: |scene| vec![scene.watch()], node_lives: false, may_be_left: &[] },
    Row {
        killed: "the guard and its parent",
        who: |scene| vec![scene.watch(), scene.guard()],
        node_lives: false,
        may_be_left: &[],
    },
    Row {
        killed: "the guard, its parent and the keeper",
        who: |scene| vec![scene.watch(), scene.guard(), scene.keeper()],
        node_lives: false,
        // It belongs to nobody, and nothing in it says whose it was.
        may_be_left: &["orphan without its environment"],
    },
    Row {
        killed: "the node, the guard and its parent",
        who: |scene| vec![scene.node(), scene.watch(), scene.guard()],
        node_lives: false,
        may_be_left: &[],
    },
    Row {
        killed: "the head",
        who: |scene| vec![scene.cluster.head_pid().unwrap()],
        node_lives: false,
        may_be_left: &[],
    },
    Row { killed: "the driver", who: |scene| vec![scene.driver.id()], node_lives: true, may_be_left: &[] },
];

#[test]
fn nothing_is_left_whoever_is_killed() {
    if let Ok(told) = std::env::var(DRIVER) {
        let told: Vec<&str> = told.lines().collect();
        let session = join(told[0], told[1]);
        let _entered = session.enter();
        let task = leaves_behind::options().num_gpus(1.0).remote(PathBuf::from(told[2]));
        let _ = task.get_blocking();
        loop {
            std::thread::park();
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let mut wrong = Vec::new();
    for (number, row) in ROWS.iter().enumerate() {
        let scene = Scene::begin(dir.path(), number);
        kill(&(row.who)(&scene));
        let left = scene.what_is_left(row.may_be_left).into_iter();
        wrong.extend(left.map(|kind| format!("{} was killed, and left: {kind}", row.killed)));
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
