//! Tasks.

use std::io::Write;
use std::path::PathBuf;

use wingbeat::{Error, ObjectRef};

use crate::work::{double, waits_for_a_file};
use crate::world::{World, exists, once_each};

/// Leaves a line with its number.
#[wingbeat::remote(max_retries = 0)]
fn leaves_a_line(file: PathBuf, number: u64) -> u64 {
    let mut file = std::fs::OpenOptions::new().append(true).create(true).open(file).unwrap();
    file.write_all(format!("{number}\n").as_bytes()).unwrap();
    2 * number
}

/// Has a task of its own done, and waits for it.
#[wingbeat::remote(max_retries = 0)]
fn asks_another(number: u64) -> u64 {
    double::remote(number).get_blocking().unwrap()
}

#[wingbeat::remote(max_retries = 0)]
async fn asleep(began: PathBuf) -> u64 {
    std::fs::write(began, "").unwrap();
    std::future::pending().await
}

#[wingbeat::remote(max_retries = 0)]
fn cancels(refs: Vec<ObjectRef<u64>>) {
    refs.iter().for_each(ObjectRef::cancel);
}

/// Tasks: many short ones, some that wait for others, and some that are cancelled.
pub(crate) fn tasks(world: &mut World) {
    let file = world.file("lines");
    const COUNT: u64 = 60;
    let lines: Vec<_> = (0..COUNT).map(|number| leaves_a_line::remote(file.clone(), number)).collect();
    let asking: Vec<_> = (0..4).map(asks_another::remote).collect();
    let after: Vec<_> = (0..20).map(double::remote).collect();
    let done = (0..).zip(&lines).filter(|(number, line)| world.right(line.get_blocking(), 2 * number)).count();
    once_each(world, &file, COUNT, done as u64);
    for (number, asked) in (0..).zip(asking) {
        world.right(asked.get_blocking(), 2 * number);
    }
    for (number, after) in (0..).zip(after) {
        world.right(after.get_blocking(), 2 * number);
    }
    let spread: Vec<_> = (0..4).map(|number| double::options().spread().remote(number)).collect();
    for (number, spread) in (0..).zip(spread) {
        world.right(spread.get_blocking(), 2 * number);
    }
    // Short tasks are pushed ahead, behind one that is long; another node takes them over.
    for round in 0..20 {
        let (began, go_on) = (world.file(&format!("began {round}")), world.file(&format!("go on {round}")));
        let long = waits_for_a_file::options().max_retries(1).remote(began.clone(), go_on.clone());
        let behind: Vec<_> = (0..100).map(double::remote).collect();
        exists(&began);
        for (number, behind) in (0..).zip(behind) {
            world.right(behind.get_blocking(), 2 * number);
        }
        std::fs::write(&go_on, "").unwrap();
        world.right(long.get_blocking(), 7);
        if world.has_come("Work::TakeBack") {
            break;
        }
    }
    let asleep = [world.file("asleep"), world.file("also asleep")].map(|began| {
        let asleep = asleep::options().num_cpus(0.5).max_retries(1).remote(began.clone());
        exists(&began);
        asleep
    });
    asleep[0].cancel();
    cancels::options().max_retries(1).remote(vec![asleep[1].clone()]).get_blocking().unwrap();
    for asleep in asleep {
        let got = asleep.get_blocking();
        assert!(matches!(got, Err(Error::Cancelled { .. })) || world.ends_process, "{got:?}");
    }
}
