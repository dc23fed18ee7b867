//! What one side says to another: in order and once, over any number of connections. Without IO.
//!
//! Messages go in numbered batches, which are kept until they are answered. What was not answered when a connection ended is
//! sent again over the next one, under the same numbers; the other side passes over the numbers that it has taken in.

use std::collections::VecDeque;

use crate::messages::Weight;

/// Batches in flight. Answers may be a millisecond late.
const BATCHES: usize = 64;

/// Messages in a batch.
pub const BATCH: usize = 512;

/// About so many bytes in a batch, unless its first message has more: with [`BATCHES`] it bounds what a peer that takes
/// nothing in must keep, and it keeps frames far below their limit.
const BATCH_BYTES: usize = 1 << 20;

/// So many messages wait for others at most.
const WITH_OTHERS: usize = 64;

/// Together they have fewer bytes than this.
const WITH_OTHERS_BYTES: usize = 64 << 10;

/// What has become of a message that may wait for others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waits {
    /// It is the first that waits.
    Begins,
    /// There is something to send now, and was nothing before.
    Over,
    /// Neither.
    Nothing,
}

/// The saying side. Lives as long as anything may be said.
pub struct Sequence<M> {
    queue: VecDeque<M>,
    /// Messages ever queued.
    queued: u64,
    /// Nothing is queued any more.
    is_broken: bool,
    /// Whether somebody waits for one of those in the queue to be taken in.
    is_hurried: bool,
    /// Whether all that is in the queue may wait for others.
    is_patient: bool,
    /// Batches that are not answered.
    in_flight: VecDeque<Kept<M>>,
    /// Those that were sent over a connection which has ended.
    again: VecDeque<Kept<M>>,
    /// The number of the next batch.
    next: u64,
}

struct Kept<M> {
    number: u64,
    is_hurried: bool,
    count: u64,
    /// As long as it may have to be sent again.
    messages: Vec<M>,
}

/// Something to send.
#[derive(Debug, PartialEq, Eq)]
pub struct Batch<M> {
    /// Of this batch; it has the same when it is sent again.
    pub number: u64,
    /// Whether somebody waits for the answer.
    pub is_hurried: bool,
    /// In order.
    pub messages: Vec<M>,
}

/// What an answer has done.
pub struct Answered<M> {
    /// How many messages were taken in.
    pub count: u64,
    /// Whether nothing could be sent until now.
    pub was_full: bool,
    /// The messages. Dropping them may do much.
    pub messages: Vec<M>,
}

impl<M> Default for Sequence<M> {
    fn default() -> Self {
        Sequence {
            queue: VecDeque::new(),
            queued: 0,
            is_broken: false,
            is_hurried: false,
            is_patient: false,
            in_flight: VecDeque::new(),
            again: VecDeque::new(),
            next: 0,
        }
    }
}

impl<M: Weight> Sequence<M> {
    /// Queues a message. Answers whether there is something to send now and was nothing before.
    pub fn push(&mut self, message: M) -> bool {
        // What was dropped counts as queued: whoever waits for it learns that it was not taken in.
        self.queued += 1;
        if self.is_broken {
            return false;
        }
        self.queue.push_back(message);
        std::mem::take(&mut self.is_patient) || self.queue.len() == 1
    }

    /// Queues a message that may wait for others, until [`Sequence::ripen`] says that it has waited long enough.
    pub fn push_with_others(&mut self, message: M) -> Waits {
        let is_first = self.queue.is_empty() && !self.is_broken;
        let is_patient = (is_first || self.is_patient)
            && self.queue.len() < WITH_OTHERS
            && message.weight() < WITH_OTHERS_BYTES / WITH_OTHERS;
        let wakes = self.push(message);
        self.is_patient = is_patient;
        match (is_patient, wakes) {
            (true, _) if is_first => Waits::Begins,
            (true, _) | (false, false) => Waits::Nothing,
            (false, true) => Waits::Over,
        }
    }

