//! The state of the cluster, for people and tools.

use std::fmt::Write;

use wingbeat_core::ResourceSet;
use wingbeat_core::spec::Shape;
use wingbeat_net::messages::{ActorRow, ClusterState, JobState, NodeState, PendingRow};

use super::State;
use super::nodes::Nodes;

pub(super) fn of(state: &State) -> ClusterState {
    let nodes = state.nodes.iter().map(|node| NodeState {
        info: node.info.clone(),
        available: node.available.clone(),
        leases: node.leases,
    });
    let jobs = state.jobs.values().map(|job| JobState {
        id: job.id,
        name: job.name.clone(),
        leases: state.leases.of_job(job.id),
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
    let tasks = state.leases.unmet().map(|(shape, name, count)| PendingRow {
        name: name.to_owned(),
        resources: shape.resources.clone(),
        count,
        why: why(&state.nodes, shape),
    });
    let waiting_actors = state.actors.pending_specs().map(|spec| PendingRow {
        name: format!("actor {}", spec.class_name),
        resources: spec.placement.resources.clone(),
        count: 1,
        why: why(&state.nodes, &spec.placement),
    });
    ClusterState {
        cluster: Some(state.cluster),
        uptime_secs: state.now / 1000,
        nodes: nodes.collect(),
        jobs: jobs.collect(),
        actors: actors.collect(),
        pending: tasks.chain(waiting_actors).collect(),
    }
}

/// Why a shape is not placed now.
fn why(nodes: &Nodes, shape: &Shape) -> String {
    if nodes.is_empty() {
        return "no node has joined yet; start one with `wingbeat worker`".into();
    }
    let mut text = format!("asks for {}", shape.resources);
    for node in nodes.iter() {
        let short: Vec<String> = missing(&node.available, &shape.resources);
        if short.is_empty() {
            let _ = write!(text, "; {} has room, and a worker process is being started", node.info.hostname);
        } else {
            let _ = write!(text, "; {} has {} free ({} leases)", node.info.hostname, short.join(", "), node.leases);
        }
    }
    text
}

fn missing(available: &ResourceSet, needed: &ResourceSet) -> Vec<String> {
    let short = needed.iter().filter(|(name, amount)| available.get(name) < *amount);
    short.map(|(name, _)| format!("{} {name}", available.get(name))).collect()
}
