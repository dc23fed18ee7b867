//! What processes and nodes may ask of the head, and who may ask for what.

use std::sync::Arc;

use tarpc::client::RpcError;
use tarpc::context::Context;
use wingbeat_core::codec::Payload;
use wingbeat_core::error::Error;
use wingbeat_core::names;
use wingbeat_core::spec::{ActorInfo, ActorSpec, JobSpec, PlacementGroupSpec, ScopedName};
use wingbeat_core::{JobId, NodeId, PlacementGroupId, ProcessId, ResourceSet};
use wingbeat_net::handshake::{Epoch, Role};
use wingbeat_net::messages::{
    ClusterState, ClusterView, Explanation, Follow, Followed, HeadMessage, NodeInfo, ProcessStacks, Running, Subject,
};
use wingbeat_net::mux;
use wingbeat_net::services::NodeClient;

use super::{ENDING_LOOK, OUTPUT_LIMIT, Shell, UNCHANGED, but, peers, unknown};
use crate::state::{Drained, Event, Fact, KeptActor, Speaker, State};

/// The service for one connection; it knows who is on the other side.
#[derive(Clone)]
pub(super) struct Service {
    pub shell: Arc<Shell>,
    pub process: ProcessId,
    pub role: Role,
    /// Why the head does not tell it what happens: a tool only asks, and one that comes back too late is told so. None if it does.
    pub unknown: Option<String>,
    /// The earlier head from which a node comes back.
    pub knew: Option<Epoch>,
}

impl Service {
    /// What the message means; none if it is not for this process to say.
    fn event(&self, message: HeadMessage) -> Option<Event> {
        let by = match self.role {
            Role::Node(node) => Speaker::Node(node),
            _ => Speaker::Process(self.process),
        };
        if !self.shell.inside.lock().state.may_say(by, &message) {
            tracing::warn!(process = %self.process, role = ?self.role, ?message, "ignored what is not for it to say");
            return None;
        }
        match message {
            HeadMessage::Leaves => {
                self.leaves();
                None
            }
            HeadMessage::NodeEnds(_) => {
                self.leaves();
                Some(Event::Says(by, message))
            }
            HeadMessage::Demand { shape, wanted, name } => {
                let name = names::made_of(&name).into_owned();
                Some(Event::Says(by, HeadMessage::Demand { shape, wanted, name }))
            }
            message => Some(Event::Says(by, message)),
        }
    }

    /// Whether a batch of this number is to be taken in.
    fn hears(&self, number: u64) -> bool {
        let mut inside = self.shell.inside.lock();
        match self.role {
            Role::Node(node) => peers::hears(&mut inside.nodes, &node, number),
            _ => peers::hears(&mut inside.processes, &self.process, number),
        }
    }

    /// It has said that it leaves.
    fn leaves(&self) {
        let mut inside = self.shell.inside.lock();
        match self.role {
            Role::Node(node) => peers::leaves(&mut inside.nodes, &node),
            _ => peers::leaves(&mut inside.processes, &self.process),
        }
    }

    fn refused(&self, why: String) -> Error {
        Error::Refused { who: "the head".into(), why }
    }

    /// Refuses who was given up: what it had was ended, or runs elsewhere.
    fn check_is_known(&self) -> Result<(), Error> {
        match &self.unknown {
            None => Ok(()),
            Some(why) => Err(self.refused(format!("the head has given it up, because {why}; start it again"))),
        }
    }

    /// Refuses what ends with whoever asked for it, if that is gone already: nothing would end it any more.
    fn check_is_there(&self, state: &State) -> Result<(), Error> {
        if state.is_connected(self.process) {
            return Ok(());
        }
        Err(self.refused(format!("{}, which asked for it, is gone", self.process)))
    }
}

/// Refuses what is no name, whoever sent it: it would be shown to others.
fn named<'a>(what: &str, given: impl IntoIterator<Item = &'a String>) -> Result<(), Error> {
    let invalid = |why| Error::InvalidArgument { what: format!("the name of {what}: {why}") };
    given.into_iter().try_for_each(|name| names::check(name).map_err(invalid))
}

