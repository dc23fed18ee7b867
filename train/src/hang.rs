//! Who keeps the others waiting, told from the stacks of all ranks.

use std::fmt::Write;
use std::time::Duration;

use crate::process::stacks::{ENDED, STOPPED};
use crate::ras::Status;
use crate::shown;

/// Where ranks wait for each other.
const WAITS: [&str; 5] = [
    "torch/distributed/distributed_c10d.py",
    "torch/autograd/graph.py",
    "torch/cuda/__init__.py",
    "wingbeat/train/_connection.py",
    "wingbeat/train/_process_group.py",
];
/// Lines of a stack that are shown of each rank.
const LINES: usize = 6;

/// What is known about ranks that have stopped.
#[derive(Debug, PartialEq)]
pub(crate) struct Described {
    pub lagging: Vec<usize>,
    pub text: String,
}

/// What is known of what a rank does.
enum Doing<'a> {
    HasEnded,
    /// What is said of that, and its stack.
    IsStopped(&'a str, &'a str),
    IsIn(&'a str),
}

impl Doing<'_> {
    fn of(said: &str) -> Doing<'_> {
        match said.split_once('\n') {
            _ if said == ENDED => Doing::HasEnded,
            Some((stopped, stack)) if said.starts_with(STOPPED) => Doing::IsStopped(stopped, stack),
            _ => Doing::IsIn(said),
        }
    }

    fn stack(&self) -> &str {
        match self {
            Doing::HasEnded => "",
            Doing::IsStopped(_, stack) | Doing::IsIn(stack) => stack,
        }
    }
}

