//! Several machines: network namespaces joined by a bridge, where root and `ip` are there. Nothing is shared between
//! them but TCP: no unix sockets, no shared memory.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result};

/// The token of every cluster of hosts.
const TOKEN: &str = "a token for several hosts, which is long enough";

/// Runs `ip` with these arguments. Whether it could.
pub fn ip(arguments: &str) -> bool {
    let status = Command::new("ip").args(arguments.split(' ')).stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}

fn tc(arguments: &str) -> bool {
    let status = Command::new("tc").args(arguments.split(' ')).stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}

/// Namespaces `…-0` to `…-(n-1)` with the addresses 10.77.x.1 to 10.77.x.n on one bridge. Dropping them removes them.
pub struct Hosts {
    /// The namespaces.
    pub names: Vec<String>,
    bridge: String,
    subnet: u8,
    env: Vec<(&'static str, &'static str)>,
}

/// A process on a host. Dropping it kills it with SIGKILL.
pub struct HostProcess(Child);

impl From<Child> for HostProcess {
    fn from(child: Child) -> HostProcess {
        HostProcess(child)
    }
}

impl HostProcess {
    /// Starts a command of [`Hosts::on`].
    ///
    /// # Errors
    /// When it does not start.
    pub fn spawn(command: &mut Command) -> Result<HostProcess> {
        Ok(HostProcess(command.spawn()?))
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Its exit status; none while it runs.
    ///
    /// # Errors
    /// When the kernel does not answer.
    pub fn exit_status(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.0.try_wait()?)
    }
}

impl Drop for HostProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Hosts {
    /// So many; none where the test is to be skipped ([`crate::is_root`]).
    ///
    /// # Errors
    /// When they cannot be made.
    pub fn new(count: usize) -> Result<Option<Hosts>> {
        if !crate::is_root()? {
            return Ok(None);
        }
        Self::made(count).map(Some).context("`ip` cannot make network namespaces")
    }

