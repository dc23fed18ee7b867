//! A standby: it copies what the head writes, and leads when that is gone and the nodes agree. [`StandingBy`] decides.
//!
//! It listens from the beginning where it would serve, and says to whoever connects where the head is. It ends when the cluster is stopped,
//! when the head refuses it, or when its handle is dropped; a copy that it has made stays in its file, and is made anew when it follows again.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tarpc::context::Context;
use tokio::sync::{mpsc, oneshot, watch};
use wingbeat_core::codec::Payload;
use wingbeat_core::error::Error;
use wingbeat_core::spec::{Address, Executable};
use wingbeat_core::{ClusterId, NodeId, ProcessId};
use wingbeat_net::Token;
use wingbeat_net::address::{self, DialError, Listener, Stream};
use wingbeat_net::handshake::{Epoch, Hello, Purpose, Role, StandsBy, Welcome};
use wingbeat_net::limits::{self, limits, patience};
use wingbeat_net::messages::{Ballot, Facts, Follow, Followed, Succession, Vote};
use wingbeat_net::mux::{self, Waiting};
use wingbeat_net::panics;
use wingbeat_net::seek;
use wingbeat_net::services::{
    HeadClient, HeadRequest, HeadResponse, NodeClient, NodeRequest, NodeResponse, ProcessRequest, ProcessResponse,
    Standby as _, StandbyRequest, StandbyResponse,
};
use wingbeat_net::way::Way;

use crate::files;
use crate::journal::{self, Changes, Journal};
use crate::programs::{Giver, Programs};
use crate::service::{Durable as _, Shell};
use crate::state::{Fact, FactKey};
use crate::succession::standing_by::{Order, StandingBy};
use crate::succession::{Clock, Millis, millis};
use crate::{FormerStandby, Head, HeadConfig, HeadHandle};

/// How long a ballot may take.
const VOTE_LIMIT: Duration = Duration::from_secs(1);
/// The pause before the head is dialled again.
const PAUSE: Duration = Duration::from_millis(100);
/// The same, where somebody there has refused.
const REFUSED_PAUSE: Duration = Duration::from_secs(1);
/// The first pause after the file could not be written, and the longest.
const FULL_PAUSES: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(60));
/// The pause before a program is fetched again.
const PROGRAM_PAUSE: Duration = Duration::from_secs(10);
/// Answers of nodes that wait to be looked at.
const VOTES: usize = 1024;

/// What has become of a standby.
pub enum Outcome {
    /// It leads.
    Leads(HeadHandle),
    /// The cluster was stopped.
    Stopped,
    /// It cannot go on.
    Failed(Error),
}

/// A running standby.
pub struct StandbyHandle {
    address: Address,
    head: Option<Address>,
    outcome: oneshot::Receiver<Outcome>,
    has_begun: watch::Receiver<bool>,
    is_current: watch::Receiver<bool>,
    _stop: watch::Sender<()>,
}

impl StandbyHandle {
    /// Where it listens.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// The head that it follows; none if it goes on as a head itself.
    pub fn head(&self) -> Option<&Address> {
        self.head.as_ref()
    }

    /// Waits until it stands by: the head has accepted it, or does not answer. It never does where the head refuses it at once.
    pub fn has_begun(&self) -> impl Future<Output = ()> + Send + use<> {
        until_true(self.has_begun.clone())
    }

    /// Waits until it has all that it needs, and may take over.
    pub fn is_current(&self) -> impl Future<Output = ()> + Send + use<> {
        until_true(self.is_current.clone())
    }

    /// Waits until it leads, or ends.
    pub async fn outcome(&mut self) -> Outcome {
        let ended = || Error::Failed {
            what: "standing by".into(),
            why: "a part of the standby has failed; see its log".into(),
        };
        (&mut self.outcome).await.unwrap_or_else(|_| Outcome::Failed(ended()))
    }
}

