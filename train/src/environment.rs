//! The environment of every rank, as torchrun defines it
//! (<https://docs.pytorch.org/docs/stable/elastic/run.html>, "Environment Variables").

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use serde::{Deserialize, Serialize};

/// What a rank's environment has beside that of its actor.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Environment {
    /// Set, whatever was there.
    pub set: BTreeMap<String, String>,
    /// Set only where the actor's environment has nothing.
    pub unless_set: BTreeMap<String, String>,
}

impl Environment {
    /// Gives it to a command.
    pub(crate) fn apply(&self, command: &mut Command) {
        for (name, value) in &self.unless_set {
            if std::env::var_os(name).is_none() {
                command.env(name, value);
            }
        }
        command.envs(&self.set);
    }

    /// Has NCCL and gloo speak over this interface, unless the user has chosen one. NCCL takes a bare name for a prefix.
    pub(crate) fn use_interface(&mut self, name: &str) {
        self.unless_set.insert("NCCL_SOCKET_IFNAME".into(), format!("={name}"));
        self.unless_set.insert("GLOO_SOCKET_IFNAME".into(), name.to_owned());
    }

    /// All of it, with that of this process. A variable that is not UTF-8 cannot be sent, and is left out.
    pub(crate) fn complete(&self) -> BTreeMap<String, String> {
        let own =
            std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
        let mut all = self.unless_set.clone();
        all.extend(own);
        all.extend(self.set.clone());
        all
    }
}

/// Where a rank is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// The node, as a key that equal nodes share.
    pub node: u64,
    /// The devices of this rank, by number on the node.
    pub gpus: Vec<u32>,
    /// What programs call them: by the variable that says which they may use, in the order of `gpus`.
    pub names: DeviceNames,
}

/// For each variable, the names of a rank's devices.
pub(crate) type DeviceNames = BTreeMap<String, Vec<String>>;

/// Variables that say which devices a process may use. PyTorch for ROCm reads both.
const VISIBLE: [&str; 2] = ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"];

/// What the devices of a process are called whose environment `variable` answers from. The node has put the names there: on
/// a machine whose `wingbeat worker` may use GPUs 4 and 5 alone, or slices of one, they are no numbers from 0 on.
pub(crate) fn device_names(gpus: &[u32], variable: impl Fn(&str) -> Option<String>) -> DeviceNames {
    let named = |name: &str| {
        let names: Vec<String> = variable(name)?.split(',').map(|device| device.trim().to_owned()).collect();
        (names.len() == gpus.len()).then(|| (name.to_owned(), names))
    };
    let names: DeviceNames = VISIBLE.into_iter().filter_map(named).collect();
    match names.is_empty() {
        true => BTreeMap::from([(VISIBLE[0].to_owned(), gpus.iter().map(u32::to_string).collect())]),
        false => names,
    }
}

/// What all ranks of an attempt share.
#[derive(Clone, Debug)]
pub(crate) struct Shared {
    pub master_addr: String,
    pub master_port: u16,
    pub run_id: String,
    pub role: String,
    pub restarts: u32,
    pub max_restarts: u32,
    pub backend: &'static str,
    pub layout: Layout,
}

/// How the ranks of a node are told apart, in `LOCAL_RANK` and in the devices that they see.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Layout {
    /// As torchrun has it: they are numbered on each node, and each sees the devices of all.
    #[default]
    Torchrun,
    /// As `torchrun --virtual-local-rank`: each is number 0, and sees its own devices alone.
    Virtual,
    /// As pyspark's TorchDistributor on a cluster: each is the only one on a node of its own, as far as it can tell. What
    /// Lightning expects with `devices=1, num_nodes=N`.
    Spark,
}

impl Layout {
    /// As ranks are told it: scripts see from it whose devices they see.
    fn name(self) -> &'static str {
        match self {
            Layout::Torchrun => "torchrun",
            Layout::Virtual => "virtual",
            Layout::Spark => "spark",
        }
    }
}

/// The order of ranks: by node, in the order of their first rank, then by device. Stable, so that a restart
/// on the same nodes gives the same ranks.
pub(crate) fn rank_order(places: &[Place]) -> Vec<usize> {
    let mut nodes: Vec<u64> = places.iter().map(|place| place.node).collect();
    nodes.sort_unstable();
    nodes.dedup();
    let mut order: Vec<usize> = (0..places.len()).collect();
    order.sort_by_key(|i| (nodes.binary_search(&places[*i].node), places[*i].gpus.first().copied(), *i));
    order
}

