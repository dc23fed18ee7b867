//! What a head with a standby decides.
//!
//! A succession says which standby may take over, and by the votes of which nodes. As far as the head knows, the standby may use any that is
//! *open*: the one in force, and one that was proposed and that the standby has not confirmed. The head leads as long as it is supported
//! under each of them, by the standby or by so many nodes that the others are no majority. It does without the standby when so many nodes
//! have heard that all of them are revoked.

use std::collections::{BTreeMap, BTreeSet};

use wingbeat_core::NodeId;
use wingbeat_core::spec::Address;
use wingbeat_net::handshake::Epoch;
use wingbeat_net::messages::{Generation, Leadership, Succession, Support};

use super::{Millis, blocking};

/// What is to be done.
#[derive(Clone, PartialEq, Eq, Debug)]
#[allow(clippy::large_enum_variant, reason = "few at a time")]
pub(crate) enum Order {
    /// Write down by what the standby may take over, which it hears after all that was written before. A head that is started again must
    /// know of each, so they are written together.
    Write { latest: Succession, earlier: Option<Succession> },
    /// The standby has the latest, and will not use the earlier one.
    ForgetEarlier,
    /// Ask the nodes for their support now.
    AskNodes,
    /// End: another head leads, or may.
    End(String),
}

/// Which standby follows, and how well.
struct Following {
    address: Address,
    /// When it was heard last.
    heard: Millis,
    /// Whether it has written all that there was when it began.
    has_all: bool,
}

/// The side of the head. Its many fields are one state: whether the head leads, and what it acknowledges, follows from most of them.
pub(crate) struct Leading {
    epoch: Epoch,
    /// Of what was said last about the standby.
    count: u64,
    /// How long a standby may be silent.
    takeover: Millis,
    /// How long the head leads after it was supported last.
    fence: Millis,
    follower: Option<Following>,
    /// Successions that the standby may use, the latest last: two at most.
    open: Vec<Succession>,
    /// Whether the standby has written the latest of them.
    is_confirmed: bool,
    /// As of when the standby has supported the head under an open succession.
    standby_supports: Millis,
    /// When the standby was heard last.
    standby_heard: Millis,
    /// Whether all that is open is being revoked.
    is_revoking: bool,
    revoked_by: BTreeSet<NodeId>,
    /// The nodes that are to vote.
    voters: BTreeMap<NodeId, Address>,
    /// As of when each node has supported the head.
    supports: BTreeMap<NodeId, Millis>,
    /// When time passed last.
    ticked: Millis,
    /// The head itself has stood still: until then it may hear that it is supported still. It does not lead before it has.
    waits_until: Millis,
    has_ended: bool,
}

impl Leading {
    /// A head without a standby.
    pub(crate) fn new(epoch: Epoch, takeover: Millis, fence: Millis) -> Leading {
        Leading {
            epoch,
            count: 0,
            takeover,
            fence,
            follower: None,
            open: Vec::new(),
            is_confirmed: false,
            standby_supports: 0,
            standby_heard: 0,
            is_revoking: false,
            revoked_by: BTreeSet::new(),
            voters: BTreeMap::new(),
            supports: BTreeMap::new(),
            ticked: 0,
            waits_until: 0,
            has_ended: false,
        }
    }

    /// Which standby follows now.
    pub(crate) fn standby(&self) -> Option<&Address> {
        self.follower.as_ref().map(|follower| &follower.address)
    }

    /// By how many nodes' votes the standby may take over; none while it lacks something.
    pub(crate) fn voters(&self) -> Option<usize> {
        match &self.open[..] {
            [settled] if !self.is_revoking && self.is_confirmed => Some(settled.voters.len()),
            _ => None,
        }
    }

    /// Whether what is acknowledged must be written by the standby first.
    pub(crate) fn waits_for_standby(&self) -> bool {
        !self.open.is_empty()
    }

    /// Whether the standby that was there is not to be heard any more: without nodes, it may take over until it has heard nothing for long enough.
    pub(crate) fn is_about_to_go_on_alone(&self) -> bool {
        self.is_revoking && self.open.iter().any(|succession| succession.voters.is_empty())
    }

