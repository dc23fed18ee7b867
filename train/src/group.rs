//! The actors of one attempt: placed, described, checked, and let go.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::future::join_all;
use wingbeat::{Drained, Error, NodeId, get_all};

use crate::environment::{self, Environment, Place};
use crate::error::TrainError;
use crate::plan::{Plan, Program, Shipped};
use crate::process::{Greeting, Target};
use crate::progress::RankProgress;
use crate::rank::{Description, Rank, RankHandle, Version, Wanted};
use crate::reservation::{Patience, Reservation};
use crate::room::Room;
use crate::{limits, shipping, warm};

/// How often, and how fast, a warm Python is asked for in place of one that is about to end.
const WARM_TRIES: u32 = 20;
const WARM_PAUSE: Duration = Duration::from_millis(50);
/// How long nodes may take to say what is there before that is said.
const SILENT: Duration = Duration::from_secs(10);

/// A rank that has been placed.
pub(crate) struct Member {
    pub handle: RankHandle,
    /// Its bundle of the reservation.
    pub bundle: u32,
    pub at: Description,
    /// The socket of the warm Python that it is forked from.
    pub warm: Option<String>,
}

impl Member {
    /// Where it is; it has not come far.
    pub(crate) fn progress(&self) -> RankProgress {
        let (node, gpus) = (self.at.hostname.clone(), self.at.gpus.clone());
        RankProgress { node, gpus, is_warm: self.warm.is_some(), ..RankProgress::default() }
    }
}

/// A group that has been placed, in the order of its ranks.
pub(crate) struct Group {
    pub ranks: Vec<Member>,
    /// Whether something was put on its nodes for it.
    pub left_something: AtomicBool,
    /// What they run in.
    pub reserved: Reservation,
}

impl Group {
    /// Places all ranks, or none, and sees to it that every node can run what is to be run.
    pub(crate) async fn place(plan: &Plan, patience: &Patience<'_>) -> Result<Group, TrainError> {
        let reserved = Reservation::make(&plan.scaling, patience).await?;
        match Self::start(plan, &reserved).await {
            Ok(ranks) => {
                let mut group = Group { ranks, left_something: AtomicBool::new(false), reserved };
                match group.prepare(plan).await {
                    Ok(()) => Ok(group),
                    Err(error) => {
                        group.release(&BTreeSet::new(), &mut BTreeSet::new()).await;
                        Err(error)
                    }
                }
            }
            Err(error) => {
                reserved.release().await;
                Err(error.into())
            }
        }
    }

    /// Starts the actors in their bundles.
    async fn start(plan: &Plan, reserved: &Reservation) -> Result<Vec<Member>, Error> {
        let (cpus, gpus) = match plan.program {
            Program::Process(_) => plan.scaling.cpus_and_gpus(),
            // Its call holds them.
            Program::Call(_) => (0.0, None),
        };
        let bundles = (0..plan.scaling.ranks_of(reserved.units)).map(|index| plan.scaling.bundle_of(index));
        let bundles: Vec<u32> = bundles.collect();
        let handles: Vec<RankHandle> = bundles
            .iter()
            .map(|bundle| {
                let options = Rank::options().num_cpus(cpus).in_bundle(&reserved.bundles, *bundle);
                match gpus {
                    Some(gpus) => options.num_gpus(gpus).remote(),
                    None => options.remote(),
                }
            })
            .collect();
        let wanted = Wanted {
            python: plan.python.clone(),
            // What is not looked for there need not travel there yet.
            target: match &plan.program {
                Program::Process(Target::Function(_)) => Some(Target::Function(Vec::new())),
                Program::Process(target) => Some(target.clone()),
                Program::Call(_) => None,
            },
            env: Environment { set: plan.env.clone(), ..Environment::default() },
            warm: plan.warm && !matches!(plan.program, Program::Process(Target::Program(_)) | Program::Call(_)),
            shipment: plan.shipment.as_ref().map(|shipped| shipped.hash.clone()),
        };
        ship(plan, &handles).await?;
        let asked: Vec<_> = handles.iter().map(|rank| rank.describe(wanted.clone())).collect();
        let described = get_all(&asked);
        let mut described = std::pin::pin!(described);
        let descriptions = tokio::select! {
            described = &mut described => described?,
            () = tokio::time::sleep(SILENT) => {
                if wanted.warm {
                    (plan.on_notice)("waiting for the warm Python of a node, which imports or stands still; without it, ranks start cold");
                }
                described.await?
            }
        };
        let silent: BTreeSet<&String> =
            descriptions.iter().filter(|at| at.is_warm_silent).map(|at| &at.hostname).collect();
        for node in silent {
            (plan.on_notice)(&starts_cold(node, SILENT_PYTHON));
        }
        let places: Vec<Place> = descriptions.iter().map(place_of).collect();
        let members = handles.into_iter().zip(bundles).zip(descriptions).map(|((handle, bundle), at)| {
            let warm = (wanted.warm && !at.is_warm_silent).then(|| at.kind.socket(at.node));
            Member { handle, bundle, at, warm }
        });
        let mut members: Vec<Option<Member>> = members.map(Some).collect();
        Ok(environment::rank_order(&places).into_iter().filter_map(|i| members[i].take()).collect())
    }

