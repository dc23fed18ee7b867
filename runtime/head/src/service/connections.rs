//! Who connects: a process or node that is new, comes back, or was given up.

use std::sync::Arc;
use std::time::Duration;

use wingbeat_core::{JobId, NodeId};
use wingbeat_net::address::Stream;
use wingbeat_net::handshake::{Hello, Resumes, Role};
use wingbeat_net::messages::{HeadEvent, NodeMessage};
use wingbeat_net::mux::{self, Connection, Waiting};
use wingbeat_net::peer_process;
use wingbeat_net::services::{
    Head as _, HeadRequest, HeadResponse, NodeClient, NodeRequest, NodeResponse, ProcessClient, ProcessRequest,
    ProcessResponse,
};
use wingbeat_net::silence::Probing;

use super::calls::Service;
use super::peers::{self, Absence, Before, Entered, Return};
use super::{Shell, Stage};
use crate::state::{Event, State};

/// Why nothing is said to a tool.
const ONLY_ASKS: &str = "it only asks";

/// How long a connection may outlive the program that has made it.
const AFTER_ITS_END: Duration = Duration::from_secs(1);

impl Shell {
    /// How whoever connects was connected before.
    pub(super) fn before(&self, hello: &Hello, state: &State) -> Before {
        let process = hello.address.process;
        let is_awaited = match hello.role {
            Role::Worker => state.may_come_back(process),
            Role::Driver(job) => state.is_recovering() && state.may_come_back(process) && !state.has_ended_before(job),
            _ => state.is_recovering(),
        };
        let is_lost = match hello.role {
            Role::Driver(_) => state.is_job_of_over(process) || state.has_seen_the_end_of(process),
            Role::Node(node) => state.will_not_come_back(node),
            _ => false,
        };
        match hello.resumes {
            Resumes::Nothing => Before::Never,
            Resumes::Joining | Resumes::Joined if hello.epoch == self.epoch => Before::WithThis,
            // It may have nothing that this head could know of, and so be awaited by nobody.
            Resumes::Joining if !is_lost => Before::WithEarlier,
            Resumes::Joined if is_awaited && !is_lost => Before::WithEarlier,
            Resumes::Joining | Resumes::Joined => Before::TooLongAgo,
        }
    }

    /// Why somebody who comes back is not known, for people.
    pub(super) fn why_unknown(&self, hello: &Hello, before: Before) -> String {
        let inside = self.inside.lock();
        let state = &inside.state;
        if let Role::Node(node) = hello.role
            && let Some(why) = state.why_lost(node)
        {
            return why.to_owned();
        }
        match (before, hello.role) {
            (Before::TooLongAgo, Role::Driver(job)) if state.is_recovering() && state.has_ended_before(job) => {
                "the journal with which the head was started does not know its job: the last head had ended that, or the journal is an older \
                 copy"
                    .to_owned()
            }
            (Before::TooLongAgo, _) if !state.is_recovering() => format!(
                "this head began {:.0} s ago, and waits no longer for those that the last one knew",
                self.started.elapsed().as_secs_f64()
            ),
            _ => format!(
                "the head had heard nothing from it for {:?}, or nobody listened any more where it did",
                self.lost_after()
            ),
        }
    }

    pub(crate) async fn serve_connection(self: Arc<Self>, stream: Stream, hello: Hello) {
        let process = hello.address.process;
        self.note_return(&hello);
        self.note_later_head(&hello);
        match hello.role {
            Role::Node(node) => self.serve_node(stream, node, hello).await,
            Role::Driver(job) => self.serve_process(stream, hello, Some(job)).await,
            Role::Worker => self.serve_process(stream, hello, None).await,
            Role::Tool | Role::Head => {
                let (connection, client, server) =
                    mux::connect::<ProcessRequest, ProcessResponse, HeadRequest, HeadResponse>(stream, Waiting::Asleep);
                drop(client);
                let unknown = Some(ONLY_ASKS.to_owned());
                let service = Service { shell: self.clone(), process, role: hello.role, unknown, knew: None };
                self.run(&connection, mux::serve(server, service.serve()), std::future::pending()).await;
                if hello.role == Role::Head {
                    self.standby_left(process);
                }
            }
        }
    }

    async fn run(&self, connection: &Connection, serving: impl Future<Output = ()>, sending: impl Future<Output = ()>) {
        self.until_stopped(async {
            tokio::select! {
                () = serving => {}
                () = sending => {}
                () = connection.closed() => {}
            }
        })
        .await;
        connection.close();
    }

