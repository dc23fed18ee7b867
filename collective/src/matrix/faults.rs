//! Members that do not do their part of an operation of many parts: the others hear of it, and nobody waits for ever.

use std::cell::RefCell;
use std::sync::{Mutex, mpsc};
use std::time::Duration;

use crate::element::sealed;
use crate::local::{ALL, On, member, members, results};
use crate::meeting::{Gathering, Meeting};
use crate::{CollectiveError, Group, Op};

/// Several parts of what goes through shared memory.
const LENGTH: usize = 1 << 18;
/// Nobody who hears of a fault waits for so long.
const LONG: Duration = Duration::from_secs(60);

const CALLS: [Call; 6] =
    [Call::AllReduce, Call::Reduce, Call::Broadcast, Call::AllGather, Call::ReduceScatter, Call::AllToAll];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    AllReduce,
    Reduce,
    Broadcast,
    AllGather,
    ReduceScatter,
    AllToAll,
}

impl Call {
    /// With as many elements in all.
    fn run(self, group: &mut Group, length: usize) -> Result<(), CollectiveError> {
        let each = length / group.size() as usize;
        let filled = |length: usize| vec![Mined(1); length];
        let whole = each * group.size() as usize;
        match self {
            Call::AllReduce => group.all_reduce(&mut filled(length), Op::Sum),
            Call::Reduce => group.reduce(&mut filled(length), Op::Sum, 0),
            Call::Broadcast => group.broadcast(&mut filled(length), 0),
            Call::AllGather => group.all_gather(&filled(each), &mut filled(whole)),
            Call::ReduceScatter => group.reduce_scatter(&filled(whole), &mut filled(each), Op::Sum),
            Call::AllToAll => group.all_to_all(&filled(whole), &mut filled(whole)),
        }
    }
}

/// Some groups, in each way, and one of their members.
fn groups() -> impl Iterator<Item = (u32, On, u32)> {
    let counts = ALL.into_iter().flat_map(|on| [2, 3, 5].map(|count: u32| (count, on)));
    counts.flat_map(|(count, on)| (0..count).step_by(count.div_ceil(3) as usize).map(move |rank| (count, on, rank)))
}

/// What the others hear when one member does as `fault` does.
fn heard(
    call: Call,
    (count, on, faulty): (u32, On, u32),
    fault: impl Fn(&mut Group) + Sync,
) -> impl Iterator<Item = CollectiveError> {
    let errors = members(count, on, |group| {
        group.set_timeout(LONG);
        if group.rank() == faulty {
            fault(group);
            return None;
        }
        Some(call.run(group, LENGTH).unwrap_err())
    });
    errors.into_iter().flatten()
}

#[test]
fn all_name_a_member_that_leaves() {
    for (call, group) in CALLS.into_iter().flat_map(|call| groups().map(move |group| (call, group))) {
        for error in heard(call, group, |_| {}) {
            assert_eq!(error, CollectiveError::PeerLost { rank: group.2 }, "{call:?} {group:?}");
        }
    }
}

#[test]
fn all_name_a_member_that_calls_another_operation_or_length() {
    for (call, group) in CALLS.into_iter().flat_map(|call| groups().map(move |group| (call, group))) {
        let other = if call == Call::AllGather { Call::Broadcast } else { Call::AllGather };
        for (other, length) in [(other, LENGTH), (call, LENGTH + 5)] {
            for error in heard(call, group, |group| other.run(group, length).map_or((), drop)) {
                let is_named = matches!(&error, CollectiveError::Mismatch { rank, .. } if *rank == group.2);
                assert!(is_named, "{call:?} {group:?}: {error}");
            }
        }
    }
}

thread_local! {
    /// What happens to this member in the middle of an operation.
    static MINE: RefCell<Option<Box<dyn FnOnce()>>> = const { RefCell::new(None) };
}

fn lay(mine: impl FnOnce() + 'static) {
    MINE.set(Some(Box::new(mine)));
}

/// A number that is well until it is added up where there is a mine.
#[derive(Clone, Copy, Debug)]
struct Mined(u32);

// SAFETY: a plain number.
unsafe impl sealed::Element for Mined {
    const NAME: &'static str = "mined";
    type Wide = Mined;
    const IS_NARROW: bool = false;

    fn widened(from: &[Self]) -> Vec<Mined> {
        from.to_vec()
    }

    fn narrow(from: &[Mined], into: &mut [Self]) {
        into.copy_from_slice(from);
    }

    fn combine(_op: Op, into: &mut [Self], from: &[Self]) {
        if let Some(mine) = MINE.take() {
            mine();
        }
        for (into, from) in into.iter_mut().zip(from) {
            into.0 += from.0;
        }
    }

