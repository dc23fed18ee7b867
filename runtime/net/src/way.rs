//! The way to the head, which may be started again.
//!
//! A head that keeps a journal says which life of its cluster's head it is ([`Epoch`]). When it is gone, the next one is looked
//! for where it was, and where its standby would serve. Whoever finds it tells it what it has, since the next head knows only what was written down.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use wingbeat_core::error::Error;
use wingbeat_core::spec::{Address, MachineId};

use crate::address::{self, DialError, Stream};
use crate::handshake::{Epoch, Hello, Resumes, Token, Welcome};
use crate::limits;
use crate::seek;
use crate::staggered::first_of;

/// What it is called in errors.
const HEAD: &str = "the head";

/// Heads that are looked for at most: the list that a person gave, and standbys that were told of.
const HEADS: usize = 8;

/// Where the head is, and which one was talked to last.
pub struct Way {
    /// Where it was found last comes first; never empty. The others are where its standby would serve.
    heads: Mutex<Vec<Address>>,
    epoch: Mutex<Option<Epoch>>,
    /// To whom this node has promised itself: no earlier head is believed any more.
    promise: Mutex<Option<Promise>>,
    /// Whether it was said that no other head will follow. That may come before the answer with which the present one is joined.
    ends: AtomicBool,
    /// Why whoever listens there refused last.
    refused: Mutex<Option<String>>,
}

/// A promise to a standby that asked for a vote.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Promise {
    /// The standby would lead with this epoch.
    pub epoch: Epoch,
    /// Where it would serve.
    pub standby: Address,
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
        Way {
            heads: Mutex::new(vec![address]),
            epoch: Mutex::default(),
            promise: Mutex::default(),
            ends: AtomicBool::new(false),
            refused: Mutex::default(),
        }
    }

    /// The head may be there, too.
    pub fn learn(&self, other: Address) {
        let mut heads = self.heads.lock();
        if heads.iter().any(|known| is_same(known, &other)) {
            return;
        }
        if heads.len() == HEADS {
            heads.remove(1);
        }
        heads.push(other);
    }

    /// Where the head may be; where it was found last comes first.
    pub fn heads(&self) -> Vec<Address> {
        self.heads.lock().clone()
    }

    /// Whether the head was found there last.
    pub fn is_with(&self, head: &Address) -> bool {
        is_same(&self.heads.lock()[0], head)
    }

    /// The standby to which this node has promised itself.
    pub fn promise(&self) -> Option<Promise> {
        self.promise.lock().clone()
    }

    /// Decides on a promise: what is returned with the answer replaces the present one.
    pub fn promise_if<R>(&self, decide: impl FnOnce(Option<&Promise>) -> (R, Option<Promise>)) -> R {
        let mut promise = self.promise.lock();
        let (answer, made) = decide(promise.as_ref());
        if let Some(made) = made {
            self.learn(made.standby.clone());
            *promise = Some(made);
        }
        answer
    }

    /// The epoch of the head that was joined last.
    pub fn epoch(&self) -> Option<Epoch> {
        *self.epoch.lock()
    }

    /// Whoever was found there first has said this of itself.
    pub fn found(&self, epoch: Option<Epoch>) {
        *self.epoch.lock() = epoch;
    }

    /// Whether another head will follow when this one has ended.
    pub fn is_followed(&self) -> bool {
        self.epoch.lock().is_some()
    }

    /// Where the head is, or was when it was found last.
    pub fn address(&self) -> Address {
        self.heads.lock()[0].clone()
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
            self.promise.lock().take_if(|promise| promise.epoch <= epoch);
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
        let attempts = self.heads().into_iter().map(|head| self.dial_one(head, token, hello.clone(), known));
        let errors = match first_of(attempts).await {
            Ok((stream, met, head)) => {
                *self.refused.lock() = None;
                self.is_at(&head);
                return Ok((stream, met));
            }
            Err(errors) => errors,
        };
        let (gone, failed): (Vec<_>, Vec<_>) =
            errors.into_iter().partition(|error| matches!(error, DialError::Gone(_)));
        match (failed.into_iter().next(), gone.into_iter().next()) {
            (Some(error), _) => Err(self.noted(error)),
            // The next one may follow.
            (None, Some(DialError::Gone(error))) if known.is_some() => Err(DialError::Failed(error)),
            (None, Some(error)) => Err(error),
            (None, None) => Err(DialError::Failed(Error::NoSession)),
        }
    }

    async fn dial_one(
        &self,
        head: Address,
        token: &Token,
        hello: Hello,
        known: Option<Epoch>,
    ) -> Result<(Stream, Met, Address), DialError> {
        let resumes = hello.resumes != Resumes::Nothing;
        // As of before the question: a standby that answers later knows whether it still runs.
        let promised = self.promise();
        let (stream, welcome) = self.dial_somewhere(&head, token, hello).await?;
        if let Some(standby) = &welcome.stands_by {
            if let Some(promised) = promised.filter(|promised| standby.runs_for != Some(promised.epoch))
                && is_same(&promised.standby, &head)
            {
                // It has given up, and will not lead with that epoch.
                self.promise.lock().take_if(|promise| *promise == promised);
            }
            self.learn(standby.head.clone());
            return Err(DialError::Failed(seek::only_a_standby(HEAD, &shown(&head), standby)));
        }
        let met = self.met(known, resumes, &welcome)?;
        if let Some(patience) = welcome.patience {
            limits::take(patience);
        }
        Ok((stream, met, head))
    }

    /// The head was found there.
    fn is_at(&self, head: &Address) {
        let mut heads = self.heads.lock();
        if let Some(at) = heads.iter().position(|known| known == head) {
            heads[..=at].rotate_right(1);
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

    async fn dial_somewhere(
        &self,
        head: &Address,
        token: &Token,
        hello: Hello,
    ) -> Result<(Stream, Welcome), DialError> {
        let dialled = address::dial_and_learn(head, HEAD, token, hello.clone()).await;
        match (&dialled, over_tcp(head)) {
            // Another has no such socket, and the same port.
            (Err(DialError::Gone(_)), Some(address)) => address::dial_and_learn(&address, HEAD, token, hello).await,
            _ => dialled,
        }
    }

    fn met(&self, known: Option<Epoch>, resumes: bool, welcome: &Welcome) -> Result<Met, DialError> {
        let least = self.promise.lock().as_ref().map(|promise| promise.epoch);
        match welcome.epoch {
            earlier if earlier < least => Err(older()),
            first if !resumes => {
                *self.epoch.lock() = first;
                Ok(Met::Known)
            }
            same if same == known => Ok(Met::Known),
            Some(next) if known.is_some_and(|known| known < next) => Ok(Met::Next(next)),
            _ => Err(older()),
        }
    }
}

fn older() -> DialError {
    DialError::Failed(Error::Refused { who: HEAD.into(), why: "an older head of the cluster listens there".into() })
}

fn is_same(one: &Address, other: &Address) -> bool {
    let by_tcp = one.tcp.is_some() && one.tcp == other.tcp;
    by_tcp || one.machine == other.machine && one.unix == other.unix && !one.unix.is_empty()
}

fn shown(head: &Address) -> String {
    head.tcp.map_or_else(|| format!("unix:@{}", head.unix), |tcp| tcp.to_string())
}

/// The same process on a machine that nobody is on, so that it is reached over the network.
fn over_tcp(head: &Address) -> Option<Address> {
    let is_here = head.machine == address::this_machine();
    let far = Address { machine: MachineId(0), unix: String::new(), ..head.clone() };
    (is_here && far.tcp.is_some()).then_some(far)
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
