//! One attempt: the ranks run to their end, or until the first of them fails.
//!
//! `checkpoints`: what is reported is stored; `growth`: there is room for more ranks; `metrics`: so are metrics; `quiet`: nobody says anything; `slow`: the
//! storage takes long; `failure`: why it has failed; `state`: what is known meanwhile.

mod checkpoints;
mod failure;
mod growth;
mod metrics;
mod quiet;
mod slow;
mod state;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use futures::stream::{FuturesUnordered, StreamExt};
use rustix::process::Signal;
use tokio::sync::mpsc;
use wingbeat::{AnyRef, Drained, Error};

use self::state::{Attempt, Checkpoints, GROWTH_LOOK, Metrics, Moves, Quiet, Ranks, Showing};
use crate::error::{ReportError, TrainError};
use crate::group::{Group, Member};
use crate::launch::{Events, Launched, RankEvent};
use crate::limits;
use crate::plan::Plan;
use crate::printer::Message;
use crate::process::{Answer, Event, Report};
use crate::progress::Progress;
use crate::reports::{Reports, Step};
use crate::so_far::SoFar;
use crate::storage::Place;

/// How long what ranks print while they are stopped waits for somebody to read it.
const UNREAD: Duration = Duration::from_secs(1);
/// How long before its deadline a drained node is left.
const KILL_TIME: Duration = Duration::from_millis(500);
/// After how long without more, what is held back of a line is shown.
const PAUSE: Duration = Duration::from_millis(100);

/// What came of an attempt that succeeded.
#[derive(Debug, Default)]
pub(crate) struct Finished {
    /// How many ranks there were.
    pub ranks: u32,
    /// Rank 0's last metrics.
    pub metrics: BTreeMap<String, f64>,
    /// What each rank's function returned, pickled, where that was wanted.
    pub returned: BTreeMap<u32, Vec<u8>>,
}

fn moves(Drained { node, why, .. }: Drained) -> TrainError {
    TrainError::Moves { node, why }
}

/// Waits until ranks on a drained node must be asked to end.
async fn due(drained: Option<(Drained, Instant)>) -> Drained {
    match drained {
        Some((drained, asked_at)) => {
            tokio::time::sleep_until(asked_at.into()).await;
            drained
        }
        None => std::future::pending().await,
    }
}

/// How long ranks may still run that must have ended at the deadline: what runs then is ended by the head, with the actors that store
/// what ranks have reported.
fn left(now: Instant, deadline: Instant) -> Duration {
    deadline.saturating_duration_since(now).saturating_sub(KILL_TIME)
}

/// When ranks are asked to end that must have ended at the deadline: they have their grace, and where there are checkpoints, the next has
/// at least half of the time to come.
fn asked_at(now: Instant, deadline: Instant, grace: Duration, has_checkpoints: bool) -> Instant {
    let left = left(now, deadline);
    now + left.saturating_sub(grace).max(if has_checkpoints { left / 2 } else { Duration::ZERO })
}

/// How long ranks have to end after a checkpoint that took so long to come, before they are begun again with it elsewhere. What they
/// still do is lost, if they do not end: a tenth of what was just stored is little. A report shows sooner that they go on.
fn time_to_end(took: Duration) -> Duration {
    (took / 10).clamp(*limits::LAST, *limits::LAST * 6)
}

/// Does something that may take a while, unless the run is stopped.
async fn or_stopped(plan: &Plan, work: impl Future<Output = Result<(), TrainError>>) -> Result<(), TrainError> {
    tokio::select! {
        biased;
        () = plan.stopper.stopped() => Err(TrainError::stopped()),
        done = work => done,
    }
}

