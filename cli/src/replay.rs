//! `wingbeat replay`: what a head and nodes took in, played back; and what drivers and worker processes heard and said.

mod brief;

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, bail};
use clap::Args;
use wingbeat_head::state as head;
use wingbeat_net::recording::{self, EXTENSION, Played};
use wingbeat_node as node;
use wingbeat_process::recorded as process;

use self::brief::{brief, names};
use crate::say::{fail, say};

/// Play back what a head and nodes took in, and check that they decide the same again; show what drivers and worker
/// processes heard and said.
///
///     WINGBEAT_RECORD=/tmp/recording wingbeat head      (and so with workers and programs)
///     wingbeat replay /tmp/recording                    what there is, and whether it comes out the same
///     wingbeat replay /tmp/recording --around 9f1c      every step that names this: any part of an id
///     wingbeat replay /tmp/recording --around 9f1c --merged   the same, of all recordings in one order
///     wingbeat replay /tmp/recording --at 12.5          the steps of that second, and the state after them
///
/// Nodes record what concerns their worker processes, each from its own start. A driver records its own messages and has its
/// worker processes record theirs; so does a node for all of its worker processes. Users' threads enter a driver or worker
/// process at any time: what it said is shown, and not checked. Values of programs, what they print, the texts of their errors
/// and panics, and environments are not recorded; names, addresses, paths and texts of errors of the runtime are. A recording
/// ends at 256 MiB (WINGBEAT_RECORD_MB). It is played by the build that wrote it.
#[derive(Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct ReplayArgs {
    /// A folder of recordings, or one of them.
    recording: PathBuf,
    /// Show the steps that name this: an id, or any word.
    #[arg(long)]
    around: Option<String>,
    /// Show the steps of half a second before and after this moment, in seconds from the start, and the state after those steps.
    #[arg(long)]
    at: Option<f64>,
    /// Show all steps.
    #[arg(long)]
    all: bool,
    /// Show steps with all that was recorded of them: all steps, unless `--around` or `--at` says which.
    #[arg(long)]
    full: bool,
    /// Show the steps of all recordings together, ordered by the clocks of their machines: all steps, unless `--around` or `--at` says which. They are in memory until all are read.
    #[arg(long)]
    merged: bool,
}

impl ReplayArgs {
    fn shows_all(&self) -> bool {
        let chooses = self.around.is_some() || self.at.is_some();
        self.all || (self.full || self.merged) && !chooses
    }
}

/// What is played.
trait Machine {
    type Input: std::fmt::Debug;
    /// Whether it decides the same from the same.
    const IS_CHECKED: bool;
    fn take_in(&mut self, now: u64, input: Self::Input) -> Vec<String>;
    /// All that it knows, for people; none if that does not follow from what it took in.
    fn state(&self) -> Option<String>;
    /// What was taken in, in parts that are shown alone.
    fn parts(input: &Self::Input) -> Vec<Part>;
}

/// A part of a step: who said it to whom, and what `Debug` shows of it.
struct Part {
    way: String,
    text: String,
}

impl Part {
    fn of(input: &impl std::fmt::Debug) -> Vec<Part> {
        vec![Part { way: String::new(), text: format!("{input:?}") }]
    }
}

impl Machine for head::State {
    type Input = head::Input;
    const IS_CHECKED: bool = true;

    fn take_in(&mut self, now: u64, input: head::Input) -> Vec<String> {
        recording::texts(&self.replay(now, input))
    }

    fn state(&self) -> Option<String> {
        Some(format!("{:#?}", self.picture()))
    }

    fn parts(input: &head::Input) -> Vec<Part> {
        Part::of(input)
    }
}

impl Machine for node::State {
    type Input = node::Event;
    const IS_CHECKED: bool = true;

    fn take_in(&mut self, now: u64, input: node::Event) -> Vec<String> {
        recording::texts(&self.step(now, input))
    }

    fn state(&self) -> Option<String> {
        let processes: Vec<_> = self.processes().collect();
        Some(format!("worker processes: {processes:#?}\nleases: {:#?}", self.running()))
    }

    fn parts(input: &node::Event) -> Vec<Part> {
        Part::of(input)
    }
}

/// A driver or a worker process.
struct Process;

impl Machine for Process {
    type Input = process::Event;
    const IS_CHECKED: bool = false;

    fn take_in(&mut self, _: u64, _: process::Event) -> Vec<String> {
        Vec::new()
    }

