//! What `Debug` says of an event, in one line that a person can read: ids and names stay, and what is nested deeply goes.

/// Entries of a list that are shown.
const SHOWN: usize = 8;
/// A nested struct without an id is shown if it is no longer than this; and so much of a text.
const SHORT: usize = 80;

/// Names that say nothing which the line does not say otherwise.
const WRAPPERS: &[&str] = &["Event", "Some", "Process", "Work"];

/// A value as `Debug` shows it.
#[derive(Debug)]
enum Shown<'a> {
    /// A number, an id, a text in quotes, or a name without fields.
    Word(&'a str),
    /// `Name(a, b)`, or a tuple if the name is empty.
    Tuple(&'a str, Vec<Shown<'a>>),
    /// `Name { a: b }`, or a map if the name is empty. What has no key, as in a set, has an empty one.
    Fields(&'a str, Vec<(&'a str, Shown<'a>)>),
    List(Vec<Shown<'a>>),
}

/// `text` in short. In a long list, the entries in which `wanted` occurs are shown. What cannot be read stays as it is.
pub(super) fn brief(text: &str, wanted: Option<&str>) -> String {
    let mut reader = Reader { rest: text };
    match reader.value(true) {
        Some(value) if reader.rest.is_empty() => value.text(wanted, true),
        _ => text.to_owned(),
    }
}

/// Whether `text` names it. `7a31.12` is a task, and no part of `7a31.120`.
pub(super) fn names(text: &str, wanted: &str) -> bool {
    let is_number = wanted.contains('.') && wanted.ends_with(|sign: char| sign.is_ascii_digit());
    let goes_on = |at: usize| text[at + wanted.len()..].starts_with(|sign: char| sign.is_ascii_digit());
    text.match_indices(wanted).any(|(at, _)| !(is_number && goes_on(at)))
}

struct Reader<'a> {
    rest: &'a str,
}

impl<'a> Reader<'a> {
    fn takes(&mut self, sign: &str) -> bool {
        let rest = self.rest.strip_prefix(sign);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    fn take(&mut self, length: usize) -> &'a str {
        let (taken, rest) = self.rest.split_at(length);
        self.rest = rest;
        taken
    }

    /// A word ends before a bracket, a comma, or, unless it is the whole text, a colon.
    fn word(&mut self, is_whole: bool) -> &'a str {
        let is_end = |(at, sign): &(usize, char)| match sign {
            ',' | '(' | ')' | '[' | ']' | '{' | '}' | '"' => true,
            ':' => !is_whole && self.rest[at + 1..].starts_with(' '),
            ' ' => self.rest[at + 1..].starts_with(['{', '}']),
            _ => false,
        };
        let end = self.rest.char_indices().find(is_end).map_or(self.rest.len(), |(at, _)| at);
        self.take(end)
    }

    /// A text in quotes, with them.
    fn quoted(&mut self) -> Option<&'a str> {
        let mut is_escaped = false;
        let is_end = |(at, sign): &(usize, char)| {
            let ends = *at > 0 && *sign == '"' && !is_escaped;
            is_escaped = *sign == '\\' && !is_escaped;
            ends
        };
        let end = self.rest.char_indices().find(is_end)?.0;
        Some(self.take(end + 1))
    }

    fn items(&mut self, end: &str) -> Option<Vec<Shown<'a>>> {
        let mut items = Vec::new();
        while !self.takes(end) {
            if !items.is_empty() && !self.takes(", ") {
                return None;
            }
            items.push(self.value(false)?);
        }
        Some(items)
    }

    fn fields(&mut self) -> Option<Vec<(&'a str, Shown<'a>)>> {
        let mut fields = Vec::new();
        loop {
            if self.takes(" }") || self.takes("}") {
                return Some(fields);
            }
            if !fields.is_empty() && !self.takes(", ") {
                return None;
            }
            self.takes(" ");
            let first = self.value(false)?;
            fields.push(match (first, self.takes(": ")) {
                (Shown::Word(key), true) => (key, self.value(false)?),
                // The key of a map may be anything; its value says enough.
                (_, true) => ("", self.value(false)?),
                (value, false) => ("", value),
            });
        }
    }

    fn value(&mut self, is_whole: bool) -> Option<Shown<'a>> {
        if self.rest.starts_with('"') {
            return self.quoted().map(Shown::Word);
        }
        if self.takes("[") {
            return self.items("]").map(Shown::List);
        }
        let name = self.word(is_whole);
        if self.takes("(") {
            return Some(Shown::Tuple(name, self.items(")")?));
        }
        if self.takes(" {") || (name.is_empty() && self.takes("{")) {
            return Some(Shown::Fields(name, self.fields()?));
        }
        (!name.is_empty()).then_some(Shown::Word(name))
    }
}

