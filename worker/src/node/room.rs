//! Waiting for room in the store. What others read or write cannot leave memory, but they are done at some time, and what cannot go to the disk
//! is dropped at some time: whoever needs its room waits for that, longest where it will most likely help. Where the machine has no memory for it,
//! somebody may give some back.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use wingbeat_core::ProcessId;
use wingbeat_core::limits::limit;
use wingbeat_net::messages::{HeadMessage, StoreUse};
use wingbeat_store::{Full, HeldBy, NodeStore};

use super::Daemon;

/// How long room is waited for that the process which needs it holds itself, or another that waits, too: it may only be copying, or two of its
/// threads need what one after the other can have; or it has views, and would wait for itself. As long, where nobody holds what takes the room, and
/// the disk has none: it may be dropped, as items of a stream are that its consumer has taken. Where memory is short, whoever has taken most is ended soon.
const OWN: Duration = Duration::from_secs(10);

/// How often one may wait for its limit while others get room.
const TURNS: u32 = 10;

/// How long the others wait at least when one has given up: what it holds itself is free soon, and may be what they lack.
const AFTERWARDS: Duration = Duration::from_secs(1);

/// How long one waits until it looks again, if nobody says that something has changed.
const LOOK: Duration = Duration::from_secs(1);

/// How much less often each of those that wait looks for each other that does.
const APART: Duration = Duration::from_millis(1);

/// No more rarely does one look that has waited for long, if something changes.
const RAREST: Duration = Duration::from_millis(50);

/// Why there is no room now.
pub(super) struct NoRoom {
    why: String,
    held_by: HeldBy,
}

impl From<Full> for NoRoom {
    fn from(full: Full) -> NoRoom {
        NoRoom { held_by: full.held_by, why: full.to_string() }
    }
}

impl NoRoom {
    /// Memory is short.
    pub(super) fn in_memory(why: &impl std::fmt::Display) -> NoRoom {
        NoRoom { why: why.to_string(), held_by: HeldBy::Nobody }
    }
}

/// Those that wait for room.
pub(super) struct Room {
    /// For how long none of them may get any (`WINGBEAT_ROOM_LIMIT_MS`).
    limit: Duration,
    look: Duration,
    /// The node's own process: what it holds is on its way from one node to another.
    node: ProcessId,
    waiting: AtomicUsize,
    last: Mutex<Last>,
    store: Mutex<Shown>,
}

/// What the head shows of the store.
#[derive(Default)]
struct Shown {
    /// What it was told.
    told: StoreUse,
    /// What was found last.
    found: StoreUse,
}

/// When one of them got room last, and when one gave up.
#[derive(Default)]
struct Last {
    got: Option<Instant>,
    gave_up: Option<Instant>,
}

/// One that may have to wait.
pub(super) struct Wait<'a> {
    room: &'a Room,
    by: ProcessId,
    since: Option<Instant>,
    /// Where it says so.
    store: &'a NodeStore,
    /// Whom it waits for, and since when.
    holder: Option<(HeldBy, Instant)>,
    /// Until when it waits for what is free since another has given up; it does so once.
    moment: Option<Instant>,
}

impl Room {
    pub(super) fn new(node: ProcessId) -> Room {
        let limit = limit("WINGBEAT_ROOM_LIMIT_MS", Duration::from_secs(60));
        Room { limit, look: LOOK, node, waiting: AtomicUsize::new(0), last: Mutex::default(), store: Mutex::default() }
    }

    /// What the head was told of the store.
    pub(super) fn told(&self) -> StoreUse {
        self.store.lock().told
    }

    /// For a process that needs room in the store.
    pub(super) fn wait<'a>(&'a self, by: ProcessId, store: &'a NodeStore) -> Wait<'a> {
        Wait { room: self, by, store, since: None, holder: None, moment: None }
    }

    fn patience(&self, held_by: HeldBy, by: ProcessId) -> Duration {
        match held_by {
            HeldBy::Others => self.limit,
            HeldBy::Asker if by == self.node => self.limit,
            _ => self.limit.min(OWN),
        }
    }

