//! A driver that has waited long for a value says once for what, and why it is not there.

use std::collections::BTreeMap;
use std::time::Duration;

use wingbeat_core::ObjectId;
use wingbeat_core::limits::limit;
use wingbeat_net::threads::on_a_thread;
use wingbeat_process::Session;

/// So many are told of at a time.
const AT_A_TIME: usize = 3;

/// Looks, a third of the time apart, at which a value is still waited for when it is told of: that many periods have passed.
const LOOKS: u32 = 4;

/// How long the answer to why a value is not there is waited for. The head itself may be what is waited for.
const WHY: Duration = Duration::from_secs(10);

/// How often each value was seen to be waited for.
#[derive(Default)]
struct Seen(BTreeMap<ObjectId, u32>);

impl Seen {
    /// Those that are to be told of now, each once; of those beyond [`AT_A_TIME`] only how many there are.
    fn look(&mut self, waited: Vec<ObjectId>) -> (Vec<ObjectId>, usize) {
        let before = std::mem::take(&mut self.0);
        let counted = |id: ObjectId| (id, before.get(&id).map_or(1, |looks| looks.saturating_add(1)));
        self.0 = waited.into_iter().map(counted).collect();
        let mut long: Vec<ObjectId> = self.0.iter().filter(|(_, looks)| **looks == LOOKS).map(|(id, _)| *id).collect();
        let more = long.len().saturating_sub(AT_A_TIME);
        long.truncate(AT_A_TIME);
        (long, more)
    }
}

/// Of a private cluster.
const NOBODY_ASKS: &str = "the cluster is this program's own, which no command can ask; in one that is started with `wingbeat head`, \
                           `wingbeat status`, `why` and `stack` show more";

/// Tells of long waits until the session is over. Of the commands that help, none reaches a private cluster.
pub(crate) async fn tell(session: Session, is_private: bool, show: impl Fn(&str)) {
    let after = limit("WINGBEAT_WAIT_TOLD_MS", Duration::from_secs(60));
    let mut seen = Seen::default();
    let telling = async {
        loop {
            tokio::time::sleep(after / (LOOKS - 1)).await;
            // A walk over everything that the process has, which takes long when that is much.
            let process = session.process().clone();
            let Ok(awaited) = on_a_thread("wingbeat-waits", move || process.awaited()).await else { continue };
            let (long, more) = seen.look(awaited);
            for id in long {
                let why = match tokio::time::timeout(WHY, session.why(id)).await {
                    Ok(Ok(mut why)) => {
                        if is_private {
                            why.help.retain(|help| !help.contains("`wingbeat "));
                            why.help.push(NOBODY_ASKS.into());
                        }
                        why.to_string()
                    }
                    Ok(Err(error)) => format!("{id}; why, is not known: {error}"),
                    Err(_) => format!("{id}; why, is not known: the head did not answer within {WHY:?}"),
                };
                // Asking may have taken long.
                if !session.process().is_awaited(id) {
                    continue;
                }
                show(&format!("(wingbeat) has waited for a value for {after:?} or longer: {why}"));
            }
            if more > 0 {
                show(&format!("(wingbeat) has waited for {more} more values for as long"));
            }
        }
    };
    tokio::select! {
        never = telling => never,
        () = session.process().over() => {}
    }
}

#[cfg(test)]
mod tests {
    use wingbeat_core::{ProcessId, TaskId};

    use super::*;

    fn object(seq: u64) -> ObjectId {
        TaskId { owner: ProcessId(1), seq }.output(0)
    }

    #[test]
    fn each_value_is_told_of_once_when_it_was_waited_for_all_the_time() {
        let mut seen = Seen::default();
        for look in 1..10 {
            let waited = if look == 2 { vec![object(1)] } else { vec![object(1), object(2)] };
            let expected = match look {
                LOOKS => vec![object(1)],
                // It was not waited for in between.
                6 => vec![object(2)],
                _ => Vec::new(),
            };
            assert_eq!(seen.look(waited), (expected, 0), "look {look}");
        }
    }

    #[test]
    fn of_many_at_once_a_few_are_told_of() {
        let mut seen = Seen::default();
        let all: Vec<ObjectId> = (0..100).map(object).collect();
        let last = (0..LOOKS).map(|_| seen.look(all.clone())).last().unwrap();
        assert_eq!(last, (vec![object(0), object(1), object(2)], 97));
        assert_eq!(seen.look(all), (Vec::new(), 0));
    }
}
