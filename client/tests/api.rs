//! What the API promises, on a private cluster.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::BTreeMap;
use std::future::IntoFuture;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use wingbeat::{ActorPool, ActorRef, Error, ObjectRef, Queue, QueueError, Session, block_on, get_all, put, wait};

/// A private cluster that the test's thread has entered.
struct Local {
    session: Session,
    _entered: wingbeat::SessionGuard,
}

impl Local {
    fn start() -> Local {
        let init = wingbeat::init().num_cpus(2).global(false).log_to_driver(false);
        let session = block_on(init.into_future()).unwrap();
        let _entered = session.enter();
        Local { session, _entered }
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        block_on(self.session.shutdown());
    }
}

/// A file that is not there yet, for one test of this process.
fn shut_gate(test: &str) -> PathBuf {
    let gate = std::env::temp_dir().join(format!("wingbeat-gate-{}-{test}", std::process::id()));
    // Of an earlier process with this id that was killed.
    let _ = std::fs::remove_file(&gate);
    gate
}

#[wingbeat::remote]
async fn never() -> u64 {
    std::future::pending().await
}

#[wingbeat::remote]
async fn never_numbers() -> Vec<f32> {
    std::future::pending().await
}

#[wingbeat::remote(num_cpus = 2, memory = "1MiB")]
fn what_it_holds() -> BTreeMap<String, f64> {
    wingbeat::assigned_resources()
}

/// Says what it holds, and who it is.
struct Answering;

#[wingbeat::actor(memory = "2MiB")]
impl Answering {
    fn new() -> Self {
        Answering
    }
    fn holds(&self) -> BTreeMap<String, f64> {
        wingbeat::assigned_resources()
    }
    fn who(&self) -> wingbeat::Result<AnsweringHandle> {
        wingbeat::current_handle()
    }
    fn another(&self) -> wingbeat::Result<EchoHandle> {
        wingbeat::current_handle()
    }
}

#[wingbeat::remote(resources(license = 1), memory = "1MiB")]
fn licensed() -> u64 {
    7
}

#[wingbeat::remote(labels = "zone=nowhere")]
fn nowhere() -> u64 {
    7
}

/// Nobody ever has a license.
#[wingbeat::remote(resources(license = 1), wait_until_feasible, timeout = "20ms")]
fn patient() -> u64 {
    7
}

struct Door;

#[wingbeat::actor(max_pending_calls = 1)]
impl Door {
    fn new() -> Self {
        Door
    }
    #[method(timeout = "20ms")]
    async fn waits(&self) {
        wingbeat::cancelled().await
    }
    async fn waits_for_ever(&self) {
        wingbeat::cancelled().await
    }
}

#[wingbeat::actor(resources(license = 1), wait_until_feasible, spread)]
impl Lonely {
    fn new() -> Self {
        Lonely
    }
    #[method(timeout = "20ms")]
    fn hello(&self) {}
}

struct Lonely;

/// The first item is there at once, and the other when there is a file.
#[wingbeat::remote]
fn items_behind(gate: PathBuf) -> impl Iterator<Item = u64> {
    (0..2).inspect(move |number| {
        while *number > 0 && !gate.exists() {
            std::thread::yield_now();
        }
    })
}

#[wingbeat::remote]
fn fails() -> Result<u64, String> {
    Err("no".to_owned())
}

struct Echo;

#[wingbeat::actor]
impl Echo {
    fn new() -> Self {
        Echo
    }
    fn say(&self, x: u64) -> u64 {
        x
    }
}

#[wingbeat::remote]
async fn twice(x: u64) -> wingbeat::Result<u64> {
    if x == 0 { fails::remote().await } else { Ok(2 * x) }
}

/// What it begins with comes from a task.
struct Prepared {
    begins_with: u64,
}

#[wingbeat::actor]
impl Prepared {
    async fn new(x: u64) -> wingbeat::Result<Self> {
        Ok(Prepared { begins_with: twice::remote(x).await? })
    }
    async fn plus(&self, x: u64) -> wingbeat::Result<u64> {
        Ok(self.begins_with + twice::remote(x).await?)
    }
    fn items(&self) -> impl Iterator<Item = wingbeat::Result<u64>> {
        (0..self.begins_with).map(Ok).chain([Err(Error::NoSession)])
    }
}

