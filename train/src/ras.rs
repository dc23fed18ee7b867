//! What NCCL itself knows of a run: the RAS port that every process with NCCL 2.24 or newer has.
//!
//! A line protocol over TCP (<https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html>): both
//! sides name their version, the client sets a time limit and asks for the status, and the answer ends with the
//! connection. It is JSON where NCCL can (2.28), with each rank's number of operations, and text for people otherwise.
//! Whichever process is asked gathers it from all.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::shown;

/// Tells NCCL where to listen.
pub(crate) const VARIABLE: &str = "NCCL_RAS_ADDR";
const PROTOCOL: u32 = 2;
/// How long NCCL's processes wait for each other, in seconds.
const GATHER_SECONDS: u32 = 5;
const CONNECT_LIMIT: Duration = Duration::from_secs(1);
const ANSWER_LIMIT: Duration = Duration::from_secs(15);
/// A thousand ranks take half a megabyte.
const LENGTH_LIMIT: u64 = 16 << 20;
/// More than this nobody reads.
const TEXT_LIMIT: usize = 64 << 10;

/// What NCCL says of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Status {
    pub communicators: Vec<Communicator>,
    /// What an NCCL says that knows no JSON.
    pub text: String,
}

/// What NCCL says of one of its groups.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Communicator {
    pub size: usize,
    /// How many of each operation each rank has begun.
    pub counts: BTreeMap<usize, BTreeMap<String, u64>>,
    /// Ranks of which nothing was heard.
    pub silent: Vec<usize>,
}

impl Status {
    /// Whether more operations have begun since `before`.
    pub(crate) fn has_moved_since(&self, before: &Status) -> bool {
        let total = |status: &Status| {
            let ranks = status.communicators.iter().flat_map(|communicator| communicator.counts.values());
            ranks.flat_map(BTreeMap::values).sum::<u64>()
        };
        total(self) > total(before)
    }

    /// Ranks that have begun fewer operations than others of the group of all, or say nothing.
    pub(crate) fn lagging(&self, ranks: usize) -> Vec<usize> {
        let mut lagging = BTreeSet::new();
        for communicator in self.communicators.iter().filter(|communicator| communicator.size == ranks) {
            let totals = || communicator.counts.iter().map(|(rank, counts)| (*rank, counts.values().sum::<u64>()));
            let most = totals().map(|(_, total)| total).max().unwrap_or(0);
            lagging.extend(totals().filter(|(_, total)| *total < most).map(|(rank, _)| rank));
            lagging.extend(&communicator.silent);
        }
        lagging.into_iter().collect()
    }

    /// In lines.
    pub(crate) fn shown(&self) -> Vec<String> {
        let mut lines: Vec<String> = self.text.lines().map(str::to_owned).collect();
        for communicator in &self.communicators {
            let mut alike: BTreeMap<String, Vec<usize>> = BTreeMap::new();
            for (rank, counts) in &communicator.counts {
                let begun = counts.iter().filter(|(_, count)| **count > 0);
                let begun: Vec<String> = begun.map(|(name, count)| format!("{count} {name}")).collect();
                let begun = if begun.is_empty() { "nothing".into() } else { begun.join(", ") };
                alike.entry(begun).or_default().push(*rank);
            }
            let group = format!("group of {}", communicator.size);
            lines.extend(alike.iter().map(|(begun, who)| format!("{group}: {} began {begun}", shown::ranks(who))));
            if !communicator.silent.is_empty() {
                lines.push(format!("{group}: nothing was heard of {}", shown::ranks(&communicator.silent)));
            }
        }
        lines
    }
}

/// Asks the process that listens here.
pub(crate) fn status(port: u16) -> Result<Status, String> {
    let mut connection = Connection::open(port)?;
    let knows_json = connection.ask("SET FORMAT json", "OK").is_ok();
    connection.say(if knows_json { "STATUS" } else { "VERBOSE STATUS" })?;
    let mut bytes = Vec::new();
    connection.reader.take(LENGTH_LIMIT).read_to_end(&mut bytes).map_err(failed)?;
    if knows_json {
        let told: Report = serde_json::from_slice(&bytes).map_err(|error| format!("NCCL's status: {error}"))?;
        return Ok(Status { communicators: told.communicators.into_iter().map(Into::into).collect(), text: "".into() });
    }
    bytes.truncate(TEXT_LIMIT);
    Ok(Status { communicators: Vec::new(), text: String::from_utf8_lossy(&bytes).trim().to_owned() })
}

fn failed(error: std::io::Error) -> String {
    error.to_string()
}

struct Connection {
    stream: TcpStream,
    reader: BufReader<TcpStream>,
}

impl Connection {
    fn open(port: u16) -> Result<Connection, String> {
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        let stream = TcpStream::connect_timeout(&address, CONNECT_LIMIT).map_err(failed)?;
        stream.set_read_timeout(Some(ANSWER_LIMIT)).map_err(failed)?;
        stream.set_write_timeout(Some(CONNECT_LIMIT)).map_err(failed)?;
        let reader = BufReader::new(stream.try_clone().map_err(failed)?);
        let mut connection = Connection { stream, reader };
        connection.ask(&format!("CLIENT PROTOCOL {PROTOCOL}"), "SERVER PROTOCOL ")?;
        connection.ask(&format!("TIMEOUT {GATHER_SECONDS}"), "OK")?;
        Ok(connection)
    }

