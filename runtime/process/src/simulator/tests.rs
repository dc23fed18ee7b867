use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use wingbeat_core::ClusterId;
use wingbeat_head::state::{Action, Beginning, Input, State};
use wingbeat_net::recording::{self, Recorder, Recording, Redact};

use super::world::World;
use super::{Config, Large, Report, Size, schedule};

/// Says which seed fails.
struct Seed(Config);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let Config { seed, faults, restarts, size, .. } = self.0;
            let again = match size {
                Size::Small => {
                    let kind = match (faults, restarts) {
                        (true, true) => "WINGBEAT_FAULTS=1 ",
                        (true, false) => "WINGBEAT_FAULTS=1 WINGBEAT_RESTARTS=0 ",
                        (false, true) => "WINGBEAT_RESTARTS=1 ",
                        (false, false) => "",
                    };
                    format!(
                        "{kind}WINGBEAT_SEED={seed} cargo test -p wingbeat-process --lib simulator::tests::one_seed\n\
                         and with fewer faults: WINGBEAT_LEAVE_OUT=1,5 leaves two out, WINGBEAT_SHRINK=1 all that can be left out, of\n  {}",
                        schedule::shown(&schedule::schedule(&self.0), &left_out())
                    )
                }
                Size::Large(Large { nodes, events, .. }) => {
                    let faults = if faults { "" } else { " --no-faults" };
                    format!("cargo xtask simulate --seed {seed} --nodes {nodes} --events {events}{faults}")
                }
            };
            eprintln!("seed {seed} fails; repeat it with\n  {again}");
        }
    }
}

fn run(config: Config) -> Report {
    let _seed = Seed(config);
    let mut world = World::new(config);
    if config.trace {
        record(&mut world, config.seed);
    }
    world.run()
}

/// With `WINGBEAT_RECORD`, the first head is recorded as that of a cluster is.
fn record(world: &mut World, seed: u64) {
    let begins = Beginning { cluster: ClusterId(seed), first_lease: 1, remembered: None, grace: 0 };
    world.state.record_with(Recording::asked_for(recording::Machine::Head, &format!("head-seed{seed}"), begins));
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// How many seeds are tried: more for a longer search.
fn seeds() -> std::ops::Range<u64> {
    let first = number("WINGBEAT_FIRST_SEED").unwrap_or(0);
    first..first + number("WINGBEAT_SEEDS").unwrap_or(3_400)
}

/// Numbers of faults that do not happen.
fn left_out() -> BTreeSet<usize> {
    let listed = std::env::var("WINGBEAT_LEAVE_OUT").unwrap_or_default();
    listed.split(',').filter_map(|number| number.trim().parse().ok()).collect()
}

/// What can be left out of the faults of a seed, one after the other, so that it still fails.
fn shrink(config: Config, mut left_out: BTreeSet<usize>) -> BTreeSet<usize> {
    let fails = |left_out: &BTreeSet<usize>| {
        let mut world = World::new(config);
        world.left_out.clone_from(left_out);
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| world.run())).is_err()
    };
    assert!(fails(&left_out), "the seed does not fail");
    for number in (0..schedule::schedule(&config).len()).rev() {
        if left_out.insert(number) && !fails(&left_out) {
            left_out.remove(&number);
        }
    }
    left_out
}

#[test]
fn many_seeds_without_faults() {
    for seed in seeds() {
        let report = run(Config::small(seed, false));
        assert_eq!((report.cuts, report.deaths), (0, 0));
    }
}

/// Nothing fails, whatever runs when the head dies.
#[test]
fn many_seeds_with_a_head_that_is_started_again() {
    let (mut restarts, mut standstills) = (0, 0);
    for seed in seeds() {
        let report = run(Config { restarts: true, ..Config::small(seed, false) });
        assert_eq!((report.cuts, report.deaths), (0, 0));
        restarts += report.restarts;
        standstills += report.standstills;
    }
    assert!(restarts > 0 && standstills > 0 || seeds().count() < 10);
}

#[test]
fn many_seeds_with_faults() {
    let (mut cuts, mut deaths, mut restarts) = (0, 0, 0);
    for seed in seeds() {
        let report = run(Config::small(seed, true));
        cuts += report.cuts;
        deaths += report.deaths;
        restarts += report.restarts;
    }
    assert!(
        cuts > 0 && deaths > 0 && restarts > 0 || seeds().count() < 10,
        "{cuts} cuts, {deaths} deaths, {restarts} restarts"
    );
}

#[test]
fn the_same_seed_gives_the_same_run() {
    for (seed, faults) in (0..seeds().count() as u64 / 10).map(|seed| (seed, seed % 3 > 0)) {
        let config = Config::small(seed, faults);
        let _seed = Seed(config);
        let [one, two] = [(); 2].map(|()| run(config));
        assert_eq!(one, two);
    }
}

