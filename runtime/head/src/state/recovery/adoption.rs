//! What runs on a node that comes back.

use std::sync::Arc;

use wingbeat_core::error::Error;
use wingbeat_core::spec::{ActorSpec, Address};
use wingbeat_core::{Amount, Incarnation, JobId, LeaseId, NodeId, PlacementGroupId, ProcessId, ResourceSet, TaskId};
use wingbeat_net::messages::{HeadEvent, LeaseHolder, LeaseStart, NodeMessage, Running, RunningLease, WorkerDeath};

use super::claims::DROPPED;
use crate::state::State;
use crate::state::actors::ToEnd;
use crate::state::hears::ABANDONED;
use crate::state::lease::{Holder, Lease};
use crate::state::nodes::Taken;

impl State {
    /// Takes in what runs on a node that knew a head before.
    pub(in crate::state) fn adopt(&mut self, node: NodeId, running: Running) {
        self.tell_node_of_lost_nodes(node);
        let (known, places) = match &mut self.recovering {
            Some(recovering) => (recovering.nodes.remove(&node), recovering.places.remove(&node)),
            None => (None, None),
        };
        self.bundles_are_back(node, places.unwrap_or_default());
        for job in running.jobs {
            match self.jobs.get(&job) {
                Some(known) if !known.is_over => drop(self.nodes.change(node, |node| node.jobs.insert(job))),
                // It may have detached actors, which the node keeps.
                _ => self.order(node, NodeMessage::EndJob { job }),
            }
        }
        for (process, job) in running.ended {
            self.departed.insert(process, Some(job));
        }
        for (worker, job) in running.workers {
            self.worker_known(worker, job, node);
        }
        for lease in running.leases {
            let owner = match &lease.start.holder {
                LeaseHolder::Tasks(owner, _) => Some(*owner),
                LeaseHolder::Actor(spec, ..) => (!spec.detached).then_some(spec.owner.process),
            };
            if let Some(recovering) = &mut self.recovering {
                recovering.owners.extend(owner);
            }
            self.adopt_lease(node, lease);
        }
        if let Some((_, Some(drained))) = known {
            // It is there.
            let _ = self.drain_node(node, drained);
        }
    }

    /// Whatever runs, holds what it holds until the node says that it is gone. Whether it may go on, is another question.
    fn adopt_lease(&mut self, node: NodeId, lease: RunningLease) {
        let RunningLease { start, worker, started, terminated, is_ending } = lease;
        let LeaseStart { lease: id, job, resources, gpus, bundle, holder, .. } = start;
        if self.leases.leases.contains_key(&id) {
            return;
        }
        let (taken, is_lost) = self.adopt_place(node, job, bundle, resources, gpus);
        let outlives = matches!(&holder, LeaseHolder::Actor(spec, ..) if spec.detached);
        let has_job = self.jobs.get(&job).is_some_and(|job| !job.is_over || outlives);
        let may_go_on = has_job && !is_ending && !is_lost;
        let known = match &holder {
            _ if !may_go_on => Holder::Nobody,
            LeaseHolder::Tasks(owner, shape) => {
                Holder::Tasks((*owner, self.adopt_demand(*owner, (**shape).clone(), id)))
            }
            LeaseHolder::Actor(spec, ..) => Holder::Actor(spec.id),
        };
        let server = worker.as_ref().map(|(address, pid)| (address.process, *pid));
        let entry = Lease::of_earlier_head(Lease::new(taken, known, job, self.now), server, is_ending);
        self.leases.leases.insert(id, entry);
        self.job_holds(job, 1);
        self.nodes.change(node, |node| node.leases.insert(id));
        self.tell_of_job(node, job);
        if let Some((address, _)) = &worker {
            self.worker_known(address.process, job, node);
        }
        if let Holder::Tasks(asker) = known {
            self.requeue(&asker);
        }
        let waiting = self.recovering.as_mut().and_then(|recovering| recovering.waiting.remove(&id));
        for task in waiting.unwrap_or_default() {
            self.lease_waits(id, task, true);
        }
        if !may_go_on {
            if let (LeaseHolder::Actor(spec, ..), Some(by)) = (&holder, terminated) {
                self.terminate_actor(spec.id, by);
            }
            return self.end_lease(id, Some("the head that was started again has no place for it".into()));
        }
        match holder {
            LeaseHolder::Tasks(owner, _) => self.adopt_tasks(owner, id),
            LeaseHolder::Actor(spec, incarnation, moves) => {
                if self.is_stale(&spec, incarnation) {
                    self.has_earlier_life(spec.id, id);
                    let why = "this life of its actor was over before the head was started again";
                    return self.end_lease(id, Some(why.into()));
                }
                self.adopt_life((&spec, incarnation, moves), id, node, worker, started, terminated);
            }
        }
    }

