//! How a worker process that has nothing to do any more leaves what it owns to the steward of its node: it ends, and those who refer to
//! its objects find them there, as after any other end of an owner.

use std::sync::Arc;

use wingbeat_core::ProcessId;
use wingbeat_core::value::ObjectValue;
use wingbeat_net::messages::{PeerMessage, Shadow};

use crate::owner::Owner;
use crate::owner::object::Object;

impl Owner {
    /// Whether nobody would lose anything that this process alone can give, if it ended. Its actors would end with it; what it has asked
    /// for would come to nobody; and a value with copies on other nodes only might have to be made again, which a steward cannot.
    pub(crate) fn may_leave(&self, steward: ProcessId) -> bool {
        let nothing_runs = self.submission.look(|dispatch, calls| dispatch.is_done() && calls.is_done());
        let nothing_is_asked = self.submission.unresolved.is_empty() && self.streams.are_over();
        nothing_runs
            && nothing_is_asked
            && self.actors.makes_none()
            && self.objects.all(|object| self.can_be_left(object, steward))
    }

    fn can_be_left(&self, object: &Object, steward: ProcessId) -> bool {
        if !self.owns(object) {
            return !object.is_awaited();
        }
        match object.value() {
            Some(ObjectValue::Stored(stored)) => stored.nodes.iter().any(|at| at.node.steward() == steward),
            Some(ObjectValue::Inline(_) | ObjectValue::Failed(_)) => true,
            None => false,
        }
    }

    /// Asks the steward whether this process may end. False if there is none.
    pub(crate) fn asks_to_leave(self: &Arc<Self>) -> bool {
        self.outside.tell_steward(self, PeerMessage::Shadows(vec![Shadow::Leaves]))
    }
}
