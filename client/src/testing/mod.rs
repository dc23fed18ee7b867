//! Clusters for tests: real processes of the test's own executable, and failures on purpose.
//!
//! ```no_run
//! use wingbeat::testing::TestCluster;
//!
//! #[wingbeat::remote]
//! fn total(upto: u64) -> u64 { (0..upto).sum() }
//!
//! #[test]
//! # fn attribute() {}
//! fn survives_the_loss_of_a_node() -> wingbeat::Result<()> {
//!     let cluster = TestCluster::builder().nodes(2).num_cpus(2).start()?;
//!     let sum = total::remote(100);
//!     cluster.kill_node(0)?;
//!     assert_eq!(sum.get_blocking()?, 4950);
//!     Ok(())
//! }
//! ```
//!
//! The guide is `docs/guide/testing.md`.

mod builder;
mod captured;

use std::cell::RefCell;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use wingbeat_core::NodeId;
use wingbeat_core::error::{Error, Result};
use wingbeat_net::Token;
use wingbeat_net::patience::Patience;
use wingbeat_process::block_on;
use wingbeat_worker::join::{self, InitOptions, Output};
use wingbeat_worker::testing::log::Log;
use wingbeat_worker::testing::network::{Machine, Network};
use wingbeat_worker::testing::process::{LAST_LINES, Surroundings, TestProcess};
use wingbeat_worker::testing::{Ready, Role};
use wingbeat_worker::token::TOKEN_VARIABLE;

pub use builder::{TestClusterBuilder, TestNode};
pub use wingbeat_worker::testing::network::Cut;
pub use wingbeat_worker::testing::process::Paused;

use crate::{Init, Scope, Session, SessionGuard};

/// The object store of the test itself.
const STORE: u64 = 64 << 20;

/// A head and nodes, each a process of the test's own executable, and the session of the test in them.
///
/// The thread that has started it uses its session until it is dropped; see [`Session::enter`] for other threads. Of several clusters of one
/// thread, it is the one that was started last. When it is dropped, every process has ended.
pub struct TestCluster {
    /// First: afterwards calls of this thread go to another session.
    entered: Option<SessionGuard>,
    session: Session,
    started: StartedCluster,
}

/// The processes of a cluster, with or without a session. Dropping it ends them.
struct StartedCluster {
    token: Token,
    env: Vec<(String, String)>,
    log: Arc<Log>,
    address: SocketAddr,
    /// None where all are on this machine.
    network: Option<Network>,
    head: TestProcess,
    nodes: RefCell<Vec<Node>>,
}

struct Node {
    id: NodeId,
    process: TestProcess,
    machine: Option<Machine>,
}

