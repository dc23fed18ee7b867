//! What must survive the head: facts, each of which replaces what was known before under the same key.

use bytes::{Bytes, BytesMut};
use serde::{Deserialize, Serialize};
use wingbeat_core::codec;
use wingbeat_core::spec::{ActorSpec, Address, JobSpec, PlacementGroupSpec};
use wingbeat_core::{ActorId, Amount, Incarnation, JobId, NodeId, PlacementGroupId, ResourceSet};
use wingbeat_net::messages::{NodeInfo, Succession};

/// A durable change, as its result and not as what caused it, so that a later version of the head can read it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Fact {
    /// A job is there, and whether its driver is.
    Job(Box<JobSpec>, bool),
    /// Nothing of it is left.
    JobGone(JobId),
    /// A named or detached actor.
    Actor(KeptActor),
    /// It is dead.
    ActorGone(ActorId),
    /// A placement group, and the place of each bundle that has one.
    Group(Box<PlacementGroupSpec>, Vec<Option<BundlePlace>>),
    /// It was removed.
    GroupGone(PlacementGroupId),
    /// What a namespace may hold.
    Quota(String, ResourceSet),
    /// It may hold anything.
    QuotaGone(String),
    /// A node is there, and how it is drained, if it is.
    Node(Box<NodeInfo>, Option<Drained>),
    /// It is lost.
    NodeGone(NodeId),
    /// Whoever knows the head may go on without it for so many milliseconds, and then has ended by itself.
    Promise(u64),
    /// Who may take over from the head that has written this.
    Succession(Box<Succession>),
    /// Nobody has said who.
    NoSuccession,
    /// What lies beside this is the copy that a standby makes of what this head has written.
    Follows(Box<Address>),
    /// The standby has taken over.
    Leads,
    /// By which the standby may take over, too, as long as it has not confirmed the latest.
    EarlierSuccession(Box<Succession>),
    /// It cannot any more.
    NoEarlierSuccession,
}

/// An actor that is found again when the head was started again.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct KeptActor {
    /// What it is.
    pub spec: Box<ActorSpec>,
    /// Its latest life, if any has begun.
    pub life: Option<Incarnation>,
    /// How often it was moved, which has cost it no restart.
    pub moves: u32,
    /// Why it is to end in order, if it is.
    pub ends: Option<String>,
}

impl KeptActor {
    /// One of which no life has begun.
    #[must_use]
    pub fn new(spec: ActorSpec) -> KeptActor {
        KeptActor { spec: Box::new(spec), life: None, moves: 0, ends: None }
    }
}

/// Where a bundle is, and what it took there.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BundlePlace {
    /// The node.
    pub node: NodeId,
    /// What it holds.
    pub resources: ResourceSet,
    /// Its devices, and how much of each.
    pub devices: Vec<(u32, Amount)>,
}

/// How a node is drained, as somebody has asked for it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Drained {
    /// After so many milliseconds what still runs is moved: from when it was asked for, or from when a head that was started again has
    /// the node back.
    pub within: u64,
    /// Why, for people.
    pub why: String,
    /// Whether the daemon is told to end when nothing runs any more.
    pub stops: bool,
}

/// What a fact is about.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum FactKey {
    /// A job; first, because what follows may belong to it.
    Job(JobId),
    /// A quota.
    Quota(String),
    /// A placement group; before actors, which may live in it.
    Group(PlacementGroupId),
    /// An actor.
    Actor(ActorId),
    /// A node.
    Node(NodeId),
    /// What was promised.
    Promise,
    /// Who may take over.
    Succession,
    /// Whose copy it is.
    Follows,
    /// Who may take over by what was said before.
    EarlierSuccession,
}

