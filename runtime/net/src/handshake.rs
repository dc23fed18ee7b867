//! The first bytes of every connection.
//!
//! ```text
//! acceptor → dialler   WINGBEAT <protocol: u32>  [nonce: 32]
//! dialler → acceptor   WINGBEAT <protocol: u32>  [nonce: 32] [proof: 32]  Hello
//! acceptor → dialler   Answer: Welcome with proof, or why not
//! ```
//!
//! The eight letters and the number are the same in every version, so that versions which cannot talk
//! can at least say so. The proof is BLAKE3, keyed by the token, over both nonces: the token itself never
//! crosses the wire, and neither side can replay the other's words.

use std::fmt;
use std::io;

use bytes::{Bytes, BytesMut};
use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use wingbeat_core::codec;
use wingbeat_core::error::Error;
use wingbeat_core::spec::Address;
use wingbeat_core::{ClusterId, JobId, NodeId};

use crate::address::Stream;

/// Changes whenever two builds could misunderstand each other.
pub const PROTOCOL: u32 = 1;

const MAGIC: [u8; 8] = *b"WINGBEAT";

/// A hello with an address is some two hundred bytes; more is no hello.
const HELLO_LIMIT: usize = 64 << 10;

/// What every connection must know: who knows it may run code as this user.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

/// The fewest bytes of a token that a person chose. Listeners answer anybody who asks, as often as they ask: less than
/// this can be guessed. The command in the README makes 44.
pub const SHORTEST_TOKEN: usize = 16;

/// How to make a token, for messages.
pub const MAKE_A_TOKEN: &str = "make one with\n    (umask 077; head -c 32 /dev/urandom | base64 > token)\nand \
                                name the file with --token-file token or WINGBEAT_TOKEN_FILE=token";

impl Token {
    /// A token as it is. One from outside goes through [`Token::checked`].
    pub fn new(text: impl Into<String>) -> Token {
        Token(text.into())
    }

    /// A token that was given from outside: without the blanks around it, and refused if it could be guessed. `from` is
    /// where it was given, for the message.
    ///
    /// ```
    /// use wingbeat_net::Token;
    /// assert!(Token::checked(" ", "WINGBEAT_TOKEN").is_err());
    /// assert_eq!(Token::checked("0123456789abcdef\n", "WINGBEAT_TOKEN").unwrap().reveal(), "0123456789abcdef");
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if it is empty, blank, or shorter than [`SHORTEST_TOKEN`].
    pub fn checked(text: &str, from: &str) -> Result<Token, Error> {
        let text = text.trim();
        let wrong = match text.len() {
            0 => "is empty".to_owned(),
            length if length < SHORTEST_TOKEN => {
                format!("has {length} bytes, and {SHORTEST_TOKEN} are needed")
            }
            _ => return Ok(Token(text.to_owned())),
        };
        let what = format!("the token from {from} {wrong}: whoever guesses it can run code as you; {MAKE_A_TOKEN}");
        Err(Error::InvalidArgument { what })
    }

