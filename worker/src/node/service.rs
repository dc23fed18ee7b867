//! What the daemon answers: to the head, to processes of this machine, to owners elsewhere.

use std::sync::Arc;
use std::time::Duration;

use tarpc::context::Context;
use wingbeat_core::codec::Payload;
use wingbeat_core::error::Error;
use wingbeat_core::spec::Address;
use wingbeat_core::{JobId, ObjectId, ProcessId};
use wingbeat_net::address::{self, Stream};
use wingbeat_net::handshake::{Hello, Purpose, Role};
use wingbeat_net::limits;
use wingbeat_net::messages::{
    Ballot, Fetch, Leadership, Located, NodeMessage, Place, ProcessStacks, Support, Vote, WorkerStart,
};
use wingbeat_net::mux::{self, Connection, Waiting};
use wingbeat_net::services::{Node as _, NodeRequest, NodeResponse, ProcessClient, ProcessRequest, ProcessResponse};
use wingbeat_net::silence::Probing;
use wingbeat_node::Event;
use wingbeat_store::Extent;

use super::objects::{Destination, Present};
use super::{Daemon, is_from_head};

/// A worker process looks at its threads, and names what it finds, within this time: it may get little CPU.
const STACKS_LIMIT: Duration = Duration::from_secs(20);

/// The service for one connection; it knows who is on the other side.
#[derive(Clone)]
pub(super) struct NodeService {
    daemon: Arc<Daemon>,
    peer: ProcessId,
    /// Of a driver; that of a worker process is known to the pool.
    job: Option<JobId>,
    connection: Option<Connection>,
}

impl NodeService {
    pub(super) fn new(daemon: Arc<Daemon>, peer: ProcessId) -> Self {
        NodeService { daemon, peer, job: None, connection: None }
    }

    /// The peer has an object in the store.
    fn note_owner(&self, object: ObjectId, steward: Option<Box<Address>>) {
        let of_worker = || self.daemon.pool.lock().state.job_of(self.peer);
        if let Some(job) = self.job.or_else(of_worker) {
            self.daemon.owners.note(job, object.owner(), steward.map(|steward| *steward));
        }
    }
}

