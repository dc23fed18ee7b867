use proptest::prelude::*;

use super::*;

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

fn usage(used: u64) -> MemoryUsage {
    MemoryUsage { of: "the test".into(), limit: 10 * GIB, used, threshold: 9 * GIB, store: 0 }
}

fn sample(used: u64, users: &[User]) -> Sample {
    Sample { usage: usage(used), users: Some(users.to_vec()), ..Sample::default() }
}

fn user(process: u64, work: Work, bytes: u64) -> User {
    User { process: ProcessId(process), lease: Some(LeaseId(process)), work, started: 1, bytes }
}

fn task(process: u64, owner: u64, bytes: u64) -> User {
    user(process, Work::Tasks { owner: ProcessId(owner), yields: true }, bytes)
}

fn ends(process: u64) -> Verdict {
    Verdict::End(ProcessId(process), Some(LeaseId(process)))
}

#[test]
fn below_the_threshold_nobody_ends() {
    let mut watch = Watch::default();
    assert_eq!(watch.look(0, &sample(9 * GIB - 1, &[task(1, 1, 8 * GIB)])), Verdict::Enough);
    assert_eq!(watch.look(1, &sample(9 * GIB, &[task(1, 1, 8 * GIB)])), ends(1));
    let off = MemoryUsage { threshold: 0, ..usage(10 * GIB) };
    assert_eq!(watch.look(2, &Sample { usage: off, ..Sample::default() }), Verdict::Enough);
}

#[test]
fn of_many_alike_the_newest_of_the_owner_with_most_goes() {
    let mut watch = Watch::default();
    let first = [task(1, 7, GIB), task(2, 8, GIB)];
    watch.look(0, &sample(5 * GIB, &first));
    let mut all = vec![task(1, 7, GIB), task(2, 8, GIB), task(3, 8, GIB), task(4, 7, GIB), task(5, 7, GIB)];
    watch.look(100, &sample(8 * GIB, &all[..4]));
    watch.look(200, &sample(8 * GIB, &all));
    // 1 has gone on with another task since.
    all[0].started = 2;
    watch.look(20_000, &sample(8 * GIB, &all));
    assert_eq!(watch.look(20_010, &sample(9 * GIB, &all)), ends(1));
}

#[test]
fn who_takes_more_and_more_goes_before_newer_ones_that_take_little() {
    let mut watch = Watch::default();
    let actor = |bytes| user(9, Work::Actor { restarts: false }, bytes);
    watch.look(0, &sample(5 * GIB, &[task(1, 7, 100 * MIB), actor(4 * GIB)]));
    let newer = [task(2, 7, 100 * MIB), task(3, 7, 100 * MIB)];
    let all = |hog| [task(1, 7, hog), actor(4 * GIB), newer[0], newer[1]];
    assert_eq!(watch.look(1_000, &sample(7 * GIB, &all(2 * GIB))), Verdict::Enough);
    assert_eq!(watch.look(2_000, &sample(9 * GIB, &all(4 * GIB))), ends(1));
}

#[test]
fn an_actor_that_takes_all_is_ended_and_not_the_small_tasks_beside_it() {
    let mut watch = Watch::default();
    let all = |hog| [task(1, 7, 50 * MIB), user(9, Work::Actor { restarts: false }, hog), task(2, 7, 20 * MIB)];
    watch.look(0, &sample(5 * GIB, &all(GIB)));
    assert_eq!(watch.look(900, &sample(9 * GIB, &all(8 * GIB))), ends(9));
}

#[test]
fn who_loses_least_goes_first() {
    let mut works = vec![
        Work::Idle,
        Work::Tasks { owner: ProcessId(7), yields: true },
        Work::Actor { restarts: true },
        Work::Tasks { owner: ProcessId(7), yields: false },
        Work::Actor { restarts: false },
    ];
    let mut watch = Watch::default();
    while !works.is_empty() {
        // Those that lose more are newer.
        let users: Vec<User> =
            works.iter().enumerate().map(|(at, work)| user((10 + at) as u64, *work, 2 * GIB + at as u64)).collect();
        let verdict = watch.look(0, &sample(9 * GIB, &users));
        match works.remove(0) {
            Work::Idle => assert_eq!(verdict, Verdict::Retire(ProcessId(10))),
            _ => assert_eq!(verdict, ends(10)),
        }
        watch = Watch::default();
    }
}

#[test]
fn an_idle_process_that_stays_is_not_asked_again_while_memory_is_short() {
    let mut watch = Watch::default();
    let users = [user(1, Work::Idle, 2 * GIB), task(2, 7, GIB)];
    assert_eq!(watch.look(0, &sample(9 * GIB, &users)), Verdict::Retire(ProcessId(1)));
    assert_eq!(watch.look(10, &sample(9 * GIB, &users)), ends(2));
    assert_eq!(watch.look(20, &sample(GIB, &users)), Verdict::Enough);
    assert_eq!(watch.look(30, &sample(9 * GIB, &users)), Verdict::Retire(ProcessId(1)));
}

