//! Where the lines of ranks go, as torchrun has it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result};
use wingbeat_train::Line;

const STDOUT: u8 = 1;
const STDERR: u8 = 2;

/// Which streams of which local ranks: one number for all, or `RANK:NUMBER` with commas between.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Streams {
    of_all: u8,
    of_ranks: BTreeMap<u32, u8>,
}

impl Streams {
    fn has(&self, local_rank: u32, stream: u8) -> bool {
        self.of_ranks.get(&local_rank).copied().unwrap_or(self.of_all) & stream != 0
    }

    fn is_empty(&self) -> bool {
        self.of_all == 0 && self.of_ranks.values().all(|streams| *streams == 0)
    }
}

impl FromStr for Streams {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let number = |text: &str| match text.trim() {
            "0" => Ok(0),
            "1" => Ok(STDOUT),
            "2" => Ok(STDERR),
            "3" => Ok(STDOUT | STDERR),
            other => Err(format!("{other:?} is none of 0 (nothing), 1 (stdout), 2 (stderr), 3 (both)")),
        };
        if !text.contains(':') {
            return Ok(Streams { of_all: number(text)?, of_ranks: BTreeMap::new() });
        }
        let one = |part: &str| {
            let (rank, streams) = part.split_once(':').ok_or_else(|| format!("{part:?} is not RANK:NUMBER"))?;
            let rank = rank.trim().parse().map_err(|_| format!("{rank:?} is not a local rank"))?;
            Ok::<_, String>((rank, number(streams)?))
        };
        Ok(Streams { of_all: 0, of_ranks: text.split(',').map(one).collect::<Result<_, _>>()? })
    }
}

/// Writes and shows what ranks print.
pub(crate) struct RankLogs {
    /// The run's folder, if anything is written.
    dir: Option<PathBuf>,
    per_node: u32,
    redirects: Streams,
    tee: Streams,
    only: Vec<u32>,
    role: String,
    attempt: u32,
    files: BTreeMap<(u32, bool), File>,
    has_complained: bool,
}

impl RankLogs {
    pub(crate) fn new(
        dir: Option<&Path>,
        run_id: &str,
        per_node: u32,
        redirects: Streams,
        tee: Streams,
        only: Vec<u32>,
        role: String,
    ) -> Result<RankLogs> {
        let dir = match (redirects.is_empty() && tee.is_empty(), dir) {
            (true, _) => None,
            (false, Some(dir)) => Some(dir.to_owned()),
            (false, None) => Some(std::env::temp_dir().join("wingbeat-torchrun")),
        };
        let dir = dir.map(|dir| dir.join(format!("{run_id}_{}", std::process::id())));
        if let Some(dir) = &dir {
            std::fs::create_dir_all(dir).with_context(|| format!("making {}", dir.display()))?;
        }
        let files = BTreeMap::new();
        Ok(RankLogs { dir, per_node, redirects, tee, only, role, attempt: 0, files, has_complained: false })
    }

    /// Where files are written.
    pub(crate) fn dir(&self) -> Option<&Path> {
        self.dir.as_deref()
    }

    /// What follows is of this attempt.
    pub(crate) fn attempt(&mut self, attempt: u32) {
        if std::mem::replace(&mut self.attempt, attempt) != attempt {
            self.files.clear();
        }
    }

    /// A rank has printed a line.
    pub(crate) fn line(&mut self, rank: u32, line: &Line) {
        let local_rank = rank % self.per_node.max(1);
        let stream = if line.is_stderr { STDERR } else { STDOUT };
        let (redirected, teed) = (self.redirects.has(local_rank, stream), self.tee.has(local_rank, stream));
        if (redirected || teed)
            && let Err(error) = self.write(rank, line)
            && !std::mem::replace(&mut self.has_complained, true)
        {
            eprintln!("wingbeat torchrun: cannot write what ranks print: {error:#}");
        }
        let is_shown = (teed || !redirected) && (self.only.is_empty() || self.only.contains(&local_rank));
        if !is_shown {
            return;
        }
        let text = match teed {
            true => format!("[{}{local_rank}]:{}", self.role, line.text),
            false => line.text.clone(),
        };
        show(line.is_stderr, &text);
    }

    fn write(&mut self, rank: u32, line: &Line) -> Result<()> {
        let Some(dir) = &self.dir else { return Ok(()) };
        let file = match self.files.entry((rank, line.is_stderr)) {
            std::collections::btree_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::btree_map::Entry::Vacant(entry) => {
                // Ranks of several nodes write here, and local ranks alone would collide.
                let dir = dir.join(format!("attempt_{}", self.attempt)).join(rank.to_string());
                std::fs::create_dir_all(&dir).with_context(|| format!("making {}", dir.display()))?;
                let path = dir.join(if line.is_stderr { "stderr.log" } else { "stdout.log" });
                entry.insert(File::create(&path).with_context(|| format!("making {}", path.display()))?)
            }
        };
        writeln!(file, "{}", line.text)?;
        Ok(())
    }
}

/// Shows a line as it is.
pub(crate) fn show(is_stderr: bool, text: &str) {
    // Training goes on when nobody reads any more, as under `| head`.
    let _ = match is_stderr {
        true => writeln!(std::io::stderr(), "{text}"),
        false => writeln!(std::io::stdout(), "{text}"),
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_are_for_all_ranks_or_for_some() {
        let both: Streams = "3".parse().unwrap();
        assert!(both.has(5, STDOUT) && both.has(0, STDERR));
        let some: Streams = "0:1,1:2".parse().unwrap();
        assert!(some.has(0, STDOUT) && !some.has(0, STDERR) && some.has(1, STDERR) && !some.has(2, STDOUT));
        assert!("4".parse::<Streams>().unwrap_err().contains("none of"));
        assert!("a:1".parse::<Streams>().unwrap_err().contains("not a local rank"));
    }

    #[test]
    fn what_is_redirected_is_in_files_by_attempt_and_rank() {
        let dir = tempfile::tempdir().unwrap();
        let streams = |text: &str| text.parse().unwrap();
        let mut logs =
            RankLogs::new(Some(dir.path()), "run", 2, streams("1"), streams("0"), vec![], "default".into()).unwrap();
        logs.line(1, &Line { is_stderr: false, text: "one".into() });
        logs.attempt(1);
        logs.line(1, &Line { is_stderr: false, text: "two".into() });
        let at = logs.dir().unwrap().to_owned();
        let read = |path: &str| std::fs::read_to_string(at.join(path)).unwrap();
        assert_eq!((read("attempt_0/1/stdout.log"), read("attempt_1/1/stdout.log")), ("one\n".into(), "two\n".into()));
    }
}
