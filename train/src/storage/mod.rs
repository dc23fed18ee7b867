//! Checkpoints in a folder, or in S3, GCS and Azure.
//!
//! A checkpoint is a folder `checkpoint_000007` of the run's storage. The driver marks it as this storage's own, ranks write
//! their files there, and when all have, the driver writes `.wingbeat-complete.json`: a checkpoint without it is none, so that
//! one that was cut short is never seen. What has no mark, or another's, is never written to nor removed ([`Claim`]).

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use futures::{StreamExt, TryStreamExt};
use object_store::buffered::BufWriter;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutMode};
use serde::{Deserialize, Serialize};
use tokio::io::AsyncWriteExt;
use url::Url;

use crate::own_folder::OwnFolder;
use listing::Shape;

mod claim;
mod completion;
mod keep;
mod listing;
mod place;
mod probe;

pub(crate) use claim::Claim;
pub use keep::{BestCheckpoints, CheckpointConfig, ScoreOrder};
pub(crate) use listing::Listing;
pub(crate) use place::Place;

const PREFIX: &str = "checkpoint_";
const COMPLETE: &str = ".wingbeat-complete.json";
/// Files of a checkpoint that are looked for at a time, or if they are small, written.
const AT_ONCE: usize = 16;
/// As many bytes has a small file at most.
const SMALL: u64 = 1 << 20;
/// Copies of checkpoints of elsewhere. What begins so and nobody uses is removed, so users' own copies are named otherwise (`_COPY` in
/// `_checkpoint.py`).
const COPY: &str = "wingbeat-checkpoint-";
/// Files of a checkpoint that are not its user's.
const OWN: [&str; 2] = [COMPLETE, claim::MARK];
/// Variables with settings of S3, GCS and Azure begin with one of these. Without them, some are also known by names that
/// others use, as TOKEN.
const SETTINGS: [&str; 3] = ["aws_", "google_", "azure_"];

/// A complete checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Checkpoint {
    /// Checkpoints of a run are numbered in the order in which they were reported.
    pub number: u64,
    /// Where it is.
    pub url: String,
    /// Rank 0's metrics when it was reported.
    pub metrics: BTreeMap<String, f64>,
    /// Its files, by their path in it.
    pub files: Vec<String>,
    shape: Shape,
}

/// What says that a checkpoint is complete.
#[derive(Debug, Serialize, Deserialize)]
struct Complete {
    /// Numbers as text: JSON has no infinity.
    metrics: BTreeMap<String, String>,
    files: Vec<String>,
    #[serde(default)]
    shape: Shape,
}

/// Why the storage did not do what it was asked to.
pub(crate) type Result<T> = std::result::Result<T, String>;

/// Where a run stores its checkpoints.
#[derive(Clone)]
pub(crate) struct Storage {
    url: Url,
    store: Arc<dyn ObjectStore>,
    root: Path,
}

impl Storage {
    /// `url`: a folder, or what `object_store` knows: `file:`, `s3:`, `gs:`, `az:`, … with its settings in the
    /// environment.
    pub(crate) fn open(url: &str) -> Result<Storage> {
        let url = match Url::parse(url) {
            Ok(url) if url.scheme().len() > 1 => url,
            _ => {
                let folder = std::path::absolute(url).map_err(|error| format!("{url}: {error}"))?;
                Url::from_directory_path(&folder).map_err(|()| format!("{} is no folder", folder.display()))?
            }
        };
        if url.scheme() == "file" {
            let folder = url.to_file_path().map_err(|()| format!("{url} is no folder"))?;
            std::fs::create_dir_all(&folder).map_err(|error| format!("cannot make {}: {error}", folder.display()))?;
        }
        let settings = std::env::vars_os().filter_map(|(name, value)| {
            let name = name.into_string().ok()?.to_lowercase();
            SETTINGS.iter().any(|kind| name.starts_with(kind)).then_some((name, value.into_string().ok()?))
        });
        let (store, root) = object_store::parse_url_opts(&url, settings).map_err(|error| {
            let cloud = "for S3, GCS and Azure, build with `--features cloud`";
            let hint = if cfg!(feature = "cloud") { String::new() } else { format!(" ({cloud})") };
            format!("{url}: {error}{hint}")
        })?;
        Ok(Storage { url, store: store.into(), root })
    }

