//! Values, and streams of them.

use wingbeat::{ObjectRef, get_all_blocking, put};

use crate::work::{Counter, large, makes_refs, waits_for_a_file};
use crate::world::{LARGE, World, exists};

#[wingbeat::remote(max_retries = 0)]
fn sum(bytes: Vec<u8>) -> u64 {
    bytes.iter().map(|byte| u64::from(*byte)).sum()
}

/// Waits for what is inside the refs, which somebody else makes.
#[wingbeat::remote(max_retries = 0)]
fn total(refs: Vec<ObjectRef<u64>>) -> u64 {
    get_all_blocking(&refs).unwrap().iter().sum()
}

#[wingbeat::remote(max_retries = 0)]
fn total_of_large(refs: Vec<ObjectRef<Vec<u8>>>) -> u64 {
    refs.iter().flat_map(|bytes| bytes.get_blocking().unwrap()).map(u64::from).sum()
}

/// Values: large and small, in their own process, in others, and in transit.
pub(crate) fn values(world: &mut World) {
    let far = |bytes: &ObjectRef<Vec<u8>>| sum::options().resource("far", 1.0).remote(bytes.clone());
    let here = put(&vec![3_u8; LARGE]).unwrap();
    world.right(far(&here).get_blocking(), 3 * LARGE as u64);
    let there = large::options().resource("far", 1.0).remote(5);
    world.right(there.get_blocking(), vec![5; LARGE]);
    let nested = total_of_large::options().resource("far", 1.0).remote(vec![here.clone(), there.clone()]);
    world.right(nested.get_blocking(), 8 * LARGE as u64);
    // A value that is not there when somebody else begins to wait for it.
    let (began, go_on) = (world.file("began"), world.file("go on"));
    let late = waits_for_a_file::options().resource("home", 1.0).remote(began.clone(), go_on.clone());
    exists(&began);
    let waiting = total::options().resource("far", 1.0).remote(vec![late.clone(), put(&1).unwrap()]);
    let large_here = large::options().resource("far", 1.0).num_cpus(0.0).remote(1);
    world.right(large_here.get_blocking(), vec![1; LARGE]);
    std::fs::write(go_on, "").unwrap();
    world.right(waiting.get_blocking(), 8);
    world.right(late.get_blocking(), 7);
    if let Ok(made) = makes_refs::options().resource("far", 1.0).remote(20).get_blocking() {
        let forth = total::options().resource("home", 1.0).remote(made.clone());
        world.right(forth.get_blocking(), 190);
        let numbers = get_all_blocking(&made);
        world.right(numbers, (0..20).collect::<Vec<u64>>());
    } else {
        assert!(world.ends_process);
    }
    drop((here, there, large_here));
}

#[wingbeat::remote(max_retries = 0)]
fn yields_refs(count: u64) -> impl Iterator<Item = ObjectRef<u64>> {
    (0..count).map(|number| put(&number).unwrap())
}

/// Streams of tasks and of actors, with refs and without.
pub(crate) fn streams(world: &mut World) {
    const COUNT: u64 = 60;
    let mut refs = yields_refs::options().resource("far", 1.0).stream_ahead(4).remote(COUNT);
    for number in 0..COUNT {
        let item = refs.next_blocking().unwrap_or_else(|| panic!("no item {number}"));
        if !world.right(item.and_then(|item| item.get_blocking()), number) {
            break;
        }
    }
    let counter = Counter::remote();
    let mut numbers = counter.numbers(COUNT);
    for number in 0..COUNT {
        let item = numbers.next_blocking().unwrap_or_else(|| panic!("no item {number}"));
        if !world.right(item, number) {
            return;
        }
    }
    assert!(numbers.next_blocking().is_none());
}
