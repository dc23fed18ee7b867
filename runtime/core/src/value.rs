//! The forms in which an object's value travels.

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::codec::Payload;
use crate::error::Error;
use crate::ids::{NodeId, ObjectId};
use crate::spec::Address;

/// Values up to this many encoded bytes travel with messages; larger ones live in their node's store.
pub const INLINE_LIMIT: usize = 100 << 10;

/// The object refs inside an encoded value, and where their owners are.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Refs {
    /// Every object that the value refers to, in order of encoding.
    pub ids: Vec<ObjectId>,
    /// The address of every owner that occurs in `ids`, once; with an argument in shared memory, also that of its own.
    pub owners: Vec<Address>,
}

/// An encoded value with the refs inside it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Packed {
    /// The value in the form of [`crate::codec::encode_value`].
    pub bytes: Payload,
    /// The refs inside it; absent, as it mostly is, where there are none.
    pub refs: Option<Box<Refs>>,
}

impl Packed {
    /// A value without refs in it.
    pub fn plain(bytes: Bytes) -> Packed {
        Packed { bytes: Payload(bytes), refs: None }
    }
}

/// A copy of a value in the store of a node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stored {
    /// Encoded length in bytes.
    pub size: u64,
    /// Nodes that hold a copy, the maker's first.
    pub nodes: Vec<StoreNode>,
    /// The refs inside the value.
    pub refs: Option<Box<Refs>>,
}

/// A node that holds copies, and how to reach it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StoreNode {
    /// The node.
    pub node: NodeId,
    /// Its daemon.
    pub address: Address,
}

/// What an object has become.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum ObjectValue {
    /// The bytes themselves.
    Inline(Packed),
    /// In shared memory of one or more nodes.
    Stored(Stored),
    /// There is no value and never will be.
    Failed(Box<Error>),
}

impl ObjectValue {
    /// The refs inside the value.
    pub fn refs(&self) -> Option<&Refs> {
        match self {
            ObjectValue::Inline(packed) => packed.refs.as_deref(),
            ObjectValue::Stored(stored) => stored.refs.as_deref(),
            ObjectValue::Failed(_) => None,
        }
    }

    /// Whether a node has a copy.
    pub fn is_stored_at(&self, node: NodeId) -> bool {
        matches!(self, ObjectValue::Stored(stored) if stored.nodes.iter().any(|holder| holder.node == node))
    }
}