    /// By which others open the same one, whatever their working directory.
    pub(crate) fn url(&self) -> &str {
        self.url.as_str()
    }

    /// The complete checkpoints, in the order of their numbers. What cannot be understood is none.
    pub(crate) async fn checkpoints(&self) -> Result<Vec<Checkpoint>> {
        Ok(self.found().await?.0)
    }

    /// What says of checkpoints that they are complete and cannot be understood, and why.
    pub(crate) async fn damaged(&self) -> Result<Vec<String>> {
        Ok(self.found().await?.1)
    }

    async fn found(&self) -> Result<(Vec<Checkpoint>, Vec<String>)> {
        let (mut found, mut damaged) = (Vec::new(), Vec::new());
        for number in self.folders().await?.into_iter().filter_map(|folder| folder.number()) {
            let file = self.folder(number).join(COMPLETE);
            let Some(bytes) = self.read(&file).await? else { continue };
            let Complete { metrics, files, shape } = match serde_json::from_slice(&bytes) {
                Ok(complete) => complete,
                Err(error) => {
                    damaged.push(format!("{}/{COMPLETE}: {error}", self.url_of(number)));
                    continue;
                }
            };
            let listing = Listing { files, shape };
            if !listing.is_safe() {
                damaged.push(format!("{}/{COMPLETE}: it names what is not in the checkpoint", self.url_of(number)));
                continue;
            }
            let Listing { files, shape } = listing;
            let metrics = metrics.into_iter().filter_map(|(name, value)| Some((name, value.parse().ok()?))).collect();
            found.push(Checkpoint { number, url: self.url_of(number), metrics, files, shape });
        }
        Ok((found, damaged))
    }

    /// Writes what is listed of this node into a checkpoint: paths are within `from`, or it is one file itself.
    pub(crate) async fn upload(&self, number: u64, from: &FilePath, listing: &Listing) -> Result<()> {
        let size = |name: &String| {
            let source = if from.is_file() { from.to_owned() } else { from.join(name) };
            std::fs::metadata(source).map_or(0, |there| there.len())
        };
        let (small, large): (Vec<String>, Vec<String>) =
            listing.files.iter().cloned().partition(|name| size(name) <= SMALL);
        // Each small file waits for the disk or the network: many do at once. Large ones have many parts on their way.
        for (names, at_once) in [(small, AT_ONCE), (large, 1)] {
            let uploads = names.into_iter().map(|name| self.upload_file(number, from, name));
            let mut uploads = futures::stream::iter(uploads).buffer_unordered(at_once);
            while let Some(uploaded) = uploads.next().await {
                uploaded?;
            }
        }
        let Some(folder) = self.path_of(&self.folder(number)) else { return Ok(()) };
        lay_out(listing.clone(), folder.clone()).await?;
        // Of each folder once, that its files are in it.
        let within = listing.files.iter().flat_map(|name| FilePath::new(name).ancestors().skip(1));
        let folders: BTreeSet<PathBuf> = within.map(|within| folder.join(within)).collect();
        for folder in folders {
            sync_path(folder).await?;
        }
        self.sync(&self.folder(number)).await
    }

    async fn upload_file(&self, number: u64, from: &FilePath, name: String) -> Result<()> {
        let source = if from.is_file() { from.to_owned() } else { from.join(&name) };
        let failed = |error: std::io::Error| format!("{}: {error}", source.display());
        let to = self.file(number, &name)?;
        let mut file = tokio::fs::File::open(&source).await.map_err(failed)?;
        let mut writer = BufWriter::new(self.store.clone(), to.clone());
        tokio::io::copy(&mut file, &mut writer).await.map_err(failed)?;
        writer.shutdown().await.map_err(failed)?;
        match self.path_of(&to) {
            Some(path) => sync_path(path).await,
            None => Ok(()),
        }
    }

