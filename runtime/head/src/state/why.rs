//! Why something waits: from what the scheduler itself looks at.

use std::collections::{BTreeMap, BTreeSet};

use wingbeat_core::resources::GPU;
use wingbeat_core::spec::{Shape, Strategy};
use wingbeat_core::{ActorId, Amount, JobId, LeaseId, NodeId, PlacementGroupId, ProcessId, ResourceSet};
use wingbeat_net::messages::{Explanation, Subject};

use super::actors::Standing;
use super::lease::Lease;
use super::nodes::{Node, requirements_of};
use super::queue::{Hold, Waiter};
use super::shapes::ShapeId;
use super::{Millis, State};

/// Nodes and holders that are named one by one; of others, only the number is told.
const NAMED: usize = 8;

/// For how long, in words.
pub(super) fn ago(millis: Millis) -> String {
    match millis {
        0..1_000 => format!("{millis} ms"),
        1_000..120_000 => format!("{} s", millis / 1_000),
        120_000..7_200_000 => format!("{} min", millis / 60_000),
        _ => format!("{} h", millis / 3_600_000),
    }
}

fn title(node: &Node) -> String {
    format!("{} ({})", node.info.hostname, node.info.id)
}

/// What is said of a node that has no connection to the head; none of others.
fn suspicion(node: &Node, now: Millis) -> Option<String> {
    let since = node.suspect?;
    Some(format!(
        "is suspect: it has had no connection to the head for {}, and may come back",
        ago(now.saturating_sub(since))
    ))
}

fn first_of(mut all: Vec<String>, of_what: &str) -> Vec<String> {
    if all.len() > NAMED {
        let more = all.len() - NAMED;
        all.truncate(NAMED);
        all.push(format!("and {more} more {of_what}"));
    }
    all
}

/// Why a namespace with a quota waits for a moment.
const USE_UNKNOWN: &str = "the head was started again: until the nodes have said what runs on them, \
                           namespaces with a quota get nothing more";

impl State {
    /// Why something waits, or where it runs. None for what this head does not know.
    pub fn explain(&mut self, now: Millis, subject: Subject) -> Option<Explanation> {
        // Nothing may have happened for long.
        self.now = self.now.max(now);
        let mut explanation = match subject {
            Subject::Actor(id) => self.explain_actor(id)?,
            Subject::PlacementGroup(id) => self.explain_group(id)?,
            Subject::Node(id) => self.explain_node(id)?,
            Subject::Process(id) => self.explain_process(id)?,
            Subject::Pid(pid, node) => {
                self.explain_process(the_one_with_pid(pid, &self.processes_with_pid(pid, node)).ok()??.0)?
            }
            // Its owner knows it.
            Subject::Task(_) => return None,
        };
        explanation.since_ms = explanation.since_ms.map(|since| now.saturating_sub(since));
        Some(explanation)
    }

    /// Goes on explaining a task that waits for a lease of this shape.
    pub fn explain_demand(
        &mut self,
        now: Millis,
        process: ProcessId,
        shape: &Shape,
        mut so_far: Explanation,
    ) -> Explanation {
        self.now = self.now.max(now);
        let Some(id) = self.shapes.id_of(shape) else {
            so_far.reasons.push("the head has not heard of it yet; ask again".into());
            return so_far;
        };
        let waiter = Waiter::Tasks(process, id);
        if self.queue.contains(waiter) {
            so_far.since_ms = so_far.since_ms.or(self.queue.since(waiter).map(|since| now.saturating_sub(since)));
            self.explain_shape(waiter, shape, &mut so_far);
            return so_far;
        }
        match self.leases.demands.get(&(process, id)) {
            Some(demand) => {
                let starting = demand.held.iter().filter_map(|lease| self.leases.leases.get(lease));
                let starting = starting.filter(|lease| lease.server().is_none()).count();
                so_far.reasons.push(match starting {
                    0 => format!("{} leases were granted, and it is queued for one of them", demand.held.len()),
                    count => format!("{count} leases were granted, and their worker processes are being started"),
                });
            }
            None => so_far.reasons.push("the head has not heard of it yet; ask again".into()),
        }
        so_far
    }

    /// The worker process of a lease, once there is one, and its node.
    #[must_use]
    pub fn process_of_lease(&self, lease: LeaseId) -> Option<(ProcessId, NodeId)> {
        let lease = self.leases.leases.get(&lease)?;
        Some((lease.server()?.0, lease.taken.node))
    }

    /// The node of a worker process that serves a lease.
    #[must_use]
    pub fn node_of_process(&self, process: ProcessId) -> Option<NodeId> {
        let serves = |lease: &&Lease| lease.server().is_some_and(|(worker, _)| worker == process);
        self.leases.leases.values().find(serves).map(|lease| lease.taken.node)
    }

