//! The programs that worker processes run: the driver's own executable, by its content.
//!
//! It is opened where the driver runs, if that is this machine; else the driver gives it, and when that is gone, the head,
//! which keeps the programs of detached actors. It is kept until the last job of it ends here.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::OnceCell;
use wingbeat_core::codec::Payload;
use wingbeat_core::error::Error;
use wingbeat_core::spec::{Executable, JobSpec};
use wingbeat_net::address;
use wingbeat_net::handshake::Purpose;
use wingbeat_net::limits::limits;
use wingbeat_net::mux::{self, Waiting};
use wingbeat_net::services::{HeadClient, NodeRequest, NodeResponse, ProcessClient, ProcessRequest, ProcessResponse};
use wingbeat_net::threads::on_a_thread;

use super::Daemon;

/// Descriptors of executables by hash. A descriptor keeps the content, whatever happens to the path.
#[derive(Default)]
pub(super) struct Executables {
    open: Mutex<BTreeMap<String, Arc<Program>>>,
}

#[derive(Default)]
struct Program {
    content: OnceCell<OwnedFd>,
    /// Held by the thread that opens its file: a file system that does not answer holds one thread, and not one for each attempt.
    opens: Arc<tokio::sync::Mutex<()>>,
}

impl Executables {
    /// The program of this hash. Those who ask for it at the same time share one attempt to get it, and whoever asks for
    /// another does not wait for that.
    async fn get_or(
        &self,
        hash: &str,
        get: impl Future<Output = Result<OwnedFd, Error>>,
    ) -> Result<std::io::Result<OwnedFd>, Error> {
        let program = self.open.lock().entry(hash.to_owned()).or_default().clone();
        Ok(program.content.get_or_try_init(|| get).await?.try_clone())
    }

    /// Opens a file of the program of this hash on a thread of its own. Why that takes too long, if it does.
    async fn opened<T: Send + 'static>(
        &self,
        hash: &str,
        limit: Duration,
        open: impl FnOnce() -> Option<T> + Send + 'static,
    ) -> Result<Option<T>, String> {
        let opens = self.open.lock().entry(hash.to_owned()).or_default().opens.clone();
        let unanswered = format!("the file system in which it is has not answered for {limit:?}");
        let Ok(opens) = opens.try_lock_owned() else { return Err(unanswered) };
        let opening = on_a_thread("opens-program", move || {
            let _opens = opens;
            open()
        });
        match tokio::time::timeout(limit, opening).await {
            // Without a thread, it is fetched as from another machine.
            Ok(opened) => Ok(opened.ok().flatten()),
            Err(_) => Err(unanswered),
        }
    }

    /// Lets go of the programs of which this says no.
    pub(super) fn keep_only(&self, is_needed: impl Fn(&str) -> bool) {
        self.open.lock().retain(|hash, _| is_needed(hash));
    }
}

fn failed(job: &JobSpec, why: impl std::fmt::Display) -> Error {
    Error::Failed {
        what: format!("getting the executable {} of job {}", job.executable.path, job.name),
        why: why.to_string(),
    }
}

/// Who gives a program.
enum Source {
    Driver(ProcessClient),
    Head(HeadClient),
}

impl Source {
    async fn read(&self, hash: &str, offset: u64) -> Result<Option<Payload>, Error> {
        let limit = mux::within(limits().chunk);
        match self {
            Source::Driver(driver) => {
                let answer = driver.read_executable(limit, offset).await;
                mux::answered(answer, "the driver")?.map(Some)
            }
            Source::Head(head) => {
                let answer = head.read_program(limit, hash.to_owned(), offset).await;
                mux::answered(answer, "the head")?
            }
        }
    }
}

impl Daemon {
    /// A descriptor of the job's executable, fetched if this machine does not have it.
    pub(super) async fn executable(&self, job: &JobSpec) -> Result<OwnedFd, Error> {
        let fd = self.executables.get_or(&job.executable.hash, self.open_executable(job)).await?;
        fd.map_err(|error| Error::io(format!("opening the executable {}", job.executable.path), &error))
    }

    async fn open_executable(&self, job: &JobSpec) -> Result<OwnedFd, Error> {
        // Another process may have the id of a driver that is gone.
        let is_over = self.pool.lock().state.job(job.id).is_none_or(|job| job.is_over);
        if !is_over && let Some(file) = self.local(job).await? {
            return Ok(file.into());
        }
        let from_driver = match is_over {
            true => Err(failed(job, "its driver is gone")),
            false => self.fetch_from_driver(job).await,
        };
        let Err(error) = from_driver else { return from_driver };
        let head = self.head.client().ok_or_else(|| failed(job, "there is no connection to the head"))?;
        match receive(job, &Source::Head(head.clone())).await? {
            Some(fd) => Ok(fd),
            None => Err(failed(job, format!("{error}, and the head does not keep it"))),
        }
    }

    /// The driver's own executable, if it runs on this machine and can be opened.
    async fn local(&self, job: &JobSpec) -> Result<Option<File>, Error> {
        let Executable { machine, pid, size, ref hash, .. } = job.executable;
        if machine != self.who.address.machine {
            return Ok(None);
        }
        let open = move || {
            let file = File::open(format!("/proc/{pid}/exe")).ok()?;
            (file.metadata().ok()?.len() == size).then_some(file)
        };
        self.executables.opened(hash, limits().chunk, open).await.map_err(|why| failed(job, why))
    }

