//! What must hold after every step, for the simulator: computed anew from what is known, and compared with the sums
//! that decisions rely on.

use std::collections::{BTreeMap, BTreeSet};

use wingbeat_core::resources::GPU;
use wingbeat_core::{Amount, LeaseId, NodeId, PlacementGroupId, ProcessId, ResourceSet};

use super::facts::Fact;
use super::lease::Lease;
use super::nodes::{Node, requirements_of};
use super::pool::Pool;
use super::queue::Waiter;
use super::{Job, State};

fn add_devices(to: &mut BTreeMap<u32, Amount>, devices: &[(u32, Amount)]) {
    for (number, amount) in devices {
        let held = to.entry(*number).or_default();
        *held = *held + *amount;
    }
}

/// Whether a pool has free exactly what is in none of these.
fn check_pool(
    what: &str,
    pool: &Pool,
    taken: impl Iterator<Item = (ResourceSet, Vec<(u32, Amount)>)>,
) -> Result<(), String> {
    let mut sum = ResourceSet::new();
    let mut devices = BTreeMap::new();
    for (resources, held) in taken {
        sum.add(&resources);
        add_devices(&mut devices, &held);
    }
    let mut free = pool.total.clone();
    free.subtract(&sum);
    if free != pool.available {
        return Err(format!("{what} should have {free} free, and has {}", pool.available));
    }
    for (number, whole, free) in pool.devices() {
        let held = devices.remove(&number).unwrap_or_default();
        if held > whole {
            return Err(format!("{held} of device {number} of {what} are given away, and it has {whole}"));
        }
        if free + held != whole {
            return Err(format!("device {number} of {what} has {free} free while {held} of {whole} are held"));
        }
    }
    match devices.into_iter().find(|(_, held)| !held.is_zero()) {
        Some((number, _)) => Err(format!("{what} gave away device {number}, which it does not have")),
        None => Ok(()),
    }
}

impl State {
    /// Checks some nodes: no unit and no device is given twice or lost.
    ///
    /// # Errors
    /// What is wrong.
    pub fn audit(&self, nodes: impl IntoIterator<Item = NodeId>) -> Result<(), String> {
        nodes.into_iter().filter_map(|id| self.nodes.get(id)).try_for_each(|node| self.audit_node(node))
    }

    fn audit_node(&self, node: &Node) -> Result<(), String> {
        let known = |id: &LeaseId| self.leases.leases.get(id).ok_or_else(|| format!("{id} is on no list"));
        let leases: Vec<&Lease> = node.leases.iter().map(known).collect::<Result<_, _>>()?;
        if let Some(lease) = leases.iter().find(|lease| lease.taken.node != node.info.id) {
            return Err(format!("a lease of {} is listed under {}", lease.taken.node, node.info.id));
        }
        let held = |lease: &&&Lease| !lease.is_returned();
        let taken = |lease: &&Lease| {
            let taken = lease.still_taken();
            (taken.resources, taken.devices)
        };
        let alone = leases.iter().filter(held).filter(|lease| lease.taken.bundle.is_none());
        let mut bundles = Vec::new();
        for (group, index) in &node.bundles {
            let placed = self.groups.get(*group).and_then(|group| group.placed.get(*index as usize)?.as_ref());
            let placed = placed.ok_or_else(|| format!("bundle {index} of {group} is on no list"))?;
            bundles.push((placed.taken.resources.clone(), placed.taken.devices.clone()));
            let inside = leases.iter().filter(held).filter(|lease| lease.taken.bundle == Some((*group, *index)));
            check_pool(&format!("bundle {index} of {group}"), &placed.pool, inside.map(taken))?;
        }
        check_pool(&node.info.id.to_string(), &node.pool, alone.map(taken).chain(bundles))
    }

    /// Checks what some processes ask for: what they hold is theirs, and who lacks something waits.
    ///
    /// # Errors
    /// What is wrong.
    pub fn audit_owners(&self, processes: impl IntoIterator<Item = ProcessId>) -> Result<(), String> {
        for asker in processes.into_iter().flat_map(|process| self.leases.asked_by(process)) {
            let Some(demand) = self.leases.demands.get(&asker) else { continue };
            let is_theirs = |id: &LeaseId| {
                let lease = self.leases.leases.get(id);
                lease.is_some_and(|lease| !lease.is_ending() && lease.holder == super::lease::Holder::Tasks(asker))
            };
            if let Some(lease) = demand.held.iter().find(|lease| !is_theirs(lease)) {
                return Err(format!("{} is known to hold {lease}, which is not its own", asker.0));
            }
            self.audit_demand(asker, demand)?;
        }
        Ok(())
    }

