//! Actors and groups.

use wingbeat::{Bundle, Error, PlacementStrategy, block_on, placement_group};

use crate::work::{Counter, double};
use crate::world::{LIMIT, World};

/// Actors: their calls, names and ends.
pub(crate) fn actors(world: &mut World) {
    const CALLS: u64 = 50;
    let counter = Counter::options().resource("far", 1.0).remote();
    let calls: Vec<_> = (0..CALLS).map(|_| counter.add()).collect();
    for (number, call) in (1..).zip(&calls) {
        world.right(call.get_blocking(), number);
    }
    let named = block_on(Counter::options().name("one").get_or_create());
    if let Ok(named) = &named {
        world.right(named.add().get_blocking(), 1);
        let same = block_on(Counter::named("one")).map(|same| same.actor().id());
        world.right(same, named.actor().id());
        named.actor().terminate();
        let ended = loop {
            match named.add().get_blocking() {
                Err(error) => break error,
                Ok(_) => continue,
            }
        };
        assert!(matches!(ended, Error::ActorDied { .. }), "{ended:?}");
    }
    let killed = Counter::options().max_restarts(3).remote();
    let first = killed.pid().get_blocking();
    killed.actor().kill_may_restart();
    let second = killed.pid().get_blocking();
    if let (Ok(first), Ok(second)) = (&first, &second) {
        assert_ne!(first, second);
    } else {
        assert!(world.ends_process, "{first:?} {second:?}");
    }
    killed.actor().kill();
    let dead = killed.add().get_blocking();
    assert!(matches!(dead, Err(Error::ActorDied { .. })), "{dead:?}");
    let (one, other) = (Counter::remote(), Counter::remote());
    let circle = one.asks(other.clone(), one.clone()).get_blocking().unwrap_err();
    assert!(circle.to_string().to_lowercase().contains("deadlock") || world.ends_process, "{circle}");
    world.right(other.add().get_blocking(), 1);
    // The last handle ends an actor.
    let pid = counter.pid().get_blocking();
    drop((counter, calls));
    if let Ok(pid) = pid {
        assert!(wingbeat_tests::wait_for_end(pid, LIMIT), "nobody holds it any more");
    }
}

/// Placement groups.
pub(crate) fn groups(world: &mut World) {
    let bundles = [Bundle::new().num_cpus(0.5), Bundle::new().num_cpus(0.5)];
    let group =
        placement_group(bundles).strategy(PlacementStrategy::StrictSpread).name("both").create_blocking().unwrap();
    assert_eq!(group.ready().get_blocking().unwrap().len(), 2);
    let inside = double::options().num_cpus(0.5).in_bundle(&group, 1).remote(4);
    world.right(inside.get_blocking(), 8);
    let named = block_on(wingbeat::PlacementGroup::named("both")).unwrap();
    assert_eq!(named.id(), group.id());
    let actor = Counter::options().in_bundle(&group, 0).remote();
    world.right(actor.add().get_blocking(), 1);
    group.remove_blocking().unwrap();
    // Its process ends in a moment, and may answer until then.
    let ended = wingbeat_tests::poll(LIMIT, || actor.add().get_blocking().err());
    assert!(matches!(ended, Some(Error::ActorDied { .. })), "{ended:?}");
}
