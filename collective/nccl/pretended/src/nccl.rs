//! The calls of NCCL. Those that start something answer that it is going on, as they may where nothing blocks.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use cudarc::nccl::sys::{ncclConfig_t, ncclUniqueId};
use parking_lot::{Condvar, Mutex};

use crate::stream::Stream;

const SUCCESS: c_int = 0;
const INVALID_ARGUMENT: c_int = 4;
const IN_PROGRESS: c_int = 7;
const FLOAT: c_int = 7;

static GROUPS: Mutex<BTreeMap<u64, Arc<Group>>> = Mutex::new(BTreeMap::new());
static NEXT: AtomicU64 = AtomicU64::new(1);

#[derive(Default)]
struct Group {
    state: Mutex<State>,
    changed: Condvar,
    aborted: AtomicI32,
    destroyed: AtomicI32,
    failure: AtomicI32,
}

#[derive(Default)]
struct State {
    size: usize,
    joined: usize,
    is_aborted: bool,
    /// What each member has given, by operation.
    given: BTreeMap<u64, BTreeMap<usize, Vec<f32>>>,
    /// What is on its way, from one to another.
    sent: BTreeMap<(usize, usize), VecDeque<Vec<f32>>>,
}

/// A communicator.
pub struct Communicator {
    group: Arc<Group>,
    rank: usize,
    operations: u64,
}

/// Where an operation's data goes, as a number that a thread may have.
struct Into(usize);

impl Into {
    unsafe fn write(&self, data: &[f32]) {
        std::ptr::copy_nonoverlapping(data.as_ptr(), self.0 as *mut f32, data.len());
    }
}

impl Group {
    fn of(id: &ncclUniqueId) -> Arc<Group> {
        let mut bytes = [0; 8];
        for (byte, from) in bytes.iter_mut().zip(&id.internal) {
            *byte = *from as u8;
        }
        GROUPS.lock().entry(u64::from_le_bytes(bytes)).or_default().clone()
    }
}

impl Communicator {
    /// Runs an operation of all: `result` makes what this member gets of what all have given.
    unsafe fn all(
        &mut self,
        (from, count, into): (*const f32, usize, *mut f32),
        element: c_int,
        stream: *mut c_void,
        result: impl FnOnce(usize, &[Vec<f32>]) -> Option<Vec<f32>> + Send + 'static,
    ) -> c_int {
        if element != FLOAT {
            return INVALID_ARGUMENT;
        }
        self.operations += 1;
        let (group, rank, operation) = (self.group.clone(), self.rank, self.operations);
        let (from, into) = (from as usize, Into(into as usize));
        Stream::of(stream).give(move || {
            let data = std::slice::from_raw_parts(from as *const f32, count).to_vec();
            let mut state = group.state.lock();
            state.given.entry(operation).or_default().insert(rank, data);
            group.changed.notify_all();
            group
                .changed
                .wait_while(&mut state, |state| !state.is_aborted && state.given[&operation].len() < state.size);
            if !state.is_aborted {
                let given: Vec<Vec<f32>> = state.given[&operation].values().cloned().collect();
                if let Some(result) = result(rank, &given) {
                    into.write(&result);
                }
            }
        });
        IN_PROGRESS
    }
}

fn reduced(given: &[Vec<f32>], op: c_int) -> Vec<f32> {
    let combine = |a: f32, b: f32| match op {
        1 => a * b,
        2 => a.max(b),
        3 => a.min(b),
        _ => a + b,
    };
    let mut result = given[0].clone();
    for data in &given[1..] {
        result.iter_mut().zip(data).for_each(|(a, b)| *a = combine(*a, *b));
    }
    if op == 4 {
        result.iter_mut().for_each(|value| *value /= given.len() as f32);
    }
    result
}

/// How many members of the group with this name have aborted.
#[unsafe(no_mangle)]
pub extern "C" fn pretendedAborted(id: ncclUniqueId) -> c_int {
    Group::of(&id).aborted.load(Ordering::SeqCst)
}

/// How many have left in peace.
#[unsafe(no_mangle)]
pub extern "C" fn pretendedDestroyed(id: ncclUniqueId) -> c_int {
    Group::of(&id).destroyed.load(Ordering::SeqCst)
}

/// From now on the group fails with this code.
#[unsafe(no_mangle)]
pub extern "C" fn pretendedFail(id: ncclUniqueId, code: c_int) {
    Group::of(&id).failure.store(code, Ordering::SeqCst);
}

