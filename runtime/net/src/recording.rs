//! What a head or a node took in, and a check of what followed, in a file: a hang in somebody's cluster can be played back on
//! another machine, by `wingbeat replay`. What a driver or worker process heard and said is written in the same form, and
//! shown there.
//!
//! Nothing is recorded unless `WINGBEAT_RECORD` names a folder. A file begins with how its machine began, and has one frame
//! for each step: the time, the input, and a digest of the actions. It ends at 256 MiB (`WINGBEAT_RECORD_MB`). Values and
//! environments are taken out before anything is written ([`Redact`]).

use std::fmt::Debug;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::marker::PhantomData;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use bytes::{Bytes, BytesMut};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use wingbeat_core::codec;
use wingbeat_core::error::Error;

use crate::handshake;

mod redact;

pub use redact::Redact;

/// The folder, if anything is to be recorded.
const FOLDER: &str = "WINGBEAT_RECORD";
/// How large a recording may become, in MiB.
const LIMIT: &str = "WINGBEAT_RECORD_MB";
const USUAL_LIMIT_MB: u64 = 256;
/// Steps that wait for the disk: so many, and the recording ends.
const QUEUED: usize = 16_384;
/// So many bytes are written at once, if they wait.
const AT_ONCE: usize = 256 << 10;
/// How long the end of a process waits for what is left.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// Counts changes of what is recorded, beside those of the protocol.
const FORMAT: u32 = 2;
/// What a recording's name ends with.
pub const EXTENSION: &str = "wbrec";

/// Is told what a machine has taken in, and what it has decided.
pub trait Recorder<I, A>: Send {
    /// One step.
    fn record(&mut self, now: u64, input: I, actions: &[A]);
}

/// What the first frame says, in every version.
#[derive(Serialize, Deserialize)]
struct Header {
    version: String,
    of: Machine,
    /// In microseconds since 1970.
    begun: u64,
}

/// What was recorded.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Machine {
    /// A head.
    Head,
    /// A node.
    Node,
    /// A driver or a worker process.
    Process,
}

#[derive(Serialize, Deserialize)]
enum Frame<B, I> {
    Begins {
        with: B,
    },
    Step {
        now: u64,
        at: u64,
        input: I,
        digest: u64,
    },
    /// It was as large as it may be.
    Full,
    /// The disk was too slow for what happened.
    Behind,
}

/// A recording that is being written.
pub struct Recording<I, A> {
    /// To whoever writes; none once it is over.
    frames: Option<mpsc::SyncSender<Vec<u8>>>,
    writer: Option<JoinHandle<()>>,
    path: PathBuf,
    left: u64,
    begun: Instant,
    /// Whether something was left out, because too much waited for the disk.
    is_behind: Arc<AtomicBool>,
    of: PhantomData<fn(I, A)>,
}

impl<I, A> Recording<I, A>
where
    I: Serialize + Redact + Send,
    A: Clone + Debug + Redact,
{
    /// Begins a recording, if the environment asks for one. What keeps it from being written is said, and no reason not to
    /// go on.
    pub fn asked_for<B: Serialize + Redact>(of: Machine, name: &str, with: B) -> Option<Box<dyn Recorder<I, A>>>
    where
        I: 'static,
        A: 'static,
    {
        match Self::begin_if_asked(of, name, with) {
            Ok(recording) => {
                let recording = recording?;
                tracing::info!("recording what happens in {}", recording.path.display());
                Some(Box::new(recording))
            }
            Err(error) => {
                tracing::error!("{error}");
                None
            }
        }
    }

    /// Begins a recording, if the environment asks for one.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn begin_if_asked<B: Serialize + Redact>(of: Machine, name: &str, mut with: B) -> Result<Option<Self>, Error> {
        let Some(folder) = folder() else { return Ok(None) };
        let megabytes = match std::env::var(LIMIT).map(|limit| (limit.parse::<u32>(), limit)) {
            Ok((Ok(megabytes), _)) => u64::from(megabytes),
            Ok((Err(error), limit)) => {
                tracing::error!(%error, limit, "{LIMIT} is no number of MiB: recording {USUAL_LIMIT_MB}");
                USUAL_LIMIT_MB
            }
            Err(_) => USUAL_LIMIT_MB,
        };
        if megabytes == 0 {
            return Ok(None);
        }
        with.redact();
        let recording = Self::begin(of, &folder, &format!("{name}-{}", std::process::id()), megabytes << 20, with);
        recording.map(Some).map_err(|error| Error::io(format!("recording in {}", folder.display()), &error))
    }

    fn begin<B: Serialize>(of: Machine, folder: &Path, name: &str, limit: u64, with: B) -> io::Result<Self> {
        std::fs::create_dir_all(folder)?;
        let path = folder.join(name).with_extension(EXTENSION);
        // Names and addresses are nobody else's.
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
        let (since, begun) = (SystemTime::now().duration_since(SystemTime::UNIX_EPOCH), Instant::now());
        let header = Header { version: version(), of, begun: since.unwrap_or_default().as_micros() as u64 };
        let begins = [framed(&header)?, framed(&Frame::<B, I>::Begins { with })?].concat();
        file.write_all(&begins)?;
        let behind = framed(&Frame::<(), ()>::Behind)?;
        let (frames, to_write) = mpsc::sync_channel::<Vec<u8>>(QUEUED);
        let (place, is_behind) = (path.clone(), Arc::new(AtomicBool::new(false)));
        let has_fallen_behind = is_behind.clone();
        // A disk may stand still for long, and whoever is recorded may not.
        let writer = std::thread::Builder::new().name("wingbeat-record".into()).spawn(move || {
            let written = write_all(&mut file, &to_write).and_then(|()| {
                let is_behind = has_fallen_behind.load(Ordering::Acquire);
                if is_behind { file.write_all(&behind) } else { Ok(()) }
            });
            if let Err(error) = written {
                tracing::error!(%error, "the recording {} ends here", place.display());
            }
        })?;
        let left = limit.saturating_sub(begins.len() as u64);
        Ok(Recording { frames: Some(frames), writer: Some(writer), path, left, begun, is_behind, of: PhantomData })
    }
}

