//! The head's standby, as the head sees it: what it is sent, whether it confirms it, and what nodes say. [`Leading`] decides.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use wingbeat_core::error::Error;
use wingbeat_core::spec::Address;
use wingbeat_core::{NodeId, ProcessId};
use wingbeat_net::handshake::{Epoch, Hello};
use wingbeat_net::limits::{limits, patience};
use wingbeat_net::messages::{Follow, Followed, HeadEvent, NodeInfo, StandbyState};
use wingbeat_net::mux;
use wingbeat_net::services::NodeClient;

use super::{Shell, Stage, peers};
use crate::feed::Feed;
use crate::state::{Event, Fact};
use crate::succession::leading::{Leading, Order};
use crate::succession::{Clock, Millis, millis};

/// The standby of this head. Lives as long as the head does, whether a standby follows or not.
pub(crate) struct Follower {
    /// Decides whether this head may lead, and what the standby and nodes are asked.
    leading: Mutex<Leading>,
    /// What is yet to be sent to the standby. Ended with each connection of it.
    feed: Arc<Feed>,
    /// The connection of the standby, until it has ended or nothing was heard over it for too long.
    session: Mutex<Option<Session>>,
    /// How often each node is joining: one whose connection has ended may join over the next before the end of the first was noticed.
    /// Until each join is done or given up ([`Joining`]).
    joining: Mutex<BTreeMap<NodeId, usize>>,
    /// Up to which position the standby has written, and a count of what changes without that.
    confirmed: watch::Sender<u64>,
    /// The time by which `leading` decides.
    clock: Clock,
    /// Something is to be looked at before the next beat.
    looks: Notify,
    /// Nodes are to be asked before the next beat. Taken back when they are.
    asks_now: AtomicBool,
    /// The cluster is stopped, which the standby is told. Set once.
    stops: AtomicBool,
    /// What is still written is not waited for there: the standby has ended with the cluster, or its connection with this head.
    is_done_with: AtomicBool,
}

/// A connection of the standby.
struct Session {
    /// The name of the connection.
    process: ProcessId,
    /// When it was answered last. None before that: until then it supports nobody, since its question may be old.
    answered: Option<Millis>,
    /// When the journal was last to be read for it.
    fed: Millis,
}

/// A node that is written down, and has not joined yet. Its join may be given up at any time: the next head would wait for it. Where it
/// joins more than once at a time, the last of them counts.
#[must_use = "the node is forgotten when this is dropped before it has joined"]
pub(super) struct Joining {
    shell: Arc<Shell>,
    standby: Arc<Follower>,
    node: NodeId,
}

impl Joining {
    fn begin(shell: &Arc<Shell>, standby: &Arc<Follower>, node: NodeId) -> Joining {
        *standby.joining.lock().entry(node).or_default() += 1;
        Joining { shell: shell.clone(), standby: standby.clone(), node }
    }
}

impl Drop for Joining {
    fn drop(&mut self) {
        let inside = self.shell.inside.lock();
        // Until it is forgotten: whoever begins after that writes it down again.
        let mut joining = self.standby.joining.lock();
        if let Some(others) = joining.get_mut(&self.node)
            && *others > 1
        {
            *others -= 1;
            return;
        }
        joining.remove(&self.node);
        if !inside.state.has_node(self.node) && !inside.state.is_awaited(self.node) {
            // Under the lock, and so before whatever becomes true of it later.
            self.shell.write(vec![Fact::NodeGone(self.node)]);
        }
    }
}

/// A head with a shorter `--lost-after` has no standby.
const SHORTEST: Duration = Duration::from_secs(8);

/// How often a standby and nodes hear that the head is there: also often enough for [`Shell::until_nobody_else_leads`].
fn beat() -> Duration {
    (limits().takeover / 4).min(limits().silence / 10)
}

impl Follower {
    /// None yet, of a head of this epoch, whose journal this is.
    pub(crate) fn new(epoch: Epoch, feed: Arc<Feed>) -> Follower {
        let leading = Leading::new(epoch, millis(limits().takeover), millis(limits().fence));
        Follower {
            leading: Mutex::new(leading),
            feed,
            session: Mutex::default(),
            joining: Mutex::default(),
            confirmed: watch::Sender::new(0),
            clock: Clock::start(),
            looks: Notify::new(),
            asks_now: AtomicBool::new(false),
            stops: AtomicBool::new(false),
            is_done_with: AtomicBool::new(false),
        }
    }

