//! Writing to standard output, whose reader may have seen enough.

use std::fmt::Arguments;
use std::io::{ErrorKind, Write};

/// Writes a line, as `println!`. When nobody reads any more (`wingbeat status | head -1`) the command has done its work and
/// ends in order.
pub(crate) fn line(text: Arguments<'_>) {
    let mut out = std::io::stdout().lock();
    if let Err(error) = writeln!(out, "{text}").and_then(|()| out.flush()) {
        let is_enough = error.kind() == ErrorKind::BrokenPipe;
        if !is_enough {
            eprintln!("error: cannot write the output: {error}");
        }
        std::process::exit(i32::from(!is_enough));
    }
}

/// As [`line()`], of a daemon, which goes on when nobody reads what it says.
pub(crate) fn line_of_daemon(text: Arguments<'_>) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{text}").and_then(|()| out.flush());
}

/// Writes a line to standard error, of which there may be nothing left: a terminal that was closed.
pub(crate) fn line_of_note(text: Arguments<'_>) {
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

/// `eprintln!`, which does not panic where nobody reads any more.
macro_rules! note {
    ($($text:tt)*) => { $crate::say::line_of_note(format_args!($($text)*)) };
}

/// `println!` for commands.
macro_rules! say {
    ($($text:tt)*) => { $crate::say::line(format_args!($($text)*)) };
}

/// `println!` for daemons.
macro_rules! say_of_daemon {
    ($($text:tt)*) => { $crate::say::line_of_daemon(format_args!($($text)*)) };
}

pub(crate) use {note, say, say_of_daemon};
