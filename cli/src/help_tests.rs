//! What `--help` says, where options are shared between commands.

use clap::CommandFactory;

use crate::Cli;

/// The long help, without what the environment holds.
fn help(name: &str) -> String {
    let mut cli = Cli::command().term_width(100);
    cli.build();
    let command = cli.find_subcommand_mut(name).unwrap();
    let mut command = command.clone().mut_args(|argument| argument.hide_env_values(true));
    let help = command.render_long_help().to_string();
    help.lines().map(str::trim_end).collect::<Vec<_>>().join("\n")
}

#[test]
fn of_status() {
    insta::assert_snapshot!(help("status"), @r"
    Show the machines, jobs, actors and whatever waits, and why it waits

    Usage: wingbeat status [OPTIONS] [ID]

    Arguments:
      [ID]
              Show only what has this id, or begins with it alone, and what is on that node, or of that job waits: node-…, actor-…, group-…, job-…

    Options:
          --address <ADDRESS>
              The head, as host:port, or several places where it may be; this machine's default head if nothing is said

              [env: WINGBEAT_ADDRESS]

          --context <NAME>
              The cluster of this name in the configuration; see `wingbeat context --help`

              [env: WINGBEAT_CONTEXT]

          --token-file <TOKEN_FILE>
              File with the cluster's token; else as for `wingbeat head`

          --json
              Print JSON for programs

          --watch[=<SECONDS>]
              Show it again every 2 seconds, or every SECONDS, until Ctrl-C. Where the output is no terminal, one after the other

      -h, --help
              Print help
    ");
}

#[test]
fn of_list() {
    insta::assert_snapshot!(help("list"), @r"
    List one kind of thing of a cluster: a table, or with --json an array for programs

    Usage: wingbeat list [OPTIONS] <WHAT>

    Arguments:
      <WHAT>
              What is listed

              Possible values:
              - nodes
              - jobs
              - actors
              - groups:  Placement groups
              - quotas
              - waiting: What wants leases or room, and why it has none

    Options:
          --address <ADDRESS>
              The head, as host:port, or several places where it may be; this machine's default head if nothing is said

              [env: WINGBEAT_ADDRESS]

          --context <NAME>
              The cluster of this name in the configuration; see `wingbeat context --help`

              [env: WINGBEAT_CONTEXT]

          --token-file <TOKEN_FILE>
              File with the cluster's token; else as for `wingbeat head`

          --json
              Print a JSON array for programs, with the fields of `wingbeat status --json`

          --watch[=<SECONDS>]
              Show it again every 2 seconds, or every SECONDS, until Ctrl-C. Where the output is no terminal, one after the other

      -h, --help
              Print help (see a summary with '-h')
    ");
}

#[test]
fn of_context() {
    insta::assert_snapshot!(help("context"), @r#"
    List the clusters that the configuration names, or choose one.

    A context is a cluster with a name, in $XDG_CONFIG_HOME/wingbeat/config.toml, or ~/.config/wingbeat/config.toml:

        [context.lab]
        address = "10.0.0.1:6420"
        token_file = "~/lab-token"
        namespace = "vision"          # of runs: wingbeat train, wingbeat torchrun

        wingbeat --context lab status
        wingbeat context use lab

    Usage: wingbeat context [OPTIONS] <COMMAND>

    Commands:
      list  List the contexts; a star marks the one that is in use
      use   Use this one from now on, where neither an option nor a variable names another cluster
      help  Print this message or the help of the given subcommand(s)

    Options:
          --context <NAME>
              The cluster of this name in the configuration; see `wingbeat context --help`

              [env: WINGBEAT_CONTEXT]

      -h, --help
              Print help (see a summary with '-h')
    "#);
}
