//! Commands, flags and exit codes: 0 done (or stopped by the user), 1 failed, 2 wrong usage.

mod bench;
mod compare;
mod data;
mod estimate;
mod fields;
mod quantize;
mod runs;
mod signals;
mod starter;
mod train;
mod train_output;

use std::io::Write as _;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tracing_subscriber::EnvFilter;

/// Fine-tunes local language models on this machine. Without a command it opens the window.
#[derive(Parser)]
#[command(name = "tandem", version, about, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// Train a model as a run.toml says.
    Train(Box<train::TrainArgs>),
    /// Look at what a run will train on.
    #[command(subcommand)]
    Data(Box<data::DataCommand>),
    /// Measure how fast this machine trains models of known shapes.
    Bench(Box<bench::BenchArgs>),
    /// Compare optimizations on against off, in pairs of blocks from the same state.
    Compare(Box<compare::CompareArgs>),
    /// Say what memory a run will take and how it would be trained, before it starts.
    Estimate(Box<estimate::EstimateArgs>),
    /// Write a model with its linear layers in 4 bits (NF4), as bitsandbytes stores them.
    Quantize(quantize::QuantizeArgs),
    /// List the runs on this machine.
    Runs(runs::RunsArgs),
    /// The starter model: a small real model to begin with.
    #[command(subcommand)]
    Starter(starter::StarterCommand),
}

/// Runs the program.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(message) => {
            // Help and version arrive here too, and leave with 0. A closed terminal cannot be told anything.
            let _ = message.print();
            return if message.use_stderr() { ExitCode::from(2) } else { ExitCode::SUCCESS };
        }
    };
    log_to_stderr();
    let result = match cli.command {
        None => tandem::gui::app::run(),
        Some(Command::Train(args)) => train::run(&args),
        Some(Command::Data(command)) => data::run(*command),
        Some(Command::Bench(args)) => bench::run(&args),
        Some(Command::Compare(args)) => compare::run(&args),
        Some(Command::Estimate(args)) => estimate::run(&args),
        Some(Command::Quantize(args)) => quantize::run(&args),
        Some(Command::Runs(args)) => runs::run(&args),
        Some(Command::Starter(command)) => starter::run(&command),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&format!("error: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// Diagnostics of the program itself go to stderr; `TANDEM_LOG` (as `debug`, `tandem=trace`) says which.
fn log_to_stderr() {
    let filter = EnvFilter::try_from_env("TANDEM_LOG").unwrap_or_else(|_| EnvFilter::new("warn"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
}

/// A line on stderr. A terminal that was closed must not end a run, as `eprintln!` would.
fn say(text: &str) {
    drop(writeln!(std::io::stderr(), "{text}"));
}
