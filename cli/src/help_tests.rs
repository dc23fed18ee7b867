//! What `--help` says, of every command.

use clap::{Command, CommandFactory};

use crate::Cli;

/// The long help, without what the environment holds.
fn help(command: &Command) -> String {
    let mut command = command.clone().mut_args(|argument| argument.hide_env_values(true));
    let help = command.render_long_help().to_string();
    help.lines().map(str::trim_end).collect::<Vec<_>>().join("\n")
}

/// The text of each command is in `snapshots/`. After a change, `INSTA_UPDATE=always cargo test -p wingbeat-cli help` writes them anew.
#[test]
fn of_every_command() {
    let mut cli = Cli::command();
    cli.build();
    let mut left = vec![("wingbeat".to_owned(), &cli)];
    while let Some((name, command)) = left.pop() {
        insta::assert_snapshot!(name.replace(' ', "-"), help(command));
        let below = command.get_subcommands().filter(|below| below.get_name() != "help" && !below.is_hide_set());
        left.extend(below.map(|below| (format!("{name} {}", below.get_name()), below)));
    }
}