    /// Whether nodes are to be asked for their support.
    pub(crate) fn asks_nodes(&self) -> bool {
        !self.has_ended && (self.follower.is_some() || !self.open.is_empty())
    }

    /// What is said to nodes.
    pub(crate) fn leadership(&self) -> Leadership {
        let generation = Generation { epoch: self.epoch, count: self.count };
        let standby = self.follower.as_ref().map(|follower| follower.address.clone());
        Leadership { generation, is_revoked: self.is_revoking, standby }
    }

    /// Whether the head may lead at this time.
    pub(crate) fn may_lead(&self, now: Millis) -> bool {
        !self.has_ended && self.open.iter().all(|succession| self.is_supported(succession, now))
    }

    /// Whether the head was supported so short a time ago that no node that it has not heard for long can have joined another head since.
    pub(crate) fn may_give_up(&self, now: Millis, within: Millis) -> bool {
        !self.has_ended && self.open.iter().all(|succession| self.is_supported_within(succession, now, within))
    }

    fn is_supported(&self, by: &Succession, now: Millis) -> bool {
        self.is_supported_within(by, now, self.fence)
    }

    fn is_supported_within(&self, by: &Succession, now: Millis, within: Millis) -> bool {
        let mut supports: Vec<Millis> = by.voters.keys().filter_map(|node| self.supports.get(node).copied()).collect();
        supports.sort_unstable_by(|one, other| other.cmp(one));
        let needed = blocking(by.voters.len());
        // Without nodes, the standby takes over only when this process is gone.
        let Some(last) = needed.checked_sub(1) else { return true };
        let by_nodes = supports.get(last).copied().unwrap_or(0);
        now <= by_nodes.max(self.standby_supports) + within
    }

    /// A standby begins to follow: it is being sent all that is written.
    ///
    /// # Errors
    /// There is another one.
    pub(crate) fn follows(&mut self, now: Millis, standby: &Address) -> Result<Vec<Order>, String> {
        let mut orders = Vec::new();
        if let Some(known) = self.follower.as_ref().filter(|known| known.address != *standby) {
            // Two do not listen at one port: it was started again, before the end of the last one was noticed.
            let is_next_life = standby.tcp.is_some() && known.address.tcp == standby.tcp;
            if !is_next_life {
                let at = known.address.tcp.map_or_else(|| known.address.unix.clone(), |tcp| tcp.to_string());
                return Err(format!("the head has a standby already, at {at}; end that one first"));
            }
            orders = self.standby_gone(now);
        }
        self.follower = Some(Following { address: standby.clone(), heard: now, has_all: false });
        Ok(orders)
    }

    /// The standby follows as of then. The latest succession that it has written is this; and whether it has written all that there was when
    /// it began.
    pub(crate) fn heard(&mut self, now: Millis, as_of: Millis, has: Option<Generation>, has_all: bool) -> Vec<Order> {
        let Some(follower) = &mut self.follower else { return Vec::new() };
        follower.heard = now;
        self.standby_heard = now;
        follower.has_all |= has_all;
        if self.is_revoking {
            return Vec::new();
        }
        self.standby_supports = self.standby_supports.max(as_of);
        let mut orders = Vec::new();
        if let Some(latest) = self.open.last().map(|latest| latest.generation)
            && has == Some(latest)
        {
            if self.open.len() > 1 {
                orders.push(Order::ForgetEarlier);
            }
            self.open.retain(|succession| succession.generation == latest);
            self.is_confirmed = true;
        }
        orders.extend(self.propose(now));
        orders
    }

    /// The standby's connection has ended.
    pub(crate) fn standby_gone(&mut self, now: Millis) -> Vec<Order> {
        self.follower = None;
        self.revoke(now)
    }

    /// These nodes are there.
    pub(crate) fn nodes_are(&mut self, now: Millis, voters: BTreeMap<NodeId, Address>) -> Vec<Order> {
        self.voters = voters;
        let open = &self.open;
        let is_of_use = |node: &NodeId| {
            self.voters.contains_key(node) || open.iter().any(|succession| succession.voters.contains_key(node))
        };
        self.supports.retain(|node, _| is_of_use(node));
        self.propose(now)
    }