    /// A new one that nobody can guess.
    pub fn random() -> Token {
        let bytes: [u8; 32] = rand::random();
        Token(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// The text, to hand to a child or to write to a file of mode 0600.
    pub fn reveal(&self) -> &str {
        &self.0
    }

    fn proof(&self, side: &str, first: &[u8; 32], second: &[u8; 32]) -> [u8; 32] {
        let key = blake3::derive_key("wingbeat 2026 connection token", self.0.as_bytes());
        let mut hash = blake3::Hasher::new_keyed(&key);
        hash.update(side.as_bytes());
        hash.update(first);
        hash.update(second);
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
    /// The descriptor of the node's shared memory (unix sockets only).
    Arena,
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
    /// The release, for messages.
    pub version: String,
}

impl Hello {
    /// Of a tool: somebody who only asks, and is not asked.
    pub fn of_tool() -> Hello {
        let machine = crate::address::this_machine();
        let nobody = Address { process: wingbeat_core::ProcessId::random(), machine, unix: String::new(), tcp: None };
        let version = env!("CARGO_PKG_VERSION").into();
        Hello { address: nobody, role: Role::Tool, purpose: Purpose::Control, cluster: None, version }
    }
}

/// The accepting side introduces itself.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Welcome {
    /// Who it is.
    pub address: Address,
    /// Its cluster.
    pub cluster: ClusterId,
}

#[derive(Serialize, Deserialize)]
enum Answer {
    Welcome { welcome: Welcome, proof: [u8; 32] },
    Refused(String),
}

fn prelude() -> [u8; 12] {
    let mut bytes = [0; 12];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..].copy_from_slice(&PROTOCOL.to_le_bytes());
    bytes
}

/// What a prelude says about the side that sent it, if it cannot be talked to.
fn objection(prelude: &[u8; 12]) -> Option<String> {
    if prelude[..8] != MAGIC {
        return Some("it does not speak Wingbeat's protocol".into());
    }
    let theirs = u32::from_le_bytes([prelude[8], prelude[9], prelude[10], prelude[11]]);
    (theirs != PROTOCOL).then(|| {
        format!("it speaks protocol version {theirs} and this is version {PROTOCOL}; install the same release of Wingbeat on both sides")
    })
}

async fn send<T: Serialize>(stream: &mut Stream, prefix: &[u8], message: &T) -> io::Result<()> {
    let mut body = BytesMut::new();
    codec::encode_message(message, &mut body).map_err(io::Error::other)?;
    let mut out = Vec::with_capacity(prefix.len() + 4 + body.len());
    out.extend_from_slice(prefix);
    out.extend_from_slice(&(body.len() as u32).to_le_bytes());
    out.extend_from_slice(&body);
    stream.write_all(&out).await
}

async fn receive<T: serde::de::DeserializeOwned>(stream: &mut Stream) -> io::Result<T> {
    let len = stream.read_u32_le().await? as usize;
    if len > HELLO_LIMIT {
        return Err(io::Error::other(format!("an introduction of {len} bytes")));
    }
    let mut body = vec![0; len];
    stream.read_exact(&mut body).await?;
    codec::decode_message(Bytes::from(body)).map_err(io::Error::other)
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
    let mut first = [0; 44];
    first[..12].copy_from_slice(&prelude());
    first[12..].copy_from_slice(&nonce);
    stream.write_all(&first).await?;
    let mut theirs = [0; 12];
    stream.read_exact(&mut theirs).await?;
    if let Some(why) = objection(&theirs) {
        return Err(io::Error::other(why));
    }
    let mut rest = [0; 64];
    stream.read_exact(&mut rest).await?;
    let (their_nonce, their_proof) = rest.split_at(32);
    let mut peer_nonce = [0; 32];
    peer_nonce.copy_from_slice(their_nonce);
    let hello: Hello = receive(&mut stream).await?;
    let expected = token.proof("dialler", &nonce, &peer_nonce);
    let refusal = if !bool::from(expected.ct_eq(their_proof)) {
        Some("the token is wrong; give both sides the same one with --token-file or WINGBEAT_TOKEN".to_owned())
    } else {
        match hello.cluster {
            Some(theirs) if theirs != welcome.cluster => {
                Some(format!("this process belongs to {}, not to {theirs}", welcome.cluster))
            }
            _ => None,
        }
    };
    if let Some(why) = refusal {
        send(&mut stream, &[], &Answer::Refused(why.clone())).await?;
        return Err(io::Error::other(why));
    }
    let proof = token.proof("acceptor", &peer_nonce, &nonce);
    send(&mut stream, &[], &Answer::Welcome { welcome, proof }).await?;
    Ok((stream, hello))
}

/// The dialling side of the handshake.
///
/// # Errors
/// [`Error::Refused`], with the other side's reason or ours.
pub async fn introduce(
    mut stream: Stream,
    token: &Token,
    hello: Hello,
    what: &str,
) -> Result<(Stream, Welcome), Error> {
    let refused = |why: String| Error::Refused { who: what.to_owned(), why };
    let broken = |error: io::Error| Error::Refused {
        who: what.to_owned(),
        why: format!("the connection ended during the introduction ({error}); its log says why"),
    };
    let mut first = [0; 12];
    stream.read_exact(&mut first).await.map_err(broken)?;
    if let Some(why) = objection(&first) {
        // Tell the other side what we speak, so that its log can say it too.
        let _ = stream.write_all(&prelude()).await;
        return Err(refused(why));
    }
    let mut their_nonce = [0; 32];
    stream.read_exact(&mut their_nonce).await.map_err(broken)?;
    let nonce: [u8; 32] = rand::random();
    let mut prefix = Vec::with_capacity(76);
    prefix.extend_from_slice(&prelude());
    prefix.extend_from_slice(&nonce);
    prefix.extend_from_slice(&token.proof("dialler", &their_nonce, &nonce));
    send(&mut stream, &prefix, &hello).await.map_err(broken)?;
    match receive(&mut stream).await.map_err(broken)? {
        Answer::Refused(why) => Err(refused(why)),
        Answer::Welcome { welcome, proof } => {
            let expected = token.proof("acceptor", &nonce, &their_nonce);
            if !bool::from(expected.ct_eq(&proof)) {
                return Err(refused("it does not know the token of this cluster".into()));
            }
            Ok((stream, welcome))
        }
    }
}
