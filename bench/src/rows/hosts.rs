//! Values between hosts that share nothing but a network: namespaces of this machine, joined by virtual cables. Without root and
//! `ip` these rows are left out, and it is said.

use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use wingbeat::{ObjectRef, get_all, wait};
use wingbeat_tests::hosts::{HostProcess, Hosts};

use super::Figures;
use super::cluster::{is_read_on, made};
use crate::limits::{OTHER, limit_tcp_hosts};
use crate::report::{Figure, Must};

const REPEAT: usize = 4;

/// As many hosts. None where they cannot be made.
fn hosts(count: usize) -> Result<Option<Hosts>> {
    let hosts = Hosts::new(count)?;
    if hosts.is_none() {
        eprintln!("   left out: rows between hosts need root and `ip`");
    }
    Ok(hosts)
}

/// A head on the first host, and a node on each other; the one on host `n` has the resource `node-n`.
fn cluster(hosts: &Hosts, memory: &str) -> Result<(String, Vec<HostProcess>)> {
    let (head, daemon) = hosts.head()?;
    let mut daemons = vec![daemon];
    for host in 1..hosts.names.len() {
        let resource = format!("node-{host}=1");
        daemons.push(hosts.node(host, &head, &["--resource", &resource, "--object-store-memory", memory])?);
    }
    Ok((head, daemons))
}

/// What this program printed as a driver on a host.
fn driven(hosts: &Hosts, host: usize, head: &str, what: &str) -> Result<Vec<Vec<f64>>> {
    let mut command: Command = hosts.on(host, &std::env::current_exe()?);
    hosts.join(command.env(OTHER, what), head);
    let output = command.stderr(Stdio::inherit()).output()?;
    ensure!(output.status.success(), "the driver failed");
    let text = String::from_utf8(output.stdout)?;
    let line = text.lines().last().context("the driver printed nothing")?;
    serde_json::from_str(line).context("what the driver printed")
}

fn in_session(row: impl AsyncFnOnce() -> Result<Vec<Vec<f64>>>) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let seconds = runtime.block_on(async {
        let session = wingbeat::init().await?;
        let seconds = row().await;
        session.shutdown().await;
        seconds
    })?;
    println!("{}", serde_json::to_string(&seconds)?);
    Ok(())
}

async fn made_on(node: usize, count: usize, bytes: u64, byte: u8) -> Result<Vec<ObjectRef<Vec<u8>>>> {
    let resource = format!("node-{node}");
    let objects: Vec<_> = (0..count).map(|_| made::options().resource(&resource, 0.01).remote(bytes, byte)).collect();
    wait(objects.clone(), count, None).await?;
    Ok(objects)
}

/// The sum of their lengths, and of their last bytes, read where they lie.
#[wingbeat::remote]
async fn ends_of(objects: Vec<ObjectRef<Vec<u8>>>) -> Result<(u64, u64), wingbeat::Error> {
    let views = futures::future::try_join_all(objects.iter().map(ObjectRef::view)).await?;
    let lengths = views.iter().map(|view| view.len() as u64).sum();
    Ok((lengths, views.iter().map(|view| u64::from(view[view.len() - 1])).sum()))
}

const LARGE: u64 = 1 << 30;
const PIECES: usize = 100;
const PIECE: u64 = 1 << 20;
const WIDE: usize = 10_000;
const WIDE_BYTES: u64 = 100_000;

