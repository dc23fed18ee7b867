//! What is found out before ranks start, and their start.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::sync::atomic::Ordering;

use futures::FutureExt;
use futures::stream::{SelectAll, Stream, StreamExt};
use tokio::sync::watch;
use wingbeat::{ObjectRef, get_all};

use crate::environment::{self, Shared};
use crate::error::TrainError;
use crate::group::Group;
use crate::plan::{Backend, Plan, Shipped};
use crate::preflight::{self, Problem};
use crate::process::{Event, Launch, Shard, Target};
use crate::progress::{Progress, RankProgress};
use crate::rank::RankHandle;
use crate::storage::{Place, Storage};

/// Tells NCCL that ranks may share a device.
const MAY_SHARE: &str = "NCCL_MULTI_RANK_GPU_ENABLE";

/// What is heard of ranks, from all of them.
pub(crate) type Events<S> = SelectAll<S>;
/// What one of them says.
pub(crate) type RankEvent = (usize, wingbeat::Result<Event>);

/// What is found out before ranks start.
pub(crate) struct Prepared {
    /// Where rank 0 listens.
    pub port: u16,
    /// Where NCCL tells how far it is.
    pub ras: Option<u16>,
    /// The number of the next checkpoint.
    pub next: u64,
    /// Where each rank finds the newest one.
    pub checkpoints: Vec<String>,
    /// Where each rank runs, if that was shipped.
    pub folders: Vec<String>,
    /// Over what each rank reaches the others.
    pub interfaces: Vec<Option<String>>,
}

impl Group {
    /// Finds out what ranks are to be told.
    pub(crate) async fn prepare_attempt(
        &self,
        plan: &Plan,
        progress: &Progress,
        storage: &Place,
    ) -> Result<Prepared, TrainError> {
        let port = match plan.master_port {
            Some(port) => port,
            None => self.free_port().await?,
        };
        let (next, checkpoints) = match storage.claim() {
            Some(claim) => {
                self.check_storage(claim.storage()).await?;
                let next = claim.next().await.map_err(TrainError::Storage)?;
                (next, self.newest_checkpoint(claim.storage()).await?)
            }
            None => (1, Vec::new()),
        };
        self.preflight(plan, &progress.ranks).await?;
        let interfaces = self.interfaces().await?;
        let ras = match self.backend(plan) {
            "nccl" => Some(self.free_port().await?),
            _ => None,
        };
        let folders = match &plan.shipment {
            Some(Shipped { hash, run, .. }) => self.on_each_node(|rank| rank.unfold(hash.clone(), run.clone())).await?,
            None => Vec::new(),
        };
        Ok(Prepared { port, ras, next, checkpoints, folders, interfaces })
    }

    /// A port of rank 0's node that is free now.
    pub(crate) async fn free_port(&self) -> Result<u16, TrainError> {
        match self.ranks.first() {
            Some(first) => Ok(first.handle.free_port().get().await?),
            None => Ok(0),
        }
    }