    fn audit_demand(&self, asker: super::lease::Asker, demand: &super::leases::Demand) -> Result<(), String> {
        let waits = |id: &&LeaseId| self.leases.leases.get(id).is_some_and(|lease| !lease.waiting.is_empty());
        let active = demand.held.len() - demand.held.iter().filter(waits).count();
        if active as u32 != demand.active {
            return Err(format!("{} has {active} leases of use, and {} are counted", asker.0, demand.active));
        }
        let waiter = Waiter::Tasks(asker.0, asker.1);
        if demand.is_unmet() != self.queue.contains(waiter) {
            return Err(format!("{} wants more leases and does not wait, or the other way round", asker.0));
        }
        Ok(())
    }

    /// Checks everything that [`State::audit`] does not: who holds, who waits, and what is remembered of both.
    ///
    /// # Errors
    /// What is wrong.
    pub fn audit_all(&self) -> Result<(), String> {
        self.audit(self.nodes.ids())?;
        let mut of_jobs: BTreeMap<wingbeat_core::JobId, u32> = BTreeMap::new();
        let mut held: BTreeMap<super::lease::Asker, BTreeSet<LeaseId>> = BTreeMap::new();
        for (id, lease) in &self.leases.leases {
            *of_jobs.entry(lease.job).or_default() += 1;
            if let super::lease::Holder::Tasks(asker) = lease.holder
                && !lease.is_ending()
            {
                held.entry(asker).or_default().insert(*id);
            }
        }
        for (asker, demand) in &self.leases.demands {
            if held.remove(asker).unwrap_or_default() != demand.held {
                return Err(format!("the leases of {} are not those that it is known to hold", asker.0));
            }
            self.audit_demand(*asker, demand)?;
        }
        if let Some((asker, _)) = held.into_iter().next() {
            return Err(format!("{} holds leases that it never asked for", asker.0));
        }
        self.audit_waiters()?;
        for job in self.actors.jobs_of_living().chain(self.groups.iter().map(|group| group.spec.job)) {
            *of_jobs.entry(job).or_default() += 1;
        }
        for (id, job) in &self.jobs {
            let holds = of_jobs.remove(id).unwrap_or_default();
            if holds != job.holds {
                return Err(format!("{id} holds {holds} things, and {} are counted", job.holds));
            }
        }
        self.audit_shares()?;
        self.audit_quotas()
    }

    /// Nobody waits for a group that is gone.
    fn audit_waiters(&self) -> Result<(), String> {
        for waiter in self.queue.waiters() {
            let shape = self.shape_of(waiter).and_then(|shape| self.shapes.get(shape));
            if let Some((group, _)) = shape.and_then(|shape| shape.bundle())
                && self.groups.get(group).is_none()
                && !self.may_be_told_of_group(group)
            {
                return Err(format!("{waiter:?} waits for something in {group}, which is gone"));
            }
        }
        Ok(())
    }

    fn audit_shares(&self) -> Result<(), String> {
        let mut used: BTreeMap<wingbeat_core::JobId, ResourceSet> = BTreeMap::new();
        for lease in self.leases.leases.values().filter(|lease| lease.taken.bundle.is_none() && !lease.is_returned()) {
            used.entry(lease.job).or_default().add(&lease.still_taken().resources);
        }
        for group in self.groups.iter() {
            for placed in group.placed.iter().flatten() {
                used.entry(group.spec.job).or_default().add(&placed.taken.resources);
            }
        }
        for (id, job) in &self.jobs {
            let used = used.remove(id).unwrap_or_default();
            if used != job.used || self.share_of(&used) != job.share {
                let (counted, share) = (&job.used, job.share);
                return Err(format!("{id} holds {used}, and {counted} are counted, of which {share} is the share"));
            }
        }
        Ok(())
    }

