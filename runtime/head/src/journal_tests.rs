//! What a journal keeps, refuses and survives.

use std::os::unix::fs::{MetadataExt, PermissionsExt};

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

fn modes(folder: &Path) -> Vec<(String, u32)> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    let mut modes: Vec<(String, u32)> = entries
        .map(|entry| (entry.file_name().into_string().unwrap(), entry.metadata().unwrap().mode() & 0o777))
        .collect();
    modes.sort();
    modes
}

#[tokio::test]
async fn the_next_head_reads_the_latest_fact_under_each_key() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal");
    let (journal, before) = Journal::open(&path, ClusterId(7)).unwrap();
    assert!(before.cluster.is_none() && before.facts.is_empty());
    journal.write(vec![quota("a", 1), quota("b", 1)]);
    journal.intend(vec![quota("a", 2), quota("c", 3)]).await.unwrap();
    journal.write(vec![quota("c", 3), Fact::QuotaGone("b".into())]);
    drop(journal);
    let (_, after) = Journal::open(&path, ClusterId(8)).unwrap();
    assert_eq!(after.cluster, Some(ClusterId(7)), "the cluster stays the same");
    assert_eq!(shown(&after.facts), shown(&[quota("a", 2), quota("c", 3)]));
}

#[tokio::test]
async fn a_file_that_is_no_journal_and_one_of_another_format_are_refused() {
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

#[tokio::test]
async fn what_is_said_after_the_file_was_removed_is_refused_until_it_is_back() {
    let dir = tempfile::tempdir().unwrap();
    let [path, aside] = ["journal", "aside"].map(|name| dir.path().join(name));
    let (journal, _) = Journal::open(&path, ClusterId(7)).unwrap();
    journal.intend(vec![quota("a", 1)]).await.unwrap();
    std::fs::rename(&path, &aside).unwrap();
    let refused = journal.intend(vec![quota("b", 1)]).await.unwrap_err().to_string();
    assert!(refused.contains("was removed or replaced while the head ran"), "{refused}");
    std::fs::copy(&aside, &path).unwrap();
    assert!(journal.intend(vec![quota("b", 1)]).await.is_err(), "another file is none that the head writes");
    std::fs::rename(&aside, &path).unwrap();
    journal.intend(vec![quota("c", 1)]).await.unwrap();
    drop(journal);
    let (_, after) = Journal::open(&path, ClusterId(8)).unwrap();
    assert_eq!(shown(&after.facts), shown(&[quota("a", 1), quota("c", 1)]));
}

#[tokio::test]
async fn a_head_that_is_started_while_the_file_is_away_leaves_what_belongs_to_it() {
    let dir = tempfile::tempdir().unwrap();
    let [path, aside] = ["journal", "aside"].map(|name| dir.path().join(name));
    let (journal, _) = Journal::open(&path, ClusterId(7)).unwrap();
    journal.intend(vec![quota("a", 1)]).await.unwrap();
    std::fs::rename(&path, &aside).unwrap();
    for _ in 0..2 {
        let refused = Journal::open(&path, ClusterId(8)).err().unwrap().to_string();
        assert!(refused.contains("it is not there") && refused.contains("journal-count belongs to it"), "{refused}");
    }
    let count = std::fs::read(Count::path(&path)).unwrap();
    std::fs::remove_file(Count::path(&path)).unwrap();
    File::create(&path).unwrap();
    let refused = Journal::open(&path, ClusterId(8)).err().unwrap().to_string();
    assert!(refused.contains("it is empty") && refused.contains("journal-wal belongs to it"), "{refused}");
    std::fs::write(Count::path(&path), count).unwrap();
    std::fs::rename(&aside, &path).unwrap();
    let left = killed(&path);
    let (_, after) = Journal::open(&left.path().join("journal"), ClusterId(8)).unwrap();
    assert_eq!(shown(&after.facts), shown(&[quota("a", 1)]));
}

#[tokio::test]
async fn what_is_said_after_the_log_was_removed_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal");
    let (journal, _) = Journal::open(&path, ClusterId(7)).unwrap();
    journal.intend(vec![quota("a", 1)]).await.unwrap();
    std::fs::remove_file(log_of(&path)).unwrap();
    let refused = journal.intend(vec![quota("b", 1)]).await.unwrap_err().to_string();
    assert!(refused.contains("journal-wal was removed or replaced while the head ran"), "{refused}");
}

/// A journal in a folder of its own, and a link to it.
fn linked(dir: &Path) -> [PathBuf; 2] {
    let [path, link] = ["elsewhere/journal", "link"].map(|name| dir.join(name));
    std::fs::create_dir(path.parent().unwrap()).unwrap();
    std::os::unix::fs::symlink("elsewhere/journal", &link).unwrap();
    [path, link]
}

