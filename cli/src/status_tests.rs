//! What `wingbeat status` shows of a cluster, at several widths.

use wingbeat_core::spec::{Address, MachineId, PlacementStrategy};
use wingbeat_core::{ActorId, JobId, NodeId, PlacementGroupId, ProcessId};
use wingbeat_net::messages::{
    ActorRow, JobState, NodeInfo, NodeState, OwningJob, PendingRow, PlacementGroupRow, QuotaRow, StandbyState, StoreUse,
};

use super::*;

const GIB: u64 = 1 << 30;

fn at(state: &ClusterState, width: u16) -> String {
    let mut shown = Shown { text: String::new(), width };
    shown.cluster(state, true);
    anstream::adapter::strip_str(&shown.text).to_string()
}

fn bytes(bytes: u64) -> Amount {
    Amount::new(bytes as f64).unwrap()
}

fn node(id: u64, hostname: &str, cpus: u32, gpus: u32) -> NodeState {
    let memory = bytes(16 * GIB);
    let resources = ResourceSet::cpus(Amount::whole(cpus)).with(GPU, Amount::whole(gpus)).with(MEMORY, memory);
    NodeState {
        id: NodeId(id),
        state: "alive".into(),
        info: NodeInfo {
            id: NodeId(id),
            address: Address {
                process: ProcessId(id),
                machine: MachineId(0),
                unix: String::new(),
                tcp: None,
                steward: None,
            },
            hostname: hostname.to_owned(),
            resources: resources.clone(),
            devices: Vec::new(),
            labels: BTreeMap::new(),
            store_bytes: 5 * GIB,
        },
        available: resources,
        leases: 0,
        draining: None,
        suspect_secs: None,
        held_devices: Vec::new(),
        memory_short: None,
        store: StoreUse::default(),
    }
}

fn empty() -> ClusterState {
    ClusterState {
        cluster: None,
        uptime_secs: 7,
        nodes: Vec::new(),
        absent: Vec::new(),
        standby: None,
        journal_fails: None,
        jobs: Vec::new(),
        actors: Vec::new(),
        placement_groups: Vec::new(),
        quotas: Vec::new(),
        pending: Vec::new(),
    }
}

fn busy() -> ClusterState {
    let mut alpha = node(42, "alpha", 8, 2);
    alpha.available =
        ResourceSet::cpus(Amount::from_units(25_000)).with(GPU, Amount::whole(1)).with(MEMORY, bytes(12 * GIB));
    alpha.leases = 6;
    alpha.store = StoreUse { used: 4 * GIB + GIB / 2, spilled: 2 * GIB, waiting: 2 };
    let mut beta = node(43, "beta", 8, 0);
    beta.info.resources.set("licence", Amount::whole(3));
    beta.available = beta.info.resources.clone();
    (beta.state, beta.suspect_secs) = ("suspect".into(), Some(12));
    let job = |id, name: &str, state: &str, leases| JobState {
        id: JobId(id),
        name: name.to_owned(),
        namespace: JobId(id).to_string(),
        priority: 0,
        state: state.to_owned(),
        leases,
    };
    let lab = JobState { namespace: "lab".into(), priority: -10, ..job(9, "nightly", "running", 1) };
    let of = |job: &JobState| {
        let JobState { id, name, namespace, priority, .. } = job.clone();
        OwningJob { id: Some(id), name, namespace, priority }
    };
    let sweep = job(7, "sweep", "running", 6);
    let actor = |id: u64, class: &str, state: &str, node: Option<u64>, pid: Option<u32>, restarts| ActorRow {
        id: ActorId(id),
        class_name: class.to_owned(),
        name: None,
        state: state.to_owned(),
        node: node.map(NodeId),
        pid,
        restarts,
    };
    let (of_sweep, of_lab) = (of(&sweep), of(&lab));
    ClusterState {
        uptime_secs: 3 * 3600 + 62,
        nodes: vec![alpha, beta],
        jobs: vec![sweep, job(8, "wingbeat train digits.py", "ended", 0), lab],
        actors: vec![
            actor(900, "Counter", "alive", Some(42), Some(4711), 0),
            actor(901, "sweep::trial::ParameterServer", "restarting", None, None, 3),
        ],
        placement_groups: vec![PlacementGroupRow {
            id: PlacementGroupId(5),
            name: None,
            job: of_sweep,
            state: "placed".into(),
            strategy: PlacementStrategy::StrictSpread,
            bundles: vec![(ResourceSet::new(), Some(NodeId(42))), (ResourceSet::new(), Some(NodeId(43)))],
        }],
        quotas: vec![QuotaRow {
            namespace: "team".into(),
            limit: ResourceSet::cpus(Amount::whole(8)),
            used: ResourceSet::cpus(Amount::whole(2)),
        }],
        pending: vec![PendingRow {
            name: "train".into(),
            id: "process-000000000011".into(),
            job: of_lab,
            resources: ResourceSet::cpus(Amount::whole(4)).with(GPU, Amount::whole(4)),
            count: 3,
            is_group: false,
            why: "each needs 4 CPU, 4 GPU; no node has that much: the largest is alpha with 8 CPU, 2 GPU".into(),
        }],
        ..empty()
    }
}