struct Busy {
    waiting: AtomicU64,
}

// More than the executor has threads, so that calls share one.
#[wingbeat::actor(max_concurrency = 200)]
impl Busy {
    fn new() -> Self {
        Busy { waiting: AtomicU64::new(0) }
    }
    async fn waits_for(&self, gate: PathBuf) -> u64 {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        while !gate.exists() {
            tokio::task::yield_now().await;
        }
        1
    }
    async fn waiting(&self) -> u64 {
        self.waiting.load(Ordering::Relaxed)
    }
    fn alone(&mut self) -> u64 {
        2
    }
}

#[test]
fn what_is_said_of_how_to_join_has_no_secret() {
    let init = wingbeat::init_at("10.0.0.1:6420").token("0123456789abcdef").env("API_KEY", "sk-42").num_cpus(3);
    let shown = format!("{init:?} {init:#?}");
    assert!(shown.contains("10.0.0.1:6420") && shown.contains("API_KEY") && shown.contains("num_cpus"), "{shown}");
    assert!(!shown.contains("0123456789abcdef") && !shown.contains("sk-42"), "{shown}");
}

#[test]
fn tasks_methods_and_constructors_pass_errors_on_as_they_are() {
    let _local = Local::start();
    let prepared = Prepared::remote(2);
    assert_eq!(prepared.plus(3).get_blocking().unwrap(), 10);
    let error = prepared.plus(0).get_blocking().unwrap_err();
    assert_eq!(error.application::<String>().as_deref(), Some("no"), "{error}");
    let mut items = prepared.items();
    for wanted in 0..4 {
        assert_eq!(items.next_blocking().unwrap().unwrap(), wanted);
    }
    let last = items.next_blocking().unwrap().unwrap_err();
    assert!(matches!(last.application::<Error>(), Some(Error::NoSession)), "{last}");
    let error = Prepared::remote(0).plus(1).get_blocking().unwrap_err();
    assert_eq!(error.application::<String>().as_deref(), Some("no"), "{error}");
}

/// `Result` is here that of anyhow.
mod with_anyhow {
    use anyhow::{Context, Result, bail};

    #[wingbeat::remote]
    pub(crate) fn parsed(text: String) -> Result<u64> {
        text.parse::<u64>().with_context(|| format!("parsing {text:?}")).context("reading the table")
    }

    #[wingbeat::remote]
    pub(crate) async fn parsed_by_another(text: String) -> anyhow::Result<u64> {
        Ok(parsed::remote(text).await?)
    }

    #[wingbeat::remote]
    pub(crate) fn boxed() -> std::result::Result<(), Box<dyn std::error::Error + Send + Sync>> {
        Err("no box".into())
    }

    #[wingbeat::remote]
    pub(crate) fn items() -> impl Iterator<Item = Result<u64>> {
        [Ok(1), Err(anyhow::anyhow!("the end"))].into_iter()
    }

    #[wingbeat::remote(max_retries = 2, retry_if = |text: &String| text.contains("again"))]
    pub(crate) fn tried() -> anyhow::Result<u32, anyhow::Error> {
        match wingbeat::current_attempt() {
            Some(attempt) if attempt < 2 => bail!("again"),
            attempt => Ok(attempt.unwrap_or(0)),
        }
    }

    pub(crate) struct Opened;

    #[wingbeat::actor]
    impl Opened {
        pub(crate) async fn new(opens: bool) -> Result<Self> {
            if !opens {
                bail!("closed");
            }
            Ok(Opened)
        }
        pub(crate) fn read(&self) -> Result<u64> {
            bail!("nothing to read")
        }
    }
}

