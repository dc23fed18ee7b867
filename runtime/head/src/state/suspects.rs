//! Executions that look stuck by what was last said. They are believed to be when all that are stuck with them have said so again: what one waits
//! for may be over, and that may be on its way here.
//!
//! Why that is enough: the circle is in what all of them had said before the question was asked, and again in what they say after it. So all of them
//! waited when it was asked, and none can be the first that goes on from there. What is said for the first time after a question counts for the next.

use std::collections::{BTreeMap, BTreeSet};

use wingbeat_core::{ProcessId, TaskId};

use super::Millis;
use super::waits::{Circle, Waits};

/// Who looks stuck is asked when it has looked so for this long. Most go on at once.
pub(super) const ASKED_AFTER: Millis = 200;

/// A question that was not answered by all in this time is asked again, of those who are stuck now.
pub(super) const ASKED_AGAIN_AFTER: Millis = 10_000;

/// One that was told, and says the same after this long, is told again: what it was told ended something that it does not look at.
pub(super) const TOLD_AGAIN_AFTER: Millis = 5_000;

/// Executions that look stuck, each until it goes on or its process is lost.
#[derive(Default)]
pub(super) struct Suspects {
    suspects: BTreeMap<TaskId, Suspect>,
    /// Questions that were asked and not answered by all, by number, each until somebody looks after that.
    asked: BTreeMap<u64, Question>,
    latest: u64,
}

/// How far it is known that one is stuck.
#[derive(Clone, Copy)]
enum Suspect {
    /// It is asked from then on.
    AskedAt(Millis),
    /// This question was asked of all that are stuck with it.
    Asked(u64),
}

/// A question to several processes.
struct Question {
    at: Millis,
    /// Those that have not answered it, and live.
    unanswered: BTreeSet<ProcessId>,
    /// Whether an answer has come since it was looked who is stuck by the answers.
    is_news: bool,
    /// Those that were told of a circle by the answers so far.
    told: BTreeSet<TaskId>,
}

impl Suspects {
    /// By what an execution says now, it looks stuck or not.
    pub(super) fn looks_stuck(&mut self, task: TaskId, is_stuck: bool, now: Millis) {
        if is_stuck {
            self.suspects.entry(task).or_insert(Suspect::AskedAt(now + ASKED_AFTER));
        } else {
            self.suspects.remove(&task);
        }
    }

    /// Whether this question is open.
    pub(super) fn asks(&self, question: u64) -> bool {
        self.asked.contains_key(&question)
    }

    /// The latest question that was asked.
    pub(super) fn latest(&self) -> u64 {
        self.latest
    }

    pub(super) fn forget(&mut self, task: TaskId) {
        self.suspects.remove(&task);
    }

    pub(super) fn forget_process(&mut self, process: ProcessId) {
        for question in self.asked.values_mut() {
            question.is_news |= question.unanswered.remove(&process);
        }
    }
}

impl Waits {
    /// When somebody is to be asked, or an answer is late, in milliseconds from now; none if nobody looks stuck.
    pub(super) fn suspects_due(&self, now: Millis) -> Option<Millis> {
        let asked_at = self.suspects.suspects.values().filter_map(|suspect| match suspect {
            Suspect::AskedAt(at) => Some(*at),
            Suspect::Asked(_) => None,
        });
        let late_at = self.suspects.asked.values().map(|question| match question.is_news {
            true => now,
            false => question.at + ASKED_AGAIN_AFTER,
        });
        asked_at.chain(late_at).min().map(|at| at.saturating_sub(now).max(1))
    }

    #[cfg(test)]
    pub(super) fn has_suspects(&self) -> bool {
        !self.suspects.suspects.is_empty() || !self.suspects.asked.is_empty()
    }

    /// A process has answered a question: it has said what those of its executions wait for that still wait.
    pub(super) fn has_answered_all(&mut self, process: ProcessId, question: u64) {
        if let Some(asked) = self.suspects.asked.get_mut(&question) {
            asked.is_news |= asked.unanswered.remove(&process);
        }
    }

    /// The circles that were said again.
    pub(super) fn confirmed(&mut self, now: Millis) -> Vec<Circle> {
        let mut circles = Vec::new();
        let news = self.suspects.asked.iter_mut().filter_map(|(number, question)| {
            let is_over = question.unanswered.is_empty() || now >= question.at + ASKED_AGAIN_AFTER;
            (std::mem::take(&mut question.is_news) || is_over).then_some((*number, is_over))
        });
        let news: BTreeMap<u64, bool> = news.collect();
        for (task, question) in self.suspects_asked() {
            let Some(is_over) = news.get(&question) else { continue };
            // Whoever is told goes on, and with it perhaps others.
            let is_told = |member| self.suspects.asked.get(&question).is_some_and(|asked| asked.told.contains(&member));
            let counts = |member: TaskId| self.has_answered(member, question) && !is_told(member);
            if let Some(circle) = self.circle_of(task, counts) {
                self.suspects.suspects.insert(task, Suspect::AskedAt(now + TOLD_AGAIN_AFTER));
                if let Some(asked) = self.suspects.asked.get_mut(&question) {
                    asked.told.insert(circle.task);
                }
                circles.push(circle);
            } else if *is_over {
                // By what was said since, it may be stuck with others.
                let is_stuck = self.stuck_with(task, |_| true).is_some();
                self.suspects.suspects.remove(&task);
                self.suspects.looks_stuck(task, is_stuck, now);
            }
        }
        self.suspects.asked.retain(|number, _| news.get(number) != Some(&true));
        circles
    }

    fn suspects_asked(&self) -> Vec<(TaskId, u64)> {
        let asked = self.suspects.suspects.iter().filter_map(|(task, suspect)| match suspect {
            Suspect::Asked(question) => Some((*task, *question)),
            Suspect::AskedAt(_) => None,
        });
        asked.collect()
    }

    /// What is to be asked now, of which processes: what these of their executions wait for.
    pub(super) fn questions(&mut self, now: Millis) -> Vec<(ProcessId, u64, Vec<TaskId>)> {
        let is_due = |suspect: &Suspect| matches!(suspect, Suspect::AskedAt(at) if now >= *at);
        let due: Vec<TaskId> =
            self.suspects.suspects.iter().filter(|(_, suspect)| is_due(suspect)).map(|(task, _)| *task).collect();
        let question = self.suspects.latest + 1;
        let mut stuck: BTreeSet<TaskId> = BTreeSet::new();
        for task in due {
            // One that is stuck with another is stuck with all that this is stuck with.
            let with = if stuck.contains(&task) { Some(BTreeSet::new()) } else { self.stuck_with(task, |_| true) };
            match with {
                Some(with) => {
                    stuck.extend(with);
                    self.suspects.suspects.insert(task, Suspect::Asked(question));
                }
                None => self.suspects.forget(task),
            }
        }
        let mut asked: BTreeMap<ProcessId, Vec<TaskId>> = BTreeMap::new();
        for task in stuck {
            if let Some(process) = self.process_of(task) {
                asked.entry(process).or_default().push(task);
            }
        }
        if !asked.is_empty() {
            self.suspects.latest = question;
            let unanswered = asked.keys().copied().collect();
            self.suspects
                .asked
                .insert(question, Question { at: now, unanswered, is_news: false, told: BTreeSet::new() });
        }
        asked.into_iter().map(|(process, tasks)| (process, question, tasks)).collect()
    }
}