impl TestCluster {
    /// What the cluster is to have. Without more, it has one node with one CPU.
    ///
    /// ```no_run
    /// # fn test() -> wingbeat::Result<()> {
    /// use wingbeat::testing::TestCluster;
    /// let cluster = TestCluster::builder().nodes(3).num_cpus(2).label("zone", "a").start()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn builder() -> TestClusterBuilder {
        TestClusterBuilder::default()
    }

    fn start(wanted: TestClusterBuilder) -> Result<TestCluster> {
        let started = StartedCluster::start(&wanted)?;
        let log = started.log.clone();
        let source: Arc<str> = "task".into();
        let options = InitOptions {
            output: Some(Output::new(move |line| log.add(&source, line))),
            own_store: Some(STORE),
            global: wanted.global,
            ..started.init_options()
        };
        let session = block_on(join::init(options)).map(Session::new).inspect_err(|_| {
            started.end();
            started.print_log();
        })?;
        let entered = Some(session.enter());
        Ok(TestCluster { entered, session, started })
    }

    /// The test's session, for other threads.
    ///
    /// ```no_run
    /// # fn test(cluster: wingbeat::testing::TestCluster) {
    /// let session = cluster.session().clone();
    /// let thread = std::thread::spawn(move || {
    ///     let _entered = session.enter();
    ///     wingbeat::put(&1).map(drop)
    /// });
    /// # }
    /// ```
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// A future that uses this cluster on whatever thread it runs.
    ///
    /// ```no_run
    /// # #[wingbeat::remote] fn total(upto: u64) -> u64 { (0..upto).sum() }
    /// # async fn test() -> wingbeat::Result<()> {
    /// let cluster = wingbeat::testing::TestCluster::builder().start()?;
    /// let task = tokio::spawn(cluster.within(async { total::remote(4).get().await }));
    /// # Ok(())
    /// # }
    /// ```
    pub fn within<F: Future>(&self, future: F) -> Scope<F> {
        self.session.scope(future)
    }

    /// The head's `host:port`.
    ///
    /// ```no_run
    /// # async fn test(cluster: wingbeat::testing::TestCluster) -> wingbeat::Result<()> {
    /// let another = wingbeat::init_at(&cluster.address()).token(cluster.token()).global(false).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn address(&self) -> String {
        self.started.address.to_string()
    }

    /// The cluster's token, with which others join it.
    pub fn token(&self) -> &str {
        self.started.token.reveal()
    }

    /// The variables with which a program of its own joins the cluster, by `wingbeat::init()`.
    ///
    /// ```no_run
    /// # fn test(cluster: wingbeat::testing::TestCluster, app: &str) -> std::io::Result<()> {
    /// let status = std::process::Command::new(app).envs(cluster.variables()).status()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn variables(&self) -> [(&'static str, String); 2] {
        [(join::ADDRESS_VARIABLE, self.address()), (TOKEN_VARIABLE, self.token().to_owned())]
    }

    /// How another driver joins, in this process and beside the test's own session.
    ///
    /// ```no_run
    /// # async fn test(cluster: wingbeat::testing::TestCluster) -> wingbeat::Result<()> {
    /// let urgent = cluster.init().priority(10).await?;
    /// let _entered = urgent.enter();
    /// # Ok(())
    /// # }
    /// ```
    pub fn init(&self) -> Init {
        Init::of(self.started.init_options())
    }

    /// Adds a node, and answers with its number.
    ///
    /// ```no_run
    /// # fn test(cluster: wingbeat::testing::TestCluster) -> wingbeat::Result<()> {
    /// use wingbeat::testing::TestNode;
    /// let number = cluster.add_node(TestNode::default().num_gpus(8))?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// It does not start; the error has what it wrote.
    pub fn add_node(&self, node: TestNode) -> Result<usize> {
        self.started.add_nodes(vec![node])?;
        Ok(self.started.nodes.borrow().len() - 1)
    }

    /// How many nodes were added, also those that were killed.
    pub fn nodes(&self) -> usize {
        self.started.nodes.borrow().len()
    }

    /// The id of a node. Nodes are numbered from 0, in the order in which they were added; those of
    /// [`TestClusterBuilder::nodes`] come first.
    ///
    /// # Errors
    /// There is no such node.
    pub fn node_id(&self, node: usize) -> Result<NodeId> {
        self.started.with_node(node, |node| Ok(node.id))
    }

    /// The process id of a node's daemon.
    ///
    /// # Errors
    /// There is no such node, or it was killed.
    pub fn node_pid(&self, node: usize) -> Result<u32> {
        self.started.with_living(node, |living| living.process.pid().ok_or_else(|| gone(node)))
    }

    /// Kills a node's daemon with SIGKILL, and waits until everything below it is gone: its worker processes, and what those had started.
    ///
    /// ```no_run
    /// # fn test(cluster: wingbeat::testing::TestCluster) -> wingbeat::Result<()> {
    /// cluster.kill_node(0)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// There is no such node, or it was killed before.
    pub fn kill_node(&self, node: usize) -> Result<()> {
        self.started.with_living(node, |node| {
            node.process.end();
            Ok(())
        })
    }

    /// Stops a node's daemon and its worker processes (SIGSTOP) until the result is dropped, as a machine that hangs.
    ///
    /// ```no_run
    /// # fn test(cluster: wingbeat::testing::TestCluster) -> wingbeat::Result<()> {
    /// let paused = cluster.pause(0)?;
    /// // What is submitted here runs on other nodes.
    /// drop(paused);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// There is no such node, or it was killed.
    pub fn pause(&self, node: usize) -> Result<Paused> {
        self.started.with_living(node, |node| node.process.pause())
    }

    /// Cuts a node off from all others until the result is dropped: packets vanish, and nobody is told. Only in a cluster with
    /// [`TestClusterBuilder::machines`].
    ///
    /// ```no_run
    /// # fn test() -> wingbeat::Result<()> {
    /// use wingbeat::testing::TestCluster;
    /// let cluster = TestCluster::builder().nodes(2).machines().start()?;   // needs root
    /// let cut = cluster.cut(0)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// There is no such node, it was killed, or the nodes have no machines of their own.
    pub fn cut(&self, node: usize) -> Result<Cut> {
        self.started.with_living(node, |node| match &node.machine {
            Some(machine) => machine.cut(),
            None => Err(Error::InvalidArgument {
                what: "the nodes of this test cluster have no machines of their own, so that none can be cut off; start it with \
                       `.machines()`"
                    .into(),
            }),
        })
    }

    /// What the head, the nodes and the tasks have written so far: the last 10,000 lines, in order, each with its process before it.
    ///
    /// ```no_run
    /// # fn test(cluster: wingbeat::testing::TestCluster) {
    /// assert!(cluster.logs().contains("[head]"));
    /// # }
    /// ```
    pub fn logs(&self) -> String {
        self.started.log.text(None)
    }
}

