//! What somebody waits for who has no place.

use std::collections::BTreeMap;

use wingbeat_core::resources::GPU;
use wingbeat_core::spec::Shape;
use wingbeat_core::{Amount, ResourceSet};
use wingbeat_net::messages::Explanation;

use super::titles::{NAMED, ago, suspicion, title};
use crate::state::State;
use crate::state::nodes::{Node, requirements_of};
use crate::state::queue::{Hold, Waiter};
use crate::state::shapes::ShapeId;

/// Why a namespace with a quota waits for a moment.
pub(super) const USE_UNKNOWN: &str = "the head was started again: until the nodes have said what runs on them, \
                           namespaces with a quota get nothing more";

impl State {
    /// Whether something else than room holds a waiter back, which is then explained.
    pub(super) fn explain_hold(&self, waiter: Waiter, explanation: &mut Explanation) -> bool {
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

    pub(super) fn explain_shape(&self, waiter: Waiter, shape: &Shape, explanation: &mut Explanation) {
        if self.explain_hold(waiter, explanation) {
            explanation.reasons.insert(0, format!("asks for {shape}"));
            return;
        }
        if let Some((group, index)) = shape.bundle() {
            explanation.reasons.push(format!("asks for {shape}"));
            return self.explain_bundle(group, index, shape, explanation);
        }
        let nodes = self.explain_places(waiter, shape, explanation);
        let must_be_on = shape.required_node();
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
            let waits = |node: &&Node| node.bundles.iter().any(|bundle| self.waits_in(node, *bundle).is_some());
            if able.iter().any(waits) {
                let help = "what waits in a placement group keeps its bundle from others: leave room beside the group for what it waits for";
                explanation.help.push(help.into());
            }
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
    pub(super) fn explain_places(&self, waiter: Waiter, shape: &Shape, explanation: &mut Explanation) -> Vec<&Node> {
        explanation.reasons.push(format!("asks for {shape}"));
        if self.nodes.offer_nothing() {
            explanation.reasons.push("no node is there".into());
        }
        let nodes: Vec<&Node> = match shape.required_node() {
            Some(node) => {
                let node = self.nodes.get(node).ok_or(node);
                if let Err(id) = node
                    && !self.nodes.offer_nothing()
                {
                    explanation.reasons.push(format!("{id}, where it must be, is not there"));
                }
                node.into_iter().collect()
            }
            None => self.nodes.iter().filter(|node| !node.info.resources.is_empty()).collect(),
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
            if let Waiter::Group(group) = other {
                let asked = self.groups.asked(*group);
                return asked.is_some_and(|(_, sum)| sum.iter().any(|(name, _)| !mine.get(name).is_zero()));
            }
            self.shape_of(*other).is_some_and(|id| {
                *competes.entry(id).or_insert_with(|| {
                    let Some(other) = self.shapes.get(id) else { return false };
                    let shares = scarce_of(other).iter().any(|(name, _)| !mine.get(name).is_zero());
                    let requirements = requirements_of(other);
                    let could =
                        |node: &&Node| node.may_serve(other) && requirements.iter().any(|asked| node.could_hold(asked));
                    shares && other.bundle().is_none() && nodes.iter().any(could)
                })
            })
        });
        counted.count()
    }

    /// What each node lacks.
    pub(super) fn explain_nodes(&self, waiter: Waiter, shape: &Shape, nodes: &[&Node], explanation: &mut Explanation) {
        let standing = self.queue.standing(waiter);
        let requirements = requirements_of(shape);
        let reasons = nodes.iter().take(NAMED).map(|node| {
            let lacks = if let Some(drain) = &node.draining {
                format!("is being drained ({})", drain.as_asked.why)
            } else if let Some(suspicion) = suspicion(node, self.now) {
                suspicion
            } else if let Some(why) = self.label_mismatch(node, shape) {
                why
            } else if let Some(why) = self.why_unfit(node, waiter) {
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
}

pub(super) fn journal_fails(why: &str) -> String {
    format!("the head cannot write its journal, and grants nothing new until it can: {why}")
}

/// The resources that a shape competes for.
pub(super) fn scarce_of(shape: &Shape) -> ResourceSet {
    let mut asked = shape.resources.clone();
    if shape.gpu_memory > 0 {
        asked.set(GPU, Amount::ONE);
    }
    asked
}

/// What a node must have that could serve a shape, and how such a node is started.
pub(super) fn node_for(shape: &Shape) -> String {
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
