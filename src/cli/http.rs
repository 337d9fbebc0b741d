//! `http token`: makes a token for the API and the page.

use std::io::{self, Write as _};

use clap::{Args, Subcommand};
use serde::Serialize;

use super::{Exit, Failure, Out};
use crate::{
    config::tokens::{self, Role},
    http::auth::{random_token, sha256_hex},
};

#[derive(Debug, Args)]
pub(super) struct Http {
    #[command(subcommand)]
    command: HttpCommand,
}

#[derive(Debug, Subcommand)]
enum HttpCommand {
    /// Make a token, and the line for the file that `[http] tokens_file` names
    Token(Token),
}

#[derive(Debug, Args)]
#[command(after_help = "\
The token is shown once: the line has only its hash. An instance reads its file again when it has changed, so it needs \
no restart; to take a token away, remove its line.

Examples:
  soloist http token ann operate              shows the token and the line
  soloist http token grafana read --json")]
struct Token {
    /// Whose it is; the log names it
    #[arg(value_parser = tokens::name)]
    name: String,
    /// `read`: sees everything; `operate`: may also trigger, pause, cancel and drain
    #[arg(value_parser = role)]
    role: Role,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn role(text: &str) -> Result<Role, String> {
    text.parse()
}

#[derive(Debug, Serialize)]
struct Made<'a> {
    name: &'a str,
    role: Role,
    token: &'a str,
    line: &'a str,
}

impl Http {
    pub(super) fn json(&self) -> bool {
        let HttpCommand::Token(t) = &self.command;
        t.json
    }
}

pub(super) fn http(args: &Http, out: &Out) -> Result<Exit, Failure> {
    let HttpCommand::Token(args) = &args.command;
    let token = random_token().map_err(|e| Failure::internal("cannot make a token", e))?;
    let (name, role) = (args.name.as_str(), args.role);
    let line = format!("{name} {} sha256:{}", role.as_str(), sha256_hex(&token));
    let made = Made {
        name,
        role,
        token: &token,
        line: &line,
    };
    out.say(&made, || format!("{token}\n{line}\n"))?;
    if !args.json {
        let _ = writeln!(
            io::stderr(),
            "soloist: give the first line to `{name}`, for `Authorization: Bearer …` or the page; add the second to the \
             file that `tokens_file` in [http] names"
        );
    }
    Ok(Exit::Ok)
}
