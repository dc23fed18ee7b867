//! A standby: it copies what the head writes, and leads when that is gone and the nodes agree. [`StandingBy`] decides.
//!
//! It listens from the beginning where it would serve, and says to whoever connects where the head is. It ends when the cluster is stopped,
//! when the head refuses it, or when its handle is dropped; a copy that it has made stays in its file, and is made anew when it follows again.
//!
//! - `start`: with what it begins, and as what.
//! - `follow`: it follows the head; `copy`: what it writes to its file; `programs`: executables that it fetches.
//! - `votes`: it asks nodes whether it may lead.
//! - `service`: what a head asks of it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot, watch};
use wingbeat_core::error::Error;
use wingbeat_core::spec::Address;
use wingbeat_core::{ClusterId, ProcessId};
use wingbeat_net::Token;
use wingbeat_net::handshake::{Epoch, Hello, Purpose, Role, StandsBy, Welcome};
use wingbeat_net::limits::{limits, patience};
use wingbeat_net::messages::Succession;
use wingbeat_net::way::Way;

use crate::journal::Journal;
use crate::programs::Programs;
use crate::service::Shell;
use crate::state::{Fact, FactKey};
use crate::succession::standing_by::StandingBy;
use crate::succession::{Clock, Millis};
use crate::{Head, HeadHandle};

mod copy;
mod follow;
mod programs;
mod service;
mod start;
mod votes;

pub(crate) use start::{is_a_copy, start};
use votes::VOTES;

/// What has become of a standby.
pub enum Outcome {
    /// It leads.
    Leads(HeadHandle),
    /// The cluster was stopped.
    Stopped,
    /// It cannot go on.
    Failed(Error),
}

/// A running standby.
pub struct StandbyHandle {
    address: Address,
    head: Option<Address>,
    outcome: oneshot::Receiver<Outcome>,
    has_begun: watch::Receiver<bool>,
    is_current: watch::Receiver<bool>,
    _stop: watch::Sender<()>,
}

impl StandbyHandle {
    /// Where it listens.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// The head that it follows; none if it goes on as a head itself.
    pub fn head(&self) -> Option<&Address> {
        self.head.as_ref()
    }

    /// Waits until it stands by: the head has accepted it, or does not answer. It never does where the head refuses it at once.
    pub fn has_begun(&self) -> impl Future<Output = ()> + Send + use<> {
        until_true(self.has_begun.clone())
    }

    /// Waits until it has all that it needs, and may take over.
    pub fn is_current(&self) -> impl Future<Output = ()> + Send + use<> {
        until_true(self.is_current.clone())
    }

    /// Waits until it leads, or ends.
    pub async fn outcome(&mut self) -> Outcome {
        let ended = || Error::Failed {
            what: "standing by".into(),
            why: "a part of the standby has failed; see its log".into(),
        };
        (&mut self.outcome).await.unwrap_or_else(|_| Outcome::Failed(ended()))
    }
}

