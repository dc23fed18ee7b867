//! `wingbeat head` and `wingbeat worker`.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Args;
use tokio::signal::unix::{SignalKind, signal};
use wingbeat_core::ClusterId;
use wingbeat_head::{Head, HeadConfig};
use wingbeat_net::Token;
use wingbeat_worker::node::{self, NodeConfig};
use wingbeat_worker::{gpus, join, token};

use crate::sizes;

/// The port of a head unless told otherwise.
pub(crate) const DEFAULT_PORT: u16 = 6420;

/// Start a head: the one process that knows which machines, actors and jobs there are.
#[derive(Args)]
pub(crate) struct HeadArgs {
    /// Address to listen on. Anything but loopback needs a token that was given on purpose.
    #[arg(long, default_value = "127.0.0.1")]
    host: IpAddr,
    /// Port to listen on; 0 lets the system choose.
    #[arg(long, default_value_t = DEFAULT_PORT)]
    port: u16,
    /// File with the cluster's token (mode 0600). Else $WINGBEAT_TOKEN, $WINGBEAT_TOKEN_FILE, or on loopback a token of
    /// your own that is made on first use.
    #[arg(long)]
    token_file: Option<PathBuf>,
    /// File in which to keep what must survive this head: placement groups, quotas, named and detached actors. A head
    /// that is started with the file of another goes on with its cluster.
    #[arg(long, value_name = "FILE")]
    journal: Option<PathBuf>,
}

/// Start a node: this machine's CPUs, GPUs and memory join the cluster.
#[derive(Args)]
pub(crate) struct WorkerArgs {
    /// The head, as host:port.
    #[arg(long, env = join::ADDRESS_VARIABLE)]
    head: String,
    /// Address to listen on for other machines; the one on the way to the head if nothing is said.
    #[arg(long)]
    host: Option<IpAddr>,
    /// CPUs to offer; all if nothing is said.
    #[arg(long)]
    num_cpus: Option<u32>,
    /// GPUs to offer, the first that there are; all that the driver knows if nothing is said. More than there are only
    /// pretends, to try things out.
    #[arg(long)]
    num_gpus: Option<u32>,
    /// Memory to pretend that each GPU has, such as 16GiB, to try things out.
    #[arg(long, value_parser = sizes::bytes)]
    gpu_memory: Option<u64>,
    /// A custom resource to offer, as NAME=AMOUNT; may be repeated.
    #[arg(long = "resource", value_parser = sizes::resource)]
    resources: Vec<(String, f64)>,
    /// A label, as KEY=VALUE; may be repeated.
    #[arg(long = "label", value_parser = sizes::pair)]
    labels: Vec<(String, String)>,
    /// Capacity of the object store, such as 2GiB; 30% of the memory if nothing is said.
    #[arg(long, value_parser = sizes::bytes)]
    object_store_memory: Option<u64>,
    /// Where objects go when the store is full.
    #[arg(long)]
    spill_dir: Option<PathBuf>,
    /// How much may go there, such as 100GiB; half of what is free if nothing is said.
    #[arg(long, value_parser = sizes::bytes)]
    spill_limit: Option<u64>,
    /// File with the cluster's token; else as for `wingbeat head`.
    #[arg(long)]
    token_file: Option<PathBuf>,
}

/// The token that was given, or on loopback the user's own.
pub(crate) fn token_for(ip: Option<IpAddr>, file: Option<&std::path::Path>) -> Result<Token> {
    if let Some(token) = token::given(file)? {
        return Ok(token);
    }
    if ip.is_some_and(|ip| !ip.is_loopback()) {
        bail!(
            "beyond loopback a token must be given on purpose: anybody who has it can run code as you. Make one with\n    \
             (umask 077; head -c 32 /dev/urandom | base64 > token)\nand give it to every machine with --token-file token"
        );
    }
    Ok(token::own()?)
}

pub(crate) async fn asked_to_end() -> Result<&'static str> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        _ = interrupt.recv() => Ok("interrupted"),
        _ = terminate.recv() => Ok("terminated"),
    }
}

pub(crate) async fn head(args: HeadArgs) -> Result<()> {
    let token = token_for(Some(args.host), args.token_file.as_deref())?;
    let config = HeadConfig { tcp: Some(SocketAddr::new(args.host, args.port)), token, cluster: ClusterId::random() };
    let head = match &args.journal {
        Some(file) => Head::start_with_journal(config, file).await,
        None => Head::start(config).await,
    };
    let head = head.context("cannot start the head")?;
    let address = head.address().tcp.context("the head does not listen")?;
    println!("wingbeat head listening at {address}");
    println!("  add a machine:  wingbeat worker --head {address}");
    println!("  use it:         WINGBEAT_ADDRESS={address} <your program>");
    println!("  look at it:     wingbeat status --address {address}");
    tokio::select! {
        why = asked_to_end() => eprintln!("wingbeat head: {}; ending the cluster", why?),
        () = head.stopped() => eprintln!("wingbeat head: the cluster was stopped"),
    }
    head.shutdown().await;
    Ok(())
}

pub(crate) async fn worker(args: WorkerArgs) -> Result<()> {
    // Whether a token must have been given depends on where the head is; until then, the given one or our own.
    let token = match token::given(args.token_file.as_deref())? {
        Some(token) => token,
        None => token::own()?,
    };
    let (head, cluster, ip) = join::find_head(&args.head, &token).await.context("cannot join the cluster")?;
    let ip = args.host.or(ip);
    let token = token_for(ip, args.token_file.as_deref())?;
    let gpus = gpus::of_machine(args.num_gpus, args.gpu_memory)?;
    let resources = join::machine_resources(
        args.num_cpus,
        gpus.count,
        &args.resources.into_iter().collect::<BTreeMap<String, f64>>(),
    )?;
    let (default_dir, default_limit) = join::default_spill();
    let config = NodeConfig {
        head,
        token,
        cluster,
        resources: resources.clone(),
        labels: join::labels_of(&gpus, args.labels.into_iter().collect()),
        gpus,
        store_bytes: args.object_store_memory.unwrap_or_else(join::default_store_bytes),
        spill_dir: Some(args.spill_dir.unwrap_or(default_dir)),
        spill_bytes: args.spill_limit.unwrap_or(default_limit),
        listen: ip.map(|ip| SocketAddr::new(ip, 0)),
    };
    let node = node::start(config).await.context("cannot start the node")?;
    println!("wingbeat worker {} joined {} with {resources}", node.id(), args.head);
    let outcome = tokio::select! {
        why = asked_to_end() => {
            eprintln!("wingbeat worker: {}; ending what runs here", why?);
            Ok(())
        }
        ended = node.ended() => match ended {
            Ok(why) => {
                eprintln!("wingbeat worker: {why}");
                Ok(())
            }
            Err(why) => Err(anyhow::Error::msg(why)),
        },
    };
    node.shut_down();
    outcome
}
