//! Between processes: tasks, results, objects and who holds them.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use wingbeat_core::spec::*;
use wingbeat_core::value::{ObjectValue, StoreNode, Stored};
use wingbeat_core::*;

/// What processes say to each other.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum PeerMessage {
    /// To a worker process.
    Work(Work),
    /// Worker process to owner.
    Results(Vec<TaskResult>),
    /// Worker process to owner: these were not started and never will be here.
    GaveBack {
        /// The lease.
        lease: LeaseId,
        /// The tasks.
        tasks: Vec<TaskId>,
        /// Whether the process waits now, and takes no tasks until `Ready`.
        waiting: bool,
    },
    /// Worker process to owner: it takes tasks of this lease again.
    Ready(LeaseId),
    /// Borrower to owner: cancel the task that makes this object, if it is not there yet.
    CancelObject {
        /// The object.
        object: ObjectId,
        /// As in `Cancel`.
        force: bool,
    },
    /// Worker process to owner: the next item of a stream.
    StreamItem {
        /// The stream.
        task: TaskId,
        /// Its number from 0.
        index: u32,
        /// The item.
        value: ObjectValue,
    },
    /// Borrower to owner: say when these are there.
    Subscribe(Vec<ObjectId>),
    /// Owner to borrower.
    Resolved(Vec<(ObjectId, ObjectValue)>),
    /// Receiver to owner: this process holds refs to these objects, as of these registrations.
    Borrow(Vec<(ObjectId, Registration)>),
    /// Borrower to owner: it no longer does, unless it has registered again since.
    Release(Vec<(ObjectId, Registration)>),
    /// Reader to owner: this node has a copy now.
    Copied {
        /// The object.
        object: ObjectId,
        /// The node.
        at: StoreNode,
    },
    /// Reader to owner: the copies at these nodes could not be read.
    Lost {
        /// The object.
        object: ObjectId,
        /// The nodes.
        at: Vec<NodeId>,
        /// What was tried.
        why: String,
    },
    /// Owner to the steward of its node, in order: what is to be known of its objects when it is no more.
    Shadows(Vec<Shadow>),
}

/// What an owner tells the steward of its node of an object to which others may refer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Shadow {
    /// Others may refer to it, and this is its value, if it has one.
    Kept(ObjectId, Option<ObjectValue>),
    /// Nobody refers to it any more.
    Freed(ObjectId),
    /// Contact was lost, and some of what was said with it: all is said again from here on.
    Again,
    /// All was said again. What was not among it is freed.
    AllSaid,
    /// Its owner has nothing to do any more, and would end. It waits for [`Work::MayLeave`].
    Leaves,
}

/// What an owner, a caller or a consumer says to the worker process that runs something for it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Work {
    /// Run these, in order.
    Tasks {
        /// Under this lease.
        lease: LeaseId,
        /// The owner's number of the first on this lease; the others follow.
        first: u64,
        /// The tasks.
        tasks: Vec<Arc<TaskSpec>>,
    },
    /// From a caller to an actor: run these, in order.
    Calls {
        /// The actor.
        actor: ActorId,
        /// The life that the caller means.
        incarnation: Incarnation,
        /// The calls.
        calls: Vec<Arc<TaskSpec>>,
    },
    /// Give up to this many unstarted tasks back, the latest first.
    TakeBack {
        /// Of this lease.
        lease: LeaseId,
        /// At most.
        most: u32,
        /// Whether others need the lease: its process runs nothing more of its own while the task waits that was sent there.
        recalled: bool,
    },
    /// A task or call is not wanted any more.
    Cancel {
        /// The task.
        task: TaskId,
        /// Whether the worker process ends if it runs now.
        force: bool,
    },
    /// The consumer took items up to here.
    StreamTaken {
        /// The stream.
        task: TaskId,
        /// Number of items taken.
        count: u32,
    },
    /// The results of these tasks arrived, and the refs in them are registered.
    Received(Vec<TaskId>),
    /// This item of a stream arrived, and the refs in it are registered.
    ItemReceived(ObjectId),
    /// From the steward: it holds all refs in what it has heard of. With the end of this process nothing is lost.
    MayLeave,
}

impl PeerMessage {
    /// Whether it is said to the owner of an object by whoever holds a ref, and so to its steward when it is no more.
    #[must_use]
    pub fn is_for_owner(&self) -> bool {
        matches!(
            self,
            PeerMessage::Borrow(_)
                | PeerMessage::Release(_)
                | PeerMessage::Subscribe(_)
                | PeerMessage::Copied { .. }
                | PeerMessage::Lost { .. }
        )
    }
}

impl From<Work> for PeerMessage {
    fn from(work: Work) -> PeerMessage {
        PeerMessage::Work(work)
    }
}

/// The number of a registration of a borrowed object. Later ones of a process are larger; 0 is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Registration(pub u64);

/// A value's place in the shared memory of the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Located {
    /// Where it begins.
    pub offset: u64,
    /// Its length.
    pub len: u64,
}

/// What there is for an object that is to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Place {
    /// Nothing yet: it is to be written here.
    Free(Located),
    /// The object, complete.
    Taken {
        /// Its length: perhaps not that of what was to be written, where an earlier attempt has made it.
        len: u64,
    },
}

/// Where an object's copies are, for a node that is to fetch it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Fetch {
    /// The object.
    pub object: ObjectId,
    /// Size and holders.
    pub stored: Stored,
    /// Who answers for it when its owner is no more, if the reader knows.
    pub steward: Option<Box<Address>>,
}
