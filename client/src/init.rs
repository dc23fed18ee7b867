//! Joining and leaving.

use std::future::{Future, IntoFuture};
use std::path::PathBuf;
use std::pin::Pin;

use wingbeat_core::ByteSize;
use wingbeat_core::error::Result;
use wingbeat_net::Token;
use wingbeat_process::block_on;
use wingbeat_worker::join::{self, InitOptions};

use crate::Session;

/// Joins the cluster at `WINGBEAT_ADDRESS`, or starts a private one inside this process.
///
/// ```no_run
/// # async fn run() -> wingbeat::Result<()> {
/// let session = wingbeat::init().num_cpus(2).await?;
/// # Ok(())
/// # }
/// ```
pub fn init() -> Init {
    Init { options: InitOptions::default() }
}

/// Joins the cluster whose head is at `host:port`: short for [`init()`](init)[`.address(…)`](Init::address).
///
/// ```no_run
/// # async fn run() -> wingbeat::Result<()> {
/// let token = std::fs::read_to_string("token").expect("a file with the cluster's token");
/// wingbeat::init_at("10.0.0.1:6420").token(token.trim()).await?;
/// # Ok(())
/// # }
/// ```
pub fn init_at(address: &str) -> Init {
    init().address(address)
}

/// As [`init`], blocking this thread.
///
/// ```no_run
/// # #[wingbeat::remote] fn square(x: u64) -> u64 { x * x }
/// fn main() -> wingbeat::Result<()> {
///     wingbeat::init_blocking()?;
///     println!("{}", square::remote(3).get_blocking()?);
///     wingbeat::shutdown_blocking();
///     Ok(())
/// }
/// ```
///
/// # Errors
/// As awaiting [`init`].
pub fn init_blocking() -> Result<Session> {
    block_on(init().into_future())
}

/// Leaves the cluster; a private one ends. Refs to small values that have arrived can still be read; every other ref,
/// stream and call, also a pending one, fails with [`Error::SessionEnded`](crate::Error::SessionEnded). So does what is submitted after that in a session that is
/// still entered; without one it fails with [`Error::NoSession`](crate::Error::NoSession).
pub async fn shutdown() {
    if let Ok(session) = Session::current() {
        session.shutdown().await;
    }
}

/// As [`shutdown`], blocking this thread.
pub fn shutdown_blocking() {
    block_on(shutdown());
}

/// How to join; awaiting it joins.
///
/// What a private cluster is to offer, and how worker processes of this job start:
///
/// ```no_run
/// # async fn run() -> wingbeat::Result<()> {
/// wingbeat::init()
///     .num_cpus(4)
///     .num_gpus(1)
///     .resource("license", 2.0)
///     .object_store_memory(wingbeat::ByteSize::gib(1))
///     .env("OMP_NUM_THREADS", "1")
///     .working_dir("/data")
///     .await?;
/// # Ok(())
/// # }
/// ```
#[must_use = "nothing is joined until this is awaited"]
#[derive(Clone, Debug)]
pub struct Init {
    options: InitOptions,
}

impl Init {
    #[cfg(feature = "testing")]
    pub(crate) fn of(options: InitOptions) -> Init {
        Init { options }
    }

