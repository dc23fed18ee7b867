//! Ports for the ranks' rendezvous.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};

/// Below it, other services have their ports.
const LOWEST: u16 = 20_000;
/// Where the kernel takes ports for outgoing connections from, unless it says otherwise.
const EPHEMERAL: u16 = 32_768;
const TRIES: u32 = 64;

/// A port that is free now, and that no outgoing connection will take: from below the kernel's own range
/// (`ip_local_port_range`).
pub(crate) fn free() -> std::io::Result<u16> {
    let highest = ephemeral_begin().max(LOWEST + 1000);
    let mut last = None;
    for _ in 0..TRIES {
        let port = rand::random_range(LOWEST..highest);
        match try_port(port) {
            Ok(()) => return Ok(port),
            Err(error) => last = Some(error),
        }
    }
    Err(last.unwrap_or_else(|| std::io::ErrorKind::AddrInUse.into()))
}

/// torch's store listens on both, where there are both.
fn try_port(port: u16) -> std::io::Result<()> {
    let _four = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))?;
    match TcpListener::bind(SocketAddr::from((Ipv6Addr::LOCALHOST, port))) {
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => Err(error),
        _ => Ok(()),
    }
}

fn ephemeral_begin() -> u16 {
    let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    range.split_whitespace().next().and_then(|begin| begin.parse().ok()).unwrap_or(EPHEMERAL)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_that_somebody_has_is_not_given() {
        let taken = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
        let port = taken.local_addr().unwrap().port();
        assert_eq!(try_port(port).unwrap_err().kind(), std::io::ErrorKind::AddrInUse);
        drop(taken);
        let free = free().unwrap();
        assert!((LOWEST..ephemeral_begin().max(LOWEST + 1000)).contains(&free));
    }
}
