//! One run at a time uses a storage, and removes only what runs on this storage have made.
//!
//! The storage has an id, in a file at its root, and each checkpoint that a run makes carries it in a file that is written
//! before any other. What carries another one, or none, is not ours: models of other programs may lie there under the same
//! names. Who uses the storage now says so in another file, and says it again every ten seconds. A run that finds such a file
//! waits until it has not changed for a minute, or its process is certainly gone, and otherwise refuses.

use object_store::ObjectStoreExt;
use object_store::path::Path;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::{Result, Storage};
use crate::identity::{Identity, Life};
use crate::limits::STALE;

const ID: &str = ".wingbeat-storage";
const USER: &str = ".wingbeat-in-use";
/// In a checkpoint: the id of the storage in which it was made.
pub(super) const MARK: &str = ".wingbeat-made-in";
/// How often a file that is there may not be read: it is being written, or removed by another.
const VANISHED: u32 = 10;

/// Who uses a storage.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct User {
    run: String,
    host: String,
    pid: u32,
    process: Identity,
    /// How often it has said so.
    said: u64,
}

impl User {
    fn this(run: &str) -> User {
        let pid = std::process::id();
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        User { run: run.to_owned(), host, pid, process: Identity::of(pid).unwrap_or_default(), said: 0 }
    }

    fn is_same(&self, other: &User) -> bool {
        (&self.run, self.pid, &self.process) == (&other.run, other.pid, &other.process)
    }

    /// Whether it can be told that its process has ended: only on its own machine.
    fn is_gone(&self) -> bool {
        self.process.life() == Life::Gone
    }
}

/// A storage that this process uses. Others may use it again when this is dropped.
pub(crate) struct Claim {
    storage: Storage,
    id: String,
    user: User,
    /// None once it was released.
    saying: Option<Saying>,
}

/// What says again and again who uses the storage. It is never ended while it writes: what it wrote would come after
/// whatever follows.
struct Saying {
    end: watch::Sender<()>,
    task: JoinHandle<()>,
}

impl Saying {
    /// Others may use the storage once this has come to an end.
    async fn leave(self, storage: &Storage, user: &User) {
        drop(self.end);
        let _ = self.task.await;
        if storage.is_used_by(user).await {
            let _ = storage.delete(&storage.at_root(USER)).await;
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let (storage, user) = (self.storage.clone(), self.user.clone());
        // Not waited for: a process that ends before this is done is certainly gone.
        if let Some(saying) = self.saying.take()
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            runtime.spawn(async move { saying.leave(&storage, &user).await });
        }
    }
}

impl Claim {
    /// Waits while another run may still use the storage. None if it was `stopped` meanwhile.
    ///
    /// # Errors
    /// It does, or the storage cannot be written.
    pub(crate) async fn new(
        storage: &Storage,
        run: &str,
        notice: &(dyn Fn(&str) + Send + Sync),
        stopped: impl Future<Output = ()>,
    ) -> Result<Option<Claim>> {
        let user = User::this(run);
        let mut seen: Option<(Vec<u8>, Instant)> = None;
        let mut vanished = 0;
        let mut stopped = std::pin::pin!(stopped);
        while !storage.create(&storage.at_root(USER), &encoded(&user)).await? {
            tokio::select! {
                () = tokio::time::sleep(*STALE / 60) => {}
                () = &mut stopped => return Ok(None),
            }
            let Some(now) = storage.read(&storage.at_root(USER)).await? else {
                vanished += 1;
                if vanished > VANISHED {
                    let url = storage.url();
                    return Err(format!(
                        "{USER} in {url} is there and cannot be read; remove it if no run uses the storage"
                    ));
                }
                continue;
            };
            // One that was killed while it wrote the file has left nothing to be read.
            let other: Option<User> = serde_json::from_slice(&now).ok();
            let in_use = || {
                let by = other.as_ref().map(|User { run, host, pid, .. }| format!("{run} of process {pid} on {host}"));
                let (url, by) = (storage.url(), by.unwrap_or_else(|| "of another process".into()));
                format!("{url} is used by the run {by}; wait for its end, or use another")
            };
            match &seen {
                _ if other.as_ref().is_some_and(User::is_gone) => storage.remove_user(&now).await?,
                None => {
                    notice(&format!("{}. If that is gone, this run goes on within {} s", in_use(), STALE.as_secs()));
                    seen = Some((now, Instant::now()));
                }
                Some((before, _)) if *before != now => return Err(in_use()),
                Some((_, since)) if since.elapsed() > *STALE => storage.remove_user(&now).await?,
                Some(_) => {}
            }
        }
        let (end, ended) = watch::channel(());
        let task = tokio::spawn(say_again(storage.clone(), user.clone(), ended));
        // From here on it is given back, whatever happens.
        let mut claim = Claim { storage: storage.clone(), id: String::new(), user, saying: Some(Saying { end, task }) };
        claim.id = storage.id().await?;
        Ok(Some(claim))
    }

