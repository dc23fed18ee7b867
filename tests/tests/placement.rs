//! Resources, devices and placement groups of real processes.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::collections::BTreeSet;
use std::future::IntoFuture;
use std::path::PathBuf;
use std::time::Duration;

use common::{Local, Started};
use wingbeat::{Bundle, ByteSize, Error, PlacementGroup, PlacementStrategy, get_all_blocking, placement_group};
use wingbeat_tests::{TestCluster, is_alive, poll};

/// Only something that hangs takes so long.
const LIMIT: Duration = Duration::from_secs(60);

/// The devices of this process, as Wingbeat and as CUDA is told.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
struct Seen {
    gpus: Vec<u32>,
    visible: Option<String>,
    order: Option<String>,
}

fn seen() -> Seen {
    let of = |name: &str| std::env::var(name).ok();
    Seen { gpus: wingbeat::gpu_ids(), visible: of("CUDA_VISIBLE_DEVICES"), order: of("CUDA_DEVICE_ORDER") }
}

#[wingbeat::remote]
fn devices() -> Seen {
    seen()
}

/// Stays until its marker is gone.
#[wingbeat::remote]
fn devices_and_stay(started: PathBuf) -> Seen {
    std::fs::write(&started, "").unwrap();
    while started.exists() {
        std::thread::yield_now();
    }
    seen()
}

/// Starts a process in a session of its own, tells its id, and stays.
#[wingbeat::remote]
#[allow(clippy::zombie_processes, reason = "whoever ends the task must end its child too")]
fn starts_an_orphan_and_stays(started: PathBuf) -> u64 {
    let child = std::process::Command::new("setsid").args(["sleep", "1000"]).spawn().unwrap();
    std::fs::write(started.with_extension("tmp"), format!("{} {}", std::process::id(), child.id())).unwrap();
    std::fs::rename(started.with_extension("tmp"), started).unwrap();
    loop {
        std::thread::park();
    }
}

#[wingbeat::remote]
fn lives(pids: Vec<u32>) -> Vec<bool> {
    assert_eq!(wingbeat::gpu_ids(), [0]);
    pids.iter().map(|pid| is_alive(*pid)).collect()
}

#[wingbeat::remote]
fn node() -> String {
    wingbeat::current_node().unwrap().to_string()
}

#[wingbeat::remote]
fn node_of_child() -> Vec<String> {
    let child = node::remote().get_blocking().unwrap();
    vec![node(), child]
}

struct Trainer;

#[wingbeat::actor]
impl Trainer {
    fn new() -> Self {
        Trainer
    }
    fn see(&self) -> Seen {
        seen()
    }
    fn pid(&self) -> u32 {
        std::process::id()
    }
}

fn visible(seen: &Seen) -> &str {
    seen.visible.as_deref().unwrap_or("unset")
}

#[test]
fn a_task_and_an_actor_see_their_devices_and_nobody_else_s() {
    let _local = Local::from(wingbeat::init().num_cpus(2).pretend_gpus(4));
    let whole = devices::options().num_gpus(2.0).remote().get_blocking().unwrap();
    assert_eq!((whole.gpus.len(), whole.order.as_deref()), (2, Some("PCI_BUS_ID")));
    let shown: Vec<String> = whole.gpus.iter().map(u32::to_string).collect();
    assert_eq!(visible(&whole), shown.join(","));
    assert_eq!(visible(&devices::remote().get_blocking().unwrap()), "", "who was given none sees none");
    let trainers: Vec<_> = (0..2).map(|_| Trainer::options().num_gpus(1.0).remote()).collect();
    let seen = get_all_blocking(&trainers.iter().map(TrainerHandle::see).collect::<Vec<_>>()).unwrap();
    let distinct: BTreeSet<&str> = seen.iter().map(visible).collect();
    assert_eq!(distinct.len(), 2, "{seen:?}");
}

#[test]
fn a_process_without_a_device_sees_all_if_the_user_wants_it_to() {
    let _local = Local::from(wingbeat::init().num_cpus(1).pretend_gpus(1).env("WINGBEAT_SHOW_ALL_GPUS", "1"));
    let unchanged = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    assert_eq!(devices::remote().get_blocking().unwrap().visible, unchanged);
}

