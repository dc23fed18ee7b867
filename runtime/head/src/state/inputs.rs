//! All that changes the state from outside, as it is recorded and played back.

use serde::{Deserialize, Serialize};
use wingbeat_core::error::Error;
use wingbeat_core::spec::{ActorInfo, ActorSpec, PlacementGroupSpec};
use wingbeat_core::{ClusterId, NodeId, PlacementGroupId, ResourceSet};
use wingbeat_net::recording::{Recorder, Redact};

use super::facts::Drained;
use super::{Action, Event, Fact, Millis, State};

/// How a state begins.
#[derive(Clone, Serialize, Deserialize)]
pub struct Beginning {
    /// The cluster.
    pub cluster: ClusterId,
    /// The number of its first lease.
    pub first_lease: u64,
    /// What was written down by an earlier head, if one was.
    pub remembered: Option<Vec<Fact>>,
    /// How long those that an earlier head knew have to come back.
    pub grace: Millis,
}

/// What a state takes in.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Input {
    /// Something happened.
    Event(Event),
    /// See [`State::create_actor`].
    CreateActor(Box<ActorSpec>, bool),
    /// See [`State::create_group`].
    CreateGroup(Box<PlacementGroupSpec>),
    /// See [`State::remove_placement_group`].
    RemoveGroup(PlacementGroupId),
    /// See [`State::placement_group_not_written`].
    GroupNotWritten(PlacementGroupId),
    /// See [`State::quota`].
    Quota(String, Option<ResourceSet>),
    /// See [`State::drain`].
    Drain(NodeId, Option<Millis>, String, bool),
    /// See [`State::somebody_returns`].
    Returns(Millis),
    /// See [`State::remember`].
    Remembers(Vec<Fact>),
}

/// Who is told of each step, and what the present one is of.
#[derive(Default)]
pub(super) struct Recorded {
    recorder: Option<Box<dyn Recorder<Input, Action>>>,
    input: Option<Input>,
}

impl State {
    /// A state as it began.
    pub fn begun(with: Beginning) -> State {
        match with.remembered {
            None => State::new(with.cluster, with.first_lease),
            Some(facts) => State::recover(with.cluster, with.first_lease, facts, with.grace),
        }
    }

    /// From now on, somebody is told of each step.
    pub fn record_with(&mut self, recorder: Option<Box<dyn Recorder<Input, Action>>>) {
        self.recorded.recorder = recorder;
    }

    /// A step begins in which something happens: time goes on at its pace from here.
    pub(super) fn begin(&mut self, now: Millis, input: impl FnOnce() -> Input) {
        self.idle_ticks = 0;
        self.begin_tick(now, input);
    }

    /// A step begins in which time passes.
    pub(super) fn begin_tick(&mut self, now: Millis, input: impl FnOnce() -> Input) {
        self.now = now;
        if self.recorded.recorder.is_some() {
            self.recorded.input = Some(input());
        }
    }

    /// A step was made.
    pub(super) fn done(&mut self, actions: Vec<Action>) -> Vec<Action> {
        if let Recorded { recorder: Some(recorder), input } = &mut self.recorded
            && let Some(input) = input.take()
        {
            recorder.record(self.now, input, &actions);
        }
        actions
    }

    /// Makes a placement group.
    ///
    /// # Errors
    /// It makes no sense, its name is taken, or no nodes could ever hold it.
    pub fn create_group(
        &mut self,
        now: Millis,
        spec: PlacementGroupSpec,
    ) -> (Result<PlacementGroupSpec, Error>, Vec<Action>) {
        self.begin(now, || Input::CreateGroup(Box::new(spec.clone())));
        // Until the first time is written, nobody knows whether it can be.
        let is_there = self.groups.get(spec.id).is_some();
        let answer = self.new_group(spec);
        let actions = self.act();
        // One that has its places was recorded with them.
        if let Ok(spec) = &answer
            && (is_there || !self.placed(spec.id))
        {
            self.record_group(spec.id);
        }
        (answer, actions)
    }

    /// Removes a placement group, and ends what runs in it. Nothing happens when it is gone already.
    pub fn remove_placement_group(&mut self, now: Millis, group: PlacementGroupId) -> Vec<Action> {
        self.begin(now, || Input::RemoveGroup(group));
        self.group_removed(group);
        self.act()
    }

    /// A placement group that was asked for could not be written.
    pub fn placement_group_not_written(&mut self, now: Millis, group: PlacementGroupId) -> Vec<Action> {
        self.begin(now, || Input::GroupNotWritten(group));
        self.group_not_written(group);
        self.act()
    }

