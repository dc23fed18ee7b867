//! Tasks and calls that are to be cancelled, looked for together: a search among 100,000 for each of as many takes minutes.

use std::collections::{HashMap, VecDeque};

use wingbeat_core::TaskId;

/// Tasks that are to be cancelled and were not found yet, each with whether by force.
#[derive(Default)]
pub(crate) struct Wanted(HashMap<TaskId, bool>);

impl Wanted {
    pub(crate) fn insert(&mut self, task: TaskId, force: bool) {
        *self.0.entry(task).or_default() |= force;
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn contains(&self, task: TaskId) -> bool {
        self.0.contains_key(&task)
    }

    /// Whether by force, if it is wanted. It is found now.
    pub(crate) fn take(&mut self, task: TaskId) -> Option<bool> {
        if self.0.is_empty() { None } else { self.0.remove(&task) }
    }

    /// Takes those that are wanted out of a queue, in its order.
    pub(crate) fn take_from<T>(&mut self, queue: &mut VecDeque<T>, id: impl Fn(&T) -> TaskId) -> Vec<T> {
        if self.0.is_empty() {
            return Vec::new();
        }
        let Some(at) = queue.iter().position(|item| self.contains(id(item))) else { return Vec::new() };
        if self.0.len() == 1 {
            self.0.clear();
            return queue.remove(at).into_iter().collect();
        }
        let mut found = Vec::new();
        for item in queue.split_off(at) {
            match self.take(id(&item)) {
                Some(_) => found.push(item),
                None => queue.push_back(item),
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wingbeat_core::ProcessId;

    fn task(seq: u64) -> TaskId {
        TaskId { owner: ProcessId(1), seq }
    }

    #[test]
    fn what_is_wanted_leaves_the_queue_and_the_others_keep_their_order() {
        let mut wanted = Wanted::default();
        for seq in [8, 2, 5, 99] {
            wanted.insert(task(seq), false);
        }
        wanted.insert(task(99), true);
        let mut queue: VecDeque<u64> = (0..10).collect();
        assert_eq!(wanted.take_from(&mut queue, |seq| task(*seq)), [2, 5, 8]);
        assert_eq!(queue, [0, 1, 3, 4, 6, 7, 9]);
        assert_eq!((wanted.take(task(99)), wanted.is_empty()), (Some(true), true));
    }

    #[test]
    fn a_single_one_is_taken_out() {
        let mut wanted = Wanted::default();
        wanted.insert(task(3), false);
        let mut queue: VecDeque<u64> = (0..5).collect();
        assert_eq!((wanted.take_from(&mut queue, |seq| task(*seq)), wanted.is_empty()), (vec![3], true));
        assert_eq!(queue, [0, 1, 2, 4]);
    }
}