#[test]
fn fractions_share_a_device_and_a_whole_one_is_never_shared() {
    let _local = Local::from(wingbeat::init().num_cpus(8).pretend_gpus(2));
    let started: Vec<Started> = (0..4).map(|_| Started::new()).collect();
    let amounts = [1.0, 0.25, 0.25, 0.5];
    let refs: Vec<_> = started
        .iter()
        .zip(amounts)
        .map(|(started, gpus)| devices_and_stay::options().num_cpus(1.0).num_gpus(gpus).remote(started.path()))
        .collect();
    started.iter().for_each(Started::wait);
    // Both devices are full now.
    let other = devices::options().num_gpus(0.1).remote();
    assert!(other.get_timeout_blocking(Duration::from_millis(50)).is_err());
    for started in &started {
        std::fs::remove_file(started.path()).unwrap();
    }
    let seen = get_all_blocking(&refs).unwrap();
    let whole = &seen[0].gpus;
    let shared: BTreeSet<&Vec<u32>> = seen[1..].iter().map(|seen| &seen.gpus).collect();
    assert_eq!(shared.len(), 1, "{seen:?}");
    assert!(!shared.contains(whole), "{seen:?}");
    other.get_timeout_blocking(LIMIT).unwrap();
}

#[test]
fn a_device_is_given_on_only_when_the_last_process_of_its_lease_is_gone() {
    let local = Local::from(wingbeat::init().num_cpus(2).pretend_gpus(1));
    let started = Started::new();
    let stays = starts_an_orphan_and_stays::options().num_gpus(1.0).max_retries(0).remote(started.path());
    started.wait();
    let pids: Vec<u32> =
        std::fs::read_to_string(started.path()).unwrap().split(' ').map(|pid| pid.parse().unwrap()).collect();
    assert!(pids.iter().all(|pid| is_alive(*pid)));
    let next = lives::options().num_gpus(1.0).remote(pids.clone());
    let killed = rustix::process::Pid::from_raw(i32::try_from(pids[0]).unwrap()).unwrap();
    rustix::process::kill_process(killed, rustix::process::Signal::KILL).unwrap();
    let alive = next.get_timeout_blocking(LIMIT).unwrap();
    assert_eq!(alive, [false, false], "neither the process nor what it had started lives");
    assert!(matches!(stays.get_blocking(), Err(Error::WorkerCrashed { .. })));
    drop(local);
}

#[test]
fn the_daemon_s_own_devices_are_what_it_gives_on() {
    let mut cluster = TestCluster::start(0, 0).unwrap();
    let told = &[("CUDA_VISIBLE_DEVICES", "5,GPU-aa,7")];
    cluster.add_node_with(&["--num-cpus", "2", "--num-gpus", "3"], told).unwrap();
    let _joined = join(&cluster);
    let seen: Vec<Seen> = (0..3)
        .map(|_| Trainer::options().num_gpus(1.0).remote())
        .collect::<Vec<_>>()
        .iter()
        .map(|trainer| trainer.see().get_timeout_blocking(LIMIT).unwrap())
        .collect();
    let shown: BTreeSet<(Vec<u32>, &str)> = seen.iter().map(|seen| (seen.gpus.clone(), visible(seen))).collect();
    assert_eq!(shown, BTreeSet::from([(vec![0], "5"), (vec![1], "GPU-aa"), (vec![2], "7")]));
}

#[test]
fn memory_of_a_device_is_checked_against_its_size() {
    let mut cluster = TestCluster::start(0, 0).unwrap();
    cluster.add_node(&["--num-cpus", "2", "--pretend-gpus", "1", "--gpu-memory", "16GiB"]).unwrap();
    let _joined = join(&cluster);
    assert_eq!(devices::options().gpu_memory(ByteSize::gib(8)).remote().get_timeout_blocking(LIMIT).unwrap().gpus, [0]);
    let error = devices::options().gpu_memory(ByteSize::gib(24)).remote().get_timeout_blocking(LIMIT).unwrap_err();
    assert!(matches!(error, Error::Infeasible { .. }), "{error}");
}

