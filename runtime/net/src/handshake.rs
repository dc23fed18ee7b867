//! The first bytes of every connection.
//!
//! ```text
//! acceptor → dialler   WINGBEAT <protocol: u32> <release: 16>  [nonce: 32]
//! dialler → acceptor   WINGBEAT <protocol: u32> <release: 16>  [nonce: 32] [proof: 32]  Hello  [proof of the Hello: 32]
//! acceptor → dialler   Answer: Welcome with proof, or why not
//! ```
//!
//! The eight letters, the number and the release have the same form in every version, so that versions which cannot talk
//! can at least say so. Nothing else of the dialler is decoded before its proof was checked. The proof is BLAKE3, keyed by the token, over both nonces, and a second one
//! over what that side says of itself, too: the token itself never crosses the wire, neither side can replay the other's words, and whoever passes them on can change nothing in them.

use std::fmt;
use std::io;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use wingbeat_core::codec;
use wingbeat_core::error::Error;
use wingbeat_core::schema::fold;
use wingbeat_core::spec::Address;
use wingbeat_core::{ClusterId, JobId, NodeId, ProcessId};

use crate::address::Stream;
use crate::patience::Patience;

/// Changes whenever two builds could misunderstand each other: it is made of the sources of everything that travels. The
/// highest bit says that a release follows, which it did not when protocols were counted from 1.
pub const PROTOCOL: u32 = {
    let core = wingbeat_core::schema::SCHEMA;
    let handshake = fold(core, include_bytes!("handshake.rs"));
    let patience = fold(handshake, include_bytes!("patience.rs"));
    let services = fold(patience, include_bytes!("services.rs"));
    let head = fold(services, include_bytes!("messages/head.rs"));
    let node = fold(head, include_bytes!("messages/node.rs"));
    let peer = fold(node, include_bytes!("messages/peer.rs"));
    let stacks = fold(peer, include_bytes!("messages/stacks.rs"));
    let state = fold(stacks, include_bytes!("messages/state.rs"));
    let succession = fold(state, include_bytes!("messages/succession.rs"));
    let all = fold(succession, include_bytes!("messages/worker.rs"));
    (all ^ (all >> 32)) as u32 | HAS_RELEASE
};
const HAS_RELEASE: u32 = 1 << 31;

/// The release of this build.
pub const RELEASE: &str = env!("CARGO_PKG_VERSION");

const MAGIC: [u8; 8] = *b"WINGBEAT";

/// A hello with an address is some two hundred bytes; more is no hello. Nor is a longer answer one.
const HELLO_LIMIT: usize = 4 << 10;

/// How long the release of a version that cannot be talked to is waited for: it is in the same packet, or nowhere.
const RELEASE_LIMIT: Duration = Duration::from_millis(500);

/// How long the rest of what a refused dialler sends is read: closing with unread input would take the answer back.
const REFUSED_LIMIT: Duration = Duration::from_millis(500);

/// What every connection must know: who knows it may run code as this user.
#[derive(Clone)]
pub struct Token {
    text: String,
    /// Where it was given, if from outside.
    from: Option<String>,
}

/// How a refusal for a token begins.
const TOKEN_IS_WRONG: &str = "the token is wrong";

/// The fewest bytes of a token that a person chose. Listeners answer anybody who asks, as often as they ask: less than
/// this can be guessed. [`MAKE_A_TOKEN`] makes 44.
pub const SHORTEST_TOKEN: usize = 16;

/// How to make a token, for messages.
pub const MAKE_A_TOKEN: &str = "make one with\n    (umask 077; head -c 32 /dev/urandom | base64 > token)\nand \
                                name the file with --token-file token or WINGBEAT_TOKEN_FILE=token";

impl Token {
    /// A token as it is. One from outside goes through [`Token::checked`].
    pub fn new(text: impl Into<String>) -> Token {
        Token { text: text.into(), from: None }
    }

