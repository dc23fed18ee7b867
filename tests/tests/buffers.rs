//! Buffers in values: read where they lie, on whichever node, for as long as somebody has them.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::collections::HashMap;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::time::Duration;

use common::{Local, Started};
use serde::{Deserialize, Serialize};
use wingbeat::{Buffer, Error, ObjectRef, Queue, put};
use wingbeat_core::spec::Address;
use wingbeat_core::value::Stored;
use wingbeat_core::{JobId, ProcessId, TaskId};
use wingbeat_net::address::{self, Stream};
use wingbeat_net::messages::{Fetch, Place};
use wingbeat_net::mux::{self, Waiting};
use wingbeat_net::services::{NodeClient, NodeRequest, NodeResponse, ProcessRequest, ProcessResponse};
use wingbeat_net::silence::Probing;
use wingbeat_net::{Connection, Hello, Purpose, Role, Token};
use wingbeat_tests::TestCluster;

/// Numbers of a buffer that is stored, and of one that is sent with messages.
const MANY: usize = 1 << 20;
const FEW: usize = 2000;

#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize, wingbeat::Plain)]
#[repr(C)]
struct Point {
    at: [f32; 2],
    id: u64,
}

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
struct Scan {
    name: String,
    points: Buffer<Point>,
    layers: HashMap<u32, Layer>,
    more: Option<Box<Scan>>,
}

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
enum Layer {
    Empty,
    Heights(Buffer<f64>),
    Pair { left: Buffer<u8>, right: Buffer<u16> },
}

fn scan(count: usize) -> Scan {
    let points = (0..count).map(|n| Point { at: [n as f32, 0.5], id: n as u64 }).collect();
    let pair = Layer::Pair { left: vec![7; count].into(), right: vec![9; 3].into() };
    let heights = Layer::Heights((0..count).map(|n| n as f64).collect());
    let layers = HashMap::from([(0, Layer::Empty), (1, heights), (2, pair)]);
    let more = Scan { name: "inner".to_owned(), points: vec![].into(), layers: HashMap::new(), more: None };
    Scan { name: "outer".to_owned(), points, layers, more: Some(Box::new(more)) }
}

fn numbers(count: usize) -> Buffer<u64> {
    (0..count as u64).collect()
}

fn is_right(buffer: &Buffer<u64>) -> bool {
    buffer.iter().enumerate().all(|(at, number)| at as u64 == *number)
}

/// What it was given, and whether it was read in place.
#[wingbeat::remote]
fn passed_on(scan: Scan) -> (Scan, bool) {
    let in_place = scan.points.is_elsewhere();
    (scan, in_place)
}

#[wingbeat::remote]
fn total(numbers: Buffer<u64>) -> u64 {
    numbers.iter().sum()
}

#[wingbeat::remote]
fn made(count: usize) -> Buffer<u64> {
    numbers(count)
}

#[wingbeat::remote]
fn several(count: usize) -> impl Iterator<Item = (u64, Buffer<u64>)> {
    [1, FEW, count].into_iter().map(|count| (count as u64, numbers(count)))
}

/// Reads what it was given when it may.
#[wingbeat::remote]
fn read_later(numbers: Buffer<u64>, started: PathBuf, go_on: PathBuf) -> (bool, bool) {
    std::fs::write(started, "").unwrap();
    while !go_on.exists() {
        std::thread::yield_now();
    }
    (numbers.is_elsewhere(), is_right(&numbers))
}

fn sum_of(count: usize) -> u64 {
    (0..count as u64).sum()
}

/// Puts more than the store holds, so that whatever may be moved or forgotten is.
fn fill_the_store() {
    let objects: Vec<_> = (0..6u8).map(|n| put(&vec![n; 4 << 20]).unwrap()).collect();
    for (n, object) in objects.iter().enumerate() {
        assert_eq!(object.get_blocking().unwrap(), vec![n as u8; 4 << 20]);
    }
}

#[test]
fn buffers_anywhere_in_a_value_are_arguments_and_results() {
    let _local = Local::start(2);
    for count in [0, 1, FEW, MANY / 8] {
        let scan = scan(count);
        assert_eq!(passed_on::remote(scan.clone()).get_blocking().unwrap(), (scan.clone(), count == MANY / 8));
        let stored = put(&scan).unwrap();
        assert_eq!(passed_on::remote(&stored).get_blocking().unwrap().0, scan);
        assert_eq!(stored.get_blocking().unwrap(), scan);
    }
    assert_eq!(total::remote(vec![1, 2, 3]).get_blocking().unwrap(), 6);
    assert_eq!(total::remote(made::remote(MANY)).get_blocking().unwrap(), sum_of(MANY));
}

