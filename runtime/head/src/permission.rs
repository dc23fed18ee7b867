//! Whether a head that is started with a file may lead: a standby that is named in it may have taken over, and where the file is an older
//! copy, some other head may lead.

use std::collections::BTreeMap;
use std::time::Duration;

use parking_lot::Mutex;
use wingbeat_core::error::Error;
use wingbeat_core::spec::{Address, MachineId};
use wingbeat_core::{ClusterId, NodeId, ProcessId};
use wingbeat_net::Token;
use wingbeat_net::address::{self, DialError, Stream};
use wingbeat_net::handshake::{Epoch, Hello, Purpose, Role, Welcome, is_of_another_build};
use wingbeat_net::limits::limits;
use wingbeat_net::messages::{Generation, Leadership, Leave, Succession, Support};
use wingbeat_net::mux::{self, Waiting};
use wingbeat_net::services::{
    HeadRequest, HeadResponse, NodeClient, NodeRequest, NodeResponse, ProcessRequest, ProcessResponse, StandbyClient,
    StandbyRequest, StandbyResponse,
};

use crate::service::Shell;
use crate::state::Fact;
use crate::succession::blocking;

/// How long it may take until the standby or enough nodes have answered: longer than a standby takes over.
const LIMIT: Duration = Duration::from_secs(15);
/// How long nodes may take to say whether they hear a head. One that does not answer in that time is not waited for: a head that was
/// started again is to go on at once.
const ANSWER: Duration = Duration::from_secs(1);
/// So many nodes are asked whether they hear a head.
const ASKED: usize = 64;
const NODES_HEAR: &str = "nodes that are in the journal hear, or have just heard,";
/// The pause between two attempts.
const PAUSE: Duration = Duration::from_millis(250);

/// Who asks.
pub(crate) struct Asker {
    pub token: Token,
    pub cluster: ClusterId,
    /// With which it would lead.
    pub epoch: Epoch,
}

/// What somebody says.
#[derive(PartialEq, Eq, Debug)]
enum Answer {
    MayLead,
    /// The standby leads.
    Superseded,
    /// The standby follows another head: here.
    Another(Address),
}

impl Asker {
    fn hello(&self) -> Hello {
        let hello =
            Hello { role: Role::Head, purpose: Purpose::Control, cluster: Some(self.cluster), ..Hello::of_tool() };
        Hello { address: Address { process: ProcessId(self.cluster.0), ..hello.address.clone() }, ..hello }
    }

    /// Waits until it is certain that nobody else leads, by any of the successions that the standby may use.
    ///
    /// # Errors
    /// Somebody does, or it cannot be found out.
    pub(crate) async fn may_lead(&self, open: &[Succession]) -> Result<(), Error> {
        // Both name the same one.
        let Some(standby) = open.iter().find_map(|by| by.standby.as_ref()) else { return Ok(()) };
        // At once: a machine that is gone is silent for longer than nodes wait for the next head.
        let heard = Mutex::new(None);
        let asking = async {
            tokio::select! {
                said = until_said(|| self.ask_standby(standby)) => said,
                said = until_said(|| self.ask_nodes(open, &heard)) => said,
            }
        };
        match tokio::time::timeout(LIMIT, asking).await {
            Ok(Answer::MayLead) => Ok(()),
            Ok(Answer::Superseded) => Err(superseded(standby)),
            Ok(Answer::Another(head)) => Err(another(&head, "the standby that the journal names follows")),
            Err(_) => Err(match heard.lock().take() {
                Some(head) => another(&head, NODES_HEAR),
                None => refused(format!(
                    "the journal names a standby at {}, which may have taken over, and neither that nor enough nodes answer. Start the \
                     standby again, or this head with --without-standby if it is certain that no other head of the cluster runs",
                    shown(standby)
                )),
            }),
        }
    }

