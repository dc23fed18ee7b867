//! Machines that share nothing but a network: namespaces joined by a bridge.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

pub(crate) fn ip(arguments: &str) -> bool {
    let status = Command::new("ip").args(arguments.split(' ')).stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}

/// Namespaces `…-0` to `…-(n-1)` with the addresses 10.78.x.1 to 10.78.x.n on one bridge.
pub(crate) struct Hosts {
    pub(crate) names: Vec<String>,
    bridge: String,
    subnet: u8,
}

impl Hosts {
    pub(crate) fn new(count: usize) -> Option<Hosts> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        // Tests of one program run beside each other. Names of interfaces have 15 letters.
        let id = std::process::id() % 100_000 * 10 + MADE.fetch_add(1, Ordering::Relaxed);
        let hosts = Hosts {
            names: (0..count).map(|i| format!("wt{id}-{i}")).collect(),
            bridge: format!("wt{id}"),
            subnet: (id % 250) as u8,
        };
        let bridge = &hosts.bridge;
        if !ip(&format!("link add {bridge} type bridge")) || !ip(&format!("link set {bridge} up")) {
            return None;
        }
        for (i, name) in hosts.names.iter().enumerate() {
            let (inner, outer) = (format!("i{}", &name[2..]), format!("o{}", &name[2..]));
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

    pub(crate) fn address(&self, host: usize) -> String {
        format!("10.78.{}.{}", self.subnet, host + 1)
    }

    pub(crate) fn on(&self, host: usize, program: &std::path::Path) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.names[host]]).arg(program);
        command
    }
}

pub(crate) const TOKEN: &str = "a token for several hosts";

impl Hosts {
    /// A head on the first, where there is no node: its address.
    pub(crate) fn head(&self) -> (String, Ended) {
        let head = self.address(0);
        let mut command = self.on(0, &wingbeat_tests::binary().unwrap());
        command.args(["head", "--host", &head, "--port", "6420"]).env("WINGBEAT_TOKEN", TOKEN);
        (format!("{head}:6420"), start(&mut command, "listening").0)
    }

    /// A node of one CPU on a host.
    pub(crate) fn node(&self, host: usize, head: &str) -> Ended {
        let mut command = self.on(host, &wingbeat_tests::binary().unwrap());
        command.args(["worker", "--head", head, "--num-cpus", "1", "--object-store-memory", "256MiB"]);
        start(command.env("WINGBEAT_TOKEN", TOKEN), "joined").0
    }

    /// The host's end of its way to the bridge, as the bridge's machine calls it.
    pub(crate) fn interface(&self, host: usize) -> String {
        format!("o{}", &self.names[host][2..])
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

/// Killed when dropped.
pub(crate) struct Ended(pub(crate) Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub(crate) fn start(command: &mut Command, sign: &str) -> (Ended, String) {
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let line = lines.by_ref().map_while(Result::ok).find(|line| line.contains(sign));
    // Somebody must read on, or the daemon would block on its next line.
    std::thread::spawn(move || lines.for_each(drop));
    (Ended(child), line.unwrap())
}