#[test]
fn an_error_of_anyhow_arrives_as_text_with_its_causes() {
    use with_anyhow::{Opened, boxed, items, parsed, parsed_by_another, tried};
    let _local = Local::start();
    assert_eq!(parsed::remote("7").get_blocking().unwrap(), 7);
    let error = parsed::remote("x").get_blocking().unwrap_err();
    let text = "reading the table: parsing \"x\": invalid digit found in string";
    assert_eq!(error.application::<String>().as_deref(), Some(text));
    assert!(error.to_string().contains(text), "{error}");
    let outer = parsed_by_another::remote("x").get_blocking().unwrap_err();
    assert!(outer.application::<String>().is_some_and(|outer| outer.contains(text)), "{outer}");
    let text_of = |error: Error| error.application::<String>().unwrap_or_else(|| panic!("{error}"));
    assert_eq!(text_of(boxed::remote().get_blocking().unwrap_err()), "no box");
    assert_eq!(text_of(Opened::remote(true).read().get_blocking().unwrap_err()), "nothing to read");
    assert_eq!(text_of(Opened::remote(false).read().get_blocking().unwrap_err()), "closed");
    let mut items = items::remote();
    assert_eq!(items.next_blocking().unwrap().unwrap(), 1);
    assert_eq!(text_of(items.next_blocking().unwrap().unwrap_err()), "the end");
    assert_eq!(tried::remote().get_blocking().unwrap(), 2, "it is tried again by its text");
}

#[test]
fn get_all_of_many_fails_without_waiting_for_the_ones_before() {
    let _local = Local::start();
    let slow = never::remote();
    let failing = fails::remote();
    let mut refs = vec![slow.clone()];
    refs.extend((0..100).map(|_| failing.clone()));
    let limited = async { tokio::time::timeout(Duration::from_secs(20), get_all(&refs)).await };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let error = runtime.block_on(limited).expect("get_all waited for a ref that is never ready").unwrap_err();
    assert_eq!(error.application::<String>().unwrap(), "no");
    slow.cancel();
}

#[test]
fn a_call_that_excludes_others_leaves_them_their_thread() {
    let _local = Local::start();
    let busy = Busy::remote();
    let gate = shut_gate("excludes");
    let waiting: Vec<_> = (0..150).map(|_| busy.waits_for(gate.clone())).collect();
    while busy.waiting().get_blocking().unwrap() < 150 {}
    // It shares a thread with some of those that it has to wait for.
    let alone = busy.alone();
    let (ready, _) = block_on(wait(vec![alone.clone()], 1, Some(Duration::from_millis(200)))).unwrap();
    assert!(ready.is_empty(), "a call that takes &mut self ran beside others");
    std::fs::write(&gate, "").unwrap();
    for call in waiting {
        assert_eq!(call.get_timeout_blocking(Duration::from_secs(20)).unwrap(), 1);
    }
    assert_eq!(alone.get_timeout_blocking(Duration::from_secs(20)).unwrap(), 2);
    std::fs::remove_file(&gate).unwrap();
}

#[test]
fn waiting_for_none_of_none_is_done() {
    let _local = Local::start();
    let (ready, rest) = block_on(wait(Vec::<ObjectRef<u64>>::new(), 1, None)).unwrap();
    assert!(ready.is_empty() && rest.is_empty());
}

#[test]
fn options_are_said_once_and_cloned_for_each_call() {
    let _local = Local::start();
    let options = fails::options().name("checked").max_retries(0);
    assert!(format!("{options:?}").contains("api::fails"), "{options:?}");
    for call in [options.clone(), options] {
        let error = call.remote().get_blocking().unwrap_err();
        assert!(error.to_string().starts_with("checked returned an error"), "{error}");
    }
    let options = Echo::options().num_cpus(0.0);
    assert!(format!("{options:?}").contains("api::Echo"), "{options:?}");
    let (one, other) = (options.clone().remote(), options.remote());
    assert_ne!(one.actor().id(), other.actor().id());
    assert_eq!((one.say(1).get_blocking().unwrap(), other.say(2).get_blocking().unwrap()), (1, 2));
}