    /// Whether the standby answers nothing: for whoever is certain that it is gone.
    ///
    /// # Errors
    /// It leads, or may at any moment.
    pub(crate) async fn is_alone(&self, open: &[Succession]) -> Result<(), Error> {
        let Some(standby) = open.iter().find_map(|by| by.standby.as_ref()) else { return Ok(()) };
        // No question that anybody would remember: it may be a head with a copy of the journal.
        match tokio::time::timeout(limits().takeover, self.dial_standby(standby)).await {
            Ok(Ok((_, welcome))) if welcome.stands_by.is_none() => Err(superseded(standby)),
            Ok(Ok(_)) => Err(refused(format!(
                "its standby at {} runs, and may take over. Start this head without --without-standby, so that it asks for leave, or stop \
                 the standby first",
                shown(standby)
            ))),
            // One that was upgraded may lead. With another token, or of another cluster, it is not the standby any more.
            Ok(Err(DialError::Failed(error))) if is_of_another_build(&error) => Err(refused(format!(
                "what is at its standby's address, {}, is of another build and may lead: {error}. Start this head with that build, or stop \
                 what is there first",
                shown(standby)
            ))),
            _ => Ok(()),
        }
    }

    /// Waits until none of the nodes in the file is connected to a head. One that was just lost may be heard for a while.
    ///
    /// # Errors
    /// Some are connected to the standby that is named in the file; or some are to another, and stay so: this file is a copy from before
    /// that head, and whoever came over from it would find nothing of what it has acknowledged.
    pub(crate) async fn nobody_leads(&self, facts: &[Fact], open: &[Succession]) -> Result<(), Error> {
        let nodes = nodes_among(facts);
        let until = tokio::time::Instant::now() + limits().silence * 2;
        while let Some(head) = self.head_that_is_heard(&nodes).await {
            if let Some(standby) =
                open.iter().find_map(|by| by.standby.as_ref()).filter(|standby| is_at(standby, &head))
            {
                return Err(superseded(standby));
            }
            if tokio::time::Instant::now() > until {
                return Err(another(&head, NODES_HEAR));
            }
            tokio::time::sleep(PAUSE).await;
        }
        Ok(())
    }

    /// Ends `head`, which leads already, when one of these nodes hears another, and none has come: all may have been between two heads when
    /// it was started, and its file may be a copy.
    pub(crate) async fn ends_beside_another(&self, head: &Shell, nodes: &[Address]) {
        while head.is_without_those_it_expects() {
            tokio::time::sleep(limits().silence).await;
            if let Some(other) = self.head_that_is_heard(nodes).await
                && head.is_without_those_it_expects()
            {
                return head.ends_for(another(&other, NODES_HEAR).to_string());
            }
        }
    }

    async fn head_that_is_heard(&self, nodes: &[Address]) -> Option<Address> {
        let some = nodes.iter().step_by(nodes.len().div_ceil(ASKED).max(1));
        let asking = some.map(async |node| {
            match tokio::time::timeout(ANSWER, self.ask_node(node, before_all_others())).await.ok()?? {
                Support::Joined { epoch, heard_at } => heard_at.filter(|_| epoch != self.epoch),
                Support::Given | Support::Promised(_) => None,
            }
        });
        futures::future::join_all(asking).await.into_iter().flatten().next()
    }

    async fn ask_standby(&self, standby: &Address) -> Option<Answer> {
        let dialled = tokio::time::timeout(limits().takeover, self.dial_standby(standby)).await.ok()?;
        let (stream, welcome) = dialled.ok()?;
        if welcome.stands_by.is_none() {
            return Some(Answer::Superseded);
        }
        let (connection, client, _) =
            mux::connect::<StandbyRequest, StandbyResponse, HeadRequest, HeadResponse>(stream, Waiting::Asleep);
        let _closes = connection.closes();
        let client = StandbyClient::new(mux::client_config(), client).spawn();
        match client.may_lead(mux::within(LIMIT), self.epoch).await.ok()? {
            Leave::Given => Some(Answer::MayLead),
            Leave::Superseded => Some(Answer::Superseded),
            Leave::HearsHead(head) => Some(Answer::Another(head)),
        }
    }

    async fn dial_standby(&self, standby: &Address) -> Result<(Stream, Welcome), DialError> {
        // Its next life has another socket, and the same port.
        let far = Address { machine: MachineId(0), unix: String::new(), ..standby.clone() };
        match address::dial_and_learn(standby, "the standby", &self.token, self.hello()).await {
            Err(DialError::Gone(_)) if far.tcp.is_some() => {
                address::dial_and_learn(&far, "the standby", &self.token, self.hello()).await
            }
            dialled => dialled,
        }
    }

