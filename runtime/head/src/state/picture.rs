//! The state of the cluster, for people and tools.

use std::collections::BTreeMap;

use wingbeat_core::{JobId, ResourceSet};
use wingbeat_net::messages::{ActorRow, ClusterState, JobState, NodeState, PendingRow, PlacementGroupRow, QuotaRow};

use super::queue::Waiter;
use super::shapes::ShapeId;
use super::{Millis, State};

/// Shapes and groups of which one picture says what each node lacks: the others say how to ask. Looking at the nodes
/// for each of thousands would take as long as others may wait for the head.
const EXPLAINED: usize = 64;

pub(super) fn of(state: &State, now: Millis) -> ClusterState {
    let nodes = state.nodes.iter().map(|node| NodeState {
        info: node.info.clone(),
        available: node.pool.available.clone(),
        leases: node.leases.len() as u32,
        draining: node.draining.as_ref().map(|drain| drain.as_asked.why.clone()),
        suspect_secs: node.suspect.map(|since| now.saturating_sub(since) / 1_000),
        held_devices: node.held.iter().map(|(device, who)| format!("GPU {device}: {who}")).collect(),
    });
    let absent = state.recovering.iter().flat_map(|recovering| recovering.infos()).map(|info| info.id).collect();
    let mut leases: BTreeMap<JobId, u32> = BTreeMap::new();
    for lease in state.leases.leases.values() {
        *leases.entry(lease.job).or_default() += 1;
    }
    let jobs = state.jobs.values().map(|job| JobState {
        id: job.spec.id,
        name: job.spec.name.clone(),
        leases: leases.get(&job.spec.id).copied().unwrap_or_default(),
    });
    let actors = state.actors.rows().map(|row| ActorRow {
        id: row.spec.id,
        class_name: row.spec.class_name.clone(),
        name: row.spec.name.clone(),
        state: row.state.to_owned(),
        node: row.node,
        pid: row.pid,
        restarts: row.restarts,
    });
    let groups = state.groups.iter().map(|group| PlacementGroupRow {
        id: group.spec.id,
        name: group.spec.name.clone(),
        state: if group.is_placed() { "placed" } else { "pending" }.to_owned(),
        strategy: group.spec.strategy,
        bundles: group
            .spec
            .bundles
            .iter()
            .zip(&group.placed)
            .map(|(bundle, placed)| (bundle.resources.clone(), placed.as_ref().map(|placed| placed.taken.node)))
            .collect(),
    });
    let quotas = state.quotas.iter().map(|(namespace, quota)| QuotaRow {
        namespace: namespace.to_owned(),
        limit: quota.limit.clone(),
        used: quota.used.clone(),
    });
    let mut reasons = Reasons { state, by_shape: BTreeMap::new(), groups: 0 };
    ClusterState {
        standby: None,
        absent,
        cluster: Some(state.cluster),
        uptime_secs: now / 1000,
        nodes: nodes.collect(),
        jobs: jobs.collect(),
        actors: actors.collect(),
        placement_groups: groups.collect(),
        quotas: quotas.collect(),
        pending: state.queue.waiters().filter_map(|waiter| reasons.row_of(waiter)).collect(),
    }
}

/// Why those who wait do so, said once for all who ask for the same.
struct Reasons<'a> {
    state: &'a State,
    by_shape: BTreeMap<ShapeId, String>,
    groups: usize,
}

impl Reasons<'_> {
    fn row_of(&mut self, waiter: Waiter) -> Option<PendingRow> {
        let state = self.state;
        let (name, id, resources, count): (String, String, ResourceSet, u32) = match waiter {
            Waiter::Tasks(process, shape) => {
                let demand = state.leases.demands.get(&(process, shape))?;
                let more = demand.wanted - demand.held.len() as u32;
                (demand.name.clone(), process.to_string(), state.shapes.get(shape)?.resources.clone(), more)
            }
            Waiter::Actor(id) => {
                let spec = state.actors.spec(id)?;
                (format!("actor {}", spec.class_name), id.to_string(), spec.placement.resources.clone(), 1)
            }
            Waiter::Group(id) => {
                let (spec, sum) = state.groups.asked(id)?;
                (spec.title(), id.to_string(), sum, 1)
            }
        };
        let why = self.why(waiter, &id);
        Some(PendingRow { name, id, resources, count, why })
    }

    fn why(&mut self, waiter: Waiter, id: &str) -> String {
        let state = self.state;
        if let Some(held) = state.hold_in_short(waiter) {
            return held;
        }
        let shape = match waiter {
            Waiter::Tasks(_, shape) => Some(shape),
            Waiter::Actor(actor) => state.actors.shape_of(actor),
            Waiter::Group(group) => {
                self.groups += 1;
                if self.groups > EXPLAINED {
                    return format!("`wingbeat why {id}` says more");
                }
                return state.group_in_short(group);
            }
        };
        let Some(shape) = shape else { return String::new() };
        let is_first = self.by_shape.len() < EXPLAINED;
        let reasons = match self.by_shape.get(&shape) {
            Some(known) => known.clone(),
            None if is_first => {
                let reasons = state.shape_in_short(waiter, shape);
                self.by_shape.insert(shape, reasons.clone());
                reasons
            }
            None => {
                let asked = state.shapes.get(shape).map(|shape| format!("asks for {shape}; ")).unwrap_or_default();
                format!("{asked}`wingbeat why {id}` says more")
            }
        };
        match waiter {
            Waiter::Actor(actor) => match state.actors.last_end(actor) {
                Some(cause) => format!("its last life ended: {cause}; {reasons}"),
                None => reasons,
            },
            Waiter::Tasks(..) | Waiter::Group(_) => reasons,
        }
    }
}
