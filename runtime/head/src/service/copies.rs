//! What a head without a journal knows, in the memory of a few nodes, so that the next one is told it.
//!
//! The same facts that a journal would hold go to up to [`KEEPERS`] nodes, in the order in which they became true. A head that is
//! started where another was begins with none of them. Who comes back first and has kept them tells it; a node without them waits for
//! that, since what runs there belongs to jobs and groups that the head would not know. So do questions for names: whoever
//! has the name may be about to come back.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use tokio::sync::watch;
use wingbeat_core::NodeId;
use wingbeat_core::codec::Payload;
use wingbeat_core::error::Error;
use wingbeat_core::spec::MachineId;
use wingbeat_net::handshake::{Epoch, Hello, Resumes};
use wingbeat_net::link::Link;
use wingbeat_net::messages::{Keep, NodeMessage, Version};
use wingbeat_net::mux;
use wingbeat_net::services::NodeClient;

use super::{Inside, Shell, promise};
use crate::state::Fact;

/// Nodes that keep what the head knows: one that is left of them is enough.
const KEEPERS: usize = 3;
/// About how many bytes of facts a message to a node has.
const PART: usize = 1 << 20;
/// How long those who ask for names wait at the beginning for somebody who knew an earlier head: nodes dial it again four times a second.
const FIRST_RETURN: Duration = Duration::from_millis(500);
/// How long those who come back wait for a node that has kept what the last head knew, from the first of them on.
const COPY_LIMIT: Duration = Duration::from_secs(5);
/// How long such a node may take for a part of it. While it answers, all others wait.
const READ_LIMIT: Duration = Duration::from_secs(2);
/// How long keepers may take to have what is answered next.
const KEEP_LIMIT: Duration = Duration::from_secs(1);

/// What is kept by nodes.
pub(super) struct Copies {
    epoch: Epoch,
    /// Counts what was said to the keepers.
    count: u64,
    facts: BTreeMap<Vec<u8>, Payload>,
    keepers: BTreeSet<NodeId>,
}

/// What is known of an earlier head.
pub(super) struct Returns {
    /// When the first came back who knew it.
    first: OnceLock<Instant>,
    /// Whether what it knew is known here.
    has_learned: watch::Sender<bool>,
    /// The latest that was read of it. Held while it is read.
    read: tokio::sync::Mutex<Option<Version>>,
    /// Whether it was said that what it knew is lost.
    is_lost: AtomicBool,
}

impl Returns {
    pub(super) fn new() -> Returns {
        let read = tokio::sync::Mutex::new(None);
        Returns {
            first: OnceLock::new(),
            has_learned: watch::Sender::new(false),
            read,
            is_lost: AtomicBool::new(false),
        }
    }
}

impl Copies {
    pub(super) fn new(epoch: Epoch) -> Copies {
        Copies { epoch, count: 0, facts: BTreeMap::new(), keepers: BTreeSet::new() }
    }

    fn version(&self) -> Version {
        Version { epoch: self.epoch, count: self.count }
    }

    /// These are true now. Answers with what the keepers are to be told.
    fn note(&mut self, facts: &[Fact]) -> NodeMessage {
        let mut changes = Vec::with_capacity(facts.len());
        for fact in facts {
            match fact.encoded() {
                Ok((key, fact)) => {
                    let fact = fact.map(|fact| Payload(fact.into()));
                    match &fact {
                        Some(fact) => self.facts.insert(key.clone(), fact.clone()),
                        None => self.facts.remove(&key),
                    };
                    changes.push((Payload(key.into()), fact));
                }
                Err(error) => tracing::error!(%error, ?fact, "a fact cannot be encoded"),
            }
        }
        self.count += 1;
        NodeMessage::Keep(Box::new(Keep { version: Some(self.version()), begins: false, is_complete: true, changes }))
    }

    /// All, for a node that is to keep it from now on.
    fn all(&self) -> Vec<NodeMessage> {
        let (mut parts, mut part, mut size) = (Vec::new(), Vec::new(), 0);
        for (key, fact) in &self.facts {
            size += key.len() + fact.len();
            part.push((Payload(key.clone().into()), Some(fact.clone())));
            if size > PART {
                parts.push(std::mem::take(&mut part));
                size = 0;
            }
        }
        parts.push(part);
        let (last, version) = (parts.len() - 1, Some(self.version()));
        let keep = |(at, changes)| {
            NodeMessage::Keep(Box::new(Keep { version, begins: at == 0, is_complete: at == last, changes }))
        };
        parts.into_iter().enumerate().map(keep).collect()
    }

