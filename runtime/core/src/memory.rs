//! That memory ran out on a node: who used what then.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::ids::NodeId;

/// Memory ran out on a node, and a process of it was ended for that.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MemoryShortage {
    /// The node.
    pub node: NodeId,
    /// The name of its machine.
    pub hostname: String,
    /// Who ended the process.
    pub by: EndedBy,
    /// What was in use.
    pub usage: MemoryUsage,
    /// The processes that used most, largest first.
    pub largest: Vec<MemoryUser>,
}

/// Who ended a process because memory ran out.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum EndedBy {
    /// Its node, before the kernel did it.
    Node,
    /// The kernel.
    Kernel,
}

/// What is used of the memory that a node may use, in bytes.
#[derive(Clone, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MemoryUsage {
    /// What has the limit, for people: `the machine`, or a control group.
    pub of: String,
    /// How much there is.
    pub limit: u64,
    /// How much of it is used, by whomever; what the kernel would drop at once does not count.
    pub used: u64,
    /// Above this the node ends processes; 0 if it ends none.
    pub threshold: u64,
    /// What the object store of the node has of it.
    pub store: u64,
}

/// A process and the memory of its own that it uses.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MemoryUser {
    /// Its process id.
    pub pid: u32,
    /// The task or actor that runs in it, or its command.
    pub what: String,
    /// Bytes; the object store, and files that the kernel can read again, do not count.
    pub bytes: u64,
}

impl fmt::Display for MemoryUsage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MemoryUsage { of, limit, used, threshold, store } = self;
        write!(f, "{} of {} ({of}) were in use", Size(*used), Size(*limit))?;
        if *threshold > 0 {
            write!(f, ", and the node ends processes above {}", Size(*threshold))?;
        }
        write!(f, "; the object store had {} of that", Size(*store))
    }
}

impl fmt::Display for MemoryShortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MemoryShortage { node, hostname, by, usage, largest } = self;
        let by = match by {
            EndedBy::Node => "its node ended it before the kernel would have:",
            EndedBy::Kernel => "the kernel killed it. When its node had looked last,",
        };
        write!(f, "memory ran out on {hostname} ({node}), and {by} {usage}")?;
        if !largest.is_empty() {
            f.write_str("; the largest processes were")?;
        }
        for MemoryUser { pid, what, bytes } in largest {
            write!(f, "\n    {:>10}  pid {pid:<7} {what}", Size(*bytes).to_string())?;
        }
        Ok(())
    }
}

/// Bytes, as people read them.
pub struct Size(pub u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Size(bytes) = *self;
        match [("TiB", 40), ("GiB", 30), ("MiB", 20)].into_iter().find(|(_, shift)| bytes >> shift > 0) {
            Some((unit, shift)) => write!(f, "{:.1} {unit}", bytes as f64 / (1u64 << shift) as f64),
            None => write!(f, "{} KiB", bytes >> 10),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shortage_says_who_used_what() {
        let usage =
            MemoryUsage { of: "the machine".into(), limit: 4 << 30, used: 3900 << 20, threshold: 3800 << 20, store: 0 };
        let user = |pid, what: &str, bytes| MemoryUser { pid, what: what.into(), bytes };
        let shortage = MemoryShortage {
            node: NodeId(1),
            hostname: "here".into(),
            by: EndedBy::Node,
            usage,
            largest: vec![user(12, "hog", 3 << 30), user(9, "(idle)", 300 << 10)],
        };
        let text = shortage.to_string();
        assert!(text.contains("3.8 GiB of 4.0 GiB (the machine)"), "{text}");
        assert!(text.contains("\n       3.0 GiB  pid 12      hog\n       300 KiB  pid 9       (idle)"), "{text}");
    }
}
