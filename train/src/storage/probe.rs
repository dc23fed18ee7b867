//! Whether a storage can be written, and is the same on all nodes.

use std::time::Duration;

use object_store::ObjectStoreExt;
use object_store::path::Path;

use super::{Result, Storage};

const PROBE: &str = ".wingbeat-probe";

impl Storage {
    /// Whether it can be written to: found out before anything is trained.
    pub(crate) async fn probe(&self) -> Result<()> {
        // Others may do the same now.
        let probe = self.probe_file(&format!("{:016x}", rand::random::<u64>()));
        let failed = |error: object_store::Error| format!("{} cannot be written: {error}", self.url);
        self.store.put(&probe, "wingbeat".into()).await.map_err(failed)?;
        self.delete(&probe).await
    }

    /// Writes something for another node to read, which then answers with [`Storage::answer_probe`].
    pub(crate) async fn ask(&self, name: &str) -> Result<()> {
        let file = self.probe_file(name);
        self.store.put(&file, name.to_owned().into()).await.map(drop).map_err(|error| self.failed(&error))
    }

    /// On another node: reads what was written to be read there, and writes an answer.
    pub(crate) async fn answer_probe(&self, name: &str) -> Result<()> {
        match self.read(&self.probe_file(name)).await? {
            Some(text) if text == name.as_bytes() => self.ask(&answer_to(name)).await,
            _ => Err(format!("{} is not the same there as for the driver: what that wrote is not in it", self.url)),
        }
    }

    /// Whether the answer can be read here. Removes both.
    pub(crate) async fn hear(&self, name: &str) -> Result<()> {
        let answer = answer_to(name);
        let there = self.read(&self.probe_file(&answer)).await?;
        for file in [name, &answer] {
            self.delete(&self.probe_file(file)).await?;
        }
        let is_there = there.is_some_and(|text| text == answer.as_bytes());
        let missing = || format!("{} is not the same there as for the driver, which cannot read it", self.url);
        is_there.then_some(()).ok_or_else(missing)
    }

    fn probe_file(&self, name: &str) -> Path {
        self.root.clone().join(format!("{PROBE}-{name}"))
    }

    /// Removes what checks of the storage have left that were cut short, as far as it lies on this machine.
    pub(super) fn remove_old_probes(&self) {
        const OLD: Duration = Duration::from_secs(3600);
        let entries = self.url.to_file_path().ok().and_then(|root| std::fs::read_dir(root).ok());
        for entry in entries.into_iter().flatten().flatten() {
            let is_probe = entry.file_name().to_string_lossy().starts_with(PROBE);
            let made = entry.metadata().and_then(|there| there.modified());
            if is_probe && made.is_ok_and(|made| made.elapsed().is_ok_and(|age| age > OLD)) {
                // Another may have removed it.
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }
}

/// What answers the probe of this name is called.
fn answer_to(name: &str) -> String {
    format!("{name}-answered")
}
