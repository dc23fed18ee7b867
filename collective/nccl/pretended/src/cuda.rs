//! The calls of CUDA's driver that are made.

use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::stream::Stream;

const SUCCESS: c_int = 0;
const NOT_READY: c_int = 600;
const DEVICES: c_int = 2;
const NO_DEVICE: c_int = 100;

/// Where a stream was.
#[derive(Default)]
pub struct Event {
    at: Option<(&'static Stream, u64)>,
}

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(_flags: c_uint) -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(device: *mut c_int, number: c_int) -> c_int {
    *device = number;
    if number < DEVICES { SUCCESS } else { NO_DEVICE }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, device: c_int) -> c_int {
    *context = (device as usize + 1) as *mut c_void;
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease_v2(_device: c_int) -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, _attribute: c_int, _device: c_int) -> c_int {
    *value = 0;
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetUuid(uuid: *mut [u8; 16], device: c_int) -> c_int {
    *uuid = [device as u8 + 1; 16];
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) -> c_int {
    cuDeviceGetUuid(uuid, device)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetCurrent(context: *mut *mut c_void) -> c_int {
    *context = std::ptr::null_mut();
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(_context: *mut c_void) -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSynchronize() -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreate(stream: *mut *mut c_void, _flags: c_uint) -> c_int {
    // Never freed: threads may still run what was given to it.
    *stream = (&raw mut *Box::leak(Box::<Stream>::default())).cast();
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamDestroy_v2(_stream: *mut c_void) -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamSynchronize(stream: *mut c_void) -> c_int {
    let stream = Stream::of(stream);
    stream.wait(stream.given());
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamWaitEvent(stream: *mut c_void, event: *mut Event, _flags: c_uint) -> c_int {
    if let Some((other, given)) = (*event).at {
        let stream = Stream::of(stream);
        // A stream waits for its own past anyway.
        if !std::ptr::eq(stream, other) {
            stream.give(move || other.wait(given));
        }
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventCreate(event: *mut *mut Event, _flags: c_uint) -> c_int {
    *event = Box::into_raw(Box::default());
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventDestroy_v2(event: *mut Event) -> c_int {
    drop(Box::from_raw(event));
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventRecord(event: *mut Event, stream: *mut c_void) -> c_int {
    let stream = Stream::of(stream);
    (*event).at = Some((stream, stream.given()));
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventQuery(event: *const Event) -> c_int {
    match (*event).at {
        Some((stream, given)) if !stream.has_run(given) => NOT_READY,
        _ => SUCCESS,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(at: *mut u64, bytes: usize) -> c_int {
    // Its length is kept in front of it.
    let words = bytes.div_ceil(8) + 1;
    let memory: &mut [u64] = Box::leak(vec![0; words].into_boxed_slice());
    memory[0] = words as u64;
    *at = (&raw mut memory[1]) as u64;
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFree_v2(at: u64) -> c_int {
    let memory = (at as *mut u64).sub(1);
    let words = *memory as usize;
    drop(Box::from_raw(std::ptr::slice_from_raw_parts_mut(memory, words)));
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoDAsync_v2(to: u64, from: *const u8, bytes: usize, stream: *mut c_void) -> c_int {
    cuStreamSynchronize(stream);
    std::ptr::copy_nonoverlapping(from, to as *mut u8, bytes);
    SUCCESS
}

/// To pageable memory: it returns when it is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoHAsync_v2(to: *mut u8, from: u64, bytes: usize, stream: *mut c_void) -> c_int {
    cuStreamSynchronize(stream);
    std::ptr::copy_nonoverlapping(from as *const u8, to, bytes);
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemsetD8Async(to: u64, value: u8, bytes: usize, stream: *mut c_void) -> c_int {
    cuStreamSynchronize(stream);
    std::ptr::write_bytes(to as *mut u8, value, bytes);
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(_code: c_int, name: *mut *const c_char) -> c_int {
    *name = c"PRETENDED".as_ptr();
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(_code: c_int, text: *mut *const c_char) -> c_int {
    *text = c"a pretended error".as_ptr();
    SUCCESS
}
