//! This process's connection to the head, over any number of connections. A driver dials at once; a worker process when it
//! first has something to say.
//!
//! A connection that ends is no loss: the head is dialled again, and what was not answered is sent again. A head that was started
//! again is told what this process has and wants instead. It is lost when its machine says that nobody listens there any more
//! and no other head is going to, when it says that it has given this process up, or when it cannot be reached for as long as it
//! waits for this process.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tarpc::client::RpcError;
use tokio::sync::watch;
use wingbeat_core::error::Error;
use wingbeat_core::spec::Address;
use wingbeat_core::{ActorId, ErrorKind, PlacementGroupId};
use wingbeat_net::address::{DialError, Stream};
use wingbeat_net::handshake::{Epoch, Hello, Purpose, Resumes, Role};
use wingbeat_net::limits::limits;
use wingbeat_net::messages::HeadMessage;
use wingbeat_net::mux::{self, Connection, Waiting};
use wingbeat_net::services::{HeadClient, HeadRequest, HeadResponse, Process as _, ProcessRequest, ProcessResponse};
use wingbeat_net::silence::Probing;
use wingbeat_net::way::Met;

use crate::owner::Outside;
use crate::recorded::Event;
use crate::wire::executor::EXITS;
use crate::wire::head_link::{HeadLink, Standing};
use crate::wire::process::Process;
use crate::wire::service::PeerService;

/// The first pause before the head is dialled again, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(5), Duration::from_secs(1));

fn process_ended() -> Error {
    Error::SessionEnded { why: "it was shut down while connecting to the head".into() }
}

impl Process {
    /// Queues a message to the head.
    pub fn tell_head(&self, message: HeadMessage) {
        self.wire.tell_head(&self.owner, message);
    }

    /// The head may be there, too; its node is with the first. A worker process follows it there, since its own connection may say nothing
    /// of a head that stands still.
    pub(crate) fn learn_heads(&self, heads: Vec<Address>) {
        if let Some(head) = self.wire.head.get() {
            let is_elsewhere = heads.first().is_some_and(|first| !head.is_with(first));
            heads.into_iter().for_each(|other| head.learn(other));
            if is_elsewhere {
                head.close();
            }
        }
    }

    /// Where the head may be, and which was joined last.
    pub fn heads(&self) -> Option<(Vec<Address>, Option<Epoch>)> {
        self.wire.head.get().map(|head| (head.heads(), head.epoch()))
    }

    /// Waits until the head has taken in what was said so far, or is lost.
    pub(crate) async fn head_flushed(&self) {
        if let Some(head) = self.wire.head.get() {
            head.shared.link.flushed().await;
        }
    }

    /// Dials the head, to which something was said or is to be.
    pub(super) fn reach_head(&self, head: &HeadLink) {
        let (process, head) = (self.clone(), head.clone());
        self.vital("its connection to the head", async move {
            let why = match process.dial_head(&head).await {
                Ok(stream) => process.see_head_through(&head, stream).await,
                Err(error) => {
                    tracing::warn!(%error, "cannot reach the head");
                    error
                }
            };
            head.shared.link.broke();
            head.shared.client.send_replace(Standing::Lost(why.clone()));
            process.head_lost(why);
        });
    }

    /// The first connection. A driver that cannot reach its head is told at once; a worker process knows that there is one.
    async fn dial_head(&self, head: &HeadLink) -> Result<Stream, Error> {
        if self.wire.who.role == Role::Worker {
            let found = self.find_head(head, Resumes::Nothing).await.map(|(stream, _)| stream);
            return found.ok_or_else(|| self.head_is_lost(head));
        }
        let dialled = head.shared.way.dial(&self.wire.who.token, self.hello(Purpose::Control)).await;
        match dialled.map_err(Error::from) {
            Ok((stream, _)) => Ok(stream),
            // It was there a moment ago.
            Err(error @ (Error::Unreachable { .. } | Error::OutOfDescriptors { .. }))
                if head.shared.way.is_followed() =>
            {
                let found = self.find_head(head, Resumes::Nothing).await.map(|(stream, _)| stream);
                found.ok_or(error)
            }
            Err(error) => Err(error),
        }
    }

