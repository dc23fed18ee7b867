//! A network inside one process, for tests: it delays, holds, refuses and cuts, when it is told to; or by chance, of a seed
//! ([`Network::disturb`]): then each connection is late in its own way, so that what was said over several arrives in another order,
//! some end, and some lose all that is said for a while before they end.
//!
//! Both ends of a connection are real sockets. What one side writes is carried to the other by a task that does what the network
//! is told. What a cut catches on its way is lost, in both directions, and links say it again: so there are repetitions, too.
//!
//! ```
//! # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
//! use std::time::Duration;
//! use wingbeat_core::ProcessId;
//! use wingbeat_net::transport::{Transport, memory::Network};
//!
//! let network = Network::new();
//! let mut listening = network.listen(ProcessId(1), None).await.unwrap();
//! network.delay(Duration::from_millis(5));
//! network.cut_after(100);
//! let stream = network.open(&listening.address).await.unwrap();
//! let (_there, _) = listening.incoming.next().await.unwrap();
//! # drop(stream);
//! # });
//! ```

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{mpsc, watch};
use wingbeat_core::ProcessId;
use wingbeat_core::error::Error;
use wingbeat_core::spec::{Address, MachineId};

use super::{Incoming, Listening, OTHERS, Transport};
use crate::admission::Source;
use crate::stream::Stream;

/// Connections that nobody has taken in yet.
const BACKLOG: usize = 128;

/// What happens by chance, to each piece that a connection carries.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Disturbance {
    /// Of what: with the same seed, the dice fall alike for the first connection that is made, the second and so on. Into which pieces
    /// what is said falls is not decided here.
    pub seed: u64,
    /// It is late by up to so much more.
    pub late: Duration,
    /// The chance that the connection ends with it, from 0 to 1.
    pub cuts: f64,
    /// The chance that nothing arrives from it on, and that the connection ends [`Disturbance::lost_for`] later.
    pub loses: f64,
    /// How long it is before anybody can notice.
    pub lost_for: Duration,
}

/// What the network does.
#[derive(Clone, Debug, Default)]
struct Rules {
    delay: Duration,
    disturbance: Option<Disturbance>,
    /// Connections that began before the latest cut are over.
    cuts: u64,
    /// Nothing arrives, and nobody is connected.
    is_held: bool,
}

/// A network. All that listens in it is on one machine, which is not this one: what is said goes over connections, and what is
/// special about one machine does not apply. Who is dropped there is gone.
#[derive(Clone)]
pub struct Network {
    shared: Arc<Shared>,
}

struct Shared {
    machine: MachineId,
    rules: watch::Sender<Rules>,
    listeners: Mutex<BTreeMap<ProcessId, mpsc::Sender<Stream>>>,
    /// After so many bytes more all connections end.
    bytes: Mutex<Option<u64>>,
    /// How many connections were made.
    made: AtomicU64,
}

impl Default for Network {
    fn default() -> Network {
        Network::new()
    }
}

impl Network {
    /// A network that does nothing to what it carries.
    #[must_use]
    pub fn new() -> Network {
        let machine = MachineId(rand::random());
        let (rules, listeners, bytes, made) = Default::default();
        let shared = Shared { machine, rules, listeners, bytes, made };
        let network = Network { shared: Arc::new(shared) };
        OTHERS.write().insert(machine, Arc::new(network.clone()));
        network
    }

    /// From now on, what is said takes so long to arrive.
    pub fn delay(&self, delay: Duration) {
        self.shared.rules.send_modify(|rules| rules.delay = delay);
    }

    /// From now on, this happens by chance, to connections that are there already, too.
    pub fn disturb(&self, disturbance: Disturbance) {
        self.shared.rules.send_modify(|rules| rules.disturbance = Some(disturbance));
    }

    /// All connections end. What is on its way is lost.
    pub fn cut(&self) {
        self.shared.rules.send_modify(|rules| rules.cuts += 1);
    }

    /// All connections end when so many bytes more have arrived, in whichever direction. Once.
    pub fn cut_after(&self, bytes: u64) {
        *self.shared.bytes.lock() = Some(bytes);
    }

    /// Nothing arrives any more, nobody is connected, and nobody is told; or all goes on.
    pub fn hold(&self, is_held: bool) {
        self.shared.rules.send_modify(|rules| rules.is_held = is_held);
    }

    /// Does nothing more to what it carries. What is connected stays so.
    pub fn heal(&self) {
        *self.shared.bytes.lock() = None;
        self.shared.rules.send_modify(|rules| *rules = Rules { cuts: rules.cuts, ..Rules::default() });
    }

    /// Nothing listens in it any more, and it is forgotten.
    pub fn close(&self) {
        OTHERS.write().remove(&self.shared.machine);
        self.shared.listeners.lock().clear();
        self.cut();
    }

