//! What ranks report is stored, and what is stored is found for them.

use std::collections::BTreeMap;
use std::time::Instant;

use futures::future::join_all;
use futures::stream::StreamExt;
use wingbeat::{Error, get_all};

use super::state::Attempt;
use crate::error::{ReportError, TrainError};
use crate::group::Group;
use crate::limits;
use crate::process::{Answer, Report};
use crate::rank::RankHandle;
use crate::storage::{Claim, Listing, Place};

impl Attempt<'_> {
    /// The attempt is about to end: what all have reported is stored now.
    pub(super) fn hurry(&mut self) {
        (self.moves.leaves_at, self.checkpoints.is_ending) = (None, true);
    }

    /// Begins to store what is held, if it is its turn. Called whenever something has happened.
    pub(super) fn save_next(&mut self) {
        if self.moves.leaves_at.is_some() || !self.checkpoints.saves.is_empty() || self.checkpoints.held.is_empty() {
            return;
        }
        if !self.checkpoints.has_made_room {
            // An earlier run may have left more than is kept.
            self.checkpoints.has_made_room = true;
            self.remove_outdated();
        }
        if self.makes_room_until().is_none_or(|until| until <= Instant::now())
            && let Some(held) = self.checkpoints.held.pop_front()
        {
            // A removal is no silence of ranks.
            self.quiet.since = Instant::now();
            self.save(held);
        }
    }

    /// Until when the next checkpoint waits for the removal of old ones: a disk with room for one more is enough then. When
    /// the run is about to leave or to end, there is no time for it.
    pub(super) fn makes_room_until(&self) -> Option<Instant> {
        let is_in_a_hurry = self.checkpoints.is_ending || self.moves.drained.is_some() || self.moves.grows_to.is_some();
        self.checkpoints.removals.since.filter(|_| !is_in_a_hurry).map(|since| since + *limits::STORAGE)
    }

    /// A checkpoint is there, or cannot be: who waits is told, and if nobody does, the run.
    pub(super) fn saved(
        &mut self,
        reports: BTreeMap<usize, Report>,
        saved: Result<(), String>,
    ) -> Result<(), TrainError> {
        if saved.is_ok() {
            (self.checkpoints.has_stored, self.checkpoints.stored_at) = (true, Instant::now());
            self.remove_outdated();
        }
        if reports.contains_key(&0) {
            self.metrics.recorder.stored();
            self.record(false);
        }
        match saved {
            Err(why) if reports.is_empty() => Err(TrainError::CheckpointLost(why)),
            saved => {
                self.tell(reports, &Answer(saved.map(|()| None).map_err(ReportError::Storage)));
                Ok(())
            }
        }
    }

    /// Begins to remove what is not kept any more, one removal at a time: the new one is there, whatever becomes of older
    /// ones.
    fn remove_outdated(&mut self) {
        self.checkpoints.removals.is_outdated = self.checkpoints.removals.since.is_some();
        let Some(claim) = self.storage.claim().cloned().filter(|_| !self.checkpoints.removals.is_outdated) else {
            return;
        };
        let keep = self.plan.keep.clone();
        self.checkpoints.removals.since = Some(Instant::now());
        self.checkpoints.removals.running.push(Box::pin(async move { claim.remove_outdated(&keep).await }));
    }

    pub(super) fn removed(&mut self, removed: Result<(), String>) {
        (self.checkpoints.removals.since, self.quiet.since) = (None, Instant::now());
        if let Err(complaint) = removed
            && self.checkpoints.removals.complaints.insert(complaint.clone())
        {
            (self.plan.on_notice)(&format!("an old checkpoint cannot be removed: {complaint}"));
        }
        if self.checkpoints.removals.is_outdated {
            self.remove_outdated();
        }
    }

    pub(super) async fn finish_removals(&mut self) {
        while let Some(removed) = self.checkpoints.removals.running.next().await {
            self.removed(removed);
        }
    }

    pub(super) async fn finish_saves(&mut self) -> Result<(), TrainError> {
        let mut all = Ok(());
        self.save_next();
        while let Some((reports, saved)) = self.checkpoints.saves.next().await {
            all = all.and(self.saved(reports, saved));
            self.save_next();
        }
        all
    }

    /// Begins to store a checkpoint.
    pub(super) fn save(&mut self, reports: BTreeMap<usize, Report>) {
        let number = self.checkpoints.next;
        (self.checkpoints.next, self.checkpoints.save_began) = (number + 1, Instant::now());
        let save = save(self.group, self.storage, number, &reports);
        // Those who do not wait are answered now, and their next checkpoint waits for what is left of this one.
        let (waiting, others): (BTreeMap<_, _>, BTreeMap<_, _>) =
            reports.into_iter().partition(|(_, report)| report.waits);
        self.checkpoints.saves.push(Box::pin(async move { (waiting, save.await) }));
        self.tell(others, &Answer(Ok(None)));
    }

    /// A rank asks for the newest checkpoint. One at a time is looked for on a node: its ranks have only so many calls.
    pub(super) fn look_up(&mut self, rank: usize, id: u64) {
        let Some(node) = self.group.ranks.get(rank).map(|rank| rank.at.node) else { return };
        if !self.checkpoints.has_stored {
            // It was given it when it began.
            return self.tell_one(rank, id, &Answer(Ok(None)));
        }
        let [with, since] = self.checkpoints.lookups.asked.entry(node).or_default();
        match with.is_empty() {
            true => {
                with.push((rank, id));
                self.begin_lookup(node, rank);
            }
            // A newer one may be there by now.
            false => since.push((rank, id)),
        }
    }

    pub(super) fn begin_lookup(&mut self, node: u64, rank: usize) {
        self.checkpoints.lookups.began.get_or_insert_with(Instant::now);
        let (fetcher, place) = (self.group.fetcher(rank).cloned(), self.storage.clone());
        let find = async move {
            let (Some(claim), Some(fetcher)) = (place.claim(), fetcher) else { return Ok(None) };
            let Some(newest) = claim.storage().checkpoints().await?.pop() else { return Ok(None) };
            let path = fetcher.fetch(claim.storage().url().to_owned(), newest).get().await;
            path.map(Some).map_err(own_words)
        };
        self.checkpoints
            .lookups
            .running
            .push(Box::pin(async move { (node, Answer(find.await.map_err(ReportError::Storage))) }));
    }

    pub(super) fn looked_up(&mut self, node: u64, answer: &Answer) {
        // One is over, and others are: how long each takes alone is of interest.
        self.checkpoints.lookups.began = (!self.checkpoints.lookups.running.is_empty()).then(Instant::now);
        self.quiet.since = Instant::now();
        let [with, since] = self.checkpoints.lookups.asked.remove(&node).unwrap_or_default();
        for (rank, id) in with {
            self.tell_one(rank, id, answer);
        }
        if let Some((rank, _)) = since.first().copied() {
            self.checkpoints.lookups.asked.insert(node, [since, Vec::new()]);
            self.begin_lookup(node, rank);
        }
    }
}