    fn now(&self) -> Millis {
        self.clock.now()
    }

    /// Waits until what was written so far is written by the standby, too, or that cannot take over.
    pub(crate) async fn has_confirmed(&self) {
        let written = self.feed.position();
        let mut confirmed = self.confirmed.subscribe();
        let waits = || self.leading.lock().waits_for_standby() && !self.is_done_with.load(Ordering::Acquire);
        while *confirmed.borrow_and_update() < written && waits() {
            if confirmed.changed().await.is_err() {
                return;
            }
        }
    }

    /// Whether a standby is still to be sent everything, for so long that the journal could not be read. It is read again.
    fn waits_in_vain(&self) -> bool {
        let (now, mut session) = (self.now(), self.session.lock());
        let Some(session) = session.as_mut().filter(|session| now > session.fed + millis(limits().takeover)) else {
            return false;
        };
        session.fed = now;
        self.feed.is_empty()
    }

    /// From now on nobody waits for the standby.
    pub(super) fn is_done_with(&self) {
        self.is_done_with.store(true, Ordering::Release);
        self.confirmed.send_modify(|_| {});
    }

    /// Answers a standby.
    pub(super) async fn follow(
        self: &Arc<Self>,
        shell: &Arc<Shell>,
        process: ProcessId,
        asks: Follow,
    ) -> Result<Followed, Error> {
        let refused = |why: String| Error::Refused { who: "the head".into(), why };
        if self.leading.lock().is_about_to_go_on_alone() {
            let why = "it was silent, and the head is about to go on without it; begin again".into();
            return Err(Error::Failed { what: "following the head".into(), why });
        }
        if patience().lost_after() < SHORTEST {
            let why = format!(
                "its --lost-after is {} s: nodes would end before a standby could take over. With {} s it can have one",
                patience().lost_after().as_secs_f64(),
                SHORTEST.as_secs_f64()
            );
            return Err(refused(why));
        }
        if asks.written == 0 {
            let is_new = self.session.lock().as_ref().is_none_or(|session| session.process != process);
            if is_new {
                let voters = shell.voters();
                let orders = {
                    let mut leading = self.leading.lock();
                    let mut orders = leading.follows(self.now(), &asks.standby).map_err(refused)?;
                    orders.extend(leading.nodes_are(self.now(), voters));
                    orders
                };
                *self.session.lock() = Some(Session { process, answered: None, fed: self.now() });
                tracing::info!("a standby follows this head");
                shell.obey(orders);
                self.looks.notify_one();
                self.feed.end();
                shell.feed_standby();
            } else if self.waits_in_vain() {
                shell.feed_standby();
            }
        }
        let as_of = match &*self.session.lock() {
            Some(session) if session.process == process => session.answered.unwrap_or(0),
            _ => {
                return Err(Error::Failed {
                    what: "following the head".into(),
                    why: "it was silent; begin again".into(),
                });
            }
        };
        let has_all = self.feed.has_all(asks.written);
        let orders = self.leading.lock().heard(self.now(), as_of, asks.generation, has_all);
        // A part of a copy is of no use alone.
        if has_all {
            self.confirmed.send_modify(|confirmed| *confirmed = (*confirmed).max(asks.written));
        }
        shell.obey(orders);
        let answer = self.next_part(asks.written).await;
        if let Some(session) = self.session.lock().as_mut().filter(|session| session.process == process) {
            session.answered = Some(self.now());
        }
        Ok(answer)
    }

    async fn next_part(&self, written: u64) -> Followed {
        let nothing =
            wingbeat_net::messages::Facts { position: written, begins: false, is_complete: true, changes: Vec::new() };
        let next = async {
            loop {
                let news = self.feed.news();
                tokio::pin!(news);
                // From now on none is missed.
                news.as_mut().enable();
                if self.stops.load(Ordering::Acquire) {
                    return Followed::Stops;
                }
                if let Some(part) = self.feed.after(written) {
                    return Followed::Facts(part);
                }
                news.await;
            }
        };
        tokio::time::timeout(beat(), next).await.unwrap_or(Followed::Facts(nothing))
    }
}

impl Shell {
    /// Whether no other head can lead.
    pub(super) fn may_lead(&self) -> bool {
        self.standby.as_ref().is_none_or(|standby| standby.leading.lock().may_lead(standby.now()))
    }