    async fn fetch_from_driver(&self, job: &JobSpec) -> Result<OwnedFd, Error> {
        let hello = self.hello(Purpose::Control);
        let stream = address::dial(&job.driver, "the driver", &self.who.token, hello).await?;
        let (connection, client, server) =
            mux::connect::<ProcessRequest, ProcessResponse, NodeRequest, NodeResponse>(stream, Waiting::Asleep);
        drop(server);
        let client = ProcessClient::new(mux::client_config(), client).spawn();
        let received = receive(job, &Source::Driver(client)).await;
        connection.close();
        received?.ok_or_else(|| failed(job, "the driver does not have it"))
    }
}

/// Receives a program, unless whoever is asked does not have it.
async fn receive(job: &JobSpec, from: &Source) -> Result<Option<OwnedFd>, Error> {
    let wanted = &job.executable;
    let whose = match from {
        Source::Driver(_) => "the driver",
        Source::Head(_) => "the head",
    };
    tracing::info!(hash = %wanted.hash, size = wanted.size, job = %job.name, "fetching the executable from {whose}");
    let fd = rustix::fs::memfd_create("wingbeat-executable", rustix::fs::MemfdFlags::CLOEXEC)
        .map_err(|error| Error::io("making room for an executable", &error.into()))?;
    let mut hash = blake3::Hasher::new();
    let mut offset = 0;
    while offset < wanted.size {
        let Some(Payload(chunk)) = from.read(&wanted.hash, offset).await? else { return Ok(None) };
        if chunk.is_empty() {
            break;
        }
        hash.update(&chunk);
        let mut written = 0;
        while written < chunk.len() {
            written += rustix::io::write(&fd, &chunk[written..]).map_err(|error| failed(job, error))?;
        }
        offset += chunk.len() as u64;
    }
    let got = hash.finalize().to_hex().to_string();
    if got != wanted.hash {
        return Err(failed(job, format!("its content has the hash {got}, and {} was announced", wanted.hash)));
    }
    // Executing needs a descriptor that is not open for writing.
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&fd));
    let readable = File::open(path).map_err(|error| failed(job, error))?;
    drop(fd);
    Ok(Some(readable.into()))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    fn program() -> OwnedFd {
        rustix::fs::memfd_create("program", rustix::fs::MemfdFlags::CLOEXEC).unwrap()
    }

    #[tokio::test]
    async fn a_program_that_does_not_come_keeps_nobody_waiting_for_another() {
        let executables = Arc::new(Executables::default());
        let stuck = executables.clone();
        let stuck = tokio::spawn(async move { stuck.get_or("stuck", std::future::pending()).await });
        tokio::task::yield_now().await;
        assert!(executables.open.lock().contains_key("stuck"));
        executables.get_or("other", async { Ok(program()) }).await.unwrap().unwrap();
        stuck.abort();
        let _ = stuck.await;
        // Whoever asks next tries again.
        executables.get_or("stuck", async { Ok(program()) }).await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_program_is_fetched_once_and_again_only_after_a_failure() {
        let executables = Executables::default();
        let fetches = AtomicU32::new(0);
        let get = async |fails: bool| {
            let fetch = async {
                fetches.fetch_add(1, Ordering::Relaxed);
                tokio::task::yield_now().await;
                if fails { Err(Error::NoSession) } else { Ok(program()) }
            };
            executables.get_or("program", fetch).await.map(drop)
        };
        assert!(get(true).await.is_err());
        let (first, second) = tokio::join!(get(false), get(false));
        first.and(second).unwrap();
        assert_eq!(fetches.load(Ordering::Relaxed), 2);
    }

    #[tokio::test]
    async fn a_file_that_cannot_be_opened_for_long_is_an_error_and_holds_one_thread() {
        let executables = Executables::default();
        let (answers, answered) = std::sync::mpsc::channel();
        let hangs = move || answered.recv().ok();
        let short = Duration::from_millis(1);
        let why = executables.opened("program", short, hangs).await.unwrap_err();
        assert!(why.contains("has not answered for 1ms"), "{why}");
        // While that thread waits, there is no other, also for a longer time.
        let long = Duration::from_secs(60);
        let opens = || Some(2);
        assert_eq!(executables.opened("program", long, opens).await.unwrap_err(), why.replace("1ms", "60s"));
        assert_eq!(executables.opened("another", long, opens).await, Ok(Some(2)));
        answers.send(1).unwrap();
        while executables.opened("program", long, opens).await != Ok(Some(2)) {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn a_program_goes_with_the_last_job_of_it() {
        let executables = Executables::default();
        for hash in ["needed", "not needed"] {
            executables.get_or(hash, async { Ok(program()) }).await.unwrap().unwrap();
        }
        executables.keep_only(|hash| hash == "needed");
        assert_eq!(executables.open.lock().keys().collect::<Vec<_>>(), ["needed"]);
    }
}
