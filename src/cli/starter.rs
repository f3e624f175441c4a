//! `tandem starter fetch` and `status`: puts the starter model on this machine.

use std::sync::atomic::Ordering;

use anyhow::bail;
use clap::Subcommand;
use indicatif::{ProgressBar, ProgressStyle};
use tandem::base::error::Result;
use tandem::base::units;
use tandem::session::starter::{self, Status};

use super::signals;

/// Commands of `tandem starter`.
#[derive(Subcommand)]
pub enum StarterCommand {
    /// Fetch it (once), check it, and say where it is.
    Fetch,
    /// Say where it is; exits with 1 while it is not ready.
    Status,
}

/// Runs one of them.
pub fn run(command: &StarterCommand) -> Result<()> {
    match command {
        StarterCommand::Fetch => fetch(),
        StarterCommand::Status => status(),
    }
}

fn status() -> Result<()> {
    match starter::status()? {
        Status::Ready { path } => println!("{} is at {}", starter::model_name(), path.display()),
        Status::Partial { bytes } => bail!(
            "a file of {} is there, but it is not known to be the starter model; `tandem starter fetch` checks and \
             repairs it",
            units::bytes(bytes)
        ),
        Status::Absent => bail!(
            "{} is not on this machine; `tandem starter fetch` downloads it ({})",
            starter::model_name(),
            units::bytes(starter::download_bytes())
        ),
    }
    Ok(())
}

fn fetch() -> Result<()> {
    let stop = signals::stop_flag()?;
    // Hidden by indicatif itself when stderr is no terminal.
    let bar = ProgressBar::new(starter::download_bytes());
    if let Ok(style) = ProgressStyle::with_template("{msg} {bar:30} {bytes}/{total_bytes}") {
        bar.set_style(style);
    }
    let mut report = |stage: &str, done: u64, total: u64| {
        bar.set_message(stage.to_owned());
        bar.set_length(total);
        bar.set_position(done);
    };
    let path = starter::fetch_blocking(&mut report, &stop)?;
    bar.finish_and_clear();
    match path {
        Some(path) => println!("{} is at {}", starter::model_name(), path.display()),
        None => {
            debug_assert!(stop.load(Ordering::Relaxed));
            println!("stopped; `tandem starter fetch` goes on from the beginning");
        }
    }
    Ok(())
}
