//! When the devices of a lease that is over can be given on: when the last process that the lease started is gone, and
//! nobody uses their memory any more.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::{Semaphore, oneshot};
use wingbeat_core::ProcessId;
use wingbeat_net::messages::HeadMessage;

use super::Daemon;
use crate::gpus::{self, Users};

/// How often a device is looked at until it is free: the driver takes some milliseconds to take memory back.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// A device that is still in use then is shown to people, and looked at more rarely.
const SHOWN_AFTER: Duration = Duration::from_secs(2);
const THEN_EVERY: Duration = Duration::from_secs(1);

/// How long the driver's library may take to say who uses devices. It takes milliseconds, and stands still for minutes or for
/// ever when a device is broken.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// Questions to the driver's library, one at a time: when it stands still, it has one thread and no more.
pub(super) struct Questions {
    limit: Duration,
    turn: Arc<Semaphore>,
}

impl Default for Questions {
    fn default() -> Self {
        Questions { limit: ANSWER_LIMIT, turn: Arc::new(Semaphore::new(1)) }
    }
}

impl Questions {
    /// The answer, if it is there in time.
    async fn ask<T: Send + 'static>(&self, question: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        let answer = async {
            let turn = self.turn.clone().acquire_owned().await.ok()?;
            let asking = tokio::task::spawn_blocking(move || {
                let answer = question();
                drop(turn);
                answer
            });
            asking.await.ok()
        };
        tokio::time::timeout(self.limit, answer).await.ok().flatten()
    }
}

/// Processes that leave, and devices that cannot be given on.
#[derive(Default)]
pub(super) struct Held {
    leaving: Mutex<BTreeMap<ProcessId, oneshot::Sender<()>>>,
    devices: Mutex<BTreeMap<u32, String>>,
}

impl Held {
    /// A process has ended: the receiver hears when all that it had started has, too.
    pub(super) fn leaves(&self, process: ProcessId) -> oneshot::Receiver<()> {
        let (gone, receiver) = oneshot::channel();
        self.leaving.lock().insert(process, gone);
        receiver
    }

    /// Those that have ended, and may have left something behind.
    pub(super) fn leaving(&self) -> Vec<ProcessId> {
        self.leaving.lock().keys().copied().collect()
    }

    pub(super) fn is_gone(&self, process: ProcessId) {
        if let Some(gone) = self.leaving.lock().remove(&process) {
            // Nobody waits where no devices were held.
            let _ = gone.send(());
        }
    }
}

impl Daemon {
    /// Who uses each of some devices now; none if nobody can tell.
    async fn users_of_each(self: &Arc<Self>, devices: Vec<u32>) -> Option<Vec<Users>> {
        if devices.is_empty() {
            return Some(Vec::new());
        }
        let daemon = self.clone();
        self.devices
            .questions
            .ask(move || devices.iter().map(|device| daemon.devices.gpus.users(*device)).collect())
            .await
    }

    /// Who uses some devices now. Of whom nobody could tell in time, nobody is spared later.
    pub(super) async fn users_of(self: &Arc<Self>, devices: &[u32]) -> BTreeSet<u32> {
        let users = self.users_of_each(devices.to_vec()).await.unwrap_or_default();
        users.into_iter().flatten().map(|(pid, _)| pid).collect()
    }

    /// Waits until nothing of a lease uses its devices. One that stays in use is told of, with who uses it, and the
    /// others are given on: the head gives the device to nobody until it is free.
    pub(super) async fn devices_released(
        self: &Arc<Self>,
        devices: &[u32],
        before: &BTreeSet<u32>,
        gone: Option<oneshot::Receiver<()>>,
    ) {
        if let Some(gone) = gone {
            // It fails only when the guard is gone, and then so is the node.
            let _ = gone.await;
        }
        let since = Instant::now();
        let mut leaks = self.leaks_on(devices, before).await;
        while !leaks.is_empty() && since.elapsed() < SHOWN_AFTER {
            tokio::time::sleep(LOOK_EVERY).await;
            leaks = self.leaks_on(devices, before).await;
        }
        for (device, who) in leaks {
            tracing::warn!(device, who, "a GPU is given to nobody");
            self.hold(device, Some(who));
            self.vital("freeing devices", self.clone().wait_for_device(device, before.clone()));
        }
    }

    /// Those of the devices that are still in use, and by whom.
    async fn leaks_on(self: &Arc<Self>, devices: &[u32], before: &BTreeSet<u32>) -> Vec<(u32, String)> {
        let unshared = {
            let pool = self.pool.lock();
            // Others may share the device, each with a part of it.
            devices.iter().filter(|device| !pool.state.is_used(**device)).copied().collect::<Vec<u32>>()
        };
        let users = self.users_of_each(unshared.clone()).await;
        let leak = |(at, device): (usize, u32)| {
            let who = match &users {
                Some(users) => gpus::leaked(users.get(at)?, before, gpus::process_name)?,
                None => format!("the driver's library does not say within {ANSWER_LIMIT:?} who uses it"),
            };
            Some((device, who))
        };
        unshared.into_iter().enumerate().filter_map(leak).collect()
    }

    async fn wait_for_device(self: Arc<Self>, device: u32, before: BTreeSet<u32>) {
        let free = async {
            while let Some((_, who)) = self.leaks_on(&[device], &before).await.pop() {
                self.hold(device, Some(who));
                tokio::time::sleep(THEN_EVERY).await;
            }
            self.hold(device, None);
        };
        self.until_ended(free).await;
    }

    fn hold(&self, device: u32, who: Option<String>) {
        let mut devices = self.devices.held.devices.lock();
        let before = devices.get(&device).cloned();
        if before == who {
            return;
        }
        match who {
            Some(who) => drop(devices.insert(device, who)),
            None => drop(devices.remove(&device)),
        }
        let held = devices.iter().map(|(device, who)| (*device, who.clone())).collect();
        self.head.link.send(HeadMessage::DevicesHeld(held));
    }

    /// Devices that cannot be given on, and what holds each, in words.
    pub(super) fn what_is_held(&self) -> Vec<(u32, String)> {
        self.devices.held.devices.lock().iter().map(|(device, who)| (*device, who.clone())).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn a_question_that_is_never_answered_holds_up_one_thread_and_nobody_who_asks() {
        let questions = Questions { limit: Duration::from_millis(1), ..Questions::default() };
        let (answers, answer) = mpsc::channel::<u32>();
        let (begun, begins) = oneshot::channel();
        let asked = questions.ask(move || {
            let _ = begun.send(());
            answer.recv()
        });
        assert!(asked.await.is_none());
        begins.await.unwrap();
        let next = questions.ask(|| panic!("asked while another question is"));
        assert_eq!(next.await, None::<u32>);
        answers.send(1).unwrap();
        let patient = Questions { limit: ANSWER_LIMIT, turn: questions.turn.clone() };
        assert_eq!(patient.ask(|| 2).await, Some(2));
    }
}
