//! What `wingbeat status` shows: a summary first, then a table a kind of thing, and at the end what is wrong and what waits.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::time::Duration;

use comfy_table::{CellAlignment, ColumnConstraint, ContentArrangement, Table, presets};
use wingbeat_core::names::{printable, printable_lines};
use wingbeat_core::resources::{CPU, GPU, MEMORY};
use wingbeat_core::spec::ScopedName;
use wingbeat_core::{Amount, ResourceSet};
use wingbeat_net::messages::{ClusterState, OwningJob};

use crate::cluster::What;
use crate::say::{HEADING, TROUBLE};
use crate::sizes;

/// The columns of a line where the output is no terminal: programs that look for words find them on one line.
const PIPED_WIDTH: u16 = 500;
/// Columns whose cells stay on one line.
const UNBROKEN: [&str; 7] = ["node", "state", "job", "actor", "group", "id", "strategy"];
/// Fewer columns hold no id with its heading.
const NARROWEST: u16 = 40;
/// A column with so many letters can be read, however long its cells are.
const READABLE: usize = 24;
/// And one with names.
const READABLE_NAME: usize = 10;
/// The longest name that is shown of what has one in a table.
const LONGEST_NAME: usize = 40;

/// What is shown of a cluster; `is_all` says that nothing was left out.
pub(crate) fn text(state: &ClusterState, is_all: bool) -> String {
    let mut shown = Shown { text: String::new(), width: width() };
    shown.cluster(state, is_all);
    shown.text
}

/// One kind of thing of a cluster.
pub(crate) fn list(state: &ClusterState, what: What) -> String {
    let mut shown = Shown { text: String::new(), width: width() };
    shown.list(state, what);
    shown.text
}

/// Columns of a line.
fn width() -> u16 {
    let terminal = rustix::termios::tcgetwinsize(std::io::stdout());
    terminal.map_or(PIPED_WIDTH, |size| size.ws_col.max(NARROWEST))
}

struct Shown {
    text: String,
    /// Columns of a line.
    width: u16,
}

impl Shown {
    fn cluster(&mut self, state: &ClusterState, is_all: bool) {
        if is_all {
            self.summary(state);
        }
        self.nodes(state);
        self.jobs(state);
        self.actors(state);
        self.groups(state);
        self.quotas(state);
        self.troubles(state);
        self.waiting(state);
    }

    fn list(&mut self, state: &ClusterState, what: What) {
        let (is_empty, none) = match what {
            What::Nodes => (state.nodes.is_empty() && state.absent.is_empty(), "no nodes"),
            What::Jobs => (state.jobs.is_empty(), "no jobs"),
            What::Actors => (state.actors.is_empty(), "no actors"),
            What::Groups => (state.placement_groups.is_empty(), "no placement groups"),
            What::Quotas => (state.quotas.is_empty(), "no quotas"),
            What::Waiting => (state.pending.is_empty(), "nothing waits"),
        };
        if is_empty {
            return self.line(none);
        }
        match what {
            What::Nodes => {
                self.nodes(state);
                absent(state).into_iter().for_each(|line| self.line(&line));
            }
            What::Jobs => self.jobs(state),
            What::Actors => self.actors(state),
            What::Groups => self.groups(state),
            What::Quotas => self.quotas(state),
            What::Waiting => self.waiting(state),
        }
    }

    fn line(&mut self, line: &str) {
        let _ = writeln!(self.text, "{line}");
    }

    fn title(&mut self, title: &str) {
        let gap = if self.text.is_empty() { "" } else { "\n" };
        let _ = writeln!(self.text, "{gap}{HEADING}{title}{HEADING:#}");
    }

