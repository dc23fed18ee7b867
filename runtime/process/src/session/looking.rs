//! Whoever looks every so often at something of this process, as long as there is something to look at.

use std::time::Duration;

use crate::wire::looks::Looks;
use crate::wire::process::{Process, Wire};

impl Process {
    /// There is something to look at: unless somebody looks already, it is looked `every` so often until `look` finds nothing left, and nothing `has_come`
    /// meanwhile. A process of which this ends early ends: what it would tell the head would never be told.
    pub(crate) fn look_every(
        &self,
        every: Duration,
        (what, looks): (&'static str, fn(&Wire) -> &Looks),
        mut look: impl FnMut(&Process) -> bool + Send + 'static,
        has_come: impl Fn(&Process) -> bool + Send + 'static,
    ) {
        if !looks(&self.wire).begin() {
            return;
        }
        let process = self.clone();
        self.vital(what, async move {
            loop {
                tokio::time::sleep(every).await;
                if !look(&process) && looks(&process.wire).end(|| has_come(&process)) {
                    return;
                }
            }
        });
    }
}
