//! What people ask, and the end of a cluster.

use wingbeat::{Error, block_on};

use crate::work::{Counter, double, large};
use crate::world::{World, command, wait_for};

#[wingbeat::remote(max_retries = 0)]
fn prints(what: String) {
    println!("{what}");
}

/// What people ask, and the end of a driver and of the cluster.
pub(crate) fn tools(world: &mut World) {
    let session = world.session();
    let never = double::options().resource("nowhere", 1.0).wait_until_feasible().remote(1);
    // An answer that takes too long is an error, and the next question is answered.
    let why = (0..3).find_map(|_| block_on(session.why(never.id())).ok()).unwrap();
    assert!(format!("{why:?}").contains("nowhere"), "{why:?}");
    block_on(session.set_quota("matrix", Some(&[("CPU", 100.0)]))).unwrap();
    let status = command(world, &["status"]);
    assert!(status.contains("matrix"), "{status}");
    world.right(double::remote(1).get_blocking(), 2);
    let counter = Counter::remote();
    let pid = counter.pid().get_blocking().unwrap().to_string();
    let shown = || world.cluster.command().unwrap().args(["stack", &pid]).status().unwrap().success();
    // An answer that is lost is an error, and so may be the next question: the end of a connection is heard of after a moment.
    wait_for("nobody shows its stacks", || shown() || world.ends_process);
    let job = block_on(session.runtime().cluster_state()).unwrap().jobs[0].id.to_string();
    wait_for("nobody shows the stacks of the job", || {
        world.cluster.command().unwrap().args(["stack", &job]).status().unwrap().success() || world.ends_process
    });
    drop(counter);
    let token = world.cluster.token().unwrap();
    let init = wingbeat::init_at(world.cluster.address()).token(&token).global(false);
    let second = block_on(std::future::IntoFuture::into_future(init)).unwrap();
    let entered = second.enter();
    let printed = prints::remote("printed by a task");
    world.right(printed.get_blocking(), ());
    let made = large::remote(1);
    let _ = wingbeat::wait_blocking(vec![made.clone()], 1, None).unwrap();
    block_on(second.shutdown());
    drop((made, entered));
    // Its values are deleted though it has said nothing of them.
    wait_for("what a driver stored outlives it", || {
        let state = block_on(session.runtime().cluster_state()).unwrap();
        state.jobs.len() <= 1
    });
    never.cancel();
    assert!(matches!(never.get_blocking(), Err(Error::Cancelled { .. })));
    command(world, &["stop"]);
    let end = loop {
        match double::remote(1).get_blocking() {
            Ok(two) => assert_eq!(two, 2),
            // A node may end before the driver hears that the session has ended.
            Err(Error::NodeDied { why, .. }) if why == "the cluster was stopped" => {}
            Err(error) => break error,
        }
    };
    assert!(matches!(end, Error::SessionEnded { .. }), "{end:?}");
    world.driver = None;
    world.cluster.wait_for_stop().unwrap();
}
