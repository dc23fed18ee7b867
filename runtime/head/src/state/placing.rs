//! Who of those who wait is placed now, and where.

use std::borrow::Cow;

use wingbeat_core::error::Error;
use wingbeat_core::spec::{MachineId, Strategy};
use wingbeat_core::{JobId, NodeId, PlacementGroupId, ProcessId, ResourceSet};

use super::State;
use super::index::Slot;
use super::nodes::{Node, Nodes, Taken};
use super::queue::{Class, Hold, Waiter};
use super::shapes::{ShapeId, Shapes};

/// What came of an attempt to place somebody.
pub(super) enum Attempt {
    /// It has its place, or needs none any more.
    Done,
    /// There is no room.
    NoRoom,
    /// It is held back by something else than room.
    HeldBack(Hold),
}

/// Where there is room.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Site {
    Node(NodeId),
    Bundle(PlacementGroupId, u32, NodeId),
}

impl State {
    /// Places whoever fits, in order, until nobody does. Cheap when nothing changed.
    pub(super) fn serve(&mut self) {
        while let Some((waiter, class)) = self.queue.next() {
            match self.try_to_place(waiter) {
                Attempt::Done => {}
                Attempt::HeldBack(hold) => self.queue.park(waiter, hold),
                Attempt::NoRoom => {
                    self.queue.block(class);
                    // Room that is kept for somebody further back in the class is room for that one alone.
                    for other in self.reservations.waiters() {
                        if other != waiter && self.class_of(other) == Some(class) {
                            let _ = self.try_to_place(other);
                        }
                    }
                }
            }
        }
    }

    fn class_of(&self, waiter: Waiter) -> Option<Class> {
        self.queue.class(waiter)
    }

    fn try_to_place(&mut self, waiter: Waiter) -> Attempt {
        match waiter {
            Waiter::Tasks(process, shape) => self.try_tasks(process, shape),
            Waiter::Actor(actor) => self.try_actor(actor),
            Waiter::Group(group) => self.try_group(group),
        }
    }

    fn try_tasks(&mut self, process: ProcessId, shape: ShapeId) -> Attempt {
        let waiter = Waiter::Tasks(process, shape);
        let Some(asked) = self.shapes.get(shape).cloned() else {
            self.queue.remove(waiter);
            return Attempt::Done;
        };
        let Some(job) = self.job_of(process) else {
            return Attempt::HeldBack(Hold::UnknownJob(process));
        };
        if !self.jobs.contains_key(&job) {
            // The process itself will be gone in a moment.
            let error = Error::Refused { who: "the head".into(), why: format!("{job} is over") };
            self.refuse_demand(&(process, shape), error);
            return Attempt::Done;
        }
        match self.take_place(waiter, shape, &asked.resources, asked.gpu_memory, job) {
            Ok(taken) => {
                self.grant((process, shape), taken);
                Attempt::Done
            }
            Err(attempt) => attempt,
        }
    }

    /// Takes `holds` where there is room for all of the shape.
    pub(super) fn take_place(
        &mut self,
        waiter: Waiter,
        shape: ShapeId,
        holds: &ResourceSet,
        gpu_memory: u64,
        job: JobId,
    ) -> Result<Taken, Attempt> {
        let near = self.jobs.get(&job).map(|job| job.spec.driver.machine);
        let is_in_group = matches!(self.shapes.get(shape).map(|shape| &shape.strategy), Some(Strategy::Bundle { .. }));
        if !is_in_group
            && let Some(namespace) = self.namespace_of(job)
            && !self.quotas.allows(&namespace, holds)
        {
            return Err(Attempt::HeldBack(Hold::Quota(namespace)));
        }
        let site = self.find_site(waiter, shape, near).ok_or(Attempt::NoRoom)?;
        self.take_at(site, holds, gpu_memory).ok_or(Attempt::NoRoom)
    }

