//! Clusters of real processes for tests.
//!
//! ```no_run
//! let mut cluster = wingbeat_tests::TestCluster::start(2, 1)?;   // a head and two nodes of one CPU
//! cluster.kill_node(0)?;
//! # anyhow::Ok(())
//! ```

pub mod hosts;

use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

/// How long a daemon may take to say that it is there. Only a daemon that hangs takes so long.
const START_LIMIT: Duration = Duration::from_secs(60);

/// A head and nodes, each a process of its own. Dropping it ends them all.
pub struct TestCluster {
    address: String,
    token: PathBuf,
    dir: tempfile::TempDir,
    binary: PathBuf,
    head: Option<Daemon>,
    standby: Option<Standby>,
    nodes: Vec<Option<Daemon>>,
    keeps_journal: bool,
    /// Where the journal is, if not in the cluster's own folder.
    journal: Option<PathBuf>,
    /// Further environment of the next node.
    env: Vec<(String, String)>,
    /// Further environment of all daemons.
    env_of_all: Vec<(String, String)>,
    /// Further arguments of the next head.
    head_args: Vec<String>,
}

/// A daemon with what it wrote. Dropping it kills it with SIGKILL.
pub struct Daemon {
    child: Child,
    log: Arc<Log>,
    errors: Arc<Log>,
}

/// The standby of a head.
struct Standby {
    daemon: Daemon,
    address: String,
    journal: PathBuf,
}

/// Lines of a daemon, and who waits for one.

#[derive(Default)]
struct Log {
    lines: Mutex<(Vec<String>, bool)>,
    more: Condvar,
}

impl Log {
    /// The first line that contains `text`, when it comes.
    fn wait_for(&self, text: &str) -> Result<String> {
        let guard = self.lines.lock().map_err(|_| anyhow::anyhow!("a log reader panicked"))?;
        let found = |(lines, over): &mut (Vec<String>, bool)| !*over && !lines.iter().any(|line| line.contains(text));
        let (guard, _) = self
            .more
            .wait_timeout_while(guard, START_LIMIT, found)
            .map_err(|_| anyhow::anyhow!("a log reader panicked"))?;
        match guard.0.iter().find(|line| line.contains(text)) {
            Some(line) => Ok(line.clone()),
            None => bail!("it never wrote `{text}`, but:\n{}", guard.0.join("\n")),
        }
    }

    fn follow(self: &Arc<Self>, pipe: impl std::io::Read + Send + 'static) {
        let log = self.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(pipe).lines().map_while(Result::ok) {
                if let Ok(mut lines) = log.lines.lock() {
                    lines.0.push(line);
                }
                log.more.notify_all();
            }
            if let Ok(mut lines) = log.lines.lock() {
                lines.1 = true;
            }
            log.more.notify_all();
        });
    }
}

impl Daemon {
    /// Starts a command.
    ///
    /// # Errors
    /// When it does not start.
    pub fn start(command: &mut Command) -> Result<Daemon> {
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let log = Arc::new(Log::default());
        let stdout = child.stdout.take().context("no stdout")?;
        let stderr: ChildStderr = child.stderr.take().context("no stderr")?;
        // The end of stdout is the end of the daemon; stderr only adds lines.
        log.follow(stdout);
        let errors = Arc::new(Log::default());
        errors.follow(stderr);
        Ok(Daemon { child, log, errors })
    }

    /// Waits for a line of its standard output that contains `text`.
    ///
    /// # Errors
    /// It ends without, or hangs.
    pub fn wait_for(&self, text: &str) -> Result<String> {
        self.log.wait_for(text)
    }

    /// Waits for `text` on its standard error. All of that, until it is there.
    ///
    /// # Errors
    /// It does not come.
    pub fn wait_for_error(&self, text: &str) -> Result<String> {
        self.errors.wait_for(text)?;
        Ok(self.errors())
    }

    /// What it has written to its standard error so far.
    pub fn errors(&self) -> String {
        self.errors.lines.lock().map(|lines| lines.0.join("\n")).unwrap_or_default()
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits until it has ended by itself. Whether it ended in order.
    ///
    /// # Errors
    /// It does not.
    pub fn wait_for_end(&mut self) -> Result<bool> {
        if !wait_for_end(self.child.id(), START_LIMIT) {
            bail!("pid {} does not end; it wrote:\n{}", self.child.id(), self.errors());
        }
        Ok(self.child.wait()?.success())
    }

    fn terminate(&mut self) -> Result<()> {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM)?;
        self.child.wait()?;
        Ok(())
    }

    fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}

/// The `wingbeat` binary: the one that `WINGBEAT_BIN` names (`cargo xtask test` builds it first), else the workspace's
/// own, brought up to date once per test program.
pub fn binary() -> Result<PathBuf> {
    static BUILT: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    if let Some(binary) = std::env::var_os("WINGBEAT_BIN") {
        return Ok(binary.into());
    }
    BUILT.get_or_init(|| build().map_err(|error| error.to_string())).clone().map_err(anyhow::Error::msg)
}

fn build() -> Result<PathBuf> {
    let test = std::env::current_exe()?;
    let target = test.parent().and_then(Path::parent).context("a test lies in target/<profile>/deps")?;
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["build", "--quiet", "-p", "wingbeat-cli"]);
    if target.ends_with("release") {
        cargo.arg("--release");
    }
    if !cargo.current_dir(env!("CARGO_MANIFEST_DIR")).status()?.success() {
        bail!("cannot build the wingbeat command");
    }
    Ok(target.join("wingbeat"))
}

impl TestCluster {
    /// A head, and `nodes` nodes of `cpus` CPUs each.
    pub fn start(nodes: usize, cpus: u32) -> Result<TestCluster> {
        Self::with_binary(binary()?, nodes, cpus)
    }

    /// As [`TestCluster::start`], of this `wingbeat` binary.
    pub fn with_binary(binary: PathBuf, nodes: usize, cpus: u32) -> Result<TestCluster> {
        let mut cluster = Self::head_only(binary, false)?;
        for _ in 0..nodes {
            cluster.add_node(&["--num-cpus", &cpus.to_string()])?;
        }
        Ok(cluster)
    }

    /// As [`TestCluster::start`], with these variables in the environment of every daemon.
    pub fn with_env(nodes: usize, cpus: u32, env: &[(&str, &str)]) -> Result<TestCluster> {
        Self::daemons(nodes, cpus, env, false)
    }

    /// As [`TestCluster::start`], with a head that keeps a journal.
    pub fn with_journal(nodes: usize, cpus: u32) -> Result<TestCluster> {
        Self::daemons(nodes, cpus, &[], true)
    }

    /// As [`TestCluster::with_env`], with a head that keeps a journal.
    pub fn with_journal_and_env(nodes: usize, cpus: u32, env: &[(&str, &str)]) -> Result<TestCluster> {
        Self::daemons(nodes, cpus, env, true)
    }

    fn daemons(nodes: usize, cpus: u32, env: &[(&str, &str)], keeps_journal: bool) -> Result<TestCluster> {
        let mut cluster = Self::unstarted(binary()?, keeps_journal)?;
        cluster.env_of_all = env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        cluster.start_head()?;
        for _ in 0..nodes {
            cluster.add_node(&["--num-cpus", &cpus.to_string()])?;
        }
        Ok(cluster)
    }

    /// As [`TestCluster::with_journal`], with the journal in this file.
    pub fn with_journal_at(journal: &Path, nodes: usize, cpus: u32) -> Result<TestCluster> {
        let mut cluster = Self::head_only(binary()?, false)?;
        cluster.kill_head()?;
        (cluster.keeps_journal, cluster.journal) = (true, Some(journal.to_owned()));
        cluster.start_head()?;
        for _ in 0..nodes {
            cluster.add_node(&["--num-cpus", &cpus.to_string()])?;
        }
        Ok(cluster)
    }

    /// As [`TestCluster::start`], with these arguments of the head, and with a journal if one is to be kept.
    pub fn with_head_args(nodes: usize, cpus: u32, keeps_journal: bool, args: &[&str]) -> Result<TestCluster> {
        let mut cluster = Self::unstarted(binary()?, keeps_journal)?;
        cluster.set_head_args(args);
        cluster.start_head()?;
        for _ in 0..nodes {
            cluster.add_node(&["--num-cpus", &cpus.to_string()])?;
        }
        Ok(cluster)
    }

    /// The next head gets these arguments.
    pub fn set_head_args(&mut self, args: &[&str]) {
        self.head_args = args.iter().map(|arg| (*arg).to_owned()).collect();
    }

    /// The file in which the head keeps what must survive it.
    pub fn journal(&self) -> PathBuf {
        self.journal.clone().unwrap_or_else(|| self.dir.path().join("journal"))
    }

