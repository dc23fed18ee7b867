//! A connection from every member to every other.

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq;

use crate::error::{CollectiveError, Result};
use crate::limits;
use crate::memory::Moves;

/// For how long one may do nothing that is waited for, unless told otherwise: as long as gloo waits.
const LIMIT: Duration = Duration::from_secs(1_800);
/// After how long another machine is asked whether it is there, and how often again: it is given up after 11 s.
const PROBE_AFTER: Duration = Duration::from_secs(5);
const PROBE_AGAIN: Duration = Duration::from_secs(2);
/// What is kept at most of a member that sends while this one sends to another.
const EARLY_LIMIT: usize = 256 << 20;
/// What is taken in at a time while this member sends.
const EARLY: usize = 256 << 10;
/// How often who waits looks whether somebody is gone.
const LOOK: Duration = Duration::from_millis(100);
/// How long nothing may move while somebody is gone, before that is why: who has done its part may leave.
const STALL: Duration = Duration::from_secs(1);

/// How a member is reached.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Card {
    /// Members with the same share memory and unix sockets; none if this one wants no such thing.
    machine: Option<String>,
    unix: String,
    tcp: SocketAddr,
    /// Whoever connects shows that it has this card.
    secret: [u8; 16],
}

/// A member that others can connect to.
pub(crate) struct Member {
    unix: UnixListener,
    tcp: TcpListener,
    card: Card,
}

impl Member {
    /// `shares`: whether it may share memory with others of its machine.
    pub(crate) fn new(ip: IpAddr, shares: bool) -> Result<Member> {
        Self::on(shares.then(machine), ip)
    }

    /// On this machine, as far as it wants to share memory.
    pub(crate) fn on(machine: Option<String>, ip: IpAddr) -> Result<Member> {
        let io = |error: std::io::Error| CollectiveError::io("listening for other members", error);
        let name = format!("wingbeat-group-{}-{:016x}", std::process::id(), rand::random::<u64>());
        let address = UnixAddr::from_abstract_name(&name).map_err(io)?;
        let unix = UnixListener::bind_addr(&address).map_err(io)?;
        let tcp = TcpListener::bind((ip, 0)).map_err(io)?;
        let card = Card { machine, unix: name, tcp: tcp.local_addr().map_err(io)?, secret: rand::random() };
        Ok(Member { unix, tcp, card })
    }

    pub(crate) fn card(&self) -> Card {
        self.card.clone()
    }

    /// Connects to all others: to those of lower rank, and from those of higher.
    pub(crate) fn connect(self, rank: u32, cards: &[Card]) -> Result<Mesh> {
        self.connect_within(*limits::CONNECT, rank, cards)
    }

    /// The same, with its time limit.
    pub(crate) fn connect_within(self, limit: Duration, rank: u32, cards: &[Card]) -> Result<Mesh> {
        let until = Instant::now() + limit;
        let mut peers: Vec<Option<OwnedFd>> = cards.iter().map(|_| None).collect();
        for (peer, card) in cards.iter().enumerate().take(rank as usize) {
            peers[peer] = Some(self.call(card, rank, limit)?);
        }
        let mut awaited = cards.len().saturating_sub(rank as usize + 1);
        while awaited > 0 {
            let Some((peer, stream)) = self.answer(cards.len(), until)? else {
                let missing = peers.iter().skip(rank as usize + 1).take_while(|peer| peer.is_some()).count();
                let why = format!("rank {} did not within {limit:?}", rank as usize + 1 + missing);
                return Err(CollectiveError::io("waiting for other members to connect", why));
            };
            if peer as usize > rank as usize && peers[peer as usize].is_none() {
                peers[peer as usize] = Some(stream);
                awaited -= 1;
            }
        }
        for peer in peers.iter().flatten() {
            rustix::io::ioctl_fionbio(peer, true)
                .map_err(|error| CollectiveError::io("making a socket wait", error))?;
        }
        let whole = Whole {
            early: Mutex::new(peers.iter().map(|_| VecDeque::new()).collect()),
            has_early: AtomicBool::new(false),
            limit_ms: AtomicU64::new(LIMIT.as_millis() as u64),
            machines: cards.iter().map(|card| card.machine.clone()).collect(),
            peers,
        };
        Ok(Mesh { rank, members: (0..cards.len() as u32).collect(), whole: Arc::new(whole), moves: None })
    }