    /// The head's client, if there is a connection now.
    pub fn connected_head(&self) -> Option<HeadClient> {
        match &*self.standing_with_head().ok()?.borrow() {
            Standing::Here(client) => Some(client.clone()),
            Standing::Away | Standing::Lost(_) => None,
        }
    }

    /// The head's client, for questions; dials if need be, and waits while there is no connection.
    ///
    /// # Errors
    /// When there is no head, or it cannot be reached.
    pub async fn head_client(&self) -> Result<HeadClient, Error> {
        self.client_of_head(&mut self.standing_with_head()?).await
    }

    /// Asks the head something, on the IO thread; again, if the connection ends before it has answered. What it is asked to
    /// make carries an id, so that it is made once.
    ///
    /// # Errors
    /// There is no head, it cannot be reached, or it does not answer.
    pub async fn ask_head<T, Q, F>(&self, question: Q) -> Result<T, Error>
    where
        Q: Fn(HeadClient) -> F + Send,
        F: Future<Output = Result<T, RpcError>> + Send + 'static,
        T: Send + 'static,
    {
        let mut standing = self.standing_with_head()?;
        loop {
            let client = self.client_of_head(&mut standing).await?;
            let asking = self.io().spawn(question(client));
            let answer = asking.await.map_err(|_| self.no_answer())?;
            match answer {
                Err(RpcError::Shutdown | RpcError::Channel(_)) => {
                    // What came of the connection is told in a moment.
                    tokio::select! {
                        _ = standing.changed() => {}
                        () = self.over() => return Err(self.owner.over_error()),
                    }
                }
                answer => {
                    let answered = mux::answered(answer, "the head");
                    return answered.map_err(|error| self.ended().cloned().unwrap_or(error));
                }
            }
        }
    }

    fn standing_with_head(&self) -> Result<watch::Receiver<Standing>, Error> {
        let head = self.wire.head.get().ok_or(Error::NoSession)?;
        if head.is_first_use() {
            self.reach_head(head);
        }
        Ok(head.shared.client.subscribe())
    }

    async fn client_of_head(&self, standing: &mut watch::Receiver<Standing>) -> Result<HeadClient, Error> {
        let known = async {
            match standing.wait_for(|standing| !matches!(standing, Standing::Away)).await.as_deref() {
                Ok(Standing::Here(client)) => Ok(client.clone()),
                Ok(Standing::Lost(why)) => Err(why.clone()),
                Ok(Standing::Away) | Err(_) => Err(process_ended()),
            }
        };
        tokio::select! {
            biased;
            // Why the head is lost says more than that the session is over.
            known = known => known,
            () = self.over() => Err(self.owner.over_error()),
        }
    }

    /// Talks to the head over one connection after the other, until it is lost. Answers with why.
    async fn see_head_through(&self, head: &HeadLink, first: Stream) -> Error {
        let (mut stream, mut back) = (first, None);
        let mut told = None;
        loop {
            let given_up = self.talk_to_head(head, stream, back).await;
            match given_up {
                Some(why) if !head.is_stopped() => {
                    let at = shown(head);
                    return Error::SessionEnded {
                        why: format!(
                            "the head{at} has given this process up, because {why}; what was running may be lost"
                        ),
                    };
                }
                None if !self.is_shut_down() => {}
                _ => return self.head_is_lost(head),
            }
            let has_joined = self.wire.who.role == Role::Worker || head.job().is_some();
            let resumes = if has_joined { Resumes::Joined } else { Resumes::Joining };
            let Some((found, met)) = self.find_head(head, resumes).await else { return self.head_is_lost(head) };
            // The next head may have taken in what it was told over an earlier connection.
            match met {
                Met::Next(epoch) if told.replace(epoch) != Some(epoch) => self.rejoin(head),
                Met::Next(_) => {}
                // What was said to another goes to this one, and would be missing there.
                _ => told = None,
            }
            (stream, back) = (found, Some(met));
        }
    }