    /// A node has answered what was asked then.
    pub(crate) fn answered(
        &mut self,
        now: Millis,
        node: NodeId,
        asked: Millis,
        said: &Leadership,
        answer: Support,
    ) -> Vec<Order> {
        match answer {
            Support::Given => {}
            // It may be let go again.
            Support::Promised(_) => return Vec::new(),
            Support::Joined { epoch: later, .. } => return self.superseded(later),
        }
        let known = self.supports.entry(node).or_insert(asked);
        *known = (*known).max(asked);
        if self.is_revoking && said.is_revoked && said.generation.count == self.count {
            self.revoked_by.insert(node);
        }
        self.look_whether_revoked(now)
    }

    /// Somebody has joined a head of this epoch.
    pub(crate) fn superseded(&mut self, epoch: Epoch) -> Vec<Order> {
        if epoch <= self.epoch {
            return Vec::new();
        }
        self.end("its standby has taken over, or another head of this cluster was started later".into())
    }

    /// Time has passed.
    pub(crate) fn tick(&mut self, now: Millis) -> Vec<Order> {
        if self.has_ended {
            return Vec::new();
        }
        if now > self.ticked + self.takeover / 2 {
            self.waits_until = now + self.takeover;
        }
        self.ticked = now;
        if !self.may_lead(now) {
            if now < self.waits_until {
                return vec![Order::AskNodes];
            }
            let why = format!(
                "for {:?} it has heard neither from its standby nor from enough nodes, so the standby may lead by now",
                std::time::Duration::from_millis(self.fence)
            );
            return self.end(why);
        }
        match &self.follower {
            Some(follower) if now > follower.heard + self.takeover => self.standby_gone(now),
            _ => self.look_whether_revoked(now),
        }
    }

    fn end(&mut self, why: String) -> Vec<Order> {
        match std::mem::replace(&mut self.has_ended, true) {
            true => Vec::new(),
            false => vec![Order::End(why)],
        }
    }

    /// Proposes the next succession, if there is one and none is in flight.
    fn propose(&mut self, now: Millis) -> Vec<Order> {
        let Some(follower) = self.follower.as_ref().filter(|follower| follower.has_all) else { return Vec::new() };
        if self.is_revoking || self.has_ended || !self.open.is_empty() && !self.is_confirmed {
            return Vec::new();
        }
        let is_same =
            |known: &Succession| known.voters == self.voters && known.standby.as_ref() == Some(&follower.address);
        if self.open.last().is_some_and(is_same) {
            return Vec::new();
        }
        self.count += 1;
        let generation = Generation { epoch: self.epoch, count: self.count };
        let (standby, voters) = (Some(follower.address.clone()), self.voters.clone());
        let next = Succession { generation, standby, voters };
        if self.open.is_empty() {
            // It cannot use it before now.
            self.standby_supports = now;
        }
        let earlier = self.open.last().cloned();
        self.open.push(next.clone());
        self.is_confirmed = false;
        vec![Order::Write { latest: next, earlier }, Order::AskNodes]
    }

    fn revoke(&mut self, now: Millis) -> Vec<Order> {
        if self.open.is_empty() || self.is_revoking {
            return Vec::new();
        }
        self.count += 1;
        self.is_revoking = true;
        self.revoked_by.clear();
        let mut orders = vec![Order::AskNodes];
        orders.extend(self.look_whether_revoked(now));
        orders
    }

    fn look_whether_revoked(&mut self, now: Millis) -> Vec<Order> {
        let is_revoked = |succession: &Succession| {
            let by = succession.voters.keys().filter(|node| self.revoked_by.contains(node)).count();
            // Without nodes, the standby takes over soon after it was heard last, if at all.
            let is_too_late = !succession.voters.is_empty() || now > self.standby_heard + self.fence;
            by >= blocking(succession.voters.len()) && is_too_late
        };
        if !self.is_revoking || !self.open.iter().all(is_revoked) {
            return Vec::new();
        }
        self.is_revoking = false;
        self.open.clear();
        let generation = Generation { epoch: self.epoch, count: self.count };
        let nobody = Succession { generation, standby: None, voters: BTreeMap::new() };
        let mut orders = vec![Order::Write { latest: nobody, earlier: None }];
        orders.extend(self.propose(now));
        orders
    }
}

