//! The rows, in the order in which they run.

mod actors;
pub(crate) mod args;
mod cluster;
mod collective;
mod computing;
mod contention;
mod deaths;
mod estimators;
mod exchange;
mod hosts;
mod launch;
mod many_actors;
mod mixed;
mod nested;
mod objects;
mod one_by_one;
mod payloads;
mod restart;
mod scale;
pub(crate) mod scheduler;
mod spilling;
mod start;
mod tail;
mod tasks;
mod values;

use anyhow::Result;
use futures::future::LocalBoxFuture;

use crate::limits;
use crate::report::Figure;

pub(crate) use start::be_other;
pub(crate) use tasks::nop;

type Figures = Result<Vec<Figure>>;

/// One row, or several that come of the same work.
pub(crate) struct Row {
    pub name: &'static str,
    /// The limits that it is compared with.
    pub limits: &'static [&'static str],
    pub run: Run,
}

/// Where a row runs.
pub(crate) enum Run {
    /// With processes of its own.
    Alone(fn() -> Figures),
    /// In a private cluster of this process, with 2 CPUs, that rows share.
    InCluster(fn() -> LocalBoxFuture<'static, Figures>),
}

macro_rules! rows {
    ($($kind:ident $name:ident = $run:path $(, $limit:ident)*;)*) => {
        pub(crate) const ROWS: &[Row] = &[$(
            Row { name: stringify!($name), limits: &[$(stringify!($limit)),*], run: rows!(@$kind $run) },
        )*];
    };
    (@alone $run:path) => { Run::Alone($run) };
    (@cluster $run:path) => { Run::InCluster(|| Box::pin($run())) };
}

rows! {
    alone limit_echo = limits::limit_echo;
    alone limit_echo_hops = limits::limit_echo_hops;
    alone limit_stream = limits::limit_stream;
    alone limit_memcpy = limits::limit_memcpy;
    alone limit_tcp = limits::limit_tcp;
    alone limit_disk = limits::limit_disk;
    alone startup_to_first_task = start::startup_to_first_task;
    alone idle_rss = start::idle_rss;
    cluster tasks_sync = tasks::tasks_sync, limit_echo;
    cluster tasks_sync_p99 = tail::tasks_sync_p99;
    cluster tasks_async = tasks::tasks_async;
    cluster task_chain_100 = tasks::task_chain_100;
    cluster tasks_multi_client_async = tasks::tasks_multi_client_async, tasks_async;
    cluster actor_sync = actors::actor_sync, limit_echo;
    alone tasks_sync_blocking = one_by_one::blocking, limit_echo;
    alone tasks_sync_asleep = one_by_one::asleep, limit_echo;
    alone tasks_sync_one_core = one_by_one::one_core;
    cluster actor_async = actors::actor_async;
    cluster actor_n_n_async = actors::actor_n_n_async, actor_async;
    cluster actor_create_to_first_reply = actors::actor_create_to_first_reply;
    alone actors_1000 = many_actors::actors_1000;
    cluster put_small = objects::put_small;
    cluster get_small = objects::get_small;
    cluster put_bandwidth = objects::put_bandwidth, limit_memcpy;
    cluster task_return_256MiB = objects::task_return;
    cluster get_view_256MiB = objects::get_view;
    cluster value_vec = values::value_vec, limit_memcpy;
    cluster value_struct = values::value_struct, limit_memcpy;
    cluster value_nested = values::value_nested, limit_memcpy;
    cluster value_ndarray = values::value_ndarray, limit_memcpy;
    cluster value_bytes = values::value_bytes, limit_memcpy;
    cluster value_serde = values::value_serde, limit_memcpy;
    cluster value_map = values::value_map, limit_memcpy;
    cluster get_object_with_10k_refs = objects::get_object_with_10k_refs;
    cluster wait_1k_refs = objects::wait_1k_refs;
    cluster mixed = mixed::mixed;
    cluster cpu = computing::cpu;
    alone limit_rayon = nested::limit_rayon;
    cluster nested_fib18 = nested::nested_fib18;
    cluster nested_sync_fib14 = nested::nested_sync_fib14;
    cluster queue_1m = tasks::queue_1m;
    cluster args = args::args, limit_stream;
    cluster map_1000x1MiB = exchange::map_1000x1mib, limit_memcpy;
    cluster shuffle_64x64 = exchange::shuffle_64x64, limit_memcpy;
    cluster tasks_1k_of_50kb = payloads::tasks_1k_of_50kb;
    cluster tasks_100k_of_1kb = payloads::tasks_100k_of_1kb;
    alone driver_beside_half_open = contention::driver_beside_half_open;
    alone gang_beside_streams = contention::gang_beside_streams;
    alone short_beside_busy = tail::short_beside_busy;
    alone equal_jobs = contention::equal_jobs;
    alone new_shape_among_1k = contention::new_shape_among_1k;
    alone placement_group_create_remove = scheduler::placement_group_create_remove;
    alone decisions_100_nodes = scheduler::decisions_100_nodes;
    alone decisions_10000_nodes = scheduler::decisions_10000_nodes;
    alone head_restart_under_load = restart::head_restart_under_load;
    alone worker_death = deaths::worker_death;
    alone node_death = deaths::node_death;
    alone takeover = deaths::takeover;
    alone head_restart_100k_actors = restart::head_restart_100k_actors;
    alone status_10000 = scale::status_10000;
    alone nodes_300 = scale::nodes_300;
    alone node_to_node = cluster::node_to_node, limit_tcp;
    alone node_to_node_tcp = hosts::node_to_node_tcp;
    alone broadcast_8 = hosts::broadcast_8;
    alone broadcast_4 = cluster::broadcast_4, limit_tcp;
    alone spill = spilling::spill, limit_disk;
    alone limit_gloo = collective::limit_gloo;
    cluster allreduce_64MiB = collective::allreduce_64mib, limit_gloo;
    alone limit_torchrun = launch::limit_torchrun;
    alone limit_torch_distributor = launch::limit_torch_distributor;
    alone limit_ray_train = launch::limit_ray_train;
    alone launch_2_ranks_alone = launch::launch_2_ranks_alone, limit_torchrun;
    alone launch_2_ranks_cold = launch::launch_2_ranks_cold, limit_torchrun;
    alone launch_2_ranks_warm = launch::launch_2_ranks_warm, limit_torchrun, limit_torch_distributor, limit_ray_train;
    alone limit_torchrun_relaunch = launch::limit_torchrun_relaunch;
    alone relaunch_after_failure = launch::relaunch_after_failure, limit_torchrun_relaunch;
    alone relaunch_after_node_loss = launch::relaunch_after_node_loss;
    alone steps_beside_torchrun = launch::steps_beside_torchrun;
    alone limit_pyspark_estimators = estimators::limit_pyspark_estimators;
    alone estimators = estimators::estimators, limit_pyspark_estimators;
}
