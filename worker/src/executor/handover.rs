//! Finished results are handed over before the process ends, also when user code ends it.
//!
//! A result is queued for the IO thread, and the next piece of work starts at once. If that aborts, crashes or calls
//! `exit`, the thread that does so waits here for a moment, in a signal handler or at exit, while the IO thread, which
//! is alive, sees to it that every owner has taken in the results of what was finished. Then the process ends as it would
//! have. Nothing of this costs anything before.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::IntoRawFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::Duration;

use libc::c_int;
use rustix::pipe::{PipeFlags, pipe_with};
use tokio::net::unix::pipe;

/// How long the end of a process is held up at most: by an owner that does not read, or by a crash that has left a lock
/// locked which the IO thread needs.
const LIMIT: Duration = Duration::from_secs(2);
/// How often the thread that ends the process looks.
const LOOK: Duration = Duration::from_micros(50);
/// What a signal handler needs, with the largest register state of today's processors.
const STACK: usize = 64 << 10;

/// Ways to die of one's own doing.
const FATAL: [c_int; 7] =
    [libc::SIGABRT, libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP, libc::SIGSYS];

/// Wakes the IO thread.
static WAKE: AtomicI32 = AtomicI32::new(-1);
/// The process and the thread that can hand over: a forked child and that thread itself must not wait for it.
static PROCESS: AtomicI32 = AtomicI32::new(0);
static IO_THREAD: AtomicI32 = AtomicI32::new(0);
static DONE: AtomicBool = AtomicBool::new(false);
/// What was done with the signals before.
static BEFORE: OnceLock<[libc::sigaction; FATAL.len()]> = OnceLock::new();

/// Waits for `handed_over`, which is done when owners have everything, once this process ends. Called once, on the IO thread.
pub(super) fn install(handed_over: impl Future<Output = ()> + Send + 'static) -> io::Result<()> {
    let (woken, wake) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
    let woken = pipe::Receiver::from_owned_fd(woken)?;
    // It stays open until the process is gone.
    WAKE.store(wake.into_raw_fd(), Ordering::Release);
    // SAFETY: both only answer with a number.
    let (pid, thread) = unsafe { (libc::getpid(), libc::gettid()) };
    PROCESS.store(pid, Ordering::Release);
    IO_THREAD.store(thread, Ordering::Release);
    tokio::spawn(async move {
        if woken.readable().await.is_ok() {
            // Who waits has the same limit.
            handed_over.await;
        }
        DONE.store(true, Ordering::Release);
    });
    // SAFETY: a function without arguments that may be called from any thread.
    unsafe { libc::atexit(at_exit) };
    let mut before = [no_action(); FATAL.len()];
    for (signal, before) in FATAL.iter().zip(&mut before) {
        let mut action = no_action();
        action.sa_sigaction = on_signal as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: the handler calls only what may be called in one, and both structures live.
        if unsafe { libc::sigaction(*signal, &action, before) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    let _ = BEFORE.set(before);
    Ok(())
}

/// Gives this thread a stack for signals, so that an overflow of its own stack is seen to as well.
pub(super) fn watch_this_thread() {
    // The thread lives about as long as the process; the memory is touched only by a handler.
    let memory: &'static mut [MaybeUninit<u8>] = Box::leak(Box::new_uninit_slice(STACK));
    let stack = libc::stack_t { ss_sp: memory.as_mut_ptr().cast(), ss_flags: 0, ss_size: STACK };
    // SAFETY: the memory is leaked, and used by nobody else. Without it, the handler uses the thread's own stack.
    unsafe { libc::sigaltstack(&stack, std::ptr::null_mut()) };
}

/// The same for a thread that ends before the process does. It must be dropped by the thread that made it.
pub(super) struct SignalStack(#[expect(dead_code, reason = "the kernel knows where it is")] Box<[MaybeUninit<u8>]>);

impl SignalStack {
    pub(super) fn of_this_thread() -> SignalStack {
        let mut memory = Box::new_uninit_slice(STACK);
        let stack = libc::stack_t { ss_sp: memory.as_mut_ptr().cast(), ss_flags: 0, ss_size: STACK };
        // SAFETY: the memory lives until the thread has forgotten it. Without it, the handler uses the thread's own stack.
        unsafe { libc::sigaltstack(&stack, std::ptr::null_mut()) };
        SignalStack(memory)
    }
}

impl Drop for SignalStack {
    fn drop(&mut self) {
        let none = libc::stack_t { ss_sp: std::ptr::null_mut(), ss_flags: libc::SS_DISABLE, ss_size: STACK };
        // SAFETY: no handler runs on this thread now, and none will use the memory any more.
        unsafe { libc::sigaltstack(&none, std::ptr::null_mut()) };
    }
}

fn no_action() -> libc::sigaction {
    // SAFETY: a structure of numbers and a nullable pointer; zeroed, it is the default action.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

extern "C" fn at_exit() {
    hand_over();
}

extern "C" fn on_signal(signal: c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    hand_over();
    let before = BEFORE.get().and_then(|before| FATAL.iter().position(|other| *other == signal).map(|at| before[at]));
    let before = before.unwrap_or_else(no_action);
    // SAFETY: `sigaction` and `raise` may be called in a handler, and the kernel gives a valid `info`. A fault that the
    // processor found happens again after this handler; what was sent, as `abort` does, is sent again.
    unsafe {
        libc::sigaction(signal, &before, std::ptr::null_mut());
        if (*info).si_code <= 0 {
            libc::raise(signal);
        }
    }
}

/// Waits until the IO thread has handed everything over. May be called in a signal handler: it takes no lock and no memory.
fn hand_over() {
    let wake = WAKE.load(Ordering::Acquire);
    // SAFETY: both only answer with a number.
    let (pid, thread) = unsafe { (libc::getpid(), libc::gettid()) };
    if wake < 0
        || pid != PROCESS.load(Ordering::Acquire)
        || thread == IO_THREAD.load(Ordering::Acquire)
        || wingbeat_process::does_io()
    {
        return;
    }
    let byte = 1u8;
    // SAFETY: one live byte to a descriptor that is never closed.
    unsafe { libc::write(wake, (&raw const byte).cast(), 1) };
    let pause = libc::timespec { tv_sec: 0, tv_nsec: LOOK.as_nanos() as libc::c_long };
    let mut waited = Duration::ZERO;
    while !DONE.load(Ordering::Acquire) && waited < LIMIT {
        // SAFETY: a live structure, and nothing is written back.
        unsafe { libc::nanosleep(&pause, std::ptr::null_mut()) };
        waited += LOOK;
    }
}