    /// The actor that runs here has asked for its end. The process ends when the head says so: it must know first that no other life is to
    /// follow.
    pub(crate) fn actor_exits(&self, actor: ActorId) {
        let _ = self.wire.exits.set(actor);
        self.tell_head(HeadMessage::TerminateActor { actor, by: EXITS.into() });
    }

    /// Says to a head that was started again what it is to know.
    fn rejoin(&self, head: &HeadLink) {
        tracing::info!("the head was started again");
        self.wire.record(|| Event::HeadRestarted);
        head.begin_anew();
        self.owner.rejoin();
        // The last one may have known it and written down nothing of it, and then it was not carried out.
        if let Some(actor) = self.wire.exits.get() {
            self.actor_exits(*actor);
        }
        for group in self.groups_to_hear_of() {
            self.tell_head(HeadMessage::WatchPlacementGroup(group));
        }
        let waits: Vec<_> = self.wire.waits.iter().map(|waiting| waiting.clone()).collect();
        for waiting in waits {
            waiting.tell_anew();
        }
    }

    /// Those that somebody here waits for, and those for which this process stays: they may have been removed meanwhile.
    pub(super) fn groups_to_hear_of(&self) -> BTreeSet<PlacementGroupId> {
        // Of one that is being made, the next head is asked again, and may not know it yet.
        let own = self.wire.own_groups.iter().filter(|group| *group.value()).map(|group| *group.key());
        self.wire.groups.ids().into_iter().chain(own).collect()
    }

    /// Talks to the head until the connection ends. Why the head has given this process up, if it says that it has.
    async fn talk_to_head(&self, head: &HeadLink, stream: Stream, back: Option<Met>) -> Option<String> {
        let shared = &head.shared;
        // A head that stands still closes nothing. A driver on its machine that is stopped itself keeps what it has there.
        let is_noted = self.wire.who.role != Role::Worker && shared.way.is_followed();
        let probing = if is_noted { Probing::Notes } else { Probing::default() };
        let (connection, client, server) = mux::connect_probing::<
            HeadRequest,
            HeadResponse,
            ProcessRequest,
            ProcessResponse,
        >(stream, Waiting::Asleep, probing);
        *shared.connection.lock() = Some(connection.clone());
        self.wire.record(|| Event::HeadConnected);
        let client = HeadClient::new(mux::client_config(), client).spawn();
        let service = PeerService::new(self.clone(), head.address().process);
        let talking = async {
            if let Some(met) = back {
                match come_back(head, &client, met).await {
                    Ok(None) => shared.way.joined(met),
                    Ok(given_up) => return given_up,
                    // The next connection may tell.
                    Err(_) => return None,
                }
            }
            let request = |number, messages| HeadRequest::Deliver { number, messages };
            let carrying = shared.link.carry(&connection, request, messages_of);
            let asking = async {
                // What is asked may be about what the next head is only being told, over however many connections.
                if shared.tells.load(Ordering::Acquire) && shared.link.flushed().await {
                    shared.tells.store(false, Ordering::Release);
                }
                shared.client.send_replace(Standing::Here(client));
                std::future::pending().await
            };
            tokio::select! {
                () = carrying => None,
                never = asking => never,
                () = until_another_may_lead(head, &connection) => {
                    tracing::warn!("the head says nothing; looking for it, and for its standby");
                    None
                }
            }
        };
        let mut given_up = None;
        let talking = async {
            given_up = talking.await;
            connection.close();
        };
        mux::beside(mux::serve(server, service.serve()), talking).await;
        shared.client.send_replace(Standing::Away);
        self.wire.record(|| Event::HeadDisconnected);
        given_up
    }

