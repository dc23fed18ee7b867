//! The actors of one attempt: placed, described, checked, and let go.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use futures::future::join_all;
use wingbeat::{Bundle, Error, PlacementGroup, PlacementStrategy, Session, get_all, placement_group};
use wingbeat_core::resources::ResourceSet;

use crate::environment::{self, Environment, Place};
use crate::error::TrainError;
use crate::process::{Greeting, Target};
use crate::rank::{Description, Rank, RankHandle, Version, Wanted};
use crate::scaling::Scaling;
use crate::trainer::Plan;
use crate::warm;

/// How long a group may take to be placed. Longer means that the resources are not there.
const PLACE_LIMIT: Duration = Duration::from_secs(60);
/// How often, and how fast, a warm Python is asked for in place of one that is about to end.
const WARM_TRIES: u32 = 20;
const WARM_PAUSE: Duration = Duration::from_millis(50);
/// How long an elastic group waits for what is not free now.
const ELASTIC_WAIT: Duration = Duration::from_secs(3);
const ELASTIC_PAUSE: Duration = Duration::from_millis(50);
/// A bundle must reserve something.
const LEAST_CPUS: f64 = 0.0001;

/// A rank that has been placed.
pub(crate) struct Member {
    pub handle: RankHandle,
    pub at: Description,
    /// The socket of the warm Python that it is forked from.
    pub warm: Option<String>,
}

/// A group that has been placed, in the order of its ranks.
pub(crate) struct Group {
    pub ranks: Vec<Member>,
    /// How many units of [`crate::scaling::Scaling`] it is.
    units: u32,
    /// What they run in, all reserved at once or none.
    reserved: PlacementGroup,
}

impl Group {
    /// Places all ranks, or none, and sees to it that every node can run what is to be run.
    pub(crate) async fn place(plan: &Plan) -> Result<Group, TrainError> {
        let missing = |why: String| TrainError::NotEnoughResources { workers: plan.ranks(), each: plan.each(), why };
        let units = units(plan).await?;
        let (bundles, strategy) = match plan.scaling.per_node {
            None => (vec![bundle(plan, 1); units as usize], PlacementStrategy::Pack),
            Some(each) => (vec![bundle(plan, each); units as usize], PlacementStrategy::StrictSpread),
        };
        let reserved = match placement_group(bundles).strategy(strategy).await {
            Ok(reserved) => reserved,
            Err(error @ Error::Infeasible { .. }) => return Err(missing(error.to_string())),
            Err(error) => return Err(error.into()),
        };
        let started = Self::start(plan, units, &reserved).await;
        let ready = match started {
            Ok(ranks) => {
                let mut group = Group { ranks, units, reserved: reserved.clone() };
                group.prepare(plan).await.map(|()| group)
            }
            Err(Unplaced::TooLong(why)) => Err(missing(why)),
            Err(Unplaced::Failed(error)) => Err(error.into()),
        };
        if ready.is_err() {
            let _ = reserved.remove().await;
        }
        ready
    }

    /// Waits for the bundles, and starts the actors in them.
    async fn start(plan: &Plan, units: u32, reserved: &PlacementGroup) -> Result<Vec<Member>, Unplaced> {
        match reserved.ready().get_timeout(PLACE_LIMIT).await {
            Ok(_) => {}
            Err(Error::TimedOut { .. }) => return Err(Unplaced::TooLong(why_not_placed(reserved).await)),
            Err(error) => return Err(error.into()),
        }
        let bundle_of = |index: u32| index / plan.scaling.per_node.unwrap_or(1).max(1);
        let handles: Vec<RankHandle> = (0..plan.scaling.ranks_of(units))
            .map(|index| {
                let mut options = Rank::options().num_cpus(plan.cpus_per_worker).in_bundle(reserved, bundle_of(index));
                if plan.gpus_per_worker > 0.0 {
                    options = options.num_gpus(plan.gpus_per_worker);
                }
                options.remote()
            })
            .collect();
        let wanted = Wanted {
            python: plan.python.clone(),
            // What is not looked for there need not travel there yet.
            target: match &plan.target {
                Target::Function(_) => Target::Function(Vec::new()),
                target => target.clone(),
            },
            env: Environment { set: plan.env.clone(), ..Environment::default() },
            warm: plan.warm && !matches!(plan.target, Target::Program(_)),
            shipment: plan.shipment.as_ref().map(|(hash, _)| hash.clone()),
        };
        ship(plan, &handles).await?;
        let asked: Vec<_> = handles.iter().map(|rank| rank.describe(wanted.clone())).collect();
        let descriptions = get_all(&asked).await?;
        let places: Vec<Place> = descriptions.iter().map(place_of).collect();
        let members = handles.into_iter().zip(descriptions).map(|(handle, at)| {
            let warm = wanted.warm.then(|| at.kind.socket(at.node));
            Member { handle, at, warm }
        });
        let mut members: Vec<Option<Member>> = members.map(Some).collect();
        Ok(environment::rank_order(&places).into_iter().filter_map(|i| members[i].take()).collect())
    }

