//! What must survive the head, in an SQLite file: the latest fact under each key.
//!
//! One thread writes. Whatever has queued while it wrote goes into its next transaction, so that many who ask at the same
//! time share one wait for the disk. Nobody is told that something durable was done before it is.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;

use bytes::{Bytes, BytesMut};
use futures::future::BoxFuture;
use rusqlite::{Connection, OptionalExtension, params};
use tokio::sync::watch;
use wingbeat_core::ClusterId;
use wingbeat_core::codec;
use wingbeat_core::error::Error;

use crate::service::Durable;
use crate::state::Fact;

/// The layout of the file and of the facts in it. A head refuses a file of another.
const FORMAT: i64 = 1;
/// Facts that are queued at most: further events wait for the disk.
const QUEUED: usize = 65_536;

/// Where facts go.
pub(crate) struct Journal {
    queue: mpsc::SyncSender<Vec<Fact>>,
    written: watch::Receiver<Written>,
    count: AtomicU64,
}

/// How many batches were written, or why no more can be.
type Written = Result<u64, String>;

/// What an earlier head wrote down.
pub(crate) struct Remembered {
    pub cluster: Option<ClusterId>,
    pub facts: Vec<Fact>,
}

fn failed(path: &Path, why: impl std::fmt::Display) -> Error {
    Error::Io { what: format!("the head's journal {}", path.display()), why: why.to_string() }
}

impl Journal {
    /// Opens a file, or makes it, and reads what is in it.
    ///
    /// # Errors
    /// It cannot be read or written, another head uses it, or it is no journal of this version.
    pub(crate) fn open(path: &Path, cluster: ClusterId) -> Result<(Journal, Remembered), Error> {
        let failed = |why: rusqlite::Error| failed(path, why);
        let file = Connection::open(path).map_err(failed)?;
        // Another head has it: waiting would not help.
        file.busy_timeout(std::time::Duration::ZERO).map_err(failed)?;
        // One head at a time, and nothing is lost when the machine loses power.
        file.pragma_update(None, "locking_mode", "EXCLUSIVE").map_err(failed)?;
        file.pragma_update(None, "journal_mode", "WAL").map_err(failed)?;
        file.pragma_update(None, "synchronous", "FULL").map_err(failed)?;
        let format: i64 = file.pragma_query_value(None, "user_version", |row| row.get(0)).map_err(failed)?;
        if format != 0 && format != FORMAT {
            let why = format!("it has format {format}, and this head writes {FORMAT}; use the version that wrote it");
            return Err(Error::Io { what: format!("the head's journal {}", path.display()), why });
        }
        file.execute_batch(&format!(
            "BEGIN IMMEDIATE;
             CREATE TABLE IF NOT EXISTS cluster (id INTEGER NOT NULL);
             CREATE TABLE IF NOT EXISTS facts (key BLOB PRIMARY KEY, fact BLOB NOT NULL) WITHOUT ROWID;
             PRAGMA user_version = {FORMAT};
             COMMIT;"
        ))
        .map_err(failed)?;
        let remembered = read(&file, path)?;
        if remembered.cluster.is_none() {
            file.execute("INSERT INTO cluster (id) VALUES (?1)", params![cluster.0 as i64]).map_err(failed)?;
        }
        let (queue, incoming) = mpsc::sync_channel(QUEUED);
        let (sender, written) = watch::channel(Ok(0));
        let path = path.to_owned();
        std::thread::Builder::new()
            .name("wingbeat-journal".into())
            .spawn(move || write_all(file, &incoming, &sender))
            .map_err(|error| self::failed(&path, error))?;
        Ok((Journal { queue, written, count: AtomicU64::new(0) }, remembered))
    }
}

impl Durable for Journal {
    fn write(&self, facts: Vec<Fact>) -> u64 {
        let number = self.count.fetch_add(1, Ordering::Relaxed) + 1;
        // Fails only after the thread has ended with an error, which whoever waits is told.
        let _ = self.queue.send(facts);
        number
    }

    fn is_written(&self, number: u64) -> BoxFuture<'_, Result<(), Error>> {
        let mut written = self.written.clone();
        Box::pin(async move {
            let reached = |written: &Written| !matches!(written, Ok(count) if *count < number);
            let outcome = match written.wait_for(reached).await {
                Ok(outcome) => outcome.clone(),
                Err(_) => Err("its writer has ended".into()),
            };
            outcome.map(drop).map_err(|why| Error::Io { what: "writing the head's journal".into(), why })
        })
    }
}

