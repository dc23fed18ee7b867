//! What must survive the head, in an SQLite file: the latest fact under each key.
//!
//! One thread writes. Whatever has queued while it wrote goes into its next transaction, so that many who ask at the same
//! time share one wait for the disk. A change that somebody asked for is written before they hear of it ([`Durable::intend`]):
//! if the disk is full, they get the error, and what was asked for is not made, or is taken back. What became true by itself
//! (an actor died), or frees something (a placement group was removed), is not refused: it is owed to the disk, and written as
//! soon as there is room ([`Durable::write`]).
//!
//! Damage is found and not passed over in silence. Each fact has a checksum; the seal counts the facts, sums their checksums
//! up, and numbers the transactions. SQLite drops the end of its write-ahead log from the first damaged page on, and opens
//! what was true before: so the number of the last acknowledged transaction also lies in a file of its own (`FILE-count`).
//! It is written without waiting for the disk, after the transaction was: a head that was killed finds it exact, and after
//! a power failure it may be too low, never too high. At a clean stop the log is folded in, and the file is complete by
//! itself.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::future::BoxFuture;
use rusqlite::{Connection, ErrorCode, OptionalExtension, params};
use tokio::runtime::Handle;
use tokio::sync::{oneshot, watch};
use wingbeat_core::ClusterId;
use wingbeat_core::error::Error;
use wingbeat_net::handshake::Epoch;

use crate::feed::Feed;
use crate::files::{beside, real_path};
use crate::service::Durable;
use crate::state::Fact;

pub(crate) use place::keep_aside;
use place::{Place, log_of, open_private};

mod place;

/// The layout of the file and of the facts in it. A head refuses a file of another.
const FORMAT: i64 = 8;
/// Facts that are queued at most: further events wait for the disk.
const QUEUED: usize = 65_536;
/// What nobody waits for is written so much later at most, with what somebody waits for if that comes before: each
/// transaction is a wait for the disk.
const TOGETHER: Duration = Duration::from_millis(2);
/// How often what is owed to the disk is tried again: soon after room was made, and seldom enough to cost nothing.
const RETRY: Duration = Duration::from_millis(500);

/// What the writer is told.
enum Order {
    /// These became true. Somebody may wait until they are written.
    Owe(Vec<Fact>, Option<oneshot::Sender<Result<(), String>>>),
    /// These are to become true when they are written, and whoever asked waits for that.
    Intend(Vec<Fact>, oneshot::Sender<Result<(), String>>),
    /// As another head has written them, all or what is new.
    Copy { changes: Changes, replaces: bool, answer: oneshot::Sender<Result<(), String>> },
    /// A standby begins to follow.
    Feed,
    /// Somebody wants to know whether it can be written.
    Try(oneshot::Sender<Result<(), String>>),
    /// The file may grow to so many pages: a disk without room.
    #[cfg(test)]
    Limit(u32),
    /// Nothing may be written to the file: a disk that is mounted to be read.
    #[cfg(test)]
    ReadOnly,
}

/// Where facts go.
pub(crate) struct Journal {
    queue: Option<mpsc::SyncSender<Order>>,
    writer: Option<std::thread::JoinHandle<()>>,
    /// Why it cannot be written, while it cannot.
    fails: watch::Receiver<Option<String>>,
    /// What a standby is sent.
    feed: Arc<Feed>,
}

/// What an earlier head wrote down.
pub(crate) struct Remembered {
    pub cluster: Option<ClusterId>,
    pub facts: Vec<Fact>,
    /// Of the head that has opened it: later than all before.
    pub epoch: Epoch,
}

fn failed(path: &Path, why: impl std::fmt::Display) -> Error {
    Error::Failed { what: format!("the head's journal {}", path.display()), why: why.to_string() }
}

/// What to do about a file that cannot be used.
const NEEDED: &str = "the head must be able to write this file and to make others beside it. Allow it that, or name another with --journal";

/// What SQLite says, and what to do about it.
fn explained(why: &rusqlite::Error) -> String {
    match why.sqlite_error_code() {
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => {
            format!("{why}: another head uses it. Stop that first, or name another file")
        }
        Some(ErrorCode::NotADatabase | ErrorCode::DatabaseCorrupt) => {
            format!("{why}: it is no journal, or damaged. Name another file, or a copy of it")
        }
        Some(ErrorCode::ReadOnly | ErrorCode::CannotOpen | ErrorCode::PermissionDenied) => format!("{why}: {NEEDED}"),
        _ => why.to_string(),
    }
}