impl std::fmt::Debug for TestCluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TestCluster({}, {} nodes)", self.started.address, self.nodes())
    }
}

impl Drop for TestCluster {
    fn drop(&mut self) {
        self.entered.take();
        // What follows in the logs is of no interest.
        self.started.log.add(&"test".into(), "it ends");
        self.session.shutdown_blocking();
        self.started.end();
        if captured::is_to_be_printed() {
            self.started.print_log();
        }
    }
}

impl StartedCluster {
    fn start(wanted: &TestClusterBuilder) -> Result<StartedCluster> {
        let patience =
            Patience::new(wanted.suspect_after, wanted.lost_after).map_err(|error| Error::InvalidOption {
                what: "a test cluster".into(),
                option: "suspect_after or lost_after".into(),
                why: error.to_string(),
            })?;
        let network = wanted.has_machines.then(Network::new).transpose()?;
        let ip = network.as_ref().map_or(IpAddr::V4(Ipv4Addr::LOCALHOST), Network::address);
        let (token, log, env) = (Token::random(), Arc::default(), wanted.env.clone());
        let role = Role::Head { at: SocketAddr::new(ip, 0), patience };
        let mut head = TestProcess::start("head", role, None, &Surroundings { token: &token, env: &env, log: &log })?;
        let Ready::Head(address) = head.wait_for_start()? else { return Err(confused()) };
        let nodes = RefCell::default();
        let started = StartedCluster { token, env, log, address, network, head, nodes };
        started.add_nodes(wanted.all_nodes())?;
        Ok(started)
    }

    /// Starts nodes at the same time, and waits for all of them.
    fn add_nodes(&self, nodes: Vec<TestNode>) -> Result<()> {
        let around = Surroundings { token: &self.token, env: &self.env, log: &self.log };
        let mut starting = Vec::new();
        for (number, node) in (self.nodes.borrow().len()..).zip(nodes) {
            let machine = self.network.as_ref().map(|network| network.machine(number)).transpose()?;
            let role = Role::Node { head: self.address.to_string(), offer: Box::new(node.offer) };
            let process = TestProcess::start(&format!("node {number}"), role, machine.as_ref(), &around)?;
            starting.push((process, machine));
        }
        for (mut process, machine) in starting {
            let Ready::Node(id) = process.wait_for_start()? else { return Err(confused()) };
            self.nodes.borrow_mut().push(Node { id, process, machine });
        }
        Ok(())
    }

    fn init_options(&self) -> InitOptions {
        InitOptions {
            address: Some(self.address.to_string()),
            token: Some(self.token.clone()),
            global: false,
            // The worker processes of a job have what the job has.
            env: self.env.iter().cloned().collect(),
            ..InitOptions::default()
        }
    }

    fn with_node<T>(&self, number: usize, ask: impl FnOnce(&Node) -> Result<T>) -> Result<T> {
        let nodes = self.nodes.borrow();
        let node = nodes.get(number).ok_or_else(|| Error::InvalidArgument {
            what: format!("this test cluster has no node {number}; it has {}, numbered from 0", nodes.len()),
        })?;
        ask(node)
    }

    fn with_living<T>(&self, number: usize, ask: impl FnOnce(&Node) -> Result<T>) -> Result<T> {
        self.with_node(number, |node| if node.process.has_ended() { Err(gone(number)) } else { ask(node) })
    }

    fn print_log(&self) {
        eprintln!("wingbeat: what the processes of the test cluster have written:\n{}", self.log.text(None).trim_end());
    }

    /// Ends all processes, at the same time, and waits for them and for what they have written.
    fn end(&self) {
        let nodes = self.nodes.borrow();
        let all = || nodes.iter().map(|node| &node.process).chain(std::iter::once(&self.head));
        all().for_each(TestProcess::begin_to_end);
        all().for_each(TestProcess::end);
        self.log.wait_for_end(None, LAST_LINES);
    }
}

fn gone(node: usize) -> Error {
    Error::InvalidArgument { what: format!("node {node} of this test cluster was killed before") }
}

/// Both sides are this executable.
fn confused() -> Error {
    Error::Failed {
        what: "starting a test cluster".into(),
        why: "a process has become another than it was to be".into(),
    }
}
