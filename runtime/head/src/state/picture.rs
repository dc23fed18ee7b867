//! The state of the cluster, for people and tools.

use std::collections::BTreeMap;

use wingbeat_core::{ActorId, JobId, LeaseId, NodeId, PlacementGroupId, ResourceSet};
use wingbeat_net::messages::{
    ActorRow, ClusterState, ClusterView, JobState, NodeState, OwningJob, PendingRow, PlacementGroupRow, QuotaRow,
};

use super::queue::Waiter;
use super::shapes::ShapeId;
use super::{Millis, State, after};

/// Shapes and groups of which one picture says what each node lacks: the others say how to ask. Looking at the nodes
/// for each of thousands would take as long as others may wait for the head.
const EXPLAINED: usize = 64;

/// Rows that are taken at a time: others wait for the head no longer than this takes, about half a millisecond.
const ROWS: usize = 256;
/// Leases that are counted at a time.
const COUNTED: usize = 4_096;

/// A picture that is being taken, in parts: between them, others may ask the head, and what it knows may change.
pub struct Taking {
    picture: ClusterState,
    next: Part,
    leases: BTreeMap<JobId, u32>,
    reasons: Reasons,
}

/// What comes next, each after the last one that was taken.
enum Part {
    Nodes(Option<NodeId>),
    Leases(Option<LeaseId>),
    Actors(Option<ActorId>),
    Groups(Option<PlacementGroupId>),
    Pending(Option<Waiter>),
    End,
}

impl Taking {
    pub(super) fn begin(state: &State, now: Millis) -> Taking {
        let absent = state.recovering.iter().flat_map(|recovering| recovering.infos()).map(|info| info.id).collect();
        let quotas = state.quotas.iter().map(|(namespace, quota)| QuotaRow {
            namespace: namespace.to_owned(),
            limit: quota.limit.clone(),
            used: quota.used.clone(),
        });
        let picture = ClusterState {
            absent,
            cluster: Some(state.cluster),
            uptime_secs: now / 1000,
            quotas: quotas.collect(),
            journal_fails: state.cannot_write.clone(),
            ..ClusterState::default()
        };
        Taking { picture, next: Part::Nodes(None), leases: BTreeMap::new(), reasons: Reasons::default() }
    }

    /// Takes the next part. Whether there are more.
    pub(super) fn go_on(&mut self, state: &State, now: Millis) -> bool {
        self.next = match self.next {
            Part::Nodes(last) => self.nodes(state, last, now),
            Part::Leases(last) => self.leases(state, last),
            Part::Actors(last) => self.actors(state, last),
            Part::Groups(last) => self.groups(state, last),
            Part::Pending(last) => self.pending(state, last),
            Part::End => Part::End,
        };
        !matches!(self.next, Part::End)
    }

    /// The picture, when there are no more parts.
    #[must_use]
    pub fn picture(self) -> ClusterState {
        self.picture
    }

    fn nodes(&mut self, state: &State, last: Option<NodeId>, now: Millis) -> Part {
        let rows = state.nodes.after(last).take(ROWS).map(|node| NodeState {
            id: node.info.id,
            state: node.standing().to_owned(),
            info: node.info.clone(),
            available: node.pool.available.clone(),
            leases: node.leases.len() as u32,
            draining: node.draining.as_ref().map(|drain| drain.as_asked.why.clone()),
            suspect_secs: node.suspect.map(|since| now.saturating_sub(since) / 1_000),
            store: node.store,
            memory_short: node.memory_short.as_ref().map(ToString::to_string),
            held_devices: node.held.iter().map(|(device, who)| format!("GPU {device}: {who}")).collect(),
        });
        match taken(&mut self.picture.nodes, rows) {
            Some(last) => Part::Nodes(Some(last.id)),
            None => Part::Leases(None),
        }
    }

    fn leases(&mut self, state: &State, last: Option<LeaseId>) -> Part {
        let mut counted = None;
        for (id, lease) in after(&state.leases.leases, last).take(COUNTED) {
            *self.leases.entry(lease.job).or_default() += 1;
            counted = Some(*id);
        }
        if counted.is_some() {
            return Part::Leases(counted);
        }
        let jobs = state.jobs.values().map(|job| JobState {
            id: job.spec.id,
            name: job.spec.name.clone(),
            namespace: job.spec.namespace.clone(),
            priority: job.spec.priority,
            state: if job.is_over { "ended" } else { "running" }.to_owned(),
            leases: self.leases.get(&job.spec.id).copied().unwrap_or_default(),
        });
        self.picture.jobs = jobs.collect();
        Part::Actors(None)
    }

    fn actors(&mut self, state: &State, last: Option<ActorId>) -> Part {
        let rows = state.actors.rows_after(last).take(ROWS).map(|row| ActorRow {
            id: row.spec.id,
            class_name: row.spec.class_name.clone(),
            name: row.spec.name.clone(),
            state: row.state.to_owned(),
            node: row.node,
            pid: row.pid,
            restarts: row.restarts,
        });
        match taken(&mut self.picture.actors, rows) {
            Some(last) => Part::Actors(Some(last.id)),
            None => Part::Groups(None),
        }
    }

    fn groups(&mut self, state: &State, last: Option<PlacementGroupId>) -> Part {
        let rows = state.groups.after(last).take(ROWS).map(|group| PlacementGroupRow {
            id: group.spec.id,
            name: group.spec.name.clone(),
            job: state.owning_job(Some(group.spec.job)),
            state: if group.is_placed() { "placed" } else { "pending" }.to_owned(),
            strategy: group.spec.strategy,
            bundles: group
                .spec
                .bundles
                .iter()
                .zip(&group.placed)
                .map(|(bundle, placed)| (bundle.resources.clone(), placed.as_ref().map(|placed| placed.taken.node)))
                .collect(),
        });
        match taken(&mut self.picture.placement_groups, rows) {
            Some(last) => Part::Groups(Some(last.id)),
            None => Part::Pending(None),
        }
    }

