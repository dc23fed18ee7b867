//! What the daemon answers: to the head, to processes of this machine, to owners elsewhere.

use std::sync::Arc;

use tarpc::context::Context;
use wingbeat_core::error::Error;
use wingbeat_core::spec::Address;
use wingbeat_core::{JobId, ObjectId, ProcessId};
use wingbeat_net::address::Stream;
use wingbeat_net::handshake::{Hello, Purpose, Role};
use wingbeat_net::messages::{Fetch, Located, NodeMessage, WorkerStart};
use wingbeat_net::mux::{self, Connection, Waiting};
use wingbeat_net::services::{Node as _, NodeRequest, NodeResponse, ProcessRequest, ProcessResponse};
use wingbeat_net::silence::Probing;
use wingbeat_store::{AlreadyExists, CreateError, Extent, GetError};

use super::transfer::create_error;
use super::{Daemon, is_from_head, send_arena};

/// The service for one connection; it knows who is on the other side.
#[derive(Clone)]
pub(super) struct NodeService {
    daemon: Arc<Daemon>,
    peer: ProcessId,
    connection: Option<Connection>,
}

impl NodeService {
    pub(super) fn new(daemon: Arc<Daemon>, peer: ProcessId) -> Self {
        NodeService { daemon, peer, connection: None }
    }
}

impl Daemon {
    /// Serves a connection that proved the token.
    pub(super) async fn accept(self: Arc<Self>, stream: Stream, hello: Hello) {
        match hello.purpose {
            Purpose::Bulk => return self.serve_bulk(stream).await,
            Purpose::Arena => {
                if let Stream::Unix(stream) = stream {
                    let arena = self.store.attach(hello.address.process);
                    if let Err(error) = stream.into_std().and_then(|stream| send_arena(&stream, arena)) {
                        tracing::warn!(%error, "cannot hand out the store's memory");
                    }
                }
                return;
            }
            Purpose::Control => {}
        }
        let peer = hello.address.process;
        let probing = match hello.role {
            // They must notice when this daemon is stopped. When they are, nobody waits for what they say.
            Role::Worker | Role::Driver(_) => Probing::Sends,
            _ => Probing::default(),
        };
        let (connection, _, server) = mux::connect_probing::<ProcessRequest, ProcessResponse, NodeRequest, NodeResponse>(
            stream,
            Waiting::Asleep,
            probing,
        );
        let service = NodeService { daemon: self.clone(), peer, connection: Some(connection.clone()) };
        self.until_ended(async {
            tokio::select! {
                () = mux::serve(server, service.serve()) => {}
                () = connection.closed() => {}
            }
        })
        .await;
        connection.close();
        // What worker processes hold is taken back when they have ended; a driver only has its connection.
        if matches!(hello.role, Role::Driver(_)) {
            self.store.process_gone(peer);
        }
    }

    fn take_in(self: &Arc<Self>, peer: ProcessId, message: NodeMessage) {
        if is_from_head(&message) && peer != self.head_address.process {
            tracing::warn!(%peer, ?message, "only the head may say this");
            return;
        }
        match message {
            NodeMessage::BeginJob(spec) => self.begin_job(spec),
            NodeMessage::StartLease(start) => self.start_lease(*start),
            NodeMessage::EndLease { lease, kill } => self.end_lease(lease, kill),
            NodeMessage::DrainActor { lease, by } => self.drain(lease, by),
            NodeMessage::EndJob { job } => self.end_job(job),
            NodeMessage::Stop(why) => self.told_to_end(&why),
            NodeMessage::Prestart { job, count } => self.prestart(job, count),
            NodeMessage::Unpin(objects) => {
                for object in objects {
                    self.store.release(object, peer);
                }
            }
            NodeMessage::Delete(objects) => {
                for object in objects {
                    self.store.delete(object);
                }
            }
            NodeMessage::KillWorker { process, why } => self.kill_worker(process, why),
            NodeMessage::ActorStarted { actor, incarnation, outcome } => {
                self.actor_started(peer, actor, incarnation, outcome);
            }
            NodeMessage::Stays => self.stays(peer),
            NodeMessage::LostHead => self.lost_its_head(peer),
        }
    }
}