    /// Checks what every node needs, and has nodes start their warm Pythons.
    async fn prepare(&mut self, plan: &Plan) -> Result<(), TrainError> {
        if let (Program::Process(Target::Script(script)), Some(lacks)) =
            (&plan.program, self.ranks.iter().map(|rank| &rank.at).find(|at| !at.has_script))
        {
            let (node, working_dir) = (lacks.hostname.clone(), lacks.working_dir.clone());
            return Err(TrainError::ScriptNotFound { script: script.display().to_string(), node, working_dir });
        }
        self.warm_up(plan).await;
        let mut versions = BTreeSet::new();
        for Member { at, .. } in &self.ranks {
            let node = at.hostname.clone();
            match &at.python {
                Some(Ok(version)) => versions.insert((version.clone(), node)),
                Some(Err(why)) => {
                    return Err(TrainError::PythonNotFound { python: plan.python.clone(), node, why: why.clone() });
                }
                None => false,
            };
        }
        let distinct: BTreeSet<&String> = versions.iter().map(|(version, _)| version).collect();
        if distinct.len() > 1 {
            let versions: Vec<String> = versions.iter().map(|(version, node)| format!("{version} on {node}")).collect();
            return Err(TrainError::PythonDiffers { versions: versions.join(", ") });
        }
        Ok(())
    }

    /// Starts the warm Pythons that are missing. Ranks whose node has none after that start cold.
    async fn warm_up(&mut self, plan: &Plan) {
        let mut missing: BTreeMap<String, &Member> = BTreeMap::new();
        for rank in self.ranks.iter().filter(|rank| rank.at.python.is_none()) {
            missing.extend(rank.warm.clone().map(|socket| (socket, rank)));
        }
        let started = join_all(missing.into_iter().map(async |(socket, rank)| {
            let version = start_warm(plan, rank, &socket).await;
            let is_warm = version.is_some();
            let version = match version {
                Some(version) => Some(version),
                None => rank.handle.version(plan.python.clone()).get().await.ok().map(|Version(version)| version),
            };
            (socket, version, is_warm)
        }));
        for (socket, version, is_warm) in started.await {
            for rank in self.ranks.iter_mut().filter(|rank| rank.warm.as_ref() == Some(&socket)) {
                rank.at.python.clone_from(&version);
                if !is_warm {
                    rank.warm = None;
                }
            }
        }
    }

    /// Ends the ranks' actors, and gives back what was reserved for them. What was made for further attempts stays on the
    /// nodes to which the run `returns`. `left`: the nodes with something of the run.
    pub(crate) async fn release(self, returns_to: &BTreeSet<u64>, left: &mut BTreeSet<u64>) {
        left.extend(returns_to);
        if self.left_something.into_inner() {
            let clean = |rank: &Member| rank.handle.clean_up(!returns_to.contains(&rank.at.node));
            let cleaning: Vec<_> = self.ranks.iter().map(clean).collect();
            let cleaned = join_all(cleaning.iter().map(|cleaned| cleaned.get_timeout(*limits::CLEAN))).await;
            let nodes = || self.ranks.iter().map(|rank| rank.at.node).zip(&cleaned);
            // One that had nothing says nothing of what earlier attempts have left.
            for (node, _) in nodes().filter(|(node, cleaned)| !returns_to.contains(node) && matches!(cleaned, Ok(true)))
            {
                left.remove(&node);
            }
            // Where a rank's actor is gone, so is who would have removed what it has made.
            left.extend(nodes().filter(|(_, cleaned)| cleaned.is_err()).map(|(node, _)| node));
        }
        self.reserved.release().await;
    }

