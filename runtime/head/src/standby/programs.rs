//! A standby has the programs of detached actors, in case that it leads.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use wingbeat_core::spec::Executable;
use wingbeat_net::services::HeadClient;

use super::Standby;
use crate::programs::{Giver, Programs};
use crate::state::{Fact, FactKey};

/// The pause before a program is fetched again.
const PROGRAM_PAUSE: Duration = Duration::from_secs(10);

impl Standby {
    /// Has the programs of detached actors here, as far as the head gives them in time.
    pub(super) fn fetch_programs(&self, head: &HeadClient) {
        let needed: BTreeMap<String, Executable> = {
            let known = self.known.lock();
            let detached = known.values().filter_map(|fact| match fact {
                Fact::Actor(actor) if actor.spec.detached => Some(actor.spec.job),
                _ => None,
            });
            let jobs: BTreeSet<_> = detached.collect();
            let programs = jobs.into_iter().filter_map(|job| match known.get(&FactKey::Job(job)) {
                Some(Fact::Job(spec, _)) => Some(spec.executable.clone()),
                _ => None,
            });
            programs.filter(Programs::can_keep).map(|program| (program.hash.clone(), program)).collect()
        };
        self.programs.keep_only(&needed.keys().cloned().collect());
        let missing: Vec<Executable> = {
            let mut lacks = self.lacks.lock();
            lacks.retain(|hash, _| needed.contains_key(hash));
            let is_due = |hash: &String| lacks.get(hash).is_none_or(|tried| tried.elapsed() > PROGRAM_PAUSE);
            let missing = needed.into_values().filter(|program| !self.programs.has(&program.hash));
            missing.filter(|program| is_due(&program.hash)).collect()
        };
        for program in missing {
            let (programs, from, lacks) = (self.programs.clone(), Giver::Head(head.clone()), self.lacks.clone());
            // It ends with the connection.
            tokio::spawn(async move {
                let Err(error) = programs.keep(&program, Some(from)).await else {
                    lacks.lock().remove(&program.hash);
                    return;
                };
                if lacks.lock().insert(program.hash.clone(), Instant::now()).is_none() {
                    tracing::warn!(%error, "the standby lacks a program; nodes that have it can start its actors");
                }
            });
        }
    }
}