#[tokio::test]
async fn whatever_belongs_to_a_journal_lies_beside_it_and_not_beside_a_link_to_it() {
    let dir = tempfile::tempdir().unwrap();
    let [path, link] = linked(dir.path());
    for cpus in 1..3 {
        let (journal, _) = Journal::open(&link, ClusterId(7)).unwrap();
        journal.intend(vec![quota("a", cpus)]).await.unwrap();
    }
    let (journal, _) = Journal::open(&link, ClusterId(7)).unwrap();
    journal.intend(vec![quota("b", 1)]).await.unwrap();
    assert_eq!(modes(dir.path()).len(), 2, "{:?}", modes(dir.path()));
    let left = killed(&path);
    let (_, after) = Journal::open(&left.path().join("journal"), ClusterId(7)).unwrap();
    assert_eq!(shown(&after.facts), shown(&[quota("a", 2), quota("b", 1)]));
}

#[tokio::test]
async fn a_count_that_lies_beside_a_link_to_the_journal_is_used_and_moved() {
    let dir = tempfile::tempdir().unwrap();
    let [path, link] = linked(dir.path());
    let (journal, _) = Journal::open(&path, ClusterId(7)).unwrap();
    journal.intend(vec![quota("a", 1)]).await.unwrap();
    let left = killed(&path);
    drop(journal);
    std::fs::remove_file(beside(&path, "-count")).unwrap();
    for (ending, to) in [("", &path), ("-wal", &path), ("-count", &link)] {
        std::fs::copy(beside(&left.path().join("journal"), ending), beside(to, ending)).unwrap();
    }
    let (_journal, after) = Journal::open(&link, ClusterId(7)).unwrap();
    assert_eq!(shown(&after.facts), shown(&[quota("a", 1)]));
    assert!(beside(&path, "-count").exists() && !beside(&link, "-count").exists());
}

#[tokio::test]
async fn what_is_said_after_the_link_to_the_journal_leads_elsewhere_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let [path, link] = linked(dir.path());
    let (journal, _) = Journal::open(&link, ClusterId(7)).unwrap();
    std::fs::remove_file(&link).unwrap();
    assert!(path.exists() && journal.intend(vec![quota("a", 1)]).await.is_err());
}

#[tokio::test]
async fn two_heads_do_not_share_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal");
    let _first = Journal::open(&path, ClusterId(7)).unwrap();
    let error = Journal::open(&path, ClusterId(7)).err().unwrap().to_string();
    assert!(error.contains("locked"), "{error}");
}

#[tokio::test]
async fn nobody_else_can_read_it_or_what_lies_beside_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal");
    let (journal, _) = Journal::open(&path, ClusterId(7)).unwrap();
    journal.intend(vec![quota("a", 1)]).await.unwrap();
    assert!(modes(dir.path()).iter().all(|(_, mode)| *mode == 0o600), "{:?}", modes(dir.path()));
    drop(journal);
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
    let _journal = Journal::open(&path, ClusterId(7)).unwrap();
    assert!(modes(dir.path()).iter().all(|(_, mode)| *mode == 0o600), "one that was open to others no longer is");
}

#[tokio::test]
async fn a_head_with_an_older_copy_of_the_file_is_not_taken_for_one_that_has_led_since() {
    let dir = tempfile::tempdir().unwrap();
    let [path, copy] = ["journal", "copy"].map(|name| dir.path().join(name));
    drop(Journal::open(&path, ClusterId(7)).unwrap());
    std::fs::copy(&path, &copy).unwrap();
    let (journal, last) = Journal::open(&path, ClusterId(7)).unwrap();
    journal.intend(vec![quota("a", 1)]).await.unwrap();
    drop(journal);
    let (_, with_copy) = Journal::open(&copy, ClusterId(7)).unwrap();
    assert!(with_copy.epoch > last.epoch, "{:?}, {:?}", with_copy.epoch, last.epoch);
    let (_, next) = Journal::open(&path, ClusterId(7)).unwrap();
    assert!(next.epoch > last.epoch);
}

#[tokio::test]
async fn the_file_alone_is_complete_after_a_clean_stop() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal");
    let (journal, _) = Journal::open(&path, ClusterId(7)).unwrap();
    for cpus in 1..20 {
        journal.intend(vec![quota("a", cpus), quota(&format!("team {cpus}"), cpus)]).await.unwrap();
    }
    drop(journal);
    let copy = dir.path().join("copy");
    std::fs::copy(&path, &copy).unwrap();
    let (journal, copied) = Journal::open(&copy, ClusterId(8)).unwrap();
    assert_eq!((copied.facts.len(), copied.cluster), (20, Some(ClusterId(7))));
    journal.intend(vec![quota("b", 1)]).await.unwrap();
    // While it is in use it is not, and a copy of it says so.
    let second = dir.path().join("second");
    std::fs::copy(&copy, &second).unwrap();
    let error = Journal::open(&second, ClusterId(8)).err().map(|error| error.to_string());
    assert!(error.is_none_or(|error| error.contains("did not close it")));
}

