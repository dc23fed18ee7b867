//! Which faults happen when. Pure: the seed decides everything.

use std::time::Duration;

use wingbeat_shapes::Chance;

use crate::fault::{DRIVER_MACHINES, Disk, Fault, MACHINES, NODES, Target};

/// The pauses between two faults: half a second on average.
const PAUSE_MS: [u64; 2] = [150, 850];

/// So many nodes at a time are killed, stopped or cut off; the others go on.
const AWAY_AT_A_TIME: usize = 2;

/// A head that was away is left alone for so long: the worst is allowed, but not that it never gets anything done.
const HEAD_RESTS: Duration = Duration::from_secs(4);

/// How patient the cluster is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Patience {
    /// When a connection counts as dead.
    pub silence: Duration,
    /// When a node or driver that does not come back counts as dead.
    pub lost: Duration,
}

impl Patience {
    /// What a cluster has if nothing is said.
    pub const USUAL: Patience = Patience { silence: Duration::from_secs(5), lost: Duration::from_secs(30) };
    /// So that what takes long happens more often. The rest follows from the silence.
    pub const SHORT: Patience = Patience { silence: Duration::from_secs(2), lost: Duration::from_secs(7) };
}

/// A fault and its time from the beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strike {
    /// When.
    pub at: Duration,
    /// What.
    pub fault: Fault,
}

/// The faults of a seed.
pub fn schedule(seed: u64, length: Duration, patience: Patience) -> Vec<Strike> {
    let mut plan = Plan { chance: Chance::new(seed), patience, away: Vec::new() };
    let (mut strikes, mut at) = (Vec::new(), Duration::ZERO);
    loop {
        at += plan.between(PAUSE_MS);
        if at >= length {
            return strikes;
        }
        let fault = plan.next(at);
        strikes.push(Strike { at, fault });
    }
}

struct Plan {
    chance: Chance,
    patience: Patience,
    /// What is away or out of order, and until when.
    away: Vec<(Part, Duration)>,
}

/// What one fault at a time is for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Head,
    Node(usize),
    Driver(usize),
    Link(usize),
    Disk(usize),
}

impl Plan {
    fn between(&mut self, [from, to]: [u64; 2]) -> Duration {
        Duration::from_millis(from + self.chance.below((to - from + 1) as usize) as u64)
    }

    /// Mostly short, sometimes as long as a connection lives, and rarely so long that whoever is silent is given up.
    fn silence(&mut self) -> Duration {
        let silence = self.patience.silence.as_millis() as u64;
        let lost = self.patience.lost.as_millis() as u64;
        match self.chance.below(20) {
            0 => self.between([lost + 500, lost + 2 * silence]),
            1..5 => self.between([silence, 2 * silence]),
            _ => self.between([50, silence]),
        }
    }

    /// A fault that fits to what is out of order already.
    fn next(&mut self, at: Duration) -> Fault {
        self.away.retain(|(_, until)| *until > at);
        for _ in 0..20 {
            let fault = self.draw();
            let parts = parts(&fault);
            let nodes = self.away.iter().filter(|(part, _)| matches!(part, Part::Node(_))).count();
            let more = parts.iter().filter(|part| matches!(part, Part::Node(_))).count();
            let is_free = parts.iter().all(|part| self.away.iter().all(|(other, _)| other != part));
            if is_free && (more == 0 || nodes + more <= AWAY_AT_A_TIME) {
                self.away.extend(parts.into_iter().map(|part| {
                    let rests = if part == Part::Head { HEAD_RESTS } else { Duration::from_secs(1) };
                    (part, at + fault.lasts() + rests)
                }));
                return fault;
            }
        }
        self.worker_process()
    }

    fn worker_process(&mut self) -> Fault {
        Fault::Kill { target: self.pick_worker_process(), away: Duration::ZERO }
    }

    fn pick_worker_process(&mut self) -> Target {
        Target::WorkerProcess { node: self.node(), pick: self.chance.below(64) }
    }

    fn node(&mut self) -> usize {
        1 + self.chance.below(NODES)
    }

