//! `wingbeat status` and `wingbeat stop`.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use comfy_table::{ContentArrangement, Table, presets};
use tarpc::client::RpcError;
use wingbeat_core::names::{printable, printable_lines};
use wingbeat_core::resources::MEMORY;
use wingbeat_core::spec::{Address, ScopedName};
use wingbeat_core::{NodeId, ResourceSet};
use wingbeat_net::address;
use wingbeat_net::handshake::Hello;
use wingbeat_net::messages::ClusterState;
use wingbeat_net::mux::{self, Waiting};
use wingbeat_net::seek;
use wingbeat_net::services::{HeadClient, HeadRequest, HeadResponse, ProcessRequest, ProcessResponse};
use wingbeat_worker::{join, token};

use crate::daemons::DEFAULT_PORT;
use crate::named;
use crate::say::say;
use crate::sizes;

#[derive(Args)]
pub(crate) struct Where {
    /// The head, as host:port, or several places where it may be; this machine's default head if nothing is said.
    #[arg(long, env = join::ADDRESS_VARIABLE)]
    address: Option<String>,
    /// File with the cluster's token; else as for `wingbeat head`.
    #[arg(long)]
    token_file: Option<PathBuf>,
}

/// Show the machines, jobs, actors and whatever waits, and why it waits.
#[derive(Args)]
pub(crate) struct StatusArgs {
    /// Show only what has this id, or begins with it alone, and what is on that node: node-…, actor-…, group-…, job-….
    id: Option<String>,
    #[command(flatten)]
    at: Where,
    /// Print JSON for programs.
    #[arg(long)]
    json: bool,
}

/// How often the head is asked to stop, over connections that end.
const STOP_TRIES: u32 = 5;

/// End every job and node, and the head.
#[derive(Args)]
pub(crate) struct StopArgs {
    #[command(flatten)]
    at: Where,
}

pub(crate) async fn connect(at: &Where) -> Result<HeadClient> {
    dial(at).await.map(|(head, _)| head)
}

/// The head, and where it is by its own word.
async fn dial(at: &Where) -> Result<(HeadClient, Address)> {
    let text = at.address.clone().unwrap_or_else(|| format!("127.0.0.1:{DEFAULT_PORT}"));
    let token = match token::given(at.token_file.as_deref())? {
        Some(token) => token,
        None => token::own()?,
    };
    let (stream, welcome) = seek::dial_head(&text, "the head", &token, Hello::of_tool()).await?;
    let (_, client, _) =
        mux::connect::<HeadRequest, HeadResponse, ProcessRequest, ProcessResponse>(stream, Waiting::Asleep);
    Ok((HeadClient::new(mux::client_config(), client).spawn(), welcome.address))
}

pub(crate) async fn status(args: StatusArgs) -> Result<()> {
    let head = connect(&args.at).await?;
    let mut state = head.state(mux::within(Duration::from_secs(10))).await.context("the head did not answer")?;
    if let Some(text) = &args.id {
        let all = named::ids(&state);
        let id = named::one_of(text, &all)?.with_context(|| format!("nothing has an id that begins with `{text}`"))?;
        keep_only(id, &mut state);
    }
    if args.json {
        say!("{}", serde_json::to_string_pretty(&state)?);
    } else {
        show(&state, args.id.is_none());
    }
    Ok(())
}

pub(crate) async fn stop(args: StopArgs) -> Result<()> {
    let (mut head, address) = dial(&args.at).await?;
    for _ in 0..STOP_TRIES {
        match head.stop(mux::within(Duration::from_secs(10))).await {
            Ok(()) => return stopped(),
            // The head has ended, or the connection has, before the head heard of it or could answer.
            Err(RpcError::Shutdown | RpcError::Channel(_)) => {}
            Err(error) => return Err(error).context("the head did not answer"),
        }
        head = match dial(&args.at).await {
            Ok((head, _)) => head,
            Err(_) if address::is_gone(&address).await => return stopped(),
            Err(error) => return Err(error),
        };
    }
    anyhow::bail!("the connection to the head ended {STOP_TRIES} times before it had answered")
}