impl Daemon {
    /// Serves a connection that proved the token.
    pub(super) async fn accept(self: Arc<Self>, stream: Stream, hello: Hello) {
        match hello.purpose {
            Purpose::Bulk => return self.serve_bulk(stream).await,
            Purpose::Arena => {
                // Worker processes have it from the guard.
                if let (Stream::Unix(stream), Role::Driver(_)) = (stream, hello.role) {
                    self.lend_memory(stream, hello.address.process).await;
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
        let job = match hello.role {
            Role::Driver(job) => Some(job),
            _ => None,
        };
        let service = NodeService { daemon: self.clone(), peer, job, connection: Some(connection.clone()) };
        self.until_ended(async {
            tokio::select! {
                () = mux::serve(server, service.serve()) => {}
                () = connection.closed() => {}
            }
        })
        .await;
        // What the peer holds in the store is not taken back here: user code may read and write there for longer (`loans`).
        connection.close();
    }

    fn take_in(self: &Arc<Self>, peer: ProcessId, message: NodeMessage) {
        if is_from_head(&message) && peer != self.head.way.address().process {
            tracing::warn!(%peer, ?message, "only the head may say this");
            return;
        }
        match message {
            NodeMessage::Stop(why) => self.told_to_end(&why),
            NodeMessage::Unpin(objects) => {
                for object in objects {
                    self.store.release(object, peer);
                }
                self.object_settled();
            }
            NodeMessage::Delete(objects) => self.delete(objects),
            NodeMessage::OwnersGone { owners, are_jobs_over } => self.owners_gone(&owners, are_jobs_over),
            NodeMessage::NodeDied(node) => {
                self.transfers.node_died(node);
                self.owners.steward.node_died(node);
            }
            NodeMessage::Keep(keep) => self.kept.lock().take_in(*keep),
            of_leases => self.step(Event::Says(peer, of_leases)),
        }
    }
}

impl Daemon {
    /// Asks a worker process what its threads do: others cannot reach it as surely.
    async fn stacks_of(&self, process: ProcessId) -> Result<ProcessStacks, Error> {
        let (known, pid) = {
            let pool = self.pool.lock();
            (pool.state.address_of(process), pool.state.pid_of(process))
        };
        let address = known.ok_or_else(|| Error::InvalidArgument { what: format!("{process} has ended") })?;
        // One that is stopped answers nobody, and takes no connection.
        still(pid)?;
        let asked = self.ask_for_stacks(&address).await;
        asked.map_err(|error| still(pid).err().unwrap_or(error))
    }

    async fn ask_for_stacks(&self, address: &Address) -> Result<ProcessStacks, Error> {
        let hello = self.hello(Purpose::Control);
        let stream = address::dial(address, "the worker process", &self.who.token, hello).await?;
        let (connection, client, server) =
            mux::connect::<ProcessRequest, ProcessResponse, NodeRequest, NodeResponse>(stream, Waiting::Asleep);
        drop(server);
        let client = ProcessClient::new(mux::client_config(), client).spawn();
        let answer = client.stacks(mux::within(STACKS_LIMIT)).await;
        connection.close();
        mux::answered(answer, "the worker process")?
    }
}

/// Refuses to ask a process that the kernel does not let run.
///
/// # Errors
/// It is stopped, or held by a debugger.
fn still(pid: u32) -> Result<(), Error> {
    let state = match wingbeat_process::programs::doing(&format!("/proc/{pid}")) {
        Some((_, state)) if state.starts_with("is stopped") => format!("{state} (state T); SIGCONT has it go on"),
        Some((_, state)) if state.starts_with("is held by a debugger") => format!("{state} (state t)"),
        _ => return Ok(()),
    };
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    Err(Error::Failed { what: format!("looking at pid {pid} on {host}"), why: format!("it {state}") })
}

fn located(extent: Extent) -> Located {
    Located { offset: extent.offset, len: extent.len }
}

impl wingbeat_net::services::Node for NodeService {
    async fn deliver(self, _: Context, messages: Vec<NodeMessage>) {
        for message in messages {
            self.daemon.take_in(self.peer, message);
        }
    }

    async fn orders(self, _: Context, number: u64, messages: Vec<NodeMessage>) {
        if self.peer != self.daemon.head.way.address().process {
            tracing::warn!(peer = %self.peer, "only the head may say this");
            return;
        }
        if !self.daemon.head.hears(number) {
            return;
        }
        for message in messages {
            self.daemon.take_in(self.peer, message);
        }
    }

    async fn register_worker(self, _: Context, address: Address, pid: u32) -> Result<WorkerStart, Error> {
        let daemon = &self.daemon;
        let refused = |why: &str| Error::Refused { who: "the node daemon".into(), why: why.into() };
        let connection = self.connection.ok_or_else(|| refused("this connection cannot carry commands"))?;
        let address = Address { steward: Some(Box::new(daemon.owners.steward.address().clone())), ..address };
        let job = daemon
            .registered(self.peer, address, pid, connection)
            .ok_or_else(|| refused("it did not start this worker process, or has given it up"))?;
        Ok(WorkerStart {
            cluster: daemon.who.cluster,
            job: job.id,
            namespace: job.namespace.clone(),
            node: daemon.who.id,
            daemon: daemon.who.address.clone(),
            head: daemon.head.way.address(),
            standby: daemon.succession.standby(),
            arena_bytes: daemon.store.capacity(),
            driver: job.driver.clone(),
            // Other times are said to it from now on.
            patience: limits::patience(),
        })
    }

    async fn create(
        self,
        _: Context,
        object: ObjectId,
        size: u64,
        replaces: bool,
        steward: Option<Box<Address>>,
    ) -> Result<Place, Error> {
        let present = if replaces { Present::Replaced } else { Present::Kept };
        let place = self.daemon.create(object, size, self.peer, present).await?;
        self.note_owner(object, steward);
        Ok(match place {
            Destination::Free(extent) => Place::Free(located(extent)),
            Destination::Taken(len) => Place::Taken { len },
        })
    }

    async fn seal(self, _: Context, object: ObjectId) -> Result<(), Error> {
        let sealed = self.daemon.store.seal(object, self.peer);
        self.daemon.object_settled();
        sealed.map_err(|error| Error::Failed { what: format!("sealing {object}"), why: error.to_string() })
    }

    async fn stacks(self, _: Context, process: ProcessId) -> Result<ProcessStacks, Error> {
        self.daemon.stacks_of(process).await
    }

    async fn process_above(self, _: Context, pid: u32) -> Option<ProcessId> {
        self.daemon.process_above(pid)
    }

    async fn settle_output(self, _: Context, job: JobId) -> bool {
        self.daemon.settle_output(job).await;
        true
    }

    async fn fetch(self, _: Context, what: Fetch) -> Result<(Located, bool), Error> {
        let Fetch { object, stored, steward } = what;
        // Before there is a copy: it may be made, and not be pinned.
        self.note_owner(object, steward.clone());
        let (extent, new) = self.daemon.read(object, stored, self.peer).await?;
        // Again: an owner of whom nothing is here is forgotten, and this may have waited.
        self.note_owner(object, steward);
        Ok((located(extent), new))
    }

    async fn support(self, _: Context, said: Leadership) -> Support {
        if self.peer != self.daemon.head.way.address().process {
            tracing::warn!(peer = %self.peer, "only the head may ask for support");
            return std::future::pending().await;
        }
        self.daemon.support(&said)
    }

    async fn elect(self, _: Context, ballot: Ballot) -> Vote {
        if self.peer != self.daemon.head.way.address().process {
            tracing::warn!(peer = %self.peer, "only a standby of the cluster may ask for a vote");
            return std::future::pending().await;
        }
        self.daemon.vote(&ballot)
    }

    async fn read_kept(self, _: Context, after: Option<Payload>) -> Vec<(Payload, Payload)> {
        match self.peer == self.daemon.head.way.address().process {
            true => self.daemon.kept.lock().read(after.as_deref()),
            false => Vec::new(),
        }
    }
}