#[test]
fn what_the_head_has_taken_in_gives_the_same_when_it_is_played() {
    for seed in 0..20 {
        let tape = Tape::default();
        let config = Config { restarts: false, ..Config::small(seed, true) };
        let _seed = Seed(config);
        let mut world = World::new(config);
        world.state.record_with(Some(Box::new(tape.clone())));
        world.run();
        let mut again = State::new(ClusterId(seed), 1);
        for (now, input, digest) in std::mem::take(&mut *tape.0.lock()) {
            let text = format!("{input:?}");
            let actions = again.replay(now, input);
            assert_eq!(recording::digest(&recording::texts(&actions)), digest, "seed {seed}, at {now}: {text}");
        }
    }
}

#[derive(Clone, Default)]
struct Tape(Arc<Mutex<Vec<(u64, Input, u64)>>>);

impl Recorder<Input, Action> for Tape {
    fn record(&mut self, now: u64, mut input: Input, actions: &[Action]) {
        input.redact();
        self.0.lock().push((now, input, recording::digest(&recording::texts(actions))));
    }
}

/// The seed in `WINGBEAT_SEED`, with all that happens on stderr. With `WINGBEAT_RECORD`, it is recorded as a cluster is.
#[test]
fn one_seed() {
    let Some(seed) = number("WINGBEAT_SEED") else { return };
    let small = Config::small(seed, number("WINGBEAT_FAULTS").is_some());
    let restarts = number("WINGBEAT_RESTARTS").map_or(small.faults, |restarts| restarts > 0);
    let config = Config { trace: true, restarts, ..small };
    let _seed = Seed(config);
    let config = if number("WINGBEAT_SHRINK").is_some() { Config { trace: false, ..config } } else { config };
    let mut left_out = left_out();
    if number("WINGBEAT_SHRINK").is_some() {
        left_out = shrink(config, left_out);
        eprintln!(
            "what is left of the faults of this seed: {}",
            schedule::shown(&schedule::schedule(&config), &left_out)
        );
        let numbers: Vec<String> = left_out.iter().map(usize::to_string).collect();
        eprintln!("the same without the others: WINGBEAT_LEAVE_OUT={}", numbers.join(","));
    }
    let mut world = World::new(config);
    world.left_out = left_out;
    record(&mut world, seed);
    let report = world.run();
    eprintln!("{report:?}");
}

#[test]
fn drivers_in_a_cluster_of_many_nodes_begin_programs_until_enough_has_happened() {
    for (seed, faults) in [(0, false), (1, true), (2, true)] {
        let large = Large::new(seed, 200, 20_000);
        let config = Config { size: Size::Large(large), ..Config::small(seed, faults) };
        let [one, two] = [(); 2].map(|()| run(config));
        assert_eq!(one, two);
        assert!(one.happenings >= large.events && one.programs >= large.drivers, "{one:?}");
    }
}

/// Large clusters: what `cargo xtask simulate` runs.
#[test]
#[ignore = "takes minutes; cargo xtask simulate runs it"]
fn large() {
    let first = number("WINGBEAT_SEED").unwrap_or(1);
    let (nodes, events) = (number("WINGBEAT_NODES").unwrap_or(100), number("WINGBEAT_EVENTS").unwrap_or(100_000));
    let (faults, trace) = (number("WINGBEAT_NO_FAULTS").is_none(), number("WINGBEAT_TRACE").is_some());
    for seed in first..first + number("WINGBEAT_SEEDS").unwrap_or(1) {
        let (large, begun) = (Large::new(seed, nodes, events), Instant::now());
        let report = run(Config { seed, faults, restarts: faults, trace, size: Size::Large(large) });
        println!("seed {seed}, {} nodes, {} drivers: {}", large.nodes, large.drivers, report.shown(begun.elapsed()));
    }
    println!("invariants: ok");
}

/// What a quarter of the seeds is for happens in them, and not all of it in a few.
#[test]
fn tasks_run_at_home_in_many_seeds_and_are_left_behind_in_some() {
    let (mut at_home, mut leftovers, mut given_up) = (0, 0, 0);
    for seed in (0..400).filter(|seed| Config::small(*seed, true).shares_much()) {
        let report = run(Config::small(seed, true));
        at_home += u64::from(report.at_home > 4);
        leftovers += u64::from(report.leftovers > 0);
        given_up += u64::from(report.given_up > 0);
    }
    assert!(at_home > 50 && leftovers > 10 && given_up > 0, "{at_home}, {leftovers}, {given_up}");
}