/// A driver of this cluster, entered by this thread.
fn join(cluster: &TestCluster) -> Local {
    Local::from(wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap()))
}

#[test]
fn two_drivers_contend_for_the_last_device_and_both_get_it_in_turn() {
    let mut cluster = TestCluster::start(0, 0).unwrap();
    cluster.add_node(&["--num-cpus", "4", "--pretend-gpus", "1"]).unwrap();
    let init =
        || wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap()).global(false).log_to_driver(false);
    let sessions: Vec<_> = (0..2).map(|_| wingbeat::block_on(init().into_future()).unwrap()).collect();
    let refs: Vec<_> = (0..10)
        .flat_map(|_| &sessions)
        .map(|session| {
            let _entered = session.enter();
            devices::options().num_gpus(1.0).remote()
        })
        .collect();
    for found in &refs {
        assert_eq!(found.get_timeout_blocking(LIMIT).unwrap().gpus, [0]);
    }
    for session in &sessions {
        wingbeat::block_on(session.shutdown());
    }
}

fn ready(group: &PlacementGroup) -> Vec<String> {
    let nodes = group.ready().get_timeout_blocking(LIMIT).unwrap();
    nodes.iter().map(ToString::to_string).collect()
}

/// Whether everything on every node is free.
fn is_idle(joined: &Local) -> bool {
    let state = wingbeat::block_on(joined.session.runtime().cluster_state()).unwrap();
    state.nodes.iter().all(|node| node.available == node.info.resources)
}

#[test]
fn bundles_lie_on_real_nodes_as_their_strategy_says() {
    let cluster = TestCluster::start(4, 2).unwrap();
    let joined = join(&cluster);
    for (strategy, count, nodes) in [
        (PlacementStrategy::StrictPack, 2, 1),
        (PlacementStrategy::Pack, 4, 2),
        (PlacementStrategy::Spread, 4, 4),
        (PlacementStrategy::StrictSpread, 4, 4),
    ] {
        let bundles = vec![Bundle::new().num_cpus(1.0); count];
        let group = placement_group(bundles).strategy(strategy).create_blocking().unwrap();
        let places = ready(&group);
        let distinct: BTreeSet<&String> = places.iter().collect();
        assert_eq!(distinct.len(), nodes, "{strategy:?}: {places:?}");
        // What runs in a bundle runs on its node.
        let tasks: Vec<_> = (0..count as u32).map(|index| node::options().in_bundle(&group, index).remote()).collect();
        assert_eq!(get_all_blocking(&tasks).unwrap(), places, "{strategy:?}");
        group.remove_blocking().unwrap();
        // What ran in the bundles ends; until then, its CPUs are not there for the next group.
        while !is_idle(&joined) {
            std::thread::yield_now();
        }
    }
}

#[test]
fn removing_a_group_ends_what_runs_in_it_and_fails_what_waits() {
    let _local = Local::start(2);
    let group = placement_group([Bundle::new().num_cpus(1.0)]).create_blocking().unwrap();
    ready(&group);
    let actor = Trainer::options().num_cpus(1.0).in_group(&group).remote();
    let pid = actor.pid().get_timeout_blocking(LIMIT).unwrap();
    let waits = node::options().in_bundle(&group, 0).remote();
    group.remove_blocking().unwrap();
    group.remove_blocking().unwrap();
    let error = waits.get_timeout_blocking(LIMIT).unwrap_err();
    assert!(matches!(error, Error::PlacementGroupGone { .. }), "{error}");
    // Its process ends in a moment, and may answer until then.
    let error = poll(LIMIT, || actor.pid().get_timeout_blocking(LIMIT).err()).unwrap();
    assert!(error.to_string().contains("was removed"), "{error}");
    assert!(wingbeat_tests::wait_for_end(pid, LIMIT));
    // Everything is there again.
    node::options().num_cpus(2.0).remote().get_timeout_blocking(LIMIT).unwrap();
}