impl Fact {
    /// What it is about.
    pub fn key(&self) -> FactKey {
        match self {
            Fact::Job(spec, _) => FactKey::Job(spec.id),
            Fact::JobGone(id) => FactKey::Job(*id),
            Fact::Actor(actor) => FactKey::Actor(actor.spec.id),
            Fact::ActorGone(id) => FactKey::Actor(*id),
            Fact::Group(spec, _) => FactKey::Group(spec.id),
            Fact::GroupGone(id) => FactKey::Group(*id),
            Fact::Quota(namespace, _) | Fact::QuotaGone(namespace) => FactKey::Quota(namespace.clone()),
            Fact::Node(info, _) => FactKey::Node(info.id),
            Fact::NodeGone(id) => FactKey::Node(*id),
            Fact::Promise(_) => FactKey::Promise,
            Fact::Succession(_) | Fact::NoSuccession => FactKey::Succession,
            Fact::Follows(_) | Fact::Leads => FactKey::Follows,
            Fact::EarlierSuccession(_) | Fact::NoEarlierSuccession => FactKey::EarlierSuccession,
        }
    }

    /// Whether nothing is left to know under its key.
    pub fn is_end(&self) -> bool {
        matches!(
            self,
            Fact::JobGone(_)
                | Fact::ActorGone(_)
                | Fact::GroupGone(_)
                | Fact::QuotaGone(_)
                | Fact::NodeGone(_)
                | Fact::NoSuccession
                | Fact::Leads
                | Fact::NoEarlierSuccession
        )
    }
}

/// A fact with its key, as they are kept; none where nothing is left to know.
pub(crate) type Encoded = (Vec<u8>, Option<Vec<u8>>);

impl FactKey {
    /// What was encoded.
    ///
    /// # Errors
    /// It is no key.
    #[cfg_attr(not(feature = "journal"), allow(dead_code, reason = "for standbys, which keep a journal"))]
    pub(crate) fn decoded(bytes: Bytes) -> Result<FactKey, String> {
        codec::decode_message(bytes).map_err(|error| error.to_string())
    }
}

impl Fact {
    /// As it is written down, or kept by nodes.
    ///
    /// # Errors
    /// It cannot be encoded.
    pub(crate) fn encoded(&self) -> Result<Encoded, String> {
        fn bytes<T: Serialize>(value: &T) -> Result<Vec<u8>, String> {
            let mut bytes = BytesMut::new();
            codec::encode_message(value, &mut bytes).map_err(|error| error.to_string())?;
            Ok(bytes.into())
        }
        let content = if self.is_end() { None } else { Some(bytes(self)?) };
        Ok((bytes(&self.key())?, content))
    }

    /// What was encoded.
    ///
    /// # Errors
    /// It is no fact.
    pub(crate) fn decoded(bytes: Bytes) -> Result<Fact, String> {
        codec::decode_message(bytes).map_err(|error| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use wingbeat_core::spec::{Address, MachineId};
    use wingbeat_core::{Amount, ProcessId, ResourceSet};

    use super::*;

    fn honest() -> Vec<Fact> {
        let tcp = Some("10.0.0.1:6420".parse().unwrap());
        let address = Address { process: ProcessId(1), machine: MachineId(1), unix: "name".into(), tcp, steward: None };
        let node = NodeInfo {
            id: NodeId(1),
            address: address.clone(),
            hostname: "host".into(),
            resources: ResourceSet::cpus(Amount::whole(3)),
            devices: Vec::new(),
            labels: [("zone".into(), "a".into())].into(),
            store_bytes: 7,
        };
        vec![
            Fact::Quota("namespace".into(), ResourceSet::cpus(Amount::ONE)),
            Fact::Node(Box::new(node), None),
            Fact::Follows(Box::new(address)),
            Fact::JobGone(JobId(7)),
        ]
    }

    proptest! {
        #[test]
        fn whatever_lies_in_a_file_is_a_fact_or_refused(
            which in 0..4usize,
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
            cut in any::<Option<prop::sample::Index>>(),
        ) {
            let fact = &honest()[which];
            let (key, content) = fact.encoded().unwrap();
            for mut bytes in [Some(key), content].into_iter().flatten() {
                for (at, byte) in &changes {
                    let at = at.index(bytes.len());
                    bytes[at] = *byte;
                }
                if let Some(cut) = &cut {
                    bytes.truncate(cut.index(bytes.len()));
                }
                let bytes = Bytes::from(bytes);
                let _ = FactKey::decoded(bytes.clone());
                if let Ok(fact) = Fact::decoded(bytes) {
                    prop_assert!(fact.encoded().is_ok());
                }
            }
        }
    }
}
