//! How long those that know a head may go on without it: as long as that head said when they joined. The next head may have other times.
//! Until the time of the last one is over, it starts nothing elsewhere that may still run: so much it has to know of the last one.
//!
//! A head writes down what it promises ([`Fact::Promise`]), as any fact: in its journal, or in the memory of nodes. While those of an
//! earlier head may go on for longer, that is what counts, also for the head after it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use wingbeat_net::limits::limits;

use super::Shell;
use crate::state::{Fact, Millis};

/// What an earlier head has promised, in milliseconds since this one began; 0 if there was none.
#[derive(Default)]
pub(super) struct Promise(AtomicU64);

fn own() -> Millis {
    limits().lost.as_millis() as Millis
}

/// Until when those that an earlier head knew may come back, by what it wrote down. Whoever has not by then has ended by itself: it has
/// waited as long, from before this head began; or from so much later, where the last one may have led for that long beside it. Nor may
/// they have less time than this head gives them. The facts say the same from now on.
pub(crate) fn of_earlier(facts: &mut Vec<Fact>, later: Duration) -> Millis {
    let promised = facts.iter().filter_map(|fact| match fact {
        Fact::Promise(promised) => Some(*promised),
        _ => None,
    });
    // There is one, as one fact is kept under a key.
    let until = promised.max().map_or(unknown(), |promised| promised.max(own())) + later.as_millis() as Millis;
    facts.retain(|fact| !matches!(fact, Fact::Promise(_)));
    facts.push(Fact::Promise(until));
    until
}

/// The same, where it is not known what was promised.
pub(super) fn unknown() -> Millis {
    limits().unknown.as_millis() as Millis
}

impl Shell {
    /// From now on, so much is promised: what an earlier head has promised, as far as it is known, until that is over.
    pub(crate) fn promises(self: &Arc<Self>, earlier: Option<Millis>) {
        let promised = earlier.unwrap_or(0);
        self.earlier.0.store(promised, Ordering::Relaxed);
        self.note_fact(Fact::Promise(promised.max(own())));
        if promised > own() {
            let shell = self.clone();
            self.vital("keeping an earlier promise", async move {
                let over = Duration::from_millis(promised).saturating_sub(shell.started.elapsed());
                shell.until_stopped(tokio::time::sleep(over)).await;
                // It may end before, and another promise may be known by now.
                if shell.now() >= promised && shell.earlier.0.load(Ordering::Relaxed) == promised {
                    shell.note_fact(Fact::Promise(own()));
                }
            });
        }
    }

    /// Whether an earlier head has promised something, as far as is known.
    pub(super) fn knows_a_promise(&self) -> bool {
        self.earlier.0.load(Ordering::Relaxed) > 0
    }

    /// After how much silence somebody is lost now.
    pub(super) fn lost_after(&self) -> Duration {
        let earlier = self.earlier.0.load(Ordering::Relaxed);
        match self.now() < earlier {
            true => limits().lost.max(Duration::from_millis(earlier)),
            false => limits().lost,
        }
    }

    /// Writes down what is true of the head itself.
    fn note_fact(&self, fact: Fact) {
        let mut inside = self.inside.lock();
        inside.keep(std::slice::from_ref(&fact));
        self.write(vec![fact]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_may_have_led_for_longer_has_promised_more() {
        let (promised, later) = (own() + 1_000, Duration::from_secs(6));
        let mut facts = vec![Fact::Promise(promised)];
        assert_eq!(of_earlier(&mut facts, later), promised + 6_000);
        assert!(matches!(facts[..], [Fact::Promise(until)] if until == promised + 6_000), "the state waits as long");
    }
}
