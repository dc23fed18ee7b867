//! Clusters by name: what `~/.config/wingbeat/config.toml` says of each, and `wingbeat context`.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use clap::parser::ValueSource;
use clap::{ArgMatches, Args, Subcommand};
use serde::Deserialize;
use wingbeat_worker::{join, token};

use crate::say::say;

/// Names the context, as `--context` does.
pub(crate) const CONTEXT_VARIABLE: &str = "WINGBEAT_CONTEXT";
/// The namespace of runs, as `--namespace` of `train` and `torchrun`.
pub(crate) const NAMESPACE_VARIABLE: &str = "WINGBEAT_NAMESPACE";

/// No context, whatever is in use: as a name. Programs say so to the commands that they run.
pub(crate) const NONE: &str = "none";

/// Commands that talk to no cluster, or are one.
const WITHOUT: [&str; 6] = [HEAD, "devices", "replay", "context", "completions", "help"];
const HEAD: &str = "head";
/// A context that was chosen days ago is not enough for this one.
const STOP: &str = "stop";

/// List the clusters that the configuration names, or choose one.
///
/// A context is a cluster with a name, in $XDG_CONFIG_HOME/wingbeat/config.toml, or ~/.config/wingbeat/config.toml:
///
///     [context.lab]
///     address = "10.0.0.1:6420"
///     token_file = "~/lab-token"
///     namespace = "vision"          # of runs: wingbeat train, wingbeat torchrun
///
///     wingbeat --context lab status
///     wingbeat context use lab
#[derive(Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct ContextArgs {
    #[command(subcommand)]
    command: ContextCommand,
}

#[derive(Subcommand)]
enum ContextCommand {
    /// List the contexts; a star marks the one that is in use.
    List,
    /// Use this one from now on, where neither an option nor a variable names another cluster.
    Use {
        /// Its name; none: no context is in use.
        name: String,
    },
}

/// The configuration file.
#[derive(Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    /// The context in use.
    current: Option<String>,
    /// All of them.
    #[serde(default)]
    context: BTreeMap<String, Context>,
}

/// A cluster with a name.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Context {
    address: String,
    token_file: Option<PathBuf>,
    namespace: Option<String>,
}

/// What is wrong, without the value that was found, which may be a token.
fn without_values(message: &str) -> String {
    let is_of_value = message.starts_with("invalid type") || message.starts_with("invalid value");
    match message.rsplit_once(", expected ") {
        Some((_, expected)) if is_of_value => format!("another type of value is expected: {expected}"),
        _ if is_of_value => "another type of value is expected".to_owned(),
        _ => message.to_owned(),
    }
}

impl Config {
    fn read(path: &Path) -> Result<Config> {
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Config::default()),
            Err(error) => return Err(error).with_context(|| format!("reading {}", path.display())),
        };
        Config::parse(&text).with_context(|| format!("reading {}", path.display()))
    }

    fn parse(text: &str) -> Result<Config> {
        // Without the line itself: somebody may have written a token there.
        let config: Config = toml::from_str(text).map_err(|error| {
            let line = error.span().map_or(0, |span| text[..span.start.min(text.len())].matches('\n').count()) + 1;
            anyhow::anyhow!("line {line}: {}", without_values(error.message()))
        })?;
        if let Some((name, _)) = config.context.iter().find(|(_, context)| context.address.trim().is_empty()) {
            bail!("context {name} has no address; write address = \"host:port\"");
        }
        Ok(config)
    }

    fn find(&self, name: &str, path: &Path) -> Result<&Context> {
        self.context.get(name).with_context(|| {
            let known: Vec<&str> = self.context.keys().map(String::as_str).collect();
            match known[..] {
                [] => format!("no context is named `{name}`: {} has none", path.display()),
                _ => format!("no context is named `{name}`: {} has {}", path.display(), known.join(", ")),
            }
        })
    }
}

/// Where the file is. There may be none.
fn path() -> Option<PathBuf> {
    let folder = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let config = folder("XDG_CONFIG_HOME").or_else(|| Some(folder("HOME")?.join(".config")))?;
    Some(config.join("wingbeat/config.toml"))
}

fn known_path() -> Result<PathBuf> {
    path().context("neither XDG_CONFIG_HOME nor HOME names a folder for the configuration")
}