    fn head_only(binary: PathBuf, keeps_journal: bool) -> Result<TestCluster> {
        let mut cluster = Self::unstarted(binary, keeps_journal)?;
        cluster.start_head()?;
        Ok(cluster)
    }

    fn unstarted(binary: PathBuf, keeps_journal: bool) -> Result<TestCluster> {
        let dir = tempfile::tempdir()?;
        let token = dir.path().join("token");
        std::fs::write(&token, format!("test-{}-{:?}", std::process::id(), std::time::Instant::now()))?;
        let private = <std::fs::Permissions as std::os::unix::fs::PermissionsExt>::from_mode(0o600);
        std::fs::set_permissions(&token, private)?;
        Ok(TestCluster {
            address: String::new(),
            token,
            dir,
            binary,
            head: None,
            standby: None,
            nodes: Vec::new(),
            keeps_journal,
            journal: None,
            env: Vec::new(),
            env_of_all: Vec::new(),
            head_args: Vec::new(),
        })
    }

    /// Starts a head where the last one was, and with its journal if that kept one.
    pub fn start_head(&mut self) -> Result<()> {
        let port = self.address.rsplit(':').next().filter(|port| !port.is_empty()).unwrap_or("0");
        let mut command = self.command()?;
        command.args(["head", "--port", port]);
        if self.keeps_journal {
            command.arg("--journal").arg(self.journal());
        }
        command.args(&self.head_args);
        let head = Daemon::start(&mut command)?;
        let line = head.log.wait_for("listening at")?;
        self.address = line.rsplit(' ').next().unwrap_or_default().to_owned();
        self.head = Some(head);
        Ok(())
    }

    /// Starts a standby of the head with this journal, and waits until it may take over.
    pub fn start_standby(&mut self, journal: &str) -> Result<()> {
        let mut command = self.command()?;
        let journal = self.dir.path().join(journal);
        command.args(["head", "--port", "0", "--standby-of", &self.address, "--journal"]).arg(&journal);
        let daemon = Daemon::start(&mut command)?;
        let line = daemon.wait_for("standing by at")?;
        let address = line.split_whitespace().nth(5).unwrap_or_default().to_owned();
        daemon.wait_for("it has all that the head has written")?;
        self.standby = Some(Standby { daemon, address, journal });
        Ok(())
    }

    /// The process id of the standby.
    pub fn standby_pid(&self) -> Option<u32> {
        self.standby.as_ref().map(|standby| standby.daemon.pid())
    }

    /// Where the standby listens.
    pub fn standby_address(&self) -> Option<&str> {
        self.standby.as_ref().map(|standby| standby.address.as_str())
    }

    /// The process of the head, which ends when this is dropped, and not when the standby has taken over.
    pub fn take_head(&mut self) -> Option<Daemon> {
        self.head.take()
    }

    /// Ends the standby with SIGKILL.
    pub fn kill_standby(&mut self) -> Result<()> {
        self.standby.take().context("no standby")?.daemon.kill()
    }

    /// Waits until the standby leads. From now on it is the head, and keeps the journal.
    pub fn wait_for_takeover(&mut self) -> Result<()> {
        let Standby { daemon, address, journal } = self.standby.take().context("no standby")?;
        daemon.wait_for("listening at").with_context(|| daemon.errors())?;
        (self.address, self.journal, self.head) = (address, Some(journal), Some(daemon));
        Ok(())
    }

    /// A `wingbeat` command with this cluster's token.
    pub fn command(&self) -> Result<Command> {
        let mut command = Command::new(&self.binary);
        command
            .env("WINGBEAT_TOKEN_FILE", &self.token)
            .env_remove("WINGBEAT_TOKEN")
            .env("WINGBEAT_ADDRESS", &self.address)
            .envs(self.env_of_all.iter().map(|(name, value)| (name, value)));
        Ok(command)
    }

    /// Adds a node with these further arguments, and answers with its number. Without `--spill-dir` it spills to the
    /// cluster's own folder, and without `--object-store-memory` its store has 256 MiB.
    pub fn add_node(&mut self, args: &[&str]) -> Result<usize> {
        let mut defaults = Vec::new();
        if !args.contains(&"--spill-dir") {
            defaults.extend(["--spill-dir".into(), self.dir.path().as_os_str().to_owned()]);
        }
        if !args.contains(&"--object-store-memory") {
            defaults.extend(["--object-store-memory".into(), "256MiB".into()]);
        }
        self.start_node(args.iter().map(OsString::from).chain(defaults))
    }