    /// Sets what a namespace may hold at a time; anything if nothing is said.
    pub fn quota(&mut self, now: Millis, namespace: &str, limit: Option<ResourceSet>) -> Vec<Action> {
        self.begin(now, || Input::Quota(namespace.to_owned(), limit.clone()));
        self.record(match &limit {
            Some(limit) => Fact::Quota(namespace.to_owned(), limit.clone()),
            None => Fact::QuotaGone(namespace.to_owned()),
        });
        self.set_quota(namespace, limit);
        self.act()
    }

    /// Places nothing more on a node; what runs there is moved after `within` milliseconds, and then, if `stops`, the
    /// daemon is told to end. With no `within`, the node takes work again.
    ///
    /// # Errors
    /// There is no such node.
    pub fn drain(
        &mut self,
        now: Millis,
        node: NodeId,
        within: Option<Millis>,
        why: String,
        stops: bool,
    ) -> (Result<(), Error>, Vec<Action>) {
        self.begin(now, || Input::Drain(node, within, why.clone(), stops));
        let answer = match within {
            Some(within) => self.drain_node(node, Drained { within, why, stops }),
            None => self.end_drain(node),
        };
        (answer, self.act())
    }

    /// Makes an actor, or finds the one of its name.
    ///
    /// # Errors
    /// The name is taken, or no node could ever hold it.
    pub fn create_actor(
        &mut self,
        now: Millis,
        spec: ActorSpec,
        or_get: bool,
    ) -> (Result<ActorInfo, Error>, Vec<Action>) {
        self.begin(now, || Input::CreateActor(Box::new(spec.clone()), or_get));
        let answer = self.new_actor(spec, or_get);
        (answer, self.act())
    }

    /// Somebody has come back who knew an earlier head, and this one knows nothing of what that knew. Whoever has not come back
    /// `until` then has ended by itself.
    pub fn somebody_returns(&mut self, now: Millis, until: Millis) -> Vec<Action> {
        self.begin(now, || Input::Returns(until));
        if !self.was_recovered {
            self.begin_recovery(until);
        }
        self.act()
    }

    /// What the last head knew, as a node has kept it. What is known here already counts: it has happened since.
    pub fn remember(&mut self, now: Millis, facts: Vec<Fact>) -> Vec<Action> {
        self.begin(now, || Input::Remembers(facts.clone()));
        self.take_back(facts);
        // Some wait for groups that are known now to be there, or not.
        self.refuse_the_infeasible();
        self.queue.unblock_all_in_turn();
        self.act()
    }

    /// Takes in again what was recorded.
    pub fn replay(&mut self, now: Millis, input: Input) -> Vec<Action> {
        match input {
            Input::Event(event) => self.step(now, event),
            Input::CreateActor(spec, or_get) => self.create_actor(now, *spec, or_get).1,
            Input::CreateGroup(spec) => self.create_group(now, *spec).1,
            Input::RemoveGroup(group) => self.remove_placement_group(now, group),
            Input::GroupNotWritten(group) => self.placement_group_not_written(now, group),
            Input::Quota(namespace, limit) => self.quota(now, &namespace, limit),
            Input::Drain(node, within, why, stops) => self.drain(now, node, within, why, stops).1,
            Input::Returns(until) => self.somebody_returns(now, until),
            Input::Remembers(facts) => self.remember(now, facts),
        }
    }
}

impl Redact for Beginning {
    fn redact(&mut self) {
        self.remembered.iter_mut().flatten().for_each(Redact::redact);
    }
}

impl Redact for Fact {
    fn redact(&mut self) {
        match self {
            Fact::Job(spec, _) => spec.redact(),
            Fact::Actor(actor) => actor.spec.redact(),
            _ => {}
        }
    }
}

impl Redact for Input {
    fn redact(&mut self) {
        match self {
            Input::Event(Event::JobJoined(spec)) => spec.redact(),
            Input::Event(Event::NodeJoined(_, running)) => running.redact(),
            Input::Event(Event::Says(_, message)) => message.redact(),
            Input::CreateActor(spec, _) => spec.redact(),
            Input::Remembers(facts) => facts.iter_mut().for_each(Redact::redact),
            _ => {}
        }
    }
}

impl Redact for Action {
    fn redact(&mut self) {
        match self {
            Action::Tell(_, event) => event.redact(),
            Action::Order(_, message) => message.redact(),
        }
    }
}
