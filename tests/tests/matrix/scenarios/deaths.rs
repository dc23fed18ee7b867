//! Processes and nodes that end, and what they owned.

use std::path::PathBuf;
use std::time::Duration;

use rustix::process::{Pid, Signal, getpid, kill_process};
use wingbeat::{Error, block_on};
use wingbeat_net::messages::ENDED_UNREPORTED;

use crate::common::Local;
use crate::work::{Counter, double, large, reads, reads_when};
use crate::world::{LARGE, LIMIT, World, exists, is_stopped, tells_of_an_end, wait_for, wait_for_text};

#[wingbeat::remote(max_retries = 0)]
fn dies() -> u64 {
    let _ = kill_process(getpid(), Signal::KILL);
    0
}

/// Processes and nodes that die, and what can never be had.
pub(crate) fn deaths(world: &mut World) {
    let dead = dies::remote().get_blocking().unwrap_err();
    assert!(matches!(dead, Error::WorkerCrashed { .. }), "{dead:?}");
    let never = double::options().resource("nowhere", 1.0).remote(1).get_blocking().unwrap_err();
    assert!(never.to_string().contains("nowhere"), "{never}");
    // A value whose only copy is lost with its node is made again for whoever reads it, and a value that was put is not.
    let node = world.cluster.add_node(&["--num-cpus", "1", "--resource", "lost=1"]).unwrap();
    let made = large::options().resource("lost", 0.1).max_retries(5).remote(1);
    let (ready, _) = wingbeat::wait_blocking(vec![made], 1, None).unwrap();
    let reader = Counter::options().resource("lost", 0.1).max_restarts(1).remote();
    world.right(reader.add().get_blocking(), 1);
    world.cluster.kill_node(node).unwrap();
    world.cluster.add_node(&["--num-cpus", "1", "--resource", "lost=1"]).unwrap();
    let read = reads::options().resource("far", 1.0).max_retries(3).remote(ready);
    world.right(read.get_blocking(), format!("{LARGE} bytes"));
    let again = loop {
        match reader.add().get_blocking() {
            Ok(count) => break count,
            Err(Error::ActorUnavailable { .. }) => {}
            Err(error) if world.ends_process && tells_of_an_end(&error) => break 1,
            Err(error) => panic!("{error:?}"),
        }
    };
    assert_eq!(again, 1, "a new life counts from the beginning");
}

/// So many worker processes end before they are one: more than are started ahead of need.
const NEVER: usize = 4;

/// A file, with a number after it: the worker process that can remove it ends before it is one.
const NEVER_BEGINS: &str = "WINGBEAT_MATRIX_NEVER_BEGINS";

/// Before worker processes begin.
#[used]
#[unsafe(link_section = ".init_array.00050")]
static BEFORE: extern "C" fn() = end_if_asked;

extern "C" fn end_if_asked() {
    let is_worker = std::env::var("WINGBEAT_CHILD").is_ok_and(|kind| kind.starts_with("worker"));
    let ends = |file: String| (0..NEVER).any(|number| std::fs::remove_file(format!("{file}{number}")).is_ok());
    if is_worker && std::env::var(NEVER_BEGINS).is_ok_and(ends) {
        std::process::abort();
    }
}

/// Worker processes that end before they are one.
pub(crate) fn unstarted(world: &mut World) {
    let file = world.file("never begins");
    for number in 0..NEVER {
        std::fs::write(format!("{}{number}", file.display()), "").unwrap();
    }
    let token = world.cluster.token().unwrap();
    let init = wingbeat::init_at(world.cluster.address()).token(&token).env(NEVER_BEGINS, file.to_str().unwrap());
    let driver = Local::from(init);
    let fails = |error: &Error| matches!(error, Error::Failed { what, .. } if what == ENDED_UNREPORTED);
    for round in 0.. {
        let tasks: Vec<_> = (0..4).map(double::remote).collect();
        let done = (0..).zip(tasks).filter(|(number, task)| match task.get_blocking() {
            Ok(got) => got == 2 * number,
            Err(error) if fails(&error) => false,
            Err(error) => panic!("{error:?}"),
        });
        if done.count() == 4 {
            break;
        }
        assert!(round < NEVER, "all processes begin by now");
    }
    drop(driver);
}

