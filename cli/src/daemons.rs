//! `wingbeat head` and `wingbeat worker`.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Args;
use wingbeat_core::ClusterId;
use wingbeat_head::{FormerStandby, Head, HeadConfig, HeadHandle, Outcome};
use wingbeat_net::Token;
use wingbeat_net::handshake::MAKE_A_TOKEN;
use wingbeat_net::limits::limits;
use wingbeat_net::patience::Patience;
use wingbeat_worker::node;
use wingbeat_worker::offer::Offer;
use wingbeat_worker::{join, token};

use crate::say::{notice, say_of_daemon};
use crate::signals::{INTERRUPTED, Signals};
use crate::sizes;

/// The port of a head unless told otherwise.
pub(crate) const DEFAULT_PORT: u16 = 6420;

/// Start a head: the one process that knows which machines, actors and jobs there are.
#[derive(Args)]
pub(crate) struct HeadArgs {
    /// Address to listen on. Anything but loopback needs a token that was given on purpose.
    #[arg(long, default_value = "127.0.0.1", value_parser = sizes::host)]
    host: IpAddr,
    /// Port to listen on; 0 lets the system choose.
    #[arg(long, default_value_t = DEFAULT_PORT)]
    port: u16,
    /// File with the cluster's token (mode 0600). Else $WINGBEAT_TOKEN, $WINGBEAT_TOKEN_FILE, or on loopback a token of
    /// your own that is made on first use.
    #[arg(long)]
    token_file: Option<PathBuf>,
    /// File in which to keep what must survive this head: placement groups, quotas, named and detached actors. A head
    /// that is started with the file of another goes on with its cluster: nodes and programs wait for it for --lost-after
    /// after the last one has ended, at the same address and with the same token. Without a file they do so, too, and up
    /// to three nodes keep what would be in it, in memory. With a file, SIGTERM and SIGHUP end the head alone, as
    /// SIGKILL does; Ctrl-C and `wingbeat stop` end the cluster. Only you can read the file; the
    /// programs of detached actors lie beside it, in FILE.programs.
    #[arg(long, value_name = "FILE")]
    journal: Option<PathBuf>,
    /// A node that says nothing for this time is suspect: nothing new is placed there, and nothing of it runs elsewhere. 5s, or a third of
    /// --lost-after if that is less.
    #[arg(long, value_name = "TIME", value_parser = sizes::duration, conflicts_with = "standby_of")]
    suspect_after: Option<std::time::Duration>,
    /// A node or program that says nothing for this time is lost: what ran there runs elsewhere, and the node ends itself a little before. 30s;
    /// at least 3s. It is also how long nodes and programs wait for the next head. A node that has ended is lost at once. All processes of
    /// the cluster learn it from the head.
    #[arg(long, value_name = "TIME", value_parser = sizes::duration, conflicts_with = "standby_of")]
    lost_after: Option<std::time::Duration>,
    /// Be a standby of the head at this address (host:port), which must keep a journal itself: copy its journal to FILE, and take over at
    /// once when it is gone, and within about 4 s (a quarter of --lost-after if that is less) when it is cut off, if a majority of the nodes
    /// has not heard it either. Nodes and programs find the standby by themselves, at --host and --port, which they must be able to reach. To
    /// survive the loss of a machine, give the head, the standby and at least one node machines of their own. Its --suspect-after and
    /// --lost-after are those of the head that it follows. The head that was taken over
    /// from ends; start it again with --standby-of the new one.
    #[arg(long, value_name = "ADDRESS", requires = "journal")]
    standby_of: Option<String>,
    /// Lead although the journal names a standby that may have taken over, and does not answer. Only if it is certain that no other head of
    /// this cluster runs or will run: two heads would start actors twice. Refused while the standby answers. It is for
    /// once, as where the standby's machine has burned: from then on the journal names no standby, and the head is started as before. Give it
    /// a new standby on another machine, with --standby-of and a FILE of its own.
    #[arg(long, requires = "journal", conflicts_with = "standby_of")]
    without_standby: bool,
}

