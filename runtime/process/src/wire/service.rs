//! What this process answers to others.

use tarpc::context::Context;
use wingbeat_core::codec::Payload;
use wingbeat_core::error::Error;
use wingbeat_core::{ObjectId, ProcessId, TaskId};
use wingbeat_net::messages::{HeadEvent, LogLine, PeerMessage, ProcessStacks, TaskStanding, WorkerCommand};

use crate::recorded::Event;
use crate::wire::numbers::Receipt;
use crate::wire::process::Process;

/// A piece of an executable: large enough that round trips do not matter.
const CHUNK: usize = 1 << 20;

/// The service for one connection; it knows who is on the other side.
#[derive(Clone)]
pub struct PeerService {
    process: Process,
    peer: ProcessId,
}

impl PeerService {
    /// For a connection with `peer`.
    pub fn new(process: Process, peer: ProcessId) -> Self {
        PeerService { process, peer }
    }

    fn take_in(&self, message: PeerMessage) {
        match (message, self.process.executor()) {
            (PeerMessage::Work(work), Some(executor)) => executor.deliver(self.peer, work),
            (message, _) => self.process.owner.hears(self.peer, message),
        }
    }
}

/// Results that have come together are taken in together: for each it would be looked anew what is to be pushed next.
fn together(messages: Vec<PeerMessage>) -> impl Iterator<Item = PeerMessage> {
    let mut messages = messages.into_iter().peekable();
    std::iter::from_fn(move || {
        let mut first = messages.next()?;
        if let PeerMessage::Results(all) = &mut first {
            let mut more = || messages.next_if(|next| matches!(next, PeerMessage::Results(_)));
            while let Some(PeerMessage::Results(results)) = more() {
                all.extend(results);
            }
        }
        Some(first)
    })
}

impl wingbeat_net::services::Process for PeerService {
    async fn deliver(self, _: Context, contact: u64, number: u64, messages: Vec<PeerMessage>) {
        match self.process.hears(self.peer, contact, number) {
            Receipt::TakeIn => {}
            Receipt::Stale => return std::future::pending().await,
            Receipt::Again | Receipt::Lost(_) => return,
        }
        self.process.wire.record(|| Event::FromProcess(self.peer, messages.clone()));
        for message in together(messages) {
            self.take_in(message);
        }
    }

    async fn head_events(self, _: Context, number: u64, events: Vec<HeadEvent>) {
        if !self.process.hears_head(number) {
            return;
        }
        self.process.wire.record(|| Event::FromHead(events.clone()));
        for event in events {
            self.process.head_event(event);
        }
    }

    async fn commands(self, _: Context, commands: Vec<WorkerCommand>) {
        let Some(executor) = self.process.executor() else { return };
        self.process.wire.record(|| Event::FromNode(commands.clone()));
        for command in commands {
            match command {
                WorkerCommand::Heads(heads) => self.process.learn_heads(heads),
                command => executor.command(command),
            }
        }
    }

    async fn logs(self, _: Context, lines: Vec<LogLine>) {
        self.process.log(lines).await;
    }

    async fn explain_task(self, _: Context, task: TaskId) -> TaskStanding {
        self.process.owner.standing(task)
    }

    async fn stacks(self, _: Context) -> Result<ProcessStacks, Error> {
        match self.process.executor() {
            Some(executor) => executor.stacks().await,
            None => Err(Error::InvalidArgument {
                what: "a driver shows its threads to nobody; ask about a task or an actor".into(),
            }),
        }
    }

    async fn keeps(self, _: Context, objects: Vec<ObjectId>, are_jobs_over: bool) -> Vec<ObjectId> {
        self.process.owner.keeps(objects, are_jobs_over)
    }

    async fn read_executable(self, _: Context, offset: u64) -> Result<Payload, Error> {
        // Reading a megabyte of a file that is being executed comes from the page cache.
        read_own_executable(offset).map_err(|error| Error::io("reading the driver's executable", &error))
    }
}

fn read_own_executable(offset: u64) -> std::io::Result<Payload> {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::open("/proc/self/exe")?;
    let mut chunk = vec![0; CHUNK];
    let mut len = 0;
    while len < CHUNK {
        match file.read_at(&mut chunk[len..], offset + len as u64)? {
            0 => break,
            read => len += read,
        }
    }
    chunk.truncate(len);
    Ok(Payload(chunk.into()))
}
