//! Writing to standard output and standard error, whose readers may have seen enough: in which colors, and how much.

use std::fmt::Arguments;
use std::io::{ErrorKind, Write};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use anstream::AutoStream;
use anstyle::{AnsiColor, Style};
use clap::ColorChoice;
use wingbeat_worker::aside::Aside;
use wingbeat_worker::log;

/// What stands above a table.
pub(crate) const HEADING: Style = Style::new().bold();
/// What a person may have to look after.
pub(crate) const TROUBLE: Style = AnsiColor::Yellow.on_default();
/// Before an error.
const ERROR: Style = AnsiColor::Red.on_default().bold();

/// Moves to the upper left corner and clears the screen.
const CLEAR: &str = "\x1b[H\x1b[2J";

/// What a daemon writes to standard output; none in a process that is none.
static OUT_OF_DAEMON: OnceLock<Aside<String>> = OnceLock::new();

/// Whether a command shows nothing but errors and what it was asked for.
static IS_QUIET: AtomicBool = AtomicBool::new(false);

/// What every command shows of itself, before its name: `wingbeat -q train …`, in which the script may have a `-q` of its own.
#[derive(clap::Args)]
#[command(next_help_heading = "Before the command's name")]
pub(crate) struct Shown {
    /// Log more: what each part does, and with -vv every step. Goes before $WINGBEAT_LOG
    #[arg(short, long, action = clap::ArgAction::Count)]
    verbose: u8,
    /// Show errors, and what was asked for, and nothing else
    #[arg(short, long, conflicts_with = "verbose")]
    quiet: bool,
    /// When to show colors: in a terminal where $NO_COLOR is not set, always, or never
    #[arg(long, value_name = "WHEN", default_value = "auto", hide_possible_values = true, value_enum)]
    color: ColorChoice,
}

impl Shown {
    /// From here on this process shows so much, and in such colors.
    ///
    /// # Errors
    /// The process may have no more threads.
    pub(crate) fn begin(&self) -> std::io::Result<()> {
        IS_QUIET.store(self.quiet, Ordering::Relaxed);
        match self.color {
            ColorChoice::Auto => anstream::ColorChoice::Auto,
            ColorChoice::Always => anstream::ColorChoice::Always,
            ColorChoice::Never => anstream::ColorChoice::Never,
        }
        .write_global();
        let filter = match (self.quiet, self.verbose) {
            (true, _) => Some("error,tarpc=off"),
            (_, 0) => None,
            (_, 1) => Some("info,tarpc=off,wingbeat=debug"),
            _ => Some("debug,tarpc=off,wingbeat=trace"),
        };
        let has_colors = AutoStream::choice(&std::io::stderr()) != anstream::ColorChoice::Never;
        log::to_stderr(filter, has_colors)
    }
}

/// Whether nothing is shown but errors and what was asked for.
pub(crate) fn is_quiet() -> bool {
    IS_QUIET.load(Ordering::Relaxed)
}

/// From here on this process is a daemon: whatever becomes of the readers of what it says, it goes on, and waits for none of them.
///
/// # Errors
/// The process may have no more threads.
pub(crate) fn begin_daemon() -> std::io::Result<()> {
    let out = Aside::start(|text: String| {
        let mut out = anstream::stdout().lock();
        let _ = writeln!(out, "{text}").and_then(|()| out.flush());
    })?;
    let _ = OUT_OF_DAEMON.set(out);
    Ok(())
}

/// What was said is written, or nobody has read it for a second.
pub(crate) fn end() {
    if let Some(out) = OUT_OF_DAEMON.get() {
        out.end();
    }
    log::written();
}

/// Writes a line, as `println!`. When nobody reads any more (`wingbeat status | head -1`) the command has done its work and
/// ends in order.
pub(crate) fn line(text: Arguments<'_>) {
    let mut out = anstream::stdout().lock();
    if let Err(error) = writeln!(out, "{text}").and_then(|()| out.flush()) {
        let is_enough = error.kind() == ErrorKind::BrokenPipe;
        if !is_enough {
            line_of_error(format_args!("cannot write the output: {error}"));
        }
        end();
        std::process::exit(i32::from(!is_enough));
    }
}

/// As [`line()`], in place of what the terminal shows.
pub(crate) fn screen(text: &str) {
    // Written as it is: without colors, a screen is cleared all the same.
    let _ = std::io::stdout().lock().write_all(CLEAR.as_bytes());
    line(format_args!("{text}"));
}

/// As [`line()`], of a daemon.
pub(crate) fn line_of_daemon(text: Arguments<'_>) {
    if let Some(out) = OUT_OF_DAEMON.get() {
        out.tell(text.to_string());
    }
}

/// Writes a line to standard error, of which there may be nothing left: a terminal that was closed. A command that is no daemon waits for its
/// reader.
pub(crate) fn line_of_note(text: Arguments<'_>) {
    if OUT_OF_DAEMON.get().is_some() {
        let mut line = AutoStream::new(Vec::new(), AutoStream::choice(&std::io::stderr()));
        let _ = writeln!(line, "{text}");
        return log::line(line.into_inner());
    }
    // After what was logged.
    log::written();
    let _ = writeln!(anstream::stderr().lock(), "{text}");
}

/// Writes an error.
pub(crate) fn line_of_error(text: Arguments<'_>) {
    line_of_note(format_args!("{ERROR}error:{ERROR:#} {text}"));
}

/// `eprintln!`, which does not panic where nobody reads any more.
macro_rules! note {
    ($($text:tt)*) => { $crate::say::line_of_note(format_args!($($text)*)) };
}

/// As [`note!`], of what `-q` leaves out: how a run goes, and not what is wrong with it.
macro_rules! notice {
    ($($text:tt)*) => { if !$crate::say::is_quiet() { $crate::say::line_of_note(format_args!($($text)*)) } };
}

/// As [`note!`], of an error.
macro_rules! fail {
    ($($text:tt)*) => { $crate::say::line_of_error(format_args!($($text)*)) };
}

/// `println!` for commands.
macro_rules! say {
    ($($text:tt)*) => { $crate::say::line(format_args!($($text)*)) };
}

/// `println!` for daemons.
macro_rules! say_of_daemon {
    ($($text:tt)*) => { $crate::say::line_of_daemon(format_args!($($text)*)) };
}

pub(crate) use {fail, note, notice, say, say_of_daemon};
