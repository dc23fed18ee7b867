//! The matrix of faults: every kind of message, lost, its answer lost, repeated, late, and with the connection cut after it, between
//! real processes. Nothing may hang, be lost, be done twice or be held for nobody.
//!
//! `wingbeat_net::faults` does the faults, and says what each is. A kind that is not listed there does not compile; here each needs a
//! program that sends it for certain. The tests run one cell of each row; `cargo xtask matrix` runs all cells, and prints the table.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "matrix/cells.rs"]
mod cells;
mod common;
#[path = "matrix/scenarios/mod.rs"]
mod scenarios;
#[path = "matrix/work.rs"]
mod work;
#[path = "matrix/world.rs"]
mod world;

use cells::{Cell, FAULTS, ends_process};
use world::World;

/// The test that is the driver of a cell.
const DRIVER: &str = "driver";

/// A program, and the kinds of messages for which it stands: it sends each of them for certain.
struct Program {
    name: &'static str,
    run: fn(&mut World),
    sends: &'static [&'static str],
}

#[rustfmt::skip]
const ROWS: &[Program] = &[
    Program {
        name: "tasks",
        run: scenarios::tasks,
        sends: &[
            "HeadMessage::Demand",
            "HeadMessage::ReturnLease",
            "HeadMessage::Waiting",
            "HeadMessage::Resumed",
            "HeadMessage::LeaseReady",
            "HeadMessage::LeaseEnded",
            "HeadEvent::Granted",
            "HeadEvent::Starting",
            "HeadEvent::Recall",
            "HeadEvent::Nodes",
            "NodeMessage::BeginJob",
            "NodeMessage::StartLease",
            "NodeMessage::EndLease",
            "NodeMessage::Prestart",
            "WorkerCommand::Lease",
            "Work::Tasks",
            "Work::TakeBack",
            "Work::Cancel",
            "PeerMessage::Results",
            "PeerMessage::GaveBack",
            "PeerMessage::Ready",
            "PeerMessage::CancelObject",
            "HeadRequest::JoinNode",
            "HeadRequest::JoinJob",
            "HeadRequest::KnowsNode",
            "HeadRequest::State",
            "NodeRequest::RegisterWorker",
        ],
    },
    Program {
        name: "actors",
        run: scenarios::actors,
        sends: &[
            "HeadMessage::WatchActor",
            "HeadMessage::KillActor",
            "HeadMessage::TerminateActor",
            "HeadMessage::LifeOver",
            "HeadMessage::ActorStarted",
            "HeadEvent::Actor",
            "HeadMessage::SaidAgain",
            "HeadEvent::SayAgain",
            "HeadEvent::Deadlock",
            "NodeMessage::DrainActor",
            "NodeMessage::ActorStarted",
            "WorkerCommand::StartActor",
            "WorkerCommand::Drain",
            "Work::Calls",
            "HeadRequest::CreateActor",
            "HeadRequest::FindActor",
            "HeadRequest::HasEnded",
        ],
    },
    Program {
        name: "streams",
        run: scenarios::streams,
        sends: &[
            "Work::StreamTaken",
            "Work::ItemReceived",
            "PeerMessage::StreamItem",
        ],
    },
    Program {
        name: "values",
        run: scenarios::values,
        sends: &[
            "NodeMessage::Unpin",
            "NodeMessage::Delete",
            "Work::Received",
            "PeerMessage::Subscribe",
            "PeerMessage::Resolved",
            "PeerMessage::Borrow",
            "PeerMessage::Release",
            "PeerMessage::Copied",
            "NodeRequest::Create",
            "NodeRequest::Seal",
            "NodeRequest::Fetch",
        ],
    },
    Program {
        name: "groups",
        run: scenarios::groups,
        sends: &[
            "HeadMessage::WatchPlacementGroup",
            "HeadEvent::Refused",
            "HeadEvent::WorkerDied",
            "HeadEvent::PlacementGroup",
            "HeadRequest::CreatePlacementGroup",
            "HeadRequest::RemovePlacementGroup",
            "HeadRequest::FindPlacementGroup",
        ],
    },
    Program {
        name: "deaths",
        run: scenarios::deaths,
        sends: &[
            "HeadMessage::WorkerDied",
            "HeadEvent::NodeDied",
            "NodeMessage::NodeDied",
        ],
    },
    Program {
        name: "unstarted",
        run: scenarios::unstarted,
        sends: &[
            "HeadMessage::LeaseFailed",
        ],
    },
    Program {
        name: "restart",
        run: scenarios::restart,
        sends: &[
            "HeadMessage::Holds",
            "HeadMessage::Made",
            "HeadRequest::Resume",
        ],
    },
    Program {
        name: "drain",
        run: scenarios::drain,
        sends: &[
            "HeadMessage::NodeEnds",
            "NodeMessage::Stop",
            "NodeMessage::Stays",
            "NodeMessage::LeftBehind",
            "WorkerCommand::Exit",
            "Work::MayLeave",
            "HeadRequest::DrainNode",
        ],
    },
    Program {
        name: "tools",
        run: scenarios::tools,
        sends: &[
            "HeadMessage::Leaves",
            "HeadEvent::Stops",
            "NodeMessage::EndJob",
            "HeadRequest::SetQuota",
            "HeadRequest::Explain",
            "HeadRequest::SettleOutput",
            "HeadRequest::Stop",
            "NodeRequest::SettleOutput",
            "ProcessRequest::Logs",
            "ProcessRequest::ExplainTask",
            "HeadRequest::Stacks",
            "NodeRequest::Stacks",
            "ProcessRequest::Stacks",
            "HeadRequest::ProcessesOfJob",
            "NodeRequest::ProcessAbove",
        ],
    },
    Program {
        name: "standby",
        run: scenarios::standby,
        sends: &[
            "HeadRequest::Follow",
            "HeadEvent::Standby",
            "NodeRequest::Support",
            "NodeRequest::Elect",
            "WorkerCommand::Heads",
            "StandbyRequest::MayLead",
        ],
    },
    Program {
        name: "without_journal",
        run: scenarios::without_journal,
        sends: &[
            "NodeMessage::Keep",
            "NodeRequest::ReadKept",
            "WorkerCommand::Patience",
        ],
    },
    Program {
        name: "short",
        run: scenarios::short,
        sends: &["HeadMessage::MemoryShort"],
    },
    Program {
        name: "owners",
        run: scenarios::owners,
        sends: &[
            "HeadMessage::Owners",
            "HeadMessage::StoreUsed",
            "NodeMessage::OwnersGone",
        ],
    },
    Program {
        name: "lost",
        run: scenarios::lost,
        sends: &[
            "PeerMessage::Lost",
        ],
    },
    Program {
        name: "abandoned",
        run: scenarios::abandoned,
        sends: &[
            "HeadMessage::AbandonLease",
        ],
    },
    Program {
        name: "detached",
        run: scenarios::detached,
        sends: &[
            "HeadRequest::ReadProgram",
            "ProcessRequest::ReadExecutable",
        ],
    },
    Program {
        name: "owners",
        run: scenarios::owners,
        sends: &[
            "PeerMessage::Shadows",
            "ProcessRequest::Keeps",
        ],
    },
];