/// Waits until that is true, which may be never.
async fn until_true(mut watched: watch::Receiver<bool>) {
    if watched.wait_for(|is_true| *is_true).await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// For whoever starts a head with the file of a standby.
pub(crate) fn is_a_copy(file: &Path, head: &Address) -> Error {
    let head = head.tcp.map_or_else(|| head.unix.clone(), |tcp| tcp.to_string());
    Error::InvalidArgument {
        what: format!(
            "{} is the copy that a standby makes of the journal of the head at {head}; start it with --standby-of {head}",
            file.display()
        ),
    }
}

/// What a standby's tasks share, until it leads or ends. Its many fields are what it copies, what it decides by, and what others ask of
/// it meanwhile.
struct Standby {
    token: Token,
    cluster: ClusterId,
    /// Where its copy of the journal lies. When it leads, that is its journal.
    file: PathBuf,
    /// Where it would serve.
    address: Address,
    /// Where the head is that it follows, and which.
    way: Way,
    /// Whether it follows, or asks for promises.
    deciding: Mutex<StandingBy>,
    /// None when it takes over.
    journal: Mutex<Option<Arc<Journal>>>,
    /// Executables of detached actors, beside the file, each while one needs it.
    programs: Arc<Programs>,
    /// Jobs and actors, for the programs that may be needed.
    known: Mutex<BTreeMap<FactKey, Fact>>,
    /// Whether its file was made for it.
    is_new_file: bool,
    /// Whether the head has accepted it, or was not there.
    has_begun: watch::Sender<bool>,
    /// Whether it has all that the head has written, and may take over. For whoever waits for that.
    is_current: watch::Sender<bool>,
    /// How long it was paused last since the file cannot be written; none while it can.
    cannot_write: Mutex<Option<Duration>>,
    /// When programs were tried last that the head did not give.
    lacks: Arc<Mutex<BTreeMap<String, Instant>>>,
    /// Counts from its start.
    clock: Clock,
    /// Once it leads.
    leads: OnceLock<Arc<Shell>>,
}

/// How following over one connection has ended.
enum Ended {
    /// With the standby.
    Standby(Outcome),
    /// Another connection may go on.
    Connection,
    /// The file cannot be written.
    CannotWrite(Error),
}

/// What comes next.
enum Next {
    /// It follows the head, or looks for it.
    Follows,
    /// It asks nodes for their promises.
    Runs,
    Leads(Epoch),
}

/// See [`Head::stand_by`].
pub(crate) async fn start(config: HeadConfig, head: &str, file: &Path) -> Result<StandbyHandle, Error> {
    let HeadConfig { tcp, token, cluster, patience: own } = config;
    let hello = Hello { role: Role::Head, purpose: Purpose::Control, ..Hello::of_tool() };
    let found = seek::dial_head(head, "the head", &token, hello).await;
    let is_new_file = !file.exists();
    if is_new_file {
        // No file is made for a head that is not there.
        found.as_ref().map_err(Clone::clone)?;
    }
    let new = found.as_ref().map_or(cluster, |(_, welcome)| welcome.cluster);
    let (mut journal, remembered) = Journal::open(file, new)?;
    let follows = remembered.facts.iter().find_map(|fact| match fact {
        Fact::Follows(head) => Some((**head).clone()),
        _ => None,
    });
    let succession = remembered.facts.iter().find_map(|fact| match fact {
        Fact::Succession(succession) => Some((**succession).clone()),
        _ => None,
    });
    let last = succession.as_ref().map(|succession| succession.generation.epoch);
    let has_led = !remembered.facts.is_empty() && follows.is_none();
    let (head, epoch, ip) = match (found, follows) {
        (Ok((stream, welcome)), _) if !has_led || last <= welcome.epoch => {
            if remembered.cluster.is_some_and(|cluster| cluster != welcome.cluster) {
                let what = format!(
                    "{} is the journal of {}, and the head there is of {}; name another file",
                    file.display(),
                    remembered.cluster.unwrap_or(welcome.cluster),
                    welcome.cluster
                );
                return Err(Error::InvalidArgument { what });
            }
            if let Some(patience) = welcome.patience {
                limits::take(patience);
            }
            let mut head = welcome.address;
            if let Stream::Tcp(stream) = &stream
                && let Ok(peer) = stream.peer_addr()
            {
                head.tcp = Some(peer);
            }
            if has_led {
                // That head may have begun with an older copy, which is about to replace what this file alone holds.
                drop(journal);
                let aside = journal::keep_aside(file)?;
                tracing::info!("what this journal holds, with which it has led, is kept as {}", aside.display());
                journal = Journal::open(file, new)?.0;
            }
            (head, welcome.epoch, address::local_ip(&stream))
        }
        // It has taken over, was started again with the same words, and the last head is not back as a later one.
        (_, None) if has_led => {
            drop(journal);
            let config = HeadConfig { tcp, token, cluster, patience: own };
            let head = Head::start_with_journal(config, file, FormerStandby::IsAsked).await?;
            let (outcome, told) = oneshot::channel();
            let address = head.address().clone();
            let _ = outcome.send(Outcome::Leads(head));
            let (_stop, _) = watch::channel(());
            let (has_begun, is_current) = (watch::channel(true).1, watch::channel(true).1);
            return Ok(StandbyHandle { address, head: None, outcome: told, has_begun, is_current, _stop });
        }
        // It was current when it ended, or is not: nodes know.
        (Err(_), Some(head)) => (head, last, own_ip(succession.as_ref(), tcp)),
        (Err(error), None) => return Err(error),
        (Ok(_), _) => unreachable!("one that has led follows nobody"),
    };
    let cluster = remembered.cluster.unwrap_or(new);
    let facts = remembered.facts;
    begin(Begins { tcp, token, cluster, head, epoch, ip, file, is_new_file, journal, facts, succession }).await
}

/// This machine's address, by which the last head knew this standby.
fn own_ip(succession: Option<&Succession>, listens: Option<SocketAddr>) -> Option<IpAddr> {
    let known = succession?.standby.as_ref()?.tcp?;
    (Some(known.port()) == listens.map(|listens| listens.port())).then(|| known.ip())
}

/// Whoever reaches the head from other machines must reach its standby, too.
fn can_be_reached(listens: Option<SocketAddr>, on_the_way: Option<IpAddr>) -> Result<(), Error> {
    match (listens, on_the_way) {
        (Some(listens), Some(ip)) if listens.ip().is_loopback() && !ip.is_loopback() => Err(Error::InvalidArgument {
            what: format!(
                "a standby at {listens} cannot be reached from other machines, and the head that it follows can: the cluster would be lost \
                 when it takes over. Give --host {ip}"
            ),
        }),
        _ => Ok(()),
    }
}

/// With what a standby begins.
struct Begins<'a> {
    tcp: Option<SocketAddr>,
    token: Token,
    cluster: ClusterId,
    head: Address,
    epoch: Option<Epoch>,
    /// This machine's address on the way to the head.
    ip: Option<IpAddr>,
    file: &'a Path,
    is_new_file: bool,
    journal: Journal,
    facts: Vec<Fact>,
    succession: Option<Succession>,
}

