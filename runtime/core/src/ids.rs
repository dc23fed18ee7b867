//! Newtypes for everything that has an identity.
//!
//! Ids that one authority hands out in order (leases) are counters; ids that many processes make
//! without asking anybody (processes, nodes, actors) are random 64-bit numbers.

use std::borrow::Cow;
use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub u64);

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                match to.is_human_readable() {
                    true => to.collect_str(self),
                    false => to.serialize_u64(self.0),
                }
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                match from.is_human_readable() {
                    true => Cow::<str>::deserialize(from)?.parse().map_err(serde::de::Error::custom),
                    false => u64::deserialize(from).map(Self),
                }
            }
        }

        impl $name {
            /// A new random id, of 16 digits: what it begins with is what people type of it.
            pub fn random() -> Self {
                Self(rand::random_range(1 << 60..=u64::MAX))
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "-{:012x}"), self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }

        impl std::str::FromStr for $name {
            type Err = InvalidId;

            fn from_str(text: &str) -> Result<Self, InvalidId> {
                text.strip_prefix(concat!($prefix, "-"))
                    .and_then(|hex| u64::from_str_radix(hex, 16).ok())
                    .map(Self)
                    .ok_or_else(|| InvalidId { text: text.to_owned(), expected: concat!($prefix, "-<hex>") })
            }
        }
    };
}

/// A text that is no id of the kind that was asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not an id: expected the form {expected}")]
pub struct InvalidId {
    /// What was given.
    pub text: String,
    /// The form that was expected.
    pub expected: &'static str,
}

id!(
    /// A cluster: what one head controls. Chosen at random when the head first starts.
    ClusterId, "cluster"
);
id!(
    /// A participating process (driver or worker process).
    ProcessId, "process"
);
id!(
    /// One life of a node daemon. A daemon that is started again is a new node.
    NodeId, "node"
);
id!(
    /// A driver's session with a cluster; all its tasks, actors and objects belong to it.
    JobId, "job"
);
id!(
    /// A grant of resources on one node to one owner.
    LeaseId, "lease"
);
id!(
    /// An actor over all its restarts.
    ActorId, "actor"
);
id!(
    /// A placement group.
    PlacementGroupId, "group"
);
id!(
    /// A remote function or an actor class: a hash of crate, path and signature.
    FunctionId, "function"
);

impl NodeId {
    /// The process in the node's daemon that answers for the objects of processes that have ended.
    #[must_use]
    pub fn steward(self) -> ProcessId {
        ProcessId(self.0)
    }
}

/// A task or an actor call: the process that submitted it and that process's running number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct TaskId {
    /// The process that submitted the task, and so owns what it returns.
    pub owner: ProcessId,
    /// The owner's running number. Puts take a number too.
    pub seq: u64,
}

impl TaskId {
    /// The id of the `index`-th value that the task returns. It is the same for every attempt.
    pub fn output(self, index: u32) -> ObjectId {
        ObjectId { task: self, index }
    }
}

/// An object. The id itself says who owns it, so no directory is needed to find the owner.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ObjectId {
    /// The task that makes the object, or the number that a put took.
    pub task: TaskId,
    /// Which of the task's outputs.
    pub index: u32,
}

impl ObjectId {
    /// The process that owns the object.
    pub fn owner(self) -> ProcessId {
        self.task.owner
    }
}

impl fmt::Display for TaskId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "task-{:012x}.{}", self.owner.0, self.seq)
    }
}

impl std::str::FromStr for TaskId {
    type Err = InvalidId;

    fn from_str(text: &str) -> Result<Self, InvalidId> {
        let parts = text.strip_prefix("task-").and_then(|rest| rest.split_once('.'));
        let parsed = parts.and_then(|(owner, seq)| {
            Some(TaskId { owner: ProcessId(u64::from_str_radix(owner, 16).ok()?), seq: seq.parse().ok()? })
        });
        parsed.ok_or_else(|| InvalidId { text: text.to_owned(), expected: "task-<hex>.<number>" })
    }
}

impl std::str::FromStr for ObjectId {
    type Err = InvalidId;

    fn from_str(text: &str) -> Result<Self, InvalidId> {
        let invalid = || InvalidId { text: text.to_owned(), expected: "object-<hex>.<number>.<number>" };
        let (task, index) = text.strip_prefix("object-").and_then(|rest| rest.rsplit_once('.')).ok_or_else(invalid)?;
        let task = format!("task-{task}").parse().map_err(|_| invalid())?;
        Ok(ObjectId { task, index: index.parse().map_err(|_| invalid())? })
    }
}

impl fmt::Debug for TaskId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "object-{:012x}.{}.{}", self.task.owner.0, self.task.seq, self.index)
    }
}

impl fmt::Debug for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// How often an actor was started before this life of it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug, Serialize, Deserialize)]
pub struct Incarnation(pub u32);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_written_for_people_as_it_is_shown_and_for_programs_as_a_number() {
        use serde::de::IntoDeserializer;
        use serde::de::value::{Error, StrDeserializer};
        let text: StrDeserializer<'_, Error> = "node-00000000002a".into_deserializer();
        assert_eq!(NodeId::deserialize(text), Ok(NodeId(42)));
        let text: StrDeserializer<'_, Error> = "job-00000000002a".into_deserializer();
        assert!(NodeId::deserialize(text).is_err());
        let mut encoded = bytes::BytesMut::new();
        crate::codec::encode_message(&NodeId(42), &mut encoded).unwrap();
        assert_eq!(crate::codec::decode_message::<NodeId>(encoded.freeze()).unwrap(), NodeId(42));
    }

    #[test]
    fn an_id_reads_back_what_it_shows() {
        let id = ActorId::random();
        assert_eq!(id.to_string().parse(), Ok(id));
        assert!("node-12".parse::<ActorId>().is_err());
        let object = TaskId { owner: ProcessId(0xabc), seq: 12 }.output(3);
        assert_eq!(object.to_string().parse(), Ok(object));
        assert_eq!(object.task.to_string().parse(), Ok(object.task));
        assert!("task-abc".parse::<TaskId>().is_err());
    }
}
