//! Who of those who wait is placed now, and where.

use std::borrow::Cow;

use wingbeat_core::error::Error;
use wingbeat_core::resources::GPU;
use wingbeat_core::spec::{MachineId, Strategy};
use wingbeat_core::{JobId, NodeId, PlacementGroupId, ProcessId, ResourceSet};

use super::index::Slot;
use super::nodes::{Node, Nodes, Taken};
use super::queue::{Class, Hold, Rank, Standing, Waiter};
use super::shapes::{ShapeId, Shapes};
use super::{Millis, State};

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

/// See [`State::share_of`].
fn share_of(total: &ResourceSet, held: &ResourceSet) -> u64 {
    let share = |name: &str, amount: i64| match total.get(name).units() {
        0 => 0,
        total => (amount.max(0) as u64).saturating_mul(1_000_000) / total as u64,
    };
    held.iter().map(|(name, amount)| share(name, amount.units())).max().unwrap_or(0)
}

impl State {
    /// Places whoever fits, in order, until nobody does. Cheap when nothing changed.
    pub(super) fn serve(&mut self) {
        while self.cannot_write.is_none()
            && let Some((waiter, class)) = self.queue.next()
        {
            match self.try_to_place(waiter) {
                Attempt::Done => {}
                Attempt::HeldBack(hold) => self.queue.park(waiter, hold),
                // Where nothing is kept from anybody, who comes next has no more room.
                Attempt::NoRoom if self.reservations.is_empty() && self.unfit.is_empty() => {
                    self.queue.block_for_all(class)
                }
                Attempt::NoRoom => {
                    self.queue.block(class);
                    // Room that is kept for somebody further back in the class is room for that one alone.
                    for other in self.reservations.waiters() {
                        if other != waiter && self.queue.class(other) == Some(class) {
                            let _ = self.try_to_place(other);
                        }
                    }
                }
            }
        }
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
        let is_in_group = self.shapes.get(shape).is_some_and(|shape| shape.bundle().is_some());
        let namespace = if is_in_group { None } else { self.namespace_of(job) };
        let mut quota = None;
        if let Some(namespace) = namespace {
            if !self.quotas.allows(&namespace, holds) {
                return Err(Attempt::HeldBack(Hold::Quota(namespace)));
            }
            quota = self.quotas.get(&namespace).filter(|_| gpu_memory > 0).cloned().map(|quota| (namespace, quota));
        }
        let site = match &quota {
            None => self.find_site(waiter, shape, near, |_| true),
            Some((namespace, quota)) => {
                // Which part of a GPU some memory is depends on the node.
                let allowed = |node: &Node| {
                    node.amounts(holds, gpu_memory).is_some_and(|amounts| quota.exceeded_by(&amounts).is_none())
                };
                let site = self.find_site(waiter, shape, near, allowed);
                if site.is_none() && self.find_site(waiter, shape, near, |_| true).is_some() {
                    return Err(Attempt::HeldBack(Hold::Quota(namespace.clone())));
                }
                site
            }
        };
        self.take_at(site.ok_or(Attempt::NoRoom)?, holds, gpu_memory).ok_or(Attempt::NoRoom)
    }