    /// The process of an actor that lives.
    #[must_use]
    pub fn process_of_actor(&self, actor: ActorId) -> Option<(ProcessId, NodeId)> {
        match self.actors.standing(actor)?.1 {
            Standing::Starting { lease, .. } | Standing::Alive { lease } => self.process_of_lease(lease),
            _ => None,
        }
    }

    /// The worker processes that run something of a job, but for those of its detached actors, which outlive it. None if there is no such job.
    #[must_use]
    pub fn processes_of_job(&self, id: JobId) -> Option<Vec<ProcessId>> {
        self.jobs.get(&id)?;
        let rows = self.actors.rows_after(None).filter(|row| row.spec.job == id && row.spec.detached);
        let detached = rows.filter_map(|row| self.process_of_actor(row.spec.id)).map(|(process, _)| process);
        let detached: BTreeSet<ProcessId> = detached.collect();
        let leases = self.leases.leases.values().filter(|lease| lease.job == id);
        let processes: BTreeSet<ProcessId> = leases.filter_map(|lease| Some(lease.server()?.0)).collect();
        Some(processes.difference(&detached).copied().collect())
    }

    /// The worker processes with this process id, which each machine gives out for itself, and their nodes.
    pub fn processes_with_pid(&self, pid: u32, on: Option<NodeId>) -> BTreeMap<ProcessId, NodeId> {
        let leases = self.leases.leases.values().filter(|lease| on.is_none_or(|node| lease.taken.node == node));
        let found = leases
            .filter_map(|lease| lease.server().filter(|(_, other)| *other == pid).map(|(process, _)| (process, lease)));
        found.map(|(process, lease)| (process, lease.taken.node)).collect()
    }

    /// Goes on explaining a task on a lease.
    pub fn explain_lease(&self, now: Millis, id: LeaseId, mut so_far: Explanation) -> Explanation {
        if let Some(lease) = self.leases.leases.get(&id) {
            let pid = lease.server().map_or_else(String::new, |(_, pid)| format!(", pid {pid}"));
            let held = lease.still_taken();
            so_far.reasons.push(format!(
                "{id} on {}{pid} holds {} for {}",
                self.node_title(lease.taken.node),
                self.held_by_lease(lease.taken.node, &held.resources, &held.devices),
                ago(now.saturating_sub(lease.since)),
            ));
            if let Some(node) = self.nodes.get(lease.taken.node)
                && let Some(suspicion) = suspicion(node, now)
            {
                so_far.reasons.push(format!(
                    "{} {suspicion}: what runs there is not started again before it is lost",
                    title(node)
                ));
            }
            if let Some((worker, _)) = lease.server().filter(|_| !lease.waiting.is_empty()) {
                let waits = self.waits.of(worker).map(|wait| {
                    let on: Vec<String> = wait.on.iter().map(|(task, _)| task.to_string()).collect();
                    let on = if on.is_empty() { "something".into() } else { first_of(on, "tasks").join(", ") };
                    format!("{} waits for {on}; others use its CPUs meanwhile", wait.name)
                });
                so_far.reasons.extend(first_of(waits.collect(), "executions"));
            }
        }
        so_far
    }

    fn node_title(&self, id: NodeId) -> String {
        self.nodes.get(id).map_or_else(|| id.to_string(), title)
    }

    fn held_by_lease(&self, node: NodeId, resources: &ResourceSet, devices: &[(u32, Amount)]) -> String {
        if devices.is_empty() {
            return resources.to_string();
        }
        let numbers: Vec<u32> = devices.iter().map(|(number, _)| *number).collect();
        let shown: Vec<String> = numbers.iter().map(u32::to_string).collect();
        let span = self.nodes.get(node).map(|node| super::pool::Span::of(&numbers, &node.info.devices));
        let span = span.map(|span| format!(", {}", span.shown())).unwrap_or_default();
        format!("{resources} (GPU {}{span})", shown.join(" and "))
    }

