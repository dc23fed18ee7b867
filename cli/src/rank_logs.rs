//! Where what ranks print goes, as torchrun has it.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::{DirBuilder, File};
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{FileType, fstat};
use rustix::io::Errno;
use wingbeat_train::{Line, Lines, RankOutput};

use crate::say::note;

const STDOUT: u8 = 1;
const STDERR: u8 = 2;

/// Which streams of which local ranks: one number for all, or `RANK:NUMBER` with commas between.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Streams {
    of_all: u8,
    of_ranks: BTreeMap<u32, u8>,
}

impl Streams {
    fn has(&self, local_rank: u32, stream: u8) -> bool {
        self.of_ranks.get(&local_rank).copied().unwrap_or(self.of_all) & stream != 0
    }

    fn is_empty(&self) -> bool {
        self.of_all == 0 && self.of_ranks.values().all(|streams| *streams == 0)
    }
}

impl FromStr for Streams {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let number = |text: &str| match text.trim() {
            "0" => Ok(0),
            "1" => Ok(STDOUT),
            "2" => Ok(STDERR),
            "3" => Ok(STDOUT | STDERR),
            other => Err(format!("{other:?} is none of 0 (nothing), 1 (stdout), 2 (stderr), 3 (both)")),
        };
        if !text.contains(':') {
            return Ok(Streams { of_all: number(text)?, of_ranks: BTreeMap::new() });
        }
        let one = |part: &str| {
            let (rank, streams) = part.split_once(':').ok_or_else(|| format!("{part:?} is not RANK:NUMBER"))?;
            let rank = rank.trim().parse().map_err(|_| format!("{rank:?} is not a local rank"))?;
            Ok::<_, String>((rank, number(streams)?))
        };
        Ok(Streams { of_all: 0, of_ranks: text.split(',').map(one).collect::<Result<_, _>>()? })
    }
}

/// Texts with commas between; two commas are one in a text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Texts(Vec<String>);

impl FromStr for Texts {
    type Err = std::convert::Infallible;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        // No command line has a byte 0.
        let parts = text.replace(",,", "\0");
        Ok(Texts(parts.split(',').map(|part| part.replace('\0', ",")).collect()))
    }
}

/// What is to be written and shown.
#[derive(Clone, Debug, Default)]
pub(crate) struct Wanted {
    pub redirects: Streams,
    pub tee: Streams,
    /// Local ranks whose output alone is shown; all if there are none.
    pub only: Vec<u32>,
    /// Of what is teed and shown, lines of standard output with one of these texts are written once more.
    pub stdout_filters: Option<Texts>,
    /// The same of standard error.
    pub stderr_filters: Option<Texts>,
}

impl Wanted {
    fn filters(&self, is_stderr: bool) -> Option<&Texts> {
        if is_stderr { self.stderr_filters.as_ref() } else { self.stdout_filters.as_ref() }
    }
}

/// Writes and shows what ranks print.
pub(crate) struct RankLogs {
    /// The run's folder, if anything is written.
    dir: Option<PathBuf>,
    prefix: Prefix,
    wanted: Wanted,
    attempt: u32,
    errors: ErrorFiles,
    files: BTreeMap<(u32, bool), (PathBuf, File)>,
    /// What passes the filters of a stream, of all ranks.
    filtered: BTreeMap<bool, (PathBuf, File)>,
    /// Of those that are shown with their ranks.
    lines: Lines,
    /// Of the others, whose bytes are shown as they are.
    begun: BTreeMap<(u32, bool), OpenLine>,
}

/// The beginning of a line that is held back for a moment, so that ranks do not write into each other's lines.
#[derive(Default)]
struct OpenLine {
    bytes: Vec<u8>,
    /// Whether there was a pause since the last of it came.
    is_old: bool,
}

/// What ranks of the last attempt that failed have written into their error files.
pub(crate) type ErrorFiles = Arc<Mutex<BTreeMap<u32, String>>>;

