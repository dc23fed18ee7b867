//! How a standby starts: it finds the head, and decides with the file as what it goes on.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use tokio::sync::{oneshot, watch};
use wingbeat_core::error::Error;
use wingbeat_core::spec::Address;
use wingbeat_core::{ClusterId, ProcessId};
use wingbeat_net::address::{Listener, Stream};
use wingbeat_net::handshake::{Epoch, Hello, Purpose, Role};
use wingbeat_net::limits::{self, limits};
use wingbeat_net::messages::Succession;
use wingbeat_net::way::Way;
use wingbeat_net::{Token, address, panics, seek};

use super::{Outcome, Standby, StandbyHandle};
use crate::journal::Journal;
use crate::programs::Programs;
use crate::service::Durable as _;
use crate::state::Fact;
use crate::succession::standing_by::StandingBy;
use crate::succession::{Clock, millis};
use crate::{FormerStandby, Head, HeadConfig, journal};

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

/// What a file says of the process that wrote it last.
enum Past {
    /// Nothing: it is new.
    New,
    /// It followed this head.
    Followed(Address),
    /// It led.
    Led,
}

impl Past {
    fn of(facts: &[Fact]) -> Past {
        let head = facts.iter().find_map(|fact| match fact {
            Fact::Follows(head) => Some((**head).clone()),
            _ => None,
        });
        match head {
            Some(head) => Past::Followed(head),
            None if facts.is_empty() => Past::New,
            None => Past::Led,
        }
    }
}

/// As what a standby starts.
#[derive(Debug, PartialEq)]
enum StandbyRole<H> {
    /// It follows the head that answers.
    Follows(H),
    /// It has taken over before, and the last head is not back as a later one: it leads.
    LeadsAgain,
    /// It stands by for this head, which does not answer. Nodes know whether its copy is current.
    Awaits(Address),
}

/// Decides by the file, by the latest epoch in it, and by the head that answers, with its epoch.
fn role<H>(past: Past, last: Option<Epoch>, found: Result<(H, Option<Epoch>), Error>) -> Result<StandbyRole<H>, Error> {
    match (past, found) {
        (Past::Led, Ok((_, epoch))) if last > epoch => Ok(StandbyRole::LeadsAgain),
        // Who refuses is there.
        (Past::Led, Err(error @ Error::Refused { .. })) => Err(error),
        (Past::Led, Err(_)) => Ok(StandbyRole::LeadsAgain),
        (_, Ok((head, _))) => Ok(StandbyRole::Follows(head)),
        (Past::Followed(head), Err(_)) => Ok(StandbyRole::Awaits(head)),
        (Past::New, Err(error)) => Err(error),
    }
}

/// See [`Head::stand_by`].
pub(crate) async fn start(config: HeadConfig, head: &str, file: &Path) -> Result<StandbyHandle, Error> {
    let hello = Hello { role: Role::Head, purpose: Purpose::Control, ..Hello::of_tool() };
    let found = seek::dial_head(head, "the head", &config.token, hello).await;
    let is_new_file = !file.exists();
    if is_new_file {
        // No file is made for a head that is not there.
        found.as_ref().map_err(Clone::clone)?;
    }
    let new = found.as_ref().map_or(config.cluster, |(_, welcome)| welcome.cluster);
    let (journal, remembered) = Journal::open(file, new)?;
    let succession = remembered.facts.iter().find_map(|fact| match fact {
        Fact::Succession(succession) => Some((**succession).clone()),
        _ => None,
    });
    let last = succession.as_ref().map(|succession| succession.generation.epoch);
    let past = Past::of(&remembered.facts);
    let has_led = matches!(past, Past::Led);
    let found = found.map(|(stream, welcome)| {
        let epoch = welcome.epoch;
        ((stream, welcome), epoch)
    });
    let (head, epoch, ip) = match role(past, last, found)? {
        StandbyRole::Follows((stream, welcome)) => {
            is_of_cluster(file, remembered.cluster, welcome.cluster)?;
            if let Some(patience) = welcome.patience {
                limits::take(patience);
            }
            let mut head = welcome.address;
            if let Stream::Tcp(stream) = &stream
                && let Ok(peer) = stream.peer_addr()
            {
                head.tcp = Some(peer);
            }
            (head, welcome.epoch, address::local_ip(&stream))
        }
        StandbyRole::LeadsAgain => {
            drop(journal);
            let leads = lead_again(config, file).await?;
            tracing::warn!("there is no later head at {head}: this one leads again, with its own journal");
            return Ok(leads);
        }
        StandbyRole::Awaits(head) => (head, last, own_ip(succession.as_ref(), config.tcp)),
    };
    let HeadConfig { tcp, token, .. } = config;
    let cluster = remembered.cluster.unwrap_or(new);
    let facts = remembered.facts;
    begin(Begins { tcp, token, cluster, head, epoch, ip, file, is_new_file, has_led, journal, facts, succession }).await
}

