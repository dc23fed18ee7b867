//! Looking for the head at several addresses: where it was, and where its standby would serve.

use std::net::SocketAddr;
use std::time::Instant;

use futures::FutureExt;
use futures::future::BoxFuture;
use wingbeat_core::error::Error;
use wingbeat_core::spec::{Address, MachineId};

use crate::address::{Stream, dial_text};
use crate::handshake::{Hello, StandsBy, Token, Welcome};
use crate::limits::limits;
use crate::staggered::{STAGGER, first_of};

/// The addresses in a list such as `a:6420,b:6420`.
pub fn in_list(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').map(str::trim).filter(|one| !one.is_empty())
}

/// The error for whoever has found only a standby.
pub(crate) fn only_a_standby(what: &str, at: &str, standby: &StandsBy) -> Error {
    let head = standby.head.tcp.map_or_else(|| "on its own machine".to_owned(), |tcp| format!("at {tcp}"));
    let why = match standby.runs_for {
        None => format!("a standby listens at {at}; the head is {head}, as far as that knows"),
        Some(_) => format!("a standby listens at {at}, and is about to take over from the head {head}"),
    };
    // The next attempt may find it as the head.
    Error::Unreachable { what: what.to_owned(), address: at.to_owned(), why }
}

/// Connects to the head at one of the addresses that a person gave, as `host:port` or `host:port,host:port`. A standby says where the head is.
///
/// While only a standby answers, it is waited for as long as that may take to lead.
///
/// # Errors
/// None of them is the head, or refuses; or nobody answers.
pub async fn dial_head(text: &str, what: &str, token: &Token, hello: Hello) -> Result<(Stream, Welcome), Error> {
    let until = Instant::now() + limits().takeover * 2;
    loop {
        // A machine that is gone holds a round up for longer than a standby needs to lead.
        let began = Instant::now();
        let attempts: Vec<BoxFuture<'_, _>> =
            in_list(text).map(|one| dial_one_of(text, one, what, token, hello.clone()).boxed()).collect();
        let errors = match first_of(attempts).await {
            Ok(found) => return Ok(found),
            Err(errors) => errors,
        };
        let may_lead_soon = errors.iter().any(|missed| missed.is_standby);
        if !may_lead_soon || began > until {
            let nobody = || Error::Unreachable {
                what: what.into(),
                address: text.into(),
                why: "no address is given; an address is host:port".into(),
            };
            return Err(together(text, what, errors).unwrap_or_else(nobody));
        }
        tokio::time::sleep(STAGGER).await;
    }
}

/// Why the head was not found at one address.
struct Missed {
    error: Error,
    /// A standby is there.
    is_standby: bool,
}

impl From<Error> for Missed {
    fn from(error: Error) -> Missed {
        Missed { error, is_standby: false }
    }
}

async fn dial_one_of(
    list: &str,
    one: &str,
    what: &str,
    token: &Token,
    hello: Hello,
) -> Result<(Stream, Welcome), Missed> {
    let (stream, welcome) = dial_text(one, what, token, hello.clone()).await?;
    let Some(standby) = &welcome.stands_by else { return Ok((stream, welcome)) };
    let is_listed = |tcp: &SocketAddr| in_list(list).any(|listed| listed == tcp.to_string());
    if let Some(head) = standby.head.tcp.filter(|tcp| !is_listed(tcp))
        && let Ok((stream, welcome)) = dial_text(&head.to_string(), what, token, hello).await
        && welcome.stands_by.is_none()
    {
        return Ok((stream, welcome));
    }
    Err(Missed { error: only_a_standby(what, one, standby), is_standby: true })
}

/// What was tried, and why it was not the head: of several addresses, each with its reason. Somebody who refuses has said so on purpose.
fn together(list: &str, what: &str, errors: Vec<Missed>) -> Option<Error> {
    if errors.len() < 2 {
        return errors.into_iter().next().map(|missed| missed.error);
    }
    let is_refused = errors.iter().any(|missed| matches!(missed.error, Error::Refused { .. }));
    let each = in_list(list).zip(errors).map(|(one, missed)| match missed.error {
        Error::Unreachable { why, .. } => format!("{one}: {why}"),
        Error::Refused { why, .. } => format!("{one} refused: {why}"),
        other => format!("{one}: {other}"),
    });
    let why = each.collect::<Vec<_>>().join("; ");
    let (who, address) = (what.to_owned(), list.to_owned());
    Some(if is_refused { Error::Refused { who, why } } else { Error::Unreachable { what: who, address, why } })
}

/// Where a head would be that is reached at one of these addresses, but for those that were reached already.
pub async fn others(text: &str, reached: &Welcome, at: Option<SocketAddr>) -> Vec<Address> {
    let mut others = Vec::new();
    for one in in_list(text) {
        let Ok(found) = tokio::net::lookup_host(one).await else { continue };
        let new = |tcp: &SocketAddr| Some(*tcp) != at && reached.address.tcp != Some(*tcp);
        others.extend(found.filter(new).map(|tcp| Address {
            process: reached.address.process,
            machine: MachineId(0),
            unix: String::new(),
            tcp: Some(tcp),
            steward: None,
        }));
    }
    others
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_about_several_addresses_names_each() {
        let missed = |error| Missed { error, is_standby: false };
        let silent =
            |at: &str| Error::Unreachable { what: "the head".into(), address: at.into(), why: "no answer".into() };
        let said = |errors| together("a:1, b:2", "the head", errors).map(|error| error.to_string());
        let text = said(vec![missed(silent("a:1")), missed(silent("b:2"))]);
        assert_eq!(text.as_deref(), Some("cannot reach the head at a:1, b:2: a:1: no answer; b:2: no answer"));
        let refused = Error::Refused { who: "the head".into(), why: "another token".into() };
        let text = said(vec![missed(silent("a:1")), missed(refused)]);
        assert_eq!(text.as_deref(), Some("refused by the head: a:1: no answer; b:2 refused: another token"));
    }
}
