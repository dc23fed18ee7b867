//! `wingbeat devices`.

use anyhow::Result;
use clap::Args;
use comfy_table::{Table, presets};
use wingbeat_worker::gpus::{Gpus, Offered};

use crate::say::say;
use crate::sizes;

/// Show this machine's GPUs, as a node here would offer them.
#[derive(Args)]
pub(crate) struct DevicesArgs {
    /// As a JSON list.
    #[arg(long)]
    json: bool,
}

pub(crate) fn devices(args: &DevicesArgs) -> Result<()> {
    let gpus = Gpus::find(Offered::All)?;
    if args.json {
        let known: Vec<serde_json::Value> = (0..gpus.count as usize)
            .map(|index| match gpus.devices.get(index) {
                Some(device) => serde_json::json!({
                    "index": index, "model": device.model, "memory": device.memory, "uuid": device.uuid,
                    "island": device.island, "numa": device.numa,
                }),
                None => serde_json::json!({ "index": index }),
            })
            .collect();
        say!("{}", serde_json::to_string(&known)?);
        return Ok(());
    }
    if gpus.count == 0 {
        say!("this machine has no GPU that can be used");
        return Ok(());
    }
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header(["GPU", "model", "memory", "NVLink island", "NUMA node"]);
    let number = |number: Option<u32>| number.map(|number| number.to_string()).unwrap_or_default();
    for index in 0..gpus.count {
        let row = match gpus.devices.get(index as usize) {
            Some(device) => {
                [device.model.clone(), sizes::shown(device.memory), number(device.island), number(device.numa)]
            }
            None => ["not known".to_owned(), String::new(), String::new(), String::new()],
        };
        table.add_row([index.to_string()].into_iter().chain(row));
    }
    say!("{table}");
    Ok(())
}
