//! What a head or a node took in, and a check of what followed, in a file: a hang in somebody's cluster can be played back on
//! another machine, by `wingbeat replay`.
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
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use bytes::{Bytes, BytesMut};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use wingbeat_core::codec::{self, Payload};
use wingbeat_core::error::Error;
use wingbeat_core::spec::{ActorSpec, ActorState, Arg, JobSpec};

use crate::handshake;
use crate::messages::{
    ENDED_UNREPORTED, HeadEvent, HeadMessage, LeaseHolder, NodeMessage, Running, RunningLease, WorkerCommand,
};

/// The folder, if anything is to be recorded.
const FOLDER: &str = "WINGBEAT_RECORD";
/// How large a recording may become, in MiB.
const LIMIT: &str = "WINGBEAT_RECORD_MB";
const USUAL_LIMIT_MB: u64 = 256;
/// Steps that wait for the disk: so many, and the recording ends.
const QUEUED: usize = 16_384;
/// How long the end of a process waits for what is left.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// Counts changes of what is recorded, beside those of the protocol.
const FORMAT: u32 = 1;
/// What a recording's name ends with.
pub const EXTENSION: &str = "wbrec";

/// Takes out what nobody else is to see: values of users' programs, what they print, and environments. Before a step is written,
/// and before actions are compared.
pub trait Redact {
    /// Takes it out.
    fn redact(&mut self);
}

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
    /// In milliseconds since 1970.
    begun: u64,
}

/// What was recorded.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Machine {
    /// A head.
    Head,
    /// A node.
    Node,
}

#[derive(Serialize, Deserialize)]
enum Frame<B, I> {
    Begins {
        with: B,
    },
    Step {
        now: u64,
        input: I,
        digest: u64,
    },
    /// It was as large as it may be.
    Full,
}

/// A recording that is being written.
pub struct Recording<I, A> {
    /// To whoever writes; none once it is over.
    frames: Option<mpsc::SyncSender<Vec<u8>>>,
    writer: Option<JoinHandle<()>>,
    path: PathBuf,
    left: u64,
    of: PhantomData<fn(I, A)>,
}