/// Whether all that a stream was given has been run.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pretendedIdle(stream: *mut c_void) -> c_int {
    let stream = Stream::of(stream);
    c_int::from(stream.has_run(stream.given()))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> c_int {
    *version = 22_705;
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetUniqueId(id: *mut ncclUniqueId) -> c_int {
    let mut internal = [0; 128];
    for (at, byte) in internal.iter_mut().zip(NEXT.fetch_add(1, Ordering::SeqCst).to_le_bytes()) {
        *at = byte as c_char;
    }
    *id = ncclUniqueId { internal };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRankConfig(
    comm: *mut *mut Communicator,
    size: c_int,
    id: ncclUniqueId,
    rank: c_int,
    config: *const ncclConfig_t,
) -> c_int {
    let config = *config;
    if config.magic != 0xcafe_beef || config.blocking != 0 || config.size != size_of::<ncclConfig_t>() {
        return INVALID_ARGUMENT;
    }
    let group = Group::of(&id);
    let mut state = group.state.lock();
    state.size = size as usize;
    state.joined += 1;
    drop(state);
    *comm = Box::into_raw(Box::new(Communicator { group, rank: rank as usize, operations: 0 }));
    IN_PROGRESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommGetAsyncError(comm: *const Communicator, code: *mut c_int) -> c_int {
    let group = &(*comm).group;
    let state = group.state.lock();
    *code = match group.failure.load(Ordering::SeqCst) {
        SUCCESS if state.joined < state.size => IN_PROGRESS,
        code => code,
    };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommAbort(comm: *mut Communicator) -> c_int {
    let comm = Box::from_raw(comm);
    comm.group.state.lock().is_aborted = true;
    comm.group.aborted.fetch_add(1, Ordering::SeqCst);
    comm.group.changed.notify_all();
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommFinalize(_comm: *mut Communicator) -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommDestroy(comm: *mut Communicator) -> c_int {
    let comm = Box::from_raw(comm);
    comm.group.destroyed.fetch_add(1, Ordering::SeqCst);
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetErrorString(code: c_int) -> *const c_char {
    match code {
        6 => c"remote process exited or there was a network error".as_ptr(),
        _ => c"something else".as_ptr(),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetLastError(_comm: *const Communicator) -> *const c_char {
    c"NET/Socket: connection closed".as_ptr()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAllReduce(
    from: *const f32,
    into: *mut f32,
    count: usize,
    element: c_int,
    op: c_int,
    comm: *mut Communicator,
    stream: *mut c_void,
) -> c_int {
    (*comm).all((from, count, into), element, stream, move |_, given| Some(reduced(given, op)))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclReduce(
    from: *const f32,
    into: *mut f32,
    count: usize,
    element: c_int,
    op: c_int,
    root: c_int,
    comm: *mut Communicator,
    stream: *mut c_void,
) -> c_int {
    let result = move |rank, given: &[Vec<f32>]| (rank == root as usize).then(|| reduced(given, op));
    (*comm).all((from, count, into), element, stream, result)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclBroadcast(
    from: *const f32,
    into: *mut f32,
    count: usize,
    element: c_int,
    root: c_int,
    comm: *mut Communicator,
    stream: *mut c_void,
) -> c_int {
    (*comm).all((from, count, into), element, stream, move |_, given| Some(given[root as usize].clone()))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAllGather(
    from: *const f32,
    into: *mut f32,
    count: usize,
    element: c_int,
    comm: *mut Communicator,
    stream: *mut c_void,
) -> c_int {
    (*comm).all((from, count, into), element, stream, |_, given| Some(given.concat()))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclReduceScatter(
    from: *const f32,
    into: *mut f32,
    count: usize,
    element: c_int,
    op: c_int,
    comm: *mut Communicator,
    stream: *mut c_void,
) -> c_int {
    let comm = &mut *comm;
    let whole = count * comm.group.state.lock().size;
    let result = move |rank, given: &[Vec<f32>]| Some(reduced(given, op)[rank * count..][..count].to_vec());
    comm.all((from, whole, into), element, stream, result)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclSend(
    from: *const f32,
    count: usize,
    element: c_int,
    peer: c_int,
    comm: *mut Communicator,
    stream: *mut c_void,
) -> c_int {
    if element != FLOAT {
        return INVALID_ARGUMENT;
    }
    let (group, rank, from) = ((*comm).group.clone(), (*comm).rank, from as usize);
    Stream::of(stream).give(move || {
        let data = std::slice::from_raw_parts(from as *const f32, count).to_vec();
        group.state.lock().sent.entry((rank, peer as usize)).or_default().push_back(data);
        group.changed.notify_all();
    });
    IN_PROGRESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclRecv(
    into: *mut f32,
    count: usize,
    element: c_int,
    peer: c_int,
    comm: *mut Communicator,
    stream: *mut c_void,
) -> c_int {
    if element != FLOAT {
        return INVALID_ARGUMENT;
    }
    let (group, rank, into) = ((*comm).group.clone(), (*comm).rank, Into(into as usize));
    Stream::of(stream).give(move || {
        let mut state = group.state.lock();
        let way = (peer as usize, rank);
        loop {
            if state.is_aborted {
                return;
            }
            if let Some(data) = state.sent.entry(way).or_default().pop_front() {
                assert_eq!(data.len(), count, "NCCL would mix data up");
                return into.write(&data);
            }
            group.changed.wait(&mut state);
        }
    });
    IN_PROGRESS
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupStart() -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupEnd() -> c_int {
    IN_PROGRESS
}