/// What the driver on the second host does.
pub(super) fn between_hosts() -> Result<()> {
    in_session(async || {
        let mut large = Vec::new();
        for byte in 1..=REPEAT as u8 {
            let object = made_on(2, 1, LARGE, byte).await?.remove(0);
            let begun = Instant::now();
            ensure!(is_read_on(1, &object).get().await? == (LARGE, byte));
            large.push(begun.elapsed().as_secs_f64());
        }
        let mut pieces = Vec::new();
        for byte in 1..=REPEAT as u8 {
            let objects = made_on(2, PIECES, PIECE, byte).await?;
            let task = ends_of::options().num_cpus(1.0).resource("node-1", 0.01);
            let begun = Instant::now();
            let ends = task.remote(objects).get().await?;
            pieces.push(begun.elapsed().as_secs_f64());
            ensure!(ends == (PIECES as u64 * PIECE, PIECES as u64 * u64::from(byte)));
        }
        let mut wide = Vec::new();
        for byte in 1..=REPEAT as u8 {
            let objects = made_on(2, WIDE, WIDE_BYTES, byte).await?;
            let begun = Instant::now();
            let got = get_all(&objects).await?;
            wide.push(begun.elapsed().as_secs_f64());
            ensure!(got.len() == WIDE && got.iter().all(|bytes| *bytes == vec![byte; WIDE_BYTES as usize]));
        }
        Ok(vec![large, pieces.split_off(1), wide.split_off(1)])
    })
}

/// 1 GiB at once, many values of 1 MiB at once, and 10,000 of 100 KB that the driver gets.
pub(super) fn node_to_node_tcp() -> Figures {
    let Some(hosts) = hosts(3)? else { return Ok(Vec::new()) };
    let limit = limit_tcp_hosts(&hosts, [2, 1])?;
    let (head, _daemons) = cluster(&hosts, "3GiB")?;
    let measured: [Vec<f64>; 3] =
        driven(&hosts, 1, &head, "between_hosts")?.try_into().ok().context("the driver printed something else")?;
    let [large, pieces, wide] = measured;
    let figure =
        |row, bytes, seconds: &[f64], part| Figure::bandwidth(row, bytes, seconds, Must::Of("limit_tcp_hosts", part));
    Ok(vec![
        limit,
        figure("node_to_node_tcp_first", LARGE, &large[..1], 0.6),
        figure("node_to_node_tcp", LARGE, &large[1..], 0.9),
        figure("node_to_node_tcp_100x1MiB", PIECES as u64 * PIECE, &pieces, 0.8),
        figure("wide_get", WIDE as u64 * WIDE_BYTES, &wide, 0.6),
    ])
}

const BROADCAST: u64 = 256 << 20;
const READERS: usize = 8;

/// What the driver does whose value eight hosts read.
pub(super) fn to_eight_hosts() -> Result<()> {
    in_session(async || {
        let (mut one, mut all) = (Vec::new(), Vec::new());
        // Once until the memory of every store is there.
        for round in 0..=REPEAT as u8 {
            let object = made_on(1, 1, BROADCAST, 2 * round).await?.remove(0);
            let begun = Instant::now();
            ensure!(is_read_on(2, &object).get().await? == (BROADCAST, 2 * round));
            one.push(begun.elapsed().as_secs_f64());
            drop(object);
            let object = made_on(1, 1, BROADCAST, 2 * round + 1).await?.remove(0);
            let begun = Instant::now();
            let reads: Vec<_> = (2..2 + READERS).map(|node| is_read_on(node, &object)).collect();
            let read = get_all(&reads).await?;
            all.push(begun.elapsed().as_secs_f64());
            ensure!(read == vec![(BROADCAST, 2 * round + 1); READERS]);
        }
        Ok(vec![one.split_off(1), all.split_off(1)])
    })
}

/// 256 MiB to eight hosts, in times of what one of them takes.
pub(super) fn broadcast_8() -> Figures {
    let Some(hosts) = hosts(2 + READERS)? else { return Ok(Vec::new()) };
    let (head, _daemons) = cluster(&hosts, "768MiB")?;
    let measured = driven(&hosts, 1, &head, "to_eight_hosts")?;
    let [one, all] = measured.as_slice() else { anyhow::bail!("the driver printed something else") };
    let times = all.iter().zip(one).map(|(all, one)| all / one).collect();
    Ok(vec![
        Figure::of("broadcast_8", "× one transfer", true, times, Must::Reach(2.5)),
        Figure::of("broadcast_8_one", "s", true, one.clone(), Must::Nothing),
    ])
}
