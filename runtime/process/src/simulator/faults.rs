//! What may happen at any time, as data: drawn from the seed before anything happens, so that a failing seed can be tried without
//! some of it.

use std::collections::BTreeSet;
use std::fmt::Write;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use wingbeat_core::resources::GPU;
use wingbeat_core::{Amount, NodeId, ProcessId, ResourceSet};
use wingbeat_head::state::{Event, Fact, Speaker};
use wingbeat_net::messages::HeadMessage;

use super::Config;
use super::head::NAMESPACE;
use super::world::{Happening, World};

/// Apart from all other chance, so that leaving something out changes nothing before it.
const STREAM: u64 = 0x5eed_fa17;
/// How long contact may be cut, and processes may stand still, without anybody being given up. Those that an earlier head knew
/// have to find the next one in time all the same.
const SHORT: u64 = 1_000;
/// More than there are of anything.
const NTH: u64 = 10_000;
/// How long there may be no head.
const AWAY: u64 = 2_000;

/// Something that happens. Which of those that there are then is `nth`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Fault {
    /// Nodes look for worker processes that are not worth keeping.
    Retire,
    /// All that runs may hold so much only, for some time.
    Quota {
        cpus: u32,
        gpus: u32,
        lasts: u64,
    },
    HeadDies {
        away: u64,
    },
    /// Something stands still: contact of a node or a process with the head, a process, a machine.
    StandsStill {
        what: u32,
        nth: u64,
        lasts: u64,
    },
    /// Two processes lose contact.
    Cut {
        nth: u64,
    },
    /// A connection breaks, and resumes.
    Breaks {
        nth: u64,
    },
    WorkerDies {
        nth: u64,
    },
    NodeDies {
        nth: u64,
    },
    /// A node is without contact for so long that it is given up.
    GivenUp {
        nth: u64,
    },
    Drain {
        nth: u64,
        within: u64,
        comes_back: Option<u64>,
    },
    /// There is no room in the store of a node.
    Full {
        nth: u64,
        lasts: u64,
    },
    MemoryShort {
        nth: u64,
        lasts: u64,
    },
    /// The head cannot write its journal.
    JournalFails {
        lasts: u64,
    },
    DriverLeaves {
        nth: u64,
    },
}

/// A fault and when it happens.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Strike {
    pub at: u64,
    pub fault: Fault,
    /// Where all other chance in it comes from.
    luck: u64,
}

/// When everything may still go wrong.
fn ends(config: &Config) -> u64 {
    200 + 1_000 * (config.seed % 3)
}

/// All faults of a small cluster, in order.
pub(super) fn schedule(config: &Config) -> Vec<Strike> {
    let mut random = StdRng::seed_from_u64(config.seed ^ STREAM);
    let (mut at, mut strikes) = (1, Vec::new());
    while config.large().is_none() && at <= ends(config) {
        strikes.extend(draw(&mut random, config, 12).into_iter().map(|(fault, luck)| Strike { at, fault, luck }));
        at += 1 + random.random_range(0..80);
    }
    strikes
}

/// A schedule in one line, each entry with its number.
pub(super) fn shown(strikes: &[Strike], left_out: &BTreeSet<usize>) -> String {
    let mut line = String::new();
    for (number, Strike { at, fault, .. }) in
        strikes.iter().enumerate().filter(|(number, _)| !left_out.contains(number))
    {
        let _ = write!(line, "{}{number}: {fault:?} at {at}", if line.is_empty() { "" } else { "; " });
    }
    line
}

