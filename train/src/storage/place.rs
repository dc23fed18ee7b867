//! The storage of a run: the one that was named, or else a folder of the user's own, made when the first checkpoint is
//! reported.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

use tokio::sync::OnceCell;

use super::{Claim, Result, Storage};

/// Told where that folder is.
type Notice = Arc<dyn Fn(&str) + Send + Sync>;

/// As all of a run's attempts share it.
#[derive(Clone)]
pub(crate) struct Place {
    claim: Arc<OnceCell<Arc<Claim>>>,
    run: String,
    notice: Notice,
}

impl Place {
    /// The storage that was named, if one was.
    pub(crate) fn new(claim: Option<Claim>, run: &str, notice: Notice) -> Place {
        let claim = claim.map(|claim| OnceCell::new_with(Some(Arc::new(claim)))).unwrap_or_default();
        Place { claim: Arc::new(claim), run: run.to_owned(), notice }
    }

    /// The storage, if there is one by now.
    pub(crate) fn claim(&self) -> Option<&Arc<Claim>> {
        self.claim.get()
    }

    /// As it is named in a notice.
    pub(crate) fn name(&self) -> String {
        self.claim().map_or_else(|| "the storage".to_owned(), |claim| format!("the storage {}", claim.storage().url()))
    }

    /// The storage, made if there is none.
    ///
    /// # Errors
    /// It cannot be made.
    pub(super) async fn made(&self) -> Result<Arc<Claim>> {
        let made = self.claim.get_or_try_init(|| async {
            let none = "a checkpoint was reported, and the run has nowhere to store it; name a storage";
            let folder = own_folder().ok_or(none)?;
            let storage = Storage::open(&folder.display().to_string()).map_err(|why| format!("{none} ({why})"))?;
            let claim = Claim::new(&storage, &self.run, &*self.notice, std::future::pending()).await?.ok_or(none)?;
            let url = storage.url();
            (self.notice)(&format!(
                "no storage was named: checkpoints are in {url}, and a run with that storage goes on from them"
            ));
            Ok::<_, String>(Arc::new(claim))
        });
        made.await.cloned()
    }

    /// Others may use it.
    pub(crate) async fn release(self) {
        let claim = Arc::into_inner(self.claim).and_then(OnceCell::into_inner);
        if let Some(claim) = claim.and_then(Arc::into_inner) {
            claim.release().await;
        }
    }
}

/// One that no other run has: `$XDG_DATA_HOME/wingbeat/runs/TIME-NUMBER`, else below `~/.local/share`.
fn own_folder() -> Option<PathBuf> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let data = absolute("XDG_DATA_HOME").or_else(|| Some(absolute("HOME")?.join(".local/share")))?;
    let now = humantime::format_rfc3339_seconds(SystemTime::now()).to_string().replace(':', "-");
    Some(data.join(format!("wingbeat/runs/{now}-{:04x}", rand::random::<u16>())))
}