    fn divide(_into: &mut [Self], _by: u32) {}
}

/// Groups, and a member that adds up what others have.
fn adding() -> impl Iterator<Item = (Call, (u32, On, u32))> {
    [Call::AllReduce, Call::ReduceScatter].into_iter().flat_map(|call| groups().map(move |group| (call, group))).filter(
        // In memory on a machine of several, its first adds up for all.
        |(call, (_, on, rank))| *on != On::Two || *call == Call::ReduceScatter || *rank < 2,
    )
}

#[test]
fn all_hear_of_a_member_that_panics_in_the_middle() {
    for (call, (count, on, faulty)) in adding() {
        let results = results(count, on, |group| {
            group.set_timeout(LONG);
            if group.rank() == faulty {
                lay(|| panic!("on purpose"));
            }
            // Whoever had all before may have done its part.
            call.run(group, LENGTH).and_then(|()| group.barrier()).unwrap_err()
        });
        let mut lost = Vec::new();
        for (rank, result) in results.into_iter().enumerate() {
            match result {
                Ok(CollectiveError::PeerLost { rank }) => lost.push(rank),
                Ok(error) => panic!("{call:?} of {count} {on:?}: {error} at {rank}"),
                Err(_) => assert_eq!(rank as u32, faulty),
            }
        }
        // Others lose those who have lost it.
        assert!(lost.contains(&faulty), "{call:?} of {count} {on:?}: {lost:?} instead of {faulty}");
    }
}

#[test]
fn a_member_that_stops_in_the_middle_is_given_up() {
    let check = |call: Call, (count, on, faulty): (u32, On, u32)| {
        let (working, works) = mpsc::channel::<()>();
        // All but the faulty one have one until they have failed.
        let working = Mutex::new(vec![working; count as usize - 1]);
        let works = Mutex::new(Some(works));
        let errors = members(count, on, |group| {
            group.set_timeout(Duration::from_secs(1));
            let _working = match group.rank() == faulty {
                true => {
                    let works = works.lock().unwrap().take().unwrap();
                    lay(move || assert!(works.recv().is_err()));
                    None
                }
                false => working.lock().unwrap().pop(),
            };
            call.run(group, LENGTH).and_then(|()| group.barrier()).unwrap_err()
        });
        // Who waits for one that waits for it gives up that one as early.
        let is_heard = |error: &CollectiveError| {
            matches!(error, CollectiveError::TimedOut { .. } | CollectiveError::PeerLost { .. })
        };
        assert!(errors.iter().all(is_heard), "{call:?} of {count} {on:?}: {errors:?} for {faulty}");
        assert!(
            errors.iter().any(|error| matches!(error, CollectiveError::TimedOut { .. })),
            "{call:?} of {count} {on:?}: {errors:?} for {faulty}"
        );
    };
    // Some at once: they wait.
    std::thread::scope(|scope| {
        for on in ALL {
            let check = &check;
            scope.spawn(move || {
                let all_reduce =
                    |(call, (_, other, _)): &(Call, (u32, On, u32))| *call == Call::AllReduce && *other == on;
                adding().filter(all_reduce).for_each(|(call, group)| check(call, group));
            });
        }
    });
}

#[test]
fn a_member_that_joins_twice_is_refused_and_its_group_works() {
    for (count, on, twice) in groups() {
        let meeting = Meeting::new(count);
        let come = |rank: u32| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
            let member = member(rank, on);
            let told = runtime.block_on(meeting.come(rank, member.card()));
            match told {
                Gathering::All(cards) => Some(Group::of(member, rank, &cards).unwrap()),
                Gathering::Refused(why) => {
                    assert_eq!(why, format!("rank {twice} came twice; every group needs a meeting of its own"));
                    None
                }
                Gathering::Missing(..) => panic!("{told:?}"),
            }
        };
        let works = |rank: u32| {
            let mut group = come(rank)?;
            if rank == twice {
                // While the others reduce.
                assert!(come(rank).is_none());
            }
            group.all_reduce(&mut vec![1.0f32; LENGTH], Op::Sum).unwrap();
            Some(group.rank())
        };
        let ranks: Vec<u32> = std::thread::scope(|scope| {
            // And twice at the same time.
            let threads: Vec<_> = (0..count)
                .chain([twice])
                .map(|rank| {
                    scope.spawn({
                        let works = &works;
                        move || works(rank)
                    })
                })
                .collect();
            threads.into_iter().filter_map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(ranks.len(), count as usize, "{ranks:?}");
    }
}