/// What happens at one moment. At one of so many, the head dies.
fn draw(random: &mut StdRng, config: &Config, restarts_one_of: u64) -> Vec<(Fault, u64)> {
    let mut below = |limit: u64| random.random_range(0..limit);
    let mut faults = Vec::new();
    if below(4) == 0 {
        faults.push(Fault::Retire);
    }
    if below(20) == 0 {
        faults.push(Fault::Quota { cpus: 3 + below(4) as u32, gpus: 1 + below(4) as u32, lasts: below(500) });
    }
    if config.restarts && below(restarts_one_of) == 0 {
        faults.push(Fault::HeadDies { away: 1 + below(AWAY) });
    }
    if (config.restarts || config.faults) && below(8) == 0 {
        let most = if below(4) == 0 { SHORT } else { SHORT / 10 };
        faults.push(Fault::StandsStill { what: below(4) as u32, nth: below(NTH), lasts: 1 + below(most) });
    }
    if config.faults {
        let nth = below(NTH);
        faults.extend(match below(40) {
            0..=6 => Some(Fault::Cut { nth }),
            7..=14 => Some(Fault::Breaks { nth }),
            15..=19 => Some(Fault::WorkerDies { nth }),
            20 => Some(Fault::NodeDies { nth }),
            21 => Some(Fault::DriverLeaves { nth }),
            22 | 23 => {
                let (within, comes_back) = (below(300), below(3) > 0);
                Some(Fault::Drain { nth, within, comes_back: comes_back.then(|| below(600)) })
            }
            24 | 25 => Some(Fault::Full { nth, lasts: below(400) }),
            26 => Some(Fault::GivenUp { nth }),
            27 => Some(Fault::JournalFails { lasts: below(400) }),
            28 | 29 => Some(Fault::MemoryShort { nth, lasts: below(2_000) }),
            _ => None,
        });
    }
    faults.into_iter().map(|fault| (fault, below(u64::MAX))).collect()
}

impl World {
    /// Plans all faults of a small cluster.
    pub(super) fn plan_faults(&mut self) {
        for (number, strike) in self.strikes.clone().into_iter().enumerate() {
            if !self.left_out.contains(&number) {
                self.schedule(strike.at, Happening::Strikes(strike));
            }
        }
    }

    /// Something happens, unless every program has ended. What is chance in it, comes from it alone.
    pub(super) fn strikes(&mut self, strike: Strike) {
        if self.drivers.is_empty() {
            return;
        }
        self.shared.trace(|| format!("{:?}", strike.fault));
        let before = self.shared.random.replace(StdRng::seed_from_u64(strike.luck));
        self.suffers(strike.fault);
        self.shared.random.replace(before);
    }

    /// What happens now in a large cluster, where it is not known before.
    pub(super) fn something_happens(&mut self) {
        let mut random = StdRng::seed_from_u64(self.shared.below(u64::MAX));
        let restarts_one_of = self.shared.config.large().map_or(12, |large| (large.nodes / 4).max(12));
        for (fault, luck) in draw(&mut random, &self.shared.config, restarts_one_of) {
            self.strikes(Strike { at: self.shared.now(), fault, luck });
        }
    }

    pub(super) fn maybe_retire(&mut self) {
        if self.shared.below(4) == 0 {
            self.retire_idle_workers();
        }
    }

    fn suffers(&mut self, fault: Fault) {
        let nodes: Vec<NodeId> = self.nodes.keys().copied().collect();
        match fault {
            Fault::Retire => self.retire_idle_workers(),
            Fault::Quota { cpus, gpus, lasts } => self.limit(cpus, gpus, lasts),
            Fault::HeadDies { away } => self.head_dies(away),
            Fault::StandsStill { what, nth, lasts } => self.something_stands_still(what, nth, lasts),
            Fault::Cut { nth } | Fault::Breaks { nth } => {
                let processes: Vec<ProcessId> = self.processes.keys().copied().collect();
                let Some(one) = pick(&processes, nth) else { return };
                let peers = self.processes[&one].side.peers();
                match (pick(&peers, nth / 64), fault) {
                    (Some(other), Fault::Cut { .. }) => self.cut(one, other),
                    (Some(other), _) => self.breaks(one, other),
                    (None, _) => {}
                }
            }
            Fault::WorkerDies { nth } => {
                let workers = self.processes.values().filter(|process| process.is_worker());
                let workers: Vec<ProcessId> = workers.map(|process| process.id).collect();
                if let Some(worker) = pick(&workers, nth) {
                    self.shared.report.borrow_mut().deaths += 1;
                    self.dies(worker);
                }
            }
            Fault::NodeDies { nth }
            | Fault::GivenUp { nth }
            | Fault::Drain { nth, .. }
            | Fault::Full { nth, .. }
            | Fault::MemoryShort { nth, .. } => {
                if let Some(node) = pick(&nodes, nth) {
                    self.node_suffers(node, fault);
                }
            }
            Fault::JournalFails { lasts } if !self.is_head_away => {
                self.step(Event::JournalFails(Some("the simulation".into())));
                self.schedule(lasts, Happening::CanWrite);
            }
            Fault::DriverLeaves { nth } if self.drivers.len() > 1 => {
                let drivers: Vec<ProcessId> = self.drivers.iter().copied().collect();
                if let Some(driver) = pick(&drivers, nth) {
                    self.driver_leaves(driver);
                }
            }
            Fault::JournalFails { .. } | Fault::DriverLeaves { .. } => {}
        }
    }