#[test]
fn nobody_ends_while_one_leaves_that_gives_back_enough() {
    let idle = [user(1, Work::Idle, 6 * GIB), task(2, 7, 2 * GIB)];
    let leaving = [User { lease: None, ..user(1, Work::Leaving, 6 * GIB) }, task(2, 7, 2 * GIB)];
    // It has taken all that it has a moment ago.
    let asked = || {
        let mut watch = Watch::default();
        watch.look(0, &sample(5 * GIB, &[task(1, 7, GIB), task(2, 7, 2 * GIB)]));
        assert_eq!(watch.look(1_000, &sample(9 * GIB, &idle)), Verdict::Retire(ProcessId(1)));
        assert_eq!(watch.look(1_025, &sample(9 * GIB, &leaving)), Verdict::Enough);
        watch
    };
    let mut watch = asked();
    assert_eq!(watch.look(1_050, &sample(9 * GIB + GIB / 4, &leaving)), Verdict::Enough);
    // Somebody takes what is left before it has left.
    let taking = [leaving[0], task(2, 7, 2 * GIB + GIB / 4)];
    assert_eq!(watch.look(1_075, &sample(9 * GIB + GIB / 4, &taking)), ends(2));
    // It does not leave, and has taken most.
    assert_eq!(asked().look(1_025 + LEAVING, &sample(9 * GIB, &leaving)), Verdict::End(ProcessId(1), None));
    // What it has is not enough.
    let little = [User { bytes: GIB / 8, ..leaving[0] }, leaving[1]];
    assert_eq!(asked().look(1_050, &sample(9 * GIB + GIB / 8, &little)), ends(2));
    // It stays where it is, and was never asked.
    assert_eq!(Watch::default().look(0, &sample(9 * GIB, &leaving)), ends(2));
}

#[test]
fn who_was_asked_to_leave_and_does_not_is_ended_when_nobody_else_would_help() {
    let mut watch = Watch::default();
    let idle = [user(1, Work::Idle, 8 * GIB)];
    let leaving = [User { lease: None, ..user(1, Work::Leaving, 8 * GIB) }];
    assert_eq!(watch.look(0, &sample(9 * GIB, &idle)), Verdict::Retire(ProcessId(1)));
    assert_eq!(watch.look(10, &sample(9 * GIB, &leaving)), Verdict::Enough, "it has time to leave");
    assert_eq!(watch.look(9 + LEAVING, &sample(9 * GIB, &leaving)), Verdict::Enough);
    assert_eq!(watch.look(10 + LEAVING, &sample(9 * GIB, &leaving)), Verdict::End(ProcessId(1), None));
    // One that stays, and is asked again later, has its time again.
    let mut watch = Watch::default();
    watch.look(0, &sample(9 * GIB, &leaving));
    watch.look(10, &sample(5 * GIB, &idle));
    assert_eq!(watch.look(LEAVING, &sample(9 * GIB, &leaving)), Verdict::Helpless);
    // A task that is tried again loses less than it may.
    let beside = [leaving[0], task(2, 7, 4 * GIB)];
    assert_eq!(watch.look(2 * LEAVING, &sample(9 * GIB, &beside)), ends(2));
}

#[test]
fn one_ends_at_a_time_and_the_next_when_that_takes_too_long() {
    let mut watch = Watch::default();
    let users = [task(1, 7, 2 * GIB), task(2, 7, 2 * GIB)];
    assert_eq!(watch.look(0, &sample(9 * GIB, &users)), ends(2));
    let left = Sample { is_ending: true, ..sample(9 * GIB, &users[..1]) };
    assert_eq!(watch.look(ENDING - 1, &left), Verdict::Enough);
    assert_eq!(watch.look(ENDING, &left), ends(1));
    // It is gone, and memory is still short.
    let mut watch = Watch::default();
    assert_eq!(watch.look(0, &sample(9 * GIB, &users)), ends(2));
    assert_eq!(watch.look(10, &sample(9 * GIB, &users[..1])), ends(1));
}

#[test]
fn the_store_gives_first_as_long_as_there_is_room_for_that() {
    let mut watch = Watch::default();
    let full = |used| Sample { store_gives: true, ..sample(used, &[task(1, 7, 2 * GIB)]) };
    assert_eq!(watch.look(0, &full(9 * GIB + 1)), Verdict::Relieve(GIB / 2 + 1));
    assert_eq!(watch.look(1, &full(9 * GIB + GIB / 2)), ends(1));
}

#[test]
fn where_others_use_the_memory_nobody_ends() {
    let mut watch = Watch::default();
    assert_eq!(watch.look(0, &sample(9 * GIB, &[task(1, 7, 5 * MIB), task(2, 7, 9 * MIB)])), Verdict::Helpless);
    assert_eq!(watch.look(1, &sample(9 * GIB, &[])), Verdict::Helpless);
    let small = [task(1, 7, 500 * MIB), task(2, 7, 500 * MIB)];
    assert_eq!(watch.look(2, &sample(9 * GIB, &small)), Verdict::Helpless);
}