fn is_of_cluster(file: &Path, own: Option<ClusterId>, of_head: ClusterId) -> Result<(), Error> {
    match own {
        Some(own) if own != of_head => Err(Error::InvalidArgument {
            what: format!(
                "{} is the journal of {own}, and the head there is of {of_head}; name another file",
                file.display()
            ),
        }),
        _ => Ok(()),
    }
}

/// Starts a head with the file of a standby that has led.
async fn lead_again(config: HeadConfig, file: &Path) -> Result<StandbyHandle, Error> {
    let head = Head::start_with_journal(config, file, FormerStandby::IsAsked).await?;
    let address = head.address().clone();
    let (outcome, told) = oneshot::channel();
    let _ = outcome.send(Outcome::Leads(head));
    let (_stop, _) = watch::channel(());
    let (has_begun, is_current) = (watch::channel(true).1, watch::channel(true).1);
    Ok(StandbyHandle { address, head: None, outcome: told, has_begun, is_current, _stop })
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
    /// Whether the file is that of a head.
    has_led: bool,
    journal: Journal,
    facts: Vec<Fact>,
    succession: Option<Succession>,
}

async fn begin(mut with: Begins<'_>) -> Result<StandbyHandle, Error> {
    can_be_reached(with.tcp, with.ip)?;
    let listener = Listener::bind(ProcessId(with.cluster.0), with.tcp).await?;
    let mut address = listener.address().clone();
    if let (Some(tcp), Some(ip)) = (&mut address.tcp, with.ip)
        && tcp.ip().is_unspecified()
    {
        tcp.set_ip(ip);
    }
    if with.has_led {
        // The head that it follows may have begun with an older copy, which is about to replace what this file alone holds.
        drop(with.journal);
        let aside = journal::keep_aside(with.file)?;
        tracing::info!("what this journal holds, with which it has led, is kept as {}", aside.display());
        with.journal = Journal::open(with.file, with.cluster)?.0;
    }
    let head = with.head.clone();
    with.journal.intend(vec![Fact::Follows(Box::new(head.clone()))]).await?;
    let standby = Arc::new(Standby::new(with, address.clone())?);
    let (has_begun, is_current) = (standby.has_begun.subscribe(), standby.is_current.subscribe());
    let (stop, stopped) = watch::channel(());
    let (outcome, told) = oneshot::channel();
    tokio::spawn(async move {
        // Before it leads, whoever waits for its outcome is told.
        if let Err(said) = panics::caught(standby.clone().take_part(listener, stopped, outcome)).await
            && let Some(shell) = standby.leads.get()
        {
            shell.is_defect("taking connections", &said);
        }
    });
    Ok(StandbyHandle { address, head: Some(head), outcome: told, has_begun, is_current, _stop: stop })
}

impl Standby {
    fn new(with: Begins<'_>, address: Address) -> Result<Standby, Error> {
        let Begins { token, cluster, head, epoch, file, is_new_file, journal, facts, succession, .. } = with;
        let way = Way::new(head);
        way.found(epoch);
        let standby = Standby {
            token,
            cluster,
            file: file.to_owned(),
            address,
            way,
            deciding: Mutex::new(StandingBy::new(0, millis(limits().takeover), None)),
            journal: Mutex::new(Some(Arc::new(journal))),
            programs: Arc::new(Programs::beside(file)?),
            known: Mutex::new(facts.into_iter().map(|fact| (fact.key(), fact)).collect()),
            is_new_file,
            has_begun: watch::Sender::new(false),
            is_current: watch::Sender::new(false),
            cannot_write: Mutex::default(),
            lacks: Arc::default(),
            clock: Clock::start(),
            leads: OnceLock::new(),
        };
        standby.note_succession(succession);
        Ok(standby)
    }

    /// Listens and stands by, until the handle is dropped or the head ends that it has become.
    async fn take_part(
        self: Arc<Self>,
        listener: Listener,
        mut stopped: watch::Receiver<()>,
        outcome: oneshot::Sender<Outcome>,
    ) {
        let (listening, serving) = (self.clone(), self.clone());
        let accept = move |stream: Stream, hello: Hello| serving.accept(stream, hello);
        let serve = listener.serve_with(self.token.clone(), move || listening.welcome(), accept);
        let ended = async {
            let _ = stopped.changed().await;
            // When it leads, it listens as long as that.
            if let Some(shell) = self.leads.get() {
                shell.until_stopped(std::future::pending()).await;
            }
        };
        tokio::select! {
            () = serve => {}
            () = ended => {}
            () = async {
                let ended = self.clone().stand_by().await;
                if matches!(ended, Outcome::Failed(_)) && self.is_new_file && !*self.has_begun.borrow() {
                    self.remove_file().await;
                }
                let _ = outcome.send(ended);
                std::future::pending().await
            } => {}
        }
    }

