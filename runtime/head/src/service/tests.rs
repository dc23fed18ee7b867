//! What becomes of a request whose connection ends while its fact is being written, or whose head ends before it has answered.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::Semaphore;
use wingbeat_core::spec::{Address, BundleSpec, Executable, JobSpec, MachineId, PlacementGroupSpec, PlacementStrategy};
use wingbeat_core::{Amount, ClusterId, PlacementGroupId, ResourceSet};
use wingbeat_net::handshake::{Hello, Resumes, Role};
use wingbeat_net::messages::{Follow, HeadMessage, NodeInfo, Running};
use wingbeat_net::services::Head as _;

use super::calls::Service;
use super::peers::Before;
use super::*;

const DRIVER: ProcessId = ProcessId(1);
const JOB: JobId = JobId(1);
const GROUP: PlacementGroupId = PlacementGroupId(3);

/// A disk that writes when it may.
#[derive(Clone)]
struct Disk {
    asked: Arc<Notify>,
    may_write: Arc<Semaphore>,
    is_full: Arc<AtomicBool>,
    /// What it was given, in that order.
    written: Arc<Mutex<Vec<Fact>>>,
}

impl Durable for Disk {
    fn feed(&self) {}

    fn why_it_fails(&self) -> Option<String> {
        self.is_full.load(Ordering::Relaxed).then(|| "it is full".into())
    }

    fn write(&self, facts: Vec<Fact>) {
        self.written.lock().extend(facts);
    }

    fn write_and_tell(&self, facts: Vec<Fact>) -> BoxFuture<'static, Result<(), Error>> {
        self.intend(facts)
    }

    fn intend(&self, facts: Vec<Fact>) -> BoxFuture<'static, Result<(), Error>> {
        self.write(facts);
        let disk = self.clone();
        Box::pin(async move {
            disk.asked.notify_one();
            disk.may_write.acquire().await.unwrap().forget();
            match disk.is_full.load(Ordering::Relaxed) {
                true => Err(Error::Failed { what: "writing".into(), why: "it is full".into() }),
                false => Ok(()),
            }
        })
    }
}

fn address() -> Address {
    Address { process: DRIVER, machine: MachineId(1), unix: String::new(), tcp: None, steward: None }
}

fn job() -> JobSpec {
    JobSpec {
        id: JOB,
        name: "job".into(),
        driver: address(),
        executable: Executable::default(),
        working_dir: String::new(),
        env: BTreeMap::new(),
        local_env: BTreeMap::new(),
        namespace: "test".into(),
        priority: 0,
    }
}

/// A head with a driver whose disk writes nothing yet, and a group that the driver wants.
fn waiting_for_its_disk() -> (Service, Disk, PlacementGroupSpec) {
    let may_write = Arc::new(Semaphore::new(0));
    let disk = Disk { asked: Arc::default(), may_write, is_full: Arc::default(), written: Arc::default() };
    let state = State::new(ClusterId(1), 1);
    let shell = Shell::new(state, Some(Box::new(disk.clone())), Programs::in_memory(), None, None);
    shell.step(Event::ProcessConnected(DRIVER));
    shell.step(Event::JobJoined(Box::new(job())));
    let service = Service { shell: shell.clone(), process: DRIVER, role: Role::Driver(JOB), unknown: None, knew: None };
    let bundle = BundleSpec { resources: ResourceSet::cpus(Amount::ONE), ..BundleSpec::default() };
    let spec = PlacementGroupSpec {
        id: GROUP,
        job: JOB,
        name: None,
        strategy: PlacementStrategy::Pack,
        bundles: vec![bundle],
        detached: false,
        captures_children: false,
        patient: false,
        owner: address(),
    };
    (service, disk, spec)
}

/// The request was given up while the disk was busy.
async fn given_up() -> (Arc<Shell>, Disk) {
    let (service, disk, spec) = waiting_for_its_disk();
    let shell = service.shell.clone();
    tokio::select! {
        _ = service.create_placement_group(tarpc::context::current(), spec) => panic!("it is not written"),
        () = disk.asked.notified() => {}
    }
    (shell, disk)
}

