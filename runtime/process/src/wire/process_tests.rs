//! A process by itself, without a cluster.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use wingbeat_core::spec::{Executable, JobSpec};
use wingbeat_core::value::ObjectValue;
use wingbeat_net::handshake::Epoch;

use super::*;
use crate::owner::object::Handle;
use crate::session::session::Session;

/// A process that has joined nothing.
pub(crate) fn start() -> Session {
    start_in(Token::random(), ClusterId::random())
}

pub(crate) fn start_in(token: Token, cluster: ClusterId) -> Session {
    start_with(token, cluster, None)
}

/// In a pretended network, if there is one.
pub(crate) fn start_with(token: Token, cluster: ClusterId, network: Option<Network>) -> Session {
    let io = Arc::new(Io::start().unwrap());
    let job = JobId::random();
    let config = Config { id: ProcessId::random(), token, role: Role::Driver(job), listen: None };
    let starting = io.clone();
    let session = io.run(async move {
        let prepared = match network {
            Some(network) => Prepared::bind_in(&network, config).await,
            None => Prepared::bind(config).await,
        };
        prepared.map(|prepared| prepared.start(&starting, job, "test".into(), cluster))
    });
    session.unwrap().unwrap()
}

#[derive(Serialize, Deserialize)]
struct Link(Option<Next>);

/// A ref, as users' refs are read and written.
struct Next(Handle);

impl Serialize for Next {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        crate::session::values::serialize_handle(&self.0, serializer)
    }
}

impl<'de> Deserialize<'de> for Next {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        crate::session::values::deserialize_handle(deserializer).map(Next)
    }
}

fn chain(session: &Session, length: u32) -> Handle {
    let mut last = session.put(&Link(None)).unwrap();
    for _ in 1..length {
        last = session.put(&Link(Some(Next(last)))).unwrap();
    }
    last
}

#[test]
fn dropping_many_nested_objects_needs_no_deep_stack() {
    let session = start();
    let last = chain(&session, 100_000);
    assert_eq!(session.process().live_objects(), 100_000);
    let small = std::thread::Builder::new().stack_size(64 << 10);
    small.spawn(move || drop(last)).unwrap().join().unwrap();
    assert_eq!(session.process().live_objects(), 0);
    session.process().shut_down("the test is over");
}

thread_local! {
    static AT_EXIT: std::cell::RefCell<Option<Handle>> = const { std::cell::RefCell::new(None) };
}

#[test]
fn nested_objects_can_be_dropped_while_a_thread_ends() {
    let session = start();
    let last = chain(&session, 100_000);
    let small = std::thread::Builder::new().stack_size(64 << 10);
    small.spawn(move || AT_EXIT.set(Some(last))).unwrap().join().unwrap();
    assert_eq!(session.process().live_objects(), 0);
    session.process().shut_down("the test is over");
}

#[test]
fn what_waits_for_a_long_chain_of_objects_is_called_without_deep_stack() {
    let session = start();
    let handles: Vec<Handle> =
        (0..100_000).map(|_| session.owner().new_object(session.owner().next_task().output(0), None)).collect();
    for pair in handles.windows(2) {
        let (process, next) = (session.process().clone(), pair[1].object().clone());
        let then: Arc<dyn Fn() + Send + Sync> = Arc::new(move || {
            process.owner.resolve_object(&next, ObjectValue::Failed(Box::new(Error::NoSession)), Vec::new());
        });
        assert!(pair[0].object().when_ready(&then).is_some());
    }
    let (process, first) = (session.process().clone(), handles[0].object().clone());
    let small = std::thread::Builder::new().stack_size(64 << 10);
    let resolving = small.spawn(move || {
        process.owner.resolve_object(&first, ObjectValue::Failed(Box::new(Error::NoSession)), Vec::new());
    });
    resolving.unwrap().join().unwrap();
    assert!(handles.iter().all(Handle::is_ready));
    session.process().shut_down("the test is over");
}

#[test]
fn a_panic_on_a_thread_for_tasks_ends_the_session_with_that_as_the_reason() {
    let session = start();
    session.process().vital_thread("a test", || panic!("on purpose"));
    let Some(Error::SessionEnded { why }) = session.process().ended() else { panic!("the session goes on") };
    assert!(why.contains("a thread of Wingbeat's") && why.contains("on purpose"), "{why}");
    session.process().shut_down("the test is over");
}

#[test]
fn whoever_waits_for_what_panics_on_the_io_thread_is_told_that() {
    let session = start();
    let answer: Result<(), Error> = session.process().on_io(async { panic!("on purpose") });
    let Err(Error::SessionEnded { why }) = answer else { panic!("{answer:?}") };
    assert!(why.contains("a defect of Wingbeat's"), "{why}");
    session.process().shut_down("the test is over");
}