    /// Writes a file that is there whole or not at all, also after a loss of power.
    async fn put_whole(&self, file: &Path, content: Vec<u8>) -> Result<()> {
        let Some(path) = self.path_of(file) else {
            return self.store.put(file, content.into()).await.map(drop).map_err(|error| self.failed(&error));
        };
        let written = tokio::task::spawn_blocking(move || {
            let mut beside = path.clone().into_os_string();
            beside.push(".new");
            let mut new = std::fs::File::create(&beside)?;
            new.write_all(&content)?;
            new.sync_all()?;
            std::fs::rename(&beside, &path)
        });
        written
            .await
            .map_err(|error| error.to_string())?
            .map_err(|error| format!("{file} in {}: {error}", self.url))?;
        self.sync(file).await
    }

    /// Waits until a file of this machine, and that it is in its folders, would outlive a loss of power.
    async fn sync(&self, file: &Path) -> Result<()> {
        let (Ok(root), Some(mut path)) = (self.url.to_file_path(), self.path_of(file)) else { return Ok(()) };
        let synced = tokio::task::spawn_blocking(move || {
            loop {
                let synced = std::fs::File::open(&path).and_then(|file| file.sync_all());
                synced.map_err(|error| format!("{}: {error}", path.display()))?;
                if path == root || !path.pop() {
                    return Ok(());
                }
            }
        });
        synced.await.map_err(|error| error.to_string())?
    }

    /// Whether each [`Storage::append`] makes another object.
    pub(crate) fn makes_objects(&self) -> bool {
        self.url.scheme() != "file"
    }

    /// Adds to a file; where there is none to be added to, as another one beside it.
    pub(crate) async fn append(&self, name: &str, bytes: &[u8]) -> Result<()> {
        if let Ok(root) = self.url.to_file_path() {
            let file = root.join(name);
            let opened = tokio::fs::OpenOptions::new().create(true).append(true).open(&file).await;
            let failed = |error: std::io::Error| format!("{}: {error}", file.display());
            let mut opened = opened.map_err(failed)?;
            let before = opened.metadata().await.map_err(failed)?.len();
            let mut written = opened.write_all(bytes).await;
            if written.is_ok() {
                written = opened.flush().await;
            }
            if written.is_err() {
                // It is tried again, whole.
                let _ = opened.set_len(before).await;
            }
            return written.map_err(failed);
        }
        let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let part = self.root.clone().join(format!("{name}.{}", since_epoch.as_millis()));
        self.store.put(&part, bytes.to_vec().into()).await.map_err(|error| self.failed(&error))?;
        Ok(())
    }

    /// A folder of this node with a checkpoint's files: its own, if that is on this node, else a copy, which is
    /// returned, too.
    pub(crate) async fn fetch(&self, checkpoint: &Checkpoint) -> Result<(PathBuf, Option<OwnFolder>)> {
        if let Ok(root) = self.url.to_file_path() {
            let folder = root.join(name_of(checkpoint.number));
            if folder.join(COMPLETE).exists() {
                return Ok((folder, None));
            }
            return Err(format!("{} is not on this node; a folder that all nodes share is needed", folder.display()));
        }
        let copy = OwnFolder::make(&std::env::temp_dir(), COPY)
            .map_err(|error| format!("making a folder for a checkpoint: {error}"))?;
        let into = copy.folder();
        for name in &checkpoint.files {
            let target = into.join(name);
            let failed = |error: std::io::Error| format!("{}: {error}", target.display());
            if let Some(folder) = target.parent() {
                std::fs::create_dir_all(folder).map_err(failed)?;
            }
            let there = self.store.get(&self.file(checkpoint.number, name)?).await;
            let mut stream = there.map_err(|error| self.failed(&error))?.into_stream();
            let mut file = tokio::fs::File::create(&target).await.map_err(failed)?;
            while let Some(bytes) = stream.next().await {
                file.write_all(&bytes.map_err(|error| self.failed(&error))?).await.map_err(failed)?;
            }
            file.flush().await.map_err(failed)?;
        }
        let Checkpoint { files, shape, .. } = checkpoint.clone();
        lay_out(Listing { files, shape }, into.clone()).await?;
        Ok((into, Some(copy)))
    }

