//! Two tarpc channels over one connection, one each way.
//!
//! A frame is four bytes of length, one byte that says which channel, and a message in the form of
//! [`wingbeat_core::codec`]. Both channels encode straight into one send buffer, which a single task
//! writes out: whatever queued while the last write was under way goes out as one.
//!
//! ```text
//!   tarpc client ─┐                         ┌─▶ tarpc server
//!                 ├─▶ Outbox ─▶ writer ═══▶ reader
//!   tarpc server ─┘                         └─▶ tarpc client
//! ```

use std::io;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use bytes::{Buf, BufMut, BytesMut};
use futures::stream::{FuturesUnordered, StreamExt};
use futures::{Sink, Stream as FuturesStream};
use parking_lot::Mutex;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tarpc::client::RpcError;
use tarpc::server::{BaseChannel, Channel, Serve};
use tarpc::{ClientMessage, Response, context};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::{Notify, mpsc, watch};
use wingbeat_core::codec;

use crate::address::Stream;

/// A TCP connection on which nothing was heard for so long is dead. Probes go out every second, so
/// this is ten lost ones.
pub const SILENCE_LIMIT: Duration = Duration::from_secs(10);
const PROBE_EVERY: Duration = Duration::from_secs(1);

/// No message is larger: values above the inline limit travel as bulk, and senders cut batches well
/// below this.
const FRAME_LIMIT: usize = 256 << 20;

/// Beyond this many unsent bytes senders wait. Large enough to keep a fast link busy, small enough that
/// a slow peer costs little memory.
const OUTBOX_HIGH: usize = 4 << 20;

/// Decoded messages that wait for a channel's consumer. Consumers are prompt; this only smooths.
const INBOX: usize = 256;

/// Requests in flight on a channel; beyond it, callers wait. Batches make large numbers pointless.
const IN_FLIGHT: usize = 4096;

const REQUEST: u8 = 0;
const RESPONSE: u8 = 1;
const PROBE: u8 = 2;

/// A context for calls that are ended by the connection's end and not by a clock. Thirty days, because
/// the timer wheel behind it takes no more than about two years.
pub fn no_deadline() -> context::Context {
    within(Duration::from_secs(30 * 24 * 3600))
}

/// A context for a call that must be answered within `limit`.
pub fn within(limit: Duration) -> context::Context {
    let mut context = context::Context::current();
    context.deadline = Instant::now() + limit;
    context
}

struct Outbox {
    buffer: Mutex<OutBuffer>,
    wake_writer: Notify,
}

#[derive(Default)]
struct OutBuffer {
    bytes: BytesMut,
    closed: bool,
    /// Senders that found the buffer full.
    waiting: Vec<Waker>,
}

impl Outbox {
    fn push<T: Serialize>(&self, tag: u8, message: &T) -> io::Result<()> {
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
        drop(buffer);
        self.wake_writer.notify_one();
        Ok(())
    }

    fn close(&self) {
        let mut buffer = self.buffer.lock();
        buffer.closed = true;
        for waker in buffer.waiting.drain(..) {
            waker.wake();
        }
        drop(buffer);
        self.wake_writer.notify_one();
    }
}

/// One channel of a connection: a tarpc transport.
pub struct Half<In, Out> {
    incoming: mpsc::Receiver<In>,
    outbox: Arc<Outbox>,
    tag: u8,
    sends: PhantomData<fn(Out)>,
}

impl<In, Out> FuturesStream for Half<In, Out> {
    type Item = io::Result<In>;
    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.incoming.poll_recv(cx).map(|message| message.map(Ok))
    }
}

impl<In, Out: Serialize> Sink<Out> for Half<In, Out> {
    type Error = io::Error;