/// What a head that is killed now would leave: everything that it wrote, and no clean stop.
fn killed(path: &Path) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for beside in ["", "-wal", "-count"] {
        let from = format!("{}{beside}", path.display());
        std::fs::copy(from, dir.path().join(format!("journal{beside}"))).unwrap();
    }
    dir
}

/// Whether a damaged journal is refused, with `word` in the reason. One that is not holds everything.
fn is_refused(path: &Path, facts: &[Fact], word: &str, place: &str) -> bool {
    match Journal::open(path, ClusterId(8)) {
        Ok((_, after)) => {
            assert_eq!(shown(&after.facts), shown(facts), "{place}");
            assert_eq!(after.cluster, Some(ClusterId(7)), "{place}");
            false
        }
        Err(error) => {
            assert!(error.to_string().contains(word), "{error}");
            true
        }
    }
}

#[tokio::test]
async fn a_changed_bit_in_what_a_killed_head_left_loses_nothing_in_silence() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal");
    let facts: Vec<Fact> = (1..7).map(|cpus| quota(&format!("team {cpus}"), cpus)).collect();
    let (journal, _) = Journal::open(&path, ClusterId(7)).unwrap();
    for fact in &facts {
        journal.intend(vec![fact.clone()]).await.unwrap();
    }
    let left = killed(&path);
    drop(journal);
    let (_, after) = Journal::open(&left.path().join("journal"), ClusterId(8)).unwrap();
    assert_eq!(shown(&after.facts), shown(&facts), "what was acknowledged is there");
    let (journal, _) = Journal::open(&dir.path().join("other"), ClusterId(7)).unwrap();
    for fact in &facts {
        journal.intend(vec![fact.clone()]).await.unwrap();
    }
    let left = killed(&dir.path().join("other"));
    drop(journal);
    let refused = refused_where(&left, &facts, |whole, at| {
        let mut bytes = whole.to_vec();
        bytes[at] ^= 1 << (at % 8);
        bytes
    });
    assert!(refused > 100, "{refused}");
}

#[tokio::test]
async fn what_a_killed_head_left_loses_nothing_in_silence_when_it_is_cut_short() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal");
    let facts: Vec<Fact> = (1..7).map(|cpus| quota(&format!("team {cpus}"), cpus)).collect();
    let (journal, _) = Journal::open(&path, ClusterId(7)).unwrap();
    for fact in &facts {
        journal.intend(vec![fact.clone()]).await.unwrap();
    }
    let left = killed(&path);
    drop(journal);
    let refused = refused_where(&left, &facts, |whole, length| whole[..length].to_vec());
    assert!(refused > 100, "{refused}");
}

/// In how many places what a killed head left is refused when its log or its count is changed there. In the others nothing is lost.
fn refused_where(left: &tempfile::TempDir, facts: &[Fact], change: impl Fn(&[u8], usize) -> Vec<u8>) -> usize {
    let mut refused = 0;
    for file in ["journal-wal", "journal-count"] {
        let whole = std::fs::read(left.path().join(file)).unwrap();
        let step = if whole.len() > 1_000 { 97 } else { 1 };
        for at in (0..whole.len()).step_by(step) {
            let changed = killed(&left.path().join("journal"));
            std::fs::write(changed.path().join(file), change(&whole, at)).unwrap();
            let place = format!("{file}, at byte {at}");
            refused += usize::from(is_refused(&changed.path().join("journal"), facts, "damaged", &place));
        }
    }
    refused
}

#[tokio::test]
async fn a_changed_bit_loses_nothing_in_silence() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal");
    let facts: Vec<Fact> = (1..7).map(|cpus| quota(&format!("team {cpus}"), cpus)).collect();
    let (journal, _) = Journal::open(&path, ClusterId(7)).unwrap();
    for fact in &facts {
        journal.intend(vec![fact.clone()]).await.unwrap();
    }
    drop(journal);
    let whole = std::fs::read(&path).unwrap();
    let mut refused = 0;
    let count = std::fs::read(Count::path(&path)).unwrap();
    // Every byte that holds something, and some of those that do not.
    for (at, byte) in whole.iter().enumerate().filter(|(at, byte)| **byte != 0 || at % 61 == 0) {
        let mut bytes = whole.clone();
        bytes[at] = byte ^ (1 << (at % 8));
        std::fs::write(&path, &bytes).unwrap();
        std::fs::write(Count::path(&path), &count).unwrap();
        let _ = std::fs::remove_file(dir.path().join("journal-wal"));
        refused += usize::from(is_refused(&path, &facts, "journal", &format!("byte {at}")));
    }
    assert!(refused > 200, "{refused}");
}

