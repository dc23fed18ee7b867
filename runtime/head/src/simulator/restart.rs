//! The head is started again, from what it had written down.

use std::cmp::Reverse;

use rand::RngExt;
use wingbeat_core::spec::Shape;
use wingbeat_core::{ActorId, ClusterId, NodeId, PlacementGroupId, ProcessId};
use wingbeat_net::messages::HeadMessage;

use super::daemon::worker_of;
use super::world::{Granted, Happening, World};
use crate::state::{Event, Fact, Millis, State};

/// How long those that were there before have to come back.
const GRACE: Millis = 10_000;

impl World {
    pub(super) fn restart_head(&mut self) -> Result<(), String> {
        self.report.restarts += 1;
        self.check_facts()?;
        let facts: Vec<Fact> = self.facts.values().cloned().collect();
        self.state = State::recover(ClusterId(self.config.seed), self.report.restarts << 40, facts, GRACE);
        self.state.keep_facts();
        self.started_at = self.now;
        self.ticks_at = None;
        // What was on its way is lost.
        let old = std::mem::take(&mut self.clock);
        for Reverse(scheduled) in old.into_sorted_vec().into_iter().rev() {
            let is_lost = matches!(
                scheduled.what,
                Happening::ToHead(..)
                    | Happening::ToNode(..)
                    | Happening::ToProcess(..)
                    | Happening::FromProcess(..)
                    | Happening::Lost(_)
                    | Happening::Tick
            );
            if !is_lost {
                self.clock.push(Reverse(scheduled));
            }
        }
        self.granted.clear();
        self.absent_waits.clear();
        self.placed.clear();
        let nodes: Vec<NodeId> = self.nodes.keys().copied().collect();
        for node in nodes {
            if let Some(daemon) = self.nodes.get_mut(&node) {
                daemon.is_connected = false;
                (daemon.to_head_at, daemon.to_node_at) = (0, 0);
            }
            if self.chance(30) {
                // It died meanwhile: owners notice it by their own connections.
                let daemon = self.nodes.remove(&node);
                for lease in daemon.into_iter().flat_map(|daemon| daemon.leases.into_keys()) {
                    self.owners.remove(&worker_of(lease));
                    let owners: Vec<ProcessId> = self.owners.keys().copied().collect();
                    for owner in owners {
                        self.lease_broke(owner, lease);
                    }
                }
                let info = self.new_node();
                self.schedule(3_000, Happening::Join(Box::new(info)));
            } else {
                let after = self.random.random_range(0..8_000);
                self.schedule(after, Happening::Back(node));
            }
        }
        let owners: Vec<ProcessId> = self.owners.keys().copied().collect();
        for process in owners {
            if self.chance(20) {
                self.owners.remove(&process);
                continue;
            }
            if let Some(owner) = self.owners.get_mut(&process) {
                (owner.to_head_at, owner.from_head_at) = (0, 0);
            }
            let after = self.random.random_range(0..8_000);
            self.schedule(after, Happening::Reconnect(process));
        }
        if let Some(after) = self.state.next_tick() {
            self.ticks_at = Some(self.now + after);
            self.schedule(after, Happening::Tick);
        }
        Ok(())
    }

    pub(super) fn node_is_back(&mut self, node: NodeId) -> Result<(), String> {
        let Some(daemon) = self.nodes.get_mut(&node).filter(|daemon| !daemon.is_connected) else { return Ok(()) };
        daemon.is_connected = true;
        let (info, running) = (daemon.info.clone(), daemon.running());
        for lease in &running.leases {
            let start = lease.start.clone();
            let waiting = self.absent_waits.remove(&start.lease).unwrap_or(0);
            let granted = Granted { node, start, is_ending: false, is_returned: false, waiting };
            self.granted.insert(lease.start.lease, granted);
        }
        // What died while the head was away is not on the list, and its end is not told again.
        self.deliver(Event::NodeJoined(Box::new(info), running))?;
        self.say_held(node);
        Ok(())
    }

    pub(super) fn process_is_back(&mut self, process: ProcessId) -> Result<(), String> {
        let Some(owner) = self.owners.get(&process) else { return Ok(()) };
        let (job, holds) = (owner.job.clone(), owner.holds());
        let shapes: Vec<Shape> = owner.demands.keys().cloned().collect();
        let actors: Vec<ActorId> = owner.actors.iter().copied().collect();
        self.deliver(Event::ProcessConnected(process))?;
        if let Some(job) = job {
            self.deliver(Event::JobJoined(Box::new(job)))?;
        }
        let holds = HeadMessage::Holds { leases: holds.into_iter().collect(), actors: actors.clone(), is_all: true };
        self.deliver(Event::Says(process.into(), holds))?;
        for shape in shapes {
            self.demand(process, &shape);
        }
        for actor in actors {
            self.say(process, HeadMessage::WatchActor(actor));
        }
        let groups: Vec<PlacementGroupId> = self.groups.keys().copied().collect();
        for group in groups {
            self.say(process, HeadMessage::WatchPlacementGroup(group));
        }
        Ok(())
    }
}
