//! Tasks: arguments, results, errors, options, waiting, cancelling.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::time::Duration;

use common::{Local, Started};
use serde::{Deserialize, Serialize};
use tokio::io::AsyncReadExt;
use wingbeat::{Error, ErrorKind, ObjectRef, get_all_blocking, put, wait_blocking};

/// Only what hangs takes so long.
const LIMIT: Duration = Duration::from_secs(60);

#[wingbeat::remote]
fn square(x: u64) -> u64 {
    x * x
}

#[wingbeat::remote]
fn write_to_a_pipe_that_nobody_reads() -> bool {
    let (reader, mut writer) = std::io::pipe().unwrap();
    drop(reader);
    writer.write_all(b"x").is_err()
}

#[test]
fn a_broken_pipe_is_an_error_in_a_task_as_in_any_program() {
    let _local = Local::start(1);
    assert!(write_to_a_pipe_that_nobody_reads::remote().get_blocking().unwrap());
}

#[wingbeat::remote(instances(u32, f64, Option<String>))]
fn last<T: Clone>(mut items: Vec<T>) -> Result<T, String> {
    items.pop().ok_or_else(|| format!("no {}", std::any::type_name::<T>()))
}

/// Its instances have an option that says so of all of them.
#[wingbeat::remote(instances((u64, 2), (String, 3)), num_returns = 2)]
async fn cut<T, const N: usize>(items: Vec<T>) -> (Vec<T>, usize)
where
    T: Clone + Send,
{
    tokio::task::yield_now().await;
    (items[..N].to_vec(), N)
}

/// Answers with a number of another task, and what it has heard over a socket.
#[wingbeat::remote]
fn asks_over_a_socket(address: SocketAddr, number: Vec<ObjectRef<u64>>) -> Result<(u64, String), Error> {
    wingbeat::block_on(async {
        let asked = tokio::spawn(async move {
            let mut answer = String::new();
            tokio::net::TcpStream::connect(address).await.unwrap().read_to_string(&mut answer).await.unwrap();
            answer
        });
        tokio::time::sleep(Duration::from_millis(5)).await;
        Ok((number[0].get().await?, asked.await.unwrap()))
    })
}

#[test]
fn a_synchronous_task_blocks_on_timers_sockets_and_what_it_spawns() {
    let _local = Local::start(1);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let asks = asks_over_a_socket::remote(listener.local_addr().unwrap(), vec![square::remote(3)]);
    listener.accept().unwrap().0.write_all(b"hello").unwrap();
    assert_eq!(asks.get_timeout_blocking(LIMIT).unwrap(), (9, "hello".to_owned()));
}

#[test]
fn instances_of_a_generic_function_that_are_named_can_be_called() {
    let _local = Local::start(1);
    assert_eq!(last::<u32>::remote(vec![1, 2]).get_blocking().unwrap(), 2);
    assert_eq!(last::<f64>::options().num_cpus(0.5).remote(vec![0.5]).get_blocking().unwrap(), 0.5);
    let none: Option<String> = None;
    assert_eq!(last::<Option<String>>::remote(vec![none.clone()]).get_blocking().unwrap(), none);
    let error = last::<u32>::remote(vec![]).get_blocking().unwrap_err();
    assert_eq!(error.application::<String>().unwrap(), "no u32");
    assert!(error.to_string().contains("last::<u32>"), "it is said which instance: {error}");
    let (two, count) = cut::<u64, 2>::remote(vec![1, 2, 3]);
    assert_eq!((two.get_blocking().unwrap(), count.get_blocking().unwrap()), (vec![1, 2], 2));
    let words = ["a", "b", "c", "d"].map(str::to_owned);
    assert_eq!(cut::<String, 3>::remote(words.to_vec()).0.get_blocking().unwrap(), words[..3]);
    assert_eq!(last(vec![7_i8]), Ok(7), "here any instance can be called");
}

#[wingbeat::remote]
async fn add(a: u64, b: u64) -> u64 {
    tokio::task::yield_now().await;
    a + b
}