    fn call(&self, card: &Card, rank: u32, limit: Duration) -> Result<OwnedFd> {
        let io = |error: std::io::Error| CollectiveError::io("connecting to another member", error);
        let stream: OwnedFd = if card.machine.is_some() && card.machine == self.card.machine {
            let address = UnixAddr::from_abstract_name(&card.unix).map_err(io)?;
            UnixStream::connect_addr(&address).map_err(io)?.into()
        } else {
            let stream = TcpStream::connect_timeout(&card.tcp, limit).map_err(io)?;
            stream.set_nodelay(true).map_err(io)?;
            probe(&stream).map_err(io)?;
            stream.into()
        };
        let mut greeting = [0; 20];
        greeting[..16].copy_from_slice(&card.secret);
        greeting[16..].copy_from_slice(&rank.to_le_bytes());
        let sent = rustix::net::send(&stream, &greeting, SendFlags::NOSIGNAL);
        match sent {
            Ok(20) => Ok(stream),
            Ok(_) => Err(CollectiveError::io("greeting another member", "it took part of it")),
            Err(error) => Err(CollectiveError::io("greeting another member", error)),
        }
    }

    /// The next member that connects; none if nobody does in time.
    fn answer(&self, members: usize, until: Instant) -> Result<Option<(u32, OwnedFd)>> {
        loop {
            let mut fds = [PollFd::new(&self.unix, PollFlags::IN), PollFd::new(&self.tcp, PollFlags::IN)];
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            match poll(&mut fds, Some(&timespec(left))) {
                Err(Errno::INTR) | Ok(0) => continue,
                Err(error) => return Err(CollectiveError::io("waiting for other members", error)),
                Ok(_) => {}
            }
            let by_unix = !fds[0].revents().is_empty();
            // One at a time: what is not accepted now waits.
            let accepted = match by_unix {
                true => self.unix.accept().ok().map(|(stream, _)| OwnedFd::from(stream)),
                false => self.tcp.accept().ok().and_then(|(stream, _)| {
                    stream.set_nodelay(true).ok()?;
                    probe(&stream).ok()?;
                    Some(OwnedFd::from(stream))
                }),
            };
            let greeted = accepted.and_then(|stream| Some((self.greeted(&stream, left)?, stream)));
            if let Some((rank, stream)) = greeted.filter(|(rank, _)| (*rank as usize) < members) {
                return Ok(Some((rank, stream)));
            }
        }
    }

    /// Who connected, if it has this member's card.
    fn greeted(&self, stream: &OwnedFd, limit: Duration) -> Option<u32> {
        let mut greeting = [0; 20];
        let mut read = 0;
        while read < greeting.len() {
            let mut fds = [PollFd::new(stream, PollFlags::IN)];
            if poll(&mut fds, Some(&timespec(limit.min(Duration::from_secs(2))))).ok()? == 0 {
                return None;
            }
            match rustix::net::recv(stream, &mut greeting[read..], RecvFlags::empty()).ok()? {
                (0, _) => return None,
                (count, _) => read += count,
            }
        }
        let knows: bool = greeting[..16].ct_eq(&self.card.secret).into();
        knows.then(|| u32::from_le_bytes([greeting[16], greeting[17], greeting[18], greeting[19]]))
    }
}

/// Has the system ask whether the other machine is still there: a link that is cut says nothing.
fn probe(stream: &TcpStream) -> std::io::Result<()> {
    use rustix::net::sockopt;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, PROBE_AFTER)?;
    sockopt::set_tcp_keepintvl(stream, PROBE_AGAIN)?;
    sockopt::set_tcp_keepcnt(stream, 3)?;
    Ok(())
}

/// Whether a connection has something on its way of which the other machine has not said a word for too long: while there is
/// such, the system asks nothing, and tries for a quarter of an hour. A member that merely does not read is no such case: its
/// system answers.
fn is_cut(peer: &OwnedFd) -> bool {
    // SAFETY: any bytes are a `tcp_info`.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut length = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: the memory is as long as is said.
    let told = unsafe {
        libc::getsockopt(peer.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, (&raw mut info).cast(), &raw mut length)
    };
    // Of a socket of another kind there is no such thing.
    told == 0 && info.tcpi_unacked > 0 && u128::from(info.tcpi_last_ack_recv) > limits::GIVEN_UP.as_millis()
}