/// What is to stand before each line with `--tee`.
const TEMPLATE: &str = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE";
/// A line whose beginning is longer is not held back.
const HELD: usize = 64 * 1024;
/// For how long logs are kept for which no folder was named.
const KEPT: Duration = Duration::from_secs(30 * 24 * 3600);

impl RankLogs {
    pub(crate) fn new(
        dir: Option<&Path>,
        run_id: &str,
        per_node: u32,
        wanted: Wanted,
        role: String,
    ) -> Result<RankLogs> {
        let template = std::env::var(TEMPLATE).unwrap_or_else(|_| "[${role_name}${local_rank}]:".into());
        let parent = match (wanted.redirects.is_empty() && wanted.tee.is_empty(), dir) {
            (_, Some(dir)) => Some(dir.to_owned()),
            (true, None) => None,
            (false, None) => Some(own_folder()),
        };
        let new = |parent: PathBuf| {
            std::fs::create_dir_all(&parent).and_then(|()| {
                // No other run's, whatever the ids of their processes.
                Ok(tempfile::Builder::new().prefix(&format!("{run_id}_")).tempdir_in(&parent)?.keep())
            })
        };
        let dir = parent.map(|dir| new(dir.clone()).with_context(|| format!("making a folder in {}", dir.display())));
        let dir = dir.transpose()?;
        Ok(RankLogs {
            dir,
            prefix: Prefix { template, role, per_node },
            wanted,
            attempt: 0,
            errors: ErrorFiles::default(),
            files: BTreeMap::new(),
            filtered: BTreeMap::new(),
            lines: Lines::new(),
            begun: BTreeMap::new(),
        })
    }

    /// Where files are written.
    pub(crate) fn dir(&self) -> Option<&Path> {
        self.dir.as_deref()
    }

    /// Filled while the run goes on.
    pub(crate) fn errors(&self) -> ErrorFiles {
        self.errors.clone()
    }

    /// Whether what some rank prints is written.
    pub(crate) fn has_files(&self) -> bool {
        !(self.wanted.redirects.is_empty() && self.wanted.tee.is_empty())
    }

    fn local_rank(&self, rank: u32) -> u32 {
        rank % self.prefix.per_node.max(1)
    }

    fn is_written(&self, local_rank: u32, stream: u8) -> bool {
        self.wanted.redirects.has(local_rank, stream) || self.wanted.tee.has(local_rank, stream)
    }

    fn write(&mut self, rank: u32, is_stderr: bool, bytes: &[u8]) -> Result<()> {
        let Some(dir) = &self.dir else { return Ok(()) };
        let file = match self.files.entry((rank, is_stderr)) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                let name = if is_stderr { "stderr.log" } else { "stdout.log" };
                entry.insert(create(&rank_dir(dir, self.attempt, rank), name)?)
            }
        };
        file.1.write_all(bytes).with_context(|| format!("writing {}", file.0.display()))
    }

    /// Begins the files of an attempt in which lines of all ranks come together.
    fn begin_filtered(&mut self) {
        self.filtered.clear();
        let Some(dir) = &self.dir else { return };
        for (is_stderr, name) in [(false, "filtered_stdout.log"), (true, "filtered_stderr.log")] {
            if self.wanted.filters(is_stderr).is_some() {
                match create(&attempt_dir(dir, self.attempt), name) {
                    Ok(file) => drop(self.filtered.insert(is_stderr, file)),
                    Err(error) => Self::complain(Err(error), 0),
                }
            }
        }
    }

    /// Shows lines of a rank, and writes those that pass a filter once more.
    fn show_lines(&mut self, rank: u32, lines: &[Line]) {
        for is_stderr in [false, true] {
            let (mut shown, mut filtered) = (Vec::new(), Vec::new());
            let filters = self.wanted.filters(is_stderr);
            for line in lines.iter().filter(|line| line.is_stderr == is_stderr) {
                let begin = shown.len();
                self.prefix.add(&mut shown, rank, line);
                if filters.is_some_and(|Texts(texts)| texts.iter().any(|text| line.text.contains(text))) {
                    filtered.extend_from_slice(&shown[begin..]);
                }
            }
            if !shown.is_empty() {
                show(is_stderr, &shown);
            }
            if let Some((path, file)) = self.filtered.get_mut(&is_stderr).filter(|_| !filtered.is_empty()) {
                let written = file.write_all(&filtered).with_context(|| format!("writing {}", path.display()));
                Self::complain(written, filtered.len());
            }
        }
    }

    fn complain(written: Result<()>, bytes: usize) {
        if let Err(error) = written {
            lost(&format!("{error:#}"), bytes);
        }
    }

    /// Shows bytes as they are, up to the last end of a line or of a bar's state.
    fn show_whole(&mut self, rank: u32, is_stderr: bool, bytes: &[u8]) {
        let begun = self.begun.entry((rank, is_stderr)).or_default();
        begun.is_old = false;
        let whole = match bytes.iter().rposition(|byte| matches!(byte, b'\n' | b'\r')) {
            Some(last) => last + 1,
            None if begun.bytes.len() + bytes.len() > HELD => bytes.len(),
            None => 0,
        };
        let (shown, rest) = bytes.split_at(whole);
        if !shown.is_empty() {
            begun.bytes.extend_from_slice(shown);
            show(is_stderr, &begun.bytes);
            begun.bytes.clear();
        }
        begun.bytes.extend_from_slice(rest);
    }
}