    /// A token that was given from outside: without the blanks around it, and refused if it could be guessed. `from` is
    /// where it was given, for the message.
    ///
    /// ```
    /// use wingbeat_net::Token;
    /// assert!(Token::checked(" ", "WINGBEAT_TOKEN").is_err());
    /// assert_eq!(Token::checked("\u{feff}0123456789abcdef\r\n", "WINGBEAT_TOKEN").unwrap().reveal(), "0123456789abcdef");
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if it is empty, blank, or shorter than [`SHORTEST_TOKEN`].
    pub fn checked(text: &str, from: &str) -> Result<Token, Error> {
        // Editors of Windows begin files with a mark of their order of bytes.
        let text = text.trim_start_matches('\u{feff}').trim();
        let wrong = match text.len() {
            0 => "is empty".to_owned(),
            length if length < SHORTEST_TOKEN => {
                format!("has {length} bytes, and {SHORTEST_TOKEN} are needed")
            }
            _ => return Ok(Token { text: text.to_owned(), from: Some(from.to_owned()) }),
        };
        let what = format!("the token from {from} {wrong}: whoever guesses it can run code as you; {MAKE_A_TOKEN}");
        Err(Error::InvalidArgument { what })
    }

    /// A new one that nobody can guess.
    pub fn random() -> Token {
        let bytes: [u8; 32] = rand::random();
        Token::new(bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>())
    }

    /// The text, to hand to a child or to write to a file of mode 0600.
    pub fn reveal(&self) -> &str {
        &self.text
    }

    /// The cluster whose head has this token and this address. A head that is started there again has the same, and so knows whose
    /// members come back, without anything that it would have to remember.
    pub fn cluster_at(&self, address: std::net::SocketAddr) -> ClusterId {
        let key = blake3::derive_key("wingbeat 2026 cluster at an address", self.text.as_bytes());
        let hash = blake3::keyed_hash(&key, address.to_string().as_bytes());
        let mut first = [0; 8];
        first.copy_from_slice(&hash.as_bytes()[..8]);
        ClusterId(u64::from_le_bytes(first))
    }

    /// Of what a side says, after the nonces of the other and its own.
    fn proof(&self, side: &str, first: &[u8; 32], second: &[u8; 32], says: &[u8]) -> [u8; 32] {
        let key = blake3::derive_key("wingbeat 2026 connection token", self.text.as_bytes());
        let mut hash = blake3::Hasher::new_keyed(&key);
        hash.update(side.as_bytes());
        hash.update(first);
        hash.update(second);
        hash.update(says);
        *hash.finalize().as_bytes()
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

/// What the dialling side is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Role {
    /// A user's program.
    Driver(JobId),
    /// A worker process.
    Worker,
    /// A node daemon.
    Node(NodeId),
    /// The head.
    Head,
    /// A command-line tool; it serves nothing.
    Tool,
}

/// What the connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Purpose {
    /// Two tarpc channels.
    Control,
    /// Raw frames of object bytes.
    Bulk,
    /// The descriptor of the node's shared memory (unix sockets only), for a driver. It lasts as long as anything there can touch the
    /// memory.
    Arena,
}

/// With what a connection to the head goes on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Resumes {
    /// It is the first one.
    #[default]
    Nothing,
    /// The last one ended before the head had answered that this node or job has joined. It may have.
    Joining,
    /// Where the last one ended.
    Joined,
}

/// The dialling side introduces itself.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Hello {
    /// Who it is, and where it listens itself.
    pub address: Address,
    /// What it is.
    pub role: Role,
    /// What the connection is for.
    pub purpose: Purpose,
    /// The cluster that it belongs to, if it belongs to one.
    pub cluster: Option<ClusterId>,
    /// The release.
    pub version: String,
    /// How often the dialler lost contact with this very process, as far as it knows. More than the acceptor knows of says
    /// that connections which that still has are dead.
    pub losses: u64,
    /// Whom it is for, if that is known: another process may listen where that did.
    pub to: Option<ProcessId>,
    /// With what it goes on. For the head.
    pub resumes: Resumes,
    /// The life of the head with which it was connected.
    pub epoch: Option<Epoch>,
}

impl Hello {
    /// Of a tool: somebody who only asks, and is not asked.
    pub fn of_tool() -> Hello {
        let machine = crate::address::this_machine();
        let nobody = Address { process: ProcessId::random(), machine, unix: String::new(), tcp: None, steward: None };
        let version = RELEASE.into();
        let (role, purpose) = (Role::Tool, Purpose::Control);
        Hello {
            address: nobody,
            role,
            purpose,
            cluster: None,
            version,
            losses: 0,
            to: None,
            resumes: Resumes::Nothing,
            epoch: None,
        }
    }
}