/// Whether a word is the id of something.
fn is_id(word: &str) -> bool {
    const KINDS: &[&str] = &["task", "object", "actor", "lease", "process", "node", "group", "job", "cluster"];
    word.split_once('-').is_some_and(|(kind, _)| KINDS.contains(&kind))
}

impl<'a> Shown<'a> {
    fn holds(&self, wanted: &str) -> bool {
        match self {
            Shown::Word(word) => names(word, wanted),
            Shown::Tuple(name, items) => names(name, wanted) || items.iter().any(|item| item.holds(wanted)),
            Shown::Fields(name, fields) => {
                names(name, wanted) || fields.iter().any(|(key, value)| names(key, wanted) || value.holds(wanted))
            }
            Shown::List(items) => items.iter().any(|item| item.holds(wanted)),
        }
    }

    fn is_nothing(&self) -> bool {
        match self {
            Shown::Word(word) => *word == "None",
            Shown::List(items) => items.is_empty(),
            Shown::Fields("", fields) => fields.is_empty(),
            _ => false,
        }
    }

    /// `is_outer`: nothing but names in brackets is around it.
    fn text(&self, wanted: Option<&str>, is_outer: bool) -> String {
        let joined = |items: Vec<String>| items.join(", ");
        match self {
            Shown::Word(word) if word.starts_with('"') => shortened(word),
            Shown::Word(word) => (*word).to_owned(),
            Shown::Tuple(name, items) => match items.as_slice() {
                [only] if WRAPPERS.contains(name) => only.text(wanted, is_outer),
                items => {
                    let items = items.iter().filter(|item| !item.is_nothing());
                    format!("{name}({})", joined(items.map(|item| item.text(wanted, is_outer)).collect()))
                }
            },
            Shown::List(items) => {
                let mut shown: Vec<&Shown> = items.iter().collect();
                if items.len() > SHOWN {
                    // Stable: else in their order.
                    shown.sort_by_key(|item| !wanted.is_some_and(|wanted| item.holds(wanted)));
                    shown.truncate(SHOWN);
                }
                let mut texts: Vec<_> = shown.iter().map(|item| item.text(wanted, false)).collect();
                if items.len() > SHOWN {
                    texts.push(format!("and {} more", items.len() - SHOWN));
                }
                format!("[{}]", joined(texts))
            }
            Shown::Fields(name, fields) => {
                if !is_outer {
                    if let Some(title) = title(fields) {
                        return title;
                    }
                    if let Some(id) = fields.iter().find_map(|(_, value)| value.deep_id()) {
                        return format!("{name}({id})");
                    }
                }
                let fields = fields.iter().filter(|(_, value)| !value.is_nothing());
                let text = joined(fields.map(|field| named(field, wanted)).collect());
                match (is_outer || text.len() <= SHORT, name.is_empty()) {
                    (true, true) => format!("{{{text}}}"),
                    (true, false) => format!("{name} {{ {text} }}"),
                    (false, _) => format!("{name}{{…}}"),
                }
            }
        }
    }

    /// The first id in the structs in it.
    fn deep_id(&self) -> Option<&'a str> {
        match self {
            Shown::Fields(_, fields) => fields.iter().find_map(|(_, value)| value.id().or_else(|| value.deep_id())),
            _ => None,
        }
    }

    /// Its id, if it is nothing else.
    fn id(&self) -> Option<&'a str> {
        match self {
            Shown::Word(word) => is_id(word).then_some(word),
            Shown::Tuple("Some", items) => items.first()?.id(),
            _ => None,
        }
    }
}

