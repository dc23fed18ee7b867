//! What a session answers about its cluster. These types are Wingbeat's interface; what processes send each other is another matter.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use wingbeat_core::error::{Error, Result};
use wingbeat_core::{ActorId, NodeId, ObjectId, PlacementGroupId, ResourceSet, TaskId};
use wingbeat_net::messages;

/// A node of the cluster, as [`Session::nodes`](crate::Session::nodes) lists it.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub struct Node {
    /// The life of its daemon: a node that is started again has another one.
    pub id: NodeId,
    /// The machine's name.
    pub hostname: String,
    /// For how long it has been suspect, if it is: it is silent, nothing new is placed there, and it may come back.
    pub suspect_for: Option<Duration>,
    /// Why it is being drained, if it is: nothing new is placed there.
    pub draining: Option<String>,
    /// What it has, by name: `CPU`, `GPU`, `memory` in bytes, and custom resources.
    pub resources: BTreeMap<String, f64>,
    /// What of that is free.
    pub available: BTreeMap<String, f64>,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Its GPUs, such as `NVIDIA H200`; empty if only their number is known.
    pub gpu_models: Vec<String>,
    /// Capacity of its object store, in bytes.
    pub object_store_memory: u64,
}

impl Node {
    /// Whether new work may be placed there, as far as there is room.
    pub fn is_open(&self) -> bool {
        self.suspect_for.is_none() && self.draining.is_none()
    }
}

/// What [`Session::why`](crate::Session::why) can be asked about: made of an id, or parsed from one as text.
///
/// ```
/// let subject: wingbeat::Subject = "12345".parse()?;   // a worker process
/// assert!("nothing".parse::<wingbeat::Subject>().is_err());
/// # Ok::<(), wingbeat::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Subject(messages::Subject);

impl Subject {
    pub(crate) fn into_message(self) -> messages::Subject {
        self.0
    }
}

impl From<ObjectId> for Subject {
    fn from(object: ObjectId) -> Self {
        Subject(object.into())
    }
}

impl From<TaskId> for Subject {
    fn from(task: TaskId) -> Self {
        Subject(messages::Subject::Task(task))
    }
}

impl From<ActorId> for Subject {
    fn from(actor: ActorId) -> Self {
        Subject(actor.into())
    }
}

impl From<PlacementGroupId> for Subject {
    fn from(group: PlacementGroupId) -> Self {
        Subject(group.into())
    }
}

impl From<NodeId> for Subject {
    fn from(node: NodeId) -> Self {
        Subject(node.into())
    }
}

impl FromStr for Subject {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        text.parse().map(Subject).map_err(|error| Error::InvalidArgument { what: format!("{error}") })
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Why something waits, or where it runs; the answer of [`Session::why`](crate::Session::why). Printed, it is what `wingbeat why`
/// shows.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Explanation {
    /// What was asked about, as people know it.
    pub subject: String,
    /// What it does now, such as `waits for a worker process to start`.
    pub state: String,
    /// For how long it has done so, where that is known.
    pub since: Option<Duration>,
    /// What must come true first, and for each node why it is not there yet.
    pub reasons: Vec<String>,
    /// Who holds what is missing: what, how much, where, since when.
    pub holders: Vec<String>,
    /// What would help.
    pub help: Vec<String>,
}

impl Explanation {
    pub(crate) fn from_message(message: messages::Explanation) -> Explanation {
        let messages::Explanation { subject, state, since_ms, reasons, holders, help } = message;
        Explanation { subject, state, since: since_ms.map(Duration::from_millis), reasons, holders, help }
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Explanation { subject, state, since, reasons, holders, help } = self.clone();
        let since_ms = since.map(|since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX));
        messages::Explanation { subject, state, since_ms, reasons, holders, help }.fmt(f)
    }
}

/// All nodes that the head knows of, by id.
pub(crate) async fn nodes(session: &wingbeat_process::Session) -> Result<Vec<Node>> {
    let mut nodes: Vec<Node> = session.cluster_state().await?.nodes.into_iter().map(node).collect();
    nodes.sort_by_key(|node| node.id);
    Ok(nodes)
}

fn node(of: messages::NodeState) -> Node {
    Node {
        id: of.info.id,
        hostname: of.info.hostname,
        suspect_for: of.suspect_secs.map(Duration::from_secs),
        draining: of.draining,
        resources: amounts(&of.info.resources),
        available: amounts(&of.available),
        labels: of.info.labels,
        gpu_models: of.info.devices.into_iter().map(|device| device.model).collect(),
        object_store_memory: of.info.store_bytes,
    }
}

fn amounts(resources: &ResourceSet) -> BTreeMap<String, f64> {
    resources.iter().map(|(name, amount)| (name.to_owned(), amount.as_f64())).collect()
}

/// What all of these are together.
pub(crate) fn sum(sets: impl Iterator<Item = BTreeMap<String, f64>>) -> BTreeMap<String, f64> {
    let mut all = BTreeMap::new();
    for (name, amount) in sets.flatten() {
        *all.entry(name).or_default() += amount;
    }
    all
}
