//! `wingbeat stack`.

use std::borrow::Cow;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use futures::{StreamExt, stream};
use wingbeat_core::{InvalidId, JobId};
use wingbeat_net::messages::{ProcessStacks, ProgramStacks, StackFrame, Subject};
use wingbeat_net::mux;

use crate::cluster::{Where, connect};
use crate::named;
use crate::say::say;

/// The process has longer: it may get little CPU, and have much to read.
const LIMIT: Duration = Duration::from_secs(30);

/// So many processes of a job are looked at at a time. Each answers for itself, and a hang is what makes them slow.
const AT_ONCE: usize = 64;

/// Columns after which a function's place goes to the next line.
const WIDTH: usize = 80;

/// Show what the threads of a task's or actor's process do.
///
/// For a task that hangs, or takes long: which function is each thread in, and where does it sleep. Takes what `wingbeat why`
/// takes, a job for all of its processes but those of detached actors, and the process id of a worker process or of what it has
/// started, such as a rank: task-…, object-…, actor-…, process-…, job-…, 12345, or 12345@node-….
#[derive(Args)]
pub(crate) struct StackArgs {
    /// Whose.
    id: String,
    #[command(flatten)]
    at: Where,
    /// Print JSON for programs.
    #[arg(long)]
    json: bool,
}

/// What can be looked at, besides a job.
struct Looked(Subject);

impl FromStr for Looked {
    type Err = InvalidId;

    fn from_str(text: &str) -> Result<Looked, InvalidId> {
        let expected = "task-…, object-…, actor-…, process-…, job-… or a process id";
        text.parse().map(Looked).map_err(|invalid| InvalidId { expected, ..invalid })
    }
}

pub(crate) async fn stack(args: StackArgs) -> Result<()> {
    if args.id.starts_with("job-") {
        return of_job(args).await;
    }
    named::check::<Looked>(&args.id)?;
    let head = connect(&args.at).await?;
    let Looked(subject) = named::whole(&head, &args.id).await?.parse()?;
    let stacks = head.stacks(mux::within(LIMIT), subject).await.context("the head did not answer")??;
    if args.json {
        say!("{}", serde_json::to_string_pretty(&stacks)?);
        return Ok(());
    }
    // It may have ended since.
    if let Ok(Ok(explanation)) = head.explain(mux::within(LIMIT), subject).await {
        say!("{explanation}");
    }
    say!("{}", wingbeat_core::names::printable_lines(&shown(&stacks)).trim_end());
    Ok(())
}

/// What all processes of a job do.
async fn of_job(args: StackArgs) -> Result<()> {
    named::check::<JobId>(&args.id)?;
    let head = connect(&args.at).await?;
    let job: JobId = named::whole(&head, &args.id).await?.parse()?;
    let processes = head.processes_of_job(mux::within(LIMIT), job).await.context("the head did not answer")??;
    let asked = stream::iter(processes).map(async |process| {
        let answer = head.stacks(mux::within(LIMIT), Subject::Process(process)).await;
        (process, answer.map_err(|error| format!("the head did not answer: {error}")))
    });
    let mut answers = asked.buffer_unordered(AT_ONCE);
    let (mut told, mut answered, mut silent) = (Vec::new(), 0, 0);
    while let Some((process, answer)) = answers.next().await {
        let answer = answer.and_then(|answer| answer.map_err(|error| error.to_string()));
        let text = match &answer {
            Ok(stacks) => shown(stacks),
            // It may have ended since, or be the one that hangs.
            Err(why) => format!("{process} does not say what it does: {why}"),
        };
        if args.json {
            told.push(match &answer {
                Ok(stacks) => serde_json::to_value(stacks)?,
                Err(why) => serde_json::json!({ "process": process, "error": why }),
            });
        } else {
            // Those that hang may take long: what others say is shown before.
            let between = if answered + silent > 0 { "\n" } else { "" };
            say!("{between}{}", wingbeat_core::names::printable_lines(&text).trim_end());
        }
        *(if answer.is_ok() { &mut answered } else { &mut silent }) += 1;
    }
    if args.json {
        say!("{}", serde_json::to_string_pretty(&told)?);
    }
    match answered {
        0 if silent > 0 => bail!("none of the {silent} processes of {job} has answered"),
        0 if !args.json => say!("no process runs anything of {job} now"),
        _ => {}
    }
    Ok(())
}

