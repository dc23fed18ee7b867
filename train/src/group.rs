//! One attempt: actors placed, environment made, ranks run to their end.

use std::collections::BTreeSet;
use std::time::Duration;

use futures::stream::{SelectAll, StreamExt};
use wingbeat::{Error, get_all};

use crate::environment::{self, Place, Shared};
use crate::error::TrainError;
use crate::process::{Event, Launch, Outcome, Target};
use crate::rank::{Description, Rank, RankHandle};
use crate::trainer::{Backend, Plan};

/// How long a group may take to be placed. Longer means that the resources are not there.
const PLACE_LIMIT: Duration = Duration::from_secs(60);
/// How long stopped ranks may take to end by themselves.
const GRACE: Duration = Duration::from_secs(5);

/// A group that has been placed, in the order of its ranks.
pub(crate) struct Group {
    ranks: Vec<(RankHandle, Description)>,
}

impl Group {
    /// Places all ranks, or none.
    pub(crate) async fn place(plan: &Plan) -> Result<Group, TrainError> {
        let missing = |why: String| TrainError::NotEnoughResources { workers: plan.workers, each: plan.each(), why };
        let room = room_in_all(plan).await?;
        if room < plan.workers {
            return Err(missing(format!("the whole cluster, were it idle, has room for {room}")));
        }
        let handles: Vec<RankHandle> = (0..plan.workers)
            .map(|_| {
                let mut options = Rank::options().num_cpus(plan.cpus_per_worker);
                if plan.gpus_per_worker > 0.0 {
                    options = options.num_gpus(plan.gpus_per_worker);
                }
                options.remote()
            })
            .collect();
        let asked: Vec<_> =
            handles.iter().map(|rank| rank.describe(plan.python.clone(), plan.target.clone())).collect();
        let described = tokio::time::timeout(PLACE_LIMIT, get_all(&asked)).await;
        let descriptions = match described {
            Ok(Ok(descriptions)) => descriptions,
            Ok(Err(Error::ActorDied { cause, .. })) if matches!(*cause, Error::Infeasible { .. }) => {
                return Err(missing(cause.to_string()));
            }
            Ok(Err(error)) => return Err(error.into()),
            Err(_) => {
                let placed = asked.iter().filter(|description| description.is_ready()).count();
                let limit = PLACE_LIMIT.as_secs();
                return Err(missing(format!(
                    "only {placed} of them could be placed within {limit} s; `wingbeat status` shows who holds the rest"
                )));
            }
        };
        let places: Vec<Place> = descriptions.iter().map(place_of).collect();
        let mut ranks: Vec<Option<(RankHandle, Description)>> =
            handles.into_iter().zip(descriptions).map(Some).collect();
        let order = environment::rank_order(&places);
        Ok(Group { ranks: order.into_iter().filter_map(|i| ranks[i].take()).collect() })
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

/// How many ranks all nodes together could hold if nothing else ran.
async fn room_in_all(plan: &Plan) -> Result<u32, TrainError> {
    let state = wingbeat::Session::current()?.cluster_state().await?;
    let fit = |has: f64, needs: f64| if needs > 0.0 { (has / needs).floor() } else { f64::INFINITY };
    let room = state.nodes.iter().map(|node| {
        let has = |name: &str| node.info.resources.get(name).as_f64();
        fit(has("CPU"), plan.cpus_per_worker).min(fit(has("GPU"), plan.gpus_per_worker)) as u32
    });
    Ok(room.fold(0, u32::saturating_add))
}

fn place_of(description: &Description) -> Place {
    Place { node: description.node, gpus: description.gpus.clone() }
}
