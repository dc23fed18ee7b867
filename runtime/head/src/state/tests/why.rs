//! Everything that waits says why.

use wingbeat_net::messages::{Await, AwaitedTask};

use super::*;

fn why(bench: &mut Bench, subject: Subject) -> Explanation {
    bench.state.explain(bench.now, subject).unwrap_or_else(|| panic!("nobody knows {subject:?}"))
}

/// What a driver that waits is told.
fn why_process(bench: &mut Bench, process: ProcessId) -> String {
    shown(&why(bench, Subject::Process(process)))
}

fn shown(explanation: &Explanation) -> String {
    let lines = [&explanation.reasons, &explanation.holders, &explanation.help].map(|lines| lines.join("\n"));
    format!("{} {}\n{}", explanation.subject, explanation.state, lines.join("\n"))
}

#[track_caller]
fn assert_says(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "`{part}` is not in:\n{text}");
    }
}

#[test]
fn there_is_no_node() {
    let mut bench = Bench::empty();
    bench.driver(DRIVER);
    bench.demand(DRIVER, cpus(1.0), 1);
    assert_says(&why_process(&mut bench, DRIVER), &["no node is there", "wingbeat worker --head"]);
}

#[test]
fn there_are_only_nodes_of_drivers() {
    let mut bench = Bench::empty();
    bench.driver(DRIVER);
    bench.driver(OTHER);
    bench.node(1, ResourceSet::new());
    bench.demand(DRIVER, cpus(1.0), 1);
    assert_says(&why_process(&mut bench, DRIVER), &["no node is there", "wingbeat worker --head"]);
    // It waits for the first node that offers something, and is told only then that it asks for too much.
    bench.demand(OTHER, cpus(64.0), 1);
    assert!(bench.told_to(OTHER, |event| matches!(event, HeadEvent::Refused { .. }).then_some(())).is_empty());
    bench.node(2, cpus(1.0));
    assert_eq!(bench.told_to(OTHER, |event| matches!(event, HeadEvent::Refused { .. }).then_some(())).len(), 1);
    assert!(bench.told_to(DRIVER, |event| matches!(event, HeadEvent::Refused { .. }).then_some(())).is_empty());
}

#[test]
fn somebody_else_holds_it() {
    let mut bench = Bench::new(cpus(2.0));
    bench.alive(ActorSpec { holds: cpus(2.0), ..actor_of(OTHER, 5) });
    bench.now += 90_000;
    bench.demand(DRIVER, cpus(1.0), 3);
    let text = why_process(&mut bench, DRIVER);
    assert_says(&text, &["square wants 3 more leases", "host1", "has 0 CPU free of 2"]);
    assert_says(&text, &["actor Counter (actor-000000000005) of job job 2 holds 2 CPU on host1", "for 90 s, pid 77"]);
    assert_says(&text, &["wait for one of the holders", "add a node with 1 CPU"]);
    // Nothing happens, and time passes.
    bench.now += 30_000;
    assert_says(&why_process(&mut bench, DRIVER), &["on host1", "for 2 min, pid 77"]);
}

#[test]
fn it_can_never_be_and_waits_on_purpose() {
    let mut bench = Bench::new(cpus(2.0));
    bench.wants(DRIVER, Shape { patient: true, ..shape(cpus(8.0)) }, 1);
    assert_says(&why_process(&mut bench, DRIVER), &["no node could ever hold it", "has 2 CPU free of 2"]);
}

#[test]
fn labels_do_not_match() {
    let mut bench = Bench::empty();
    bench.driver(DRIVER);
    bench.labelled(1, cpus(1.0), &[("zone", "a")]);
    let labels = vec!["zone=b".parse().unwrap()];
    bench.wants(DRIVER, Shape { labels, patient: true, ..shape(cpus(1.0)) }, 1);
    assert_says(&why_process(&mut bench, DRIVER), &["does not match `zone=b`: zone is a"]);
}

#[test]
fn its_node_is_full_or_drained() {
    let mut bench = Bench::new(cpus(1.0));
    bench.node(2, cpus(1.0));
    bench.drain(1, 60_000, false);
    let on = Shape { strategy: Strategy::Node { node: NodeId(1), soft: false }, ..shape(cpus(1.0)) };
    bench.wants(DRIVER, on, 1);
    let text = why_process(&mut bench, DRIVER);
    assert_says(&text, &["on node-000000000001", "is being drained (kernel update)"]);
    assert!(!text.contains("host2"), "{text}");
    assert_says(
        &shown(&why(&mut bench, Subject::Node(NodeId(1)))),
        &["is being drained", "what still runs is moved in 60 s"],
    );
}