fn not_written(why: impl std::fmt::Display) -> Error {
    Error::Failed { what: "writing the head's journal".into(), why: why.to_string() }
}

impl Journal {
    /// Opens a file, or makes it, and reads what is in it. Answers come on the current tokio runtime.
    ///
    /// # Errors
    /// It cannot be read or written, belongs to somebody else, another head uses it, it is damaged, or it is no journal of
    /// this version.
    pub(crate) fn open(given: &Path, cluster: ClusterId) -> Result<(Journal, Remembered), Error> {
        let path = &real_path(given);
        let failed = |why: rusqlite::Error| failed(path, explained(&why));
        let count = Count::of(given)?;
        is_whole(path, &count)?;
        drop(open_private(path)?);
        let file = Connection::open(path).map_err(failed)?;
        // Another head has it: waiting would not help.
        file.busy_timeout(Duration::ZERO).map_err(failed)?;
        // One head at a time, and nothing is lost when the machine loses power.
        file.pragma_update(None, "locking_mode", "EXCLUSIVE").map_err(failed)?;
        file.pragma_update(None, "journal_mode", "WAL").map_err(failed)?;
        file.pragma_update(None, "synchronous", "FULL").map_err(failed)?;
        let (remembered, facts) = match contents(&file).map_err(failed)? {
            Contents::Nothing if count.acknowledged.is_some() => {
                let what = format!("it is empty, and {} counts what was in it", Count::path(path).display());
                return Err(damaged(path, &what));
            }
            Contents::Nothing => {
                make(&file, cluster).map_err(failed)?;
                (None, Vec::new())
            }
            Contents::Format(format) => {
                let why =
                    format!("it has format {format}, and this head writes {FORMAT}; use the version that wrote it");
                return Err(self::failed(path, why));
            }
            Contents::Foreign => return Err(damaged(path, "its tables are not those of a journal")),
            Contents::Journal => {
                // Takes the lock that is kept: nobody changes what is read here.
                file.execute_batch("BEGIN EXCLUSIVE; COMMIT").map_err(failed)?;
                let (cluster, facts) = read(&file, path, &count)?;
                (Some(cluster), facts)
            }
        };
        let (old_count, count, runtime) = (count.is_beside_the_link, count.open(path)?, Handle::current());
        let (failing, fails) = watch::channel(None);
        let feed = Arc::new(Feed::default());
        let (owed, fed) = (BTreeMap::new(), feed.clone());
        let mut writer = Writer {
            file,
            place: None,
            count,
            known: None,
            runtime,
            owed,
            failing,
            feed: fed,
            is_to_feed: false,
            is_to_try: false,
        };
        // From now on it is in use, until it is closed in order.
        writer.write(&Changes::new(), Use::Opens).map_err(failed)?;
        // By the path that was given, it is also seen when that leads elsewhere.
        let opened = place::settle(path, &writer.count).and_then(|()| Place::of(given));
        writer.place = Some(opened.map_err(|error| self::failed(path, error))?);
        if old_count {
            let _ = std::fs::remove_file(Count::path(given));
        }
        let written = writer.known.as_ref().map_or(0, |known| known.seal.transactions.unsigned_abs());
        // A standby may have a clock that is behind that of the head before it.
        let epoch = written.max(latest_epoch(&facts) + 1);
        let (queue, incoming) = mpsc::sync_channel(QUEUED);
        let thread = std::thread::Builder::new()
            .name("wingbeat-journal".into())
            .spawn(move || writer.run(&incoming))
            .map_err(|error| self::failed(path, error))?;
        let remembered = Remembered { cluster: remembered, facts, epoch: Epoch(epoch) };
        Ok((Journal { queue: Some(queue), writer: Some(thread), fails, feed }, remembered))
    }

    /// Why it cannot be written, while it cannot.
    pub(crate) fn fails(&self) -> watch::Receiver<Option<String>> {
        self.fails.clone()
    }

    /// What a standby is sent of it.
    pub(crate) fn fed(&self) -> Arc<Feed> {
        self.feed.clone()
    }

