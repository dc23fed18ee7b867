//! What is finished stays finished, whatever the next piece of work in the process does to it.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::io::Write;
use std::os::fd::BorrowedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use common::Local;
use wingbeat::Error;

/// Ways to end a process from inside.
const WAYS: [&str; 6] = ["abort", "exit", "segfault", "overflow", "illegal", "panic in extern C"];

#[allow(unconditional_recursion, reason = "that is the point")]
fn overflows(depth: u64) -> u64 {
    let room = std::hint::black_box([depth; 1024]);
    overflows(depth + 1) + room[1023]
}

extern "C" fn must_not_unwind() {
    panic!("nobody can catch this");
}

fn ends_the_process(way: &str) -> u64 {
    match way {
        "abort" => std::process::abort(),
        "exit" => std::process::exit(0),
        // SAFETY: not safe at all; the process ends here.
        "segfault" => unsafe { std::ptr::read_volatile(std::ptr::without_provenance::<u64>(8)) },
        "overflow" => overflows(0),
        "illegal" => {
            let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::ILL);
            unreachable!("the signal is not caught");
        }
        _ => {
            must_not_unwind();
            0
        }
    }
}

#[wingbeat::remote]
fn appends(file: PathBuf, what: String) -> String {
    let mut file = std::fs::OpenOptions::new().append(true).create(true).open(file).unwrap();
    writeln!(file, "{what}").unwrap();
    what
}

#[wingbeat::remote]
fn ends(way: String) -> u64 {
    ends_the_process(&way)
}

