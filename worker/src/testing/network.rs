//! Machines that are pretended: network namespaces on one bridge, where a machine's packets can be made to vanish.
//!
//! ```text
//!   the test and its head ── bridge ─┬─ machine of node 0
//!                                    └─ machine of node 1 …
//! ```
//!
//! The namespaces have no names: each ends with its last process and descriptor, and its interfaces with it. So nothing of them stays,
//! whatever ends the test.

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::Arc;

use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};
use wingbeat_core::error::Error;

/// Networks are parts of 198.18.0.0/15, which is nobody's: it is reserved for tests of networks (RFC 2544). So many fit in.
const NETWORKS: u32 = 1 << (32 - 15 - BITS);
/// The bits of an address inside its network.
const BITS: u32 = 8;
const FIRST: u32 = u32::from_be_bytes([198, 18, 0, 0]);
/// So many machines fit into a network, beside the test's own.
const MACHINES: u32 = (1 << BITS) - 3;

/// The network of one test cluster.
pub struct Network(Arc<Hub>);

/// The namespace of the bridge.
struct Hub {
    namespace: OwnedFd,
    number: u32,
    /// Nobody else has the number while this is bound.
    _claim: UnixListener,
}

/// A machine on it. It is gone with its last process.
pub struct Machine {
    namespace: OwnedFd,
    /// The end of its cable at the bridge.
    port: String,
    hub: Arc<Hub>,
}

/// A machine that is cut off until this is dropped.
#[must_use = "the machine is connected again when this is dropped"]
pub struct Cut {
    port: String,
    hub: Arc<Hub>,
}

impl Network {
    /// A network without machines.
    ///
    /// # Errors
    /// This user is not root, or `ip` is not there or fails.
    pub fn new() -> Result<Network, Error> {
        if !rustix::process::geteuid().is_root() {
            return Err(failed(
                "only root can make network namespaces; run the test as root, or leave `machines()` out",
            ));
        }
        let mut last = failed("there are too many");
        for number in 0..NETWORKS {
            let Some(claim) = claim(number) else { continue };
            let hub = Hub { namespace: namespace().map_err(failed)?, number, _claim: claim };
            match hub.connect() {
                Ok(()) => return Ok(Network(Arc::new(hub))),
                // What had this number a moment ago may not be gone yet.
                Err(error) if error.to_string().contains("exists") => last = failed(error),
                Err(error) => return Err(failed(error)),
            }
        }
        Err(last)
    }

    /// The test's own address on it.
    pub fn address(&self) -> IpAddr {
        self.0.address(0)
    }

    /// Another machine, the `number`th from 0.
    ///
    /// # Errors
    /// There are too many, or `ip` fails.
    pub fn machine(&self, number: usize) -> Result<Machine, Error> {
        let number = u32::try_from(number).ok().filter(|number| *number < MACHINES);
        let number = number.ok_or_else(|| failed(format!("a test cluster has at most {MACHINES} machines")))?;
        let hub = &self.0;
        let (namespace, port) = (namespace().map_err(failed)?, format!("port{number}"));
        let inside = path(&namespace);
        // If it is there, it is another machine's.
        hub.ip(&format!("link add {port} type veth peer name eth0 netns {inside}")).map_err(failed)?;
        let machine = Machine { namespace, port, hub: hub.clone() };
        let (port, address) = (&machine.port, hub.address(number + 1));
        let connect = || -> io::Result<()> {
            hub.ip(&format!("link set {port} master hub up"))?;
            ip(&format!("addr add {address}/{} dev eth0", 32 - BITS), Some(&machine.namespace))?;
            ip("link set eth0 up", Some(&machine.namespace))?;
            ip("link set lo up", Some(&machine.namespace))
        };
        connect().map_err(failed)?;
        Ok(machine)
    }
}

