//! A new Python. The thread that spawned it waits for it: its parent-death signal fires when that thread ends.

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, Stdio};

use std::sync::Arc;

use rustix::process::{Pid, Resource, Rlimit, WaitId, WaitIdOptions, getrlimit, setrlimit};
use tokio::sync::mpsc;

use super::stacks::Stacks;
use super::{Event, Exit, Launch, Reach, Running, Target, now_us, output};
use crate::environment::Environment;
use crate::package;

pub(super) fn run(
    launch: &Launch,
    line: &[String],
    env: &Environment,
    running: &Running,
    stacks: Arc<Stacks>,
    events: &mpsc::Sender<Event>,
) -> std::io::Result<Exit> {
    let mut command = match &launch.target {
        Target::Program(program) => {
            let mut command = Command::new(program);
            command.args(line.get(1..).unwrap_or_default());
            command
        }
        _ => {
            let mut command = Command::new(&launch.python);
            // As torchrun: nothing that was printed is lost when the process is killed.
            command.arg("-u").arg(package::folder()?.join("_rank_main.py")).args(line);
            command.env("WINGBEAT_RANK_PARENT", std::process::id().to_string());
            command
        }
    };
    env.apply(&mut command);
    let folder = launch.folder()?;
    command.current_dir(&folder);
    command.stdin(launch.stdin()?).stdout(Stdio::piped()).stderr(Stdio::piped());
    as_outside(&mut command);
    let mut child = command.spawn().map_err(|error| {
        let why = match folder.is_dir() {
            true => format!("cannot run {}: {error}", command.get_program().display()),
            false => format!("the working directory {} is not there", folder.display()),
        };
        std::io::Error::new(error.kind(), why)
    })?;
    let told = follow(&mut child, running, stacks, events);
    if told.is_err() {
        running.ended();
        let _ = child.kill();
    }
    let status = child.wait()?;
    told.map(|exit| Exit { code: status.code(), signal: status.signal(), ..exit })
}

/// Has a process begin as it would where the node was started: with that limit of open files, and none of the descriptors
/// that this process was given. And in a session of its own, as torchrun has each rank: the scheduler shares CPUs between
/// sessions before it does within them, so that ranks that wait for each other are not put on one. With two on two CPUs
/// that is a tenth of their speed.
pub(crate) fn as_outside(command: &mut Command) {
    let files = wingbeat_net::descriptors::usual_limit();
    // SAFETY: between fork and exec, system calls and nothing else.
    unsafe {
        command.pre_exec(move || {
            rustix::process::setsid()?;
            // Kernels before 5.11 do not know it.
            libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC);
            if let Some(files) = files {
                let maximum = getrlimit(Resource::Nofile).maximum;
                let current = maximum.map_or(files, |maximum| files.min(maximum));
                setrlimit(Resource::Nofile, Rlimit { current: Some(current), maximum })?;
            }
            Ok(())
        });
    }
}

/// Tells what the process prints until it ends, and leaves it to be reaped. What it started may hold its pipes open for
/// longer, and is not waited for.
fn follow(
    child: &mut Child,
    running: &Running,
    stacks: Arc<Stacks>,
    events: &mpsc::Sender<Event>,
) -> std::io::Result<Exit> {
    let id = Pid::from_child(child);
    running.started(Reach::Group(id), stacks);
    let _ = events.blocking_send(Event::Begins);
    output::follow(child.stdout.take(), child.stderr.take(), events, || {
        wait_unreaped(id)?;
        let ended_us = now_us();
        let was_stopped = running.ended();
        Ok(Exit { code: None, signal: None, stderr: Vec::new(), was_stopped, orphaned: false, ended_us })
    })
}

fn wait_unreaped(id: Pid) -> std::io::Result<()> {
    loop {
        match rustix::process::waitid(WaitId::Pid(id), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT) {
            Err(rustix::io::Errno::INTR) => {}
            other => return other.map(drop).map_err(Into::into),
        }
    }
}