    /// Writes what another head has written: in the place of all that is there, or beside it.
    pub(crate) fn copy(&self, changes: Changes, replaces: bool) -> BoxFuture<'static, Result<(), Error>> {
        let (answer, written) = oneshot::channel();
        self.tell(Order::Copy { changes, replaces, answer });
        Box::pin(told(written))
    }

    /// Whether it can be written: something is.
    pub(crate) fn try_to_write(&self) -> BoxFuture<'static, Result<(), Error>> {
        let (answer, written) = oneshot::channel();
        self.tell(Order::Try(answer));
        Box::pin(told(written))
    }

    fn tell(&self, order: Order) {
        if let Some(queue) = &self.queue
            && queue.send(order).is_err()
        {
            // A head that forgot from here on what it has said would be worse than none.
            std::panic::resume_unwind(Box::new("the journal's writer has panicked".to_owned()));
        }
    }
}

impl Drop for Journal {
    /// Whatever is queued is written, and the file is closed.
    fn drop(&mut self) {
        drop(self.queue.take());
        if let Some(writer) = self.writer.take() {
            let _ = writer.join();
        }
    }
}

impl Durable for Journal {
    fn write(&self, facts: Vec<Fact>) {
        self.tell(Order::Owe(facts, None));
    }

    fn write_and_tell(&self, facts: Vec<Fact>) -> BoxFuture<'static, Result<(), Error>> {
        let (answer, written) = oneshot::channel();
        self.tell(Order::Owe(facts, Some(answer)));
        Box::pin(told(written))
    }

    fn intend(&self, facts: Vec<Fact>) -> BoxFuture<'static, Result<(), Error>> {
        let (answer, written) = oneshot::channel();
        self.tell(Order::Intend(facts, answer));
        Box::pin(told(written))
    }

    fn feed(&self) {
        self.tell(Order::Feed);
    }

    fn why_it_fails(&self) -> Option<String> {
        self.fails.borrow().clone()
    }
}

/// The latest epoch in which somebody has said who may take over.
fn latest_epoch(facts: &[Fact]) -> u64 {
    let epochs = facts.iter().filter_map(|fact| match fact {
        Fact::Succession(succession) => Some(succession.generation.epoch.0),
        _ => None,
    });
    epochs.max().unwrap_or(0)
}

async fn told(written: oneshot::Receiver<Result<(), String>>) -> Result<(), Error> {
    written.await.unwrap_or_else(|_| Err("its writer has ended".into())).map_err(not_written)
}

enum Contents {
    Nothing,
    Journal,
    Format(i64),
    /// Something else, or what damage made of a journal.
    Foreign,
}

fn contents(file: &Connection) -> rusqlite::Result<Contents> {
    let mut tables = file.prepare("SELECT name FROM sqlite_master ORDER BY name")?;
    let tables = tables.query_map([], |row| row.get::<_, String>(0))?.collect::<Result<Vec<_>, _>>()?;
    let format: i64 = file.pragma_query_value(None, "user_version", |row| row.get(0))?;
    Ok(match format {
        0 if tables.is_empty() => Contents::Nothing,
        FORMAT if tables == ["facts", "seal"] => Contents::Journal,
        0 | FORMAT => Contents::Foreign,
        other => Contents::Format(other),
    })
}

/// All facts, encoded, with their keys.
fn contents_of(file: &Connection) -> rusqlite::Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let mut rows = file.prepare("SELECT key, fact FROM facts")?;
    rows.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?.collect()
}

fn make(file: &Connection, cluster: ClusterId) -> rusqlite::Result<()> {
    file.execute_batch(&format!(
        "BEGIN EXCLUSIVE;
         CREATE TABLE facts (key BLOB PRIMARY KEY, fact BLOB NOT NULL, checksum INTEGER NOT NULL) WITHOUT ROWID;
         CREATE TABLE seal (cluster INTEGER NOT NULL, facts INTEGER NOT NULL, sum INTEGER NOT NULL,
             transactions INTEGER NOT NULL, is_closed INTEGER NOT NULL, checksum INTEGER NOT NULL);
         PRAGMA user_version = {FORMAT};"
    ))?;
    let seal = Seal { cluster, facts: 0, sum: 0, transactions: 0, is_closed: false };
    file.execute("INSERT INTO seal VALUES (?1, 0, 0, 0, 0, ?2)", params![cluster.0 as i64, seal.checksum()])?;
    file.execute_batch("COMMIT")
}

/// What all facts together are.
#[derive(Clone, Copy)]
struct Seal {
    cluster: ClusterId,
    /// How many there are.
    facts: i64,
    /// Their checksums, added up.
    sum: i64,
    /// The number of the last transaction. Each has the next one, but for that with which a head opens the file.
    transactions: i64,
    /// The last head ended in order: nothing lies beside the file.
    is_closed: bool,
}

