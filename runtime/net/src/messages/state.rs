//! What people ask of a cluster.

use std::fmt;

use serde::{Deserialize, Serialize};
use wingbeat_core::spec::*;
use wingbeat_core::*;

use super::node::{NodeInfo, StoreUse};

/// A picture of the cluster, for people and tools.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ClusterState {
    /// The cluster.
    pub cluster: Option<ClusterId>,
    /// Seconds since the head started.
    pub uptime_secs: u64,
    /// Living nodes.
    pub nodes: Vec<NodeState>,
    /// Nodes that are not back since the head was started again, and may still come.
    pub absent: Vec<NodeId>,
    /// The head's standby, if it has one.
    pub standby: Option<StandbyState>,
    /// Why the head cannot write its journal. Until it can, it grants nothing new.
    pub journal_fails: Option<String>,
    /// Jobs that run, and those that have ended and of which something is left, such as a detached actor.
    pub jobs: Vec<JobState>,
    /// Actors that are not dead.
    pub actors: Vec<ActorRow>,
    /// Placement groups.
    pub placement_groups: Vec<PlacementGroupRow>,
    /// What each namespace may hold, and what it holds.
    pub quotas: Vec<QuotaRow>,
    /// Demands that are not met.
    pub pending: Vec<PendingRow>,
}

/// The head's standby in [`ClusterState`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StandbyState {
    /// Where it would serve.
    pub address: Address,
    /// Whether it has all that it needs, and may take over.
    pub is_current: bool,
    /// The nodes of whose votes it needs a majority.
    pub voters: usize,
}

/// A node in [`ClusterState`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NodeState {
    /// The node.
    pub id: NodeId,
    /// `alive`, `suspect` or `draining`.
    pub state: String,
    /// As it introduced itself.
    pub info: NodeInfo,
    /// What is free.
    pub available: ResourceSet,
    /// Leases on it.
    pub leases: u32,
    /// Why nothing new is placed here, if so.
    pub draining: Option<String>,
    /// For how many seconds it has been suspect, if it is: it has no connection to the head, and may come back.
    pub suspect_secs: Option<u64>,
    /// Devices that are not given to anybody, because of what still holds them.
    pub held_devices: Vec<String>,
    /// What its object store holds, as of a few seconds ago.
    pub store: StoreUse,
    /// How much of its memory was used, in words, when it became short; none if there is enough.
    pub memory_short: Option<String>,
}

/// A placement group in [`ClusterState`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PlacementGroupRow {
    /// The group.
    pub id: PlacementGroupId,
    /// Its name.
    pub name: Option<ScopedName>,
    /// Whose it is.
    pub job: OwningJob,
    /// `pending` or `placed`.
    pub state: String,
    /// How its bundles lie to each other.
    pub strategy: PlacementStrategy,
    /// What each bundle holds, and its node once it has one.
    pub bundles: Vec<(ResourceSet, Option<NodeId>)>,
}

/// The job of something in [`ClusterState`], and what decides how soon its work is placed.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct OwningJob {
    /// The job; none if the node of its worker process has not yet said whose that is.
    pub id: Option<JobId>,
    /// Its name.
    pub name: String,
    /// As in [`JobState`].
    pub namespace: String,
    /// As in [`JobState`].
    pub priority: i32,
}

/// A quota in [`ClusterState`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct QuotaRow {
    /// Of whom.
    pub namespace: String,
    /// What it may hold at a time.
    pub limit: ResourceSet,
    /// What it holds.
    pub used: ResourceSet,
}

/// A job in [`ClusterState`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct JobState {
    /// The job.
    pub id: JobId,
    /// Its name.
    pub name: String,
    /// Where its actors and placement groups have their names, and to which a quota applies. One of its own is called after its id.
    pub namespace: String,
    /// Whose waiting work is placed first: that of the job with the larger number.
    pub priority: i32,
    /// `running`, or `ended` if its program is gone.
    pub state: String,
    /// Leases that it holds.
    pub leases: u32,
}

/// An actor in [`ClusterState`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ActorRow {
    /// The actor.
    pub id: ActorId,
    /// Its class.
    pub class_name: String,
    /// Its name.
    pub name: Option<ScopedName>,
    /// `starting`, `alive` or `restarting`.
    pub state: String,
    /// Its node.
    pub node: Option<NodeId>,
    /// Its process id.
    pub pid: Option<u32>,
    /// How often it was started again.
    pub restarts: u32,
}

/// An unmet demand in [`ClusterState`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PendingRow {
    /// A task's or actor's name.
    pub name: String,
    /// What `wingbeat why` takes: the actor, the placement group, or the process whose tasks wait.
    pub id: String,
    /// Whose it is.
    pub job: OwningJob,
    /// What each needs.
    pub resources: ResourceSet,
    /// How many leases are wanted for it. Of tasks, that is what their owner can use by its last word, which grows in powers of two; how
    /// many tasks wait, it alone knows.
    pub count: u32,
    /// Whether it is a placement group, which waits for room and not for a lease.
    pub is_group: bool,
    /// Why, in words.
    pub why: String,
}

/// Why something waits, or where it runs; the answer of `wingbeat why`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Explanation {
    /// What was asked about, as people know it.
    pub subject: String,
    /// What it does now, such as `waits for a worker process to start`.
    pub state: String,
    /// Since when, in milliseconds before now, where that is known.
    pub since_ms: Option<u64>,
    /// What must come true first, and for each node why it is not there yet.
    pub reasons: Vec<String>,
    /// Who holds what is missing: what, how much, where, since when.
    pub holders: Vec<String>,
    /// What would help.
    pub help: Vec<String>,
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.subject, self.state)?;
        if let Some(millis) = self.since_ms {
            let (minutes, seconds) = (millis / 60_000, millis / 1000 % 60);
            match minutes {
                0 => write!(f, ", for {seconds}s")?,
                minutes => write!(f, ", for {minutes}m {seconds}s")?,
            }
        }
        for (heading, lines) in [("because", &self.reasons), ("held by", &self.holders), ("what helps", &self.help)] {
            for (i, line) in lines.iter().enumerate() {
                write!(f, "\n  {:<11} {line}", if i == 0 { heading } else { "" })?;
            }
        }
        Ok(())
    }
}
