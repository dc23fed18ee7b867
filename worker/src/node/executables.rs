//! The programs that worker processes run: the driver's own executable, by its content.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use wingbeat_core::codec::Payload;
use wingbeat_core::error::Error;
use wingbeat_core::spec::{Executable, JobSpec};
use wingbeat_net::address;
use wingbeat_net::handshake::Purpose;
use wingbeat_net::mux::{self, Waiting};
use wingbeat_net::services::{NodeRequest, NodeResponse, ProcessClient, ProcessRequest, ProcessResponse};

use super::Daemon;

/// Descriptors of executables by hash. A descriptor keeps the content, whatever happens to the path.
#[derive(Default)]
pub(super) struct Executables {
    open: tokio::sync::Mutex<BTreeMap<String, Arc<OwnedFd>>>,
}

fn failed(job: &JobSpec, why: impl std::fmt::Display) -> Error {
    Error::Io {
        what: format!("getting the executable {} of job {}", job.executable.path, job.name),
        why: why.to_string(),
    }
}

impl Daemon {
    /// A descriptor of the job's executable, fetched from the driver if this machine does not have it.
    pub(super) async fn executable(&self, job: &JobSpec) -> Result<OwnedFd, Error> {
        let wanted = &job.executable;
        // Held over the fetch, so that several worker processes need only one.
        let mut open = self.executables.open.lock().await;
        let fd = match open.get(&wanted.hash) {
            Some(fd) => fd.clone(),
            None => {
                let fd = match self.local(wanted) {
                    Some(file) => OwnedFd::from(file),
                    None => self.fetch_executable(job).await?,
                };
                let fd = Arc::new(fd);
                open.insert(wanted.hash.clone(), fd.clone());
                fd
            }
        };
        drop(open);
        fd.try_clone().map_err(|error| failed(job, error))
    }

    /// The driver's own executable, if it runs on this machine and can be opened.
    fn local(&self, wanted: &Executable) -> Option<File> {
        if wanted.machine != self.address.machine {
            return None;
        }
        let file = File::open(format!("/proc/{}/exe", wanted.pid)).ok()?;
        (file.metadata().ok()?.len() == wanted.size).then_some(file)
    }

    async fn fetch_executable(&self, job: &JobSpec) -> Result<OwnedFd, Error> {
        let wanted = &job.executable;
        tracing::info!(hash = %wanted.hash, size = wanted.size, job = %job.name, "fetching the driver's executable");
        let hello = self.hello(Purpose::Control);
        let stream = address::dial(&job.driver, "the driver", &self.token, hello).await?;
        let (connection, client, server) =
            mux::connect::<ProcessRequest, ProcessResponse, NodeRequest, NodeResponse>(stream, Waiting::Asleep);
        drop(server);
        let client = ProcessClient::new(mux::client_config(), client).spawn();
        let fd = rustix::fs::memfd_create("wingbeat-executable", rustix::fs::MemfdFlags::CLOEXEC)
            .map_err(|error| failed(job, error))?;
        let mut hash = blake3::Hasher::new();
        let mut offset = 0;
        while offset < wanted.size {
            let answer = client.read_executable(mux::no_deadline(), offset).await;
            let Payload(chunk) = mux::answered(answer, "the driver")??;
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
        connection.close();
        let got = hash.finalize().to_hex().to_string();
        if got != wanted.hash {
            return Err(failed(job, format!("its content has the hash {got}, and {} was announced", wanted.hash)));
        }
        // Executing needs a descriptor that is not open for writing.
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&fd));
        let readable = File::open(path).map_err(|error| failed(job, error))?;
        drop(fd);
        Ok(readable.into())
    }
}
