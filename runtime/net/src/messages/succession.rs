//! Between a head, its standby, and the nodes that decide which of them leads.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use wingbeat_core::NodeId;
use wingbeat_core::codec::Payload;
use wingbeat_core::spec::Address;

use crate::handshake::Epoch;

/// Numbers what a head says about its standby. What a later head says is greater than anything that an earlier one said.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct Generation {
    /// The head that says it.
    pub epoch: Epoch,
    /// Counts what that head has said.
    pub count: u64,
}

/// Who may take over from a head, and which nodes decide that.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Succession {
    /// Its number.
    pub generation: Generation,
    /// Where the standby would serve; none if nobody may take over.
    pub standby: Option<Address>,
    /// The nodes of whose votes it needs a majority.
    pub voters: BTreeMap<NodeId, Address>,
}

/// What a head says to a node in order to stay its head.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Leadership {
    /// The latest number that the head has given; nobody may take over with an earlier one, if `is_revoked`.
    pub generation: Generation,
    /// Whether nobody may take over with an earlier number any more.
    pub is_revoked: bool,
    /// Where the standby would serve, if there is one.
    pub standby: Option<Address>,
}

/// What a node says to that.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Support {
    /// It has accepted no later head.
    Given,
    /// It has promised itself to a standby, which would lead with this epoch.
    Promised(Epoch),
    /// It has joined a later head.
    Joined {
        /// Of this epoch.
        epoch: Epoch,
        /// Where that is, while the node is connected to it.
        heard_at: Option<Address>,
    },
}

/// What a standby says to a head that asks whether it may lead.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Leave {
    /// It does not take over by what the last head had said.
    Given,
    /// It leads itself.
    Superseded,
    /// It follows a head that goes on: here. Whoever asks has a copy of the file.
    HearsHead(Address),
}

/// A standby asks a node for its vote.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Ballot {
    /// By which it may take over.
    pub generation: Generation,
    /// It would lead with this epoch.
    pub epoch: Epoch,
    /// Where it would serve.
    pub standby: Address,
    /// Whether the node promises itself. Otherwise it only says what it would do.
    pub is_binding: bool,
}

/// A node's vote.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Vote {
    /// For the standby.
    Yes,
    /// The node hears the head.
    HearsHead,
    /// The head has said that nobody may take over by that number.
    Revoked(Generation),
    /// It has joined, or has promised itself to, a head of this epoch.
    Later(Epoch),
}

/// A standby asks the head for facts.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Follow {
    /// Where the standby would serve.
    pub standby: Address,
    /// It has written everything as of this position; 0 when it begins.
    pub written: u64,
    /// The latest succession that it has written.
    pub generation: Option<Generation>,
}

/// A part of the facts.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Facts {
    /// The position after it.
    pub position: u64,
    /// Whether what was sent before is replaced. The first part of a copy of everything.
    pub begins: bool,
    /// Whether more of that copy follows.
    pub is_complete: bool,
    /// Keys, and what there is to know; nothing if nothing is left to know.
    pub changes: Vec<(Payload, Option<Payload>)>,
}

/// The answer to [`Follow`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Followed {
    /// What is new; nothing, if nothing is for a while.
    Facts(Facts),
    /// The cluster was stopped: nobody is to take over.
    Stops,
}
