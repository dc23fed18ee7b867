//! Checkpoints in a folder, or in S3, GCS and Azure.
//!
//! A checkpoint is a folder `checkpoint_000007` of the run's storage. The driver marks it as this storage's own, ranks write
//! their files there, and when all have, the driver writes `.wingbeat-complete.json`: a checkpoint without it is none, so that
//! one that was cut short is never seen. What has no mark, or another's, is never written to nor removed ([`Claim`]).

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use std::time::SystemTime;

use futures::StreamExt;
use object_store::buffered::BufWriter;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutMode};
use serde::{Deserialize, Serialize};
use tokio::io::AsyncWriteExt;
use url::Url;

use crate::own_folder::OwnFolder;
use listing::Shape;

mod claim;
mod listing;
mod place;

pub(crate) use claim::Claim;
pub(crate) use listing::Listing;
pub(crate) use place::Place;

const PREFIX: &str = "checkpoint_";
const COMPLETE: &str = ".wingbeat-complete.json";
const PROBE: &str = ".wingbeat-probe";
/// Files of a checkpoint that are looked for at a time, or if they are small, written.
const AT_ONCE: usize = 16;
/// As many bytes has a small file at most.
const SMALL: u64 = 1 << 20;
/// Copies of checkpoints of elsewhere.
const COPY: &str = "wingbeat-checkpoint-";
/// Files of a checkpoint that are not its user's.
const OWN: [&str; 2] = [COMPLETE, claim::MARK];
/// Variables with settings of S3, GCS and Azure begin with one of these. Without them, some are also known by names that
/// others use, as TOKEN.
const SETTINGS: [&str; 3] = ["aws_", "google_", "azure_"];

/// A complete checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
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

/// Which checkpoints are kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Keep {
    /// The newest of them, at least one.
    pub newest: usize,
    /// And the best one by this metric.
    pub best: Option<Best>,
}

/// What makes a checkpoint the best.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Best {
    /// The metric.
    pub metric: String,
    /// Whether more is better.
    pub more: bool,
}

impl Default for Keep {
    fn default() -> Self {
        Keep { newest: 2, best: None }
    }
}