#[test]
fn buffers_are_items_of_streams_and_queues() {
    let _local = Local::start(2);
    let mut items = several::remote(MANY);
    for count in [1, FEW, MANY] {
        let (said, buffer) = items.next_blocking().unwrap().unwrap();
        assert!(said == count as u64 && buffer.len() == count && is_right(&buffer));
    }
    let queue = Queue::<Buffer<u64>>::bounded(4);
    for count in [FEW, MANY] {
        queue.put_blocking(&numbers(count)).unwrap();
        let item = queue.get_blocking().unwrap();
        assert!(item.len() == count && is_right(&item));
    }
}

#[test]
fn a_buffer_from_another_node_is_read_on_this() {
    let mut cluster = TestCluster::start(0, 0).unwrap();
    cluster.add_node(&["--num-cpus", "2", "--resource", "home=10"]).unwrap();
    let _driver = Local::from(wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap()));
    cluster.add_node(&["--num-cpus", "2", "--resource", "far=10"]).unwrap();
    let far = made::options().resource("far", 1.0).remote(MANY);
    let here = far.get_blocking().unwrap();
    assert!(here.is_elsewhere() && is_right(&here));
    let of_here = put(&here).unwrap();
    for place in ["home", "far"] {
        assert_eq!(total::options().resource(place, 1.0).remote(&far).get_blocking().unwrap(), sum_of(MANY));
        assert_eq!(total::options().resource(place, 1.0).remote(&of_here).get_blocking().unwrap(), sum_of(MANY));
    }
    // The memory of a node that is gone is still mapped.
    drop((far, of_here));
    cluster.kill_node(0).unwrap();
    cluster.kill_node(1).unwrap();
    assert!(is_right(&here));
}

#[test]
fn a_buffer_stays_when_its_object_is_freed_and_others_need_the_memory() {
    let local = Local::from(wingbeat::init().num_cpus(1).object_store_memory(32 << 20));
    let object = put(&(1u8, numbers(MANY))).unwrap();
    let (_, buffer) = object.get_blocking().unwrap();
    assert!(buffer.is_elsewhere());
    let second = buffer.clone();
    // Not moved, and not spilled, while somebody reads there.
    fill_the_store();
    assert!(is_right(&buffer));
    // Nor given to others once nobody refers to the object.
    drop(object);
    fill_the_store();
    assert!(is_right(&buffer));
    drop(buffer);
    fill_the_store();
    assert!(is_right(&second));
    // And after the end of the session.
    drop(local);
    assert!(is_right(&second));
}

#[test]
fn what_a_buffer_has_kept_is_free_when_it_is_dropped() {
    let _local = Local::from(wingbeat::init().num_cpus(1).object_store_memory(16 << 20));
    let half = MANY / 8 * 9;
    let buffer = put(&numbers(half)).unwrap().get_blocking().unwrap();
    assert!(buffer.is_elsewhere() && is_right(&buffer));
    drop(buffer);
    put_when_there_is_room(half);
}

/// The node may hear of what was dropped later than of this.
fn put_when_there_is_room(count: usize) {
    let object = wingbeat_tests::poll(Duration::from_secs(60), || match put(&numbers(count)) {
        Ok(object) => Some(object),
        Err(Error::StoreFull { .. }) => None,
        Err(error) => panic!("{error}"),
    });
    assert!(is_right(&object.unwrap().get_blocking().unwrap()));
}

/// Nor is there in a while: the node may hear of what was dropped later than of the first of these.
fn there_is_no_room(count: usize) {
    let numbers = numbers(count);
    for _ in 0..100 {
        assert!(matches!(put(&numbers), Err(Error::StoreFull { .. })));
    }
}

/// A cluster whose node, with a store of so many bytes, outlives its drivers, and says at once that there is no room.
fn cluster_with(store: &str) -> TestCluster {
    let mut cluster = TestCluster::start(0, 0).unwrap();
    let args = ["--num-cpus", "1", "--object-store-memory", store];
    cluster.add_node_with(&args, &[("WINGBEAT_ROOM_LIMIT_MS", "1")]).unwrap();
    cluster
}

fn join(cluster: &TestCluster) -> Local {
    Local::from(wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap()))
}

#[test]
fn a_buffer_outlives_the_session_that_has_read_it_on_a_node_that_lives_on() {
    let cluster = cluster_with("40MiB");
    let first = join(&cluster);
    let buffer = put(&numbers(MANY)).unwrap().get_blocking().unwrap();
    let view = put(&vec![7u8; 1 << 20]).unwrap().view_blocking().unwrap();
    assert!(buffer.is_elsewhere());
    drop(first);
    let is_as_it_was = || is_right(&buffer) && view.iter().all(|byte| *byte == 7);
    for _ in 0..3 {
        // Each is another job, to which the memory would be given.
        let _next = join(&cluster);
        fill_the_store();
        assert!(is_as_it_was());
    }
}