    /// Waits until it is certain that a node that was not heard for too long has not joined another head in time: the support of this head is later
    /// than the end of the node's term would be.
    pub(super) async fn until_nobody_else_leads(&self) {
        let Some(standby) = &self.standby else { return };
        // A quarter is for clocks.
        let margin = limits().margin * 3 / 4;
        let waiting = async {
            let (began, mut is_told) = (standby.now(), false);
            while !standby.leading.lock().may_give_up(standby.now(), millis(margin)) {
                if standby.now() > began + millis(margin) && !std::mem::replace(&mut is_told, true) {
                    tracing::warn!(
                        "a node is not given up yet: neither the standby nor enough nodes have said within {margin:?} that no other head leads"
                    );
                }
                tokio::time::sleep(beat() / 8).await;
            }
        };
        self.until_stopped(waiting).await;
    }

    /// Where the standby would serve, if there is one.
    pub(super) fn standby_address(&self) -> Option<Address> {
        let standby = self.standby.as_ref()?;
        standby.leading.lock().standby().cloned()
    }

    /// The same, if it has all that it needs.
    pub(crate) fn standby_that_is_current(&self) -> Option<Address> {
        let leading = self.standby.as_ref()?.leading.lock();
        leading.voters().and(leading.standby().cloned())
    }

    /// The standby, for people.
    pub(super) fn standby_state(&self) -> Option<StandbyState> {
        let standby = self.standby.as_ref()?;
        let leading = standby.leading.lock();
        let (address, voters) = (leading.standby()?.clone(), leading.voters());
        Some(StandbyState { address, is_current: voters.is_some(), voters: voters.unwrap_or(0) })
    }

    /// Writes a node down before anything runs there, so that the next head and the standby know of it. What is returned is kept until it has joined:
    /// else it is forgotten. Where it cannot be written, nothing is granted.
    pub(super) async fn write_down_first(self: &Arc<Self>, node: &NodeInfo) -> Option<Joining> {
        let (Some(standby), Some(journal)) = (&self.standby, &self.journal) else { return None };
        // One that is back was written down, and how it is drained.
        let is_new = {
            let state = &self.inside.lock().state;
            !state.has_node(node.id) && !state.is_awaited(node.id)
        };
        if !is_new {
            return None;
        }
        let joining = Joining::begin(self, standby, node.id);
        if journal.intend(vec![Fact::Node(Box::new(node.clone()), None)]).await.is_err() {
            // Known before the node has joined, and not in a moment.
            self.change(|state, now| ((), state.step(now, Event::JournalFails(journal.why_it_fails()))));
        }
        Some(joining)
    }

    fn feed_standby(&self) {
        if let Some(journal) = &self.journal {
            journal.feed();
        }
    }

    /// The connection of a standby has ended.
    pub(super) fn standby_left(self: &Arc<Self>, process: ProcessId) {
        let Some(standby) = &self.standby else { return };
        let was = standby.session.lock().take_if(|session| session.process == process);
        if was.is_some() {
            standby.feed.end();
            // Where this head ends, it says why.
            if !standby.stops.load(Ordering::Acquire) && *self.stopping.borrow() == Stage::Running {
                tracing::warn!(
                    "the standby is gone; this head goes on without it when half of the nodes have heard so"
                );
            }
            let orders = standby.leading.lock().standby_gone(standby.now());
            self.obey(orders);
            standby.looks.notify_one();
        }
    }

    /// Somebody connects who has joined another head.
    pub(super) fn note_later_head(self: &Arc<Self>, hello: &Hello) {
        if let (Some(standby), Some(epoch)) = (&self.standby, hello.epoch) {
            let orders = standby.leading.lock().superseded(epoch);
            self.obey(orders);
        }
    }

    /// The standby is not to take over: the cluster ends.
    pub(super) async fn tell_standby_of_the_stop(&self) {
        let Some(standby) = &self.standby else { return };
        standby.stops.store(true, Ordering::Release);
        standby.feed.wake();
        standby.is_done_with();
        let mut confirmed = standby.confirmed.subscribe();
        while standby.session.lock().is_some() {
            // Its end is noted there.
            if confirmed.changed().await.is_err() {
                return;
            }
        }
    }