impl<I, A> Recording<I, A>
where
    I: Serialize + Redact + Send,
    A: Clone + Debug + Redact,
{
    /// Begins a recording, if the environment asks for one. What keeps it from being written is said, and no reason not to
    /// go on.
    pub fn asked_for<B: Serialize + Redact>(of: Machine, name: &str, mut with: B) -> Option<Box<dyn Recorder<I, A>>>
    where
        I: 'static,
        A: 'static,
    {
        let folder = PathBuf::from(std::env::var_os(FOLDER).filter(|folder| !folder.is_empty())?);
        let megabytes = match std::env::var(LIMIT).map(|limit| (limit.parse::<u32>(), limit)) {
            Ok((Ok(megabytes), _)) => u64::from(megabytes),
            Ok((Err(error), limit)) => {
                tracing::error!(%error, limit, "{LIMIT} is no number of MiB: recording {USUAL_LIMIT_MB}");
                USUAL_LIMIT_MB
            }
            Err(_) => USUAL_LIMIT_MB,
        };
        if megabytes == 0 {
            return None;
        }
        with.redact();
        match Self::begin(of, &folder, &format!("{name}-{}", std::process::id()), megabytes << 20, with) {
            Ok(recording) => {
                tracing::info!("recording what happens in {}", recording.path.display());
                Some(Box::new(recording))
            }
            Err(error) => {
                tracing::error!(%error, "cannot record in {}", folder.display());
                None
            }
        }
    }

    fn begin<B: Serialize>(of: Machine, folder: &Path, name: &str, limit: u64, with: B) -> io::Result<Self> {
        std::fs::create_dir_all(folder)?;
        let path = folder.join(name).with_extension(EXTENSION);
        // Names and addresses are nobody else's.
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let header = Header { version: version(), of, begun: since.as_millis() as u64 };
        let begins = [framed(&header)?, framed(&Frame::<B, I>::Begins { with })?].concat();
        file.write_all(&begins)?;
        let (frames, to_write) = mpsc::sync_channel::<Vec<u8>>(QUEUED);
        let place = path.clone();
        // A disk may stand still for long, and whoever is recorded may not.
        let writer = std::thread::Builder::new().name("wingbeat-record".into()).spawn(move || {
            while let Ok(frame) = to_write.recv() {
                // Whole at once: the process may be killed at any time.
                if let Err(error) = file.write_all(&frame) {
                    tracing::error!(%error, "the recording {} ends here", place.display());
                    return;
                }
            }
        })?;
        let left = limit.saturating_sub(begins.len() as u64);
        Ok(Recording { frames: Some(frames), writer: Some(writer), path, left, of: PhantomData })
    }
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
            _ => Frame::Step { now, input, digest: digest(&texts(actions)) },
        };
        let is_full = matches!(frame, Frame::Full);
        let end = match framed(&frame) {
            Ok(bytes) => {
                self.left = self.left.saturating_sub(bytes.len() as u64);
                frames.try_send(bytes).err().map(|error| error.to_string())
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
    /// When, in milliseconds.
    pub now: u64,
    /// What was taken in.
    pub input: I,
    /// Of the actions that followed.
    pub digest: u64,
}

/// A recording that is played back.
pub struct Played<B, I> {
    file: io::BufReader<File>,
    /// When it began, in milliseconds since 1970.
    pub begun: u64,
    /// Whether it ended because it was as large as it may be.
    pub is_full: bool,
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
    let other = |why: String| Error::Io { what: format!("playing {}", path.display()), why };
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
        let other = |why: String| Error::Io { what: format!("playing {}", path.display()), why };
        match frame::<Frame<B, I>>(&mut file) {
            Ok(Found::Frame(Frame::Begins { with })) => {
                Ok((with, Played { file, begun, is_full: false, is_cut: false, of: PhantomData }))
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
            Found::Frame(Frame::Step { now, input, digest }) => return Ok(Some(Step { now, input, digest })),
            Found::Frame(Frame::Full) => self.is_full = true,
            Found::Cut => self.is_cut = true,
            Found::Frame(Frame::Begins { .. }) | Found::End => {}
        }
        Ok(None)
    }
}

impl Redact for JobSpec {
    fn redact(&mut self) {
        self.env.clear();
        self.local_env.clear();
    }
}

impl Redact for ActorSpec {
    fn redact(&mut self) {
        for arg in &mut self.args {
            if let Arg::Value(packed) = arg {
                packed.bytes = Payload::default();
            }
        }
    }
}

impl<T: Redact + Clone> Redact for Arc<T> {
    fn redact(&mut self) {
        Arc::make_mut(self).redact();
    }
}

impl Redact for Error {
    fn redact(&mut self) {
        match self {
            Error::Application { error, .. } => error.payload = Payload::default(),
            Error::ActorDied { cause, .. } | Error::ActorUnavailable { cause, .. } => cause.redact(),
            Error::WorkerCrashed { exit, .. } => exit.stderr.clear(),
            Error::Io { what, why } if what == ENDED_UNREPORTED => why.clear(),
            _ => {}
        }
    }
}

impl Redact for LeaseHolder {
    fn redact(&mut self) {
        if let LeaseHolder::Actor(spec, ..) = self {
            spec.redact();
        }
    }
}

impl Redact for Running {
    fn redact(&mut self) {
        self.leases.iter_mut().for_each(Redact::redact);
    }
}

impl Redact for RunningLease {
    fn redact(&mut self) {
        self.start.holder.redact();
        if let Some(Err(error)) = &mut self.started {
            error.redact();
        }
    }
}

impl Redact for NodeMessage {
    fn redact(&mut self) {
        match self {
            NodeMessage::BeginJob(spec) => spec.redact(),
            NodeMessage::StartLease(start) => start.holder.redact(),
            NodeMessage::ActorStarted { outcome: Err(error), .. } => error.redact(),
            _ => {}
        }
    }
}

impl Redact for HeadMessage {
    fn redact(&mut self) {
        match self {
            HeadMessage::ActorStarted { outcome: Err(error), .. } | HeadMessage::LeaseFailed { error, .. } => {
                error.redact()
            }
            // What a program has printed.
            HeadMessage::WorkerDied(death) => death.exit.stderr.clear(),
            HeadMessage::Made { spec, .. } => spec.redact(),
            _ => {}
        }
    }
}

impl Redact for WorkerCommand {
    fn redact(&mut self) {
        if let WorkerCommand::StartActor { spec, .. } = self {
            spec.redact();
        }
    }
}

impl Redact for HeadEvent {
    fn redact(&mut self) {
        match self {
            HeadEvent::WorkerDied(death) => death.exit.stderr.clear(),
            HeadEvent::Actor { state: ActorState::Restarting { cause, .. } | ActorState::Dead { cause }, .. } => {
                cause.redact()
            }
            HeadEvent::Refused { error, .. } => error.redact(),
            _ => {}
        }
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
}
