//! A run's checkpoints from their beginning to their removal.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use futures::StreamExt;

use super::{AT_ONCE, COMPLETE, CheckpointConfig, Claim, Complete, Listing, Place, Result, name_of, numbered};

impl Place {
    /// Begins a checkpoint: ranks may write into what is returned.
    pub(crate) async fn begin(&self, number: u64) -> Result<Arc<Claim>> {
        let claim = self.made().await?;
        claim.begin(number).await?;
        Ok(claim)
    }
}

impl Claim {
    /// The number of the next checkpoint: larger than any there is. What a run on this storage has left incomplete is removed.
    pub(crate) async fn next(&self) -> Result<u64> {
        let storage = self.storage();
        self.check().await?;
        storage.remove_old_probes();
        let mut next = 1;
        for folder in storage.folders().await? {
            // What cannot be removed now (somebody reads it over a network) is in nobody's way.
            let is_left = !folder.has(COMPLETE) && self.has_made(&folder.name).await?;
            if !is_left || storage.remove(&folder).await.is_err() {
                next = next.max(numbered(&folder.name).unwrap_or_default().saturating_add(1));
            }
        }
        Ok(next)
    }

    /// Begins a checkpoint: ranks may write into it.
    pub(crate) async fn begin(&self, number: u64) -> Result<()> {
        self.check().await?;
        match self.mark(&name_of(number)).await? {
            true => Ok(()),
            false => Err(format!("{} is there already", self.storage().url_of(number))),
        }
    }

    /// Removes a checkpoint that could not be stored, as far as that can be done: what is left is removed as outdated.
    pub(crate) async fn give_up(&self, number: u64) {
        // Another run may have taken the storage over, and stored its own under this number.
        if self.check().await.is_err() {
            return;
        }
        let storage = self.storage();
        let folders = storage.folders().await.unwrap_or_default();
        let unfinished = folders.into_iter().find(|folder| folder.number() == Some(number) && !folder.has(COMPLETE));
        if let Some(folder) = unfinished
            && self.has_made(&folder.name).await == Ok(true)
        {
            let _ = storage.remove(&folder).await;
        }
    }

    /// Says that a checkpoint is complete.
    pub(crate) async fn complete(&self, number: u64, metrics: &BTreeMap<String, f64>, listing: Listing) -> Result<()> {
        let storage = self.storage();
        self.check().await?;
        let seen = listing.files.clone().into_iter().map(|name| storage.check_is_there(number, name));
        let mut seen = futures::stream::iter(seen).buffer_unordered(AT_ONCE);
        while let Some(seen) = seen.next().await {
            seen?;
        }
        let metrics = metrics.iter().map(|(name, value)| (name.clone(), value.to_string())).collect();
        let Listing { files, shape } = listing;
        let text = serde_json::to_vec(&Complete { metrics, files, shape }).map_err(|error| error.to_string())?;
        let file = storage.folder(number).join(COMPLETE);
        storage.put_whole(&file, text).await
    }

    /// Removes the checkpoints of this storage that are not kept any more, as far as that can be done.
    ///
    /// # Errors
    /// Some could not be removed; they are tried again with the next.
    pub(crate) async fn remove_outdated(&self, keep: &CheckpointConfig) -> Result<()> {
        let storage = self.storage();
        self.check().await?;
        let all = storage.checkpoints().await?;
        let outdated: BTreeSet<u64> = keep.outdated(&all).into_iter().map(|checkpoint| checkpoint.number).collect();
        let newest = all.last().map_or(0, |newest| newest.number);
        let mut removed = Ok(());
        for folder in storage.folders().await? {
            // Also what is left of one that could not be removed whole.
            let is_rest = |number: &u64| *number < newest && !folder.has(COMPLETE);
            let is_old = folder.number().is_some_and(|number| outdated.contains(&number) || is_rest(&number));
            if is_old && self.has_made(&folder.name).await? {
                removed = removed.and(storage.remove(&folder).await);
            }
        }
        removed
    }
}