/// The variables that a context stands for. `None` removes one.
type Variables = Vec<(&'static str, Option<OsString>)>;

/// A context that a command uses.
#[derive(Debug, Default)]
pub(crate) struct Used {
    /// What the command line is to find in the environment, besides what is there.
    pub variables: Variables,
    /// What errors of the command begin with; nothing if it uses no context.
    pub prefix: String,
}

/// The context that this command line uses. An option goes before everything, `--context` before variables, and those before the context in
/// use.
pub(crate) fn used(matches: &ArgMatches) -> Result<Used> {
    let Some((of_command_name, of_command)) = matches.subcommand() else { return Ok(Used::default()) };
    let source = |id| of_command.value_source(id);
    let is_option = source("context") == Some(ValueSource::CommandLine);
    if of_command_name == HEAD && is_option && of_command.get_one::<String>("context").is_some_and(|name| name != NONE)
    {
        bail!(
            "`wingbeat head` starts a cluster and joins none: it takes no --context. Give --host, --port and --token-file"
        );
    }
    if WITHOUT.contains(&of_command_name) {
        return Ok(Used::default());
    }
    let address = if of_command_name == "worker" { "head" } else { "address" };
    if source(address) == Some(ValueSource::CommandLine) {
        return Ok(Used::default());
    }
    // A global option is found in the subcommand, too.
    let wanted = of_command.get_one::<String>("context").filter(|name| !name.is_empty());
    if is_option && wanted.is_none() {
        bail!("--context is empty; leave it out, or write --context {NONE} for no context");
    }
    let is_asked = wanted.is_some() && is_option;
    let is_alone = of_command.try_get_one::<bool>("standalone").ok().flatten() == Some(&true);
    if wanted.is_some_and(|name| name == NONE) || is_alone || !is_asked && source(address).is_some() {
        return Ok(Used::default());
    }
    let path = match (path(), wanted) {
        (Some(path), _) => path,
        (None, None) => return Ok(Used::default()),
        (None, Some(_)) => known_path()?,
    };
    let config = Config::read(&path)?;
    let Some(name) = wanted.or(config.current.as_ref()) else { return Ok(Used::default()) };
    let context = config.find(name, &path)?;
    if of_command_name == STOP && wanted.is_none() {
        bail!(
            "the context `{name}` ({}) is in use, and this would end its cluster with all jobs. Say which you mean: \
             `wingbeat --context {name} stop`, or `wingbeat --context {NONE} stop` for the head on this machine",
            context.address
        );
    }
    let prefix = format!("context `{name}` ({}): ", context.address);
    let mut variables = context.variables(&path);
    if is_asked {
        // What is set for another cluster is not for this one.
        for other in [token::TOKEN_VARIABLE, token::TOKEN_FILE_VARIABLE, NAMESPACE_VARIABLE] {
            if variables.iter().all(|(name, _)| *name != other) {
                variables.push((other, None));
            }
        }
    } else {
        // What the user has said there counts, and a token goes with the file that may hold it.
        let is_set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let has_token = is_set(token::TOKEN_VARIABLE) || is_set(token::TOKEN_FILE_VARIABLE);
        let is_of_token = |name: &str| [token::TOKEN_VARIABLE, token::TOKEN_FILE_VARIABLE].contains(&name);
        variables.retain(
            |(name, _)| if is_of_token(name) { !has_token } else { *name != NAMESPACE_VARIABLE || !is_set(name) },
        );
    }
    Ok(Used { variables, prefix })
}

impl Context {
    fn variables(&self, config: &Path) -> Variables {
        let mut variables: Variables = vec![(join::ADDRESS_VARIABLE, Some(self.address.clone().into()))];
        if let Some(file) = &self.token_file {
            // The token of another cluster may be in the environment.
            variables.push((token::TOKEN_VARIABLE, None));
            variables.push((token::TOKEN_FILE_VARIABLE, Some(whole(file, config).into())));
        }
        if let Some(namespace) = &self.namespace {
            variables.push((NAMESPACE_VARIABLE, Some(namespace.into())));
        }
        variables
    }
}

/// A path in the configuration: of the home folder with `~/`, else from the folder of the configuration.
fn whole(file: &Path, config: &Path) -> PathBuf {
    match (file.strip_prefix("~"), std::env::var_os("HOME")) {
        (Ok(rest), Some(home)) => Path::new(&home).join(rest),
        _ => config.parent().unwrap_or(config).join(file),
    }
}

pub(crate) fn run(args: &ContextArgs) -> Result<()> {
    let path = known_path()?;
    let config = Config::read(&path)?;
    match &args.command {
        ContextCommand::List => say!("{}", listed(&config, &path).trim_end()),
        ContextCommand::Use { name } => {
            if name == NONE && !path.exists() {
                say!("no context is in use");
                return Ok(());
            }
            if name != NONE {
                config.find(name, &path)?;
            }
            // Where a link leads, so that the link stays.
            let path = path.canonicalize().with_context(|| format!("reading {}", path.display()))?;
            let text = std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
            let chosen = with_current(&text, name);
            Config::parse(&chosen)
                .with_context(|| format!("{} cannot be changed; write it by hand", path.display()))?;
            // Written aside, so that nobody reads half of it.
            let aside = path.with_extension("toml.new");
            let written = std::fs::write(&aside, chosen)
                .and_then(|()| std::fs::set_permissions(&aside, std::fs::metadata(&path)?.permissions()))
                .and_then(|()| std::fs::rename(&aside, &path));
            written.with_context(|| format!("writing {}", path.display()))?;
            match name.as_str() {
                NONE => say!("no context is in use"),
                name => say!("{name} is in use"),
            }
        }
    }
    Ok(())
}

fn listed(config: &Config, path: &Path) -> String {
    if config.context.is_empty() {
        return format!("no contexts; write [context.NAME] with an address into {}", path.display());
    }
    let mut table = comfy_table::Table::new();
    table.load_preset(comfy_table::presets::NOTHING).set_header(["", "context", "address", "namespace", "token file"]);
    for (name, context) in &config.context {
        let star = if config.current.as_ref() == Some(name) { "*" } else { "" };
        let token = context.token_file.as_ref().map(|file| file.display().to_string());
        let namespace = context.namespace.clone().unwrap_or_default();
        table.add_row([star, name, &context.address, &namespace, &token.unwrap_or_default()]);
    }
    let lines = table.lines().map(|line| line.trim_end().to_owned());
    lines.collect::<Vec<_>>().join("\n")
}

/// The text of a configuration with another context in use, and everything else as it was, comments included.
fn with_current(text: &str, name: &str) -> String {
    let line = format!("current = {}", toml::Value::String(name.to_owned()));
    let is_current =
        |line: &str| line.split_once('=').is_some_and(|(key, _)| key.trim().trim_matches(['"', '\'']) == "current");
    let mut lines: Vec<&str> = text.lines().collect();
    // Behind the first heading, keys belong to that.
    let heading = lines.iter().position(|line| line.trim_start().starts_with('[')).unwrap_or(lines.len());
    match lines[..heading].iter().position(|line| is_current(line)) {
        Some(at) if name == NONE => drop(lines.remove(at)),
        Some(at) => lines[at] = &line,
        None if name == NONE => {}
        None => lines.insert(0, &line),
    }
    lines.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# mine\n[context.lab]\naddress = \"10.0.0.1:6420\"\ntoken_file = \"lab-token\"\n\n\
                        [context.prod] # careful\naddress = \"a:6420,b:6420\"\nnamespace = \"vision\"\n";

    #[test]
    fn every_command_has_an_address_or_needs_none() {
        use clap::CommandFactory;
        for command in crate::Cli::command().get_subcommands() {
            let address = if command.get_name() == "worker" { "head" } else { "address" };
            let has_address = command.get_arguments().any(|argument| argument.get_id() == address);
            assert!(has_address || WITHOUT.contains(&command.get_name()), "{}", command.get_name());
        }
    }

    #[test]
    fn a_context_becomes_what_the_command_reads() {
        let config = Config::parse(TEXT).unwrap();
        let path = Path::new("/home/me/.config/wingbeat/config.toml");
        let lab = config.find("lab", path).unwrap().variables(path);
        let file = OsString::from("/home/me/.config/wingbeat/lab-token");
        assert_eq!(
            lab,
            [
                ("WINGBEAT_ADDRESS", Some("10.0.0.1:6420".into())),
                ("WINGBEAT_TOKEN", None),
                ("WINGBEAT_TOKEN_FILE", Some(file))
            ]
        );
        let prod = config.find("prod", path).unwrap().variables(path);
        assert_eq!(prod[1], ("WINGBEAT_NAMESPACE", Some("vision".into())));
    }

    #[test]
    fn what_a_configuration_cannot_be_is_said_with_its_place() {
        let path = Path::new("/c.toml");
        let config = Config::parse(TEXT).unwrap();
        let unknown = config.find("labb", path).unwrap_err().to_string();
        assert_eq!(unknown, "no context is named `labb`: /c.toml has lab, prod");
        let wrong = |text| Config::parse(text).unwrap_err().to_string();
        assert!(
            wrong("[context.lab]\nadress = \"x\"").contains("adress"),
            "{}",
            wrong("[context.lab]\nadress = \"x\"")
        );
        assert!(wrong("[context.lab]\naddress = \"\"").contains("context lab has no address"));
        assert!(wrong("[context.lab]\ntoken_file = \"x\"").contains("address"));
        for text in [
            "[context]\ntoken = \"s3cret\"",
            "[context.lab]\naddress = \"a:1\"\ntoken_file = 53173",
            "current = \"x\ns3cret",
        ] {
            let wrong = wrong(text);
            assert!(wrong.starts_with("line ") && !wrong.contains("s3cret") && !wrong.contains("53173"), "{wrong}");
        }
    }

    #[test]
    fn another_is_chosen_and_the_rest_of_the_file_stays() {
        let lab = with_current(TEXT, "lab");
        assert_eq!(lab, format!("current = \"lab\"\n{TEXT}"));
        let prod = with_current(&lab, "prod");
        assert_eq!(prod, format!("current = \"prod\"\n{TEXT}"));
        assert_eq!(Config::parse(&prod).unwrap().current.as_deref(), Some("prod"));
    }

    #[test]
    fn the_list_marks_the_one_in_use() {
        let config = Config::parse(&with_current(TEXT, "prod")).unwrap();
        insta::assert_snapshot!(listed(&config, Path::new("/c.toml")), @r"
           context  address        namespace  token file
           lab      10.0.0.1:6420             lab-token
        *  prod     a:6420,b:6420  vision
        ");
    }
}