    fn accept(self: &Arc<Self>, stream: Stream, hello: Hello) {
        match self.leads.get() {
            Some(shell) => {
                let shell = shell.clone();
                shell.clone().vital("serving a connection", async move { shell.serve_connection(stream, hello).await });
            }
            None => {
                tokio::spawn(self.clone().answer(stream, hello));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Outcome;
    use super::*;
    use crate::files;
    use crate::journal::Journal;

    /// Of heads and standbys of one cluster.
    fn configs() -> impl Fn() -> HeadConfig {
        let token = Token::random();
        let (cluster, patience) = (ClusterId(7), wingbeat_net::patience::Patience::USUAL);
        move || HeadConfig { tcp: Some("127.0.0.1:0".parse().unwrap()), token: token.clone(), cluster, patience }
    }

    #[test]
    fn one_that_has_led_follows_a_later_head_alone_and_one_that_followed_awaits_its_head() {
        let head = || Address {
            process: ProcessId(1),
            machine: wingbeat_core::spec::MachineId(1),
            unix: String::new(),
            tcp: None,
            steward: None,
        };
        let gone = || Err(super::super::has_ended());
        let found = |epoch| Ok(((), Some(Epoch(epoch))));
        let last = Some(Epoch(5));
        assert_eq!(role(Past::Led, last, found(4)).unwrap(), StandbyRole::LeadsAgain);
        assert_eq!(role::<()>(Past::Led, last, gone()).unwrap(), StandbyRole::LeadsAgain);
        assert_eq!(role(Past::Led, last, found(5)).unwrap(), StandbyRole::Follows(()));
        let refused = || Err(Error::Refused { who: "the head".into(), why: "another token".into() });
        assert!(role::<()>(Past::Led, last, refused()).is_err(), "a head that refuses is there");
        let (what, address, why) = ("the head".into(), String::new(), "it ended just now".into());
        let ended = Err(Error::Unreachable { what, address, why });
        assert_eq!(role::<()>(Past::Led, last, ended).unwrap(), StandbyRole::LeadsAgain, "nobody has refused anything");
        assert_eq!(role(Past::Followed(head()), last, found(4)).unwrap(), StandbyRole::Follows(()));
        assert_eq!(role::<()>(Past::Followed(head()), last, gone()).unwrap(), StandbyRole::Awaits(head()));
        assert_eq!(role(Past::New, None, found(1)).unwrap(), StandbyRole::Follows(()));
        assert!(role::<()>(Past::New, None, gone()).is_err());
    }

    #[tokio::test]
    async fn what_a_head_has_led_with_is_kept_when_it_follows_another_one() {
        let dir = tempfile::tempdir().unwrap();
        let [led, older] = ["led", "older"].map(|name| dir.path().join(name));
        let (config, cluster) = (configs(), ClusterId(7));
        drop(Journal::open(&older, cluster).unwrap());
        std::fs::copy(&older, &led).unwrap();
        let quota = Fact::Quota("team".into(), wingbeat_core::ResourceSet::default());
        Journal::open(&led, cluster).unwrap().0.intend(vec![quota]).await.unwrap();
        let head = Head::start_with_journal(config(), &older, crate::FormerStandby::IsAsked).await.unwrap();
        let at = head.address().tcp.unwrap().to_string();
        // However often a supervisor tries, as where its port is taken, what led is kept once.
        let taken = HeadConfig { tcp: head.address().tcp, ..config() };
        assert!(Head::stand_by(taken, &at, &led).await.is_err());
        assert!(!dir.path().join("led.led").exists());
        // Its number would be that of the head there, or later, if it had begun after that.
        let standby = Head::stand_by(config(), &at, &led).await.unwrap();
        standby.is_current().await;
        drop((standby, head));
        let (_, kept) = Journal::open(&dir.path().join("led.led"), cluster).unwrap();
        assert!(matches!(&kept.facts[..], [Fact::Quota(name, _)] if name == "team"), "{:?}", kept.facts);
        assert_eq!(journal::keep_aside(&led).unwrap(), dir.path().join("led.led-2"), "what was kept stays");
    }

    #[tokio::test]
    async fn a_standby_whose_files_were_removed_does_not_take_over() {
        let dir = tempfile::tempdir().unwrap();
        let [of_head, copy] = ["head", "copy/journal"].map(|name| dir.path().join(name));
        std::fs::create_dir(copy.parent().unwrap()).unwrap();
        let config = configs();
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
        let config = configs();
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
