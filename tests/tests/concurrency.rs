//! How many calls of an actor run at a time, and what that takes.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::{Local, wait_for};
use futures::{Stream, StreamExt, stream};
use wingbeat::{Error, ObjectRef, ObjectStream, get_all_blocking};

/// Only something that hangs takes so long.
const LIMIT: Duration = Duration::from_secs(60);
const MEMBERS: usize = 5;

struct Meeting {
    members: Barrier,
}

#[wingbeat::actor(max_concurrency = 64)]
impl Meeting {
    fn new() -> Self {
        Meeting { members: Barrier::new(MEMBERS) }
    }
    /// Returns when all members are there.
    fn meet(&self) {
        self.members.wait();
    }
    /// Keeps the output for itself while it waits for another call.
    fn waits_with_the_output(&self) -> Result<u32, Error> {
        let _out = std::io::stdout().lock();
        wingbeat::current_handle::<MeetingHandle>()?.answers().get_timeout_blocking(LIMIT)
    }
    fn answers(&self) -> u32 {
        7
    }
    /// Threads of this process that run calls, beside the main one.
    fn lanes(&self) -> usize {
        let threads = std::fs::read_dir("/proc/self/task").unwrap();
        let names = threads.map(|thread| std::fs::read_to_string(thread.unwrap().path().join("comm")).unwrap());
        names.filter(|name| name.starts_with("lane")).count()
    }
}

#[test]
fn a_call_may_hold_the_output_while_it_waits_for_another_of_its_actor() {
    let _local = Local::start(1);
    assert_eq!(Meeting::remote().waits_with_the_output().get_timeout_blocking(2 * LIMIT).unwrap(), 7);
}

/// More than an actor has threads, and no multiple of those.
const CROWD: u32 = 100;

struct Crowd {
    there: AtomicUsize,
    most: AtomicUsize,
    members: tokio::sync::Barrier,
    /// Beside one that blocks its thread.
    others: tokio::sync::Barrier,
    others_are_there: Barrier,
}

