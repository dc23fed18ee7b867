//! What processes hold when they have little to do. The only test of its program, since it counts the memory of all of it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::future::IntoFuture;
use std::time::{Duration, Instant};

use wingbeat::get_all_blocking;
use wingbeat_shapes::usage;
use wingbeat_tests::TestCluster;

/// Buffers are given back after a second of quiet. Only what is kept for good stays so long.
const LIMIT: Duration = Duration::from_secs(60);

/// What a connection and its process may hold of what they have carried, in bytes.
const LITTLE: u64 = 2 << 20;

struct Echo;

#[wingbeat::actor]
impl Echo {
    fn new() -> Self {
        Echo
    }

    fn echo(&mut self, data: Vec<u8>) -> Vec<u8> {
        data
    }

    /// The bytes of memory that its process holds.
    fn held(&mut self) -> u64 {
        usage::of_this().unwrap().private
    }
}

#[test]
fn a_quiet_connection_holds_nothing_of_the_large_messages_that_it_has_carried() {
    let mut cluster = TestCluster::start(1, 1).unwrap();
    let init = wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap()).global(false);
    let session = wingbeat::block_on(init.into_future()).unwrap();
    let entered = session.enter();
    let actor = Echo::options().remote();
    assert_eq!(actor.echo(vec![7]).get_blocking().unwrap(), [7]);
    let (driver, process) = (usage::of_this().unwrap().private, actor.held().get_blocking().unwrap());

    let data = vec![1u8; 100_000];
    let echoes: Vec<_> = (0..300).map(|_| actor.echo(data.clone())).collect();
    assert!(get_all_blocking(&echoes).unwrap().iter().all(|echo| *echo == data));
    drop(echoes);

    let begun = Instant::now();
    loop {
        // A connection that always has something small to do gives back, too.
        let now = (usage::of_this().unwrap().private, actor.held().get_blocking().unwrap());
        if now.0 <= driver + LITTLE && now.1 <= process + LITTLE {
            break;
        }
        assert!(begun.elapsed() < LIMIT, "driver and actor hold {now:?} bytes, and held {:?}", (driver, process));
        std::thread::sleep(Duration::from_millis(50));
    }
    drop(actor);
    drop(entered);
    wingbeat::block_on(session.shutdown());
    cluster.stop().unwrap();
}