#[test]
fn a_queue_gives_up_at_once_if_it_is_told_to_try() {
    let _local = Local::start();
    let queue = Queue::<u64>::bounded(1);
    let empty = block_on(queue.try_get()).unwrap_err();
    assert_eq!(empty.application::<QueueError>(), Some(QueueError::Empty));
    block_on(queue.try_put(&1)).unwrap();
    let full = block_on(queue.try_put(&2)).unwrap_err();
    assert_eq!(full.application::<QueueError>(), Some(QueueError::Full));
    assert_eq!(queue.get_blocking().unwrap(), 1);
}

#[test]
fn a_closed_queue_gives_what_is_left_and_then_says_so() {
    let _local = Local::start();
    let closed = |error: Error| assert_eq!(error.application::<QueueError>(), Some(QueueError::Closed), "{error}");
    let queue = Queue::<u64>::bounded(2);
    block_on(async {
        queue.put(&1).await.unwrap();
        queue.put(&2).await.unwrap();
        let limit = Duration::from_secs(20);
        let (waits, _) = tokio::join!(queue.put_timeout(&3, limit), async {
            // It waits for room by then, or is refused at once.
            queue.size().await.unwrap();
            queue.close().await.unwrap();
        });
        closed(waits.unwrap_err());
        closed(queue.put(&4).await.unwrap_err());
        assert_eq!((queue.get().await.unwrap(), queue.get().await.unwrap()), (1, 2), "what is left");
        closed(queue.get().await.unwrap_err());
        closed(queue.try_get().await.unwrap_err());
        queue.close().await.unwrap();
        let empty = Queue::<u64>::unbounded();
        let (waits, _) = tokio::join!(empty.get_timeout(limit), async {
            empty.size().await.unwrap();
            empty.close().await.unwrap();
        });
        closed(waits.unwrap_err());
    });
}

#[test]
fn what_an_item_of_a_queue_refers_to_lives_while_it_is_queued() {
    let _local = Local::start();
    let queue = Queue::<(ObjectRef<u64>, EchoHandle)>::unbounded();
    // After this, the queue's own are all that is left.
    queue.put_blocking(&(put(&7u64).unwrap(), Echo::remote())).unwrap();
    let (object, actor) = queue.get_blocking().unwrap();
    assert_eq!(actor.say(object.get_blocking().unwrap()).get_blocking().unwrap(), 7);
}

#[test]
fn work_of_a_pool_is_taken_in_order_or_as_it_ends() {
    let _local = Local::start();
    let pool = ActorPool::new([Echo::remote(), Echo::remote()]);
    block_on(async {
        let mut work = pool.work();
        for x in 0..10u64 {
            work.submit(|actor| actor.say(x)).await.unwrap();
        }
        for x in 0..5 {
            assert_eq!(work.next().await.unwrap().unwrap(), x);
        }
        let mut rest = Vec::new();
        while let Some(value) = work.next_unordered().await {
            rest.push(value.unwrap());
        }
        rest.sort_unstable();
        assert_eq!(rest, [5, 6, 7, 8, 9]);
        let none: Option<wingbeat::Result<u64>> = work.next().await;
        assert!(none.is_none());
    });
    let nobody = block_on(ActorPool::<EchoHandle>::new([]).map([1u64], |actor, x| actor.say(x))).unwrap_err();
    assert!(matches!(nobody, Error::InvalidArgument { .. }), "{nobody}");
}

#[test]
fn an_actor_is_found_and_ended_by_its_name_whatever_its_class() {
    let local = Local::start();
    let kept = Echo::options().namespace("elsewhere").name("kept").remote();
    let echo = Echo::options().name("echo").remote();
    assert_eq!(kept.say(1).get_blocking().unwrap() + echo.say(1).get_blocking().unwrap(), 2);
    let found = block_on(ActorRef::named("echo")).unwrap();
    assert_eq!((found.id(), found.class_name()), (echo.actor().id(), concat!(module_path!(), "::Echo")));
    assert!(matches!(block_on(ActorRef::named("kept")), Err(Error::ActorNotFound { .. })));
    let elsewhere = block_on(ActorRef::named_in("elsewhere", "kept")).unwrap();
    assert_eq!(elsewhere.id(), kept.actor().id());

    block_on(local.session.named_actor("echo")).unwrap().kill();
    assert!(matches!(echo.say(1).get_blocking(), Err(Error::ActorDied { .. })));
    assert!(matches!(block_on(ActorRef::named("echo")), Err(Error::ActorNotFound { .. })));

    // A handle as any other: the actor lives as long as there is one.
    drop(kept);
    let again = block_on(Echo::named_in("elsewhere", "kept")).unwrap();
    assert_eq!(again.say(3).get_blocking().unwrap(), 3);
    elsewhere.terminate();
    assert!(matches!(again.say(1).get_blocking(), Err(Error::ActorDied { .. })));
}