#[wingbeat::remote]
fn sum_of(refs: Vec<ObjectRef<u64>>) -> wingbeat::Result<u64, String> {
    let values = get_all_blocking(&refs).map_err(|error| error.to_string())?;
    Ok(values.iter().sum())
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum Complaint {
    TooLarge { limit: u64 },
}

impl std::fmt::Display for Complaint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self:?}")
    }
}

#[wingbeat::remote]
fn small_only(x: u64) -> Result<u64, Complaint> {
    if x > 10 { Err(Complaint::TooLarge { limit: 10 }) } else { Ok(x) }
}

#[wingbeat::remote(num_returns = 2)]
fn div_mod_apart(a: u64, b: u64) -> Result<(u64, u64), String> {
    let quotient = a.checked_div(b).ok_or("by zero")?;
    Ok((quotient, a % b))
}

#[wingbeat::remote]
fn sum_of_pair((a, b): (u64, u64)) -> u64 {
    a + b
}

#[wingbeat::remote]
fn pairs_to(count: u64) -> impl Iterator<Item = (u64, u64)> {
    (0..count).map(|i| (i, 2 * i))
}

struct Halves;

#[wingbeat::actor]
impl Halves {
    fn new() -> Self {
        Halves
    }
    #[method(num_returns = 2)]
    fn apart(&self, n: u64) -> (u64, u64) {
        (n / 2, n - n / 2)
    }
    fn together(&self, n: u64) -> (u64, u64) {
        (n / 2, n - n / 2)
    }
}

#[wingbeat::remote]
fn div_mod(a: u64, b: u64) -> (u64, u64) {
    (a / b, a % b)
}

#[wingbeat::remote]
fn count_to(n: u64) -> impl Iterator<Item = u64> {
    0..n
}

struct Made {
    count: u64,
}

#[wingbeat::actor]
impl Made {
    fn new() -> Self {
        Made { count: 0 }
    }
    fn one_more(&mut self) -> u64 {
        self.count += 1;
        self.count
    }
    fn so_far(&self) -> u64 {
        self.count
    }
}

#[wingbeat::remote]
fn notes_each(made: MadeHandle) -> impl Iterator<Item = u64> {
    std::iter::from_fn(move || Some(made.one_more().get_blocking().unwrap()))
}

#[wingbeat::remote]
fn fails_after(n: u64) -> impl Iterator<Item = Result<u64, String>> {
    (0..n).map(Ok).chain(std::iter::once(Err("the end of the line".to_owned())))
}

#[wingbeat::remote]
fn panics(text: String) -> u64 {
    panic!("{text}")
}

#[wingbeat::remote]
fn exits(code: i32) -> u64 {
    eprintln!("about to exit");
    std::process::exit(code)
}

#[wingbeat::remote]
fn says_to_stderr(text: String) -> u32 {
    eprintln!("{text}");
    while rustix::io::ioctl_fionread(std::io::stderr()).unwrap() > 0 {
        std::thread::yield_now();
    }
    std::process::id()
}

#[wingbeat::remote]
fn pid() -> u32 {
    std::process::id()
}

#[wingbeat::remote]
fn nested(depth: u32) -> u32 {
    if depth == 0 { 0 } else { nested::remote(depth - 1).get_blocking().unwrap() + 1 }
}

#[wingbeat::remote]
fn spins_until_cancelled(started: PathBuf) -> u64 {
    std::fs::write(started, "").unwrap();
    while !wingbeat::is_cancelled() {
        std::thread::yield_now();
    }
    7
}

#[wingbeat::remote]
fn says_when_cancelled(started: PathBuf, ended: PathBuf) -> u64 {
    spins_until_cancelled(started);
    std::fs::write(ended, "").unwrap();
    0
}

#[wingbeat::remote]
fn waits_for_its_child(started: PathBuf, ended: PathBuf) -> u64 {
    says_when_cancelled::remote(started, ended).get_blocking().unwrap_or(1)
}

