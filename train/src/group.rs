//! One attempt: actors placed, environment made, ranks run to their end.

use std::collections::BTreeSet;
use std::time::Duration;

use futures::stream::{SelectAll, StreamExt};
use wingbeat::{Bundle, Error, PlacementGroup, get_all, placement_group};

use crate::environment::{self, Place, Shared};
use crate::error::TrainError;
use crate::process::{Event, Launch, Outcome, Target};
use crate::rank::{Description, Rank, RankHandle};
use crate::trainer::{Backend, Plan};

/// How long a group may take to be placed. Longer means that the resources are not there.
const PLACE_LIMIT: Duration = Duration::from_secs(60);
/// A bundle must reserve something.
const LEAST_CPUS: f64 = 0.0001;
/// How long stopped ranks may take to end by themselves.
const GRACE: Duration = Duration::from_secs(5);

/// A group that has been placed, in the order of its ranks.
pub(crate) struct Group {
    ranks: Vec<(RankHandle, Description)>,
    /// What they run in: a bundle a rank, all reserved at once or none.
    reserved: PlacementGroup,
}

impl Group {
    /// Places all ranks, or none.
    pub(crate) async fn place(plan: &Plan) -> Result<Group, TrainError> {
        let missing = |why: String| TrainError::NotEnoughResources { workers: plan.workers, each: plan.each(), why };
        let mut bundle = Bundle::new().num_cpus(plan.cpus_per_worker.max(LEAST_CPUS));
        if plan.gpus_per_worker > 0.0 {
            bundle = bundle.num_gpus(plan.gpus_per_worker);
        }
        let reserved = match placement_group(vec![bundle; plan.workers as usize]).await {
            Ok(reserved) => reserved,
            Err(error @ Error::Infeasible { .. }) => return Err(missing(error.to_string())),
            Err(error) => return Err(error.into()),
        };
        let placed = Self::start(plan, &reserved).await;
        let Ok(ranks) = placed else {
            let _ = reserved.remove().await;
            return Err(match placed {
                Err(Unplaced::TooLong(why)) => missing(why),
                Err(Unplaced::Failed(error)) => error.into(),
                Ok(_) => missing("it was placed".into()),
            });
        };
        Ok(Group { ranks, reserved })
    }

    /// Waits for the bundles, and starts an actor in each.
    async fn start(plan: &Plan, reserved: &PlacementGroup) -> Result<Vec<(RankHandle, Description)>, Unplaced> {
        match reserved.ready().get_timeout(PLACE_LIMIT).await {
            Ok(_) => {}
            Err(Error::TimedOut { .. }) => return Err(Unplaced::TooLong(why_not_placed(reserved).await)),
            Err(error) => return Err(error.into()),
        }
        let handles: Vec<RankHandle> = (0..plan.workers)
            .map(|index| {
                let mut options = Rank::options().num_cpus(plan.cpus_per_worker).in_bundle(reserved, index);
                if plan.gpus_per_worker > 0.0 {
                    options = options.num_gpus(plan.gpus_per_worker);
                }
                options.remote()
            })
            .collect();
        let asked: Vec<_> =
            handles.iter().map(|rank| rank.describe(plan.python.clone(), plan.target.clone())).collect();
        let descriptions = get_all(&asked).await?;
        let places: Vec<Place> = descriptions.iter().map(place_of).collect();
        let mut ranks: Vec<Option<(RankHandle, Description)>> =
            handles.into_iter().zip(descriptions).map(Some).collect();
        Ok(environment::rank_order(&places).into_iter().filter_map(|i| ranks[i].take()).collect())
    }

    /// Ends the ranks' actors, and gives back what was reserved for them.
    pub(crate) async fn release(self) {
        // It fails only when the head is gone, and then nothing is reserved any more.
        let _ = self.reserved.remove().await;
    }

    /// Whether every node can run what is to be run.
    pub(crate) fn check(&self, plan: &Plan) -> Result<(), TrainError> {
        let mut versions = BTreeSet::new();
        for (_, description) in &self.ranks {
            let node = description.hostname.clone();
            if let Target::Script(script) = &plan.target
                && !description.has_script
            {
                let (script, working_dir) = (script.display().to_string(), description.working_dir.clone());
                return Err(TrainError::ScriptNotFound { script, node, working_dir });
            }
            match &description.python {
                Ok(version) => versions.insert((version.clone(), node)),
                Err(why) => {
                    return Err(TrainError::PythonNotFound { python: plan.python.clone(), node, why: why.clone() });
                }
            };
        }
        let distinct: BTreeSet<&String> = versions.iter().map(|(version, _)| version).collect();
        if distinct.len() > 1 {
            let versions: Vec<String> = versions.iter().map(|(version, node)| format!("{version} on {node}")).collect();
            return Err(TrainError::PythonDiffers { versions: versions.join(", ") });
        }
        Ok(())
    }

