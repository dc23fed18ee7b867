//! Who may connect, and what those who may not are told.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::os::linux::net::SocketAddrExt;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use wingbeat_core::error::Error;
use wingbeat_core::spec::Address;
use wingbeat_core::{ClusterId, ProcessId};
use wingbeat_net::address::{self, Listener};
use wingbeat_net::handshake::{self, Hello, PROTOCOL, Purpose, RELEASE, Resumes, Role, Token, Welcome};

/// A protocol that is not ours, and whose release follows.
const OTHER: u32 = PROTOCOL ^ 1;

async fn listener(cluster: ClusterId) -> Address {
    let listener = Listener::bind(ProcessId::random(), None).await.unwrap();
    let address = listener.address().clone();
    let welcome = Welcome { address: address.clone(), cluster, epoch: None, patience: None, stands_by: None };
    tokio::spawn(listener.serve(Token::new("secret"), welcome, |_, _| {}));
    address
}

fn hello(cluster: Option<ClusterId>) -> Hello {
    let address = Address {
        process: ProcessId::random(),
        machine: address::this_machine(),
        unix: String::new(),
        tcp: None,
        steward: None,
    };
    Hello {
        address,
        role: Role::Tool,
        purpose: Purpose::Control,
        cluster,
        version: RELEASE.into(),
        losses: 0,
        to: None,
        resumes: Resumes::Nothing,
        epoch: None,
    }
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
        if first.is_empty() {
            return; // it hangs up
        }
        stream.write_all(&first).await.unwrap();
        let _ = stream.read_to_end(&mut Vec::new()).await;
    });
    Address { process: ProcessId(1), machine: address::this_machine(), unix: name, tcp: None, steward: None }
}

#[tokio::test]
async fn versions_that_do_not_speak_the_same_protocol_refuse_each_other() {
    let mut prelude = b"WINGBEAT".to_vec();
    prelude.extend_from_slice(&OTHER.to_le_bytes());
    let mut newer = prelude.clone();
    newer.extend_from_slice(b"99.1.0\0\0\0\0\0\0\0\0\0\0");
    newer.extend_from_slice(&[0; 32]);
    let error = dial(&impostor(newer), "secret", None).await.unwrap_err();
    let text = error.to_string();
    assert!(text.contains("Wingbeat 99.1.0") && text.contains(RELEASE) && text.contains("same release"), "{text}");
    assert!(text.contains(&format!("{OTHER:08x}")) && text.contains(&format!("{PROTOCOL:08x}")), "{text}");

    let mut same_release = prelude;
    let mut release = RELEASE.as_bytes().to_vec();
    release.resize(16, 0);
    same_release.extend_from_slice(&release);
    same_release.extend_from_slice(&[0; 32]);
    let text = dial(&impostor(same_release), "secret", None).await.unwrap_err().to_string();
    assert!(text.contains("other sources") && text.contains("same build"), "{text}");

    // Protocols were counted from 1 once, and no release followed.
    let mut first = b"WINGBEAT".to_vec();
    first.extend_from_slice(&1u32.to_le_bytes());
    first.extend_from_slice(&[200; 32]);
    let text = dial(&impostor(first), "secret", None).await.unwrap_err().to_string();
    assert!(text.contains("another release") && text.contains("same release on both sides"), "{text}");
    let refused = |why: &str| Error::Refused { who: "the head".into(), why: why.into() };
    for text in [text.as_str(), "the token is wrong", "this process belongs to cluster-1"] {
        let why = text.strip_prefix("refused by the listener: ").unwrap_or(text);
        assert_eq!(handshake::is_of_another_build(&refused(why)), text.contains("Wingbeat"), "{why}");
    }

    let error =
        dial(&impostor(b"HTTP/1.1 400 Bad Request, and so on, and on".to_vec()), "secret", None).await.unwrap_err();
    assert!(error.to_string().contains("does not speak"), "{error}");
    assert!(matches!(error, Error::Unreachable { .. }), "something else is there, which refuses nothing: {error:?}");
    let error = dial(&impostor(Vec::new()), "secret", None).await.unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. }), "it may end just now: {error:?}");
}