impl RankOutput for RankLogs {
    fn begun(&mut self, attempt: u32) {
        if std::mem::replace(&mut self.attempt, attempt) != attempt {
            self.files.clear();
            self.errors.lock().unwrap_or_else(PoisonError::into_inner).clear();
        }
        self.begin_filtered();
    }

    fn printed(&mut self, rank: u32, is_stderr: bool, bytes: &[u8]) {
        let local_rank = self.local_rank(rank);
        let stream = if is_stderr { STDERR } else { STDOUT };
        let Wanted { redirects, tee, only, .. } = &self.wanted;
        let (redirected, teed) = (redirects.has(local_rank, stream), tee.has(local_rank, stream));
        let is_shown = (teed || !redirected) && (only.is_empty() || only.contains(&local_rank));
        if self.is_written(local_rank, stream) {
            Self::complain(self.write(rank, is_stderr, bytes), bytes.len());
        }
        match (is_shown, teed) {
            (false, _) => {}
            (true, false) => self.show_whole(rank, is_stderr, bytes),
            (true, true) => {
                let mut lines = Vec::new();
                self.lines.take_in(rank, is_stderr, bytes, |line| lines.push(line));
                self.show_lines(rank, &lines);
            }
        }
    }

    fn paused(&mut self) {
        for ((_, is_stderr), begun) in &mut self.begun {
            if std::mem::replace(&mut begun.is_old, true) && !begun.bytes.is_empty() {
                show(*is_stderr, &begun.bytes);
                begun.bytes.clear();
            }
        }
        let prefix = &self.prefix;
        self.lines.bars(|rank, line| {
            let mut shown = Vec::new();
            prefix.add(&mut shown, rank, &line);
            show(line.is_stderr, &shown);
        });
    }

    fn ended(&mut self, rank: u32) {
        for is_stderr in [false, true] {
            if let Some(begun) = self.begun.remove(&(rank, is_stderr)) {
                show(is_stderr, &begun.bytes);
            }
        }
        let mut last = Vec::new();
        self.lines.end(rank, |line| last.push(line));
        self.show_lines(rank, &last);
        for (is_stderr, stream) in [(false, STDOUT), (true, STDERR)] {
            // Who looks for a file finds one, also of a rank that has printed nothing.
            if self.is_written(self.local_rank(rank), stream) {
                Self::complain(self.write(rank, is_stderr, &[]), 0);
            }
        }
    }

    fn failed(&mut self, rank: u32, error_file: &str) {
        self.errors.lock().unwrap_or_else(PoisonError::into_inner).insert(rank, error_file.to_owned());
        if let Some(dir) = &self.dir {
            let file = create(&rank_dir(dir, self.attempt, rank), "error.json");
            let written = file.and_then(|(path, mut file)| {
                file.write_all(error_file.as_bytes()).with_context(|| format!("writing {}", path.display()))
            });
            Self::complain(written, error_file.len());
        }
    }
}

