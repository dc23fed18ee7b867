//! Programs that this process sees through, whoever has forked them: the Python of a rank. `wingbeat stack` shows what their threads do
//! beside those of the process itself, and the memory that they use counts as the process's.

use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;
use wingbeat_net::messages::ProgramStacks;

/// A program that runs, or has not begun yet, or has ended.
pub trait Program: Send + Sync {
    /// What its threads do; nothing if it does not run. Blocks until the program has answered, for seconds at most.
    fn stacks(&self) -> Option<ProgramStacks>;
}

/// Who tells the node which program this process sees through.
static TELLER: OnceLock<Box<dyn Fn(Option<u32>) + Send + Sync>> = OnceLock::new();

/// From now on the node is told by this.
pub fn tell_by(teller: impl Fn(Option<u32>) + Send + Sync + 'static) {
    // There is one executor in a process.
    let _ = TELLER.set(Box::new(teller));
}

/// The program has this process id, or is over. Of several, the last one counts.
pub fn runs_as(pid: Option<u32>) {
    if let Some(teller) = TELLER.get() {
        teller(pid);
    }
}

/// Each is dropped by whoever sees it through.
static KNOWN: Mutex<Vec<Weak<dyn Program>>> = Mutex::new(Vec::new());

/// From now on the program is asked, as long as it is kept.
pub fn add(program: &Arc<dyn Program>) {
    let mut known = KNOWN.lock();
    known.retain(|other| other.strong_count() > 0);
    known.push(Arc::downgrade(program));
}

/// What all of them do. Blocks as long as they take.
pub fn stacks() -> Vec<ProgramStacks> {
    let known: Vec<_> = KNOWN.lock().iter().filter_map(Weak::upgrade).collect();
    known.iter().filter_map(|program| program.stacks()).collect()
}

/// The name of a process or thread, and what the kernel has it do.
///
/// `folder` is its folder in `/proc`. None if it has ended.
pub fn doing(folder: &str) -> Option<(String, String)> {
    let stat = std::fs::read_to_string(format!("{folder}/stat")).ok()?;
    let (name, rest) = stat.split_once('(')?.1.rsplit_once(')')?;
    let place = std::fs::read_to_string(format!("{folder}/wchan")).ok();
    let verb = match rest.split_whitespace().next()? {
        "R" => "runs",
        "D" => "waits for a device, and hears nothing meanwhile",
        "T" => "is stopped",
        "t" => "is held by a debugger",
        _ => "sleeps",
    };
    let place = place.filter(|place| verb != "runs" && !place.is_empty() && place != "0");
    let state = place.map_or_else(|| verb.to_owned(), |place| format!("{verb} in the kernel's {place}"));
    Some((name.to_owned(), state))
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Named(Option<&'static str>);

    impl Program for Named {
        fn stacks(&self) -> Option<ProgramStacks> {
            Some(ProgramStacks { pid: 7, name: "test".into(), stacks: self.0?.to_owned() })
        }
    }

    #[test]
    fn those_that_run_are_asked_until_they_are_dropped() {
        let said = || stacks().into_iter().map(|program| program.stacks).collect::<Vec<_>>();
        let first: Arc<dyn Program> = Arc::new(Named(Some("first")));
        let second: Arc<dyn Program> = Arc::new(Named(Some("second")));
        let not_begun: Arc<dyn Program> = Arc::new(Named(None));
        [&first, &second, &not_begun].into_iter().for_each(add);
        assert_eq!(said(), ["first", "second"]);
        drop(first);
        assert_eq!(said(), ["second"]);
    }
}
