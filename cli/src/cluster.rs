//! `wingbeat status` and `wingbeat stop`.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use tarpc::client::RpcError;
use wingbeat_core::spec::Address;
use wingbeat_core::{NodeId, ResourceSet};
use wingbeat_net::address;
use wingbeat_net::handshake::Hello;
use wingbeat_net::messages::{ClusterState, OwningJob};
use wingbeat_net::mux::{self, Waiting};
use wingbeat_net::seek;
use wingbeat_net::services::{HeadClient, HeadRequest, HeadResponse, ProcessRequest, ProcessResponse};
use wingbeat_worker::{join, token};

use crate::daemons::DEFAULT_PORT;
use crate::named;
use crate::say::say;
use crate::status;
use crate::watch::Watch;

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
    /// Show only what has this id, or begins with it alone, and what is on that node, or of that job waits: node-…, actor-…, group-…, job-….
    id: Option<String>,
    #[command(flatten)]
    at: Where,
    /// Print JSON for programs.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    watch: Watch,
}

/// List one kind of thing of a cluster: a table, or with --json an array for programs.
#[derive(Args)]
pub(crate) struct ListArgs {
    /// What is listed.
    #[arg(value_enum)]
    what: What,
    #[command(flatten)]
    at: Where,
    /// Print a JSON array for programs, with the fields of `wingbeat status --json`.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    watch: Watch,
}

/// A kind of thing that a cluster has.
#[derive(Clone, Copy, clap::ValueEnum)]
pub(crate) enum What {
    Nodes,
    Jobs,
    Actors,
    /// Placement groups.
    Groups,
    Quotas,
    /// What wants leases or room, and why it has none.
    Waiting,
}

/// How long the head may take to answer.
const LIMIT: Duration = Duration::from_secs(10);
/// How often the head is asked to stop, over connections that end.
const STOP_TRIES: u32 = 5;

/// End every job and node, and the head.
#[derive(Args)]
pub(crate) struct StopArgs {
    #[command(flatten)]
    at: Where,
}

/// The head, over a connection that ends with this: a watch makes one each time.
pub(crate) struct Head {
    client: HeadClient,
    _closes: mux::Closes,
}

impl std::ops::Deref for Head {
    type Target = HeadClient;

    fn deref(&self) -> &HeadClient {
        &self.client
    }
}

pub(crate) async fn connect(at: &Where) -> Result<Head> {
    dial(at).await.map(|(head, _)| head)
}

/// The head, and where it is by its own word.
async fn dial(at: &Where) -> Result<(Head, Address)> {
    let text = at.address.clone().unwrap_or_else(|| format!("127.0.0.1:{DEFAULT_PORT}"));
    let token = match token::given(at.token_file.as_deref())? {
        Some(token) => token,
        None => token::own()?,
    };
    let (stream, welcome) = seek::dial_head(&text, "the head", &token, Hello::of_tool()).await?;
    let (connection, client, _) =
        mux::connect::<HeadRequest, HeadResponse, ProcessRequest, ProcessResponse>(stream, Waiting::Asleep);
    let client = HeadClient::new(mux::client_config(), client).spawn();
    Ok((Head { client, _closes: connection.closes() }, welcome.address))
}

async fn state(at: &Where) -> Result<ClusterState> {
    connect(at).await?.state(mux::within(Duration::from_secs(10))).await.context("the head did not answer")
}

pub(crate) async fn list(args: ListArgs) -> Result<()> {
    let text = async || {
        let state = state(&args.at).await?;
        if !args.json {
            return Ok(status::list(&state, args.what));
        }
        let listed = match args.what {
            What::Nodes => serde_json::to_string_pretty(&state.nodes),
            What::Jobs => serde_json::to_string_pretty(&state.jobs),
            What::Actors => serde_json::to_string_pretty(&state.actors),
            What::Groups => serde_json::to_string_pretty(&state.placement_groups),
            What::Quotas => serde_json::to_string_pretty(&state.quotas),
            What::Waiting => serde_json::to_string_pretty(&state.pending),
        };
        Ok(listed?)
    };
    args.watch.show(text).await
}

pub(crate) async fn status(args: StatusArgs) -> Result<()> {
    let text = async || {
        let mut state = state(&args.at).await?;
        if let Some(text) = &args.id {
            let all = named::ids(&state);
            let id = named::one_of(text, &all)?;
            let id = id.with_context(|| format!("nothing has an id that begins with `{text}`"))?;
            keep_only(id, &mut state);
        }
        match args.json {
            true => Ok(serde_json::to_string_pretty(&state)?),
            false => Ok(status::text(&state, args.id.is_none())),
        }
    };
    args.watch.show(text).await
}