fn attempt_dir(run: &Path, attempt: u32) -> PathBuf {
    run.join(format!("attempt_{attempt}"))
}

/// Ranks of several nodes write here, and local ranks alone would collide.
fn rank_dir(run: &Path, attempt: u32, rank: u32) -> PathBuf {
    attempt_dir(run, attempt).join(rank.to_string())
}

fn create(dir: &Path, name: &str) -> Result<(PathBuf, File)> {
    std::fs::create_dir_all(dir).with_context(|| format!("making {}", dir.display()))?;
    let path = dir.join(name);
    let file = File::create(&path).with_context(|| format!("making {}", path.display()))?;
    Ok((path, file))
}

/// Where logs go for which no folder was named: `$XDG_STATE_HOME/wingbeat/torchrun`, or below `~/.local/state`, or where that
/// cannot be written, `/tmp`. Removes those that nobody has written to for long.
fn own_folder() -> PathBuf {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = absolute("XDG_STATE_HOME").or_else(|| Some(absolute("HOME")?.join(".local/state")));
    let folder = state.map(|state| state.join("wingbeat/torchrun"));
    let Some(folder) = folder.filter(|folder| {
        // The folder above holds the token, too: others may not look into it.
        let made = DirBuilder::new().recursive(true).mode(0o700).create(folder);
        made.is_ok() && rustix::fs::access(folder, rustix::fs::Access::WRITE_OK).is_ok()
    }) else {
        return std::env::temp_dir();
    };
    for run in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
        if last_written(&run.path()).and_then(|at| at.elapsed().ok()).is_some_and(|age| age > KEPT) {
            // What cannot be removed now is, some other time.
            let _ = std::fs::remove_dir_all(run.path());
        }
    }
    folder
}

/// When something in a folder was written last.
fn last_written(path: &Path) -> Option<SystemTime> {
    let metadata = std::fs::symlink_metadata(path).ok()?;
    let within = metadata.is_dir().then(|| std::fs::read_dir(path).into_iter().flatten().flatten());
    let newest = within.into_iter().flatten().filter_map(|entry| last_written(&entry.path())).max();
    newest.max(metadata.modified().ok())
}

/// What stands before a line: torchrun's template, with `$name` or `${name}` for what is known of the rank.
#[derive(Clone)]
struct Prefix {
    template: String,
    role: String,
    per_node: u32,
}

impl Prefix {
    fn add(&self, to: &mut Vec<u8>, rank: u32, line: &Line) {
        let mut text = self.template.clone();
        let local_rank = rank % self.per_node.max(1);
        // The longer names first: one is the end of another, and none its beginning.
        for (name, value) in
            [("role_name", &self.role), ("local_rank", &local_rank.to_string()), ("rank", &rank.to_string())]
        {
            text = text.replace(&format!("${{{name}}}"), value).replace(&format!("${name}"), value);
        }
        to.extend_from_slice(text.as_bytes());
        to.extend_from_slice(line.text.as_bytes());
        to.push(b'\n');
    }
}

/// Whether what was shown last on standard error has no end of a line.
static IS_OPEN: AtomicBool = AtomicBool::new(false);

/// Ends a line that a rank has left without an end, so that what follows has one of its own.
pub(crate) fn end_line() {
    if IS_OPEN.swap(false, Ordering::Relaxed) {
        show(true, b"\n");
    }
}

/// What of the output could not be written: why at first, and how many bytes.
static LOST: Mutex<Option<(String, usize)>> = Mutex::new(None);

fn lost(why: &str, bytes: usize) {
    let mut all = LOST.lock().unwrap_or_else(PoisonError::into_inner);
    match &mut *all {
        Some((_, sum)) => *sum += bytes,
        None => {
            note!("wingbeat: what ranks print cannot be written, and the run goes on: {why}");
            *all = Some((why.to_owned(), bytes));
        }
    }
}

/// How the command ends when a run has ended well and some of its output is missing: sysexits.h's EX_IOERR. Whoever started it must
/// know that from a run that has failed, also where nothing more can be written.
pub(crate) const INCOMPLETE: u8 = 74;