impl Keep {
    /// The best of these; none if no metric was named, or none has it.
    pub(crate) fn best<'a>(&self, checkpoints: &'a [Checkpoint]) -> Option<&'a Checkpoint> {
        let Best { metric, more } = self.best.as_ref()?;
        let value = |checkpoint: &&Checkpoint| {
            let value = checkpoint.metrics.get(metric).copied().filter(|value| !value.is_nan())?;
            Some(if *more { value } else { -value })
        };
        let of = checkpoints.iter().filter(|checkpoint| value(checkpoint).is_some());
        of.max_by(|a, b| value(a).unwrap_or(f64::MIN).total_cmp(&value(b).unwrap_or(f64::MIN)))
    }

    /// Those that are not kept, of all, in the order of their numbers.
    fn outdated<'a>(&self, checkpoints: &'a [Checkpoint]) -> Vec<&'a Checkpoint> {
        let best = self.best(checkpoints).map(|best| best.number);
        let old = checkpoints.len().saturating_sub(self.newest.max(1));
        checkpoints[..old].iter().filter(|checkpoint| Some(checkpoint.number) != best).collect()
    }
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
        let place = |file: &&Path| match file.filename() {
            Some(COMPLETE) => 0,
            Some(claim::MARK) => 2,
            _ => 1,
        };
        let mut files: Vec<&Path> = folder.files.iter().collect();
        files.sort_by_key(place);
        for file in files {
            self.delete(file).await?;
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

    /// Removes what checks of the storage have left that were cut short, as far as it lies on this machine.
    fn remove_old_probes(&self) {
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

/// What answers the probe of this name is called.
fn answer_to(name: &str) -> String {
    format!("{name}-answered")
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
    pub(crate) async fn remove_outdated(&self, keep: &Keep) -> Result<()> {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn checkpoint(number: u64, loss: f64) -> Checkpoint {
        let metrics = BTreeMap::from([("loss".to_owned(), loss)]);
        Checkpoint { number, url: String::new(), metrics, files: Vec::new(), shape: Shape::default() }
    }

    async fn claim(storage: &Storage) -> Claim {
        Claim::new(storage, "test", &|_| (), std::future::pending()).await.unwrap().unwrap()
    }

    #[test]
    fn the_newest_and_the_best_are_kept() {
        let all = [checkpoint(1, 0.5), checkpoint(2, 0.1), checkpoint(3, f64::NAN), checkpoint(4, 0.7)];
        let numbers = |keep: Keep| keep.outdated(&all).iter().map(|old| old.number).collect::<Vec<_>>();
        assert_eq!(numbers(Keep { newest: 2, best: None }), [1, 2]);
        assert_eq!(numbers(Keep { newest: 0, best: None }), [1, 2, 3], "one is always kept");
        let best = |more| Some(Best { metric: "loss".into(), more });
        assert_eq!(numbers(Keep { newest: 1, best: best(false) }), [1, 3]);
        assert_eq!(numbers(Keep { newest: 1, best: best(true) }), [1, 2, 3]);
    }

    #[tokio::test]
    async fn what_is_not_complete_is_not_there() {
        let (dir, files) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        std::fs::create_dir(files.path().join("sub")).unwrap();
        std::fs::write(files.path().join("sub/rank 0.bin"), b"weights").unwrap();
        let storage = Storage::open(&dir.path().display().to_string()).unwrap();
        storage.probe().await.unwrap();
        let claim = claim(&storage).await;
        let listing = Listing::of(files.path()).unwrap();
        claim.begin(1).await.unwrap();
        storage.upload(1, files.path(), &listing).await.unwrap();
        assert!(storage.checkpoints().await.unwrap().is_empty());
        assert_eq!(claim.next().await.unwrap(), 1, "what was cut short is removed");
        assert!(storage.folders().await.unwrap().is_empty());

        for number in 1..=3 {
            claim.begin(number).await.unwrap();
            storage.upload(number, files.path(), &listing).await.unwrap();
            let metrics = BTreeMap::from([("loss".to_owned(), f64::INFINITY)]);
            claim.complete(number, &metrics, listing.clone()).await.unwrap();
            claim.remove_outdated(&Keep::default()).await.unwrap();
        }
        let kept = storage.checkpoints().await.unwrap();
        assert_eq!(kept.iter().map(|kept| kept.number).collect::<Vec<_>>(), [2, 3]);
        assert_eq!(kept[1].metrics["loss"], f64::INFINITY);
        let (at, _) = storage.fetch(&kept[1]).await.unwrap();
        assert_eq!(std::fs::read(at.join("sub/rank 0.bin")).unwrap(), b"weights");
        assert_eq!(claim.next().await.unwrap(), 4);
        let error = claim.begin(3).await.unwrap_err();
        assert!(error.contains("checkpoint_000003 is there already"), "{error}");
        claim.begin(4).await.unwrap();
        let error = claim.complete(4, &BTreeMap::new(), listing).await.unwrap_err();
        assert!(error.contains("do all nodes share it"), "{error}");
    }

    #[tokio::test]
    async fn a_storage_that_is_another_on_each_node_is_found_out() {
        let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let [ours, theirs] = [&here, &there].map(|dir| Storage::open(&dir.path().display().to_string()).unwrap());
        ours.ask("x").await.unwrap();
        let error = theirs.answer_probe("x").await.unwrap_err();
        assert!(error.contains("what that wrote is not in it"), "{error}");
        // What the driver wrote is there, and its answer goes elsewhere.
        theirs.ask("x").await.unwrap();
        theirs.answer_probe("x").await.unwrap();
        let error = ours.hear("x").await.unwrap_err();
        assert!(error.contains("which cannot read it"), "{error}");
        ours.ask("y").await.unwrap();
        ours.answer_probe("y").await.unwrap();
        ours.hear("y").await.unwrap();
        assert_eq!(std::fs::read_dir(here.path()).unwrap().count(), 0, "probes are removed");
    }

    #[tokio::test]
    async fn what_links_lead_to_stays() {
        let (dir, others) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        std::fs::write(others.path().join("data"), b"precious").unwrap();
        let storage = Storage::open(&dir.path().display().to_string()).unwrap();
        let claim = claim(&storage).await;
        let folder = |number: u64| dir.path().join(name_of(number));
        for number in 1..=4 {
            claim.begin(number).await.unwrap();
            std::os::unix::fs::symlink(others.path(), folder(number).join("linked")).unwrap();
            claim.complete(number, &BTreeMap::new(), Listing::default()).await.unwrap();
            claim.remove_outdated(&Keep::default()).await.unwrap();
            if number == 2 {
                // It is to be kept, elsewhere.
                let elsewhere = others.path().join("best");
                std::fs::rename(folder(2), &elsewhere).unwrap();
                std::os::unix::fs::symlink(&elsewhere, folder(2)).unwrap();
            }
        }
        assert!(!folder(1).exists() && folder(2).join(COMPLETE).exists() && folder(4).exists());
        assert_eq!(std::fs::read(others.path().join("data")).unwrap(), b"precious");
    }

    #[tokio::test]
    async fn a_checkpoint_that_cannot_be_understood_is_passed_over_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        let storage = Storage::open(&dir.path().display().to_string()).unwrap();
        let claim = claim(&storage).await;
        for number in 1..=2 {
            claim.begin(number).await.unwrap();
            claim.complete(number, &BTreeMap::new(), Listing::default()).await.unwrap();
            claim.remove_outdated(&Keep::default()).await.unwrap();
        }
        let damaged = dir.path().join(name_of(2)).join(COMPLETE);
        std::fs::write(&damaged, "").unwrap();
        let numbers: Vec<u64> = storage.checkpoints().await.unwrap().iter().map(|there| there.number).collect();
        assert_eq!(numbers, [1]);
        let said = storage.damaged().await.unwrap();
        assert!(said.len() == 1 && said[0].contains("checkpoint_000002"), "{said:?}");
        assert_eq!(claim.next().await.unwrap(), 3);
        assert!(damaged.exists());
    }

    #[tokio::test]
    async fn what_others_have_put_there_stays() {
        let dir = tempfile::tempdir().unwrap();
        let theirs =
            ["checkpoint_0", "checkpoint_7", "checkpoint_000000", "checkpoint_000001", "checkpoint_500", "other"];
        for folder in theirs {
            std::fs::create_dir_all(dir.path().join(folder).join("empty")).unwrap();
            std::fs::write(dir.path().join(folder).join("complete.json"), "{}").unwrap();
        }
        let storage = Storage::open(&dir.path().display().to_string()).unwrap();
        let claim = claim(&storage).await;
        let first = claim.next().await.unwrap();
        assert_eq!(first, 501);
        for number in first..first + 3 {
            claim.begin(number).await.unwrap();
            let file = tempfile::NamedTempFile::new().unwrap();
            let listing = Listing::of(file.path()).unwrap();
            storage.upload(number, file.path(), &listing).await.unwrap();
            claim.complete(number, &BTreeMap::new(), listing).await.unwrap();
            claim.remove_outdated(&Keep { newest: 1, best: None }).await.unwrap();
        }
        // A copy of a checkpoint from another storage: it can be read, and is nobody's to remove.
        let copied = dir.path().join("checkpoint_000502");
        std::fs::rename(dir.path().join("checkpoint_000503"), &copied).unwrap();
        std::fs::write(copied.join(".wingbeat-made-in"), "another").unwrap();
        assert_eq!(storage.checkpoints().await.unwrap().len(), 1);
        claim.begin(504).await.unwrap();
        claim.complete(504, &BTreeMap::new(), Listing::default()).await.unwrap();
        claim.remove_outdated(&Keep { newest: 1, best: None }).await.unwrap();
        let mut left: Vec<String> = std::fs::read_dir(dir.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| !name.starts_with('.'))
            .collect();
        left.sort();
        let mut expected = [&theirs[..], &["checkpoint_000502", "checkpoint_000504"]].concat();
        expected.sort_unstable();
        assert_eq!(left, expected);
        assert!(theirs.iter().all(|folder| dir.path().join(folder).join("empty").exists()));
    }

    #[tokio::test]
    async fn a_storage_that_cannot_be_written_is_named() {
        assert!(Storage::open("/proc/none/such").err().unwrap().contains("cannot make /proc/none/such"));
        let error = Storage::open("nothing://there").err().unwrap();
        assert!(error.contains("nothing://there"), "{error}");
    }
}
