//! `tandem train`: a run.toml and flags that override its fields, followed until the run ends.

use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::anyhow;
use clap::Args;
use tandem::base::error::Result;
use tandem::session::event::{Command, Outcome, RunEvent};
use tandem::session::handle;

use super::fields::FieldArgs;
use super::signals;
use super::train_output::Output;

/// How often signals are looked at while no event comes.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Flags of `tandem train`.
#[derive(Args)]
pub struct TrainArgs {
    /// Print one JSON event a line on stdout.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    fields: FieldArgs,
}

/// Trains, and says how it went.
pub fn run(args: &TrainArgs) -> Result<()> {
    let config = args.fields.run_config()?;
    let stop = signals::stop_flag()?;
    let mut run = handle::start(config, None)?;
    let mut output = Output::new(args.json, run.folder());
    let mut outcome = None;
    let mut told = false;
    loop {
        if stop.load(Ordering::Relaxed) && !told {
            run.send(Command::Stop);
            told = true;
        }
        // Asked before the queue: an ended run adds nothing after it.
        let ended = run.is_finished();
        match run.next_event(LOOK_EVERY) {
            Some(event) => {
                output.event(&event);
                if let RunEvent::Finished { outcome: how, .. } = event.event {
                    outcome = Some(how);
                }
            }
            None if ended => break,
            None => {}
        }
    }
    run.join();
    output.end();
    match outcome {
        Some(Outcome::Completed | Outcome::Stopped) => Ok(()),
        Some(Outcome::Failed(text)) => Err(anyhow!(text)),
        None => Err(anyhow!("the run ended without a word; {} holds what it wrote", run.folder().display())),
    }
}