    /// Joins the cluster whose head is at `host:port`, whatever `WINGBEAT_ADDRESS` says; of a head that may be in several places,
    /// `host:port,host:port`.
    ///
    /// ```no_run
    /// # async fn run() -> wingbeat::Result<()> {
    /// wingbeat::init().address("10.0.0.1:6420,10.0.0.2:6420").await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn address(mut self, address: &str) -> Self {
        self.options.address = Some(address.to_owned());
        self.options.private = false;
        self
    }

    /// Starts a private cluster, whatever `WINGBEAT_ADDRESS` says.
    ///
    /// ```no_run
    /// # async fn run() -> wingbeat::Result<()> {
    /// wingbeat::init().private().num_cpus(2).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn private(mut self) -> Self {
        self.options.address = None;
        self.options.private = true;
        self
    }

    /// The token of the cluster, of at least 16 bytes; else `WINGBEAT_TOKEN`, `WINGBEAT_TOKEN_FILE`, or this user's own.
    pub fn token(mut self, token: &str) -> Self {
        self.options.token = Some(Token::new(token));
        self
    }

    /// CPUs of a private cluster; as many as the machine has if nothing is said.
    pub fn num_cpus(mut self, cpus: u32) -> Self {
        self.options.num_cpus = Some(cpus);
        self
    }

    /// GPUs of a private cluster, the first of the machine; all if nothing is said. More than it has are an error: see
    /// [`Init::pretend_gpus`].
    pub fn num_gpus(mut self, gpus: u32) -> Self {
        self.options.num_gpus = Some(gpus);
        self
    }

    /// So many GPUs of a private cluster, of which those that the machine does not have are pretended: tasks are placed by them and see
    /// `CUDA_VISIBLE_DEVICES`, and nothing can be computed on them. For tests.
    ///
    /// ```
    /// #[wingbeat::remote(num_gpus = 2)]
    /// fn devices() -> Vec<u32> {
    ///     wingbeat::gpu_ids()
    /// }
    ///
    /// # #[wingbeat::main]
    /// # async fn main() -> wingbeat::Result<()> {
    /// let _session = wingbeat::init().private().num_cpus(1).pretend_gpus(4).await?;
    /// assert_eq!(devices::remote().await?, [0, 1]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn pretend_gpus(mut self, gpus: u32) -> Self {
        self.options.pretend_gpus = Some(gpus);
        self
    }

    /// A custom resource of a private cluster.
    pub fn resource(mut self, name: &str, amount: f64) -> Self {
        self.options.resources.insert(name.to_owned(), amount);
        self
    }

    /// Capacity of a private cluster's object store; 30% of the machine's memory if nothing is said.
    pub fn object_store_memory(mut self, size: impl Into<ByteSize>) -> Self {
        self.options.object_store_memory = Some(size.into().bytes());
        self
    }

    /// The part of all memory above which a private cluster ends tasks and actors, before the kernel kills one of its choice; 0.95 if
    /// neither this nor `WINGBEAT_MEMORY_THRESHOLD` says something, and 0 for never. What was ended fails with
    /// [`Error::OutOfMemory`](wingbeat_core::error::Error::OutOfMemory), or is tried again.
    pub fn memory_threshold(mut self, part: f64) -> Self {
        self.options.memory_threshold = Some(part);
        self
    }

    /// The namespace of the actors that this job names; one of its own if nothing is said.
    pub fn namespace(mut self, namespace: &str) -> Self {
        self.options.namespace = Some(namespace.to_owned());
        self
    }

    /// Whose waiting tasks, actors and placement groups are served first: those of the job with the larger number. It
    /// also gets leases of the others'. 0 if nothing is said; may be negative.
    ///
    /// ```no_run
    /// # async fn run() -> wingbeat::Result<()> {
    /// wingbeat::init().name("nightly cleaning").priority(-10).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn priority(mut self, priority: i32) -> Self {
        self.options.priority = priority;
        self
    }

    /// What to call the job in `wingbeat status`.
    pub fn name(mut self, name: &str) -> Self {
        self.options.name = Some(name.to_owned());
        self
    }

    /// A variable of the worker processes' environment. Those on this process's machine also get all of its own if the head
    /// runs there, too; others get of its own only what is no secret, such as `PATH`, `LANG`, `RUST_*`, `PYTHON*` or `CUDA_*` (the guide's
    /// reference of variables has the list). So name here what they need besides, keys of clouds for example: what
    /// is named is sent over the network and written to the head's journal.
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.options.env.insert(name.to_owned(), value.to_owned());
        self
    }

    /// The working directory of worker processes, on nodes that have it; this process's if nothing is said. Nothing is sent: on a
    /// node without it, they work where its `wingbeat worker` does. Joining fails if it is not UTF-8, or a private cluster's machine lacks it.
    pub fn working_dir(mut self, dir: impl Into<PathBuf>) -> Self {
        self.options.working_dir = Some(dir.into());
        self
    }

    /// Whether output of user code is shown here; it is if nothing is said.
    pub fn log_to_driver(mut self, show: bool) -> Self {
        self.options.log_to_driver = show;
        self
    }

    /// Whether the session becomes the one of the whole process. If not, it is used by entering it
    /// ([`Session::enter`]); so one process can have several.
    pub fn global(mut self, global: bool) -> Self {
        self.options.global = global;
        self
    }
}

impl IntoFuture for Init {
    type Output = Result<Session>;
    type IntoFuture = Pin<Box<dyn Future<Output = Result<Session>> + Send>>;
    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async { join::init(self.options).await.map(Session::new) })
    }
}
