//! Groups whose members are threads of this process, for tests.

use std::net::{IpAddr, Ipv4Addr};

use crate::Group;
use crate::mesh::{Card, Member};

/// Which machine each member is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum On {
    One,
    /// Two, in turn.
    Two,
    /// One each.
    Each,
}

pub(crate) const ALL: [On; 3] = [On::One, On::Two, On::Each];

/// One that has not met the others.
pub(crate) fn member(rank: u32, on: On) -> Member {
    let machine = match on {
        On::One => Some("one".to_owned()),
        On::Two => Some(format!("number {}", rank % 2)),
        On::Each => None,
    };
    Member::on(machine, IpAddr::V4(Ipv4Addr::LOCALHOST)).unwrap()
}

/// Members, each on a thread of its own, that do the same.
pub(crate) fn members<R: Send>(count: u32, on: On, work: impl Fn(&mut Group) -> R + Sync) -> Vec<R> {
    results(count, on, work).into_iter().map(|result| result.unwrap()).collect()
}

/// The same; what a member panicked with is its result.
pub(crate) fn results<R: Send>(
    count: u32,
    on: On,
    work: impl Fn(&mut Group) -> R + Sync,
) -> Vec<std::thread::Result<R>> {
    let members: Vec<Member> = (0..count).map(|rank| member(rank, on)).collect();
    let cards: Vec<Card> = members.iter().map(Member::card).collect();
    std::thread::scope(|scope| {
        let threads: Vec<_> = members
            .into_iter()
            .enumerate()
            .map(|(rank, member)| {
                let (cards, work) = (&cards, &work);
                scope.spawn(move || work(&mut Group::of(member, rank as u32, cards).unwrap()))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join()).collect()
    })
}