    /// Tells the head that was followed until now that this one leads, as long as it may live and not know it.
    #[cfg(feature = "journal")]
    pub(crate) async fn tell_last_head(self: Arc<Self>, hello: Hello, token: wingbeat_net::Token, last: Address) {
        let hello = Hello { epoch: self.epoch(), ..hello };
        let until = Instant::now() + limits().lost;
        let telling = async {
            while Instant::now() < until && !wingbeat_net::address::is_gone(&last).await {
                // It notices by the greeting.
                drop(wingbeat_net::address::dial(&last, "the last head", &token, hello.clone()).await);
                tokio::time::sleep(beat()).await;
            }
        };
        self.until_stopped(telling).await;
    }

    fn obey(self: &Arc<Self>, orders: Vec<Order>) {
        let Some(standby) = &self.standby else { return };
        standby.confirmed.send_modify(|_| {});
        for order in orders {
            match order {
                Order::Write { latest, earlier } => {
                    let earlier = earlier.map(|earlier| Fact::EarlierSuccession(Box::new(earlier)));
                    let earlier = earlier.unwrap_or(Fact::NoEarlierSuccession);
                    self.write(vec![earlier, Fact::Succession(Box::new(latest))]);
                }
                Order::ForgetEarlier => self.write(vec![Fact::NoEarlierSuccession]),
                Order::AskNodes => {
                    standby.asks_now.store(true, Ordering::Release);
                    standby.looks.notify_one();
                }
                Order::End(why) => {
                    let why = format!(
                        "this head ends: {why}; to have it back, start it as a standby (`wingbeat head --standby-of <the new head> --journal FILE`)"
                    );
                    self.ends_for(why);
                }
            }
        }
    }

    /// Sees to it that the standby and the nodes hear this head, and notices when they do not hear it.
    pub(crate) async fn look_after_standby(self: Arc<Self>) {
        let Some(standby) = self.standby.clone() else { return };
        let looking = async {
            let mut told: Option<Address> = None;
            let mut asked: Option<Instant> = None;
            loop {
                let has_work = standby.leading.lock().asks_nodes() || told.is_some();
                if has_work {
                    let _ = tokio::time::timeout(beat() / 2, standby.looks.notified()).await;
                } else {
                    standby.looks.notified().await;
                }
                let voters = self.voters();
                let orders = {
                    let now = standby.now();
                    let mut leading = standby.leading.lock();
                    let mut orders = leading.nodes_are(now, voters);
                    orders.extend(leading.tick(now));
                    orders
                };
                if standby.leading.lock().standby().is_none() && standby.session.lock().take().is_some() {
                    standby.feed.end();
                    tracing::warn!("nothing is heard from the standby; this head goes on without it");
                }
                self.obey(orders);
                let address = self.standby_address();
                if address != told {
                    told = address;
                    self.tell_processes(&told);
                }
                let is_due = asked.is_none_or(|asked| asked.elapsed() >= beat());
                if standby.asks_now.swap(false, Ordering::AcqRel) || is_due {
                    asked = Some(Instant::now());
                    self.ask_nodes(&standby);
                }
            }
        };
        self.until_stopped(looking).await;
    }

    fn voters(&self) -> BTreeMap<NodeId, Address> {
        let inside = self.inside.lock();
        inside.state.nodes_for_work().map(|info| (info.id, info.address.clone())).collect()
    }

    fn tell_processes(&self, standby: &Option<Address>) {
        for link in peers::links_of_present(&self.inside.lock().processes) {
            link.send(HeadEvent::Standby(standby.clone()));
        }
    }

    fn ask_nodes(self: &Arc<Self>, standby: &Arc<Follower>) {
        let said = {
            let leading = standby.leading.lock();
            if !leading.asks_nodes() {
                return;
            }
            leading.leadership()
        };
        let nodes: Vec<(NodeId, NodeClient)> =
            self.inside.lock().nodes.iter().map(|(node, peer)| (*node, peer.client.clone())).collect();
        for (node, client) in nodes {
            let (shell, standby, said) = (self.clone(), standby.clone(), said.clone());
            self.vital("asking a node for its support", async move {
                let asked = standby.now();
                if let Ok(answer) = client.support(mux::within(beat() * 2), said.clone()).await {
                    let orders = standby.leading.lock().answered(standby.now(), node, asked, &said, answer);
                    shell.obey(orders);
                }
            });
        }
    }
}