    async fn carry(self, one: UnixStream, other: UnixStream, cuts: u64, number: u64) {
        let (from_one, to_one) = one.into_split();
        let (from_other, to_other) = other.into_split();
        let mut rules = self.shared.rules.subscribe();
        // Both are closed when this is over: what was not carried by then is lost.
        tokio::select! {
            _ = rules.wait_for(|rules| rules.cuts != cuts) => {}
            _ = async { tokio::try_join!(self.pump(from_one, to_other, 2 * number), self.pump(from_other, to_one, 2 * number + 1)) } => {}
        }
    }

    /// Carries what one side says until it says nothing more, or the connection is cut.
    async fn pump(&self, mut from: OwnedReadHalf, mut to: OwnedWriteHalf, number: u64) -> io::Result<()> {
        let mut rules = self.shared.rules.subscribe();
        let mut chance: Option<StdRng> = None;
        let mut buffer = vec![0; 64 << 10];
        loop {
            let count = from.read(&mut buffer).await?;
            let rules = rules.wait_for(|rules| !rules.is_held).await.map_err(io::Error::other)?.clone();
            let late = match rules.disturbance {
                Some(disturbance) => {
                    let of = || StdRng::seed_from_u64(disturbance.seed ^ number.rotate_left(32));
                    disturbance.befalls(chance.get_or_insert_with(of)).await?
                }
                None => Duration::ZERO,
            };
            if !(rules.delay + late).is_zero() {
                tokio::time::sleep(rules.delay + late).await;
            }
            let left = self.pass(count);
            if count == 0 {
                return to.shutdown().await;
            }
            to.write_all(&buffer[..left.unwrap_or(count)]).await?;
            if left.is_some() {
                self.cut();
                return Ok(());
            }
        }
    }
}

impl Disturbance {
    /// What becomes of a piece: how late it is. If the connection is to end, that is the error, after a while if all is lost meanwhile.
    async fn befalls(self, chance: &mut StdRng) -> io::Result<Duration> {
        let (cuts, loses, late) =
            (chance.random_bool(self.cuts), chance.random_bool(self.loses), chance.random::<f64>());
        if loses {
            tokio::time::sleep(self.lost_for).await;
        }
        if cuts || loses {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        Ok(self.late.mul_f64(late))
    }
}

impl Network {
    /// Counts what is about to arrive. If that is too much, how much of it may still.
    fn pass(&self, count: usize) -> Option<usize> {
        let mut bytes = self.shared.bytes.lock();
        let left = bytes.as_mut()?;
        if *left >= count as u64 {
            *left -= count as u64;
            return None;
        }
        bytes.take().map(|left| left as usize)
    }
}

impl Transport for Network {
    fn open<'a>(&'a self, to: &'a Address) -> BoxFuture<'a, io::Result<Stream>> {
        async move {
            let mut rules = self.shared.rules.subscribe();
            let cuts = rules.wait_for(|rules| !rules.is_held).await.map_err(io::Error::other)?.cuts;
            let listener = self.shared.listeners.lock().get(&to.process).cloned();
            let refused = || io::Error::from(io::ErrorKind::ConnectionRefused);
            let listener = listener.ok_or_else(refused)?;
            let (here, relay_here) = UnixStream::pair()?;
            let (there, relay_there) = UnixStream::pair()?;
            listener.send(Stream::Unix(there)).await.map_err(|_| refused())?;
            let number = self.shared.made.fetch_add(1, Ordering::Relaxed);
            tokio::spawn(self.clone().carry(relay_here, relay_there, cuts, number));
            Ok(Stream::Unix(here))
        }
        .boxed()
    }

    fn listen(&self, process: ProcessId, _: Option<SocketAddr>) -> BoxFuture<'_, Result<Listening, Error>> {
        let (sender, receiver) = mpsc::channel(BACKLOG);
        self.shared.listeners.lock().insert(process, sender);
        let address = Address { process, machine: self.shared.machine, unix: String::new(), tcp: None, steward: None };
        let door = Door { process, network: self.clone(), receiver };
        async move { Ok(Listening { address, incoming: Box::new(door) }) }.boxed()
    }
}

/// Where somebody listens.
struct Door {
    process: ProcessId,
    network: Network,
    receiver: mpsc::Receiver<Stream>,
}

impl Incoming for Door {
    fn next(&mut self) -> BoxFuture<'_, io::Result<(Stream, Source)>> {
        async {
            match self.receiver.recv().await {
                Some(stream) => Ok((stream, Source::Local)),
                // The network is closed.
                None => std::future::pending().await,
            }
        }
        .boxed()
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.network.shared.listeners.lock().remove(&self.process);
    }
}