async fn begin(with: Begins<'_>) -> Result<StandbyHandle, Error> {
    let Begins { tcp, token, cluster, head, epoch, ip, file, is_new_file, journal, facts, succession } = with;
    can_be_reached(tcp, ip)?;
    let listener = Listener::bind(ProcessId(cluster.0), tcp).await?;
    let mut address = listener.address().clone();
    if let (Some(tcp), Some(ip)) = (&mut address.tcp, ip)
        && tcp.ip().is_unspecified()
    {
        tcp.set_ip(ip);
    }
    journal.intend(vec![Fact::Follows(Box::new(head.clone()))]).await?;
    let way = Way::new(head.clone());
    way.found(epoch);
    let known = facts.into_iter().map(|fact| (fact.key(), fact)).collect();
    let (stop, mut stopped) = watch::channel(());
    let standby = Arc::new(Standby {
        token,
        cluster,
        file: file.to_owned(),
        address: address.clone(),
        way,
        deciding: Mutex::new(StandingBy::new(0, millis(limits().takeover), None)),
        journal: Mutex::new(Some(Arc::new(journal))),
        programs: Arc::new(Programs::beside(file)?),
        known: Mutex::new(known),
        is_new_file,
        has_begun: watch::Sender::new(false),
        is_current: watch::Sender::new(false),
        cannot_write: Mutex::default(),
        lacks: Arc::default(),
        clock: Clock::start(),
        leads: OnceLock::new(),
    });
    standby.note_succession(succession);
    let (outcome, told) = oneshot::channel();
    let (has_begun, is_current) = (standby.has_begun.subscribe(), standby.is_current.subscribe());
    let (listening, serving) = (standby.clone(), standby.clone());
    let accepted = move |stream: Stream, hello: Hello| match serving.leads.get() {
        Some(shell) => {
            let shell = shell.clone();
            shell.clone().vital("serving a connection", async move { shell.serve_connection(stream, hello).await });
        }
        None => {
            tokio::spawn(serving.clone().answer(stream, hello));
        }
    };
    let running = standby.clone();
    let taking_part = async move {
        let token = standby.token.clone();
        let ending = standby.clone();
        let ended = async move {
            let _ = stopped.changed().await;
            // When it leads, it listens as long as that.
            if let Some(shell) = ending.leads.get() {
                shell.until_stopped(std::future::pending()).await;
            }
        };
        let serve = listener.serve_with(token, move || listening.welcome(), accepted);
        tokio::select! {
            () = serve => {}
            () = ended => {}
            () = async {
                let ended = standby.clone().stand_by().await;
                if matches!(ended, Outcome::Failed(_)) && standby.is_new_file && !*standby.has_begun.borrow() {
                    standby.remove_file().await;
                }
                let _ = outcome.send(ended);
                std::future::pending().await
            } => {}
        }
    };
    tokio::spawn(async move {
        // Before it leads, whoever waits for its outcome is told.
        if let Err(said) = panics::caught(taking_part).await
            && let Some(shell) = running.leads.get()
        {
            shell.is_defect("taking connections", &said);
        }
    });
    Ok(StandbyHandle { address, head: Some(head), outcome: told, has_begun, is_current, _stop: stop })
}

impl Standby {
    fn now(&self) -> Millis {
        self.clock.now()
    }

