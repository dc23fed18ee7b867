//! An actor with state: a call happens at most once, so the count lies between what was acknowledged and what was submitted.

use std::collections::BTreeMap;
use std::fs::File;

use serde::{Deserialize, Serialize};
use wingbeat::ErrorKind;
use wingbeat_shapes::Chance;

use super::{Failure, MayFail, RETRIES, doze, hold};
use crate::signs;

/// A call that was under way when the actor ended has failed, and so have calls to one that is being started again.
pub(super) const ERRORS: &[ErrorKind] = &[ErrorKind::Actor, ErrorKind::Lost];

/// Counts for each of several callers.
pub(super) struct Counter {
    life: u64,
    counts: BTreeMap<u64, u64>,
    /// Held as long as this life lasts.
    _alone: Option<File>,
}

/// What a counter says: which life it is in, and how often the caller has called in that.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Count {
    life: u64,
    count: u64,
}

#[wingbeat::actor]
impl Counter {
    pub(super) fn new(name: String) -> Counter {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let life = now.as_nanos() as u64 ^ (u64::from(std::process::id()) << 48);
        Counter { life, counts: BTreeMap::new(), _alone: signs::is_alone(&name) }
    }

    pub(super) fn add(&mut self, caller: u64, takes_ms: u64) -> Count {
        doze(takes_ms);
        let count = self.counts.entry(caller).or_default();
        *count += 1;
        Count { life: self.life, count: *count }
    }

    pub(super) fn read(&self, caller: u64) -> Count {
        Count { life: self.life, count: self.counts.get(&caller).copied().unwrap_or_default() }
    }
}

/// What one caller has submitted, and what was acknowledged, life by life.
#[derive(Debug, Default)]
pub(super) struct Account {
    submitted: u64,
    lives: BTreeMap<u64, Life>,
}

#[derive(Debug, Default)]
struct Life {
    acknowledged: u64,
    last: u64,
}

impl Account {
    pub(super) fn submits(&mut self) {
        self.submitted += 1;
    }

    /// The answer to a call, in the order of submission.
    pub(super) fn acknowledged(&mut self, Count { life, count }: Count) -> Result<(), Failure> {
        let of = self.lives.entry(life).or_default();
        of.acknowledged += 1;
        let (last, least) = (of.last, of.acknowledged);
        of.last = count;
        self.check(life, count, least)?;
        match count > last {
            true => Ok(()),
            false => Err(Failure::Wrong(format!("a counter says {count} after {last}"))),
        }
    }

    /// What the actor says at the end.
    pub(super) fn reads(&self, Count { life, count }: Count) -> Result<(), Failure> {
        self.check(life, count, self.lives.get(&life).map_or(0, |of| of.last))
    }

    fn check(&self, life: u64, count: u64, least: u64) -> Result<(), Failure> {
        let elsewhere: u64 =
            self.lives.iter().filter(|(other, _)| **other != life).map(|(_, of)| of.acknowledged).sum();
        let most = self.submitted - elsewhere;
        match (least..=most).contains(&count) {
            true => Ok(()),
            false => Err(Failure::Wrong(format!("a counter says {count}, and not {least} to {most}: {self:?}"))),
        }
    }
}

pub(super) async fn run(driver: u64, chance: &mut Chance) -> Result<(), Failure> {
    let name = format!("counter-{driver}-{}", chance.below(u32::MAX as usize));
    let counter = Counter::options().max_restarts(RETRIES).num_cpus(0.1).remote(name);
    let mut account = Account::default();
    // The first lives may end between two rounds.
    for _ in 0..chance.below(3) {
        match count(&counter, 0, &mut account, chance).await {
            Err(Failure::Error(error, kinds)) if kinds.contains(&error.kind()) => {}
            other => other?,
        }
        hold(2, chance).await;
    }
    count(&counter, 0, &mut account, chance).await
}

/// Calls in quick succession, and what the actor says then.
pub(super) async fn count(
    counter: &CounterHandle,
    caller: u64,
    account: &mut Account,
    chance: &mut Chance,
) -> Result<(), Failure> {
    let calls: Vec<_> = (0..1 + chance.below(30))
        .map(|_| {
            account.submits();
            counter.add(caller, chance.below(10) as u64)
        })
        .collect();
    let mut failed = None;
    for call in calls {
        match call.get().await {
            Ok(answer) => account.acknowledged(answer)?,
            Err(error) => failed = Some(error),
        }
    }
    account.reads(counter.read(caller).get().await.may_be(ERRORS)?)?;
    failed.map_or(Ok(()), Err).may_be(ERRORS)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(life: u64, count: u64) -> Count {
        Count { life, count }
    }

    #[test]
    fn a_count_lies_between_what_was_acknowledged_and_what_was_submitted() {
        let mut account = Account::default();
        (0..4).for_each(|_| account.submits());
        assert!(account.acknowledged(of(7, 1)).is_ok());
        // The second call has failed, and may have run.
        assert!(account.acknowledged(of(7, 3)).is_ok());
        assert!(account.reads(of(7, 3)).is_ok() && account.reads(of(7, 4)).is_ok());
        assert!(account.reads(of(7, 2)).is_err() && account.reads(of(7, 5)).is_err());
        assert!(account.acknowledged(of(7, 3)).is_err(), "one that ran twice or was forgotten");
    }

    #[test]
    fn what_was_acknowledged_in_one_life_was_not_in_another() {
        let mut account = Account::default();
        (0..3).for_each(|_| account.submits());
        assert!(account.acknowledged(of(7, 1)).is_ok() && account.acknowledged(of(7, 2)).is_ok());
        assert!(account.reads(of(8, 1)).is_ok());
        assert!(account.reads(of(8, 2)).is_err());
    }
}