/// Names what shares memory and the names of unix sockets.
fn machine() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let network = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    format!("{}/{}/{}", boot.trim(), network.display(), rustix::process::geteuid().as_raw())
}

/// Where members of other machines reach this process.
pub(crate) fn own_ip() -> IpAddr {
    let session = wingbeat::Session::current().ok();
    let tcp = session.and_then(|session| session.runtime().process().address().tcp);
    tcp.map_or(IpAddr::V4(Ipv4Addr::LOCALHOST), |tcp| tcp.ip())
}

fn timespec(duration: Duration) -> Timespec {
    Timespec { tv_sec: duration.as_secs() as i64, tv_nsec: i64::from(duration.subsec_nanos()) }
}

#[doc(hidden)]
/// The other members of a group, seen from any thread: see [`Group::peers`](crate::Group::peers).
#[derive(Debug)]
pub struct Peers(Vec<Option<OwnedFd>>);

impl Peers {
    /// A member that is dead, or has left the group.
    pub fn lost(&self) -> Option<u32> {
        gone(&self.0).first().copied()
    }
}

fn gone(peers: &[Option<OwnedFd>]) -> Vec<u32> {
    let there: Vec<(u32, &OwnedFd)> =
        peers.iter().enumerate().filter_map(|(rank, peer)| Some((rank as u32, peer.as_ref()?))).collect();
    let mut fds: Vec<PollFd<'_>> = there.iter().map(|(_, peer)| PollFd::new(*peer, PollFlags::RDHUP)).collect();
    if poll(&mut fds, Some(&timespec(Duration::ZERO))).is_err() {
        return Vec::new();
    }
    let closed = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
    let is_gone = |fd: &PollFd<'_>, peer: &OwnedFd| fd.revents().intersects(closed) || is_cut(peer);
    there.iter().zip(&fds).filter(|((_, peer), fd)| is_gone(fd, peer)).map(|((rank, _), _)| *rank).collect()
}

/// The connections of one member to a group, or to a part of it. A part's members have numbers of their own, in the order
/// of their ranks; errors name ranks.
pub(crate) struct Mesh {
    /// This member's number.
    pub rank: u32,
    /// The rank of each.
    members: Vec<u32>,
    whole: Arc<Whole>,
    /// Where those see that something moves who wait for this member and not for these.
    moves: Option<Moves>,
}

/// The connections to all of a group.
struct Whole {
    /// By rank; none to itself.
    peers: Vec<Option<OwnedFd>>,
    /// What came from each while this member was sending, before it was asked for.
    early: Mutex<Vec<VecDeque<u8>>>,
    has_early: AtomicBool,
    /// For how long, in milliseconds, one may do nothing that is waited for.
    limit_ms: AtomicU64,
    /// The machine of each, if it shares memory there.
    machines: Vec<Option<String>>,
}

/// What the system says of a connection whose other side is not there any more.
fn is_loss(error: Errno) -> bool {
    matches!(error, Errno::PIPE | Errno::CONNRESET | Errno::TIMEDOUT | Errno::HOSTUNREACH | Errno::NETUNREACH)
}

/// What a transfer has done.
pub(crate) enum Moved {
    Bytes(usize),
    /// Nothing can move now.
    Blocked,
}

impl Mesh {
    pub(crate) fn members(&self) -> usize {
        self.members.len()
    }

    /// The rank of a member.
    pub(crate) fn rank_of(&self, member: u32) -> u32 {
        self.members[member as usize]
    }

    /// Which member has this rank.
    pub(crate) fn member(&self, rank: u32) -> Option<u32> {
        self.members.binary_search(&rank).ok().map(|member| member as u32)
    }