    fn explain_actor(&self, id: ActorId) -> Option<Explanation> {
        let (spec, standing, since) = self.actors.standing(id)?;
        let name = spec.name.as_ref().map(|name| format!(" `{}`", name.name)).unwrap_or_default();
        let mut explanation = Explanation {
            subject: format!("actor {}{name} ({id})", spec.class_name),
            since_ms: Some(since),
            ..Explanation::default()
        };
        match standing {
            Standing::Pending { after } => {
                explanation.state = "waits to be placed".into();
                if let Some(cause) = after {
                    explanation.reasons.push(format!("its last life ended: {cause}"));
                }
                let shape = Self::placement_of(spec);
                self.explain_shape(Waiter::Actor(id), &shape, &mut explanation);
            }
            Standing::Awaiting { earlier } => {
                explanation.state = "waits until its last life has ended".into();
                explanation = self.explain_lease(self.now, earlier, explanation);
            }
            Standing::Resting { until, quick, after } => {
                explanation.state = format!("rests for another {}", ago(until.saturating_sub(self.now)));
                explanation.reasons.push(format!("it died {quick} times in a row soon after it was started"));
                explanation.reasons.extend(after.map(|cause| format!("its last life ended: {cause}")));
                explanation.help.push("mend what ends it; its last lines of stderr are in the cause above".into());
            }
            Standing::Starting { node, lease, has_process } => {
                explanation.state = if has_process {
                    "waits for its constructor to return".into()
                } else {
                    "waits for its worker process to start".into()
                };
                explanation = self.explain_lease(self.now, lease, explanation);
                if !has_process && self.nodes.get(node).is_some() {
                    let hint = "if it stays so, look at the log of that node's `wingbeat worker`";
                    explanation.help.push(hint.into());
                }
            }
            Standing::Alive { lease } => {
                explanation.state = "is alive".into();
                explanation = self.explain_lease(self.now, lease, explanation);
            }
            Standing::Dead { cause } => {
                explanation.state = "is dead".into();
                explanation.reasons.push(cause.to_string());
            }
        }
        Some(explanation)
    }

    fn explain_process(&self, id: ProcessId) -> Option<Explanation> {
        let job = self.job_of(id).and_then(|job| self.jobs.get(&job));
        let name = job.map(|job| format!(" of job {}", job.spec.name)).unwrap_or_default();
        let mut explanation = Explanation { subject: format!("{id}{name}"), ..Explanation::default() };
        let mut waits = 0;
        for asker in self.leases.asked_by(id) {
            let waiter = Waiter::Tasks(asker.0, asker.1);
            let (Some(demand), Some(shape)) = (self.leases.demands.get(&asker), self.shapes.get(asker.1)) else {
                continue;
            };
            if self.queue.contains(waiter) {
                waits += 1;
                let more = demand.wanted - demand.held.len() as u32;
                explanation.reasons.push(format!("{} wants {more} more leases", demand.name));
                explanation.since_ms = explanation.since_ms.or(self.queue.since(waiter));
                self.explain_shape(waiter, shape, &mut explanation);
            } else {
                explanation.reasons.push(format!("{} has the {} leases that it wants", demand.name, demand.held.len()));
            }
        }
        explanation.state = match waits {
            0 if explanation.reasons.is_empty() => "asks for nothing".into(),
            0 => "has what it asks for".into(),
            _ => "waits for leases".into(),
        };
        (job.is_some() || self.connected.contains(&id)).then_some(explanation)
    }

    fn explain_node(&self, id: NodeId) -> Option<Explanation> {
        let Some(node) = self.nodes.get(id) else { return self.explain_lost_node(id) };
        let mut explanation =
            Explanation { subject: title(node), state: "takes work".into(), ..Explanation::default() };
        if let Some(drain) = &node.draining {
            explanation.state = format!("is being drained ({})", drain.as_asked.why);
            explanation.reasons.push(match drain.deadline.checked_sub(self.now) {
                Some(left) if left > 0 => format!("what still runs is moved in {}", ago(left)),
                _ => "what still ran was told to end".into(),
            });
        }
        if let Some(suspicion) = suspicion(node, self.now) {
            explanation.state = suspicion;
            explanation
                .reasons
                .push("nothing new is placed there, and what runs there is not started again elsewhere yet".into());
        }
        for (device, who) in &node.held {
            explanation.reasons.push(format!("GPU {device} is given to nobody: {who}"));
        }
        explanation.holders = self.holders(&[node], &node.info.resources);
        Some(explanation)
    }

    /// What is said of a node that has no connection to the head, with its host; none of others.
    pub(crate) fn suspicion_of(&self, now: Millis, node: NodeId) -> Option<String> {
        let node = self.nodes.get(node)?;
        Some(format!("{} {}", title(node), suspicion(node, now)?))
    }

    fn explain_lost_node(&self, id: NodeId) -> Option<Explanation> {
        let lost = self.nodes.lost(id)?;
        let what_follows =
            "what ran there runs elsewhere, or has failed; a worker that is started again is another node";
        Some(Explanation {
            subject: format!("{} ({id})", lost.hostname),
            state: "is lost".into(),
            since_ms: Some(lost.at),
            reasons: vec![lost.why.clone(), what_follows.into()],
            ..Explanation::default()
        })
    }

    /// Why a node is lost, as far as that is remembered.
    pub(crate) fn why_lost(&self, node: NodeId) -> Option<&str> {
        self.nodes.lost(node).map(|lost| lost.why.as_str())
    }