    fn state(&self) -> Option<String> {
        None
    }

    fn parts(event: &process::Event) -> Vec<Part> {
        fn each<T: std::fmt::Debug>(way: &str, said: &[T]) -> Vec<Part> {
            said.iter().map(|said| Part { way: way.to_owned(), text: format!("{said:?}") }).collect()
        }
        match event {
            process::Event::FromProcess(from, messages) => each(&format!("from {from}: "), messages),
            process::Event::ToProcess(to, message) => each(&format!("to {to}: "), std::slice::from_ref(message)),
            process::Event::FromHead(events) => each("from the head: ", events),
            process::Event::ToHead(message) => each("to the head: ", std::slice::from_ref(message)),
            process::Event::FromNode(commands) => each("from its node: ", commands),
            process::Event::ToNode(node, message) => each(&format!("to {node}: "), std::slice::from_ref(message)),
            process::Event::CreateActor(_) | process::Event::CreateGroup(_) | process::Event::RemoveGroup(_) => {
                each("to the head: ", std::slice::from_ref(event))
            }
            process::Event::Unsent(_)
            | process::Event::Stored(..)
            | process::Event::Fetched(..)
            | process::Event::Connected(..)
            | process::Event::Disconnected(_)
            | process::Event::ContactLost(..)
            | process::Event::HeadConnected
            | process::Event::HeadDisconnected
            | process::Event::HeadRestarted
            | process::Event::NodeAttached(_)
            | process::Event::Ended(_) => Part::of(event),
        }
    }
}

/// A line that is shown with those of other recordings.
struct Line {
    /// In microseconds since 1970.
    at: u64,
    name: String,
    text: String,
}

/// Shows lines at once, or all of them in one order at the end.
#[derive(Default)]
struct Lines {
    merged: Option<Vec<Line>>,
    /// Steps that name what was asked for.
    named: u64,
}

impl Lines {
    fn show(&mut self, at: u64, number: u64, now: u64, name: &str, text: &str) {
        match &mut self.merged {
            None => say!("  {number:>6} at {:.3} s  {text}", now as f64 / 1000.0),
            Some(lines) => lines.push(Line { at, name: name.to_owned(), text: text.to_owned() }),
        }
    }

    fn follows(&mut self, at: u64, name: &str, text: &str) {
        match &mut self.merged {
            None => say!("         → {text}"),
            Some(lines) => lines.push(Line { at, name: name.to_owned(), text: format!("→ {text}") }),
        }
    }

    fn end(self) {
        let mut lines = self.merged.unwrap_or_default();
        // Stable: what followed stays behind what it followed from.
        lines.sort_by_key(|line| line.at);
        for line in lines {
            let at = SystemTime::UNIX_EPOCH + Duration::from_micros(line.at);
            say!("  {}  {}  {}", humantime::format_rfc3339_micros(at), line.name, line.text);
        }
    }
}

pub(crate) fn replay(args: &ReplayArgs) -> Result<()> {
    let mut files = Vec::new();
    if args.recording.is_dir() {
        for entry in std::fs::read_dir(&args.recording).context("cannot read the folder")? {
            let path = entry.context("cannot read the folder")?.path();
            files.extend(path.extension().is_some_and(|extension| extension == EXTENSION).then_some(path));
        }
        files.sort();
    } else {
        files.push(args.recording.clone());
    }
    if files.is_empty() {
        bail!("no recordings are in {}: they end with .{EXTENSION}", args.recording.display());
    }
    let (mut differ, mut unread) = (0, 0);
    let mut lines = Lines { merged: args.merged.then(Vec::new), named: 0 };
    for file in &files {
        let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        match play_file(file, &name, args, &mut lines) {
            Ok(is_same) => differ += u32::from(!is_same),
            // The others may tell.
            Err(error) => {
                unread += 1;
                fail!("{error:#}");
            }
        }
    }
    let named = lines.named;
    lines.end();
    match (differ, unread) {
        (0, 0) => match &args.around {
            Some(around) if named == 0 => bail!("no step of {} recordings names `{around}`", files.len()),
            _ => Ok(()),
        },
        (differ, 0) => bail!("{differ} of {} recordings came out differently", files.len()),
        (0, unread) => bail!("{unread} of {} recordings cannot be played to the end", files.len()),
        (differ, unread) => {
            bail!("of {} recordings, {differ} came out differently and {unread} cannot be played", files.len())
        }
    }
}

