//! A process that has no descriptor left: its connections go on. Alone in its file, since the limit is that of the process.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::os::fd::AsRawFd;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;
use wingbeat_net::address::Stream;
use wingbeat_net::link::Link;
use wingbeat_net::messages::LogLine;
use wingbeat_net::mux::{self, Waiting};
use wingbeat_net::services::{ProcessRequest, ProcessResponse};

#[tokio::test]
async fn a_full_socket_is_waited_for_also_when_no_descriptor_is_free() {
    const LINE: usize = 1 << 20;
    const LINES: usize = 8;
    let (here, mut there) = UnixStream::pair().unwrap();
    let (connection, _client, _server) = mux::connect::<ProcessRequest, ProcessResponse, ProcessRequest, ProcessResponse>(
        Stream::Unix(here),
        Waiting::Asleep,
    );
    let link = Link::new();
    for _ in 0..LINES {
        let text = "x".repeat(LINE);
        link.send(LogLine { pid: 1, source: String::new(), node: String::new(), is_stderr: false, text });
    }
    let limit = getrlimit(Resource::Nofile);
    let next_free = rustix::io::dup(&there).unwrap().as_raw_fd() as u64;
    setrlimit(Resource::Nofile, Rlimit { current: Some(next_free), maximum: limit.maximum }).unwrap();
    // The only thread writes until the socket is full, and reads after that.
    let reading = async {
        let mut chunk = vec![0; 64 << 10];
        let mut read = 0;
        while read < LINES * LINE {
            let count = there.read(&mut chunk).await.unwrap();
            assert!(count > 0, "the connection ended after {read} bytes");
            read += count;
        }
    };
    tokio::select! {
        () = link.run(&connection, |lines| ProcessRequest::Logs { lines }) => panic!("the link broke"),
        () = reading => {}
    }
    setrlimit(Resource::Nofile, limit).unwrap();
}