fn stopped() -> Result<()> {
    say!("stopped");
    Ok(())
}

/// Keeps what has this id, or is on the node of this id.
fn keep_only(id: &str, state: &mut ClusterState) {
    let is_it = |other: &dyn ToString| other.to_string() == id;
    state.nodes.retain(|node| is_it(&node.info.id));
    state.absent.retain(|node| is_it(node));
    state.jobs.retain(|job| is_it(&job.id));
    state.actors.retain(|actor| is_it(&actor.id) || actor.node.is_some_and(|node| is_it(&node)));
    let is_there = |bundles: &[(ResourceSet, Option<NodeId>)]| {
        bundles.iter().any(|(_, node)| node.is_some_and(|node| is_it(&node)))
    };
    state.placement_groups.retain(|group| is_it(&group.id) || is_there(&group.bundles));
    state.quotas.clear();
    state.pending.retain(|row| row.id == id);
}

fn table(headings: &[&str]) -> Table {
    let mut table = Table::new();
    table
        .load_preset(presets::UTF8_HORIZONTAL_ONLY)
        .set_content_arrangement(ContentArrangement::Dynamic)
        .set_header(headings);
    table
}

fn scoped(name: Option<&ScopedName>) -> String {
    name.map(|name| printable(&format!("{}/{}", name.namespace, name.name)).into_owned()).unwrap_or_default()
}

fn show(state: &ClusterState, is_all: bool) {
    let cluster = state.cluster.map(|cluster| cluster.to_string()).unwrap_or_default();
    say!("{cluster}, up {} s", state.uptime_secs);
    if let Some(standby) = &state.standby {
        let at = standby.address.tcp.map_or_else(|| standby.address.unix.clone(), |tcp| tcp.to_string());
        match standby.is_current {
            true => say!("a standby at {at} is up to date, and takes over when this head is gone"),
            false => say!("a standby at {at} does not have everything yet, and cannot take over"),
        }
    }
    let mut nodes = table(&["node", "host", "free / total", "object store", "leases"]);
    for node in &state.nodes {
        let resources: Vec<String> = node
            .info
            .resources
            .iter()
            .map(|(name, total)| {
                let free = node.available.get(name);
                if name == MEMORY {
                    let bytes = |amount: wingbeat_core::Amount| sizes::shown(amount.as_f64().max(0.0) as u64);
                    format!("{} / {} memory", bytes(free), bytes(total))
                } else {
                    format!("{free} / {total} {name}")
                }
            })
            .collect();
        nodes.add_row([
            if node.suspect_secs.is_some() { format!("{} (suspect)", node.info.id) } else { node.info.id.to_string() },
            printable(&node.info.hostname).into_owned(),
            resources.join(", "),
            sizes::shown(node.info.store_bytes),
            node.leases.to_string(),
        ]);
    }
    if !state.absent.is_empty() {
        let absent: Vec<String> = state.absent.iter().map(ToString::to_string).collect();
        say!("the head was started again {}s ago; not back yet: {}", state.uptime_secs, absent.join(", "));
    }
    if !state.nodes.is_empty() {
        say!("{nodes}");
    } else if state.absent.is_empty() && is_all {
        say!("no nodes; add one with `wingbeat worker --head <this head>`");
    }
    if !state.jobs.is_empty() {
        let mut jobs = table(&["job", "name", "leases"]);
        for job in &state.jobs {
            jobs.add_row([job.id.to_string(), printable(&job.name).into_owned(), job.leases.to_string()]);
        }
        say!("{jobs}");
    }
    if !state.actors.is_empty() {
        let mut actors = table(&["actor", "class", "name", "state", "node", "pid", "restarts"]);
        for actor in &state.actors {
            actors.add_row([
                actor.id.to_string(),
                printable(&actor.class_name).into_owned(),
                scoped(actor.name.as_ref()),
                actor.state.clone(),
                actor.node.map(|node| node.to_string()).unwrap_or_default(),
                actor.pid.map(|pid| pid.to_string()).unwrap_or_default(),
                actor.restarts.to_string(),
            ]);
        }
        say!("{actors}");
    }
    if !state.placement_groups.is_empty() {
        let mut groups = table(&["placement group", "name", "state", "strategy", "bundles", "nodes"]);
        for group in &state.placement_groups {
            let nodes: BTreeSet<String> =
                group.bundles.iter().filter_map(|(_, node)| node.map(|node| node.to_string())).collect();
            groups.add_row([
                group.id.to_string(),
                scoped(group.name.as_ref()),
                group.state.clone(),
                format!("{:?}", group.strategy),
                group.bundles.len().to_string(),
                nodes.into_iter().collect::<Vec<_>>().join(", "),
            ]);
        }
        say!("{groups}");
    }
    for quota in &state.quotas {
        say!("namespace {} holds {} of its quota of {}", printable(&quota.namespace), quota.used, quota.limit);
    }
    for node in &state.nodes {
        if let Some(secs) = node.suspect_secs {
            say!(
                "{} ({}) has been suspect for {secs} s: it has no connection to the head. Nothing new is placed there, and nothing of it runs \
                 elsewhere until it is back or lost",
                printable(&node.info.hostname),
                node.info.id
            );
        }
        if let Some(why) = &node.draining {
            say!("{} ({}) is being drained: {}", printable(&node.info.hostname), node.info.id, printable(why));
        }
        for held in &node.held_devices {
            say!("{} ({}) cannot give on {}", printable(&node.info.hostname), node.info.id, printable(held));
        }
    }
    if !state.pending.is_empty() {
        let mut pending = table(&["waiting", "wingbeat why", "count", "why"]);
        for row in &state.pending {
            let (name, why) = (printable(&row.name).into_owned(), printable_lines(&row.why).into_owned());
            pending.add_row([name, row.id.clone(), row.count.to_string(), why]);
        }
        say!("{pending}");
    }
}

