//! What a worker process does: it joins, runs what it is sent, and ends.
//!
//! - `queue`: the unstarted tasks and calls, and who they are for.
//! - `run`: one task from its arguments to its result.
//! - `fence`: what it does while its daemon is silent.
//! - `lanes`: the threads that take tasks and calls; `threads`: how one of them goes on with several.
//! - `at_home`: tasks of this very process, while one that was sent here waits; `home_threads`: their threads.
//! - `handover`: results are handed over before the process ends, however it does.
//!
//! The main thread runs tasks, or the default group of the actor that the process became; user code never
//! runs on the IO thread, which takes work in and answers cancellations while user code is busy.
//! The process ends when its daemon says so, or is gone, or when its actor has been drained.

mod at_home;
mod fence;
mod handover;
mod home_threads;
mod lanes;
mod queue;
mod run;
mod stacks;
mod threads;

use std::io::{self, Write};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use wingbeat_core::error::Error;
use wingbeat_net::address;
use wingbeat_net::handshake::{Purpose, Role, Token};
use wingbeat_net::limits::{self, limits};
use wingbeat_net::messages::WorkerStart;
use wingbeat_net::mux::{self, Waiting};
use wingbeat_net::services::{NodeClient, NodeRequest, NodeResponse, Process as _, ProcessRequest, ProcessResponse};
use wingbeat_net::silence::Probing;
use wingbeat_process::HeadLink;
use wingbeat_process::NodeLink;
use wingbeat_process::{Config, Io, PeerService, Session, note};
use wingbeat_store::Mapping;

use crate::page::Page;
use crate::start::WorkerStartInfo;
use queue::Queue;

/// The whole life of a worker process.
pub(crate) fn main(info: WorkerStartInfo, arena: OwnedFd, page: OwnedFd) -> io::Result<()> {
    run::install_panic_hook();
    let io = Arc::new(Io::start().map_err(io::Error::other)?);
    let page = Arc::new(Page::open(page)?);
    let told = page.clone();
    wingbeat_process::programs::tell_by(move |pid| told.sees_through(pid));
    let joined = io.run(join(io.clone(), info, arena, page)).ok_or_else(|| io::Error::other("the IO thread ended"))?;
    let (session, queue) = joined.map_err(io::Error::other)?;
    Session::set_global(Some(session.clone()));
    lanes::main_loop(&session, &queue);
    // Results and releases that are queued leave before the process does, and what user code printed.
    let _ = std::io::stdout().flush();
    let handed_over = queue.handed_over();
    io.run(async move {
        let limit = std::time::Duration::from_secs(5);
        let _ = tokio::time::timeout(limit, handed_over).await;
    });
    session.process().end_recording();
    Ok(())
}

async fn join(
    io: Arc<Io>,
    info: WorkerStartInfo,
    arena: OwnedFd,
    page: Arc<Page>,
) -> Result<(Session, Arc<Queue>), Error> {
    // The daemon tells job and namespace only after the process has said where it listens.
    let config = Config {
        id: info.process,
        token: Token::new(info.token),
        role: Role::Worker,
        listen: info.listen.map(|ip| SocketAddr::new(ip, 0)),
    };
    let token = config.token.clone();
    let prepared = wingbeat_process::Prepared::bind(config).await?;
    let hello = prepared.hello(Purpose::Control);
    let stream = address::dial(&info.daemon, "the node daemon", &token, hello).await?;
    let (connection, client, server) = mux::connect_probing::<NodeRequest, NodeResponse, ProcessRequest, ProcessResponse>(
        stream,
        Waiting::Asleep,
        Probing::Notes,
    );
    let client = NodeClient::new(mux::client_config(), client).spawn();
    let answer = client.register_worker(mux::no_deadline(), prepared.address().clone(), std::process::id()).await;
    let WorkerStart { cluster, job, namespace, node, daemon, head, standby, arena_bytes, driver, patience } =
        mux::answered(answer, "the node daemon")??;
    limits::take(patience);
    let mapping = Mapping::open(arena, arena_bytes).map_err(|error| Error::io("mapping the node's store", &error))?;
    let session = prepared.start(&io, job, namespace, cluster);
    let process = session.process();
    let head = HeadLink::new(head);
    if let Some(standby) = standby {
        head.learn(standby);
    }
    process.set_head(head);
    process.know(&driver);
    process.set_storage(NodeLink::start(node, daemon.clone(), client, mapping, connection.clone()));
    let queue = Queue::new(session.clone(), page);
    process.set_executor(queue.clone());
    process.vital("looking after its node", fence::keep(queue.clone(), connection.clone(), node));
    process.vital("looking after the head", fence::report_loss_of_head(process.clone()));
    // Commands of the daemon come on its own connection, from now on.
    let service = PeerService::new(process.clone(), daemon.process);
    process.vital("hearing its node", mux::serve(server, service.serve()));
    handover::install(queue.handed_over())
        .map_err(|error| Error::io("preparing for the end of the process", &error))?;
    let (ending, watched) = (queue.clone(), process.clone());
    process.vital("the end of the session", async move {
        watched.over().await;
        // Without the head nothing can be submitted or waited for here: another process is of more use. What runs is
        // finished, and its results can still reach their owners.
        note(format_args!(
            "this worker process takes no more work, because it has lost the head, which is gone or has heard nothing from it for {:?}",
            limits().lost
        ));
        ending.end();
    });
    let ending = process.clone();
    tokio::spawn(async move {
        connection.closed().await;
        ending.end_recording();
        // Without its daemon a worker process has no purpose and nobody to end it.
        // SAFETY: ends the process without running user code's exit handlers.
        unsafe { libc::_exit(1) }
    });
    Ok((session, queue))
}