    fn pending(&mut self, state: &State, last: Option<Waiter>) -> Part {
        let explained = self.reasons.explained();
        let mut taken = None;
        for waiter in state.queue.waiters_after(last).take(ROWS) {
            taken = Some(waiter);
            self.picture.pending.extend(self.reasons.row_of(state, waiter));
            // Each of these looks at all nodes.
            if self.reasons.explained() > explained {
                break;
            }
        }
        taken.map_or(Part::End, |last| Part::Pending(Some(last)))
    }
}

impl State {
    /// The cluster, for somebody who joins; with nodes that may still come back, which most likely live.
    pub fn view(&self) -> ClusterView {
        let absent = self.recovering.iter().flat_map(|recovering| recovering.infos());
        ClusterView { cluster: self.cluster, nodes: self.nodes.infos().into_iter().chain(absent.cloned()).collect() }
    }

    /// Everything, for people, as of when something has happened last.
    pub fn picture(&self) -> ClusterState {
        self.picture_at(self.now)
    }

    /// The same as of now: nothing may have happened for long.
    pub fn picture_at(&self, now: Millis) -> ClusterState {
        let mut taking = self.begin_picture(now);
        while self.take_part(&mut taking, now) {}
        taking.picture()
    }

    /// Begins to take a picture in parts, each with [`State::take_part`].
    pub fn begin_picture(&self, now: Millis) -> Taking {
        Taking::begin(self, now.max(self.now))
    }

    /// Takes the next part of a picture. Whether there are more.
    pub fn take_part(&self, taking: &mut Taking, now: Millis) -> bool {
        taking.go_on(self, now.max(self.now))
    }

    /// A job as it is shown with what belongs to it.
    fn owning_job(&self, id: Option<JobId>) -> OwningJob {
        let spec = id.and_then(|job| self.jobs.get(&job)).map(|job| &job.spec);
        OwningJob {
            id,
            name: spec.map(|spec| spec.name.clone()).unwrap_or_default(),
            namespace: spec.map(|spec| spec.namespace.clone()).unwrap_or_default(),
            priority: spec.map(|spec| spec.priority).unwrap_or_default(),
        }
    }
}

/// Adds these rows. The last of them, if there are any.
fn taken<T>(rows: &mut Vec<T>, more: impl Iterator<Item = T>) -> Option<&T> {
    let before = rows.len();
    rows.extend(more);
    rows[before..].last()
}

/// Why those who wait do so, said once for all who ask for the same.
#[derive(Default)]
struct Reasons {
    by_shape: BTreeMap<ShapeId, String>,
    groups: usize,
}

impl Reasons {
    fn explained(&self) -> usize {
        self.by_shape.len() + self.groups
    }

    fn row_of(&mut self, state: &State, waiter: Waiter) -> Option<PendingRow> {
        let (name, id, job, resources, count): (String, String, Option<JobId>, ResourceSet, u32) = match waiter {
            Waiter::Tasks(process, shape) => {
                let demand = state.leases.demands.get(&(process, shape))?;
                let more = demand.wanted - demand.held.len() as u32;
                let resources = state.shapes.get(shape)?.resources.clone();
                (demand.name.clone(), process.to_string(), state.job_of(process), resources, more)
            }
            Waiter::Actor(id) => {
                let spec = state.actors.spec(id)?;
                let resources = spec.placement.resources.clone();
                (format!("actor {}", spec.class_name), id.to_string(), Some(spec.job), resources, 1)
            }
            Waiter::Group(id) => {
                let (spec, sum) = state.groups.asked(id)?;
                (spec.title(), id.to_string(), Some(spec.job), sum, 1)
            }
        };
        let job = state.owning_job(job);
        let why = self.why(state, waiter, &id);
        let is_group = matches!(waiter, Waiter::Group(_));
        Some(PendingRow { name, id, job, resources, count, is_group, why })
    }

    fn why(&mut self, state: &State, waiter: Waiter, id: &str) -> String {
        if let Some(held) = state.hold_in_short(waiter) {
            return held;
        }
        let shape = match waiter {
            Waiter::Tasks(_, shape) => Some(shape),
            Waiter::Actor(actor) => state.actors.shape_of(actor),
            Waiter::Group(group) => {
                self.groups += 1;
                if self.groups > EXPLAINED {
                    return format!("`wingbeat why {id}` says more");
                }
                return state.group_in_short(group);
            }
        };
        let Some(shape) = shape else { return String::new() };
        let is_first = self.by_shape.len() < EXPLAINED;
        let reasons = match self.by_shape.get(&shape) {
            Some(known) => known.clone(),
            None if is_first => {
                let reasons = state.shape_in_short(waiter, shape);
                self.by_shape.insert(shape, reasons.clone());
                reasons
            }
            None => {
                let asked = state.shapes.get(shape).map(|shape| format!("asks for {shape}; ")).unwrap_or_default();
                format!("{asked}`wingbeat why {id}` says more")
            }
        };
        match waiter {
            Waiter::Actor(actor) => match state.actors.last_end(actor) {
                Some(cause) => format!("its last life ended: {cause}; {reasons}"),
                None => reasons,
            },
            Waiter::Tasks(..) | Waiter::Group(_) => reasons,
        }
    }
}
