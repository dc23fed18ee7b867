//! What would go wrong between nodes, found before it does: by [`doctor`], and before a run on several machines.
//!
//! A `NodeReport` is what a node knows of itself, `judge` says what is wrong with all of them together, and how to mend it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use wingbeat::{Node, Session, get_all};

use crate::error::TrainError;
use crate::interface;
use crate::progress::RankProgress;
use crate::rank::{Rank, RankHandle};
use crate::shown;

/// How long another node may take to answer.
const REACH_LIMIT: Duration = Duration::from_secs(3);
/// NCCL and DataLoader workers share memory here; with less than this they fail in ways that do not say so.
const LEAST_SHM: u64 = 64 << 20;
/// Clocks that differ by more make logs and first failures hard to put in order.
const CLOCK_SECONDS: f64 = 2.0;

/// What a node knows of itself.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct NodeReport {
    /// Its name.
    pub node: String,
    /// Where others reach it; none if only processes of the same machine do.
    pub ip: Option<IpAddr>,
    /// The network interface that has it.
    pub interface: Option<String>,
    /// Versions of what training needs, by package: `python`, `torch`, `nccl`; what is not installed is not there.
    pub versions: BTreeMap<String, String>,
    /// Why its Python does not run, if so.
    pub python_error: Option<String>,
    /// Bytes that are free in `/dev/shm`.
    pub shm_free: u64,
    /// Seconds that its clock is ahead of the asking one's, as far as the way there lets one know.
    pub clock_ahead: f64,
    /// Where it listens while others try to reach it.
    pub(crate) listens: Option<SocketAddr>,
}

/// Something that is wrong, where, and what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Problem {
    /// Whether a run cannot work with it.
    pub is_fatal: bool,
    /// In a sentence.
    pub text: String,
}

/// What was found out about nodes.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Diagnosis {
    /// Of each node.
    pub nodes: Vec<NodeReport>,
    /// What is wrong.
    pub problems: Vec<Problem>,
}

/// What a node knows of itself, and a socket where others can try to reach it.
pub(crate) fn node_report(python: &str, ip: Option<IpAddr>) -> (NodeReport, Option<TcpListener>) {
    let script = "import json, sys\nfrom importlib import metadata\nfound = {'python': '.'.join(map(str, sys.version_info[:2]))}\nfor name in metadata.distributions():\n    package = (name.metadata['Name'] or '').lower()\n    if package == 'torch':\n        found['torch'] = name.version\n    elif package.startswith('nvidia-nccl'):\n        found['nccl'] = name.version\nprint(json.dumps(found))";
    let told = Command::new(python).args(["-c", script]).output();
    let (versions, python_error) = match told {
        Ok(output) if output.status.success() => match serde_json::from_slice(&output.stdout) {
            Ok(versions) => (versions, None),
            Err(error) => (BTreeMap::new(), Some(error.to_string())),
        },
        Ok(output) => (BTreeMap::new(), Some(String::from_utf8_lossy(&output.stderr).trim().to_owned())),
        Err(error) => (BTreeMap::new(), Some(error.to_string())),
    };
    let listener = ip.and_then(|ip| TcpListener::bind((ip, 0)).ok());
    let shm = rustix::fs::statvfs("/dev/shm").map_or(0, |shm| shm.f_bavail * shm.f_frsize);
    let report = NodeReport {
        node: rustix::system::uname().nodename().to_string_lossy().into_owned(),
        ip,
        interface: ip.and_then(interface::to),
        versions,
        python_error,
        shm_free: shm,
        clock_ahead: now(),
        listens: listener.as_ref().and_then(|listener| listener.local_addr().ok()),
    };
    (report, listener)
}

/// Why others cannot be reached from here; none of those that can.
pub(crate) fn reach(others: &[Option<SocketAddr>]) -> Vec<Option<String>> {
    let tried =
        |other: &SocketAddr| TcpStream::connect_timeout(other, REACH_LIMIT).err().map(|error| error.to_string());
    std::thread::scope(|scope| {
        let tries: Vec<_> =
            others.iter().map(|other| other.as_ref().map(|other| scope.spawn(move || tried(other)))).collect();
        tries.into_iter().map(|one| one.and_then(|one| one.join().unwrap_or(None))).collect()
    })
}

fn now() -> f64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