    /// Where there is room for a shape.
    fn find_site(&mut self, waiter: Waiter, id: ShapeId, near: Option<MachineId>) -> Option<Site> {
        let shape = self.shapes.get(id)?.clone();
        if let Strategy::Bundle { group, index } = shape.strategy {
            let (index, node) = self.groups.find(group, index, &shape, &self.nodes)?;
            return Some(Site::Bundle(group, index, node));
        }
        let rank = self.queue.rank(waiter);
        let reservations = &self.reservations;
        let is_free = |node: &Node| !reservations.is_against(node, waiter, rank, &shape.resources);
        let requirements = self.shapes.requirements(id);
        if let Strategy::Node { node: wanted, soft } = shape.strategy {
            let there = self.nodes.get(wanted).filter(|node| {
                let fits = |id| self.nodes.index.requirement(id).is_some_and(|asked| node.cost_of(asked).is_some());
                requirements.iter().copied().any(fits) && is_free(node)
            });
            if there.is_some() || !soft {
                return there.map(|node| Site::Node(node.info.id));
            }
        }
        requirements.iter().find_map(|id| self.nodes.find(*id, near, is_free)).map(Site::Node)
    }

    pub(super) fn take_at(&mut self, site: Site, resources: &ResourceSet, gpu_memory: u64) -> Option<Taken> {
        let (Site::Node(node) | Site::Bundle(_, _, node)) = site;
        let amounts = self.nodes.get(node)?.amounts(resources, gpu_memory)?.into_owned();
        match site {
            Site::Node(node) => self.nodes.take(node, &amounts, &[]),
            Site::Bundle(group, index, node) => {
                let devices = self.groups.take(group, index, &amounts, &self.nodes.get(node)?.info.devices)?;
                Some(Taken { node, bundle: Some((group, index)), resources: amounts, devices })
            }
        }
    }

    /// Gives back to where it was taken from, and tells those who may use it.
    pub(super) fn give_back(&mut self, taken: &Taken) {
        match taken.bundle {
            None => {
                self.nodes.change(taken.node, |node| node.pool.give_back(&taken.resources, &taken.devices));
                self.freed_on(taken.node);
            }
            Some((group, index)) => {
                self.groups.give_back(group, index, &taken.resources, &taken.devices);
                self.freed_in(group);
            }
        }
    }

    /// Gives back the CPUs of a lease whose process waits, or takes them again.
    pub(super) fn adjust(&mut self, cpus: &Taken, back: bool) {
        if back {
            return self.give_back(cpus);
        }
        match cpus.bundle {
            None => drop(self.nodes.change(cpus.node, |node| node.pool.take_exactly(&cpus.resources, &[]))),
            Some((group, index)) => self.groups.take_exactly(group, index, &cpus.resources, &[]),
        }
    }

    pub(super) fn freed_on(&mut self, node: NodeId) {
        let Some(slot) = self.nodes.slot(node) else { return };
        let could_use: Vec<Class> = {
            let (nodes, shapes, groups) = (&self.nodes, &self.shapes, &self.groups);
            let could_use = |class| match class {
                Class::InGroup(_) => false,
                Class::Shape(shape) => could_use(nodes, shapes, shape, slot),
                Class::Group(group) => groups.could_use(group, nodes, slot),
            };
            self.queue.blocked_where(could_use)
        };
        for class in could_use {
            self.queue.unblock(class);
        }
    }

    pub(super) fn freed_in(&mut self, group: PlacementGroupId) {
        for shape in self.shapes.in_group(group) {
            self.queue.unblock(Class::InGroup(shape));
        }
    }

    /// Fails whoever can never be placed, as far as it does not want to wait for it.
    pub(super) fn refuse_if_infeasible(&mut self, waiter: Waiter) {
        match waiter {
            Waiter::Tasks(process, shape) => {
                let asker = (process, shape);
                let Some(demand) = self.leases.demands.get(&asker).filter(|demand| demand.is_unmet()) else { return };
                let what = demand.name.clone();
                if let Some(error) = self.shape_infeasible(shape, what).or_else(|| self.quota_error(waiter)) {
                    self.refuse_demand(&asker, error);
                }
            }
            Waiter::Actor(actor) => self.refuse_actor_if_infeasible(actor),
            Waiter::Group(group) => self.refuse_group_if_infeasible(group),
        }
    }

    /// What nodes there are has changed for the worse.
    pub(super) fn refuse_the_infeasible(&mut self) {
        for class in self.queue.classes() {
            let Some(first) = self.queue.in_class(class).next() else { continue };
            // What one of a class can never have, none can.
            if self.is_infeasible(first) {
                let all: Vec<Waiter> = self.queue.in_class(class).collect();
                for waiter in all {
                    self.refuse_if_infeasible(waiter);
                }
            }
        }
    }

