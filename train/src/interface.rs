//! The network interface over which a node reaches another.
//!
//! NCCL and gloo choose by themselves, and badly where a machine has more than one: a bridge of containers, or an address
//! that the others have no way to. The route that the kernel takes to rank 0 is one that really joins the nodes.

use std::net::{IpAddr, UdpSocket};

/// The name of the interface that leads to `peer`; none if there is no way, or it cannot be named.
pub(crate) fn to(peer: IpAddr) -> Option<String> {
    let own = match local_address_to(peer) {
        // On the peer's own node, that is the interface that the others come in by.
        Some(own) if own.is_loopback() && !peer.is_loopback() => peer,
        Some(own) => own,
        None => return None,
    };
    let interfaces = if_addrs::get_if_addrs().ok()?;
    interfaces.into_iter().find(|interface| interface.ip() == own).map(|interface| interface.name)
}

/// The address from which this node would speak to `peer`. Connecting a datagram socket sends nothing.
fn local_address_to(peer: IpAddr) -> Option<IpAddr> {
    let any = if peer.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let socket = UdpSocket::bind(any).ok()?;
    socket.connect((peer, 9)).ok()?;
    socket.local_addr().ok().map(|address| address.ip())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_way_to_this_machine_is_named() {
        assert_eq!(to("127.0.0.1".parse().unwrap()).as_deref(), Some("lo"));
        // Any other address of this machine is on the interface that others come in by, and not on the loopback.
        for interface in if_addrs::get_if_addrs().unwrap().into_iter().filter(|other| !other.is_loopback()) {
            if interface.ip().is_ipv4() {
                assert_eq!(to(interface.ip()).as_deref(), Some(interface.name.as_str()));
            }
        }
    }
}