impl Group {
    /// Runs all ranks to their end. The first that fails ends the others, and is the error.
    pub(crate) async fn run(
        &self,
        plan: &Plan,
        so_far: &mut SoFar,
        run_id: &str,
        storage: &Place,
        output: &mpsc::Sender<Message>,
    ) -> Result<Finished, TrainError> {
        let ranks = self.ranks.iter().map(Member::progress).collect();
        let progress = Progress { attempt: so_far.failures, ranks, reports: 0 };
        (plan.on_progress)(&progress);
        let (stored, launched) = tokio::select! {
            biased;
            () = plan.stopper.stopped() => return Err(TrainError::stopped()),
            launched = async {
                // One that shows nothing any more is found out when there is something to show.
                let _ = output.send(Message::Begun(progress.attempt)).await;
                let stored = self.find_stored(storage).await?;
                let launched = self.launch(plan, run_id, &progress, &stored).await?;
                Ok::<_, TrainError>((stored, launched))
            } => launched?,
        };
        let Launched { mut events, port, ras, calls } = launched;
        let count = self.ranks.len();
        let mut attempt = Attempt {
            plan,
            group: self,
            storage,
            showing: Showing { output, unshown: None, pause: Instant::now(), pauses: 0 },
            metrics: Metrics::new(so_far.failures, so_far.launches.saturating_sub(1)),
            checkpoints: Checkpoints::from(&stored),
            quiet: Quiet::new(ras),
            moves: Moves::new(so_far.failed_growths),
            ranks: Ranks::new(count, calls),
            reports: Reports::of(count),
            progress,
            // An attempt that has nothing left to do reports nothing.
            finished: Finished { ranks: count as u32, metrics: so_far.metrics.clone(), ..Finished::default() },
        };
        let mut told = attempt.until_failure(&mut events).await;
        if told.is_ok() && attempt.ranks.are_well() {
            attempt.hurry();
            let given_up = async {
                plan.stopper.stopped().await;
                let (storage, seconds) = (storage.name(), limits::STORAGE.as_secs());
                (plan.on_notice)(&format!(
                    "the run was stopped: waiting up to {seconds} s for {storage} to store the last checkpoint"
                ));
                tokio::time::sleep(*limits::STORAGE).await;
            };
            let waits = slow::remind(*limits::STORAGE, |took| {
                let (storage, seconds) = (storage.name(), took.as_secs());
                (plan.on_notice)(&format!(
                    "all ranks have ended: waiting for {storage} to store the last checkpoint, {seconds} s so far"
                ));
            });
            let saved = tokio::select! {
                biased;
                saved = attempt.finish_saves() => saved,
                () = given_up => Err(TrainError::stopped()),
                never = waits => match never {},
            };
            return attempt.finish(saved, so_far).await;
        }
        let now = Instant::now();
        let (grace, runs_on) = match (&told, &attempt.moves.drained) {
            (Err(TrainError::Moves { .. }), Some(drained)) => {
                // After a checkpoint, what a function still does is lost; else it has until the deadline to end.
                let without_checkpoint =
                    attempt.moves.leaves_at.is_none() && attempt.moves.asked_at.is_some_and(|at| at <= now);
                (plan.grace.min(left(now, drained.deadline)), without_checkpoint)
            }
            // As torchrun, also when a rank has failed: whoever handles the signal may save what it has. Most do not, and
            // end at once.
            _ => (plan.grace, false),
        };
        // What all have reported is worth having, and what they report in their grace.
        attempt.hurry();
        let was_heard = attempt.stop(&mut events, grace, runs_on).await;
        let were_asked = was_heard || attempt.ranks.was_stopped;
        let goes_elsewhere = matches!(told, Err(TrainError::Moves { .. } | TrainError::Grows { .. }));
        if goes_elsewhere && !were_asked && attempt.ranks.left == 0 && attempt.ranks.are_well() {
            // All have come to their own end, as with the last checkpoint: there is nothing to go on with.
            told = Ok(());
        }
        let saved = tokio::time::timeout(*limits::STORAGE, attempt.finish_saves()).await;
        // That it could not be stored is not why the run has failed.
        let lost = match saved {
            Ok(saved) => saved.err().map(|error| error.to_string()),
            Err(_) => Some(format!("not within {} s", limits::STORAGE.as_secs())),
        };
        if let Some(why) = attempt.checkpoints.not_stored.take().or(lost) {
            (plan.on_notice)(&format!("what ranks reported last is not stored: {why}"));
        }
        if told.is_ok() && !attempt.ranks.are_well() {
            told = Err(attempt.first_failure(port));
        }
        attempt.finish(told, so_far).await
    }
}