    /// By each succession so many nodes that the others were no majority for the standby, and from now on are none.
    /// Who of them hears another head says which, and nobody is asked then.
    async fn ask_nodes(&self, open: &[Succession], heard: &Mutex<Option<Address>>) -> Option<Answer> {
        // As the head that the standby followed: whoever has joined the standby since, or promised to, does not support that.
        let epoch = open.iter().map(|by| by.generation.epoch).max()?;
        let generation = Generation { epoch, count: u64::MAX };
        let voters: BTreeMap<NodeId, &Address> =
            open.iter().flat_map(|by| by.voters.iter().map(|(node, address)| (*node, address))).collect();
        let leads = Leadership { generation, is_revoked: true, standby: None };
        // Before any node forgets the standby for this head: where only one of them hears another, this has a copy of the file.
        // One whose machine is gone is waited for in each attempt.
        let limit = limits().takeover / 2;
        let first = self.ask_all(&before_all_others(), voters.into_iter().collect(), limit).await;
        let standbys: Vec<&Address> = open.iter().filter_map(|by| by.standby.as_ref()).collect();
        let is_standby = |head: &Address| standbys.iter().any(|standby| is_at(standby, head));
        let other = first.iter().find_map(|(.., said)| match said {
            Some(Support::Joined { heard_at: Some(head), .. }) if !is_standby(head) => Some(head.clone()),
            _ => None,
        });
        let is_heard = other.is_some();
        *heard.lock() = other;
        if is_heard {
            return None;
        }
        let those = first.into_iter().filter_map(|(node, at, said)| said.map(|_| (node, at))).collect();
        let answers = self.ask_all(&leads, those, limit).await;
        let answers = answers.into_iter().map(|(node, _, said)| (node, said)).collect();
        said_by_nodes(open, &answers)
    }

    async fn ask_all<'a>(
        &self,
        leads: &Leadership,
        asked: Vec<(NodeId, &'a Address)>,
        limit: Duration,
    ) -> Vec<(NodeId, &'a Address, Option<Support>)> {
        let asking = asked.into_iter().map(async |(node, at)| {
            let said = tokio::time::timeout(limit, self.ask_node(at, leads.clone())).await;
            (node, at, said.ok().flatten())
        });
        futures::future::join_all(asking).await
    }

    async fn ask_node(&self, node: &Address, leads: Leadership) -> Option<Support> {
        let dialled = address::dial(node, "a node", &self.token, self.hello());
        let stream = tokio::time::timeout(limits().takeover, dialled).await.ok()?.ok()?;
        let (connection, client, _) =
            mux::connect::<NodeRequest, NodeResponse, ProcessRequest, ProcessResponse>(stream, Waiting::Asleep);
        let client = NodeClient::new(mux::client_config(), client).spawn();
        let _closes = connection.closes();
        client.support(mux::within(limits().takeover), leads).await.ok()
    }
}

/// As a head before all others: each node that has joined any says so.
fn before_all_others() -> Leadership {
    Leadership { generation: Generation { epoch: Epoch(0), count: 0 }, is_revoked: false, standby: None }
}

fn another(head: &Address, who_hears: &str) -> Error {
    let at = shown(head);
    refused(format!(
        "{who_hears} another head of it at {at}. Stand by for that one: `wingbeat head --standby-of {at} --journal FILE`; or name the \
         journal that it writes; or stop it first"
    ))
}

fn refused(why: String) -> Error {
    Error::Refused { who: "the cluster".into(), why }
}

fn shown(standby: &Address) -> String {
    standby.tcp.map_or_else(|| standby.unix.clone(), |tcp| tcp.to_string())
}

/// Whether that is where the other is. Its next life has another socket, and the same port.
fn is_at(one: &Address, other: &Address) -> bool {
    one.tcp.is_some() && one.tcp == other.tcp || one.machine == other.machine && one.unix == other.unix
}

fn superseded(standby: &Address) -> Error {
    let at = shown(standby);
    refused(format!(
        "its standby at {at} has taken over, and leads it; start this head as its standby: `wingbeat head --standby-of {at} \
         --journal FILE`"
    ))
}

/// Where the nodes in a file are.
pub(crate) fn nodes_among(facts: &[Fact]) -> Vec<Address> {
    let nodes = facts.iter().filter_map(|fact| match fact {
        Fact::Node(node, _) => Some(node.address.clone()),
        _ => None,
    });
    nodes.collect()
}

