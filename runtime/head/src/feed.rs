//! What was written, on its way to a standby.

use std::collections::VecDeque;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;
use wingbeat_core::codec::Payload;
use wingbeat_net::messages::Facts;

/// About how many bytes of facts a part has.
const PART: usize = 1 << 20;

/// What a standby has not confirmed yet. The journal's writer adds to it after each transaction; what is confirmed leaves it. It grows as
/// long as a standby may be silent, and then ends.
#[derive(Default)]
pub(crate) struct Feed {
    inside: Mutex<Inside>,
    news: Notify,
}

#[derive(Default)]
struct Inside {
    /// Counts what was written since this head began, and copies of it.
    position: u64,
    /// None while nobody follows.
    parts: Option<VecDeque<Facts>>,
    /// The position with which a standby has all that there was when it began.
    all: u64,
}

impl Feed {
    /// A standby is sent all of this, and then what is pushed.
    pub(crate) fn begin(&self, all: Vec<(Vec<u8>, Vec<u8>)>) {
        let (mut parts, mut part, mut size) = (Vec::new(), Vec::new(), 0);
        for (key, fact) in all {
            size += key.len() + fact.len();
            part.push((Payload(key.into()), Some(Payload(fact.into()))));
            if size > PART {
                parts.push(std::mem::take(&mut part));
                size = 0;
            }
        }
        parts.push(part);
        let mut inside = self.inside.lock();
        let last = parts.len() - 1;
        let mut queued = VecDeque::new();
        for (at, changes) in parts.into_iter().enumerate() {
            inside.position += 1;
            queued.push_back(Facts { position: inside.position, begins: at == 0, is_complete: at == last, changes });
        }
        (inside.parts, inside.all) = (Some(queued), inside.position);
        drop(inside);
        self.news.notify_waiters();
    }

    /// This was written.
    pub(crate) fn push<'a>(&self, changes: impl Iterator<Item = (&'a [u8], Option<&'a [u8]>)>) {
        let mut inside = self.inside.lock();
        inside.position += 1;
        let position = inside.position;
        let Some(parts) = &mut inside.parts else { return };
        let payload = |bytes: &[u8]| Payload(bytes.to_vec().into());
        let changes = changes.map(|(key, fact)| (payload(key), fact.map(payload))).collect();
        parts.push_back(Facts { position, begins: false, is_complete: true, changes });
        drop(inside);
        self.news.notify_waiters();
    }

    /// Nobody follows any more.
    pub(crate) fn end(&self) {
        self.inside.lock().parts = None;
    }

    /// Whether there is nothing for a standby, not even that there is nothing.
    pub(crate) fn is_empty(&self) -> bool {
        self.inside.lock().parts.is_none()
    }

    /// The position of what was written last.
    pub(crate) fn position(&self) -> u64 {
        self.inside.lock().position
    }

    /// Whether a standby that has written this has all that there was when it began.
    pub(crate) fn has_all(&self, written: u64) -> bool {
        let inside = self.inside.lock();
        inside.parts.is_some() && inside.all > 0 && written >= inside.all
    }

    /// What follows what a standby has written.
    pub(crate) fn after(&self, written: u64) -> Option<Facts> {
        let mut inside = self.inside.lock();
        let all = inside.all;
        let parts = inside.parts.as_mut()?;
        while parts.front().is_some_and(|part| part.position <= written) {
            parts.pop_front();
        }
        let mut together = parts.front()?.clone();
        // A part of a copy of everything goes alone.
        if together.position <= all {
            return Some(together);
        }
        let size = |part: &Facts| -> usize {
            part.changes.iter().map(|(key, fact)| key.len() + fact.as_ref().map_or(0, |fact| fact.len())).sum()
        };
        let mut sum = size(&together);
        for part in parts.iter().skip(1) {
            sum += size(part);
            if sum > PART {
                break;
            }
            together.changes.extend(part.changes.iter().cloned());
            together.position = part.position;
        }
        Some(together)
    }

    /// Whoever waits is to look.
    pub(crate) fn wake(&self) {
        self.news.notify_waiters();
    }

    /// Waits for news, from the moment on in which this is called.
    pub(crate) fn news(&self) -> Notified<'_> {
        self.news.notified()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(facts: &Facts) -> Vec<u8> {
        facts.changes.iter().map(|(key, _)| key[0]).collect()
    }

    fn push(feed: &Feed, key: u8) {
        feed.push([(&[key][..], Some(&[0_u8][..]))].into_iter());
    }

    #[test]
    fn a_standby_is_sent_all_and_then_what_is_new_until_it_has_confirmed_it() {
        let feed = Feed::default();
        push(&feed, 1);
        assert!(feed.after(0).is_none(), "nobody follows");
        feed.begin(vec![(vec![1], vec![0; PART]), (vec![2], vec![0])]);
        push(&feed, 3);
        push(&feed, 4);
        let first = feed.after(0).unwrap();
        assert!(first.begins && !first.is_complete && keys(&first) == [1]);
        assert_eq!(feed.after(0).unwrap().position, first.position, "it is sent again");
        let second = feed.after(first.position).unwrap();
        assert!(!second.begins && second.is_complete && keys(&second) == [2] && !feed.has_all(first.position));
        assert!(feed.has_all(second.position));
        let news = feed.after(second.position).unwrap();
        assert!(keys(&news) == [3, 4] && news.position == feed.position());
        assert!(feed.after(news.position).is_none());
        feed.end();
        push(&feed, 5);
        assert!(feed.after(news.position).is_none() && !feed.has_all(u64::MAX));
    }
}