#[test]
fn a_panic_on_the_io_thread_ends_the_session_with_that_as_the_reason() {
    let session = start();
    let handle = session.owner().new_object(session.owner().next_task().output(0), None);
    session.process().vital("a test", async { panic!("on purpose") });
    let waiting = session.value(&handle);
    let waited =
        session.process().io().spawn(async move { tokio::time::timeout(Duration::from_secs(60), waiting).await });
    let ended = session.block_on(waited).unwrap().unwrap();
    let Err(Error::SessionEnded { why }) = ended else { panic!("the session goes on") };
    assert!(why.contains("a test") && why.contains("on purpose"), "{why}");
    assert!(session.process().is_over());
    session.process().shut_down("the test is over");
}

#[test]
fn nothing_is_kept_of_processes_that_are_gone_but_the_latest_names() {
    let session = start();
    let process = session.process();
    let borrowed = process.owner.borrow(wingbeat_core::TaskId { owner: ProcessId(1), seq: 1 }.output(0));
    // Nobody knows where its owner is.
    let Some(ObjectValue::Failed(error)) = borrowed.object().value() else { panic!("it waits for ever") };
    assert!(matches!(*error, Error::OwnerDied { .. }), "{error}");
    for id in 1..20_000 {
        let address = wingbeat_core::spec::Address { process: ProcessId(id), ..process.address().clone() };
        process.know(&address);
        process.wire.peers.certainly_gone(ProcessId(id));
        process.know(&address);
    }
    assert_eq!(process.wire.peers.size(), (1, 4_096));
    process.shut_down("the test is over");
}

#[test]
fn nothing_is_kept_of_a_process_that_ended_while_nobody_waited_for_it() {
    let session = start();
    let process = session.process();
    for _ in 0..5 {
        let other = start_in(process.wire.who.token.clone(), process.cluster());
        let id = other.process().id();
        process.know(other.process().address());
        process.send_to(id, wingbeat_net::messages::Work::Received(Vec::new()).into());
        while !process.wire.peers.has_contact(id) {
            std::thread::yield_now();
        }
        other.process().shut_down("it ends");
        drop(other);
        while process.wire.peers.has_contact(id) || process.wire.peers.address(id).is_some() {
            std::thread::yield_now();
        }
    }
    process.shut_down("the test is over");
}

#[test]
fn the_loss_of_a_process_that_was_gone_before_it_was_reached_is_told() {
    let session = start();
    let process = session.process();
    let gone = start_in(process.wire.who.token.clone(), process.cluster());
    let (id, address) = (gone.process().id(), gone.process().address().clone());
    gone.process().shut_down("it ends");
    drop(gone);
    process.know(&address);
    let borrowed = process.owner.borrow(wingbeat_core::TaskId { owner: id, seq: 1 }.output(0));
    let waiting = session.value(&borrowed);
    let waited = process.io().spawn(async move { tokio::time::timeout(Duration::from_secs(60), waiting).await });
    let error = session.block_on(waited).unwrap().expect("it waits for ever").err().unwrap();
    assert!(matches!(error, Error::OwnerDied { .. }), "{error}");
    while process.wire.peers.has_contact(id) {
        std::thread::yield_now();
    }
    process.shut_down("the test is over");
}

#[test]
fn a_process_stays_for_a_group_that_it_has_made_until_that_is_removed_by_whomever() {
    let session = start();
    let process = session.process();
    let [own, watched, being_made] = [1, 2, 3].map(PlacementGroupId);
    process.wire.own_groups.insert(own, true);
    process.wire.own_groups.insert(being_made, false);
    process.wire.groups.groups.lock().entry(watched).or_default();
    assert!(process.groups_to_hear_of().into_iter().eq([own, watched]), "of a head that is started again");
    let says = |group, state| process.head_event(HeadEvent::PlacementGroup { group, state });
    says(own, PlacementGroupState::Pending);
    assert!(!process.is_done());
    for group in [own, being_made] {
        assert!(!process.is_done());
        says(group, PlacementGroupState::Gone { cause: Box::new(Error::NoSession) });
    }
    assert!(process.is_done());
    process.shut_down("the test is over");
}

/// A head that takes connections in, and says who comes and with what it goes on.
struct Listening {
    address: wingbeat_core::spec::Address,
    found: std::sync::mpsc::Receiver<Hello>,
    serving: tokio::task::JoinHandle<()>,
}