/// The accepting side introduces itself.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Welcome {
    /// Who it is.
    pub address: Address,
    /// Its cluster.
    pub cluster: ClusterId,
    /// Which life of the cluster's head it is, if the head may be started again. Of a standby, which head it follows.
    pub epoch: Option<Epoch>,
    /// How long silence is borne in the cluster. The head says so.
    pub patience: Option<Patience>,
    /// It is not the head: it stands by.
    pub stands_by: Option<StandsBy>,
}

/// What a standby says to whoever looks for the head.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StandsBy {
    /// Where the head is, as far as the standby knows.
    pub head: Address,
    /// It asks nodes for their votes, and would lead with this epoch.
    pub runs_for: Option<Epoch>,
}

/// Which life of its cluster's head one is. A later one is greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Epoch(pub u64);

impl Epoch {
    /// Of a head that begins now, and has written down nothing of those before it. By the clock, and so later than they; where the
    /// clock was put back, it is an older one to those who knew them, who do not believe it.
    pub fn by_clock() -> Epoch {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        Epoch((since.as_millis() as u64) << 16 | u64::from(rand::random::<u16>()))
    }
}

#[derive(Serialize, Deserialize)]
enum Answer {
    /// A [`Welcome`] as it is encoded, of which that is the proof.
    Welcome {
        welcome: Vec<u8>,
        proof: [u8; 32],
    },
    Refused(String),
}

const PRELUDE: usize = 12;
const RELEASE_LEN: usize = 16;

fn prelude() -> [u8; PRELUDE + RELEASE_LEN] {
    let mut bytes = [0; PRELUDE + RELEASE_LEN];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..PRELUDE].copy_from_slice(&PROTOCOL.to_le_bytes());
    let release = &RELEASE.as_bytes()[..RELEASE.len().min(RELEASE_LEN)];
    bytes[PRELUDE..PRELUDE + release.len()].copy_from_slice(release);
    bytes
}

/// Reads what the other side says of itself first. Answers with the objection to it, if it is of another build.
///
/// # Errors
/// The connection ends, or what is there is something else ([`io::ErrorKind::InvalidData`]).
async fn read_prelude(stream: &mut Stream) -> io::Result<Option<String>> {
    let mut first = [0; PRELUDE];
    stream.read_exact(&mut first).await?;
    if first[..8] != MAGIC {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "it does not speak Wingbeat's protocol"));
    }
    let theirs = u32::from_le_bytes([first[8], first[9], first[10], first[11]]);
    let mut release = [0; RELEASE_LEN];
    if theirs == PROTOCOL {
        stream.read_exact(&mut release).await?;
        return Ok(None);
    }
    if theirs & HAS_RELEASE != 0 {
        let _ = tokio::time::timeout(RELEASE_LIMIT, stream.read_exact(&mut release)).await;
    }
    let release: String = release.iter().map(|byte| *byte as char).filter(char::is_ascii_graphic).collect();
    Ok(Some(objection(theirs, &release)))
}

/// Whether a refusal is one by what speaks Wingbeat of another build.
pub fn is_of_another_build(error: &Error) -> bool {
    matches!(error, Error::Refused { why, .. } if ["it is built from other sources of Wingbeat", "it is another release of Wingbeat", "it is Wingbeat "]
        .iter()
        .any(|beginning| why.starts_with(beginning)))
}

fn objection(protocol: u32, release: &str) -> String {
    let ours = format!("{RELEASE} (protocol {PROTOCOL:08x})");
    match release {
        RELEASE => format!(
            "it is built from other sources of Wingbeat {RELEASE} (protocol {protocol:08x}) than this, which is {ours}; use the same build on both sides"
        ),
        "" => format!(
            "it is another release of Wingbeat (protocol {protocol:08x}) and this is {ours}; install the same release on both sides"
        ),
        other => format!(
            "it is Wingbeat {other} (protocol {protocol:08x}) and this is {ours}; install the same release on both sides"
        ),
    }
}

fn encoded<T: Serialize>(message: &T) -> io::Result<BytesMut> {
    let mut body = BytesMut::new();
    codec::encode_message(message, &mut body).map_err(io::Error::other)?;
    Ok(body)
}

async fn send(stream: &mut Stream, prefix: &[u8], body: &[u8], seal: &[u8]) -> io::Result<()> {
    let mut out = Vec::with_capacity(prefix.len() + 4 + body.len() + seal.len());
    out.extend_from_slice(prefix);
    out.extend_from_slice(&(body.len() as u32).to_le_bytes());
    out.extend_from_slice(body);
    out.extend_from_slice(seal);
    stream.write_all(&out).await
}

