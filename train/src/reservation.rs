//! What a group of ranks reserves: all of it, or nothing.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use wingbeat::{Error, NodeId, PlacementGroup, Session, placement_group};
use wingbeat_core::resources::ResourceSet;

use crate::error::TrainError;
use crate::limits;
use crate::scaling::Scaling;

const ELASTIC_PAUSE: Duration = Duration::from_millis(50);
/// After how long a head whose journal could not be written is asked again.
const JOURNAL_PAUSE: Duration = Duration::from_secs(1);
/// After how long it is said what a group waits for; and again each time that twice as long has passed, and at least once in
/// [`SAID_AGAIN`].
const SAID: Duration = Duration::from_secs(2);
const SAID_AGAIN: Duration = Duration::from_secs(300);
/// How long a group that was asked for late has at least, since there may be room.
const LEAST_WAIT: Duration = Duration::from_secs(1);

/// How a group waits for its place.
pub(crate) struct Patience<'a> {
    /// For how long; as long as it takes if none.
    pub limit: Option<Duration>,
    /// Also for nodes that are not there.
    pub for_nodes: bool,
    /// Also for a head that cannot write its journal.
    pub for_journal: bool,
    /// Who is told what it waits for.
    pub notice: &'a (dyn Fn(&str) + Send + Sync),
}

/// The bundles of a group, which have been placed. They are given back when it is dropped.
pub(crate) struct Reservation {
    pub bundles: PlacementGroup,
    /// Where each bundle is.
    pub nodes: Vec<NodeId>,
    /// How many units of [`Scaling`] it is.
    pub units: u32,
    session: Session,
    is_released: bool,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if !self.is_released {
            self.session.runtime().give_up_placement_group(self.bundles.id());
        }
    }
}

impl Reservation {
    /// Reserves what so many ranks need.
    ///
    /// # Errors
    /// It can never be placed, or was not in time, and why.
    pub(crate) async fn make(scaling: &Scaling, patience: &Patience<'_>) -> Result<Reservation, TrainError> {
        let missing =
            |why: String| TrainError::NotEnoughResources { workers: scaling.ranks(), each: scaling.each(), why };
        let infeasible = |error| match error {
            Error::Infeasible { .. } => missing(error.to_string()),
            error => error.into(),
        };
        let session = Session::current()?;
        let (begun, mut said, mut healed) = (Instant::now(), SAID, false);
        let (units, bundles) = loop {
            // Nodes come and go while it waits.
            let units = units(scaling).await?;
            let (bundles, strategy) = scaling.bundles(units);
            let asked = placement_group(bundles).strategy(strategy);
            let asked = if patience.for_nodes { asked.wait_until_feasible() } else { asked };
            let error = match asked.await {
                Ok(bundles) => break (units, bundles),
                Err(error @ Error::Infeasible { .. }) => return Err(infeasible(error)),
                Err(error) => error,
            };
            let is_in_time = patience.limit.is_none_or(|limit| begun.elapsed() < limit);
            if !patience.for_journal || !is_in_time {
                return Err(error.into());
            }
            // A run that was going on, or that may wait, does not fail for a disk that is full for a while.
            let Some(why) = journal_fails(&session).await else {
                // It may be written again since the group was refused.
                if std::mem::replace(&mut healed, true) {
                    return Err(error.into());
                }
                continue;
            };
            healed = false;
            if begun.elapsed() >= said {
                (patience.notice)(&format!(
                    "waiting for {} now: the head cannot write its journal: {why}",
                    since(begun)
                ));
                said += said.min(SAID_AGAIN);
            }
            tokio::time::sleep(JOURNAL_PAUSE).await;
        };
        // From here on it is given back, whatever happens.
        let mut reserved = Reservation { bundles, nodes: Vec::new(), units, session, is_released: false };
        let (ready, asked) = (reserved.bundles.ready(), Instant::now());
        while said <= begun.elapsed() {
            said += said.min(SAID_AGAIN);
        }
        reserved.nodes = loop {
            let wait = patience.limit.map_or(said, |limit| limit.min(said)).saturating_sub(begun.elapsed());
            match ready.get_timeout(wait.max(LEAST_WAIT.saturating_sub(asked.elapsed()))).await {
                Ok(nodes) => break nodes,
                Err(Error::TimedOut { .. }) => {}
                Err(error) => return Err(infeasible(error)),
            }
            let why = reserved.why_not_placed().await;
            if patience.limit.is_some_and(|limit| begun.elapsed() >= limit) {
                return Err(missing(format!("they could not all be placed within {}: {why}", since(begun))));
            }
            (patience.notice)(&format!("waiting for room for {} now: {why}", since(begun)));
            said += said.min(SAID_AGAIN);
        };
        Ok(reserved)
    }

    /// Gives it back, and ends what still runs in it.
    pub(crate) async fn release(mut self) {
        // It fails only when the head is gone, and then nothing is reserved any more.
        let _ = self.bundles.remove().await;
        self.is_released = true;
    }

    /// What it waits for, as `wingbeat why` says it.
    async fn why_not_placed(&self) -> String {
        let explained = self.session.why(self.bundles.id()).await.ok();
        let mut lines = explained.map(|why| [why.reasons, why.holders].concat()).unwrap_or_default();
        // Each bundle has the same reasons.
        let mut seen = BTreeSet::new();
        lines.retain(|line| seen.insert(line.clone()));
        lines.join("; ")
    }
}

/// Why the head cannot write its journal; none if it can, or does not say.
pub(crate) async fn journal_fails(session: &Session) -> Option<String> {
    session.runtime().cluster_state().await.ok()?.journal_fails
}

/// In whole seconds.
fn since(begun: Instant) -> humantime::FormattedDuration {
    humantime::format_duration(Duration::from_secs(begun.elapsed().as_secs()))
}

/// What is free on the nodes that take new work and where ranks may be, but for these, and what they have in all.
pub(crate) async fn resources(
    scaling: &Scaling,
    without: &BTreeSet<u64>,
) -> Result<(Vec<ResourceSet>, Vec<ResourceSet>), Error> {
    let state = Session::current()?.runtime().cluster_state().await?;
    let open = state.nodes.into_iter().filter(|node| {
        node.draining.is_none() && scaling.accepts(&node.info.labels) && !without.contains(&node.info.id.0)
    });
    Ok(open.map(|node| (node.available, node.info.resources)).unzip())
}

/// With how many units to begin. What the last attempt held is free again soon, and waited for; what was lost is not.
async fn units(scaling: &Scaling) -> Result<u32, Error> {
    if !scaling.is_elastic() {
        return Ok(scaling.most);
    }
    let begun = Instant::now();
    loop {
        let (free, total) = resources(scaling, &BTreeSet::new()).await?;
        match scaling.choose(&free, &total) {
            Some(units) => return Ok(units),
            // The group waits for its least, and says for what.
            None if begun.elapsed() > *limits::ELASTIC => return Ok(scaling.fits(&free).max(scaling.least)),
            None => tokio::time::sleep(ELASTIC_PAUSE).await,
        }
    }
}