    pub(crate) fn storage(&self) -> &Storage {
        &self.storage
    }

    /// Others may use it from now on.
    pub(crate) async fn release(mut self) {
        if let Some(saying) = self.saying.take() {
            saying.leave(&self.storage, &self.user).await;
        }
    }

    /// Whether a checkpoint was made by a run on this storage.
    pub(super) async fn has_made(&self, folder: &str) -> Result<bool> {
        // Whoever put a link in its place has taken the checkpoint elsewhere.
        let path = self.storage.path_of(&self.storage.at_root(folder));
        if path.is_some_and(|path| path.is_symlink()) {
            return Ok(false);
        }
        let mark = self.storage.at_root(folder).join(MARK);
        // What cannot be read is not ours, or not for now.
        Ok(self.storage.read(&mark).await.ok().flatten().is_some_and(|id| id == self.id.as_bytes()))
    }

    /// Marks a checkpoint that is about to be written. False if there is one already.
    pub(super) async fn mark(&self, folder: &str) -> Result<bool> {
        self.storage.create(&self.storage.at_root(folder).join(MARK), self.id.as_bytes()).await
    }

    /// Fails if another run has taken the storage, because this process stood still for long. What merely is not there any
    /// more is written again.
    pub(super) async fn check(&self) -> Result<()> {
        let file = self.storage.at_root(USER);
        for _ in 0..VANISHED {
            match self.storage.user().await? {
                Some(user) if user.is_same(&self.user) => return Ok(()),
                Some(User { run, host, .. }) => {
                    let (url, seconds) = (self.storage.url(), STALE.as_secs());
                    return Err(format!(
                        "{url} was taken over by the run {run} on {host}: this run had not been heard of for {seconds} s"
                    ));
                }
                // Somebody has removed it, or it is being written.
                None if self.storage.create(&file, &encoded(&self.user)).await? => return Ok(()),
                None => tokio::time::sleep(*STALE / 60).await,
            }
        }
        Err(format!("{USER} in {} cannot be understood; who has written it?", self.storage.url()))
    }
}

fn encoded(user: &User) -> Vec<u8> {
    serde_json::to_vec(user).unwrap_or_default()
}

async fn say_again(storage: Storage, mut user: User, mut ended: watch::Receiver<()>) {
    let file = storage.at_root(USER);
    loop {
        tokio::select! {
            () = tokio::time::sleep(*STALE / 6) => {}
            _ = ended.changed() => return,
        }
        // Not what another run says, which has taken over.
        if storage.is_used_by(&user).await {
            user.said += 1;
            // If it fails for long, another run may take over, and this one hears of that.
            let _ = storage.store.put(&file, encoded(&user).into()).await;
        }
    }
}

