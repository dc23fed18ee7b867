//! A communicator that cannot hang without an error.
//!
//! It never blocks: every call is asked again whether it is done, until a deadline. A thread looks after it while its
//! operations run on the device, and aborts it when NCCL has failed or a member is gone; what waits on the stream goes on
//! then, and the group is broken. It is never dropped in a way that panics.

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use cudarc::nccl::sys::{ncclComm_t, ncclUniqueId};
use parking_lot::Mutex;
use wingbeat_collective::{CollectiveError, Peers};

use crate::error::{NcclError, Result};
use crate::library::{Functions, Library};

const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 7;

/// How often the thread looks whether all is well.
const LOOK: Duration = Duration::from_millis(100);
/// How long operations may go on once a member is gone: who has done its part may leave.
const STALL: Duration = Duration::from_secs(1);
/// The longest pause between two questions whether a call is done.
const PAUSE: Duration = Duration::from_millis(1);
/// How long leaving may take.
const LEAVE_LIMIT: Duration = Duration::from_secs(5);

/// Whether a call has failed, and is not just going on.
pub(crate) fn is_failure(code: c_int) -> bool {
    !matches!(code, SUCCESS | IN_PROGRESS)
}

/// Whether all that was started on the device has ended.
pub(crate) type IsIdle = Box<dyn Fn() -> Result<bool> + Send>;

pub(crate) struct Communicator {
    shared: Arc<Shared>,
    limit: Duration,
    watchdog: Option<(SyncSender<()>, JoinHandle<()>)>,
}

struct Shared {
    library: &'static Library,
    rank: u32,
    peers: Peers,
    is_idle: Mutex<IsIdle>,
    state: Mutex<State>,
}

enum State {
    Live(Handle),
    Broken(NcclError),
}

/// NCCL's own handle.
#[derive(Clone, Copy)]
struct Handle(ncclComm_t);

// SAFETY: NCCL's handles may be used from any thread, by one at a time; the state's lock sees to that.
unsafe impl Send for Handle {}

impl Communicator {
    /// A name for a group that all its members are told.
    pub(crate) fn name(library: &Library) -> Result<ncclUniqueId> {
        let mut id = ncclUniqueId { internal: [0; 128] };
        // SAFETY: written to where one may be.
        match unsafe { (library.functions.ncclGetUniqueId)(&raw mut id) } {
            SUCCESS => Ok(id),
            code => Err(NcclError::Failed {
                what: "naming a group".to_owned(),
                why: library.explained(code, std::ptr::null_mut()),
            }),
        }
    }

    /// Meets the other members of the group with this name.
    pub(crate) fn join(
        library: &'static Library,
        id: ncclUniqueId,
        (rank, size): (u32, u32),
        peers: Peers,
        limit: Duration,
        is_idle: IsIdle,
    ) -> Result<Communicator> {
        const WHAT: &str = "joining";
        let mut comm: ncclComm_t = std::ptr::null_mut();
        let mut config = library.config();
        // SAFETY: both are written to where they may be, and the config is a whole one.
        let code = unsafe {
            (library.functions.ncclCommInitRankConfig)(&raw mut comm, size as c_int, id, rank as c_int, &raw mut config)
        };
        if comm.is_null() {
            return Err(NcclError::Failed { what: WHAT.to_owned(), why: library.explained(code, comm) });
        }
        let state = Mutex::new(State::Live(Handle(comm)));
        let shared = Arc::new(Shared { library, rank, peers, is_idle: Mutex::new(is_idle), state });
        shared.settle(WHAT, code, limit)?;
        let (stop, stopped) = sync_channel(0);
        let looked_after = shared.clone();
        let watchdog = std::thread::Builder::new()
            .name("nccl-watchdog".into())
            .spawn(move || {
                let mut gone_since = None;
                while stopped.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
                    looked_after.look(&mut gone_since);
                }
            })
            .map_err(|error| shared.abort(NcclError::Failed { what: WHAT.to_owned(), why: error.to_string() }))?;
        Ok(Communicator { shared, limit, watchdog: Some((stop, watchdog)) })
    }

    /// Calls NCCL with the communicator, and waits until it has taken the operation up; the device runs it later.
    ///
    /// # Safety
    /// What is called gets valid pointers, which stay valid until the device has run it.
    pub(crate) unsafe fn call(
        &mut self,
        what: &'static str,
        call: impl FnOnce(&Functions, ncclComm_t) -> c_int,
    ) -> Result<()> {
        let code = match &*self.shared.state.lock() {
            State::Live(Handle(comm)) => call(&self.shared.library.functions, *comm),
            State::Broken(why) => return Err(why.clone()),
        };
        self.shared.settle(what, code, self.limit)
    }

    /// Waits until the device has run what was called.
    pub(crate) fn wait(&mut self) -> Result<()> {
        let mut pause = Duration::from_micros(5);
        loop {
            let is_idle = (self.shared.is_idle.lock())()?;
            // What has ended may have ended because it was aborted elsewhere.
            match self.shared.asked()? {
                SUCCESS if is_idle => return Ok(()),
                SUCCESS | IN_PROGRESS => {}
                code => return Err(self.shared.abort(self.shared.failed("an operation", code))),
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(PAUSE);
        }
    }
}