#[cfg(test)]
mod tests {
    use wingbeat_core::ProcessId;
    use wingbeat_core::spec::MachineId;

    use super::*;

    pub(super) fn address(process: u64) -> Address {
        Address {
            process: ProcessId(process),
            machine: MachineId(process),
            unix: String::new(),
            tcp: None,
            steward: None,
        }
    }

    fn nodes(count: u64) -> BTreeMap<NodeId, Address> {
        (1..=count).map(|node| (NodeId(node), address(node))).collect()
    }

    fn written(orders: &[Order]) -> Option<Generation> {
        orders.iter().find_map(|order| match order {
            Order::Write { latest, .. } => Some(latest.generation),
            _ => None,
        })
    }

    /// A head with a standby that may take over by the votes of so many nodes, since the time 0.
    fn with_standby(voters: u64) -> Leading {
        let mut head = Leading::new(Epoch(3), 4, 6);
        assert!(head.nodes_are(0, nodes(voters)).is_empty());
        head.follows(0, &address(99)).unwrap();
        assert!(head.heard(0, 0, None, false).is_empty() && !head.waits_for_standby(), "it lacks something");
        let orders = head.heard(0, 0, None, true);
        assert!(head.waits_for_standby(), "from the moment on in which it may take over");
        assert!(head.voters().is_none() && head.heard(0, 0, written(&orders), true).is_empty());
        assert_eq!(head.voters(), Some(voters as usize));
        head
    }

    #[test]
    fn a_head_without_standby_leads_for_ever_and_asks_nobody() {
        let mut head = Leading::new(Epoch(3), 4, 6);
        head.nodes_are(0, nodes(3));
        assert!(head.may_lead(1_000_000) && !head.asks_nodes() && head.tick(1_000_000).is_empty());
    }

    #[test]
    fn it_leads_while_the_standby_follows_though_no_node_answers() {
        let mut head = with_standby(3);
        head.heard(5, 5, None, true);
        assert!(head.tick(9).is_empty() && head.may_lead(11));
        assert!(head.may_give_up(7, 2) && !head.may_give_up(8, 2));
    }

    #[test]
    fn without_standby_and_nodes_it_ends_in_time() {
        let mut head = with_standby(3);
        assert!((1..5).all(|time| head.tick(time).is_empty()));
        assert_eq!(head.tick(5), [Order::AskNodes], "the standby is silent");
        assert!(head.may_lead(6) && !head.may_lead(7));
        assert!(matches!(head.tick(7)[..], [Order::End(_)]));
        assert!(!head.may_lead(7) && head.tick(8).is_empty());
    }

    #[test]
    fn one_that_has_stood_still_itself_leads_again_only_when_it_has_heard_that_it_may() {
        let mut head = with_standby(3);
        assert!((1..4).all(|time| head.tick(time).is_empty()));
        assert_eq!(head.tick(20), [Order::AskNodes], "it is late itself");
        assert!(!head.may_lead(20));
        head.answered(21, NodeId(1), 20, &head.leadership(), Support::Given);
        head.answered(21, NodeId(2), 20, &head.leadership(), Support::Given);
        assert!(head.may_lead(21) && !head.tick(22).iter().any(|order| matches!(order, Order::End(_))));
        let mut unsupported = with_standby(3);
        assert!(!unsupported.tick(20).iter().any(|order| matches!(order, Order::End(_))));
        assert!((21..24).all(|time| !unsupported.tick(time).iter().any(|order| matches!(order, Order::End(_)))));
        assert!(matches!(unsupported.tick(24)[..], [Order::End(_)]));
    }

    #[test]
    fn it_goes_on_alone_when_no_majority_is_left_that_has_not_heard_so() {
        let mut head = with_standby(4);
        head.standby_gone(1);
        let said = head.leadership();
        assert!(said.is_revoked && head.waits_for_standby());
        assert!(head.answered(2, NodeId(1), 2, &said, Support::Given).is_empty());
        head.answered(2, NodeId(2), 2, &said, Support::Given);
        assert!(!head.waits_for_standby());
        assert!(head.may_lead(1_000_000));
    }