/// Who lags: those that are stopped; else by NCCL's counts, if they tell; those who are not where ranks wait for each other, while others
/// are; else those whose report is missing.
pub(crate) fn describe(stacks: &[String], missing: &[usize], nccl: Option<&Status>, quiet: Duration) -> Described {
    let ranks: Vec<Doing<'_>> = stacks.iter().map(|said| Doing::of(said)).collect();
    let among = |is: &dyn Fn(&Doing<'_>) -> bool| (0..ranks.len()).filter(|rank| is(&ranks[*rank])).collect();
    let waits = |rank: &Doing<'_>| innermost(rank.stack()).any(|line| WAITS.iter().any(|place| line.contains(place)));
    let stopped: Vec<usize> = among(&|rank| matches!(rank, Doing::IsStopped(..)));
    let of_nccl = nccl.map(|status| status.lagging(ranks.len())).unwrap_or_default();
    let candidates: [Vec<usize>; 2] = [of_nccl, among(&|rank| !waits(rank))];
    let tells = |lagging: &Vec<usize>| !lagging.is_empty() && lagging.len() < ranks.len();
    let lagging = match stopped.is_empty() {
        true => candidates.into_iter().find(tells).unwrap_or_else(|| missing.to_vec()),
        false => stopped.clone(),
    };
    let mut text = format!("no rank has printed or reported anything for {} s", quiet.as_secs());
    let has_ended = |rank: &usize| matches!(ranks.get(*rank), Some(Doing::HasEnded));
    let (who, is_one) = (shown::ranks(&lagging), lagging.len() == 1);
    let _ = match lagging.is_empty() {
        true => write!(text, "; they wait for each other, or all work"),
        false if !stopped.is_empty() => write!(text, "; {who} {} stopped", if is_one { "is" } else { "are" }),
        false if lagging.iter().all(has_ended) => {
            write!(text, "; {who} {} ended, and the others may wait for that", if is_one { "has" } else { "have" })
        }
        false => write!(text, "; {who} keeps the others waiting"),
    };
    for (number, rank) in ranks.iter().enumerate() {
        let _ = match rank {
            Doing::HasEnded => write!(text, "\n  rank {number} has ended"),
            Doing::IsStopped(said, _) => write!(text, "\n  rank {number}: {said}; it is in"),
            Doing::IsIn(_) => write!(text, "\n  rank {number} is in"),
        };
        for line in innermost(rank.stack()) {
            let _ = write!(text, "\n    {line}");
        }
    }
    for (index, line) in nccl.map(Status::shown).unwrap_or_default().iter().enumerate() {
        let _ = write!(text, "{}\n    {line}", if index == 0 { "\n  NCCL says" } else { "" });
    }
    Described { lagging, text }
}

/// The innermost frames of the main thread, which Python shows last, and py-spy names.
fn innermost(stack: &str) -> impl Iterator<Item = &str> {
    let named = stack.find("\"MainThread\"").map(|at| &stack[at..]);
    let stack = named.map_or(stack, |stack| stack.split_once('\n').map_or("", |(_, frames)| frames));
    let header = stack.rfind("(most recent call first)");
    let main = header.and_then(|at| stack[at..].split_once('\n')).map_or(stack, |(_, frames)| frames);
    main.lines().map(str::trim).filter(|line| !line.is_empty()).take(LINES)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::ras::Communicator;

    #[test]
    fn the_rank_that_is_not_in_a_collective_keeps_the_others_waiting() {
        let waits = "Thread 0x01 (most recent call first):\n  File \"/x/threading.py\", line 1 in wait\n\nCurrent thread 0x02 (most recent call first):\n  File \"/lib/torch/distributed/distributed_c10d.py\", line 9 in all_reduce\n  File \"train.py\", line 3 in step\n";
        let works = "Current thread 0x02 (most recent call first):\n  File \"train.py\", line 7 in load\n";
        let described = describe(&[waits.into(), works.into()], &[], None, Duration::from_secs(60));
        assert_eq!(described.lagging, [1]);
        assert!(described.text.contains("rank 1 keeps the others waiting"), "{}", described.text);
        assert!(described.text.contains("line 7 in load"));
    }

    #[test]
    fn nccl_s_counts_tell_who_lags_where_stacks_do_not() {
        let began = |count| BTreeMap::from([("AllReduce".to_owned(), count)]);
        let counts = BTreeMap::from([(0, began(7)), (1, began(6))]);
        let status =
            Status { communicators: vec![Communicator { size: 2, counts, silent: vec![] }], ..Status::default() };
        let described = describe(&["x".into(), "x".into()], &[], Some(&status), Duration::from_secs(1));
        assert_eq!(described.lagging, [1]);
        assert!(described.text.ends_with(
            "NCCL says\n    group of 2: rank 1 began 6 AllReduce\n    group of 2: rank 0 began 7 AllReduce"
        ));
    }

    #[test]
    fn what_py_spy_shows_is_understood() {
        let stack = "Process 7: python\nThread 8 (idle): \"other\"\n    wait (threading.py:1)\nThread 7 (active): \"MainThread\"\n    load (train.py:7)\n";
        assert_eq!(innermost(stack).collect::<Vec<_>>(), ["load (train.py:7)"]);
    }

    #[test]
    fn a_rank_that_is_stopped_or_has_ended_is_named_for_that() {
        let waits =
            "Thread 0x02 (most recent call first):\n  File \"/lib/torch/distributed/distributed_c10d.py\", line 9\n";
        let stopped = format!("{STOPPED}: SIGCONT to pid 7 has it go on\n{waits}");
        let described = describe(&[waits.into(), stopped.clone()], &[], None, Duration::from_secs(60));
        assert_eq!(described.lagging, [1], "it was stopped where it waits");
        assert!(described.text.contains("for 60 s; rank 1 is stopped\n"), "{}", described.text);
        assert!(described.text.contains("rank 1: it is stopped: SIGCONT to pid 7 has it go on; it is in\n    File"));
        let alone = describe(&[stopped], &[], None, Duration::from_secs(60));
        assert!(alone.lagging == [0] && alone.text.contains("; rank 0 is stopped\n"), "{}", alone.text);
        let described = describe(&[waits.into(), ENDED.into()], &[], None, Duration::from_secs(60));
        assert_eq!(described.lagging, [1]);
        assert!(
            described.text.contains("; rank 1 has ended, and the others may wait for that\n"),
            "{}",
            described.text
        );
        assert!(described.text.ends_with("\n  rank 1 has ended"), "{}", described.text);
    }

    #[test]
    fn nobody_is_named_where_all_do_the_same() {
        let described = describe(&["x".into(), "x".into()], &[], None, Duration::from_secs(1));
        assert!(described.lagging.is_empty() && described.text.contains("or all work"));
        assert_eq!(describe(&["x".into(), "x".into()], &[1], None, Duration::from_secs(1)).lagging, [1]);
    }
}