impl Storage {
    /// Who uses it. What cannot be read is being written.
    async fn user(&self) -> Result<Option<User>> {
        let bytes = self.read(&self.at_root(USER)).await?;
        Ok(bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok()))
    }

    async fn is_used_by(&self, user: &User) -> bool {
        matches!(self.user().await, Ok(Some(now)) if now.is_same(user))
    }

    /// What says so is no longer true, if it still says this.
    async fn remove_user(&self, content: &[u8]) -> Result<()> {
        if self.read(&self.at_root(USER)).await?.as_deref() == Some(content) {
            self.delete(&self.at_root(USER)).await?;
        }
        Ok(())
    }

    /// Its id, which it gets from its first user; nobody else uses it meanwhile.
    async fn id(&self) -> Result<String> {
        let file = self.at_root(ID);
        if let Some(id) = self.read(&file).await?.filter(|id| !id.is_empty()) {
            return String::from_utf8(id).map_err(|error| format!("{file} in {}: {error}", self.url()));
        }
        let new = format!("{:032x}", rand::random::<u128>());
        self.store.put(&file, new.clone().into()).await.map_err(|error| self.failed(&error))?;
        Ok(new)
    }

    pub(super) fn at_root(&self, name: &str) -> Path {
        self.root.clone().join(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn claim(storage: &Storage, run: &str) -> Result<Claim> {
        Ok(Claim::new(storage, run, &|_| (), std::future::pending()).await?.unwrap())
    }

    #[tokio::test]
    async fn one_run_at_a_time_uses_a_storage() {
        let dir = tempfile::tempdir().unwrap();
        let storage = Storage::open(&dir.path().display().to_string()).unwrap();
        let first = claim(&storage, "first").await.unwrap();
        let id = first.id.clone();
        // It says again that it is there while the second looks.
        let file = storage.at_root(USER);
        let again = User { said: 1, ..first.user.clone() };
        let looked = tokio::sync::Notify::new();
        let noticed = |notice: &str| {
            assert!(notice.contains("goes on within"), "{notice}");
            looked.notify_one();
        };
        let (refused, ()) = tokio::join!(Claim::new(&storage, "second", &noticed, std::future::pending()), async {
            looked.notified().await;
            storage.store.put(&file, encoded(&again).into()).await.unwrap();
        });
        let error = refused.err().unwrap();
        assert!(error.contains("is used by the run first of process"), "{error}");
        drop(first);
        while dir.path().join(USER).exists() {
            tokio::task::yield_now().await;
        }
        assert_eq!(claim(&storage, "third").await.unwrap().id, id);
    }

    #[tokio::test]
    async fn a_process_that_was_killed_uses_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let storage = Storage::open(&dir.path().display().to_string()).unwrap();
        let mut dead = std::process::Command::new("true").spawn().unwrap();
        let user = User { pid: dead.id(), process: Identity::of(dead.id()).unwrap(), ..User::this("dead") };
        dead.wait().unwrap();
        std::fs::write(dir.path().join(USER), encoded(&user)).unwrap();
        let claimed = claim(&storage, "next").await.unwrap();
        claimed.check().await.unwrap();
        assert!(!claimed.user.is_gone());
        std::fs::write(dir.path().join(USER), encoded(&user)).unwrap();
        let error = claimed.check().await.unwrap_err();
        assert!(error.contains("was taken over by the run dead"), "{error}");
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_is_not_heard_of_for_long_is_taken_over() {
        let dir = tempfile::tempdir().unwrap();
        let storage = Storage::open(&dir.path().display().to_string()).unwrap();
        let elsewhere = User { host: "elsewhere".into(), process: Identity::elsewhere(), ..User::this("lost") };
        // The second was killed while it wrote.
        for content in [encoded(&elsewhere), Vec::new()] {
            std::fs::write(dir.path().join(USER), content).unwrap();
            let notices = std::sync::Mutex::new(Vec::new());
            let notice = |notice: &str| notices.lock().unwrap().push(notice.to_owned());
            let claimed = Claim::new(&storage, "next", &notice, std::future::pending()).await;
            let claimed = claimed.unwrap().unwrap();
            claimed.check().await.unwrap();
            claimed.release().await;
            assert_eq!(notices.lock().unwrap().len(), 1);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_run_that_is_told_to_stop_waits_for_no_storage() {
        let dir = tempfile::tempdir().unwrap();
        let storage = Storage::open(&dir.path().display().to_string()).unwrap();
        let elsewhere = User { host: "elsewhere".into(), process: Identity::elsewhere(), ..User::this("lost") };
        std::fs::write(dir.path().join(USER), encoded(&elsewhere)).unwrap();
        let stop = tokio::time::sleep(*STALE / 10);
        assert!(Claim::new(&storage, "next", &|_| (), stop).await.unwrap().is_none());
        assert_eq!(std::fs::read(dir.path().join(USER)).unwrap(), encoded(&elsewhere), "it was not touched");
    }

    #[tokio::test(start_paused = true)]
    async fn what_can_never_be_read_is_an_error_and_no_wait() {
        let dir = tempfile::tempdir().unwrap();
        let storage = Storage::open(&dir.path().display().to_string()).unwrap();
        std::os::unix::fs::symlink("nothing", dir.path().join(USER)).unwrap();
        let error = claim(&storage, "next").await.err().unwrap();
        assert!(error.contains("cannot be read"), "{error}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_file_that_somebody_has_removed_is_written_again() {
        let dir = tempfile::tempdir().unwrap();
        let storage = Storage::open(&dir.path().display().to_string()).unwrap();
        let claimed = claim(&storage, "mine").await.unwrap();
        std::fs::remove_file(dir.path().join(USER)).unwrap();
        claimed.check().await.unwrap();
        assert!(storage.is_used_by(&claimed.user).await);
        std::fs::write(dir.path().join(USER), "no user").unwrap();
        let error = claimed.check().await.unwrap_err();
        assert!(error.contains("cannot be understood"), "{error}");
    }

    #[tokio::test]
    async fn nothing_says_that_a_storage_is_used_once_it_was_released() {
        let dir = tempfile::tempdir().unwrap();
        let storage = Storage::open(&dir.path().display().to_string()).unwrap();
        for _ in 0..50 {
            claim(&storage, "mine").await.unwrap().release().await;
            assert!(!dir.path().join(USER).exists());
        }
    }
}