    /// The folders that are named as checkpoints are, by whomever.
    async fn folders(&self) -> Result<Vec<Folder>> {
        if let Ok(root) = self.url.to_file_path() {
            let found = tokio::task::spawn_blocking(move || local_folders(&root));
            return found.await.map_err(|error| error.to_string())?.map_err(|error| format!("{}: {error}", self.url));
        }
        let mut folders: BTreeMap<String, Vec<Path>> = BTreeMap::new();
        let mut list = self.store.list(Some(&self.root));
        while let Some(object) = list.next().await {
            let object = object.map_err(|error| self.failed(&error))?;
            let name =
                object.location.prefix_match(&self.root).and_then(|mut parts| Some(parts.next()?.as_ref().to_owned()));
            if let Some(name) = name.filter(|name| numbered(name).is_some()) {
                folders.entry(name).or_default().push(object.location);
            }
        }
        let mut folders: Vec<Folder> = folders.into_iter().map(|(name, files)| Folder { name, files }).collect();
        folders.sort_by_key(|folder| numbered(&folder.name));
        Ok(folders)
    }

    /// Removes a checkpoint; first of all what says that it is complete, and at the end what says whose it is. What its links lead to stays.
    async fn remove(&self, folder: &Folder) -> Result<()> {
        if let Ok(root) = self.url.to_file_path() {
            self.delete(&self.at_root(&folder.name).join(COMPLETE)).await?;
            let path = root.join(&folder.name);
            let removed = tokio::task::spawn_blocking(move || remove_folder(&path));
            return removed.await.map_err(|error| error.to_string())?;
        }
        // Its mark goes last: what is left without it would be nobody's.
        let place = |file: &Path| match file.filename() {
            Some(COMPLETE) => 0,
            Some(claim::MARK) => 2,
            _ => 1,
        };
        for turn in 0..=2 {
            let mut files = folder.files.clone();
            files.retain(|file| place(file) == turn);
            let deleting = files.into_iter().map(|file| async move { self.delete(&file).await });
            futures::stream::iter(deleting).buffer_unordered(AT_ONCE).try_collect::<()>().await?;
        }
        Ok(())
    }

    /// The content of a file, if it is there.
    async fn read(&self, file: &Path) -> Result<Option<Vec<u8>>> {
        match self.store.get(file).await {
            Ok(there) => {
                let bytes = there.bytes().await.map_err(|error| self.failed(&error))?;
                Ok(Some(bytes.to_vec()))
            }
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(self.failed(&error)),
        }
    }

    /// Writes a file that must not be there yet. False if it is.
    async fn create(&self, file: &Path, content: &[u8]) -> Result<bool> {
        if let Some(path) = self.path_of(file) {
            // Not as `object_store` does it, by a hard link, which some mounted stores do not have.
            let content = content.to_vec();
            let created = tokio::task::spawn_blocking(move || create_new(&path, &content));
            return created.await.map_err(|error| error.to_string())?;
        }
        match self.store.put_opts(file, content.to_vec().into(), PutMode::Create.into()).await {
            Ok(_) => Ok(true),
            Err(object_store::Error::AlreadyExists { .. } | object_store::Error::Precondition { .. }) => Ok(false),
            Err(error) => Err(self.failed(&error)),
        }
    }

    /// Where a file lies on this machine, if it does.
    fn path_of(&self, file: &Path) -> Option<PathBuf> {
        let root = self.url.to_file_path().ok()?;
        let within: PathBuf = file.prefix_match(&self.root)?.map(|part| part.as_ref().to_owned()).collect();
        Some(root.join(within))
    }

