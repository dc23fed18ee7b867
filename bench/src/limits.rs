//! What the machine itself can do, measured in the same run: nothing of Wingbeat is on the way.

use std::hint::black_box;
use std::io::{BufRead, BufReader, BufWriter, Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use wingbeat_tests::hosts::Hosts;

use crate::measure::{REPEAT, repeated, repeated_blocking};
use crate::report::{Figure, Must};
use crate::rows::args::SIZES;

/// Names what this program is to be instead of the bench: the other process of a limit.
pub(crate) const OTHER: &str = "WINGBEAT_BENCH_OTHER";

const ROUNDS: u64 = 20_000;

/// What the other process does, if this is one.
pub(crate) fn be_other() -> Option<Result<()>> {
    let what = std::env::var(OTHER).ok()?;
    let (kind, at) = what.split_once(' ')?;
    Some(match kind {
        "echo" => runtime().and_then(|runtime| runtime.block_on(echo(at))),
        "echo_hops" => runtime().and_then(|runtime| runtime.block_on(echo_with_hop(at))),
        "stream" => read_stream(at),
        "tcp" => send_tcp(at),
        "tcp_reader" => read_tcp(at),
        other => Err(anyhow::anyhow!("{OTHER}={other}")),
    })
}

/// The other process; it ends with this.
struct Other(Child);

impl Other {
    fn start(kind: &str, at: &str) -> Result<Other> {
        Ok(Other(Command::new(std::env::current_exe()?).env(OTHER, format!("{kind} {at}")).spawn()?))
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn runtime() -> Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?)
}

async fn echo(at: &str) -> Result<()> {
    let mut stream = UnixStream::connect(at).await?;
    let mut bytes = [0; 64];
    while stream.read_exact(&mut bytes).await.is_ok() {
        stream.write_all(&bytes).await?;
    }
    Ok(())
}

/// As a worker process: an IO thread reads, another thread answers, the IO thread writes.
async fn echo_with_hop(at: &str) -> Result<()> {
    let mut stream = UnixStream::connect(at).await?;
    let (to_user, from_io) = std::sync::mpsc::channel::<([u8; 64], tokio::sync::oneshot::Sender<[u8; 64]>)>();
    std::thread::spawn(move || {
        while let Ok((bytes, answer)) = from_io.recv() {
            let _ = answer.send(bytes);
        }
    });
    let mut bytes = [0; 64];
    while stream.read_exact(&mut bytes).await.is_ok() {
        let (answer, answered) = tokio::sync::oneshot::channel();
        to_user.send((bytes, answer))?;
        stream.write_all(&answered.await?).await?;
    }
    Ok(())
}

/// Round trips of 64 bytes over a unix socket between two processes, on one thread each.
pub(crate) fn limit_echo() -> Result<Vec<Figure>> {
    let dir = tempfile::tempdir()?;
    let at = dir.path().join("socket");
    let seconds = runtime()?.block_on(async {
        let listener = UnixListener::bind(&at)?;
        let _other = Other::start("echo", &at.display().to_string())?;
        let (mut stream, _) = listener.accept().await?;
        let mut bytes = [7; 64];
        repeated(async || {
            for _ in 0..ROUNDS {
                stream.write_all(&bytes).await?;
                stream.read_exact(&mut bytes).await?;
            }
            ensure!(bytes == [7; 64]);
            Ok(())
        })
        .await
    })?;
    Ok(vec![Figure::rate("limit_echo", ROUNDS, &seconds, Must::Nothing)])
}

/// The same with the thread hops of a task: user thread, IO thread, IO thread, user thread, and back.
pub(crate) fn limit_echo_hops() -> Result<Vec<Figure>> {
    let dir = tempfile::tempdir()?;
    let at = dir.path().join("socket");
    let (ask, mut asked) = tokio::sync::mpsc::unbounded_channel::<std::sync::mpsc::SyncSender<[u8; 64]>>();
    let path = at.clone();
    let io = std::thread::spawn(move || -> Result<()> {
        runtime()?.block_on(async {
            let listener = UnixListener::bind(&path)?;
            let _other = Other::start("echo_hops", &path.display().to_string())?;
            let (mut stream, _) = listener.accept().await?;
            let mut bytes = [7; 64];
            while let Some(answer) = asked.recv().await {
                stream.write_all(&bytes).await?;
                stream.read_exact(&mut bytes).await?;
                answer.send(bytes)?;
            }
            Ok(())
        })
    });
    let seconds = repeated_blocking(|| {
        let (answer, answered) = std::sync::mpsc::sync_channel(1);
        for _ in 0..ROUNDS {
            ask.send(answer.clone())?;
            ensure!(answered.recv()? == [7; 64]);
        }
        Ok(())
    })?;
    drop(ask);
    if io.join().is_err() {
        bail!("the IO thread panicked");
    }
    Ok(vec![Figure::rate("limit_echo_hops", ROUNDS, &seconds, Must::Nothing)])
}

/// Bytes that are sent, or read, at once.
const STREAM_BATCH: usize = 256 << 10;

/// Reads messages of the length that each begins with, every one into memory of its own, and answers each with its length.
fn read_stream(at: &str) -> Result<()> {
    let stream = std::os::unix::net::UnixStream::connect(at)?;
    let mut messages = BufReader::with_capacity(STREAM_BATCH, stream.try_clone()?);
    let mut answers = BufWriter::new(stream);
    let mut length = [0; 8];
    loop {
        // What was asked for is answered before this waits.
        if messages.buffer().is_empty() {
            answers.flush()?;
        }
        if messages.read_exact(&mut length).is_err() {
            return Ok(());
        }
        let mut bytes = vec![0; u64::from_le_bytes(length) as usize];
        messages.read_exact(&mut bytes)?;
        answers.write_all(&(black_box(&bytes).len() as u64).to_le_bytes())?;
    }
}

/// The bytes of the `args_*` rows in batches over a unix socket between two processes, copied once at each end: messages a second.
pub(crate) fn limit_stream() -> Result<Vec<Figure>> {
    let dir = tempfile::tempdir()?;
    let at = dir.path().join("socket");
    let listener = std::os::unix::net::UnixListener::bind(&at)?;
    let _other = Other::start("stream", &at.display().to_string())?;
    let (stream, _) = listener.accept()?;
    let mut figures = Vec::new();
    for size in &SIZES {
        let seconds = repeated_blocking(|| {
            let mut answers = BufReader::new(stream.try_clone()?);
            let mut messages = BufWriter::with_capacity(STREAM_BATCH, &stream);
            std::thread::scope(|threads| {
                let answered = threads.spawn(move || -> Result<bool> {
                    let mut length = [0; 8];
                    for _ in 0..size.count {
                        answers.read_exact(&mut length)?;
                        ensure!(u64::from_le_bytes(length) == size.bytes as u64);
                    }
                    Ok(answers.buffer().is_empty())
                });
                for _ in 0..size.count {
                    let bytes = vec![1u8; size.bytes];
                    messages.write_all(&(bytes.len() as u64).to_le_bytes())?;
                    messages.write_all(black_box(&bytes))?;
                }
                messages.flush()?;
                ensure!(answered.join().is_ok_and(|ended| ended.is_ok_and(|all| all)), "the answers were wrong");
                Ok(())
            })
        })?;
        figures.push(Figure::rate(size.limit, size.count, &seconds, Must::Nothing));
    }
    Ok(figures)
}

/// Copying into shared memory whose pages are there.
pub(crate) fn limit_memcpy() -> Result<Vec<Figure>> {
    const SIZE: usize = 256 << 20;
    let source = vec![7u8; SIZE];
    let fd = rustix::fs::memfd_create("limit_memcpy", rustix::fs::MemfdFlags::CLOEXEC)?;
    rustix::fs::ftruncate(&fd, SIZE as u64)?;
    // SAFETY: a new mapping of a file that nobody else has, unmapped below.
    let shared = unsafe {
        use rustix::mm::{MapFlags, ProtFlags, mmap};
        mmap(std::ptr::null_mut(), SIZE, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &fd, 0)?
    };
    let seconds = repeated_blocking(|| {
        // SAFETY: both are SIZE bytes, and do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(black_box(source.as_ptr()), shared.cast::<u8>(), SIZE) };
        Ok(())
    })?;
    // SAFETY: mapped above; nothing refers to it any more.
    unsafe { rustix::mm::munmap(shared, SIZE)? };
    Ok(vec![Figure::bandwidth("limit_memcpy", SIZE as u64, &seconds, Must::Nothing)])
}

const TCP_BYTES: usize = 1 << 30;
const TCP_PIECE: usize = 1 << 20;

fn send_tcp(at: &str) -> Result<()> {
    let mut stream = std::net::TcpStream::connect(at)?;
    let piece = vec![7u8; TCP_PIECE];
    let mut go = [0];
    while stream.read_exact(&mut go).is_ok() {
        for _ in 0..TCP_BYTES / TCP_PIECE {
            stream.write_all(&piece)?;
        }
    }
    Ok(())
}

/// Seconds of each time that everything has come from whoever connects, into one buffer.
fn received(listener: &TcpListener) -> Result<Vec<f64>> {
    let (mut stream, _) = listener.accept().context("nobody connected")?;
    let mut buffer = vec![0; TCP_PIECE];
    repeated_blocking(|| {
        stream.write_all(&[1])?;
        for _ in 0..TCP_BYTES / TCP_PIECE {
            stream.read_exact(&mut buffer)?;
        }
        ensure!(buffer[TCP_PIECE - 1] == 7);
        Ok(())
    })
}

fn read_tcp(at: &str) -> Result<()> {
    let listener = TcpListener::bind(at)?;
    println!("ready");
    println!("{}", serde_json::to_string(&received(&listener)?)?);
    Ok(())
}

/// One loopback connection between two processes.
pub(crate) fn limit_tcp() -> Result<Vec<Figure>> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let _other = Other::start("tcp", &listener.local_addr()?.to_string())?;
    Ok(vec![Figure::bandwidth("limit_tcp", TCP_BYTES as u64, &received(&listener)?, Must::Nothing)])
}