    /// A job, and what decides how soon its work is placed, for people.
    fn title_of_job(&self, job: JobId) -> String {
        let Some(spec) = self.jobs.get(&job).map(|job| &job.spec) else { return job.to_string() };
        let is_own = spec.namespace == job.to_string();
        let namespace = if is_own { String::new() } else { format!(", namespace `{}`", spec.namespace) };
        let priority = if spec.priority == 0 { String::new() } else { format!(", priority {}", spec.priority) };
        format!("job {} ({job}{namespace}{priority})", spec.name)
    }

    fn explain_group(&self, id: PlacementGroupId) -> Option<Explanation> {
        let Some(group) = self.groups.get(id) else {
            let cause = self.groups.cause_of_end(id)?;
            let state = "is gone".into();
            return Some(Explanation {
                subject: id.to_string(),
                state,
                reasons: vec![cause.to_string()],
                ..Explanation::default()
            });
        };
        let (asked, job) = (super::gangs::shown(&group.spec), self.title_of_job(group.spec.job));
        let mut explanation =
            Explanation { subject: format!("{} of {job}: {asked}", group.spec.title()), ..Explanation::default() };
        let waiter = Waiter::Group(id);
        if group.is_placed() {
            explanation.state = "is placed".into();
            for (index, placed) in group.placed.iter().enumerate() {
                let Some(placed) = placed else { continue };
                let held = self.held_by_lease(placed.taken.node, &placed.taken.resources, &placed.taken.devices);
                explanation.reasons.push(format!("bundle {index}: {held} on {}", self.node_title(placed.taken.node)));
            }
            explanation.reasons = first_of(explanation.reasons, "bundles");
            for (node, (devices, span)) in group.spans(&self.nodes) {
                let devices: Vec<String> = devices.iter().map(u32::to_string).collect();
                let text = format!("its GPUs {} on {} are {}", devices.join(", "), self.node_title(node), span.shown());
                explanation.reasons.push(text);
            }
            return Some(explanation);
        }
        explanation.state = "waits for its bundles to be placed, all at once".into();
        explanation.since_ms = self.queue.since(waiter);
        if !self.queue.contains(waiter) {
            explanation
                .reasons
                .push("nodes that were there before the head was started again may still come back".into());
            return Some(explanation);
        }
        if self.explain_hold(waiter, &mut explanation) {
            return Some(explanation);
        }
        let mut kinds: BTreeMap<String, (Vec<usize>, usize)> = BTreeMap::new();
        let mut with_room = std::collections::BTreeSet::new();
        for index in group.missing() {
            let bundle = &group.spec.bundles[index];
            let shape = Shape {
                resources: bundle.resources.clone(),
                gpu_memory: bundle.gpu_memory,
                labels: bundle.labels.clone(),
                ..Shape::default()
            };
            let kind = kinds.entry(shape.to_string()).or_default();
            if kind.0.is_empty() {
                let requirements = requirements_of(&shape);
                let fits = |node: &&Node| requirements.iter().any(|asked| node.cost_of(asked).is_some());
                let fitting: Vec<NodeId> = self.nodes.iter().filter(fits).map(|node| node.info.id).collect();
                kind.1 = fitting.len();
                with_room.extend(fitting);
            }
            kind.0.push(index);
        }
        let nodes = self.nodes.len();
        for (kind, (bundles, room)) in &kinds {
            explanation.reasons.push(match bundles.len() {
                1 => format!("a bundle of {kind}: {room} of {nodes} nodes have room for it"),
                count => format!("{count} bundles of {kind}: {room} of {nodes} nodes have room for one"),
            });
        }
        use wingbeat_core::spec::PlacementStrategy::{Pack, Spread, StrictPack, StrictSpread};
        match group.spec.strategy {
            _ if group.missing().count() == 1 => {}
            StrictPack => explanation.reasons.push("all of them must fit on one node together".into()),
            StrictSpread => {
                let text = format!("each needs a node of its own, and {} nodes have room for any", with_room.len());
                explanation.reasons.push(text);
            }
            Pack | Spread => explanation.reasons.push("they do not all fit at the same time".into()),
        }
        let kept = self.reservations.nodes_of(waiter);
        if !kept.is_empty() {
            let kept = kept.into_iter().map(|node| self.node_title(node)).collect();
            let kept = first_of(kept, "nodes").join(", ");
            explanation.reasons.push(format!("room is kept for it on {kept}, until what runs there is done"));
        }
        let missing = |node: &&Node| !with_room.contains(&node.info.id) || group.spec.strategy == StrictPack;
        let nodes: Vec<&Node> = self.nodes.iter().filter(missing).collect();
        // What one more node must have for all of it to fit, whatever else there is.
        let mut needed = Shape::default();
        let apart = group.spec.strategy == StrictSpread;
        let mut labels = None;
        for index in group.missing() {
            let bundle = &group.spec.bundles[index];
            for (name, amount) in bundle.resources.iter() {
                let so_far = needed.resources.get(name);
                let amount = if apart { so_far.max(amount) } else { so_far + amount };
                needed.resources.set(name, amount);
            }
            needed.gpu_memory = needed.gpu_memory.max(bundle.gpu_memory);
            labels = Some(match labels {
                Some(others) if others != bundle.labels => Vec::new(),
                _ => bundle.labels.clone(),
            });
        }
        needed.labels = labels.unwrap_or_default();
        self.explain_nodes(waiter, &needed, &nodes, &mut explanation);
        explanation.holders = self.holders(&nodes, &scarce_of(&needed));
        if !explanation.holders.is_empty() {
            explanation.help.push("wait for one of the holders, or end it".into());
        }
        let short = group.missing().count().saturating_sub(with_room.len()).max(1);
        explanation.help.push(match short {
            count if apart && count > 1 => format!("add {count} nodes, each with {}", node_for(&needed)),
            _ => format!("add a node with {}", node_for(&needed)),
        });
        Some(explanation)
    }