/// Kinds that no program here sends, so that no fault happens to them, and the test in which they are sent.
const ELSEWHERE: &[(&str, &str)] = &[
    // Needs a device that something holds which has thrown its parents away.
    ("HeadMessage::DevicesHeld", "simulator"),
    // Needs a head that cannot be reached by a worker process, and can by its node.
    (
        "NodeMessage::LostHead",
        "contact: a_task_whose_process_the_head_has_given_up_is_tried_again_though_user_code_has_failed",
    ),
];

fn rows() -> impl Iterator<Item = (&'static Program, &'static str)> {
    ROWS.iter().flat_map(|program| program.sends.iter().map(move |kind| (program, *kind)))
}

#[test]
fn every_kind_of_message_has_a_row() {
    let mut in_rows: Vec<_> = rows().map(|(_, kind)| kind).chain(ELSEWHERE.iter().map(|(kind, _)| *kind)).collect();
    let mut all = wingbeat_net::faults::all();
    in_rows.sort_unstable();
    all.sort_unstable();
    assert_eq!(in_rows, all);
}

/// One cell of each row, each with the next fault. Those of a program that end no worker process happen in the same run.
#[test]
fn a_fault_at_every_kind_of_message_loses_nothing_and_repeats_nothing() {
    let mut cells: Vec<Cell> = Vec::new();
    for (number, (program, kind)) in rows().enumerate() {
        let fault = FAULTS[number % FAULTS.len()];
        // `Made` goes in one batch with `Holds`, and one fault happens to a batch.
        let alone = ends_process(fault, kind) || kind == "HeadMessage::Made";
        // The end of one of a program's drivers leaves nothing to be said over the same connection.
        let together =
            |cell: &&mut Cell| cell.program == program.name && cell.program != "tools" && !cell.ends_process();
        match cells.iter_mut().rev().find(together).filter(|_| !alone) {
            Some(cell) => cell.faults.push((fault, kind)),
            None => cells.push(Cell { program: program.name, faults: vec![(fault, kind)], at: 1 }),
        }
    }
    let failed: Vec<String> = cells::run_all(&cells, 3, "1000").into_iter().filter_map(Result::err).collect();
    assert!(failed.is_empty(), "{}", failed.join("\n\n"));
}

/// All cells, or those that `WINGBEAT_MATRIX` names: part of a kind, and perhaps a fault after it.
#[test]
#[ignore = "takes minutes: cargo xtask matrix"]
fn every_cell() {
    let asked = std::env::var("WINGBEAT_MATRIX").unwrap_or_default();
    let (kind_asked, fault_asked) = asked.split_once(' ').unwrap_or((&asked, ""));
    let jobs = std::env::var("WINGBEAT_MATRIX_JOBS").ok().and_then(|jobs| jobs.parse().ok()).unwrap_or(4);
    let at = std::env::var("WINGBEAT_MATRIX_AT").ok().and_then(|at| at.parse().ok()).unwrap_or(1);
    let mut cells = Vec::new();
    for (program, kind) in rows().filter(|(_, kind)| kind.contains(kind_asked)) {
        for fault in FAULTS.into_iter().filter(|fault| fault_asked.is_empty() || fault.name() == fault_asked) {
            cells.push(Cell { program: program.name, faults: vec![(fault, kind)], at });
        }
    }
    let results = cells::run_all(&cells, jobs, "5000");
    println!("{}", cells::table(&cells, &results));
    let failed: Vec<String> = results.into_iter().filter_map(Result::err).collect();
    assert!(failed.is_empty(), "{} of {} cells failed:\n\n{}", failed.len(), cells.len(), failed.join("\n\n"));
    println!("matrix: {} cells, ok", cells.len());
}

/// The driver of a cell, when the test starts itself again.
#[test]
fn driver() {
    if std::env::var_os(scenarios::COMES_AND_GOES).is_some() {
        return scenarios::comes_and_goes();
    }
    let Ok(name) = std::env::var(cells::PROGRAM) else { return };
    let program = ROWS.iter().find(|program| program.name == name).unwrap();
    let mut world = World::new(std::env::var_os(cells::ENDS_PROCESS).is_some());
    (program.run)(&mut world);
    world.is_clean();
}
