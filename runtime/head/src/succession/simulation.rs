//! A head, its standby and nodes, with messages that are late or lost and links that are cut, chosen by a seed.
//!
//! What must hold: when the standby leads, it has all that the head has acknowledged, the head acknowledges nothing more, and it leads no
//! longer than it may without support.

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
enum Entry {
    Succession(Succession),
    Change(u64),
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
        from: usize,
        entries: Vec<Entry>,
    },
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

struct World {
    random: StdRng,
    now: Millis,
    number: u64,
    queue: BinaryHeap<Reverse<(Millis, u64)>>,
    messages: BTreeMap<u64, (Who, Who, Message)>,
    cut: BTreeSet<(Who, Who)>,
    head: Leading,
    head_lives: bool,
    log: Vec<Entry>,
    /// Changes that wait, with the position after them.
    waiting: Vec<(u64, usize)>,
    acknowledged: BTreeSet<u64>,
    confirmed: usize,
    session: Option<(u64, Millis)>,
    asked_nodes: Millis,
    standby: StandingBy,
    copy: Vec<Entry>,
    copy_session: u64,
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
            head_lives: true,
            log: vec![Entry::Change(0)],
            waiting: Vec::new(),
            acknowledged: BTreeSet::new(),
            confirmed: 0,
            session: None,
            asked_nodes: 0,
            standby: StandingBy::new(first, TAKEOVER, None),
            copy: Vec::new(),
            copy_session: 0,
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
        self.messages.insert(self.number, (from, to, message));
    }

    fn is_cut(&self, from: Who, to: Who) -> bool {
        self.cut.contains(&(from, to))
    }

    fn obey(&mut self, orders: Vec<leading::Order>) {
        for order in orders {
            match order {
                leading::Order::Write(succession) => self.log.push(Entry::Succession(succession)),
                leading::Order::AskNodes => self.ask_nodes(),
                leading::Order::GoOnAlone => {}
                leading::Order::End(_) => self.head_lives = false,
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

    fn head_hears(&mut self, message: Message) {
        if !self.head_lives {
            return;
        }
        match message {
            Message::Follow { session, written, has } => {
                if self.session.is_some_and(|(known, _)| known > session) {
                    return;
                }
                if self.session.is_none_or(|(known, _)| known < session) {
                    if written > 0 || self.head.follows(self.now, &address(STANDBY)).is_err() {
                        return;
                    }
                    self.session = Some((session, self.now));
                    self.confirmed = 0;
                }
                let as_of = self.session.map_or(0, |(_, answered)| answered);
                self.confirmed = self.confirmed.max(written);
                let orders = self.head.heard(self.now, as_of, has, written > 0);
                self.obey(orders);
                self.session = Some((session, self.now));
                let facts = Message::Facts { session, from: written, entries: self.log[written..].to_vec() };
                self.send(Who::Head, Who::Standby, facts);
            }
            other => panic!("{other:?}"),
        }
    }

    fn hears(&mut self, from: Who, to: Who, message: Message) {
        match (to, message) {
            (Who::Head, Message::Support { said, asked, answer }) => {
                let Who::Node(node) = from else { return };
                if self.head_lives {
                    let orders = self.head.answered(self.now, NodeId(node), asked, &said, answer);
                    self.obey(orders);
                }
            }
            (Who::Head, message) => self.head_hears(message),
            (Who::Standby, Message::Facts { session, from, entries }) => {
                if session != self.copy_session || !self.standby.may_follow() || self.leads.is_some() {
                    return;
                }
                let asked = self.asks.filter(|_| self.written > 0);
                self.standby.heard(self.now, asked, Epoch(3));
                if from == 0 {
                    self.copy.clear();
                }
                self.copy.truncate(from);
                self.copy.extend(entries);
                self.written = self.copy.len();
                let said = self.copy.iter().rev().find_map(|entry| match entry {
                    Entry::Succession(succession) => Some(succession.clone()),
                    Entry::Change(_) => None,
                });
                self.standby.wrote(said);
                self.asks = None;
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
                let hears_head = !self.is_cut(Who::Head, to) && self.head_lives;
                let Some(node) = self.nodes.get_mut(&number) else { return };
                let answer = match message {
                    Message::Leadership { said, asked } => {
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
        if self.head_lives {
            let orders = self.head.tick(self.now);
            self.obey(orders);
            if self.head.standby().is_none() {
                self.session = None;
            }
            if self.head.asks_nodes() && self.now >= self.asked_nodes + BEAT {
                self.ask_nodes();
            }
        }
        if let Some((at, _)) = self.leads {
            assert!(
                self.now <= at + FENCE || !self.head_lives || !self.head.may_lead(self.now),
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
                (self.asks, self.written) = (None, 0);
                self.copy_session += 1;
            }
            if self.asks.is_none() {
                self.asks = Some(self.now);
                let has = self.copy.iter().rev().find_map(|entry| match entry {
                    Entry::Succession(succession) => Some(succession.generation),
                    Entry::Change(_) => None,
                });
                let follow = Message::Follow { session: self.copy_session, written: self.written, has };
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
                self.head_lives = false;
                self.standby.head_is_gone();
            }
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
                let Some((from, to, message)) = self.messages.remove(&number) else { continue };
                if !self.is_cut(from, to) {
                    self.hears(from, to, message);
                }
            }
            self.beat();
            if self.head_lives && self.random.random_range(0..10) == 0 {
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
        world.head_lives = false;
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
            if let Some((from, to, message)) = self.messages.remove(&number) {
                self.hears(from, to, message);
            }
        }
        self.beat();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn there_is_one_head_and_it_knows_what_was_acknowledged(seed in any::<u64>(), nodes in 0..6_u64) {
        World::new(seed, nodes).run(10_000);
    }
}