    fn hello(&self, process: ProcessId) -> Hello {
        let of_tool = Hello::of_tool();
        let address = Address { process, ..self.address.clone() };
        Hello { role: Role::Head, purpose: Purpose::Control, cluster: Some(self.cluster), address, ..of_tool }
    }

    fn welcome(&self) -> Welcome {
        let (address, cluster) = (self.address.clone(), self.cluster);
        match self.leads.get() {
            Some(shell) => {
                let patience = Some(patience());
                Welcome { address, cluster, epoch: shell.epoch(), patience, stands_by: None }
            }
            None => {
                let runs_for = self.deciding.lock().runs_for();
                let stands_by = Some(StandsBy { head: self.way.address(), runs_for });
                Welcome { address, cluster, epoch: self.way.epoch(), patience: None, stands_by }
            }
        }
    }

    /// Before it leads.
    async fn answer(self: Arc<Self>, stream: Stream, hello: Hello) {
        // Others have learned from the welcome where the head is.
        if hello.role == Role::Head {
            let (connection, _, server) =
                mux::connect::<HeadRequest, HeadResponse, StandbyRequest, StandbyResponse>(stream, Waiting::Asleep);
            mux::serve(server, Asked(self).serve()).await;
            connection.close();
        }
    }

    /// Who may take over was written: by what this standby has, if it is meant.
    fn note_succession(&self, succession: Option<Succession>) {
        let succession = succession.map(|mut succession| {
            // In an earlier life it had another socket.
            let is_meant = |at: &Address| *at == self.address || at.tcp.is_some() && at.tcp == self.address.tcp;
            succession.standby = succession.standby.filter(is_meant).map(|_| self.address.clone());
            succession
        });
        self.deciding.lock().wrote(succession);
    }

    /// Whether it has all that the head has written, and may take over.
    fn note_whether_current(&self, is_current: bool) {
        self.is_current.send_if_modified(|current| std::mem::replace(current, is_current) != is_current);
    }

    /// It was refused before there was anything to copy.
    async fn remove_file(&self) {
        self.close_journal().await;
        // A link to it stays: the user has made that.
        let file = files::real_path(&self.file);
        // The count alone would be of a journal that is gone.
        for ending in ["-count", "-wal", "-shm", ""] {
            // What cannot be removed stays, and is used by the next standby.
            let _ = std::fs::remove_file(files::beside(&file, ending));
        }
    }

    /// Waits until nothing is written to the file any more.
    async fn close_journal(&self) {
        let mut journal = self.journal.lock().take();
        while let Some(shared) = journal {
            match Arc::try_unwrap(shared) {
                Ok(last) => {
                    let _ = tokio::task::spawn_blocking(move || drop(last)).await;
                    break;
                }
                // Something is being written.
                Err(shared) => {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                    journal = Some(shared);
                }
            }
        }
    }

    async fn stand_by(self: Arc<Self>) -> Outcome {
        let (votes, mut incoming) = mpsc::channel(VOTES);
        loop {
            let next = tokio::select! {
                biased;
                next = self.decide(&votes, &mut incoming) => next,
                ended = self.follow() => return ended,
            };
            // From here on nobody is followed, and so nobody supported.
            let next = match next {
                Next::Runs => {
                    tracing::warn!(
                        "a majority of the nodes would accept this standby; it asks them for their promises"
                    );
                    self.decide(&votes, &mut incoming).await
                }
                next => next,
            };
            match next {
                Next::Leads(epoch) => {
                    return match self.lead(epoch).await {
                        Ok(head) => Outcome::Leads(head),
                        Err(error) => Outcome::Failed(error),
                    };
                }
                Next::Follows | Next::Runs => {}
            }
        }
    }

    /// Decides until something else comes next.
    async fn decide(
        self: &Arc<Self>,
        votes: &mpsc::Sender<(NodeId, Ballot, Vote)>,
        incoming: &mut mpsc::Receiver<(NodeId, Ballot, Vote)>,
    ) -> Next {
        let followed = self.deciding.lock().may_follow();
        let mut beat = tokio::time::interval(limits().takeover / 16);
        let mut lacks_file = false;
        loop {
            let orders = tokio::select! {
                _ = beat.tick() => self.deciding.lock().tick(self.now()),
                vote = incoming.recv() => match vote {
                    Some((node, ballot, vote)) => self.deciding.lock().voted(self.now(), node, &ballot, vote),
                    None => Vec::new(),
                },
            };
            for order in orders {
                match order {
                    Order::Lead(epoch) => return Next::Leads(epoch),
                    Order::Ask(ballot, nodes) => {
                        // With a promise, nodes would refuse the head that is started again.
                        if let Err(error) = self.keeps_its_file().await {
                            if !std::mem::replace(&mut lacks_file, true) {
                                tracing::error!(%error, "this standby cannot take over");
                            }
                            continue;
                        }
                        for (node, address) in nodes {
                            let (standby, ballot, votes) = (self.clone(), ballot.clone(), votes.clone());
                            // It ends within a second.
                            tokio::spawn(async move {
                                let asking = standby.ask(&address, &ballot);
                                if let Ok(Some(vote)) = tokio::time::timeout(VOTE_LIMIT, asking).await {
                                    tracing::debug!(%node, ?ballot, ?vote, "a node has voted");
                                    let _ = votes.send((node, ballot, vote)).await;
                                }
                            });
                        }
                    }
                }
            }
            let may_follow = self.deciding.lock().may_follow();
            if may_follow != followed {
                return if may_follow { Next::Follows } else { Next::Runs };
            }
        }
    }