async fn receive(stream: &mut Stream) -> io::Result<Bytes> {
    let len = stream.read_u32_le().await? as usize;
    if len > HELLO_LIMIT {
        return Err(io::Error::other(format!("an introduction of {len} bytes")));
    }
    let mut body = vec![0; len];
    stream.read_exact(&mut body).await?;
    Ok(Bytes::from(body))
}

fn decoded<T: serde::de::DeserializeOwned>(body: Bytes) -> io::Result<T> {
    codec::decode_message(body).map_err(io::Error::other)
}

/// Says why not, and lets the other side read it.
async fn refuse(mut stream: Stream, why: String) -> io::Result<(Stream, Hello)> {
    send(&mut stream, &[], &encoded(&Answer::Refused(why.clone()))?, &[]).await?;
    stream.shutdown().await?;
    let rest = async {
        let mut unread = [0; 1024];
        let mut left = HELLO_LIMIT;
        while left > 0 && stream.read(&mut unread).await.is_ok_and(|count| count > 0) {
            left = left.saturating_sub(unread.len());
        }
    };
    let _ = tokio::time::timeout(REFUSED_LIMIT, rest).await;
    Err(io::Error::other(why))
}

/// The accepting side of the handshake.
///
/// # Errors
/// When the other side is of another version or user, or does not prove the token. It has been told.
pub async fn accept(mut stream: Stream, token: &Token, welcome: Welcome) -> io::Result<(Stream, Hello)> {
    if let Stream::Unix(unix) = &stream {
        let theirs = unix.peer_cred()?.uid();
        let ours = rustix::process::geteuid().as_raw();
        if theirs != ours && theirs != 0 {
            return Err(io::Error::other(format!(
                "user {theirs} tried to connect; this process belongs to user {ours}"
            )));
        }
    }
    let nonce: [u8; 32] = rand::random();
    let mut first = Vec::with_capacity(PRELUDE + RELEASE_LEN + nonce.len());
    first.extend_from_slice(&prelude());
    first.extend_from_slice(&nonce);
    stream.write_all(&first).await?;
    if let Some(why) = read_prelude(&mut stream).await? {
        return Err(io::Error::other(why));
    }
    let mut rest = [0; 64];
    stream.read_exact(&mut rest).await?;
    let (their_nonce, their_proof) = rest.split_at(32);
    let mut peer_nonce = [0; 32];
    peer_nonce.copy_from_slice(their_nonce);
    let expected = token.proof("dialler", &nonce, &peer_nonce, &[]);
    if !bool::from(expected.ct_eq(their_proof)) {
        let why = format!("{TOKEN_IS_WRONG}; give both sides the same one with --token-file or WINGBEAT_TOKEN");
        return refuse(stream, why).await;
    }
    let mut seal = [0; 32];
    let says = match receive(&mut stream).await {
        Ok(says) => stream.read_exact(&mut seal).await.map(|_| says),
        Err(error) => Err(error),
    };
    let unreadable = |error: io::Error| format!("its introduction cannot be read: {error}");
    let says = match says {
        Ok(says) => says,
        Err(error) => return refuse(stream, unreadable(error)).await,
    };
    if !bool::from(token.proof("dialler says", &nonce, &peer_nonce, &says).ct_eq(&seal)) {
        return refuse(stream, "its introduction was changed on the way".into()).await;
    }
    let hello: Hello = match decoded(says) {
        Ok(hello) => hello,
        Err(error) => return refuse(stream, unreadable(error)).await,
    };
    if hello.version != RELEASE {
        let theirs = hello.version.escape_debug();
        let why = format!("it is Wingbeat {theirs} and this is {RELEASE}; install the same release on both sides");
        return refuse(stream, why).await;
    }
    if let Some(theirs) = hello.cluster
        && theirs != welcome.cluster
    {
        return refuse(stream, format!("this process belongs to {}, not to {theirs}", welcome.cluster)).await;
    }
    let this = welcome.address.process;
    let welcome = encoded(&welcome)?.to_vec();
    let proof = token.proof("acceptor", &peer_nonce, &nonce, &welcome);
    send(&mut stream, &[], &encoded(&Answer::Welcome { welcome, proof })?, &[]).await?;
    match hello.to {
        // It learns from the welcome that whom it looked for is gone.
        Some(wanted) if wanted != this => Err(io::Error::other(format!("it looked for {wanted}, and this is {this}"))),
        _ => Ok((stream, hello)),
    }
}

