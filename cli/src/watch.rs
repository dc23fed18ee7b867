//! Output that is shown again and again: `--watch`.

use std::io::IsTerminal;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args;
use wingbeat_core::names::printable_lines;

use crate::say::{fail, say, screen};

#[derive(Args)]
pub(crate) struct Watch {
    /// Show it again every 2 seconds, or every SECONDS, until Ctrl-C. Where the output is no terminal, one after the other.
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, require_equals = true, default_missing_value = "2", value_parser = seconds)]
    watch: Option<Duration>,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.trim_end_matches('s').parse().ok().filter(|seconds| *seconds >= 0.1 && *seconds <= 86_400.0);
    seconds
        .map(Duration::from_secs_f64)
        .ok_or_else(|| format!("`{text}` is no number of seconds from 0.1 on; write --watch=5"))
}

impl Watch {
    /// Shows what `text` gives: once, or until Ctrl-C. Once it was shown, an error is shown in its place, since it may pass.
    pub(crate) async fn show(&self, text: impl AsyncFn() -> Result<String>) -> Result<()> {
        let first = text().await?;
        let Some(pause) = self.watch else {
            say!("{}", first.trim_end());
            return Ok(());
        };
        let mut ends = std::pin::pin!(tokio::signal::ctrl_c());
        let mut shown = first;
        let mut is_drawn = false;
        loop {
            if !is_drawn {
                self.draw(&shown, pause);
            }
            is_drawn = false;
            tokio::select! {
                ended = &mut ends => match ended {
                    Ok(()) => return Ok(()),
                    Err(error) => bail!("cannot hear Ctrl-C: {error}"),
                },
                next = async { tokio::time::sleep(pause).await; text().await } => match next {
                    Ok(next) => shown = next,
                    Err(error) => {
                        let why = printable_lines(&format!("{error:#}")).into_owned();
                        if !std::io::stdout().is_terminal() {
                            // A program may read the rest.
                            fail!("{why}");
                            is_drawn = true;
                            continue;
                        }
                        shown = format!("error: {why}");
                    }
                }
            }
        }
    }

    fn draw(&self, text: &str, pause: Duration) {
        let Ok(size) = rustix::termios::tcgetwinsize(std::io::stdout()) else {
            say!("{}\n", text.trim_end());
            return;
        };
        screen(&page(text, pause, size.ws_row));
    }
}

/// As much of a text as fits on a screen, below a line that says how often it is shown.
fn page(text: &str, pause: Duration, rows: u16) -> String {
    let lines: Vec<&str> = text.trim_end().lines().collect();
    // The heading, and the line that the cursor is on.
    let room = match rows {
        // Of a terminal that does not say how large it is.
        0 => lines.len(),
        rows => usize::from(rows).saturating_sub(3).max(1),
    };
    let every = humantime::format_duration(pause);
    let heading = match lines.len().saturating_sub(room) {
        0 => format!("every {every}; Ctrl-C ends it"),
        more => format!("every {every}; Ctrl-C ends it; {more} more lines do not fit"),
    };
    format!("{heading}\n\n{}", lines[..lines.len().min(room)].join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_on_the_screen_is_counted() {
        let text = "one\ntwo\nthree\n";
        assert_eq!(page(text, Duration::from_secs(2), 24), "every 2s; Ctrl-C ends it\n\none\ntwo\nthree");
        assert_eq!(page(text, Duration::from_secs(2), 0), "every 2s; Ctrl-C ends it\n\none\ntwo\nthree");
        assert_eq!(
            page(text, Duration::from_secs(2), 5),
            "every 2s; Ctrl-C ends it; 1 more lines do not fit\n\none\ntwo"
        );
    }

    #[test]
    fn a_pause_is_a_number_of_seconds() {
        assert_eq!(seconds("5"), Ok(Duration::from_secs(5)));
        assert_eq!(seconds("0.5s"), Ok(Duration::from_millis(500)));
        assert!(seconds("0").is_err() && seconds("node-1").is_err() && seconds("NaN").is_err());
    }
}