#[test]
fn what_a_session_has_kept_is_free_when_its_last_buffer_is_dropped() {
    let cluster = cluster_with("16MiB");
    let half = MANY / 8 * 9;
    let first = join(&cluster);
    let buffer = put(&numbers(half)).unwrap().get_blocking().unwrap();
    drop(first);
    let _second = join(&cluster);
    // There is room for one.
    let full = put(&numbers(half)).unwrap_err();
    assert!(
        matches!(full, Error::StoreFull { .. }) && full.to_string().contains("most is held by a program"),
        "{full}"
    );
    assert!(buffer.is_elsewhere() && is_right(&buffer));
    drop(buffer);
    put_when_there_is_room(half);
}

#[test]
fn what_a_driver_has_kept_is_free_when_it_is_killed() {
    const READER: &str = "WINGBEAT_TEST_READER";
    let half = MANY / 8 * 9;
    if let Ok(address) = std::env::var(READER) {
        let _reader = Local::from(wingbeat::init_at(&address));
        let buffer = put(&numbers(half)).unwrap().get_blocking().unwrap();
        println!("it has read {}", buffer.len());
        loop {
            std::thread::park();
        }
    }
    let cluster = cluster_with("16MiB");
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    let command = command.args(["--exact", "what_a_driver_has_kept_is_free_when_it_is_killed", "--nocapture"]);
    let command = command.env(READER, cluster.address()).env("WINGBEAT_TOKEN", cluster.token().unwrap());
    let mut reader = command.stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(reader.stdout.take().unwrap()));
    assert!(lines.any(|line| line.unwrap().contains("it has read")));
    let _driver = join(&cluster);
    let full = put(&numbers(half));
    reader.kill().unwrap();
    reader.wait().unwrap();
    assert!(matches!(full, Err(Error::StoreFull { .. })));
    put_when_there_is_room(half);
}

#[test]
fn a_process_that_a_driver_has_forked_has_what_that_had_read() {
    const NAME: &str = "a_process_that_a_driver_has_forked_has_what_that_had_read";
    // In a process of its own: whatever is open in this one would be open in the forked one, too.
    if common::runs_again_with(NAME, &[]) {
        return;
    }
    let cluster = cluster_with("16MiB");
    let half = MANY / 8 * 9;
    let first = join(&cluster);
    let buffer = put(&numbers(half)).unwrap().get_blocking().unwrap();
    assert!(buffer.is_elsewhere());
    let (mut here, there) = std::os::unix::net::UnixStream::pair().unwrap();
    // SAFETY: until it ends, the child reads memory and makes system calls, and nothing else: no lock and no allocation.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let is_asked = (&there).read_exact(&mut [0]).is_ok();
        let has_it = is_asked && is_right(&buffer);
        // SAFETY: it runs nothing of this process.
        unsafe { libc::_exit(i32::from(!has_it)) };
    }
    drop((first, buffer, there));
    let _second = join(&cluster);
    // Nothing is left of it in the driver, and the memory is still not given to others.
    there_is_no_room(half);
    here.write_all(&[1]).unwrap();
    let child = rustix::process::Pid::from_raw(child);
    let (_, ended) = rustix::process::waitpid(child, rustix::process::WaitOptions::empty()).unwrap().unwrap();
    assert_eq!(ended.exit_status(), Some(0), "what it has is not as it was");
    put_when_there_is_room(half);
}

/// A driver as its node sees it, without a process of its own: it can end each of its connections.
struct HandMade {
    lent: Stream,
    control: Connection,
    node: NodeClient,
}

impl HandMade {
    async fn join(address: &Address, token: &Token) -> HandMade {
        let process = ProcessId::random();
        let role = Role::Driver(JobId::random());
        let hello = |purpose| {
            let of_tool = Hello::of_tool();
            Hello { role, purpose, address: Address { process, ..of_tool.address.clone() }, ..of_tool }
        };
        let lent = address::dial(address, "the node", token, hello(Purpose::Arena)).await.unwrap();
        // The memory comes with this byte.
        let Stream::Unix(socket) = &lent else { panic!("it is on another machine") };
        socket.readable().await.unwrap();
        let stream = address::dial(address, "the node", token, hello(Purpose::Control)).await.unwrap();
        let (control, client, _) = mux::connect_probing::<NodeRequest, NodeResponse, ProcessRequest, ProcessResponse>(
            stream,
            Waiting::Asleep,
            Probing::Expects,
        );
        HandMade { lent, control, node: NodeClient::new(mux::client_config(), client).spawn() }
    }