    /// What was kept somewhere, but for that of which more is known here.
    fn note_earlier(&mut self, facts: &[Fact]) -> NodeMessage {
        let is_new = |fact: &&Fact| fact.encoded().is_ok_and(|(key, _)| !self.facts.contains_key(&key));
        let earlier: Vec<Fact> = facts.iter().filter(is_new).cloned().collect();
        self.note(&earlier)
    }
}

impl Inside {
    /// Has nodes keep what became true.
    pub(super) fn keep(&mut self, facts: &[Fact]) {
        if let Some(copies) = self.copies.as_mut().filter(|_| !facts.is_empty()) {
            let message = copies.note(facts);
            self.tell_keepers(&message);
        }
    }

    fn tell_keepers(&self, message: &NodeMessage) {
        for link in self.keepers() {
            link.send(message.clone());
        }
    }

    fn keepers(&self) -> impl Iterator<Item = &Link<NodeMessage>> {
        let keepers = self.copies.iter().flat_map(|copies| &copies.keepers);
        keepers.filter_map(|node| self.nodes.get(node)).map(|peer| &peer.link)
    }

    /// A node has joined, or is lost: there are keepers as long as there are nodes, on different machines if that can be.
    pub(super) fn choose_keepers(&mut self) {
        let (nodes, state) = (&self.nodes, &self.state);
        let Some(copies) = &mut self.copies else { return };
        copies.keepers.retain(|node| nodes.contains_key(node));
        if copies.keepers.len() >= KEEPERS {
            return;
        }
        let machine = |node: &NodeId| state.machine_of(*node);
        let machines: BTreeSet<MachineId> = copies.keepers.iter().filter_map(machine).collect();
        let may_keep = |node: &NodeId| !copies.keepers.contains(node) && state.offers_work(*node);
        let (elsewhere, beside): (Vec<NodeId>, Vec<NodeId>) = nodes
            .keys()
            .copied()
            .filter(may_keep)
            .partition(|node| machine(node).is_some_and(|machine| !machines.contains(&machine)));
        let mut chosen = BTreeSet::new();
        let mut taken = machines;
        for node in elsewhere {
            if copies.keepers.len() + chosen.len() < KEEPERS
                && machine(&node).is_some_and(|machine| taken.insert(machine))
            {
                chosen.insert(node);
            }
        }
        if copies.keepers.is_empty() && chosen.is_empty() {
            chosen.extend(beside.first());
        }
        for node in chosen {
            copies.keepers.insert(node);
            if let Some(peer) = nodes.get(&node) {
                peer.link.send_all(copies.all());
            }
        }
    }

    /// A node that has kept something for another head, and keeps nothing for this one, lets go of it.
    fn lets_go(&self, node: NodeId) {
        if let (Some(copies), Some(peer)) = (&self.copies, self.nodes.get(&node))
            && !copies.keepers.contains(&node)
        {
            let nothing = Keep { version: None, begins: true, is_complete: true, changes: Vec::new() };
            peer.link.send(NodeMessage::Keep(Box::new(nothing)));
        }
    }
}

impl Shell {
    /// Somebody connects who may have known an earlier head.
    pub(super) fn note_return(self: &Arc<Self>, hello: &Hello) {
        let knew_another =
            hello.resumes != Resumes::Nothing && hello.epoch.is_some_and(|epoch| Some(epoch) < self.epoch);
        let until = promise::unknown();
        if let Some(returns) = self.returns.as_ref().filter(|_| knew_another && self.now() < until) {
            returns.first.get_or_init(Instant::now);
            if !self.knows_a_promise() {
                // Until a node says more.
                self.promises(Some(until));
            }
            self.change(|state, now| ((), state.somebody_returns(now, until)));
            self.note_time();
        }
    }