/// Start a node: this machine's CPUs, GPUs and memory join the cluster.
// A field for each option.
#[derive(Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct WorkerArgs {
    /// The head, as host:port, or several places where it may be, as host:port,host:port; also --address, as everywhere else. Else that of the
    /// context.
    #[arg(long, alias = "address", env = join::ADDRESS_VARIABLE)]
    head: Option<String>,
    /// Address to listen on for other machines; the one on the way to the head if nothing is said.
    #[arg(long, value_parser = sizes::host)]
    host: Option<IpAddr>,
    /// CPUs to offer; all if nothing is said.
    #[arg(long, value_parser = sizes::count)]
    num_cpus: Option<u32>,
    /// Number of GPUs to offer (default: all that the machine has).
    #[arg(long, value_parser = sizes::count)]
    num_gpus: Option<u32>,
    /// Number of GPUs to offer, for tests of programs: those that the machine does not have are pretended.
    #[arg(long, value_parser = sizes::count, conflicts_with = "num_gpus")]
    pretend_gpus: Option<u32>,
    /// Pretended memory of each GPU, such as 16GiB, for tests of programs.
    #[arg(long, value_parser = sizes::some_bytes)]
    gpu_memory: Option<u64>,
    /// A custom resource to offer, as NAME=AMOUNT; may be repeated.
    #[arg(long = "resource", value_parser = sizes::offered)]
    resources: Vec<(String, f64)>,
    /// A label, as KEY=VALUE; may be repeated.
    #[arg(long = "label", value_parser = sizes::label)]
    labels: Vec<(String, String)>,
    /// Capacity of the object store, such as 2GiB; 30% of the memory if nothing is said.
    #[arg(long, value_parser = sizes::some_bytes)]
    object_store_memory: Option<u64>,
    /// Where objects go when the store is full.
    #[arg(long)]
    spill_dir: Option<PathBuf>,
    /// How much may go there, such as 100GiB; half of what is free on its disk if nothing is said.
    #[arg(long, value_parser = sizes::bytes)]
    spill_limit: Option<u64>,
    /// The part of the object store above which objects are written to disk before others need their room; 1 for not before it is full.
    #[arg(long, value_parser = sizes::part, default_value_t = join::SPILL_AHEAD)]
    spill_ahead: f64,
    /// The part of all memory above which tasks and actors are ended, before the kernel kills a process of its choice; 0.95 if neither
    /// this nor WINGBEAT_MEMORY_THRESHOLD says something, and 0 for never.
    #[arg(long, value_parser = sizes::part)]
    memory_threshold: Option<f64>,
    /// How often memory is looked at, such as 250ms (the default): more often where little is left, and more rarely where much is.
    #[arg(long, value_parser = sizes::some_time)]
    memory_check_interval: Option<std::time::Duration>,
    /// File with the cluster's token; else as for `wingbeat head`.
    #[arg(long)]
    token_file: Option<PathBuf>,
}

impl WorkerArgs {
    /// What no option can see of the others.
    fn check(&self) -> Result<()> {
        if let Some(name) = sizes::given_twice(&self.resources) {
            bail!("--resource {name} is given twice; give the sum");
        }
        if let Some(key) = sizes::given_twice(&self.labels) {
            bail!("--label {key} is given twice; a node has one value of each label");
        }
        let has_gpus = self.pretend_gpus.or(self.num_gpus).is_none_or(|count| count > 0);
        if self.num_cpus == Some(0) && !has_gpus && self.resources.is_empty() {
            bail!("this node would offer nothing: give --num-cpus, --num-gpus or a --resource of which there is some");
        }
        Ok(())
    }
}

/// The token that was given, or on loopback the user's own.
pub(crate) fn token_for(ip: Option<IpAddr>, file: Option<&std::path::Path>) -> Result<Token> {
    if let Some(token) = token::given(file)? {
        return Ok(token);
    }
    if ip.is_some_and(|ip| !ip.is_loopback()) {
        bail!(
            "beyond loopback a token must be given on purpose: anybody who has it can run code as you; {MAKE_A_TOKEN}, on \
             every machine"
        );
    }
    Ok(token::own()?)
}

