//! What is kept of the connection to the head.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use tokio::sync::watch;
use wingbeat_core::error::Error;
use wingbeat_core::spec::{Address, JobSpec};
use wingbeat_net::handshake::Epoch;
use wingbeat_net::link::Link;
use wingbeat_net::messages::HeadMessage;
use wingbeat_net::mux::Connection;
use wingbeat_net::services::HeadClient;
use wingbeat_net::way::Way;

/// How this process stands with the head.
#[derive(Clone)]
pub(super) enum Standing {
    /// There is no connection (yet).
    Away,
    Here(HeadClient),
    /// There will be none any more.
    Lost(Error),
}

/// The link to the head.
#[derive(Clone)]
pub struct HeadLink {
    pub(super) shared: Arc<Shared>,
}

pub(super) struct Shared {
    pub way: Way,
    pub link: Link<HeadMessage>,
    /// For questions. Whoever has one while there is no connection waits for the next.
    pub client: watch::Sender<Standing>,
    /// Whether somebody dials, or has.
    started: AtomicBool,
    /// What a head that was started again is to know may not be taken in yet.
    pub tells: AtomicBool,
    /// It has said that the cluster ends.
    stops: AtomicBool,
    pub connection: Mutex<Option<Connection>>,
    /// The number of the next batch of what the head says.
    heard: AtomicU64,
    /// With what a driver has joined: a head has answered so.
    job: OnceLock<JobSpec>,
}

impl HeadLink {
    /// To the head at `address`; not dialled yet.
    pub fn new(address: Address) -> HeadLink {
        HeadLink {
            shared: Arc::new(Shared {
                way: Way::new(address),
                link: Link::new(),
                client: watch::Sender::new(Standing::Away),
                started: AtomicBool::new(false),
                tells: AtomicBool::new(false),
                stops: AtomicBool::new(false),
                connection: Mutex::default(),
                heard: AtomicU64::new(0),
                job: OnceLock::new(),
            }),
        }
    }

    /// A link that somebody else dials and lends: for questions alone.
    pub(super) fn lent(address: Address) -> HeadLink {
        let head = HeadLink::new(address);
        head.shared.started.store(true, Ordering::Release);
        head
    }

    /// There is a connection now, or none.
    pub(super) fn lend(&self, client: Option<HeadClient>) {
        self.shared.client.send_replace(client.map_or(Standing::Away, Standing::Here));
    }

    /// Whoever was found there first has said this of itself.
    pub fn found(&self, epoch: Option<Epoch>) {
        self.shared.way.found(epoch);
    }

    /// The cluster ends: no other head will follow.
    pub(super) fn stops(&self) {
        self.shared.stops.store(true, Ordering::Release);
        self.shared.way.ends();
    }

    /// Whether the head has said that the cluster ends.
    pub(super) fn is_stopped(&self) -> bool {
        self.shared.stops.load(Ordering::Acquire)
    }

    /// Where the head is.
    pub fn address(&self) -> Address {
        self.shared.way.address()
    }

    /// It may be there, too.
    pub fn learn(&self, other: Address) {
        self.shared.way.learn(other);
    }

    /// Whether it was found there last.
    pub(super) fn is_with(&self, head: &Address) -> bool {
        self.shared.way.is_with(head)
    }

    /// Where it may be; where it was found last comes first.
    pub fn heads(&self) -> Vec<Address> {
        self.shared.way.heads()
    }

    /// Which head was joined last, if another will follow.
    pub fn epoch(&self) -> Option<Epoch> {
        self.shared.way.epoch()
    }

    /// Whether there is a connection now.
    pub(super) fn is_here(&self) -> bool {
        matches!(&*self.shared.client.borrow(), Standing::Here(_))
    }

    /// Ends the connection.
    pub(super) fn close(&self) {
        if let Some(connection) = &*self.shared.connection.lock() {
            connection.close();
        }
    }

    /// Queues a message. Whether nobody dials yet, and somebody is to.
    pub(super) fn say(&self, message: HeadMessage) -> bool {
        self.shared.link.send(message);
        self.is_first_use()
    }

    /// Whether nobody dials yet, and somebody is to.
    pub(super) fn is_first_use(&self) -> bool {
        !self.shared.started.swap(true, Ordering::AcqRel)
    }

    /// A driver has joined with this job.
    pub fn has_joined(&self, job: JobSpec) {
        let _ = self.shared.job.set(job);
    }

    pub(super) fn job(&self) -> Option<&JobSpec> {
        self.shared.job.get()
    }

    /// What was said to an earlier head, and what that said, is over. What ends something is still to be done.
    pub(super) fn begin_anew(&self) {
        self.shared.link.forget(HeadMessage::outlives_head);
        self.shared.heard.store(0, Ordering::Release);
        self.shared.tells.store(true, Ordering::Release);
    }

    /// Whether a batch of this number is to be taken in, and has not come before.
    pub(super) fn hears(&self, number: u64) -> bool {
        self.shared.heard.fetch_max(number + 1, Ordering::AcqRel) <= number
    }
}
