//! What is drained, and what should retire.

use std::path::PathBuf;
use std::time::Duration;

use wingbeat::{ObjectRef, block_on, get_all_blocking};

use crate::work::{Counter, CounterHandle, double, makes_refs};
use crate::world::{World, command, exists, wait_for};

type RefsOrActors = (Vec<ObjectRef<u64>>, Vec<CounterHandle>);

/// Refs of this process, or an actor of it.
#[wingbeat::remote(max_retries = 0)]
fn makes_when(began: PathBuf, go_on: PathBuf, refs: bool) -> RefsOrActors {
    std::fs::write(began, "").unwrap();
    exists(&go_on);
    match refs {
        true => (makes_refs(3), Vec::new()),
        false => (Vec::new(), vec![Counter::options().num_cpus(0.0).remote()]),
    }
}

#[wingbeat::remote]
fn goes_on_when(began: PathBuf, go_on: PathBuf) -> u64 {
    std::fs::write(began, "").unwrap();
    exists(&go_on);
    3
}

/// Ends while what it has submitted runs, in its own process.
#[wingbeat::remote]
fn leaves_one_behind(began: PathBuf, go_on: PathBuf) -> ObjectRef<u64> {
    let left = goes_on_when::remote(began.clone(), go_on);
    while !began.exists() {
        let _ = left.get_timeout_blocking(Duration::from_millis(20));
    }
    left
}

/// A node that is drained, and takes work again; one that is drained and ends; and what owns something when it should retire.
pub(crate) fn drain(world: &mut World) {
    let node = world.cluster.add_node(&["--num-cpus", "1", "--resource", "drained=1"]).unwrap();
    let id = world.cluster.node_numbers().unwrap()[node].clone();
    let actor = Counter::options().resource("drained", 0.1).max_restarts(0).remote();
    world.right(actor.add().get_blocking(), 1);
    let session = world.session();
    let node_id: wingbeat::NodeId = id.parse().unwrap();
    block_on(session.drain_node(node_id, Duration::from_secs(600), "to see what follows")).unwrap();
    let waiting = double::options().resource("drained", 0.1).remote(2);
    block_on(session.end_drain(node_id)).unwrap();
    world.right(waiting.get_blocking(), 4);
    command(world, &["drain", &id, "--within", "0s", "--reason", "to be rid of it", "--stop"]);
    assert!(world.cluster.wait_for_node_end(node).unwrap(), "it did not end in order");
    // There are more processes than CPUs: those that own values leave them, and those that have made an actor stay.
    let go_on = world.file("go on");
    let owners: Vec<_> = (0..6)
        .map(|number| {
            let began = world.file(&format!("began {number}"));
            let options = makes_when::options().num_cpus(0.1).resource("home", 1.0);
            let owner = options.remote(began.clone(), go_on.clone(), number % 2 == 0);
            exists(&began);
            owner
        })
        .collect();
    std::fs::write(&go_on, "").unwrap();
    let made: Vec<_> = owners.iter().filter_map(|owner| owner.get_blocking().ok()).collect();
    assert!(made.len() == 6 || world.ends_process);
    wait_for("no process is asked whether it can end", || {
        let kinds = ["NodeMessage::Stays", "WorkerCommand::Exit", "Work::MayLeave"];
        kinds.into_iter().all(|kind| world.has_come(kind))
    });
    leaves_something_behind(world);
    for (refs, actors) in made {
        world.right(get_all_blocking(&refs), (0..refs.len() as u64).collect::<Vec<_>>());
        for actor in actors {
            world.right(actor.add().get_blocking(), 1);
        }
    }
}

fn leaves_something_behind(world: &mut World) {
    let [began, go_on] = ["left one behind", "what is left goes on"].map(|name| world.file(name));
    let left = leaves_one_behind::remote(began, go_on.clone()).get_blocking();
    std::fs::write(&go_on, "").unwrap();
    if let Ok(left) = left {
        world.right(left.get_blocking(), 3);
    }
}