/// The address by which others reach a socket: one that listens on all interfaces, by that on the way to elsewhere.
fn reachable(address: SocketAddr) -> SocketAddr {
    if !address.ip().is_unspecified() {
        return address;
    }
    // A datagram socket that is connected has the address of its route; nothing is sent. The documentation's networks
    // are nobody's, and so lie behind the default route.
    let through = |from: &str, to: &str| {
        let socket = std::net::UdpSocket::bind(from).ok()?;
        socket.connect(to).ok()?;
        socket.local_addr().ok().map(|local| local.ip()).filter(|ip| !ip.is_unspecified())
    };
    let by_v4 = || through("0.0.0.0:0", "192.0.2.1:9");
    let by_v6 = || through("[::]:0", "[2001:db8::1]:9").filter(|_| address.is_ipv6());
    // Without a route elsewhere, nobody is elsewhere.
    let local = if address.is_ipv6() { IpAddr::from(std::net::Ipv6Addr::LOCALHOST) } else { [127, 0, 0, 1].into() };
    SocketAddr::new(by_v4().or_else(by_v6).unwrap_or(local), address.port())
}

pub(crate) async fn head(args: HeadArgs) -> Result<()> {
    wingbeat_net::descriptors::raise_limit();
    let token = token_for(Some(args.host), args.token_file.as_deref())?;
    let patience = Patience::new(args.suspect_after, args.lost_after).context("--suspect-after and --lost-after")?;
    let tcp = Some(SocketAddr::new(args.host, args.port));
    let config = HeadConfig { tcp, token, cluster: ClusterId::random(), patience };
    let mut signals = Signals::of_daemon()?;
    let standby = if args.without_standby { FormerStandby::IsGone } else { FormerStandby::IsAsked };
    let head = match (&args.standby_of, &args.journal) {
        (Some(of), Some(file)) => match stand_by(config, of, file, &mut signals).await? {
            Some(head) => Ok(head),
            None => return Ok(()),
        },
        // It may have to hear first from others whether it may lead.
        (_, Some(file)) => match unless_asked(&mut signals, Head::start_with_journal(config, file, standby)).await {
            Some(begun) => begun,
            None => return Ok(()),
        },
        (_, None) => Head::start_to_be_followed(config).await,
    };
    let head = head.context("cannot start the head")?;
    let address = head.address().tcp.context("the head does not listen")?;
    say_of_daemon!("wingbeat head listening at {address}");
    let address = reachable(address);
    // Without it everybody would try the user's own token.
    let (flag, variable) = match &args.token_file {
        Some(file) => (format!(" --token-file {}", file.display()), format!("WINGBEAT_TOKEN_FILE={} ", file.display())),
        None => (String::new(), String::new()),
    };
    say_of_daemon!("  add a machine:  wingbeat worker --head {address}{flag}");
    say_of_daemon!("  use it:         {variable}WINGBEAT_ADDRESS={address} <your program>");
    say_of_daemon!("  look at it:     {variable}wingbeat status --address {address}");
    tokio::select! {
        asked = signals.next() => {
            if leaves_the_cluster(args.journal.is_some(), asked.what) {
                let next = match head.standby() {
                    Some(standby) => format!("its standby at {standby} takes over"),
                    None => format!(
                        "nodes and programs wait for about {} s for a head with this journal",
                        limits().lost.as_secs()
                    ),
                };
                notice!("wingbeat head: {}; {next} (`wingbeat stop` would have ended them)", asked.what);
                head.leave().await;
                return Ok(());
            }
            notice!("wingbeat head: {}; ending the cluster", asked.what);
        }
        stopped = head.stopped() => match stopped {
            Ok(()) => notice!("wingbeat head: the cluster was stopped"),
            Err(why) => anyhow::bail!("{why}"),
        },
    }
    head.shutdown().await;
    Ok(())
}