/// Why a dialler was not let in.
#[derive(Debug)]
pub(crate) enum Failed {
    /// It would not be the next time either.
    ForGood(Error),
    /// The other side closed the connection, after it had begun, without a word: it was busy, and may not be the next time.
    ForNow(Error),
}

/// The dialling side of the handshake.
///
/// # Errors
/// [`Error::Refused`], with the other side's reason or ours; [`Error::Unreachable`] if the connection ends before anything was said.
pub(crate) async fn introduce(
    mut stream: Stream,
    token: &Token,
    hello: Hello,
    what: &str,
) -> Result<(Stream, Welcome), Failed> {
    let refused = |why: String| Failed::ForGood(Error::Refused { who: what.to_owned(), why });
    let at = peer_of(&stream);
    // Nobody has refused anything: whoever is there may end just now, or be something else.
    let unreachable = |why: String| Error::Unreachable { what: what.to_owned(), address: at.clone(), why };
    let ended = |error: io::Error, rest: &str| {
        unreachable(format!("the connection ended during the introduction ({error}){rest}"))
    };
    let silent = |error: io::Error| {
        Failed::ForGood(match error.kind() {
            io::ErrorKind::InvalidData => unreachable(error.to_string()),
            _ => ended(error, "; its log says why"),
        })
    };
    if let Some(why) = is_of_another_user(&stream) {
        return Err(refused(why));
    }
    if let Some(why) = read_prelude(&mut stream).await.map_err(silent)? {
        // Tell the other side what we speak, so that its log can say it too.
        let _ = stream.write_all(&prelude()).await;
        return Err(refused(why));
    }
    let busy = |error| Failed::ForNow(ended(error, ": it has ended itself, or its log says why"));
    let mut their_nonce = [0; 32];
    stream.read_exact(&mut their_nonce).await.map_err(busy)?;
    let nonce: [u8; 32] = rand::random();
    let mut prefix = Vec::with_capacity(PRELUDE + RELEASE_LEN + 64);
    prefix.extend_from_slice(&prelude());
    prefix.extend_from_slice(&nonce);
    let says = encoded(&hello).map_err(busy)?;
    prefix.extend_from_slice(&token.proof("dialler", &their_nonce, &nonce, &[]));
    let seal = token.proof("dialler says", &their_nonce, &nonce, &says);
    send(&mut stream, &prefix, &says, &seal).await.map_err(busy)?;
    match receive(&mut stream).await.and_then(decoded).map_err(busy)? {
        Answer::Refused(why) => {
            let ours = token.from.as_ref().filter(|_| why.starts_with(TOKEN_IS_WRONG));
            let ours = ours.map(|from| format!(" (this side has the one from {from})")).unwrap_or_default();
            Err(refused(without_control(&why) + &ours))
        }
        Answer::Welcome { welcome, proof } => {
            let expected = token.proof("acceptor", &nonce, &their_nonce, &welcome);
            if !bool::from(expected.ct_eq(&proof)) {
                return Err(refused("it does not know the token of this cluster".into()));
            }
            Ok((stream, decoded(Bytes::from(welcome)).map_err(busy)?))
        }
    }
}

/// Whether another user of this machine listens, who could pass on what this process says. The superuser dials everybody.
fn is_of_another_user(stream: &Stream) -> Option<String> {
    let Stream::Unix(unix) = stream else { return None };
    let (theirs, ours) = (unix.peer_cred().ok()?.uid(), rustix::process::geteuid().as_raw());
    let is_trusted = theirs == ours || theirs == 0 || ours == 0;
    (!is_trusted).then(|| format!("user {theirs} listens there, and this process belongs to user {ours}"))
}

/// Who is on the other side, for people.
pub(crate) fn peer_of(stream: &Stream) -> String {
    match stream {
        Stream::Tcp(tcp) => tcp.peer_addr().map_or_else(|error| error.to_string(), |peer| peer.to_string()),
        Stream::Unix(_) => "a socket of this machine".into(),
    }
}

/// Whoever answers has proved nothing, and its text is shown in terminals.
fn without_control(text: &str) -> String {
    text.chars().map(|letter| if letter.is_control() { '\u{fffd}' } else { letter }).collect()
}
