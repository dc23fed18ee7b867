//! The copy of the head's journal in a standby's file.

use std::sync::Arc;
use std::time::Duration;

use wingbeat_core::codec::Payload;
use wingbeat_core::error::Error;
use wingbeat_net::messages::Facts;

use super::{Standby, has_ended};
use crate::files;
use crate::journal::Changes;
use crate::state::{Fact, FactKey};

/// A copy of everything that comes over one connection.
#[derive(Default)]
pub(super) struct Copying {
    /// What has come of it, until it is complete.
    parts: Option<Changes>,
    /// Whether it is.
    pub(super) is_complete: bool,
}

impl Copying {
    /// What is to be written with this, and whether it replaces all that is there.
    fn take_in(&mut self, facts: Facts) -> Option<(Changes, bool)> {
        let Facts { begins, is_complete, changes, .. } = facts;
        let bytes = |payload: Payload| payload.0.to_vec();
        let changes = changes.into_iter().map(|(key, fact)| (bytes(key), fact.map(bytes)));
        if begins {
            self.parts = Some(Changes::new());
        }
        match self.parts.take() {
            None => Some((changes.collect(), false)),
            Some(mut copy) => {
                copy.extend(changes);
                if is_complete {
                    self.is_complete = true;
                    return Some((copy, true));
                }
                self.parts = Some(copy);
                None
            }
        }
    }
}

impl Standby {
    pub(super) async fn write(&self, facts: Facts, copying: &mut Copying) -> Result<(), Error> {
        let Some((changes, replaces)) = copying.take_in(facts) else { return Ok(()) };
        if changes.is_empty() && !replaces {
            return Ok(());
        }
        let unreadable = |why: String| Error::Failed { what: "reading what the head has written".into(), why };
        let mut changes = changes;
        if replaces {
            let follows = Fact::Follows(Box::new(self.way.address())).encoded().map_err(unreadable)?;
            changes.insert(follows.0, follows.1);
        }
        let journal = self.journal.lock().clone();
        let journal = journal.ok_or_else(has_ended)?;
        let mut facts = Vec::new();
        let written = {
            // Until it is queued, no other head is let lead: what this one says of who may take over is void from then on.
            let deciding = self.deciding.lock();
            for (key, content) in &mut changes {
                let key = FactKey::decoded(key.clone().into()).map_err(unreadable)?;
                let mut fact =
                    content.clone().map(|fact| Fact::decoded(fact.into())).transpose().map_err(unreadable)?;
                if matches!(&fact, Some(Fact::Succession(by) | Fact::EarlierSuccession(by)) if deciding.is_void(by)) {
                    (fact, *content) = (None, None);
                }
                facts.push((key, fact));
            }
            journal.copy(changes, replaces)
        };
        written.await?;
        let mut said = None;
        {
            let mut known = self.known.lock();
            if replaces {
                known.clear();
                said = Some(None);
            }
            for (key, fact) in facts {
                if key == FactKey::Succession {
                    said = Some(match &fact {
                        Some(Fact::Succession(succession)) => Some((**succession).clone()),
                        _ => None,
                    });
                }
                match fact {
                    Some(fact) => known.insert(key, fact),
                    None => known.remove(&key),
                };
            }
        }
        if let Some(said) = said {
            self.note_succession(said);
        }
        Ok(())
    }

    /// Whether the next head could read what is written here.
    pub(super) async fn keeps_its_file(&self) -> Result<(), Error> {
        let journal = self.journal.lock().clone();
        match journal {
            Some(journal) => journal.try_to_write().await,
            None => Err(has_ended()),
        }
    }

    /// Waits until nothing is written to the file any more.
    pub(super) async fn close_journal(&self) {
        let mut journal = self.journal.lock().take();
        while let Some(shared) = journal {
            match Arc::try_unwrap(shared) {
                Ok(last) => {
                    let _ = tokio::task::spawn_blocking(move || drop(last)).await;
                    break;
                }
                // Something is being written.
                Err(shared) => {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                    journal = Some(shared);
                }
            }
        }
    }

    /// It was refused before there was anything to copy.
    pub(super) async fn remove_file(&self) {
        self.close_journal().await;
        // A link to it stays: the user has made that.
        let file = files::real_path(&self.file);
        // The count alone would be of a journal that is gone.
        for ending in ["-count", "-wal", "-shm", ""] {
            // What cannot be removed stays, and is used by the next standby.
            let _ = std::fs::remove_file(files::beside(&file, ending));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_complete_with_its_last_part_and_not_before_it_has_begun() {
        let facts = |position, begins, is_complete| Facts { position, begins, is_complete, changes: Vec::new() };
        let mut copying = Copying::default();
        assert!(
            copying.take_in(facts(0, false, true)).is_some() && !copying.is_complete,
            "the head had nothing to say"
        );
        assert!(copying.take_in(facts(1, true, false)).is_none() && !copying.is_complete);
        assert!(matches!(copying.take_in(facts(2, false, true)), Some((_, true))) && copying.is_complete);
        assert!(matches!(copying.take_in(facts(3, false, true)), Some((_, false))) && copying.is_complete);
    }
}