#[test]
fn a_full_store_is_no_tasks_fault() {
    let mut watch = Watch::default();
    let with_store = |used, users: &[User]| {
        let usage = MemoryUsage { store: 7 * GIB, ..usage(used) };
        Sample { usage, users: Some(users.to_vec()), ..Sample::default() }
    };
    assert_eq!(watch.look(0, &with_store(9 * GIB, &[task(1, 7, GIB)])), Verdict::Helpless);
    // This one is.
    assert_eq!(watch.look(1_000, &with_store(9 * GIB, &[task(1, 7, 2 * GIB)])), ends(1));
}

#[test]
fn the_less_is_left_the_sooner_it_looks() {
    assert_eq!([0, 5, 8, 9].map(|used| pause(&usage(used * GIB), 250)), [900, 400, 100, 25]);
    let small = |used| MemoryUsage { limit: 300 * MIB, threshold: 285 * MIB, ..usage(used * MIB) };
    assert_eq!([0, 85, 185, 284].map(|used| pause(&small(used), 250)), [278, 195, 97, 25]);
}

#[test]
fn a_kill_is_the_kernels_if_its_count_rose_for_it() {
    let mut kills = KernelKills::default();
    kills.counts(0, Some(5));
    assert!(!kills.explains(), "those before were of others");
    kills.counts(10, Some(6));
    assert!(kills.explains());
    assert!(!kills.explains(), "one kill ends one process");
    kills.counts(20, Some(7));
    kills.counts(20 + KILLING + 1, Some(7));
    assert!(!kills.explains(), "it was of another process, long ago");
    kills.counts(40_000, None);
    assert!(!kills.explains());
}

fn any_work() -> impl Strategy<Value = Work> {
    prop_oneof![
        Just(Work::Idle),
        (0..3u64, any::<bool>()).prop_map(|(owner, yields)| Work::Tasks { owner: ProcessId(owner), yields }),
        any::<bool>().prop_map(|restarts| Work::Actor { restarts }),
    ]
}

proptest! {
    /// A hog beside any others, none of which has or takes a fourth of what it does: it is the one, whatever it is and they are.
    #[test]
    fn the_hog_ends_whatever_is_beside_it(
        hog in any_work().prop_filter("an idle one takes nothing", |work| *work != Work::Idle),
        others in prop::collection::vec((any_work(), 1..500u64, 0..3u64), 0..20),
        place in 0..20usize,
        steps in 4..40u64,
    ) {
        let mut watch = Watch::default();
        for step in 0..=steps {
            let mut users: Vec<User> = others
                .iter()
                .enumerate()
                // Some start later, and have others to do.
                .filter(|(at, _)| *at as u64 % 7 <= step)
                .map(|(at, (work, mib, busy))| User { started: step * busy, ..user(100 + at as u64, *work, mib * MIB) })
                .collect();
            users.insert(place.min(users.len()), user(1, hog, 8 * GIB * step / steps));
            let used = if step == steps { 9 * GIB } else { 5 * GIB };
            let verdict = watch.look(step * 100, &sample(used, &users));
            let wanted = if step == steps { ends(1) } else { Verdict::Enough };
            prop_assert_eq!(verdict, wanted);
        }
    }

    /// Only who is there is ended, and only when memory is short; and a task that is tried again before any other work of that size.
    #[test]
    fn work_that_is_not_tried_again_ends_last(
        works in prop::collection::vec((any_work(), 900..1000u64), 1..20),
        used in 8 * GIB..10 * GIB,
    ) {
        let users: Vec<User> =
            works.iter().enumerate().map(|(at, (work, mib))| user(at as u64, *work, mib * MIB)).collect();
        let verdict = Watch::default().look(0, &sample(used, &users));
        prop_assert_eq!(verdict == Verdict::Enough, used < 9 * GIB);
        if let Verdict::End(process, _) = verdict {
            let yields = |work: &Work| matches!(work, Work::Tasks { yields: true, .. });
            let ended = &works[process.0 as usize].0;
            prop_assert!(!works.iter().any(|(work, _)| *work == Work::Idle));
            prop_assert!(yields(ended) || !works.iter().any(|(work, _)| yields(work)));
        }
    }
}

#[test]
fn that_memory_is_short_is_said_once_and_taken_back_when_there_is_enough_for_a_while() {
    let usage = |used| MemoryUsage { used, limit: 100, threshold: 95, ..MemoryUsage::default() };
    let mut strain = Strain::default();
    let mut looks = |now, used| strain.look(now, &usage(used));
    assert_eq!(looks(0, 94), None);
    assert_eq!(looks(100, 95), Some(true));
    assert_eq!(looks(200, 99), None);
    assert_eq!((looks(300, 10), looks(4_000, 10), looks(4_100, 96), looks(4_200, 10)), (None, None, None, None));
    assert_eq!(looks(9_100, 10), None, "it was short in between");
    assert_eq!(looks(9_200, 10), Some(false));
    assert_eq!(looks(9_300, 96), Some(true));
    // A node that ends nobody for want of memory says nothing of it.
    assert_eq!(Strain::default().look(0, &MemoryUsage { threshold: 0, ..usage(100) }), None);
}
