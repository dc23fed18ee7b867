//! What is found out before ranks start, and the start of their processes; that of calls is in `calls`.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::sync::atomic::Ordering;

use futures::FutureExt;
use futures::stream::{BoxStream, SelectAll, StreamExt};
use tokio::sync::watch;
use wingbeat::{AnyRef, ObjectRef, get_all};

use crate::environment::{self, Shared};
use crate::error::TrainError;
use crate::group::Group;
use crate::plan::{Backend, Plan, Program, Shipped};
use crate::preflight::{self, Problem};
use crate::process::{Event, Launch, Shard, Target};
use crate::progress::{Progress, RankProgress};
use crate::rank::RankHandle;
use crate::storage::{Place, Storage};

/// Tells NCCL that ranks may share a device.
const MAY_SHARE: &str = "NCCL_MULTI_RANK_GPU_ENABLE";

/// What is heard of ranks, from all of them.
pub(crate) type Events = SelectAll<BoxStream<'static, RankEvent>>;
/// What one of them says.
pub(crate) type RankEvent = (usize, wingbeat::Result<Event>);

/// What was stored before an attempt.
pub(crate) struct Stored {
    /// The number of the next checkpoint.
    pub next: u64,
    /// Where each rank finds the newest one.
    pub checkpoints: Vec<String>,
}

/// Ranks that were started.
pub(crate) struct Launched {
    pub events: Events,
    /// Where rank 0 listens; 0 if it is a call.
    pub port: u16,
    /// Where NCCL tells how far it is.
    pub ras: Option<u16>,
    /// By rank, if they are calls.
    pub calls: Vec<AnyRef>,
}

/// What is found out before processes start.
struct Prepared {
    port: u16,
    ras: Option<u16>,
    /// Where each rank runs, if that was shipped.
    folders: Vec<String>,
    /// Over what each rank reaches the others.
    interfaces: Vec<Option<String>>,
}

impl Group {
    /// Finds out what is stored, and that all nodes can.
    pub(crate) async fn find_stored(&self, storage: &Place) -> Result<Stored, TrainError> {
        let Some(claim) = storage.claim() else { return Ok(Stored { next: 1, checkpoints: Vec::new() }) };
        self.check_storage(claim.storage()).await?;
        let next = claim.next().await.map_err(TrainError::Storage)?;
        Ok(Stored { next, checkpoints: self.newest_checkpoint(claim.storage()).await? })
    }

    /// Starts every rank.
    pub(crate) async fn launch(
        &self,
        plan: &Plan,
        run_id: &str,
        progress: &Progress,
        stored: &Stored,
    ) -> Result<Launched, TrainError> {
        match &plan.program {
            Program::Process(target) => {
                let prepared = self.prepare_processes(plan, progress).await?;
                let events = self.start_processes(plan, target, progress.attempt, run_id, &prepared, stored);
                Ok(Launched { events, port: prepared.port, ras: prepared.ras, calls: Vec::new() })
            }
            Program::Call(make) => Ok(self.make_calls(plan, make, progress.attempt, stored)),
        }
    }

    /// Finds out what processes are to be told.
    async fn prepare_processes(&self, plan: &Plan, progress: &Progress) -> Result<Prepared, TrainError> {
        let port = match plan.master_port {
            Some(port) => port,
            None => self.free_port().await?,
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
        Ok(Prepared { port, ras, folders, interfaces })
    }

    /// A port of rank 0's node that is free now.
    async fn free_port(&self) -> Result<u16, TrainError> {
        match self.ranks.first() {
            Some(first) => Ok(first.handle.free_port().get().await?),
            None => Ok(0),
        }
    }

    /// What carries the ranks' tensors.
    fn backend(&self, plan: &Plan) -> &'static str {
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
    async fn preflight(&self, plan: &Plan, ranks: &[RankProgress]) -> Result<(), TrainError> {
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
    async fn interfaces(&self) -> Result<Vec<Option<String>>, TrainError> {
        match self.master_of_several() {
            Some(ip) => {
                let asked: Vec<_> = self.ranks.iter().map(|rank| rank.handle.interface_to(ip)).collect();
                Ok(get_all(&asked).await?)
            }
            None => Ok(Vec::new()),
        }
    }

    /// Whether all nodes and the driver see each other's files in the storage: found out before anything is trained.
    async fn check_storage(&self, storage: &Storage) -> Result<(), TrainError> {
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
    async fn newest_checkpoint(&self, storage: &Storage) -> Result<Vec<String>, TrainError> {
        let all = storage.checkpoints().await.map_err(TrainError::Storage)?;
        let Some(newest) = all.last() else { return Ok(Vec::new()) };
        let fetch = |rank: &RankHandle| rank.fetch(storage.url().to_owned(), newest.clone());
        self.on_each_node(fetch).await
    }

    /// Asks one rank of each node: what each rank is to know of it, by rank.
    async fn on_each_node(&self, ask: impl Fn(&RankHandle) -> ObjectRef<String>) -> Result<Vec<String>, TrainError> {
        self.left_something.store(true, Ordering::Relaxed);
        let mut asked: BTreeMap<u64, ObjectRef<String>> = BTreeMap::new();
        for rank in &self.ranks {
            asked.entry(rank.at.node).or_insert_with(|| ask(&rank.handle));
        }
        let of_ranks: Vec<_> = self.ranks.iter().filter_map(|rank| asked.get(&rank.at.node).cloned()).collect();
        Ok(get_all(&of_ranks).await?)
    }

    /// Starts a process for every rank, that of the first before the others. It listens for them, and whoever comes too early
    /// tries again only after a third of a second or more (torch's `TCPStore`).
    fn start_processes(
        &self,
        plan: &Plan,
        target: &Target,
        attempt: u32,
        run_id: &str,
        prepared: &Prepared,
        stored: &Stored,
    ) -> Events {
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
            if let Target::Program(_) = target {
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
            if let Some(checkpoint) = stored.checkpoints.get(index) {
                env.set.insert("WINGBEAT_CHECKPOINT".into(), checkpoint.clone());
            }
            let launch = Launch {
                python: plan.python.clone(),
                target: target.clone(),
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
