//! `cargo xtask soak`: a mixed load with checks on a cluster of real processes, for as long as it is told. At its end every
//! process must hold what it held after the first tenth.

use std::collections::BTreeMap;
use std::future::IntoFuture;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Parser;
use wingbeat_shapes::usage::{self, Usage};
use wingbeat_shapes::{Chance, Size, Watchdog, cells, run};
use wingbeat_tests::TestCluster;

const NODES: usize = 2;
const CPUS: u32 = 2;

/// So many idle worker processes are kept.
const IDLE: usize = NODES * CPUS as usize;

/// A cell takes a second or two. Only one that hangs takes so long.
const LIMIT: Duration = Duration::from_secs(180);

/// How long idle worker processes, connections and threads may take to go. They retire after some 20 s.
const SETTLE: Duration = Duration::from_secs(90);

/// Allocators keep some of what was freed: so much more, and a quarter, is no leak.
const SLACK: u64 = 8 << 20;

/// A mixed load with checks on a head and two nodes; at its end every process must hold what it held at the start.
#[derive(Parser)]
struct Args {
    /// How long.
    #[arg(long, default_value_t = 10.0)]
    minutes: f64,
    /// Which load: the same seed gives the same operations in the same order.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Only shapes whose description contains this, such as "Busy, 5000".
    #[arg(long, default_value = "")]
    only: String,
}

/// A store opens its spill file when it first spills, and keeps it; a connection may be under way.
const DESCRIPTORS: u64 = 3;

/// What a node has open for one worker process: its output, its guard's word, its process, and the connections with it. How many
/// worker processes are idle at the moment of a look is a matter of chance.
const FOR_A_WORKER: usize = 7;

/// Housekeeping keeps idle threads of the blocking pool alive, as many as once were busy with it at a time.
const THREADS: u64 = 4;

/// What the cluster's processes hold while nothing runs.
#[derive(Debug, PartialEq)]
struct Sample {
    processes: BTreeMap<(&'static str, u32), Usage>,
    worker_processes: usize,
    zombies: usize,
    files: usize,
    objects: usize,
}

impl Sample {
    fn take(cluster: &TestCluster, session: &wingbeat::Session) -> Result<Sample> {
        let roots = cluster.pids();
        let mut processes = BTreeMap::new();
        let daemons = roots.iter().map(|pid| ("daemon", *pid));
        let guards = usage::guards(&roots).into_iter().map(|pid| ("guard", pid));
        let keepers = usage::keepers(&roots).into_iter().map(|pid| ("keeper", pid));
        for (what, pid) in daemons.chain(guards).chain(keepers) {
            let usage = match usage::of(pid) {
                // One that retires while it is looked at goes with its keeper.
                None if what == "keeper" => continue,
                usage => usage,
            };
            let mut usage = usage.with_context(|| format!("{what} {pid} is gone"))?;
            if what == "daemon" {
                let its_own = usage::worker_processes(&[pid]).len() * FOR_A_WORKER;
                usage.descriptors = usage.descriptors.saturating_sub(its_own);
            }
            processes.insert((what, pid), usage);
        }
        let driver = usage::of_this().context("this process is not in /proc")?;
        processes.insert(("driver", std::process::id()), driver);
        Ok(Sample {
            processes,
            worker_processes: usage::worker_processes(&roots).len(),
            zombies: usage::zombies(&roots),
            files: usage::files(cluster.folder()),
            objects: session.runtime().process().live_objects(),
        })
    }

    /// The most that a process of a kind holds: one that began later, such as the keeper of a new worker process, may hold as much.
    fn largest(&self, what: &str) -> Usage {
        let of_kind = self.processes.iter().filter(|((kind, _), _)| *kind == what).map(|(_, usage)| *usage);
        of_kind.fold(Usage::default(), |most, usage| Usage {
            private: most.private.max(usage.private),
            descriptors: most.descriptors.max(usage.descriptors),
            threads: most.threads.max(usage.threads),
        })
    }