/// What is wrong with nodes together. `unreached[i][j]`: why node i does not reach node j.
fn judge(nodes: &[NodeReport], unreached: &[Vec<Option<String>>]) -> Vec<Problem> {
    let mut problems = Vec::new();
    let mut find = |is_fatal, text: String| problems.push(Problem { is_fatal, text });
    for report in nodes {
        let node = &report.node;
        if let Some(why) = &report.python_error {
            find(
                true,
                format!(
                    "Python does not run on {node}: {why}; name another (--python, TorchTrainer::python or WINGBEAT_PYTHON)"
                ),
            );
        } else if !report.versions.contains_key("torch") {
            find(false, format!("{node} has no torch; install it there with pip"));
        }
        if report.shm_free < LEAST_SHM {
            let mebibytes = report.shm_free >> 20;
            let fix = "in a container, start it with --shm-size=1g or more";
            find(
                false,
                format!(
                    "/dev/shm of {node} has {mebibytes} MiB free, and NCCL and DataLoader workers need more; {fix}"
                ),
            );
        }
        if report.clock_ahead.abs() > CLOCK_SECONDS {
            find(false, format!("the clock of {node} differs by {:.0} s; run an NTP client there", report.clock_ahead));
        }
    }
    for package in ["python", "torch", "nccl"] {
        let versions: BTreeSet<&String> = nodes.iter().filter_map(|report| report.versions.get(package)).collect();
        if versions.len() > 1 {
            let of: Vec<String> = nodes
                .iter()
                .filter_map(|report| Some(format!("{} on {}", report.versions.get(package)?, report.node)))
                .collect();
            find(
                true,
                format!("nodes differ in the version of {package}: {}; install the same everywhere", of.join(", ")),
            );
        }
    }
    for (from, row) in nodes.iter().zip(unreached) {
        for (to, why) in nodes.iter().zip(row) {
            let Some(why) = why else { continue };
            let ip = to.ip.map(|ip| ip.to_string()).unwrap_or_default();
            let interface = to.interface.as_deref().unwrap_or("an unknown interface");
            let fix =
                "open the ports between the nodes, or start `wingbeat worker` with an address that the others reach";
            find(true, format!("{} does not reach {} at {ip} ({interface}): {why}; {fix}", from.node, to.node));
        }
    }
    problems
}

/// What is wrong with ranks that share devices. `is_nccl`: it carries their tensors, and was not told to allow that.
pub(crate) fn sharing(ranks: &[RankProgress], is_nccl: bool) -> Vec<Problem> {
    let mut of_devices: BTreeMap<(&str, u32), Vec<usize>> = BTreeMap::new();
    for (rank, at) in ranks.iter().enumerate() {
        for gpu in &at.gpus {
            of_devices.entry((&at.node, *gpu)).or_default().push(rank);
        }
    }
    let shared = of_devices.into_iter().filter(|(_, ranks)| ranks.len() > 1);
    shared
        .map(|((node, gpu), ranks)| {
            let who = format!("{} share GPU {gpu} of {node}", shown::ranks(&ranks));
            let text = match is_nccl {
                true => format!(
                    "{who}, which NCCL cannot do; give each rank a whole GPU, use gloo, or set \
                     NCCL_MULTI_RANK_GPU_ENABLE=1 where NCCL has it (2.30)"
                ),
                false => format!("{who}, and LOCAL_RANK is not its number there"),
            };
            Problem { is_fatal: is_nccl, text }
        })
        .collect()
}

/// Asks the actors of some nodes, and has each try to reach each other.
pub(crate) async fn examine(members: &[&RankHandle], python: &str) -> Result<Diagnosis, TrainError> {
    let mut nodes = Vec::new();
    let asked: Vec<_> = members.iter().map(|member| (now(), member.node_report(python.to_owned()))).collect();
    for (sent, asked) in asked {
        let mut report = asked.get().await?;
        // The answer was written between then and now.
        let (earliest, latest) = (sent, now());
        report.clock_ahead = (report.clock_ahead - latest).max(0.0) + (report.clock_ahead - earliest).min(0.0);
        nodes.push(report);
    }
    let listening: Vec<Option<SocketAddr>> = nodes.iter().map(|report| report.listens).collect();
    let tried: Vec<_> = members.iter().map(|member| member.reach(listening.clone())).collect();
    let unreached = get_all(&tried).await?;
    let problems = judge(&nodes, &unreached);
    Ok(Diagnosis { nodes, problems })
}

