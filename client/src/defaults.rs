//! Options of calls that are not made by whoever chooses them: `wingbeat-train` places the calls of ranks so, which a closure of the user's
//! makes.

use std::borrow::Cow;
use std::cell::RefCell;

use wingbeat_process::options::TaskOptions;

thread_local! {
    static DEFAULTS: RefCell<Option<TaskOptions>> = const { RefCell::new(None) };
}

/// Calls `submit`. Remote functions that it calls on this thread run where `defaults` says, and hold what it says as far as the options of the
/// call say nothing of that; what the function's attribute says of it gives way. Calls of actors are as they are.
#[doc(hidden)]
pub fn with_defaults<T>(defaults: TaskOptions, submit: impl FnOnce() -> T) -> T {
    struct Restore(Option<TaskOptions>);
    impl Drop for Restore {
        fn drop(&mut self) {
            DEFAULTS.set(self.0.take());
        }
    }
    let _restore = Restore(DEFAULTS.replace(Some(defaults)));
    submit()
}

/// The options of a call, with this thread's defaults.
pub(crate) fn filled(options: &TaskOptions) -> Cow<'_, TaskOptions> {
    DEFAULTS.with_borrow(|defaults| match defaults {
        Some(defaults) => Cow::Owned(over(options.clone(), defaults)),
        None => Cow::Borrowed(options),
    })
}

fn over(mut options: TaskOptions, defaults: &TaskOptions) -> TaskOptions {
    options.num_cpus = options.num_cpus.or(defaults.num_cpus);
    let (place, other) = (&mut options.place, &defaults.place);
    if place.num_gpus.is_none() && place.gpu_memory.is_none() {
        (place.num_gpus, place.gpu_memory) = (other.num_gpus, other.gpu_memory);
    }
    place.memory = place.memory.or(other.memory);
    for (name, amount) in &other.resources {
        place.resources.entry(name.clone()).or_insert(*amount);
    }
    // What goes with the place is there: what looks after a rank, and its checkpoints.
    place.strategy = other.strategy.clone();
    options
}

#[cfg(test)]
mod tests {
    use wingbeat_core::PlacementGroupId;
    use wingbeat_core::spec::Strategy;

    use super::*;

    fn of_a_rank() -> TaskOptions {
        let mut options = TaskOptions { num_cpus: Some(2.0), ..TaskOptions::default() };
        options.place.num_gpus = Some(1.0);
        options.place.resources.insert("license".into(), 0.5);
        options.place.strategy = Strategy::Bundle { group: PlacementGroupId(7), index: Some(3) };
        options
    }

    #[test]
    fn a_call_takes_what_it_does_not_say_itself() {
        let nothing = TaskOptions::default();
        with_defaults(of_a_rank(), || {
            let filled = filled(&nothing);
            assert_eq!((filled.num_cpus, &filled.place), (Some(2.0), &of_a_rank().place));
        });
        assert!(filled(&nothing).num_cpus.is_none(), "only while it is made");
    }

    #[test]
    fn what_a_call_says_itself_it_holds_in_the_given_place() {
        let mut own = TaskOptions { num_cpus: Some(0.5), ..TaskOptions::default() };
        own.place.gpu_memory = Some(wingbeat_core::ByteSize::gib(8));
        own.place.resources.insert("license".into(), 1.0);
        own.place.strategy = Strategy::Spread;
        let filled = with_defaults(of_a_rank(), || filled(&own).into_owned());
        own.place.strategy = of_a_rank().place.strategy;
        assert_eq!((filled.num_cpus, filled.place), (Some(0.5), own.place));
    }
}