/// Writes frames until nobody has more. What waits is written at once: a process that is killed loses no more than that.
fn write_all(file: &mut File, frames: &mpsc::Receiver<Vec<u8>>) -> io::Result<()> {
    let mut bytes = Vec::new();
    while let Ok(frame) = frames.recv() {
        bytes.extend(frame);
        while bytes.len() < AT_ONCE
            && let Ok(frame) = frames.try_recv()
        {
            bytes.extend(frame);
        }
        file.write_all(&bytes)?;
        bytes.clear();
    }
    Ok(())
}

/// The folder, if anything is to be recorded.
fn folder() -> Option<PathBuf> {
    let folder = PathBuf::from(std::env::var_os(FOLDER).filter(|folder| !folder.is_empty())?);
    Some(std::path::absolute(&folder).unwrap_or(folder))
}

/// The variables with which another process records where this one does, whichever folder it works in; none if this one
/// records nothing.
pub fn variables() -> Vec<(String, String)> {
    let Some(folder) = folder().and_then(|folder| folder.into_os_string().into_string().ok()) else {
        return Vec::new();
    };
    let limit = std::env::var(LIMIT).ok().map(|limit| (LIMIT.to_owned(), limit));
    std::iter::once((FOLDER.to_owned(), folder)).chain(limit).collect()
}

/// With which version a recording can be played.
fn version() -> String {
    format!("{} (protocol {:08x}, {FORMAT})", env!("CARGO_PKG_VERSION"), handshake::PROTOCOL)
}

/// Before each frame are its length and its fingerprint.
const BEFORE: usize = 12;

fn framed<T: Serialize>(frame: &T) -> io::Result<Vec<u8>> {
    let mut bytes = BytesMut::zeroed(BEFORE);
    codec::encode_message(frame, &mut bytes).map_err(io::Error::other)?;
    let (length, print) = ((bytes.len() - BEFORE) as u32, fingerprint(bytes[BEFORE..].iter().copied()));
    bytes[..4].copy_from_slice(&length.to_le_bytes());
    bytes[4..BEFORE].copy_from_slice(&print.to_le_bytes());
    Ok(bytes.into())
}

impl<I, A> Recorder<I, A> for Recording<I, A>
where
    I: Serialize + Redact + Send,
    A: Clone + Debug + Redact,
{
    fn record(&mut self, now: u64, mut input: I, actions: &[A]) {
        let Some(frames) = &self.frames else { return };
        input.redact();
        let frame = match self.left {
            0 => Frame::<(), I>::Full,
            _ => {
                let at = self.begun.elapsed().as_micros() as u64;
                Frame::Step { now, at, input, digest: digest(&texts(actions)) }
            }
        };
        let is_full = matches!(frame, Frame::Full);
        let end = match framed(&frame) {
            Ok(bytes) => {
                self.left = self.left.saturating_sub(bytes.len() as u64);
                frames.try_send(bytes).err().map(|error| {
                    self.is_behind.store(matches!(error, mpsc::TrySendError::Full(_)), Ordering::Release);
                    error.to_string()
                })
            }
            Err(error) => Some(error.to_string()),
        };
        if let Some(why) = &end {
            tracing::error!("the recording {} ends here: {why}", self.path.display());
        }
        if is_full || end.is_some() {
            self.frames = None;
        }
    }
}

