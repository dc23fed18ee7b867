//! How long it takes until very many actors are back under a head that was started again.

use std::time::Instant;

use crate::journal::Journal;
use crate::service::Durable;

use super::*;

const NODES: u64 = 100;
const ON_EACH: u64 = 1_000;

fn node(id: u64) -> NodeInfo {
    NodeInfo {
        id: NodeId(id),
        address: address(ProcessId(900 + id)),
        hostname: format!("host{id}"),
        resources: cpus(8.0),
        devices: Vec::new(),
        labels: BTreeMap::new(),
        store_bytes: 0,
    }
}

fn actor(id: u64) -> ActorSpec {
    let holds_nothing = shape(ResourceSet::new());
    ActorSpec { detached: true, placement: holds_nothing, ..named(actor_of(DRIVER, id), &format!("actor {id}")) }
}

fn runs(id: u64) -> RunningLease {
    let lease = LeaseId(id);
    RunningLease {
        start: LeaseStart {
            lease,
            job: JobId(DRIVER.0),
            resources: ResourceSet::new(),
            gpus: Vec::new(),
            bundle: None,
            captures: None,
            holder: LeaseHolder::Actor(std::sync::Arc::new(actor(id)), Incarnation(0), 0),
        },
        worker: Some((address(worker_of(lease)), 1)),
        started: Some(Ok(())),
        terminated: None,
        is_ending: false,
    }
}

#[tokio::test]
#[ignore = "prints how long it takes: `cargo test --release -p wingbeat-head --features journal -- --ignored --nocapture many_actors`"]
async fn many_actors_are_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal");
    let ids = |node: u64| (node * ON_EACH)..((node + 1) * ON_EACH);
    let mut facts = vec![Fact::Job(Box::new(job_of(DRIVER)), false)];
    facts.extend((0..NODES).map(|id| Fact::Node(Box::new(node(id)), None)));
    facts.extend((0..NODES).flat_map(ids).map(|id| kept(actor(id), 0)));
    let (journal, _) = Journal::open(&path, ClusterId(1)).unwrap();
    journal.write_and_tell(facts).await.unwrap();
    drop(journal);
    let running: Vec<Vec<RunningLease>> = (0..NODES).map(|node| ids(node).map(runs).collect()).collect();

    let began = Instant::now();
    let (journal, remembered) = Journal::open(&path, ClusterId(1)).unwrap();
    let read = began.elapsed();
    let mut state = State::recover(ClusterId(1), 1 << 32, remembered.facts, 35_000);
    state.keep_facts();
    for (id, leases) in (0..).zip(running) {
        let running = Running { leases, ..Running::default() };
        let _ = state.step(id, Event::NodeJoined(Box::new(node(id)), running));
        journal.write(state.take_facts());
    }
    let _ = state.step(NODES, Event::Tick);
    let back = began.elapsed();
    journal.intend(Vec::new()).await.unwrap();
    println!(
        "{} actors: read after {read:?}, back after {back:?}, written after {:?}",
        NODES * ON_EACH,
        began.elapsed()
    );
    assert!(!state.is_recovering());
    assert_eq!(state.picture().actors.len() as u64, NODES * ON_EACH);
}