    fn is_infeasible(&mut self, waiter: Waiter) -> bool {
        match waiter {
            Waiter::Tasks(_, shape) => self.shape_infeasible(shape, String::new()).is_some(),
            Waiter::Actor(actor) => {
                self.actors.shape_of(actor).is_some_and(|shape| self.shape_infeasible(shape, String::new()).is_some())
            }
            Waiter::Group(group) => self.group_infeasible(group).is_some(),
        }
    }

    /// The error of somebody who asks for more than the quota of its namespace could ever allow.
    pub(super) fn quota_error(&self, waiter: Waiter) -> Option<Error> {
        let (what, asked, namespace) = match waiter {
            Waiter::Tasks(process, shape) => {
                let name = self.leases.demands.get(&(process, shape))?.name.clone();
                let shape =
                    self.shapes.get(shape).filter(|shape| !matches!(shape.strategy, Strategy::Bundle { .. }))?;
                (name, Cow::Borrowed(&shape.resources), self.namespace_of(self.job_of(process)?)?)
            }
            Waiter::Actor(actor) => {
                let spec = self.actors.spec(actor)?;
                if matches!(spec.placement.strategy, Strategy::Bundle { .. }) {
                    return None;
                }
                (format!("actor {}", spec.class_name), Cow::Borrowed(&spec.holds), self.namespace_of(spec.job)?)
            }
            Waiter::Group(group) => {
                let (spec, sum) = self.groups.asked(group)?;
                (spec.title(), Cow::Owned(sum), self.namespace_of(spec.job)?)
            }
        };
        let quota = self.quotas.get(&namespace).filter(|_| !self.quotas.could_allow(&namespace, &asked))?;
        let nearest =
            format!("the quota of namespace `{namespace}` is {}; raise it with `wingbeat quota`", quota.limit);
        Some(Error::Infeasible { what, asked: asked.to_string(), nearest })
    }

    pub(super) fn charge(&mut self, job: JobId, taken: &ResourceSet) {
        if let Some(namespace) = self.namespace_of(job) {
            self.quotas.take(&namespace, taken);
        }
    }

    pub(super) fn uncharge(&mut self, job: JobId, taken: &ResourceSet) {
        if let Some(namespace) = self.namespace_of(job)
            && self.quotas.give_back(&namespace, taken)
        {
            self.queue.unpark(&Hold::Quota(namespace));
        }
    }

    /// The namespace of a job, if quotas are of interest at all.
    pub(super) fn namespace_of(&self, job: JobId) -> Option<String> {
        if self.quotas.is_empty() {
            return None;
        }
        self.jobs.get(&job).map(|job| job.spec.namespace.clone())
    }

    /// What the jobs of a namespace hold.
    pub(super) fn used_by(&self, namespace: &str) -> ResourceSet {
        let is_of = |job: JobId| self.jobs.get(&job).is_some_and(|job| job.spec.namespace == namespace);
        let mut used = ResourceSet::new();
        let held = self.leases.leases.values().filter(|lease| lease.taken.bundle.is_none() && !lease.returned);
        for lease in held.filter(|lease| is_of(lease.job)) {
            used.add(&lease.taken.resources);
        }
        for reserved in self.groups.reserved_where(is_of) {
            used.add(&reserved);
        }
        used
    }

    /// From now on, a namespace may hold this much at a time; anything if nothing is said.
    pub(super) fn set_quota(&mut self, namespace: &str, limit: Option<ResourceSet>) {
        match limit {
            None => self.quotas.remove(namespace),
            Some(limit) => {
                let used = self.used_by(namespace);
                self.quotas.set(namespace, limit, used);
                let waiters: Vec<Waiter> = self.queue.waiters().collect();
                for waiter in waiters {
                    self.refuse_if_infeasible(waiter);
                }
            }
        }
        self.queue.unpark(&Hold::Quota(namespace.to_owned()));
    }
}

/// Whether the node in this place has room for the shape now.
fn could_use(nodes: &Nodes, shapes: &Shapes, id: ShapeId, slot: Slot) -> bool {
    let (Some(shape), Some(node)) = (shapes.get(id), nodes.at(slot)) else { return false };
    if let Strategy::Node { node: wanted, soft: false } = shape.strategy
        && wanted != node.info.id
    {
        return false;
    }
    let mut requirements = shapes.requirements(id).iter().filter_map(|id| nodes.index.requirement(*id));
    requirements.any(|requirement| node.cost_of(requirement).is_some())
}
