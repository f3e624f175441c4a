//! `tandem starter fetch`: puts the starter model on this machine.

use std::sync::atomic::Ordering;

use clap::Subcommand;
use indicatif::{ProgressBar, ProgressStyle};
use tandem::base::error::Result;
use tandem::session::starter;

use super::signals;

/// Commands of `tandem starter`.
#[derive(Subcommand)]
pub enum StarterCommand {
    /// Fetch it (once), check it, and say where it is.
    Fetch,
}

/// Fetches the starter model.
pub fn run(command: &StarterCommand) -> Result<()> {
    let StarterCommand::Fetch = command;
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