fn scoped(what: &str, name: Option<&ScopedName>) -> Result<(), Error> {
    named(what, name.into_iter().flat_map(|name| [&name.namespace, &name.name]))
}

impl wingbeat_net::services::Head for Service {
    async fn deliver(self, _: Context, number: u64, messages: Vec<HeadMessage>) {
        if self.unknown.is_none() && self.hears(number) {
            for message in messages {
                if let Some(event) = self.event(message) {
                    self.shell.step(event);
                }
            }
        }
        if self.shell.has_left() {
            // What is not answered is said to the next head.
            std::future::pending::<()>().await;
        }
    }

    async fn resume(self, _: Context) -> Option<String> {
        self.unknown
    }

    async fn join_node(self, _: Context, node: NodeInfo, running: Running) -> Result<ClusterView, Error> {
        if self.role != Role::Node(node.id) {
            return Err(self.refused("it introduced itself as something else than this node".into()));
        }
        self.check_is_known()?;
        named("a node's host", [&node.hostname])?;
        named("a label of a node", node.labels.iter().flat_map(|(key, value)| [key, value]))?;
        names::check_resources(&node.resources).map_err(|why| self.refused(format!("of a node, {why}")))?;
        // It asks again when it was not told that it has.
        let (id, kept) = (node.id, running.kept);
        self.shell.learn_before(id, kept, self.knew).await;
        // What runs on a node of which the next head does not know would not be waited for.
        let _joining = self.shell.write_down_first(&node).await;
        let joined = move |state: &mut State, now| match state.has_node(node.id) {
            true => (Ok(()), Vec::new()),
            false => (Ok(()), state.step(now, Event::NodeJoined(Box::new(node), running))),
        };
        // The next head waits for the nodes that were written down, and for no others. A disk without room keeps no node away, nor does
        // a slow one keep away what runs already.
        if self.shell.inside.lock().state.is_awaited(id) {
            let joined: Result<(), Error> = self.shell.change(joined);
            self.shell.note_time();
            self.shell.node_is_in(id, kept);
            return joined.map(|()| self.shell.inside.lock().state.view());
        }
        if let Err(error) = self.shell.change_and_write(joined, |_, _| Vec::new()).await {
            tracing::warn!(%error, "a head that is started again does not wait for this node until that is written");
        }
        self.shell.node_is_in(id, kept);
        self.shell.kept_elsewhere().await;
        Ok(self.shell.inside.lock().state.view())
    }

    async fn join_job(self, _: Context, job: JobSpec) -> Result<ClusterView, Error> {
        if self.role != Role::Driver(job.id) {
            return Err(self.refused("only the job's own driver can start it".into()));
        }
        self.check_is_known()?;
        named("a job or its namespace", [&job.name, &job.namespace])?;
        if self.shell.inside.lock().state.driver_of(job.id).is_some_and(|driver| driver != self.process) {
            return Err(self.refused(format!("{} is another driver's", job.id)));
        }
        let (id, known) = (job.id, Fact::Job(Box::new(job.without_local()), true));
        // A job that is back is written down already, and a full disk keeps nobody away.
        let fact = move |state: &State| (!state.is_job_running(id)).then_some(known);
        let undone = move |answer: &Result<(), Error>| answer.is_err().then_some(Fact::JobGone(id));
        let asker = self.clone();
        let joined = move |state: &mut State, now| match asker.check_is_there(state) {
            Ok(()) => (Ok(()), state.step(now, Event::JobJoined(Box::new(job)))),
            Err(gone) => (Err(gone), Vec::new()),
        };
        self.shell.change_durably(fact, undone, joined).await?;
        Ok(self.shell.inside.lock().state.view())
    }

