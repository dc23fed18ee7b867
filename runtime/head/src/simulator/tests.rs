use super::*;

fn config(seed: u64, nodes: usize, events: u64) -> Config {
    Config { seed, nodes, events, faults: true, thorough: true, trace: false }
}

#[test]
fn many_small_clusters_with_faults() {
    for seed in 0..60 {
        run(config(seed, 6, 1_500)).unwrap_or_else(|failure| panic!("{failure}"));
    }
}

#[test]
fn a_larger_cluster_with_faults() {
    let config = Config { thorough: false, ..config(1, 200, 20_000) };
    let report = run(config).unwrap_or_else(|failure| panic!("{failure}"));
    assert!(report.tasks > 1_000 && report.groups > 20 && report.actors > 20 && report.nodes_lost > 0, "{report:?}");
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let [one, two] = [(); 2].map(|()| run(config(7, 5, 800)).unwrap_or_else(|failure| panic!("{failure}")));
    assert_eq!(
        (one.events, one.decisions, one.tasks, one.actors, one.groups),
        (two.events, two.decisions, two.tasks, two.actors, two.groups)
    );
}
