//! The end of a session, as everybody sees it who still holds something of it.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::future::{IntoFuture, poll_fn};
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::mpsc;
use std::task::Poll;
use std::time::Duration;

use common::{Local, Started};
use wingbeat::{
    Bundle, ClusterId, Error, ObjectRef, ObjectStream, Result, Session, placement_group, put, wait_blocking,
};
use wingbeat_tests::TestCluster;

/// Only what hangs takes so long.
const LIMIT: Duration = Duration::from_secs(60);

#[wingbeat::remote]
fn square(x: u64) -> u64 {
    x * x
}

#[wingbeat::remote]
fn zeros(len: usize) -> Vec<u8> {
    vec![0; len]
}

#[wingbeat::remote]
fn nested_ref(inner: Vec<ObjectRef<u64>>) -> Vec<ObjectRef<u64>> {
    inner
}

#[wingbeat::remote]
fn never_ends(started: PathBuf) -> u64 {
    std::fs::write(started, "").unwrap();
    loop {
        std::thread::park();
    }
}

#[wingbeat::remote]
fn never_yields() -> impl Iterator<Item = u64> {
    std::iter::from_fn(|| {
        loop {
            std::thread::park();
        }
    })
}

struct Deaf;

#[wingbeat::actor]
impl Deaf {
    fn new() -> Self {
        Deaf
    }
    fn hear(&self) -> u64 {
        loop {
            std::thread::park();
        }
    }
}

fn is_over<T>(result: Result<T>) -> bool {
    matches!(result, Err(Error::SessionEnded { .. }))
}