    /// Dials the head until it answers; none when it is gone, or has given this process up by now.
    async fn find_head(&self, head: &HeadLink, resumes: Resumes) -> Option<(Stream, Met)> {
        let end = Instant::now() + limits().lost;
        // A head inside a driver may stand still with that (Ctrl-Z). When it ends, so does the node of a worker process, which ends that.
        let is_patient = self.wire.who.role == Role::Worker && head.address().tcp.is_none();
        let (mut pause, longest) = PAUSES;
        while !self.is_shut_down() && (is_patient || Instant::now() < end) {
            let hello = Hello { resumes, ..self.hello(Purpose::Control) };
            let dialling = head.shared.way.dial(&self.wire.who.token, hello);
            // What is lost on the way is not waited for as long as a machine may take to answer.
            let limit = if resumes == Resumes::Nothing { limits().dial } else { limits().redial };
            match tokio::time::timeout(limit, dialling).await {
                Ok(Ok(found)) => return Some(found),
                // The node of a worker process knows better whether there will be another, and ends it if not.
                Ok(Err(DialError::Gone(_))) if self.wire.who.role != Role::Worker => return None,
                Ok(Err(DialError::Gone(error) | DialError::Failed(error))) => {
                    tracing::debug!(%error, "cannot reach the head");
                }
                Err(_) => {}
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(longest);
        }
        None
    }

    fn head_is_lost(&self, head: &HeadLink) -> Error {
        // Whoever leaves loses nothing.
        if let Some(ended) = self.ended().filter(|_| self.is_shut_down()) {
            return ended.clone();
        }
        if head.is_stopped() {
            return Error::SessionEnded { why: "the cluster was stopped".into() };
        }
        let (at, lost) = (shown(head), limits().lost);
        Error::SessionEnded {
            why: format!(
                "the head{at} is gone, or has heard nothing from this process for {lost:?}; what was running may be lost"
            ),
        }
    }

    fn head_lost(&self, why: Error) {
        if let Some(head) = self.wire.head.get()
            && !self.is_shut_down()
        {
            let is_told = matches!(why, Error::SessionEnded { .. });
            self.end(&if is_told { why } else { self.head_is_lost(head) });
        }
    }
}

/// Where a head is, behind its name.
fn shown(head: &HeadLink) -> String {
    head.address().tcp.map_or_else(String::new, |tcp| format!(" at {tcp}"))
}

/// Waits until the head has been silent for long, and there may be another.
async fn until_another_may_lead(head: &HeadLink, connection: &Connection) {
    let mut silence = connection.silence();
    while silence.wait_for(|is_silent| *is_silent).await.is_ok() {
        if head.heads().len() > 1 {
            return;
        }
        if silence.wait_for(|is_silent| !*is_silent).await.is_err() {
            break;
        }
    }
    // It has ended, which others notice.
    std::future::pending().await
}

/// Goes on with the head over a new connection. Why it does not know this process any more; none if it does, or does now.
async fn come_back(head: &HeadLink, client: &HeadClient, met: Met) -> Result<Option<String>, RpcError> {
    if let Some(why) = client.resume(mux::within(limits().silence)).await? {
        return Ok(Some(why));
    }
    let (Met::Next(_), Some(job)) = (met, head.job()) else { return Ok(None) };
    let joined = client.join_job(mux::within(limits().written), job.clone()).await?;
    let Err(error) = joined else { return Ok(None) };
    tracing::warn!(%error, "the head that was started again does not take this job");
    if error.kind() == ErrorKind::Full {
        // It cannot write now.
        tokio::time::sleep(PAUSES.1).await;
        return Err(RpcError::Shutdown);
    }
    Ok(Some(error.to_string()))
}

fn messages_of(request: HeadRequest) -> Vec<HeadMessage> {
    match request {
        HeadRequest::Deliver { messages, .. } => messages,
        _ => Vec::new(),
    }
}