fn read(file: &Connection, path: &Path) -> Result<Remembered, Error> {
    let failed = |why: rusqlite::Error| failed(path, why);
    let id: Option<i64> = file.query_row("SELECT id FROM cluster", [], |row| row.get(0)).optional().map_err(failed)?;
    let mut rows = file.prepare("SELECT fact FROM facts").map_err(failed)?;
    let rows = rows.query_map([], |row| row.get::<_, Vec<u8>>(0)).map_err(failed)?;
    let mut facts = Vec::new();
    for row in rows {
        let bytes = Bytes::from(row.map_err(failed)?);
        facts.push(codec::decode_message(bytes).map_err(|error| self::failed(path, error))?);
    }
    Ok(Remembered { cluster: id.map(|id| ClusterId(id as u64)), facts })
}

fn write_all(mut file: Connection, incoming: &mpsc::Receiver<Vec<Fact>>, written: &watch::Sender<Written>) {
    let mut count = 0;
    while let Ok(first) = incoming.recv() {
        let mut batch = vec![first];
        batch.extend(incoming.try_iter());
        count += batch.len() as u64;
        if let Err(error) = write_batch(&mut file, batch.into_iter().flatten()) {
            tracing::error!(%error, "cannot write the head's journal");
            let _ = written.send_replace(Err(error));
            return;
        }
        let _ = written.send_replace(Ok(count));
    }
}

fn write_batch(file: &mut Connection, facts: impl Iterator<Item = Fact>) -> Result<(), String> {
    let transaction = file.transaction().map_err(|error| error.to_string())?;
    {
        let mut put = transaction
            .prepare_cached("INSERT INTO facts (key, fact) VALUES (?1, ?2) ON CONFLICT (key) DO UPDATE SET fact = ?2")
            .map_err(|error| error.to_string())?;
        let mut remove =
            transaction.prepare_cached("DELETE FROM facts WHERE key = ?1").map_err(|error| error.to_string())?;
        for fact in facts {
            let key = encoded(&fact.key())?;
            let done = if fact.is_end() {
                remove.execute(params![&key[..]])
            } else {
                put.execute(params![&key[..], &encoded(&fact)?[..]])
            };
            done.map_err(|error| error.to_string())?;
        }
    }
    transaction.commit().map_err(|error| error.to_string())
}

fn encoded<T: serde::Serialize>(value: &T) -> Result<BytesMut, String> {
    let mut bytes = BytesMut::new();
    codec::encode_message(value, &mut bytes).map_err(|error| error.to_string())?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use wingbeat_core::ResourceSet;

    fn quota(name: &str, cpus: u32) -> Fact {
        Fact::Quota(name.into(), ResourceSet::cpus(wingbeat_core::Amount::whole(cpus)))
    }

    fn shown(facts: &[Fact]) -> Vec<String> {
        let mut shown: Vec<String> = facts.iter().map(|fact| format!("{fact:?}")).collect();
        shown.sort();
        shown
    }

    #[tokio::test]
    async fn the_next_head_reads_the_latest_fact_under_each_key() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        let (journal, before) = Journal::open(&path, ClusterId(7)).unwrap();
        assert!(before.cluster.is_none() && before.facts.is_empty());
        journal.write(vec![quota("a", 1), quota("b", 1)]);
        journal.write(vec![quota("a", 2), quota("c", 3)]);
        let last = journal.write(vec![Fact::QuotaGone("b".into())]);
        journal.is_written(last).await.unwrap();
        drop(journal);
        // The file is free when its writer has ended.
        let after = loop {
            if let Ok((_, after)) = Journal::open(&path, ClusterId(8)) {
                break after;
            }
            std::thread::yield_now();
        };
        assert_eq!(after.cluster, Some(ClusterId(7)), "the cluster stays the same");
        assert_eq!(shown(&after.facts), shown(&[quota("a", 2), quota("c", 3)]));
    }

    #[test]
    fn a_file_that_is_no_journal_and_one_of_another_format_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        std::fs::write(
            &path,
            "not a database, and long enough to be looked at as one, with a header of its own......................",
        )
        .unwrap();
        assert!(Journal::open(&path, ClusterId(7)).is_err());
        std::fs::remove_file(&path).unwrap();
        Connection::open(&path).unwrap().pragma_update(None, "user_version", 99).unwrap();
        let error = Journal::open(&path, ClusterId(7)).err().unwrap().to_string();
        assert!(error.contains("format 99"), "{error}");
    }

    #[test]
    fn two_heads_do_not_share_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        let _first = Journal::open(&path, ClusterId(7)).unwrap();
        let error = Journal::open(&path, ClusterId(7)).err().unwrap().to_string();
        assert!(error.contains("locked"), "{error}");
    }
}
