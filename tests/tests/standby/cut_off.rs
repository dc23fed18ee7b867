//! Several machines, some of which are cut off from each other.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use wingbeat::Error;
use wingbeat_tests::hosts::{HostProcess, Hosts};
use wingbeat_tests::{Daemon, binary};

/// Runs inside the driver's namespace when the test starts itself again there.
const INSIDE: &str = "WINGBEAT_TEST_INSIDE";
/// Where lives of the actor note that they are there.
const FOLDER: &str = "WINGBEAT_TEST_FOLDER";

/// An actor of which two lives at a time would be noticed: each holds a lock as long as its process lives.
struct Only {
    life: u64,
    _lock: std::fs::File,
}

#[wingbeat::actor]
impl Only {
    fn new(folder: PathBuf) -> Only {
        let lock = std::fs::File::create(folder.join("lock")).unwrap();
        if lock.try_lock().is_err() {
            std::fs::write(folder.join("two"), "").unwrap();
        }
        let lives = (1..).find(|life| std::fs::File::create_new(folder.join(format!("life-{life}"))).is_ok());
        Only { life: lives.unwrap(), _lock: lock }
    }

    fn life(&self) -> u64 {
        self.life
    }
}

/// A head on the first host, a standby on the second, and a node on each other.
struct World {
    hosts: Hosts,
    head: Daemon,
    standby: Daemon,
    _nodes: Vec<HostProcess>,
    folder: tempfile::TempDir,
}

impl World {
    /// None where the test is to be skipped. Half a minute becomes a few seconds.
    fn new(count: usize, nodes: std::ops::RangeInclusive<usize>) -> Option<World> {
        let hosts = Hosts::new(count).unwrap()?;
        let hosts = hosts.env("WINGBEAT_SILENCE_MS", "2000").env("WINGBEAT_TAKEOVER_MS", "1500");
        let folder = tempfile::tempdir().unwrap();
        let head = World::daemon(&hosts, 0, folder.path(), &[]);
        head.wait_for("listening at").unwrap();
        let address = format!("{}:6420", hosts.address(0));
        let standby = World::daemon(&hosts, 1, folder.path(), &["--standby-of", &address]);
        standby.wait_for("it has all that the head has written").unwrap();
        let mut world = World { hosts, head, standby, _nodes: Vec::new(), folder };
        world.add_nodes(nodes);
        Some(world)
    }

    /// Adds nodes, and waits until they vote.
    fn add_nodes(&mut self, hosts: std::ops::RangeInclusive<usize>) {
        let address = format!("{}:6420", self.hosts.address(0));
        for host in hosts {
            self._nodes.push(self.hosts.node(host, &address, &[]).unwrap());
        }
        self.until_standby(|standby| standby["voters"] == self._nodes.len() && standby["is_current"] == true);
    }

    fn daemon(hosts: &Hosts, host: usize, folder: &Path, further: &[&str]) -> Daemon {
        let mut command = hosts.on(host, &binary().unwrap());
        command.args(["head", "--host", &hosts.address(host), "--port", "6420"]).args(further);
        command.arg("--journal").arg(folder.join(format!("journal-{host}")));
        hosts.join(&mut command, "");
        Daemon::start(&mut command).unwrap()
    }

    /// This test again, as a driver on that host.
    fn driver(&self, host: usize, test: &str) -> Daemon {
        let mut driver = self.hosts.on(host, &std::env::current_exe().unwrap());
        driver.args(["--exact", &format!("cut_off::{test}"), "--nocapture"]);
        self.hosts.join(&mut driver, &format!("{}:6420", self.hosts.address(0)));
        driver.env(INSIDE, "1").env(FOLDER, self.folder.path());
        Daemon::start(&mut driver).unwrap()
    }

    /// What the head says of the cluster.
    fn state(&self) -> serde_json::Value {
        let mut status = self.hosts.on(0, &binary().unwrap());
        self.hosts.join(status.args(["status", "--json"]), &format!("{}:6420", self.hosts.address(0)));
        let output = status.output().unwrap();
        serde_json::from_slice(&output.stdout).unwrap_or_default()
    }