/// Runs each wait on a thread of its own; answers with what each gave.
struct Waits {
    sender: mpsc::Sender<(&'static str, bool)>,
    results: mpsc::Receiver<(&'static str, bool)>,
    names: Vec<&'static str>,
}

impl Waits {
    fn new() -> Waits {
        let (sender, results) = mpsc::channel();
        Waits { sender, results, names: Vec::new() }
    }

    fn add<T>(&mut self, name: &'static str, wait: impl FnOnce() -> Result<T> + Send + 'static) {
        let sender = self.sender.clone();
        self.names.push(name);
        std::thread::spawn(move || sender.send((name, is_over(wait()))));
    }

    /// Every wait must end with the end of the session.
    fn all_say_that_the_session_is_over(mut self) {
        while !self.names.is_empty() {
            let Ok((name, over)) = self.results.recv_timeout(LIMIT) else {
                panic!("still waiting: {:?}", self.names);
            };
            assert!(over, "{name} must say that the session has ended");
            self.names.retain(|waiting| *waiting != name);
        }
    }
}

#[test]
fn who_waits_hears_of_the_end_of_the_session() {
    let local = Local::start(2);
    let started = Started::new();
    let running = never_ends::remote(started.path());
    started.wait();
    let dependent = square::remote(&running);
    let deaf = Deaf::remote();
    let (call, later) = (deaf.hear(), deaf.hear());
    let mut stream: ObjectStream<u64> = never_yields::remote();
    let group =
        wingbeat::block_on(placement_group([Bundle::new().num_cpus(1000.0)]).wait_until_feasible().into_future())
            .unwrap();
    let group = group.ready();

    let mut waits = Waits::new();
    let object = running.clone();
    waits.add("a running task", move || object.get_blocking());
    let object = running.clone();
    waits.add("a wait with a limit", move || object.get_timeout_blocking(LIMIT * 10));
    let object = dependent.clone();
    waits.add("a task that waits for its argument", move || object.get_blocking());
    waits.add("a call", move || call.get_blocking());
    waits.add("a queued call", move || later.get_blocking());
    waits.add("a stream", move || stream.next_blocking().unwrap());
    waits.add("a placement group", move || group.get_blocking());
    let both = vec![running.clone(), dependent.clone()];
    waits.add("wait()", move || {
        let (ready, _) = wait_blocking(both, 2, None)?;
        assert_eq!(ready.len(), 2, "what failed is ready");
        ready[1].get_blocking()
    });
    wingbeat::block_on(local.session.shutdown());
    waits.all_say_that_the_session_is_over();
    assert!(running.is_ready() && dependent.is_ready());
}

#[test]
fn small_values_can_be_read_after_the_session_and_nothing_else() {
    let local = Local::start(1);
    let small = square::remote(3);
    let unread = square::remote(4);
    let put_small = put(&7u64).unwrap();
    let put_large = put(&vec![1u8; 1 << 20]).unwrap();
    let large = zeros::remote(1 << 20);
    let inner = nested_ref::remote(vec![put_small.clone()]);
    assert_eq!(small.get_blocking().unwrap(), 9);
    wait_blocking(vec![unread.clone()], 1, None).unwrap();
    wait_blocking(vec![large.clone()], 1, None).unwrap();
    wait_blocking(vec![inner.clone()], 1, None).unwrap();
    let view = put_large.view_blocking().unwrap();
    wingbeat::block_on(local.session.shutdown());

    assert_eq!(small.get_blocking().unwrap(), 9);
    assert_eq!(unread.get_blocking().unwrap(), 16);
    assert_eq!(put_small.get_blocking().unwrap(), 7);
    assert!(is_over(put_large.get_blocking()));
    assert!(is_over(put_large.get_timeout_blocking(LIMIT)));
    assert!(is_over(large.view_blocking()));
    assert_eq!(view.len(), 1 << 20, "what was mapped stays mapped");
    // The vector is here, and the refs inside it lead nowhere.
    let refs = inner.get_blocking().unwrap();
    assert!(is_over(refs[0].get_blocking()));
}

#[test]
fn nothing_can_be_started_after_the_session() {
    let local = Local::start(1);
    let deaf = Deaf::remote();
    let large = put(&vec![1u8; 1 << 20]).unwrap();
    let group = wingbeat::block_on(placement_group([Bundle::new().num_cpus(1.0)]).into_future()).unwrap();
    wingbeat::block_on(local.session.shutdown());

    assert!(is_over(square::remote(1).get_blocking()));
    assert!(is_over(deaf.hear().get_blocking()));
    assert!(is_over(Deaf::remote().hear().get_blocking()));
    assert!(is_over(never_yields::remote().next_blocking().unwrap()));
    assert!(is_over(put(&1u64)));
    assert!(is_over(put(&large)));
    assert!(is_over(group.ready().get_blocking()));
    assert!(is_over(wingbeat::block_on(placement_group([Bundle::new().num_cpus(1.0)]).into_future())));
    assert!(is_over(wingbeat::block_on(group.remove())));
    assert!(is_over(wingbeat::block_on(local.session.runtime().cluster_state())));
}

#[test]
fn what_is_submitted_while_another_thread_shuts_down_ends_too() {
    for _ in 0..5 {
        let local = Local::start(1);
        let session = local.session.clone();
        let (first, begun) = mpsc::channel();
        let submitting = std::thread::spawn(move || {
            let _entered = session.enter();
            let mut refs = Vec::new();
            loop {
                let object = square::remote(refs.len() as u64);
                if refs.len() == 10 {
                    first.send(()).unwrap();
                }
                // It was refused at once: the end was seen.
                let refused = object.is_ready() && is_over(object.get_blocking());
                refs.push(object);
                if refused {
                    return refs;
                }
            }
        });
        begun.recv().unwrap();
        wingbeat::block_on(local.session.shutdown());
        let mut waits = Waits::new();
        waits.add("every ref", move || {
            for (x, object) in submitting.join().unwrap().into_iter().enumerate() {
                match object.get_blocking() {
                    Ok(square) => assert_eq!(square, (x * x) as u64),
                    Err(Error::SessionEnded { .. }) => {}
                    Err(other) => return Err(other),
                }
            }
            put(&1u64)
        });
        let (_, _) = waits.results.recv_timeout(LIMIT).expect("every ref ends");
    }
}

#[test]
fn an_explanation_can_be_printed() {
    let local = Local::start(1);
    let started = Started::new();
    let running = never_ends::remote(started.path());
    started.wait();
    let why: wingbeat::Explanation = wingbeat::block_on(local.session.why(running.id())).unwrap();
    assert!(why.to_string().contains("never_ends"), "{why}");
}

#[test]
fn a_removed_group_is_named_once() {
    let _local = Local::start(1);
    let group = wingbeat::block_on(placement_group([Bundle::new().num_cpus(1.0)]).into_future()).unwrap();
    group.ready().get_timeout_blocking(LIMIT).unwrap();
    wingbeat::block_on(group.remove()).unwrap();
    let error = square::options().in_group(&group).remote(1).get_timeout_blocking(LIMIT).unwrap_err().to_string();
    assert_eq!(error.matches("cannot run").count(), 1, "{error}");
    assert_eq!(error.matches(&group.id().to_string()).count(), 1, "{error}");
}

#[test]
fn a_lost_head_ends_what_is_asked_for_later_too() {
    let soon = [("WINGBEAT_SILENCE_MS", "1000"), ("WINGBEAT_LOST_MS", "3000")];
    if common::runs_again_with("a_lost_head_ends_what_is_asked_for_later_too", &soon) {
        return;
    }
    let mut cluster = wingbeat_tests::TestCluster::start(1, 1).unwrap();
    let token = cluster.token().unwrap();
    let local = Local::from(wingbeat::init_at(cluster.address()).token(&token));
    let group = wingbeat::block_on(placement_group([Bundle::new().num_cpus(1.0)]).into_future()).unwrap();
    group.ready().get_timeout_blocking(LIMIT).unwrap();
    let object = put(&7u64).unwrap();
    cluster.kill_head().unwrap();
    let mut waits = Waits::new();
    let session = local.session.clone();
    waits.add("the session", move || {
        wingbeat::block_on(session.runtime().process().over());
        Err::<(), _>(Error::SessionEnded { why: String::new() })
    });
    waits.all_say_that_the_session_is_over();

    let mut waits = Waits::new();
    let ready = group.ready();
    waits.add("a group", move || ready.get_blocking());
    let result = square::remote(2);
    waits.add("a task", move || result.get_blocking());
    waits.all_say_that_the_session_is_over();
    let text = square::remote(2).get_blocking().unwrap_err().to_string();
    assert!(text.contains("the head at"), "{text}");
    assert_eq!(object.get_blocking().unwrap(), 7);
}

/// Ends, as code may that is shared with programs, what it believes to be its own session.
#[wingbeat::remote]
fn shuts_down() -> (u32, String) {
    let joined = wingbeat::init_blocking().unwrap_err().to_string();
    wingbeat::shutdown_blocking();
    (std::process::id(), joined)
}

#[test]
fn what_runs_in_a_task_can_neither_join_for_its_process_nor_end_its_session() {
    let _local = Local::start(1);
    let (first, refused) = shuts_down::remote().get_timeout_blocking(LIMIT).unwrap();
    assert!(refused.contains("in the session of its job already"), "{refused}");
    let (second, _) = shuts_down::remote().get_timeout_blocking(LIMIT).unwrap();
    assert_eq!(first, second, "its process goes on");
}

#[test]
fn of_two_who_join_for_the_whole_process_one_is_refused() {
    let both = std::thread::scope(|scope| {
        [(); 2].map(|()| scope.spawn(wingbeat::init_blocking)).map(|joins| joins.join().unwrap())
    });
    let refused: Vec<String> = both.iter().filter_map(|joined| joined.as_ref().err()).map(Error::to_string).collect();
    let [refused] = &refused[..] else { panic!("{refused:?}") };
    assert!(refused.contains("is joining a cluster") || refused.contains("has joined a cluster"), "{refused}");
    assert!(wingbeat::init_blocking().unwrap_err().to_string().contains("has joined a cluster already"));
    wingbeat::shutdown_blocking();
    wingbeat::init_blocking().unwrap();
    wingbeat::shutdown_blocking();
}

/// Says when it is dropped in which cluster that was.
struct Dropped(mpsc::Sender<Option<ClusterId>>);

impl Drop for Dropped {
    fn drop(&mut self) {
        self.0.send(Session::current().ok().map(|session| session.cluster())).unwrap();
    }
}

#[test]
fn what_is_given_up_in_a_scope_is_dropped_in_its_session() {
    let session = wingbeat::block_on(wingbeat::init().num_cpus(1).global(false).into_future()).unwrap();
    let (dropped, dropped_in) = mpsc::channel();
    let dropped = Dropped(dropped);
    let mut scope = session.scope(async move {
        let _dropped = dropped;
        std::future::pending::<()>().await;
    });
    let is_pending =
        wingbeat::block_on(poll_fn(|context| Poll::Ready(Pin::new(&mut scope).poll(context).is_pending())));
    assert!(is_pending);
    drop(scope);
    assert_eq!(dropped_in.recv().unwrap(), Some(session.cluster()));
    session.shutdown_blocking();
}

#[test]
fn a_session_that_was_shut_down_says_so_whatever_it_is_asked() {
    let session = wingbeat::block_on(wingbeat::init().num_cpus(1).global(false).into_future()).unwrap();
    assert_eq!(wingbeat::block_on(session.nodes()).unwrap().len(), 1);
    session.shutdown_blocking();
    let nodes = wingbeat::block_on(session.nodes()).unwrap_err();
    let available = wingbeat::block_on(session.available_resources()).unwrap_err();
    for error in [nodes, available] {
        assert!(matches!(error, Error::SessionEnded { .. }), "{error:?}");
        assert!(error.to_string().contains("shut down") && !error.to_string().contains("gone"), "{error}");
    }
}

#[test]
fn a_private_cluster_ends_also_where_whoever_ends_it_does_not_wait() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let session = runtime.block_on(wingbeat::init().num_cpus(1).global(false).into_future()).unwrap();
    let nodes = runtime.block_on(session.nodes()).unwrap();
    assert_eq!(nodes.len(), 1);
    runtime.block_on(async {
        let mut shutdown = std::pin::pin!(session.shutdown());
        assert!(futures::poll!(&mut shutdown).is_pending());
    });
    while !session.is_over() {
        std::thread::yield_now();
    }
}

#[test]
fn what_a_program_has_put_is_there_when_another_program_of_its_machine_ends() {
    let cluster = TestCluster::start(0, 0).unwrap();
    let join = || {
        let init = wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap()).global(false);
        wingbeat::block_on(init.into_future()).unwrap()
    };
    let (first, second) = (join(), join());
    let value = {
        let _entered = second.enter();
        put(&vec![7_u8; 1 << 20]).unwrap()
    };
    first.shutdown_blocking();
    assert_eq!(value.get_timeout_blocking(LIMIT).unwrap().len(), 1 << 20);
    second.shutdown_blocking();
}
