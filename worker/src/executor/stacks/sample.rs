//! A thread's registers and stack.

use std::ffi::{c_int, c_void};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Bytes of a stack that are looked at: its innermost part.
const STACK: usize = 1 << 20;
/// How long a thread may take to hear the signal: one that runs needs the CPU for that.
const HEARS: Duration = Duration::from_secs(1);
/// How long it stands still at most, in milliseconds: copying takes some ten microseconds.
const STANDS_STILL_MS: u32 = 500;

/// What a thread was doing.
pub(super) struct Sample {
    pub pc: u64,
    pub sp: u64,
    pub fp: u64,
    /// Where a function returns to that has not saved it. On x86-64 that is on the stack.
    #[cfg_attr(target_arch = "x86_64", allow(dead_code, reason = "the other architecture has such a register"))]
    pub lr: u64,
    /// The bytes from `sp` upwards.
    pub stack: Vec<u8>,
}

/// Nobody asks.
const IDLE: u32 = 0;
/// A thread is to say where it is.
const ASKED: u32 = 1;
/// It writes that down.
const WRITES: u32 = 2;
/// It has, and stands still.
const STANDS: u32 = 3;

/// Between the thread that asks and the one that is asked, one at a time.
struct Slot {
    phase: AtomicU32,
    /// Who is asked.
    tid: AtomicI32,
    registers: [AtomicU64; 4],
}

static SLOT: Slot = Slot {
    phase: AtomicU32::new(IDLE),
    tid: AtomicI32::new(0),
    registers: [AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0)],
};

/// One question at a time; whether the handler is there.
static ASKING: Mutex<bool> = Mutex::new(false);

/// The signal: one of those that have no meaning of their own, and that few use.
fn signal() -> c_int {
    libc::SIGRTMAX() - 3
}

/// Where a thread is now, or why nobody knows.
pub(super) fn of_thread(tid: u32) -> Result<Sample, String> {
    let mut is_installed = ASKING.lock();
    if !*is_installed {
        install()?;
        *is_installed = true;
    }
    if !is_ours() {
        return Err("the program uses the signal by which threads are asked".into());
    }
    if blocks_signal(tid) {
        return Err("it blocks the signal by which threads are asked".into());
    }
    let tid = i32::try_from(tid).map_err(|_| "it has no number".to_owned())?;
    SLOT.tid.store(tid, Ordering::Relaxed);
    SLOT.phase.store(ASKED, Ordering::Release);
    // SAFETY: sends a signal, whose handler is installed, to a thread of this process.
    let sent = unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), tid, signal()) };
    if sent != 0 {
        SLOT.phase.store(IDLE, Ordering::Release);
        return Err("it has ended meanwhile".into());
    }
    let asked = Instant::now();
    loop {
        match SLOT.phase.load(Ordering::Acquire) {
            STANDS => break,
            IDLE => return Err("it was asked, and went on before anybody looked: the machine is busy".into()),
            _ => {}
        }
        let gives_up = asked.elapsed() > HEARS;
        if gives_up && SLOT.phase.compare_exchange(ASKED, IDLE, Ordering::AcqRel, Ordering::Acquire).is_ok() {
            return Err(format!("it has not heard the signal within {HEARS:?}: it gets no CPU, or waits for a device"));
        }
        std::thread::sleep(Duration::from_micros(50));
    }
    let [pc, sp, fp, lr] = [0, 1, 2, 3].map(|at: usize| SLOT.registers[at].load(Ordering::Relaxed));
    let stack = stack_from(sp);
    // It went on by itself if that took too long, and what was copied is a mix.
    let stood = SLOT.phase.compare_exchange(STANDS, IDLE, Ordering::AcqRel, Ordering::Acquire).is_ok();
    match stack {
        Some(stack) if stood => Ok(Sample { pc, sp, fp, lr, stack }),
        _ => Err("its stack could not be read".into()),
    }
}

/// The innermost part of the stack that begins here, read as a file: memory that is gone is an error then.
fn stack_from(sp: u64) -> Option<Vec<u8>> {
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    let end = maps.lines().find_map(|line| {
        let (start, end) = line.split_once(' ')?.0.split_once('-')?;
        let [start, end] = [start, end].map(|text| u64::from_str_radix(text, 16).ok());
        end.filter(|end| start.is_some_and(|start| start <= sp) && sp < *end)
    })?;
    let mut stack = vec![0; usize::try_from(end - sp).ok()?.min(STACK)];
    File::open("/proc/self/mem").ok()?.read_exact_at(&mut stack, sp).ok()?;
    Some(stack)
}