    /// Where there is room for a shape, of the nodes that are `allowed`.
    fn find_site(
        &mut self,
        waiter: Waiter,
        id: ShapeId,
        near: Option<MachineId>,
        allowed: impl Fn(&Node) -> bool,
    ) -> Option<Site> {
        let shape = self.shapes.get(id)?.clone();
        if let Some((group, index)) = shape.bundle() {
            let (index, node) = self.groups.find(group, index, &shape, &self.nodes)?;
            return Some(Site::Bundle(group, index, node));
        }
        let standing = self.queue.standing(waiter);
        let (reservations, unfit, job) = (&self.reservations, &self.unfit, self.job_of_waiter(waiter));
        let is_free = |node: &Node| {
            allowed(node)
                && !job.is_some_and(|job| unfit.rests(node.info.id, job))
                && !reservations.is_against(node, waiter, standing, &shape.resources)
        };
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
                Class::InGroup(..) => false,
                Class::Shape(shape, _) => could_use(nodes, shapes, shape, slot),
                Class::Group(group) => groups.could_use(group, nodes, slot),
            };
            self.queue.blocked_where(could_use)
        };
        for class in could_use {
            self.queue.unblock(class);
        }
        // However many come before, what is kept for somebody is looked at by that one.
        if let Some(class) = self.reservations.on(node).and_then(|waiter| self.queue.class(waiter)) {
            self.queue.unblock(class);
        }
    }

    pub(super) fn freed_in(&mut self, group: PlacementGroupId) {
        for shape in self.shapes.in_group(group) {
            self.queue.unblock_for_all(Class::InGroup(shape, None));
        }
    }

    /// Fails whoever can never be placed, as far as it does not want to wait for it.
    pub(super) fn refuse_if_infeasible(&mut self, waiter: Waiter) {
        match waiter {
            Waiter::Tasks(process, shape) => {
                let asker = (process, shape);
                let Some(demand) = self.leases.demands.get(&asker).filter(|demand| demand.is_unmet()) else { return };
                let (what, since) = (demand.name.clone(), self.job_began(self.job_of(process)));
                let error = self.shape_infeasible(shape, what, since).or_else(|| self.quota_error(waiter));
                if let Some(error) = error {
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
            // What a node can hold now for one of a class, it can for all.
            if self.is_infeasible(first) {
                let all: Vec<Waiter> = self.queue.in_class(class).collect();
                for waiter in all {
                    self.refuse_if_infeasible(waiter);
                }
            }
        }
        for waiter in self.queue.set_aside() {
            self.refuse_if_infeasible(waiter);
        }
    }

    /// What somebody asks for; none for a placement group, which asks for several.
    pub(super) fn shape_of(&self, waiter: Waiter) -> Option<ShapeId> {
        match waiter {
            Waiter::Tasks(_, shape) => Some(shape),
            Waiter::Actor(actor) => self.actors.shape_of(actor),
            Waiter::Group(_) => None,
        }
    }

    /// Whether no node could hold it now.
    fn is_infeasible(&mut self, waiter: Waiter) -> bool {
        if let Waiter::Group(group) = waiter {
            return self.group_infeasible(group).is_some();
        }
        self.shape_of(waiter).is_some_and(|shape| self.shape_infeasible(shape, String::new(), Millis::MAX).is_some())
    }

    /// The error of somebody who asks for more than the quota of its namespace could ever allow.
    pub(super) fn quota_error(&self, waiter: Waiter) -> Option<Error> {
        let (what, asked, namespace) = match waiter {
            Waiter::Tasks(process, shape) => {
                let name = self.leases.demands.get(&(process, shape))?.name.clone();
                let namespace = self.namespace_of(self.job_of(process)?)?;
                let shape = self.shapes.get(shape).filter(|shape| shape.bundle().is_none())?;
                (name, self.least_amounts(&shape.resources, shape.gpu_memory), namespace)
            }
            Waiter::Actor(actor) => {
                let spec = self.actors.spec(actor)?;
                if spec.placement.bundle().is_some() {
                    return None;
                }
                let namespace = self.namespace_of(spec.job)?;
                let asked = self.least_amounts(&spec.holds, spec.placement.gpu_memory);
                (format!("actor {}", spec.class_name), asked, namespace)
            }
            Waiter::Group(group) => {
                let (spec, _) = self.groups.asked(group)?;
                let namespace = self.namespace_of(spec.job)?;
                let mut sum = ResourceSet::new();
                for bundle in &spec.bundles {
                    sum.add(&self.least_amounts(&bundle.resources, bundle.gpu_memory));
                }
                (spec.title(), Cow::Owned(sum), namespace)
            }
        };
        let quota = self.quotas.get(&namespace).filter(|_| !self.quotas.could_allow(&namespace, &asked))?;
        let nearest =
            format!("the quota of namespace `{namespace}` is {}; raise it with `wingbeat quota`", quota.limit);
        Some(Error::Infeasible { what, asked: asked.to_string(), nearest })
    }

    /// What `resources`, and memory of one device, come to on the node where that is least.
    fn least_amounts<'a>(&self, resources: &'a ResourceSet, gpu_memory: u64) -> Cow<'a, ResourceSet> {
        if gpu_memory == 0 {
            return Cow::Borrowed(resources);
        }
        let amounts = self.nodes.iter().filter_map(|node| node.amounts(resources, gpu_memory));
        amounts.min_by_key(|amounts| amounts.get(GPU)).unwrap_or(Cow::Borrowed(resources))
    }

    /// A job holds this from now on.
    pub(super) fn charge(&mut self, job: JobId, taken: &ResourceSet) {
        self.change_use(job, |used| used.add(taken));
        if let Some(namespace) = self.namespace_of(job) {
            self.quotas.take(&namespace, taken);
        }
    }

    /// A job does not hold this any more.
    pub(super) fn uncharge(&mut self, job: JobId, taken: &ResourceSet) {
        self.change_use(job, |used| used.subtract(taken));
        if let Some(namespace) = self.namespace_of(job)
            && self.quotas.give_back(&namespace, taken)
        {
            self.queue.unpark(&Hold::Quota(namespace));
        }
    }

    /// How much of the cluster some resources are: in millionths of what there is of the scarcest of them.
    pub(super) fn share_of(&self, held: &ResourceSet) -> u64 {
        share_of(self.nodes.total(), held)
    }

    fn change_use(&mut self, id: JobId, change: impl FnOnce(&mut ResourceSet)) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        change(&mut job.used);
        let share = share_of(self.nodes.total(), &job.used);
        if share != job.share {
            job.share = share;
            self.queue.set_share(Some(id), share);
        }
    }

    /// What there is has changed, and with it how much of that everybody holds.
    pub(super) fn shares_changed(&mut self) {
        for job in self.jobs.keys().copied().collect::<Vec<_>>() {
            self.change_use(job, |_| {});
        }
    }

    /// Where somebody stands who waits in the name of a job.
    pub(super) fn standing(&self, job: Option<JobId>, has: u32, turn: u64) -> Standing {
        let known = job.and_then(|job| self.jobs.get(&job));
        let (priority, share) = known.map_or((0, 0), |job| (job.spec.priority, job.share));
        let rank = Rank { priority: std::cmp::Reverse(priority), has, turn };
        Standing { rank, job: job.filter(|_| known.is_some()), share, hungry: None }
    }

    /// Recalls leases of a job's namespace that are above its quota.
    pub(super) fn recall_over_quota_of(&mut self, job: JobId) {
        if let Some(namespace) = self.namespace_of(job) {
            self.recall_over_quota(&namespace);
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
        let held = self.leases.leases.values().filter(|lease| lease.taken.bundle.is_none() && !lease.is_returned());
        for lease in held.filter(|lease| is_of(lease.job)) {
            used.add(&lease.still_taken().resources);
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
                self.recall_over_quota(namespace);
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
    if !node.may_serve(shape) {
        return false;
    }
    let mut requirements = shapes.requirements(id).iter().filter_map(|id| nodes.index.requirement(*id));
    requirements.any(|requirement| node.cost_of(requirement).is_some())
}
