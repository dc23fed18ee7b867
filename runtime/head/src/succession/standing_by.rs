//! What a standby decides.
//!
//! It follows the head. When that is gone, or silent for long, it asks the nodes what they would do, and when a majority would accept it, it
//! runs: from then on it follows nobody, and has nodes promise themselves to it. With a majority of promises it leads.

use std::collections::BTreeSet;

use wingbeat_core::NodeId;
use wingbeat_core::spec::Address;
use wingbeat_net::handshake::Epoch;
use wingbeat_net::messages::{Ballot, Succession, Vote};

use super::{Millis, majority};

/// What is to be done.
#[derive(Clone, Debug)]
pub(crate) enum Order {
    /// Ask these nodes.
    Ask(Ballot, Vec<(NodeId, Address)>),
    /// Lead with this epoch, or a later one.
    Lead(Epoch),
}

enum Phase {
    /// The head is there, as far as is known.
    Follows,
    /// It may be gone.
    Asks { would_accept: BTreeSet<NodeId> },
    /// It runs for this epoch.
    Runs { epoch: Epoch, since: Millis, promised: BTreeSet<NodeId> },
    /// It has won with this epoch.
    Leads(Epoch),
}

/// The side of the standby.
pub(crate) struct StandingBy {
    /// How long the head may be silent.
    takeover: Millis,
    /// By which it may take over: as it was written here, after all that came before.
    succession: Option<Succession>,
    /// When the head has answered last.
    heard: Millis,
    /// Whether the connection is open over which it has.
    is_connected: bool,
    /// When the last question was asked that the head has answered to one that has all that it had written before: it has heard it later.
    asked: Option<Millis>,
    /// Whether nobody listens where the head did.
    is_gone: bool,
    /// The latest epoch that was in use: of the head, and those for which it ran in vain.
    used: Epoch,
    /// The latest head that it has let lead: what earlier ones have said of who may take over is void, however late it is written.
    let_lead: Option<Epoch>,
    phase: Phase,
}

impl StandingBy {
    /// One that has written this so far.
    pub(crate) fn new(now: Millis, takeover: Millis, succession: Option<Succession>) -> StandingBy {
        let mut standby = StandingBy {
            takeover,
            succession: None,
            heard: now,
            is_connected: false,
            asked: None,
            is_gone: false,
            used: Epoch(0),
            let_lead: None,
            phase: Phase::Follows,
        };
        standby.wrote(succession);
        standby
    }

    /// What it has written last of who may take over.
    pub(crate) fn wrote(&mut self, succession: Option<Succession>) {
        let succession = succession.filter(|succession| !self.is_void(succession));
        if let Some(succession) = &succession {
            self.used = self.used.max(succession.generation.epoch);
        }
        self.succession = succession;
    }

    /// The head may be silent for so long from now on.
    pub(crate) fn bears(&mut self, takeover: Millis) {
        self.takeover = takeover;
    }

    /// Whether it has given this up by letting a later head lead.
    pub(crate) fn is_void(&self, succession: &Succession) -> bool {
        Some(succession.generation.epoch) < self.let_lead
    }

    /// Whether it has something by which it may take over.
    pub(crate) fn may_take_over(&self) -> bool {
        self.succession.as_ref().is_some_and(|succession| succession.standby.is_some())
    }

    /// Whether it may ask the head for more facts: whoever does, supports it.
    pub(crate) fn may_follow(&self) -> bool {
        matches!(self.phase, Phase::Follows | Phase::Asks { .. })
    }

    /// The epoch for which it runs, or has run: one that has won needs the promises until it serves as a head.
    pub(crate) fn runs_for(&self) -> Option<Epoch> {
        match &self.phase {
            Phase::Runs { epoch, .. } | Phase::Leads(epoch) => Some(*epoch),
            Phase::Follows | Phase::Asks { .. } => None,
        }
    }

    /// A head of this epoch has answered: what was asked then, by one that had a complete copy. Before it has, the head waits for it with
    /// nothing.
    pub(crate) fn heard(&mut self, now: Millis, asked: Option<Millis>, epoch: Epoch) {
        self.is_connected = true;
        self.bears_with_head(now, asked, epoch);
    }

    fn bears_with_head(&mut self, now: Millis, asked: Option<Millis>, epoch: Epoch) {
        if self.may_follow() {
            self.asked = self.asked.max(asked);
            (self.heard, self.is_gone) = (now, false);
            self.used = self.used.max(epoch);
            self.phase = Phase::Follows;
        }
    }

    /// The connection to the head has ended, or is about to be closed.
    pub(crate) fn is_cut_off(&mut self) {
        self.is_connected = false;
    }

    /// Whether the head is there: a machine that is gone ends no connection.
    pub(crate) fn hears_head(&self, now: Millis) -> bool {
        self.is_connected && now <= self.heard + self.takeover
    }

