//! Nodes and drivers that an earlier head knew, and that are not back: those where nobody listens any more are lost at once.

use std::sync::Arc;
use std::time::Duration;

use wingbeat_core::spec::Address;
use wingbeat_net::address;
use wingbeat_net::limits::limits;

use super::Shell;
#[cfg(feature = "journal")]
use super::{Stage, peers};
use crate::state::{Absentee, Event};

/// The first pause before an absent one's machine is asked whether somebody listens, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// How many of these are nodes for work, and how many programs, in words.
fn counted(those: &[Absentee]) -> String {
    let nodes = those.iter().filter(|who| matches!(who, Absentee::Node(_, true))).count();
    let programs = those.iter().filter(|who| matches!(who, Absentee::Driver(..))).count();
    let of = |count: usize, what| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
    format!("{} and {}", of(nodes, "node"), of(programs, "program"))
}

impl Shell {
    /// Looks for everybody who may still come back.
    pub(crate) fn look_for_the_absent(self: &Arc<Self>) {
        let absent = self.inside.lock().state.absent();
        if !absent.is_empty() {
            // Nodes that programs bring belong to these.
            let those =
                absent.iter().map(|(who, _)| *who).filter(|who| !matches!(who, Absentee::Node(_, false))).collect();
            self.vital("saying who is back", self.clone().tell_who_is_back(those));
        }
        for (who, address) in absent {
            // A refusal says little of a driver on another machine, or of the node that it brings: something between may let nobody in. It
            // is given time to come by itself. Without an end to that, a head that is started again and again would keep all who have ended.
            let may_hide = !matches!(who, Absentee::Node(_, true)) && address.machine != address::this_machine();
            let comes_within = if may_hide { limits().silence } else { Duration::ZERO };
            self.vital("looking for the absent", self.clone().look_for(who, address, comes_within));
        }
    }

    /// Says in the log for whom the last head has a cluster, and who of them is given up.
    async fn tell_who_is_back(self: Arc<Self>, those: Vec<Absentee>) {
        tracing::info!("going on with the cluster of an earlier head, which had {}", counted(&those));
        let waiting = async {
            while self.inside.lock().state.is_recovering() {
                tokio::time::sleep(PAUSES.1).await;
            }
            let missing: Vec<Absentee> = {
                let inside = self.inside.lock();
                those.iter().copied().filter(|who| !inside.state.is_back(*who)).collect()
            };
            if !missing.is_empty() {
                tracing::warn!("did not come back, or have ended since: {} of {}", counted(&missing), counted(&those));
            }
        };
        self.until_stopped(waiting).await;
    }

    async fn look_for(self: Arc<Self>, who: Absentee, address: Address, comes_within: Duration) {
        let (mut pause, longest) = PAUSES;
        let looking = async {
            tokio::time::sleep(comes_within).await;
            while self.inside.lock().state.is_absent(who) {
                if address::is_gone(&address).await {
                    return self.lose(who);
                }
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(longest);
            }
        };
        self.until_stopped(looking).await;
    }

    /// Whether nodes of an earlier head may still come, and none is there.
    #[cfg(feature = "journal")]
    pub(crate) fn is_without_those_it_expects(&self) -> bool {
        let inside = self.inside.lock();
        let is_running = *self.stopping.borrow() == Stage::Running;
        is_running && inside.state.is_recovering() && peers::links_of_present(&inside.nodes).is_empty()
    }

    fn lose(&self, who: Absentee) {
        let event = match who {
            Absentee::Node(node, _) => Event::NodeLost(node, "it ended while the head was away".into()),
            Absentee::Driver(process, job) => Event::ProcessLost(process, Some(job)),
        };
        self.change(|state, now| match state.is_absent(who) {
            true => ((), state.step(now, event)),
            false => ((), Vec::new()),
        });
        self.note_time();
    }
}