/// What a rank says of its own failure, without the names of Wingbeat's own functions.
fn own_words(error: Error) -> String {
    match error {
        Error::Application { error, .. } => error.message,
        other => other.to_string(),
    }
}

/// Writes a checkpoint of what ranks have reported. Of files with the same name, the lowest rank's is taken.
fn save(
    group: &Group,
    place: &Place,
    number: u64,
    reports: &BTreeMap<usize, Report>,
) -> impl Future<Output = Result<(), String>> + Send + use<> {
    let place = place.clone();
    let metrics = reports.get(&0).map(|report| report.metrics.clone()).unwrap_or_default();
    let parts: Vec<(RankHandle, String)> = reports
        .iter()
        .filter_map(|(rank, report)| Some((group.ranks.get(*rank)?.handle.clone(), report.checkpoint.clone()?)))
        .collect();
    async move {
        let claim = place.begin(number).await?;
        let stored = store(&claim, number, &metrics, parts).await;
        match stored {
            Err(Failure { why, is_over }) => {
                if is_over {
                    // It would keep room from the next one.
                    claim.give_up(number).await;
                }
                Err(why)
            }
            Ok(()) => Ok(()),
        }
    }
}

/// Why a checkpoint was not stored.
struct Failure {
    why: String,
    /// Whether nobody writes there any more. A rank that cannot be reached may.
    is_over: bool,
}

impl Failure {
    fn of(error: Error) -> Failure {
        let is_over = matches!(error, Error::Application { .. });
        Failure { why: own_words(error), is_over }
    }
}

/// Has the ranks write what they have reported.
async fn store(
    claim: &Claim,
    number: u64,
    metrics: &BTreeMap<String, f64>,
    parts: Vec<(RankHandle, String)>,
) -> Result<(), Failure> {
    let storage = claim.storage();
    let listed: Vec<_> =
        parts.iter().map(|(handle, path)| handle.listing(path.clone(), storage.url().to_owned())).collect();
    let mut whole = Listing::default();
    let mut writing = Vec::new();
    for ((handle, path), listing) in parts.iter().zip(get_all(&listed).await.map_err(Failure::of)?) {
        let own = whole.take_in(listing);
        writing.push(handle.upload(storage.url().to_owned(), number, path.clone(), own));
    }
    let written = join_all(writing.iter().map(|written| written.get())).await;
    let is_over = written.iter().all(|written| matches!(written, Ok(()) | Err(Error::Application { .. })));
    let written: Result<(), Error> = written.into_iter().collect();
    written.map_err(|error| {
        let why = format!("the checkpoint could not be stored at {}: {}", storage.url(), own_words(error));
        Failure { why, is_over }
    })?;
    claim.complete(number, metrics, whole).await.map_err(|why| Failure { why, is_over: true })
}