    /// Adds so many nodes that start at the same time, and waits until all have joined.
    pub fn add_nodes(&mut self, count: usize, args: &[&str]) -> Result<()> {
        let mut starting = Vec::new();
        for _ in 0..count {
            let mut command = self.command()?;
            command.arg("worker").args(args).arg("--spill-dir").arg(self.dir.path());
            starting.push(Daemon::start(&mut command)?);
        }
        for node in starting {
            node.log.wait_for("joined")?;
            self.nodes.push(Some(node));
        }
        Ok(())
    }

    /// Adds a node without any arguments, which offers whatever its machine has, and answers with its number.
    pub fn add_default_node(&mut self) -> Result<usize> {
        self.start_node(std::iter::empty())
    }

    fn start_node(&mut self, args: impl Iterator<Item = OsString>) -> Result<usize> {
        let mut command = self.command()?;
        command.envs(self.env.iter().map(|(name, value)| (name, value)));
        let node = Daemon::start(command.arg("worker").args(args))?;
        node.log.wait_for("joined")?;
        self.nodes.push(Some(node));
        Ok(self.nodes.len() - 1)
    }

    /// As [`TestCluster::add_node`], with these variables in the daemon's environment.
    pub fn add_node_with(&mut self, args: &[&str], env: &[(&str, &str)]) -> Result<usize> {
        self.env = env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let added = self.add_node(args);
        self.env.clear();
        added
    }

    /// The ids of the nodes, in the order in which they were added.
    pub fn node_numbers(&self) -> Result<Vec<String>> {
        let id = |node: &Daemon| {
            let line = node.log.wait_for("joined")?;
            Ok(line.split_whitespace().find(|word| word.starts_with("node-")).unwrap_or_default().to_owned())
        };
        self.nodes.iter().flatten().map(id).collect()
    }

    /// Waits until a node's daemon has ended by itself. Whether it ended in order.
    pub fn wait_for_node_end(&mut self, node: usize) -> Result<bool> {
        let mut daemon = self.nodes.get_mut(node).and_then(Option::take).context("no such node")?;
        let pid = daemon.child.id();
        if !wait_for_end(pid, START_LIMIT) {
            bail!("pid {pid} does not end");
        }
        Ok(daemon.child.wait()?.success())
    }

    /// The number of nodes that were added.
    pub fn nodes(&self) -> usize {
        self.nodes.len()
    }

    /// Where its daemons keep files.
    pub fn folder(&self) -> &Path {
        self.dir.path()
    }

    /// The head's `host:port`.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// The token, as drivers give it.
    pub fn token(&self) -> Result<String> {
        Ok(std::fs::read_to_string(&self.token)?.trim().to_owned())
    }

    /// The process id of a node's daemon.
    pub fn node_pid(&self, node: usize) -> Option<u32> {
        self.nodes.get(node)?.as_ref().map(|daemon| daemon.child.id())
    }

    /// The process id of the head.
    pub fn head_pid(&self) -> Option<u32> {
        self.head.as_ref().map(|daemon| daemon.child.id())
    }

    /// What the head has written to its standard error so far.
    pub fn head_errors(&self) -> String {
        self.head.as_ref().map(Daemon::errors).unwrap_or_default()
    }

    /// The process ids of all daemons.
    pub fn pids(&self) -> Vec<u32> {
        self.nodes.iter().chain(std::iter::once(&self.head)).flatten().map(|daemon| daemon.child.id()).collect()
    }

    /// Ends a node with SIGKILL.
    pub fn kill_node(&mut self, node: usize) -> Result<()> {
        self.nodes.get_mut(node).and_then(Option::take).context("no such node")?.kill()
    }

    /// Ends the head with SIGKILL.
    pub fn kill_head(&mut self) -> Result<()> {
        self.head.take().context("no head")?.kill()
    }

    /// Ends the head with SIGTERM, and waits until it is gone.
    pub fn terminate_head(&mut self) -> Result<()> {
        self.head.take().context("no head")?.terminate()
    }

    /// What the head says of the cluster.
    pub fn state(&self) -> Result<serde_json::Value> {
        let output = self.command()?.args(["status", "--json"]).output()?;
        if !output.status.success() {
            bail!("wingbeat status: {}", String::from_utf8_lossy(&output.stderr));
        }
        Ok(serde_json::from_slice(&output.stdout)?)
    }

