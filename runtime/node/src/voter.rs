//! What a node says to a head that wants to stay it, and to a standby that wants to become it.
//!
//! A node that has promised itself to a standby supports no earlier head any more. It breaks a promise only when the standby itself has said
//! that it does not run for that epoch.

use wingbeat_net::handshake::Epoch;
use wingbeat_net::messages::{Ballot, Generation, Leadership, Support, Vote};
use wingbeat_net::way::Promise;

/// What a node remembers of what heads have said about their standbys.
#[derive(Clone, Default, Debug)]
pub struct Voter {
    /// By an earlier number nobody may take over.
    revoked: Option<Generation>,
}

impl Voter {
    /// A head asks whether it still is. Whether a later one is heard, the caller knows.
    pub fn support(&mut self, joined: Option<Epoch>, promise: Option<&Promise>, said: &Leadership) -> Support {
        let by = said.generation.epoch;
        if let Some(later) = joined.filter(|joined| *joined > by) {
            return Support::Joined { epoch: later, heard_at: None };
        }
        if let Some(later) = promise.map(|promise| promise.epoch).filter(|promised| *promised > by) {
            return Support::Promised(later);
        }
        if said.is_revoked {
            self.revoked = self.revoked.max(Some(said.generation));
        }
        Support::Given
    }

    /// A standby asks for a vote. With it comes the promise that it makes, if it does.
    pub fn vote(
        &self,
        joined: Option<Epoch>,
        promise: Option<&Promise>,
        hears_head: bool,
        ballot: &Ballot,
    ) -> (Vote, Option<Promise>) {
        let asked = Promise { epoch: ballot.epoch, standby: ballot.standby.clone() };
        if promise == Some(&asked) && ballot.is_binding {
            return (Vote::Yes, None);
        }
        let latest = joined.max(promise.map(|promise| promise.epoch));
        if let Some(later) = latest.filter(|latest| *latest >= ballot.epoch) {
            return (Vote::Later(later), None);
        }
        if let Some(revoked) = self.revoked.filter(|revoked| *revoked > ballot.generation) {
            return (Vote::Revoked(revoked), None);
        }
        // The head that it has joined was let lead by that standby.
        if let Some(joined) = joined.filter(|joined| *joined > ballot.generation.epoch) {
            return (Vote::Later(joined), None);
        }
        if hears_head {
            return (Vote::HearsHead, None);
        }
        (Vote::Yes, ballot.is_binding.then_some(asked))
    }
}

#[cfg(test)]
mod tests {
    use wingbeat_core::ProcessId;
    use wingbeat_core::spec::{Address, MachineId};

    use super::*;

    fn standby() -> Address {
        Address { process: ProcessId(9), machine: MachineId(9), unix: String::new(), tcp: None, steward: None }
    }

    fn number(count: u64) -> Generation {
        Generation { epoch: Epoch(3), count }
    }

    fn ballot(count: u64, epoch: u64, is_binding: bool) -> Ballot {
        Ballot { generation: number(count), epoch: Epoch(epoch), standby: standby(), is_binding }
    }

    fn said(count: u64, is_revoked: bool) -> Leadership {
        Leadership { generation: number(count), is_revoked, standby: Some(standby()) }
    }

    #[test]
    fn a_promise_ends_the_support_of_earlier_heads_and_is_given_again_to_the_same_standby_alone() {
        let (mut voter, joined) = (Voter::default(), Some(Epoch(3)));
        assert_eq!(voter.vote(joined, None, true, &ballot(1, 4, true)), (Vote::HearsHead, None));
        assert_eq!(voter.vote(joined, None, false, &ballot(1, 4, false)), (Vote::Yes, None));
        assert_eq!(voter.support(joined, None, &said(1, false)), Support::Given);
        let (vote, promise) = voter.vote(joined, None, false, &ballot(1, 4, true));
        assert!(vote == Vote::Yes && promise.is_some());
        let promise = promise.as_ref();
        assert_eq!(voter.support(joined, promise, &said(1, false)), Support::Promised(Epoch(4)));
        assert_eq!(voter.vote(joined, promise, true, &ballot(1, 4, true)).0, Vote::Yes);
        let other = Ballot { standby: Address { process: ProcessId(8), ..standby() }, ..ballot(1, 4, true) };
        assert_eq!(voter.vote(joined, promise, false, &other).0, Vote::Later(Epoch(4)));
        assert_eq!(
            voter.support(Some(Epoch(4)), None, &said(9, true)),
            Support::Joined { epoch: Epoch(4), heard_at: None }
        );
    }

    #[test]
    fn what_was_revoked_gets_no_vote_and_what_was_said_later_does() {
        let (mut voter, joined) = (Voter::default(), Some(Epoch(3)));
        assert_eq!(voter.support(joined, None, &said(2, true)), Support::Given);
        assert_eq!(voter.vote(joined, None, false, &ballot(1, 4, true)), (Vote::Revoked(number(2)), None));
        assert_eq!(voter.vote(joined, None, false, &ballot(3, 4, true)).0, Vote::Yes);
        assert_eq!(voter.vote(Some(Epoch(5)), None, false, &ballot(3, 6, true)).0, Vote::Later(Epoch(5)));
    }
}
