//! The node whose store a driver uses: one of its machine's, or one that it brings itself; another one when that dies.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use wingbeat_core::error::Error;
use wingbeat_core::spec::Address;
use wingbeat_core::{NodeId, ResourceSet};
use wingbeat_net::Token;
use wingbeat_net::address::{self, Stream};
use wingbeat_net::handshake::Purpose;
use wingbeat_net::messages::NodeInfo;
use wingbeat_net::mux::{self, Waiting};
use wingbeat_net::services::{NodeClient, NodeRequest, NodeResponse, Process as _, ProcessRequest, ProcessResponse};
use wingbeat_process::NodeLink;
use wingbeat_process::{PeerService, Session};
use wingbeat_store::Mapping;

use crate::gpus::Gpus;
use crate::join::{self, Joined};
use crate::node::{self, NodeConfig, NodeHandle};

/// How long it may take to notice that the head has ended with a node.
const END_OF_HEAD: Duration = Duration::from_secs(2);

/// Attaches the driver to the first of these nodes that is on its machine and answers, or to one of its own.
pub(crate) async fn attach(joined: &Joined, session: &Session, nodes: Vec<NodeInfo>) -> Result<(), Error> {
    let machine = address::this_machine();
    // Not one that another driver has brought for its own objects: it ends with that.
    let is_of_cluster = |node: &NodeInfo| !node.resources.is_empty();
    let may_serve =
        |node: &NodeInfo| joined.own_store.is_none() && node.address.machine == machine && is_of_cluster(node);
    for NodeInfo { id, address, .. } in nodes.into_iter().filter(may_serve) {
        match attach_to(joined, session, id, &address).await {
            Ok(()) => return Ok(()),
            // It may have died a moment ago.
            Err(error) => tracing::info!(%error, node = %id, "cannot attach to a node"),
        }
    }
    let (id, address) = node_for_objects(joined, session).await?;
    attach_to(joined, session, id, &address).await
}

/// Attaches the driver again whenever its node has died, until the session is over.
pub(crate) async fn stay_attached(joined: Joined, session: Session) {
    let process = session.process();
    while let Some(link) = process.storage() {
        tokio::select! {
            () = link.connection().closed() => {}
            () = process.over() => return,
        }
        if let Err(error) = attach_again(&joined, &session, link.node()).await {
            // When the whole cluster ends, the end of the head is the reason.
            let _ = tokio::time::timeout(END_OF_HEAD, process.over()).await;
            let why = format!("the node whose store it used has ended, and no other can be used: {error}");
            process.end(&Error::SessionEnded { why });
            return;
        }
    }
}

/// A private cluster has one head and one node: when one of them has to end, nothing will run any more.
#[cfg(feature = "embedded")]
pub(crate) async fn end_with(
    head: impl Future<Output = Result<(), String>>,
    node: impl Future<Output = Result<String, String>>,
    session: Session,
) {
    let process = session.process();
    let broken = async {
        match head.await {
            Err(why) => why,
            Ok(()) => std::future::pending().await,
        }
    };
    let why = tokio::select! {
        biased;
        why = broken => why,
        ended = node => format!("the node of this private cluster has ended: {}", ended.unwrap_or_else(|why| why)),
        () = process.over() => return,
    };
    process.end(&Error::SessionEnded { why });
}

async fn attach_again(joined: &Joined, session: &Session, dead: NodeId) -> Result<(), Error> {
    let nodes = session.cluster_state().await?.nodes.into_iter().map(|node| node.info);
    attach(joined, session, nodes.filter(|node| node.id != dead).collect()).await
}

async fn attach_to(joined: &Joined, session: &Session, node: NodeId, daemon: &Address) -> Result<(), Error> {
    let process = session.process();
    let (mapping, stream) = futures::try_join!(
        map_arena(session, daemon, &joined.token),
        address::dial(daemon, "the node daemon", &joined.token, process.hello(Purpose::Control)),
    )?;
    let (connection, client, server) = mux::connect_probing::<NodeRequest, NodeResponse, ProcessRequest, ProcessResponse>(
        stream,
        Waiting::Asleep,
        joined.node,
    );
    let client = NodeClient::new(mux::client_config(), client).spawn();
    process.set_storage(NodeLink::start(node, daemon.clone(), client, mapping, connection));
    let service = PeerService::new(process.clone(), daemon.process);
    process.vital("hearing its node", mux::serve(server, service.serve()));
    Ok(())
}