#[wingbeat::actor(max_concurrency = 100)]
impl Crowd {
    fn new() -> Self {
        let members = tokio::sync::Barrier::new(CROWD as usize);
        let others = tokio::sync::Barrier::new(CROWD as usize - 1);
        let (there, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Crowd { there, most, members, others, others_are_there: Barrier::new(2) }
    }
    /// Returns when as many are there as may be. How many there were at most.
    async fn meet(&self) -> usize {
        let there = self.there.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(there, Ordering::SeqCst);
        self.members.wait().await;
        self.there.fetch_sub(1, Ordering::SeqCst);
        self.most.load(Ordering::SeqCst)
    }
    /// Blocks its thread until the others are there.
    fn wait_for_others(&self) {
        self.others_are_there.wait();
    }
    /// Returns when all that may run are there, but one.
    async fn is_another(&self) {
        if self.others.wait().await.is_leader() {
            self.others_are_there.wait();
        }
    }
}

/// As many threads as such an actor has.
const THREADS: usize = 64;

struct Blocked {
    all: Barrier,
}

#[wingbeat::actor(max_concurrency = 1_000)]
impl Blocked {
    fn new() -> Self {
        Blocked { all: Barrier::new(THREADS) }
    }
    async fn answers(&self) -> u32 {
        7
    }
    /// Blocks its thread, as all others, until this actor answers.
    fn asks(&self) -> Result<u32, Error> {
        self.all.wait();
        wingbeat::current_handle::<BlockedHandle>()?.answers().get_blocking()
    }
}

struct Grouped;

#[wingbeat::actor(concurrency_groups(one = 1))]
impl Grouped {
    fn new() -> Self {
        Grouped
    }
    /// The only call of its group, which waits for one of the other.
    #[method(group = "one")]
    fn asks(&self, gate: PathBuf) -> Result<u32, Error> {
        wingbeat::current_handle::<GroupedHandle>()?.answers(gate).get_blocking()
    }
    fn answers(&self, gate: PathBuf) -> u32 {
        drop(File::open(gate).unwrap());
        7
    }
    /// Waits for another call of its own group, which runs one at a time.
    #[method(group = "one")]
    fn asks_its_own_group(&self) -> Result<u32, Error> {
        wingbeat::current_handle::<GroupedHandle>()?.asks(PathBuf::new()).get_blocking()
    }
}

struct Relay;

#[wingbeat::actor(concurrency_groups(one = 1))]
impl Relay {
    fn new() -> Self {
        Relay
    }
    /// The last item comes from a call that begins in its place, while its consumer takes nothing.
    #[method(group = "one")]
    fn items(&self, begun: PathBuf, gate: PathBuf) -> impl Stream<Item = Result<u32, Error>> + use<> {
        let slow = wingbeat::current_handle::<RelayHandle>().map(|relay| relay.slow(begun, gate));
        let last = stream::once(async move { slow?.get().await });
        stream::iter((0..ITEMS).map(Ok)).chain(last)
    }
    /// The last item comes from a call for which this group has no room.
    #[method(group = "one")]
    fn ends_in_a_circle(&self, go: PathBuf) -> impl Stream<Item = Result<u32, Error>> + use<> {
        let last = async move {
            comes(&go).await;
            wingbeat::current_handle::<RelayHandle>()?.slow(go.clone(), go).get().await
        };
        stream::iter((0..ITEMS).map(Ok)).chain(stream::once(last))
    }
    /// Its items come when a file is there.
    #[method(group = "one")]
    fn items_when(&self, begun: PathBuf, gate: PathBuf) -> impl Stream<Item = u32> + use<> {
        let first = async move {
            File::create(begun).unwrap();
            comes(&gate).await;
            0
        };
        stream::once(first).chain(stream::iter(1..ITEMS))
    }
    /// Its last item blocks the only thread, on which the call runs that began in its place.
    #[method(group = "one")]
    fn blocks_in_a_circle(&self, go: PathBuf) -> impl Stream<Item = Result<u32, Error>> + use<> {
        let last = async move {
            comes(&go).await;
            wingbeat::current_handle::<RelayHandle>()?.slow(go.clone(), go).get_blocking()
        };
        stream::iter((0..ITEMS).map(Ok)).chain(stream::once(last))
    }
    /// Its last item waits for a call that runs in its place, and blocks the thread of that for a task.
    #[method(group = "one")]
    fn blocks_beside(
        &self,
        begun: PathBuf,
        gate: PathBuf,
        pipe: PathBuf,
    ) -> impl Stream<Item = Result<u32, Error>> + use<> {
        let slow = wingbeat::current_handle::<RelayHandle>().map(|relay| relay.slow(begun, gate));
        let last = async move {
            let blocks = async { opens::remote(pipe).get_blocking() };
            let (slow, opened) = futures::join!(slow?.get(), blocks);
            Ok(slow? + opened?)
        };
        stream::iter((0..ITEMS).map(Ok)).chain(stream::once(last))
    }
    #[method(group = "one")]
    async fn slow(&self, begun: PathBuf, gate: PathBuf) -> u32 {
        File::create(begun).unwrap();
        comes(&gate).await;
        7
    }
}

/// Returns when a file is there.
async fn comes(file: &Path) {
    while !file.exists() {
        tokio::task::yield_now().await;
    }
}

/// More than a stream is ahead of its consumer.
const ITEMS: u32 = 100;

/// Its calls wait for its other calls, which have the state to themselves or not.
struct Ledger(u32);

#[wingbeat::actor(max_concurrency = 8, concurrency_groups(other = 1))]
impl Ledger {
    fn new() -> Self {
        Ledger(0)
    }
    fn reads_and_adds(&self) -> Result<u32, Error> {
        wingbeat::current_handle::<LedgerHandle>()?.adds().get_blocking()
    }
    async fn reads_and_adds_elsewhere(&self) -> Result<u32, Error> {
        wingbeat::current_handle::<LedgerHandle>()?.adds_in_other_group().get().await
    }
    fn adds_and_reads(&mut self) -> Result<u32, Error> {
        self.0 += 1;
        wingbeat::current_handle::<LedgerHandle>()?.reads().get_blocking()
    }
    async fn reads(&self) -> u32 {
        self.0
    }
    fn adds(&mut self) -> u32 {
        self.0 += 1;
        self.0
    }
    /// Has the state while it waits for others, and lets it go before it waits for a call behind another.
    fn items_after(
        &mut self,
        begun: PathBuf,
        go: PathBuf,
        after: Vec<ObjectRef<u32>>,
    ) -> impl Stream<Item = Result<u32, Error>> + use<> {
        File::create(begun).unwrap();
        wait_for(&go);
        let behind = Ledger::ledger().map(|ledger| ledger.adds());
        let waited = after[0].get_blocking();
        stream::once(async move {
            waited?;
            behind?.get().await
        })
    }
    async fn adds_when(&mut self, gate: PathBuf) -> u32 {
        comes(&gate).await;
        self.0 += 1;
        self.0
    }
    #[method(group = "other")]
    async fn adds_in_other_group(&mut self) -> u32 {
        self.0 += 1;
        self.0
    }
    /// Has the state while it waits for others.
    fn adds_after(&mut self, begun: PathBuf, after: Vec<ObjectRef<u32>>) -> Result<u32, Error> {
        File::create(begun).unwrap();
        self.0 += after[0].get_blocking()?;
        Ok(self.0)
    }
}

impl Ledger {
    fn ledger() -> Result<LedgerHandle, Error> {
        wingbeat::current_handle()
    }
}

/// Opens a pipe, which waits for its other end.
#[wingbeat::remote]
fn opens(gate: PathBuf) -> u32 {
    drop(File::open(gate).unwrap());
    10
}

struct Serial;

#[wingbeat::actor]
impl Serial {
    fn new() -> Self {
        Serial
    }
    fn hello(&self) {}
}

fn meet(meeting: &MeetingHandle) -> Vec<ObjectRef<()>> {
    (0..MEMBERS).map(|_| meeting.meet()).collect()
}

#[test]
fn an_actor_has_as_many_threads_as_calls_ran_at_once_and_not_as_many_as_may() {
    let _local = Local::start(1);
    let meeting = Meeting::remote();
    // The next call may come before the lane of the last one waits again.
    const SPARE: usize = 10;
    for _ in 0..1_000 {
        assert!(meeting.lanes().get_timeout_blocking(LIMIT).unwrap() <= SPARE);
    }
    for _ in 0..20 {
        get_all_blocking(&meet(&meeting)).unwrap();
    }
    let lanes = meeting.lanes().get_timeout_blocking(LIMIT).unwrap();
    assert!((MEMBERS - 1..MEMBERS + SPARE).contains(&lanes), "{lanes} lanes for {MEMBERS} calls at once");
}

#[test]
fn as_many_asynchronous_calls_run_at_a_time_as_may_and_no_more() {
    let _local = Local::start(1);
    let crowd = Crowd::remote();
    let calls: Vec<_> = (0..4 * CROWD).map(|_| crowd.meet()).collect();
    for call in calls {
        assert_eq!(call.get_timeout_blocking(LIMIT).unwrap(), CROWD as usize);
    }
}

#[test]
fn a_call_that_blocks_takes_the_place_of_one_and_no_more() {
    let _local = Local::start(1);
    let crowd = Crowd::remote();
    // Of 64 threads each has a call, and one of them blocks.
    let blocks = crowd.wait_for_others();
    let calls: Vec<_> = (1..CROWD).map(|_| crowd.is_another()).collect();
    for call in calls.into_iter().chain([blocks]) {
        call.get_timeout_blocking(LIMIT).unwrap();
    }
}

#[test]
fn an_actor_all_of_whose_threads_wait_for_itself_is_told_so_though_it_may_run_more() {
    let _local = Local::start(1);
    let actor = Blocked::remote();
    let calls: Vec<_> = (0..THREADS).map(|_| actor.asks()).collect();
    let results: Vec<_> = calls.into_iter().map(|call| call.get_timeout_blocking(LIMIT)).collect();
    let failed: Vec<_> = results.iter().filter_map(|result| result.as_ref().err()).collect();
    assert!(!failed.is_empty() && failed.iter().all(|error| error.to_string().contains("deadlock")), "{failed:?}");
    // Each that fails makes room.
    assert!(results.iter().filter_map(|result| result.as_ref().ok()).all(|answer| *answer == 7));
}

#[test]
fn a_call_that_waits_for_one_of_another_group_is_in_no_circle() {
    let _local = Local::start(1);
    let folder = tempfile::tempdir().unwrap();
    let gate = folder.path().join("gate");
    rustix::fs::mknodat(rustix::fs::CWD, &gate, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
    let asks = Grouped::remote().asks(gate.clone());
    // A circle is believed after a fifth of a second.
    let error = asks.get_timeout_blocking(Duration::from_secs(2)).unwrap_err();
    assert!(matches!(error, Error::TimedOut { .. }), "{error}");
    let _open = File::options().read(true).write(true).open(&gate).unwrap();
    assert_eq!(asks.get_timeout_blocking(LIMIT).unwrap(), 7);
}

#[test]
fn a_call_that_waits_for_one_of_its_own_full_group_is_told_of_the_circle() {
    let _local = Local::start(1);
    let error = Grouped::remote().asks_its_own_group().get_timeout_blocking(LIMIT).unwrap_err();
    assert!(error.to_string().contains("deadlock"), "{error}");
}

#[test]
fn a_call_that_waits_for_one_that_waits_for_its_state_is_told_of_the_circle() {
    let _local = Local::start(1);
    let ledger = Ledger::remote();
    for call in [ledger.reads_and_adds(), ledger.reads_and_adds_elsewhere(), ledger.adds_and_reads()] {
        let error = call.get_timeout_blocking(LIMIT).unwrap_err();
        assert!(error.to_string().contains("deadlock"), "{error}");
    }
    // The error is that of the wait: what was waited for is carried out.
    assert_eq!(ledger.adds().get_timeout_blocking(LIMIT).unwrap(), 4);
}

#[test]
fn whoever_waits_for_the_state_of_an_actor_that_waits_for_others_is_in_no_circle() {
    let _local = Local::start(2);
    let folder = tempfile::tempdir().unwrap();
    let [begun, gate] = ["begun", "gate"].map(|name| folder.path().join(name));
    rustix::fs::mknodat(rustix::fs::CWD, &gate, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
    let ledger = Ledger::remote();
    let first = ledger.adds_after(begun.clone(), vec![opens::remote(gate.clone())]);
    wait_for(&begun);
    let rest: Vec<_> = (0..4).flat_map(|_| [ledger.reads(), ledger.adds()]).collect();
    let error = rest[7].get_timeout_blocking(Duration::from_secs(2)).unwrap_err();
    assert!(matches!(error, Error::TimedOut { .. }), "{error}");
    let _open = File::options().read(true).write(true).open(&gate).unwrap();
    assert_eq!(first.get_timeout_blocking(LIMIT).unwrap(), 10);
    for call in &rest {
        call.get_timeout_blocking(LIMIT).unwrap();
    }
    assert_eq!(ledger.reads().get_timeout_blocking(LIMIT).unwrap(), 14);
}

#[test]
fn whoever_has_let_the_state_go_is_in_no_circle_with_those_that_waited_for_it() {
    let _local = Local::start(2);
    let folder = tempfile::tempdir().unwrap();
    let [begun, go, pipe, gate] = ["begun", "go", "pipe", "gate"].map(|name| folder.path().join(name));
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
    let ledger = Ledger::remote();
    let mut items = ledger.items_after(begun.clone(), go.clone(), vec![opens::remote(pipe.clone())]);
    wait_for(&begun);
    let before = ledger.adds_when(gate.clone());
    File::create(&go).unwrap();
    // Long enough for the head to be told who has the state, and then to believe in a circle.
    let is_late =
        |late: Option<Result<u32, Error>>| assert!(matches!(late, Some(Err(Error::TimedOut { .. }))), "{late:?}");
    is_late(wingbeat::block_on(items.next_timeout(Duration::from_secs(1))));
    let _open = File::options().read(true).write(true).open(&pipe).unwrap();
    is_late(wingbeat::block_on(items.next_timeout(Duration::from_secs(2))));
    File::create(gate).unwrap();
    assert_eq!(wingbeat::block_on(items.next_timeout(LIMIT)).unwrap().unwrap(), 2);
    assert_eq!(before.get_timeout_blocking(LIMIT).unwrap(), 1);
}

#[test]
fn a_stream_in_whose_place_a_call_ran_is_told_of_its_circle() {
    let _local = Local::start(1);
    let folder = tempfile::tempdir().unwrap();
    let [begun, gate, go] = ["begun", "gate", "go"].map(|name| folder.path().join(name));
    let relay = Relay::remote();
    let mut items = relay.ends_in_a_circle(go.clone());
    let slow = relay.slow(begun.clone(), gate.clone());
    wait_for(&begun);
    takes_all_but_the_last(&mut items);
    File::create(gate).unwrap();
    assert_eq!(slow.get_timeout_blocking(LIMIT).unwrap(), 7);
    File::create(go).unwrap();
    is_told_of_its_circle(&mut items);
}

/// All that is made before the call for which there is no room.
fn takes_all_but_the_last(items: &mut ObjectStream<u32>) {
    for number in 0..ITEMS {
        assert_eq!(items.next_blocking().unwrap().unwrap(), number);
    }
}

fn is_told_of_its_circle(items: &mut ObjectStream<u32>) {
    let error = wingbeat::block_on(items.next_timeout(LIMIT)).unwrap().unwrap_err();
    assert!(error.to_string().contains("deadlock"), "{error}");
}

/// A circle is believed after a fifth of a second.
fn is_told_of_nothing(items: &mut ObjectStream<u32>) {
    let late = wingbeat::block_on(items.next_timeout(Duration::from_secs(2)));
    assert!(matches!(late, Some(Err(Error::TimedOut { .. }))), "{late:?}");
}

#[test]
fn a_stream_in_whose_place_another_began_that_pauses_is_told_of_its_circle() {
    let _local = Local::start(1);
    let folder = tempfile::tempdir().unwrap();
    let [begun, gate, go] = ["begun", "gate", "go"].map(|name| folder.path().join(name));
    let relay = Relay::remote();
    let mut items = relay.ends_in_a_circle(go.clone());
    let _others = relay.items_when(begun.clone(), gate.clone());
    wait_for(&begun);
    takes_all_but_the_last(&mut items);
    File::create(gate).unwrap();
    File::create(go).unwrap();
    is_told_of_its_circle(&mut items);
}

#[test]
fn a_stream_that_blocks_what_runs_beside_it_is_told_of_its_circle() {
    let _local = Local::start(1);
    let folder = tempfile::tempdir().unwrap();
    let [begun, gate, go] = ["begun", "gate", "go"].map(|name| folder.path().join(name));
    let relay = Relay::remote();
    let mut items = relay.blocks_in_a_circle(go.clone());
    let slow = relay.slow(begun.clone(), gate.clone());
    wait_for(&begun);
    takes_all_but_the_last(&mut items);
    File::create(go).unwrap();
    is_told_of_its_circle(&mut items);
    File::create(gate).unwrap();
    assert_eq!(slow.get_timeout_blocking(LIMIT).unwrap(), 7);
}

#[test]
fn a_stream_that_blocks_a_call_for_which_it_waits_beside_others_is_in_no_circle() {
    let _local = Local::start(2);
    let folder = tempfile::tempdir().unwrap();
    let [begun, gate, pipe] = ["begun", "gate", "pipe"].map(|name| folder.path().join(name));
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
    let mut items = Relay::remote().blocks_beside(begun.clone(), gate.clone(), pipe.clone());
    wait_for(&begun);
    takes_all_but_the_last(&mut items);
    is_told_of_nothing(&mut items);
    File::create(gate).unwrap();
    let _open = File::options().read(true).write(true).open(&pipe).unwrap();
    assert_eq!(wingbeat::block_on(items.next_timeout(LIMIT)).unwrap().unwrap(), 17);
}

#[test]
fn two_streams_in_whose_places_others_ran_are_told_of_their_circles() {
    let _local = Local::start(1);
    let folder = tempfile::tempdir().unwrap();
    let [begun, gate, go] = ["begun", "gate", "go"].map(|name| folder.path().join(name));
    let relay = Relay::remote();
    let mut streams = [relay.ends_in_a_circle(go.clone()), relay.ends_in_a_circle(go.clone())];
    let slow = relay.slow(begun.clone(), gate.clone());
    wait_for(&begun);
    streams.iter_mut().for_each(takes_all_but_the_last);
    File::create(gate).unwrap();
    assert_eq!(slow.get_timeout_blocking(LIMIT).unwrap(), 7);
    File::create(go).unwrap();
    streams.iter_mut().for_each(is_told_of_its_circle);
}

#[test]
fn a_stream_that_waits_for_what_began_in_its_place_is_in_no_circle() {
    let _local = Local::start(1);
    let folder = tempfile::tempdir().unwrap();
    let [begun, gate] = ["begun", "gate"].map(|name| folder.path().join(name));
    let mut items = Relay::remote().items(begun.clone(), gate.clone());
    wait_for(&begun);
    takes_all_but_the_last(&mut items);
    is_told_of_nothing(&mut items);
    File::create(gate).unwrap();
    assert_eq!(wingbeat::block_on(items.next_timeout(LIMIT)).unwrap().unwrap(), 7);
}

#[test]
fn an_option_changes_how_many_calls_of_a_concurrent_class_run_at_a_time() {
    let _local = Local::start(1);
    let meeting = Meeting::options().max_concurrency(MEMBERS as u32).remote();
    get_all_blocking(&meet(&meeting)).unwrap();
    let meeting = Meeting::options().max_concurrency(MEMBERS as u32 - 1).remote();
    let stuck = meet(&meeting);
    let error = stuck[0].get_timeout_blocking(Duration::from_millis(500)).unwrap_err();
    assert!(matches!(error, Error::TimedOut { .. }), "{error}");
    meeting.actor().kill();
}

#[test]
fn an_option_that_a_class_was_not_compiled_for_is_an_error() {
    let _local = Local::start(1);
    let error = Serial::options().max_concurrency(8).remote().hello().get_timeout_blocking(LIMIT).unwrap_err();
    assert!(error.to_string().contains("#[wingbeat::actor(max_concurrency = 8)]"), "{error}");
    Serial::options().max_concurrency(1).remote().hello().get_timeout_blocking(LIMIT).unwrap();
}