    /// How much longer one waits that is as patient, has waited for others to let go since `since`, and in all since `begun`.
    fn left(&self, patience: Duration, since: Instant, begun: Instant) -> Duration {
        let since = self.last.lock().got.map_or(since, |got| got.max(since));
        patience.saturating_sub(since.elapsed()).min((self.limit * TURNS).saturating_sub(begun.elapsed()))
    }

    /// Whether another has given up a moment ago.
    fn has_one_given_up(&self) -> bool {
        self.last.lock().gave_up.is_some_and(|gave_up| gave_up.elapsed() < AFTERWARDS)
    }
}

impl Daemon {
    /// Has the head show what the store holds and how many wait for room. It hears of small changes only when there are no others.
    pub(super) fn tell_of_store(&self) {
        let stats = self.store.stats();
        let waiting = self.room.waiting.load(Ordering::Relaxed).try_into().unwrap_or(u32::MAX);
        let holds = StoreUse { used: stats.used, spilled: stats.spilled, waiting };
        // Held while it is told: a head that was started again is told of it in the same order.
        let mut shown = self.room.store.lock();
        let is_large = |before: u64, now: u64| before.abs_diff(now) > stats.capacity / 64;
        let told = shown.told;
        let is_quiet = std::mem::replace(&mut shown.found, holds) == holds;
        let has_changed =
            told.waiting != waiting || is_large(told.used, holds.used) || is_large(told.spilled, holds.spilled);
        if told != holds && (has_changed || is_quiet) {
            shown.told = holds;
            self.head.link.send(HeadMessage::StoreUsed(holds));
        }
    }
}

