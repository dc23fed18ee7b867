//! Several attempts, each while those before it have not answered yet.

use std::time::Duration;

use futures::stream::{FuturesUnordered, StreamExt};

/// How long one address has before the next one is tried, too: longer than a head takes to answer, and short beside the silence of a
/// machine that is gone.
pub(crate) const STAGGER: Duration = Duration::from_millis(200);

/// Tries one after the other, each while those before it have not answered yet. The first that succeeds counts, and else all errors are
/// returned, in the order of the attempts.
pub(crate) async fn first_of<T, E, F: Future<Output = Result<T, E>>>(
    attempts: impl IntoIterator<Item = F>,
) -> Result<T, Vec<E>> {
    let mut left = attempts.into_iter().enumerate();
    let (mut under_way, mut failed) = (FuturesUnordered::new(), Vec::new());
    let mut has_more = true;
    loop {
        match left.next() {
            Some((number, attempt)) => under_way.push(async move { (number, attempt.await) }),
            None => has_more = false,
        }
        loop {
            tokio::select! {
                biased;
                ended = under_way.next() => match ended {
                    Some((_, Ok(done))) => return Ok(done),
                    Some((number, Err(error))) => {
                        failed.push((number, error));
                        if has_more {
                            break;
                        }
                    }
                    None if has_more => break,
                    None => {
                        failed.sort_by_key(|(number, _)| *number);
                        return Err(failed.into_iter().map(|(_, error)| error).collect());
                    }
                },
                () = tokio::time::sleep(STAGGER), if has_more => break,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_next_is_tried_when_one_fails_or_is_silent_and_the_first_that_succeeds_counts() {
        let silent = |number: u32| async move {
            match number {
                0 => std::future::pending().await,
                1 => Err("refused"),
                _ => Ok(number),
            }
        };
        assert_eq!(first_of((0..4).map(silent)).await, Ok(2));
        let fails = |number: u32| async move {
            tokio::time::sleep(Duration::from_secs(u64::from(3 - number))).await;
            Err::<(), _>(number)
        };
        assert_eq!(first_of((0..3).map(fails)).await, Err(vec![0, 1, 2]));
        assert_eq!(first_of(std::iter::empty::<std::future::Ready<Result<(), ()>>>()).await, Err(vec![]));
    }
}
