use proptest::prelude::*;

use super::*;
use crate::local::{ALL, On, member, members};
use crate::{bf16, f16};

/// What member `rank` has at `index`.
fn value(rank: u32, index: usize) -> i64 {
    (i64::from(rank) + 1) * (index as i64 % 7 + 1)
}

fn all_operations(count: u32, on: On, length: usize) {
    let sum = |index: usize| (0..count).map(|rank| value(rank, index)).sum::<i64>();
    members(count, on, |group| {
        let rank = group.rank();
        let mine: Vec<i64> = (0..length).map(|index| value(rank, index)).collect();
        let summed: Vec<i64> = (0..length).map(sum).collect();

        let mut data = mine.clone();
        group.all_reduce(&mut data, Op::Sum).unwrap();
        assert_eq!(data, summed);

        let mut data = mine.clone();
        group.all_reduce(&mut data, Op::Max).unwrap();
        assert!(data.iter().enumerate().all(|(index, max)| *max == value(count - 1, index)));

        let mut data: Vec<f32> = mine.iter().map(|value| *value as f32).collect();
        group.all_reduce(&mut data, Op::Avg).unwrap();
        assert!(data.iter().zip(&summed).all(|(mean, sum)| (mean - *sum as f32 / count as f32).abs() < 1e-3));

        let root = count - 1;
        let mut data = mine.clone();
        group.reduce(&mut data, Op::Sum, root).unwrap();
        assert_eq!(data, if rank == root { summed.clone() } else { mine.clone() });

        let mut data = mine.clone();
        group.broadcast(&mut data, root).unwrap();
        assert!(data.iter().enumerate().all(|(index, got)| *got == value(root, index)));

        let mut all = vec![0; length * count as usize];
        group.all_gather(&mine, &mut all).unwrap();
        for other in 0..count {
            let part = &all[other as usize * length..][..length];
            assert!(part.iter().enumerate().all(|(index, got)| *got == value(other, index)));
        }

        // Part `to` of member `from`'s is `value(from, index) * 10 + to`.
        let out: Vec<i64> =
            (0..count).flat_map(|to| (0..length).map(move |index| value(rank, index) * 10 + i64::from(to))).collect();
        let mut into = vec![0; out.len()];
        group.all_to_all(&out, &mut into).unwrap();
        for from in 0..count {
            let part = &into[from as usize * length..][..length];
            let right = |(index, got): (usize, &i64)| *got == value(from, index) * 10 + i64::from(rank);
            assert!(part.iter().enumerate().all(right));
        }

        let mut part = vec![0; length];
        group.reduce_scatter(&out, &mut part, Op::Sum).unwrap();
        let right = |(index, got): (usize, &i64)| *got == sum(index) * 10 + i64::from(rank * count);
        assert!(part.iter().enumerate().all(right));

        if count > 1 {
            let (next, before) = ((rank + 1) % count, (rank + count - 1) % count);
            let mut got = vec![0; length.min(1000)];
            let short = &mine[..got.len()];
            // Around the ring, one after the other.
            if rank == 0 {
                group.send(short, next).unwrap();
                group.recv(&mut got, before).unwrap();
            } else {
                group.recv(&mut got, before).unwrap();
                group.send(short, next).unwrap();
            }
            assert!(got.iter().enumerate().all(|(index, got)| *got == value(before, index)));
        }
        group.barrier().unwrap();
    });
}

