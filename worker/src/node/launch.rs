//! How a lease gets its worker process: an idle one, one that is starting, or a new one.

use std::os::fd::OwnedFd;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use wingbeat_core::error::Error;
use wingbeat_core::limits::limit;
use wingbeat_core::spec::{Address, JobSpec};
use wingbeat_core::{JobId, LeaseId, ProcessId};
use wingbeat_net::link::Link;
use wingbeat_net::messages::{HeadMessage, LeaseHolder, LeaseStart, WorkerCommand};
use wingbeat_net::mux::Connection;
use wingbeat_net::services::ProcessRequest;

use super::Daemon;
use super::lifecycle::{Assignment, Contact, Event, Stage};
use super::pool::{Pool, Worker};
use crate::guard::{Launch, LaunchFds};
use crate::page::Page;
use crate::start::{self, WorkerStartInfo};

/// See [`wingbeat_net::limits::Limits::silence`].
const SILENCE_VARIABLE: &str = "WINGBEAT_SILENCE_MS";
/// How long a launch waits for descriptors before it fails: 10 s, `WINGBEAT_DESCRIPTORS_MS`. And how often it looks.
static DESCRIPTORS_LIMIT: LazyLock<Duration> =
    LazyLock::new(|| limit("WINGBEAT_DESCRIPTORS_MS", Duration::from_secs(10)));
const DESCRIPTORS_PAUSE: Duration = Duration::from_millis(100);

impl Daemon {
    /// A lease to serve: an idle worker process takes it, or one that is starting, or a new one.
    pub(super) fn start_lease(self: &Arc<Self>, start: LeaseStart) {
        let gpus: Vec<u32> = start.gpus.iter().map(|(device, _)| *device).collect();
        let mut pool = self.pool.lock();
        let Some(job) = pool.jobs.get(&start.job).map(|job| job.spec.clone()) else {
            let what = format!("starting a worker process of {}", start.job);
            let error = Error::Io { what, why: "the node was not told of the job".into() };
            return self.launch_failed(Some(start.lease), &error);
        };
        let assignment = Assignment { start, started: false };
        // One that has reported is ready now; one that is starting will be sooner than a new one.
        match pool.free_for(job.id, &gpus) {
            Some(process) => self.apply(&mut pool, process, Event::Assigned(assignment)),
            None => self.launch(&mut pool, &job, gpus, Some(assignment)),
        }
    }

    pub(super) fn prestart(self: &Arc<Self>, job: JobId, count: u32) {
        let mut pool = self.pool.lock();
        let Some(job) = pool.jobs.get(&job).map(|job| job.spec.clone()) else { return };
        let have = pool.workers.values().filter(|worker| worker.job == job.id && worker.gpus.is_empty()).count();
        for _ in have..count as usize {
            self.launch(&mut pool, &job, Vec::new(), None);
        }
    }

    /// Sends a worker process that has reported the orders of its lease.
    pub(super) fn hand_over(&self, worker: &Worker) {
        let Stage::Leased { assignment: assigned, contact } = worker.stage() else { return };
        // The process may be gone before it reads its orders: what it started earlier is not of this lease.
        worker.page.reset();
        let Contact { address, commands, .. } = contact;
        let (lease, gpus, captures) = (assigned.lease(), worker.gpus.clone(), assigned.start.captures);
        let ready = HeadMessage::LeaseReady { lease, worker: address.clone(), pid: worker.pid };
        match &assigned.start.holder {
            LeaseHolder::Actor(spec, incarnation) => {
                // Said first: nobody calls the actor before its constructor has returned, which is said next.
                self.head.link.send(ready);
                let (spec, incarnation) = (spec.clone(), *incarnation);
                commands.send(WorkerCommand::StartActor { lease, spec, incarnation, gpus, captures });
            }
            LeaseHolder::Tasks(..) => {
                commands.send(WorkerCommand::Lease { lease, gpus, captures });
                let (link, head) = (commands.clone(), self.head.link.clone());
                // The owner must not reach the process before its orders have.
                self.runtime.spawn(async move {
                    if link.flushed().await {
                        head.send(ready);
                    }
                });
            }
        }
    }

