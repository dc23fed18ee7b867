//! Heads that are killed, started again or taken over from.

use std::time::Duration;

use wingbeat::{Bundle, Error, block_on, placement_group};
use wingbeat_tests::TestCluster;

use crate::common::Local;
use crate::work::{Counter, double, waits_for_a_file};
use crate::world::{ENV, World, command, exists, wait_for};

/// A head that is killed and started again.
pub(crate) fn restart(world: &mut World) {
    let counter = Counter::options().max_restarts(1).remote();
    world.right(counter.add().get_blocking(), 1);
    let killed = Counter::options().max_restarts(1).remote();
    world.right(killed.add().get_blocking(), 1);
    let group = placement_group([Bundle::new().resource("far", 1.0)]).create_blocking().unwrap();
    assert_eq!(group.ready().get_blocking().unwrap().len(), 1);
    let (began, go_on) = (world.file("began"), world.file("go on"));
    let running = waits_for_a_file::remote(began.clone(), go_on.clone());
    exists(&began);
    world.cluster.kill_head().unwrap();
    killed.actor().kill();
    let meanwhile: Vec<_> = (0..20).map(double::remote).collect();
    world.cluster.start_head().unwrap();
    for (number, meanwhile) in (0..).zip(meanwhile) {
        world.right(meanwhile.get_blocking(), 2 * number);
    }
    std::fs::write(go_on, "").unwrap();
    world.right(running.get_blocking(), 7);
    world.right(counter.add().get_blocking(), 2);
    let dead = killed.add().get_blocking();
    assert!(matches!(dead, Err(Error::ActorDied { .. })), "{dead:?}");
    group.remove_blocking().unwrap();
}

/// A head that is killed and started again before its standby leads, and then taken over from.
pub(crate) fn standby(world: &mut World) {
    let follows = |world: &World| {
        wait_for("the standby does not follow", || {
            world.cluster.state().is_ok_and(|state| state["standby"]["is_current"] == true)
        });
    };
    world.cluster.start_standby("second").unwrap();
    follows(world);
    let counter = Counter::options().max_restarts(0).remote();
    world.right(counter.add().get_blocking(), 1);
    world.cluster.kill_head().unwrap();
    // Whoever of the two leads then, there is one.
    if world.cluster.start_head().is_err() {
        world.cluster.wait_for_takeover().unwrap();
    }
    world.right(double::options().num_cpus(0.5).remote(5).get_blocking(), 10);
    world.right(counter.add().get_blocking(), 2);
    if world.cluster.standby_pid().is_some() {
        follows(world);
        world.cluster.kill_head().unwrap();
        world.cluster.wait_for_takeover().unwrap();
        world.right(double::options().num_cpus(0.25).remote(6).get_blocking(), 12);
        world.right(counter.add().get_blocking(), 3);
    }
    counter.actor().kill();
}

/// A head without a journal, which is started again with other times, and knows from its nodes what was there.
pub(crate) fn without_journal(world: &mut World) {
    world.driver = None;
    world.cluster = TestCluster::with_env(1, 1, &ENV).unwrap();
    command(world, &["quota", "matrix", "CPU=3"]);
    world.driver = Some(world.join());
    let counter = block_on(Counter::options().name("kept").detached().get_or_create()).unwrap();
    world.right(counter.add().get_blocking(), 1);
    world.cluster.kill_head().unwrap();
    world.cluster.set_head_args(&["--suspect-after", "4s", "--lost-after", "25s"]);
    world.cluster.start_head().unwrap();
    match block_on(Counter::named("kept")) {
        Ok(kept) => drop(world.right(kept.add().get_blocking(), 2)),
        Err(error) => assert!(world.ends_process, "{error:?}"),
    }
    world.right(double::options().num_cpus(0.5).remote(5).get_blocking(), 10);
    let state = world.cluster.state().unwrap();
    assert_eq!(state["quotas"][0]["namespace"], "matrix", "{state}");
    wait_for("the driver never hears of the other times", || {
        wingbeat_net::limits::limits().lost == Duration::from_secs(25)
    });
    counter.actor().kill();
}

/// What makes a program the driver of [`detached`].
pub(crate) const COMES_AND_GOES: &str = "WINGBEAT_MATRIX_COMES_AND_GOES";

/// The driver that leaves an actor behind.
pub(crate) fn comes_and_goes() {
    let _driver = Local::from(wingbeat::init().namespace("matrix"));
    let counter = Counter::options().name("left").detached().max_restarts(10).resource("lost", 1.0).remote();
    assert_eq!(counter.add().get_blocking().unwrap(), 1);
}

/// An actor that outlives its driver and its node: nobody but the head has its program.
pub(crate) fn detached(world: &mut World) {
    let node = world.cluster.add_node(&["--num-cpus", "1", "--resource", "lost=1"]).unwrap();
    let mut driver = std::process::Command::new(std::env::current_exe().unwrap());
    driver.args(["--exact", crate::DRIVER, "--nocapture"]).env(COMES_AND_GOES, "1");
    driver.env("WINGBEAT_ADDRESS", world.cluster.address()).env("WINGBEAT_TOKEN", world.cluster.token().unwrap());
    let output = driver.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    world.cluster.kill_node(node).unwrap();
    world.cluster.add_node(&["--num-cpus", "1", "--resource", "lost=1"]).unwrap();
    let counter = block_on(Counter::named("left")).unwrap();
    let again = loop {
        match counter.add().get_blocking() {
            Ok(count) => break count,
            Err(Error::ActorUnavailable { .. }) => {}
            Err(error) => panic!("{error:?}"),
        }
    };
    assert_eq!(again, 1);
    counter.actor().kill();
}