    /// Nobody listens where the head did.
    pub(crate) fn head_is_gone(&mut self) {
        self.is_gone = true;
    }

    /// A head that is started again with the file of the last one asks whether it may lead with this epoch. None while that is not decided:
    /// also while the last head is there, since whoever asks has a copy of its file.
    pub(crate) fn lets_lead(&mut self, now: Millis, epoch: Epoch) -> Option<bool> {
        match self.phase {
            Phase::Follows | Phase::Asks { .. } if self.hears_head(now) => None,
            Phase::Follows | Phase::Asks { .. } => {
                // By what the last head said it does not take over any more; the next one says something else.
                self.succession = None;
                self.let_lead = self.let_lead.max(Some(epoch));
                self.is_connected = false;
                self.bears_with_head(now, None, epoch);
                Some(true)
            }
            Phase::Runs { .. } => None,
            Phase::Leads(_) => Some(false),
        }
    }

    /// A node has answered a ballot.
    pub(crate) fn voted(&mut self, now: Millis, node: NodeId, ballot: &Ballot, vote: Vote) -> Vec<Order> {
        let Some(succession) = &self.succession else { return Vec::new() };
        if ballot.generation != succession.generation || !succession.voters.contains_key(&node) {
            return Vec::new();
        }
        if let Vote::Later(epoch) = vote {
            // It need not be of this node's head: other standbys have run.
            self.used = self.used.max(epoch);
        }
        let needed = majority(succession.voters.len());
        match &mut self.phase {
            Phase::Asks { would_accept } => {
                match vote {
                    Vote::Yes => would_accept.insert(node),
                    _ => would_accept.remove(&node),
                };
                if would_accept.len() < needed {
                    return Vec::new();
                }
                let epoch = Epoch(self.used.0 + 1);
                self.used = epoch;
                self.phase = Phase::Runs { epoch, since: now, promised: BTreeSet::new() };
                self.ask()
            }
            Phase::Runs { epoch, promised, .. } if ballot.is_binding && ballot.epoch == *epoch => {
                if vote == Vote::Yes {
                    promised.insert(node);
                }
                if promised.len() < needed {
                    return Vec::new();
                }
                let epoch = *epoch;
                self.phase = Phase::Leads(epoch);
                vec![Order::Lead(epoch)]
            }
            _ => Vec::new(),
        }
    }

    /// Time has passed.
    pub(crate) fn tick(&mut self, now: Millis) -> Vec<Order> {
        let Some(succession) = self.succession.as_ref().filter(|known| known.standby.is_some()) else {
            return Vec::new();
        };
        match &self.phase {
            Phase::Follows => {
                if !self.is_gone && now <= self.heard + self.takeover {
                    return Vec::new();
                }
                if succession.voters.is_empty() {
                    // Nobody else could say that it is gone, or has gone on alone, which it does when this standby was silent for longer.
                    if !self.is_gone || self.asked.is_none_or(|asked| now > asked + self.takeover) {
                        return Vec::new();
                    }
                    let epoch = Epoch(self.used.0 + 1);
                    self.phase = Phase::Leads(epoch);
                    return vec![Order::Lead(epoch)];
                }
                self.phase = Phase::Asks { would_accept: BTreeSet::new() };
                self.ask()
            }
            Phase::Runs { since, .. } if now > since + self.takeover => {
                // Nodes hear the head again. What was promised for this epoch is void: it is never used.
                self.phase = Phase::Follows;
                Vec::new()
            }
            Phase::Asks { .. } | Phase::Runs { .. } => self.ask(),
            Phase::Leads(_) => Vec::new(),
        }
    }

