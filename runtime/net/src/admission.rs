//! Connections that were accepted and have not proved the token yet.
//!
//! Whoever reaches the port can open such connections, so they are bounded, and nobody can keep others out with them: local
//! and remote ones are apart, and when there are too many, the oldest of the address with the most is dropped. Accepting
//! never waits.

use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

use tokio::task::{AbortHandle, JoinSet};
use tokio::time::Instant;

/// Local ones at most. Others of this machine's users are refused at once, so these are all this user's.
const LOCAL: usize = 256;

/// Remote ones at most: enough that thousands which are opened a second leave an honest one time for its answer, which
/// takes a round trip, and few enough to leave descriptors for everything else.
const REMOTE: usize = 512;

/// Refusals are logged in periods of this length, ...
const PERIOD: Duration = Duration::from_secs(10);
/// ... so many of them one by one; the others as one number at its end.
const LOGGED: u32 = 5;

/// Where a connection comes from.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Source {
    /// This machine, over a unix socket.
    Local,
    /// An address; of IPv6 the network, since whoever has one of its addresses has them all.
    Remote(IpAddr),
}

impl Source {
    pub(crate) fn remote(address: IpAddr) -> Source {
        Source::Remote(match address.to_canonical() {
            IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX))),
            v4 => v4,
        })
    }

    fn most(self) -> usize {
        match self {
            Source::Local => LOCAL,
            Source::Remote(_) => REMOTE,
        }
    }

    fn competes_with(self, other: Source) -> bool {
        (self == Source::Local) == (other == Source::Local)
    }
}

/// The handshakes under way at a listener. Each ends with nothing, or with why the connection was refused.
#[derive(Default)]
pub(crate) struct Admission {
    tasks: JoinSet<Option<String>>,
    /// The oldest of each first; those that are over are taken out when room is needed.
    waiting: BTreeMap<Source, VecDeque<AbortHandle>>,
}

impl Admission {
    /// Begins a handshake, in place of an older one if there are too many.
    pub(crate) fn admit(&mut self, from: Source, handshake: impl Future<Output = Option<String>> + Send + 'static) {
        if self.count(from) >= from.most() {
            self.forget_ended();
            while self.count(from) >= from.most() && self.drop_oldest(|other| from.competes_with(other)) {}
        }
        let handle = self.tasks.spawn(handshake);
        self.waiting.entry(from).or_default().push_back(handle);
    }

    /// Ends one, for the descriptor that it has.
    pub(crate) fn make_room(&mut self) {
        self.forget_ended();
        self.drop_oldest(|_| true);
    }

    /// The next that ends, and why it was refused if it was.
    pub(crate) async fn ended(&mut self) -> Option<String> {
        match self.tasks.join_next().await {
            Some(Ok(refused)) => refused,
            Some(Err(error)) if error.is_cancelled() => Some("too many did not introduce themselves".into()),
            Some(Err(error)) => Some(error.to_string()),
            None => std::future::pending().await,
        }
    }

    fn count(&self, from: Source) -> usize {
        let competing = self.waiting.iter().filter(|(other, _)| from.competes_with(**other));
        competing.map(|(_, handles)| handles.len()).sum()
    }

    fn forget_ended(&mut self) {
        self.waiting.retain(|_, handles| {
            handles.retain(|handle| !handle.is_finished());
            !handles.is_empty()
        });
    }

    fn drop_oldest(&mut self, among: impl Fn(Source) -> bool) -> bool {
        let candidates = self.waiting.iter_mut().filter(|(source, _)| among(**source));
        let Some((_, handles)) = candidates.max_by_key(|(_, handles)| handles.len()) else { return false };
        match handles.pop_front() {
            Some(oldest) => {
                oldest.abort();
                true
            }
            None => false,
        }
    }
}

/// What was refused, for the log.
#[derive(Debug)]
pub(crate) struct Refusals {
    since: Instant,
    count: u32,
}

impl Default for Refusals {
    fn default() -> Self {
        Refusals { since: Instant::now(), count: 0 }
    }
}

impl Refusals {
    /// Takes a refusal in; answers whether it is to be logged.
    pub(crate) fn note(&mut self) -> bool {
        if self.count <= LOGGED && self.since.elapsed() >= PERIOD {
            *self = Refusals::default();
        }
        self.count = self.count.saturating_add(1);
        self.count <= LOGGED
    }

    /// Waits for the end of a period in which some were not logged, and answers how many.
    pub(crate) async fn unlogged(&mut self) -> u32 {
        if self.count <= LOGGED {
            return std::future::pending().await;
        }
        tokio::time::sleep_until(self.since + PERIOD).await;
        std::mem::take(self).count - LOGGED
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn remote(last: u8) -> Source {
        Source::remote(IpAddr::from([10, 0, 0, last]))
    }

    fn half_open(admission: &mut Admission, from: Source) {
        admission.admit(from, std::future::pending());
    }

    #[tokio::test]
    async fn one_address_with_many_loses_its_own_and_nobody_elses() {
        let mut admission = Admission::default();
        half_open(&mut admission, remote(1));
        half_open(&mut admission, Source::Local);
        for _ in 0..10_000 {
            half_open(&mut admission, remote(2));
        }
        assert_eq!(admission.waiting[&remote(1)].len(), 1);
        assert_eq!(admission.waiting[&Source::Local].len(), 1);
        assert_eq!(admission.waiting[&remote(2)].len(), REMOTE - 1);
        assert!(admission.ended().await.unwrap().contains("too many"));
    }

    #[tokio::test]
    async fn local_ones_and_remote_ones_are_apart() {
        let mut admission = Admission::default();
        for last in 0..=255 {
            for _ in 0..10 {
                half_open(&mut admission, remote(last));
                half_open(&mut admission, Source::Local);
            }
        }
        let remote: usize =
            admission.waiting.iter().filter(|(from, _)| **from != Source::Local).map(|(_, of)| of.len()).sum();
        assert_eq!((admission.waiting[&Source::Local].len(), remote), (LOCAL, REMOTE));
    }

    #[tokio::test]
    async fn those_that_are_over_need_no_room() {
        let mut admission = Admission::default();
        half_open(&mut admission, remote(1));
        for _ in 0..3 * REMOTE {
            admission.admit(remote(1), async { None });
            assert!(admission.ended().await.is_none());
        }
        assert!(admission.waiting[&remote(1)].iter().filter(|handle| !handle.is_finished()).count() == 1);
    }

    #[test]
    fn addresses_of_one_network_of_ipv6_are_one_source() {
        let source = |text: &str| Source::remote(text.parse().unwrap());
        assert_eq!(source("2001:db8::1"), source("2001:db8::ffff:2"));
        assert_ne!(source("2001:db8::1"), source("2001:db8:0:1::1"));
        assert_eq!(source("::ffff:10.0.0.1"), source("10.0.0.1"));
    }

    #[tokio::test]
    async fn a_flood_of_refusals_is_a_few_lines_and_a_number() {
        let mut refusals = Refusals::default();
        let logged = (0..1000).filter(|_| refusals.note()).count();
        assert_eq!(logged as u32, LOGGED);
        // The period is over.
        refusals.since = Instant::now().checked_sub(PERIOD).unwrap();
        assert_eq!(refusals.unlogged().await, 1000 - LOGGED);
        assert!(refusals.note());
    }
}
