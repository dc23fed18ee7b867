//! A head, its standby and nodes, with messages that are late or lost and links that are cut, chosen by a seed. The head is killed, and
//! started again with its file.
//!
//! What must hold: when the standby leads, it has all that the head has acknowledged, the head acknowledges nothing more, and it leads no
//! longer than it may without support; and none is let lead afterwards.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use proptest::prelude::*;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use wingbeat_core::spec::{Address, MachineId};
use wingbeat_core::{NodeId, ProcessId};
use wingbeat_net::handshake::Epoch;
use wingbeat_net::messages::{Ballot, Generation, Leadership, Succession, Support, Vote};
use wingbeat_net::way::Promise;
use wingbeat_node::voter::Voter;

use super::Millis;
use super::leading::{self, Leading};
use super::standing_by::{self, StandingBy};

const TAKEOVER: Millis = 400;
const FENCE: Millis = 600;
const BEAT: Millis = TAKEOVER / 4;
const STANDBY: u64 = 99;

/// Who sends or takes in.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Who {
    Head,
    Standby,
    Node(u64),
}

/// What was written: who may take over, or something that somebody waits for.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant, reason = "in a test")]
enum Entry {
    Succession { latest: Succession, earlier: Option<Succession> },
    NoEarlier,
    Change(u64),
}

/// The latest succession in a file, and the one before it that is open, too.
fn successions(file: &[Entry]) -> (Option<Succession>, Option<Succession>) {
    let (mut found, mut found_earlier) = (None, None);
    for entry in file {
        match entry {
            Entry::Succession { latest, earlier } => (found, found_earlier) = (Some(latest.clone()), earlier.clone()),
            Entry::NoEarlier => found_earlier = None,
            Entry::Change(_) => {}
        }
    }
    (found, found_earlier)
}

/// What becomes of the head.
enum Life {
    Leads,
    /// It was started again with its file, and asks whether it may lead.
    Asks {
        epoch: Epoch,
        /// By what is open in its file.
        open: Vec<Succession>,
        given: BTreeSet<NodeId>,
    },
    Dead,
}

#[derive(Clone, Debug)]
enum Message {
    Follow {
        session: u64,
        written: usize,
        has: Option<Generation>,
    },
    Facts {
        session: u64,
        epoch: Epoch,
        from: usize,
        entries: Vec<Entry>,
    },
    /// The standby has them in its file.
    Written {
        session: u64,
        from: usize,
        entries: Vec<Entry>,
    },
    MayLead(Epoch),
    LetsLead(Epoch, bool),
    Leadership {
        said: Leadership,
        asked: Millis,
    },
    Support {
        said: Leadership,
        asked: Millis,
        answer: Support,
    },
    Ballot(Ballot),
    Vote(Ballot, Vote),
    /// A node that has promised itself asks the standby how it stands.
    Looks(Option<Promise>),
    Stands {
        asked: Option<Promise>,
        runs_for: Option<Epoch>,
        leads: Option<Epoch>,
    },
}

#[derive(Default)]
struct Node {
    voter: Voter,
    promise: Option<Promise>,
    joined: Option<Epoch>,
    heard: Option<Millis>,
}

/// A head, its standby, their files, the nodes, and what is on its way between them. Its many fields are those of all of these: one seed
/// decides what becomes of them.
struct World {
    random: StdRng,
    now: Millis,
    number: u64,
    queue: BinaryHeap<Reverse<(Millis, u64)>>,
    /// Each with the life of the head in which it was sent.
    messages: BTreeMap<u64, (Who, Who, u64, Message)>,
    cut: BTreeSet<(Who, Who)>,
    head: Leading,
    epoch: Epoch,
    life: Life,
    /// How often the head was started: a connection ends with it.
    lives: u64,
    /// Its file.
    log: Vec<Entry>,
    /// Changes that wait, with the position after them.
    waiting: Vec<(u64, usize)>,
    acknowledged: BTreeSet<u64>,
    confirmed: usize,
    session: Option<(u64, Millis)>,
    asked_nodes: Millis,
    standby: StandingBy,
    /// Its file.
    copy: Vec<Entry>,
    copy_session: u64,
    /// Whether something is being written there.
    writes: bool,
    /// Whether the standby waits for an answer, and since when.
    asks: Option<Millis>,
    written: usize,
    nodes: BTreeMap<u64, Node>,
    /// When the standby has won, and its epoch.
    leads: Option<(Millis, Epoch)>,
    /// From when on it says so: its file is opened again before.
    says_so: Millis,
}

