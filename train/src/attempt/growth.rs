//! An elastic group looks for room for more ranks, beside everything else: the head may be away.

use std::time::{Duration, Instant};

use super::state::Attempt;
use crate::error::TrainError;

impl Attempt<'_> {
    /// Whether it is to look for room.
    pub(super) fn may_grow(&self) -> bool {
        self.plan.scaling.is_elastic()
            && self.moves.grows_to.is_none()
            && self.moves.looks.is_empty()
            && self.group.ranks.len() < self.plan.scaling.ranks() as usize
    }

    /// Whether the attempt may leave, once it is time: to grow, it waits for the look that is under way.
    pub(super) fn may_leave(&self) -> bool {
        let is_known = self.moves.drained.is_some() || self.moves.looks.is_empty();
        self.moves.leaves_at.is_some() && self.checkpoints.saves.is_empty() && is_known
    }

    /// Begins to look. There is no room when that is not known within `limit`.
    pub(super) fn look_for_room(&mut self, limit: Option<Duration>) {
        self.moves.next_growth = Instant::now() + self.moves.growth_look;
        let look = self.group.room_for(self.plan);
        self.moves.looks.push(match limit {
            Some(limit) => Box::pin(async move { tokio::time::timeout(limit, look).await.ok().flatten() }),
            None => Box::pin(look),
        });
    }

    /// For how many ranks there is room, if for more than there are.
    pub(super) fn found_room(&mut self, room: Option<u32>) -> Result<(), TrainError> {
        let notice = &self.plan.on_notice;
        let leaves = self.moves.grows_to.is_some()
            && self.moves.drained.is_none()
            && self.moves.leaves_at.is_some_and(|at| at <= Instant::now());
        match (room, self.moves.grows_to) {
            // What has been done since the last checkpoint would be lost.
            (Some(ranks), _) if leaves || self.storage.claim().is_none() => return Err(TrainError::Grows { ranks }),
            (Some(ranks), None) => {
                notice(&format!("there is room for {ranks} ranks: the run goes on with them after its next checkpoint"))
            }
            (None, Some(_)) => {
                notice(&format!("the room for more ranks is gone: the run goes on with {}", self.group.ranks.len()));
                if self.moves.drained.is_none() {
                    self.moves.leaves_at = None;
                }
            }
            (Some(_), Some(_)) | (None, None) => {}
        }
        self.moves.grows_to = room;
        Ok(())
    }
}