impl Seal {
    /// Whether an earlier head wrote it.
    fn is_known(&self) -> bool {
        self.transactions > 0
    }

    fn checksum(&self) -> i64 {
        let numbers = [self.cluster.0 as i64, self.facts, self.sum, self.transactions, i64::from(self.is_closed)];
        checksum(numbers.map(i64::to_le_bytes).each_ref().map(<[u8; 8]>::as_slice).as_slice())
    }

    fn read(file: &Connection) -> rusqlite::Result<Option<(Seal, i64)>> {
        let mut rows =
            file.prepare_cached("SELECT cluster, facts, sum, transactions, is_closed, checksum FROM seal")?;
        let seal = rows.query_row([], |row| {
            let cluster = ClusterId(row.get::<_, i64>(0)? as u64);
            let (facts, sum, transactions) = (row.get(1)?, row.get(2)?, row.get(3)?);
            let is_closed = row.get::<_, i64>(4)? != 0;
            Ok((Seal { cluster, facts, sum, transactions, is_closed }, row.get(5)?))
        });
        seal.optional()
    }
}

/// What lies in the file, as far as the next transaction must know it. Reading it there would cost each fact a search.
struct Known {
    seal: Seal,
    /// The checksum of each fact, by its key.
    checksums: HashMap<Vec<u8>, i64>,
}

impl Known {
    fn read(file: &Connection) -> rusqlite::Result<Known> {
        let (seal, _) = Seal::read(file)?.ok_or(rusqlite::Error::QueryReturnedNoRows)?;
        let mut rows = file.prepare("SELECT key, checksum FROM facts")?;
        let checksums = rows.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?.collect::<Result<_, _>>()?;
        Ok(Known { seal, checksums })
    }

    /// What of these changes something, with the checksums, and the seal that they make. What is intended counts where
    /// something is owed, too.
    fn after<'a>(&self, owed: &'a Changes, intended: &'a Changes, using: Use) -> Option<(Seal, Vec<Change<'a>>)> {
        let is_closed = using == Use::Ends;
        // By the clock where a head opens it: one with an older copy of the file would else have the number of a head that has led
        // since, and be taken for that.
        let least = if using == Use::Opens { Epoch::by_clock().0 as i64 } else { 0 };
        let transactions = least.max(self.seal.transactions + 1);
        let mut seal = Seal { is_closed, transactions, ..self.seal };
        let mut made = Vec::with_capacity(owed.len() + intended.len());
        for (key, fact) in owed.iter().filter(|(key, _)| !intended.contains_key(*key)).chain(intended) {
            let before = self.checksums.get(key).copied();
            let fact = fact.as_ref().map(|fact| (fact.as_slice(), checksum(&[key, fact])));
            let after = fact.map(|(_, checksum)| checksum);
            // Also what was written as an intention, and is now true.
            if before == after {
                continue;
            }
            seal.facts += i64::from(after.is_some()) - i64::from(before.is_some());
            seal.sum = seal.sum.wrapping_sub(before.unwrap_or(0)).wrapping_add(after.unwrap_or(0));
            made.push(Change { key, fact });
        }
        let is_used = matches!(using, Use::Opens | Use::Tries);
        let is_changed = is_used || !made.is_empty() || seal.is_closed != self.seal.is_closed;
        is_changed.then_some((seal, made))
    }

    fn take_in(&mut self, seal: Seal, made: &[Change<'_>]) {
        self.seal = seal;
        for change in made {
            match change.fact {
                Some((_, checksum)) => self.checksums.insert(change.key.to_vec(), checksum),
                None => self.checksums.remove(change.key),
            };
        }
    }
}

/// A fact that is new or another than before, with its checksum; none where it is removed.
struct Change<'a> {
    key: &'a [u8],
    fact: Option<(&'a [u8], i64)>,
}

/// The number of the last transaction that was acknowledged, in a file beside the journal.
struct Count {
    /// As far as the file is there.
    acknowledged: Option<i64>,
    /// Earlier versions kept it beside a link to the journal, and not beside the journal.
    is_beside_the_link: bool,
}

impl Count {
    fn path(journal: &Path) -> PathBuf {
        beside(journal, "-count")
    }