/// The disk writes, and everything that follows from that happens.
async fn go_on(disk: &Disk) {
    disk.may_write.add_permits(1);
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
}

fn has_the_group(shell: &Shell) -> bool {
    shell.inside.lock().state.picture().placement_groups.iter().any(|group| group.id == GROUP)
}

#[tokio::test]
async fn what_is_on_the_disk_is_made_true_also_when_the_request_was_given_up() {
    let (shell, disk) = given_up().await;
    go_on(&disk).await;
    assert!(has_the_group(&shell));
    let written = disk.written.lock();
    assert!(matches!(written.last(), Some(Fact::Group(..))), "{written:?}");
}

#[tokio::test]
async fn what_would_have_ended_with_its_creator_is_not_made_after_that() {
    let (shell, disk) = given_up().await;
    shell.step(Event::ProcessLost(DRIVER, Some(JOB)));
    go_on(&disk).await;
    assert!(!has_the_group(&shell));
    let written = disk.written.lock();
    assert!(matches!(written.last(), Some(Fact::GroupGone(GROUP) | Fact::JobGone(JOB))), "{written:?}");
    assert!(written.iter().any(|fact| matches!(fact, Fact::GroupGone(GROUP))), "{written:?}");
}

#[tokio::test]
async fn what_cannot_be_written_is_taken_back() {
    let (service, disk, spec) = waiting_for_its_disk();
    let shell = service.shell.clone();
    disk.is_full.store(true, Ordering::Relaxed);
    disk.may_write.add_permits(1);
    let error = service.create_placement_group(tarpc::context::current(), spec).await.unwrap_err();
    assert!(error.to_string().contains("it is full"), "{error}");
    assert!(!has_the_group(&shell));
    let written = disk.written.lock();
    assert!(matches!(written.last(), Some(Fact::GroupGone(GROUP))), "{written:?}");
}

#[tokio::test]
async fn what_is_removed_is_free_also_when_that_cannot_be_written_yet() {
    let (service, disk, spec) = waiting_for_its_disk();
    let shell = service.shell.clone();
    disk.may_write.add_permits(2);
    service.clone().create_placement_group(tarpc::context::current(), spec).await.unwrap();
    disk.is_full.store(true, Ordering::Relaxed);
    let error = service.clone().remove_placement_group(tarpc::context::current(), GROUP).await.unwrap_err();
    assert!(error.to_string().contains("is removed"), "{error}");
    assert!(!has_the_group(&shell));
    assert!(matches!(disk.written.lock().last(), Some(Fact::GroupGone(GROUP))));
    // Whoever asks again hears that it is not written either.
    disk.may_write.add_permits(1);
    assert!(service.remove_placement_group(tarpc::context::current(), GROUP).await.is_err());
}

#[tokio::test]
async fn what_cannot_be_written_is_taken_back_also_when_the_request_was_given_up() {
    let (service, disk, spec) = waiting_for_its_disk();
    let shell = service.shell.clone();
    disk.is_full.store(true, Ordering::Relaxed);
    tokio::select! {
        _ = service.create_placement_group(tarpc::context::current(), spec) => panic!("it is not written"),
        () = disk.asked.notified() => {}
    }
    go_on(&disk).await;
    assert!(!has_the_group(&shell));
    let written = disk.written.lock();
    assert!(matches!(written.last(), Some(Fact::GroupGone(GROUP))), "{written:?}");
}

#[tokio::test]
async fn a_panic_of_one_of_its_tasks_ends_the_head_with_that_as_the_reason() {
    let shell = Shell::new(State::new(ClusterId(1), 1), None, Programs::in_memory(), None, None);
    shell.vital("a test", async { panic!("on purpose") });
    let why = shell.stopped().await.unwrap_err();
    assert!(why.contains("a test") && why.contains("on purpose"), "{why}");
}

const NODE: NodeId = NodeId(4);

