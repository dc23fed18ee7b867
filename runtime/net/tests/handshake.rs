//! Who may connect, and what those who may not are told.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::os::linux::net::SocketAddrExt;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use wingbeat_core::error::Error;
use wingbeat_core::spec::Address;
use wingbeat_core::{ClusterId, ProcessId};
use wingbeat_net::address::{self, Listener};
use wingbeat_net::handshake::{Hello, PROTOCOL, Purpose, Role, Token, Welcome};

async fn listener(cluster: ClusterId) -> Address {
    let listener = Listener::bind(ProcessId::random(), None).await.unwrap();
    let address = listener.address().clone();
    let welcome = Welcome { address: address.clone(), cluster };
    tokio::spawn(listener.serve(Token::new("secret"), welcome, |_, _| {}));
    address
}

fn hello(cluster: Option<ClusterId>) -> Hello {
    let address =
        Address { process: ProcessId::random(), machine: address::this_machine(), unix: String::new(), tcp: None };
    Hello { address, role: Role::Tool, purpose: Purpose::Control, cluster, version: "test".into() }
}

async fn dial(to: &Address, token: &str, cluster: Option<ClusterId>) -> Result<(), Error> {
    address::dial(to, "the listener", &Token::new(token), hello(cluster)).await.map(drop)
}

#[tokio::test]
async fn who_knows_the_token_is_welcome_and_nobody_else() {
    let cluster = ClusterId::random();
    let to = listener(cluster).await;
    dial(&to, "secret", Some(cluster)).await.unwrap();
    dial(&to, "secret", None).await.unwrap();
    let error = dial(&to, "guess", None).await.unwrap_err();
    assert!(matches!(&error, Error::Refused { why, .. } if why.contains("token")), "{error}");
}

#[tokio::test]
async fn another_clusters_process_is_refused_by_name() {
    let cluster = ClusterId::random();
    let to = listener(cluster).await;
    let error = dial(&to, "secret", Some(ClusterId::random())).await.unwrap_err();
    assert!(error.to_string().contains(&cluster.to_string()), "{error}");
}

/// A listener that says `first` to whoever comes.
fn impostor(first: Vec<u8>) -> Address {
    let name = format!("wingbeat-test-{:016x}", ProcessId::random().0);
    let address = std::os::unix::net::SocketAddr::from_abstract_name(&name).unwrap();
    let listener = std::os::unix::net::UnixListener::bind_addr(&address).unwrap();
    listener.set_nonblocking(true).unwrap();
    let listener = tokio::net::UnixListener::from_std(listener).unwrap();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.write_all(&first).await.unwrap();
        let _ = stream.read_to_end(&mut Vec::new()).await;
    });
    Address { process: ProcessId(1), machine: address::this_machine(), unix: name, tcp: None }
}

#[tokio::test]
async fn versions_that_do_not_speak_the_same_protocol_refuse_each_other() {
    let mut prelude = b"WINGBEAT".to_vec();
    prelude.extend_from_slice(&(PROTOCOL + 1).to_le_bytes());
    prelude.extend_from_slice(&[0; 32]);
    let error = dial(&impostor(prelude), "secret", None).await.unwrap_err();
    let text = error.to_string();
    assert!(text.contains(&format!("version {}", PROTOCOL + 1)) && text.contains("same release"), "{text}");

    let error =
        dial(&impostor(b"HTTP/1.1 400 Bad Request, and so on, and on".to_vec()), "secret", None).await.unwrap_err();
    assert!(error.to_string().contains("does not speak"), "{error}");
}

#[tokio::test]
async fn a_newer_dialler_is_sent_away_before_anything_is_read() {
    let to = listener(ClusterId::random()).await;
    let name = std::os::unix::net::SocketAddr::from_abstract_name(&to.unix).unwrap();
    let stream = std::os::unix::net::UnixStream::connect_addr(&name).unwrap();
    stream.set_nonblocking(true).unwrap();
    let mut stream = UnixStream::from_std(stream).unwrap();
    let mut greeting = [0; 44];
    stream.read_exact(&mut greeting).await.unwrap();
    let mut prelude = b"WINGBEAT".to_vec();
    prelude.extend_from_slice(&(PROTOCOL + 1).to_le_bytes());
    stream.write_all(&prelude).await.unwrap();
    // The connection ends without an answer.
    assert_eq!(stream.read(&mut [0; 1]).await.unwrap_or(0), 0);
}
