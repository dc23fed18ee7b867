//! What may happen at any time, as data: drawn from the seed before anything happens, so that a failing seed can be tried without
//! some of it.

use std::collections::BTreeSet;
use std::fmt::Write;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::Config;

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
    /// No worker process can be started on a node.
    StartsFail {
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
    pub luck: u64,
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
pub(super) fn draw(random: &mut StdRng, config: &Config, restarts_one_of: u64) -> Vec<(Fault, u64)> {
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
            30 | 31 => Some(Fault::StartsFail { nth, lasts: below(4_000) }),
            _ => None,
        });
    }
    faults.into_iter().map(|fault| (fault, below(u64::MAX))).collect()
}

/// One of those that there are.
pub(super) fn pick<T: Copy>(of: &[T], nth: u64) -> Option<T> {
    (!of.is_empty()).then(|| of[(nth % of.len() as u64) as usize])
}