fn address(process: u64) -> Address {
    Address { process: ProcessId(process), machine: MachineId(process), unix: String::new(), tcp: None, steward: None }
}

impl World {
    fn new(seed: u64, nodes: u64) -> World {
        let mut random = StdRng::seed_from_u64(seed);
        let first = random.random_range(0..100);
        World {
            random,
            now: first,
            number: 0,
            queue: BinaryHeap::new(),
            messages: BTreeMap::new(),
            cut: BTreeSet::new(),
            head: Leading::new(Epoch(3), TAKEOVER, FENCE),
            epoch: Epoch(3),
            life: Life::Leads,
            lives: 0,
            log: vec![Entry::Change(0)],
            waiting: Vec::new(),
            acknowledged: BTreeSet::new(),
            confirmed: 0,
            session: None,
            asked_nodes: 0,
            standby: StandingBy::new(first, TAKEOVER, None),
            copy: Vec::new(),
            copy_session: 0,
            writes: false,
            asks: None,
            written: 0,
            nodes: (1..=nodes).map(|node| (node, Node { joined: Some(Epoch(3)), ..Node::default() })).collect(),
            leads: None,
            says_so: 0,
        }
    }

    fn send(&mut self, from: Who, to: Who, message: Message) {
        let late = match self.random.random_range(0..100) {
            0 => self.random.random_range(0..4 * TAKEOVER),
            1..10 => self.random.random_range(0..BEAT),
            _ => self.random.random_range(0..5),
        };
        self.number += 1;
        self.queue.push(Reverse((self.now + late, self.number)));
        self.messages.insert(self.number, (from, to, self.lives, message));
    }

    fn leads(&self) -> bool {
        matches!(self.life, Life::Leads)
    }

    fn is_cut(&self, from: Who, to: Who) -> bool {
        self.cut.contains(&(from, to))
    }

    fn obey(&mut self, orders: Vec<leading::Order>) {
        for order in orders {
            match order {
                leading::Order::Write { latest, earlier } => self.log.push(Entry::Succession { latest, earlier }),
                leading::Order::ForgetEarlier => self.log.push(Entry::NoEarlier),
                leading::Order::AskNodes => self.ask_nodes(),
                leading::Order::End(_) => self.life = Life::Dead,
            }
        }
        self.acknowledge();
    }

    fn ask_nodes(&mut self) {
        self.asked_nodes = self.now;
        let (said, asked) = (self.head.leadership(), self.now);
        for node in self.nodes.keys().copied().collect::<Vec<_>>() {
            self.send(Who::Head, Who::Node(node), Message::Leadership { said: said.clone(), asked });
        }
    }

    fn acknowledge(&mut self) {
        let alone = !self.head.waits_for_standby();
        let done: Vec<u64> = self
            .waiting
            .iter()
            .filter(|(_, position)| alone || *position <= self.confirmed)
            .map(|(change, _)| *change)
            .collect();
        self.waiting.retain(|(change, _)| !done.contains(change));
        if let Some((at, _)) = self.leads {
            assert!(done.is_empty(), "acknowledged {done:?} though the standby leads since {at}, at {}", self.now);
        }
        self.acknowledged.extend(done);
    }

    fn vote(&mut self, orders: Vec<standing_by::Order>) {
        for order in orders {
            match order {
                standing_by::Order::Ask(ballot, nodes) => {
                    for (node, _) in nodes {
                        self.send(Who::Standby, Who::Node(node.0), Message::Ballot(ballot.clone()));
                    }
                }
                standing_by::Order::Lead(epoch) => {
                    self.leads = Some((self.now, epoch));
                    self.says_so = self.now + self.random.random_range(0..TAKEOVER);
                    let has = |change: &u64| {
                        self.copy.iter().any(|entry| matches!(entry, Entry::Change(had) if had == change))
                    };
                    let lost: Vec<u64> = self.acknowledged.iter().copied().filter(|change| !has(change)).collect();
                    assert!(lost.is_empty(), "{lost:?} were acknowledged, and the standby leads without them");
                }
            }
        }
    }

