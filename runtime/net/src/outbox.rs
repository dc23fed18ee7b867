//! What is to be written to a connection, and when.
//!
//! Frames are encoded into one buffer, and the connection's writer task takes everything that queued while its last write
//! was under way. Frames that can wait ([`Urgency::Patient`]) go with the next ones that cannot, or after a moment.

use std::io;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::{Buf, BufMut, BytesMut};
use parking_lot::Mutex;
use serde::Serialize;
use tokio::sync::Notify;
use wingbeat_core::codec;

use crate::socket::Socket;

/// Beyond this many unsent bytes senders wait. Large enough to keep a fast link busy, small enough that
/// a slow peer costs little memory.
const HIGH: usize = 4 << 20;

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

/// Is told of the answers to the batches of a [`crate::link::Link`].
pub(crate) trait Answers: Send + Sync {
    fn answered(&self, id: u64, taken_in: bool);
}

#[derive(Default)]
pub(crate) struct Outbox {
    buffer: Mutex<Buffer>,
    wake_writer: Notify,
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
        buffer.waiting.push(cx.waker().clone());
        Poll::Pending
    }

    /// Encodes a frame.
    pub(crate) fn push<T: Serialize>(&self, tag: u8, message: &T, urgency: Urgency) -> io::Result<()> {
        let mut buffer = self.buffer.lock();
        if buffer.closed {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let start = buffer.bytes.len();
        buffer.bytes.put_u32_le(0);
        buffer.bytes.put_u8(tag);
        if let Err(error) = codec::encode_message(message, &mut buffer.bytes) {
            buffer.bytes.truncate(start);
            return Err(io::Error::other(error));
        }
        let len = (buffer.bytes.len() - start - 4) as u32;
        buffer.bytes[start..start + 4].copy_from_slice(&len.to_le_bytes());
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
    }

    /// Writes until the connection is closed. With `probe`, that is written when nothing else was for so long.
    pub(crate) async fn write_loop(&self, socket: &Socket, probe: Option<(&[u8], Duration)>) -> io::Result<()> {
        let mut sending = BytesMut::new();
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
                write_all(socket, &mut sending).await?;
                // One huge message must not hold its memory for ever.
                if sending.capacity() > 2 * HIGH {
                    sending = BytesMut::new();
                }
                continue;
            }
            if closed {
                return socket.shutdown();
            }
            let woken = self.wake_writer.notified();
            match (waiting, probe) {
                (true, _) => ripe = tokio::time::timeout(PATIENCE, woken).await.is_err(),
                (false, None) => woken.await,
                (false, Some((probe, every))) => {
                    if tokio::time::timeout(every, woken).await.is_err() {
                        let mut buffer = self.buffer.lock();
                        buffer.bytes.extend_from_slice(probe);
                        buffer.urgent = true;
                    }
                }
            }
        }
    }
}

async fn write_all(socket: &Socket, bytes: &mut BytesMut) -> io::Result<()> {
    while !bytes.is_empty() {
        match socket.try_write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => bytes.advance(count),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => socket.writable().await?,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