    fn draw(&mut self) -> Fault {
        let away = self.between([0, 1_500]);
        match self.chance.below(100) {
            0..32 => self.worker_process(),
            32..35 => Fault::Eat { node: self.node(), lasts: self.between([200, 2_000]) },
            35..44 => Fault::Stop { target: self.pick_worker_process(), lasts: self.silence() },
            44..51 => Fault::Kill { target: Target::Node(self.node()), away },
            51..57 => Fault::Stop { target: Target::Node(self.node()), lasts: self.silence() },
            57..61 => Fault::Kill { target: self.guard(), away },
            61..63 => Fault::Stop { target: self.guard(), lasts: self.silence() },
            63..68 => Fault::Kill { target: Target::Head, away },
            68..71 => Fault::Stop { target: Target::Head, lasts: self.between([50, 1_500]) },
            71..76 => Fault::Kill { target: Target::Driver(self.chance.below(DRIVER_MACHINES.len())), away },
            76..79 => {
                Fault::Stop { target: Target::Driver(self.chance.below(DRIVER_MACHINES.len())), lasts: self.silence() }
            }
            79..84 => Fault::Cut { machine: 1 + self.chance.below(MACHINES - 1), lasts: self.silence() },
            84..88 => {
                let from = self.chance.below(MACHINES);
                let to = (from + 1 + self.chance.below(MACHINES - 1)) % MACHINES;
                Fault::CutWay { from, to, lasts: self.silence() }
            }
            88..94 => Fault::Slow { machine: self.chance.below(MACHINES), lasts: self.between([500, 4_000]) },
            94..98 => Fault::Fill { disk: Disk::Spill(self.node()), lasts: self.between([500, 4_000]) },
            _ => Fault::Fill { disk: Disk::Journal, lasts: self.between([200, 2_000]) },
        }
    }

    fn guard(&mut self) -> Target {
        Target::Guard { node: self.node(), outer: self.chance.below(2) == 0 }
    }
}

/// What a fault puts out of order. The head must be heard by all, or everybody would end with it.
fn parts(fault: &Fault) -> Vec<Part> {
    let of_machine = |machine: usize| match machine {
        0 => vec![Part::Head],
        machine => {
            let drivers = (0..DRIVER_MACHINES.len()).filter(|driver| DRIVER_MACHINES[*driver] == machine);
            let node = Some(Part::Node(machine)).filter(|_| machine <= NODES);
            drivers.map(Part::Driver).chain(node).collect()
        }
    };
    match *fault {
        Fault::Kill { target, .. } | Fault::Stop { target, .. } => match target {
            Target::Head => vec![Part::Head],
            Target::Node(node) | Target::Guard { node, .. } => vec![Part::Node(node)],
            Target::WorkerProcess { .. } => Vec::new(),
            Target::Driver(driver) => vec![Part::Driver(driver)],
        },
        Fault::Cut { machine, .. } => of_machine(machine).into_iter().chain([Part::Link(machine)]).collect(),
        // The head is away for one of them alone.
        Fault::CutWay { from, to, .. } => {
            let others = [from, to].into_iter().filter(|machine| *machine != 0);
            others.flat_map(|machine| of_machine(machine).into_iter().chain([Part::Link(machine)])).collect()
        }
        Fault::Slow { machine, .. } => vec![Part::Link(machine)],
        Fault::Eat { node, .. } => vec![Part::Node(node)],
        Fault::Fill { disk: Disk::Spill(node), .. } => vec![Part::Disk(node)],
        Fault::Fill { disk: Disk::Journal, .. } => vec![Part::Head],
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn of(seed: u64) -> Vec<Strike> {
        let patience = if seed.is_multiple_of(4) { Patience::USUAL } else { Patience::SHORT };
        schedule(seed, Duration::from_secs(600), patience)
    }

    #[test]
    fn the_same_seed_gives_the_same_faults() {
        assert_eq!(of(3), of(3));
        assert_ne!(of(3), of(4));
    }

    #[test]
    fn there_is_more_than_one_fault_a_second_and_every_kind() {
        for seed in 0..20 {
            let strikes = of(seed);
            assert!(strikes.len() > 600, "{} faults in seed {seed}", strikes.len());
            let kinds: BTreeSet<_> = strikes.iter().map(|strike| strike.fault.kind()).collect();
            assert_eq!(kinds.len(), 16, "seed {seed}: {kinds:?}");
        }
    }

    #[test]
    fn the_head_is_never_away_for_as_long_as_would_end_the_cluster() {
        let is_of_head = |strike: &&Strike| parts(&strike.fault).contains(&Part::Head);
        for seed in 0..20 {
            let strikes = of(seed);
            let mut last = Duration::ZERO;
            for Strike { at, fault } in strikes.iter().filter(is_of_head) {
                assert!(*at >= last && fault.lasts() <= Duration::from_secs(2), "seed {seed}: {fault} at {at:?}");
                last = *at + fault.lasts() + HEAD_RESTS;
            }
        }
    }

    #[test]
    fn half_of_the_nodes_are_never_away() {
        for seed in 0..20 {
            let strikes = of(seed);
            let nodes = |at: Duration| {
                let lasting = strikes.iter().filter(|strike| strike.at <= at && at < strike.at + strike.fault.lasts());
                let parts = lasting.flat_map(|strike| parts(&strike.fault));
                parts.filter(|part| matches!(part, Part::Node(_))).count()
            };
            assert!(strikes.iter().all(|strike| nodes(strike.at) <= AWAY_AT_A_TIME), "seed {seed}");
        }
    }
}