pub(crate) async fn stop(args: StopArgs) -> Result<()> {
    let (mut head, address) = dial(&args.at).await?;
    let standby = match head.state(mux::within(LIMIT)).await {
        Ok(state) => state.standby,
        // As below.
        Err(RpcError::Shutdown | RpcError::Channel(_)) => None,
        Err(error) => return Err(error).context("the head did not answer"),
    };
    let stopped = || {
        say!("stopped the cluster of the head at {}", shown(&address));
        Ok(())
    };
    for _ in 0..STOP_TRIES {
        match head.stop(mux::within(LIMIT)).await {
            Ok(()) => return stopped(),
            // The head has ended, or the connection has, before the head heard of it or could answer.
            Err(RpcError::Shutdown | RpcError::Channel(_)) => {}
            Err(error) => return Err(error).context("the head did not answer"),
        }
        head = match dial(&args.at).await {
            Ok((head, _)) => head,
            Err(_) if address::is_gone(&address).await => match standby {
                None => return stopped(),
                Some(standby) => anyhow::bail!(
                    "the head at {0} ended before it answered, and its standby at {1} may take over: `wingbeat stop --address {1}`",
                    shown(&address),
                    shown(&standby.address)
                ),
            },
            Err(error) => return Err(error),
        };
    }
    anyhow::bail!("the connection to the head ended {STOP_TRIES} times before it had answered")
}

fn shown(address: &Address) -> String {
    address.tcp.map_or_else(|| address.unix.clone(), |tcp| tcp.to_string())
}

/// Keeps what has this id, is on the node of this id, or of the job of this id as far as that is said of it.
fn keep_only(id: &str, state: &mut ClusterState) {
    let is_it = |other: &dyn ToString| other.to_string() == id;
    state.nodes.retain(|node| is_it(&node.info.id));
    state.absent.retain(|node| is_it(node));
    state.jobs.retain(|job| is_it(&job.id));
    state.actors.retain(|actor| is_it(&actor.id) || actor.node.is_some_and(|node| is_it(&node)));
    let is_there = |bundles: &[(ResourceSet, Option<NodeId>)]| {
        bundles.iter().any(|(_, node)| node.is_some_and(|node| is_it(&node)))
    };
    let is_of_it = |job: &OwningJob| job.id.is_some_and(|job| is_it(&job));
    state.placement_groups.retain(|group| is_it(&group.id) || is_there(&group.bundles) || is_of_it(&group.job));
    state.quotas.clear();
    state.pending.retain(|row| row.id == id || is_of_it(&row.job));
}

#[cfg(test)]
mod tests {
    use wingbeat_core::spec::PlacementStrategy;
    use wingbeat_core::{ActorId, JobId, PlacementGroupId, ProcessId};
    use wingbeat_net::messages::{ActorRow, PendingRow, PlacementGroupRow};

    use super::*;

    #[test]
    fn one_id_shows_what_has_it_and_what_is_on_its_node_or_of_its_job() {
        let actor = |id, node| ActorRow {
            id: ActorId(id),
            class_name: "Counter".into(),
            name: None,
            state: "alive".into(),
            node: Some(NodeId(node)),
            pid: None,
            restarts: 0,
        };
        let of = |id| OwningJob { id: Some(JobId(id)), ..OwningJob::default() };
        let waits = |process, job| PendingRow {
            name: "square".into(),
            id: ProcessId(process).to_string(),
            job: of(job),
            resources: ResourceSet::new(),
            count: 1,
            is_group: false,
            why: String::new(),
        };
        let group = PlacementGroupRow {
            id: PlacementGroupId(5),
            name: None,
            job: of(6),
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
            journal_fails: None,
            jobs: Vec::new(),
            actors: vec![actor(3, 1), actor(4, 2)],
            placement_groups: vec![group],
            quotas: Vec::new(),
            pending: vec![waits(8, 6), waits(9, 7)],
        };
        let shown = |id: &str| {
            let mut state = all.clone();
            keep_only(id, &mut state);
            let actors: Vec<u64> = state.actors.iter().map(|actor| actor.id.0).collect();
            (state.absent.len(), actors, state.placement_groups.len(), state.pending.len())
        };
        assert_eq!(shown(&NodeId(2).to_string()), (1, vec![4], 1, 0));
        assert_eq!(shown(&ActorId(3).to_string()), (0, vec![3], 0, 0));
        assert_eq!(shown(&PlacementGroupId(5).to_string()), (0, vec![], 1, 0));
        assert_eq!(shown(&JobId(6).to_string()), (0, vec![], 1, 1), "what of a job waits");
    }
}