    fn audit_quotas(&self) -> Result<(), String> {
        for (namespace, quota) in self.quotas.iter() {
            let used = self.used_by(namespace);
            if used != quota.used {
                return Err(format!("{namespace} holds {used}, and {} are counted", quota.used));
            }
        }
        Ok(())
    }

    /// Somebody who waits although there is room, if there is such. Only true while fewer wait than are looked at when
    /// something is given back; the others are found as time passes.
    pub fn overlooked(&self) -> Option<String> {
        if !self.queue.has_looked_at_all() || self.cannot_write.is_some() {
            return None;
        }
        self.queue.waiters().find_map(|waiter| {
            if self.queue.held_back(waiter).is_some() {
                return None;
            }
            let standing = self.queue.standing(waiter);
            if let Waiter::Group(group) = waiter {
                return self.group_overlooked(group);
            }
            let shape = self.shapes.get(self.shape_of(waiter)?)?;
            if let Some((group, index)) = shape.bundle() {
                let (index, _) = self.groups.find(group, index, shape, &self.nodes)?;
                return Some(format!("{waiter:?} waits, and bundle {index} of {group} has room"));
            }
            let requirements = requirements_of(shape);
            let fits = |node: &&Node| {
                node.may_serve(shape)
                    && requirements.iter().any(|asked| node.cost_of(asked).is_some())
                    && !self.is_unfit(node, waiter)
                    && !self.is_kept_for_another(node, waiter)
            };
            let node = self.nodes.iter().find(fits)?;
            let kept = self.reservations.on(node.info.id);
            Some(format!(
                "{waiter:?} ({standing:?}) waits for {shape}, and {} has room, kept for {kept:?}; {}",
                node.info.id,
                self.queue.shown(waiter)
            ))
        })
    }

    /// Against whom room is kept changes with what everybody holds: ticks come to them.
    fn is_kept_for_another(&self, node: &Node, waiter: Waiter) -> bool {
        self.reservations.on(node.info.id).is_some_and(|other| other != waiter)
    }

    /// A group of one bundle is as simple as a lease; of several, what fits together is not obvious.
    fn group_overlooked(&self, id: PlacementGroupId) -> Option<String> {
        let group = self.groups.get(id).filter(|group| group.spec.bundles.len() == 1)?;
        let waiter = Waiter::Group(id);
        let asked = &group.spec.bundles[0].resources;
        let fits = |node: &&Node| {
            let mut requirements = group.requirements[0].iter().filter_map(|id| self.nodes.index.requirement(*id));
            requirements.any(|asked| node.cost_of(asked).is_some()) && !self.is_kept_for_another(node, waiter)
        };
        let node = self.nodes.iter().find(fits)?;
        Some(format!("{waiter:?} waits for {asked}, and {} has room", node.info.id))
    }

    /// What would have to be written down to remember this state, in order.
    pub fn durable(&self) -> Vec<Fact> {
        let job = |job: &Job| Fact::Job(Box::new(job.spec.without_local()), !job.is_over);
        let mut facts: Vec<Fact> = self.jobs.values().map(job).collect();
        facts.extend(self.quotas.iter().map(|(name, quota)| Fact::Quota(name.to_owned(), quota.limit.clone())));
        facts.extend(self.groups.iter().map(|group| self.fact_of(group)));
        facts.extend(self.recovering.iter().flat_map(|recovering| recovering.actors()));
        let absent = self.recovering.iter().flat_map(|recovering| recovering.absent_nodes());
        facts.extend(absent);
        facts.extend(self.nodes.iter().map(Node::fact));
        facts.extend(self.actors.durable());
        facts
    }

    /// What a node has free.
    pub fn available(&self, node: NodeId) -> Option<&ResourceSet> {
        self.nodes.get(node).map(|node| &node.pool.available)
    }

    /// All devices of a node are whole again.
    pub fn is_idle(&self, id: NodeId) -> bool {
        self.nodes.get(id).is_some_and(|node| {
            let gpus = node.info.resources.get(GPU);
            node.pool.available == node.info.resources
                && node.leases.is_empty()
                && node.bundles.is_empty()
                && node.pool.devices().all(|(_, whole, free)| whole == free)
                && node.pool.devices().count() as i64 == gpus.units() / Amount::ONE.units()
        })
    }
}