    async fn create_actor(self, _: Context, spec: ActorSpec, or_get: bool) -> Result<ActorInfo, Error> {
        scoped("an actor", spec.name.as_ref())?;
        named("a concurrency group", spec.groups.keys())?;
        if spec.name.is_some() {
            self.shell.until_learned(false).await;
        }
        // Whoever detaches it may end at once; its program stays as long as the actor.
        let kept = if spec.detached { self.shell.keep_program(self.process, spec.job).await? } else { None };
        let has_program = kept.is_some();
        let (id, is_kept, named) = (spec.id, spec.is_kept(), spec.clone());
        // An actor that is there is not written again: it may be in a later life.
        let fact = |state: &State| {
            let is_new = is_kept && state.is_new_actor(&named);
            is_new.then(|| Fact::Actor(KeptActor::new(named)))
        };
        let undone = move |answer: &Result<ActorInfo, Error>| {
            let is_made = answer.as_ref().is_ok_and(|info| info.id == id);
            (!is_made).then_some(Fact::ActorGone(id))
        };
        let asker = self.clone();
        let made = move |state: &mut State, now| {
            // Until the actor is known, and needs the program itself.
            let _kept = kept;
            let is_wanted = if spec.detached { Ok(()) } else { asker.check_is_there(state) };
            match is_wanted {
                Ok(()) => state.create_actor(now, spec, or_get),
                Err(gone) => (Err(gone), Vec::new()),
            }
        };
        let created = self.shell.change_durably(fact, undone, made).await;
        if has_program && created.is_err() {
            self.shell.let_programs_go();
        }
        created
    }

    async fn create_placement_group(self, _: Context, spec: PlacementGroupSpec) -> Result<PlacementGroupSpec, Error> {
        scoped("a placement group", spec.name.as_ref())?;
        if spec.name.is_some() || self.shell.is_recovering() {
            self.shell.until_learned(false).await;
        }
        let id = spec.id;
        let asker = self.clone();
        let made = move |state: &mut State, now| {
            let is_wanted = if spec.detached { Ok(()) } else { asker.check_is_there(state) };
            match is_wanted {
                Ok(()) => state.create_group(now, spec),
                Err(gone) => (Err(gone), Vec::new()),
            }
        };
        let made =
            self.shell.change_and_write(made, move |state, now| state.placement_group_not_written(now, id)).await;
        made.map_err(|error| but(error, UNCHANGED))
    }

    async fn remove_placement_group(self, _: Context, group: PlacementGroupId) -> Result<(), Error> {
        if self.shell.is_recovering() {
            // It is to be known, or would be found again.
            self.shell.until_learned(false).await;
        }
        let removed = move |state: &mut State, now| (Ok(()), state.remove_placement_group(now, group));
        // What it held is free at once, also when the disk has no room.
        let written = self.shell.change_and_write(removed, |_, _| Vec::new()).await;
        written.map_err(|error| but(error, "the placement group is removed, which is written when the journal can be"))
    }

    async fn find_placement_group(self, _: Context, name: ScopedName) -> Result<PlacementGroupSpec, Error> {
        scoped("a placement group", Some(&name))?;
        self.shell.until_learned(false).await;
        self.shell.inside.lock().state.find_group(&name)
    }

    async fn set_quota(self, _: Context, namespace: String, limit: Option<ResourceSet>) -> Result<(), Error> {
        named("a namespace", [&namespace])?;
        self.shell.until_learned(false).await;
        if let Some(limit) = &limit {
            let invalid = |why: String| Error::InvalidArgument { what: format!("of a quota, {why}") };
            names::check_resources(limit).map_err(invalid)?;
        }
        let fact = match &limit {
            Some(limit) => Fact::Quota(namespace.clone(), limit.clone()),
            None => Fact::QuotaGone(namespace.clone()),
        };
        let set = move |state: &mut State, now| (Ok(()), state.quota(now, &namespace, limit));
        self.shell.change_durably(|_| Some(fact), |_| None, set).await
    }

