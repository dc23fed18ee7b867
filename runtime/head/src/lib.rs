//! Wingbeat's control plane: which nodes there are, who has which resources, which actors live where.
//!
//! - [`state`]: every decision, in a deterministic state machine without IO.
//! - `journal`: what must survive it, in a file; `replicated`: one that a standby has a copy of; `files`: where that and what belongs to it lie.
//! - `programs`: the executables of detached actors.
//! - `succession`: which of a head and its standby leads, as pure as `state`; `standby`: the shell of a standby, `feed`: what it is sent,
//!   `permission`: how a head that is started again finds out whether its standby leads.
//! - `service`: the thin shell: connections in, orders out.
//!
//! It ends when [`HeadHandle::shutdown`] is called, or when somebody asked it to stop: every node is told, and
//! the connections close after what was queued has been written. Nodes and drivers notice the end of their
//! connection and end in turn.

#[cfg_attr(not(feature = "journal"), allow(dead_code, reason = "only what is written down can be sent to a standby"))]
mod feed;
mod files;
#[cfg(feature = "journal")]
mod journal;
#[cfg(feature = "journal")]
mod permission;
mod programs;
#[cfg(feature = "journal")]
mod replicated;
mod service;
#[cfg(feature = "journal")]
mod standby;
pub mod state;
#[cfg_attr(not(feature = "journal"), allow(dead_code, reason = "only a head with a journal has a standby"))]
mod succession;

use std::net::SocketAddr;
use std::sync::Arc;

use wingbeat_core::error::Error;
use wingbeat_core::spec::Address;
use wingbeat_core::{ClusterId, ProcessId};
use wingbeat_net::Token;
use wingbeat_net::address::Listener;
use wingbeat_net::handshake::{Epoch, Welcome};
use wingbeat_net::limits;
use wingbeat_net::patience::Patience;
use wingbeat_net::recording::{Machine, Recording};

#[cfg(feature = "journal")]
pub use standby::{Outcome, StandbyHandle};

use programs::Programs;
use service::Shell;
#[cfg(feature = "journal")]
use service::promise;
use state::{Beginning, State};

/// What a head is.
pub struct HeadConfig {
    /// Where to listen for other machines; none for this machine alone.
    pub tcp: Option<SocketAddr>,
    /// What every connection must prove.
    pub token: Token,
    /// The cluster.
    pub cluster: ClusterId,
    /// How long silence is borne in the cluster. From now on it holds in this process, too.
    pub patience: Patience,
}

/// What is known of the standby that the file of an earlier head names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FormerStandby {
    /// It may have taken over: it is asked, or else nodes are.
    IsAsked,
    /// It is certain that it has not, and will not: this head leads unless the standby answers.
    IsGone,
}

/// The head.
pub struct Head;

/// A running head.
pub struct HeadHandle {
    address: Address,
    cluster: ClusterId,
    shell: Arc<Shell>,
}

impl Head {
    /// Starts a head on the current tokio runtime.
    ///
    /// # Errors
    /// When it cannot listen: most often because another head has the port.
    pub async fn start(config: HeadConfig) -> Result<HeadHandle, Error> {
        limits::take(config.patience);
        let with = Beginning { cluster: config.cluster, first_lease: first_lease(), remembered: None, grace: 0 };
        let shell = Shell::new(recorded(with), None, Programs::in_memory(), None, None);
        Self::serve(config, shell).await
    }

    /// As [`Head::start`], for a head that is followed by the next one at the same address, with the same token: nodes, drivers and
    /// worker processes come back to that with all that runs. What it is to know beside that (jobs, placement groups, quotas, drains,
    /// named and detached actors), up to three nodes keep in their memory.
    ///
    /// # Errors
    /// When it cannot listen.
    pub async fn start_to_be_followed(mut config: HeadConfig) -> Result<HeadHandle, Error> {
        limits::take(config.patience);
        let listener = Listener::bind(ProcessId(config.cluster.0), config.tcp).await?;
        if let Some(at) = listener.address().tcp {
            config.cluster = config.token.cluster_at(at);
        }
        let listener = listener.of_process(ProcessId(config.cluster.0));
        let with = Beginning { cluster: config.cluster, first_lease: first_lease(), remembered: None, grace: 0 };
        let shell = Shell::new(recorded(with), None, Programs::in_memory(), Some(Epoch::by_clock()), None);
        shell.promises(None);
        Ok(Self::serve_at(listener, config, shell))
    }