impl Hub {
    fn connect(&self) -> io::Result<()> {
        let outside = self.outside();
        ip(&format!("link add {outside} type veth peer name test netns {}", path(&self.namespace)), None)?;
        ip(&format!("addr add {}/{} dev {outside}", self.address(0), 32 - BITS), None)?;
        ip(&format!("link set {outside} up"), None)?;
        self.ip("link add hub type bridge")?;
        self.ip("link set hub up")?;
        self.ip("link set test master hub up")
    }

    /// The test's interface.
    fn outside(&self) -> String {
        format!("wbtest{}", self.number)
    }

    fn address(&self, host: u32) -> IpAddr {
        Ipv4Addr::from(FIRST + (self.number << BITS) + 1 + host).into()
    }

    fn ip(&self, arguments: &str) -> io::Result<()> {
        ip(arguments, Some(&self.namespace))
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        // The kernel would do it, but later.
        let _ = ip(&format!("link del {}", self.outside()), None);
    }
}

impl Machine {
    /// The descriptor of its namespace.
    pub(super) fn namespace(&self) -> RawFd {
        self.namespace.as_raw_fd()
    }

    /// Has its packets vanish, in both directions, until the result is dropped.
    ///
    /// # Errors
    /// `ip` fails.
    pub fn cut(&self) -> Result<Cut, Error> {
        self.hub.ip(&format!("link set {} nomaster", self.port)).map_err(failed)?;
        Ok(Cut { port: self.port.clone(), hub: self.hub.clone() })
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // The kernel would do it, but later, and the next machine may have this number.
        let _ = self.hub.ip(&format!("link del {}", self.port));
    }
}

impl Drop for Cut {
    fn drop(&mut self) {
        if let Err(error) = self.hub.ip(&format!("link set {} master hub", self.port)) {
            tracing::warn!(%error, "a machine of a test cluster stays cut off");
        }
    }
}

impl std::fmt::Debug for Cut {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Cut({})", self.port)
    }
}

fn failed(why: impl std::fmt::Display) -> Error {
    Error::Failed { what: "making the machines of a test cluster".into(), why: why.to_string() }
}

/// Makes a number this cluster's alone, among all that share the test's network namespace, until the socket is closed.
fn claim(number: u32) -> Option<UnixListener> {
    let name = SocketAddr::from_abstract_name(format!("wingbeat-test-network-{number}")).ok()?;
    UnixListener::bind_addr(&name).ok()
}

/// A new network namespace.
fn namespace() -> io::Result<OwnedFd> {
    // A thread can have another namespace than its process.
    let made = std::thread::Builder::new().name("wingbeat-network".into()).spawn(|| -> io::Result<OwnedFd> {
        // SAFETY: the network namespace of this thread is used by nothing but the line after this one.
        unsafe { unshare_unsafe(UnshareFlags::NEWNET)? };
        Ok(std::fs::File::open("/proc/thread-self/ns/net")?.into())
    })?;
    made.join().unwrap_or_else(|_| Err(io::Error::other("a thread panicked")))
}

/// Moves the calling thread into a namespace.
pub(super) fn enter(namespace: BorrowedFd<'_>) -> io::Result<()> {
    Ok(move_into_link_name_space(namespace, Some(LinkNameSpaceType::Network))?)
}

/// By this name `ip` finds a namespace without a name.
fn path(namespace: &OwnedFd) -> String {
    format!("/proc/{}/fd/{}", std::process::id(), namespace.as_raw_fd())
}

/// Runs `ip` with these arguments, in a namespace or in the test's own.
fn ip(arguments: &str, namespace: Option<&OwnedFd>) -> io::Result<()> {
    let mut command = Command::new("ip");
    command.args(arguments.split(' ')).stdin(Stdio::null());
    if let Some(namespace) = namespace.map(AsRawFd::as_raw_fd) {
        // SAFETY: between fork and exec only one system call runs, on an open descriptor.
        unsafe {
            command.pre_exec(move || enter(BorrowedFd::borrow_raw(namespace)));
        }
    }
    let output = command.output().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => io::Error::other("`ip` is not there; install iproute2"),
        _ => error,
    })?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(io::Error::other(format!("`ip {arguments}`: {}", said.trim())));
    }
    Ok(())
}