    /// `wingbeat stop`, and the end of every daemon.
    pub fn stop(&mut self) -> Result<()> {
        let output = self.command()?.arg("stop").output()?;
        if !output.status.success() {
            bail!("wingbeat stop: {}", String::from_utf8_lossy(&output.stderr));
        }
        self.wait_for_stop()
    }

    /// Waits for the end of every daemon, after somebody has stopped the cluster.
    pub fn wait_for_stop(&mut self) -> Result<()> {
        for daemon in self.nodes.iter_mut().chain(std::iter::once(&mut self.head)) {
            if let Some(mut daemon) = daemon.take() {
                daemon.child.wait()?;
            }
        }
        Ok(())
    }
}

/// The Python with torch: `$WINGBEAT_PYTHON`, or that which `cargo xtask test` makes.
pub fn python() -> Result<PathBuf> {
    let made = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.venv/bin/python");
    let python = std::env::var_os("WINGBEAT_PYTHON").map_or(made, PathBuf::from);
    ensure!(python.exists(), "{} is not there; `cargo xtask test` makes .venv with torch", python.display());
    Ok(python)
}

/// Whether a test may do what only root can: make network namespaces, mount, be another user. Where it cannot, the test
/// fails, so that nobody takes it for a pass; with `WINGBEAT_SKIP_HOSTS=1` it says that it is skipped.
pub fn is_root() -> Result<bool> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let user = status.lines().find_map(|line| line.strip_prefix("Uid:")?.split_whitespace().nth(1));
    if user == Some("0") {
        return Ok(true);
    }
    if std::env::var_os("WINGBEAT_SKIP_HOSTS").is_some_and(|value| value == "1") {
        eprintln!("skipped: it needs root, and WINGBEAT_SKIP_HOSTS=1");
        return Ok(false);
    }
    bail!("this test needs root; run the tests as root, or leave such out with WINGBEAT_SKIP_HOSTS=1")
}

/// The parent of a process, or 0 if there is none.
pub fn parent(pid: u32) -> u32 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let rest = stat.rsplit(')').next().unwrap_or_default();
    rest.split_whitespace().nth(1).and_then(|parent| parent.parse().ok()).unwrap_or_default()
}

/// The daemon of the node of a worker process: above its keeper, the guard, and who watches that.
pub fn daemon_of(worker: u32) -> u32 {
    parent(parent(parent(parent(worker))))
}

/// Whether a process of this id is there (and is no zombie).
pub fn is_alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().next()).map(str::to_owned);
    state.is_some_and(|state| state != "Z" && state != "X")
}

/// A process, which is told from another that has its id later.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Process {
    /// Its process id.
    pub pid: u32,
    /// When it began, in ticks since the machine did.
    began: u64,
}

impl Process {
    /// The process that has this id now. None if there is none.
    pub fn of(pid: u32) -> Option<Process> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let began = stat.rsplit(')').next()?.split_whitespace().nth(19)?.parse().ok()?;
        Some(Process { pid, began })
    }

    /// Whether it is there (and is no zombie).
    pub fn is_alive(&self) -> bool {
        Process::of(self.pid) == Some(*self) && is_alive(self.pid)
    }

    /// Sends it a signal, unless it has ended.
    pub fn signal(&self, signal: rustix::process::Signal) {
        // Opened before the look: what the descriptor names cannot become another.
        let pid = rustix::process::Pid::from_raw(self.pid as i32);
        let fd = pid.map(|pid| rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()));
        if let Some(Ok(fd)) = fd
            && Process::of(self.pid) == Some(*self)
        {
            let _ = rustix::process::pidfd_send_signal(fd, signal);
        }
    }
}

/// Asks again and again until there is an answer, and leaves the core to others between two questions. None after the limit.
pub fn poll<T>(limit: Duration, mut ask: impl FnMut() -> Option<T>) -> Option<T> {
    let begun = std::time::Instant::now();
    loop {
        let answer = ask();
        if answer.is_some() || begun.elapsed() > limit {
            return answer;
        }
        std::thread::sleep(POLL_EVERY);
    }
}

/// Less than what tests wait for takes, and a hundredth of a core.
const POLL_EVERY: Duration = Duration::from_millis(1);

/// Waits until a process has ended. Whether it has within the limit.
pub fn wait_for_end(pid: u32, limit: Duration) -> bool {
    poll(limit, || (!is_alive(pid)).then_some(())).is_some()
}