/// Waits until that is true, which may be never.
async fn until_true(mut watched: watch::Receiver<bool>) {
    if watched.wait_for(|is_true| *is_true).await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// What a standby's tasks share, until it leads or ends. Its many fields are what it copies, what it decides by, and what others ask of
/// it meanwhile.
struct Standby {
    token: Token,
    cluster: ClusterId,
    /// Where its copy of the journal lies. When it leads, that is its journal.
    file: PathBuf,
    /// Where it would serve.
    address: Address,
    /// Where the head is that it follows, and which.
    way: Way,
    /// Whether it follows, or asks for promises.
    deciding: Mutex<StandingBy>,
    /// None when it takes over.
    journal: Mutex<Option<Arc<Journal>>>,
    /// Executables of detached actors, beside the file, each while one needs it.
    programs: Arc<Programs>,
    /// Jobs and actors, for the programs that may be needed.
    known: Mutex<BTreeMap<FactKey, Fact>>,
    /// Whether its file was made for it.
    is_new_file: bool,
    /// Whether the head has accepted it, or was not there.
    has_begun: watch::Sender<bool>,
    /// Whether it has all that the head has written, and may take over. For whoever waits for that.
    is_current: watch::Sender<bool>,
    /// How long it was paused last since the file cannot be written; none while it can.
    cannot_write: Mutex<Option<Duration>>,
    /// When programs were tried last that the head did not give.
    lacks: Arc<Mutex<BTreeMap<String, Instant>>>,
    /// Counts from its start.
    clock: Clock,
    /// Once it leads.
    leads: OnceLock<Arc<Shell>>,
}

/// What comes next.
enum Next {
    /// It follows the head, or looks for it.
    Follows,
    /// It asks nodes for their promises.
    Runs,
    Leads(Epoch),
}

impl Standby {
    fn now(&self) -> Millis {
        self.clock.now()
    }

    fn hello(&self, process: ProcessId) -> Hello {
        let of_tool = Hello::of_tool();
        let address = Address { process, ..self.address.clone() };
        Hello { role: Role::Head, purpose: Purpose::Control, cluster: Some(self.cluster), address, ..of_tool }
    }

    fn welcome(&self) -> Welcome {
        let (address, cluster) = (self.address.clone(), self.cluster);
        match self.leads.get() {
            Some(shell) => {
                let patience = Some(patience());
                Welcome { address, cluster, epoch: shell.epoch(), patience, stands_by: None }
            }
            None => {
                let runs_for = self.deciding.lock().runs_for();
                let stands_by = Some(StandsBy { head: self.way.address(), runs_for });
                Welcome { address, cluster, epoch: self.way.epoch(), patience: None, stands_by }
            }
        }
    }

    /// Who may take over was written: by what this standby has, if it is meant.
    fn note_succession(&self, succession: Option<Succession>) {
        let succession = succession.map(|mut succession| {
            // In an earlier life it had another socket.
            let is_meant = |at: &Address| *at == self.address || at.tcp.is_some() && at.tcp == self.address.tcp;
            succession.standby = succession.standby.filter(is_meant).map(|_| self.address.clone());
            succession
        });
        self.deciding.lock().wrote(succession);
    }

    /// Whether it has all that the head has written, and may take over.
    fn note_whether_current(&self, is_current: bool) {
        self.is_current.send_if_modified(|current| std::mem::replace(current, is_current) != is_current);
    }

    async fn stand_by(self: Arc<Self>) -> Outcome {
        let (votes, mut incoming) = mpsc::channel(VOTES);
        loop {
            let next = tokio::select! {
                biased;
                next = self.decide(&votes, &mut incoming) => next,
                ended = self.follow() => return ended,
            };
            // From here on nobody is followed, and so nobody supported.
            let next = match next {
                Next::Runs => {
                    tracing::warn!(
                        "a majority of the nodes would accept this standby; it asks them for their promises"
                    );
                    self.decide(&votes, &mut incoming).await
                }
                next => next,
            };
            match next {
                Next::Leads(epoch) => {
                    return match self.lead(epoch).await {
                        Ok(head) => Outcome::Leads(head),
                        Err(error) => Outcome::Failed(error),
                    };
                }
                Next::Follows | Next::Runs => {}
            }
        }
    }

    /// Goes on as the head.
    async fn lead(self: &Arc<Self>, epoch: Epoch) -> Result<HeadHandle, Error> {
        tracing::warn!("the standby takes over");
        let before = self.way.address();
        self.keeps_its_file().await?;
        let programs = Programs::beside(&self.file)?;
        // The file is opened again as that of a head.
        self.close_journal().await;
        let (journal, mut remembered) = Journal::open(&self.file, self.cluster)?;
        if remembered.cluster != Some(self.cluster) {
            return Err(Error::Failed {
                what: format!("taking over with {}", self.file.display()),
                why: "it was removed or replaced, and what the last head wrote is lost here".into(),
            });
        }
        remembered.epoch = remembered.epoch.max(epoch);
        // The last head may lead until it notices that nobody supports it, and nodes that only it reaches go on as long after that.
        let more = limits().fence;
        let shell = Head::go_on(programs, journal, remembered, self.cluster, more).await?;
        let _ = self.leads.set(shell.clone());
        shell.vital(
            "telling the last head",
            shell.clone().tell_last_head(self.hello(ProcessId::random()), self.token.clone(), before),
        );
        Ok(HeadHandle::of(self.address.clone(), self.cluster, shell))
    }
}

fn has_ended() -> Error {
    Error::Failed { what: "standing by".into(), why: "it has ended".into() }
}
