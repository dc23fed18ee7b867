//! What a head that was started again is told: what this process has, and what it wants.

use std::sync::Arc;

use wingbeat_core::{ActorId, LeaseId};
use wingbeat_net::link::IDS_A_MESSAGE;
use wingbeat_net::messages::HeadMessage;

use crate::owner::Owner;

impl Owner {
    /// Tells the head what it would know if it had not been started again. What was said to the last one does not count.
    pub(crate) fn rejoin(self: &Arc<Self>) {
        let (leases, lives) = self.submission.look(|dispatch, calls| {
            let leases: Vec<LeaseId> = dispatch.leases().collect();
            (leases, calls.lives())
        });
        let made: Vec<_> = self.actors.iter().filter_map(|known| known.made.clone()).collect();
        let actors: Vec<ActorId> = made.iter().map(|spec| spec.id).collect();
        let parts = leases.chunks(IDS_A_MESSAGE).map(|leases| (leases.to_vec(), Vec::new()));
        for (leases, actors) in parts.chain(actors.chunks(IDS_A_MESSAGE).map(|actors| (Vec::new(), actors.to_vec()))) {
            self.tell_head(HeadMessage::Holds { leases, actors, is_all: false });
        }
        for spec in made {
            // Of one that was never called here it is not known that it is not dead. The head has written named ones down.
            if let (Some(life), None) = (lives.get(&spec.id), &spec.name) {
                self.tell_head(HeadMessage::Made { spec, life: *life });
            }
        }
        self.tell_head(HeadMessage::Holds { leases: Vec::new(), actors: Vec::new(), is_all: true });
        self.with_core(|core, _, todo| {
            core.dispatch.announce_anew();
            core.calls.watch_anew(&mut todo.calls);
        });
    }
}