#[wingbeat::remote]
fn never_looks() -> u64 {
    loop {
        std::thread::park();
    }
}

#[wingbeat::remote]
fn marks(mark: std::path::PathBuf) {
    std::fs::write(mark, "").unwrap();
}

#[wingbeat::remote]
async fn pending_for_ever() -> u64 {
    std::future::pending().await
}

#[wingbeat::remote]
fn large(n: u64) -> Vec<f32> {
    (0..n).map(|i| i as f32).collect()
}

#[wingbeat::remote]
fn length(v: Vec<f32>) -> u64 {
    v.len() as u64
}

#[wingbeat::remote]
fn makes_refs() -> Vec<ObjectRef<u64>> {
    (0..3u64).map(|i| put(&i).unwrap()).collect()
}

#[wingbeat::remote]
fn environment(name: String) -> Option<String> {
    std::env::var(name).ok()
}

#[test]
fn the_plain_call_stays_local() {
    assert_eq!(square(3), 9);
}

#[test]
fn refs_are_arguments_and_async_functions_are_functions() {
    let _local = Local::start(2);
    let four = square::remote(2);
    let sixteen = square::remote(&four);
    assert_eq!(add::remote(four, sixteen).get_blocking().unwrap(), 20);
}

#[test]
fn refs_inside_an_argument_stay_refs() {
    let _local = Local::start(2);
    let refs: Vec<_> = (1..=10u64).map(square::remote).collect();
    assert_eq!(sum_of::remote(refs).get_blocking().unwrap(), 385);
}

#[test]
fn refs_made_by_a_task_outlive_it() {
    let _local = Local::start(2);
    let refs = makes_refs::remote().get_blocking().unwrap();
    assert_eq!(get_all_blocking(&refs).unwrap(), [0, 1, 2]);
}

#[test]
fn a_functions_error_comes_back_as_its_type() {
    let _local = Local::start(1);
    assert_eq!(small_only::remote(3).get_blocking().unwrap(), 3);
    let error = small_only::remote(11).get_blocking().unwrap_err();
    assert_eq!(error.application::<Complaint>(), Some(Complaint::TooLarge { limit: 10 }));
    assert!(error.to_string().contains("small_only"), "{error}");
    assert_eq!(error.kind(), ErrorKind::Task);
    // A task that takes it fails with the same cause, unrun.
    let passed_on = square::remote(small_only::remote(12)).get_blocking().unwrap_err();
    assert_eq!(passed_on.application::<Complaint>(), Some(Complaint::TooLarge { limit: 10 }));
}

#[wingbeat::remote(max_retries = 0)]
fn ends_its_process() {
    std::process::abort();
}

#[wingbeat::remote]
fn passes_a_loss_on() -> Result<(), Error> {
    ends_its_process::remote().get_blocking()
}

#[test]
fn a_loss_that_a_task_passes_on_is_a_loss() {
    let _local = Local::start(2);
    assert_eq!(ends_its_process::remote().get_blocking().unwrap_err().kind(), ErrorKind::Lost);
    assert_eq!(passes_a_loss_on::remote().get_blocking().unwrap_err().kind(), ErrorKind::Lost);
}

#[wingbeat::remote]
fn gives_up_with_another(asked: u64) -> Result<u64, Error> {
    small_only::remote(asked).get_blocking()
}

#[test]
fn an_error_that_a_task_passes_on_keeps_its_value() {
    let _local = Local::start(1);
    let error = gives_up_with_another::remote(11).get_blocking().unwrap_err();
    assert_eq!(error.application::<Complaint>(), Some(Complaint::TooLarge { limit: 10 }));
    assert_eq!(error.kind(), ErrorKind::Task);
    let passed_on = error.application::<Error>().unwrap();
    assert!(matches!(&passed_on, Error::Application { task, .. } if task.contains("small_only")), "{passed_on}");
}