    /// Takes what a lease has, where it is. Whether its bundle is not there any more.
    fn adopt_place(
        &mut self,
        node: NodeId,
        job: JobId,
        bundle: Option<(PlacementGroupId, u32)>,
        resources: ResourceSet,
        devices: Vec<(u32, Amount)>,
    ) -> (Taken, bool) {
        let is_there = |(group, index): &(PlacementGroupId, u32)| {
            let placed = self.groups.get(*group).and_then(|group| group.placed.get(*index as usize)?.as_ref());
            placed.is_some_and(|placed| placed.taken.node == node)
        };
        let is_lost = bundle.is_some_and(|bundle| !is_there(&bundle));
        let bundle = bundle.filter(is_there);
        let taken = Taken { node, bundle, resources, devices };
        match bundle {
            None => {
                self.nodes.change(node, |node| node.pool.take_exactly(&taken.resources, &taken.devices));
                self.charge(job, &taken.resources);
            }
            Some((group, index)) => self.groups.take_exactly(group, index, &taken.resources, &taken.devices),
        }
        (taken, is_lost)
    }

    /// Ends a lease that its owner does not have any more.
    fn adopt_tasks(&mut self, owner: ProcessId, lease: LeaseId) {
        if self.recovering.as_mut().is_none_or(|recovering| recovering.abandoned.remove(&lease)) {
            // Or its owner has said what it has to a head that could not know of this.
            self.end_lease(lease, Some(ABANDONED.into()));
        } else if self.is_claimed_by_nobody(owner, lease) {
            // It was returned, or the news of it was lost. Its process may own what others need.
            self.end_lease(lease, None);
        }
    }

    /// An actor has come back in this life.
    fn adopt_life(
        &mut self,
        (spec, incarnation, moves): (&Arc<ActorSpec>, Incarnation, u32),
        lease: LeaseId,
        node: NodeId,
        worker: Option<(Address, u32)>,
        started: Option<Result<(), Error>>,
        terminated: Option<String>,
    ) {
        let id = spec.id;
        let absent = self.recovering.as_mut().and_then(|recovering| recovering.actors.remove(&id));
        let terminated = terminated.or(absent.and_then(|absent| absent.ends));
        let is_up = matches!(started, Some(Ok(())));
        if !self.adopt_actor((spec, incarnation, moves), lease, node, worker, is_up) {
            self.next_life_waits_for(id, Some(lease));
            self.end_lease(lease, Some("another life of its actor is known".into()));
        } else if let Some(Err(error)) = started {
            self.actor_started(id, incarnation, Err(error));
        }
        match self.is_to_end(id).or_else(|| terminated.map(ToEnd::Terminate)) {
            Some(ToEnd::Kill) => self.kill_actor(id, false),
            Some(ToEnd::Terminate(by)) => self.terminate_actor(id, by),
            None => {}
        }
        if self.is_held_by_nobody(spec) {
            self.terminate_actor(id, DROPPED.into());
        }
        self.heard_of(id);
    }

    /// Somebody waits, or goes on, under a lease that its node has not reported yet.
    pub(in crate::state) fn note_absent_wait(&mut self, lease: LeaseId, task: TaskId, begins: bool) {
        let Some(recovering) = &mut self.recovering else { return };
        if self.leases.leases.contains_key(&lease) {
            return;
        }
        let waiting = recovering.waiting.entry(lease).or_default();
        match begins {
            true => waiting.insert(task),
            false => waiting.remove(&task),
        };
    }

    /// The worker process of a lease has ended that its node has not reported, or never will; or whose owner is not known, or not
    /// back.
    pub(in crate::state) fn absent_worker_died(&mut self, lease: LeaseId, death: WorkerDeath) {
        let Some(recovering) = &mut self.recovering else { return };
        let owner = recovering.claims.iter().find(|(_, claim)| claim.leases.contains(&lease)).map(|(owner, _)| *owner);
        match owner.filter(|owner| self.connected.contains(owner)) {
            Some(owner) => self.tell(owner, HeadEvent::WorkerDied(death)),
            None => drop(recovering.deaths.insert(lease, death)),
        }
    }

    /// An owner has no more use for a lease that its node has not reported yet.
    pub(in crate::state) fn note_absent_return(&mut self, owner: ProcessId, lease: LeaseId, is_abandoned: bool) {
        let Some(recovering) = &mut self.recovering else { return };
        if self.leases.leases.contains_key(&lease) {
            return;
        }
        if let Some(claim) = recovering.claims.get_mut(&owner) {
            claim.leases.remove(&lease);
        }
        if is_abandoned {
            recovering.abandoned.insert(lease);
        }
    }
}
