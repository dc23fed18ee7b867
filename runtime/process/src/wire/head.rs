//! This process's connection to the head. A driver dials at once; a worker process when it first has
//! something to say.

use wingbeat_core::error::Error;
use wingbeat_net::address;
use wingbeat_net::handshake::Purpose;
use wingbeat_net::limits::limits;
use wingbeat_net::messages::HeadMessage;
use wingbeat_net::mux::{self, Waiting};
use wingbeat_net::services::{HeadClient, HeadRequest, HeadResponse, Process as _, ProcessRequest, ProcessResponse};

use crate::owner::Outside;
use crate::wire::head_link::HeadLink;
use crate::wire::process::Process;
use crate::wire::service::PeerService;

fn process_ended() -> Error {
    Error::SessionEnded { why: "it was shut down while connecting to the head".into() }
}

impl Process {
    /// Queues a message to the head.
    pub fn tell_head(&self, message: HeadMessage) {
        self.wire.tell_head(&self.owner, message);
    }

    /// Dials the head, to which something was said.
    pub(super) fn reach_head(self, head: &HeadLink) {
        let head = head.clone();
        self.io().clone().spawn(async move {
            if let Err(error) = self.client_of(&head).await {
                tracing::warn!(%error, "cannot reach the head");
                head.shared.link.broke();
                self.head_lost();
            }
        });
    }

    /// The head's client, for questions; dials if need be.
    ///
    /// # Errors
    /// When there is no head, or it cannot be reached.
    pub async fn head_client(&self) -> Result<HeadClient, Error> {
        let head = self.wire.head.get().ok_or(Error::NoSession)?;
        let (process, head) = (self.clone(), head.clone());
        let client = self.io().spawn(async move { process.client_of(&head).await });
        client.await.map_err(|_| process_ended())?
    }

    async fn client_of(&self, head: &HeadLink) -> Result<HeadClient, Error> {
        let client = head.shared.client.get_or_try_init(|| self.dial_head(head)).await?;
        Ok(client.clone())
    }

    async fn dial_head(&self, head: &HeadLink) -> Result<HeadClient, Error> {
        let hello = self.hello(Purpose::Control);
        let stream = address::dial(&head.shared.address, "the head", &self.wire.who.token, hello).await?;
        let (head, process) = (head.clone(), self.clone());
        // Tasks of a connection belong to the IO thread, whoever dialled.
        let (ready, client) = tokio::sync::oneshot::channel();
        self.vital("its connection to the head", async move {
            let (connection, client, server) =
                mux::connect::<HeadRequest, HeadResponse, ProcessRequest, ProcessResponse>(stream, Waiting::Asleep);
            *head.shared.connection.lock() = Some(connection.clone());
            let client = HeadClient::new(mux::client_config(), client).spawn();
            let _ = ready.send(client);
            let service = PeerService::new(process.clone(), head.shared.address.process);
            let sending = head.shared.link.run(&connection, |messages| HeadRequest::Deliver { messages });
            mux::beside(mux::serve(server, service.serve()), sending).await;
            connection.close();
            head.shared.link.broke();
            process.head_lost();
        });
        client.await.map_err(|_| process_ended())
    }

    fn head_lost(&self) {
        if self.is_shut_down() {
            return;
        }
        let address = self.wire.head.get().map(|head| head.address().clone());
        let at = address.and_then(|address| address.tcp).map_or_else(String::new, |tcp| format!(" at {tcp}"));
        let silence = limits().silence;
        self.end(&Error::SessionEnded {
            why: format!(
                "the head{at} is gone, or has heard nothing from this process for {silence:?}; what was running may be lost"
            ),
        });
    }
}