    /// The members of each machine, which can share memory, in the order of the first of each. Those that want no such thing
    /// are alone.
    pub(crate) fn machines(&self) -> Vec<Vec<u32>> {
        let mut machines: Vec<(Option<&String>, Vec<u32>)> = Vec::new();
        for rank in &self.members {
            let machine = self.whole.machines[*rank as usize].as_ref();
            match machines.iter_mut().find(|(other, _)| machine.is_some() && *other == machine) {
                Some((_, members)) => members.push(*rank),
                None => machines.push((machine, vec![*rank])),
            }
        }
        machines.into_iter().map(|(_, members)| members).collect()
    }

    /// A part of the group, if this member is in it.
    pub(crate) fn part(&self, mut ranks: Vec<u32>) -> Option<Mesh> {
        ranks.sort_unstable();
        let rank = ranks.binary_search(&self.rank_of(self.rank)).ok()? as u32;
        Some(Mesh { rank, members: ranks, whole: self.whole.clone(), moves: None })
    }

    /// The same, and what moves is shown there.
    pub(crate) fn showing(self, moves: Moves) -> Mesh {
        Mesh { moves: Some(moves), ..self }
    }

    fn moved(&self, count: usize) -> Moved {
        if let Some(moves) = &self.moves {
            moves.note();
        }
        Moved::Bytes(count)
    }