    /// Whether something else than room holds a waiter back, which is then explained.
    fn explain_hold(&self, waiter: Waiter, explanation: &mut Explanation) -> bool {
        if let Some(why) = &self.cannot_write {
            explanation.reasons.push(journal_fails(why));
            explanation.help.push("make room if its disk is full, or see the head's log".into());
            return true;
        }
        match self.queue.held_back(waiter) {
            Some(Hold::Quota(namespace)) => {
                if self.quotas.is_use_unknown {
                    explanation.reasons.push(USE_UNKNOWN.into());
                    return true;
                }
                if let Some(quota) = self.quotas.get(namespace) {
                    explanation.reasons.push(format!(
                        "namespace `{namespace}` may hold {} at a time, and holds {}",
                        quota.limit, quota.used
                    ));
                }
                let all: Vec<&Node> = self.nodes.iter().collect();
                let of_namespace = |job| self.jobs.get(&job).is_some_and(|job| job.spec.namespace == *namespace);
                explanation.holders = self.holders_where(&all, &ResourceSet::new(), of_namespace);
                explanation.help.push(format!(
                    "wait until something of `{namespace}` ends, or raise the quota with `wingbeat quota {namespace} …`"
                ));
                true
            }
            Some(Hold::UnknownJob(process)) => {
                explanation.reasons.push(format!("the node of {process} has not yet said that it runs"));
                true
            }
            None => false,
        }
    }

    fn explain_shape(&self, waiter: Waiter, shape: &Shape, explanation: &mut Explanation) {
        if self.explain_hold(waiter, explanation) {
            explanation.reasons.insert(0, format!("asks for {shape}"));
            return;
        }
        if let Strategy::Bundle { group, index } = shape.strategy {
            explanation.reasons.push(format!("asks for {shape}"));
            return self.explain_bundle(group, index, shape, explanation);
        }
        let nodes = self.explain_places(waiter, shape, explanation);
        let must_be_on = match &shape.strategy {
            Strategy::Node { node, soft: false } => Some(*node),
            _ => None,
        };
        if nodes.is_empty() {
            let help = match must_be_on.filter(|_| !self.nodes.offer_nothing()) {
                Some(_) => "ask for another node, or softly for this one",
                None => "start one with `wingbeat worker --head <this head>`",
            };
            return explanation.help.push(help.into());
        }
        let requirements = requirements_of(shape);
        let could_hold = |node: &&Node| requirements.iter().any(|asked| node.could_hold(asked));
        let able: Vec<&Node> = nodes.into_iter().filter(could_hold).collect();
        explanation.holders = self.holders(&able, &scarce_of(shape));
        let before = self.served_before(waiter, shape, &able);
        if before > 0 {
            explanation.reasons.push(format!(
                "{before} others are served before it, of those that these nodes could serve: of more important jobs, \
                 of jobs that hold less, or waiting longer"
            ));
        }
        if able.is_empty() {
            explanation.help.push("no node could ever hold it: add one that could, or ask for less".into());
        } else if !explanation.holders.is_empty() {
            explanation.help.push("wait for one of the holders, or end it".into());
        }
        match must_be_on {
            None => explanation.help.push(format!("add a node with {}", node_for(shape))),
            Some(id) if self.nodes.get(id).is_some_and(|node| node.draining.is_some()) => {
                explanation.help.push(format!("let the node take work again with `wingbeat drain {id} --undo`"));
            }
            Some(_) => explanation.help.push("ask for another node, or softly for this one".into()),
        }
    }