    fn node_suffers(&mut self, node: NodeId, fault: Fault) {
        match fault {
            Fault::NodeDies { .. } => {
                self.shared.report.borrow_mut().deaths += 1;
                self.replace(node);
                self.node_dies(node);
            }
            Fault::GivenUp { .. } => self.is_given_up(node),
            Fault::Drain { within, comes_back, .. } => self.drain(node, within, comes_back),
            Fault::Full { lasts, .. } => self.fills(node, lasts),
            Fault::MemoryShort { lasts, .. } => self.memory_is_short(node, lasts),
            _ => {}
        }
    }

    /// There is no room in the store of a node for some time, nor on its disk.
    fn fills(&mut self, node: NodeId, lasts: u64) {
        self.shared.report.borrow_mut().fills += 1;
        self.shared.full.borrow_mut().insert(node);
        self.schedule(lasts, Happening::HasRoom(node));
    }

    /// The head's disk has room again.
    pub(super) fn can_write(&mut self) {
        // A head that was started again begins with one that has.
        if !self.is_head_away {
            self.step(Event::JournalFails(None));
        }
    }

    /// A person empties a node, and changes their mind or not.
    fn drain(&mut self, node: NodeId, within: u64, comes_back: Option<u64>) {
        if self.is_head_away || self.waits_for_the_kept() {
            return;
        }
        self.shared.report.borrow_mut().deaths += 1;
        if comes_back.is_none() {
            self.replace(node);
        }
        let (_, actions) =
            self.state.drain(self.head_now(), node, Some(within), "a person".into(), comes_back.is_none());
        self.act(actions);
        if let Some(after) = comes_back {
            self.schedule(after, Happening::EndDrain(node));
        }
    }

    pub(super) fn end_drain(&mut self, node: NodeId) {
        if self.is_head_away || self.waits_for_the_kept() {
            // People ask again.
            return self.schedule(500, Happening::EndDrain(node));
        }
        let (answer, actions) = self.state.drain(self.head_now(), node, None, String::new(), false);
        self.act(actions);
        if answer.is_err() && self.nodes.contains_key(&node) {
            // It is not back.
            self.schedule(500, Happening::EndDrain(node));
        }
    }

    /// All that runs may hold so much only, for some time.
    fn limit(&mut self, cpus: u32, gpus: u32, lasts: u64) {
        if !self.is_head_away && !self.waits_for_the_kept() {
            self.set_quota(Some(ResourceSet::cpus(Amount::whole(cpus)).with(GPU, Amount::whole(gpus))));
            self.schedule(lasts, Happening::EndQuota);
        }
    }

    fn set_quota(&mut self, quota: Option<ResourceSet>) {
        self.grants.limited_to(quota.clone());
        self.shared.was_limited.set(true);
        let actions = self.state.quota(self.head_now(), NAMESPACE, quota);
        self.act(actions);
    }

    pub(super) fn end_quota(&mut self) {
        match self.is_head_away || self.waits_for_the_kept() {
            true => self.schedule(500, Happening::EndQuota),
            false => self.set_quota(None),
        }
    }

    /// Somebody ends what outlives its driver.
    pub(super) fn kill_detached_actors(&mut self) {
        let detached = self.facts.values().filter_map(|fact| match fact {
            Fact::Actor(actor) if actor.spec.detached => Some(actor.spec.id),
            _ => None,
        });
        for actor in detached.collect::<Vec<_>>() {
            let by = Speaker::Process(ProcessId(0));
            self.step(Event::Says(by, HeadMessage::KillActor { actor, may_restart: false }));
        }
        self.come_to_rest();
    }

    /// Nodes look for worker processes that are not worth keeping.
    pub(super) fn retire_idle_workers(&mut self) {
        for node in self.nodes.keys().copied().collect::<Vec<_>>() {
            self.node_steps(node, wingbeat_node::Event::Tick);
        }
    }
}

/// One of those that there are.
pub(super) fn pick<T: Copy>(of: &[T], nth: u64) -> Option<T> {
    (!of.is_empty()).then(|| of[(nth % of.len() as u64) as usize])
}
