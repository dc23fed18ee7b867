//! Two members of a group, for the tests here and in `communicator`.

use std::future::IntoFuture;

use wingbeat_collective::{Group, Meeting};

/// What two members do, each on a thread of its own.
pub(crate) fn pair<R: Send>(work: impl Fn(Group) -> R + Sync) -> [R; 2] {
    let session = wingbeat::block_on(wingbeat::init().num_cpus(1).global(false).into_future()).unwrap();
    let _entered = session.enter();
    let meeting = Meeting::of(2);
    let done = std::thread::scope(|scope| {
        [0, 1]
            .map(|rank| {
                let (meeting, work, session) = (&meeting, &work, &session);
                scope.spawn(move || {
                    let _entered = session.enter();
                    work(Group::join(meeting, rank).unwrap())
                })
            })
            .map(|thread| thread.join().unwrap())
    });
    wingbeat::block_on(session.shutdown());
    done
}
