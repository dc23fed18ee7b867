//! Who keeps the others waiting, told from the stacks of all ranks.

use std::fmt::Write;
use std::time::Duration;

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

/// Who lags: by NCCL's counts, if they tell; those who are not where ranks wait for each other, while others are; else
/// those whose report is missing.
pub(crate) fn describe(stacks: &[String], missing: &[usize], nccl: Option<&Status>, quiet: Duration) -> Described {
    let waits = |stack: &str| innermost(stack).any(|line| WAITS.iter().any(|place| line.contains(place)));
    let of_stacks = || (0..stacks.len()).filter(|rank| !waits(&stacks[*rank])).collect();
    let of_nccl = nccl.map(|status| status.lagging(stacks.len())).unwrap_or_default();
    let candidates: [Vec<usize>; 2] = [of_nccl, of_stacks()];
    let tells = |lagging: &Vec<usize>| !lagging.is_empty() && lagging.len() < stacks.len();
    let lagging = candidates.into_iter().find(tells).unwrap_or_else(|| missing.to_vec());
    let mut text = format!("no rank has printed or reported anything for {} s", quiet.as_secs());
    let _ = match lagging.as_slice() {
        [] => write!(text, "; they wait for each other, or all work"),
        lagging => write!(text, "; {} keeps the others waiting", shown::ranks(lagging)),
    };
    for (rank, stack) in stacks.iter().enumerate() {
        let _ = write!(text, "\n  rank {rank} is in");
        for line in innermost(stack) {
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
    fn nobody_is_named_where_all_do_the_same() {
        let described = describe(&["x".into(), "x".into()], &[], None, Duration::from_secs(1));
        assert!(described.lagging.is_empty() && described.text.contains("or all work"));
        assert_eq!(describe(&["x".into(), "x".into()], &[1], None, Duration::from_secs(1)).lagging, [1]);
    }
}