#[test]
fn a_tuple_is_one_value_or_an_object_for_each_of_its_parts() {
    let _local = Local::start(1);
    let both = div_mod::remote(17, 5);
    assert_eq!(sum_of_pair::remote(&both).get_blocking().unwrap(), 5);
    assert_eq!(both.get_blocking().unwrap(), (3, 2));
    let (quotient, rest) = div_mod_apart::remote(17, 5);
    assert_eq!((quotient.get_blocking().unwrap(), rest.get_blocking().unwrap()), (3, 2));
    let (quotient, rest) = div_mod_apart::remote(17, 0);
    for part in [quotient, rest] {
        assert_eq!(part.get_blocking().unwrap_err().application::<String>().unwrap(), "by zero");
    }
    let halves = Halves::remote();
    let (one, other) = halves.apart(9);
    assert_eq!((one.get_blocking().unwrap(), other.get_blocking().unwrap()), (4, 5));
    assert_eq!(halves.together(9).get_blocking().unwrap(), (4, 5));
    let mut pairs = pairs_to::remote(2);
    assert_eq!(pairs.next_blocking().unwrap().unwrap(), (0, 0));
    assert_eq!(pairs.next_blocking().unwrap().unwrap(), (1, 2));
}

#[test]
fn a_stream_gives_its_items_while_the_task_runs() {
    let _local = Local::start(1);
    let mut stream = count_to::options().stream_ahead(2).remote(u64::MAX);
    for expected in 0..100 {
        assert_eq!(stream.next_blocking().unwrap().unwrap(), expected);
    }
    drop(stream);
    // Dropping it cancelled the task: the only CPU is free again.
    assert_eq!(square::remote(5).get_blocking().unwrap(), 25);
}

#[test]
fn a_stream_runs_ahead_of_its_reader_no_further_than_it_may() {
    let _local = Local::start(2);
    let made = Made::remote();
    let mut stream = notes_each::options().stream_ahead(3).remote(made.clone());
    for taken in 1..=100u64 {
        assert_eq!(stream.next_blocking().unwrap().unwrap(), taken);
        // What it may be ahead, and the one that it is making.
        let made = made.so_far().get_blocking().unwrap();
        assert!((taken..=taken + 4).contains(&made), "{made} made when {taken} were taken");
    }
}

#[test]
fn the_error_of_a_stream_is_its_last_item() {
    let _local = Local::start(1);
    let mut stream = fails_after::remote(2);
    assert_eq!(stream.next_blocking().unwrap().unwrap(), 0);
    assert_eq!(stream.next_blocking().unwrap().unwrap(), 1);
    let error = stream.next_blocking().unwrap().unwrap_err();
    assert_eq!(error.application::<String>().unwrap(), "the end of the line");
    assert!(stream.next_blocking().is_none());
}

#[test]
fn a_panic_is_an_error_with_message_and_place_and_the_process_lives_on() {
    let _local = Local::start(1);
    let before = pid::remote().get_blocking().unwrap();
    let error = panics::remote("a bad day".to_owned()).get_blocking().unwrap_err();
    match &error {
        Error::Panicked { message, task, .. } => {
            assert!(message.contains("a bad day") && message.contains("tasks.rs"), "{message}");
            assert!(task.contains("panics"), "{task}");
        }
        other => panic!("{other}"),
    }
    assert_eq!(pid::remote().get_blocking().unwrap(), before);
}

#[test]
fn exit_inside_a_task_is_a_crash_that_says_how() {
    let _local = Local::start(1);
    let error = exits::options().max_retries(0).remote(3).get_blocking().unwrap_err();
    match &error {
        Error::WorkerCrashed { exit, .. } => {
            assert_eq!(exit.code, Some(3));
            assert!(exit.stderr.iter().any(|line| line.contains("about to exit")), "{exit}");
        }
        other => panic!("{other}"),
    }
    assert_eq!(square::remote(2).get_blocking().unwrap(), 4);
}

