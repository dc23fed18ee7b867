//! How a worker process is started and reports.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use wingbeat_core::ProcessId;
use wingbeat_core::error::Error;
use wingbeat_core::limits::limit;
use wingbeat_core::spec::{Address, JobSpec};
use wingbeat_net::link::Link;
use wingbeat_net::messages::WorkerCommand;
use wingbeat_net::mux::Connection;
use wingbeat_net::recording;
use wingbeat_net::services::ProcessRequest;
use wingbeat_node::Event;

use super::pool::{Pool, Process};
use super::{Daemon, output};
use crate::guard::{self, Launch, LaunchFds};
use crate::page::Page;
use crate::start::{self, WorkerStartInfo};

/// See [`wingbeat_net::limits::Limits::silence`].
const SILENCE_VARIABLE: &str = "WINGBEAT_SILENCE_MS";
/// How long a launch waits for descriptors, or for a guard that takes nothing, before it fails: 10 s, `WINGBEAT_DESCRIPTORS_MS`. And how often it looks.
static DESCRIPTORS_LIMIT: LazyLock<Duration> =
    LazyLock::new(|| limit("WINGBEAT_DESCRIPTORS_MS", Duration::from_secs(10)));
const DESCRIPTORS_PAUSE: Duration = Duration::from_millis(100);

/// Whether a launch that began then may succeed in a while: connections and files come and go, and the guard takes in what it was asked.
fn may_pass(error: &Error, begun: Instant) -> bool {
    let is_soon = |error: io::Error| guard::takes_nothing_now(&error);
    let may_pass = matches!(error, Error::OutOfDescriptors { .. }) || error.os_error().is_some_and(is_soon);
    may_pass && begun.elapsed() < *DESCRIPTORS_LIMIT
}

impl Daemon {
    /// Starts a worker process.
    pub(super) fn launch(self: &Arc<Self>, pool: &mut Pool, process: ProcessId, job: Arc<JobSpec>, gpus: Vec<u32>) {
        let create = || Page::create().map_err(|error| Error::io("making a worker process's page", &error));
        let mut created = create();
        if let Ok(page) = created {
            return self.launch_with(pool, process, job, gpus, Arc::new(page));
        }
        let daemon = self.clone();
        self.vital("waiting to start a worker process", async move {
            let begun = Instant::now();
            loop {
                match created {
                    Ok(page) => {
                        let mut pool = daemon.pool.lock();
                        if pool.state.is_wanted(process) {
                            daemon.launch_with(&mut pool, process, job, gpus, Arc::new(page));
                        }
                        return;
                    }
                    Err(error) if may_pass(&error, begun) => tokio::time::sleep(DESCRIPTORS_PAUSE).await,
                    Err(error) => return daemon.step(Event::NotStarted { process, error }),
                }
                created = create();
            }
        });
    }

    fn launch_with(
        self: &Arc<Self>,
        pool: &mut Pool,
        process: ProcessId,
        job: Arc<JobSpec>,
        gpus: Vec<u32>,
        page: Arc<Page>,
    ) {
        let known = Process {
            job: job.id,
            page: page.clone(),
            output: output::Tail::default(),
            users_before: Default::default(),
            launch: None,
            commands: None,
            gone: None,
        };
        pool.processes.insert(process, known);
        let daemon = self.clone();
        self.vital("starting a worker process", async move {
            let users = daemon.users_of(&gpus).await;
            if let Some(known) = daemon.pool.lock().processes.get_mut(&process) {
                known.users_before = users;
            }
            let begun = Instant::now();
            loop {
                match daemon.clone().launch_process(process, &job, &gpus, &page).await {
                    Ok(()) => return,
                    Err(error) if may_pass(&error, begun) => tokio::time::sleep(DESCRIPTORS_PAUSE).await,
                    Err(error) => {
                        // It may be forgotten already, and then this is all that is left of it.
                        daemon.store.process_gone(process);
                        return daemon.step(Event::NotStarted { process, error });
                    }
                }
            }
        });
    }

    async fn launch_process(
        self: Arc<Self>,
        process: ProcessId,
        job: &JobSpec,
        gpus: &[u32],
        page: &Page,
    ) -> Result<(), Error> {
        let executable = self.executable(job).await?;
        let failed = |error: std::io::Error| Error::io("starting a worker process", &error);
        let Ok(permit) = self.launches.clone().acquire_owned().await else { return Ok(()) };
        let info = WorkerStartInfo {
            process,
            daemon: self.who.address.clone(),
            token: self.who.token.reveal().to_owned(),
            listen: self.who.listen_ip,
        };
        let (stdout, stdout_end) = pipe().map_err(failed)?;
        let (stderr, stderr_end) = pipe().map_err(failed)?;
        let fds = LaunchFds {
            executable,
            start: start::to_memfd(&info).map_err(failed)?,
            arena: self.store.attach(process).try_clone_to_owned().map_err(failed)?,
            page: page.fd().try_clone_to_owned().map_err(failed)?,
            stdout: stdout_end,
            stderr: stderr_end,
        };
        let mut env = job.environment();
        env.extend(self.devices.gpus.environment(gpus, &env));
        // A worker process gives its daemon up when the head would.
        if let Ok(limit) = std::env::var(SILENCE_VARIABLE) {
            env.insert(SILENCE_VARIABLE.to_owned(), limit);
        }
        // A driver may have them record elsewhere, or not at all.
        for (name, value) in recording::variables() {
            env.entry(name).or_insert(value);
        }
        let launch = Launch {
            process,
            title: format!("wingbeat-worker: {}", job.name),
            env,
            working_dir: Some(job.working_dir.clone()),
        };
        // The guard is asked under the lock: whoever ends the process from now on asks the guard after this.
        let mut pool = self.pool.lock();
        let known = pool.processes.contains_key(&process) && pool.state.is_wanted(process);
        if !known {
            // It was told to end meanwhile.
            drop(pool);
            self.store.process_gone(process);
            return Ok(());
        }
        let output = self.clone().read_output(process, job.id, stdout, stderr).map_err(failed)?;
        if let Err(error) = self.guard.launch(launch, fds) {
            // It has ended, and so does the node, which says why: what was to run here runs elsewhere.
            return if guard::has_ended(&error) { Ok(()) } else { Err(failed(error)) };
        }
        if let Some(known) = pool.processes.get_mut(&process) {
            (known.output, known.launch) = (output, Some(permit));
        }
        self.step_with(&mut pool, Event::HandedToGuard(process));
        Ok(())
    }

    /// A worker process has reported: it is reached at `address` from now on.
    pub(super) fn registered(
        self: &Arc<Self>,
        process: ProcessId,
        address: Address,
        pid: u32,
        connection: Connection,
    ) -> Option<Arc<JobSpec>> {
        let mut pool = self.pool.lock();
        if !pool.state.is_starting(process) {
            // It was told to end, and the guard is ending it.
            return None;
        }
        let job = pool.state.job_of(process)?;
        let commands: Link<WorkerCommand> = Link::new();
        let link = commands.clone();
        self.vital("giving orders", async move {
            link.run(&connection, |commands| ProcessRequest::Commands { commands }).await;
        });
        pool.processes.get_mut(&process)?.commands = Some(commands);
        self.step_with(&mut pool, Event::Reported { process, address, pid });
        pool.state.job(job).map(|job| job.spec.clone())
    }
}

/// A pipe whose reading end is ours.
fn pipe() -> std::io::Result<(OwnedFd, OwnedFd)> {
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    rustix::io::ioctl_fionbio(&read, true)?;
    Ok((read, write))
}