    /// The head is started again with its file.
    fn start_again(&mut self) {
        self.lives += 1;
        if self.random.random() {
            // Of a machine that is gone, nothing says so.
            self.standby.is_cut_off();
        }
        let (latest, earlier) = successions(&self.log);
        let written = latest.as_ref().map_or(0, |latest| latest.generation.epoch.0);
        let epoch = Epoch(self.epoch.0.max(written) + self.random.random_range(1..3));
        let open: Vec<Succession> = [latest, earlier].into_iter().flatten().filter(|by| by.standby.is_some()).collect();
        self.life = Life::Asks { epoch, open, given: BTreeSet::new() };
        self.epoch = epoch;
        self.ask_whether_it_may_lead();
    }

    fn ask_whether_it_may_lead(&mut self) {
        let Life::Asks { epoch, open, .. } = &self.life else { return };
        let (epoch, open) = (*epoch, open.clone());
        let Some(last) = open.iter().map(|by| by.generation.epoch).max() else { return self.is_let_lead() };
        let said =
            Leadership { generation: Generation { epoch: last, count: u64::MAX }, is_revoked: true, standby: None };
        let voters: BTreeSet<u64> = open.iter().flat_map(|by| by.voters.keys().map(|node| node.0)).collect();
        self.send(Who::Head, Who::Standby, Message::MayLead(epoch));
        for node in voters {
            self.send(Who::Head, Who::Node(node), Message::Leadership { said: said.clone(), asked: self.now });
        }
    }

    fn is_let_lead(&mut self) {
        assert!(self.leads.is_none(), "a head is let lead at {}, and the standby leads: {:?}", self.now, self.leads);
        self.life = Life::Leads;
        self.head = Leading::new(self.epoch, TAKEOVER, FENCE);
        let generation = Generation { epoch: self.epoch, count: 0 };
        let nobody = Succession { generation, standby: None, voters: BTreeMap::new() };
        self.log.push(Entry::Succession { latest: nobody, earlier: None });
        self.waiting.clear();
        (self.session, self.confirmed, self.asked_nodes) = (None, 0, self.now);
        let voters = self.nodes.keys().map(|node| (NodeId(*node), address(*node))).collect();
        let orders = self.head.nodes_are(self.now, voters);
        self.obey(orders);
    }

    fn hears_of_permission(&mut self, from: Who, message: Message) {
        let Life::Asks { epoch, open, given } = &mut self.life else { return };
        match (from, message) {
            (_, Message::LetsLead(asked, lets)) if asked == *epoch => match lets {
                true => self.is_let_lead(),
                false => self.life = Life::Dead,
            },
            // What an earlier one has asked is answered over connections that have ended with it.
            (Who::Node(node), Message::Support { said, answer, .. }) if said.generation.count == u64::MAX => {
                match answer {
                    Support::Given => given.insert(NodeId(node)),
                    Support::Promised(_) => false,
                    Support::Joined { .. } => return self.life = Life::Dead,
                };
                let is_enough = |by: &Succession| {
                    let by_nodes = by.voters.keys().filter(|node| given.contains(*node)).count();
                    !by.voters.is_empty() && by_nodes >= super::blocking(by.voters.len())
                };
                if open.iter().all(is_enough) {
                    self.is_let_lead();
                }
            }
            _ => {}
        }
    }

    fn head_hears(&mut self, message: Message) {
        match message {
            Message::Follow { session, written, has } => {
                if self.session.is_some_and(|(known, _)| known > session) {
                    return;
                }
                if self.session.is_none_or(|(known, _)| known < session) {
                    if written > 0 || self.head.follows(self.now, &address(STANDBY)).is_err() {
                        return;
                    }
                    self.session = Some((session, 0));
                    self.confirmed = 0;
                }
                let as_of = self.session.map_or(0, |(_, answered)| answered);
                self.confirmed = self.confirmed.max(written);
                let orders = self.head.heard(self.now, as_of, has, written > 0);
                self.obey(orders);
                self.session = Some((session, self.now));
                let (epoch, entries) = (self.epoch, self.log[written..].to_vec());
                let facts = Message::Facts { session, epoch, from: written, entries };
                self.send(Who::Head, Who::Standby, facts);
            }
            other => panic!("{other:?}"),
        }
    }