    /// Columns under their headings, without rules, and without those in which nothing stands. `numbers` are the columns that are aligned to
    /// the right. Neither they nor ids, which people copy, are broken into lines. Where that leaves too little room for the others, a row is
    /// a block of lines.
    fn table(&mut self, headings: &[&str], numbers: &[&str], rows: Vec<Vec<String>>) {
        let has_any = |column: &usize| rows.iter().any(|row| !row[*column].is_empty());
        let columns: Vec<usize> = (0..headings.len()).filter(has_any).collect();
        let headings: Vec<&str> = columns.iter().map(|column| headings[*column]).collect();
        let rows = rows.iter().map(|row| columns.iter().map(|column| row[*column].as_str()).collect());
        let rows: Vec<Vec<&str>> = rows.collect();
        let is_whole = |heading: &&str| numbers.contains(heading) || UNBROKEN.contains(heading);
        if least_width(&headings, &rows, is_whole) > usize::from(self.width) {
            return self.blocks(&headings, &rows);
        }
        let mut table = Table::new();
        table
            .load_preset(presets::NOTHING)
            .set_content_arrangement(ContentArrangement::Dynamic)
            .set_header(headings.clone());
        table.set_width(self.width);
        for (number, column) in table.column_iter_mut().enumerate() {
            column.set_padding((2, 0));
            if numbers.contains(&headings[number]) {
                column.set_cell_alignment(CellAlignment::Right);
            }
            if is_whole(&headings[number]) {
                column.set_constraint(ColumnConstraint::ContentWidth);
            }
        }
        table.add_rows(rows);
        let lines: Vec<String> = table.lines().map(|line| line.trim_end().to_owned()).collect();
        self.line(&lines.join("\n"));
    }

    /// Each row as a block of lines, with a heading and a cell each.
    fn blocks(&mut self, headings: &[&str], rows: &[Vec<&str>]) {
        let blocks = rows.iter().map(|row| {
            let mut table = Table::new();
            table.load_preset(presets::NOTHING).set_content_arrangement(ContentArrangement::Dynamic);
            table.set_width(self.width);
            table.add_rows(
                headings.iter().zip(row).filter(|(_, cell)| !cell.is_empty()).map(|(name, cell)| [name, cell]),
            );
            for column in table.column_iter_mut() {
                column.set_padding((2, 0));
            }
            if let Some(names) = table.column_mut(0) {
                names.set_constraint(ColumnConstraint::ContentWidth);
            }
            table.lines().map(|line| line.trim_end().to_owned()).collect::<Vec<_>>().join("\n")
        });
        let blocks: Vec<String> = blocks.collect();
        self.line(&blocks.join("\n\n"));
    }

    fn summary(&mut self, state: &ClusterState) {
        let cluster = state.cluster.map(|cluster| format!("{cluster}, ")).unwrap_or_default();
        self.line(&format!("{cluster}up {}", sizes::ago(Duration::from_secs(state.uptime_secs))));
        self.line(&counted(state).join(", "));
        let all = sum(state.nodes.iter().map(|node| &node.info.resources));
        let free = sum(state.nodes.iter().map(|node| &node.available));
        let free = |name| free.get(name).copied().unwrap_or_default();
        let used: Vec<String> = all.iter().map(|(name, total)| used_of(name, *total, free(name), true)).collect();
        if !used.is_empty() {
            self.line(&format!("used: {}", used.join(", ")));
        }
        if let Some(standby) = &state.standby {
            let at = standby.address.tcp.map_or_else(|| standby.address.unix.clone(), |tcp| tcp.to_string());
            self.line(&match standby.is_current {
                true => format!("a standby at {at} is up to date, and takes over when this head is gone"),
                false => format!("a standby at {at} does not have everything yet, and cannot take over"),
            });
        }
        if state.nodes.is_empty() && state.absent.is_empty() {
            self.line("add a node with `wingbeat worker --head <this head>`");
        }
    }

