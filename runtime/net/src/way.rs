//! The way to the head, which may be started again.
//!
//! A head that keeps a journal says which life of its cluster's head it is ([`Epoch`]). When it is gone, the next one is looked
//! for where it was. Whoever finds it tells it what it has, since the next head knows only what was written down.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use wingbeat_core::error::Error;
use wingbeat_core::spec::{Address, MachineId};

use crate::address::{self, DialError, Stream};
use crate::handshake::{Epoch, Hello, Resumes, Token, Welcome};
use crate::limits;

/// What it is called in errors.
const HEAD: &str = "the head";

/// Where the head is, and which one was talked to last.
pub struct Way {
    address: Address,
    epoch: Mutex<Option<Epoch>>,
    /// Whether it was said that no other head will follow. That may come before the answer with which the present one is joined.
    ends: AtomicBool,
    /// Why whoever listens there refused last.
    refused: Mutex<Option<String>>,
}

/// Who was found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Met {
    /// The head that was talked to before, or the first one.
    Known,
    /// A later head of the same cluster.
    Next(Epoch),
}

impl Way {
    /// To the head at `address`.
    pub fn new(address: Address) -> Way {
        Way { address, epoch: Mutex::default(), ends: AtomicBool::new(false), refused: Mutex::default() }
    }

    /// Whoever was found there first has said this of itself.
    pub fn found(&self, epoch: Option<Epoch>) {
        *self.epoch.lock() = epoch;
    }

    /// Whether another head will follow when this one has ended.
    pub fn is_followed(&self) -> bool {
        self.epoch.lock().is_some()
    }

    /// Where the head is, or was when it was found first.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// No other head will follow.
    pub fn ends(&self) {
        let mut epoch = self.epoch.lock();
        self.ends.store(true, Ordering::Relaxed);
        *epoch = None;
    }

    /// The head of this life knows what it has to know: from now on it is the one that is talked to.
    pub fn joined(&self, met: Met) {
        let mut known = self.epoch.lock();
        if let Met::Next(epoch) = met
            && !self.ends.load(Ordering::Relaxed)
        {
            *known = Some(epoch);
        }
    }

    /// Dials once, for the first connection or for one that goes on where another ended (`hello.resumes`). How long silence is borne is
    /// from now on what the head says.
    ///
    /// # Errors
    /// [`DialError::Gone`] when nobody listens there, and nobody will; otherwise it is worth trying again.
    pub async fn dial(&self, token: &Token, hello: Hello) -> Result<(Stream, Met), DialError> {
        let known = *self.epoch.lock();
        let hello = Hello { epoch: known, ..hello };
        let resumes = hello.resumes != Resumes::Nothing;
        match self.dial_somewhere(token, hello).await {
            // The next one may follow.
            Err(DialError::Gone(error)) if known.is_some() => Err(DialError::Failed(error)),
            Err(error) => Err(self.noted(error)),
            Ok((stream, welcome)) => {
                let met = self.met(known, resumes, &welcome).map_err(|error| self.noted(error))?;
                *self.refused.lock() = None;
                if let Some(patience) = welcome.patience {
                    limits::take(patience);
                }
                Ok((stream, met))
            }
        }
    }

    /// Says once why whoever listens there refuses: it may be of another build, or have another token.
    fn noted(&self, error: DialError) -> DialError {
        if let DialError::Failed(refused @ Error::Refused { .. }) = &error {
            let why = refused.to_string();
            let mut last = self.refused.lock();
            if last.as_ref() != Some(&why) {
                tracing::warn!("{why}");
                *last = Some(why);
            }
        }
        error
    }

    async fn dial_somewhere(&self, token: &Token, hello: Hello) -> Result<(Stream, Welcome), DialError> {
        let dialled = address::dial_and_learn(&self.address, HEAD, token, hello.clone()).await;
        match (&dialled, self.over_tcp()) {
            // Another has no such socket, and the same port.
            (Err(DialError::Gone(_)), Some(address)) => address::dial_and_learn(&address, HEAD, token, hello).await,
            _ => dialled,
        }
    }

    /// The same process on a machine that nobody is on, so that it is reached over the network.
    fn over_tcp(&self) -> Option<Address> {
        let is_here = self.address.machine == address::this_machine();
        let far = Address { machine: MachineId(0), unix: String::new(), ..self.address.clone() };
        (is_here && far.tcp.is_some()).then_some(far)
    }

    fn met(&self, known: Option<Epoch>, resumes: bool, welcome: &Welcome) -> Result<Met, DialError> {
        match welcome.epoch {
            first if !resumes => {
                *self.epoch.lock() = first;
                Ok(Met::Known)
            }
            same if same == known => Ok(Met::Known),
            Some(next) if known.is_some_and(|known| known < next) => Ok(Met::Next(next)),
            _ => Err(DialError::Failed(Error::Refused {
                who: HEAD.into(),
                why: "an older head of the cluster listens there".into(),
            })),
        }
    }
}

#[cfg(test)]
mod tests {
    use wingbeat_core::ProcessId;

    use super::*;

    #[test]
    fn after_the_last_head_none_follows_also_when_it_is_joined_only_then() {
        let nowhere =
            Address { process: ProcessId(1), machine: MachineId(0), unix: String::new(), tcp: None, steward: None };
        let way = Way::new(nowhere);
        way.found(Some(Epoch(1)));
        way.joined(Met::Next(Epoch(2)));
        assert!(way.is_followed());
        way.ends();
        way.joined(Met::Next(Epoch(3)));
        assert!(!way.is_followed());
    }
}
