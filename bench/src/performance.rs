//! `docs/performance.md` and its plots.

use std::fmt::Write;
use std::path::Path;

use anyhow::{Context, Result};

use crate::report::{Report, shown};
use crate::{growth, plot};

/// Measures how costs grow, and writes the page.
pub(crate) fn write(dir: &Path, report: &Report) -> Result<()> {
    let mut page = String::new();
    page.push_str("# Performance\n\n");
    page.push_str(
        "Written by `cargo xtask bench --docs`. Rows of tasks and actors run user code in other processes than the driver's and\n",
    );
    page.push_str(
        "check every result. No user code runs elsewhere in `limit_*`, `put_*`, `get_*`, `value_*`, `decisions_*`, `status_*`,\n",
    );
    page.push_str(
        "`placement_group_*` and `spill_*`. The column of Ray calls its Python API, 300 to 5,000 times a row.\n",
    );
    page.push_str("The limits are what the machine itself does, measured in the same run; machines differ\n");
    page.push_str("and drift, so compare within one run only. Above 1 is better, for rates and for times.\n\n");
    writeln!(page, "{}\n", machine())?;
    writeln!(page, "| row | median | worst to best | must reach | reached | × {} |", report.peer())?;
    page.push_str("|---|---|---|---|---|---|\n");
    for row in report.rows() {
        writeln!(page, "| {} |", row.join(" | "))?;
    }
    page.push_str(
        "\n`decisions_*` are leases that the head's state machine granted, had started, took back and ended, one thread, no\n\
         network; `placement_group_create_remove` goes through a head that writes each group to its journal before it says\n\
         that it knows it. For comparison, what Ray publishes of its own releases, over a cluster: 394 tasks/s,\n\
         551 actors/s, and 19 placement groups/s made and removed.\n",
    );
    page.push_str("\n## Growth\n\nWhat one operation costs, the best of three, in microseconds.\n");
    for (number, growth) in growth::all()?.iter().enumerate() {
        let image = format!("growth-{}.svg", number + 1);
        std::fs::write(dir.join(&image), plot::svg(growth)?).with_context(|| format!("writing {image}"))?;
        writeln!(page, "\n### {}, by {}\n\n![{}]({image})\n", growth.name, growth.of, growth.name)?;
        let sizes: Vec<String> = growth.points.iter().map(|(size, _)| size.to_string()).collect();
        let costs: Vec<String> = growth.points.iter().map(|(_, cost)| shown(*cost)).collect();
        writeln!(page, "| {} | {} |", growth.of, sizes.join(" | "))?;
        writeln!(page, "|---|{}", "---|".repeat(sizes.len()))?;
        writeln!(page, "| µs | {} |", costs.join(" | "))?;
    }
    let file = dir.join("performance.md");
    std::fs::write(&file, page).with_context(|| format!("writing {}", file.display()))
}

fn machine() -> String {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": ").map(|(_, name)| name));
    let memory = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib =
        memory.lines().find_map(|line| line.strip_prefix("MemTotal:")?.split_whitespace().next()?.parse::<u64>().ok());
    let system = rustix::system::uname();
    format!(
        "{cpus} CPUs ({}), {:.0} GiB, {} {}, Wingbeat {}, release build.",
        model.unwrap_or("unknown"),
        kib.unwrap_or(0) as f64 / f64::from(1 << 20),
        system.sysname().to_string_lossy(),
        system.release().to_string_lossy(),
        env!("CARGO_PKG_VERSION")
    )
}