    fn nodes(&mut self, state: &ClusterState) {
        if state.nodes.is_empty() {
            return;
        }
        // A column for each resource that most clusters have, and a line for what else a node has.
        let is_there = |name: &str| state.nodes.iter().any(|node| node.info.resources.get(name) > Amount::ZERO);
        let own: Vec<&str> = [CPU, GPU, MEMORY].into_iter().filter(|name| is_there(name)).collect();
        let mut headings = vec!["node", "host", "state"];
        headings.extend(&own);
        headings.extend(["store", "leases"]);
        let numbers = headings.split_off(3);
        headings.extend(&numbers);
        let rows = state.nodes.iter().map(|node| {
            let mut row = vec![node.id.to_string(), short(&node.info.hostname), node.state.clone()];
            let of = |name: &&str| match node.info.resources.get(name) {
                total if total > Amount::ZERO => {
                    used_of(name, total.as_f64(), node.available.get(name).as_f64(), false)
                }
                _ => String::new(),
            };
            row.extend(own.iter().map(of));
            let store = bytes_of(node.store.used as f64, node.info.store_bytes as f64);
            row.extend([store, node.leases.to_string()]);
            row
        });
        let rows = rows.collect();
        self.title("nodes (used/total)");
        self.table(&headings, &numbers, rows);
        for node in &state.nodes {
            let others = node.info.resources.iter().filter(|(name, _)| !own.contains(name));
            let used = |name, total: Amount| used_of(name, total.as_f64(), node.available.get(name).as_f64(), true);
            let others: Vec<String> = others.map(|(name, total)| used(name, total)).collect();
            if !others.is_empty() {
                self.line(&format!("  {} also has {}", node.info.id, others.join(", ")));
            }
        }
    }

    fn jobs(&mut self, state: &ClusterState) {
        if state.jobs.is_empty() {
            return;
        }
        let rows = state.jobs.iter().map(|job| {
            let id = job.id.to_string();
            // Without what most jobs have: a namespace of their own, and no priority.
            let namespace = if job.namespace == id { String::new() } else { short(&job.namespace) };
            let priority = if job.priority == 0 { String::new() } else { job.priority.to_string() };
            vec![id, short(&job.name), namespace, priority, job.state.clone(), job.leases.to_string()]
        });
        let rows = rows.collect();
        self.title("jobs");
        let headings = ["job", "name", "namespace", "priority", "state", "leases"];
        self.table(&headings, &["priority", "leases"], rows);
    }

    fn actors(&mut self, state: &ClusterState) {
        if state.actors.is_empty() {
            return;
        }
        let rows = state.actors.iter().map(|actor| {
            vec![
                actor.id.to_string(),
                short(actor.class_name.rsplit("::").next().unwrap_or_default()),
                scoped(actor.name.as_ref()),
                actor.state.clone(),
                actor.node.map(|node| node.to_string()).unwrap_or_default(),
                actor.pid.map(|pid| pid.to_string()).unwrap_or_default(),
                if actor.restarts > 0 { actor.restarts.to_string() } else { String::new() },
            ]
        });
        let rows = rows.collect();
        self.title("actors");
        self.table(&["actor", "class", "name", "state", "node", "pid", "restarts"], &["pid", "restarts"], rows);
    }

    fn groups(&mut self, state: &ClusterState) {
        if state.placement_groups.is_empty() {
            return;
        }
        let rows = state.placement_groups.iter().map(|group| {
            let nodes: BTreeSet<String> =
                group.bundles.iter().filter_map(|(_, node)| node.map(|node| node.to_string())).collect();
            vec![
                group.id.to_string(),
                scoped(group.name.as_ref()),
                whose(&group.job),
                group.state.clone(),
                format!("{:?}", group.strategy),
                group.bundles.len().to_string(),
                nodes.into_iter().collect::<Vec<_>>().join(", "),
            ]
        });
        let rows = rows.collect();
        self.title("placement groups");
        self.table(&["group", "name", "of", "state", "strategy", "bundles", "nodes"], &["bundles"], rows);
    }

    fn quotas(&mut self, state: &ClusterState) {
        if state.quotas.is_empty() {
            return;
        }
        let rows = state
            .quotas
            .iter()
            .map(|quota| vec![short(&quota.namespace), quota.used.to_string(), quota.limit.to_string()]);
        let rows = rows.collect();
        self.title("quotas");
        self.table(&["namespace", "used", "limit"], &[], rows);
    }