impl<I, A> Drop for Recording<I, A> {
    fn drop(&mut self) {
        self.frames = None;
        let begun = Instant::now();
        // What is left is written, unless the disk stands still.
        while self.writer.as_ref().is_some_and(|writer| !writer.is_finished()) && begun.elapsed() < LAST_WORDS {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Actions as people may see them.
pub fn texts<A: Clone + Debug + Redact>(actions: &[A]) -> Vec<String> {
    let text = |action: &A| {
        let mut action = action.clone();
        action.redact();
        format!("{action:?}")
    };
    actions.iter().map(text).collect()
}

/// A fingerprint of actions: two that decided the same have the same. FNV-1a of 64 bits (Fowler, Noll and Vo), which is the same everywhere and for ever.
pub fn digest(texts: &[String]) -> u64 {
    fingerprint(texts.iter().flat_map(|text| text.bytes().chain([0])))
}

fn fingerprint(bytes: impl Iterator<Item = u8>) -> u64 {
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// A step that was recorded.
pub struct Step<I> {
    /// When, in milliseconds of the machine's clock.
    pub now: u64,
    /// When, in microseconds since the recording began.
    pub at: u64,
    /// What was taken in.
    pub input: I,
    /// Of the actions that followed.
    pub digest: u64,
}

/// A recording that is played back.
pub struct Played<B, I> {
    file: io::BufReader<File>,
    /// When it began, in microseconds since 1970.
    pub begun: u64,
    /// Whether it ended because it was as large as it may be.
    pub is_full: bool,
    /// Whether it ended because the disk was too slow.
    pub is_behind: bool,
    /// Whether it ends in the middle of a step: its process was killed there, or the rest was lost on the way.
    pub is_cut: bool,
    of: PhantomData<fn() -> (B, I)>,
}

/// What a recording is of.
///
/// # Errors
/// It cannot be read, or is of another build.
pub fn kind(path: &Path) -> Result<Machine, Error> {
    let mut file = open(path)?;
    Ok(header(path, &mut file)?.of)
}

fn open(path: &Path) -> Result<io::BufReader<File>, Error> {
    let file = File::open(path).map_err(|error| Error::io(format!("reading {}", path.display()), &error))?;
    Ok(io::BufReader::new(file))
}

fn header(path: &Path, file: &mut io::BufReader<File>) -> Result<Header, Error> {
    let other = |why: String| Error::Failed { what: format!("playing {}", path.display()), why };
    let header: Option<Header> = match frame(file) {
        Ok(Found::Frame(header)) => Some(header),
        Ok(Found::End | Found::Cut) | Err(_) => None,
    };
    let ours = version();
    match header {
        Some(header) if header.version == ours => Ok(header),
        Some(header) => {
            Err(other(format!("it was written by {}, and this is {ours}: use the same build", header.version)))
        }
        None => Err(other("it does not begin as a recording does".into())),
    }
}

enum Found<T> {
    Frame(T),
    End,
    Cut,
}

fn frame<T: DeserializeOwned>(file: &mut impl Read) -> io::Result<Found<T>> {
    let before = up_to(file, BEFORE)?;
    if before.is_empty() {
        return Ok(Found::End);
    }
    if before.len() < BEFORE {
        return Ok(Found::Cut);
    }
    let length = u32::from_le_bytes([before[0], before[1], before[2], before[3]]) as usize;
    let bytes = up_to(file, length)?;
    if bytes.len() < length {
        return Ok(Found::Cut);
    }
    if fingerprint(bytes.iter().copied()).to_le_bytes() != before[4..BEFORE] {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "it is damaged there"));
    }
    codec::decode_message(Bytes::from(bytes)).map(Found::Frame).map_err(io::Error::other)
}

/// So many bytes, or those before the end.
fn up_to(file: &mut impl Read, length: usize) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(length as u64).read_to_end(&mut bytes)?;
    Ok(bytes)
}

impl<B: DeserializeOwned, I: DeserializeOwned> Played<B, I> {
    /// Opens a recording, and answers with how its machine began.
    ///
    /// # Errors
    /// It cannot be read, or is of another build.
    pub fn open(path: &Path) -> Result<(B, Played<B, I>), Error> {
        let mut file = open(path)?;
        let begun = header(path, &mut file)?.begun;
        let other = |why: String| Error::Failed { what: format!("playing {}", path.display()), why };
        match frame::<Frame<B, I>>(&mut file) {
            Ok(Found::Frame(Frame::Begins { with })) => {
                Ok((with, Played { file, begun, is_full: false, is_behind: false, is_cut: false, of: PhantomData }))
            }
            Err(error) => Err(other(error.to_string())),
            Ok(_) => Err(other("it does not begin as a recording does".into())),
        }
    }