    /// A node comes back: before it does, it is known what the last head knew, if that can be.
    pub(super) async fn learn_before(self: &Arc<Self>, node: NodeId, kept: Option<Version>, knew: Option<Epoch>) {
        let Some(returns) = self.returns.as_ref().filter(|_| knew.is_some()) else { return };
        // One of an earlier head yet, which the last one has not had replaced, would bring back what has ended since. It is better than
        // none: the last head may have ended before anybody kept what it knew.
        if kept.is_some_and(|version| Some(version.epoch) != knew) {
            self.until_learned(true).await;
        }
        let is_last = |version: &Version| Some(version.epoch) == knew || !*returns.has_learned.borrow();
        if let Some(version) = kept.filter(is_last) {
            let mut read = returns.read.lock().await;
            if read.is_none_or(|known| known < version) {
                match self.read_kept(node).await {
                    Ok(facts) => {
                        self.learn(facts);
                        *read = Some(version);
                        returns.has_learned.send_replace(true);
                    }
                    Err(error) => tracing::warn!(%error, "cannot read what {node} has kept of what the last head knew"),
                }
            }
        }
        self.until_learned(true).await;
        if !*returns.has_learned.borrow() && !returns.is_lost.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "no node has come back that has kept what the last head knew: jobs that are not back, placement groups, quotas, \
                 drains, and actors that no node has, are lost"
            );
        }
    }

    fn learn(self: &Arc<Self>, mut facts: Vec<Fact>) {
        let promised = promise::of_earlier(&mut facts, Duration::ZERO);
        self.take_in_earlier(facts);
        self.promises(Some(promised));
        self.note_time();
        self.look_for_the_absent();
    }

    fn take_in_earlier(&self, facts: Vec<Fact>) {
        let mut inside = self.inside.lock();
        tracing::info!("a node has kept what the last head knew: {} facts", facts.len());
        if let Some(copies) = &mut inside.copies {
            let message = copies.note_earlier(&facts);
            inside.tell_keepers(&message);
        }
        self.change_in(&mut inside, |state, now| ((), state.remember(now, facts)));
    }

    async fn read_kept(&self, node: NodeId) -> Result<Vec<Fact>, Error> {
        let client: Option<NodeClient> = self.inside.lock().nodes.get(&node).map(|peer| peer.client.clone());
        let gone = || Error::Failed { what: format!("reading what {node} keeps"), why: "it is gone".into() };
        let client = client.ok_or_else(gone)?;
        let (mut facts, mut after) = (Vec::new(), None);
        loop {
            let part = mux::answered(client.read_kept(mux::within(READ_LIMIT), after).await, "the node")?;
            let Some((last, _)) = part.last() else { return Ok(facts) };
            after = Some(last.clone());
            for (_, fact) in part {
                let unreadable = |why| Error::Failed { what: format!("reading what {node} keeps"), why };
                facts.push(Fact::decoded(fact.0).map_err(unreadable)?);
            }
        }
    }

    /// Whether those that were there before the head was started again may still come back.
    pub(super) fn is_recovering(&self) -> bool {
        self.inside.lock().state.is_recovering()
    }

    /// Waits until it is known what an earlier head knew, or that there was none, as far as somebody may be about to tell.
    pub(super) async fn until_learned(&self, is_returning: bool) {
        let Some(returns) = &self.returns else { return };
        let mut learned = returns.has_learned.subscribe();
        loop {
            let (since, limit) = match returns.first.get() {
                Some(first) => (*first, COPY_LIMIT),
                None if is_returning => (*returns.first.get_or_init(Instant::now), COPY_LIMIT),
                None => (self.started, FIRST_RETURN),
            };
            let left = limit.saturating_sub(since.elapsed());
            if *learned.borrow_and_update() {
                return;
            }
            if left.is_zero() {
                // Somebody is just telling it.
                return drop(returns.read.lock().await);
            }
            let _ = tokio::time::timeout(left, learned.changed()).await;
        }
    }

    /// Waits until what is true now is kept elsewhere, as far as that takes no long time.
    pub(super) async fn kept_elsewhere(self: &Arc<Self>) {
        let links: Vec<Link<NodeMessage>> = self.inside.lock().keepers().cloned().collect();
        let all = futures::future::join_all(links.iter().map(Link::flushed));
        let _ = tokio::time::timeout(KEEP_LIMIT, all).await;
    }

    /// A node is in.
    pub(super) fn node_is_in(&self, node: NodeId, kept: Option<Version>) {
        let mut inside = self.inside.lock();
        inside.choose_keepers();
        if kept.is_some() {
            inside.lets_go(node);
        }
    }
}
