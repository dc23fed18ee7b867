//! Which machine this is.

use std::sync::LazyLock;

use wingbeat_core::spec::MachineId;

/// The machine and network namespace in which this process was when it first asked: two processes with the same id can
/// reach each other's abstract unix sockets.
pub fn this_machine() -> MachineId {
    static MACHINE: LazyLock<MachineId> = LazyLock::new(read_machine);
    *MACHINE
}

fn read_machine() -> MachineId {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    // Two machines that do not say must not be taken for one.
    let boot = boot.unwrap_or_else(|_| rustix::system::uname().nodename().to_string_lossy().into_owned());
    let net = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    let mut hash = blake3::Hasher::new();
    let mut half = |of: &[u8]| {
        hash.update(of);
        let mut first = [0; 4];
        first.copy_from_slice(&hash.finalize().as_bytes()[..4]);
        u64::from(u32::from_le_bytes(first))
    };
    let kernel = half(boot.trim().as_bytes());
    MachineId(kernel << 32 | half(net.as_os_str().as_encoded_bytes()))
}