/// Examines every node of the session's cluster that takes new work: whether each reaches each other, their versions,
/// clocks and shared memory. `python`: the interpreter that training is to use.
///
/// ```no_run
/// # async fn run() -> Result<(), wingbeat_train::TrainError> {
/// wingbeat::init().await?;
/// for problem in wingbeat_train::doctor("python3").await?.problems {
///     println!("{}", problem.text);
/// }
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// The cluster is gone.
pub async fn doctor(python: &str) -> Result<Diagnosis, TrainError> {
    let nodes = Session::current()?.nodes().await?;
    // A driver's own node takes nothing, and has nothing to be examined.
    let (drained, open): (Vec<&Node>, Vec<&Node>) =
        nodes.iter().filter(|node| !node.resources.is_empty()).partition(|node| node.draining.is_some());
    let members: Vec<RankHandle> =
        open.iter().map(|node| Rank::options().num_cpus(0.0).on_node(node.id).remote()).collect();
    let mut found = examine(&members.iter().collect::<Vec<_>>(), python).await?;
    found.problems.extend(drained.into_iter().map(|node| Problem {
        is_fatal: false,
        text: format!("{} ({}) is being drained, and was not looked at", node.hostname, node.id),
    }));
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node_report(node: &str, torch: &str) -> NodeReport {
        let versions = BTreeMap::from([("python".into(), "3.11".into()), ("torch".into(), torch.into())]);
        let ip = Some(IpAddr::from([10, 0, 0, 1]));
        let interface = Some("eth0".into());
        NodeReport { node: node.into(), ip, interface, versions, shm_free: 1 << 30, ..NodeReport::default() }
    }

    #[test]
    fn what_is_right_is_not_mentioned() {
        assert_eq!(
            judge(&[node_report("a", "2.11"), node_report("b", "2.11")], &[vec![None, None], vec![None, None]]),
            []
        );
    }

    #[test]
    fn what_is_wrong_is_named_with_its_node_and_how_to_mend_it() {
        let mut b = NodeReport { shm_free: 1 << 20, clock_ahead: -60.0, ..node_report("b", "2.10") };
        let unreached = [vec![None, Some("timed out".into())], vec![None, None]];
        let texts =
            |problems: Vec<Problem>| problems.into_iter().map(|found| (found.is_fatal, found.text)).collect::<Vec<_>>();
        let found = texts(judge(&[node_report("a", "2.11"), b.clone()], &unreached));
        assert!(found[0].1.starts_with("/dev/shm of b has 1 MiB free") && !found[0].0);
        assert!(found[1].1.starts_with("the clock of b differs by -60 s"));
        assert_eq!(
            found[2].1,
            "nodes differ in the version of torch: 2.11 on a, 2.10 on b; install the same everywhere"
        );
        assert!(
            found[3].0 && found[3].1.starts_with("a does not reach b at 10.0.0.1 (eth0): timed out; open the ports")
        );
        b.python_error = Some("not found".into());
        assert!(judge(&[b], &[vec![None]])[0].text.starts_with("Python does not run on b: not found"));
    }

    #[test]
    fn ranks_that_share_a_device_are_named_and_nccl_refuses_them() {
        let rank = |node: &str, gpu| RankProgress { node: node.into(), gpus: vec![gpu], ..RankProgress::default() };
        let ranks = [rank("a", 0), rank("a", 0), rank("a", 1), rank("b", 0)];
        let found = sharing(&ranks, true);
        assert!(found[0].is_fatal && found[0].text.starts_with("ranks 0 and 1 share GPU 0 of a, which NCCL cannot do"));
        assert_eq!((found.len(), sharing(&ranks, false)[0].is_fatal), (1, false));
        assert_eq!(sharing(&ranks[1..], true), []);
    }

    #[test]
    fn who_listens_is_reached_and_who_does_not_is_not() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let there = listener.local_addr().unwrap();
        // Of the ports that nobody is given by chance, as other tests are.
        let nobody = "127.0.0.1:1".parse().unwrap();
        let tried = reach(&[Some(there), None, Some(nobody)]);
        assert!(tried[0].is_none() && tried[1].is_none() && tried[2].is_some(), "{tried:?}");
    }
}
