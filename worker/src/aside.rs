//! What is done on a thread of its own, because it may take long: to write where nobody reads.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, TryRecvError, TrySendError, sync_channel};
use std::time::{Duration, Instant};

/// What may wait, where little is to be done; more is left out.
pub const FEW: usize = 256;
/// How long the end waits for what was to be done, and how often it looks whether there is room to ask for that.
const END_LIMIT: Duration = Duration::from_secs(1);
const END_PAUSE: Duration = Duration::from_millis(5);

enum Message<T> {
    /// So many were left out before this one.
    Do(T, u64),
    End(SyncSender<()>),
}

/// What the thread is to do.
pub enum Told<T> {
    /// This.
    Do(T),
    /// So many have found no room here, one after another.
    LeftOut(u64),
}

/// The way to such a thread.
pub struct Aside<T> {
    queue: SyncSender<Message<T>>,
    left_out: Arc<AtomicU64>,
}

impl<T> Clone for Aside<T> {
    fn clone(&self) -> Self {
        Aside { queue: self.queue.clone(), left_out: self.left_out.clone() }
    }
}

impl<T: Send + 'static> Aside<T> {
    /// With room for [`FEW`]; of what is left out nobody is told.
    ///
    /// # Errors
    /// The process may have no more threads.
    pub fn start(mut work: impl FnMut(T) + Send + 'static) -> std::io::Result<Aside<T>> {
        Self::with_room_for(FEW, move |told| match told {
            Told::Do(what) => work(what),
            Told::LeftOut(_) => {}
        })
    }

    /// With room for so many.
    ///
    /// # Errors
    /// The process may have no more threads.
    pub fn with_room_for(count: usize, mut work: impl FnMut(Told<T>) + Send + 'static) -> std::io::Result<Aside<T>> {
        let (queue, messages) = sync_channel(count);
        let left_out = Arc::new(AtomicU64::new(0));
        let since = left_out.clone();
        std::thread::Builder::new().name("aside".into()).spawn(move || {
            let mut tell = |told| {
                if !matches!(told, Told::LeftOut(0)) {
                    work(told);
                }
            };
            loop {
                let next = messages.try_recv().or_else(|error| match error {
                    // What was left out came after all that was done.
                    TryRecvError::Empty => {
                        tell(Told::LeftOut(since.swap(0, Ordering::Relaxed)));
                        messages.recv()
                    }
                    TryRecvError::Disconnected => messages.recv(),
                });
                match next {
                    Ok(Message::Do(what, left_out)) => {
                        tell(Told::LeftOut(left_out));
                        tell(Told::Do(what));
                    }
                    Ok(Message::End(done)) => {
                        tell(Told::LeftOut(since.swap(0, Ordering::Relaxed)));
                        let _ = done.try_send(());
                    }
                    Err(_) => return,
                }
            }
        })?;
        Ok(Aside { queue, left_out })
    }

    /// Has something done; never waits.
    pub fn tell(&self, what: T) {
        let left_out = self.left_out.swap(0, Ordering::Relaxed);
        if let Err(TrySendError::Full(Message::Do(_, left_out))) = self.queue.try_send(Message::Do(what, left_out)) {
            self.left_out.fetch_add(left_out + 1, Ordering::Relaxed);
        }
    }

    /// Waits until all is done, but not for ever.
    pub fn end(&self) {
        let begun = Instant::now();
        let (done, ended) = sync_channel(1);
        let mut ask = Message::End(done);
        while let Err(TrySendError::Full(again)) = self.queue.try_send(ask) {
            if begun.elapsed() >= END_LIMIT {
                return;
            }
            ask = again;
            std::thread::sleep(END_PAUSE);
        }
        let _ = ended.recv_timeout(END_LIMIT.saturating_sub(begun.elapsed()));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn what_has_no_room_is_left_out_and_counted_in_its_place() {
        let (go_on, may_go_on) = channel::<()>();
        let (did, done) = channel();
        let aside = Aside::with_room_for(2, move |told| {
            let is_first = matches!(told, Told::Do(0));
            did.send(match told {
                Told::Do(number) => format!("did {number}"),
                Told::LeftOut(count) => format!("left out {count}"),
            })
            .unwrap();
            if is_first {
                may_go_on.recv().unwrap();
            }
        })
        .unwrap();
        aside.tell(0);
        assert_eq!(done.recv().unwrap(), "did 0");
        // Two have room, and three have none.
        (1..=5).for_each(|number| aside.tell(number));
        // The end does not wait for ever either.
        aside.end();
        go_on.send(()).unwrap();
        assert_eq!([(); 3].map(|()| done.recv().unwrap()), ["did 1", "did 2", "left out 3"]);
        aside.tell(6);
        aside.end();
        assert_eq!(done.try_recv().unwrap(), "did 6");
    }
}