    fn poll_ready(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut buffer = self.outbox.buffer.lock();
        if buffer.closed {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        if buffer.bytes.len() < OUTBOX_HIGH {
            return Poll::Ready(Ok(()));
        }
        buffer.waiting.push(cx.waker().clone());
        Poll::Pending
    }

    fn start_send(self: Pin<&mut Self>, message: Out) -> io::Result<()> {
        self.outbox.push(self.tag, &message)
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_close(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// A living connection. Dropping every clone does not close it; [`Connection::close`] does.
#[derive(Clone)]
pub struct Connection {
    outbox: Arc<Outbox>,
    ended: watch::Receiver<bool>,
}

impl Connection {
    /// Ends the connection after what is queued has been written.
    pub fn close(&self) {
        self.outbox.close();
    }

    /// Whether it has ended.
    pub fn is_closed(&self) -> bool {
        *self.ended.borrow()
    }

    /// Waits until it has ended, from either side.
    pub async fn closed(&self) {
        let mut ended = self.ended.clone();
        let _ = ended.wait_for(|ended| *ended).await;
    }
}

/// The transport of a tarpc client of a service with these requests and responses.
pub type ClientHalf<Req, Resp> = Half<Response<Resp>, ClientMessage<Req>>;
/// The transport of a tarpc server.
pub type ServerHalf<Req, Resp> = Half<ClientMessage<Req>, Response<Resp>>;

/// Starts a connection over `stream` on the current tokio runtime: a client of one service and a server
/// of another. Both sides call this, with the services exchanged.
pub fn connect<CReq, CResp, SReq, SResp>(
    stream: Stream,
) -> (Connection, ClientHalf<CReq, CResp>, ServerHalf<SReq, SResp>)
where
    CReq: Serialize + Send + 'static,
    CResp: DeserializeOwned + Send + 'static,
    SReq: DeserializeOwned + Send + 'static,
    SResp: Serialize + Send + 'static,
{
    let outbox = Arc::new(Outbox { buffer: Mutex::default(), wake_writer: Notify::new() });
    let (to_client, from_server) = mpsc::channel(INBOX);
    let (to_server, from_client) = mpsc::channel(INBOX);
    let (ended_tx, ended) = watch::channel(false);
    let probes = matches!(stream, Stream::Tcp(_));
    let (reader, writer) = tokio::io::split(stream);
    let reader = read_loop::<CResp, SReq, _>(reader, to_client, to_server, probes);
    let writer = write_loop(writer, outbox.clone(), probes);
    let closing = outbox.clone();
    tokio::spawn(async move {
        tokio::select! {
            ended = reader => if let Err(error) = ended {
                tracing::debug!(%error, "a connection ended while reading");
            },
            ended = writer => if let Err(error) = ended {
                tracing::debug!(%error, "a connection ended while writing");
            },
        }
        closing.close();
        let _ = ended_tx.send(true);
    });
    let connection = Connection { outbox: outbox.clone(), ended };
    let client = Half { incoming: from_server, outbox: outbox.clone(), tag: REQUEST, sends: PhantomData };
    let server = Half { incoming: from_client, outbox, tag: RESPONSE, sends: PhantomData };
    (connection, client, server)
}

async fn read_loop<CResp, SReq, R>(
    mut reader: R,
    to_client: mpsc::Sender<Response<CResp>>,
    to_server: mpsc::Sender<ClientMessage<SReq>>,
    probes: bool,
) -> io::Result<()>
where
    CResp: DeserializeOwned,
    SReq: DeserializeOwned,
    R: tokio::io::AsyncRead + Unpin,
{
    let mut buffer = BytesMut::with_capacity(64 << 10);
    loop {
        while let Some(mut frame) = next_frame(&mut buffer)? {
            let tag = frame.get_u8();
            // A channel whose consumer is gone just loses its messages: the other may live on.
            match tag {
                REQUEST => {
                    let message = codec::decode_message(frame.freeze()).map_err(io::Error::other)?;
                    let _ = to_server.send(message).await;
                }
                RESPONSE => {
                    let message = codec::decode_message(frame.freeze()).map_err(io::Error::other)?;
                    let _ = to_client.send(message).await;
                }
                PROBE => {}
                other => return Err(io::Error::other(format!("a frame of unknown kind {other}"))),
            }
        }
        buffer.reserve(64 << 10);
        let read = reader.read_buf(&mut buffer);
        let count = if probes {
            tokio::time::timeout(SILENCE_LIMIT, read).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??
        } else {
            read.await?
        };
        if count == 0 {
            return Ok(());
        }
    }
}

fn next_frame(buffer: &mut BytesMut) -> io::Result<Option<BytesMut>> {
    let Some(head) = buffer.first_chunk::<4>() else { return Ok(None) };
    let len = u32::from_le_bytes(*head) as usize;
    if len == 0 || len > FRAME_LIMIT {
        return Err(io::Error::other(format!("a frame of {len} bytes")));
    }
    if buffer.len() < 4 + len {
        buffer.reserve(4 + len - buffer.len());
        return Ok(None);
    }
    buffer.advance(4);
    Ok(Some(buffer.split_to(len)))
}

async fn write_loop<W: tokio::io::AsyncWrite + Unpin>(
    mut writer: W,
    outbox: Arc<Outbox>,
    probes: bool,
) -> io::Result<()> {
    let mut sending = BytesMut::new();
    loop {
        let closed = {
            let mut buffer = outbox.buffer.lock();
            std::mem::swap(&mut buffer.bytes, &mut sending);
            for waker in buffer.waiting.drain(..) {
                waker.wake();
            }
            buffer.closed
        };
        if !sending.is_empty() {
            writer.write_all(&sending).await?;
            sending.clear();
            // One huge message must not hold its memory for ever.
            if sending.capacity() > 2 * OUTBOX_HIGH {
                sending = BytesMut::new();
            }
            continue;
        }
        if closed {
            return writer.shutdown().await;
        }
        if !probes {
            outbox.wake_writer.notified().await;
        } else if tokio::time::timeout(PROBE_EVERY, outbox.wake_writer.notified()).await.is_err() {
            writer.write_all(&[1, 0, 0, 0, PROBE]).await?;
        }
    }
}

/// The configuration of every tarpc client.
pub fn client_config() -> tarpc::client::Config {
    let mut config = tarpc::client::Config::default();
    config.max_in_flight_requests = IN_FLIGHT;
    config.pending_request_buffer = 64;
    config
}

/// Serves requests until the connection ends. Handlers begin in the order of arrival, and one that never
/// waits is done before the next begins; those that wait go on by themselves.
pub async fn serve<S>(half: ServerHalf<S::Req, S::Resp>, service: S)
where
    S: Serve + Clone + Send + 'static,
    S::Req: tarpc::RequestName + Send + 'static,
    S::Resp: Serialize + Send + 'static,
    ServerHalf<S::Req, S::Resp>: tarpc::Transport<Response<S::Resp>, ClientMessage<S::Req>>,
    <ServerHalf<S::Req, S::Resp> as tarpc::Transport<Response<S::Resp>, ClientMessage<S::Req>>>::TransportError:
        std::error::Error + Send + Sync + 'static,
{
    let config = tarpc::server::Config { pending_response_buffer: 64 };
    let requests = BaseChannel::new(config, half).requests();
    futures::pin_mut!(requests);
    let mut waiting = FuturesUnordered::new();
    loop {
        tokio::select! {
            biased;
            request = requests.next() => {
                let Some(Ok(request)) = request else { return };
                let mut handling = Box::pin(request.execute(service.clone()));
                if futures::poll!(&mut handling).is_pending() {
                    waiting.push(handling);
                }
            }
            Some(_) = waiting.next(), if !waiting.is_empty() => {}
        }
    }
}

/// The answer of a call, with the ways in which a call itself fails made into one.
///
/// # Errors
/// [`wingbeat_core::Error::Unreachable`] when the connection ended or the deadline passed.
pub fn answered<T>(answer: Result<T, RpcError>, who: &str) -> Result<T, wingbeat_core::Error> {
    answer.map_err(|error| wingbeat_core::Error::Unreachable {
        what: who.to_owned(),
        address: "its connection".to_owned(),
        why: match error {
            RpcError::DeadlineExceeded => "it did not answer in time".to_owned(),
            RpcError::Shutdown => "the connection ended".to_owned(),
            other => other.to_string(),
        },
    })
}
