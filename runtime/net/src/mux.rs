//! Two tarpc channels over one connection, one each way.
//!
//! A frame is four bytes of length, one byte that says which channel, and a message in the form of
//! [`wingbeat_core::codec`]. Both channels and the connection's [`crate::link::Link`] encode straight into one send
//! buffer (`outbox.rs`).
//!
//! ```text
//!   Link, tarpc client ─┐                         ┌─▶ tarpc server
//!                       ├─▶ Outbox ─▶ writer ═══▶ reader
//!   tarpc server ───────┘                         └─▶ Link, tarpc client
//! ```

use std::io;
use std::marker::PhantomData;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::{Buf, Bytes, BytesMut};
use futures::stream::{FuturesUnordered, StreamExt};
use futures::{FutureExt, Sink, Stream as FuturesStream};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tarpc::client::RpcError;
use tarpc::server::{BaseChannel, Channel, Serve};
use tarpc::{ClientMessage, Response, ServerError, context};
use tokio::sync::{mpsc, watch};
use wingbeat_core::codec;

use crate::address::Stream;
use crate::faults::{self, Carries};
use crate::memory::Ebb;
use crate::outbox::{FRAME_LIMIT, Outbox, PushError, Urgency};
use crate::silence::{Probing, Silence};
use crate::socket::Socket;

/// Room for what a read brings, in bytes.
const ROOM: usize = 64 << 10;

/// Decoded messages that wait for a channel's consumer. Consumers are prompt; this only smooths.
const INBOX: usize = 256;

/// Requests in flight on a channel; beyond it, callers wait. Batches make large numbers pointless.
const IN_FLIGHT: usize = 4096;

/// A peer with more unanswered requests keeps to no limit of ours, and would fill this process's memory by not reading the
/// answers. More than a client of ours and its link can ever have.
const UNANSWERED: usize = 2 * IN_FLIGHT;

/// Requests that are begun before those that wait are looked at again, so that a peer which never pauses cannot keep them
/// from going on.
const TURN: usize = 32;

/// What is left in the socket when we close a connection is read for so long, since closing a TCP socket with unread input
/// would take back what was written last.
const LINGER: Duration = Duration::from_secs(1);

/// How long the other side may take nothing of what was queued before a connection was closed here.
const TAKES: Duration = Duration::from_secs(5);

/// The longest deadline that is taken from a peer. The timer wheel behind it takes no more than about two years, and adding
/// too much to a clock panics.
const DEADLINE_LIMIT: Duration = Duration::from_secs(31 * 24 * 3600);

pub(crate) const REQUEST: u8 = 0;
pub(crate) const RESPONSE: u8 = 1;
const PROBE: u8 = 2;
/// A frame with nothing in it.
const PROBE_FRAME: [u8; 5] = [1, 0, 0, 0, PROBE];

/// Set in the ids of requests that are batches of a link. Their answers say only that they were taken in, and go with
/// whatever goes back next.
pub(crate) const LINK: u64 = 1 << 63;
/// Set besides when somebody waits for the answer.
pub(crate) const HURRY: u64 = 1 << 62;

/// A context for calls that are ended by the connection's end and not by a clock. Thirty days, which is within what a peer
/// takes.
pub fn no_deadline() -> context::Context {
    within(Duration::from_secs(30 * 24 * 3600))
}

/// A context for a call that must be answered within `limit`.
pub fn within(limit: Duration) -> context::Context {
    let mut context = context::Context::current();
    context.deadline = Instant::now() + limit;
    context
}

/// One channel of a connection: a tarpc transport.
pub struct Half<In, Out> {
    incoming: mpsc::Receiver<In>,
    outbox: Arc<Outbox>,
    tag: u8,
    /// Whether all that has come was taken out, and nothing more comes.
    is_read: bool,
    sends: PhantomData<fn(Out)>,
}

impl<In, Out> FuturesStream for Half<In, Out> {
    type Item = io::Result<In>;
    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let next = self.incoming.poll_recv(cx);
        self.is_read |= matches!(next, Poll::Ready(None));
        next.map(|message| message.map(Ok))
    }
}

/// What a channel sends.
pub trait Outgoing: Serialize + Sized {
    /// The request that this answers, if it is an answer.
    fn answers(&self) -> Option<u64>;

    /// What is sent instead when this cannot be, so that the other side does not wait for it.
    fn instead(&self, why: &str) -> Option<Self>;
}

impl<T: Serialize> Outgoing for ClientMessage<T> {
    fn answers(&self) -> Option<u64> {
        None
    }

    // The caller is here, and is told.
    fn instead(&self, _: &str) -> Option<Self> {
        None
    }
}