/// One connection between two of these hosts.
pub(crate) fn limit_tcp_hosts(hosts: &Hosts, [from, to]: [usize; 2]) -> Result<Figure> {
    let at = format!("{}:7000", hosts.address(to));
    let this = std::env::current_exe()?;
    let other = |host: usize, kind: &str| {
        let mut command = hosts.on(host, &this);
        command.env(OTHER, format!("{kind} {at}")).stdout(Stdio::piped());
        command
    };
    let mut reader = Other(other(to, "tcp_reader").spawn()?);
    let mut lines = BufReader::new(reader.0.stdout.take().context("no stdout")?).lines();
    ensure!(lines.next().context("the reader has ended")?? == "ready");
    let _sender = Other(other(from, "tcp").spawn()?);
    let seconds: Vec<f64> = serde_json::from_str(&lines.next().context("the reader has ended")??)?;
    Ok(Figure::bandwidth("limit_tcp_hosts", TCP_BYTES as u64, &seconds, Must::Nothing))
}

const DISK_BYTES: u64 = 1 << 30;
const DISK_PIECE: usize = 8 << 20;
const BLOCK: usize = 4096;

/// One file on the disk of the temporary folder, where the clusters of this program spill to, written and read one piece
/// after another: without the page cache, which would answer instead of the disk.
pub(crate) fn limit_disk() -> Result<Vec<Figure>> {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("file");
    let mut memory = vec![7u8; DISK_PIECE + BLOCK];
    let start = memory.as_ptr().align_offset(BLOCK);
    let piece = &mut memory[start..start + DISK_PIECE];
    let direct = rustix::fs::OFlags::DIRECT.bits() as i32;
    let mut open = std::fs::OpenOptions::new();
    let file = open.read(true).write(true).create(true).truncate(true).custom_flags(direct).open(&path)?;
    let places = || (0..DISK_BYTES).step_by(DISK_PIECE);
    let (mut writes, mut reads) = (Vec::new(), Vec::new());
    // Once to warm up.
    for _ in 0..=REPEAT {
        file.set_len(0)?;
        let begun = Instant::now();
        places().try_for_each(|at| file.write_all_at(piece, at))?;
        writes.push(begun.elapsed().as_secs_f64());
        let begun = Instant::now();
        places().try_for_each(|at| file.read_exact_at(piece, at))?;
        reads.push(begun.elapsed().as_secs_f64());
        ensure!(piece[DISK_PIECE - 1] == 7);
    }
    Ok(vec![
        Figure::bandwidth("limit_disk_write", DISK_BYTES, &writes[1..], Must::Nothing),
        Figure::bandwidth("limit_disk_read", DISK_BYTES, &reads[1..], Must::Nothing),
    ])
}