#[tokio::test]
async fn a_file_that_was_cut_short_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal");
    let (journal, _) = Journal::open(&path, ClusterId(7)).unwrap();
    journal.write((1..500).map(|cpus| quota(&format!("team {cpus}"), cpus)).collect());
    drop(journal);
    let whole = std::fs::read(&path).unwrap();
    for length in [whole.len() - 1, whole.len() - 4096, whole.len() / 2, 4096, 100, 1] {
        std::fs::write(&path, &whole[..length]).unwrap();
        let _ = std::fs::remove_file(dir.path().join("journal-wal"));
        assert!(Journal::open(&path, ClusterId(8)).is_err(), "{length} bytes");
    }
}

#[tokio::test]
async fn a_full_disk_refuses_what_is_asked_keeps_what_is_owed_and_is_forgotten_when_there_is_room() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal");
    let (journal, _) = Journal::open(&path, ClusterId(7)).unwrap();
    journal.intend(vec![quota("a", 1)]).await.unwrap();
    journal.tell(Order::Limit(1));
    let large = "a long name ".repeat(1000);
    for _ in 0..3 {
        let error = journal.intend(vec![quota(&large, 1)]).await.unwrap_err();
        assert!(matches!(error, Error::Failed { .. }) && error.to_string().contains("full"), "{error}");
    }
    // It is true, whether there is room or not.
    journal.write(vec![quota(&large, 2)]);
    assert!(journal.intend(vec![quota("b", 1)]).await.is_err(), "nothing passes what is owed");
    assert!(journal.write_and_tell(vec![quota("d", 1)]).await.is_err(), "it is not written yet");
    journal.tell(Order::Limit(1_000_000));
    journal.intend(vec![quota("c", 1)]).await.unwrap();
    drop(journal);
    let (_, after) = Journal::open(&path, ClusterId(8)).unwrap();
    assert_eq!(shown(&after.facts), shown(&[quota("a", 1), quota(&large, 2), quota("c", 1), quota("d", 1)]));
}

#[tokio::test]
async fn whether_it_can_be_written_is_known_when_something_is() {
    let dir = tempfile::tempdir().unwrap();
    let (journal, _) = Journal::open(&dir.path().join("journal"), ClusterId(7)).unwrap();
    journal.try_to_write().await.unwrap();
    journal.tell(Order::ReadOnly);
    journal.intend(Vec::new()).await.unwrap();
    assert!(journal.try_to_write().await.is_err());
    assert!(journal.why_it_fails().is_some());
}

#[tokio::test]
async fn a_journal_that_cannot_be_written_says_so_until_it_can() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal");
    let (journal, _) = Journal::open(&path, ClusterId(7)).unwrap();
    let mut fails = journal.fails();
    assert_eq!(*fails.borrow(), None);
    journal.tell(Order::Limit(1));
    let large = "a long name ".repeat(1000);
    // Nothing is owed after it.
    journal.intend(vec![quota(&large, 1)]).await.unwrap_err();
    let why = fails.wait_for(Option::is_some).await.unwrap().clone();
    assert!(why.unwrap().contains("full"));
    journal.tell(Order::Limit(1_000_000));
    fails.wait_for(Option::is_none).await.unwrap();
    journal.intend(vec![quota(&large, 2)]).await.unwrap();
    drop(journal);
    let (_, after) = Journal::open(&path, ClusterId(8)).unwrap();
    assert_eq!(shown(&after.facts), shown(&[quota(&large, 2)]));
}

#[tokio::test]
async fn what_is_owed_is_written_without_being_asked_for_when_there_is_room() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal");
    let (journal, _) = Journal::open(&path, ClusterId(7)).unwrap();
    journal.tell(Order::Limit(1));
    let large = "a long name ".repeat(1000);
    journal.write(vec![quota(&large, 2)]);
    assert!(journal.intend(Vec::new()).await.is_err());
    journal.tell(Order::Limit(1_000_000));
    // It is in the log when that has grown.
    while std::fs::metadata(dir.path().join("journal-wal")).unwrap().len() < large.len() as u64 {
        std::thread::yield_now();
    }
    drop(journal);
    let (_, after) = Journal::open(&path, ClusterId(8)).unwrap();
    assert_eq!(shown(&after.facts), shown(&[quota(&large, 2)]));
}