    async fn drain_node(
        self,
        _: Context,
        node: NodeId,
        within_ms: Option<u64>,
        why: String,
        stops: bool,
    ) -> Result<(), Error> {
        self.shell.until_learned(false).await;
        self.shell.inside.lock().state.may_be_drained(node)?;
        let drained = within_ms.map(|within| Drained { within, why: why.clone(), stops });
        let fact = move |state: &State| state.drain_fact(node, drained);
        // It was lost meanwhile.
        let undone = move |answer: &Result<(), Error>| answer.is_err().then_some(Fact::NodeGone(node));
        let drain = move |state: &mut State, now| state.drain(now, node, within_ms, why, stops);
        self.shell.change_durably(fact, undone, drain).await
    }

    async fn explain(self, _: Context, subject: Subject) -> Result<Explanation, Error> {
        self.shell.explain(subject).await
    }

    async fn stacks(self, _: Context, subject: Subject) -> Result<ProcessStacks, Error> {
        self.shell.stacks(subject).await
    }

    async fn processes_of_job(self, _: Context, job: JobId) -> Result<Vec<ProcessId>, Error> {
        let processes = self.shell.inside.lock().state.processes_of_job(job);
        processes.ok_or_else(|| unknown(&job.to_string()))
    }

    async fn find_actor(self, _: Context, name: ScopedName, asks: JobId) -> Result<ActorInfo, Error> {
        scoped("an actor", Some(&name))?;
        self.shell.until_learned(false).await;
        self.shell.inside.lock().state.find_actor(&name, asks)
    }

    async fn settle_output(self, _: Context, job: JobId) -> bool {
        let ended = async {
            while self.shell.inside.lock().state.has_ending_actors(job) {
                tokio::time::sleep(ENDING_LOOK).await;
            }
        };
        let have_ended = tokio::time::timeout(OUTPUT_LIMIT, ended).await.is_ok();
        let nodes: Vec<NodeClient> = self.shell.inside.lock().nodes.values().map(|node| node.client.clone()).collect();
        let settling = nodes.iter().map(|node| node.settle_output(mux::within(OUTPUT_LIMIT), job));
        // A node that is gone has nothing more to show.
        let settled = futures::future::join_all(settling).await;
        have_ended && !settled.iter().any(|settled| matches!(settled, Err(RpcError::DeadlineExceeded)))
    }

    async fn knows_node(self, _: Context, node: NodeId) -> Option<bool> {
        if !self.shell.may_lead() {
            return None;
        }
        let inside = self.shell.inside.lock();
        // Others than itself may have found a head that was started again before it has.
        Some(inside.state.has_node(node) || inside.state.is_recovering() && self.role != Role::Node(node))
    }

    async fn has_ended(self, _: Context, process: ProcessId) -> bool {
        self.shell.inside.lock().state.has_ended(process)
    }

    async fn read_program(self, _: Context, hash: String, offset: u64) -> Result<Option<Payload>, Error> {
        self.shell.programs.read(&hash, offset)
    }

    async fn state(self, _: Context) -> ClusterState {
        let now = self.shell.now();
        // Others wait for a part of this, and not for all of it.
        let mut taking = self.shell.inside.lock().state.begin_picture(now);
        while self.shell.inside.lock().state.take_part(&mut taking, now) {
            tokio::task::yield_now().await;
        }
        let mut state = taking.picture();
        state.uptime_secs = self.shell.started.elapsed().as_secs();
        state.standby = self.shell.standby_state();
        state
    }

    async fn follow(self, _: Context, asks: Follow) -> Result<Followed, Error> {
        match (&self.shell.standby, self.role) {
            (Some(standby), Role::Head) => standby.follow(&self.shell, self.process, asks).await,
            (_, Role::Head) => Err(self.refused(
                "it keeps no journal, and so has nothing that a standby could follow; start it with --journal FILE"
                    .into(),
            )),
            _ => Err(self.refused("only a standby may follow".into())),
        }
    }

    async fn stop(self, _: Context) {
        self.shell.stop_nodes().await;
    }
}