    /// What carries the ranks' tensors.
    pub(crate) fn backend(&self, plan: &Plan) -> &'static str {
        let has_gpus = self.ranks.iter().any(|rank| !rank.at.gpus.is_empty());
        match plan.backend {
            Backend::Nccl => "nccl",
            Backend::Auto if has_gpus => "nccl",
            Backend::Auto | Backend::Gloo => "gloo",
        }
    }

    /// Where rank 0 is, if ranks are on several machines.
    fn master_of_several(&self) -> Option<IpAddr> {
        let first = self.ranks.first()?;
        let several = self.ranks.iter().any(|rank| rank.at.ip != first.at.ip);
        first.at.ip.filter(|_| several)
    }

    /// Whether ranks have devices of their own, and where there are several machines, these reach each other and have the
    /// same versions.
    pub(crate) async fn preflight(&self, plan: &Plan, ranks: &[RankProgress]) -> Result<(), TrainError> {
        // Ranks have the driver's environment, and what the run adds.
        let told = plan.env.get(MAY_SHARE).cloned().or_else(|| std::env::var(MAY_SHARE).ok());
        let may_share = told.is_some_and(|value| value != "0");
        let mut problems = preflight::sharing(ranks, self.backend(plan) == "nccl" && !may_share);
        if self.master_of_several().is_some() {
            let of_nodes: BTreeMap<u64, &RankHandle> =
                self.ranks.iter().rev().map(|rank| (rank.at.node, &rank.handle)).collect();
            let members: Vec<&RankHandle> = of_nodes.into_values().collect();
            problems.extend(preflight::examine(&members, &plan.python).await?.problems);
        }
        let (fatal, warnings): (Vec<Problem>, Vec<Problem>) = problems.into_iter().partition(|found| found.is_fatal);
        for warning in warnings {
            (plan.on_notice)(&warning.text);
        }
        match fatal.is_empty() {
            true => Ok(()),
            false => Err(TrainError::Preflight(fatal.into_iter().map(|found| found.text).collect())),
        }
    }

    /// The interface over which each rank reaches the others, if they are on several machines.
    pub(crate) async fn interfaces(&self) -> Result<Vec<Option<String>>, TrainError> {
        match self.master_of_several() {
            Some(ip) => {
                let asked: Vec<_> = self.ranks.iter().map(|rank| rank.handle.interface_to(ip)).collect();
                Ok(get_all(&asked).await?)
            }
            None => Ok(Vec::new()),
        }
    }

    /// Whether all nodes and the driver see each other's files in the storage: found out before anything is trained.
    pub(crate) async fn check_storage(&self, storage: &Storage) -> Result<(), TrainError> {
        let mut asked = BTreeSet::new();
        for rank in self.ranks.iter().filter(|rank| asked.insert(rank.at.node)) {
            let name = format!("{:016x}", rand::random::<u64>());
            let failed = |why: String| {
                let host = &rank.at.hostname;
                TrainError::Storage(format!("on {host}: {why}. All nodes and the driver must share the storage"))
            };
            storage.ask(&name).await.map_err(TrainError::Storage)?;
            let answered = rank.handle.answer_probe(storage.url().to_owned(), name.clone()).get().await;
            let heard = storage.hear(&name).await;
            match answered {
                Ok(()) => heard.map_err(failed)?,
                Err(wingbeat::Error::Application { error, .. }) => return Err(failed(error.message)),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Where each rank finds the newest checkpoint on its node, by rank; empty if there is none.
    pub(crate) async fn newest_checkpoint(&self, storage: &Storage) -> Result<Vec<String>, TrainError> {
        let all = storage.checkpoints().await.map_err(TrainError::Storage)?;
        let Some(newest) = all.last() else { return Ok(Vec::new()) };
        let fetch = |rank: &RankHandle| rank.fetch(storage.url().to_owned(), newest.clone());
        self.on_each_node(fetch).await
    }

    /// Asks one rank of each node: what each rank is to know of it, by rank.
    pub(crate) async fn on_each_node(
        &self,
        ask: impl Fn(&RankHandle) -> ObjectRef<String>,
    ) -> Result<Vec<String>, TrainError> {
        self.left_something.store(true, Ordering::Relaxed);
        let mut asked: BTreeMap<u64, ObjectRef<String>> = BTreeMap::new();
        for rank in &self.ranks {
            asked.entry(rank.at.node).or_insert_with(|| ask(&rank.handle));
        }
        let of_ranks: Vec<_> = self.ranks.iter().filter_map(|rank| asked.get(&rank.at.node).cloned()).collect();
        Ok(get_all(&of_ranks).await?)
    }

    /// Starts every rank: the first before the others. It listens for them, and whoever comes too early tries again only
    /// after a third of a second or more (torch's `TCPStore`).
    pub(crate) fn launch(
        &self,
        plan: &Plan,
        attempt: u32,
        run_id: &str,
        prepared: &Prepared,
    ) -> Events<impl Stream<Item = RankEvent> + Unpin + use<>> {
        let mut events = SelectAll::new();
        let (begins, first_begins) = watch::channel(false);
        let mut begins = Some(begins);
        let Some(first) = self.ranks.first() else { return events };
        let one_node = self.ranks.iter().all(|rank| rank.at.node == first.at.node);
        let local = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let shared = Shared {
            master_addr: first.at.ip.filter(|_| !one_node).unwrap_or(local).to_string(),
            master_port: prepared.port,
            run_id: run_id.to_owned(),
            role: plan.role.clone(),
            restarts: attempt,
            max_restarts: plan.max_failures,
            backend: self.backend(plan),
            layout: plan.layout,
        };
        let environments = environment::of_ranks(&self.places(), &shared, &plan.env);
        for (index, (rank, mut env)) in self.ranks.iter().zip(environments).enumerate() {
            if let Target::Program(_) = plan.target {
                // It may be a Python, which does not know that somebody watches what it prints.
                env.unless_set.insert("PYTHONUNBUFFERED".into(), "1".into());
            }
            if let Some(ras) = prepared.ras {
                // One for each run: processes of one user may run side by side on a node.
                env.unless_set.insert(crate::ras::VARIABLE.into(), format!("localhost:{ras}"));
            }
            if let Some(Some(interface)) = prepared.interfaces.get(index) {
                env.use_interface(interface);
            }
            if let Some(checkpoint) = prepared.checkpoints.get(index) {
                env.set.insert("WINGBEAT_CHECKPOINT".into(), checkpoint.clone());
            }
            let launch = Launch {
                python: plan.python.clone(),
                target: plan.target.clone(),
                as_given: plan.as_given.clone(),
                args: plan.args.clone(),
                files: plan.files.clone(),
                env,
                warm: rank.warm.clone(),
                folder: prepared.folders.get(index).map(PathBuf::from),
                stdin: plan.stdin.filter(|_| index == 0),
            };
            let shards = plan.datasets.iter().filter_map(|(dataset, shards)| {
                Some(Shard { dataset: dataset.clone(), bytes: shards.get(index)?.clone() })
            });
            let (handle, shards) = (rank.handle.clone(), shards.collect::<Vec<_>>());
            let (begins, mut first_begins) = (begins.take(), first_begins.clone());
            let run = async move {
                if begins.is_none() && shards.is_empty() {
                    // It may also have ended. Shards are fetched by all ranks at once: that takes longer than the wait saves.
                    let _ = first_begins.wait_for(|begins| *begins).await;
                }
                handle.run(launch, shards).map(move |event| {
                    if let Some(begins) = &begins {
                        begins.send_replace(true);
                    }
                    (index, event)
                })
            };
            events.push(run.flatten_stream().boxed());
        }
        events
    }
}
