//! How the head ends: it stops the cluster, leaves to the next head, or breaks.

use std::sync::Arc;
use std::time::Duration;

use wingbeat_net::link::Link;
use wingbeat_net::messages::{HeadEvent, NodeMessage};
use wingbeat_net::panics;

use super::{Shell, Stage, peers};

/// How long nodes may take to hear that they are to stop.
const STOP_LIMIT: Duration = Duration::from_secs(3);

/// How often it is looked meanwhile whether everybody is back.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

impl Shell {
    pub(crate) async fn until_stopped(&self, work: impl Future<Output = ()>) {
        let mut stopping = self.stopping.subscribe();
        tokio::select! {
            () = work => {}
            _ = stopping.wait_for(|stage| *stage >= Stage::Stopped) => {}
        }
    }

    pub(crate) async fn stopped(&self) -> Result<(), String> {
        let mut stopping = self.stopping.subscribe();
        let _ = stopping.wait_for(|stage| *stage >= Stage::Told).await;
        self.broken.get().map_or(Ok(()), |why| Err(why.clone()))
    }

    /// Runs a part without which something here would never happen: if it panics, which was printed there, the head ends. What
    /// it knows may be half changed by then.
    pub(crate) fn vital(self: &Arc<Self>, part: &'static str, running: impl Future<Output = ()> + Send + 'static) {
        let shell = self.clone();
        tokio::spawn(async move {
            if let Err(said) = panics::caught(running).await {
                shell.is_defect(part, &said);
            }
        });
    }

    /// A part without which something here would never happen has panicked.
    pub(crate) fn is_defect(&self, part: &'static str, said: &str) {
        let _ = self.broken.set(panics::defect("the head", part, said));
        self.stop();
    }

    /// Ends this head, and not its cluster.
    pub(crate) fn ends_for(&self, why: String) {
        // Whoever has started it says so.
        let _ = self.broken.set(why);
        self.stop();
    }

    pub(crate) fn stop(&self) {
        self.advance(Stage::Stopped);
    }

    /// Ends this head alone: from now on, who is gone has not ended. What it knows is written.
    pub(crate) async fn leave(&self) {
        if self.standby_that_is_current().is_some() {
            // As long as it is connected: it takes over with this.
            self.settle_journal().await;
        }
        self.advance(Stage::Left);
        if let Some(standby) = &self.standby {
            standby.is_done_with();
        }
        self.settle_journal().await;
    }

    /// Whether the next head is to be told what this one hears.
    pub(crate) fn has_left(&self) -> bool {
        *self.stopping.borrow() == Stage::Left
    }

    /// Goes on to a later stage. Whether it was in an earlier one.
    fn advance(&self, to: Stage) -> bool {
        self.stopping.send_if_modified(|stage| {
            let is_later = *stage < to;
            if is_later {
                *stage = to;
            }
            is_later
        })
    }

    /// Ends the cluster, and waits until everybody was told. Once begun it goes to its end, also when whoever asked for it is gone.
    pub(crate) async fn stop_nodes(self: &Arc<Self>) {
        if self.advance(Stage::Stopping) {
            let shell = self.clone();
            self.vital("stopping the cluster", async move { shell.tell_of_the_stop().await });
        }
        let _ = self.stopping.subscribe().wait_for(|stage| *stage >= Stage::Told).await;
    }

    /// Tells everybody that the cluster ends. Those that may still come back since the head was started again have a moment.
    async fn tell_of_the_stop(&self) {
        let everybody = async {
            self.until_learned(false).await;
            while !self.inside.lock().state.absent().is_empty() {
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        };
        let _ = tokio::time::timeout(STOP_LIMIT, everybody).await;
        let (nodes, processes): (Vec<Link<NodeMessage>>, Vec<Link<HeadEvent>>) = {
            let inside = self.inside.lock();
            (peers::links_of_present(&inside.nodes), peers::links_of_present(&inside.processes))
        };
        // Each hears it, also when another takes nothing in.
        for link in &processes {
            link.send(HeadEvent::Stops);
        }
        for link in &nodes {
            link.send(NodeMessage::Stop("the cluster was stopped".into()));
        }
        let nodes = futures::future::join_all(nodes.iter().map(Link::flushed));
        let processes = futures::future::join_all(processes.iter().map(Link::flushed));
        let standby = self.tell_standby_of_the_stop();
        let _ = tokio::time::timeout(STOP_LIMIT, futures::future::join3(nodes, processes, standby)).await;
        self.is_ending();
    }

    /// Nodes that are lost from now on have ended with the cluster.
    pub(crate) fn is_ending(&self) {
        self.advance(Stage::Told);
    }
}
