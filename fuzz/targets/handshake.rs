//! The accepting side of the handshake, given anything at all.

#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;
use tokio::runtime::Runtime;
use wingbeat_core::spec::Address;
use wingbeat_core::{ClusterId, ProcessId};
use wingbeat_net::address::{Stream, this_machine};
use wingbeat_net::handshake::{Token, Welcome, accept};

static RUNTIME: LazyLock<Runtime> =
    LazyLock::new(|| tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime"));

fuzz_target!(|data: &[u8]| {
    RUNTIME.block_on(async {
        let (here, mut there) = UnixStream::pair().expect("a pair of sockets");
        let address = Address { process: ProcessId(1), machine: this_machine(), unix: String::new(), tcp: None, steward: None };
        let welcome = Welcome { address, cluster: ClusterId::random(), epoch: None, patience: None, stands_by: None };
        let _ = there.write_all(&data[..data.len().min(64 << 10)]).await;
        let _ = there.shutdown().await;
        let token = Token::new("secret");
        let accepted = accept(Stream::Unix(here), &token, welcome).await;
        assert!(accepted.is_err(), "nobody guesses a proof");
    });
});
