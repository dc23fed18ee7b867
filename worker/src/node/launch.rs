//! How a lease gets its worker process: an idle one, one that is starting, or a new one.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use wingbeat_core::error::Error;
use wingbeat_core::spec::{Address, JobSpec};
use wingbeat_core::{JobId, LeaseId, ProcessId};
use wingbeat_net::link::Link;
use wingbeat_net::messages::{HeadMessage, LeaseHolder, LeaseStart, WorkerCommand};
use wingbeat_net::mux::Connection;
use wingbeat_net::services::ProcessRequest;

use super::pool::{Assignment, Phase, Pool, Worker};
use super::{Daemon, output};
use crate::guard::{Launch, LaunchFds};
use crate::page::Page;
use crate::start::{self, WorkerStartInfo};

/// How long a launch waits for descriptors before it fails, and how often it looks.
const DESCRIPTORS_LIMIT: Duration = Duration::from_secs(10);
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
        let assigned = Assignment { start, started: false };
        let free = |worker: &&mut Worker| {
            worker.job == job.id
                && worker.gpus == gpus
                && worker.assigned.is_none()
                && matches!(worker.phase, Phase::Idle { .. } | Phase::Starting { .. })
        };
        // One that has reported is ready now; one that is starting will be sooner than a new one.
        let mut candidates: Vec<(bool, &mut Worker)> = pool
            .workers
            .values_mut()
            .filter(|worker| free(worker))
            .map(|worker| (matches!(worker.phase, Phase::Starting { .. }), worker))
            .collect();
        candidates.sort_by_key(|(starting, _)| *starting);
        if let Some((_, worker)) = candidates.into_iter().next() {
            worker.assigned = Some(assigned);
            self.hand_over(worker);
            return;
        }
        self.launch(&mut pool, &job, gpus, Some(assigned));
    }

    pub(super) fn prestart(self: &Arc<Self>, job: JobId, count: u32) {
        let mut pool = self.pool.lock();
        let Some(job) = pool.jobs.get(&job).map(|job| job.spec.clone()) else { return };
        let have = pool.workers.values().filter(|worker| worker.job == job.id && worker.gpus.is_empty()).count();
        for _ in have..count as usize {
            self.launch(&mut pool, &job, Vec::new(), None);
        }
    }

    /// Gives an assigned worker process that has reported its orders.
    pub(super) fn hand_over(&self, worker: &mut Worker) {
        let (Some(assigned), Some(address), Some(commands)) = (&worker.assigned, &worker.address, &worker.commands)
        else {
            return;
        };
        worker.phase = Phase::Leased;
        worker.lease_over = false;
        let (lease, gpus, captures) = (assigned.lease(), worker.gpus.clone(), assigned.start.captures);
        let ready = HeadMessage::LeaseReady { lease, worker: address.clone(), pid: worker.pid };
        match &assigned.start.holder {
            LeaseHolder::Actor(spec, incarnation) => {
                // Said first: nobody calls the actor before its constructor has returned, which is said next.
                self.head.send(ready);
                let (spec, incarnation) = (spec.clone(), *incarnation);
                commands.send(WorkerCommand::StartActor { lease, spec, incarnation, gpus, captures });
            }
            LeaseHolder::Tasks(..) => {
                let resources = assigned.start.resources.clone();
                commands.send(WorkerCommand::Lease { lease, resources, gpus, captures });
                let (link, head) = (commands.clone(), self.head.clone());
                // The owner must not reach the process before its orders have.
                self.runtime.spawn(async move {
                    if link.flushed().await {
                        head.send(ready);
                    }
                });
            }
        }
    }

    pub(super) fn launch(
        self: &Arc<Self>,
        pool: &mut Pool,
        job: &Arc<JobSpec>,
        gpus: Vec<u32>,
        assigned: Option<Assignment>,
    ) {
        let process = ProcessId::random();
        let lease = assigned.as_ref().map(Assignment::lease);
        let page = match Page::create() {
            Ok(page) => Arc::new(page),
            Err(error) => return self.launch_failed(lease, &Error::io("making a worker process's page", &error)),
        };
        let worker = Worker {
            job: job.id,
            gpus: gpus.clone(),
            phase: Phase::Starting { since: Instant::now() },
            assigned,
            pid: 0,
            address: None,
            commands: None,
            users_before: self.users_of(&gpus),
            page: page.clone(),
            output: output::Tail::default(),
            reason: None,
            lease_over: false,
        };
        pool.workers.insert(process, worker);
        let (daemon, job) = (self.clone(), job.clone());
        self.runtime.spawn(async move {
            let begun = Instant::now();
            loop {
                match daemon.clone().launch_process(process, &job, &gpus, &page).await {
                    Ok(()) => return,
                    // Connections and files come and go.
                    Err(Error::OutOfDescriptors { .. }) if begun.elapsed() < DESCRIPTORS_LIMIT => {
                        tokio::time::sleep(DESCRIPTORS_PAUSE).await;
                    }
                    Err(error) => return daemon.forget_unstarted(process, &error),
                }
            }
        });
    }

    pub(super) fn launch_failed(&self, lease: Option<LeaseId>, error: &Error) {
        match lease {
            Some(lease) => self.head.send(HeadMessage::LeaseFailed { lease, error: error.clone() }),
            None => tracing::warn!(%error, "cannot start a worker process ahead of need"),
        }
    }

    pub(super) fn forget_unstarted(&self, process: ProcessId, error: &Error) {
        let worker = self.pool.lock().workers.remove(&process);
        if let Some(worker) = worker {
            self.launch_failed(worker.assigned.map(|assigned| assigned.lease()), error);
        }
    }

    pub(super) async fn launch_process(
        self: Arc<Self>,
        process: ProcessId,
        job: &JobSpec,
        gpus: &[u32],
        page: &Page,
    ) -> Result<(), Error> {
        let executable = self.executable(job).await?;
        let failed = |error: std::io::Error| Error::io("starting a worker process", &error);
        let info = WorkerStartInfo {
            process,
            daemon: self.address.clone(),
            token: self.token.reveal().to_owned(),
            listen: self.listen_ip,
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
        env.extend(self.gpus.environment(gpus, &env));
        let launch = Launch {
            process,
            title: format!("wingbeat-worker: {}", job.name),
            env,
            working_dir: Some(job.working_dir.clone()),
        };
        if let Some(worker) = self.pool.lock().workers.get_mut(&process) {
            worker.output = self.clone().read_output(process, job.id, stdout, stderr).map_err(failed)?;
        }
        self.guard.launch(launch, fds).map_err(failed)
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
        let commands: Link<WorkerCommand> = Link::new();
        let link = commands.clone();
        self.runtime.spawn(async move {
            link.run(&connection, |commands| ProcessRequest::Commands { commands }).await;
        });
        worker.pid = pid;
        worker.address = Some(address);
        worker.commands = Some(commands);
        worker.phase = Phase::Idle { since: Instant::now() };
        self.hand_over(worker);
        let job = worker.job;
        pool.jobs.get(&job).map(|job| job.spec.clone())
    }
}

/// A pipe whose reading end is ours.
fn pipe() -> std::io::Result<(OwnedFd, OwnedFd)> {
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    rustix::io::ioctl_fionbio(&read, true)?;
    Ok((read, write))
}
