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

#[cfg(test)]
mod tests {
    use super::super::Outcome;
    use super::*;
    use crate::files;
    use crate::journal::Journal;

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