    /// What a shape asks for, and what each node on which it may be lacks. Answers with those nodes.
    fn explain_places(&self, waiter: Waiter, shape: &Shape, explanation: &mut Explanation) -> Vec<&Node> {
        explanation.reasons.push(format!("asks for {shape}"));
        if self.nodes.offer_nothing() {
            explanation.reasons.push("no node is there".into());
        }
        let nodes: Vec<&Node> = match &shape.strategy {
            Strategy::Node { node, soft: false } => {
                let node = self.nodes.get(*node).ok_or(*node);
                if let Err(id) = node
                    && !self.nodes.offer_nothing()
                {
                    explanation.reasons.push(format!("{id}, where it must be, is not there"));
                }
                node.into_iter().collect()
            }
            _ => self.nodes.iter().filter(|node| !node.info.resources.is_empty()).collect(),
        };
        self.explain_nodes(waiter, shape, &nodes, explanation);
        let requirements = requirements_of(shape);
        let could_hold = |node: &&Node| requirements.iter().any(|asked| node.could_hold(asked));
        if !nodes.iter().any(could_hold)
            && let Some((at, node)) = self.nodes.former(shape, 0)
        {
            let found = ago(self.now.saturating_sub(at));
            explanation.reasons.push(format!(
                "{}, which could hold it, is lost, as the head found {found} ago: it waits for such a node",
                title(node)
            ));
        }
        nodes
    }

    /// How many wait for something that one of these nodes could hold too, and are served before this one.
    fn served_before(&self, waiter: Waiter, shape: &Shape, nodes: &[&Node]) -> usize {
        let mine = scarce_of(shape);
        let mut competes: BTreeMap<ShapeId, bool> = BTreeMap::new();
        let others = self.queue.served_before(waiter);
        let counted = others.filter(|other| {
            let id = match other {
                Waiter::Tasks(_, shape) => Some(*shape),
                Waiter::Actor(actor) => self.actors.shape_of(*actor),
                Waiter::Group(group) => {
                    let asked = self.groups.asked(*group);
                    return asked.is_some_and(|(_, sum)| sum.iter().any(|(name, _)| !mine.get(name).is_zero()));
                }
            };
            id.is_some_and(|id| {
                *competes.entry(id).or_insert_with(|| {
                    let Some(other) = self.shapes.get(id) else { return false };
                    let shares = scarce_of(other).iter().any(|(name, _)| !mine.get(name).is_zero());
                    let requirements = requirements_of(other);
                    let could = |node: &&Node| match other.strategy {
                        Strategy::Bundle { .. } => false,
                        Strategy::Node { node: wanted, soft: false } if wanted != node.info.id => false,
                        _ => requirements.iter().any(|asked| node.could_hold(asked)),
                    };
                    shares && nodes.iter().any(could)
                })
            })
        });
        counted.count()
    }

    /// What each node lacks.
    fn explain_nodes(&self, waiter: Waiter, shape: &Shape, nodes: &[&Node], explanation: &mut Explanation) {
        let standing = self.queue.standing(waiter);
        let requirements = requirements_of(shape);
        let reasons = nodes.iter().take(NAMED).map(|node| {
            let lacks = if let Some(drain) = &node.draining {
                format!("is being drained ({})", drain.as_asked.why)
            } else if let Some(suspicion) = suspicion(node, self.now) {
                suspicion
            } else if let Some(why) = self.label_mismatch(node, shape) {
                why
            } else if let Some(needed) = node.amounts(&shape.resources, shape.gpu_memory) {
                let missing = node.pool.missing(&needed);
                let held: Vec<String> =
                    node.held.iter().map(|(device, who)| format!("GPU {device} is held: {who}")).collect();
                match (missing.is_empty(), self.reservations.on(node.info.id)) {
                    (false, _) if !held.is_empty() => format!("has {}; {}", missing.join(", "), held.join("; ")),
                    (false, _) => format!("has {}", missing.join(", ")),
                    (true, Some(other)) if self.reservations.is_against(node, waiter, standing, &needed) => {
                        format!("has room, but it is kept for {}, which waits longer", self.waiter_title(other))
                    }
                    (true, _) if requirements.iter().any(|asked| node.cost_of(asked).is_some()) => {
                        "has room for this".into()
                    }
                    (true, _) => format!("has too few whole GPUs free; {}", held.join("; ")),
                }
            } else {
                "has no GPU that is known to have so much memory".into()
            };
            format!("{} {lacks}", title(node))
        });
        explanation.reasons.extend(reasons);
        if nodes.len() > NAMED {
            explanation.reasons.push(format!("and {} more nodes", nodes.len() - NAMED));
        }
    }