    /// Checks what every node needs, and has nodes start their warm Pythons.
    async fn prepare(&mut self, plan: &Plan) -> Result<(), TrainError> {
        if let (Target::Script(script), Some(lacks)) =
            (&plan.target, self.ranks.iter().map(|rank| &rank.at).find(|at| !at.has_script))
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

    /// Ends the ranks' actors, and gives back what was reserved for them.
    pub(crate) async fn release(self) {
        // It fails only when the head is gone, and then nothing is reserved any more.
        let _ = self.reserved.remove().await;
    }

    /// How many ranks it could have instead, if that is more.
    pub(crate) async fn room_for(&self, plan: &Plan) -> Option<u32> {
        let more =
            Scaling { most: plan.scaling.most.checked_sub(self.units).filter(|more| *more > 0)?, ..plan.scaling };
        // What it holds is not free, and whatever else is, is room for more; but nodes of its own count once.
        let own: BTreeSet<u64> = match plan.scaling.per_node {
            Some(_) => self.ranks.iter().map(|rank| rank.at.node).collect(),
            None => BTreeSet::new(),
        };
        let (free, _) = resources(&own).await.ok()?;
        match more.fits(&free, &plan.resources()) {
            0 => None,
            more => Some(plan.scaling.ranks_of(self.units + more)),
        }
    }

    pub(crate) fn places(&self) -> Vec<Place> {
        self.ranks.iter().map(|rank| place_of(&rank.at)).collect()
    }

    pub(crate) fn hostname(&self, rank: usize) -> String {
        self.ranks.get(rank).map(|rank| rank.at.hostname.clone()).unwrap_or_default()
    }
}

/// Brings the run's working directory to the nodes that lack it.
async fn ship(plan: &Plan, ranks: &[RankHandle]) -> Result<(), Error> {
    let Some((hash, shipment)) = &plan.shipment else { return Ok(()) };
    let asked: Vec<_> = ranks.iter().map(|rank| rank.has(hash.clone())).collect();
    let there = get_all(&asked).await?;
    let lacking = ranks.iter().zip(there).filter(|(_, there)| !there);
    let unpacking: Vec<_> = lacking.map(|(rank, _)| rank.unpack(vec![shipment.clone()])).collect();
    get_all(&unpacking).await.map(drop)
}

/// Has a rank's node start its warm Python: its version, or why it does not run; none if it cannot be had.
async fn start_warm(plan: &Plan, rank: &Member, socket: &str) -> Option<Result<String, String>> {
    for _ in 0..WARM_TRIES {
        match warm::start_on(rank.at.node, rank.at.kind.clone(), socket).await {
            Ok(warm::Started(Err(why))) => return Some(Err(why)),
            Ok(warm::Started(Ok(_))) | Err(Error::ActorDied { .. }) => {}
            Err(_) => return None,
        }
        match rank.handle.greet(socket.to_owned()).get().await.ok()? {
            Greeting::Ready(version) => return Some(Ok(version)),
            // The rank asks it, too, and says why.
            Greeting::Refuses => return Some(rank.handle.version(plan.python.clone()).get().await.ok()?.0),
            // The one that was there is about to end, and its name with it.
            Greeting::Gone => tokio::time::sleep(WARM_PAUSE).await,
        }
    }
    None
}

/// What is free on the nodes that take new work, but for these, and what they have in all.
async fn resources(without: &BTreeSet<u64>) -> Result<(Vec<ResourceSet>, Vec<ResourceSet>), Error> {
    let state = Session::current()?.cluster_state().await?;
    let open = state.nodes.into_iter().filter(|node| node.draining.is_none() && !without.contains(&node.info.id.0));
    Ok(open.map(|node| (node.available, node.info.resources)).unzip())
}

/// With how many units to begin. What the last attempt held is free again soon, and waited for; what was lost is not.
async fn units(plan: &Plan) -> Result<u32, Error> {
    let scaling = plan.scaling;
    if !scaling.is_elastic() {
        return Ok(scaling.most);
    }
    let begun = Instant::now();
    loop {
        let (free, total) = resources(&BTreeSet::new()).await?;
        let now = scaling.fits(&free, &plan.resources());
        match scaling.choose(&free, &total, &plan.resources()) {
            Some(units) => return Ok(units),
            // The group waits for its least, and says for what.
            None if begun.elapsed() > ELASTIC_WAIT => return Ok(now.max(scaling.least)),
            None => tokio::time::sleep(ELASTIC_PAUSE).await,
        }
    }
}

/// What `ranks` ranks need.
fn bundle(plan: &Plan, ranks: u32) -> Bundle {
    let ranks = f64::from(ranks);
    let bundle = Bundle::new().num_cpus((plan.cpus_per_worker * ranks).max(LEAST_CPUS));
    match plan.gpus_per_worker > 0.0 {
        true => bundle.num_gpus(plan.gpus_per_worker * ranks),
        false => bundle,
    }
}

/// Why a group has no ranks yet.
enum Unplaced {
    /// Its bundles were not placed in time.
    TooLong(String),
    Failed(Error),
}

impl From<Error> for Unplaced {
    fn from(error: Error) -> Self {
        Unplaced::Failed(error)
    }
}

/// What a group that was not placed in time waits for.
async fn why_not_placed(reserved: &PlacementGroup) -> String {
    let limit = PLACE_LIMIT.as_secs();
    let explained = match Session::current() {
        Ok(session) => session.why(reserved.id()).await.ok(),
        Err(_) => None,
    };
    let explained = explained.map(|why| [why.reasons, why.holders].concat().join("; ")).unwrap_or_default();
    format!("they could not all be placed within {limit} s: {explained}")
}

fn place_of(description: &Description) -> Place {
    Place { node: description.node, gpus: description.gpus.clone() }
}
