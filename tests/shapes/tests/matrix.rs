//! Every operation in every shape, in three places. The cells are chosen by a seed so that every two values meet:
//! `WINGBEAT_MATRIX_SEED` says which, and `WINGBEAT_MATRIX=all` runs every cell there is, larger ones too.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::process::Command;
use std::time::{Duration, Instant};

use wingbeat_shapes::{Cell, Chance, Place, Size, Watchdog, cells, run};
use wingbeat_tests::TestCluster;
use wingbeat_tests::hosts::Hosts;

/// A cell takes less than a second, and the largest ones some. Only one that hangs takes so long.
const LIMIT: Duration = Duration::from_secs(240);

/// What a driver that is started for a place is told: the daemons of its cluster.
const DAEMONS: &str = "WINGBEAT_MATRIX_DAEMONS";

fn chosen(place: Place) -> Vec<Cell> {
    let all = std::env::var("WINGBEAT_MATRIX").is_ok_and(|size| size == "all");
    let seed = std::env::var("WINGBEAT_MATRIX_SEED").map_or(1, |seed| seed.parse().unwrap());
    let small = Size { all, bytes: 32 << 20, payload: 64 << 20 };
    let size = if all { Size { bytes: 1 << 30, payload: 300 << 20, ..small } } else { small };
    cells(size, &mut Chance::new(seed + place as u64))
}

/// Runs the place's cells in a session that this thread joins; every failure is told, and not only the first.
fn run_all(place: Place, session: &wingbeat::Session, roots: &[u32]) {
    let watchdog = Watchdog::new(LIMIT);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let _entered = session.enter();
    let mut failed = Vec::new();
    let cells = chosen(place);
    for cell in &cells {
        watchdog.feed(format!("{place:?}: {cell}"));
        if std::env::var_os("WINGBEAT_MATRIX_TRACE").is_some() {
            eprintln!("{cell}");
        }
        let begun = Instant::now();
        if let Err(error) = runtime.block_on(run(session, *cell, roots)) {
            eprintln!("FAILED {error}");
            failed.push(error.to_string());
        }
        if begun.elapsed() > Duration::from_secs(5) {
            eprintln!("{:.1?}: {cell}", begun.elapsed());
        }
    }
    assert!(failed.is_empty(), "{place:?}: {} of {} cells failed:\n{}", failed.len(), cells.len(), failed.join("\n"));
}

fn joined(init: wingbeat::Init) -> wingbeat::Session {
    wingbeat::block_on(std::future::IntoFuture::into_future(init.global(false).log_to_driver(false))).unwrap()
}

#[test]
fn every_shape_in_a_private_cluster() {
    let session = joined(wingbeat::init().num_cpus(2).object_store_memory(256 << 20));
    run_all(Place::Private, &session, &[std::process::id()]);
    wingbeat::block_on(session.shutdown());
}

#[test]
fn every_shape_on_a_node_apart() {
    let mut cluster = TestCluster::start(1, 2).unwrap();
    let session = joined(wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap()));
    run_all(Place::Apart, &session, &cluster.pids());
    wingbeat::block_on(session.shutdown());
    cluster.stop().unwrap();
}

#[test]
fn every_shape_on_two_machines() {
    if let Ok(daemons) = std::env::var(DAEMONS) {
        let roots: Vec<u32> = daemons.split(',').map(|pid| pid.parse().unwrap()).collect();
        let session = joined(wingbeat::init());
        run_all(Place::Machines, &session, &roots);
        return wingbeat::block_on(session.shutdown());
    }
    let Some(hosts) = Hosts::new(3).unwrap() else {
        return;
    };
    let (address, daemons) = hosts.cluster().unwrap();
    let daemons: Vec<String> = daemons.iter().map(|daemon| daemon.pid().to_string()).collect();
    let mut driver: Command = hosts.on(0, &std::env::current_exe().unwrap());
    driver.args(["--exact", "every_shape_on_two_machines", "--nocapture"]).env(DAEMONS, daemons.join(","));
    hosts.join(&mut driver, &address);
    let output = driver.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
}
