//! Somebody without a token opens connections to every socket of the cluster, as fast as they are dropped, and says nothing:
//! head, nodes, driver and worker processes go on to find each other.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::collections::{BTreeSet, VecDeque};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;

use common::Local;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use wingbeat::{ObjectRef, put};
use wingbeat_tests::TestCluster;

/// Connections to each socket that are held at a time: more than any of them has room for.
const HALF_OPEN: usize = 400;
/// In /proc/net/unix: it listens.
const LISTENING: &str = "00010000";

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Door {
    Tcp(SocketAddr),
    /// A name in the abstract namespace.
    Unix(String),
}

impl Door {
    fn knock(&self) -> Option<OwnedFd> {
        match self {
            Door::Tcp(address) => TcpStream::connect(address).ok().map(OwnedFd::from),
            Door::Unix(name) => {
                let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
                let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).ok()?;
                let to = SocketAddrUnix::new_abstract_name(name.as_bytes()).ok()?;
                rustix::net::connect(&socket, &to).ok().map(|()| socket)
            }
        }
    }
}

/// Where a process listens.
fn doors(pid: u32) -> BTreeSet<Door> {
    let sockets: BTreeSet<String> = std::fs::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok()?.to_str().map(str::to_owned))
        .filter_map(|link| link.strip_prefix("socket:[")?.strip_suffix(']').map(str::to_owned))
        .collect();
    let unix = std::fs::read_to_string(format!("/proc/{pid}/net/unix")).unwrap();
    let unix = unix.lines().filter_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let is_theirs = fields.get(3) == Some(&LISTENING) && sockets.contains(*fields.get(6)?);
        fields.get(7)?.strip_prefix('@').filter(|_| is_theirs).map(|name| Door::Unix(name.to_owned()))
    });
    let tcp = std::fs::read_to_string(format!("/proc/{pid}/net/tcp")).unwrap();
    let tcp = tcp.lines().filter_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let is_theirs = fields.get(3) == Some(&"0A") && sockets.contains(*fields.get(9)?);
        let port = u16::from_str_radix(fields.get(1)?.split_once(':')?.1, 16).ok()?;
        is_theirs.then(|| Door::Tcp(SocketAddr::from(([127, 0, 0, 1], port))))
    });
    unix.chain(tcp).collect()
}

/// Holds as many connections to each door as it is told, for as long as it lives.
struct Flood {
    over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Flood {
    /// Answers when every door has had its connections once.
    fn of(doors: BTreeSet<Door>) -> Flood {
        let over = Arc::new(AtomicBool::new(false));
        let under_water = Arc::new(AtomicUsize::new(0));
        let count = doors.len();
        let threads = doors.into_iter().map(|door| {
            let (over, under_water) = (over.clone(), under_water.clone());
            std::thread::spawn(move || {
                let mut open = VecDeque::new();
                let mut knocks = 0usize;
                while !over.load(Ordering::Relaxed) {
                    match door.knock() {
                        Some(stream) => open.push_back(stream),
                        // Its queue is full, which is as good.
                        None => std::thread::yield_now(),
                    }
                    knocks += 1;
                    if knocks == HALF_OPEN {
                        under_water.fetch_add(1, Ordering::Relaxed);
                    }
                    if open.len() > HALF_OPEN {
                        open.pop_front();
                    }
                }
            })
        });
        let threads = threads.collect();
        let flood = Flood { over, threads };
        while under_water.load(Ordering::Relaxed) < count {
            std::thread::yield_now();
        }
        flood
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Keeps a ref to what it made: whoever reads it comes to this process.
struct Keeper {
    made: Vec<ObjectRef<Vec<u8>>>,
}

#[wingbeat::actor]
impl Keeper {
    fn new() -> Self {
        Keeper { made: Vec::new() }
    }
    fn pid(&self) -> u32 {
        std::process::id()
    }
    fn make(&mut self, len: usize) -> Vec<ObjectRef<Vec<u8>>> {
        self.made.push(put(&vec![7; len]).unwrap());
        self.made.clone()
    }
}

#[wingbeat::remote]
fn sum(bytes: Vec<u8>) -> u64 {
    bytes.iter().map(|byte| u64::from(*byte)).sum()
}

#[wingbeat::remote]
fn asks(keeper: KeeperHandle, len: usize) -> u64 {
    let made = keeper.make(len).get_blocking().unwrap();
    sum::remote(made.last().unwrap().clone()).get_blocking().unwrap()
}

#[test]
fn connections_that_say_nothing_keep_nobody_out_of_any_process() {
    let cluster = TestCluster::start(2, 2).unwrap();
    let join = || Local::from(wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap()));
    let local = join();
    let keepers: Vec<_> = (0..2).map(|_| Keeper::remote()).collect();
    let workers: Vec<u32> = keepers.iter().map(|keeper| keeper.pid().get_blocking().unwrap()).collect();
    let pids = cluster.pids().into_iter().chain(workers).chain([std::process::id()]);
    let each: Vec<BTreeSet<Door>> = pids.map(doors).collect();
    assert!(each.iter().all(|doors| !doors.is_empty()), "{each:?}");
    let flood = Flood::of(each.into_iter().flatten().collect());
    // New processes come to old ones: worker processes to actors, to this driver and to each other's nodes.
    for len in [10, 1 << 20] {
        let answers: Vec<_> =
            (0..4).map(|number| asks::options().num_cpus(0.5).remote(keepers[number % 2].clone(), len)).collect();
        for answer in answers {
            assert_eq!(answer.get_blocking().unwrap(), 7 * len as u64);
        }
    }
    // Another driver comes to the head and to the nodes.
    drop(local);
    let _other = join();
    assert_eq!(sum::remote(vec![1; 10]).get_blocking().unwrap(), 10);
    drop(flood);
}
