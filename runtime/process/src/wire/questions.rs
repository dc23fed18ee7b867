//! The thread on which user code is asked which tasks that have failed are tried again.

use std::sync::mpsc::{Sender, channel};

use parking_lot::Mutex;

type Code = Box<dyn FnOnce() + Send>;

/// Runs user code that is asked something: one after another, on one thread, however much there is to ask. The thread begins with the
/// first and ends when this is dropped, after what it runs then.
#[derive(Default)]
pub(super) struct Questions {
    /// As long as tasks that have failed wait for an answer, which bounds it.
    thread: Mutex<Option<Sender<Code>>>,
}

impl Questions {
    /// Drops `code` unrun if no thread can be started.
    pub(super) fn run(&self, code: Code) {
        let mut thread = self.thread.lock();
        if thread.is_none() {
            match start() {
                Ok(started) => *thread = Some(started),
                Err(error) => {
                    drop(thread);
                    tracing::warn!(%error, "no thread can be started on which `retry_if` is asked: a task fails instead");
                    return drop(code);
                }
            }
        }
        let unsent = thread.as_ref().and_then(|thread| thread.send(code).err());
        // What is dropped may ask for something here.
        drop(thread);
        drop(unsent);
    }
}

fn start() -> std::io::Result<Sender<Code>> {
    let (sender, codes) = channel::<Code>();
    std::thread::Builder::new().name("wingbeat-asks".into()).spawn(move || {
        for code in codes {
            code();
        }
    })?;
    Ok(sender)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_is_asked_in_order_on_one_thread_that_ends_with_this() {
        let (questions, (answer, answers)) = (Questions::default(), channel());
        for number in 0..1_000 {
            let answer = answer.clone();
            questions.run(Box::new(move || answer.send((number, std::thread::current().id())).unwrap()));
        }
        drop((questions, answer));
        let answers: Vec<_> = answers.iter().collect();
        assert!(answers.iter().map(|(number, _)| *number).eq(0..1_000));
        assert!(answers.iter().all(|(_, thread)| *thread == answers[0].1));
    }
}
