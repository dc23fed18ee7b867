//! A detached actor with a name, which all drivers call, and which outlives each of them.

use wingbeat::Result;
use wingbeat_shapes::Chance;

use super::counter::{Account, Counter, CounterHandle, count};
use super::{Failure, MayFail, REFUSED, RETRIES};

const NAME: &str = "ledger";

async fn ledger() -> Result<CounterHandle> {
    Counter::options().name(NAME).detached().max_restarts(RETRIES).num_cpus(0.1).get_or_create(NAME.to_owned()).await
}

pub(super) async fn run(driver: u64, chance: &mut Chance) -> std::result::Result<(), Failure> {
    let ledger = ledger().await.may_be(REFUSED)?;
    // Each round is a caller of its own.
    let caller = driver << 32 | chance.below(u32::MAX as usize) as u64;
    count(&ledger, caller, &mut Account::default(), chance).await
}

/// Ends it.
///
/// # Errors
/// It cannot be found.
pub async fn close() -> Result<()> {
    ledger().await?.actor().kill();
    Ok(())
}