#[test]
fn a_quota_is_used_up() {
    let mut bench = Bench::new(cpus(8.0));
    bench.quota("test", Some(cpus(1.0)));
    bench.demand(OTHER, cpus(1.0), 1);
    bench.ready();
    bench.demand(DRIVER, cpus(1.0), 1);
    let text = why_process(&mut bench, DRIVER);
    assert_says(&text, &["namespace `test` may hold 1 CPU at a time, and holds 1 CPU", "wingbeat quota test"]);
    assert_says(&text, &["square of process-000000000002 of job job 2 holds 1 CPU"]);
}

#[test]
fn others_are_before_it() {
    let mut bench = Bench::new(cpus(1.0));
    bench.demand(OTHER, cpus(1.0), 3);
    bench.ready();
    let important = ProcessId(7);
    bench.step(Event::ProcessConnected(important));
    bench.step(Event::JobJoined(Box::new(JobSpec { priority: 10, ..job_of(important) })));
    bench.demand(important, cpus(1.0), 1);
    bench.demand(DRIVER, cpus(1.0), 1);
    assert_says(&why_process(&mut bench, DRIVER), &["1 others are served before it"]);
}

#[test]
fn room_is_kept_for_a_gang() {
    let mut bench = Bench::empty();
    bench.driver(DRIVER);
    bench.driver(OTHER);
    bench.node(1, cpus(2.0));
    bench.node(2, cpus(2.0));
    bench.demand(OTHER, cpus(2.0), 1);
    let held = bench.ready()[0];
    bench.group(group_of(DRIVER, 1, PlacementStrategy::StrictSpread, &vec![cpus(2.0); 2])).unwrap();
    bench.tick(1_000);
    bench.tick(25);
    bench.demand(OTHER, cpus(1.0), 1);
    bench.tick(25);
    assert_says(&why_process(&mut bench, OTHER), &["has room, but it is kept for placement group group-000000000001"]);
    let text = shown(&why(&mut bench, Subject::PlacementGroup(PlacementGroupId(1))));
    assert_says(&text, &["2 bundles of 2 CPU: 1 of 2 nodes have room for one", "each needs a node of its own"]);
    bench.return_and_end(OTHER, held);
    assert!(bench.places(1).is_some());
    let text = shown(&why(&mut bench, Subject::PlacementGroup(PlacementGroupId(1))));
    assert_says(&text, &["is placed", "bundle 0: 2 CPU on host"]);
}

#[test]
fn its_bundle_is_full_or_its_group_not_placed() {
    let mut bench = Bench::new(cpus(2.0));
    bench.group(group_of(DRIVER, 1, PlacementStrategy::Pack, &[cpus(1.0)])).unwrap();
    bench.wants(DRIVER, inside(1, None, cpus(1.0)), 2);
    bench.ready();
    assert_says(
        &why_process(&mut bench, DRIVER),
        &["bundle 0 on host1", "has 0 CPU free of 1", "make the group larger"],
    );
    bench.group(group_of(DRIVER, 2, PlacementStrategy::Pack, &[cpus(2.0)])).unwrap();
    bench.wants(OTHER, inside(2, Some(0), cpus(1.0)), 1);
    assert_says(&why_process(&mut bench, OTHER), &["is not placed", "wingbeat why group-000000000002"]);
}

#[test]
fn a_device_is_held_by_somebody_without_a_lease() {
    let mut bench = Bench::new(gpus(1.0));
    bench.says(NodeId(1), HeadMessage::DevicesHeld(vec![(0, "pid 7 (`python`) still uses it".into())]));
    bench.demand(DRIVER, gpus(1.0), 1);
    assert_says(&why_process(&mut bench, DRIVER), &["GPU 0 is held: pid 7 (`python`) still uses it"]);
    assert_says(&shown(&why(&mut bench, Subject::Node(NodeId(1)))), &["GPU 0 is given to nobody"]);
}

