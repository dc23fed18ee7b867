//! `wingbeat completions`.

use anyhow::Result;
use clap::{Args, Command};
use clap_complete::Shell;

use crate::say::say;

/// Print a script that completes commands and options in a shell.
///
///     wingbeat completions bash > ~/.local/share/bash-completion/completions/wingbeat
///     wingbeat completions zsh > "${fpath[1]}/_wingbeat"
///     wingbeat completions fish > ~/.config/fish/completions/wingbeat.fish
#[derive(Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct CompletionsArgs {
    /// The shell.
    shell: Shell,
}

pub(crate) fn print(args: &CompletionsArgs, command: &mut Command) -> Result<()> {
    say!("{}", script(args.shell, command)?.trim_end());
    Ok(())
}

fn script(shell: Shell, command: &mut Command) -> Result<String> {
    let mut script = Vec::new();
    clap_complete::generate(shell, command, "wingbeat", &mut script);
    Ok(String::from_utf8(script)?)
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, ValueEnum};

    use super::*;

    #[test]
    fn each_shell_completes_all_commands_and_their_options() {
        let commands: Vec<String> =
            crate::Cli::command().get_subcommands().map(|command| command.get_name().to_owned()).collect();
        for shell in Shell::value_variants() {
            let script = script(*shell, &mut crate::Cli::command()).unwrap();
            for word in commands.iter().map(String::as_str).chain(["gpus-per-worker"]) {
                assert!(script.contains(word), "{shell}: {word}");
            }
        }
    }
}