#[test]
fn a_name_is_found_in_its_namespace_only() {
    let _local = Local::start();
    let echo = Echo::options().namespace("elsewhere").name("echo").remote();
    assert_eq!(echo.say(1).get_blocking().unwrap(), 1);
    let found = block_on(Echo::named_in("elsewhere", "echo")).unwrap();
    assert_eq!(found.actor().id(), echo.actor().id());
    assert!(matches!(block_on(Echo::named("echo")), Err(Error::ActorNotFound { .. })));
}

#[test]
fn a_blocking_get_can_have_a_limit() {
    let _local = Local::start();
    let slow = never::remote();
    let error = slow.get_timeout_blocking(Duration::from_millis(20)).unwrap_err();
    assert!(matches!(error, Error::TimedOut { .. }), "{error}");
    slow.cancel();
}

#[test]
fn a_session_answers_for_its_own_cluster() {
    let init = wingbeat::init().private().num_cpus(3).resource("license", 2.0).global(false).log_to_driver(false);
    let session = block_on(init.into_future()).unwrap();
    assert!(matches!(Session::current(), Err(Error::NoSession)), "nothing is entered");
    block_on(async {
        let nodes = session.nodes().await.unwrap();
        assert_eq!((nodes.len(), nodes[0].resources["CPU"], nodes[0].is_open()), (1, 3.0, true));
        let all = session.cluster_resources().await.unwrap();
        assert_eq!((all["CPU"], all["license"]), (3.0, 2.0));
        assert_eq!(session.available_resources().await.unwrap()["license"], 2.0);
        let seven = session.put(&7u64).unwrap();
        assert_eq!(session.get_all([&seven]).await.unwrap(), [7]);
        let echo = session.scope(async { Echo::options().name("echo").remote() }).await;
        assert_eq!(echo.say(1).get().await.unwrap(), 1);
        let found: EchoHandle = session.named("echo").await.unwrap();
        assert_eq!(found.actor().id(), echo.actor().id());
        assert_eq!(session.named_actors().await.unwrap()[0].name, "echo");
        let waits = session.scope(async { never::remote() }).await;
        let why = session.why(waits.id()).await.unwrap();
        assert!(why.to_string().contains("never"), "{why}");
        waits.cancel();
        session.shutdown().await;
        assert!(session.is_over());
    });
}

#[test]
fn an_attribute_says_what_a_task_holds_and_where_and_options_say_otherwise() {
    let _local = Local::start();
    let error = licensed::remote().get_blocking().unwrap_err();
    assert!(matches!(&error, Error::Infeasible { asked, .. } if asked.contains("1 license")), "{error}");
    assert_eq!(licensed::options().resource("license", 0.0).remote().get_blocking().unwrap(), 7);
    let error = nowhere::remote().get_blocking().unwrap_err();
    assert!(matches!(error, Error::Infeasible { .. }), "{error}");
    assert_eq!(nowhere::options().labels("zone!=elsewhere").remote().get_blocking().unwrap(), 7);
}