fn node() -> NodeInfo {
    NodeInfo {
        id: NODE,
        address: address(),
        hostname: "host".into(),
        resources: ResourceSet::new(),
        devices: Vec::new(),
        labels: BTreeMap::new(),
        store_bytes: 0,
    }
}

/// A head that was started again for a cluster of which it knows this, and how it takes somebody whose join was not answered, or was.
fn started_again(facts: Vec<Fact>) -> (Arc<Shell>, impl Fn(Role, Resumes) -> Before) {
    let state = State::recover(ClusterId(1), 1, facts, 1_000);
    let shell = Shell::new(state, None, Programs::in_memory(), Some(Epoch(2)), None);
    let asked = shell.clone();
    let before = move |role, resumes| {
        let hello = Hello { role, resumes, address: address(), epoch: Some(Epoch(1)), ..Hello::of_tool() };
        asked.before(&hello, &asked.inside.lock().state)
    };
    (shell, before)
}

#[test]
fn who_was_not_told_that_it_has_joined_joins_the_next_head_also_when_that_awaits_nobody() {
    let (shell, before) = started_again(Vec::new());
    shell.change(|state, _| ((), state.step(0, Event::Tick)));
    assert!(!shell.inside.lock().state.is_recovering());
    for role in [Role::Driver(JOB), Role::Node(NODE)] {
        assert_eq!(before(role, Resumes::Joining), Before::WithEarlier, "{role:?}");
        assert_eq!(before(role, Resumes::Joined), Before::TooLongAgo, "{role:?}");
    }
}

#[test]
fn who_may_have_joined_and_was_given_up_does_not_join_again() {
    let (shell, before) = started_again(vec![Fact::Node(Box::new(node()), None)]);
    assert_eq!(before(Role::Node(NODE), Resumes::Joining), Before::WithEarlier);
    shell.change(|state, _| ((), state.step(0, Event::NodeLost(NODE, "a test".into()))));
    assert_eq!(before(Role::Node(NODE), Resumes::Joining), Before::TooLongAgo, "others were told that it is lost");
}

#[test]
fn a_driver_whose_job_the_last_head_has_ended_does_not_go_on_with_the_next() {
    let node = || Fact::Node(Box::new(node()), None);
    let (_shell, before) = started_again(vec![node(), Fact::Job(Box::new(job()), true)]);
    assert_eq!(before(Role::Driver(JOB), Resumes::Joined), Before::WithEarlier);
    let (_shell, before) = started_again(vec![node()]);
    assert_eq!(before(Role::Driver(JOB), Resumes::Joined), Before::TooLongAgo, "its groups and actors were ended");
    assert_eq!(
        before(Role::Driver(JOB), Resumes::Joining),
        Before::WithEarlier,
        "the last head may not have heard of it"
    );
}

#[test]
fn who_is_not_known_any_more_is_told_why() {
    let (shell, before) = started_again(vec![Fact::Node(Box::new(node()), None)]);
    let why = |role| {
        let hello = Hello { role, resumes: Resumes::Joined, ..Hello::of_tool() };
        shell.why_unknown(&hello, before(role, Resumes::Joined))
    };
    assert!(why(Role::Driver(JOB)).contains("does not know its job"), "{}", why(Role::Driver(JOB)));
    shell.change(|state, _| ((), state.step(0, Event::NodeLost(NODE, "its connection ended".into()))));
    assert_eq!(why(Role::Node(NODE)), "its connection ended");
    shell.change(|state, _| ((), state.step(1_000, Event::Tick)));
    assert!(why(Role::Driver(JOB)).contains("waits no longer"), "{}", why(Role::Driver(JOB)));
}

#[tokio::test]
async fn a_node_is_told_that_it_has_joined_when_that_is_written() {
    let (service, disk, _) = waiting_for_its_disk();
    let info = node();
    let service = Service { role: Role::Node(NODE), ..service };
    tokio::select! {
        _ = service.clone().join_node(tarpc::context::current(), info.clone(), Running::default()) => panic!("it is not written"),
        () = disk.asked.notified() => {}
    }
    disk.is_full.store(true, Ordering::Relaxed);
    disk.may_write.add_permits(2);
    let view = service.join_node(tarpc::context::current(), info, Running::default()).await.unwrap();
    assert_eq!(view.nodes.len(), 1, "a disk without room keeps no node away");
}

