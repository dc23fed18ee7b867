//! What a group of ranks reserves: all of it, or nothing.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use wingbeat::{Error, NodeId, PlacementGroup, Session, placement_group};
use wingbeat_core::resources::ResourceSet;

use crate::error::TrainError;
use crate::scaling::Scaling;

/// How long a group may take to be placed. Longer means that the resources are not there.
const PLACE_LIMIT: Duration = Duration::from_secs(60);
/// How long an elastic group waits for what is not free now.
const ELASTIC_WAIT: Duration = Duration::from_secs(3);
const ELASTIC_PAUSE: Duration = Duration::from_millis(50);

/// The bundles of a group, which have been placed.
pub(crate) struct Reservation {
    pub bundles: PlacementGroup,
    /// Where each bundle is.
    pub nodes: Vec<NodeId>,
    /// How many units of [`Scaling`] it is.
    pub units: u32,
}

impl Reservation {
    /// Reserves what so many ranks need.
    ///
    /// # Errors
    /// It could not be placed, and why.
    pub(crate) async fn make(scaling: &Scaling) -> Result<Reservation, TrainError> {
        let missing =
            |why: String| TrainError::NotEnoughResources { workers: scaling.ranks(), each: scaling.each(), why };
        let units = units(scaling).await?;
        let (bundles, strategy) = scaling.bundles(units);
        let bundles = match placement_group(bundles).strategy(strategy).await {
            Ok(bundles) => bundles,
            Err(error @ Error::Infeasible { .. }) => return Err(missing(error.to_string())),
            Err(error) => return Err(error.into()),
        };
        let error = match bundles.ready().get_timeout(PLACE_LIMIT).await {
            Ok(nodes) => return Ok(Reservation { bundles, nodes, units }),
            Err(Error::TimedOut { .. }) => missing(why_not_placed(&bundles).await),
            Err(error) => error.into(),
        };
        let _ = bundles.remove().await;
        Err(error)
    }

    /// Gives it back, and ends what still runs in it.
    pub(crate) async fn release(self) {
        // It fails only when the head is gone, and then nothing is reserved any more.
        let _ = self.bundles.remove().await;
    }
}

/// What is free on the nodes that take new work, but for these, and what they have in all.
pub(crate) async fn resources(without: &BTreeSet<u64>) -> Result<(Vec<ResourceSet>, Vec<ResourceSet>), Error> {
    let state = Session::current()?.cluster_state().await?;
    let open = state.nodes.into_iter().filter(|node| node.draining.is_none() && !without.contains(&node.info.id.0));
    Ok(open.map(|node| (node.available, node.info.resources)).unzip())
}

/// With how many units to begin. What the last attempt held is free again soon, and waited for; what was lost is not.
async fn units(scaling: &Scaling) -> Result<u32, Error> {
    if !scaling.is_elastic() {
        return Ok(scaling.most);
    }
    let begun = Instant::now();
    loop {
        let (free, total) = resources(&BTreeSet::new()).await?;
        match scaling.choose(&free, &total) {
            Some(units) => return Ok(units),
            // The group waits for its least, and says for what.
            None if begun.elapsed() > ELASTIC_WAIT => return Ok(scaling.fits(&free).max(scaling.least)),
            None => tokio::time::sleep(ELASTIC_PAUSE).await,
        }
    }
}

/// What a group that was not placed in time waits for.
async fn why_not_placed(bundles: &PlacementGroup) -> String {
    let limit = PLACE_LIMIT.as_secs();
    let explained = match Session::current() {
        Ok(session) => session.why(bundles.id()).await.ok(),
        Err(_) => None,
    };
    let explained = explained.map(|why| [why.reasons, why.holders].concat().join("; ")).unwrap_or_default();
    format!("they could not all be placed within {limit} s: {explained}")
}