fn named((key, value): &(&str, Shown<'_>), wanted: Option<&str>) -> String {
    let value = value.text(wanted, false);
    if key.is_empty() { value } else { format!("{key}: {value}") }
}

/// What to call a nested struct: its first id, its name, and what is unusual about it.
fn title(fields: &[(&str, Shown<'_>)]) -> Option<String> {
    let mut title = fields.iter().find_map(|(_, value)| value.id())?.to_owned();
    for (key, value) in fields {
        match (*key, value) {
            ("name" | "class_name", Shown::Word(name)) if name.starts_with('"') => title += &format!(" {name}"),
            ("name", Shown::Tuple("Some", items)) => {
                items.iter().for_each(|name| title += &format!(" {}", name.text(None, false)));
            }
            ("attempt", Shown::Word(attempt)) if *attempt != "0" => title += &format!(" attempt {attempt}"),
            ("outcome", Shown::Tuple("Failed", _)) => title += " failed",
            _ => {}
        }
    }
    Some(title)
}

fn shortened(text: &str) -> String {
    match text.char_indices().nth(SHORT) {
        Some((end, _)) => format!("{}…\"", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::{brief, names};

    #[test]
    fn a_task_is_not_named_by_one_whose_number_goes_on() {
        for (text, is_named) in
            [("task-7a31.120", false), ("object-7a31.12.0", true), ("[task-7a31.120, task-7a31.12]", true)]
        {
            assert_eq!(names(text, "7a31.12"), is_named, "{text}");
        }
        assert!(names("lease-9f1c22", "9f1c2"));
    }

    #[test]
    fn an_event_is_one_line_with_ids_and_names() {
        for (debug, line) in [
            (
                "Event(Says(Process(process-7a31), ReturnLease(lease-9f1c)))",
                "Says(process-7a31, ReturnLease(lease-9f1c))",
            ),
            (
                "Work(Tasks { lease: lease-1, first: 0, tasks: [TaskSpec { id: task-0a.5, function: function-2, name: \
                 Some(\"prepare\"), args: [Value(Packed { bytes: 8 bytes, refs: None })], outputs: Fixed(1), attempt: 2, \
                 parent: Some(task-0a.1) }] })",
                "Tasks { lease: lease-1, first: 0, tasks: [task-0a.5 \"prepare\" attempt 2] }",
            ),
            (
                "Results([TaskResult { id: task-0a.5, attempt: 0, outcome: Failed(Cancelled { task: \"a, (b\" }), \
                 ran_nanos: 1 }])",
                "Results([task-0a.5 failed])",
            ),
            (
                "Resolved([(object-0a.5.0, Inline(Packed { bytes: 8 bytes, refs: None }))])",
                "Resolved([(object-0a.5.0, Inline(Packed { bytes: 8 bytes }))])",
            ),
            (
                "WorkerDied(WorkerDeath { process: process-1, lease: None, exit: Exit { code: None, signal: Some(6), \
                 stderr: [] } })",
                "WorkerDied(WorkerDeath { process: process-1, exit: Exit { signal: 6 } })",
            ),
            (
                "Lost { at: [node-1], why: \"a \\\"quoted\\\" word\" }",
                "Lost { at: [node-1], why: \"a \\\"quoted\\\" word\" }",
            ),
            (
                "Actor { actor: actor-1, state: Alive { address: Address { process: process-2, machine: MachineId(3) }, \
                 incarnation: Incarnation(0) } }",
                "Actor { actor: actor-1, state: Alive(process-2) }",
            ),
            ("HeadConnected", "HeadConnected"),
        ] {
            assert_eq!(brief(debug, None), line);
        }
    }

    #[test]
    fn of_a_long_list_the_wanted_entry_is_shown() {
        let ids: Vec<_> = (0..50).map(|number| format!("object-0a.{number}.0")).collect();
        let text = format!("Subscribe([{}])", ids.join(", "));
        assert!(brief(&text, Some("0a.42.")).starts_with("Subscribe([object-0a.42.0, object-0a.0.0,"));
        assert!(brief(&text, None).ends_with("object-0a.7.0, and 42 more])"));
    }

    #[test]
    fn what_cannot_be_read_stays_as_it_is() {
        for text in ["Odd(", "a } b", "[1, 2", "\"open", "", "{ a: }"] {
            assert_eq!(brief(text, None), text);
        }
    }
}