impl Listening {
    /// The next head of the cluster of `process`: the same process in its next life.
    fn in_life(epoch: u64, network: &Network, session: &Session) -> Listening {
        let process = session.process();
        let (token, cluster, network) = (process.wire.who.token.clone(), process.cluster(), network.clone());
        let binding = async move { Listener::bind_in(&network, ProcessId(9), None).await.unwrap() };
        let listener = session.block_on(process.io().spawn(binding)).unwrap();
        let address = listener.address().clone();
        let welcome =
            Welcome { address: address.clone(), cluster, epoch: Some(Epoch(epoch)), patience: None, stands_by: None };
        let (finds, found) = std::sync::mpsc::channel();
        // A connection ends with the head.
        let open = Arc::new(Mutex::new(Vec::new()));
        let accept = move |stream, hello: Hello| {
            open.lock().push(stream);
            let _ = finds.send(hello);
        };
        let serving = process.io().spawn(listener.serve(token, welcome, accept));
        Listening { address, found, serving }
    }

    fn next(&self) -> Hello {
        self.found.recv_timeout(Duration::from_secs(60)).unwrap()
    }

    fn ends(self, session: &Session) {
        self.serving.abort();
        // An abort is complete when it has been waited for.
        let _ = session.block_on(self.serving);
    }
}

#[test]
fn a_driver_that_was_not_told_that_it_has_joined_says_so_to_the_next_head() {
    let network = Network::new();
    let session = start_with(Token::random(), ClusterId::random(), Some(network.clone()));
    let process = session.process().clone();
    let first = Listening::in_life(1, &network, &session);
    let head = HeadLink::new(first.address.clone());
    head.found(Some(Epoch(1)));
    process.set_head(head.clone());
    process.tell_head(wingbeat_net::messages::HeadMessage::Leaves);
    assert_eq!(first.next().resumes, Resumes::Nothing);
    first.ends(&session);
    let second = Listening::in_life(2, &network, &session);
    let hello = second.next();
    assert_eq!((hello.resumes, hello.epoch), (Resumes::Joining, Some(Epoch(1))));
    head.has_joined(JobSpec {
        id: process.wire.who.job,
        name: "job".into(),
        driver: process.address().clone(),
        executable: Executable::default(),
        working_dir: String::new(),
        env: BTreeMap::new(),
        local_env: BTreeMap::new(),
        namespace: "test".into(),
        priority: 0,
    });
    second.ends(&session);
    let third = Listening::in_life(3, &network, &session);
    assert_eq!(third.next().resumes, Resumes::Joined);
    third.ends(&session);
    process.shut_down("the test is over");
    network.close();
}

#[test]
fn a_head_that_is_started_again_before_a_driver_has_reached_it_is_waited_for() {
    let (network, token, cluster) = (Network::new(), Token::random(), ClusterId::random());
    let session = start_with(token.clone(), cluster, Some(network.clone()));
    let process = session.process().clone();
    let listens = |network: Network| async move { Listener::bind_in(&network, ProcessId(9), None).await.unwrap() };
    let before = session.block_on(process.io().spawn(listens(network.clone()))).unwrap();
    let address = before.address().clone();
    // It has said that another will follow, and has ended.
    drop(before);
    let head = HeadLink::new(address.clone());
    head.found(Some(Epoch(1)));
    process.set_head(head);
    process.tell_head(wingbeat_net::messages::HeadMessage::Leaves);
    let (found, finds) = std::sync::mpsc::channel();
    let next = listens(network.clone());
    let serving = process.io().spawn(async move {
        let welcome = Welcome { address, cluster, epoch: Some(Epoch(2)), patience: None, stands_by: None };
        let found = move |_, hello: Hello| {
            let _ = found.send(hello.address.process);
        };
        next.await.serve(token, welcome, found).await;
    });
    assert_eq!(finds.recv_timeout(std::time::Duration::from_secs(60)), Ok(process.id()));
    assert!(process.ended().is_none());
    serving.abort();
    process.shut_down("the test is over");
    network.close();
}

#[test]
fn refs_in_a_result_that_a_process_sends_to_itself_are_held_until_it_is_taken_in() {
    let session = start();
    let process = session.process();
    let (held, inner) = (crate::work::Held::default(), session.put(&1_u32).unwrap());
    let task = TaskId { owner: process.id(), seq: 1_000 };
    held.result(task, vec![inner], || (), || process.can_reach(process.id()));
    assert_eq!(held.what_is_left(), [task.to_string()]);
    held.results_received([task]);
    assert!(held.what_is_left().is_empty());
    process.shut_down("the test is over");
}
