//! What is to be written to a connection, and when.
//!
//! Frames are encoded into one buffer, and the connection's writer task takes everything that queued while its last write
//! was under way. Frames that can wait ([`Urgency::Patient`]) go with the next ones that cannot, or after a moment.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::{BufMut, BytesMut};
use parking_lot::Mutex;
use serde::Serialize;
use tokio::sync::Notify;
use wingbeat_core::codec;

use crate::memory::Ebb;
use crate::socket::Socket;

/// Beyond this many unsent bytes senders wait. Large enough to keep a fast link busy, small enough that
/// a slow peer costs little memory.
const HIGH: usize = 4 << 20;

/// No frame is larger, in bytes after its length. Large values travel as bulk, and senders cut batches by bytes far below
/// this; a receiver ends a connection that claims more.
pub(crate) const FRAME_LIMIT: usize = 256 << 20;

/// How long a patient frame waits for company.
const PATIENCE: Duration = Duration::from_millis(1);

/// When a frame is to be written.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Urgency {
    /// As soon as the writer runs.
    Soon,
    /// With others, or after a moment.
    Patient,
}

/// Why a message was not sent.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PushError {
    /// The connection is over.
    #[error("the connection is closed")]
    Closed,
    /// The message cannot be sent over any connection; this one goes on.
    #[error("{0}")]
    Refused(String),
}

impl From<PushError> for io::Error {
    fn from(error: PushError) -> io::Error {
        match error {
            PushError::Closed => io::ErrorKind::BrokenPipe.into(),
            PushError::Refused(why) => io::Error::new(io::ErrorKind::InvalidData, why),
        }
    }
}

/// Is told of the answers to the batches of a [`crate::link::Link`].
pub(crate) trait Answers: Send + Sync {
    fn answered(&self, id: u64, taken_in: bool);
}

#[derive(Default)]
pub(crate) struct Outbox {
    buffer: Mutex<Buffer>,
    wake_writer: Notify,
    /// Told of the end, also when the writer waits for a peer that reads nothing.
    closes: Notify,
    /// Bytes that were written.
    written: AtomicU64,
    answers: OnceLock<Arc<dyn Answers>>,
}

#[derive(Default)]
struct Buffer {
    bytes: BytesMut,
    /// Whether any of the bytes should not wait.
    urgent: bool,
    closed: bool,
    /// Senders that found the buffer full.
    waiting: Vec<Waker>,
}

impl Outbox {
    /// Has `answers` told of the answers to one-way batches. There is one link a connection.
    pub(crate) fn tell(&self, answers: Arc<dyn Answers>) {
        let _ = self.answers.set(answers);
    }

    pub(crate) fn answered(&self, id: u64, taken_in: bool) {
        if let Some(answers) = self.answers.get() {
            answers.answered(id, taken_in);
        }
    }

