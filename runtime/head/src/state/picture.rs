//! The state of the cluster, for people and tools.

use wingbeat_core::ResourceSet;
use wingbeat_net::messages::{ActorRow, ClusterState, JobState, NodeState, PendingRow, PlacementGroupRow, QuotaRow};

use super::State;
use super::queue::Waiter;

pub(super) fn of(state: &State) -> ClusterState {
    let nodes = state.nodes.iter().map(|node| NodeState {
        info: node.info.clone(),
        available: node.pool.available.clone(),
        leases: node.leases.len() as u32,
        draining: node.draining.as_ref().map(|drain| drain.why.clone()),
        held_devices: node.held.iter().map(|(device, who)| format!("GPU {device}: {who}")).collect(),
    });
    let jobs = state.jobs.values().map(|job| JobState {
        id: job.spec.id,
        name: job.spec.name.clone(),
        leases: state.leases.of_job(job.spec.id),
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
    ClusterState {
        cluster: Some(state.cluster),
        uptime_secs: state.now / 1000,
        nodes: nodes.collect(),
        jobs: jobs.collect(),
        actors: actors.collect(),
        placement_groups: groups.collect(),
        quotas: quotas.collect(),
        pending: state.queue.waiters().filter_map(|waiter| row_of(state, waiter)).collect(),
    }
}

fn row_of(state: &State, waiter: Waiter) -> Option<PendingRow> {
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
    Some(PendingRow { name, id, resources, count, why: state.why_in_short(waiter) })
}