#[test]
fn all_operations_in_shared_memory_and_over_tcp_and_both() {
    for on in ALL {
        for count in [1, 2, 3, 5] {
            for length in [0, 1, 7, 100_003] {
                all_operations(count, on, length);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_number_of_members_and_any_length(count in 1u32..6, on in 0usize..3, length in 0usize..200_000) {
        all_operations(count, ALL[on], length);
    }

    #[test]
    fn every_member_has_the_same_bits(count in 2u32..6, on in 0usize..3, data in proptest::collection::vec(-1e3f32..1e3, 1..5000)) {
        let results = members(count, ALL[on], |group| {
            let rank = group.rank() as f32;
            let mut mine: Vec<f32> = data.iter().map(|value| value * (1.1 + rank)).collect();
            group.all_reduce(&mut mine, Op::Sum).unwrap();
            mine.iter().map(|value| value.to_bits()).collect::<Vec<_>>()
        });
        prop_assert!(results.windows(2).all(|pair| pair[0] == pair[1]));
    }
}

#[test]
fn half_precision_is_reduced() {
    members(2, On::One, |group| {
        let mut data = [f16::from_f32(1.5); 3];
        group.all_reduce(&mut data, Op::Sum).unwrap();
        assert_eq!(data, [f16::from_f32(3.0); 3]);
        let mut data = [bf16::from_f32(2.0); 3];
        group.all_reduce(&mut data, Op::Product).unwrap();
        assert_eq!(data, [bf16::from_f32(4.0); 3]);
    });
}

#[test]
fn what_does_not_match_is_named_at_every_member() {
    for on in ALL {
        let errors = members(2, on, |group| match group.rank() {
            0 => group.all_reduce(&mut [1.0f32; 8], Op::Sum).unwrap_err().to_string(),
            _ => group.broadcast(&mut [1.0f64; 4], 0).unwrap_err().to_string(),
        });
        assert!(errors[0].starts_with("rank 1 calls broadcast of 4 f64 at root 0"), "{errors:?}");
        assert!(errors[1].starts_with("rank 0 calls all_reduce of 8 f32 (sum)"), "{errors:?}");
    }
    members(2, On::One, |group| {
        let length = 4 + group.rank() as usize;
        assert!(matches!(group.all_reduce(&mut vec![0u8; length], Op::Sum), Err(CollectiveError::Mismatch { .. })));
        assert_eq!(group.barrier(), Err(CollectiveError::Broken));
    });
}

#[test]
fn what_devices_do_is_agreed_on() {
    for on in ALL {
        let errors = members(2, on, |group| {
            let other = 1 - group.rank();
            group.agree::<f32>(Call::AllReduce(Op::Sum), 8).unwrap();
            group.agree::<f32>(if other == 0 { Call::Recv(0) } else { Call::Send(1) }, 3).unwrap();
            match other {
                0 => group.all_reduce(&mut [1.0f32; 8], Op::Sum).unwrap_err().to_string(),
                _ => group.agree::<f32>(Call::AllReduce(Op::Sum), 8).unwrap_err().to_string(),
            }
        });
        assert!(errors[1].starts_with("rank 0 calls all_reduce of 8 f32 (sum) on devices"), "{errors:?}");
    }
    let lost = members(2, On::One, |group| {
        let peers = group.peers().unwrap();
        group.barrier().unwrap();
        let is_alone = group.rank() == 0;
        is_alone.then_some(peers)
    });
    // Who has left is seen by those who are still there.
    assert_eq!(lost[0].as_ref().and_then(Peers::lost), Some(1));
}

#[test]
fn two_may_send_to_each_other_first_whatever_the_length() {
    for on in ALL {
        members(3, on, |group| {
            let (rank, next, before) = (group.rank(), (group.rank() + 1) % 3, (group.rank() + 2) % 3);
            for length in [0, 1, 1 << 20] {
                let mut got = vec![0; length];
                group.send(&vec![u64::from(rank); length], next).unwrap();
                group.recv(&mut got, before).unwrap();
                assert!(got.iter().all(|value| *value == u64::from(before)));
                // What came early is not taken for what comes next.
                let mut sum = [rank];
                group.all_reduce(&mut sum, Op::Sum).unwrap();
                assert_eq!(sum, [3]);
            }
        });
    }
}

#[test]
fn two_members_have_the_same_bits_of_zeros_and_what_is_no_number() {
    const ODD: [f32; 6] = [0.0, -0.0, f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
    for (on, op) in ALL.into_iter().flat_map(|on| [Op::Sum, Op::Product, Op::Min, Op::Max, Op::Avg].map(|op| (on, op)))
    {
        let bits = members(2, on, |group| {
            let pairs = ODD.into_iter().flat_map(|a| ODD.map(|b| [a, b]));
            let mut single: Vec<f32> = pairs.map(|pair| pair[group.rank() as usize]).collect();
            let mut half: Vec<f16> = single.iter().map(|value| f16::from_f32(*value)).collect();
            group.all_reduce(&mut single, op).unwrap();
            group.all_reduce(&mut half, op).unwrap();
            let single = single.iter().map(|value| value.to_bits());
            single.chain(half.iter().map(|value| u32::from(value.to_bits()))).collect::<Vec<_>>()
        });
        assert_eq!(bits[0], bits[1], "{op:?} {on:?}");
    }
}

#[test]
fn a_mean_does_not_wrap_on_the_way() {
    for on in ALL {
        members(3, on, |group| {
            let mut data = [200u8; 2];
            group.all_reduce(&mut data, Op::Avg).unwrap();
            assert_eq!(data, [200; 2]);
            let mut data = [-100i8];
            group.reduce(&mut data, Op::Avg, 1).unwrap();
            assert_eq!(data, [-100]);
            let (all, mut mine) = ([f16::from_f32(40_000.0); 3], [f16::ZERO]);
            group.reduce_scatter(&all, &mut mine, Op::Avg).unwrap();
            assert_eq!(mine, [f16::from_f32(40_000.0)]);
        });
    }
}

#[test]
fn two_go_on_when_a_third_has_left() {
    for on in ALL {
        members(3, on, |group| match group.rank() {
            0 => {}
            1 => {
                // Longer than anybody is waited for who has left.
                std::thread::sleep(Duration::from_secs(3));
                group.send(&[7u8; 3], 2).unwrap();
            }
            _ => {
                let mut got = [0u8; 3];
                group.recv(&mut got, 1).unwrap();
                assert_eq!(got, [7; 3]);
            }
        });
    }
}

#[test]
fn a_mean_of_another_type_is_found() {
    for on in ALL {
        let errors = members(2, on, |group| match group.rank() {
            0 => group.all_reduce(&mut [1u8; 8], Op::Avg).unwrap_err().to_string(),
            _ => group.all_reduce(&mut [1i64; 8], Op::Avg).unwrap_err().to_string(),
        });
        assert!(errors[1].starts_with("rank 0 calls all_reduce of 8 u8 (avg)"), "{errors:?}");
    }
}

#[test]
fn a_member_that_does_nothing_is_given_up_and_named() {
    for on in ALL {
        let done = std::sync::Barrier::new(2);
        let errors = members(2, on, |group| {
            group.set_timeout(Duration::from_millis(300));
            // It is there, and does nothing.
            let error = (group.rank() == 0).then(|| group.all_reduce(&mut [1.0f32; 8], Op::Sum).unwrap_err());
            done.wait();
            error
        });
        assert_eq!(errors[0], Some(CollectiveError::TimedOut { rank: 1, seconds: 0 }), "{on:?}");
    }
}

#[test]
fn a_neighbour_that_stops_when_another_machine_is_done_is_given_up_and_named() {
    let done = std::sync::Barrier::new(4);
    // 0 and 2 are on one machine, 1 and 3 on another.
    let results = members(4, On::Two, |group| {
        group.set_timeout(Duration::from_secs(3));
        let result = match group.rank() {
            3 => {
                let header = group.header::<f32>(Kind::Broadcast, 8, None, Some(0)).unwrap();
                ring::agree(&group.mesh, &header)
            }
            _ => group.broadcast(&mut [1.0f32; 8], 0),
        };
        done.wait();
        result
    });
    assert!(matches!(results[1], Err(CollectiveError::TimedOut { rank: 3, .. })), "{results:?}");
}

#[test]
fn a_neighbour_that_hears_slowly_from_another_machine_is_waited_for() {
    const PIECES: usize = 40;
    members(4, On::Two, |group| {
        let mut data = [0u8; PIECES];
        match group.rank() {
            // As over a slow link: in all for longer than whoever does nothing is waited for.
            1 => {
                let header = group.header::<u8>(Kind::Broadcast, PIECES, None, Some(1)).unwrap();
                ring::agree(&group.mesh, &header).unwrap();
                let Way::Machines(machines) = &mut group.way else { panic!("there are two machines") };
                machines.shared.as_mut().unwrap().broadcast(&machines.local, &header, &mut data, 0).unwrap();
                for _ in 0..PIECES {
                    std::thread::sleep(Duration::from_millis(100));
                    group.mesh.send_to(0, &[7]).unwrap();
                }
            }
            0 | 3 => group.broadcast(&mut data, 1).unwrap(),
            _ => {
                group.set_timeout(Duration::from_millis(1_500));
                group.broadcast(&mut data, 1).unwrap();
                assert_eq!(data, [7; PIECES]);
            }
        }
    });
}

#[test]
fn who_has_failed_keeps_nobody_waiting_with_its_group_in_hand() {
    for on in ALL {
        let done = std::sync::Barrier::new(3);
        let errors = members(3, on, |group| {
            let error = match group.rank() {
                // It expects what nobody sends.
                1 => group.all_reduce(&mut [0u8; 4], Op::Max).unwrap_err(),
                _ => group.all_reduce(&mut [1.0f32; 8], Op::Sum).unwrap_err(),
            };
            let next = group.barrier();
            // All still have their groups.
            done.wait();
            (error, next)
        });
        assert!(errors.iter().all(|(_, next)| *next == Err(CollectiveError::Broken)), "{errors:?}");
        let lost = members(3, on, |group| {
            let result = match group.rank() {
                1 => {
                    let mut none = [0u8; 2];
                    group.set_timeout(Duration::from_millis(200));
                    group.recv(&mut none, 0)
                }
                _ => group.barrier(),
            };
            done.wait();
            result.unwrap_err()
        });
        assert!(
            matches!(lost[1], CollectiveError::TimedOut { rank: 0, .. } | CollectiveError::Mismatch { .. }),
            "{lost:?}"
        );
        assert!(matches!(lost[2], CollectiveError::PeerLost { .. } | CollectiveError::TimedOut { .. }), "{lost:?}");
    }
}

#[test]
fn a_member_that_leaves_is_named() {
    for on in ALL {
        let errors = members(3, on, |group| match group.rank() {
            1 => None,
            _ => Some(group.all_reduce(&mut vec![1.0f32; 1 << 20], Op::Sum).unwrap_err()),
        });
        assert_eq!(errors[0], Some(CollectiveError::PeerLost { rank: 1 }));
        assert!(matches!(errors[2], Some(CollectiveError::PeerLost { .. })));
    }
}

#[test]
fn a_member_that_never_connects_is_waited_for_as_long_as_the_limit_says() {
    let (first, second) = (member(0, On::Each), member(1, On::Each));
    let cards = [first.card(), second.card()];
    let error = first.connect_within(Duration::from_millis(100), 0, &cards).map(drop).unwrap_err();
    assert!(error.to_string().contains("rank 1 did not within 100ms"), "{error}");
}

/// Whether this is a process for one test with a short limit. If not, the test runs in one.
fn with_gone_for_1500_ms(test: &str) -> bool {
    // A process reads its limits once.
    if std::env::var_os("WINGBEAT_PEER_GONE_MS").is_some() {
        return true;
    }
    let mut again = std::process::Command::new(std::env::current_exe().unwrap());
    let test = format!("group::tests::{test}");
    let ended = again.args(["--exact", &test]).env("WINGBEAT_PEER_GONE_MS", "1500").output().unwrap();
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stdout));
    assert!(String::from_utf8_lossy(&ended.stdout).contains("1 passed"), "there is no {test}");
    false
}

#[test]
fn who_was_heard_and_is_gone_is_missed_after_a_while() {
    if !with_gone_for_1500_ms("who_was_heard_and_is_gone_is_missed_after_a_while") {
        return;
    }
    let told = std::sync::Barrier::new(2);
    let errors = members(3, On::Each, |group| match group.rank() {
        0 => {
            let error = group.barrier().unwrap_err();
            told.wait();
            Some(error)
        }
        // It says what it calls, and leaves.
        1 => {
            group.set_timeout(Duration::from_millis(100));
            drop(group.barrier().unwrap_err());
            None
        }
        _ => {
            told.wait();
            None
        }
    });
    assert_eq!(errors[0], Some(CollectiveError::PeerLost { rank: 1 }));
}

#[test]
fn who_leaves_when_all_have_come_is_not_missed_however_late_they_came() {
    if !with_gone_for_1500_ms("who_leaves_when_all_have_come_is_not_missed_however_late_they_came") {
        return;
    }
    members(3, On::Each, |group| match group.rank() {
        2 => {
            std::thread::sleep(Duration::from_secs(3));
            let header = group.header::<u8>(Kind::Barrier, 0, None, None).unwrap().to_bytes();
            group.mesh.send_to(0, &header).unwrap();
            while !group.mesh.gone().contains(&0) {
                std::thread::yield_now();
            }
            // The other looks several times.
            std::thread::sleep(Duration::from_millis(500));
            group.mesh.send_to(1, &header).unwrap();
        }
        _ => group.barrier().unwrap(),
    });
}

#[test]
fn who_has_done_its_part_may_leave() {
    for on in ALL {
        for _ in 0..50 {
            members(3, on, |group| group.all_reduce(&mut vec![1u32; 70_000], Op::Sum).unwrap());
        }
    }
}

#[test]
fn bad_lengths_and_roots_are_refused_before_anything_is_sent() {
    members(2, On::One, |group| {
        let refused = |result: Result<()>| matches!(result, Err(CollectiveError::Invalid(_)));
        assert!(refused(group.broadcast(&mut [0u8], 2)));
        assert!(refused(group.all_gather(&[0u8; 2], &mut [0; 3])));
        assert!(refused(group.all_to_all(&[0u8; 3], &mut [0; 3])));
        let own = group.rank();
        assert!(refused(group.send(&[0u8], own)));
        assert!(refused(group.recv(&mut [0u8], own)));
        group.barrier().unwrap();
    });
}

#[test]
fn who_is_reduced_first_may_leave_while_the_root_takes_its_time() {
    let results = members(3, On::Each, |group| {
        let mut data = vec![1.0f32; 4 << 20];
        if group.rank() > 0 {
            return group.reduce(&mut data, Op::Sum, 0);
        }
        // As the root does, and slowly: for longer than anybody who has left is forgiven.
        let header = group.header::<f32>(Kind::Reduce, data.len(), Some(Op::Sum), Some(0)).unwrap();
        ring::agree(&group.mesh, &header)?;
        group.mesh.recv_from(1, bytes_of_mut(&mut data))?;
        std::thread::sleep(Duration::from_millis(1_500));
        group.mesh.recv_from(2, bytes_of_mut(&mut data))
    });
    assert_eq!(results, [Ok(()), Ok(()), Ok(())]);
}