    /// What is more here than `before`.
    fn more_than(&self, before: &Sample) -> Vec<String> {
        let mut more = Vec::new();
        let mut compare = |what: String, now: u64, before: u64| {
            if now > before {
                more.push(format!("{what}: {now}, {before} before"));
            }
        };
        for (key @ (what, pid), now) in &self.processes {
            let before = before.processes.get(key).copied().unwrap_or_else(|| before.largest(what));
            let who = format!("{what} {pid}");
            compare(format!("{who}, bytes of memory"), now.private, before.private + before.private / 4 + SLACK);
            compare(format!("{who}, descriptors"), now.descriptors as u64, before.descriptors as u64 + DESCRIPTORS);
            compare(format!("{who}, threads"), now.threads as u64, before.threads as u64 + THREADS);
        }
        let idle = before.worker_processes.max(IDLE);
        compare("worker processes".into(), self.worker_processes as u64, idle as u64);
        compare("zombies".into(), self.zombies as u64, before.zombies as u64);
        compare("files".into(), self.files as u64, before.files as u64);
        compare("objects of the driver".into(), self.objects as u64, before.objects as u64);
        more
    }
}

fn main() -> Result<()> {
    let args = Args::parse();
    let whole = Duration::try_from_secs_f64(args.minutes * 60.0).context("--minutes")?;
    let watchdog = Watchdog::new(LIMIT);
    let mut cluster = TestCluster::start(NODES, CPUS)?;
    let init = wingbeat::init_at(cluster.address()).token(&cluster.token()?).log_to_driver(false);
    let session = wingbeat::block_on(init.into_future())?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let size = Size { all: true, bytes: 8 << 20, payload: 1 << 20 };
    let mut chance = Chance::new(args.seed);
    let begun = Instant::now();
    let mut count = 0u64;
    let mut first: Option<Sample> = None;
    let mut last = String::new();
    'load: loop {
        for cell in cells(size, &mut chance).into_iter().filter(|cell| cell.to_string().contains(&args.only)) {
            if first.is_none() && begun.elapsed() > whole / 10 {
                let before = settled(&cluster, &session, &watchdog)?;
                eprintln!("soak: after {count} cells: {before:#?}");
                first = Some(before);
            }
            if begun.elapsed() > whole {
                break 'load;
            }
            watchdog.feed(cell);
            last = cell.to_string();
            runtime.block_on(run(&session, cell, &cluster.pids()))?;
            count += 1;
            if count.is_multiple_of(200) {
                eprintln!("soak: {:.0?}, {count} cells", begun.elapsed());
            }
        }
    }
    let first = first.context("too short for a first tenth")?;
    watchdog.feed("the end");
    let ended = Instant::now();
    loop {
        let now = Sample::take(&cluster, &session)?;
        let more = now.more_than(&first);
        if more.is_empty() {
            eprintln!("soak: after {count} cells: {now:#?}");
            break;
        }
        if ended.elapsed() > SETTLE {
            let more = more.join("\n");
            bail!(
                "after {count} cells, of which the last was {last}, there is more than after the first tenth:\n{more}"
            );
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    wingbeat::shutdown_blocking();
    cluster.stop()?;
    println!("soak: ok");
    Ok(())
}

/// What is held when nothing has changed for as long as idle things live.
fn settled(cluster: &TestCluster, session: &wingbeat::Session, watchdog: &Watchdog) -> Result<Sample> {
    watchdog.feed("waiting until idle processes are gone");
    let begun = Instant::now();
    loop {
        let sample = Sample::take(cluster, session)?;
        let is_settled = sample.worker_processes <= IDLE && sample.zombies == 0 && begun.elapsed() > SETTLE / 3;
        if is_settled || begun.elapsed() > SETTLE {
            return Ok(sample);
        }
        std::thread::sleep(Duration::from_millis(200));
    }
}