fn lines_of(file: &PathBuf) -> Vec<String> {
    let mut lines: Vec<String> = std::fs::read_to_string(file).unwrap().lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

#[test]
fn a_finished_task_is_not_lost_when_the_next_one_ends_the_process() {
    let _local = Local::start(1);
    for way in WAYS {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("ran");
        // Short tasks are pushed several at a time, once it is known that they are short.
        for _ in 0..20 {
            appends::remote(dir.path().join("before"), String::new()).get_blocking().unwrap();
        }
        let pairs: Vec<_> = (0..30)
            .map(|index| {
                let good = appends::options().max_retries(0).remote(file.clone(), format!("{index:02}"));
                (good, ends::options().max_retries(0).remote(way.to_owned()))
            })
            .collect();
        for (index, (good, bad)) in pairs.iter().enumerate() {
            assert_eq!(good.get_blocking().unwrap(), format!("{index:02}"), "{way}");
            let error = bad.get_blocking().unwrap_err();
            assert!(matches!(error, Error::WorkerCrashed { .. }), "{way}: {error}");
        }
        let expected: Vec<String> = (0..30).map(|index| format!("{index:02}")).collect();
        assert_eq!(lines_of(&file), expected, "{way}: each ran once");
    }
}

struct Notes;

#[wingbeat::actor]
impl Notes {
    fn new() -> Self {
        Notes
    }
    fn appends(&mut self, file: PathBuf, what: String) -> String {
        appends(file, what)
    }
    fn ends(&mut self, way: String) -> u64 {
        ends_the_process(&way)
    }
}

#[test]
fn a_finished_call_is_not_lost_when_the_next_one_ends_the_process() {
    let _local = Local::start(1);
    for way in WAYS {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("ran");
        let notes = Notes::options().max_restarts(100).remote();
        for index in 0..4 {
            let good = notes.appends(file.clone(), format!("{index:02}"));
            let bad = notes.ends(way.to_owned());
            assert_eq!(good.get_blocking().unwrap(), format!("{index:02}"), "{way}");
            let error = bad.get_blocking().unwrap_err();
            assert!(matches!(error, Error::ActorUnavailable { .. }), "{way}: {error}");
        }
        assert_eq!(lines_of(&file).len(), 4, "{way}: each ran once");
    }
}

#[wingbeat::remote]
fn never_returns() {
    loop {
        std::thread::park();
    }
}

#[test]
fn a_finished_task_is_not_lost_when_the_next_one_is_cancelled_by_force() {
    let _local = Local::start(1);
    let dir = tempfile::tempdir().unwrap();
    for index in 0..10 {
        let file = dir.path().join(format!("{index}"));
        let good = appends::options().max_retries(0).remote(file.clone(), "ran".to_owned());
        let stuck = never_returns::options().max_retries(0).remote();
        while !file.exists() {
            std::thread::yield_now();
        }
        stuck.cancel_force();
        assert!(matches!(stuck.get_blocking(), Err(Error::Cancelled { .. })));
        assert_eq!(good.get_blocking().unwrap(), "ran");
        assert_eq!(lines_of(&file), ["ran"]);
    }
}

// Panics where nobody expects them.

#[derive(serde::Serialize, serde::Deserialize)]
struct PanicsWhenDropped;

impl Drop for PanicsWhenDropped {
    fn drop(&mut self) {
        // In the worker process alone: the driver drops one too.
        if ARMED.get() {
            panic!("dropped");
        }
    }
}

thread_local! {
    static ARMED: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

#[wingbeat::remote]
fn gives_what_panics_when_dropped(attempts: PathBuf) -> PanicsWhenDropped {
    appends(attempts, "attempt".to_owned());
    ARMED.set(true);
    PanicsWhenDropped
}

#[wingbeat::remote]
fn yields_what_panics_when_dropped() -> impl Iterator<Item = PanicsWhenDropped> {
    (0..3).map(|index| {
        ARMED.set(index == 2);
        PanicsWhenDropped
    })
}

struct PanicsAtTheEnd;

impl Drop for PanicsAtTheEnd {
    fn drop(&mut self) {
        panic!("the end");
    }
}

#[wingbeat::remote]
async fn panics_when_it_is_cancelled(started: PathBuf) {
    let _at_the_end = PanicsAtTheEnd;
    std::fs::write(started, "").unwrap();
    std::future::pending::<()>().await;
}

#[wingbeat::remote(isolated)]
fn pid() -> u32 {
    ARMED.set(false);
    std::process::id()
}

#[test]
fn a_panic_in_the_drop_of_a_result_is_a_panic_of_its_task() {
    let _local = Local::start(1);
    let before = pid::remote().get_blocking().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let attempts = dir.path().join("attempts");
    let error = gives_what_panics_when_dropped::remote(attempts.clone()).get_blocking().map(|_| ()).unwrap_err();
    assert!(matches!(&error, Error::Panicked { message, .. } if message.contains("dropped")), "{error}");
    assert_eq!(lines_of(&attempts).len(), 1, "a panic is not tried again");
    let mut stream = yields_what_panics_when_dropped::remote();
    for _ in 0..2 {
        stream.next_blocking().unwrap().map(|_| ()).unwrap();
    }
    let error = stream.next_blocking().unwrap().map(|_| ()).unwrap_err();
    assert!(matches!(&error, Error::Panicked { .. }), "{error}");
    let started = dir.path().join("started");
    let cancelled = panics_when_it_is_cancelled::remote(started.clone());
    while !started.exists() {
        std::thread::yield_now();
    }
    cancelled.cancel();
    cancelled.get_blocking().unwrap_err();
    assert_eq!(pid::remote().get_blocking().unwrap(), before, "no process was lost");
}

#[derive(serde::Serialize)]
struct PanicsWhenDecoded;

impl<'de> serde::Deserialize<'de> for PanicsWhenDecoded {
    fn deserialize<D: serde::Deserializer<'de>>(_: D) -> Result<Self, D::Error> {
        panic!("not a word")
    }
}

#[wingbeat::remote]
fn takes(_value: PanicsWhenDecoded) -> u64 {
    0
}

#[test]
fn a_panic_while_an_argument_is_decoded_is_the_error_of_the_call() {
    let _local = Local::start(1);
    let error = takes::remote(PanicsWhenDecoded).get_blocking().unwrap_err();
    assert!(matches!(&error, Error::Encode { .. }) && error.to_string().contains("not a word"), "{error}");
}

// A worker process whose connection to the head breaks.

/// The sockets of this process that it has dialled, but the one to `daemon`: its head's, and those of other processes.
fn dialled(daemon: &str) -> Vec<UnixStream> {
    let mut numbers: Vec<i32> = std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok())
        .collect();
    numbers.sort_unstable();
    let open = numbers.into_iter().filter_map(|number| {
        // SAFETY: it is cloned at once, and if it was closed meanwhile that fails.
        unsafe { BorrowedFd::borrow_raw(number) }.try_clone_to_owned().ok()
    });
    let dialled = |socket: &UnixStream| {
        let peer = socket.peer_addr().ok();
        let name = peer.as_ref().and_then(|peer| peer.as_abstract_name());
        name.is_some_and(|name| name.starts_with(b"wingbeat-") && name != daemon.as_bytes())
    };
    open.map(UnixStream::from).filter(dialled).collect()
}

#[wingbeat::remote]
fn breaks_with_the_head(later: Vec<wingbeat::ObjectRef<u64>>) -> u32 {
    later[0].get_blocking().unwrap();
    // From now on it is connected to the head.
    let state = wingbeat::block_on(wingbeat::Session::current().unwrap().runtime().cluster_state()).unwrap();
    for socket in dialled(&state.nodes[0].info.address.unix) {
        socket.shutdown(std::net::Shutdown::Both).unwrap();
    }
    // It asks the head again, and has it start a task while it waits itself.
    wingbeat::block_on(wingbeat::Session::current().unwrap().runtime().cluster_state()).unwrap();
    assert_ne!(pid::remote().get_blocking().unwrap(), std::process::id());
    std::process::id()
}

#[wingbeat::remote]
fn waits_for(file: PathBuf) -> u64 {
    while !file.exists() {
        std::thread::yield_now();
    }
    1
}

#[test]
fn a_worker_process_whose_connection_to_the_head_breaks_goes_on() {
    let _local = Local::start(2);
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("later");
    let later = waits_for::remote(file.clone());
    let broke = breaks_with_the_head::remote(vec![later]);
    std::fs::write(file, "").unwrap();
    let broken = broke.get_blocking().unwrap();
    assert!(wingbeat_tests::is_alive(broken));
}