/// Whether a head that is asked to end leaves its cluster to the next one: not where somebody interrupts it, at a terminal. Supervisors
/// stop so what they are about to start again, and a terminal that is closed says nothing of the cluster.
fn leaves_the_cluster(keeps_journal: bool, asked: &str) -> bool {
    keeps_journal && asked != INTERRUPTED
}

/// What has begun; none when the head is asked to end before.
async fn unless_asked<T>(signals: &mut Signals, begins: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        begun = begins => Some(begun),
        asked = signals.next() => {
            notice!("wingbeat head: {}; it ends before it has begun", asked.what);
            None
        }
    }
}

/// Stands by until it leads; none when it ends before.
async fn stand_by(
    config: HeadConfig,
    of: &str,
    file: &std::path::Path,
    signals: &mut Signals,
) -> Result<Option<HeadHandle>> {
    let Some(begun) = unless_asked(signals, Head::stand_by(config, of, file)).await else { return Ok(None) };
    let mut standby = begun.context("cannot start the standby")?;
    let address = standby.address().tcp.context("the standby does not listen")?;
    let (has_begun, is_current) = (standby.has_begun(), standby.is_current());
    tokio::pin!(has_begun, is_current);
    let (mut begins, mut is_told) = (false, standby.head().is_none());
    loop {
        tokio::select! {
            outcome = standby.outcome() => return match outcome {
                Outcome::Leads(head) => {
                    if standby.head().is_some() {
                        notice!("wingbeat head: the last head is gone; this standby leads now");
                    }
                    Ok(Some(head))
                }
                Outcome::Stopped => {
                    notice!("wingbeat head: the cluster was stopped");
                    Ok(None)
                }
                Outcome::Failed(error) => Err(error).context("the standby ends"),
            },
            () = &mut has_begun, if !begins => {
                begins = true;
                if let Some(head) = standby.head().and_then(|head| head.tcp) {
                    say_of_daemon!("wingbeat head standing by at {address} for the head at {head}");
                }
            }
            () = &mut is_current, if begins && !is_told => {
                is_told = true;
                say_of_daemon!("  it has all that the head has written, and takes over when that is gone");
            }
            asked = signals.next() => {
                notice!("wingbeat head: {}; the head goes on without this standby", asked.what);
                return Ok(None);
            }
        }
    }
}