#[tokio::test]
async fn a_newer_dialler_is_sent_away_before_anything_is_read() {
    let to = listener(ClusterId::random()).await;
    let name = std::os::unix::net::SocketAddr::from_abstract_name(&to.unix).unwrap();
    let stream = std::os::unix::net::UnixStream::connect_addr(&name).unwrap();
    stream.set_nonblocking(true).unwrap();
    let mut stream = UnixStream::from_std(stream).unwrap();
    let mut greeting = [0; 60];
    stream.read_exact(&mut greeting).await.unwrap();
    let mut prelude = b"WINGBEAT".to_vec();
    prelude.extend_from_slice(&OTHER.to_le_bytes());
    stream.write_all(&prelude).await.unwrap();
    // The connection ends without an answer.
    assert_eq!(stream.read(&mut [0; 1]).await.unwrap_or(0), 0);
}

fn raw(to: &Address) -> UnixStream {
    let name = std::os::unix::net::SocketAddr::from_abstract_name(&to.unix).unwrap();
    let stream = std::os::unix::net::UnixStream::connect_addr(&name).unwrap();
    stream.set_nonblocking(true).unwrap();
    UnixStream::from_std(stream).unwrap()
}

#[tokio::test]
async fn nothing_of_a_dialler_is_looked_at_before_its_proof() {
    let to = listener(ClusterId::random()).await;
    let mut stream = raw(&to);
    let mut greeting = [0; 60];
    stream.read_exact(&mut greeting).await.unwrap();
    // Our own prelude, a proof that is none, and no hello at all: the answer comes all the same.
    stream.write_all(&greeting[..28]).await.unwrap();
    stream.write_all(&[7; 64]).await.unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    assert!(String::from_utf8_lossy(&answer).contains("the token is wrong"), "{answer:?}");
}

/// Passes on what a dialler and `to` say to each other, with every byte of the dialler's that `change` is given changed.
async fn relay(to: Address, change: impl Fn(&mut Vec<u8>) + Send + 'static) -> Address {
    let name = format!("wingbeat-test-relay-{}", ProcessId::random());
    let address = std::os::unix::net::SocketAddr::from_abstract_name(&name).unwrap();
    let listener = std::os::unix::net::UnixListener::bind_addr(&address).unwrap();
    listener.set_nonblocking(true).unwrap();
    let listener = tokio::net::UnixListener::from_std(listener).unwrap();
    let here = Address { unix: name, ..to.clone() };
    tokio::spawn(async move {
        let (mut dialler, _) = listener.accept().await.unwrap();
        let mut acceptor = raw(&to);
        let mut greeting = [0; 60];
        acceptor.read_exact(&mut greeting).await.unwrap();
        dialler.write_all(&greeting).await.unwrap();
        let mut says = vec![0; 4096];
        let length = dialler.read(&mut says).await.unwrap();
        says.truncate(length);
        change(&mut says);
        acceptor.write_all(&says).await.unwrap();
        let _ = tokio::io::copy_bidirectional(&mut dialler, &mut acceptor).await;
    });
    here
}

#[tokio::test]
async fn whoever_passes_an_introduction_on_can_change_nothing_in_it() {
    let cluster = ClusterId::random();
    let to = listener(cluster).await;
    dial(&relay(to.clone(), |_| {}).await, "secret", Some(cluster)).await.unwrap();
    // Behind the prelude, the nonce, the proof and the length of the body come the length of the body of the message, and the process.
    let another = relay(to, |says| says[28 + 64 + 4 + 4] ^= 1).await;
    let error = dial(&another, "secret", Some(cluster)).await.unwrap_err();
    assert!(matches!(&error, Error::Refused { why, .. } if why.contains("was changed on the way")), "{error}");
}

#[tokio::test]
async fn another_release_is_refused_by_both_names_although_it_speaks_the_same() {
    let cluster = ClusterId::random();
    let to = listener(cluster).await;
    let other = Hello { version: "99.1.0".into(), ..hello(None) };
    let error = address::dial(&to, "the listener", &Token::new("secret"), other).await.unwrap_err();
    let text = error.to_string();
    assert!(text.contains("99.1.0") && text.contains(RELEASE), "{text}");
}