/// The successions in a file that somebody may use.
pub(crate) fn open_among(facts: &[Fact]) -> Vec<Succession> {
    let named = facts.iter().filter_map(|fact| match fact {
        Fact::Succession(succession) | Fact::EarlierSuccession(succession) => Some((**succession).clone()),
        _ => None,
    });
    named.filter(|succession| succession.standby.is_some()).collect()
}

/// What follows from the answers of nodes; none while they are too few.
fn said_by_nodes(open: &[Succession], answers: &BTreeMap<NodeId, Option<Support>>) -> Option<Answer> {
    if answers.values().flatten().any(|answer| matches!(answer, Support::Joined { .. })) {
        return Some(Answer::Superseded);
    }
    let is_given = |node: &&NodeId| answers.get(*node) == Some(&Some(Support::Given));
    let is_enough = |by: &Succession| {
        !by.voters.is_empty() && by.voters.keys().filter(is_given).count() >= blocking(by.voters.len())
    };
    open.iter().all(is_enough).then_some(Answer::MayLead)
}

/// Asks again and again until something is said.
async fn until_said<F: Future<Output = Option<Answer>>>(ask: impl Fn() -> F) -> Answer {
    loop {
        if let Some(said) = ask().await {
            return said;
        }
        tokio::time::sleep(PAUSE).await;
    }
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;
    use std::net::TcpListener;

    use wingbeat_net::patience::Patience;

    use super::*;
    use crate::journal::Journal;
    use crate::service::Durable as _;
    use crate::{FormerStandby, Head, HeadConfig};

    /// Somebody on another machine, who would be heard here.
    fn far() -> (TcpListener, Address) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let tcp = Some(listener.local_addr().unwrap());
        let address = Address { process: ProcessId(7), machine: MachineId(0), unix: String::new(), tcp, steward: None };
        (listener, address)
    }

    #[test]
    fn so_many_nodes_let_lead_that_by_no_open_succession_there_is_a_majority_for_the_standby() {
        let by = |count, voters: &[u64]| {
            let (_, address) = far();
            let voters = voters.iter().map(|node| (NodeId(*node), address.clone())).collect();
            Succession { generation: Generation { epoch: Epoch(1), count }, standby: Some(address), voters }
        };
        let said = |open: &[Succession], given: &[u64]| {
            let answers = given.iter().map(|node| (NodeId(*node), Some(Support::Given)));
            said_by_nodes(open, &answers.chain([(NodeId(9), None)]).collect())
        };
        let (earlier, latest) = (by(1, &[1]), by(2, &[1, 2, 3]));
        assert_eq!(said(std::slice::from_ref(&latest), &[2, 3]), Some(Answer::MayLead));
        let open = [latest, earlier];
        assert_eq!(said(&open, &[2, 3]), None, "the standby may have only the one before, by which one node elects it");
        assert_eq!(said(&open, &[1]), None);
        assert_eq!(said(&open, &[1, 3]), Some(Answer::MayLead));
        assert_eq!(said(&[by(1, &[])], &[]), None, "without nodes the standby alone knows");
        let joined =
            [(NodeId(1), Some(Support::Joined { epoch: Epoch(2), heard_at: None })), (NodeId(2), Some(Support::Given))]
                .into();
        assert_eq!(said_by_nodes(&[by(1, &[1, 2])], &joined), Some(Answer::Superseded));
    }

    #[tokio::test]
    async fn a_head_with_the_copy_of_a_standby_asks_nobody() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("copy");
        let ((at_standby, standby), (at_node, node)) = (far(), far());
        let voters = BTreeMap::from([(NodeId(1), node)]);
        let generation = Generation { epoch: Epoch(1), count: 1 };
        let succession = Succession { generation, standby: Some(standby.clone()), voters };
        let facts = vec![Fact::Succession(Box::new(succession)), Fact::Follows(Box::new(standby))];
        Journal::open(&file, ClusterId(7)).unwrap().0.intend(facts).await.unwrap();
        let (token, cluster, patience) = (Token::random(), ClusterId(7), Patience::USUAL);
        let config = HeadConfig { tcp: None, token, cluster, patience };
        let refused = Head::start_with_journal(config, &file, FormerStandby::IsAsked).await.err().unwrap();
        assert!(refused.to_string().contains("start it with --standby-of"), "{refused}");
        for listener in [at_standby, at_node] {
            assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock, "somebody was asked");
        }
    }
}