    /// What the last head left.
    fn of(journal: &Path) -> Result<Count, Error> {
        let real = real_path(journal);
        let of = |path: &Path| Count::read(&real, &Count::path(path));
        if let Some(acknowledged) = of(&real)? {
            return Ok(Count { acknowledged, is_beside_the_link: false });
        }
        let by_link = of(journal)?;
        Ok(Count { acknowledged: by_link.flatten(), is_beside_the_link: by_link.is_some() })
    }

    /// None where the file is not there.
    fn read(journal: &Path, path: &Path) -> Result<Option<Option<i64>>, Error> {
        let bytes = match std::fs::read(path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(path, error)),
        };
        match bytes.as_chunks::<8>() {
            // It was made, and nothing was acknowledged.
            ([], []) => Ok(Some(None)),
            ([number, kept], []) if checksum(&[number]).to_le_bytes() == *kept => {
                Ok(Some(Some(i64::from_le_bytes(*number))))
            }
            _ => Err(damaged(journal, &format!("{} fails its checksum", path.display()))),
        }
    }

    fn open(self, journal: &Path) -> Result<File, Error> {
        open_private(&Count::path(journal))
    }

    fn write(file: &File, number: i64) -> std::io::Result<()> {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&number.to_le_bytes());
        bytes[8..].copy_from_slice(&checksum(&[&number.to_le_bytes()]).to_le_bytes());
        file.write_all_at(&bytes, 0)
    }
}