#[test]
fn a_crash_shows_what_its_own_task_has_said() {
    let _local = Local::start(1);
    let before = says_to_stderr::remote("of another task".to_owned()).get_blocking().unwrap();
    for _ in 0..10 {
        pid::remote().get_blocking().unwrap();
    }
    match exits::options().max_retries(0).remote(3).get_blocking().unwrap_err() {
        Error::WorkerCrashed { pid, exit, .. } => {
            assert_eq!((pid, exit.stderr), (before, vec!["about to exit".to_owned()]));
        }
        other => panic!("{other}"),
    }
}

#[test]
fn a_hundred_nested_levels_finish_on_one_cpu() {
    let _local = Local::start(1);
    assert_eq!(nested::remote(100).get_blocking().unwrap(), 100);
}

#[test]
fn many_tasks_are_all_right() {
    let _local = Local::start(2);
    let refs: Vec<_> = (0..20_000u64).map(square::remote).collect();
    let values = get_all_blocking(&refs).unwrap();
    assert!(values.iter().enumerate().all(|(i, value)| *value == (i * i) as u64));
}

/// Catches a panic of its own, and continues one of another thread, as rayon does.
#[wingbeat::remote]
fn continues_a_panic() -> u64 {
    drop(std::panic::catch_unwind(|| panic!("nothing in the cache")));
    match std::thread::spawn(|| -> u64 { panic!("index 7") }).join() {
        Ok(value) => value,
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

#[test]
fn of_several_panics_the_error_tells_that_which_the_task_has_ended_with() {
    let _local = Local::start(1);
    match continues_a_panic::remote().get_blocking().unwrap_err() {
        Error::Panicked { message, .. } => assert_eq!(message, "index 7"),
        other => panic!("{other}"),
    }
}

#[test]
fn get_all_keeps_order_and_takes_duplicates() {
    let _local = Local::start(2);
    let (a, b) = (square::remote(2), square::remote(3));
    assert_eq!(get_all_blocking([&b, &a, &b]).unwrap(), [9, 4, 9]);
    assert_eq!(get_all_blocking(Vec::<&ObjectRef<u64>>::new()).unwrap(), Vec::<u64>::new());
}

#[test]
fn get_all_fails_with_the_first_failure_without_waiting_for_the_rest() {
    let _local = Local::start(2);
    let slow = never_looks::remote();
    let error = get_all_blocking([&slow, &panics::remote("at once".to_owned())]).unwrap_err();
    assert!(matches!(error, Error::Panicked { .. }), "{error}");
    slow.cancel_force();
}

#[test]
fn wait_keeps_order_and_refuses_duplicates() {
    let _local = Local::start(2);
    let (a, b, slow) = (square::remote(2), square::remote(3), pending_for_ever::remote());
    let (ready, rest) = wait_blocking(vec![slow.clone(), b.clone(), a.clone()], 2, None).unwrap();
    assert_eq!(ready.iter().map(ObjectRef::id).collect::<Vec<_>>(), [b.id(), a.id()]);
    assert_eq!(rest.len(), 1);
    assert!(matches!(wait_blocking(vec![a.clone(), a.clone()], 1, None), Err(Error::InvalidArgument { .. })));
    assert!(wait_blocking(Vec::<ObjectRef<u64>>::new(), 0, None).unwrap().0.is_empty());
    let (ready, rest) = wait_blocking(vec![slow.clone()], 1, Some(Duration::from_millis(20))).unwrap();
    assert_eq!((ready.len(), rest.len()), (0, 1));
    slow.cancel();
}

#[test]
fn a_get_with_a_limit_times_out_and_the_task_goes_on() {
    let _local = Local::start(1);
    let started = Started::new();
    let slow = spins_until_cancelled::remote(started.path());
    started.wait();
    let error = wingbeat::block_on(slow.get_timeout(Duration::from_millis(50))).unwrap_err();
    assert!(matches!(error, Error::TimedOut { .. }), "{error}");
    slow.cancel();
    assert_eq!(slow.get_blocking().unwrap(), 7);
}

#[test]
fn a_task_with_a_limit_is_cancelled_when_it_is_over() {
    let _local = Local::start(1);
    let error = pending_for_ever::options().timeout(Duration::from_millis(50)).remote().get_blocking().unwrap_err();
    assert!(matches!(error, Error::TimedOut { .. }), "{error}");
    assert_eq!(square::remote(2).get_blocking().unwrap(), 4);
}

#[test]
fn a_cancelled_pending_task_never_runs() {
    let _local = Local::start(1);
    let started = Started::new();
    let mark = Started::new();
    let running = spins_until_cancelled::remote(started.path());
    started.wait();
    let pending = marks::remote(mark.path());
    // With one CPU it runs after what was submitted before.
    let after = square::remote(3);
    pending.cancel();
    assert!(matches!(pending.get_blocking(), Err(Error::Cancelled { .. })));
    running.cancel();
    assert_eq!(running.get_blocking().unwrap(), 7);
    assert_eq!(after.get_blocking().unwrap(), 9);
    assert!(!mark.path().exists(), "it ran");
    // A finished task is left alone.
    running.cancel();
    assert_eq!(running.get_blocking().unwrap(), 7);
}

#[test]
fn async_code_is_dropped_and_force_ends_the_process() {
    let _local = Local::start(2);
    let pending = pending_for_ever::remote();
    let stubborn = never_looks::remote();
    pending.cancel();
    assert!(matches!(pending.get_blocking(), Err(Error::Cancelled { .. })));
    stubborn.cancel_force();
    assert!(matches!(stubborn.get_blocking(), Err(Error::Cancelled { .. })));
    assert_eq!(square::remote(2).get_blocking().unwrap(), 4);
}

#[test]
fn what_a_cancelled_task_had_submitted_is_cancelled_too() {
    let _local = Local::start(2);
    let (started, ended) = (Started::new(), Started::new());
    let parent = waits_for_its_child::remote(started.path(), ended.path());
    started.wait();
    parent.cancel();
    ended.wait();
    let _ = parent.get_blocking();
}

#[test]
fn a_task_whose_argument_is_cancelled_is_not_waited_for() {
    let _local = Local::start(1);
    let source = pending_for_ever::remote();
    let dependent = square::remote(&source);
    source.cancel();
    assert!(matches!(dependent.get_blocking(), Err(Error::Cancelled { .. })));
}

#[test]
fn large_values_are_read_in_shared_memory() {
    let _local = Local::start(1);
    let object = large::remote(1 << 20);
    let view = object.view_blocking().unwrap();
    assert_eq!((view.len(), view[12345]), (1 << 20, 12345.0));
    assert_eq!(length::remote(&object).get_blocking().unwrap(), 1 << 20);
    assert_eq!(length::remote(vec![1.0f32; 1 << 20]).get_blocking().unwrap(), 1 << 20);
    drop(object);
    // The view keeps its memory.
    assert_eq!(view[(1 << 20) - 1], ((1 << 20) - 1) as f32);
}

#[test]
fn small_vectors_can_be_viewed_too() {
    let _local = Local::start(1);
    let view = put(&vec![1u32, 2, 3]).unwrap().view_blocking().unwrap();
    assert_eq!(&*view, [1, 2, 3]);
}

#[test]
fn a_full_store_spills_and_brings_back() {
    let _local = Local::from(wingbeat::init().num_cpus(1).object_store_memory(8 << 20));
    let objects: Vec<_> = (0..6u8).map(|i| put(&vec![i; 4 << 20]).unwrap()).collect();
    for (i, object) in objects.iter().enumerate() {
        let value = object.get_blocking().unwrap();
        assert!(value.len() == 4 << 20 && value.iter().all(|byte| *byte == i as u8));
    }
}

#[test]
fn a_value_larger_than_the_store_is_an_error_that_says_the_sizes() {
    let _local = Local::from(wingbeat::init().num_cpus(1).object_store_memory(4 << 20));
    match put(&vec![0u8; 16 << 20]) {
        Err(Error::ObjectTooLarge { size, store, .. }) => {
            assert!(size > 16 << 20 && store == 4 << 20);
        }
        other => panic!("{other:?}"),
    }
    // As a result, too.
    let error = large::remote(8 << 20).get_blocking().unwrap_err();
    assert!(matches!(error, Error::ObjectTooLarge { .. }), "{error}");
    assert_eq!(square::remote(2).get_blocking().unwrap(), 4);
}

#[test]
fn impossible_options_are_errors_that_name_them() {
    let _local = Local::start(1);
    let error = square::options().num_cpus(-1.0).remote(1).get_blocking().unwrap_err();
    assert!(matches!(&error, Error::InvalidOption { option, .. } if option == "num_cpus"), "{error}");
    let error = square::options().num_gpus(1.5).remote(1).get_blocking().unwrap_err();
    assert!(matches!(&error, Error::InvalidOption { option, .. } if option == "num_gpus"), "{error}");
    let error = square::options().resource("CPU", 1.0).remote(1).get_blocking().unwrap_err();
    assert!(matches!(error, Error::InvalidOption { .. }), "{error}");
    let error = square::options().num_cpus(64.0).remote(1).get_blocking().unwrap_err();
    assert!(matches!(error, Error::Infeasible { .. }) && error.to_string().contains("1 CPU of the 64"), "{error}");
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum Untagged {
    Number(u64),
    #[allow(dead_code)]
    Text(String),
}

#[wingbeat::remote]
fn takes_untagged(value: Untagged) -> u64 {
    match value {
        Untagged::Number(number) => number,
        Untagged::Text(_) => 0,
    }
}

#[test]
fn a_type_that_cannot_be_carried_is_found_at_the_submission() {
    let _local = Local::start(1);
    let error = takes_untagged::remote(Untagged::Number(1)).get_blocking().unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::Encode { .. }), "{text}");
    assert!(text.contains("takes_untagged") && text.contains("`value`"), "{text}");
}

#[test]
fn a_ref_of_another_cluster_is_refused_by_name() {
    let theirs = Local::start(1);
    let object = put(&1u64).unwrap();
    let ours = Local::start(1);
    let error = square::remote(&object).get_blocking().unwrap_err();
    assert!(matches!(error, Error::ForeignRef { .. }), "{error}");
    let error = sum_of::remote(vec![object]).get_blocking().unwrap_err();
    assert!(matches!(error, Error::ForeignRef { .. }), "{error}");
    drop(ours);
    drop(theirs);
}

#[test]
fn without_a_session_a_call_is_an_error() {
    std::thread::spawn(|| {
        let error = square::remote(1).get_blocking().unwrap_err();
        assert!(matches!(error, Error::NoSession), "{error}");
    })
    .join()
    .unwrap();
}

#[test]
fn worker_processes_have_the_drivers_environment_and_what_was_added() {
    let _local = Local::from(wingbeat::init().num_cpus(1).env("COLOUR", "teal"));
    assert_eq!(environment::remote("COLOUR".to_owned()).get_blocking().unwrap().as_deref(), Some("teal"));
    let path = std::env::var("PATH").ok();
    assert_eq!(environment::remote("PATH".to_owned()).get_blocking().unwrap(), path);
}

#[test]
fn a_tuned_store_frees_what_nobody_refers_to() {
    let mut cluster = wingbeat_tests::TestCluster::start(0, 1).unwrap();
    // What is not freed has nowhere to go.
    let options = ["--num-cpus", "1", "--object-store-memory", "16MiB", "--spill-limit", "0"];
    cluster.add_node(&options).unwrap();
    let _local = Local::from(wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap()));
    for i in 0..50u64 {
        assert_eq!(length::remote(vec![i as f32; 1 << 20]).get_blocking().unwrap(), 1 << 20);
    }
}