    async fn serve_process(self: Arc<Self>, stream: Stream, hello: Hello, job: Option<JobId>) {
        // A worker process ends with its node, which sees its end.
        let dialler_ended = job.map(|_| peer_process::ended(&stream));
        // A driver looks for the next head when this one stands still.
        let probing = if job.is_some() && self.epoch.is_some() { Probing::Sends } else { Probing::default() };
        let (connection, client, server) = mux::connect_probing::<
            ProcessRequest,
            ProcessResponse,
            HeadRequest,
            HeadResponse,
        >(stream, Waiting::Asleep, probing);
        let client = ProcessClient::new(mux::client_config(), client).spawn();
        let process = hello.address.process;
        let role = job.map_or(Role::Worker, Role::Driver);
        let (entered, before) = {
            let mut inside = self.inside.lock();
            let before = self.before(&hello, &inside.state);
            (peers::enter(&mut inside.processes, process, client, &connection, before), before)
        };
        let mut service = Service { shell: self.clone(), process, role, unknown: None, knew: None };
        let link = match entered {
            Entered::New(link) => {
                self.step(Event::ProcessConnected(process));
                link
            }
            Entered::Back(link) => link,
            Entered::Unknown => {
                let why = self.why_unknown(&hello, before);
                // Worker processes end with their nodes.
                if let Some(job) = job {
                    tracing::warn!("refused the program of {job}, which comes back: {why}");
                }
                service.unknown = Some(why);
                return self.run(&connection, mux::serve(server, service.serve()), std::future::pending()).await;
            }
            Entered::Taken => {
                tracing::warn!(%process, "refused a second connection of a process");
                return connection.close();
            }
        };
        if let Some(standby) = self.standby_address() {
            link.send(HeadEvent::Standby(Some(standby)));
        }
        let request = |number, events| ProcessRequest::HeadEvents { number, events };
        let carrying = link.carry(&connection, request, events_of);
        let mut has_ended = false;
        let carrying = async {
            match dialler_ended {
                Some(ended) => tokio::select! {
                    () = carrying => {}
                    () = async {
                        ended.await;
                        // What it said last is read until then, and its sockets end at once unless somebody else has them.
                        tokio::time::sleep(AFTER_ITS_END).await;
                    } => has_ended = true,
                },
                None => carrying.await,
            }
        };
        self.run(&connection, mux::serve(server, service.serve()), carrying).await;
        let Some(absence) = peers::leave(&mut self.inside.lock().processes, &process, &connection) else { return };
        if !has_ended && self.returns(&absence, &hello).await == Return::Back {
            return;
        }
        let Some(lost) = peers::lose(&mut self.inside.lock().processes, &process, &absence) else { return };
        lost.link.broke();
        self.step(Event::ProcessLost(process, job));
    }

    async fn serve_node(self: Arc<Self>, stream: Stream, node: NodeId, hello: Hello) {
        let (connection, client, server) = mux::connect_probing::<NodeRequest, NodeResponse, HeadRequest, HeadResponse>(
            stream,
            Waiting::Asleep,
            Probing::Both,
        );
        let client = NodeClient::new(mux::client_config(), client).spawn();
        let (process, role) = (hello.address.process, Role::Node(node));
        let knew = hello.epoch.filter(|epoch| hello.resumes != Resumes::Nothing && Some(*epoch) != self.epoch);
        let mut service = Service { shell: self.clone(), process, role, unknown: None, knew };
        let (entered, before) = {
            let mut inside = self.inside.lock();
            let before = self.before(&hello, &inside.state);
            let entered = peers::enter(&mut inside.nodes, node, client, &connection, before);
            if let Entered::Back(_) = entered {
                self.change_in(&mut inside, |state, now| ((), state.step(now, Event::NodeBack(node))));
            }
            (entered, before)
        };
        let link = match entered {
            Entered::New(link) => link,
            Entered::Back(link) => {
                tracing::info!("{node} is back");
                self.note_time();
                link
            }
            Entered::Unknown => {
                let why = self.why_unknown(&hello, before);
                tracing::warn!("refused {node}, which comes back: {why}");
                service.unknown = Some(why);
                return self.run(&connection, mux::serve(server, service.serve()), std::future::pending()).await;
            }
            Entered::Taken => {
                tracing::warn!(%node, "refused a second connection of a node");
                return connection.close();
            }
        };
        let request = |number, messages| NodeRequest::Orders { number, messages };
        let carrying = link.carry(&connection, request, orders_of);
        self.run(&connection, mux::serve(server, service.serve()), carrying).await;
        let absence = {
            let mut inside = self.inside.lock();
            let Some(absence) = peers::leave(&mut inside.nodes, &node, &connection) else { return };
            self.change_in(&mut inside, |state, now| ((), state.step(now, Event::NodeAway(node))));
            absence
        };
        if !absence.is_leaving() && *self.stopping.borrow() == Stage::Running {
            tracing::info!("{node} is suspect: its connection has ended; it may come back");
        }
        let why = match self.returns(&absence, &hello).await {
            Return::Back => return,
            Return::Ended => "its connection to the head ended".to_owned(),
            Return::TooLate => {
                self.until_nobody_else_leads().await;
                format!("the head heard nothing from it for {} s", self.lost_after().as_secs_f64())
            }
        };
        let Some(lost) = peers::lose(&mut self.inside.lock().nodes, &node, &absence) else { return };
        lost.link.broke();
        if *self.stopping.borrow() == Stage::Running && self.inside.lock().state.offers_work(node) {
            tracing::warn!("{node} is lost: {why}");
        }
        self.step(Event::NodeLost(node, why));
        self.inside.lock().choose_keepers();
    }

    /// Waits until a peer that is away is back, or lost. A head that ends waits for nobody.
    async fn returns(&self, absence: &Absence, hello: &Hello) -> Return {
        let mut stopping = self.stopping.subscribe();
        let may_hide = match hello.role {
            Role::Driver(_) => true,
            // A driver's own node, for its objects alone.
            Role::Node(node) => !self.inside.lock().state.offers_work(node),
            _ => false,
        };
        tokio::select! {
            ended = absence.ends(&hello.address, may_hide, || self.lost_after()) => ended,
            _ = stopping.wait_for(|stage| *stage >= Stage::Stopped) => Return::Ended,
        }
    }
}

fn events_of(request: ProcessRequest) -> Vec<HeadEvent> {
    match request {
        ProcessRequest::HeadEvents { events, .. } => events,
        _ => Vec::new(),
    }
}

fn orders_of(request: NodeRequest) -> Vec<NodeMessage> {
    match request {
        NodeRequest::Orders { messages, .. } => messages,
        _ => Vec::new(),
    }
}