    /// As [`Head::start`], with a file in which it keeps what must survive it: jobs, placement groups, quotas, named and
    /// detached actors. If an earlier head wrote the file, this one goes on with its cluster: nodes, drivers and worker processes
    /// come back with all that runs, and what has not come back in time is started again or forgotten. Such a head may have a standby
    /// ([`Head::stand_by`]). If the file names one that may have taken over, that is asked first, unless it is certain that it has not.
    ///
    /// # Errors
    /// When it cannot listen, or cannot read or write the file; when another head leads the cluster, or may.
    #[cfg(feature = "journal")]
    pub async fn start_with_journal(
        mut config: HeadConfig,
        file: &std::path::Path,
        standby: FormerStandby,
    ) -> Result<HeadHandle, Error> {
        limits::take(config.patience);
        let (journal, remembered) = journal::Journal::open(file, config.cluster)?;
        config.cluster = remembered.cluster.unwrap_or(config.cluster);
        // Before anybody is asked: nodes that have heard a head which is none would not vote for the standby any more.
        for fact in &remembered.facts {
            if let state::Fact::Follows(head) = fact {
                return Err(standby::is_a_copy(file, head));
            }
        }
        // A port that somebody else has is found before anybody gives up something for this head.
        let listener = Listener::bind(ProcessId(config.cluster.0), config.tcp).await?;
        // So is a folder that cannot be used.
        let programs = Programs::beside(file)?;
        let token = config.token.clone();
        let asker = permission::Asker { token, cluster: config.cluster, epoch: remembered.epoch };
        let open = permission::open_among(&remembered.facts);
        // First, since it changes nothing anywhere: a standby that lets this one lead could not take over from the head that it follows.
        asker.nobody_leads(&remembered.facts, &open).await?;
        match standby {
            FormerStandby::IsAsked => asker.may_lead(&open).await?,
            FormerStandby::IsGone => asker.is_alone(&open).await?,
        }
        let nodes = permission::nodes_among(&remembered.facts);
        let shell = Self::go_on(programs, journal, remembered, config.cluster, std::time::Duration::ZERO).await?;
        let head = Self::serve_at(listener, config, shell);
        let shell = head.shell.clone();
        let looking = async move { shell.until_stopped(asker.ends_beside_another(&shell, &nodes)).await };
        head.shell.vital("asking nodes that do not come", looking);
        Ok(head)
    }

    /// A standby of the head at `head` (`host:port`, or several): it follows that with a copy of its journal, and takes over when it is gone.
    ///
    /// # Errors
    /// The head does not answer, or refuses; it cannot listen, or cannot read or write the file.
    #[cfg(feature = "journal")]
    pub async fn stand_by(config: HeadConfig, head: &str, file: &std::path::Path) -> Result<StandbyHandle, Error> {
        limits::take(config.patience);
        standby::start(config, head, file).await
    }

    /// A head that begins with what lies in a journal. Those whom the last one knew have so much more time to come back than that has
    /// promised.
    #[cfg(feature = "journal")]
    async fn go_on(
        programs: Programs,
        journal: journal::Journal,
        remembered: journal::Remembered,
        cluster: ClusterId,
        more: std::time::Duration,
    ) -> Result<Arc<Shell>, Error> {
        use service::Durable as _;
        use wingbeat_net::messages::{Generation, Succession};

        let epoch = remembered.epoch;
        if remembered.facts.iter().any(|fact| matches!(fact, state::Fact::Succession(_) | state::Fact::Follows(_))) {
            // Before anybody hears of this head: nobody may take over from it yet, and later ones have a greater epoch.
            let generation = Generation { epoch, count: 0 };
            let nobody = Succession { generation, standby: None, voters: Default::default() };
            let nobody = state::Fact::Succession(Box::new(nobody));
            journal.intend(vec![nobody, state::Fact::NoEarlierSuccession, state::Fact::Leads]).await?;
        }
        let mut facts = remembered.cluster.map(|_| remembered.facts);
        let earlier = facts.as_mut().map(|facts| promise::of_earlier(facts, more));
        let grace = earlier.unwrap_or_default();
        let with = Beginning { cluster, first_lease: first_lease(), remembered: facts, grace };
        let fails = journal.fails();
        let standby = Arc::new(service::succession::Follower::new(epoch, journal.fed()));
        let journal = replicated::Replicated { journal, standby: standby.clone() };
        let shell = Shell::new(recorded(with), Some(Box::new(journal)), programs, Some(epoch), Some(standby));
        shell.promises(earlier);
        shell.vital("hearing of its journal", shell.clone().hear_of_the_journal(fails));
        shell.vital("looking after its standby", shell.clone().look_after_standby());
        Ok(shell)
    }

