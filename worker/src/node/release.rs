//! When the devices of a lease that is over can be given on: when the last process that the lease started is gone, and
//! nobody uses their memory any more.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::oneshot;
use wingbeat_core::ProcessId;
use wingbeat_net::messages::HeadMessage;

use super::Daemon;
use crate::gpus;

/// How often a device is looked at until it is free: the driver takes some milliseconds to take memory back.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// A device that is still in use then is shown to people, and looked at more rarely.
const SHOWN_AFTER: Duration = Duration::from_secs(2);
const THEN_EVERY: Duration = Duration::from_secs(1);

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
    /// Who uses some devices now.
    pub(super) fn users_of(&self, devices: &[u32]) -> BTreeSet<u32> {
        devices.iter().flat_map(|device| self.gpus.users(*device)).map(|(pid, _)| pid).collect()
    }

    /// Waits until nothing of a lease uses its devices. One that stays in use is told of, with who uses it, and the
    /// others are given on: the head gives the device to nobody until it is free.
    pub(super) async fn devices_released(
        self: &Arc<Self>,
        devices: &[u32],
        before: &BTreeSet<u32>,
        gone: oneshot::Receiver<()>,
    ) {
        // It fails only when the guard is gone, and then so is the node.
        let _ = gone.await;
        let since = Instant::now();
        while since.elapsed() < SHOWN_AFTER {
            if devices.iter().all(|device| self.leak_on(*device, before).is_none()) {
                return;
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        for device in devices {
            if let Some(who) = self.leak_on(*device, before) {
                tracing::warn!(device, who, "a GPU is given to nobody");
                self.hold(*device, Some(who));
                tokio::spawn(self.clone().wait_for_device(*device, before.clone()));
            }
        }
    }

    fn leak_on(&self, device: u32, before: &BTreeSet<u32>) -> Option<String> {
        // Others may share the device, each with a part of it.
        let shared = self.pool.lock().workers.values().filter(|worker| worker.gpus.contains(&device)).count() > 0;
        let users = self.gpus.users(device);
        if shared { None } else { gpus::leaked(&users, before, gpus::process_name) }
    }

    async fn wait_for_device(self: Arc<Self>, device: u32, before: BTreeSet<u32>) {
        let free = async {
            while let Some(who) = self.leak_on(device, &before) {
                self.hold(device, Some(who));
                tokio::time::sleep(THEN_EVERY).await;
            }
            self.hold(device, None);
        };
        self.until_ended(free).await;
    }

    fn hold(&self, device: u32, who: Option<String>) {
        let mut devices = self.held.devices.lock();
        let before = devices.get(&device).cloned();
        if before == who {
            return;
        }
        match who {
            Some(who) => drop(devices.insert(device, who)),
            None => drop(devices.remove(&device)),
        }
        let held = devices.iter().map(|(device, who)| (*device, who.clone())).collect();
        self.head.send(HeadMessage::DevicesHeld(held));
    }
}