    fn hears(&mut self, from: Who, to: Who, message: Message) {
        match (to, message) {
            (Who::Head, message) if !self.leads() => self.hears_of_permission(from, message),
            (Who::Head, Message::Support { said, asked, answer }) => {
                let Who::Node(node) = from else { return };
                if said.generation.epoch != self.epoch {
                    return;
                }
                let orders = self.head.answered(self.now, NodeId(node), asked, &said, answer);
                self.obey(orders);
            }
            (Who::Head, Message::LetsLead(..)) => {}
            (Who::Head, message) => self.head_hears(message),
            (Who::Standby, Message::Facts { session, epoch, from, entries }) => {
                if session != self.copy_session || !self.standby.may_follow() || self.leads.is_some() {
                    return;
                }
                let asked = self.asks.filter(|_| self.written > 0);
                self.standby.heard(self.now, asked, epoch);
                self.asks = None;
                if !std::mem::replace(&mut self.writes, true) {
                    self.send(Who::Standby, Who::Standby, Message::Written { session, from, entries });
                }
            }
            (Who::Standby, Message::Written { session, from, entries }) => {
                if session != self.copy_session || !self.standby.may_follow() || self.leads.is_some() {
                    return;
                }
                self.writes = false;
                self.copy.truncate(from);
                let (said, _) = successions(&entries);
                self.copy.extend(entries);
                self.written = self.copy.len();
                if from == 0 || said.is_some() {
                    self.standby.wrote(said);
                }
            }
            (Who::Standby, Message::MayLead(epoch)) => {
                if let Some(lets) = self.standby.lets_lead(self.now, epoch) {
                    self.send(Who::Standby, Who::Head, Message::LetsLead(epoch, lets));
                }
            }
            (Who::Standby, Message::Vote(ballot, vote)) => {
                let Who::Node(node) = from else { return };
                if self.leads.is_none() {
                    let orders = self.standby.voted(self.now, NodeId(node), &ballot, vote);
                    self.vote(orders);
                }
            }
            (Who::Standby, Message::Looks(asked)) => {
                let leads = self.leads.filter(|_| self.now >= self.says_so).map(|(_, epoch)| epoch);
                let runs_for = self.standby.runs_for();
                self.send(Who::Standby, from, Message::Stands { asked, runs_for, leads });
            }
            (Who::Node(number), message) => {
                let hears_head = !self.is_cut(Who::Head, to) && self.leads();
                let Some(node) = self.nodes.get_mut(&number) else { return };
                let answer = match message {
                    Message::Leadership { said, asked } => {
                        // It has dialled a head that leads, and joined it.
                        let (epoch, asks) = (said.generation.epoch, said.generation.count == u64::MAX);
                        if !asks && node.promise.as_ref().is_none_or(|promise| promise.epoch <= epoch) {
                            node.joined = node.joined.max(Some(epoch));
                            node.promise = None;
                        }
                        let answer = node.voter.support(node.joined, node.promise.as_ref(), &said);
                        if answer == Support::Given {
                            node.heard = Some(self.now);
                        }
                        Some((Who::Head, Message::Support { said, asked, answer }))
                    }
                    Message::Ballot(ballot) => {
                        let heard = node.heard.is_some_and(|heard| self.now < heard + TAKEOVER * 3 / 4);
                        let (vote, promise) =
                            node.voter.vote(node.joined, node.promise.as_ref(), hears_head && heard, &ballot);
                        node.promise = promise.or(node.promise.take());
                        Some((Who::Standby, Message::Vote(ballot, vote)))
                    }
                    Message::Stands { asked, runs_for, leads } => {
                        if let Some(epoch) = leads {
                            node.joined = node.joined.max(Some(epoch));
                            node.promise.take_if(|promise| promise.epoch <= epoch);
                        } else if asked.is_some() && asked == node.promise && asked.map(|asked| asked.epoch) != runs_for
                        {
                            node.promise = None;
                        }
                        None
                    }
                    other => panic!("{other:?}"),
                };
                if let Some((back, answer)) = answer {
                    self.send(to, back, answer);
                }
            }
            (to, other) => panic!("{to:?} hears {other:?}"),
        }
    }

