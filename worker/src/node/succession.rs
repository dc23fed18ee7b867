//! Which head this node supports, where there is a standby. [`Voter`] decides; this knows whether the head is heard.

use std::time::Instant;

use parking_lot::Mutex;
use wingbeat_core::spec::Address;
use wingbeat_net::limits::limits;
use wingbeat_net::messages::{Ballot, Leadership, Support, Vote, WorkerCommand};
use wingbeat_node::voter::Voter;

use super::Daemon;

/// What the node knows of the head and its standby.
#[derive(Default)]
pub(super) struct Succession {
    voter: Mutex<Voter>,
    /// When the head asked for support last.
    asked: Mutex<Option<Instant>>,
    standby: Mutex<Option<Address>>,
}

impl Succession {
    /// Where the standby would serve, if the head has one.
    pub(super) fn standby(&self) -> Option<Address> {
        self.standby.lock().clone()
    }
}

impl Daemon {
    /// A head asks whether this node still supports it.
    pub(super) fn support(&self, said: &Leadership) -> Support {
        let joined = self.head.way.epoch();
        let answer =
            self.head.way.promise_if(|promise| (self.succession.voter.lock().support(joined, promise, said), None));
        if answer == Support::Given {
            *self.succession.asked.lock() = Some(Instant::now());
            let is_new = {
                let mut standby = self.succession.standby.lock();
                let is_new = *standby != said.standby;
                standby.clone_from(&said.standby);
                is_new
            };
            if is_new {
                if let Some(standby) = &said.standby {
                    self.head.learn(standby.clone());
                }
                self.tell_workers_of_heads();
            }
        }
        match answer {
            Support::Joined { epoch, .. } => {
                let heard_at = self.head.client().is_some().then(|| self.head.way.address());
                Support::Joined { epoch, heard_at }
            }
            answer => answer,
        }
    }

    /// A standby asks for this node's vote. A node that promises itself leaves its head.
    pub(super) fn vote(&self, ballot: &Ballot) -> Vote {
        let joined = self.head.way.epoch();
        let hears_head = self.hears_head();
        let mut has_promised = false;
        let vote = self.head.way.promise_if(|promise| {
            let (vote, promised) = self.succession.voter.lock().vote(joined, promise, hears_head, ballot);
            has_promised = promised.is_some();
            (vote, promised)
        });
        if has_promised {
            tracing::warn!("the head is not heard; this node accepts its standby as the next one");
            self.head.leave();
            self.head.has_learned();
        }
        vote
    }

    /// Whether the head was heard a moment ago. Less than after what time a standby asks: it may ask the nodes at once.
    fn hears_head(&self) -> bool {
        let asked = *self.succession.asked.lock();
        self.head.client().is_some() && asked.is_some_and(|asked| asked.elapsed() < limits().takeover * 3 / 4)
    }

    /// Tells worker processes where the head may be.
    pub(super) fn tell_workers_of_heads(&self) {
        let heads = self.head.way.heads();
        if heads.len() < 2 {
            return;
        }
        for process in self.pool.lock().processes.values() {
            if let Some(commands) = &process.commands {
                commands.send(WorkerCommand::Heads(heads.clone()));
            }
        }
    }
}