    fn label_mismatch(&self, node: &Node, shape: &Shape) -> Option<String> {
        let failing = shape.labels.iter().map(|selector| {
            selector.failing(&node.info.labels).map(|why| format!("does not match `{selector}`: {why}"))
        });
        // One that matches is enough.
        let failing: Option<Vec<String>> = failing.collect();
        failing.filter(|failing| !failing.is_empty()).map(|failing| failing.join(" and "))
    }

    fn explain_bundle(
        &self,
        group: PlacementGroupId,
        index: Option<u32>,
        shape: &Shape,
        explanation: &mut Explanation,
    ) {
        let Some(known) = self.groups.get(group) else {
            explanation.reasons.push(format!("{group}, in which it must be, is gone"));
            return;
        };
        if !known.is_placed() {
            explanation.reasons.push(format!("{} is not placed", known.spec.title()));
            explanation.help.push(format!("`wingbeat why {group}` says what the group waits for"));
        }
        for (at, placed) in
            known.placed.iter().enumerate().filter(|(at, _)| index.is_none_or(|index| index as usize == *at))
        {
            let Some(placed) = placed else { continue };
            let node = placed.taken.node;
            let missing = placed.pool.missing(&shape.resources);
            let known = self.nodes.get(node);
            let lacks = match known.and_then(|node| node.draining.as_ref()) {
                _ if known.is_some_and(|node| node.suspect.is_some()) => {
                    known.and_then(|node| suspicion(node, self.now)).unwrap_or_default()
                }
                Some(drain) => format!("is on a node that is being drained ({})", drain.as_asked.why),
                None if missing.is_empty() => "has room for this".into(),
                None => format!("has {}", missing.join(", ")),
            };
            explanation.reasons.push(format!("bundle {at} on {} {lacks}", self.node_title(node)));
            let inside = Some((group, at as u32));
            let leases = self.nodes.get(node).into_iter().flat_map(|node| node.leases.iter());
            let leases =
                leases.filter_map(|id| self.leases.leases.get(id)).filter(|lease| lease.taken.bundle == inside);
            let holders: Vec<String> = leases.map(|lease| self.holder_line(lease)).collect();
            explanation.holders.extend(first_of(holders, "holders"));
        }
        explanation.help.push("wait for what runs in the bundle, or make the group larger".into());
    }

    fn waiter_title(&self, waiter: Waiter) -> String {
        match waiter {
            Waiter::Tasks(process, shape) => {
                // After a restart of the head, its owner has not said it again unless it wants more.
                let name = self.leases.demands.get(&(process, shape)).map(|demand| demand.name.to_string());
                format!("{} of {process}", name.as_deref().unwrap_or("a task"))
            }
            Waiter::Actor(id) => {
                let class = self.actors.spec(id).map(|spec| spec.class_name.clone()).unwrap_or_default();
                format!("actor {class} ({id})")
            }
            Waiter::Group(id) => self.groups.get(id).map_or_else(|| id.to_string(), |group| group.spec.title()),
        }
    }

    fn holder_line(&self, lease: &Lease) -> String {
        let who = lease.holder.waiter().map_or_else(|| "what nobody needs".into(), |waiter| self.waiter_title(waiter));
        let job = self.jobs.get(&lease.job).map(|job| format!(" of job {}", job.spec.name)).unwrap_or_default();
        let held = lease.still_taken();
        let held = self.held_by_lease(lease.taken.node, &held.resources, &held.devices);
        let since = ago(self.now.saturating_sub(lease.since));
        let pid = lease.server().map_or_else(String::new, |(_, pid)| format!(", pid {pid}"));
        let ending = if lease.is_ending() { ", told to end" } else { "" };
        format!("{who}{job} holds {held} on {} for {since}{pid}{ending}", self.node_title(lease.taken.node))
    }

    /// Who holds what is asked for, those with most first.
    fn holders(&self, nodes: &[&Node], asked: &ResourceSet) -> Vec<String> {
        self.holders_where(nodes, asked, |_| true)
    }

