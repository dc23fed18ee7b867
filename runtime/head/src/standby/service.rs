//! What a head asks of a standby.

use std::sync::Arc;

use tarpc::context::Context;
use wingbeat_net::address::Stream;
use wingbeat_net::handshake::{Epoch, Hello, Role};
use wingbeat_net::limits::limits;
use wingbeat_net::messages::Leave;
use wingbeat_net::mux::{self, Waiting};
use wingbeat_net::services::{HeadRequest, HeadResponse, Standby as _, StandbyRequest, StandbyResponse};

use super::Standby;
use super::follow::PAUSE;
use crate::service::Durable as _;
use crate::state::{Fact, FactKey};
use crate::succession::millis;

impl Standby {
    /// Before it leads.
    pub(super) async fn answer(self: Arc<Self>, stream: Stream, hello: Hello) {
        // Others have learned from the welcome where the head is.
        if hello.role == Role::Head {
            let (connection, _, server) =
                mux::connect::<HeadRequest, HeadResponse, StandbyRequest, StandbyResponse>(stream, Waiting::Asleep);
            mux::serve(server, StandbyService(self).serve()).await;
            connection.close();
        }
    }
}

/// What a head that is started again asks.
#[derive(Clone)]
struct StandbyService(Arc<Standby>);

impl wingbeat_net::services::Standby for StandbyService {
    async fn may_lead(self, _: Context, epoch: Epoch) -> Leave {
        let standby = self.0;
        let until = standby.now() + millis(limits().takeover);
        loop {
            let now = standby.now();
            let (decided, hears_head) = {
                let mut deciding = standby.deciding.lock();
                // What it could not write would be void in this life alone.
                let can_write = standby.cannot_write.lock().is_none();
                (can_write.then(|| deciding.lets_lead(now, epoch)).flatten(), deciding.hears_head(now))
            };
            match decided {
                // What a head has said last may arrive after its end.
                None if hears_head && now > until => return Leave::HearsHead(standby.way.address()),
                None => tokio::time::sleep(PAUSE).await,
                Some(false) => return Leave::Superseded,
                Some(true) => break,
            }
        }
        // Also in its next life.
        let journal = standby.journal.lock().clone();
        match journal {
            Some(journal) if journal.intend(vec![Fact::NoSuccession, Fact::NoEarlierSuccession]).await.is_ok() => {
                standby.known.lock().remove(&FactKey::Succession);
                standby.is_current.send_replace(false);
                Leave::Given
            }
            _ => std::future::pending().await,
        }
    }
}