    fn ask(&self) -> Vec<Order> {
        let Some(Succession { generation, standby: Some(standby), voters }) = &self.succession else {
            return Vec::new();
        };
        let (epoch, has_promised) = match &self.phase {
            Phase::Runs { epoch, promised, .. } => (*epoch, Some(promised)),
            _ => (Epoch(self.used.0 + 1), None),
        };
        let is_open = |node: &NodeId| has_promised.is_none_or(|promised| !promised.contains(node));
        let asked = voters.iter().filter(|(node, _)| is_open(node));
        let asked = asked.map(|(node, address)| (*node, address.clone())).collect();
        let (generation, standby, is_binding) = (*generation, standby.clone(), has_promised.is_some());
        vec![Order::Ask(Ballot { generation, epoch, standby, is_binding }, asked)]
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use wingbeat_core::ProcessId;
    use wingbeat_core::spec::MachineId;
    use wingbeat_net::messages::Generation;

    use super::*;

    fn address(process: u64) -> Address {
        Address {
            process: ProcessId(process),
            machine: MachineId(process),
            unix: String::new(),
            tcp: None,
            steward: None,
        }
    }

    fn by(voters: u64) -> Option<Succession> {
        let voters: BTreeMap<_, _> = (1..=voters).map(|node| (NodeId(node), address(node))).collect();
        let generation = Generation { epoch: Epoch(3), count: 1 };
        Some(Succession { generation, standby: Some(address(99)), voters })
    }

    fn ballot(orders: &[Order]) -> Ballot {
        match orders {
            [Order::Ask(ballot, _)] => ballot.clone(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn it_leads_with_a_majority_of_promises_and_no_sooner() {
        let mut standby = StandingBy::new(0, 4, by(3));
        assert!(standby.tick(4).is_empty());
        let asks = ballot(&standby.tick(5));
        assert!(!asks.is_binding && standby.may_follow());
        assert!(standby.voted(5, NodeId(1), &asks, Vote::Yes).is_empty());
        assert!(standby.voted(5, NodeId(2), &asks, Vote::HearsHead).is_empty());
        let runs = ballot(&standby.voted(5, NodeId(3), &asks, Vote::Yes));
        assert!(runs.is_binding && runs.epoch == Epoch(4) && !standby.may_follow());
        assert!(standby.voted(5, NodeId(1), &asks, Vote::Yes).is_empty(), "that was no promise");
        assert!(standby.voted(6, NodeId(1), &runs, Vote::Yes).is_empty());
        assert!(standby.voted(6, NodeId(7), &runs, Vote::Yes).is_empty(), "it has no vote");
        assert_eq!(standby.lets_lead(6, Epoch(9)), None);
        let leads = standby.voted(6, NodeId(3), &runs, Vote::Yes);
        assert!(matches!(leads[..], [Order::Lead(Epoch(4))]));
        assert_eq!(standby.lets_lead(7, Epoch(9)), Some(false));
        assert_eq!(standby.runs_for(), Some(Epoch(4)), "a node that asks now keeps its promise");
    }

    #[test]
    fn a_head_that_is_heard_again_goes_on_and_an_epoch_is_run_for_once() {
        let mut standby = StandingBy::new(0, 4, by(1));
        let asks = ballot(&standby.tick(5));
        standby.heard(5, Some(5), Epoch(3));
        assert!(standby.voted(5, NodeId(1), &asks, Vote::Yes).is_empty());
        let asks = ballot(&standby.tick(10));
        let runs = ballot(&standby.voted(10, NodeId(1), &asks, Vote::Yes));
        standby.heard(11, Some(11), Epoch(3));
        assert_eq!(standby.runs_for(), Some(Epoch(4)), "it has promises, and does not go back for this");
        assert!(standby.tick(15).is_empty() && standby.may_follow());
        assert!(standby.voted(15, NodeId(1), &runs, Vote::Yes).is_empty(), "a promise that comes too late");
        let asks = ballot(&standby.tick(15));
        assert_eq!(asks.epoch, Epoch(5));
    }

    #[test]
    fn a_head_with_a_copy_of_the_file_is_not_let_lead_while_the_other_is_heard() {
        let mut standby = StandingBy::new(0, 4, by(0));
        standby.heard(2, Some(1), Epoch(3));
        assert_eq!(standby.lets_lead(6, Epoch(9)), None);
        assert!(standby.may_take_over(), "nothing has changed");
        assert_eq!(standby.lets_lead(7, Epoch(9)), Some(true), "its machine is gone");
        assert!(!standby.may_take_over() && !standby.hears_head(7));
        standby.heard(8, Some(8), Epoch(10));
        assert_eq!(standby.lets_lead(8, Epoch(11)), None);
        standby.is_cut_off();
        assert_eq!(standby.lets_lead(8, Epoch(11)), Some(true));
    }

    #[test]
    fn without_nodes_it_leads_only_when_the_head_is_gone_that_it_has_followed_to_the_end() {
        let mut standby = StandingBy::new(0, 4, by(0));
        standby.heard(2, Some(1), Epoch(3));
        standby.heard(3, None, Epoch(3));
        assert!(standby.tick(100).is_empty());
        standby.head_is_gone();
        assert!(standby.tick(6).is_empty(), "the head may have gone on alone before it ended, and be copied anew");
        assert!(matches!(standby.tick(5)[..], [Order::Lead(Epoch(4))]));
    }

    #[test]
    fn one_that_lacks_something_or_was_revoked_never_leads() {
        let mut standby = StandingBy::new(0, 4, None);
        standby.head_is_gone();
        assert!(standby.tick(100).is_empty());
        standby.wrote(by(1));
        assert_eq!(standby.lets_lead(100, Epoch(8)), Some(true));
        assert!(standby.tick(200).is_empty());
        standby.wrote(by(1));
        standby.head_is_gone();
        assert!(standby.tick(300).is_empty(), "a copy of the last head's file that was being written");
    }
}