#[test]
fn a_group_that_captures_its_children_keeps_them_and_another_does_not() {
    let cluster = TestCluster::start(2, 2).unwrap();
    let _joined = join(&cluster);
    let bundles = vec![Bundle::new().num_cpus(2.0)];
    let group = placement_group(bundles).capture_children().create_blocking().unwrap();
    let places = ready(&group);
    let found = node_of_child::options().num_cpus(1.0).in_group(&group).remote().get_timeout_blocking(LIMIT).unwrap();
    assert_eq!(found, [places[0].clone(), places[0].clone()]);
    group.remove_blocking().unwrap();
    // All of its node is reserved: a child that is not captured goes to the other.
    let group = placement_group([Bundle::new().num_cpus(2.0)]).create_blocking().unwrap();
    let places = ready(&group);
    let found = node_of_child::options().num_cpus(1.0).in_group(&group).remote().get_timeout_blocking(LIMIT).unwrap();
    assert_eq!(found[0], places[0]);
    assert_ne!(found[1], places[0]);
}

#[test]
fn a_detached_group_is_found_by_its_name_from_another_driver() {
    let cluster = TestCluster::start(1, 2).unwrap();
    let init = || wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap()).namespace("team");
    {
        let _first = Local::from(init());
        let group = placement_group([Bundle::new().num_cpus(1.0)]).name("kept").detached().create_blocking().unwrap();
        ready(&group);
        let taken = placement_group([Bundle::new().num_cpus(1.0)]).name("kept").create_blocking().unwrap_err();
        assert!(matches!(taken, Error::PlacementGroupNameTaken { .. }), "{taken}");
    }
    let _second = Local::from(init());
    let group = wingbeat::block_on(PlacementGroup::named("kept")).unwrap();
    node::options().in_group(&group).remote().get_timeout_blocking(LIMIT).unwrap();
    group.remove_blocking().unwrap();
    let gone = wingbeat::block_on(PlacementGroup::named("kept")).unwrap_err();
    assert!(matches!(gone, Error::PlacementGroupNotFound { .. }), "{gone}");
}

#[test]
fn bundles_of_a_killed_node_are_placed_again_and_their_actor_lives_there() {
    let mut cluster = TestCluster::start(3, 1).unwrap();
    let _joined = join(&cluster);
    let bundles = vec![Bundle::new().num_cpus(1.0); 2];
    let group = placement_group(bundles).strategy(PlacementStrategy::StrictSpread).create_blocking().unwrap();
    let before = ready(&group);
    let actor = Trainer::options().max_restarts(1).in_bundle(&group, 0).remote();
    let pid = actor.pid().get_timeout_blocking(LIMIT).unwrap();
    let at = cluster.node_numbers().unwrap().iter().position(|id| *id == before[0]).unwrap();
    cluster.kill_node(at).unwrap();
    let after = loop {
        let now = ready(&group);
        if now[0] != before[0] {
            break now;
        }
        std::thread::yield_now();
    };
    assert_eq!(after[1], before[1], "the other bundle stays");
    let again = loop {
        // A call that was on its way fails with the life that it was sent to.
        if let Ok(pid) = actor.pid().get_timeout_blocking(LIMIT) {
            break pid;
        }
    };
    assert_ne!(again, pid);
}

#[test]
fn bad_groups_are_errors_at_once() {
    let _local = Local::start(2);
    let refused = |bundles: Vec<Bundle>| placement_group(bundles).create_blocking().unwrap_err().to_string();
    assert!(refused(vec![]).contains("no bundles"));
    assert!(refused(vec![Bundle::new()]).contains("reserves nothing"));
    assert!(refused(vec![Bundle::new().num_cpus(8.0)]).contains("2 CPU of the 8 asked for"));
    assert!(refused(vec![Bundle::new().num_gpus(1.5)]).contains("num_gpus"));
    assert!(refused(vec![Bundle::new().num_cpus(1.0).labels("zone~a")]).contains("no rule about labels"));
    let error = placement_group([Bundle::new().num_cpus(1.0)]).detached().create_blocking().unwrap_err();
    assert!(error.to_string().contains("needs a name"), "{error}");
}
