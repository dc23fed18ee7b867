//! What no program should do: each is an error that names what and where, and nothing else is lost.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::sync::atomic::AtomicU32;
use std::time::Duration;

use common::Local;
use wingbeat::__private::{Entry, inventory};
use wingbeat::{Error, ObjectRef, put};
use wingbeat_process::registry::{Defaults, Function};
use wingbeat_process::{Submitted, Value};
use wingbeat_tests::{TestCluster, poll};

#[wingbeat::remote]
fn length(data: Vec<u8>) -> u64 {
    data.len() as u64
}

#[wingbeat::remote]
fn square(x: u64) -> u64 {
    x * x
}

/// Fills the store until it says no, and keeps everything until its end. How much it was, and what the store said.
#[wingbeat::remote]
fn eats_the_store() -> Vec<String> {
    let mut eaten: Vec<ObjectRef<Vec<u8>>> = Vec::new();
    loop {
        match put(&vec![eaten.len() as u8; 4 << 20]) {
            Ok(object) => eaten.push(object),
            Err(error) => return vec![eaten.len().to_string(), error.to_string()],
        }
    }
}

#[test]
fn an_argument_of_two_gibibytes_is_refused_by_name_and_size() {
    let _local = Local::from(wingbeat::init().num_cpus(1).object_store_memory(64 << 20));
    // Pages of zeros that nobody touches.
    let error = length::remote(vec![0u8; 2 << 30]).get_blocking().unwrap_err();
    match &error {
        Error::ObjectTooLarge { what, size, store, .. } => {
            assert!(what.contains("`data`") && what.contains("length"), "{error}");
            assert!(*size > 2 << 30 && *store == 64 << 20, "{error}");
        }
        other => panic!("{other}"),
    }
    assert!(matches!(put(&vec![0u8; 2 << 30]), Err(Error::ObjectTooLarge { .. })));
    assert_eq!(square::remote(3).get_blocking().unwrap(), 9);
}

#[test]
fn a_task_that_eats_the_store_is_told_and_what_it_ate_is_given_back() {
    let mut cluster = TestCluster::start(0, 0).unwrap();
    cluster.add_node(&["--num-cpus", "2", "--object-store-memory", "16MiB", "--spill-limit", "16MiB"]).unwrap();
    let _driver = Local::from(wingbeat::init_at(cluster.address()).token(&cluster.token().unwrap()));
    for _ in 0..2 {
        // The node hears a moment later that what the last one ate is dropped.
        let eats = || {
            let answer = eats_the_store::remote().get_blocking().unwrap();
            let (eaten, said) = (answer[0].parse::<u64>().unwrap(), &answer[1]);
            assert!(eaten <= 8, "{eaten} objects of 4 MiB went into 16 + 16 MiB");
            assert!(said.contains("no room in the node's store"), "{said}");
            (eaten >= 4).then_some(())
        };
        assert!(poll(Duration::from_secs(60), eats).is_some(), "what a task ate is not given back");
        assert_eq!(square::remote(3).get_blocking().unwrap(), 9);
    }
}

static MISSING: Function = Function {
    path: "nowhere::missing",
    signature: "fn(u64) -> u64",
    parameters: &["x"],
    outputs: Some(1),
    is_asynchronous: false,
    defaults: Defaults::NONE,
    run: |_| Err(Error::NoSession),
    checked: AtomicU32::new(0),
};

#[test]
fn a_function_that_the_worker_lacks_is_named() {
    let local = Local::start(1);
    let submitted = local.session.runtime().submit(&MISSING, Ok(Default::default()), &Default::default());
    let Submitted::Objects(outputs) = submitted else { panic!("not a stream") };
    let error = wingbeat::block_on(local.session.runtime().value(&outputs[0])).map(|_: Value| ()).unwrap_err();
    assert!(matches!(&error, Error::FunctionNotFound { .. }), "{error}");
    assert!(error.to_string().contains("bad_input::square"), "it does not say what there is: {error}");
    assert_eq!(square::remote(3).get_blocking().unwrap(), 9);
}

#[wingbeat::remote]
fn halves() -> (u64, u64) {
    (3, 4)
}

/// `halves` as another build declares it, of which nothing but what it gives is other: ids do not have that.
fn halves_elsewhere(outputs: Option<u32>) -> &'static Function {
    let here = inventory::iter::<Entry>().find_map(|entry| match entry {
        Entry::Function(function) if function.path.ends_with("::halves") => Some(function),
        _ => None,
    });
    let Function { path, signature, parameters, run, .. } = here.unwrap();
    let (is_asynchronous, checked, defaults) = (false, AtomicU32::new(0), Defaults::NONE);
    Box::leak(Box::new(Function {
        path,
        signature,
        parameters,
        outputs,
        is_asynchronous,
        defaults,
        run: *run,
        checked,
    }))
}

#[test]
fn a_caller_that_expects_other_outputs_is_told_and_does_not_wait() {
    let local = Local::start(1);
    let submit = |outputs| {
        local.session.runtime().submit(halves_elsewhere(outputs), Ok(Default::default()), &Default::default())
    };
    let Submitted::Objects(outputs) = submit(Some(2)) else { panic!("not a stream") };
    for output in &outputs {
        let error = wingbeat::block_on(local.session.runtime().value(output)).map(|_: Value| ()).unwrap_err();
        assert!(error.to_string().contains("another build"), "{error}");
    }
    let Submitted::Stream(mut items) = submit(None) else { panic!("a stream") };
    let error = wingbeat::block_on(std::future::poll_fn(|cx| items.poll_item(&mut None, cx)))
        .unwrap()
        .map(|_: Value| ())
        .unwrap_err();
    assert!(error.to_string().contains("another build"), "{error}");
    assert_eq!(halves::remote().get_blocking().unwrap(), (3, 4));
}

#[wingbeat::main]
async fn fails_with_a_sentence() -> Result<(), Error> {
    Err(Error::InvalidArgument { what: "the sentence".into() })
}

#[wingbeat::main]
async fn fails_with_causes() -> anyhow::Result<()> {
    use anyhow::Context as _;
    Err(std::io::Error::other("the cause")).context("the sentence")
}

#[wingbeat::main]
async fn ends_well() {}

#[test]
fn an_error_that_leaves_main_is_printed_as_a_sentence() {
    const WHICH: &str = "WINGBEAT_TEST_MAIN";
    let test = "an_error_that_leaves_main_is_printed_as_a_sentence";
    let code = match std::env::var(WHICH).as_deref() {
        Ok("sentence") => Some(fails_with_a_sentence()),
        Ok("causes") => Some(fails_with_causes()),
        Ok(_) => Some(ends_well()),
        Err(_) => None,
    };
    if let Some(code) = code {
        assert_eq!(code == std::process::ExitCode::SUCCESS, std::env::var(WHICH).as_deref() == Ok("well"));
        return;
    }
    for (which, printed) in
        [("sentence", "error: the sentence"), ("causes", "error: the sentence: the cause"), ("well", "")]
    {
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        let output = command.args(["--exact", test, "--nocapture"]).env(WHICH, which).output().unwrap();
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{err}");
        assert_eq!(err.lines().find(|line| line.starts_with("error: ")).unwrap_or_default(), printed);
    }
}