    fn launch(self: &Arc<Self>, pool: &mut Pool, job: &Arc<JobSpec>, gpus: Vec<u32>, assignment: Option<Assignment>) {
        let process = ProcessId::random();
        let page = match Page::create() {
            Ok(page) => Arc::new(page),
            Err(error) => {
                let error = Error::io("making a worker process's page", &error);
                return self.launch_failed(assignment.map(|assignment| assignment.lease()), &error);
            }
        };
        pool.insert(process, Worker::new(job.id, gpus.clone(), assignment, page.clone()));
        let (daemon, job) = (self.clone(), job.clone());
        self.runtime.spawn(async move {
            let users = daemon.users_of(&gpus).await;
            if let Some(worker) = daemon.pool.lock().workers.get_mut(&process) {
                worker.users_before = users;
            }
            let begun = Instant::now();
            loop {
                match daemon.clone().launch_process(process, &job, &gpus, &page).await {
                    Ok(()) => return,
                    // Connections and files come and go.
                    Err(Error::OutOfDescriptors { .. }) if begun.elapsed() < *DESCRIPTORS_LIMIT => {
                        tokio::time::sleep(DESCRIPTORS_PAUSE).await;
                    }
                    Err(error) => return daemon.forget_unstarted(process, &error),
                }
            }
        });
    }

    pub(super) fn launch_failed(&self, lease: Option<LeaseId>, error: &Error) {
        match lease {
            Some(lease) => self.head.link.send(HeadMessage::LeaseFailed { lease, error: error.clone() }),
            None => tracing::warn!(%error, "cannot start a worker process ahead of need"),
        }
    }

    /// A worker process could not be started.
    pub(super) fn forget_unstarted(&self, process: ProcessId, error: &Error) {
        self.store.process_gone(process);
        let mut pool = self.pool.lock();
        // Where it was told to end before, its lease is over already, or ends so.
        let Some(stage) = pool.remove(process).map(Worker::into_stage) else { return };
        let lease = stage.assignment().map(Assignment::lease);
        if let Some(lease) = lease {
            pool.lease_is_over(lease);
        }
        drop(pool);
        match (stage, lease) {
            (Stage::Ending { by_head: true, .. }, Some(lease)) => self.head.link.send(HeadMessage::LeaseEnded(lease)),
            (Stage::Ending { by_head: true, .. }, None) => {}
            _ => self.launch_failed(lease, error),
        }
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
        let launch = Launch {
            process,
            title: format!("wingbeat-worker: {}", job.name),
            env,
            working_dir: Some(job.working_dir.clone()),
        };
        // The guard is asked under the lock: whoever ends the process from now on asks the guard after this.
        let mut pool = self.pool.lock();
        let Some(worker) = pool.workers.get_mut(&process) else {
            // It was told to end meanwhile.
            self.store.process_gone(process);
            return Ok(());
        };
        worker.output = self.clone().read_output(process, job.id, stdout, stderr).map_err(failed)?;
        self.guard.launch(launch, fds).map_err(failed)?;
        worker.launch = Some(permit);
        self.apply(&mut pool, process, Event::HandedToGuard);
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
        let worker = pool.workers.get_mut(&process)?;
        if !worker.stage().is_launching() {
            // It was told to end, and the guard is ending it.
            return None;
        }
        worker.pid = pid;
        let job = worker.job;
        let commands: Link<WorkerCommand> = Link::new();
        let link = commands.clone();
        self.runtime.spawn(async move {
            link.run(&connection, |commands| ProcessRequest::Commands { commands }).await;
        });
        self.apply(&mut pool, process, Event::Reported(Contact { address, commands, is_fit: true }));
        pool.jobs.get(&job).map(|job| job.spec.clone())
    }
}

/// A pipe whose reading end is ours.
fn pipe() -> std::io::Result<(OwnedFd, OwnedFd)> {
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    rustix::io::ioctl_fionbio(&read, true)?;
    Ok((read, write))
}