    /// Whether the next head could read what is written here.
    async fn keeps_its_file(&self) -> Result<(), Error> {
        let journal = self.journal.lock().clone();
        match journal {
            Some(journal) => journal.intend(Vec::new()).await,
            None => Err(has_ended()),
        }
    }

    async fn ask(&self, node: &Address, ballot: &Ballot) -> Option<Vote> {
        let hello = self.hello(ProcessId(self.cluster.0));
        let stream = address::dial(node, "a node", &self.token, hello).await.ok()?;
        let (connection, client, _) =
            mux::connect::<NodeRequest, NodeResponse, ProcessRequest, ProcessResponse>(stream, Waiting::Asleep);
        let _closes = connection.closes();
        let client = NodeClient::new(mux::client_config(), client).spawn();
        client.elect(mux::within(VOTE_LIMIT), ballot.clone()).await.ok()
    }

    /// Follows the head over one connection after the other.
    async fn follow(self: &Arc<Self>) -> Outcome {
        loop {
            // Each connection has its own name: it begins anew.
            let hello = self.hello(ProcessId::random());
            match tokio::time::timeout(limits().takeover, self.way.dial(&self.token, hello)).await {
                Ok(Ok((stream, _))) => {
                    // A head that was started again may have other times, which it has said.
                    self.deciding.lock().bears(millis(limits().takeover));
                    match self.follow_over(stream).await {
                        Ended::Standby(outcome) => return outcome,
                        Ended::Connection => tracing::warn!("the connection to the head has ended; looking for it"),
                        Ended::CannotWrite(error) => tokio::time::sleep(self.pause_after(&error)).await,
                    }
                }
                Ok(Err(error)) => {
                    tracing::debug!(%error, "cannot reach the head");
                    self.has_begun.send_replace(true);
                    if matches!(error, DialError::Failed(Error::Refused { .. })) {
                        // It would refuse the next one, too.
                        tokio::time::sleep(REFUSED_PAUSE).await;
                        continue;
                    }
                    if matches!(error, DialError::Gone(_)) || self.is_gone().await {
                        self.deciding.lock().head_is_gone();
                    }
                }
                Err(_) => drop(self.has_begun.send_replace(true)),
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Whether nobody listens where the head did, by whatever way.
    async fn is_gone(&self) -> bool {
        let head = self.way.address();
        let far = Address { machine: wingbeat_core::spec::MachineId(0), unix: String::new(), ..head.clone() };
        address::is_gone(&head).await && (far.tcp.is_none() || address::is_gone(&far).await)
    }

    /// Follows over one connection.
    async fn follow_over(self: &Arc<Self>, stream: Stream) -> Ended {
        let (connection, client, _) =
            mux::connect::<HeadRequest, HeadResponse, ProcessRequest, ProcessResponse>(stream, Waiting::Asleep);
        // Also when it runs meanwhile.
        let _closes = connection.closes();
        let client = HeadClient::new(mux::client_config(), client).spawn();
        let epoch = self.way.epoch().unwrap_or(Epoch(0));
        let mut copying = Copying::default();
        let (mut written, mut has_all) = (0, false);
        // What it may have from earlier is not what the head has now.
        self.note_whether_current(false);
        loop {
            let generation = self.written_generation();
            let asks = Follow { standby: self.address.clone(), written, generation };
            let asked = self.now();
            let answer = client.follow(mux::within(limits().takeover), asks.clone()).await;
            if !matches!(&answer, Ok(Err(Error::Refused { .. }))) {
                self.has_begun.send_replace(true);
            }
            let facts = match answer {
                Err(_) => return Ended::Connection,
                Ok(Err(error @ Error::Refused { .. })) => return Ended::Standby(Outcome::Failed(error)),
                Ok(Err(_)) => return Ended::Connection,
                Ok(Ok(Followed::Stops)) => return Ended::Standby(Outcome::Stopped),
                Ok(Ok(Followed::Facts(facts))) => facts,
            };
            self.deciding.lock().heard(self.now(), has_all.then_some(asked), epoch);
            let position = facts.position;
            let written_now = tokio::select! {
                biased;
                written = self.write(facts, &mut copying) => written,
                never = self.say_that_it_writes(&client, asks, epoch, has_all) => match never {},
            };
            if let Err(error) = written_now {
                return Ended::CannotWrite(error);
            }
            written = position;
            has_all = copying.is_complete;
            if has_all {
                self.can_write();
            }
            self.note_whether_current(has_all && self.deciding.lock().may_take_over());
            self.fetch_programs(&client);
        }
    }

    /// Follows as before while something is being written, which may take longer than a standby may be silent.
    async fn say_that_it_writes(&self, head: &HeadClient, asks: Follow, epoch: Epoch, has_all: bool) -> Infallible {
        loop {
            tokio::time::sleep(limits().takeover / 4).await;
            let asked = self.now();
            // What it is sent, it is being sent again; and the end of the connection is found when it has written.
            let answer = head.follow(mux::within(limits().takeover), asks.clone()).await;
            if let Ok(Ok(Followed::Facts(_))) = answer {
                self.deciding.lock().heard(self.now(), has_all.then_some(asked), epoch);
            }
        }
    }

    /// How long the head is left alone after what it has written could not be written here. Each attempt has it read all that it knows.
    fn pause_after(&self, error: &Error) -> Duration {
        let (first, longest) = FULL_PAUSES;
        let mut pause = self.cannot_write.lock();
        let next = match *pause {
            None => {
                tracing::error!(%error, "cannot write what the head has written; it goes on without this standby until it can");
                first
            }
            Some(last) => (last * 2).min(longest),
        };
        *pause = Some(next);
        next
    }

    fn can_write(&self) {
        if self.cannot_write.lock().take().is_some() {
            tracing::info!("what the head has written is written here again");
        }
    }

    fn written_generation(&self) -> Option<wingbeat_net::messages::Generation> {
        match self.known.lock().get(&FactKey::Succession) {
            Some(Fact::Succession(succession)) => Some(succession.generation),
            _ => None,
        }
    }

    async fn write(&self, facts: Facts, copying: &mut Copying) -> Result<(), Error> {
        let Some((changes, replaces)) = copying.take_in(facts) else { return Ok(()) };
        if changes.is_empty() && !replaces {
            return Ok(());
        }
        let unreadable = |why: String| Error::Failed { what: "reading what the head has written".into(), why };
        let mut changes = changes;
        if replaces {
            let follows = Fact::Follows(Box::new(self.way.address())).encoded().map_err(unreadable)?;
            changes.insert(follows.0, follows.1);
        }
        let journal = self.journal.lock().clone();
        let journal = journal.ok_or_else(has_ended)?;
        let mut facts = Vec::new();
        let written = {
            // Until it is queued, no other head is let lead: what this one says of who may take over is void from then on.
            let deciding = self.deciding.lock();
            for (key, content) in &mut changes {
                let key = FactKey::decoded(key.clone().into()).map_err(unreadable)?;
                let mut fact =
                    content.clone().map(|fact| Fact::decoded(fact.into())).transpose().map_err(unreadable)?;
                if matches!(&fact, Some(Fact::Succession(by) | Fact::EarlierSuccession(by)) if deciding.is_void(by)) {
                    (fact, *content) = (None, None);
                }
                facts.push((key, fact));
            }
            journal.copy(changes, replaces)
        };
        written.await?;
        let mut said = None;
        {
            let mut known = self.known.lock();
            if replaces {
                known.clear();
                said = Some(None);
            }
            for (key, fact) in facts {
                if key == FactKey::Succession {
                    said = Some(match &fact {
                        Some(Fact::Succession(succession)) => Some((**succession).clone()),
                        _ => None,
                    });
                }
                match fact {
                    Some(fact) => known.insert(key, fact),
                    None => known.remove(&key),
                };
            }
        }
        if let Some(said) = said {
            self.note_succession(said);
        }
        Ok(())
    }

    /// Has the programs of detached actors here, as far as the head gives them in time.
    fn fetch_programs(&self, head: &HeadClient) {
        let needed: BTreeMap<String, Executable> = {
            let known = self.known.lock();
            let detached = known.values().filter_map(|fact| match fact {
                Fact::Actor(actor) if actor.spec.detached => Some(actor.spec.job),
                _ => None,
            });
            let jobs: BTreeSet<_> = detached.collect();
            let programs = jobs.into_iter().filter_map(|job| match known.get(&FactKey::Job(job)) {
                Some(Fact::Job(spec, _)) => Some(spec.executable.clone()),
                _ => None,
            });
            programs.filter(Programs::can_keep).map(|program| (program.hash.clone(), program)).collect()
        };
        self.programs.keep_only(&needed.keys().cloned().collect());
        let missing: Vec<Executable> = {
            let mut lacks = self.lacks.lock();
            lacks.retain(|hash, _| needed.contains_key(hash));
            let is_due = |hash: &String| lacks.get(hash).is_none_or(|tried| tried.elapsed() > PROGRAM_PAUSE);
            let missing = needed.into_values().filter(|program| !self.programs.has(&program.hash));
            missing.filter(|program| is_due(&program.hash)).collect()
        };
        for program in missing {
            let (programs, from, lacks) = (self.programs.clone(), Giver::Head(head.clone()), self.lacks.clone());
            // It ends with the connection.
            tokio::spawn(async move {
                let Err(error) = programs.keep(&program, Some(from)).await else {
                    lacks.lock().remove(&program.hash);
                    return;
                };
                if lacks.lock().insert(program.hash.clone(), Instant::now()).is_none() {
                    tracing::warn!(%error, "the standby lacks a program; nodes that have it can start its actors");
                }
            });
        }
    }

    /// Goes on as the head.
    async fn lead(self: &Arc<Self>, epoch: Epoch) -> Result<HeadHandle, Error> {
        tracing::warn!("the standby takes over");
        let before = self.way.address();
        self.keeps_its_file().await?;
        // The file is opened again as that of a head.
        self.close_journal().await;
        let (journal, mut remembered) = Journal::open(&self.file, self.cluster)?;
        if remembered.cluster != Some(self.cluster) {
            return Err(Error::Failed {
                what: format!("taking over with {}", self.file.display()),
                why: "it was removed or replaced, and what the last head wrote is lost here".into(),
            });
        }
        remembered.epoch = remembered.epoch.max(epoch);
        // The last head may lead until it notices that nobody supports it, and nodes that only it reaches go on as long after that.
        let more = limits().fence;
        let shell = Head::go_on(&self.file, journal, remembered, self.cluster, more).await?;
        let _ = self.leads.set(shell.clone());
        shell.vital(
            "telling the last head",
            shell.clone().tell_last_head(self.hello(ProcessId::random()), self.token.clone(), before),
        );
        Ok(HeadHandle::of(self.address.clone(), self.cluster, shell))
    }
}

fn has_ended() -> Error {
    Error::Failed { what: "standing by".into(), why: "it has ended".into() }
}

/// A copy of everything that comes over one connection.
#[derive(Default)]
struct Copying {
    /// What has come of it, until it is complete.
    parts: Option<Changes>,
    /// Whether it is.
    is_complete: bool,
}

impl Copying {
    /// What is to be written with this, and whether it replaces all that is there.
    fn take_in(&mut self, facts: Facts) -> Option<(Changes, bool)> {
        let Facts { begins, is_complete, changes, .. } = facts;
        let bytes = |payload: Payload| payload.0.to_vec();
        let changes = changes.into_iter().map(|(key, fact)| (bytes(key), fact.map(bytes)));
        if begins {
            self.parts = Some(Changes::new());
        }
        match self.parts.take() {
            None => Some((changes.collect(), false)),
            Some(mut copy) => {
                copy.extend(changes);
                if is_complete {
                    self.is_complete = true;
                    return Some((copy, true));
                }
                self.parts = Some(copy);
                None
            }
        }
    }
}

/// What a head that is started again asks.
#[derive(Clone)]
struct Asked(Arc<Standby>);

impl wingbeat_net::services::Standby for Asked {
    async fn may_lead(self, _: Context, epoch: Epoch) -> bool {
        let standby = self.0;
        loop {
            let decided = standby.deciding.lock().lets_lead(standby.now(), epoch);
            match decided {
                None => tokio::time::sleep(PAUSE).await,
                Some(false) => return false,
                Some(true) => break,
            }
        }
        // Also in its next life.
        let journal = standby.journal.lock().clone();
        match journal {
            Some(journal) if journal.intend(vec![Fact::NoSuccession, Fact::NoEarlierSuccession]).await.is_ok() => {
                standby.known.lock().remove(&FactKey::Succession);
                standby.is_current.send_replace(false);
                true
            }
            _ => std::future::pending().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_complete_with_its_last_part_and_not_before_it_has_begun() {
        let facts = |position, begins, is_complete| Facts { position, begins, is_complete, changes: Vec::new() };
        let mut copying = Copying::default();
        assert!(
            copying.take_in(facts(0, false, true)).is_some() && !copying.is_complete,
            "the head had nothing to say"
        );
        assert!(copying.take_in(facts(1, true, false)).is_none() && !copying.is_complete);
        assert!(matches!(copying.take_in(facts(2, false, true)), Some((_, true))) && copying.is_complete);
        assert!(matches!(copying.take_in(facts(3, false, true)), Some((_, false))) && copying.is_complete);
    }

    #[tokio::test]
    async fn what_a_head_has_led_with_is_kept_when_it_follows_another_one() {
        let dir = tempfile::tempdir().unwrap();
        let [led, older] = ["led", "older"].map(|name| dir.path().join(name));
        let (token, cluster, patience) = (Token::random(), ClusterId(7), wingbeat_net::patience::Patience::USUAL);
        drop(Journal::open(&older, cluster).unwrap());
        std::fs::copy(&older, &led).unwrap();
        let quota = Fact::Quota("team".into(), wingbeat_core::ResourceSet::default());
        Journal::open(&led, cluster).unwrap().0.intend(vec![quota]).await.unwrap();
        let config =
            || HeadConfig { tcp: Some("127.0.0.1:0".parse().unwrap()), token: token.clone(), cluster, patience };
        let head = Head::start_with_journal(config(), &older, crate::FormerStandby::IsAsked).await.unwrap();
        let at = head.address().tcp.unwrap().to_string();
        // Its number would be that of the head there, or later, if it had begun after that.
        let standby = Head::stand_by(config(), &at, &led).await.unwrap();
        standby.is_current().await;
        drop((standby, head));
        let (_, kept) = Journal::open(&dir.path().join("led.led"), cluster).unwrap();
        assert!(matches!(&kept.facts[..], [Fact::Quota(name, _)] if name == "team"), "{:?}", kept.facts);
    }

    #[tokio::test]
    async fn a_standby_whose_files_were_removed_does_not_take_over() {
        let dir = tempfile::tempdir().unwrap();
        let [of_head, copy] = ["head", "copy/journal"].map(|name| dir.path().join(name));
        std::fs::create_dir(copy.parent().unwrap()).unwrap();
        let (token, cluster, patience) = (Token::random(), ClusterId(7), wingbeat_net::patience::Patience::USUAL);
        let config =
            || HeadConfig { tcp: Some("127.0.0.1:0".parse().unwrap()), token: token.clone(), cluster, patience };
        let head = Head::start_with_journal(config(), &of_head, crate::FormerStandby::IsAsked).await.unwrap();
        let at = head.address().tcp.unwrap().to_string();
        let mut standby = Head::stand_by(config(), &at, &copy).await.unwrap();
        standby.is_current().await;
        std::fs::remove_dir_all(copy.parent().unwrap()).unwrap();
        std::fs::create_dir(copy.parent().unwrap()).unwrap();
        head.leave().await;
        let Outcome::Failed(why) = standby.outcome().await else { panic!("it leads, and knows nothing") };
        assert!(why.to_string().contains("was removed or replaced"), "{why}");
        assert!(!copy.exists(), "no new journal was made");
    }

    #[tokio::test]
    async fn a_new_standby_that_is_refused_removes_its_file_and_leaves_the_link_to_it() {
        let dir = tempfile::tempdir().unwrap();
        let [of_head, first, file, link] = ["head", "first", "elsewhere", "link"].map(|name| dir.path().join(name));
        std::os::unix::fs::symlink("elsewhere", &link).unwrap();
        let (token, cluster, patience) = (Token::random(), ClusterId(7), wingbeat_net::patience::Patience::USUAL);
        let config =
            || HeadConfig { tcp: Some("127.0.0.1:0".parse().unwrap()), token: token.clone(), cluster, patience };
        let head = Head::start_with_journal(config(), &of_head, crate::FormerStandby::IsAsked).await.unwrap();
        let at = head.address().tcp.unwrap().to_string();
        let first = Head::stand_by(config(), &at, &first).await.unwrap();
        first.is_current().await;
        let outcome = Head::stand_by(config(), &at, &link).await.unwrap().outcome().await;
        assert!(matches!(outcome, Outcome::Failed(Error::Refused { .. })));
        assert!(link.is_symlink() && !file.exists());
        assert!(!files::beside(&file, "-count").exists());
    }

    #[test]
    fn a_standby_of_a_head_that_other_machines_reach_does_not_listen_where_they_do_not() {
        let of = |listens: &str, ip: &str| can_be_reached(Some(listens.parse().unwrap()), Some(ip.parse().unwrap()));
        let refused = of("127.0.0.1:6420", "10.0.0.2").unwrap_err().to_string();
        assert!(refused.contains("--host 10.0.0.2"), "{refused}");
        assert!(of("127.0.0.1:6420", "127.0.0.1").is_ok(), "all on one machine");
        assert!(of("0.0.0.0:6420", "10.0.0.2").is_ok() && of("10.0.0.2:6420", "10.0.0.2").is_ok());
        assert!(can_be_reached(Some("127.0.0.1:6420".parse().unwrap()), None).is_ok());
    }
}
