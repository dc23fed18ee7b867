use super::world::World;
use super::{Config, Report};

/// Says which seed fails.
struct Seed(Config);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let Config { seed, faults, .. } = self.0;
            let faults = if faults { "WINGBEAT_FAULTS=1 " } else { "" };
            eprintln!(
                "seed {seed} fails; see it with\n  {faults}WINGBEAT_SEED={seed} cargo test -p wingbeat-process --lib simulator::tests::one_seed"
            );
        }
    }
}

fn run(config: Config) -> Report {
    let _seed = Seed(config);
    World::new(config).run()
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// How many seeds are tried: more for a longer search.
fn seeds() -> std::ops::Range<u64> {
    let first = number("WINGBEAT_FIRST_SEED").unwrap_or(0);
    first..first + number("WINGBEAT_SEEDS").unwrap_or(5_000)
}

#[test]
fn many_seeds_without_faults() {
    for seed in seeds() {
        let report = run(Config { seed, faults: false, trace: false });
        assert_eq!((report.cuts, report.deaths), (0, 0));
    }
}

#[test]
fn many_seeds_with_faults() {
    for seed in seeds() {
        run(Config { seed, faults: true, trace: false });
    }
}

#[test]
fn the_same_seed_gives_the_same_run() {
    for (seed, faults) in (0..seeds().count() as u64 / 10).map(|seed| (seed, seed % 3 > 0)) {
        let [one, two] = [(); 2].map(|()| run(Config { seed, faults, trace: false }));
        assert_eq!(one, two);
    }
}

/// The seed in `WINGBEAT_SEED`, with all that happens on stderr.
#[test]
fn one_seed() {
    let Some(seed) = number("WINGBEAT_SEED") else { return };
    let report = run(Config { seed, faults: number("WINGBEAT_FAULTS").is_some(), trace: true });
    eprintln!("{report:?}");
}