    async fn serve(config: HeadConfig, shell: Arc<Shell>) -> Result<HeadHandle, Error> {
        // The next head of the cluster is the same process to everybody, in its next life.
        let listener = Listener::bind(ProcessId(config.cluster.0), config.tcp).await?;
        Ok(Self::serve_at(listener, config, shell))
    }

    fn serve_at(listener: Listener, config: HeadConfig, shell: Arc<Shell>) -> HeadHandle {
        let address = listener.address().clone();
        let welcome = Welcome {
            address: address.clone(),
            cluster: config.cluster,
            epoch: shell.epoch(),
            patience: Some(config.patience),
            stands_by: None,
        };
        let serving = shell.clone();
        let accepting = shell.clone();
        shell.vital("taking connections", async move {
            let listen = listener.serve(config.token, welcome, move |stream, hello| {
                let shell = serving.clone();
                // Handshakes run on the head's runtime, and so does this.
                shell.clone().vital("serving a connection", async move { shell.serve_connection(stream, hello).await });
            });
            accepting.until_stopped(listen).await;
        });
        HeadHandle::of(address, config.cluster, shell)
    }
}

/// The state with which a head begins; what it takes in from now on is recorded, if the environment asks for that.
fn recorded(with: Beginning) -> State {
    let recorder = Recording::asked_for(Machine::Head, &format!("head-{}", with.cluster), with.clone());
    let mut state = State::begun(with);
    state.record_with(recorder);
    state
}

/// Leases of different heads, or of one that was started again, are never mistaken for each other.
fn first_lease() -> u64 {
    rand::random::<u64>() >> 16 << 16
}

impl HeadHandle {
    fn of(address: Address, cluster: ClusterId, shell: Arc<Shell>) -> HeadHandle {
        shell.look_for_the_absent();
        shell.vital("letting time pass", shell.clone().let_time_pass());
        HeadHandle { address, cluster, shell }
    }

    /// Where it listens.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// The cluster.
    pub fn cluster(&self) -> ClusterId {
        self.cluster
    }

    /// Where the standby listens that takes over when this head leaves, if there is one.
    pub fn standby(&self) -> Option<SocketAddr> {
        self.shell.standby_that_is_current()?.tcp
    }

    /// Waits until the head was asked to stop, and every node was told.
    ///
    /// # Errors
    /// It cannot go on, and has left everybody: it is to be started again.
    pub fn stopped(&self) -> impl Future<Output = Result<(), String>> + Send + use<> {
        let shell = self.shell.clone();
        async move { shell.stopped().await }
    }

    /// When what is returned is dropped, the cluster is about to end: that its nodes go is then no news.
    pub fn ends_with(&self) -> impl Send + use<> {
        Ending(self.shell.clone())
    }

    /// Ends this head alone, and leaves the cluster to the next one. Needs a journal: without one nobody would wait for it.
    pub async fn leave(self) {
        self.shell.leave().await;
    }

    /// Ends every node, and then the head.
    pub async fn shutdown(self) {
        self.shell.stop_nodes().await;
        self.shell.settle_journal().await;
        self.shell.stop();
    }
}

struct Ending(Arc<Shell>);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.is_ending();
    }
}

impl Drop for HeadHandle {
    fn drop(&mut self) {
        self.shell.stop();
    }
}
