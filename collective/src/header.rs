//! What members check of each other before they exchange anything.

use crate::element::{Element, Op, sealed};
use crate::error::{CollectiveError, Result};

/// An operation, as every member must call it. All of it is numbers, so that it can lie in shared memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Header {
    /// How many operations were before it.
    pub sequence: u64,
    /// Bytes of each member's part.
    pub bytes: u64,
    /// The name of the element, padded with zeros.
    element: [u8; 8],
    kind: u8,
    op: u8,
    root: u16,
    element_size: u16,
    carrier: u16,
}

/// What carries the data of an operation. Numbers, as all of a header.
const GROUP: u16 = 0;
const DEVICES: u16 = 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    Barrier = 1,
    AllReduce,
    Reduce,
    Broadcast,
    AllGather,
    ReduceScatter,
    AllToAll,
    Send,
}

const KINDS: [(Kind, &str); 8] = [
    (Kind::Barrier, "barrier"),
    (Kind::AllReduce, "all_reduce"),
    (Kind::Reduce, "reduce"),
    (Kind::Broadcast, "broadcast"),
    (Kind::AllGather, "all_gather"),
    (Kind::ReduceScatter, "reduce_scatter"),
    (Kind::AllToAll, "all_to_all"),
    (Kind::Send, "send or recv"),
];
const OPS: [(Op, &str); 5] =
    [(Op::Sum, "sum"), (Op::Product, "product"), (Op::Min, "min"), (Op::Max, "max"), (Op::Avg, "avg")];
/// In place of a root.
const NO_ROOT: u16 = u16::MAX;
pub(crate) const SIZE: usize = std::mem::size_of::<Header>();

impl Header {
    pub(crate) fn new<T: Element>(
        sequence: u64,
        kind: Kind,
        elements: usize,
        op: Option<Op>,
        root: Option<u32>,
    ) -> Self {
        let name = <T as sealed::Element>::NAME.as_bytes();
        let mut element = [0; 8];
        element[..name.len()].copy_from_slice(name);
        Header {
            sequence,
            bytes: (elements * size_of::<T>()) as u64,
            element,
            kind: kind as u8,
            op: op.map_or(0, |op| 1 + OPS.iter().position(|(other, _)| *other == op).unwrap_or(0) as u8),
            root: root.map_or(NO_ROOT, |root| root as u16),
            element_size: size_of::<T>() as u16,
            carrier: GROUP,
        }
    }

    /// The same between devices.
    pub(crate) fn on_devices(self) -> Self {
        Header { carrier: DEVICES, ..self }
    }

    /// That another calls the same.
    pub(crate) fn check(&self, theirs: &Header, rank: u32, own_rank: u32) -> Result<()> {
        if self == theirs {
            return Ok(());
        }
        Err(CollectiveError::Mismatch { rank, theirs: theirs.to_string(), own_rank, own: self.to_string() })
    }

    pub(crate) fn to_bytes(self) -> [u8; SIZE] {
        let mut bytes = [0; SIZE];
        bytes[..8].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.bytes.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.element);
        bytes[24] = self.kind;
        bytes[25] = self.op;
        bytes[26..28].copy_from_slice(&self.root.to_le_bytes());
        bytes[28..30].copy_from_slice(&self.element_size.to_le_bytes());
        bytes[30..32].copy_from_slice(&self.carrier.to_le_bytes());
        bytes
    }

    pub(crate) fn from_bytes(bytes: [u8; SIZE]) -> Header {
        let part = |at: usize| {
            let mut part = [0; 8];
            part.copy_from_slice(&bytes[at..at + 8]);
            part
        };
        Header {
            sequence: u64::from_le_bytes(part(0)),
            bytes: u64::from_le_bytes(part(8)),
            element: part(16),
            kind: bytes[24],
            op: bytes[25],
            root: u16::from_le_bytes([bytes[26], bytes[27]]),
            element_size: u16::from_le_bytes([bytes[28], bytes[29]]),
            carrier: u16::from_le_bytes([bytes[30], bytes[31]]),
        }
    }
}

impl std::fmt::Display for Header {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind =
            KINDS.iter().find(|(kind, _)| *kind as u8 == self.kind).map_or("something unknown", |(_, name)| name);
        write!(f, "{kind}")?;
        if self.kind != Kind::Barrier as u8 {
            let name = String::from_utf8_lossy(&self.element);
            let count = self.bytes / u64::from(self.element_size.max(1));
            write!(f, " of {count} {}", name.trim_end_matches('\0'))?;
        }
        if let Some((_, op)) = usize::from(self.op).checked_sub(1).and_then(|op| OPS.get(op)) {
            write!(f, " ({op})")?;
        }
        if self.root != NO_ROOT {
            write!(f, " at root {}", self.root)?;
        }
        if self.carrier == DEVICES {
            write!(f, " on devices")?;
        }
        write!(f, " as operation {}", self.sequence)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_is_said_with_ranks() {
        let mine = Header::new::<f32>(3, Kind::AllReduce, 8, Some(Op::Sum), None);
        assert_eq!(Header::from_bytes(mine.to_bytes()), mine);
        let theirs = Header::new::<f64>(3, Kind::Reduce, 4, Some(Op::Max), Some(1));
        let error = mine.check(&theirs, 2, 0).unwrap_err().to_string();
        assert!(error.starts_with("rank 2 calls reduce of 4 f64 (max) at root 1 as operation 3, and rank 0 calls all_reduce of 8 f32 (sum) as operation 3"), "{error}");
        assert!(mine.check(&mine, 1, 0).is_ok());
        let on_devices = mine.on_devices();
        assert_eq!(Header::from_bytes(on_devices.to_bytes()), on_devices);
        let error = mine.check(&on_devices, 1, 0).unwrap_err().to_string();
        assert!(error.starts_with("rank 1 calls all_reduce of 8 f32 (sum) on devices as operation 3"), "{error}");
    }

    proptest::proptest! {
        #[test]
        fn whatever_a_member_sends_is_a_header_that_differs_or_not(bytes: [u8; SIZE]) {
            let theirs = Header::from_bytes(bytes);
            proptest::prop_assert_eq!(theirs.to_bytes(), bytes);
            let mine = Header::new::<f32>(3, Kind::AllReduce, 8, Some(Op::Sum), None);
            proptest::prop_assert_eq!(mine.check(&theirs, 1, 0).is_ok(), mine == theirs);
        }
    }
}
