//! Carries a connection's frames, and does to them what is asked for.

use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use parking_lot::Mutex;
use tarpc::{ClientMessage, Request};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::net::UnixStream;
use tokio::sync::Notify;
use wingbeat_core::codec;

use super::Carries;
use crate::mux::{REQUEST, RESPONSE};
use crate::stream::Stream;

/// Set in the id of a request that is sent a second time, so that its answer is known for that. Ids of calls count from 0, and
/// those of links have only higher bits besides.
const AGAIN: u64 = 1 << 61;

/// After a cut, how long what was sent may take to be read.
const LINGER: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fault {
    Lose,
    LoseAnswer,
    Repeat,
    Delay,
    Cut,
}

/// A fault, and at which frame of this process with such a message, counted from 1.
struct PlannedFault {
    fault: Fault,
    kind: String,
    at: u32,
    seen: AtomicU32,
}

/// What is asked for, and what was done.
pub(super) struct Plan {
    faults: Vec<PlannedFault>,
    notes: bool,
    folder: Option<PathBuf>,
    delay: Duration,
    /// What this process has done or noted.
    done: Mutex<BTreeSet<String>>,
}

/// What the environment asks for, if it does.
pub(super) fn asked_for() -> Option<&'static Plan> {
    static PLAN: LazyLock<Option<Plan>> = LazyLock::new(|| Plan::read(&std::env::var("WINGBEAT_FAULT").ok()?));
    PLAN.as_ref()
}

impl Plan {
    fn read(text: &str) -> Option<Plan> {
        let mut faults = Vec::new();
        for fault in text.split(';').filter(|fault| *fault != "note") {
            let (name, kind) = fault.split_once(' ')?;
            let fault = match name {
                "lose" => Fault::Lose,
                "lose-answer" => Fault::LoseAnswer,
                "repeat" => Fault::Repeat,
                "delay" => Fault::Delay,
                "cut" => Fault::Cut,
                _ => return None,
            };
            let (kind, at) = kind.split_once('@').unwrap_or((kind, "1"));
            faults.push(PlannedFault { fault, kind: kind.to_owned(), at: at.parse().ok()?, seen: AtomicU32::new(0) });
        }
        let notes = text.split(';').any(|fault| fault == "note");
        let folder = std::env::var_os("WINGBEAT_FAULT_DIR").map(PathBuf::from);
        let delay = std::env::var("WINGBEAT_FAULT_MS").ok().and_then(|ms| ms.parse().ok()).unwrap_or(5_000);
        let delay = Duration::from_millis(delay);
        Some(Plan { faults, notes, folder, delay, done: Mutex::default() })
    }

    /// What is to happen to a frame with these kinds.
    fn fault_of(&self, kinds: &[&str]) -> Option<Fault> {
        if self.notes {
            let noted = kinds.iter().filter(|kind| !self.faults.iter().any(|asked| asked.kind == **kind));
            noted.for_each(|kind| {
                self.claims(kind);
            });
        }
        let due = |asked: &&PlannedFault| {
            kinds.contains(&asked.kind.as_str()) && asked.seen.fetch_add(1, Ordering::Relaxed) + 1 == asked.at
        };
        self.faults.iter().filter(due).find(|asked| self.claims(&asked.kind)).map(|asked| asked.fault)
    }

    /// Whether this process is the first to do it.
    fn claims(&self, kind: &str) -> bool {
        if !self.done.lock().insert(kind.to_owned()) {
            return false;
        }
        let Some(folder) = &self.folder else { return true };
        let by = format!("pid {}", std::process::id());
        let claimed = std::fs::OpenOptions::new().write(true).create_new(true).open(folder.join(kind));
        claimed.is_ok_and(|mut file| io::Write::write_all(&mut file, by.as_bytes()).is_ok())
    }
}

/// What both directions of a connection know.
#[derive(Default)]
struct Shared {
    /// The request whose answer is lost.
    unanswered: Mutex<Option<u64>>,
    /// The connection is over.
    cut: Notify,
}

/// The process's end of a relay for `stream`.
pub(super) fn relayed<Asks: Carries>(stream: Stream, plan: &'static Plan) -> Stream {
    let Ok((here, inside)) = UnixStream::pair() else { return stream };
    tokio::spawn(carry::<Asks>(inside, stream, plan));
    Stream::Unix(here)
}