/// What is to be said at the end if some of the output is missing where it was to go.
pub(crate) fn is_incomplete() -> Option<String> {
    let all = LOST.lock().unwrap_or_else(PoisonError::into_inner);
    let (why, bytes) = all.as_ref()?;
    Some(format!("the output of ranks is not complete, {bytes} bytes could not be written: {why}"))
}

/// Shows bytes as they are.
pub(crate) fn show(is_stderr: bool, bytes: &[u8]) {
    if is_stderr && let Some(last) = bytes.last() {
        IS_OPEN.store(*last != b'\n', Ordering::Relaxed);
    }
    let (written, left) = match is_stderr {
        // Nobody writes into the middle of it.
        true => write_all(std::io::stderr().lock(), bytes),
        false => {
            let mut stdout = std::io::stdout().lock();
            // What this command itself has written comes before.
            let _ = stdout.flush();
            write_all(&stdout, bytes)
        }
    };
    // Training goes on when nobody reads any more, as under `| head`, and that is nobody's loss.
    if let Err(error) = written {
        lost(&format!("standard {}: {error}", if is_stderr { "error" } else { "output" }), left);
    }
}

/// Writes to what may be shared with others, who may have said that writing does not wait; with what was left after an
/// error. Nobody who reads, and nothing that is open, is no error.
fn write_all(stream: impl AsFd, mut bytes: &[u8]) -> (std::io::Result<()>, usize) {
    while !bytes.is_empty() {
        let error = match rustix::io::write(&stream, bytes) {
            Ok(count) => {
                bytes = &bytes[count..];
                continue;
            }
            Err(Errno::INTR) => continue,
            Err(Errno::AGAIN) => match poll(&mut [PollFd::new(&stream, PollFlags::OUT)], None) {
                Ok(_) | Err(Errno::INTR) => continue,
                Err(error) => error,
            },
            Err(error) => error,
        };
        let is_terminal = || fstat(&stream).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode).is_char_device());
        return match error {
            Errno::PIPE | Errno::BADF => (Ok(()), 0),
            Errno::IO if is_terminal() => (Ok(()), 0),
            error => (Err(error.into()), bytes.len()),
        };
    }
    (Ok(()), 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_are_for_all_ranks_or_for_some() {
        let both: Streams = "3".parse().unwrap();
        assert!(both.has(5, STDOUT) && both.has(0, STDERR));
        let some: Streams = "0:1,1:2".parse().unwrap();
        assert!(some.has(0, STDOUT) && !some.has(0, STDERR) && some.has(1, STDERR) && !some.has(2, STDOUT));
        assert!("4".parse::<Streams>().unwrap_err().contains("none of"));
        assert!("a:1".parse::<Streams>().unwrap_err().contains("not a local rank"));
    }

    #[test]
    fn what_is_redirected_is_in_files_by_attempt_and_rank() {
        let dir = tempfile::tempdir().unwrap();
        let streams = |text: &str| text.parse().unwrap();
        let wanted = Wanted { redirects: streams("1"), ..Wanted::default() };
        let mut logs = RankLogs::new(Some(dir.path()), "run", 2, wanted, "default".into()).unwrap();
        logs.printed(1, false, b"\xff\r1%\ron");
        logs.printed(1, false, b"e");
        logs.begun(1);
        logs.printed(1, false, b"two\n");
        let at = logs.dir().unwrap().to_owned();
        let read = |path: &str| std::fs::read(at.join(path)).unwrap();
        assert_eq!(read("attempt_0/1/stdout.log"), b"\xff\r1%\rone", "byte by byte");
        assert_eq!(read("attempt_1/1/stdout.log"), b"two\n");
    }

    #[test]
    fn texts_have_commas_between_and_two_commas_are_one() {
        let texts = |text: &str| text.parse::<Texts>().unwrap().0;
        assert_eq!(texts("apple,a,,b"), ["apple", "a,b"]);
        assert_eq!(texts(""), [""], "which is in every line");
    }
}