    fn holders_where(&self, nodes: &[&Node], asked: &ResourceSet, of: impl Fn(JobId) -> bool) -> Vec<String> {
        let wants = |held: &ResourceSet| {
            let names = held.iter().filter(|(name, _)| asked.is_empty() || !asked.get(name).is_zero());
            // Devices are what is scarce.
            names.map(|(name, amount)| if name == GPU { amount.units() * 1_000 } else { amount.units() }).max()
        };
        let mut found: Vec<(i64, String)> = Vec::new();
        for node in nodes {
            let leases = node.leases.iter().filter_map(|id| self.leases.leases.get(id));
            for lease in leases.filter(|lease| lease.taken.bundle.is_none() && !lease.is_returned() && of(lease.job)) {
                if let Some(amount) = wants(&lease.still_taken().resources) {
                    found.push((amount, self.holder_line(lease)));
                }
            }
            for (id, index) in &node.bundles {
                let Some(group) = self.groups.get(*id).filter(|group| of(group.spec.job)) else { continue };
                let Some(placed) = group.placed.get(*index as usize).and_then(Option::as_ref) else { continue };
                if let Some(amount) = wants(&placed.taken.resources) {
                    let held = self.held_by_lease(node.info.id, &placed.taken.resources, &placed.taken.devices);
                    let job = self.jobs.get(&group.spec.job).map(|job| format!(" of job {}", job.spec.name));
                    let (who, job) = (group.spec.title(), job.unwrap_or_default());
                    found.push((amount, format!("{who}{job} reserves {held} on {}", title(node))));
                }
            }
        }
        found.sort_by_key(|(amount, _)| std::cmp::Reverse(*amount));
        first_of(found.into_iter().map(|(_, line)| line).collect(), "holders")
    }

    /// What holds a waiter back besides room, in one line; none if nothing does.
    pub(super) fn hold_in_short(&self, waiter: Waiter) -> Option<String> {
        if let Some(why) = &self.cannot_write {
            return Some(journal_fails(why));
        }
        match self.queue.held_back(waiter)? {
            Hold::Quota(_) if self.quotas.is_use_unknown => Some(USE_UNKNOWN.to_owned()),
            Hold::Quota(namespace) => {
                let quota = self.quotas.get(namespace)?;
                Some(format!("namespace `{namespace}` may hold {} at a time, and holds {}", quota.limit, quota.used))
            }
            Hold::UnknownJob(process) => Some(format!("the node of {process} has not yet said that it runs")),
        }
    }

    /// What those who ask for a shape wait for, in one line.
    pub(super) fn shape_in_short(&self, waiter: Waiter, shape: ShapeId) -> String {
        let Some(shape) = self.shapes.get(shape) else { return String::new() };
        let mut explanation = Explanation::default();
        match shape.strategy {
            Strategy::Bundle { group, index } => {
                explanation.reasons.push(format!("asks for {shape}"));
                self.explain_bundle(group, index, shape, &mut explanation);
            }
            _ => drop(self.explain_places(waiter, shape, &mut explanation)),
        }
        explanation.reasons.join("; ")
    }

    /// What a group waits for, in one line.
    pub(super) fn group_in_short(&self, id: PlacementGroupId) -> String {
        self.explain_group(id).unwrap_or_default().reasons.join("; ")
    }
}

fn journal_fails(why: &str) -> String {
    format!("the head cannot write its journal, and grants nothing new until it can: {why}")
}

/// The resources that a shape competes for.
fn scarce_of(shape: &Shape) -> ResourceSet {
    let mut asked = shape.resources.clone();
    if shape.gpu_memory > 0 {
        asked.set(GPU, Amount::ONE);
    }
    asked
}

/// What a node must have that could serve a shape, and how such a node is started.
fn node_for(shape: &Shape) -> String {
    let mut parts = Vec::new();
    if !shape.resources.is_empty() || shape.gpu_memory == 0 {
        parts.push(shape.resources.to_string());
    }
    if shape.gpu_memory > 0 {
        parts.push(format!("a GPU of at least {}", gib(shape.gpu_memory)));
    }
    let labels: Vec<String> = shape.labels.iter().map(|selector| format!("`{selector}`")).collect();
    if !labels.is_empty() {
        parts.push(format!("labels that match {}", labels.join(" or ")));
    }
    format!("{}: `wingbeat worker --head <this head>` there", parts.join(" and "))
}

/// Bytes, for people.
fn gib(bytes: u64) -> String {
    match bytes {
        bytes if bytes.is_multiple_of(1 << 30) => format!("{} GiB", bytes >> 30),
        bytes if bytes.is_multiple_of(1 << 20) => format!("{} MiB", bytes >> 20),
        bytes => format!("{bytes} bytes"),
    }
}

/// The only one of these, if there is one.
///
/// # Errors
/// There are several, on several nodes; in words.
pub(crate) fn the_one_with_pid(
    pid: u32,
    found: &BTreeMap<ProcessId, NodeId>,
) -> Result<Option<(ProcessId, NodeId)>, String> {
    if found.len() > 1 {
        let nodes: Vec<String> = found.values().map(|node| format!("{pid}@{node}")).collect();
        let which = nodes.join(" or ");
        return Err(format!("processes of several nodes have the process id {pid}; name one as {which}"));
    }
    Ok(found.iter().next().map(|(process, node)| (*process, *node)))
}
