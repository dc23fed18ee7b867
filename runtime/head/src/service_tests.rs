//! What becomes of a request whose connection ends while its fact is being written.

use std::collections::BTreeMap;

use tokio::sync::Semaphore;
use wingbeat_core::spec::{Address, BundleSpec, Executable, MachineId, PlacementStrategy};
use wingbeat_core::{Amount, ClusterId};

use super::*;

const DRIVER: ProcessId = ProcessId(1);
const JOB: JobId = JobId(1);
const GROUP: PlacementGroupId = PlacementGroupId(3);

/// A disk that writes when it may.
#[derive(Clone)]
struct Disk {
    asked: Arc<Notify>,
    may_write: Arc<Semaphore>,
    written: Arc<Mutex<Vec<Fact>>>,
}

impl Durable for Disk {
    fn write(&self, facts: Vec<Fact>) {
        self.written.lock().extend(facts);
    }

    fn intend(&self, facts: Vec<Fact>) -> BoxFuture<'_, Result<(), Error>> {
        Box::pin(async {
            self.asked.notify_one();
            self.may_write.acquire().await.unwrap().forget();
            self.write(facts);
            Ok(())
        })
    }
}

fn address() -> Address {
    Address { process: DRIVER, machine: MachineId(1), unix: String::new(), tcp: None }
}

/// A head with a driver, and with a request of it that was given up while the disk was busy.
async fn given_up() -> (Arc<Shell>, Disk) {
    let disk = Disk { asked: Arc::default(), may_write: Arc::new(Semaphore::new(0)), written: Arc::default() };
    let state = State::new(ClusterId(1), 1);
    let shell = Shell::new(state, Some(Box::new(disk.clone())), Programs::in_memory());
    shell.step(Event::ProcessConnected(DRIVER));
    shell.step(Event::JobJoined(Box::new(JobSpec {
        id: JOB,
        name: "job".into(),
        driver: address(),
        executable: Executable::default(),
        working_dir: String::new(),
        env: BTreeMap::new(),
        local_env: BTreeMap::new(),
        namespace: "test".into(),
        priority: 0,
    })));
    let service = Service { shell: shell.clone(), process: DRIVER, role: Role::Driver(JOB) };
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
    let request = service.create_placement_group(tarpc::context::current(), spec);
    tokio::select! {
        _ = request => panic!("it is not written"),
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

fn knows_the_group(shell: &Shell) -> bool {
    shell.inside.lock().state.explain(0, Subject::PlacementGroup(GROUP)).is_some()
}

#[tokio::test]
async fn what_is_on_the_disk_is_made_true_also_when_the_request_was_given_up() {
    let (shell, disk) = given_up().await;
    go_on(&disk).await;
    assert!(knows_the_group(&shell));
    let written = disk.written.lock();
    assert!(matches!(written.last(), Some(Fact::Group(..))), "{written:?}");
}

#[tokio::test]
async fn what_would_have_ended_with_its_creator_is_not_made_after_that() {
    let (shell, disk) = given_up().await;
    shell.step(Event::ProcessLost(DRIVER, Some(JOB)));
    go_on(&disk).await;
    assert!(!knows_the_group(&shell));
    let written = disk.written.lock();
    assert!(matches!(written.last(), Some(Fact::GroupGone(GROUP))), "{written:?}");
}