    async fn create(&self, seq: u64, size: u64) -> Result<Place, Error> {
        let object = TaskId { owner: ProcessId(7), seq }.output(0);
        self.node.create(mux::within(Duration::from_secs(60)), object, size, false, None).await.unwrap()
    }
}

#[test]
fn what_a_driver_writes_is_its_own_until_it_has_nothing_mapped() {
    let cluster = cluster_with("16MiB");
    let driver = join(&cluster);
    let state = wingbeat::block_on(driver.session.runtime().cluster_state()).unwrap();
    let (address, token) = (state.nodes[0].info.address.clone(), Token::new(cluster.token().unwrap()));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.block_on(async {
        let writer = HandMade::join(&address, &token).await;
        let size = 9 << 20;
        assert!(matches!(writer.create(1, size).await, Ok(Place::Free(_))));
        writer.control.close();
        writer.control.closed().await;
        // Another thread of the writer may be copying still.
        let next = HandMade::join(&address, &token).await;
        assert!(matches!(next.create(2, size).await, Err(Error::StoreFull { .. })));
        drop(writer.lent);
        let created = loop {
            match next.create(2, size).await {
                Err(Error::StoreFull { .. }) => tokio::task::yield_now().await,
                other => break other.unwrap(),
            }
        };
        assert!(matches!(created, Place::Free(_)));
    });
}

#[test]
fn what_a_driver_has_read_is_its_own_when_its_connection_broke_until_it_has_nothing_mapped() {
    let cluster = cluster_with("16MiB");
    let driver = join(&cluster);
    let state = wingbeat::block_on(driver.session.runtime().cluster_state()).unwrap();
    let (address, token) = (state.nodes[0].info.address.clone(), Token::new(cluster.token().unwrap()));
    let half = MANY / 8 * 9;
    let object = put(&numbers(half)).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let reader = runtime.block_on(async {
        let reader = HandMade::join(&address, &token).await;
        let stored = Stored { size: (half * 8) as u64, nodes: Vec::new(), refs: None };
        let what = Fetch { object: object.id(), stored, steward: None };
        let limit = mux::within(Duration::from_secs(60));
        let (place, _) = reader.node.fetch(limit, what).await.unwrap().unwrap();
        assert!(place.len >= (half * 8) as u64);
        reader.control.close();
        reader.control.closed().await;
        reader
    });
    drop(object);
    // Nobody refers to it, and who has read it cannot say any more that it has dropped it.
    there_is_no_room(half);
    drop(reader.lent);
    put_when_there_is_room(half);
}

struct Keeper(Vec<Buffer<u64>>);

#[wingbeat::actor]
impl Keeper {
    fn new(first: Buffer<u64>) -> Self {
        Keeper(vec![first])
    }

    fn keep(&mut self, scans: Vec<Buffer<u64>>) {
        self.0.extend(scans);
    }

    /// How many there are, how many lie in shared memory, and whether all are as they were.
    fn look(&self) -> (u64, u64, bool) {
        let in_place = self.0.iter().filter(|buffer| buffer.is_elsewhere()).count();
        (self.0.len() as u64, in_place as u64, self.0.iter().all(is_right))
    }

    fn changed(&mut self) -> Buffer<u64> {
        let first = self.0[0].to_mut();
        first.reverse();
        first.push(7);
        self.0[0].clone()
    }
}

#[test]
fn an_actor_keeps_buffers_that_it_was_called_with() {
    let _local = Local::from(wingbeat::init().num_cpus(1).object_store_memory(64 << 20));
    let first = put(&numbers(MANY)).unwrap();
    let keeper = Keeper::remote(&first);
    keeper.keep(vec![numbers(FEW), numbers(MANY)]).get_blocking().unwrap();
    drop(first);
    fill_the_store();
    // Also the small one: it is a part of a large value.
    assert_eq!(keeper.look().get_blocking().unwrap(), (3, 3, true));
    // What lies in shared memory is copied before it is changed.
    let changed = keeper.changed().get_blocking().unwrap();
    assert_eq!((changed.len(), changed[0], changed[MANY]), (MANY + 1, MANY as u64 - 1, 7));
}

#[test]
fn a_slow_reader_has_its_buffer_although_nobody_refers_to_it() {
    let _local = Local::from(wingbeat::init().num_cpus(1).object_store_memory(32 << 20));
    let (started, go_on) = (Started::new(), Started::new());
    let object: ObjectRef<Buffer<u64>> = put(&numbers(MANY)).unwrap();
    let read = read_later::remote(&object, started.path(), go_on.path());
    started.wait();
    drop(object);
    fill_the_store();
    std::fs::write(go_on.path(), "").unwrap();
    assert_eq!(read.get_blocking().unwrap(), (true, true));
}