    fn beat(&mut self) {
        if self.leads() {
            let orders = self.head.tick(self.now);
            self.obey(orders);
            if self.head.standby().is_none() {
                self.session = None;
            }
            if self.head.asks_nodes() && self.now >= self.asked_nodes + BEAT {
                self.ask_nodes();
            }
        } else if self.now >= self.asked_nodes + BEAT {
            self.asked_nodes = self.now;
            self.ask_whether_it_may_lead();
        }
        if let Some((at, _)) = self.leads {
            assert!(
                self.now <= at + FENCE || !self.leads() || !self.head.may_lead(self.now),
                "the head leads at {}, and the standby since {at}",
                self.now
            );
            return;
        }
        let orders = self.standby.tick(self.now);
        self.vote(orders);
        if self.leads.is_none() && self.standby.may_follow() {
            if self.asks.is_some_and(|since| self.now > since + TAKEOVER) {
                // Another connection.
                self.standby.is_cut_off();
                (self.asks, self.written, self.writes) = (None, 0, false);
                self.copy_session += 1;
            }
            // While it writes, it says now and then that it is there.
            if self.asks.is_none() && (!self.writes || self.random.random_range(0..20) == 0) {
                self.asks = Some(self.now);
                let has = successions(&self.copy).0.map(|latest| latest.generation);
                let (session, written) = (self.copy_session, self.written);
                let follow = Message::Follow { session, written, has };
                self.send(Who::Standby, Who::Head, follow);
            }
        }
    }

    fn disturb(&mut self) {
        let everybody: Vec<Who> =
            [Who::Head, Who::Standby].into_iter().chain(self.nodes.keys().map(|node| Who::Node(*node))).collect();
        let any = |random: &mut StdRng| everybody[random.random_range(0..everybody.len())];
        match self.random.random_range(0..12) {
            0 => self.cut.clear(),
            1..4 => {
                let (one, other) = (any(&mut self.random), any(&mut self.random));
                self.cut.extend([(one, other), (other, one)]);
            }
            4 => {
                let one = any(&mut self.random);
                for other in everybody {
                    self.cut.extend([(one, other), (other, one)]);
                }
            }
            5 => {
                let voters = self.nodes.keys().filter(|_| self.random.random_range(0..4) > 0);
                let voters = voters.map(|node| (NodeId(*node), address(*node))).collect();
                let orders = self.head.nodes_are(self.now, voters);
                self.obey(orders);
            }
            6 if self.random.random_range(0..4) == 0 => {
                self.life = Life::Dead;
                self.standby.head_is_gone();
            }
            7 if matches!(self.life, Life::Dead) => self.start_again(),
            _ => {}
        }
    }

    fn run(&mut self, until: Millis) {
        let voters = self.nodes.keys().map(|node| (NodeId(*node), address(*node))).collect();
        let orders = self.head.nodes_are(self.now, voters);
        self.obey(orders);
        let mut change = 0;
        while self.now < until && self.leads.is_none_or(|(at, _)| self.now < at + 4 * FENCE) {
            self.now += 5;
            while let Some(Reverse((at, number))) = self.queue.peek().copied() {
                if at > self.now {
                    break;
                }
                self.queue.pop();
                self.arrives(number);
            }
            self.beat();
            if self.leads() && self.random.random_range(0..10) == 0 {
                change += 1;
                self.log.push(Entry::Change(change));
                self.waiting.push((change, self.log.len()));
                self.acknowledge();
            }
            if self.random.random_range(0..40) == 0 {
                self.disturb();
            }
            for node in self.nodes.keys().copied().collect::<Vec<_>>() {
                let promise = self.nodes[&node].promise.clone();
                if promise.is_some() && self.random.random_range(0..5) == 0 {
                    self.send(Who::Node(node), Who::Standby, Message::Looks(promise));
                }
            }
        }
    }
}

#[test]
fn a_head_that_dies_is_taken_over_from() {
    for nodes in 0..6 {
        let mut world = World::new(nodes, nodes);
        world.run(50);
        // Nobody is cut off any more.
        world.cut.clear();
        for _ in 0..100 {
            world.now += 5;
            world.step_quietly();
        }
        assert!(world.head.voters().is_some(), "{nodes}");
        world.life = Life::Dead;
        world.standby.head_is_gone();
        for _ in 0..1_000 {
            world.now += 5;
            world.step_quietly();
        }
        assert!(world.leads.is_some(), "{nodes} nodes");
    }
}

impl World {
    fn step_quietly(&mut self) {
        while let Some(Reverse((at, number))) = self.queue.peek().copied() {
            if at > self.now {
                break;
            }
            self.queue.pop();
            self.arrives(number);
        }
        self.beat();
    }

    fn arrives(&mut self, number: u64) {
        let Some((from, to, life, message)) = self.messages.remove(&number) else { return };
        if !self.is_cut(from, to) && (to != Who::Head || life == self.lives) {
            self.hears(from, to, message);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn there_is_one_head_and_it_knows_what_was_acknowledged(seed in any::<u64>(), nodes in 0..6_u64) {
        World::new(seed, nodes).run(10_000);
    }
}