fn located(extent: Extent) -> Located {
    Located { offset: extent.offset, len: extent.len }
}

fn get_error(object: ObjectId, error: &GetError) -> Error {
    match error {
        GetError::Full(full) => Error::StoreFull { what: object.to_string(), why: full.to_string() },
        other => Error::ObjectLost { object, why: other.to_string() },
    }
}

impl wingbeat_net::services::Node for NodeService {
    async fn deliver(self, _: Context, messages: Vec<NodeMessage>) {
        for message in messages {
            self.daemon.take_in(self.peer, message);
        }
    }

    async fn register_worker(self, _: Context, address: Address, pid: u32) -> Result<WorkerStart, Error> {
        let daemon = &self.daemon;
        let refused = |why: &str| Error::Refused { who: "the node daemon".into(), why: why.into() };
        let connection = self.connection.ok_or_else(|| refused("this connection cannot carry commands"))?;
        let job = daemon
            .registered(self.peer, address, pid, connection)
            .ok_or_else(|| refused("it did not start this worker process, or has given it up"))?;
        Ok(WorkerStart {
            cluster: daemon.cluster,
            job: job.id,
            namespace: job.namespace.clone(),
            node: daemon.id,
            daemon: daemon.address.clone(),
            head: daemon.head_address.clone(),
            arena_bytes: daemon.store.capacity(),
            driver: job.driver.clone(),
        })
    }

    async fn create(self, _: Context, object: ObjectId, size: u64) -> Result<Option<Located>, Error> {
        let (daemon, peer) = (self.daemon, self.peer);
        let what = object.to_string();
        let mut created = daemon.store.try_create(object, size, peer);
        if let Err(CreateError::AlreadyExists { state: AlreadyExists::Different, .. }) = created {
            // An earlier attempt whose result never arrived, at a task that does not give the same twice.
            daemon.store.delete(object);
            created = daemon.store.try_create(object, size, peer);
        }
        match created {
            Ok(Some(extent)) => return Ok(Some(located(extent))),
            Ok(None) => {}
            Err(CreateError::AlreadyExists { state: AlreadyExists::Sealed, .. }) => return Ok(None),
            Err(error) => return Err(create_error(what, &error)),
        }
        // Something must go to disk first.
        let created = tokio::task::spawn_blocking(move || daemon.store.create(object, size, peer)).await;
        match created {
            Ok(Ok(extent)) => Ok(Some(located(extent))),
            Ok(Err(error)) => Err(create_error(what, &error)),
            Err(error) => Err(Error::Io { what: "spilling objects".into(), why: error.to_string() }),
        }
    }

    async fn seal(self, _: Context, object: ObjectId) -> Result<(), Error> {
        let sealed = self.daemon.store.seal(object, self.peer);
        sealed.map_err(|error| Error::Io { what: format!("sealing {object}"), why: error.to_string() })
    }

    async fn settle_output(self, _: Context, job: JobId) {
        self.daemon.settle_output(job).await;
    }

    async fn fetch(self, _: Context, what: Fetch) -> Result<(Located, bool), Error> {
        let Fetch { object, stored } = what;
        let (daemon, peer) = (self.daemon, self.peer);
        let new = daemon.obtain(object, stored).await?;
        match daemon.store.try_get(object, peer) {
            Ok(Some(extent)) => return Ok((located(extent), new)),
            Ok(None) => {}
            Err(error) => return Err(get_error(object, &error)),
        }
        let got = tokio::task::spawn_blocking(move || daemon.store.get(object, peer)).await;
        match got {
            Ok(Ok(extent)) => Ok((located(extent), new)),
            Ok(Err(error)) => Err(get_error(object, &error)),
            Err(error) => Err(Error::Io { what: "reading a spilled object".into(), why: error.to_string() }),
        }
    }
}