/// The connection over which it began to join has ended, which is noticed late.
#[tokio::test]
async fn a_node_that_joins_once_more_is_not_forgotten_when_its_first_join_is_given_up() {
    let disk = Disk {
        asked: Arc::default(),
        may_write: Arc::new(Semaphore::new(0)),
        is_full: Arc::default(),
        written: Arc::default(),
    };
    let standby = Arc::new(Follower::new(Epoch(1), Arc::default()));
    let journal: Box<dyn Durable> = Box::new(disk.clone());
    let state = State::new(ClusterId(1), 1);
    let shell = Shell::new(state, Some(journal), Programs::in_memory(), Some(Epoch(1)), Some(standby.clone()));
    let asks = Follow { written: 0, generation: None, standby: Address { process: ProcessId(9), ..address() } };
    assert!(futures::poll!(Box::pin(standby.follow(&shell, ProcessId(9), asks))).is_pending());
    let service =
        || Service { shell: shell.clone(), process: DRIVER, role: Role::Node(NODE), unknown: None, knew: None };
    let join = || Box::pin(service().join_node(tarpc::context::current(), node(), Running::default()));
    let (mut first, mut second) = (join(), join());
    let is_known = || {
        let of_node = |fact: &Fact| match fact {
            Fact::Node(info, _) => Some(info.id == NODE),
            Fact::NodeGone(node) => (*node == NODE).then_some(false),
            _ => None,
        };
        disk.written.lock().iter().rev().find_map(of_node)
    };
    assert!(futures::poll!(&mut first).is_pending() && futures::poll!(&mut second).is_pending());
    assert_eq!(is_known(), Some(true));
    drop(first);
    assert_eq!(is_known(), Some(true), "it is still joining");
    drop(second);
    assert_eq!(is_known(), Some(false), "the next head would wait for it");
    // And one that has joined stays.
    let (mut first, mut second) = (join(), join());
    assert!(futures::poll!(&mut first).is_pending());
    disk.may_write.add_permits(3);
    assert!((&mut second).await.is_ok());
    drop((first, second));
    assert_eq!(is_known(), Some(true));
}

#[tokio::test]
async fn a_stop_goes_to_its_end_also_when_whoever_asked_for_it_is_gone() {
    // It may still come back, and has a moment.
    let (shell, _) = started_again(vec![Fact::Node(Box::new(node()), None)]);
    let service =
        Service { shell: shell.clone(), process: DRIVER, role: Role::Tool, unknown: Some("a test".into()), knew: None };
    let mut asking = Box::pin(service.stop(tarpc::context::current()));
    assert!(futures::poll!(&mut asking).is_pending());
    drop(asking);
    shell.step(Event::NodeLost(NODE, "a test".into()));
    shell.stopped().await.unwrap();
    // Whoever asks after that has nothing to wait for.
    shell.stop_nodes().await;
    assert!(*shell.stopping.borrow() == Stage::Told);
}

#[tokio::test]
async fn a_head_that_has_left_writes_nothing_of_those_that_it_has_left_and_takes_nothing_in() {
    let (service, disk, _) = waiting_for_its_disk();
    let shell = service.shell.clone();
    disk.may_write.add_permits(1);
    shell.leave().await;
    let written = disk.written.lock().len();
    shell.step(Event::ProcessLost(DRIVER, Some(JOB)));
    assert_eq!(disk.written.lock().len(), written);
    assert!(shell.inside.lock().state.is_connected(DRIVER));
    let saying = service.deliver(tarpc::context::current(), 0, vec![HeadMessage::Leaves]);
    assert!(futures::poll!(Box::pin(saying)).is_pending(), "it is to be said to the next head");
}