    fn made(count: usize) -> Option<Hosts> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        // Tests of one program run beside each other. Names of interfaces have 15 letters.
        let id = std::process::id() % 100_000 * 10 + MADE.fetch_add(1, Ordering::Relaxed);
        let hosts = Hosts {
            names: (0..count).map(|i| format!("wb{id}-{i}")).collect(),
            bridge: format!("wb{id}"),
            subnet: (id % 250) as u8,
            env: Vec::new(),
        };
        let bridge = &hosts.bridge;
        if !ip(&format!("link add {bridge} type bridge")) || !ip(&format!("link set {bridge} up")) {
            return None;
        }
        for (i, name) in hosts.names.iter().enumerate() {
            let (inner, outer) = (hosts.interface(i), format!("o{}", &name[2..]));
            let address = hosts.address(i);
            let made = ip(&format!("netns add {name}"))
                && ip(&format!("link add {outer} type veth peer name {inner} netns {name}"))
                && ip(&format!("link set {outer} master {bridge} up"))
                && ip(&format!("-n {name} addr add {address}/24 dev {inner}"))
                && ip(&format!("-n {name} link set {inner} up"))
                && ip(&format!("-n {name} link set lo up"));
            if !made {
                return None;
            }
        }
        Some(hosts)
    }

    /// Gives every process on them this variable.
    pub fn env(mut self, variable: &'static str, value: &'static str) -> Hosts {
        self.env.push((variable, value));
        self
    }

    /// A host's address.
    pub fn address(&self, host: usize) -> String {
        format!("10.77.{}.{}", self.subnet, host + 1)
    }

    /// A host's interface on the bridge.
    pub fn interface(&self, host: usize) -> String {
        format!("i{}", &self.names[host][2..])
    }

    /// A host's end of the cable on the bridge's side, outside of its namespace.
    pub fn port(&self, host: usize) -> String {
        format!("o{}", &self.names[host][2..])
    }

    /// Pulls a host's cable: packets vanish, and nobody is told.
    pub fn cut(&self, host: usize) -> bool {
        ip(&format!("link set {} nomaster", self.port(host)))
    }

    /// Plugs it in again.
    pub fn mend(&self, host: usize) -> bool {
        ip(&format!("link set {} master {}", self.port(host), self.bridge))
    }

    /// Cuts two off from each other and from nobody else.
    pub fn cut_between(&self, one: usize, other: usize) -> bool {
        self.between(one, other, "add")
    }

    /// Cuts all of some off from all others, at the same moment as far as that goes: whoever is cut off later has seen the others go.
    pub fn split(&self, some: &[usize], others: &[usize]) -> bool {
        std::thread::scope(|threads| {
            let pairs = some.iter().flat_map(|one| others.iter().map(move |other| (*one, *other)));
            let cuts: Vec<_> = pairs.map(|(one, other)| threads.spawn(move || self.cut_between(one, other))).collect();
            cuts.into_iter().all(|cut| cut.join().is_ok_and(|is_cut| is_cut))
        })
    }

    /// The contrary.
    pub fn mend_between(&self, one: usize, other: usize) -> bool {
        self.between(one, other, "del")
    }

    /// Has what one host sends to another vanish, and not what the other sends.
    pub fn cut_way(&self, from: usize, to: usize) -> bool {
        self.way(from, to, "add")
    }

    /// The contrary.
    pub fn mend_way(&self, from: usize, to: usize) -> bool {
        self.way(from, to, "del")
    }

    /// Makes a host's link slow: it holds back packets where the kernel can (netem), and else lets few through.
    pub fn slow(&self, host: usize) -> bool {
        let port = self.port(host);
        tc(&format!("qdisc add dev {port} root netem delay 50ms 20ms loss 2%"))
            || tc(&format!("qdisc add dev {port} root tbf rate 8mbit burst 64kb latency 200ms"))
    }

    /// The contrary.
    pub fn quicken(&self, host: usize) -> bool {
        tc(&format!("qdisc del dev {} root", self.port(host)))
    }

    fn between(&self, one: usize, other: usize, change: &str) -> bool {
        [(one, other), (other, one)].iter().all(|(from, to)| self.way(*from, *to, change))
    }

    fn way(&self, from: usize, to: usize, change: &str) -> bool {
        ip(&format!("-n {} route {change} blackhole {}/32", self.names[from], self.address(to)))
    }

    /// A command that runs on a host.
    pub fn on(&self, host: usize, program: &Path) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.names[host]]).arg(program).envs(self.env.iter().copied());
        command
    }

    /// Gives a command the way to the cluster whose head is there.
    pub fn join(&self, command: &mut Command, head: &str) {
        command.env("WINGBEAT_TOKEN", TOKEN).env("WINGBEAT_ADDRESS", head);
    }

    /// A head on the first host, where there is no node: its address, and its process.
    ///
    /// # Errors
    /// When it does not start.
    pub fn head(&self) -> Result<(String, HostProcess)> {
        let head = self.address(0);
        let mut command = self.on(0, &crate::binary()?);
        command.args(["head", "--host", &head, "--port", "6420"]).env("WINGBEAT_TOKEN", TOKEN);
        Ok((format!("{head}:6420"), start(&mut command, "listening")?))
    }

    /// A node of one CPU on a host, with these further arguments. Without `--object-store-memory` its store has 128 MiB.
    ///
    /// # Errors
    /// When it does not start, or does not join the cluster of this head.
    pub fn node(&self, host: usize, head: &str, args: &[&str]) -> Result<HostProcess> {
        let mut command = self.on(host, &crate::binary()?);
        command.args(["worker", "--head", head, "--num-cpus", "1"]).args(args);
        if !args.contains(&"--object-store-memory") {
            command.args(["--object-store-memory", "128MiB"]);
        }
        start(command.env("WINGBEAT_TOKEN", TOKEN), "joined")
    }

    /// A head on the first, where there is no node, and a node of one CPU on each other: the head's address, and the
    /// daemons, the head first.
    ///
    /// # Errors
    /// When a daemon does not start.
    pub fn cluster(&self) -> Result<(String, Vec<HostProcess>)> {
        let (address, head) = self.head()?;
        let mut daemons = vec![head];
        for host in 1..self.names.len() {
            daemons.push(self.node(host, &address, &[])?);
        }
        Ok((address, daemons))
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for name in &self.names {
            ip(&format!("netns del {name}"));
        }
        ip(&format!("link del {}", self.bridge));
    }
}

/// Starts a daemon, and waits for the line that contains `sign`.
fn start(command: &mut Command, sign: &str) -> Result<HostProcess> {
    let mut child = command.stdout(Stdio::piped()).spawn()?;
    let stdout = child.stdout.take().context("no stdout")?;
    let daemon = HostProcess(child);
    let mut lines = BufReader::new(stdout).lines();
    let line = lines.by_ref().map_while(Result::ok).find(|line| line.contains(sign));
    // Somebody must read on, or the daemon would block on its next line.
    std::thread::spawn(move || lines.for_each(drop));
    line.with_context(|| format!("it never wrote `{sign}`"))?;
    Ok(daemon)
}