fn play_file(file: &Path, name: &str, args: &ReplayArgs, lines: &mut Lines) -> Result<bool> {
    if std::fs::metadata(file).is_ok_and(|file| file.len() == 0) {
        say!("{name}: empty, because its process was killed as it began");
        return Ok(true);
    }
    match recording::kind(file)? {
        recording::Machine::Head => {
            let (with, played) = Played::<head::Beginning, head::Input>::open(file)?;
            play(name, head::State::begun(with), played, args, lines)
        }
        recording::Machine::Node => {
            let (with, played) = Played::<node::Config, node::Event>::open(file)?;
            play(name, node::State::new(with), played, args, lines)
        }
        recording::Machine::Process => {
            let (_, played) = Played::<process::Beginning, process::Event>::open(file)?;
            play(name, Process, played, args, lines)
        }
    }
}

/// Plays one recording. Whether the same came out as then.
fn play<B, M: Machine>(
    name: &str,
    mut machine: M,
    mut played: Played<B, M::Input>,
    args: &ReplayArgs,
    lines: &mut Lines,
) -> Result<bool>
where
    B: serde::de::DeserializeOwned,
    M::Input: serde::de::DeserializeOwned,
{
    let moment = args.at.map(|seconds| (seconds * 1000.0).max(0.0) as u64);
    let (mut steps, mut last, mut different, mut is_state_due) = (0u64, 0, None, moment.is_some());
    let begun = SystemTime::UNIX_EPOCH + Duration::from_micros(played.begun);
    let (short_name, _) = name.rsplit_once('.').unwrap_or((name, ""));
    let line = |text: &str| if args.full { text.to_owned() } else { brief(text, args.around.as_deref()) };
    let names_it = |text: &str| args.around.as_deref().is_some_and(|word| names(text, word));
    say!("{name}, from {}", humantime::format_rfc3339_millis(begun));
    while let Some(step) = played.next_step().with_context(|| format!("{name} cannot be played after step {steps}"))? {
        if is_state_due && moment.is_some_and(|moment| step.now > moment + 500) {
            show_state("after these steps", &machine);
            is_state_due = false;
        }
        (steps, last) = (steps + 1, step.now);
        let parts = M::parts(&step.input);
        let actions = machine.take_in(step.now, step.input);
        let is_near = moment.is_some_and(|moment| step.now.abs_diff(moment) <= 500);
        let follows_named = actions.iter().any(|action| names_it(action));
        let names_part = |part: &Part| names_it(&part.way) || names_it(&part.text);
        lines.named += u64::from(follows_named || parts.iter().any(names_part));
        let (at, shows_all) = (played.begun + step.at, args.shows_all() || is_near || follows_named);
        let mut is_shown = false;
        for part in parts.iter().filter(|part| shows_all || names_part(part)) {
            is_shown = true;
            let text = format!("{}{}", part.way, line(&part.text));
            lines.show(at, steps, step.now, short_name, &text);
        }
        if is_shown {
            actions.iter().for_each(|action| lines.follows(at, short_name, &line(action)));
        }
        if M::IS_CHECKED && different.is_none() && recording::digest(&actions) != step.digest {
            different = Some(steps);
            say!("  step {steps} at {:.3} s came out differently:", step.now as f64 / 1000.0);
            parts.iter().for_each(|part| say!("         {}{}", part.way, part.text));
            actions.iter().for_each(|action| say!("         → {action}"));
        }
    }
    if is_state_due {
        show_state("at the end", &machine);
    }
    let end = match (played.is_full, played.is_behind, played.is_cut) {
        (true, _, _) => ", where it was full",
        (_, true, _) => ", where the disk was too slow for it",
        (_, _, true) => ", where it ends in the middle of a step (its process was killed, or the rest was lost)",
        _ => "",
    };
    let result = match different {
        None if !M::IS_CHECKED => "shown, and not checked: a process's own threads decide, too".to_owned(),
        None => "all came out the same".to_owned(),
        Some(step) => format!("not the same from step {step} on"),
    };
    say!("  {steps} steps, to {:.3} s{end}: {result}", last as f64 / 1000.0);
    Ok(different.is_none())
}

fn show_state(when: &str, machine: &impl Machine) {
    if let Some(state) = machine.state() {
        say!("  the state {when}:\n{}", indented(&state));
    }
}

fn indented(text: &str) -> String {
    text.lines().map(|line| format!("    {line}\n")).collect()
}