    /// Runs all ranks to their end. The first that fails ends the others, and is the error.
    pub(crate) async fn run(&self, plan: &Plan, attempt: u32, run_id: &str) -> Result<(), TrainError> {
        let Some((first, at)) = self.ranks.first() else { return Ok(()) };
        let port = first.free_port().get().await?;
        let one_node = self.ranks.iter().all(|(_, other)| other.node == at.node);
        let has_gpus = self.ranks.iter().any(|(_, rank)| !rank.gpus.is_empty());
        let shared = Shared {
            master_addr: if one_node {
                "127.0.0.1".into()
            } else {
                at.ip.clone().unwrap_or_else(|| "127.0.0.1".into())
            },
            master_port: port,
            run_id: run_id.to_owned(),
            restarts: attempt,
            max_restarts: plan.max_failures,
            backend: match plan.backend {
                Backend::Nccl => "nccl",
                Backend::Auto if has_gpus => "nccl",
                Backend::Auto | Backend::Gloo => "gloo",
            },
        };
        let places: Vec<Place> = self.ranks.iter().map(|(_, description)| place_of(description)).collect();
        let environments = environment::of_ranks(&places, &shared, &plan.env);
        let mut events = SelectAll::new();
        for (rank, ((handle, _), env)) in self.ranks.iter().zip(environments).enumerate() {
            let launch =
                Launch { python: plan.python.clone(), target: plan.target.clone(), args: plan.args.clone(), env };
            events.push(handle.run(launch).map(move |event| (rank, event)));
        }
        let mut left = self.ranks.len();
        let mut failures = Vec::new();
        let told = self.hear(plan, &mut events, &mut left, &mut failures, true).await;
        if told.is_ok() && failures.is_empty() {
            return Ok(());
        }
        // Nobody is left behind when this returns: the next attempt needs the same devices. What was on its way is
        // heard, too: a rank that printed much may have failed first and be heard of last.
        for at_once in [false, true] {
            let stopping: Vec<_> = self.ranks.iter().map(|(handle, _)| handle.stop(at_once)).collect();
            let rest = async {
                // An actor that is gone took its rank with it.
                for stopped in &stopping {
                    let _ = stopped.get().await;
                }
                while left > 0 && self.hear(plan, &mut events, &mut left, &mut failures, false).await.is_err() {}
            };
            if tokio::time::timeout(GRACE, rest).await.is_ok() {
                break;
            }
        }
        told?;
        // What ended because it was asked to is no cause. Nodes' clocks differ by less than ranks usually do.
        let first = failures.into_iter().min_by_key(|(_, outcome)| (outcome.was_stopped, outcome.ended_us));
        first.map_or(Ok(()), |(rank, outcome)| Err(self.failure(plan, rank, outcome)))
    }

    /// Shows what ranks print until all have ended; or, with `until_failure`, one has failed.
    async fn hear<S>(
        &self,
        plan: &Plan,
        events: &mut SelectAll<S>,
        left: &mut usize,
        failures: &mut Vec<(usize, Outcome)>,
        until_failure: bool,
    ) -> Result<(), TrainError>
    where
        S: futures::Stream<Item = (usize, wingbeat::Result<Event>)> + Unpin,
    {
        while *left > 0 && (failures.is_empty() || !until_failure) {
            let Some((rank, event)) = events.next().await else {
                let missing = std::mem::take(left);
                let why = format!("{missing} of {} ranks ended without saying how", self.ranks.len());
                return Err(Error::Io { what: "running the group".into(), why }.into());
            };
            match event {
                Ok(Event::Line(line)) => (plan.on_output)(rank as u32, &line),
                Ok(Event::Ended(outcome)) => {
                    *left -= 1;
                    if !outcome.is_success() {
                        failures.push((rank, outcome));
                    }
                }
                Err(error) => {
                    *left -= 1;
                    let node = self.hostname(rank);
                    return Err(TrainError::RankLost { rank: rank as u32, node, cause: Box::new(error) });
                }
            }
        }
        Ok(())
    }

    fn hostname(&self, rank: usize) -> String {
        self.ranks.get(rank).map(|(_, description)| description.hostname.clone()).unwrap_or_default()
    }

    fn failure(&self, plan: &Plan, rank: usize, outcome: Outcome) -> TrainError {
        // The exception itself: a library may print the words about something optional.
        let no_torch = "ModuleNotFoundError: No module named 'torch'";
        let lacks_torch = match &outcome.error {
            Some(error) => error.message == no_torch,
            None => outcome.stderr.last().is_some_and(|line| line == no_torch),
        };
        if lacks_torch {
            return TrainError::TorchMissing { rank: rank as u32, python: plan.python.clone() };
        }
        TrainError::RankFailed {
            rank: rank as u32,
            node: self.hostname(rank),
            exit: outcome.shown(),
            code: outcome.code,
            python_error: outcome.error.map(Box::new),
            stderr: outcome.stderr,
        }
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
    let explained = match wingbeat::Session::current() {
        Ok(session) => session.why(reserved.id()).await.ok(),
        Err(_) => None,
    };
    let explained = explained.map(|why| [why.reasons, why.holders].concat().join("; ")).unwrap_or_default();
    format!("they could not all be placed within {limit} s: {explained}")
}

fn place_of(description: &Description) -> Place {
    Place { node: description.node, gpus: description.gpus.clone() }
}