    fn say(&mut self, command: &str) -> Result<(), String> {
        self.stream.write_all(format!("{command}\n").as_bytes()).map_err(failed)
    }

    fn ask(&mut self, command: &str, expected: &str) -> Result<(), String> {
        self.say(command)?;
        let mut answer = String::new();
        self.reader.by_ref().take(1024).read_line(&mut answer).map_err(failed)?;
        match answer.to_uppercase().starts_with(expected) {
            true => Ok(()),
            false => Err(format!("NCCL answered {:?}", answer.trim_end())),
        }
    }
}

/// The names are NCCL's.
#[derive(Deserialize)]
struct Report {
    communicators: Vec<ReportedCommunicator>,
}

#[derive(Deserialize)]
struct ReportedCommunicator {
    size: usize,
    ranks: Vec<ReportedRank>,
    #[serde(default)]
    missing_ranks: Vec<ReportedRank>,
}

#[derive(Deserialize)]
struct ReportedRank {
    rank: usize,
    #[serde(default)]
    collective_counts: BTreeMap<String, u64>,
}

impl From<ReportedCommunicator> for Communicator {
    fn from(told: ReportedCommunicator) -> Self {
        Communicator {
            size: told.size,
            counts: told.ranks.into_iter().map(|rank| (rank.rank, rank.collective_counts)).collect(),
            silent: told.missing_ranks.into_iter().map(|rank| rank.rank).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// What NCCL 2.28 answers, shortened to what is read and some of what is not.
    const JSON: &str = r#"{
  "nccl_version": "2.28.9",
  "communicators_count": 1,
  "communicators": [
    {
      "hash": "0x1", "size": 3, "ranks_count": 2, "missing_ranks_count": 1,
      "ranks": [
        { "rank": 0, "host": "10.0.0.1", "pid": 7, "status": { "init_state": 0 },
          "collective_counts": { "Broadcast": 2, "Reduce": 0, "AllReduce": 42 } },
        { "rank": 1, "host": "10.0.0.1", "pid": 8, "status": { "init_state": 0 },
          "collective_counts": { "Broadcast": 2, "Reduce": 0, "AllReduce": 41 } }
      ],
      "missing_ranks": [ { "rank": 2, "host": "10.0.0.2", "pid": 9, "status": { "unresponsive": true } } ]
    }
  ],
  "ras": { "collection_time_sec": 0.001, "timeouts_count": 0 }
}"#;

    /// Answers as NCCL does, and gives what it heard.
    fn nccl(answers: Vec<&'static str>) -> (u16, std::thread::JoinHandle<Vec<String>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let answering = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
            let mut heard = Vec::new();
            for answer in answers {
                match lines.next() {
                    Some(Ok(line)) => heard.push(line),
                    _ => break,
                }
                stream.write_all(answer.as_bytes()).unwrap();
            }
            heard
        });
        (port, answering)
    }

    #[test]
    fn ranks_that_began_less_than_others_or_say_nothing_lag() {
        let (port, nccl) = nccl(vec!["SERVER PROTOCOL 2\n", "OK\n", "OK\n", JSON]);
        let status = status(port).unwrap();
        assert_eq!(nccl.join().unwrap(), ["CLIENT PROTOCOL 2", "TIMEOUT 5", "SET FORMAT json", "STATUS"]);
        assert_eq!((status.lagging(3), status.lagging(4)), (vec![1, 2], vec![]));
        assert_eq!(
            status.shown(),
            [
                "group of 3: rank 1 began 41 AllReduce, 2 Broadcast",
                "group of 3: rank 0 began 42 AllReduce, 2 Broadcast",
                "group of 3: nothing was heard of rank 2",
            ]
        );
        assert!(status.has_moved_since(&Status::default()) && !status.has_moved_since(&status));
    }

    #[test]
    fn an_nccl_without_json_says_it_in_its_own_words() {
        let refused = "ERROR: Unknown command SET FORMAT json\n";
        let (port, nccl) = nccl(vec!["SERVER PROTOCOL 2\n", "OK\n", refused, "Job summary\n  2 ranks\n"]);
        let status = status(port).unwrap();
        assert_eq!(nccl.join().unwrap()[3], "VERBOSE STATUS");
        assert_eq!(status.shown(), ["Job summary", "  2 ranks"]);
        assert!(status.lagging(2).is_empty());
    }

    #[test]
    fn who_is_not_nccl_is_not_believed() {
        let (port, other) = nccl(vec!["HTTP/1.1 400 Bad Request\n"]);
        assert!(status(port).unwrap_err().contains("400 Bad Request"));
        other.join().unwrap();
        assert!(status(port).is_err(), "and nobody is an error");
    }
}