    /// What is in the queue has waited long enough. Answers whether anything was.
    pub fn ripen(&mut self) -> bool {
        std::mem::take(&mut self.is_patient) && !self.queue.is_empty()
    }

    /// Somebody waits for what is queued next.
    pub fn hurry(&mut self) {
        self.is_hurried = true;
    }

    /// What goes next, of `most` messages at most, if there is something and it may be sent. It must be given back to
    /// [`Sequence::keep`] if it is to be sent again.
    pub fn next_batch(&mut self, most: usize) -> Option<Batch<M>> {
        if let Some(Kept { number, is_hurried, count, messages }) = self.again.pop_front() {
            self.in_flight.push_back(Kept { number, is_hurried, count, messages: Vec::new() });
            return Some(Batch { number, is_hurried, messages });
        }
        if self.queue.is_empty() || self.is_patient || self.in_flight.len() >= BATCHES {
            return None;
        }
        let mut bytes = 0;
        let fits = |message: &&M| {
            bytes += message.weight();
            bytes <= BATCH_BYTES
        };
        let count = self.queue.iter().take(most).take_while(fits).count().max(1);
        let messages: Vec<M> = self.queue.drain(..count).collect();
        let (number, is_hurried) = (self.next, self.is_hurried);
        self.is_hurried &= !self.queue.is_empty();
        self.next += 1;
        self.in_flight.push_back(Kept { number, is_hurried, count: count as u64, messages: Vec::new() });
        Some(Batch { number, is_hurried, messages })
    }

    /// Keeps a batch that was sent until it is answered.
    pub fn keep(&mut self, number: u64, messages: Vec<M>) {
        if let Some(batch) = self.in_flight.iter_mut().rev().find(|batch| batch.number == number) {
            batch.messages = messages;
        }
    }

    /// The next connection begins: what was not answered goes first.
    pub fn resume(&mut self) {
        self.in_flight.append(&mut self.again);
        self.again = std::mem::take(&mut self.in_flight);
    }

    /// The other side was started again, and knows nothing of what was said: of what it has not answered only what is to be
    /// kept is said to it. All else counts as taken in. Answers with what is dropped.
    #[must_use = "dropping it may do much"]
    pub fn forget(&mut self, keep: impl Fn(&M) -> bool) -> Vec<M> {
        let said = self.again.drain(..).chain(self.in_flight.drain(..)).flat_map(|batch| batch.messages);
        let (kept, dropped) = said.chain(self.queue.drain(..)).partition::<Vec<M>, _>(keep);
        self.queue.extend(kept);
        dropped
    }

    /// There will be no other connection: nothing is sent any more. Answers with what is dropped.
    #[must_use = "dropping it may do much"]
    pub fn broke(&mut self) -> Vec<M> {
        self.is_broken = true;
        let kept = self.again.drain(..).chain(self.in_flight.drain(..)).flat_map(|batch| batch.messages);
        kept.chain(self.queue.drain(..)).collect()
    }

    /// Messages that wait to be sent.
    pub fn waiting(&self) -> usize {
        self.queue.len()
    }
}

impl<M> Sequence<M> {
    /// A batch was answered; none if it was before.
    pub fn answered(&mut self, number: u64) -> Option<Answered<M>> {
        let was_full = self.in_flight.len() >= BATCHES;
        let answered = [&mut self.in_flight, &mut self.again].into_iter().find_map(|batches| {
            let at = batches.iter().position(|batch| batch.number == number)?;
            batches.remove(at)
        });
        answered.map(|Kept { count, messages, .. }| Answered { count, was_full, messages })
    }

    /// Messages ever queued.
    pub fn queued(&self) -> u64 {
        self.queued
    }

