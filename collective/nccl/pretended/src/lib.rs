//! An NCCL between threads of one process, for tests of what is done with it: meetings that do not take place, members
//! that die, calls that fail. It knows one operation, the sum of `f32`s, in plain memory; what a stream would run, a thread
//! does.

#![allow(
    non_snake_case,
    missing_docs,
    clippy::missing_safety_doc,
    reason = "the names of nccl.h, where their meaning is written down"
)]

use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use cudarc::nccl::sys::{ncclConfig_t, ncclUniqueId};
use parking_lot::{Condvar, Mutex};

const SUCCESS: c_int = 0;
const INVALID_ARGUMENT: c_int = 4;
const IN_PROGRESS: c_int = 7;
const FLOAT: c_int = 7;
const SUM: c_int = 0;

static GROUPS: Mutex<BTreeMap<u64, Arc<Group>>> = Mutex::new(BTreeMap::new());
static NEXT: AtomicU64 = AtomicU64::new(1);

#[derive(Default)]
struct Group {
    state: Mutex<State>,
    changed: Condvar,
    aborted: AtomicI32,
    destroyed: AtomicI32,
    failure: AtomicI32,
    /// Members' operations that have not been run.
    pending: Mutex<BTreeMap<c_int, c_int>>,
}

#[derive(Default)]
struct State {
    size: usize,
    joined: usize,
    is_aborted: bool,
    /// By operation: what has been given, and by how many.
    given: BTreeMap<u64, (usize, Vec<f32>)>,
}

/// A communicator.
pub struct Communicator {
    group: Arc<Group>,
    rank: c_int,
    operations: u64,
}

fn number(id: &ncclUniqueId) -> u64 {
    let mut bytes = [0; 8];
    for (byte, from) in bytes.iter_mut().zip(&id.internal) {
        *byte = *from as u8;
    }
    u64::from_le_bytes(bytes)
}

fn group(id: u64) -> Arc<Group> {
    GROUPS.lock().entry(id).or_default().clone()
}

/// How many members of the group with this name have aborted.
#[unsafe(no_mangle)]
pub extern "C" fn pretendedAborted(id: ncclUniqueId) -> c_int {
    group(number(&id)).aborted.load(Ordering::SeqCst)
}

/// How many have left in peace.
#[unsafe(no_mangle)]
pub extern "C" fn pretendedDestroyed(id: ncclUniqueId) -> c_int {
    group(number(&id)).destroyed.load(Ordering::SeqCst)
}

/// How many operations of a member have not been run.
#[unsafe(no_mangle)]
pub extern "C" fn pretendedPending(id: ncclUniqueId, rank: c_int) -> c_int {
    group(number(&id)).pending.lock().get(&rank).copied().unwrap_or(0)
}

/// From now on the group fails with this code.
#[unsafe(no_mangle)]
pub extern "C" fn pretendedFail(id: ncclUniqueId, code: c_int) {
    group(number(&id)).failure.store(code, Ordering::SeqCst);
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> c_int {
    // SAFETY: the caller's, here and below.
    unsafe { *version = 22_705 };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetUniqueId(id: *mut ncclUniqueId) -> c_int {
    let mut internal = [0; 128];
    for (at, byte) in internal.iter_mut().zip(NEXT.fetch_add(1, Ordering::SeqCst).to_le_bytes()) {
        *at = byte as c_char;
    }
    // SAFETY: the caller's.
    unsafe { *id = ncclUniqueId { internal } };
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
    // SAFETY: the caller's.
    let config = unsafe { *config };
    if config.magic != 0xcafe_beef || config.blocking != 0 || config.size != size_of::<ncclConfig_t>() {
        return INVALID_ARGUMENT;
    }
    let group = group(number(&id));
    let mut state = group.state.lock();
    state.size = size as usize;
    state.joined += 1;
    drop(state);
    // SAFETY: the caller's.
    unsafe { *comm = Box::into_raw(Box::new(Communicator { group, rank, operations: 0 })) };
    IN_PROGRESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommGetAsyncError(comm: *const Communicator, code: *mut c_int) -> c_int {
    // SAFETY: the caller's.
    let group = unsafe { &(*comm).group };
    let state = group.state.lock();
    let now = match group.failure.load(Ordering::SeqCst) {
        SUCCESS if state.joined < state.size => IN_PROGRESS,
        code => code,
    };
    // SAFETY: the caller's.
    unsafe { *code = now };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommAbort(comm: *mut Communicator) -> c_int {
    // SAFETY: the caller's: it is the last that is done with it.
    let comm = unsafe { Box::from_raw(comm) };
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
    // SAFETY: as `ncclCommAbort`.
    let comm = unsafe { Box::from_raw(comm) };
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
    _stream: *mut c_void,
) -> c_int {
    if element != FLOAT || op != SUM {
        return INVALID_ARGUMENT;
    }
    // SAFETY: the caller's: nobody else uses the communicator now, and data is as long.
    let (comm, data) = unsafe { (&mut *comm, std::slice::from_raw_parts(from, count).to_vec()) };
    comm.operations += 1;
    let (group, rank, operation, into) = (comm.group.clone(), comm.rank, comm.operations, into as usize);
    *group.pending.lock().entry(rank).or_default() += 1;
    std::thread::spawn(move || {
        let mut state = group.state.lock();
        let (given, sum) = state.given.entry(operation).or_insert_with(|| (0, vec![0.0; data.len()]));
        *given += 1;
        sum.iter_mut().zip(&data).for_each(|(sum, value)| *sum += value);
        group.changed.notify_all();
        group.changed.wait_while(&mut state, |state| !state.is_aborted && state.given[&operation].0 < state.size);
        if !state.is_aborted {
            let sum = &state.given[&operation].1;
            // SAFETY: the caller's: data stays there until the operation has been run.
            unsafe { std::ptr::copy_nonoverlapping(sum.as_ptr(), into as *mut f32, count) };
        }
        drop(state);
        *group.pending.lock().entry(rank).or_default() -= 1;
    });
    SUCCESS
}

/// The calls that no test makes, and a library has.
macro_rules! unused {
    ($($name:ident),*) => {
        $(#[unsafe(no_mangle)]
        pub extern "C" fn $name() -> c_int {
            INVALID_ARGUMENT
        })*
    };
}

unused!(ncclReduce, ncclBroadcast, ncclAllGather, ncclReduceScatter, ncclSend, ncclRecv, ncclGroupStart, ncclGroupEnd);