#[test]
fn an_attribute_says_how_long_something_may_take_and_what_may_wait() {
    let _local = Local::start();
    let error = patient::remote().get_blocking().unwrap_err();
    assert!(matches!(error, Error::TimedOut { .. }), "it waits for a node, and not for ever: {error}");
    let error = Lonely::remote().hello().get_blocking().unwrap_err();
    assert!(matches!(error, Error::TimedOut { .. }), "its calls wait with the actor: {error}");
    let error = Door::remote().waits().get_blocking().unwrap_err();
    assert!(matches!(error, Error::TimedOut { .. }), "{error}");
    let door = Door::remote();
    let pending = door.waits_for_ever();
    let error = door.waits().get_blocking().unwrap_err();
    assert!(matches!(error, Error::TooManyPendingCalls { limit: 1, .. }), "{error}");
    pending.cancel();
}

#[test]
fn a_task_and_an_actor_know_what_they_hold() {
    let _local = Local::start();
    let held = |amounts: &[(&str, f64)]| amounts.iter().map(|(name, amount)| ((*name).to_owned(), *amount)).collect();
    let task: BTreeMap<String, f64> = held(&[("CPU", 2.0), ("memory", 1024.0 * 1024.0)]);
    assert_eq!(what_it_holds::remote().get_blocking().unwrap(), task);
    let actor: BTreeMap<String, f64> = held(&[("memory", 2.0 * 1024.0 * 1024.0)]);
    assert_eq!(Answering::remote().holds().get_blocking().unwrap(), actor, "it names no CPUs, and holds none");
    assert!(wingbeat::assigned_resources().is_empty(), "a driver holds nothing");
}

#[test]
fn an_actor_gives_a_handle_of_itself_which_keeps_it_alive() {
    let _local = Local::start();
    let actor = Answering::remote();
    let id = actor.actor().id();
    let same = actor.who().get_blocking().unwrap();
    drop(actor);
    assert_eq!(same.actor().id(), id);
    assert!(same.holds().get_blocking().is_ok());
    let error = same.another().get_blocking().unwrap_err();
    assert!(error.to_string().contains("::Answering, and not a "), "{error}");
    let error = wingbeat::current_handle::<AnsweringHandle>().unwrap_err();
    assert!(error.to_string().contains("outside of an actor"), "{error}");
}

#[test]
fn refs_of_several_types_are_waited_for_together() {
    let _local = Local::start();
    let (never, echo) = (never::remote(), licensed::options().resource("license", 0.0).memory(0).remote());
    let text = put(&"text".to_owned()).unwrap();
    let refs = vec![never.any(), text.any(), echo.any()];
    let (ready, waiting) = block_on(wait(refs, 2, None)).unwrap();
    assert_eq!(ready, [text.any(), echo.any()]);
    waiting[0].cancel();
    assert!(matches!(never.get_blocking(), Err(Error::Cancelled { .. })));
}

#[test]
fn streams_and_many_values_can_have_a_limit() {
    let _local = Local::start();
    let short = Duration::from_millis(20);
    let never = never::remote();
    let error = block_on(wingbeat::get_all_timeout([&never], short)).unwrap_err();
    assert!(matches!(error, Error::TimedOut { .. }), "{error}");
    never.cancel();
    let never = never_numbers::remote();
    let error = block_on(never.view_timeout(short)).unwrap_err();
    assert!(matches!(error, Error::TimedOut { .. }), "{error}");
    assert!(error.to_string().starts_with("viewing "), "{error}");
    never.cancel();
    let gate = shut_gate("items");
    let mut items = items_behind::remote(gate.clone());
    block_on(async {
        assert_eq!(items.next().await.unwrap().unwrap(), 0);
        let error = items.next_timeout(short).await.unwrap().unwrap_err();
        assert!(matches!(error, Error::TimedOut { .. }), "{error}");
        let error = items.next_ref_timeout(short).await.unwrap().unwrap_err();
        assert!(matches!(error, Error::TimedOut { .. }), "{error}");
        std::fs::write(&gate, "").unwrap();
        let item = items.next_ref_timeout(Duration::from_secs(20)).await.unwrap().unwrap();
        assert_eq!(item.get().await.unwrap(), 1, "the item is not lost");
        assert!(items.next_timeout(Duration::from_secs(20)).await.is_none());
    });
    std::fs::remove_file(&gate).unwrap();
}