#[tokio::test]
async fn an_introduction_of_many_kilobytes_is_none() {
    let to = listener(ClusterId::random()).await;
    let long = Hello { version: "9".repeat(5_000), ..hello(None) };
    let refused = address::dial(&to, "the listener", &Token::new("secret"), long).await;
    let Err(Error::Refused { why, .. }) = refused else { panic!("{refused:?}") };
    assert!(why.contains("cannot be read"), "{why}");
}

#[tokio::test]
async fn a_stranger_that_says_nothing_is_disconnected() {
    let any = Some("127.0.0.1:0".parse().unwrap());
    let listener = Listener::bind(ProcessId::random(), any).await.unwrap();
    let here = listener.address().clone();
    let welcome =
        Welcome { address: here.clone(), cluster: ClusterId::random(), epoch: None, patience: None, stands_by: None };
    tokio::spawn(listener.serve(Token::new("secret"), welcome, |_, _| {}));
    let mut stranger = tokio::net::TcpStream::connect(here.tcp.unwrap()).await.unwrap();
    let mut said = Vec::new();
    // Ends when it is disconnected, whatever it was told.
    let _ = stranger.read_to_end(&mut said).await;
    assert!(said.len() < 1_000, "{said:?}");
}

#[tokio::test]
async fn half_open_connections_keep_nobody_out() {
    let any = Some("127.0.0.1:0".parse().unwrap());
    let listener = Listener::bind(ProcessId::random(), any).await.unwrap();
    let here = listener.address().clone();
    let cluster = ClusterId::random();
    tokio::spawn(listener.serve(
        Token::new("secret"),
        Welcome { address: here.clone(), cluster, epoch: None, patience: None, stands_by: None },
        |_, _| {},
    ));
    let tcp = here.tcp.unwrap();
    // As a process on another machine sees it.
    let there = Address { machine: wingbeat_core::spec::MachineId(0), ..here.clone() };
    let mut held = Vec::new();
    for number in 0..1_000 {
        held.push(tokio::net::TcpStream::connect(tcp).await.unwrap());
        if number % 250 == 249 {
            dial(&there, "secret", Some(cluster)).await.unwrap();
            dial(&here, "secret", Some(cluster)).await.unwrap();
        }
    }
    let local: Vec<UnixStream> = (0..300).map(|_| raw(&here)).collect();
    dial(&there, "secret", Some(cluster)).await.unwrap();
    dial(&here, "secret", Some(cluster)).await.unwrap();
    drop((held, local));
}

#[tokio::test]
async fn whoever_does_not_introduce_itself_is_not_waited_for_long() {
    let any = Some("127.0.0.1:0".parse().unwrap());
    let listener = Listener::bind(ProcessId::random(), any).await.unwrap();
    let tcp = listener.address().tcp.unwrap();
    let welcome = Welcome {
        address: listener.address().clone(),
        cluster: ClusterId::random(),
        epoch: None,
        patience: None,
        stands_by: None,
    };
    tokio::spawn(listener.serve(Token::new("secret"), welcome, |_, _| {}));
    let mut stream = tokio::net::TcpStream::connect(tcp).await.unwrap();
    let mut all = Vec::new();
    // It greets, and ends the connection by itself.
    stream.read_to_end(&mut all).await.unwrap();
    assert_eq!(all.len(), 60);
}

#[tokio::test]
async fn a_process_that_does_not_listen_any_more_is_known_to_be_gone_and_one_that_is_busy_is_not() {
    let listener = Listener::bind(ProcessId::random(), Some("127.0.0.1:0".parse().unwrap())).await.unwrap();
    let here = listener.address().clone();
    let there = Address { machine: wingbeat_core::spec::MachineId(0), ..here.clone() };
    // It lives, and accepts nobody at the moment.
    assert!(!address::is_gone(&here).await && !address::is_gone(&there).await);
    drop(listener);
    assert!(address::is_gone(&here).await && address::is_gone(&there).await);
    for gone in [here, there] {
        let dialled = address::dial_known(&gone, "it", &Token::new("secret"), hello(None)).await;
        assert!(matches!(dialled, Err(address::DialError::Gone(Error::Unreachable { .. }))), "{dialled:?}");
    }
}