    /// The next step; none at the end.
    ///
    /// # Errors
    /// It cannot be read on.
    pub fn next_step(&mut self) -> io::Result<Option<Step<I>>> {
        match frame::<Frame<B, I>>(&mut self.file)? {
            Found::Frame(Frame::Step { now, at, input, digest }) => return Ok(Some(Step { now, at, input, digest })),
            Found::Frame(Frame::Full) => self.is_full = true,
            Found::Frame(Frame::Behind) => self.is_behind = true,
            Found::Cut => self.is_cut = true,
            Found::Frame(Frame::Begins { .. }) | Found::End => {}
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
    struct Word(String);

    impl Redact for Word {
        fn redact(&mut self) {
            self.0 = self.0.replace("secret", "");
        }
    }

    fn recording(folder: &Path, limit: u64) -> Recording<Word, Word> {
        Recording::begin(Machine::Head, folder, "head-1", limit, Word("begin".into())).unwrap()
    }

    fn played(folder: &Path) -> (Word, Played<Word, Word>) {
        Played::open(&folder.join("head-1").with_extension(EXTENSION)).unwrap()
    }

    #[test]
    fn what_was_recorded_is_played_without_what_nobody_is_to_see() {
        let folder = tempfile::tempdir().unwrap();
        let mut writing = recording(folder.path(), 1 << 20);
        writing.record(7, Word("a secret key".into()), &[Word("secret one".into()), Word("two".into())]);
        drop(writing);
        let (with, mut played) = played(folder.path());
        assert_eq!(with, Word("begin".into()));
        let step = played.next_step().unwrap().unwrap();
        assert_eq!((step.now, step.input), (7, Word("a  key".into())));
        assert_eq!(step.digest, digest(&texts(&[Word(" one".into()), Word("two".into())])));
        assert!(played.next_step().unwrap().is_none() && !played.is_full);
    }

    #[test]
    fn a_recording_ends_where_it_is_full_and_where_its_process_was_killed() {
        let folder = tempfile::tempdir().unwrap();
        let mut writing = recording(folder.path(), 400);
        for now in 0..100 {
            writing.record(now, Word("x".repeat(50)), &[]);
        }
        drop(writing);
        let (_, mut full) = played(folder.path());
        let mut steps = 0;
        while full.next_step().unwrap().is_some() {
            steps += 1;
        }
        assert!((3..10).contains(&steps) && full.is_full, "{steps}");
        let path = folder.path().join("head-1").with_extension(EXTENSION);
        let whole = std::fs::read(&path).unwrap();
        std::fs::write(&path, &whole[..whole.len() - 25]).unwrap();
        let (_, mut cut) = played(folder.path());
        let mut read = 0;
        while cut.next_step().unwrap().is_some() {
            read += 1;
        }
        assert!(read >= steps - 1 && !cut.is_full && cut.is_cut);
        assert_eq!(kind(&path).unwrap(), Machine::Head);
        let mut damaged = whole.clone();
        let last = damaged.len() - 1;
        damaged[last] ^= 1;
        std::fs::write(&path, damaged).unwrap();
        let (_, mut damaged) = played(folder.path());
        assert!(std::iter::from_fn(|| damaged.next_step().transpose()).any(|step| step.is_err()));
    }

    #[test]
    fn a_recording_with_a_changed_byte_is_refused_or_cut_where_that_is() {
        let folder = tempfile::tempdir().unwrap();
        let mut writing = recording(folder.path(), 1 << 20);
        for now in 0..3 {
            writing.record(now, Word("word".into()), &[]);
        }
        drop(writing);
        let path = folder.path().join("head-1").with_extension(EXTENSION);
        let whole = std::fs::read(&path).unwrap();
        for at in 0..whole.len() {
            for change in [1, 0x80, 0xff] {
                let mut damaged = whole.clone();
                damaged[at] ^= change;
                std::fs::write(&path, damaged).unwrap();
                let Ok((with, mut played)) = Played::<Word, Word>::open(&path) else { continue };
                assert_eq!(with, Word("begin".into()));
                let mut steps = 0;
                let is_noticed = loop {
                    match played.next_step() {
                        Ok(Some(step)) => assert_eq!((step.now, step.input), (steps, Word("word".into()))),
                        Ok(None) => break played.is_cut,
                        Err(_) => break true,
                    }
                    steps += 1;
                };
                assert!(is_noticed && steps < 3, "byte {at}, after {steps} steps");
            }
        }
    }
}