#[test]
fn an_empty_cluster_says_what_to_do() {
    insta::assert_snapshot!(at(&empty(), 80), @r"
    up 7s
    no nodes, 0 jobs, 0 actors, nothing waits
    add a node with `wingbeat worker --head <this head>`
    ");
}

#[test]
fn a_busy_cluster_fits_into_eighty_columns() {
    let text = at(&busy(), 80);
    insta::assert_snapshot!(text, @r"
    up 3h 1m 2s
    2 nodes (1 suspect), 2 jobs, 1 ended job, 2 actors (1 restarting), 1 placement group, 3 leases wanted
    used: 5.5/16 CPU, 1/2 GPU, 0/3 licence, 4/32 GiB memory

    nodes (used/total)
      node               host   state      CPU  GPU      memory      store  leases
      node-00000000002a  alpha  alive    5.5/8  1/2    4/16 GiB  4.5/5 GiB       6
      node-00000000002b  beta   suspect    0/8       0 B/16 GiB  0 B/5 GiB       0
      node-00000000002b also has 0/3 licence

    jobs
      job               name            namespace  priority  state    leases
      job-000000000007  sweep                                running       6
      job-000000000008  wingbeat train                       ended         0
                        digits.py
      job-000000000009  nightly         lab             -10  running       1

    actors
      actor               class        state       node                pid  restarts
      actor-000000000384  Counter      alive       node-00000000002a  4711
      actor-000000000385  ParameterSe  restarting                                  3
                          rver

    placement groups
      group               of     state   strategy      bundles  nodes
      group-000000000005  sweep  placed  StrictSpread        2  node-00000000002a,
                                                                node-00000000002b

    quotas
      namespace  used   limit
      team       2 CPU  8 CPU

    to look after
      alpha (node-00000000002a): 2 objects wait for room in its object store, which has 4.5/5 GiB in memory, and 2.0 GiB on its disk
      beta (node-00000000002b) has been suspect for 12 s: it has no connection to the head. Nothing new is placed there, and nothing of it runs elsewhere until it is back or lost

    waiting (`wingbeat why ID` says more)
      what   of             wants  why                          id
      train  nightly, lab,      3  each needs 4 CPU, 4 GPU; no  process-000000000011
             priority -10          node has that much: the
                                   largest is alpha with 8
                                   CPU, 2 GPU
    ");
}

#[test]
fn a_wide_terminal_has_a_line_for_each_thing() {
    insta::assert_snapshot!(at(&busy(), 200), @r"
    up 3h 1m 2s
    2 nodes (1 suspect), 2 jobs, 1 ended job, 2 actors (1 restarting), 1 placement group, 3 leases wanted
    used: 5.5/16 CPU, 1/2 GPU, 0/3 licence, 4/32 GiB memory

    nodes (used/total)
      node               host   state      CPU  GPU      memory      store  leases
      node-00000000002a  alpha  alive    5.5/8  1/2    4/16 GiB  4.5/5 GiB       6
      node-00000000002b  beta   suspect    0/8       0 B/16 GiB  0 B/5 GiB       0
      node-00000000002b also has 0/3 licence

    jobs
      job               name                      namespace  priority  state    leases
      job-000000000007  sweep                                          running       6
      job-000000000008  wingbeat train digits.py                       ended         0
      job-000000000009  nightly                   lab             -10  running       1

    actors
      actor               class            state       node                pid  restarts
      actor-000000000384  Counter          alive       node-00000000002a  4711
      actor-000000000385  ParameterServer  restarting                                  3

    placement groups
      group               of     state   strategy      bundles  nodes
      group-000000000005  sweep  placed  StrictSpread        2  node-00000000002a, node-00000000002b

    quotas
      namespace  used   limit
      team       2 CPU  8 CPU

    to look after
      alpha (node-00000000002a): 2 objects wait for room in its object store, which has 4.5/5 GiB in memory, and 2.0 GiB on its disk
      beta (node-00000000002b) has been suspect for 12 s: it has no connection to the head. Nothing new is placed there, and nothing of it runs elsewhere until it is back or lost

    waiting (`wingbeat why ID` says more)
      what   of                          wants  why                                                                                     id
      train  nightly, lab, priority -10      3  each needs 4 CPU, 4 GPU; no node has that much: the largest is alpha with 8 CPU, 2 GPU  process-000000000011
    ");
}

#[test]
fn a_journal_that_cannot_be_written_is_to_be_looked_after() {
    let state = ClusterState { journal_fails: Some("database or disk is full".into()), ..empty() };
    let shown = at(&state, 120);
    assert!(shown.contains("to look after"), "{shown}");
    assert!(shown.contains("grants nothing new until it can: database or disk is full"), "{shown}");
}

#[test]
fn on_a_narrow_terminal_what_has_no_room_in_a_table_is_a_block_of_lines() {
    insta::assert_snapshot!(at(&busy(), 60), @r"
    up 3h 1m 2s
    2 nodes (1 suspect), 2 jobs, 1 ended job, 2 actors (1 restarting), 1 placement group, 3 leases wanted
    used: 5.5/16 CPU, 1/2 GPU, 0/3 licence, 4/32 GiB memory

    nodes (used/total)
      node    node-00000000002a
      host    alpha
      state   alive
      CPU     5.5/8
      GPU     1/2
      memory  4/16 GiB
      store   4.5/5 GiB
      leases  6

      node    node-00000000002b
      host    beta
      state   suspect
      CPU     0/8
      memory  0 B/16 GiB
      store   0 B/5 GiB
      leases  0
      node-00000000002b also has 0/3 licence

    jobs
      job     job-000000000007
      name    sweep
      state   running
      leases  6

      job     job-000000000008
      name    wingbeat train digits.py
      state   ended
      leases  0

      job        job-000000000009
      name       nightly
      namespace  lab
      priority   -10
      state      running
      leases     1

    actors
      actor  actor-000000000384
      class  Counter
      state  alive
      node   node-00000000002a
      pid    4711

      actor     actor-000000000385
      class     ParameterServer
      state     restarting
      restarts  3

    placement groups
      group     group-000000000005
      of        sweep
      state     placed
      strategy  StrictSpread
      bundles   2
      nodes     node-00000000002a, node-00000000002b

    quotas
      namespace  used   limit
      team       2 CPU  8 CPU

    to look after
      alpha (node-00000000002a): 2 objects wait for room in its object store, which has 4.5/5 GiB in memory, and 2.0 GiB on its disk
      beta (node-00000000002b) has been suspect for 12 s: it has no connection to the head. Nothing new is placed there, and nothing of it runs elsewhere until it is back or lost

    waiting (`wingbeat why ID` says more)
      what   train
      of     nightly, lab, priority -10
      wants  3
      why    each needs 4 CPU, 4 GPU; no node has that much: the
             largest is alpha with 8 CPU, 2 GPU
      id     process-000000000011
    ");
}

#[test]
fn no_line_of_a_table_is_longer_than_the_terminal() {
    for width in NARROWEST..=120 {
        let mut shown = Shown { text: String::new(), width };
        for what in [What::Jobs, What::Actors, What::Groups, What::Quotas, What::Waiting] {
            shown.list(&busy(), what);
        }
        let text = anstream::adapter::strip_str(&shown.text).to_string();
        let longest = text.lines().map(|line| line.chars().count()).max();
        assert!(longest <= Some(usize::from(width)), "{width}: {text}");
    }
}

#[test]
fn memory_reads_as_people_write_it_and_amounts_as_they_are() {
    const GIB: f64 = (1 << 30) as f64;
    assert_eq!(used_of(MEMORY, 16.0 * GIB, 12.0 * GIB, true), "4/16 GiB memory");
    assert_eq!(used_of(MEMORY, 16.0 * GIB, 16.0 * GIB, false), "0 B/16 GiB");
    assert_eq!(used_of(CPU, 4.0, 2.5, false), "1.5/4");
}

#[test]
fn a_list_is_its_table_alone() {
    let list = |state: &ClusterState, what| {
        let mut shown = Shown { text: String::new(), width: 200 };
        shown.list(state, what);
        anstream::adapter::strip_str(&shown.text).to_string()
    };
    insta::assert_snapshot!(list(&busy(), What::Jobs), @r"
    jobs
      job               name                      namespace  priority  state    leases
      job-000000000007  sweep                                          running       6
      job-000000000008  wingbeat train digits.py                       ended         0
      job-000000000009  nightly                   lab             -10  running       1
    ");
    assert!(list(&busy(), What::Waiting).starts_with("waiting (`wingbeat why ID` says more)\n"));
    assert_eq!(list(&empty(), What::Groups), "no placement groups\n");
    assert_eq!(list(&empty(), What::Waiting), "nothing waits\n");
}

/// Programs read these fields: one that is renamed, moved or written in another way breaks them, and belongs in the changelog.
#[test]
fn the_fields_of_json_stay() {
    let mut state = busy();
    state.cluster = Some(wingbeat_core::ClusterId(1));
    state.absent = vec![NodeId(44)];
    state.journal_fails = Some("no space left on device".into());
    let standby = state.nodes[0].info.address.clone();
    state.standby = Some(StandbyState { address: standby, is_current: true, voters: 3 });
    insta::assert_snapshot!(serde_json::to_string_pretty(&state).unwrap());
}
