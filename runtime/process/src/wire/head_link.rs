//! What is kept of the connection to the head.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use tokio::sync::OnceCell;
use wingbeat_core::spec::Address;
use wingbeat_net::link::Link;
use wingbeat_net::messages::HeadMessage;
use wingbeat_net::mux::Connection;
use wingbeat_net::services::HeadClient;

/// The link to the head.
#[derive(Clone)]
pub struct HeadLink {
    pub(super) shared: Arc<Shared>,
}

pub(super) struct Shared {
    pub address: Address,
    pub link: Link<HeadMessage>,
    pub client: OnceCell<HeadClient>,
    /// Whether somebody dials, or has.
    started: AtomicBool,
    pub connection: Mutex<Option<Connection>>,
}

impl HeadLink {
    /// To the head at `address`; not dialled yet.
    pub fn new(address: Address) -> HeadLink {
        HeadLink {
            shared: Arc::new(Shared {
                address,
                link: Link::new(),
                client: OnceCell::new(),
                started: AtomicBool::new(false),
                connection: Mutex::default(),
            }),
        }
    }

    /// Where the head is.
    pub fn address(&self) -> &Address {
        &self.shared.address
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
        !self.shared.started.swap(true, Ordering::AcqRel)
    }
}
