//! Whether a head that is started with a file in which a standby is named may lead: that standby may have taken over.

use std::time::{Duration, Instant};

use wingbeat_core::error::Error;
use wingbeat_core::spec::{Address, MachineId};
use wingbeat_core::{ClusterId, ProcessId};
use wingbeat_net::Token;
use wingbeat_net::address::{self, DialError};
use wingbeat_net::handshake::{Epoch, Hello, Purpose, Role};
use wingbeat_net::limits::limits;
use wingbeat_net::messages::{Generation, Leadership, Succession, Support};
use wingbeat_net::mux::{self, Waiting};
use wingbeat_net::services::{
    HeadRequest, HeadResponse, NodeClient, NodeRequest, NodeResponse, ProcessRequest, ProcessResponse, StandbyClient,
    StandbyRequest, StandbyResponse,
};

use crate::succession::blocking;

/// How long it may take until the standby or enough nodes have answered: longer than a standby takes over.
const LIMIT: Duration = Duration::from_secs(15);
/// The pause between two attempts.
const PAUSE: Duration = Duration::from_millis(250);

/// Who asks.
pub(crate) struct Asker<'a> {
    pub token: &'a Token,
    pub cluster: ClusterId,
    /// With which it would lead.
    pub epoch: Epoch,
}

/// What somebody says.
enum Said {
    MayLead,
    /// Another head leads.
    Superseded,
    Nothing,
}

impl Asker<'_> {
    fn hello(&self) -> Hello {
        let hello =
            Hello { role: Role::Head, purpose: Purpose::Control, cluster: Some(self.cluster), ..Hello::of_tool() };
        Hello { address: Address { process: ProcessId(self.cluster.0), ..hello.address.clone() }, ..hello }
    }

    /// Waits until it is certain that nobody else leads.
    ///
    /// # Errors
    /// Somebody does, or it cannot be found out.
    pub(crate) async fn may_lead(&self, by: &Succession) -> Result<(), Error> {
        let Some(standby) = &by.standby else { return Ok(()) };
        let at = standby.tcp.map_or_else(|| standby.unix.clone(), |tcp| tcp.to_string());
        let until = Instant::now() + LIMIT;
        let refused = |why: String| Error::Refused { who: "the cluster".into(), why };
        loop {
            let superseded = || {
                refused(format!(
                    "its standby at {at} has taken over, and leads it; start this head as its standby: `wingbeat head --standby-of {at} \
                     --journal FILE`"
                ))
            };
            match self.ask_standby(standby).await {
                Said::MayLead => return Ok(()),
                Said::Superseded => return Err(superseded()),
                Said::Nothing => {}
            }
            match self.ask_nodes(by).await {
                Said::MayLead => return Ok(()),
                Said::Superseded => return Err(superseded()),
                Said::Nothing => {}
            }
            if Instant::now() > until {
                return Err(refused(format!(
                    "the journal names a standby at {at}, which may have taken over, and neither that nor enough nodes answer. Start the \
                     standby again, or this head with --without-standby if it is certain that no other head of the cluster runs"
                )));
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    async fn ask_standby(&self, standby: &Address) -> Said {
        // Its next life has another socket, and the same port.
        let far = Address { machine: MachineId(0), unix: String::new(), ..standby.clone() };
        let dialled = match address::dial_and_learn(standby, "the standby", self.token, self.hello()).await {
            Err(DialError::Gone(_)) if far.tcp.is_some() => {
                address::dial_and_learn(&far, "the standby", self.token, self.hello()).await
            }
            dialled => dialled,
        };
        let Ok((stream, welcome)) = dialled else { return Said::Nothing };
        if welcome.stands_by.is_none() {
            return Said::Superseded;
        }
        let (connection, client, _) =
            mux::connect::<StandbyRequest, StandbyResponse, HeadRequest, HeadResponse>(stream, Waiting::Asleep);
        let client = StandbyClient::new(mux::client_config(), client).spawn();
        let answer = client.may_lead(mux::within(limits().takeover * 2), self.epoch).await;
        connection.close();
        match answer {
            Ok(true) => Said::MayLead,
            Ok(false) => Said::Superseded,
            Err(_) => Said::Nothing,
        }
    }

    /// So many nodes that the others were no majority for the standby, and from now on are none.
    async fn ask_nodes(&self, by: &Succession) -> Said {
        if by.voters.is_empty() {
            return Said::Nothing;
        }
        // As the head that the standby followed: whoever has joined the standby since, or promised to, does not support that.
        let generation = Generation { epoch: by.generation.epoch, count: u64::MAX };
        let answers = futures::future::join_all(by.voters.values().map(|node| self.ask_node(node, generation))).await;
        let given = answers.iter().filter(|answer| matches!(answer, Some(Support::Given))).count();
        if answers.iter().flatten().any(|answer| matches!(answer, Support::Joined(_))) {
            return Said::Superseded;
        }
        if given >= blocking(by.voters.len()) { Said::MayLead } else { Said::Nothing }
    }

    async fn ask_node(&self, node: &Address, generation: Generation) -> Option<Support> {
        let dialled = address::dial(node, "a node", self.token, self.hello());
        let stream = tokio::time::timeout(limits().takeover, dialled).await.ok()?.ok()?;
        let (connection, client, _) =
            mux::connect::<NodeRequest, NodeResponse, ProcessRequest, ProcessResponse>(stream, Waiting::Asleep);
        let client = NodeClient::new(mux::client_config(), client).spawn();
        let said = Leadership { generation, is_revoked: true, standby: None };
        let answer = client.support(mux::within(limits().takeover), said).await;
        connection.close();
        answer.ok()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io::ErrorKind;
    use std::net::TcpListener;

    use wingbeat_core::NodeId;
    use wingbeat_net::patience::Patience;

    use super::*;
    use crate::journal::Journal;
    use crate::service::Durable as _;
    use crate::state::Fact;
    use crate::{FormerStandby, Head, HeadConfig};

    /// Somebody on another machine, who would be heard here.
    fn far() -> (TcpListener, Address) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let tcp = Some(listener.local_addr().unwrap());
        let address = Address { process: ProcessId(7), machine: MachineId(0), unix: String::new(), tcp, steward: None };
        (listener, address)
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
