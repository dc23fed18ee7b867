//! A driver that submits faster than its cluster works.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use common::{Local, runs_again_with};
use wingbeat::{ObjectRef, get_all_blocking};

#[wingbeat::remote]
fn takes_a_moment(number: u64) -> u64 {
    std::thread::sleep(std::time::Duration::from_millis(2));
    number
}

#[wingbeat::remote]
fn after(gate: u64, number: u64) -> u64 {
    gate + number
}

#[wingbeat::remote(max_retries = 0)]
fn opens(path: std::path::PathBuf) -> u64 {
    while !path.exists() {
        std::thread::yield_now();
    }
    1
}

struct Doubles;

#[wingbeat::actor]
impl Doubles {
    fn new() -> Doubles {
        Doubles
    }
    fn double(&mut self, number: u64) -> u64 {
        std::thread::sleep(std::time::Duration::from_millis(2));
        number * 2
    }
}

fn left<T>(refs: &[ObjectRef<T>]) -> usize {
    refs.iter().filter(|reference| !reference.is_ready()).count()
}

#[test]
fn a_driver_that_is_faster_than_its_cluster_is_slowed() {
    if runs_again_with("a_driver_that_is_faster_than_its_cluster_is_slowed", &[("WINGBEAT_PENDING", "400")]) {
        return;
    }
    let _local = Local::start(2);
    let mut most = 0;
    let mut refs = Vec::new();
    for number in 0..3_000 {
        refs.push(takes_a_moment::remote(number));
        if number % 100 == 99 {
            most = most.max(left(&refs));
        }
    }
    // It looks every 50 submissions.
    assert!(most <= 450 + 100, "{most} tasks waited");
    assert_eq!(get_all_blocking(&refs).unwrap().into_iter().sum::<u64>(), 3_000 * 2_999 / 2);
    let doubles = Doubles::remote();
    let calls: Vec<_> = (0..1_000).map(|number| doubles.double(number)).collect();
    assert!(left(&calls) <= 450 + 100, "{} calls wait", left(&calls));
    assert_eq!(get_all_blocking(&calls).unwrap().into_iter().sum::<u64>(), 1_000 * 999);
}

#[test]
fn a_driver_that_submits_everything_before_it_opens_the_gate_goes_on() {
    if runs_again_with(
        "a_driver_that_submits_everything_before_it_opens_the_gate_goes_on",
        &[("WINGBEAT_PENDING", "100")],
    ) {
        return;
    }
    let _local = Local::start(2);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("open");
    let gate = opens::remote(path.clone());
    let refs: Vec<_> = (0..150).map(|number| after::remote(&gate, number)).collect();
    assert_eq!(left(&refs), 150);
    std::fs::write(path, "").unwrap();
    assert_eq!(get_all_blocking(&refs).unwrap()[149], 150);
}
