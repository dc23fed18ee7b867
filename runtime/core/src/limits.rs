//! Time limits that a test can shorten.

use std::time::Duration;

/// What this variable of the environment says in milliseconds; `usual` if it says nothing, or no number above zero.
pub fn limit(variable: &str, usual: Duration) -> Duration {
    set_to(std::env::var(variable).ok(), usual)
}

/// What such a text says; `usual` if there is none, or it is no number above zero.
pub fn set_to(text: Option<String>, usual: Duration) -> Duration {
    let ms = text.and_then(|text| text.trim().parse().ok()).filter(|ms| *ms > 0);
    ms.map_or(usual, Duration::from_millis)
}