    /// Whether [`Sequence::broke`] was called.
    pub fn is_broken(&self) -> bool {
        self.is_broken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Number(u64);

    impl Weight for Number {
        fn weight(&self) -> usize {
            1
        }
    }

    fn saying(numbers: impl IntoIterator<Item = u64>) -> Sequence<Number> {
        let mut sequence = Sequence::default();
        for number in numbers {
            sequence.push(Number(number));
        }
        sequence
    }

    /// Sends the next batch, and keeps it.
    fn send(sequence: &mut Sequence<Number>, most: usize) -> Option<(u64, Vec<u64>)> {
        let Batch { number, messages, .. } = sequence.next_batch(most)?;
        let sent = messages.iter().map(|message| message.0).collect();
        sequence.keep(number, messages);
        Some((number, sent))
    }

    #[test]
    fn what_waits_for_others_goes_with_the_next_or_when_it_has_waited_long_enough() {
        let mut sequence = saying([]);
        assert_eq!(sequence.push_with_others(Number(0)), Waits::Begins);
        assert_eq!(sequence.push_with_others(Number(1)), Waits::Nothing);
        assert_eq!(send(&mut sequence, 8), None);
        assert!(sequence.push(Number(2)), "this cannot wait");
        assert_eq!(sequence.push_with_others(Number(3)), Waits::Nothing);
        assert_eq!(send(&mut sequence, 8), Some((0, vec![0, 1, 2, 3])));
        assert!(!sequence.ripen());
        assert_eq!(sequence.push_with_others(Number(4)), Waits::Begins);
        assert!(sequence.ripen());
        assert_eq!(send(&mut sequence, 8), Some((1, vec![4])));
        assert_eq!(sequence.push_with_others(Number(5)), Waits::Begins);
        let others = (6..5 + WITH_OTHERS as u64).map(|number| sequence.push_with_others(Number(number)));
        assert!(others.eq(std::iter::repeat_n(Waits::Nothing, WITH_OTHERS - 1)));
        assert_eq!(sequence.push_with_others(Number(99)), Waits::Over);
        assert_eq!(sequence.waiting(), WITH_OTHERS + 1);
        assert!(send(&mut sequence, 8).is_some());
    }

    #[test]
    fn what_was_not_answered_is_sent_again_in_order_and_under_its_numbers() {
        let mut sequence = saying(0..6);
        for batch in [(0, vec![0, 1]), (1, vec![2, 3])] {
            assert_eq!(send(&mut sequence, 2), Some(batch));
        }
        assert_eq!(sequence.answered(0).map(|answered| answered.count), Some(2));
        sequence.resume();
        assert_eq!(send(&mut sequence, 2), Some((1, vec![2, 3])));
        // The next connection ends as well, before all was sent again.
        sequence.resume();
        for batch in [(1, vec![2, 3]), (2, vec![4, 5])] {
            assert_eq!(send(&mut sequence, 2), Some(batch));
        }
        assert!(send(&mut sequence, 2).is_none());
    }

    #[test]
    fn an_answer_that_comes_while_its_batch_waits_to_be_sent_again_counts_once() {
        let mut sequence = saying([0]);
        send(&mut sequence, 1);
        sequence.resume();
        assert_eq!(sequence.answered(0).map(|answered| answered.count), Some(1));
        assert!(sequence.answered(0).is_none());
        assert!(send(&mut sequence, 1).is_none());
    }

    #[test]
    fn so_many_batches_are_in_flight_and_the_next_goes_when_one_is_answered() {
        let mut sequence = saying(0..100);
        for number in 0..BATCHES as u64 {
            assert_eq!(send(&mut sequence, 1), Some((number, vec![number])));
        }
        assert!(send(&mut sequence, 1).is_none());
        assert!(sequence.answered(3).is_some_and(|answered| answered.was_full));
        assert_eq!(send(&mut sequence, 1), Some((64, vec![64])));
    }

    #[test]
    fn after_the_last_connection_nothing_is_kept_and_what_is_said_counts_as_said() {
        let mut sequence = saying(0..4);
        send(&mut sequence, 2);
        assert_eq!(sequence.broke().into_iter().map(|message| message.0).collect::<Vec<_>>(), [0, 1, 2, 3]);
        assert!(!sequence.push(Number(4)));
        assert_eq!((sequence.queued(), sequence.waiting()), (5, 0));
        assert!(send(&mut sequence, 2).is_none());
    }
}