#[test]
fn an_actor_says_where_it_is_in_its_life() {
    let mut bench = Bench::new(cpus(1.0));
    let subject = Subject::Actor(ActorId(5));
    bench.create(ActorSpec { max_restarts: 10, ..actor_of(DRIVER, 5) }, false).unwrap();
    assert_says(
        &shown(&why(&mut bench, subject)),
        &["actor Counter (actor-000000000005)", "waits for its worker process to start"],
    );
    let lease = bench.ready()[0];
    assert_says(&shown(&why(&mut bench, subject)), &["waits for its constructor to return", "pid 77"]);
    bench
        .says(NodeId(1), HeadMessage::ActorStarted { actor: ActorId(5), incarnation: Incarnation(0), outcome: Ok(()) });
    assert_says(&shown(&why(&mut bench, subject)), &["is alive"]);
    bench.crash(lease);
    let lease = bench.start_actor(ActorId(5), 1);
    bench.crash(lease);
    assert_says(
        &shown(&why(&mut bench, subject)),
        &["rests for another", "died 2 times in a row", "killed by signal 9"],
    );
    bench.says(DRIVER, HeadMessage::KillActor { actor: ActorId(5), may_restart: false });
    assert_says(&shown(&why(&mut bench, subject)), &["is dead", "it was ended by kill"]);
}

#[test]
fn an_actor_that_waits_names_the_node_and_the_holder() {
    let mut bench = Bench::new(gpus(1.0).with(CPU, amount(4.0)));
    bench.alive(ActorSpec { holds: gpus(1.0), placement: shape(gpus(1.0)), ..actor_of(OTHER, 4) });
    bench.create(ActorSpec { holds: gpus(1.0), placement: shape(gpus(1.0)), ..actor_of(DRIVER, 5) }, false).unwrap();
    let text = shown(&why(&mut bench, Subject::Actor(ActorId(5))));
    assert_says(&text, &["waits to be placed", "has 0 GPU free of 1", "holds 1 GPU (GPU 0, one device) on host1"]);
}

#[test]
fn a_task_is_explained_from_where_its_owner_left_off() {
    let mut bench = Bench::new(cpus(1.0));
    bench.demand(OTHER, cpus(1.0), 1);
    let lease = bench.ready()[0];
    bench.demand(DRIVER, cpus(1.0), 1);
    let so_far = Explanation { subject: "square".into(), state: "waits for a lease".into(), ..Explanation::default() };
    let text = shown(&bench.state.explain_demand(bench.now, DRIVER, &shape(cpus(1.0)), so_far.clone()));
    assert_says(&text, &["square waits for a lease", "has 0 CPU free of 1"]);
    let text = shown(&bench.state.explain_lease(bench.now, lease, so_far.clone()));
    assert_says(&text, &["on host1", "pid 77", "holds 1 CPU for"]);
    bench.return_and_end(OTHER, lease);
    let text = shown(&bench.state.explain_demand(bench.now, DRIVER, &shape(cpus(1.0)), so_far));
    assert_says(&text, &["their worker processes are being started"]);
}

#[test]
fn a_worker_process_whose_node_has_not_told_of_it() {
    let mut bench = Bench::new(cpus(1.0));
    let unknown = ProcessId(77);
    bench.step(Event::ProcessConnected(unknown));
    bench.demand(unknown, cpus(1.0), 1);
    assert_says(&why_process(&mut bench, unknown), &["has not yet said that it runs"]);
}

#[test]
fn every_row_of_what_waits_can_be_asked_about() {
    let mut bench = Bench::new(cpus(1.0));
    bench.demand(OTHER, cpus(1.0), 2);
    bench.ready();
    bench.demand(DRIVER, cpus(1.0), 1);
    bench.create(actor_of(DRIVER, 5), false).unwrap();
    bench.group(group_of(DRIVER, 1, PlacementStrategy::Pack, &[cpus(1.0)])).unwrap();
    let picture = bench.state.picture();
    assert_eq!(picture.pending.len(), 4);
    for row in picture.pending {
        let explanation = why(&mut bench, row.id.parse().unwrap());
        assert!(!explanation.reasons.is_empty() && !explanation.help.is_empty(), "{row:?}: {explanation:?}");
        assert!(!row.why.is_empty());
    }
}

#[test]
fn whatever_waits_says_whose_it_is() {
    let mut bench = Bench::new(cpus(1.0));
    bench.demand(OTHER, cpus(1.0), 1);
    bench.ready();
    let important = ProcessId(7);
    bench.step(Event::ProcessConnected(important));
    bench.step(Event::JobJoined(Box::new(JobSpec { priority: 3, ..job_of(important) })));
    bench.group(group_of(important, 1, PlacementStrategy::Pack, &[cpus(1.0)])).unwrap();
    bench.create(actor_of(DRIVER, 5), false).unwrap();
    bench.demand(OTHER, cpus(1.0), 2);
    let picture = bench.state.picture();
    let of = |id: &str| &picture.pending.iter().find(|row| row.id == id).unwrap().job;
    assert_eq!(of(&PlacementGroupId(1).to_string()), &picture.placement_groups[0].job);
    let group = of(&PlacementGroupId(1).to_string());
    assert_eq!(
        (group.id, group.name.as_str(), group.namespace.as_str(), group.priority),
        (Some(JobId(7)), "job 7", "test", 3)
    );
    assert_eq!(of(&ActorId(5).to_string()).id, Some(JobId(DRIVER.0)));
    assert_eq!(of(&OTHER.to_string()).id, Some(JobId(OTHER.0)));
    let text = shown(&why(&mut bench, Subject::PlacementGroup(PlacementGroupId(1))));
    assert_says(&text, &["of job job 7 (job-000000000007, namespace `test`, priority 3): 1 × {1 CPU}"]);
}