#[cfg(test)]
mod tests {
    use wingbeat_core::spec::PlacementStrategy;
    use wingbeat_core::{ActorId, PlacementGroupId};
    use wingbeat_net::messages::{ActorRow, PlacementGroupRow};

    use super::*;

    #[test]
    fn one_id_shows_what_has_it_and_what_is_on_its_node() {
        let actor = |id, node| ActorRow {
            id: ActorId(id),
            class_name: "Counter".into(),
            name: None,
            state: "alive".into(),
            node: Some(NodeId(node)),
            pid: None,
            restarts: 0,
        };
        let group = PlacementGroupRow {
            id: PlacementGroupId(5),
            name: None,
            state: "placed".into(),
            strategy: PlacementStrategy::Pack,
            bundles: vec![(ResourceSet::new(), Some(NodeId(1))), (ResourceSet::new(), Some(NodeId(2)))],
        };
        let all = ClusterState {
            cluster: None,
            uptime_secs: 0,
            nodes: Vec::new(),
            absent: vec![NodeId(1), NodeId(2)],
            standby: None,
            jobs: Vec::new(),
            actors: vec![actor(3, 1), actor(4, 2)],
            placement_groups: vec![group],
            quotas: Vec::new(),
            pending: Vec::new(),
        };
        let shown = |id: &str| {
            let mut state = all.clone();
            keep_only(id, &mut state);
            let actors: Vec<u64> = state.actors.iter().map(|actor| actor.id.0).collect();
            (state.absent.len(), actors, state.placement_groups.len())
        };
        assert_eq!(shown(&NodeId(2).to_string()), (1, vec![4], 1));
        assert_eq!(shown(&ActorId(3).to_string()), (0, vec![3], 0));
        assert_eq!(shown(&PlacementGroupId(5).to_string()), (0, vec![], 1));
    }
}