    async fn delete(&self, file: &Path) -> Result<()> {
        match self.store.delete(file).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(self.failed(&error)),
        }
    }

    fn folder(&self, number: u64) -> Path {
        self.root.clone().join(name_of(number))
    }

    fn file(&self, number: u64, name: &str) -> Result<Path> {
        let within = Path::parse(name).map_err(|error| error.to_string())?;
        Ok(self.folder(number).parts().chain(within.parts()).collect())
    }

    async fn check_is_there(&self, number: u64, name: String) -> Result<()> {
        let file = self.file(number, &name)?;
        self.store.head(&file).await.map(drop).map_err(|error| {
            format!(
                "{file} was stored by a rank and is not in {} as the driver sees it; do all nodes share it? ({error})",
                self.url()
            )
        })
    }

    /// Whether it is a part of a folder of this machine.
    pub(crate) fn lies_in(&self, folder: &FilePath) -> bool {
        let own = self.url.to_file_path().ok().and_then(|path| path.canonicalize().ok());
        own.zip(folder.canonicalize().ok()).is_some_and(|(own, folder)| own.starts_with(folder))
    }

    fn url_of(&self, number: u64) -> String {
        format!("{}/{}", self.url.as_str().trim_end_matches('/'), name_of(number))
    }

    fn failed(&self, error: &object_store::Error) -> String {
        format!("{}: {error}", self.url)
    }
}

/// Of a folder of this machine, in the order of their numbers. Nothing in them is followed: links may lead anywhere, and
/// back.
fn local_folders(root: &FilePath) -> std::io::Result<Vec<Folder>> {
    let mut folders = Vec::new();
    for entry in std::fs::read_dir(root)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if numbered(&name).is_none() || !entry.path().is_dir() {
            continue;
        }
        // Others may have made it, keep it to themselves, or remove it now. Its number is taken all the same.
        let files = std::fs::read_dir(entry.path()).into_iter().flatten().flatten();
        let files = files.map(|file| Path::from(file.file_name().to_string_lossy().into_owned()));
        folders.push(Folder { name, files: files.collect() });
    }
    folders.sort_by_key(|folder| numbered(&folder.name));
    Ok(folders)
}

/// Removes a folder of this machine, and at the end its mark.
fn remove_folder(path: &FilePath) -> Result<()> {
    let failed = |error: std::io::Error| format!("{}: {error}", path.display());
    let unless_gone = |done: std::io::Result<()>| match done {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(failed(error)),
        _ => Ok(()),
    };
    for entry in std::fs::read_dir(path).into_iter().flatten().flatten() {
        if entry.file_name() == claim::MARK {
            continue;
        }
        unless_gone(match entry.file_type().map_err(failed)?.is_dir() {
            true => std::fs::remove_dir_all(entry.path()),
            false => std::fs::remove_file(entry.path()),
        })?;
    }
    unless_gone(std::fs::remove_dir_all(path))
}

/// Waits until a file or folder of this machine would outlive a loss of power.
async fn sync_path(path: PathBuf) -> Result<()> {
    let synced = tokio::task::spawn_blocking(move || {
        let synced = std::fs::File::open(&path).and_then(|file| file.sync_all());
        synced.map_err(|error| format!("{}: {error}", path.display()))
    });
    synced.await.map_err(|error| error.to_string())?
}

async fn lay_out(listing: Listing, folder: PathBuf) -> Result<()> {
    let done = tokio::task::spawn_blocking(move || listing.lay_out(&folder).map_err(|error| error.to_string()));
    done.await.map_err(|error| error.to_string())?
}

fn create_new(path: &FilePath, content: &[u8]) -> Result<bool> {
    let failed = |error: std::io::Error| format!("{}: {error}", path.display());
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(failed)?;
    }
    match std::fs::OpenOptions::new().write(true).create_new(true).open(path) {
        Ok(mut file) => file.write_all(content).and_then(|()| file.sync_all()).map(|()| true).map_err(failed),
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(false),
        Err(error) => Err(failed(error)),
    }
}

fn name_of(number: u64) -> String {
    format!("{PREFIX}{number:06}")
}

fn numbered(name: &str) -> Option<u64> {
    name.strip_prefix(PREFIX)?.parse().ok()
}

/// A folder with a checkpoint's name.
struct Folder {
    name: String,
    /// All of its files; on this machine, what lies directly in it.
    files: Vec<Path>,
}

impl Folder {
    /// Its number, if that is how we write it.
    fn number(&self) -> Option<u64> {
        numbered(&self.name).filter(|number| name_of(*number) == self.name)
    }

    fn has(&self, file: &str) -> bool {
        self.files.iter().any(|there| there.filename() == Some(file))
    }
}

#[cfg(test)]
mod tests;
