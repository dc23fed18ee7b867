//! This process's connection to the head. A driver dials at once; a worker process when it first has
//! something to say.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use tokio::sync::OnceCell;
use wingbeat_core::error::Error;
use wingbeat_core::spec::Address;
use wingbeat_net::address;
use wingbeat_net::handshake::Purpose;
use wingbeat_net::limits::limits;
use wingbeat_net::link::Link;
use wingbeat_net::messages::HeadMessage;
use wingbeat_net::mux::{self, Connection, Waiting};
use wingbeat_net::services::{HeadClient, HeadRequest, HeadResponse, Process as _, ProcessRequest, ProcessResponse};

use crate::process::Process;
use crate::service::PeerService;

/// The link to the head.
#[derive(Clone)]
pub struct HeadLink {
    shared: Arc<Shared>,
}

struct Shared {
    address: Address,
    link: Link<HeadMessage>,
    client: OnceCell<HeadClient>,
    started: AtomicBool,
    connection: Mutex<Option<Connection>>,
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

    pub(crate) fn close(&self) {
        if let Some(connection) = &*self.shared.connection.lock() {
            connection.close();
        }
    }

    /// The client, dialling if need be.
    ///
    /// # Errors
    /// When the head cannot be reached.
    pub async fn client(&self, process: &Arc<Process>) -> Result<HeadClient, Error> {
        let client = self.shared.client.get_or_try_init(|| self.dial(process)).await?;
        Ok(client.clone())
    }

    async fn dial(&self, process: &Arc<Process>) -> Result<HeadClient, Error> {
        let hello = process.hello(Purpose::Control);
        let stream = address::dial(&self.shared.address, "the head", &process.token, hello).await?;
        let (this, process) = (self.clone(), process.clone());
        // Tasks of a connection belong to the IO thread, whoever dialled.
        let (ready, client) = tokio::sync::oneshot::channel();
        let vital = process.clone();
        vital.vital("its connection to the head", async move {
            let (connection, client, server) =
                mux::connect::<HeadRequest, HeadResponse, ProcessRequest, ProcessResponse>(stream, Waiting::Asleep);
            *this.shared.connection.lock() = Some(connection.clone());
            let client = HeadClient::new(mux::client_config(), client).spawn();
            let _ = ready.send(client);
            let service = PeerService::new(process.clone(), this.shared.address.process);
            let sending = this.shared.link.run(&connection, |messages| HeadRequest::Deliver { messages });
            mux::beside(mux::serve(server, service.serve()), sending).await;
            connection.close();
            this.shared.link.broke();
            process.head_lost();
        });
        client.await.map_err(|_| process_ended())
    }
}

fn process_ended() -> Error {
    Error::SessionEnded { why: "it was shut down while connecting to the head".into() }
}

impl Process {
    /// Queues a message to the head.
    pub fn tell_head(self: &Arc<Self>, message: HeadMessage) {
        let Some(head) = self.head.get() else { return };
        head.shared.link.send(message);
        if !head.shared.started.swap(true, Ordering::AcqRel) {
            let (process, head) = (self.clone(), head.clone());
            self.io.spawn(async move {
                if let Err(error) = head.client(&process).await {
                    tracing::warn!(%error, "cannot reach the head");
                    head.shared.link.broke();
                    process.head_lost();
                }
            });
        }
    }

    /// The head's client, for questions.
    ///
    /// # Errors
    /// When there is no head, or it cannot be reached.
    pub async fn head_client(self: &Arc<Self>) -> Result<HeadClient, Error> {
        let head = self.head.get().ok_or(Error::NoSession)?;
        let (process, head) = (self.clone(), head.clone());
        let client = self.io.spawn(async move { head.client(&process).await });
        client.await.map_err(|_| process_ended())?
    }

    fn head_lost(self: &Arc<Self>) {
        if self.is_shut_down() {
            return;
        }
        let address = self.head.get().map(|head| head.address().clone());
        let at = address.and_then(|address| address.tcp).map_or_else(String::new, |tcp| format!(" at {tcp}"));
        let silence = limits().silence;
        self.end(&Error::SessionEnded {
            why: format!(
                "the head{at} is gone, or has heard nothing from this process for {silence:?}; what was running may be lost"
            ),
        });
    }
}