/// A driver on a machine without a node brings one of its own, without resources: for its objects alone.
async fn node_for_objects(joined: &Joined, session: &Session) -> Result<(NodeId, Address), Error> {
    let (token, cluster, listen) = (joined.token.clone(), joined.cluster, joined.listen);
    // Another one may lead by now.
    let known = session.process().heads();
    let (heads, epoch) = known.unwrap_or_else(|| (vec![joined.head.clone()], joined.epoch));
    let mut others = heads.into_iter();
    let head = others.next().unwrap_or_else(|| joined.head.clone());
    let others = others.collect();
    let store_bytes = joined.own_store.unwrap_or_else(join::default_store_bytes);
    let spill = join::default_spill();
    let memory = node::MemoryConfig::given(None, None)?;
    let (address, embedded) = embed(async move || {
        let node = node::start(NodeConfig {
            head,
            others,
            epoch,
            token,
            cluster,
            resources: ResourceSet::new(),
            gpus: Gpus::default(),
            labels: BTreeMap::new(),
            store_bytes,
            spill_dir: Some(spill.0),
            spill_bytes: spill.1,
            spill_ahead: join::SPILL_AHEAD,
            memory,
            listen,
        })
        .await?;
        Ok((node.address().clone(), node))
    })
    .await?;
    let id = embedded.node.id();
    session.process().keep(Box::new(embedded));
    Ok((id, address))
}

/// The node's shared memory, over a connection of its own, which lasts as long as anything here can touch the memory: longer than
/// the session, where user code holds views.
async fn map_arena(session: &Session, daemon: &Address, token: &Token) -> Result<Arc<Mapping>, Error> {
    let hello = session.process().hello(Purpose::Arena);
    let stream = address::dial(daemon, "the node daemon", token, hello).await?;
    let failed = |error: std::io::Error| Error::io("mapping the node's store", &error);
    let Stream::Unix(stream) = stream else {
        return Err(failed(std::io::Error::other("shared memory reaches no further than this machine")));
    };
    let fd = loop {
        stream.readable().await.map_err(failed)?;
        match crate::guard::receive_fd(&stream) {
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            other => break other.map_err(failed)?,
        }
    };
    let capacity = rustix::fs::fstat(&fd).map_err(|error| failed(error.into()))?.st_size as u64;
    let lease = stream.into_std().map_err(failed)?;
    Mapping::open_leased(fd, capacity, lease.into()).map_err(failed)
}

/// A head and a node, or a node alone, inside this process, on a runtime of their own. Dropping it ends them.
pub(crate) struct Embedded {
    node: NodeHandle,
    stop: tokio::sync::watch::Sender<bool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

#[cfg(feature = "embedded")]
impl Embedded {
    /// Waits until the node has ended.
    pub(crate) fn node_ended(&self) -> impl Future<Output = Result<String, String>> + Send + use<> {
        self.node.ended()
    }
}

impl Drop for Embedded {
    fn drop(&mut self) {
        self.node.shut_down();
        let _ = self.stop.send(true);
        if let Some(thread) = self.thread.take() {
            // A panic there was printed there.
            let _ = thread.join();
        }
    }
}

/// Runs `start` on a new thread's runtime, which lives until the result is dropped.
pub(crate) async fn embed<F, T>(start: F) -> Result<(T, Embedded), Error>
where
    F: AsyncFnOnce() -> Result<(T, NodeHandle), Error> + Send + 'static,
    T: Send + 'static,
{
    let (started, starting) = tokio::sync::oneshot::channel();
    let (stop, mut stopped) = tokio::sync::watch::channel(false);
    let thread = std::thread::Builder::new()
        .name("wingbeat-node".into())
        .spawn(move || {
            let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
                Ok(runtime) => runtime,
                Err(error) => {
                    let _ = started.send(Err(Error::io("starting the node's runtime", &error)));
                    return;
                }
            };
            runtime.block_on(async move {
                let _ = started.send(start().await);
                let _ = stopped.wait_for(|stop| *stop).await;
            });
            runtime.shutdown_timeout(std::time::Duration::from_millis(200));
        })
        .map_err(|error| Error::io("starting the node's thread", &error))?;
    let answer =
        starting.await.map_err(|_| Error::Failed { what: "starting the node".into(), why: "its thread ended".into() });
    match answer.and_then(|answer| answer) {
        Ok((first, node)) => Ok((first, Embedded { node, stop, thread: Some(thread) })),
        Err(error) => {
            let _ = stop.send(true);
            let _ = thread.join();
            Err(error)
        }
    }
}