async fn carry<Asks: Carries>(inside: UnixStream, outside: Stream, plan: &'static Plan) {
    let (from_inside, mut to_inside) = tokio::io::split(inside);
    let (mut from_outside, to_outside) = tokio::io::split(outside);
    let shared = Arc::new(Shared::default());
    let hears = shared.clone();
    let carrying = async {
        tokio::join!(
            says::<Asks>(from_inside, to_outside, plan, &shared),
            // The end of what the other side says is passed on when all of it was.
            async {
                let _ = heard(&mut from_outside, &mut to_inside, &hears).await;
                let _ = to_inside.shutdown().await;
            }
        )
    };
    let is_cut = tokio::select! {
        _ = carrying => false,
        () = shared.cut.notified() => true,
    };
    drop(to_inside);
    if is_cut {
        // Closing it at once could take back what was just sent.
        let _ = tokio::time::timeout(LINGER, tokio::io::copy(&mut from_outside, &mut tokio::io::sink())).await;
    }
}

/// What this process says.
async fn says<Asks: Carries>(
    mut from: ReadHalf<UnixStream>,
    mut to: WriteHalf<Stream>,
    plan: &Plan,
    shared: &Shared,
) -> io::Result<()> {
    while let Some(frame) = next_frame(&mut from).await? {
        let asked = asked::<Asks>(&frame);
        let fault = asked.as_ref().and_then(|asked| plan.fault_of(&asked.message.kinds()));
        if fault == Some(Fault::LoseAnswer) {
            *shared.unanswered.lock() = asked.as_ref().map(|asked| asked.id);
        }
        if fault == Some(Fault::Delay) {
            tokio::time::sleep(plan.delay).await;
        }
        if fault != Some(Fault::Lose) {
            to.write_all(&frame).await?;
        }
        if fault == Some(Fault::Repeat)
            && let Some(asked) = asked
        {
            to.write_all(&again(asked)).await?;
        }
        if !matches!(fault, Some(Fault::Lose | Fault::Cut)) {
            continue;
        }
        let _ = to.shutdown().await;
        shared.cut.notify_one();
        // The other direction ends this one.
        std::future::pending::<()>().await;
    }
    to.shutdown().await
}

/// What the other side says.
async fn heard(
    from: &mut (impl AsyncRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
    shared: &Shared,
) -> io::Result<()> {
    while let Some(frame) = next_frame(from).await? {
        let answered = answered(&frame);
        if answered.is_some_and(|id| *shared.unanswered.lock() == Some(id)) {
            shared.cut.notify_one();
            std::future::pending::<()>().await;
        }
        if answered.is_none_or(|id| id & AGAIN == 0) {
            to.write_all(&frame).await?;
        }
    }
    Ok(())
}

/// A frame with its length; none at the end.
async fn next_frame(from: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<Bytes>> {
    let mut length = [0; 4];
    match from.read_exact(&mut length).await {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        read => read?,
    };
    let mut frame = vec![0; 4 + u32::from_le_bytes(length) as usize];
    frame[..4].copy_from_slice(&length);
    from.read_exact(&mut frame[4..]).await?;
    Ok(Some(frame.into()))
}

/// The request in a frame, if one is in it.
fn asked<Asks: Carries>(frame: &Bytes) -> Option<Request<Asks>> {
    if frame.get(4) != Some(&REQUEST) {
        return None;
    }
    match codec::decode_message(frame.slice(5..)).ok()? {
        ClientMessage::Request(request) => Some(request),
        _ => None,
    }
}

/// The frame of a request that is sent a second time.
fn again<Asks: Carries>(asked: Request<Asks>) -> Bytes {
    let mut frame = BytesMut::zeroed(4);
    frame.put_u8(REQUEST);
    let request = Request { id: asked.id | AGAIN, ..asked };
    match codec::encode_message(&ClientMessage::Request(request), &mut frame) {
        Ok(()) => {
            let length = (frame.len() - 4) as u32;
            frame[..4].copy_from_slice(&length.to_le_bytes());
            frame.freeze()
        }
        Err(_) => Bytes::new(),
    }
}

/// The request that a frame answers, if it is an answer. Its body begins after four bytes, with the id.
fn answered(frame: &[u8]) -> Option<u64> {
    let id = frame.get(9..).filter(|_| frame.get(4) == Some(&RESPONSE))?;
    id.first_chunk().map(|id| u64::from_le_bytes(*id))
}
