use std::sync::mpsc;
use std::thread::{self, ThreadId};

use tokio::sync::oneshot;

use super::*;

/// Which thread runs a task of the IO runtime, as the task says.
fn who_runs_it(io: &Io) -> oneshot::Receiver<ThreadId> {
    let (say, said) = oneshot::channel();
    drop(io.handle().spawn(async move {
        tokio::task::yield_now().await;
        let _ = say.send(thread::current().id());
    }));
    said
}

/// Waits as a thread of users does, and says who did the IO.
fn wait(io: &Io) -> ThreadId {
    let mut said = who_runs_it(io);
    match io.drive(Pin::new(&mut said)) {
        Some(who) => who.unwrap(),
        None => {
            io.attend();
            said.blocking_recv().unwrap()
        }
    }
}

#[test]
fn a_thread_that_waits_again_and_again_does_the_io() {
    let io = Io::start().unwrap();
    let own = wait(&io);
    let here = thread::current().id();
    // The IO thread lets go when it is asked, and takes over when this thread is late.
    let mut tries = 0;
    while wait(&io) != here {
        tries += 1;
        assert!(tries < 100_000);
    }
    assert!([own, here].contains(&wait(&io)));
    io.stop();
}

#[test]
fn when_nobody_is_back_the_io_thread_goes_on() {
    let io = Io::start().unwrap();
    for _ in 0..100 {
        wait(&io);
        let (say, said) = mpsc::channel();
        // Nobody says that this is waited for.
        drop(io.handle().spawn(async move { say.send(thread::current().id()).unwrap() }));
        assert_ne!(said.recv().unwrap(), thread::current().id());
    }
    io.stop();
}

#[test]
fn timers_and_other_threads_are_seen_to_whoever_does_the_io() {
    let io = Arc::new(Io::start().unwrap());
    let waiting = |number: u64| {
        let io = io.clone();
        move || {
            for round in 0..500u64 {
                let (say, mut said) = oneshot::channel();
                let pause = Duration::from_micros((round * 37 + number * 11) % 90);
                drop(io.handle().spawn(async move {
                    tokio::time::sleep(pause).await;
                    let _ = say.send(round);
                }));
                let came = match io.drive(Pin::new(&mut said)) {
                    Some(came) => came,
                    None => {
                        if round % 2 == 0 {
                            io.attend();
                        }
                        said.blocking_recv()
                    }
                };
                assert_eq!(came, Ok(round));
            }
        }
    };
    let threads: Vec<_> = (0..4).map(|number| thread::spawn(waiting(number))).collect();
    for thread in threads {
        thread.join().unwrap();
    }
    io.stop();
}

#[test]
fn a_thread_that_does_the_io_is_told_of_the_end() {
    for _ in 0..50 {
        let io = Arc::new(Io::start().unwrap());
        let (begin, begun) = mpsc::channel();
        let driving = io.clone();
        let driver = thread::spawn(move || {
            let mut never = std::pin::pin!(std::future::poll_fn(|_| {
                let _ = begin.send(());
                Poll::<()>::Pending
            }));
            driving.drive(never.as_mut())
        });
        begun.recv().unwrap();
        io.stop();
        assert_eq!(driver.join().unwrap(), None);
        let mut ready = std::future::ready(());
        assert_eq!(io.drive(Pin::new(&mut ready)), None);
    }
}

#[test]
fn what_is_there_at_once_leaves_the_io_with_its_thread_or_nobody() {
    let io = Io::start().unwrap();
    for _ in 0..1_000 {
        let mut ready = std::future::ready(7);
        let came = io.drive(Pin::new(&mut ready));
        assert!(came.is_none_or(|came| came == 7));
    }
    wait(&io);
    io.stop();
}

#[test]
fn a_panic_while_it_does_the_io_gives_it_back() {
    let io = Io::start().unwrap();
    let panics = || {
        let mut panics = std::pin::pin!(std::future::poll_fn(|_| -> Poll<()> { panic!("as it is polled") }));
        io.drive(panics.as_mut())
    };
    while std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics)).is_ok() {}
    assert!(!DRIVES.get());
    wait(&io);
    io.stop();
}
