//! The actor of one rank.

use std::net::TcpListener;
use std::path::Path;
use std::process::Command;

use futures::Stream;
use serde::{Deserialize, Serialize};

use crate::process::{self, Event, Launch, Running, Target};

/// What a rank's actor says about where it is.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Description {
    /// The node, as a key.
    pub node: u64,
    /// The node's name, for people.
    pub hostname: String,
    /// Where other nodes reach it.
    pub ip: Option<String>,
    /// Its devices.
    pub gpus: Vec<u32>,
    /// Whether the script is there.
    pub has_script: bool,
    /// Python's version, or why it does not run.
    pub python: Result<String, String>,
    /// Its working directory.
    pub working_dir: String,
}

pub(crate) struct Rank {
    running: Running,
}

#[wingbeat::actor(max_concurrency = 4)]
impl Rank {
    pub(crate) fn new() -> Self {
        Rank { running: Running::default() }
    }

    /// Where it is, and whether what it is to run is there.
    pub(crate) fn describe(&self, python: String, target: Target) -> Description {
        let session = wingbeat::Session::current().ok();
        let process = session.as_ref().map(|session| session.process());
        let storage = process.and_then(|process| process.storage());
        let hostname = rustix::system::uname().nodename().to_string_lossy().into_owned();
        Description {
            node: storage.map_or(0, |storage| storage.node().0),
            hostname,
            ip: process.and_then(|process| process.address().tcp).map(|tcp| tcp.ip().to_string()),
            gpus: wingbeat::gpu_ids(),
            has_script: match &target {
                Target::Script(script) => script.is_file(),
                Target::Module(_) => true,
            },
            python: version_of(&python),
            working_dir: std::env::current_dir().map(|dir| dir.display().to_string()).unwrap_or_default(),
        }
    }

    /// A port that is free now. A port lost to somebody else before it is used fails the attempt.
    pub(crate) fn free_port(&self) -> Result<u16, String> {
        let listener = TcpListener::bind("0.0.0.0:0").and_then(|listener| listener.local_addr());
        listener.map(|address| address.port()).map_err(|error| error.to_string())
    }

    /// Runs the script to its end. Dropping the stream ends it.
    pub(crate) fn run(&self, launch: Launch) -> impl Stream<Item = Event> {
        process::start(launch, &self.running)
    }

    /// Asks what runs to end; with `at_once`, ends it.
    pub(crate) fn stop(&self, at_once: bool) {
        let signal = if at_once { rustix::process::Signal::KILL } else { rustix::process::Signal::TERM };
        self.running.signal(signal);
    }
}

fn version_of(python: &str) -> Result<String, String> {
    let script = "import sys; print('.'.join(map(str, sys.version_info[:2])))";
    let path = Path::new(python);
    let output = Command::new(path).args(["-c", script]).output().map_err(|error| error.to_string())?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).trim().to_owned());
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
