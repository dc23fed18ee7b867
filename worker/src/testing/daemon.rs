//! The head or the node of a test cluster: what `wingbeat head` and `wingbeat worker` do, without signals, since they end by SIGKILL.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};

use wingbeat_core::ClusterId;
use wingbeat_core::error::Error;
use wingbeat_head::{Head, HeadConfig, HeadHandle};
use wingbeat_net::Token;

use super::{Ready, Role, Start, Started};
use crate::node::NodeHandle;
use crate::{guard, join, log, node};

/// The daemon. Returns when it has ended by itself.
pub(super) fn main(start: Start, lifeline: OwnedFd) -> io::Result<()> {
    log::to_stderr(None, false)?;
    wingbeat_net::descriptors::raise_limit();
    let name = match &start.role {
        Role::Head { .. } => c"wingbeat-head",
        Role::Node { .. } => c"wingbeat-node",
    };
    rustix::thread::set_name(name)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let ended = runtime.block_on(async {
        let running = Running::start(start.role, Token::new(start.token)).await;
        let started = match &running {
            Ok(running) => Started::Ready { pid: std::process::id(), ready: running.ready() },
            Err(error) => Started::Failed(error.to_string()),
        };
        guard::send(lifeline.as_fd(), &started)?;
        match running {
            Ok(running) => running.ended().await.map_err(io::Error::other),
            // The test says why.
            Err(_) => Ok(()),
        }
    });
    if let Err(error) = ended {
        tracing::error!("it ends: {error}");
    }
    runtime.shutdown_timeout(std::time::Duration::from_millis(200));
    log::written();
    Ok(())
}

enum Running {
    Head(HeadHandle, SocketAddr),
    Node(NodeHandle),
}

impl Running {
    async fn start(role: Role, token: Token) -> Result<Running, Error> {
        match role {
            Role::Head { at, patience } => {
                let config = HeadConfig { tcp: Some(at), token, cluster: ClusterId::random(), patience };
                let head = Head::start_to_be_followed(config).await?;
                let at = head.address().tcp.unwrap_or(at);
                tracing::info!("listening at {at}");
                Ok(Running::Head(head, at))
            }
            Role::Node { head, offer } => {
                let found = join::find_head(&head, &token).await?;
                let ip = found.ip;
                node::spare_this_process();
                let config = offer.node(found, token, ip)?;
                let resources = config.resources.clone();
                let node = node::start(config).await?;
                tracing::info!("{} joined {head} with {resources}", node.id());
                Ok(Running::Node(node))
            }
        }
    }

    fn ready(&self) -> Ready {
        match self {
            Running::Head(_, at) => Ready::Head(*at),
            Running::Node(node) => Ready::Node(node.id()),
        }
    }

    /// Waits until it ends by itself.
    async fn ended(self) -> Result<(), String> {
        match self {
            Running::Head(head, _) => head.stopped().await,
            Running::Node(node) => {
                let ended = node.ended().await;
                node.shut_down();
                ended.map(|why| tracing::info!("it ends: {why}"))
            }
        }
    }
}