impl Attempt<'_> {
    /// Hears the ranks until all have ended or one has failed, and looks after those who wait.
    async fn until_failure(&mut self, events: &mut Events) -> Result<(), TrainError> {
        let output = self.showing.output;
        while (self.ranks.left > 0 || self.showing.unshown.is_some()) && self.ranks.are_well() {
            self.save_next();
            let stopped = self.plan.stopper.stopped();
            let room_made = tokio::time::sleep_until(self.makes_room_until().unwrap_or_else(Instant::now).into());
            let leaves = tokio::time::sleep_until(self.moves.leaves_at.unwrap_or_else(Instant::now).into());
            let look = tokio::time::sleep_until(self.next_look().into());
            tokio::select! {
                biased;
                () = stopped => return Err(TrainError::stopped()),
                drained = self.group.draining(self.moves.drained.clone()) => match drained {
                    Some(drained) => self.leave(drained),
                    None => {
                        (self.plan.on_notice)("the drain was taken back: the run stays");
                        (self.moves.drained, self.moves.leaves_at) = (None, None);
                    }
                },
                drained = due(self.moves.drained.clone().zip(self.moves.asked_at)), if self.moves.drained.is_some() => {
                    return Err(moves(drained));
                }
                Some(room) = self.moves.looks.next(), if !self.moves.looks.is_empty() => self.found_room(room)?,
                () = leaves, if self.may_leave() => {
                    match (self.moves.drained.clone(), self.moves.grows_to) {
                        (Some(drained), _) => return Err(moves(drained)),
                        // Others may have taken the room since.
                        (None, Some(_)) => self.look_for_room(Some(GROWTH_LOOK)),
                        (None, None) => self.moves.leaves_at = None,
                    }
                }
                // What shows it has panicked.
                () = output.closed() => return Err(TrainError::stopped()),
                room = output.reserve(), if self.showing.unshown.is_some() => {
                    // Who shows it may have kept the ranks waiting.
                    self.quiet.since = Instant::now();
                    self.show(room)?;
                }
                () = tokio::time::sleep_until(self.showing.pause.into()), if self.showing.unshown.is_none() && self.showing.pauses > 0 => {
                    self.showing.pauses -= 1;
                    self.showing.pause = Instant::now() + PAUSE;
                    self.showing.unshown = Some(Message::Paused);
                }
                heard = events.next(), if self.showing.unshown.is_none() => {
                    self.hear(heard)?;
                    self.record(false);
                }
                Some(recorded) = self.metrics.writing.next(), if !self.metrics.writing.is_empty() => self.recorded(recorded, false),
                Some((reports, saved)) = self.checkpoints.saves.next(), if !self.checkpoints.saves.is_empty() => {
                    self.quiet.since = Instant::now();
                    let is_stored = saved.is_ok();
                    let took = self.checkpoints.stored_at.elapsed();
                    // What was held is begun: ranks may have been told that it will be stored.
                    self.saved(reports, saved)?;
                    self.save_next();
                    if is_stored && (self.moves.drained.is_some() || self.moves.grows_to.is_some()) {
                        let goes_on = !(self.checkpoints.held.is_empty() && self.checkpoints.saves.is_empty());
                        let ends = Instant::now() + if goes_on { Duration::ZERO } else { time_to_end(took) };
                        let asked_at = self.moves.asked_at.filter(|_| self.moves.drained.is_some());
                        self.moves.leaves_at = Some(asked_at.map_or(ends, |asked_at| ends.min(asked_at)));
                    }
                }
                Some((node, answer)) = self.checkpoints.lookups.running.next(), if !self.checkpoints.lookups.running.is_empty() => self.looked_up(node, &answer),
                Some(removed) = self.checkpoints.removals.running.next(), if !self.checkpoints.removals.running.is_empty() => self.removed(removed),
                // The next checkpoint waits no longer.
                () = room_made, if !self.checkpoints.held.is_empty() && self.makes_room_until().is_some_and(|until| until > Instant::now()) => {}
                () = tokio::time::sleep_until(self.moves.next_growth.into()), if self.may_grow() => self.look_for_room(None),
                () = look, if self.showing.unshown.is_none() => or_stopped(self.plan, self.look()).await?,
            }
        }
        Ok(())
    }

    /// Gives away what is to be shown. An error if what shows it is gone, which only a panic of it can be.
    fn show(&mut self, room: Result<mpsc::Permit<'_, Message>, mpsc::error::SendError<()>>) -> Result<(), TrainError> {
        let message = self.showing.unshown.take();
        match (room, message) {
            (Ok(room), Some(message)) => room.send(message),
            (Ok(_), None) => {}
            (Err(_), _) => return Err(TrainError::stopped()),
        }
        Ok(())
    }

    /// How it ended, with how far it has come; what is left of the metrics is written.
    async fn finish(mut self, ended: Result<(), TrainError>, so_far: &mut SoFar) -> Result<Finished, TrainError> {
        let until = tokio::time::Instant::now() + *limits::STORAGE;
        let written = tokio::time::timeout_at(until, self.record_all()).await;
        if written.is_err() && !self.metrics.has_complained {
            (self.plan.on_notice)("the last metrics could not be stored in time");
        }
        if tokio::time::timeout_at(until, self.finish_removals()).await.is_err() {
            (self.plan.on_notice)(
                "old checkpoints could not be removed in time: the next run on this storage removes them before its first",
            );
        }
        so_far.metrics.clone_from(&self.finished.metrics);
        ended.map(|()| self.finished)
    }

    /// Asks those who are left to end, and then ends them. Nobody is left behind when this returns: the next attempt
    /// needs the same devices. What was on its way is heard, too: a rank that printed much may have failed first and be
    /// heard of last. A function that never asks whether it is to end has its grace only if `runs_on`, until the run is stopped. Answers
    /// whether any rank heard that it is to end.
    async fn stop(&mut self, events: &mut Events, grace: Duration, runs_on: bool) -> bool {
        let (mut was_heard, mut ends_now, mut unread) = (false, !runs_on, UNREAD);
        for (signal, limit) in [(self.plan.stopper.signal(), grace), (Signal::KILL, *limits::KILLED)] {
            let stopping: Vec<_> = self.group.ranks.iter().map(|rank| rank.handle.stop(signal.as_raw())).collect();
            if signal == Signal::KILL {
                self.ranks.calls.iter().for_each(AnyRef::cancel_force);
            }
            let output = self.showing.output;
            let mut asked: FuturesUnordered<_> =
                stopping.iter().enumerate().map(|(rank, stopped)| async move { (rank, stopped.get().await) }).collect();
            let rest = async {
                // Also until all have said whether they heard: who did, and has ended since, has not come to its own end.
                while self.ranks.left > 0 || self.showing.unshown.is_some() || !asked.is_empty() {
                    self.save_next();
                    tokio::select! {
                        biased;
                        // In whatever order: one on a machine that stands still answers never. An actor that is gone took its process with it.
                        Some((rank, hears_of_it)) = asked.next(), if !asked.is_empty() => {
                            let hears_of_it = hears_of_it.unwrap_or(false);
                            was_heard |= hears_of_it;
                            if let Some(call) = self.ranks.calls.get(rank)
                                && !hears_of_it
                                && ends_now
                            {
                                call.cancel_force();
                            }
                        }
                        () = self.plan.stopper.stopped(), if !ends_now => {
                            ends_now = true;
                            was_heard = true;
                            self.ranks.calls.iter().for_each(AnyRef::cancel_force);
                        }
                        // What they report on their way out is stored, and answered.
                        Some((reports, saved)) = self.checkpoints.saves.next(), if !self.checkpoints.saves.is_empty() => {
                            if let Err(error) = self.saved(reports, saved) {
                                self.checkpoints.not_stored.get_or_insert(error.to_string());
                            }
                        }
                        Some((node, answer)) = self.checkpoints.lookups.running.next(), if !self.checkpoints.lookups.running.is_empty() => {
                            self.looked_up(node, &answer);
                        }
                        Some(removed) = self.checkpoints.removals.running.next(), if !self.checkpoints.removals.running.is_empty() => self.removed(removed),
                        // Who does not read does not keep the ranks from their end: once, and not again for each part.
                        room = tokio::time::timeout(unread, output.reserve()), if self.showing.unshown.is_some() => match room {
                            Ok(room) => {
                                unread = UNREAD;
                                drop(self.show(room));
                            }
                            Err(_) => (self.showing.unshown, unread) = (None, Duration::ZERO),
                        },
                        heard = events.next(), if self.showing.unshown.is_none() && self.ranks.left > 0 => drop(self.hear(heard)),
                    }
                }
            };
            if tokio::time::timeout(limit, rest).await.is_ok() {
                return was_heard;
            }
            // What follows is no end of their own.
            was_heard = true;
        }
        if self.ranks.left > 0 {
            let (left, all) = (self.ranks.left, self.group.ranks.len());
            (self.plan.on_notice)(&format!(
                "{left} of {all} ranks have not said that they ended: their nodes end them"
            ));
        }
        was_heard
    }

    fn hear(&mut self, heard: Option<RankEvent>) -> Result<(), TrainError> {
        let Some((rank, event)) = heard else {
            let missing = std::mem::take(&mut self.ranks.left);
            let why = format!("{missing} of {} ranks ended without saying how", self.group.ranks.len());
            return Err(Error::Failed { what: "running the group".into(), why }.into());
        };
        self.quiet.since = Instant::now();
        (self.quiet.was_named, self.quiet.was_hanging, self.quiet.nccl) = (false, false, None);
        match event {
            Ok(Event::Begins) => {}
            Ok(Event::Printed(printed)) => {
                self.showing.unshown = Some(Message::Printed(rank as u32, printed));
                if self.showing.pauses == 0 {
                    self.showing.pause = Instant::now() + PAUSE;
                }
                self.showing.pauses = 2;
            }
            // By what its function has left running.
            Ok(Event::Report(Report { id, .. }) | Event::Newest(id)) if self.reports.has_ended(rank) => {
                self.tell_one(rank, id, &Answer(Err(ReportError::Over)));
            }
            Ok(Event::Report(report)) => {
                // Its ranks go on, so the checkpoint was not the last.
                self.moves.leaves_at = self.moves.leaves_at.map(|_| Instant::now());
                let (step, before) = self.reports.report(rank, report);
                for Report { id, .. } in before {
                    self.tell_one(rank, id, &Answer(Err(ReportError::Overtaken)));
                }
                self.answer(step);
            }
            Ok(Event::Withdrawn(id)) => self.reports.withdraw(rank, id),
            Ok(Event::Newest(id)) => self.look_up(rank, id),
            Ok(Event::Returned(value)) => drop(self.finished.returned.insert(rank as u32, value)),
            Ok(Event::Raised(error)) => drop(self.ranks.raised.insert(rank, error)),
            Ok(Event::Devices(gpus)) => {
                if let Some(progress) = self.progress.ranks.get_mut(rank) {
                    progress.gpus = gpus;
                }
            }
            Ok(Event::Ended(mut outcome)) => {
                self.ranks.left -= 1;
                self.ranks.was_stopped |= outcome.was_stopped;
                let number = rank as u32;
                self.showing.unshown = Some(Message::Ended(number, outcome.error_file.take()));
                outcome.before_return = self.plan.must_return(number) && !self.finished.returned.contains_key(&number);
                if !outcome.is_success() {
                    self.ranks.failures.push((rank, outcome));
                }
                self.reports_no_more(rank, false);
            }
            Ok(Event::Failed(error)) => {
                self.ranks.failed_calls.push((rank, error));
                self.ended(rank, false);
            }
            Err(error) => {
                self.ranks.lost.push((rank, error));
                self.ended(rank, true);
            }
        }
        Ok(())
    }

    /// A rank has ended of which there is no more to say.
    fn ended(&mut self, rank: usize, is_lost: bool) {
        self.ranks.left -= 1;
        self.showing.unshown = Some(Message::Ended(rank as u32, None));
        self.reports_no_more(rank, is_lost);
    }

    /// What a function has left running may still wait with a report.
    fn reports_no_more(&mut self, rank: usize, is_lost: bool) {
        for Report { id, .. } in self.reports.left(rank) {
            self.tell_one(rank, id, &Answer(Err(ReportError::Over)));
        }
        let step = if is_lost { self.reports.lose(rank) } else { self.reports.end(rank) };
        self.answer(step);
    }

    fn answer(&mut self, step: Step) {
        match step {
            Step::Wait => {}
            Step::Refuse(reports, why) => self.tell(reports, &Answer(Err(ReportError::Uneven(why)))),
            Step::Complete(reports) => {
                for (rank, report) in self.progress.ranks.iter_mut().zip(reports.values()) {
                    rank.metrics.clone_from(&report.metrics);
                }
                self.progress.reports += 1;
                (self.plan.on_progress)(&self.progress);
                let has_checkpoint = reports.values().any(|report| report.checkpoint.is_some());
                if let Some(first) = reports.get(&0) {
                    self.finished.metrics.clone_from(&first.metrics);
                    self.metrics.recorder.add(&first.metrics, has_checkpoint && first.waits);
                }
                if !has_checkpoint {
                    self.tell(reports, &Answer(Ok(None)));
                } else {
                    self.checkpoints.held.push_back(reports);
                }
                // Others may wait in the middle of which these came.
                let next = self.reports.step();
                self.answer(next);
            }
        }
    }

    fn tell(&self, reports: impl IntoIterator<Item = (usize, Report)>, answer: &Answer) {
        for (rank, Report { id, .. }) in reports {
            self.tell_one(rank, id, answer);
        }
    }

    fn tell_one(&self, rank: usize, id: u64, answer: &Answer) {
        if let Some(member) = self.group.ranks.get(rank) {
            // A rank that has ended has disconnected, so its answer is dropped.
            drop(member.handle.answer(id, answer.clone()));
        }
    }

    /// A node is drained: the next checkpoint is the last there, or when none comes in time, ranks are asked to end while
    /// they still have their grace.
    fn leave(&mut self, drained: Drained) {
        let Drained { node, why, deadline } = &drained;
        self.moves.asked_at = Some(asked_at(Instant::now(), *deadline, self.plan.grace, self.checkpoints.are_made()));
        let left = humantime::format_duration(Duration::from_secs(
            deadline.saturating_duration_since(Instant::now()).as_secs(),
        ));
        let how = match self.storage.claim() {
            Some(_) => "with the next checkpoint, or",
            None => "with what ranks save themselves",
        };
        (self.plan.on_notice)(&format!("{node} is drained ({why}): the run moves {how} within {left}"));
        self.moves.drained = Some(drained);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_may_end_after_a_checkpoint_in_a_tenth_of_the_time_that_it_took_within_limits() {
        let after = |took| time_to_end(Duration::from_secs(took)).as_secs();
        assert_eq!([after(0), after(50), after(100), after(300), after(3600)], [5, 5, 10, 30, 30]);
    }

    #[test]
    fn ranks_that_must_leave_have_their_grace_and_a_checkpoint_half_of_the_time_at_least() {
        let now = Instant::now();
        let asked_after = |within: u64, grace: u64| {
            let deadline = now + Duration::from_secs(within) + KILL_TIME;
            (asked_at(now, deadline, Duration::from_secs(grace), true) - now).as_secs()
        };
        assert_eq!(
            [asked_after(120, 30), asked_after(60, 30), asked_after(30, 30), asked_after(4, 30)],
            [90, 30, 15, 2]
        );
        assert_eq!(asked_at(now, now, Duration::from_secs(30), true), now);
        let soon = now + Duration::from_secs(30);
        assert_eq!(asked_at(now, soon, Duration::from_secs(30), false), now, "no checkpoint will come");
        assert_eq!(
            left(now, soon),
            Duration::from_secs(30) - KILL_TIME,
            "they are gone before the head ends their actors"
        );
    }
}