#[test]
fn a_node_that_is_lost_is_remembered_with_why_and_since_when() {
    let mut bench = Bench::new(cpus(1.0));
    bench.step(Event::NodeLost(NodeId(1), "the head heard nothing from it for 30 s".into()));
    bench.now += 5_000;
    let explained = why(&mut bench, Subject::Node(NodeId(1)));
    assert_eq!((explained.state.as_str(), explained.since_ms), ("is lost", Some(5_000)));
    assert_says(&shown(&explained), &["host1 (node-000000000001) is lost", "heard nothing from it for 30 s"]);
    for node in 2..2_000 {
        bench.node(node, cpus(1.0));
        bench.step(Event::NodeLost(NodeId(node), "its connection ended".into()));
    }
    assert!(bench.state.explain(bench.now, Subject::Node(NodeId(1))).is_none(), "1,024 are remembered");
    assert!(bench.state.explain(bench.now, Subject::Node(NodeId(1_999))).is_some());
}

/// What a driver that waits is advised to do.
fn help(bench: &mut Bench, process: ProcessId) -> String {
    why(bench, Subject::Process(process)).help.join("\n")
}

#[test]
fn what_would_help_is_true_for_a_task_that_must_be_on_one_node() {
    let mut bench = Bench::new(cpus(1.0));
    bench.alive(ActorSpec { holds: cpus(1.0), ..actor_of(OTHER, 5) });
    let on = Shape { strategy: Strategy::Node { node: NodeId(1), soft: false }, ..shape(cpus(1.0)) };
    bench.wants(DRIVER, on, 1);
    let text = help(&mut bench, DRIVER);
    assert_says(&text, &["wait for one of the holders", "ask for another node, or softly for this one"]);
    assert!(!text.contains("add a node"), "{text}");
    bench.drain(1, 60_000, false);
    let text = help(&mut bench, DRIVER);
    assert_says(&text, &["`wingbeat drain node-000000000001 --undo`"]);
    assert!(!text.contains("add a node"), "{text}");
}

#[test]
fn what_would_help_names_labels_and_everything_else_that_is_asked_for() {
    let mut bench = Bench::empty();
    bench.driver(DRIVER);
    bench.labelled(1, cpus(1.0), &[("zone", "a")]);
    let labels = vec!["zone=b".parse().unwrap()];
    let asked = cpus(1.0).with("lic", amount(2.0));
    bench.wants(DRIVER, Shape { labels, patient: true, ..shape(asked) }, 1);
    assert_says(&help(&mut bench, DRIVER), &["add a node with 1 CPU, 2 lic and labels that match `zone=b`"]);
}

#[test]
fn what_would_help_for_memory_of_a_gpu_is_a_gpu_and_its_holders_are_named() {
    let mut bench = Bench::empty();
    bench.driver(DRIVER);
    bench.driver(OTHER);
    bench.labelled(1, gpus(1.0), &[]);
    bench.wants(OTHER, shape(gpus(1.0)), 1);
    bench.ready();
    bench.wants(DRIVER, Shape { gpu_memory: 10 << 30, ..shape(ResourceSet::new()) }, 1);
    assert_says(
        &help(&mut bench, DRIVER),
        &["wait for one of the holders", "add a node with a GPU of at least 10 GiB"],
    );
    assert_says(&why_process(&mut bench, DRIVER), &["square of process-000000000002 of job job 2 holds 1 GPU"]);
}

