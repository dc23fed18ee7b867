//! What a head that was started again is told: what this process has, and what it wants.

use std::sync::Arc;

use wingbeat_core::LeaseId;
use wingbeat_net::link::IDS_A_MESSAGE;
use wingbeat_net::messages::HeadMessage;

use crate::owner::Owner;
use crate::owner::actors::OwnActor;

impl Owner {
    /// Tells the head what it would know if it had not been started again. What was said to the last one does not count.
    pub(crate) fn rejoin(self: &Arc<Self>) {
        let leases = self.submission.look(|dispatch, _| dispatch.leases().collect::<Vec<LeaseId>>());
        let (actors, made) = self.actors.all_made(|handle| handle.owner() == self.id);
        let parts = leases.chunks(IDS_A_MESSAGE).map(|leases| (leases.to_vec(), Vec::new()));
        for (leases, actors) in parts.chain(actors.chunks(IDS_A_MESSAGE).map(|actors| (Vec::new(), actors.to_vec()))) {
            self.tell_head(HeadMessage::Holds { leases, actors, is_all: false });
        }
        // The head has written named ones down.
        for OwnActor { spec, life, moves, place } in made.into_iter().filter(|made| made.spec.name.is_none()) {
            self.tell_head(HeadMessage::Made { spec, life, moves, place });
        }
        self.tell_head(HeadMessage::Holds { leases: Vec::new(), actors: Vec::new(), is_all: true });
        self.with_core(|core, _, todo| {
            core.dispatch.announce_anew();
            core.calls.watch_anew(&mut todo.calls);
        });
    }
}
