//! What things are called, and who holds what.

use wingbeat_core::resources::GPU;
use wingbeat_core::{Amount, JobId, NodeId, PlacementGroupId, ResourceSet};

use crate::state::lease::Lease;
use crate::state::nodes::Node;
use crate::state::queue::Waiter;
use crate::state::{Millis, State};

/// Nodes and holders that are named one by one; of others, only the number is told.
pub(super) const NAMED: usize = 8;

/// For how long, in words.
pub(super) fn ago(millis: Millis) -> String {
    match millis {
        0..1_000 => format!("{millis} ms"),
        1_000..120_000 => format!("{} s", millis / 1_000),
        120_000..7_200_000 => format!("{} min", millis / 60_000),
        _ => format!("{} h", millis / 3_600_000),
    }
}

pub(in crate::state) fn title(node: &Node) -> String {
    format!("{} ({})", node.info.hostname, node.info.id)
}

/// What is said of a node that has no connection to the head; none of others.
pub(in crate::state) fn suspicion(node: &Node, now: Millis) -> Option<String> {
    let since = node.suspect?;
    Some(format!(
        "is suspect: it has had no connection to the head for {}, and may come back",
        ago(now.saturating_sub(since))
    ))
}

pub(super) fn first_of(mut all: Vec<String>, of_what: &str) -> Vec<String> {
    if all.len() > NAMED {
        let more = all.len() - NAMED;
        all.truncate(NAMED);
        all.push(format!("and {more} more {of_what}"));
    }
    all
}

impl State {
    pub(super) fn node_title(&self, id: NodeId) -> String {
        self.nodes.get(id).map_or_else(|| id.to_string(), title)
    }

    pub(super) fn held_by_lease(&self, node: NodeId, resources: &ResourceSet, devices: &[(u32, Amount)]) -> String {
        if devices.is_empty() {
            return resources.to_string();
        }
        let numbers: Vec<u32> = devices.iter().map(|(number, _)| *number).collect();
        let shown: Vec<String> = numbers.iter().map(u32::to_string).collect();
        let span = self.nodes.get(node).map(|node| crate::state::pool::Span::of(&numbers, &node.info.devices));
        let span = span.map(|span| format!(", {}", span.shown())).unwrap_or_default();
        format!("{resources} (GPU {}{span})", shown.join(" and "))
    }

    /// A job, and what decides how soon its work is placed, for people.
    pub(super) fn title_of_job(&self, job: JobId) -> String {
        let Some(spec) = self.jobs.get(&job).map(|job| &job.spec) else { return job.to_string() };
        let is_own = spec.namespace == job.to_string();
        let namespace = if is_own { String::new() } else { format!(", namespace `{}`", spec.namespace) };
        let priority = if spec.priority == 0 { String::new() } else { format!(", priority {}", spec.priority) };
        format!("job {} ({job}{namespace}{priority})", spec.name)
    }

    pub(super) fn waiter_title(&self, waiter: Waiter) -> String {
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

    pub(super) fn holder_line(&self, lease: &Lease) -> String {
        let who = lease.holder.waiter().map_or_else(|| "what nobody needs".into(), |waiter| self.waiter_title(waiter));
        let job = self.jobs.get(&lease.job).map(|job| format!(" of job {}", job.spec.name)).unwrap_or_default();
        let held = lease.still_taken();
        let held = self.held_by_lease(lease.taken.node, &held.resources, &held.devices);
        let since = ago(self.now.saturating_sub(lease.since));
        let pid = lease.server().map_or_else(String::new, |(_, pid)| format!(", pid {pid}"));
        let ending = if lease.is_ending() { ", told to end" } else { "" };
        format!("{who}{job} holds {held} on {} for {since}{pid}{ending}", self.node_title(lease.taken.node))
    }

    /// What an execution in a bundle waits for, if all that runs there waits.
    pub(super) fn waits_in(&self, node: &Node, bundle: (PlacementGroupId, u32)) -> Option<String> {
        let leases = node.leases.iter().filter_map(|id| self.leases.leases.get(id));
        let inside: Vec<&Lease> = leases.filter(|lease| lease.taken.bundle == Some(bundle)).collect();
        let all_wait = inside.iter().all(|lease| lease.taken.cpus().is_empty() || !lease.waiting.is_empty());
        let servers = inside.iter().filter(|lease| !lease.waiting.is_empty()).filter_map(|lease| lease.server());
        servers
            .flat_map(|(worker, _)| self.waits.of(worker))
            .next()
            .filter(|_| all_wait)
            .map(|wait| self.what_waits(wait))
    }

    /// Who holds what is asked for, those with most first.
    pub(super) fn holders(&self, nodes: &[&Node], asked: &ResourceSet) -> Vec<String> {
        self.holders_where(nodes, asked, |_| true)
    }

    pub(super) fn holders_where(
        &self,
        nodes: &[&Node],
        asked: &ResourceSet,
        of: impl Fn(JobId) -> bool,
    ) -> Vec<String> {
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
                    let waits =
                        self.waits_in(node, (*id, *index)).map(|waits| format!(" ({waits})")).unwrap_or_default();
                    found.push((amount, format!("{who}{job} reserves {held} on {}{waits}", title(node))));
                }
            }
        }
        found.sort_by_key(|(amount, _)| std::cmp::Reverse(*amount));
        first_of(found.into_iter().map(|(_, line)| line).collect(), "holders")
    }
}