/// A copy that a reader cannot have, of which its owner has not heard: the owner makes the value again.
pub(crate) fn lost(world: &mut World) {
    world.cluster.add_node(&["--num-cpus", "1", "--resource", "reads=1"]).unwrap();
    let lost = ["--num-cpus", "1", "--resource", "lost=1"];
    let mut node = world.cluster.add_node(&lost).unwrap();
    for round in 0..10 {
        let made = large::options().resource("lost", 0.1).max_retries(5).remote(1);
        let (ready, _) = wingbeat::wait_blocking(vec![made], 1, None).unwrap();
        let (began, go_on) = (world.file(&format!("began {round}")), world.file(&format!("go on {round}")));
        let reading = reads_when::options().resource("reads", 1.0).max_retries(3);
        let reading = reading.remote(ready, began.clone(), go_on.clone());
        exists(&began);
        // For a moment nobody hears of the node's end from the head.
        let head = Pid::from_raw(world.cluster.head_pid().unwrap() as i32).unwrap();
        kill_process(head, Signal::STOP).unwrap();
        world.cluster.kill_node(node).unwrap();
        std::fs::write(&go_on, "").unwrap();
        std::thread::sleep(Duration::from_millis(200));
        kill_process(head, Signal::CONT).unwrap();
        node = world.cluster.add_node(&lost).unwrap();
        world.right(reading.get_blocking(), format!("{LARGE} bytes"));
        if world.has_come("PeerMessage::Lost") {
            break;
        }
    }
}

#[wingbeat::remote(max_retries = 0)]
fn stands_still(began: PathBuf) {
    std::fs::write(began, std::process::id().to_string()).unwrap();
    let _ = kill_process(getpid(), Signal::STOP);
    loop {
        std::thread::park();
    }
}

/// A worker process that stands still after its connection has ended: nobody knows what runs there, and so it ends.
pub(crate) fn abandoned(world: &mut World) {
    let began = world.file("began");
    let still = stands_still::options().resource("far", 1.0).remote(began.clone());
    exists(&began);
    let pid: i32 = wait_for_text(&began).parse().unwrap();
    wait_for("it does not stand still", || is_stopped(pid));
    still.cancel();
    let error = still.get_blocking().unwrap_err();
    assert!(matches!(error, Error::ContactLost { .. } | Error::Cancelled { .. }) || world.ends_process, "{error:?}");
    assert!(wingbeat_tests::wait_for_end(pid as u32, LIMIT), "it is still there");
    world.right(double::options().resource("far", 1.0).remote(1).get_blocking(), 2);
}

/// Takes memory until it is ended.
#[wingbeat::remote(max_retries = 0, max_memory_retries = 0)]
fn eats_all() -> u64 {
    let mut eaten = Vec::new();
    loop {
        if eaten.len() < 256 {
            eaten.push(vec![1u8; 8 << 20]);
        }
        std::thread::yield_now();
    }
}

/// A node that is short of memory, and says so until it is not.
pub(crate) fn short(world: &mut World) {
    let limit = (192 << 20).to_string();
    let small = [("WINGBEAT_MEMORY_LIMIT", limit.as_str()), ("WINGBEAT_MEMORY_CHECK_MS", "40")];
    world.cluster.add_node_with(&["--num-cpus", "1", "--resource", "small=1"], &small).unwrap();
    let error = eats_all::options().resource("small", 1.0).remote().get_blocking().unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { .. }), "{error:?}");
    let session = world.session();
    wait_for("the node is short of memory for ever", || {
        let state = block_on(session.runtime().cluster_state()).unwrap();
        state.nodes.iter().all(|node| node.memory_short.is_none())
    });
}

/// What a process owned and stored is shown, and kept when it has ended as long as others hold it, and goes then.
pub(crate) fn owners(world: &mut World) {
    /// No two of this fit.
    const MOST: usize = 40 << 20;
    let small = ["--num-cpus", "1", "--resource", "small=1", "--object-store-memory", "64MiB", "--spill-limit", "0"];
    world.cluster.add_node(&small).unwrap();
    let owner = Counter::options().resource("small", 0.1).remote();
    let owned = match owner.puts(MOST).get_blocking() {
        Ok(owned) => owned,
        Err(error) => return assert!(world.ends_process && tells_of_an_end(&error), "{error:?}"),
    };
    let (ready, _) = wingbeat::wait_blocking(owned, 1, None).unwrap();
    // A copy on another node than the owner's.
    let copied = ready.iter().map(|owned| owned.get_blocking()).collect::<Vec<_>>();
    owner.actor().kill();
    for kind in ["HeadMessage::StoreUsed", "HeadMessage::Owners", "NodeMessage::OwnersGone", "ProcessRequest::Keeps"] {
        wait_for("nobody says what is stored, or asks who has ended", || {
            copied.iter().any(Result::is_err) || world.has_come(kind)
        });
    }
    drop((ready, copied));
    let room = || {
        let next = Counter::options().resource("small", 0.1).remote();
        match next.puts(MOST).get_blocking() {
            Ok(_) => true,
            Err(Error::Panicked { message, .. }) if message.contains("StoreFull") => false,
            Err(error) if world.ends_process && tells_of_an_end(&error) => false,
            Err(error) => panic!("{error:?}"),
        }
    };
    wait_for("the store stays full", room);
}