    #[test]
    fn a_node_that_has_promised_itself_or_answers_something_older_revokes_nothing() {
        let mut head = with_standby(1);
        let before = head.leadership();
        head.standby_gone(1);
        assert!(head.answered(2, NodeId(1), 2, &before, Support::Given).is_empty());
        assert!(head.answered(2, NodeId(1), 2, &head.leadership(), Support::Promised(Epoch(4))).is_empty());
        assert!(head.waits_for_standby());
        assert!(matches!(
            head.answered(2, NodeId(1), 2, &head.leadership(), Support::Joined { epoch: Epoch(4), heard_at: None })[..],
            [Order::End(_)]
        ));
    }

    #[test]
    fn while_the_voters_change_it_needs_support_under_both_successions() {
        let mut head = with_standby(1);
        let orders = head.nodes_are(1, nodes(3));
        assert!(written(&orders).is_some() && head.voters().is_none());
        assert!(matches!(&orders[0], Order::Write { earlier: Some(earlier), .. } if earlier.voters == nodes(1)));
        assert!(head.nodes_are(1, nodes(4)).is_empty(), "one change at a time");
        for time in 2..=8 {
            head.answered(time, NodeId(1), time, &head.leadership(), Support::Given);
        }
        assert!(!head.may_lead(8), "one of three blocks nothing");
        head.answered(8, NodeId(2), 8, &head.leadership(), Support::Given);
        assert!(head.may_lead(8));
        let next = head.heard(8, 8, written(&orders), true);
        assert!(written(&next) > written(&orders), "the next change follows");
        assert_eq!(next[0], Order::ForgetEarlier);
    }

    #[test]
    fn without_nodes_it_goes_on_alone_when_the_standby_cannot_take_over_any_more() {
        let mut head = with_standby(0);
        assert!(head.may_lead(1_000_000));
        head.standby_gone(1);
        assert!(head.tick(6).is_empty() && head.waits_for_standby());
        head.tick(7);
        assert!(!head.waits_for_standby());
    }

    #[test]
    fn without_nodes_a_standby_that_is_back_is_heard_when_the_last_one_cannot_take_over_any_more() {
        let mut head = with_standby(0);
        head.standby_gone(1);
        assert!(head.is_about_to_go_on_alone());
        assert!(head.tick(3).is_empty() && head.tick(6).is_empty());
        head.tick(7);
        assert!(!head.is_about_to_go_on_alone());
        head.follows(8, &address(99)).unwrap();
        assert!(written(&head.heard(8, 8, None, true)).is_some(), "it may take over again");
    }

    #[test]
    fn a_standby_that_was_started_again_is_no_other_and_takes_over_by_nothing_of_its_last_life() {
        let at = |life: u64| Address { tcp: Some("10.0.0.1:6420".parse().unwrap()), ..address(life) };
        let mut head = Leading::new(Epoch(3), 4, 6);
        head.nodes_are(0, nodes(1));
        head.follows(0, &at(1)).unwrap();
        let orders = head.heard(0, 0, None, true);
        head.heard(0, 0, written(&orders), true);
        assert_eq!(head.follows(1, &at(2)), Ok(vec![Order::AskNodes]), "the end of the last one was not noticed");
        assert!(head.standby() == Some(&at(2)) && head.leadership().is_revoked);
        let orders = head.answered(2, NodeId(1), 2, &head.leadership(), Support::Given);
        assert!(written(&orders).is_some() && written(&head.heard(3, 3, None, true)).is_some());
    }

    #[test]
    fn a_second_standby_is_refused_and_one_that_is_back_gets_the_next_number() {
        let mut head = with_standby(1);
        assert!(head.follows(1, &address(98)).is_err());
        let port = Some("10.0.0.1:6420".parse().unwrap());
        assert!(head.follows(1, &Address { tcp: port, ..address(99) }).is_err());
        head.standby_gone(1);
        head.follows(1, &address(98)).unwrap();
        assert!(head.heard(1, 1, None, true).is_empty(), "before it was revoked");
        let orders = head.answered(2, NodeId(1), 2, &head.leadership(), Support::Given);
        let last = orders.iter().rev().find_map(|order| match order {
            Order::Write { latest, .. } => latest.standby.clone(),
            _ => None,
        });
        assert_eq!(last, Some(address(98)));
    }
}