    /// What a person may have to look after.
    fn troubles(&mut self, state: &ClusterState) {
        let mut lines = Vec::new();
        if let Some(why) = &state.journal_fails {
            lines.push(format!(
                "the head cannot write its journal, and grants nothing new until it can: {}",
                printable(why)
            ));
        }
        lines.extend(absent(state));
        for node in &state.nodes {
            let name = format!("{} ({})", printable(&node.info.hostname), node.info.id);
            if let Some(secs) = node.suspect_secs {
                lines.push(format!(
                    "{name} has been suspect for {secs} s: it has no connection to the head. Nothing new is placed there, and nothing of \
                     it runs elsewhere until it is back or lost"
                ));
            }
            if let Some(why) = &node.draining {
                lines.push(format!("{name} is being drained: {}", printable(why)));
            }
            if let Some(usage) = &node.memory_short {
                lines.push(format!("{name} is short of memory: {}", printable(usage)));
            }
            if node.store.waiting > 0 {
                let objects = if node.store.waiting == 1 { "object waits" } else { "objects wait" };
                let on_disk = match node.store.spilled {
                    0 => String::new(),
                    spilled => format!(", and {} on its disk", sizes::shown(spilled)),
                };
                lines.push(format!(
                    "{name}: {} {objects} for room in its object store, which has {} in memory{on_disk}",
                    node.store.waiting,
                    bytes_of(node.store.used as f64, node.info.store_bytes as f64),
                ));
            }
            lines.extend(node.held_devices.iter().map(|held| format!("{name} cannot give on {}", printable(held))));
        }
        if !lines.is_empty() {
            self.title("to look after");
            lines.iter().for_each(|line| self.line(&format!("  {TROUBLE}{line}{TROUBLE:#}")));
        }
    }

    fn waiting(&mut self, state: &ClusterState) {
        if state.pending.is_empty() {
            return;
        }
        let rows = state.pending.iter().map(|row| {
            let why = printable_lines(&row.why).into_owned();
            vec![short(&row.name), whose(&row.job), row.count.to_string(), why, row.id.clone()]
        });
        let rows = rows.collect();
        self.title("waiting (`wingbeat why ID` says more)");
        self.table(&["what", "of", "wants", "why", "id"], &["wants"], rows);
    }
}

/// The columns of a line that hold a table which can be read.
fn least_width(headings: &[&str], rows: &[Vec<&str>], is_whole: impl Fn(&&str) -> bool) -> usize {
    let letters = |text: &str| text.lines().map(|line| line.chars().count()).max().unwrap_or_default();
    let widths = headings.iter().enumerate().map(|(column, heading)| {
        let longest = rows.iter().map(|row| letters(row[column])).max().unwrap_or_default();
        let readable = (longest / 4).clamp(longest.min(READABLE_NAME), READABLE);
        2 + letters(heading).max(if is_whole(heading) { longest } else { readable })
    });
    widths.sum()
}