fn install() -> Result<(), String> {
    // SAFETY: the action is whole, and the handler does only what is allowed in one.
    let installed = unsafe {
        let mut action = std::mem::zeroed::<libc::sigaction>();
        action.sa_sigaction = stand_still as *const () as usize;
        // System calls go on where the kernel can do that; a small stack of a thread's own is used where it has one for signals.
        action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART | libc::SA_ONSTACK;
        libc::sigfillset(&mut action.sa_mask);
        let mut before = std::mem::zeroed::<libc::sigaction>();
        libc::sigaction(signal(), std::ptr::null(), &mut before);
        before.sa_sigaction == libc::SIG_DFL && libc::sigaction(signal(), &action, std::ptr::null_mut()) == 0
    };
    if installed { Ok(()) } else { Err("the program uses the signal by which threads are asked".into()) }
}

/// Whether the handler is still there: the program may have its own by now.
fn is_ours() -> bool {
    // SAFETY: reads the action of a signal into a local value.
    let now = unsafe {
        let mut now = std::mem::zeroed::<libc::sigaction>();
        libc::sigaction(signal(), std::ptr::null(), &mut now);
        now.sa_sigaction
    };
    now == stand_still as *const () as usize
}

fn blocks_signal(tid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/self/task/{tid}/status")).unwrap_or_default();
    let blocked = status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("SigBlk:")?.trim(), 16).ok());
    blocked.is_some_and(|blocked| blocked >> (signal() - 1) & 1 == 1)
}

/// Runs in the thread that is asked, wherever that is: atomics, `gettid` and `poll` are all that it may use.
extern "C" fn stand_still(_: c_int, _: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: plain system calls; the place of this thread's `errno`, which is as before afterwards.
    let (own, errno) = unsafe { (libc::syscall(libc::SYS_gettid) as i32, *libc::__errno_location()) };
    // A question that was given up, or one to another.
    let is_asked = SLOT.tid.load(Ordering::Relaxed) == own
        && SLOT.phase.compare_exchange(ASKED, WRITES, Ordering::AcqRel, Ordering::Acquire).is_ok();
    if is_asked {
        // SAFETY: the kernel gives a handler with `SA_SIGINFO` the context that it has interrupted.
        let registers = registers(unsafe { &*context.cast::<libc::ucontext_t>() });
        for (place, register) in SLOT.registers.iter().zip(registers) {
            place.store(register, Ordering::Relaxed);
        }
        SLOT.phase.store(STANDS, Ordering::Release);
        for _ in 0..STANDS_STILL_MS {
            if SLOT.phase.load(Ordering::Acquire) != STANDS || SLOT.tid.load(Ordering::Relaxed) != own {
                break;
            }
            // SAFETY: waits a millisecond for no descriptor.
            unsafe { libc::poll(std::ptr::null_mut(), 0, 1) };
        }
        // Nobody came: nobody may take what is copied from now on for whole.
        if SLOT.tid.load(Ordering::Relaxed) == own {
            let _ = SLOT.phase.compare_exchange(STANDS, IDLE, Ordering::AcqRel, Ordering::Acquire);
        }
    }
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

#[cfg(target_arch = "x86_64")]
fn registers(context: &libc::ucontext_t) -> [u64; 4] {
    let of = |number: c_int| context.uc_mcontext.gregs[number as usize] as u64;
    [of(libc::REG_RIP), of(libc::REG_RSP), of(libc::REG_RBP), 0]
}

#[cfg(target_arch = "aarch64")]
fn registers(context: &libc::ucontext_t) -> [u64; 4] {
    let machine = &context.uc_mcontext;
    [machine.pc, machine.sp, machine.regs[29], machine.regs[30]]
}

/// Blocks the signal in the thread that calls this.
#[cfg(test)]
pub(super) fn block_here() {
    // SAFETY: plain calls on a local signal set, for this thread's mask.
    unsafe {
        let mut set = std::mem::zeroed::<libc::sigset_t>();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, signal());
        libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
    }
}