impl<T: Serialize> Outgoing for Response<T> {
    fn answers(&self) -> Option<u64> {
        Some(self.request_id)
    }

    fn instead(&self, why: &str) -> Option<Self> {
        let error = ServerError::new(io::ErrorKind::InvalidData, format!("the answer cannot be sent: {why}"));
        Some(Response { request_id: self.request_id, message: Err(error) })
    }
}

impl<In, Out: Outgoing> Sink<Out> for Half<In, Out> {
    type Error = io::Error;

    fn poll_ready(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_room(cx)
    }

    fn start_send(self: Pin<&mut Self>, message: Out) -> io::Result<()> {
        let urgency = match message.answers() {
            Some(id) if id & (LINK | HURRY) == LINK => Urgency::Patient,
            _ => Urgency::Soon,
        };
        match self.outbox.push(self.tag, &message, urgency) {
            Err(PushError::Refused(why)) => match message.instead(&why) {
                Some(instead) => Ok(self.outbox.push(self.tag, &instead, urgency)?),
                None => Err(PushError::Refused(why).into()),
            },
            Err(PushError::Closed) if self.tag == RESPONSE => Ok(()),
            pushed => Ok(pushed?),
        }
    }

    /// Pending exactly while [`Sink::poll_ready`] is: tarpc alternates between the two until that is ready, within one
    /// poll, in which the writer cannot run.
    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_room(cx)
    }

    fn poll_close(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

impl<In, Out> Half<In, Out> {
    /// Ready while there is room. Nobody needs answers once the connection has ended, but what was said before that is still
    /// to be taken in: results, above all. Then it is an error, which ends who serves whatever it still waits for.
    fn poll_room(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.outbox.poll_room(cx) {
            Poll::Ready(Err(_)) if self.tag == RESPONSE && !self.is_read => Poll::Ready(Ok(())),
            room => room,
        }
    }
}

/// A living connection. Dropping every clone does not close it; [`Connection::close`] does.
#[derive(Clone)]
pub struct Connection {
    outbox: Arc<Outbox>,
    ended: watch::Receiver<bool>,
    silence: watch::Receiver<bool>,
}

impl Connection {
    pub(crate) fn outbox(&self) -> &Arc<Outbox> {
        &self.outbox
    }

    /// Ends the connection after what is queued has been written.
    pub fn close(&self) {
        self.outbox.close();
    }

    /// Ends it as [`Connection::close`] does when what is returned is dropped, also with a future that is given up.
    pub fn closes(&self) -> Closes {
        Closes(self.clone())
    }

    /// Whether this is the same connection.
    pub fn is(&self, other: &Connection) -> bool {
        Arc::ptr_eq(&self.outbox, &other.outbox)
    }

    /// Whether it has ended.
    pub fn is_closed(&self) -> bool {
        // Its task may have ended without a word.
        *self.ended.borrow() || self.ended.has_changed().is_err()
    }

    /// Whether nothing was heard for the limit. Then the connection has ended, unless that is only noted
    /// ([`Probing::Notes`]).
    pub fn silence(&self) -> watch::Receiver<bool> {
        self.silence.clone()
    }

    /// Waits until it has ended, from either side.
    pub async fn closed(&self) {
        let mut ended = self.ended.clone();
        let _ = ended.wait_for(|ended| *ended).await;
    }
}

/// See [`Connection::closes`].
#[must_use = "the connection ends when this is dropped"]
pub struct Closes(Connection);

impl Drop for Closes {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// The transport of a tarpc client of a service with these requests and responses.
pub type ClientHalf<Req, Resp> = Half<Response<Resp>, ClientMessage<Req>>;
/// The transport of a tarpc server.
pub type ServerHalf<Req, Resp> = Half<ClientMessage<Req>, Response<Resp>>;

/// How a connection's reader waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Waiting {
    /// Asleep.
    Asleep,
    /// For tasks and calls: awake for a moment, where an answer is likely to come at once ([`crate::spin`]).
    Awake,
}

/// Starts a connection over `stream` on the current tokio runtime: a client of one service and a server
/// of another. Both sides call this, with the services exchanged.
pub fn connect<CReq, CResp, SReq, SResp>(
    stream: Stream,
    waiting: Waiting,
) -> (Connection, ClientHalf<CReq, CResp>, ServerHalf<SReq, SResp>)
where
    CReq: Carries,
    CResp: DeserializeOwned + Send + 'static,
    SReq: DeserializeOwned + Send + 'static,
    SResp: Serialize + Send + 'static,
{
    connect_probing(stream, waiting, Probing::default())
}

/// As [`connect`], where silence matters on one machine, too. The sides must agree on who probes.
pub fn connect_probing<CReq, CResp, SReq, SResp>(
    stream: Stream,
    waiting: Waiting,
    probing: Probing,
) -> (Connection, ClientHalf<CReq, CResp>, ServerHalf<SReq, SResp>)
where
    CReq: Carries,
    CResp: DeserializeOwned + Send + 'static,
    SReq: DeserializeOwned + Send + 'static,
    SResp: Serialize + Send + 'static,
{
    let silence = Silence::new(probing, matches!(stream, Stream::Tcp(_)));
    let noted = silence.noted();
    let stream = faults::between::<CReq>(stream);
    let socket = Socket::new(stream, waiting == Waiting::Awake);
    let outbox = Arc::new(Outbox::default());
    let (to_client, from_server) = mpsc::channel(INBOX);
    let (to_server, from_client) = mpsc::channel(INBOX);
    let (ended_tx, ended) = watch::channel(false);
    let closing = outbox.clone();
    // The socket is this task's alone, so that it is closed with it.
    tokio::spawn(async move {
        // When this is over, nothing more is handed to who serves and asks.
        let closed_here = {
            let mut reading = pin!(read_loop::<CResp, SReq>(&socket, &closing, to_client, to_server, &silence));
            let writing = closing.write_loop(&socket, &PROBE_FRAME, || silence.probe_every());
            tokio::select! {
                ended = &mut reading => {
                    if let Err(error) = ended {
                        tracing::debug!(%error, "a connection ended while reading");
                    }
                    // Who serves runs on this thread, and sees that nothing more comes after this.
                    closing.close();
                    false
                }
                // Whoever reads nothing holds nobody up who leaves.
                () = async {
                    closing.closed().await;
                    let mut before = None;
                    while before != Some(closing.written()) {
                        before = Some(closing.written());
                        tokio::time::sleep(TAKES).await;
                    }
                } => false,
                ended = writing => {
                    closing.close();
                    if let Err(error) = &ended {
                        tracing::debug!(%error, "a connection ended while writing");
                        // What the other side has said before it went is still there.
                        let _ = tokio::time::timeout(LINGER, &mut reading).await;
                    }
                    ended.is_ok()
                }
            }
        };
        let _ = ended_tx.send(true);
        if closed_here {
            let _ = tokio::time::timeout(LINGER, read_to_end(&socket)).await;
        }
    });
    let connection = Connection { outbox: outbox.clone(), ended, silence: noted };
    let client =
        Half { incoming: from_server, outbox: outbox.clone(), tag: REQUEST, is_read: false, sends: PhantomData };
    let server = Half { incoming: from_client, outbox, tag: RESPONSE, is_read: false, sends: PhantomData };
    (connection, client, server)
}

async fn read_loop<CResp, SReq>(
    socket: &Socket,
    outbox: &Outbox,
    to_client: mpsc::Sender<Response<CResp>>,
    to_server: mpsc::Sender<ClientMessage<SReq>>,
    silence: &Silence,
) -> io::Result<()>
where
    CResp: DeserializeOwned,
    SReq: DeserializeOwned,
{
    let mut buffer = BytesMut::with_capacity(ROOM);
    let mut ebb = Ebb::default();
    loop {
        while let Some(mut frame) = next_frame(&mut buffer)? {
            ebb.holds(frame.len());
            let tag = frame.get_u8();
            // A channel whose consumer is gone just loses its messages: the other may live on.
            match tag {
                REQUEST => {
                    limit_deadline(&mut frame);
                    let message = codec::decode_message(on_its_own(frame)).map_err(io::Error::other)?;
                    let _ = to_server.send(message).await;
                }
                RESPONSE => {
                    if let Some((id, taken_in)) = answer_to_link(&frame) {
                        outbox.answered(id, taken_in);
                        continue;
                    }
                    let message = codec::decode_message(on_its_own(frame)).map_err(io::Error::other)?;
                    let _ = to_client.send(message).await;
                }
                PROBE => {}
                other => return Err(io::Error::other(format!("a frame of unknown kind {other}"))),
            }
        }
        buffer.reserve(ROOM);
        let read = async {
            // What is left of a large buffer holds all of it.
            if let Some(keeps) = ebb.keeps()
                && buffer.is_empty()
            {
                if let Ok(read) = tokio::time::timeout(keeps, socket.read(&mut buffer)).await {
                    return read;
                }
                buffer = BytesMut::with_capacity(ROOM);
                ebb.is_over();
            }
            socket.read(&mut buffer).await
        };
        if silence.reading(read).await? == 0 {
            return Ok(());
        }
    }
}

/// Up to this length a frame gets memory of its own, in bytes. What is kept of it, such as a small result, would keep all of the buffer, and
/// the next read would need another.
const OWN_MEMORY: usize = 16 << 10;

fn on_its_own(frame: BytesMut) -> Bytes {
    match frame.len() {
        ..=OWN_MEMORY => Bytes::copy_from_slice(&frame),
        _ => frame.freeze(),
    }
}

async fn read_to_end(socket: &Socket) {
    let mut buffer = BytesMut::with_capacity(ROOM);
    while socket.read(&mut buffer).await.is_ok_and(|count| count > 0) {
        buffer.clear();
    }
}

/// Shortens the deadline of a [`tarpc::Request`] to what can be added to a clock. Its body begins after four bytes, with the
/// discriminant of [`ClientMessage`] and then the seconds of the deadline.
fn limit_deadline(frame: &mut [u8]) {
    if frame.get(4..8) == Some(&[0; 4])
        && let Some(seconds) = frame.get_mut(8..16)
        && let Some(now) = seconds.first_chunk()
    {
        let limited = u64::from_le_bytes(*now).min(DEADLINE_LIMIT.as_secs());
        seconds.copy_from_slice(&limited.to_le_bytes());
    }
}

/// A [`Response`] to a batch of a link. Its body begins after four bytes, with the id and the discriminant of a `Result`.
fn answer_to_link(frame: &[u8]) -> Option<(u64, bool)> {
    let body = frame.get(4..)?;
    let id = u64::from_le_bytes(*body.first_chunk()?);
    let failed = u32::from_le_bytes(*body.get(8..)?.first_chunk()?);
    (id & LINK != 0).then_some((id, failed == 0))
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
    let mut begun = 0;
    loop {
        if begun >= TURN {
            begun = 0;
            while let Some(Some(())) = waiting.next().now_or_never() {}
        }
        tokio::select! {
            biased;
            request = requests.next() => {
                let Some(Ok(request)) = request else { return };
                begun += 1;
                let mut handling = Box::pin(request.execute(service.clone()));
                if futures::poll!(&mut handling).is_pending() {
                    waiting.push(handling);
                    if waiting.len() > UNANSWERED {
                        tracing::warn!("ended a connection whose peer has {UNANSWERED} unanswered requests");
                        return;
                    }
                }
            }
            Some(_) = waiting.next(), if !waiting.is_empty() => {}
        }
    }
}

/// Serves ([`serve`]) with something else that goes on meanwhile, such as sending, and whose end is not the connection's: what the
/// other side has said is taken in to the last word.
pub async fn beside(serving: impl Future<Output = ()>, other: impl Future<Output = ()>) {
    let other = async {
        other.await;
        std::future::pending::<()>().await;
    };
    tokio::select! {
        biased;
        () = serving => {}
        () = other => {}
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
            RpcError::Server(error) => error.detail,
            RpcError::Send(error) => error.to_string(),
            other => other.to_string(),
        },
    })
}