    /// Ready while there is room.
    pub(crate) fn poll_room(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut buffer = self.buffer.lock();
        if buffer.closed {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        if buffer.bytes.len() < HIGH {
            return Poll::Ready(Ok(()));
        }
        // Polled often while it is full: each task waits once.
        if !buffer.waiting.iter().any(|waiting| waiting.will_wake(cx.waker())) {
            buffer.waiting.push(cx.waker().clone());
        }
        Poll::Pending
    }

    /// Encodes a frame.
    ///
    /// # Errors
    /// After one, nothing of the message is in the buffer, and other messages can be sent unless the outbox is closed.
    pub(crate) fn push<T: Serialize>(&self, tag: u8, message: &T, urgency: Urgency) -> Result<(), PushError> {
        let mut buffer = self.buffer.lock();
        if buffer.closed {
            return Err(PushError::Closed);
        }
        let start = buffer.bytes.len();
        buffer.bytes.put_u32_le(0);
        buffer.bytes.put_u8(tag);
        let encoded = codec::encode_message(message, &mut buffer.bytes);
        let len = buffer.bytes.len() - start - 4;
        let refused = match encoded {
            Err(error) => Some(error.to_string()),
            Ok(()) if len > FRAME_LIMIT => {
                Some(format!("a message of {len} bytes is over the limit of {FRAME_LIMIT} bytes"))
            }
            Ok(()) => None,
        };
        if let Some(why) = refused {
            buffer.bytes.truncate(start);
            // It must not hold the memory of what was refused.
            if start == 0 && buffer.bytes.capacity() > 2 * HIGH {
                buffer.bytes = BytesMut::new();
            }
            return Err(PushError::Refused(why));
        }
        buffer.bytes[start..start + 4].copy_from_slice(&(len as u32).to_le_bytes());
        let wake = match urgency {
            Urgency::Patient => start == 0,
            Urgency::Soon => !std::mem::replace(&mut buffer.urgent, true),
        };
        drop(buffer);
        if wake {
            self.wake_writer.notify_one();
        }
        Ok(())
    }

    /// No more frames; what is there is still written.
    pub(crate) fn close(&self) {
        let mut buffer = self.buffer.lock();
        buffer.closed = true;
        for waker in buffer.waiting.drain(..) {
            waker.wake();
        }
        drop(buffer);
        self.wake_writer.notify_one();
        self.closes.notify_one();
    }

    /// Waits until it was closed here. For one who waits.
    pub(crate) async fn closed(&self) {
        self.closes.notified().await;
    }

    /// How many bytes were written so far.
    pub(crate) fn written(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }

    /// Writes until the connection is closed. The `probe` is written when nothing else was for as long as `every` says each time.
    pub(crate) async fn write_loop(
        &self,
        socket: &Socket,
        probe: &[u8],
        every: impl Fn() -> Option<Duration>,
    ) -> io::Result<()> {
        let mut sending = BytesMut::new();
        let mut ebb = Ebb::default();
        // Whether patient frames have waited long enough.
        let mut ripe = false;
        loop {
            let (waiting, closed) = {
                let mut buffer = self.buffer.lock();
                if buffer.urgent || buffer.closed || ripe {
                    std::mem::swap(&mut buffer.bytes, &mut sending);
                    buffer.urgent = false;
                    for waker in buffer.waiting.drain(..) {
                        waker.wake();
                    }
                }
                (!buffer.bytes.is_empty(), buffer.closed)
            };
            ripe = false;
            if !sending.is_empty() {
                ebb.holds(sending.len());
                self.write_all(socket, &sending).await?;
                sending.clear();
                // One huge message must not hold its memory at all.
                if sending.capacity() > 2 * HIGH {
                    sending = BytesMut::new();
                }
                continue;
            }
            if closed {
                return socket.shutdown();
            }
            let keeps = ebb.keeps();
            if keeps == Some(Duration::ZERO) {
                sending = BytesMut::new();
                let mut buffer = self.buffer.lock();
                if buffer.bytes.is_empty() {
                    buffer.bytes = BytesMut::new();
                    ebb.is_over();
                } else {
                    // What has come meanwhile goes first.
                    ripe = true;
                }
                continue;
            }
            let woken = self.wake_writer.notified();
            let patience = waiting.then_some(PATIENCE);
            let every = every();
            let Some(limit) = [patience, keeps, every].into_iter().flatten().min() else {
                woken.await;
                continue;
            };
            if tokio::time::timeout(limit, woken).await.is_ok() {
                continue;
            }
            match every {
                _ if waiting => ripe = true,
                Some(every) if every == limit => {
                    let mut buffer = self.buffer.lock();
                    buffer.bytes.extend_from_slice(probe);
                    buffer.urgent = true;
                }
                _ => {}
            }
        }
    }

    async fn write_all(&self, socket: &Socket, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match socket.try_write(bytes) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => {
                    self.written.fetch_add(count as u64, Ordering::Relaxed);
                    bytes = &bytes[count..];
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => socket.writable().await?,
                Err(error) if lacks_memory(&error) => tokio::time::sleep(WITHOUT_MEMORY).await,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// How often a write is tried for which the kernel has no memory. That of a control group at its limit comes back.
const WITHOUT_MEMORY: Duration = Duration::from_millis(10);

fn lacks_memory(error: &io::Error) -> bool {
    use rustix::io::Errno;
    matches!(Errno::from_io_error(error), Some(Errno::NOBUFS | Errno::NOMEM))
}