/// The first eight bytes of BLAKE3 over the parts and their lengths.
fn checksum(parts: &[&[u8]]) -> i64 {
    let mut hash = blake3::Hasher::new();
    for part in parts {
        hash.update(&(part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    let mut first = [0; 8];
    first.copy_from_slice(&hash.finalize().as_bytes()[..8]);
    i64::from_le_bytes(first)
}

fn damaged(path: &Path, what: &str) -> Error {
    failed(
        path,
        format!(
            "it is damaged: {what}. What it says cannot be trusted; put a copy of it back, or start with a new file, which \
             forgets placement groups, quotas, named and detached actors"
        ),
    )
}

/// Whether the file is there if anything of it is. SQLite would take an empty one for new, and remove the log that lies beside it.
fn is_whole(path: &Path, count: &Count) -> Result<(), Error> {
    let how = match std::fs::metadata(path) {
        Ok(meta) if meta.len() > 0 => return Ok(()),
        Ok(_) => "it is empty",
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => "it is not there",
        Err(error) => return Err(failed(path, error)),
    };
    let log = log_of(path);
    let left = if count.acknowledged.is_some() {
        Count::path(path)
    } else if log.exists() {
        log
    } else {
        return Ok(());
    };
    Err(damaged(path, &format!("{how}, and {} belongs to it", left.display())))
}

fn read(file: &Connection, path: &Path, count: &Count) -> Result<(ClusterId, Vec<Fact>), Error> {
    let failed = |why: rusqlite::Error| match why.sqlite_error_code() {
        Some(rusqlite::ErrorCode::DatabaseCorrupt) | None => damaged(path, &why.to_string()),
        _ => failed(path, why),
    };
    let (seal, kept) = Seal::read(file).map_err(failed)?.ok_or_else(|| damaged(path, "it has no seal"))?;
    if seal.checksum() != kept {
        return Err(damaged(path, "its seal fails its checksum"));
    }
    match count.acknowledged {
        Some(acknowledged) if acknowledged > seal.transactions => {
            return Err(damaged(path, "its last transactions are missing"));
        }
        Some(_) => {}
        None if seal.is_closed || !seal.is_known() => {}
        None => {
            let beside = Count::path(path);
            let what =
                format!("the last head did not close it, and {} is missing, which belongs to it", beside.display());
            return Err(damaged(path, &what));
        }
    }
    let mut rows = file.prepare("SELECT key, fact, checksum FROM facts").map_err(failed)?;
    let rows =
        rows.query_map([], |row| Ok((row.get::<_, Vec<u8>>(0)?, row.get::<_, Vec<u8>>(1)?, row.get::<_, i64>(2)?)));
    let (mut facts, mut sum) = (Vec::new(), 0_i64);
    for row in rows.map_err(failed)? {
        let (key, fact, kept) = row.map_err(failed)?;
        if checksum(&[&key, &fact]) != kept {
            return Err(damaged(path, "a fact fails its checksum"));
        }
        sum = sum.wrapping_add(kept);
        facts.push(Fact::decoded(Bytes::from(fact)).map_err(|error| self::failed(path, error))?);
    }
    if (facts.len() as i64, sum) != (seal.facts, seal.sum) {
        return Err(damaged(path, &format!("it holds {} facts, and {} were written", facts.len(), seal.facts)));
    }
    Ok((seal.cluster, facts))
}

/// Encoded facts by their keys; none where nothing is left to know.
pub(crate) type Changes = BTreeMap<Vec<u8>, Option<Vec<u8>>>;

/// Whether a head goes on using the file after a transaction.
#[derive(Clone, Copy, PartialEq)]
enum Use {
    /// A head opens it, and gets a number of its own.
    Opens,
    /// It is tried whether it can be written.
    Tries,
    GoesOn,
    Ends,
}

/// The thread that writes.
struct Writer {
    file: Connection,
    /// None until it has been written for the first time.
    place: Option<Place>,
    /// See [`Count`].
    count: File,
    /// None before the first write and after one that failed.
    known: Option<Known>,
    /// Where those wait who asked.
    runtime: Handle,
    /// What became true and could not be written yet.
    owed: Changes,
    /// Why the last attempt failed, if it did: each outage is logged once, and the head grants nothing meanwhile.
    failing: watch::Sender<Option<String>>,
    /// What was written, for a standby.
    feed: Arc<Feed>,
    /// A standby begins to follow, after this transaction.
    is_to_feed: bool,
    /// The next transaction touches the disk, also where it changes nothing.
    is_to_try: bool,
}

impl Writer {
    fn run(mut self, incoming: &mpsc::Receiver<Order>) {
        loop {
            let first = match self.owed.is_empty() && !self.is_failing() {
                true => incoming.recv().map_err(|_| mpsc::RecvTimeoutError::Disconnected),
                false => incoming.recv_timeout(RETRY),
            };
            let mut asked = Vec::new();
            let mut intended = Changes::new();
            // What changes nothing would be written without a touch of the disk, and says nothing of it.
            self.is_to_try = self.is_failing();
            match first {
                Ok(first) => {
                    self.take_in(first, &mut intended, &mut asked);
                    let until = Instant::now() + TOGETHER;
                    while asked.is_empty()
                        && let Ok(order) = incoming.recv_timeout(until.saturating_duration_since(Instant::now()))
                    {
                        self.take_in(order, &mut intended, &mut asked);
                    }
                    for order in incoming.try_iter() {
                        self.take_in(order, &mut intended, &mut asked);
                    }
                }
                // Also where nothing is owed, it is tried whether there is room again: somebody may wait for a lease.
                Err(mpsc::RecvTimeoutError::Timeout) => self.is_to_try = true,
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    return self.close();
                }
            }
            let using = if self.is_to_try { Use::Tries } else { Use::GoesOn };
            let written = self
                .place
                .as_ref()
                .map_or(Ok(()), Place::is_kept)
                .and_then(|()| self.write(&intended, using).map_err(|error| error.to_string()));
            match &written {
                Ok(()) => {
                    if self.is_failing() {
                        self.failing.send_replace(None);
                        tracing::info!("the head's journal is written again");
                    }
                }
                Err(error) if !self.is_failing() => {
                    self.failing.send_replace(Some(error.clone()));
                    tracing::error!(
                        %error,
                        file = self.file.path(),
                        "cannot write the head's journal; changes are refused and nothing new is granted until it can be written"
                    );
                }
                Err(_) => {}
            }
            self.answer(asked, written);
            if std::mem::take(&mut self.is_to_feed) {
                self.feed_all();
            }
        }
    }

    /// Sends a standby all that is there. If it cannot be read, the standby begins again when it has waited for long.
    fn feed_all(&self) {
        match contents_of(&self.file) {
            Ok(all) => self.feed.begin(all),
            Err(error) => tracing::error!(%error, "cannot read the head's journal for its standby"),
        }
    }

    fn is_failing(&self) -> bool {
        self.failing.borrow().is_some()
    }

    /// Tells all who asked. On their runtime, which is woken once for that, and not once for each.
    fn answer(&self, asked: Vec<oneshot::Sender<Result<(), String>>>, written: Result<(), String>) {
        if !asked.is_empty() {
            self.runtime.spawn(async move {
                for answer in asked {
                    let _ = answer.send(written.clone());
                }
            });
        }
    }

    /// A later fact replaces an earlier one under its key.
    fn take_in(&mut self, order: Order, intended: &mut Changes, asked: &mut Vec<oneshot::Sender<Result<(), String>>>) {
        match order {
            Order::Owe(facts, answer) => {
                self.owe(facts, intended);
                asked.extend(answer);
            }
            Order::Intend(facts, answer) => match facts.iter().map(Fact::encoded).collect::<Result<Vec<_>, _>>() {
                Ok(encoded) => {
                    intended.extend(encoded);
                    asked.push(answer);
                }
                Err(error) => drop(answer.send(Err(error))),
            },
            Order::Copy { changes, replaces, answer } => {
                if replaces {
                    if self.known.is_none() {
                        self.known = Known::read(&self.file).ok();
                    }
                    if self.known.is_none() {
                        let _ = answer.send(Err("it cannot be read".into()));
                        return;
                    }
                    let known = self.known.iter().flat_map(|known| known.checksums.keys());
                    intended.extend(known.map(|key| (key.clone(), None)));
                }
                intended.extend(changes);
                asked.push(answer);
            }
            Order::Feed => self.is_to_feed = true,
            Order::Try(answer) => {
                self.is_to_try = true;
                asked.push(answer);
            }
            #[cfg(test)]
            Order::ReadOnly => self.file.pragma_update(None, "query_only", true).unwrap(),
            #[cfg(test)]
            Order::Limit(pages) => {
                self.file.pragma_update(None, "max_page_count", pages).unwrap();
            }
        }
    }

    fn owe(&mut self, facts: Vec<Fact>, intended: &mut Changes) {
        for fact in facts {
            match fact.encoded() {
                Ok((key, fact)) => {
                    intended.remove(&key);
                    self.owed.insert(key, fact);
                }
                Err(error) => tracing::error!(%error, ?fact, "a fact cannot be encoded"),
            }
        }
    }

    /// Writes what is owed and folds everything into the file, as far as there is room.
    fn close(mut self) {
        let missing = self.owed.len();
        let closed = self.write(&Changes::new(), Use::Ends).and_then(|()| {
            self.file.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()))?;
            self.file.close().map_err(|(_, error)| error)
        });
        if let Err(error) = closed {
            tracing::error!(%error, missing, "the head's journal was not closed in order; the files beside it belong to it");
        }
    }

    /// Writes what is owed, which then is no more, and what is intended.
    fn write(&mut self, intended: &Changes, using: Use) -> rusqlite::Result<()> {
        // After a failure, what lies in the file is read again.
        let mut known = match self.known.take() {
            Some(known) => known,
            None => {
                if !self.file.is_autocommit() {
                    // The last attempt could not even be undone.
                    self.file.execute_batch("ROLLBACK")?;
                }
                Known::read(&self.file)?
            }
        };
        let owed = std::mem::take(&mut self.owed);
        if let Some((seal, made)) = known.after(&owed, intended, using) {
            if let Err(error) = self.commit(&seal, &made) {
                self.owed = owed;
                return Err(error);
            }
            self.feed.push(made.iter().map(|change| (change.key, change.fact.map(|(fact, _)| fact))));
            known.take_in(seal, &made);
        }
        self.known = Some(known);
        Ok(())
    }

    fn commit(&mut self, seal: &Seal, made: &[Change<'_>]) -> rusqlite::Result<()> {
        let transaction = self.file.transaction()?;
        {
            let mut put = transaction.prepare_cached(
                "INSERT INTO facts (key, fact, checksum) VALUES (?1, ?2, ?3)
                 ON CONFLICT (key) DO UPDATE SET fact = ?2, checksum = ?3",
            )?;
            let mut remove = transaction.prepare_cached("DELETE FROM facts WHERE key = ?1")?;
            for Change { key, fact } in made {
                match fact {
                    Some((fact, checksum)) => put.execute(params![key, fact, checksum])?,
                    None => remove.execute(params![key])?,
                };
            }
            let mut update = transaction.prepare_cached(
                "UPDATE seal SET facts = ?1, sum = ?2, transactions = ?3, is_closed = ?4, checksum = ?5",
            )?;
            update.execute(params![seal.facts, seal.sum, seal.transactions, seal.is_closed, seal.checksum()])?;
        }
        transaction.commit()?;
        if let Err(error) = Count::write(&self.count, seal.transactions) {
            // The transaction holds; only its loss would not be noticed.
            tracing::warn!(%error, "cannot write beside the head's journal");
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "journal_tests.rs"]
mod tests;