#[cfg(test)]
mod tests {
    use tarpc::Request;

    use super::*;

    fn frame(deadline: Duration) -> BytesMut {
        let request = Request { context: within(deadline), id: 7, message: 8u32 };
        let mut frame = BytesMut::new();
        codec::encode_message(&ClientMessage::Request(request), &mut frame).unwrap();
        frame
    }

    fn seconds(frame: &BytesMut) -> u64 {
        match codec::decode_message(frame.clone().freeze()).unwrap() {
            ClientMessage::<u32>::Request(request) => {
                request.context.deadline.saturating_duration_since(Instant::now()).as_secs()
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_deadline_is_taken_as_it_is_unless_no_clock_could_hold_it() {
        for usual in [Duration::from_secs(60), Duration::from_secs(30 * 24 * 3600)] {
            let mut frame = frame(usual);
            let before = frame.clone();
            limit_deadline(&mut frame);
            assert_eq!(frame, before);
        }
        for huge in [DEADLINE_LIMIT.as_secs() + 100, u64::MAX / 2, u64::MAX] {
            let mut frame = frame(Duration::from_secs(1));
            frame[8..16].copy_from_slice(&huge.to_le_bytes());
            limit_deadline(&mut frame);
            assert!((DEADLINE_LIMIT.as_secs() - 1..=DEADLINE_LIMIT.as_secs() + 5).contains(&seconds(&frame)));
        }
    }

    #[test]
    fn a_frame_that_is_cut_short_has_no_deadline() {
        for len in 0..16 {
            limit_deadline(&mut frame(Duration::from_secs(1))[..len]);
        }
    }
}