impl Shared {
    /// Waits until a call is done that has answered with `code`; aborts everything if that is not soon.
    fn settle(&self, what: &'static str, mut code: c_int, limit: Duration) -> Result<()> {
        let begun = Instant::now();
        let (mut pause, mut looked) = (Duration::from_micros(5), begun);
        while code == IN_PROGRESS {
            if looked.elapsed() > LOOK {
                looked = Instant::now();
                if let Some(rank) = self.peers.lost() {
                    return Err(self.abort(CollectiveError::PeerLost { rank }.into()));
                }
                if begun.elapsed() > limit {
                    let why = NcclError::TooLong { what: what.to_owned(), rank: self.rank, seconds: limit.as_secs() };
                    return Err(self.abort(why));
                }
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(PAUSE);
            code = self.asked()?;
        }
        match code {
            SUCCESS => Ok(()),
            code => Err(self.abort(self.failed(what, code))),
        }
    }

    /// How NCCL says that it is.
    fn asked(&self) -> Result<c_int> {
        match &*self.state.lock() {
            State::Live(Handle(comm)) => {
                let mut code = SUCCESS;
                // SAFETY: the communicator lives, and a number is written to where one may be.
                let asked = unsafe { (self.library.functions.ncclCommGetAsyncError)(*comm, &raw mut code) };
                Ok(if asked == SUCCESS { code } else { asked })
            }
            State::Broken(why) => Err(why.clone()),
        }
    }

    fn failed(&self, what: &'static str, code: c_int) -> NcclError {
        let why = match &*self.state.lock() {
            State::Live(Handle(comm)) => self.library.explained(code, *comm),
            State::Broken(why) => why.to_string(),
        };
        NcclError::Failed { what: what.to_owned(), why }
    }

    /// Ends the communicator, and all that its operations still do on the device. The error, or the one that was before.
    fn abort(&self, why: NcclError) -> NcclError {
        let mut state = self.state.lock();
        let handle = match &*state {
            State::Broken(first) => return first.clone(),
            State::Live(handle) => *handle,
        };
        *state = State::Broken(why.clone());
        drop(state);
        let library = self.library;
        // It waits for NCCL's own threads, and nobody waits for it.
        let aborting = std::thread::Builder::new().name("nccl-abort".into()).spawn(move || {
            let Handle(comm) = { handle };
            // SAFETY: nobody else has the handle any more.
            unsafe { (library.functions.ncclCommAbort)(comm) }
        });
        drop(aborting);
        why
    }

    /// Looks after what runs on the device.
    fn look(&self, gone_since: &mut Option<Instant>) {
        match self.asked() {
            Err(_) => return,
            Ok(SUCCESS | IN_PROGRESS) => {}
            Ok(code) => {
                self.abort(self.failed("an operation", code));
                return;
            }
        }
        let is_idle = (self.is_idle.lock())();
        match (self.peers.lost(), is_idle) {
            (_, Err(error)) => {
                self.abort(error);
            }
            (None, _) | (_, Ok(true)) => *gone_since = None,
            (Some(rank), Ok(false)) => {
                if gone_since.get_or_insert_with(Instant::now).elapsed() > STALL {
                    self.abort(CollectiveError::PeerLost { rank }.into());
                }
            }
        }
    }

    /// Leaves the group in peace.
    fn leave(&self) {
        let State::Live(Handle(comm)) = *self.state.lock() else { return };
        // SAFETY: the communicator lives.
        let code = unsafe { (self.library.functions.ncclCommFinalize)(comm) };
        if self.settle("leaving", code, LEAVE_LIMIT).is_err() {
            return;
        }
        let gone = NcclError::Failed { what: "an operation".into(), why: "the group has been left".into() };
        if let State::Live(Handle(comm)) = std::mem::replace(&mut *self.state.lock(), State::Broken(gone)) {
            // SAFETY: it lives, nothing runs in it, and nobody has the handle any more.
            unsafe { (self.library.functions.ncclCommDestroy)(comm) };
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        // The thread still looks after what runs.
        let _ = self.wait();
        if let Some((stop, watchdog)) = self.watchdog.take() {
            drop(stop);
            let _ = watchdog.join();
        }
        self.shared.leave();
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::c_void;
    use std::path::PathBuf;

    use wingbeat_collective::Group;

    use super::*;
    use crate::support::pair;

    const FLOAT: c_int = 7;
    const SUM: c_int = 0;
    const LIMIT: Duration = Duration::from_secs(60);

    type Told = unsafe extern "C" fn(ncclUniqueId) -> c_int;

    /// A member, and the stream that its operations run on.
    struct Joined {
        communicator: Communicator,
        stream: *mut c_void,
    }

    /// The pretended NCCL, and what only it can tell.
    struct Pretended {
        nccl: &'static Library,
        library: libloading::Library,
    }

    impl Pretended {
        fn open() -> Pretended {
            // Cargo builds it for this test, beside it.
            let path: PathBuf =
                std::env::current_exe().unwrap().parent().unwrap().join("libwingbeat_pretended_nccl.so");
            // SAFETY: it is made for this.
            let library = unsafe { libloading::Library::new(&path) }.unwrap();
            Pretended { nccl: Box::leak(Box::new(Library::open(&path).unwrap())), library }
        }

        fn told(&self, name: &str, id: ncclUniqueId) -> c_int {
            // SAFETY: they are of this type.
            unsafe { self.library.get::<Told>(name.as_bytes()).unwrap()(id) }
        }

        fn fail(&self, id: ncclUniqueId, code: c_int) {
            type Fail = unsafe extern "C" fn(ncclUniqueId, c_int);
            // SAFETY: it is of this type.
            unsafe { self.library.get::<Fail>(b"pretendedFail").unwrap()(id, code) }
        }

        fn join(&'static self, id: ncclUniqueId, group: &Group, limit: Duration) -> Result<Joined> {
            type Create = unsafe extern "C" fn(*mut *mut c_void, u32) -> c_int;
            type Idle = unsafe extern "C" fn(*mut c_void) -> c_int;
            let mut stream = std::ptr::null_mut();
            // SAFETY: it is of this type.
            unsafe { self.library.get::<Create>(b"cuStreamCreate").unwrap()(&raw mut stream, 0) };
            let at = stream as usize;
            // SAFETY: it is of this type.
            let is_idle =
                move || Ok(unsafe { self.library.get::<Idle>(b"pretendedIdle").unwrap()(at as *mut c_void) } == 1);
            let place = (group.rank(), group.size());
            let peers = group.peers().unwrap();
            let communicator = Communicator::join(self.nccl, id, place, peers, limit, Box::new(is_idle))?;
            Ok(Joined { communicator, stream })
        }

        /// Waits until so many have aborted.
        fn aborted(&self, id: ncclUniqueId, count: c_int) {
            while self.told("pretendedAborted", id) < count {
                std::thread::yield_now();
            }
        }
    }

    fn sum(joined: &mut Joined, data: &mut [f32]) -> Result<()> {
        let (at, count, stream) = (data.as_mut_ptr(), data.len(), joined.stream);
        // SAFETY: the data stays where it is until it is waited for, or the group is broken.
        unsafe {
            joined.communicator.call("all_reduce", |nccl, comm| {
                (nccl.ncclAllReduce)(at.cast(), at.cast(), count, FLOAT, SUM, comm, stream)
            })
        }
    }

    fn pretended() -> &'static Pretended {
        Box::leak(Box::new(Pretended::open()))
    }

    #[test]
    fn members_meet_sum_and_leave() {
        let pretended = pretended();
        let id = Communicator::name(pretended.nccl).unwrap();
        pair(|group| {
            let mut joined = pretended.join(id, &group, LIMIT).unwrap();
            let mut data = [group.rank() as f32, 10.0];
            for _ in 0..3 {
                sum(&mut joined, &mut data).unwrap();
                joined.communicator.wait().unwrap();
            }
            // What each has becomes the sum of both, three times.
            assert_eq!(data, [4.0, 80.0]);
        });
        assert_eq!((pretended.told("pretendedDestroyed", id), pretended.told("pretendedAborted", id)), (2, 0));
        assert_eq!(pretended.nccl.version(), "2.27.5");
    }

    #[test]
    fn who_waits_in_vain_for_another_to_join_aborts_at_its_deadline() {
        let pretended = pretended();
        let id = Communicator::name(pretended.nccl).unwrap();
        let [error, _] = pair(|mut group| {
            let error = (group.rank() == 0).then(|| pretended.join(id, &group, Duration::from_millis(300)).err());
            group.barrier().unwrap();
            error.flatten()
        });
        assert_eq!(error, Some(NcclError::TooLong { what: "joining".into(), rank: 0, seconds: 0 }));
        pretended.aborted(id, 1);
    }

    #[test]
    fn a_member_that_is_gone_ends_what_the_other_waits_for() {
        let pretended = pretended();
        let id = Communicator::name(pretended.nccl).unwrap();
        let [error, _] = pair(|group| {
            if group.rank() == 1 {
                // It joins, and dies: its own half of the operation never comes.
                let (mut comm, mut config) = (std::ptr::null_mut(), pretended.nccl.config());
                // SAFETY: both are what they are to be.
                unsafe { (pretended.nccl.functions.ncclCommInitRankConfig)(&raw mut comm, 2, id, 1, &raw mut config) };
                return None;
            }
            let mut joined = pretended.join(id, &group, LIMIT).unwrap();
            let mut data = [1.0f32; 8];
            sum(&mut joined, &mut data).unwrap();
            let error = joined.communicator.wait().unwrap_err();
            // Everything that follows says the same.
            assert_eq!(sum(&mut joined, &mut data), Err(error.clone()));
            pretended.aborted(id, 1);
            Some(error)
        });
        assert_eq!(error, Some(NcclError::Group(CollectiveError::PeerLost { rank: 1 })));
    }

    /// PyTorch's own, from the environment that the tests run with.
    #[test]
    fn the_real_nccl_is_opened_by_its_path_and_says_that_there_is_no_device() {
        if std::env::var_os("WINGBEAT_PYTHON").is_none() {
            eprintln!("skipped: needs PyTorch's environment, which `cargo xtask test` makes and names");
            return;
        }
        let library = Library::get().unwrap();
        assert!(library.path().is_absolute() || library.path().exists(), "{}", library.path().display());
        let id = Communicator::name(library).unwrap();
        if std::path::Path::new("/dev/nvidiactl").exists() {
            return;
        }
        let errors = pair(|group| {
            let place = (group.rank(), group.size());
            let joined = Communicator::join(library, id, place, group.peers().unwrap(), LIMIT, Box::new(|| Ok(true)));
            joined.err().unwrap().to_string()
        });
        assert!(errors[1].starts_with("NCCL failed in joining: unhandled cuda error"), "{errors:?}");
    }

    #[test]
    fn what_nccl_finds_out_later_is_an_error_of_those_who_wait() {
        let pretended = pretended();
        let id = Communicator::name(pretended.nccl).unwrap();
        let [error, _] = pair(|mut group| {
            let mut joined = pretended.join(id, &group, LIMIT).unwrap();
            group.barrier().unwrap();
            let error = (group.rank() == 0).then(|| {
                let mut data = [1.0f32; 8];
                sum(&mut joined, &mut data).unwrap();
                pretended.fail(id, 6);
                joined.communicator.wait().unwrap_err().to_string()
            });
            group.barrier().unwrap();
            error
        });
        let error = error.unwrap();
        assert!(error.starts_with("NCCL failed in an operation: remote process exited"), "{error}");
        assert!(error.ends_with("NET/Socket: connection closed"), "{error}");
    }
}