    pub(crate) fn peer(&self, member: u32) -> Result<BorrowedFd<'_>> {
        let rank = self.members.get(member as usize);
        let peer = rank.and_then(|rank| self.whole.peers[*rank as usize].as_ref());
        peer.map(AsFd::as_fd)
            .ok_or_else(|| CollectiveError::Invalid(format!("rank {} cannot send to itself", self.rank)))
    }

    fn lost(&self, member: u32) -> CollectiveError {
        CollectiveError::PeerLost { rank: self.rank_of(member) }
    }

    /// Sends what can be sent now.
    pub(crate) fn try_send(&self, to: u32, bytes: &[u8]) -> Result<Moved> {
        match rustix::net::send(self.peer(to)?, bytes, SendFlags::NOSIGNAL) {
            Ok(count) => Ok(self.moved(count)),
            Err(Errno::AGAIN | Errno::INTR) => Ok(Moved::Blocked),
            Err(error) if is_loss(error) => Err(self.lost(to)),
            Err(error) => Err(CollectiveError::io("sending to another member", error)),
        }
    }

    /// Reads what is there.
    pub(crate) fn try_recv(&self, from: u32, bytes: &mut [u8]) -> Result<Moved> {
        let wanted = bytes.len();
        if self.whole.has_early.load(Ordering::Relaxed) {
            let early = self.take_early(from, bytes);
            if early > 0 {
                return Ok(self.moved(early));
            }
        }
        match rustix::net::recv(self.peer(from)?, bytes, RecvFlags::empty()) {
            Ok((0, _)) if wanted > 0 => Err(self.lost(from)),
            Ok((count, _)) => Ok(self.moved(count)),
            Err(Errno::AGAIN | Errno::INTR) => Ok(Moved::Blocked),
            Err(error) if is_loss(error) => Err(self.lost(from)),
            Err(error) => Err(CollectiveError::io("hearing from another member", error)),
        }
    }

    /// Waits until one of these can move; nothing has moved since `since`. It is nothing to them that others have left, who
    /// may have done their part: where one has failed, those who wait for it fail, too, and so on.
    pub(crate) fn wait(&self, to: Option<u32>, from: Option<u32>, since: Instant) -> Result<()> {
        let mut fds = Vec::with_capacity(2);
        if let Some(to) = to {
            fds.push(PollFd::from_borrowed_fd(self.peer(to)?, PollFlags::OUT));
        }
        if let Some(from) = from {
            fds.push(PollFd::from_borrowed_fd(self.peer(from)?, PollFlags::IN));
        }
        match poll(&mut fds, Some(&timespec(LOOK))) {
            Ok(1..) | Err(Errno::INTR) => return Ok(()),
            Ok(_) => {}
            Err(error) => return Err(CollectiveError::io("waiting for other members", error)),
        }
        to.into_iter().try_for_each(|to| self.check_partner(since, to))?;
        from.into_iter().try_for_each(|from| self.check_partner(since, from))
    }

    /// Fails if this member has waited for another for too long.
    pub(crate) fn check_time(&self, since: Instant, awaited: u32) -> Result<()> {
        let waited = since.elapsed();
        match waited.as_millis() as u64 > self.whole.limit_ms.load(Ordering::Relaxed) {
            true => Err(CollectiveError::TimedOut { rank: self.rank_of(awaited), seconds: waited.as_secs() }),
            false => Ok(()),
        }
    }

    pub(crate) fn set_limit(&self, limit: Duration) {
        self.whole.limit_ms.store(u64::try_from(limit.as_millis()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Lets the others know that this member takes part no more.
    pub(crate) fn close(&self) {
        for peer in self.whole.peers.iter().flatten() {
            // A peer that has disconnected needs no shutdown.
            let _ = rustix::net::shutdown(peer, rustix::net::Shutdown::Both);
        }
    }

    fn take_early(&self, from: u32, bytes: &mut [u8]) -> usize {
        let mut all = self.whole.early.lock().unwrap_or_else(PoisonError::into_inner);
        let early = &mut all[self.members[from as usize] as usize];
        let count = std::io::Read::read(early, bytes).unwrap_or_default();
        if early.is_empty() {
            *early = VecDeque::new();
        }
        if all.iter().all(VecDeque::is_empty) {
            self.whole.has_early.store(false, Ordering::Relaxed);
        }
        count
    }

    /// Sends all of it. While the other does not take it in, what comes from anybody is: they may be sending, too.
    pub(crate) fn send_hearing(&self, to: u32, bytes: &[u8]) -> Result<()> {
        let mut ended = vec![false; self.whole.peers.len()];
        self.send_by(to, bytes, |since| {
            self.hear_early(to, since, &mut ended)?;
            self.check_partner(since, to)
        })
    }

    pub(crate) fn recv_from(&self, from: u32, bytes: &mut [u8]) -> Result<()> {
        self.recv_by(from, bytes, |since| self.wait(None, Some(from), since))
    }

    pub(crate) fn send_to(&self, to: u32, bytes: &[u8]) -> Result<()> {
        self.send_by(to, bytes, |since| self.wait(Some(to), None, since))
    }

    /// As [`Mesh::recv_from`], where nothing is heard of one without all: fails also once somebody is gone of whom nothing
    /// has been `heard` nor ever will be, and later once anybody has been gone for a while.
    pub(crate) fn recv_with_all(&self, from: u32, bytes: &mut [u8], heard: impl Fn(u32) -> bool) -> Result<()> {
        let mut gone_since = BTreeMap::new();
        self.recv_by(from, bytes, |since| {
            for rank in if since.elapsed() > STALL { self.gone() } else { Vec::new() } {
                let gone_for = gone_since.entry(rank).or_insert_with(Instant::now).elapsed();
                // One that has been heard has come so far. It may be through: what is awaited is on its way then.
                let may_be_through = self.member(rank).is_some_and(&heard) || self.has_more_of(rank);
                if gone_for > *limits::GIVEN_UP || !may_be_through {
                    return Err(CollectiveError::PeerLost { rank });
                }
            }
            self.wait(None, Some(from), since)
        })
    }

    /// Whether something came from a rank that was not taken yet.
    fn has_more_of(&self, rank: u32) -> bool {
        let early = self.whole.early.lock().unwrap_or_else(PoisonError::into_inner);
        let peeked = self.whole.peers[rank as usize].as_ref().map(|peer| {
            let mut byte = [0];
            rustix::net::recv(peer, &mut byte, RecvFlags::PEEK)
        });
        !early[rank as usize].is_empty() || matches!(peeked, Some(Ok((1.., _))))
    }

    /// Fails if the other of two is gone, or does nothing for too long.
    fn check_partner(&self, since: Instant, other: u32) -> Result<()> {
        let peer = &self.whole.peers[self.rank_of(other) as usize];
        match peer.as_ref().is_some_and(is_cut) {
            true => Err(self.lost(other)),
            false => self.check_time(since, other),
        }
    }

    /// Waits until something can be sent to a member, or comes from one that has not `ended`, and keeps that: from that
    /// member at once, and from others, whose turn it may not be, when nothing has moved for a while.
    fn hear_early(&self, to: u32, since: Instant, ended: &mut [bool]) -> Result<()> {
        let (to_rank, is_stuck) = (self.rank_of(to) as usize, since.elapsed() >= LOOK);
        let kept: Vec<usize> = {
            let all = self.whole.early.lock().unwrap_or_else(PoisonError::into_inner);
            all.iter().map(VecDeque::len).collect()
        };
        let is_heard = |rank: usize| rank == to_rank || (is_stuck && kept[rank] < EARLY_LIMIT);
        let peers = self.whole.peers.iter().enumerate();
        let open: Vec<(usize, &OwnedFd)> = peers
            .filter_map(|(rank, peer)| Some((rank, peer.as_ref().filter(|_| !ended[rank] && is_heard(rank))?)))
            .collect();
        let mut fds = vec![PollFd::from_borrowed_fd(self.peer(to)?, PollFlags::OUT)];
        fds.extend(open.iter().map(|(_, peer)| PollFd::new(*peer, PollFlags::IN)));
        match poll(&mut fds, Some(&timespec(LOOK))) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(CollectiveError::io("waiting for other members", error)),
        }
        let mut chunk = vec![0; EARLY];
        for ((rank, peer), fd) in open.iter().zip(&fds[1..]) {
            if fd.revents().is_empty() {
                continue;
            }
            match rustix::net::recv(peer, &mut chunk, RecvFlags::empty()) {
                Ok((0, _)) => ended[*rank] = true,
                Ok((count, _)) => {
                    let mut all = self.whole.early.lock().unwrap_or_else(PoisonError::into_inner);
                    all[*rank].extend(&chunk[..count]);
                    self.whole.has_early.store(true, Ordering::Relaxed);
                }
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(_) => ended[*rank] = true,
            }
        }
        Ok(())
    }

    /// The ranks whose connections are closed, of all of the group: what a part does waits for others, too.
    pub(crate) fn gone(&self) -> Vec<u32> {
        gone(&self.whole.peers)
    }

    /// The same connections, for another thread to look at.
    pub(crate) fn peers(&self) -> Result<Peers> {
        let dup = |peer: &Option<OwnedFd>| peer.as_ref().map(OwnedFd::try_clone).transpose();
        let peers: std::io::Result<Vec<_>> = self.whole.peers.iter().map(dup).collect();
        Ok(Peers(peers.map_err(|error| CollectiveError::io("looking after other members", error))?))
    }

    /// Sends all of it; `wait` is told since when nothing has moved.
    fn send_by(&self, to: u32, mut bytes: &[u8], mut wait: impl FnMut(Instant) -> Result<()>) -> Result<()> {
        let mut since = Instant::now();
        while !bytes.is_empty() {
            match self.try_send(to, bytes)? {
                Moved::Bytes(count) => {
                    bytes = &bytes[count..];
                    since = Instant::now();
                }
                Moved::Blocked => wait(since)?,
            }
        }
        Ok(())
    }

    /// Receives as much as was asked for; `wait` as in [`Mesh::send_by`].
    fn recv_by(&self, from: u32, bytes: &mut [u8], mut wait: impl FnMut(Instant) -> Result<()>) -> Result<()> {
        let mut since = Instant::now();
        let mut read = 0;
        while read < bytes.len() {
            match self.try_recv(from, &mut bytes[read..])? {
                Moved::Bytes(count) => {
                    read += count;
                    since = Instant::now();
                }
                Moved::Blocked => wait(since)?,
            }
        }
        Ok(())
    }

    /// Sends to one and hears from another at once, so that none waits for the other to begin.
    pub(crate) fn exchange(&self, to: u32, out: &[u8], from: u32, into: &mut [u8]) -> Result<()> {
        let (mut sent, mut read, mut since) = (0, 0, Instant::now());
        while sent < out.len() || read < into.len() {
            let mut moved = false;
            if sent < out.len()
                && let Moved::Bytes(count) = self.try_send(to, &out[sent..])?
            {
                sent += count;
                moved = true;
            }
            if read < into.len()
                && let Moved::Bytes(count) = self.try_recv(from, &mut into[read..])?
            {
                read += count;
                moved = true;
            }
            if moved {
                since = Instant::now();
            } else {
                self.wait((sent < out.len()).then_some(to), (read < into.len()).then_some(from), since)?;
            }
        }
        Ok(())
    }
}
