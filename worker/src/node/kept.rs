//! What a node keeps of what the head knows, for the next head: where there is no journal, a few nodes stand for it.

use std::collections::BTreeMap;
use std::ops::Bound;

use wingbeat_core::codec::Payload;
use wingbeat_net::messages::{Keep, Version};

/// About how much is read at once: far below what a frame can hold.
const PART: usize = 1 << 20;

type Facts = BTreeMap<Vec<u8>, Payload>;

/// What is kept, as bytes that only heads understand.
#[derive(Default)]
pub(super) struct Kept {
    /// None if nothing is.
    version: Option<Version>,
    facts: Facts,
    /// What is about to replace it, until that is complete.
    next: Option<Facts>,
}

impl Kept {
    /// What is complete of it.
    pub(super) fn version(&self) -> Option<Version> {
        self.version
    }

    pub(super) fn take_in(&mut self, keep: Keep) {
        let Keep { version, begins, is_complete, changes } = keep;
        if begins {
            self.next = Some(Facts::new());
        }
        let facts = self.next.as_mut().unwrap_or(&mut self.facts);
        for (key, fact) in changes {
            match fact {
                Some(fact) => facts.insert(key.to_vec(), fact),
                None => facts.remove(&*key),
            };
        }
        if is_complete {
            self.facts = self.next.take().unwrap_or_else(|| std::mem::take(&mut self.facts));
            self.version = version;
        }
    }

    /// What follows this key, or the first: empty at the end.
    pub(super) fn read(&self, after: Option<&[u8]>) -> Vec<(Payload, Payload)> {
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let mut size = 0;
        let part = self.facts.range::<[u8], _>((from, Bound::Unbounded)).take_while(|(key, fact)| {
            let is_first = size == 0;
            size += key.len() + fact.len();
            is_first || size <= PART
        });
        part.map(|(key, fact)| (Payload(key.clone().into()), fact.clone())).collect()
    }
}

#[cfg(test)]
mod tests {
    use wingbeat_net::handshake::Epoch;

    use super::*;

    fn bytes(text: &str) -> Payload {
        Payload(text.as_bytes().to_vec().into())
    }

    fn keep(count: u64, begins: bool, is_complete: bool, changes: &[(&str, Option<&str>)]) -> Keep {
        let changes = changes.iter().map(|(key, fact)| (bytes(key), fact.map(bytes))).collect();
        Keep { version: Some(Version { epoch: Epoch(1), count }), begins, is_complete, changes }
    }

    fn texts(kept: &Kept) -> Vec<(String, String)> {
        let text = |bytes: &Payload| String::from_utf8_lossy(bytes).into_owned();
        kept.read(None).iter().map(|(key, fact)| (text(key), text(fact))).collect()
    }

    #[test]
    fn what_is_replaced_is_kept_until_what_replaces_it_is_complete() {
        let mut kept = Kept::default();
        assert_eq!(kept.version(), None);
        kept.take_in(keep(3, true, true, &[("a", Some("1")), ("b", Some("2"))]));
        kept.take_in(keep(4, false, true, &[("a", None), ("c", Some("3"))]));
        let before = texts(&kept);
        assert_eq!(before, [("b".into(), "2".into()), ("c".into(), "3".into())]);
        kept.take_in(keep(9, true, false, &[("d", Some("4"))]));
        assert_eq!((texts(&kept), kept.version().map(|version| version.count)), (before, Some(4)));
        kept.take_in(keep(9, false, true, &[("e", Some("5"))]));
        assert_eq!(texts(&kept), [("d".into(), "4".into()), ("e".into(), "5".into())]);
        assert_eq!(kept.version().map(|version| version.count), Some(9));
        kept.take_in(Keep { version: None, begins: true, is_complete: true, changes: Vec::new() });
        assert_eq!((kept.read(None).len(), kept.version()), (0, None));
    }

    #[test]
    fn it_is_read_in_parts_that_a_frame_can_hold() {
        let mut kept = Kept::default();
        let large = "x".repeat(PART / 2);
        let changes: Vec<(&str, Option<&str>)> = ["a", "b", "c", "d"].map(|key| (key, Some(large.as_str()))).into();
        kept.take_in(keep(1, true, true, &changes));
        let (mut after, mut keys, mut parts) = (None, Vec::new(), 0);
        loop {
            let part = kept.read(after.as_deref());
            let Some((last, _)) = part.last() else { break };
            after = Some(last.to_vec());
            keys.extend(part.iter().map(|(key, _)| key.to_vec()));
            parts += 1;
        }
        assert_eq!((keys, parts), (vec![b"a".to_vec(), b"b".to_vec(), b"c".to_vec(), b"d".to_vec()], 4));
    }
}