    fn until_standby(&self, is: impl Fn(&serde_json::Value) -> bool) {
        let begun = Instant::now();
        loop {
            let state = self.state();
            if is(&state["standby"]) {
                return;
            }
            assert!(begun.elapsed() < Duration::from_secs(120), "{state:#}\n{}", self.standby.errors());
        }
    }

    fn says(&self, name: &str) {
        std::fs::write(self.folder.path().join(name), "").unwrap();
    }
}

fn folder() -> PathBuf {
    std::env::var_os(FOLDER).unwrap().into()
}

fn until_there(file: &Path) {
    let begun = Instant::now();
    while !file.exists() {
        assert!(begun.elapsed() < Duration::from_secs(120), "{} does not appear", file.display());
        std::thread::yield_now();
    }
}

/// In the driver: an actor that lives again elsewhere when its node is cut off.
fn an_actor_lives_again() {
    wingbeat::init_blocking().unwrap();
    let folder = folder();
    let actor = Only::options().max_restarts(100).num_cpus(1.0).remote(folder.clone());
    assert_eq!(actor.life().get_blocking().unwrap(), 1);
    std::fs::write(folder.join("ready"), "").unwrap();
    until_there(&folder.join("cut"));
    loop {
        match actor.life().get_blocking() {
            Ok(1) | Err(Error::ActorUnavailable { .. }) => {}
            Ok(life) => {
                assert_eq!(life, 2);
                break;
            }
            Err(error) => panic!("{error}"),
        }
    }
    wingbeat::shutdown_blocking();
}

#[test]
fn a_head_that_is_cut_off_with_a_node_ends_itself_and_no_actor_lives_twice() {
    if std::env::var_os(INSIDE).is_some() {
        return an_actor_lives_again();
    }
    let Some(mut world) = World::new(5, 2..=2) else { return };
    let mut driver = world.driver(1, "a_head_that_is_cut_off_with_a_node_ends_itself_and_no_actor_lives_twice");
    until_there(&world.folder.path().join("ready"));
    world.add_nodes(3..=4);
    // The head and the node of the actor on one side, all else on the other.
    assert!(world.hosts.split(&[0, 2], &[1, 3, 4]));
    world.says("cut");
    let takes_over = world.standby.wait_for("listening at");
    takes_over.unwrap_or_else(|error| panic!("{error}\n{}\n{}", world.standby.errors(), world.head.errors()));
    assert!(!world.head.wait_for_end().unwrap());
    let said = world.head.errors();
    assert!(said.contains("neither from its standby nor from enough nodes") && said.contains("--standby-of"), "{said}");
    assert!(driver.wait_for_end().unwrap(), "{}", driver.errors());
    assert!(!world.folder.path().join("two").exists(), "two lives of one actor at a time");
}

#[test]
fn a_standby_that_is_cut_off_does_not_take_over_and_catches_up() {
    let Some(mut world) = World::new(5, 2..=4) else { return };
    assert!(world.hosts.cut(1));
    world.until_standby(serde_json::Value::is_null);
    let quota = |cpus: &str| {
        let mut quota = world.hosts.on(0, &binary().unwrap());
        quota.args(["quota", "somebody", cpus]);
        world.hosts.join(&mut quota, &format!("{}:6420", world.hosts.address(0)));
        assert!(quota.status().unwrap().success());
    };
    quota("CPU=2");
    assert!(world.hosts.mend(1));
    world.until_standby(|standby| standby["voters"] == 3);
    quota("CPU=3");
    // And now the head, from everybody.
    assert!(world.hosts.cut(0));
    world.standby.wait_for("listening at").unwrap();
    let mut status = world.hosts.on(1, &binary().unwrap());
    world.hosts.join(status.args(["status", "--json"]), &format!("{}:6420", world.hosts.address(1)));
    let state: serde_json::Value = serde_json::from_slice(&status.output().unwrap().stdout).unwrap();
    assert_eq!(state["quotas"][0]["limit"], serde_json::json!({"CPU": 3.0}), "{state:#}");
    assert!(!world.head.wait_for_end().unwrap());
}
