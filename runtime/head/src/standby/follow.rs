//! A standby follows the head, over one connection after the other.

use std::sync::Arc;
use std::time::{Duration, Instant};

use wingbeat_core::ProcessId;
use wingbeat_core::error::Error;
use wingbeat_core::spec::Address;
use wingbeat_net::address::{DialError, Stream};
use wingbeat_net::handshake::Epoch;
use wingbeat_net::limits::limits;
use wingbeat_net::messages::{Follow, Followed};
use wingbeat_net::mux::Waiting;
use wingbeat_net::services::{HeadClient, HeadRequest, HeadResponse, ProcessRequest, ProcessResponse};
use wingbeat_net::{address, mux};

use super::copy::Copying;
use super::{Outcome, Standby};
use crate::state::{Fact, FactKey};
use crate::succession::millis;

/// The pause before the head is dialled again.
pub(super) const PAUSE: Duration = Duration::from_millis(100);
/// The same, where somebody there has refused.
const REFUSED_PAUSE: Duration = Duration::from_secs(1);

/// The first pause after the file could not be written, and the longest.
const FULL_PAUSES: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(60));

/// How following over one connection has ended.
enum Ended {
    /// With the standby.
    Standby(Outcome),
    /// Another connection may go on.
    Connection,
    /// The file cannot be written.
    CannotWrite(Error),
}

fn does_not_write() -> Error {
    let why = format!("the disk has not answered for {:?}", limits().head);
    Error::Failed { what: "writing what the head has written".into(), why }
}

impl Standby {
    /// Follows the head over one connection after the other.
    pub(super) async fn follow(self: &Arc<Self>) -> Outcome {
        loop {
            // Each connection has its own name: it begins anew.
            let hello = self.hello(ProcessId::random());
            match tokio::time::timeout(limits().takeover, self.way.dial(&self.token, hello)).await {
                Ok(Ok((stream, _))) => {
                    // A head that was started again may have other times, which it has said.
                    self.deciding.lock().bears(millis(limits().takeover));
                    let ended = self.follow_over(stream).await;
                    self.deciding.lock().is_cut_off();
                    match ended {
                        Ended::Standby(outcome) => return outcome,
                        Ended::Connection => tracing::warn!("the connection to the head has ended; looking for it"),
                        Ended::CannotWrite(error) => {
                            tokio::time::sleep(self.pause_after(&error)).await;
                            // While the disk says nothing, what the head sends would only pile up.
                            let _ = self.keeps_its_file().await;
                        }
                    }
                }
                Ok(Err(error)) => {
                    tracing::debug!(%error, "cannot reach the head");
                    self.has_begun.send_replace(true);
                    if matches!(error, DialError::Failed(Error::Refused { .. })) {
                        // It would refuse the next one, too.
                        tokio::time::sleep(REFUSED_PAUSE).await;
                        continue;
                    }
                    if matches!(error, DialError::Gone(_)) || self.is_gone().await {
                        self.deciding.lock().head_is_gone();
                    }
                }
                Err(_) => drop(self.has_begun.send_replace(true)),
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Whether nobody listens where the head did, by whatever way.
    async fn is_gone(&self) -> bool {
        let head = self.way.address();
        let far = Address { machine: wingbeat_core::spec::MachineId(0), unix: String::new(), ..head.clone() };
        address::is_gone(&head).await && (far.tcp.is_none() || address::is_gone(&far).await)
    }

    /// Follows over one connection.
    async fn follow_over(self: &Arc<Self>, stream: Stream) -> Ended {
        let (connection, client, _) =
            mux::connect::<HeadRequest, HeadResponse, ProcessRequest, ProcessResponse>(stream, Waiting::Asleep);
        // Also when it runs meanwhile.
        let _closes = connection.closes();
        let client = HeadClient::new(mux::client_config(), client).spawn();
        let epoch = self.way.epoch().unwrap_or(Epoch(0));
        let mut copying = Copying::default();
        let (mut written, mut has_all) = (0, false);
        // What it may have from earlier is not what the head has now.
        self.note_whether_current(false);
        loop {
            let generation = self.written_generation();
            let asks = Follow { standby: self.address.clone(), written, generation };
            let asked = self.now();
            let answer = client.follow(mux::within(limits().takeover), asks.clone()).await;
            if !matches!(&answer, Ok(Err(Error::Refused { .. }))) {
                self.has_begun.send_replace(true);
            }
            let facts = match answer {
                Err(_) => return Ended::Connection,
                Ok(Err(error @ Error::Refused { .. })) => return Ended::Standby(Outcome::Failed(error)),
                Ok(Err(_)) => return Ended::Connection,
                Ok(Ok(Followed::Stops)) => return Ended::Standby(Outcome::Stopped),
                Ok(Ok(Followed::Facts(facts))) => facts,
            };
            self.deciding.lock().heard(self.now(), has_all.then_some(asked), epoch);
            let position = facts.position;
            let written_now = tokio::select! {
                biased;
                written = self.write(facts, &mut copying) => written,
                () = self.say_that_it_writes(&client, asks, epoch, has_all) => Err(does_not_write()),
            };
            if let Err(error) = written_now {
                return Ended::CannotWrite(error);
            }
            written = position;
            has_all = copying.is_complete;
            if has_all {
                self.can_write();
            }
            self.note_whether_current(has_all && self.deciding.lock().may_take_over());
            self.fetch_programs(&client);
        }
    }

    /// Follows as before while something is being written, which may take longer than a standby may be silent. Where the head waits for that, it ends when
    /// it takes as long as a head may take to answer.
    async fn say_that_it_writes(&self, head: &HeadClient, asks: Follow, epoch: Epoch, has_all: bool) {
        let begun = Instant::now();
        while !has_all || begun.elapsed() < limits().head {
            tokio::time::sleep(limits().takeover / 4).await;
            let asked = self.now();
            // What it is sent, it is being sent again; and the end of the connection is found when it has written.
            let answer = head.follow(mux::within(limits().takeover), asks.clone()).await;
            if let Ok(Ok(Followed::Facts(_))) = answer {
                self.deciding.lock().heard(self.now(), has_all.then_some(asked), epoch);
            }
        }
    }

    /// How long the head is left alone after what it has written could not be written here. Each attempt has it read all that it knows.
    fn pause_after(&self, error: &Error) -> Duration {
        let (first, longest) = FULL_PAUSES;
        let mut pause = self.cannot_write.lock();
        let next = match *pause {
            None => {
                tracing::error!(%error, "cannot write what the head has written; it goes on without this standby until it can");
                first
            }
            Some(last) => (last * 2).min(longest),
        };
        *pause = Some(next);
        next
    }

    fn can_write(&self) {
        if self.cannot_write.lock().take().is_some() {
            tracing::info!("what the head has written is written here again");
        }
    }

    fn written_generation(&self) -> Option<wingbeat_net::messages::Generation> {
        match self.known.lock().get(&FactKey::Succession) {
            Some(Fact::Succession(succession)) => Some(succession.generation),
            _ => None,
        }
    }
}
