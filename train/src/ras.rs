//! What NCCL itself knows of a run: the RAS port that every process with NCCL 2.24 or newer has.
//!
//! A line protocol over TCP (<https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html>): both
//! sides name their version, the client sets a time limit and asks for the status, and the answer is text until the
//! connection ends. Whichever process is asked gathers it from all.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// Tells NCCL where to listen.
pub(crate) const VARIABLE: &str = "NCCL_RAS_ADDR";
const PROTOCOL: u32 = 2;
/// How long NCCL's processes wait for each other, in seconds.
const GATHER_SECONDS: u32 = 5;
const CONNECT_LIMIT: Duration = Duration::from_secs(1);
const ANSWER_LIMIT: Duration = Duration::from_secs(15);
/// More than this nobody reads.
const LENGTH_LIMIT: u64 = 64 << 10;

/// What NCCL says of all ranks and of how far each communicator's operations have come.
pub(crate) fn status(port: u16) -> Result<String, String> {
    let failed = |error: std::io::Error| error.to_string();
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let mut stream = TcpStream::connect_timeout(&address, CONNECT_LIMIT).map_err(failed)?;
    stream.set_read_timeout(Some(ANSWER_LIMIT)).map_err(failed)?;
    stream.set_write_timeout(Some(CONNECT_LIMIT)).map_err(failed)?;
    let mut reader = BufReader::new(stream.try_clone().map_err(failed)?);
    let mut ask = |command: String, expected: &str| {
        stream.write_all(command.as_bytes()).map_err(failed)?;
        let mut answer = String::new();
        reader.by_ref().take(1024).read_line(&mut answer).map_err(failed)?;
        match answer.to_uppercase().starts_with(expected) {
            true => Ok(()),
            false => Err(format!("NCCL answered {:?}", answer.trim_end())),
        }
    };
    ask(format!("CLIENT PROTOCOL {PROTOCOL}\n"), "SERVER PROTOCOL ")?;
    ask(format!("TIMEOUT {GATHER_SECONDS}\n"), "OK")?;
    stream.write_all(b"VERBOSE STATUS\n").map_err(failed)?;
    let mut text = Vec::new();
    reader.take(LENGTH_LIMIT).read_to_end(&mut text).map_err(failed)?;
    Ok(String::from_utf8_lossy(&text).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// Answers as NCCL does, and gives what it heard.
    fn nccl(listener: TcpListener, greeting: &'static str) -> std::thread::JoinHandle<Vec<String>> {
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
            let mut heard = Vec::new();
            for answer in [greeting, "OK\n", "Job summary\n  2 ranks\n"] {
                match lines.next() {
                    Some(Ok(line)) => heard.push(line),
                    _ => break,
                }
                stream.write_all(answer.as_bytes()).unwrap();
            }
            heard
        })
    }

    #[test]
    fn the_status_is_asked_for_as_nccl_understands_it() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let nccl = nccl(listener, "SERVER PROTOCOL 3\n");
        assert_eq!(status(port).unwrap(), "Job summary\n  2 ranks");
        assert_eq!(nccl.join().unwrap(), ["CLIENT PROTOCOL 2", "TIMEOUT 5", "VERBOSE STATUS"]);
    }

    #[test]
    fn who_is_not_nccl_is_not_believed() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let other = nccl(listener, "HTTP/1.1 400 Bad Request\n");
        assert!(status(port).unwrap_err().contains("400 Bad Request"));
        other.join().unwrap();
        assert!(status(port).is_err(), "and nobody is an error");
    }
}
