//! What a group of ranks reserves: all of it, or nothing.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use wingbeat::{Error, NodeId, PlacementGroup, Session, placement_group};

use crate::error::TrainError;
use crate::limits;
use crate::room::Room;
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
    pub session: Session,
    is_released: bool,
}

/// What came of waiting for its place.
enum Placing {
    Done(Vec<NodeId>),
    /// It is too large: so many units fit, or as few as there must be.
    AtMost(u32),
}

/// How long a group has waited, and what was said of it.
struct Waits<'a> {
    scaling: &'a Scaling,
    patience: &'a Patience<'a>,
    begun: Instant,
    /// After how long something is said next.
    said: Duration,
}

impl Waits<'_> {
    /// Whether it has waited for as long as it may.
    fn is_over(&self) -> bool {
        self.patience.limit.is_some_and(|limit| self.begun.elapsed() >= limit)
    }

    /// Until that, or until something is to be said.
    fn left(&self) -> Duration {
        self.patience.limit.map_or(self.said, |limit| limit.min(self.said)).saturating_sub(self.begun.elapsed())
    }

    fn is_due(&self) -> bool {
        self.begun.elapsed() >= self.said
    }

    /// What was due is not said.
    fn skip(&mut self) {
        while self.is_due() {
            self.said += self.said.min(SAID_AGAIN);
        }
    }

    /// Says something of how long it has waited, if that is due.
    fn say(&mut self, what: impl FnOnce(humantime::FormattedDuration) -> String) {
        if self.is_due() {
            (self.patience.notice)(&what(since(self.begun)));
            self.said += self.said.min(SAID_AGAIN);
        }
    }

    fn missing(&self, why: String) -> TrainError {
        TrainError::NotEnoughResources { workers: self.scaling.ranks(), each: self.scaling.each(), why }
    }

    fn failed(&self, error: Error) -> TrainError {
        match error {
            Error::Infeasible { .. } => self.missing(error.to_string()),
            error => error.into(),
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if !self.is_released {
            self.session.runtime().give_up_placement_group(self.bundles.id());
        }
    }
}

impl Reservation {
    /// Reserves what so many ranks need. Where their number may vary and not all can be placed, as when another group was first, it is
    /// fewer.
    ///
    /// # Errors
    /// It can never be placed, or was not in time, and why.
    pub(crate) async fn make(scaling: &Scaling, patience: &Patience<'_>) -> Result<Reservation, TrainError> {
        let session = Session::current()?;
        let (mut waits, mut healed) = (Waits { scaling, patience, begun: Instant::now(), said: SAID }, false);
        // As many as may still fit.
        let mut sized = scaling.clone();
        loop {
            // Nodes come and go while it waits.
            let units = units(&session, &sized).await?;
            let (bundles, strategy) = sized.bundles(units);
            let asked = placement_group(bundles).strategy(strategy);
            let asked = if patience.for_nodes { asked.wait_until_feasible() } else { asked };
            let error = match asked.await {
                Ok(bundles) => {
                    healed = false;
                    // From here on it is given back, whatever happens.
                    let session = session.clone();
                    let mut reserved = Reservation { bundles, nodes: Vec::new(), units, session, is_released: false };
                    match reserved.wait(&sized, &mut waits).await? {
                        Placing::Done(nodes) => {
                            reserved.nodes = nodes;
                            return Ok(reserved);
                        }
                        Placing::AtMost(units) => {
                            reserved.release().await;
                            sized = sized.up_to(units);
                        }
                    }
                    continue;
                }
                Err(Error::Infeasible { .. }) if units > sized.least => {
                    sized = sized.up_to(units - 1);
                    continue;
                }
                Err(error) => error,
            };
            let is_for_good = matches!(error, Error::Infeasible { .. });
            if is_for_good || !patience.for_journal || waits.is_over() {
                return Err(waits.failed(error));
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
            waits.say(|since| format!("waiting for {since} now: the head cannot write its journal: {why}"));
            tokio::time::sleep(JOURNAL_PAUSE).await;
        }
    }

    /// Waits until it is placed. What may be smaller is asked for again when less is free, and it has waited for a while.
    async fn wait(&self, sized: &Scaling, waits: &mut Waits<'_>) -> Result<Placing, TrainError> {
        let may_be_smaller = self.units > sized.least;
        let (ready, asked) = (self.bundles.ready(), Instant::now());
        let (mut looks, mut had_room) = (asked + *limits::ELASTIC, false);
        waits.skip();
        loop {
            let mut wait = waits.left().max(LEAST_WAIT.saturating_sub(asked.elapsed()));
            if may_be_smaller {
                wait = wait.min(looks.saturating_duration_since(Instant::now()));
            }
            match ready.get_timeout(wait).await {
                Ok(nodes) => return Ok(Placing::Done(nodes)),
                Err(Error::TimedOut { .. }) => {}
                Err(Error::Infeasible { .. }) if may_be_smaller => return Ok(Placing::AtMost(self.units - 1)),
                Err(error) => return Err(waits.failed(error)),
            }
            if may_be_smaller && (looks <= Instant::now() || waits.is_over()) {
                looks = Instant::now() + *limits::ELASTIC;
                let room = Room::look(&self.session, sized, Some(self.bundles.id())).await?;
                let fit = room.unawaited(sized);
                // Where all seem to fit, it is placed soon; unless what is free is in parts that are too small, as of GPUs.
                if room.is_granted && (fit < self.units || std::mem::replace(&mut had_room, true)) {
                    return Ok(Placing::AtMost(fit.min(self.units - 1)));
                }
            }
            if waits.is_over() {
                let why = self.why_not_placed().await;
                let since = since(waits.begun);
                return Err(waits.missing(format!("they could not all be placed within {since}: {why}")));
            }
            if waits.is_due() {
                let why = self.why_not_placed().await;
                waits.say(|since| format!("waiting for room for {since} now: {why}"));
            }
        }
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

/// With how many units to begin. What the last attempt held is free again soon, and waited for; what was lost is not.
async fn units(session: &Session, scaling: &Scaling) -> Result<u32, Error> {
    if !scaling.is_elastic() {
        return Ok(scaling.most);
    }
    let begun = Instant::now();
    loop {
        let room = Room::look(session, scaling, None).await?;
        match scaling.choose(room.now(scaling), room.ever(scaling)) {
            Some(units) => return Ok(units),
            // The group waits for its least, and says for what.
            None if begun.elapsed() > *limits::ELASTIC => return Ok(room.now(scaling).max(scaling.least)),
            None => tokio::time::sleep(ELASTIC_PAUSE).await,
        }
    }
}