/// A function's name without the types that it is made of, where those make it longer than a line.
fn without_long_types(function: &str) -> Cow<'_, str> {
    if function.chars().count() <= WIDTH {
        return function.into();
    }
    let (mut short, mut depth) = (String::new(), 0_usize);
    let mut before = ' ';
    // A name may begin with a type, as `<T as Trait>::name`: that stays. The `>` of `->` closes nothing.
    for letter in function.chars() {
        match letter {
            '<' if !short.is_empty() => {
                depth += 1;
                if depth == 1 {
                    short.push_str("<…>");
                }
            }
            '>' if before != '-' && depth > 0 => depth -= 1,
            _ if depth == 0 => short.push(letter),
            _ => {}
        }
        before = letter;
    }
    short.into()
}

fn shown(stacks: &ProcessStacks) -> String {
    let ProcessStacks { pid, hostname, runs, threads, idle, programs } = stacks;
    let mut text = format!("pid {pid} on {hostname}: {runs}\n");
    for ProgramStacks { pid, name, stacks } in programs {
        let name = if name.is_empty() { String::new() } else { format!("{name}: ") };
        text += &format!("\n{name}program {pid}, which it has started\n");
        stacks.lines().for_each(|line| text += &format!("    {line}\n"));
    }
    for thread in threads {
        text += &format!("\nthread {} `{}` {}\n", thread.tid, thread.name, thread.state);
        if let Some(note) = &thread.note {
            text += &format!("    ({note})\n");
        }
        for StackFrame { function, place } in &thread.frames {
            let function = without_long_types(function);
            let place = place.as_deref().unwrap_or_default();
            text += &match 4 + function.chars().count() + 2 + place.chars().count() {
                _ if place.is_empty() => format!("    {function}\n"),
                columns if columns <= WIDTH => format!("    {function}  {place}\n"),
                _ => format!("    {function}\n        {place}\n"),
            };
        }
    }
    match idle {
        0 => {}
        1 => text += "\nand 1 idle thread of the runtime\n",
        _ => text += &format!("\nand {idle} idle threads of the runtime\n"),
    }
    text
}

#[cfg(test)]
mod tests {
    use wingbeat_net::messages::ThreadStack;

    use super::*;

    #[test]
    fn what_can_be_looked_at_is_named_where_something_else_is_given() {
        let said = named::check::<Looked>("abc").unwrap_err().to_string();
        assert!(said.contains("actor-…, process-…, job-… or a process id"), "{said}");
    }

    #[test]
    fn a_name_longer_than_a_line_has_no_types_in_it() {
        let long = "tokio::runtime::runtime::Runtime::block_on<core::future::poll_fn::PollFn<impl Fn(u32) -> Option<u8>>>::inner";
        assert_eq!(without_long_types(long), "tokio::runtime::runtime::Runtime::block_on<…>::inner");
        let of_a_trait = "<std::os::unix::net::stream::UnixStream as std::io::Read>::read_buf::and::so::on::and::on";
        assert_eq!(without_long_types(of_a_trait), of_a_trait);
        assert_eq!(without_long_types("short<u8>"), "short<u8>");
    }

    #[test]
    fn a_stack_reads_from_the_innermost_function_outwards() {
        let frame = |function: &str, place: &str| StackFrame { function: function.into(), place: Some(place.into()) };
        let long = "a_crate::a_module::a_function_with_a_name_that_says_everything_about_it";
        let main = ThreadStack {
            tid: 7,
            name: "main".into(),
            state: "sleeps in the kernel's futex_do_wait".into(),
            frames: vec![frame("jobs::wait", "src/jobs.rs:12"), frame(long, "src/long.rs:1")],
            note: None,
        };
        let deaf = ThreadStack {
            tid: 8,
            note: Some("it blocks".into()),
            name: "deaf".into(),
            state: "runs".into(),
            ..Default::default()
        };
        let programs = vec![ProgramStacks {
            pid: 9,
            name: "rank 1 of 2".into(),
            stacks: "Thread 0x1 (most recent call first):\n  File \"train.py\"\n".into(),
        }];
        let threads = vec![main, deaf];
        let stacks =
            ProcessStacks { pid: 7, hostname: "here".into(), runs: "jobs::work".into(), threads, idle: 45, programs };
        let wanted = format!(
            "pid 7 on here: jobs::work\n\nrank 1 of 2: program 9, which it has started\n    Thread 0x1 (most recent call first):\n      File \"train.py\"\n\n\
             thread 7 `main` sleeps in the kernel's futex_do_wait\n    jobs::wait  src/jobs.rs:12\n    \
             {long}\n        src/long.rs:1\n\nthread 8 `deaf` runs\n    (it blocks)\n\nand 45 idle threads of the runtime\n"
        );
        assert_eq!(shown(&stacks), wanted);
    }
}