    /// How many ranks it could have instead, if that is more.
    pub(crate) async fn room_for(&self, plan: &Plan) -> Option<u32> {
        let more = plan.scaling.beyond(self.reserved.units)?;
        let room = Room::look(&self.reserved.session, &more, Some(self.reserved.bundles.id())).await.ok()?;
        match room.beside(&more, &self.nodes()) {
            0 => None,
            more => Some(plan.scaling.ranks_of(self.reserved.units + more)),
        }
    }

    /// Who fetches what a rank needs on its node.
    pub(crate) fn fetcher(&self, rank: usize) -> Option<&RankHandle> {
        self.left_something.store(true, Ordering::Relaxed);
        let node = self.ranks.get(rank)?.at.node;
        self.ranks.iter().find(|other| other.at.node == node).map(|first| &first.handle)
    }

    /// Waits until something else is true of the draining of its nodes.
    pub(crate) async fn draining(&self, known: Option<Drained>) -> Option<Drained> {
        self.reserved.bundles.draining(known.as_ref()).await
    }

    /// Where its ranks are.
    pub(crate) fn nodes(&self) -> BTreeSet<u64> {
        self.ranks.iter().map(|rank| rank.at.node).collect()
    }

    pub(crate) fn places(&self) -> Vec<Place> {
        self.ranks.iter().map(|rank| place_of(&rank.at)).collect()
    }

    pub(crate) fn hostname(&self, rank: usize) -> String {
        self.ranks.get(rank).map(|rank| rank.at.hostname.clone()).unwrap_or_default()
    }
}

#[wingbeat::remote]
fn forget(name: String) {
    shipping::forget(&name);
}

/// Removes what a run's attempts have left on nodes for a next one, as far as these are there.
pub(crate) async fn forget_run(run: &str, nodes: BTreeSet<u64>) {
    let options = |node| forget::options().num_cpus(0.0).max_retries(0).on_node(NodeId(node));
    let forgetting: Vec<_> = nodes.into_iter().map(|node| options(node).remote(shipping::of_run(run, node))).collect();
    join_all(forgetting.iter().map(|forgotten| forgotten.get_timeout(*limits::FORGET))).await;
}

/// Brings the run's working directory to the nodes that lack it.
async fn ship(plan: &Plan, ranks: &[RankHandle]) -> Result<(), Error> {
    let Some(Shipped { hash, content, .. }) = &plan.shipment else { return Ok(()) };
    let asked: Vec<_> = ranks.iter().map(|rank| rank.has(hash.clone())).collect();
    let there = get_all(&asked).await?;
    let lacking = ranks.iter().zip(there).filter(|(_, there)| !there);
    let unpacking: Vec<_> = lacking.map(|(rank, _)| rank.unpack(vec![content.clone()])).collect();
    get_all(&unpacking).await.map(drop)
}

/// Has a rank's node start its warm Python: its version, or why it does not run; none if it cannot be had.
async fn start_warm(plan: &Plan, rank: &Member, socket: &str) -> Option<Result<String, String>> {
    let mut failed = "it has ended again and again".to_owned();
    for _ in 0..WARM_TRIES {
        match warm::start_on(rank.at.node, rank.at.kind.clone(), socket).await {
            Ok(warm::Started { version: Err(why), .. }) => return Some(Err(why)),
            // Another may listen there: it is asked.
            Ok(warm::Started { failed: why, .. }) => failed = why.unwrap_or(failed),
            Err(Error::ActorDied { .. }) => {}
            Err(error) => {
                failed = error.to_string();
                break;
            }
        }
        match rank.handle.greet(socket.to_owned()).get().await.ok()? {
            Greeting::Ready(version) => return Some(Ok(version)),
            // The rank asks it, too, and says why.
            Greeting::Refuses => return Some(rank.handle.version(plan.python.clone()).get().await.ok()?.0),
            // The one that was there is about to end, and its name with it.
            Greeting::Silent => {
                failed = SILENT_PYTHON.to_owned();
                break;
            }
            Greeting::Gone => tokio::time::sleep(WARM_PAUSE).await,
        }
    }
    (plan.on_notice)(&starts_cold(&rank.at.hostname, &failed));
    None
}

const SILENT_PYTHON: &str = "it says nothing";

fn starts_cold(node: &str, why: &str) -> String {
    format!("ranks on {node} start cold: no warm Python could be had: {why}")
}

fn place_of(description: &Description) -> Place {
    Place { node: description.node, gpus: description.gpus.clone(), names: description.device_names.clone() }
}