/// How much of what there is, in words.
fn counted(state: &ClusterState) -> Vec<String> {
    let of = |count: usize, one: &str, many: &str| match count {
        1 => format!("1 {one}"),
        count => format!("{count} {many}"),
    };
    let mut parts = vec![match state.nodes.len() {
        0 => "no nodes".to_owned(),
        count => of(count, "node", "nodes"),
    }];
    let suspect = state.nodes.iter().filter(|node| node.suspect_secs.is_some()).count();
    let draining = state.nodes.iter().filter(|node| node.draining.is_some()).count();
    let marks: Vec<String> = [(suspect, "suspect"), (draining, "draining"), (state.absent.len(), "not back yet")]
        .into_iter()
        .filter(|(count, _)| *count > 0)
        .map(|(count, mark)| format!("{count} {mark}"))
        .collect();
    if !marks.is_empty() {
        parts[0] = format!("{} ({})", parts[0], marks.join(", "));
    }
    let ended = state.jobs.iter().filter(|job| job.state == "ended").count();
    parts.push(of(state.jobs.len() - ended, "job", "jobs"));
    if ended > 0 {
        parts.push(of(ended, "ended job", "ended jobs"));
    }
    let mut states: BTreeMap<&str, usize> = BTreeMap::new();
    for actor in state.actors.iter().filter(|actor| actor.state != "alive") {
        *states.entry(&actor.state).or_default() += 1;
    }
    let others: Vec<String> = states.iter().map(|(state, count)| format!("{count} {state}")).collect();
    let actors = of(state.actors.len(), "actor", "actors");
    parts.push(if others.is_empty() { actors } else { format!("{actors} ({})", others.join(", ")) });
    if !state.placement_groups.is_empty() {
        parts.push(of(state.placement_groups.len(), "placement group", "placement groups"));
    }
    let (groups, leases): (Vec<_>, Vec<_>) = state.pending.iter().partition(|row| row.is_group);
    let leases: usize = leases.iter().map(|row| row.count as usize).sum();
    if leases > 0 {
        parts.push(format!("{} wanted", of(leases, "lease", "leases")));
    }
    if !groups.is_empty() {
        let wait = if groups.len() == 1 { "waits" } else { "wait" };
        parts.push(format!("{} {wait}", of(groups.len(), "placement group", "placement groups")));
    }
    if state.pending.is_empty() {
        parts.push("nothing waits".to_owned());
    }
    parts
}

/// All of it. A cluster may have more of something than an [`Amount`] holds.
fn sum<'a>(sets: impl Iterator<Item = &'a ResourceSet>) -> BTreeMap<&'a str, f64> {
    let mut all = BTreeMap::new();
    for (name, amount) in sets.flat_map(ResourceSet::iter) {
        *all.entry(name).or_default() += amount.as_f64();
    }
    all
}

/// `1.5/4 CPU`, and memory in a unit that people read.
fn used_of(name: &str, total: f64, free: f64, is_named: bool) -> String {
    // What the numbers themselves are exact to.
    let used = ((total - free) * 10_000.0).round() / 10_000.0;
    let unit = if is_named { format!(" {name}") } else { String::new() };
    if name == MEMORY {
        return bytes_of(used, total) + &unit;
    }
    format!("{used}/{total}{unit}")
}

/// So many bytes of so many, in few characters.
fn bytes_of(used: f64, total: f64) -> String {
    let shown = |amount: f64| sizes::shown(amount.max(0.0) as u64).replace(".0 ", " ");
    let (used, total) = (shown(used), shown(total));
    // The unit once, if both have the same.
    match (used.split_once(' '), total.split_once(' ')) {
        (Some((number, one)), Some((_, other))) if one == other => format!("{number}/{total}"),
        _ => format!("{used}/{total}"),
    }
}

fn short(name: &str) -> String {
    let name = printable(name);
    match name.char_indices().nth(LONGEST_NAME) {
        Some((at, _)) => format!("{}…", &name[..at]),
        None => name.into_owned(),
    }
}

fn scoped(name: Option<&ScopedName>) -> String {
    name.map(|name| short(&format!("{}/{}", name.namespace, name.name))).unwrap_or_default()
}

/// Whose something is: the name of its job, and what most jobs do not have, a namespace that was given and a priority.
fn whose(job: &OwningJob) -> String {
    let Some(id) = job.id.map(|id| id.to_string()) else { return String::new() };
    let name = if job.name.is_empty() { id.clone() } else { short(&job.name) };
    let namespace = Some(&job.namespace).filter(|namespace| !namespace.is_empty() && **namespace != id);
    let priority = (job.priority != 0).then(|| format!("priority {}", job.priority));
    let parts = [Some(name), namespace.map(|namespace| short(namespace)), priority];
    parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

/// Which nodes a head that was started again has not heard yet.
fn absent(state: &ClusterState) -> Option<String> {
    let absent: Vec<String> = state.absent.iter().map(ToString::to_string).collect();
    let since = sizes::ago(Duration::from_secs(state.uptime_secs));
    (!absent.is_empty()).then(|| format!("the head was started again {since} ago; not back yet: {}", absent.join(", ")))
}

#[cfg(test)]
#[path = "status_tests.rs"]
mod tests;