/// The environment of every rank; `places` is in the order of ranks. What the user set wins.
pub(crate) fn of_ranks(places: &[Place], shared: &Shared, user: &BTreeMap<String, String>) -> Vec<Environment> {
    let mut nodes: Vec<u64> = Vec::new();
    for place in places {
        if !nodes.contains(&place.node) {
            nodes.push(place.node);
        }
    }
    let world = places.len();
    let mut environments = Vec::with_capacity(world);
    for (rank, place) in places.iter().enumerate() {
        let peers: Vec<usize> = (0..world).filter(|other| places[*other].node == place.node).collect();
        let local_rank = peers.iter().position(|other| *other == rank).unwrap_or(0);
        let group_rank = nodes.iter().position(|node| *node == place.node).unwrap_or(0);
        let is_torchrun_s = shared.layout == Layout::Torchrun;
        let local_rank = if is_torchrun_s { local_rank } else { 0 };
        let (local_world, group_rank, groups) = match shared.layout {
            Layout::Torchrun | Layout::Virtual => (peers.len(), group_rank, nodes.len()),
            Layout::Spark => (1, rank, world),
        };
        let mut env = BTreeMap::new();
        let mut set = |name: &str, value: String| {
            env.insert(name.to_owned(), value);
        };
        set("RANK", rank.to_string());
        set("LOCAL_RANK", local_rank.to_string());
        set("WORLD_SIZE", world.to_string());
        set("LOCAL_WORLD_SIZE", local_world.to_string());
        set("GROUP_RANK", group_rank.to_string());
        set("NODE_RANK", group_rank.to_string());
        set("GROUP_WORLD_SIZE", groups.to_string());
        set("ROLE_RANK", rank.to_string());
        set("ROLE_NAME", shared.role.clone());
        set("ROLE_WORLD_SIZE", world.to_string());
        set("MASTER_ADDR", shared.master_addr.clone());
        set("MASTER_PORT", shared.master_port.to_string());
        set("TORCHELASTIC_RUN_ID", shared.run_id.clone());
        set("TORCHELASTIC_RESTART_COUNT", shared.restarts.to_string());
        set("TORCHELASTIC_MAX_RESTARTS", shared.max_restarts.to_string());
        // What torchrun itself ends ranks on; scripts may look.
        set("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT".into());
        // Rank 0 hosts the store: there is no agent that would.
        set("TORCHELASTIC_USE_AGENT_STORE", "False".into());
        set("WINGBEAT_BACKEND", shared.backend.to_owned());
        set("WINGBEAT_LAYOUT", shared.layout.name().to_owned());
        // Every rank of a node sees all of the group's devices there, and LOCAL_RANK indexes its own.
        // Ranks with a fraction of a device may share it, and CUDA takes no device twice.
        let (mut devices, mut visible) = (BTreeSet::new(), DeviceNames::new());
        for peer in peers.iter().filter(|peer| is_torchrun_s || **peer == rank).map(|peer| &places[*peer]) {
            for (at, _) in peer.gpus.iter().enumerate().filter(|(_, device)| devices.insert(**device)) {
                for (variable, names) in &peer.names {
                    visible.entry(variable.clone()).or_default().extend(names.get(at).cloned());
                }
            }
        }
        if !devices.is_empty() {
            for (variable, names) in visible {
                set(&variable, names.join(","));
            }
            set("CUDA_DEVICE_ORDER", "PCI_BUS_ID".into());
        }
        let mut unless_set = BTreeMap::from([("TORCH_NCCL_ASYNC_ERROR_HANDLING".to_owned(), "1".to_owned())]);
        if peers.len() > 1 {
            unless_set.insert("OMP_NUM_THREADS".to_owned(), "1".to_owned());
        }
        env.extend(user.clone());
        environments.push(Environment { set: env, unless_set });
    }
    environments
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shared() -> Shared {
        Shared {
            master_addr: "10.0.0.1".into(),
            master_port: 29500,
            run_id: "run".into(),
            role: "default".into(),
            restarts: 0,
            max_restarts: 2,
            backend: "nccl",
            layout: Layout::Torchrun,
        }
    }

    #[test]
    fn in_other_layouts_a_rank_sees_its_own_devices_as_the_first_of_its_node() {
        let places = [named(&[0], "CUDA_VISIBLE_DEVICES", "5"), named(&[1], "CUDA_VISIBLE_DEVICES", "GPU-aa")];
        let told = |layout: Layout, name: &str| -> Vec<String> {
            let environments = of_ranks(&places, &Shared { layout, ..shared() }, &BTreeMap::new());
            environments.iter().map(|environment| environment.set[name].clone()).collect()
        };
        for layout in [Layout::Virtual, Layout::Spark] {
            assert_eq!(told(layout, "CUDA_VISIBLE_DEVICES"), ["5", "GPU-aa"]);
            assert_eq!(told(layout, "LOCAL_RANK"), ["0", "0"]);
            assert_eq!(told(layout, "RANK"), ["0", "1"]);
        }
        assert_eq!(
            (told(Layout::Virtual, "LOCAL_WORLD_SIZE"), told(Layout::Spark, "LOCAL_WORLD_SIZE")),
            (vec!["2".into(); 2], vec!["1".into(); 2])
        );
        assert_eq!(told(Layout::Spark, "GROUP_RANK"), ["0", "1"]);
        let named =
            [Layout::Torchrun, Layout::Virtual, Layout::Spark].map(|layout| told(layout, "WINGBEAT_LAYOUT")[1].clone());
        assert_eq!(named, ["torchrun", "virtual", "spark"]);
        assert_eq!(told(Layout::Spark, "GROUP_WORLD_SIZE"), ["2", "2"]);
    }

    fn place(node: u64, gpus: &[u32]) -> Place {
        Place { node, gpus: gpus.to_vec(), names: device_names(gpus, |_| None) }
    }

    /// As on a machine whose worker may use these.
    fn named(gpus: &[u32], variable: &str, names: &str) -> Place {
        let said = |asked: &str| (asked == variable).then(|| names.to_owned());
        Place { node: 1, gpus: gpus.to_vec(), names: device_names(gpus, said) }
    }

    #[test]
    fn devices_keep_the_names_by_which_the_node_knows_them() {
        let uuid = "MIG-8cd8e4a9-0a27-5c2c-9a0f-2f4c0e1d9a01";
        for (variable, first, second, all) in [
            ("CUDA_VISIBLE_DEVICES", "5", "GPU-aa", "5,GPU-aa"),
            ("CUDA_VISIBLE_DEVICES", uuid, "7", &format!("{uuid},7")),
            ("HIP_VISIBLE_DEVICES", "4", "5", "4,5"),
        ] {
            let places = [named(&[0], variable, first), named(&[1], variable, second)];
            for environment in of_ranks(&places, &shared(), &BTreeMap::new()) {
                assert_eq!(environment.set[variable], all);
                assert_eq!(environment.set.keys().filter(|name| name.ends_with("VISIBLE_DEVICES")).count(), 1);
            }
        }
        let two = named(&[2, 3], "CUDA_VISIBLE_DEVICES", "4,5");
        let environments = of_ranks(&[two.clone(), two], &shared(), &BTreeMap::new());
        assert_eq!(environments[1].set["CUDA_VISIBLE_DEVICES"], "4,5", "shared devices are named once");
    }

    #[test]
    fn ranks_are_numbered_by_node_and_then_by_device() {
        let place = |node, gpu| place(node, &[gpu]);
        let places = [place(7, 1), place(3, 0), place(7, 0), place(3, 1)];
        assert_eq!(rank_order(&places), [1, 3, 2, 0]);
    }

    #[test]
    fn every_rank_of_a_node_sees_all_devices_of_the_group_there() {
        let place = |node, gpu| place(node, &[gpu]);
        let environments = of_ranks(&[place(3, 2), place(3, 5), place(7, 0)], &shared(), &BTreeMap::new());
        let get = |rank: usize, name: &str| environments[rank].set[name].clone();
        assert_eq!((get(0, "CUDA_VISIBLE_DEVICES"), get(1, "CUDA_VISIBLE_DEVICES")), ("2,5".into(), "2,5".into()));
        assert_eq!((get(1, "LOCAL_RANK"), get(1, "LOCAL_WORLD_SIZE")), ("1".into(), "2".into()));
        assert_eq!((get(2, "RANK"), get(2, "LOCAL_RANK"), get(2, "GROUP_RANK")), ("2".into(), "0".into(), "1".into()));
        assert_eq!(get(2, "CUDA_VISIBLE_DEVICES"), "0");
        assert_eq!(environments[1].unless_set["OMP_NUM_THREADS"], "1");
        assert!(!environments[2].unless_set.contains_key("OMP_NUM_THREADS"));
    }

    #[test]
    fn a_device_that_ranks_share_is_named_once() {
        let place = place(1, &[4]);
        let environments = of_ranks(&[place.clone(), place], &shared(), &BTreeMap::new());
        assert_eq!(environments[1].set["CUDA_VISIBLE_DEVICES"], "4");
    }

    #[test]
    fn what_the_user_set_wins() {
        let user = BTreeMap::from([("OMP_NUM_THREADS".to_owned(), "8".to_owned())]);
        let place = place(1, &[]);
        let environments = of_ranks(&[place.clone(), place], &shared(), &user);
        assert_eq!(environments[1].set["OMP_NUM_THREADS"], "8");
        assert!(!environments[0].set.contains_key("CUDA_VISIBLE_DEVICES"));
    }
}