impl Wait<'_> {
    /// Waits until it is worth looking for room again. `settled` is what says so, since before the last look. As long as others get
    /// room for which they have waited, one's turn may come. The look follows at once on what says so: where one that never waits has a
    /// large object nearly always, there is room for a moment only.
    ///
    /// # Errors
    /// It takes too long: why there is no room.
    pub(super) async fn until_changed(
        &mut self,
        lacking: &NoRoom,
        settled: impl Future<Output = ()>,
    ) -> Result<(), String> {
        let (room, held_by) = (self.room, lacking.held_by);
        let patience = room.patience(held_by, self.by);
        let now = Instant::now();
        if self.since.is_none() {
            room.waiting.fetch_add(1, Ordering::Relaxed);
            self.says(true);
        }
        let begun = *self.since.get_or_insert(now);
        // Whoever holds it now has the whole time.
        let holder = self.holder.filter(|(holder, _)| *holder == held_by).unwrap_or((held_by, now));
        self.holder = Some(holder);
        let mut left = room.left(patience, holder.1, begun);
        if left.is_zero() {
            if room.has_one_given_up() {
                self.moment.get_or_insert(now + AFTERWARDS.min(patience));
            }
            left = self.moment.map_or(Duration::ZERO, |moment| moment.saturating_duration_since(now));
        }
        if left.is_zero() {
            room.last.lock().gave_up = Some(now);
            let waited = match held_by {
                HeldBy::Nobody => "too little was dropped",
                HeldBy::Asker if self.by != room.node => {
                    "the process that needs room holds it itself, as a view perhaps, or others do that wait, too, and let go of too little"
                }
                _ => "others read or write what takes the room, and let go of too little",
            };
            return Err(format!("{} ({waited} in {:.1?})", lacking.why, begun.elapsed()));
        }
        let others = room.waiting.load(Ordering::Relaxed).saturating_sub(1).min(100) as u32;
        let pause = (begun.elapsed() / 10).min(RAREST) + APART * others;
        tokio::time::sleep(pause.min(left)).await;
        let _ = tokio::time::timeout(left.saturating_sub(pause).min(room.look), settled).await;
        Ok(())
    }

    fn says(&self, waits: bool) {
        // What the node itself has goes on its way meanwhile.
        if self.by != self.room.node {
            self.store.waits_for_room(self.by, waits);
        }
    }

    /// There was room.
    pub(super) fn got(self) {
        if self.since.is_some() {
            self.room.last.lock().got = Some(Instant::now());
        }
    }
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        if self.since.is_some() {
            self.room.waiting.fetch_sub(1, Ordering::Relaxed);
            self.says(false);
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::Notify;
    use wingbeat_store::StoreConfig;

    use super::*;

    const NODE: ProcessId = ProcessId(1);
    const WORKER: ProcessId = ProcessId(2);
    const LIMIT: Duration = Duration::from_millis(50);

    fn full(held_by: HeldBy) -> NoRoom {
        let (unsealed, restoring) = (0, 0);
        Full { needed: 9, capacity: 10, free: 1, pinned: 9, unsealed, restoring, spill_room: 10, held_by }.into()
    }

    fn room() -> Room {
        Room { limit: LIMIT, ..Room::new(NODE) }
    }

    fn store() -> NodeStore {
        let config = StoreConfig { capacity: 4096, spill_dir: None, spill_capacity: 0, write_ahead_above: u64::MAX };
        NodeStore::new(config).unwrap()
    }

    async fn gives_up(mut wait: Wait<'_>, held_by: HeldBy) -> String {
        loop {
            if let Err(why) = wait.until_changed(&full(held_by), std::future::pending()).await {
                return why;
            }
        }
    }

    #[tokio::test]
    async fn who_holds_what_is_lacking_is_waited_for_and_then_named() {
        let named = [
            (WORKER, HeldBy::Others, "others read or write what takes the room, and let go of too little in "),
            (WORKER, HeldBy::Asker, "holds it itself"),
            // It is another transfer.
            (NODE, HeldBy::Asker, "others read or write"),
            (WORKER, HeldBy::Nobody, "too little was dropped in "),
        ];
        for (by, held_by, named) in named {
            let (room, store, begun) = (room(), store(), Instant::now());
            let why = gives_up(room.wait(by, &store), held_by).await;
            assert!(why.contains(named) && begun.elapsed() >= LIMIT, "{why}");
        }
    }

    #[test]
    fn who_holds_it_itself_is_less_patient_than_others() {
        let room = Room { limit: Duration::from_secs(60), ..room() };
        assert_eq!(room.patience(HeldBy::Asker, WORKER), OWN);
        assert_eq!(room.patience(HeldBy::Nobody, WORKER), OWN);
        assert_eq!(room.patience(HeldBy::Asker, NODE), room.limit);
        assert_eq!(room.patience(HeldBy::Others, WORKER), room.limit);
    }

    #[tokio::test]
    async fn one_looks_again_when_something_is_settled() {
        let long = Duration::from_secs(3600);
        let (room, store, settles) = (Room { limit: long, look: long, ..room() }, store(), Notify::new());
        let mut wait = room.wait(WORKER, &store);
        let settled = settles.notified();
        settles.notify_waiters();
        wait.until_changed(&full(HeldBy::Others), settled).await.unwrap();
    }

    #[test]
    fn whoever_waits_has_time_again_when_others_got_room_but_not_for_ever() {
        let room = Room { limit: Duration::from_secs(60), ..room() };
        let now = Instant::now();
        let ago = |seconds| now.checked_sub(Duration::from_secs(seconds)).unwrap();
        assert!(room.left(room.limit, ago(61), ago(61)).is_zero());
        room.last.lock().got = Some(ago(10));
        assert!((40..=50).contains(&room.left(room.limit, ago(61), ago(61)).as_secs()));
        // Small ones that come and go do not keep a large one waiting for ever.
        assert!(room.left(room.limit, ago(61), ago(601)).is_zero());
    }

    #[tokio::test]
    async fn when_one_gives_up_another_has_a_moment_to_find_what_that_had() {
        let (room, store) = (room(), store());
        let (mut one, mut other) = (room.wait(WORKER, &store), room.wait(WORKER, &store));
        let full = full(HeldBy::Others);
        one.until_changed(&full, std::future::ready(())).await.unwrap();
        other.until_changed(&full, std::future::ready(())).await.unwrap();
        while one.until_changed(&full, std::future::pending()).await.is_ok() {}
        other.until_changed(&full, std::future::ready(())).await.unwrap();
    }
}