pub(crate) async fn worker(args: WorkerArgs) -> Result<()> {
    wingbeat_net::descriptors::raise_limit();
    args.check()?;
    let Some(head) = args.head.filter(|head| !head.is_empty()) else {
        bail!("no head is named: give --head host:port, or --context NAME (see `wingbeat context --help`)");
    };
    // Whether a token must have been given depends on where the head is; until then, the given one or our own.
    let token = match token::given(args.token_file.as_deref())? {
        Some(token) => token,
        None => token::own()?,
    };
    let found = join::find_head(&head, &token).await.context("cannot join the cluster")?;
    let ip = args.host.or(found.ip);
    let token = token_for(ip, args.token_file.as_deref())?;
    let offer = Offer {
        num_cpus: args.num_cpus,
        num_gpus: args.num_gpus,
        pretend_gpus: args.pretend_gpus,
        gpu_memory: args.gpu_memory,
        resources: args.resources.into_iter().collect(),
        labels: args.labels.into_iter().collect(),
        object_store_memory: args.object_store_memory,
        spill_dir: args.spill_dir,
        spill_limit: args.spill_limit,
        spill_ahead: Some(args.spill_ahead),
        memory_threshold: args.memory_threshold,
        memory_check_interval: args.memory_check_interval,
    };
    let config = offer.node(found, token, ip)?;
    let resources = config.resources.clone();
    node::spare_this_process();
    let node = node::start(config).await.context("cannot start the node")?;
    let mut signals = Signals::of_daemon()?;
    say_of_daemon!("wingbeat worker {} joined {head} with {resources}", node.id());
    let outcome = tokio::select! {
        asked = signals.next() => {
            notice!("wingbeat worker: {}; ending what runs here", asked.what);
            Ok(())
        }
        ended = node.ended() => match ended {
            Ok(why) => {
                notice!("wingbeat worker: {why}");
                Ok(())
            }
            Err(why) => Err(anyhow::Error::msg(why)),
        },
    };
    node.shut_down();
    outcome
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Worker {
        #[command(flatten)]
        args: WorkerArgs,
    }

    #[derive(Parser)]
    struct Standby {
        #[command(flatten)]
        _args: HeadArgs,
    }

    #[test]
    fn what_a_node_cannot_offer_is_refused_before_it_joins() {
        let worker = |args: &[&str]| {
            let parsed = Worker::try_parse_from([&["worker", "--head", "here:6420"], args].concat());
            parsed.map_err(|error| error.to_string()).map(|worker| worker.args)
        };
        let refused: &[(&[&str], &str)] = &[
            (&["--num-cpus", "-1"], "`-1` is not how many"),
            (&["--num-gpus=-2"], "`-2` is not how many"),
            (&["--num-cpus", "1.5"], "whole number"),
            (&["--resource", "disk"], "write NAME=AMOUNT"),
            (&["--resource", "disk=-1"], "zero or more"),
            (&["--label", "zone"], "write KEY=VALUE"),
            (&["--memory-threshold", "-0.5"], "from 0 to 1"),
            (&["--memory-check-interval", "0s"], "no time at all"),
            (&["--object-store-memory", "0"], "it is nothing"),
        ];
        for (args, why) in refused {
            let said = worker(args).err().unwrap();
            assert!(said.contains(why) && said.contains(args[0].split('=').next().unwrap()), "{args:?}: {said}");
        }
        let checked = |args: &[&str]| worker(args).unwrap().check().map_err(|error| error.to_string());
        assert!(checked(&["--num-cpus", "0", "--num-gpus", "0"]).unwrap_err().contains("offer nothing"));
        assert!(checked(&["--resource", "a=1", "--resource", "a=2"]).unwrap_err().contains("twice"));
        assert!(checked(&["--label", "a=1", "--label", "a=2"]).unwrap_err().contains("twice"));
        assert_eq!(
            checked(&["--num-cpus", "0", "--resource", "disk=1", "--label", "zone=a", "--num-gpus", "0"]),
            Ok(())
        );
    }

    #[test]
    fn a_standby_has_the_times_of_its_head() {
        let standby = ["head", "--standby-of", "there:6420", "--journal", "file"];
        let parsed = |more: &[&str]| Standby::try_parse_from([&standby, more].concat()).map(drop);
        assert!(parsed(&[]).is_ok());
        for option in ["--suspect-after", "--lost-after"] {
            let said = parsed(&[option, "10s"]).unwrap_err().to_string();
            assert!(
                said.contains(option) && said.contains("cannot be used with") && said.contains("--standby-of"),
                "{said}"
            );
        }
    }

    #[test]
    fn a_head_with_a_journal_ends_its_cluster_only_where_somebody_interrupts_it() {
        assert!(leaves_the_cluster(true, "terminated") && leaves_the_cluster(true, "hung up"));
        assert!(!leaves_the_cluster(true, INTERRUPTED) && !leaves_the_cluster(false, "terminated"));
    }

    #[test]
    fn a_head_on_all_interfaces_says_where_others_reach_it() {
        let bound = |text: &str| text.parse::<SocketAddr>().unwrap();
        assert_eq!(reachable(bound("10.1.2.3:6420")), bound("10.1.2.3:6420"));
        for all in ["0.0.0.0:6420", "[::]:6420"] {
            let shown = reachable(bound(all));
            assert!(!shown.ip().is_unspecified() && shown.port() == 6420, "{shown}");
            // It is an address of this machine.
            std::net::UdpSocket::bind(SocketAddr::new(shown.ip(), 0)).unwrap();
        }
    }
}