#[test]
fn what_would_help_a_group_whose_bundles_must_be_apart_is_a_node_for_one_of_them() {
    let mut bench = Bench::empty();
    bench.driver(DRIVER);
    for node in 1..=3 {
        bench.node(node, cpus(2.0));
    }
    let mut group = group_of(DRIVER, 1, PlacementStrategy::StrictSpread, &vec![cpus(2.0); 4]);
    group.patient = true;
    bench.group(group).unwrap();
    let text = why(&mut bench, Subject::PlacementGroup(PlacementGroupId(1))).help.join("\n");
    assert_says(&text, &["add a node with 2 CPU"]);
    bench.node(4, cpus(2.0));
    assert!(bench.places(1).is_some(), "that helps");
}

#[test]
fn a_task_that_waits_for_another_says_for_which_and_that_its_cpus_are_free() {
    let mut bench = Bench::new(cpus(1.0).with("lic", amount(1.0)));
    bench.demand(DRIVER, cpus(1.0).with("lic", amount(1.0)), 1);
    let lease = bench.ready()[0];
    let child = TaskId { owner: worker_of(lease), seq: 9 };
    let wait = Wait {
        task: TaskId { owner: DRIVER, seq: 1 },
        name: "parent".into(),
        within: None,
        waits_for: WaitsFor::Results,
        awaits: vec![Await { on: vec![AwaitedTask { task: child, callee: None, after: Vec::new() }], ends_without: 1 }],
    };
    bench.step(Event::Says(worker_of(lease).into(), HeadMessage::Waiting { lease: Some(lease), wait }));
    let text = shown(&bench.state.explain_lease(bench.now, lease, Explanation::default()));
    assert_says(&text, &["holds 1 lic for", &format!("parent waits for {child}"), "others use its CPUs meanwhile"]);
    // What it waits for may be a call.
    bench.create(actor_of(DRIVER, 5), false).unwrap();
    let class = bench.state.explain(bench.now, Subject::Actor(ActorId(5))).unwrap().subject;
    let class = class.strip_suffix(&format!(" ({})", ActorId(5))).unwrap();
    let callee = wingbeat_net::messages::Callee { actor: ActorId(5), group: "".into() };
    let awaits =
        vec![Await { on: vec![AwaitedTask { task: child, callee: Some(callee), after: Vec::new() }], ends_without: 1 }];
    let wait = Wait {
        task: TaskId { owner: DRIVER, seq: 1 },
        name: "parent".into(),
        within: None,
        waits_for: WaitsFor::Results,
        awaits,
    };
    bench.step(Event::Says(worker_of(lease).into(), HeadMessage::Waiting { lease: Some(lease), wait }));
    let text = shown(&bench.state.explain_lease(bench.now, lease, Explanation::default()));
    assert_says(&text, &[&format!("parent waits for {child} (a call of {class})")]);
}

#[test]
fn what_waits_in_a_placement_group_keeps_its_bundle_from_what_it_waits_for() {
    let mut bench = Bench::new(cpus(1.0));
    bench.group(group_of(DRIVER, 1, PlacementStrategy::Pack, &[cpus(1.0)])).unwrap();
    bench.wants(DRIVER, inside(1, None, cpus(1.0)), 1);
    let lease = bench.ready()[0];
    let child = TaskId { owner: OTHER, seq: 9 };
    let wait = Wait {
        task: TaskId { owner: DRIVER, seq: 1 },
        name: "train".into(),
        within: None,
        waits_for: WaitsFor::Results,
        awaits: vec![Await { on: vec![AwaitedTask { task: child, callee: None, after: Vec::new() }], ends_without: 1 }],
    };
    bench.demand(OTHER, cpus(1.0), 1);
    let help = "leave room beside the group for what it waits for";
    assert!(!why_process(&mut bench, OTHER).contains(help));
    bench.step(Event::Says(worker_of(lease).into(), HeadMessage::Waiting { lease: Some(lease), wait }));
    let text = why_process(&mut bench, OTHER);
    assert_says(&text, &[&format!("reserves 1 CPU on host1 (node-000000000001) (train waits for {child})"), help]);
    let text = shown(&bench.state.explain_lease(bench.now, lease, Explanation::default()));
    assert_says(&text, &["uses its CPUs meanwhile, and nothing outside it"]);
}

#[test]
fn only_who_competes_is_served_before() {
    let mut bench = Bench::new(cpus(1.0).with(GPU, amount(1.0)));
    bench.alive(ActorSpec { holds: cpus(1.0).with(GPU, amount(1.0)), ..actor_of(OTHER, 5) });
    for _ in 0..3 {
        bench.wants(OTHER, shape(gpus(1.0)), 1);
    }
    bench.wants(DRIVER, shape(cpus(1.0)), 1);
    let text = why_process(&mut bench, DRIVER);
    assert!(!text.contains("served before it"), "{text}");
}
