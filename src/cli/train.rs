//! `tandem train`: a run.toml and flags that override its fields, followed until the run ends.

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::anyhow;
use clap::Args;
use tandem::base::error::Result;
use tandem::session::event::{Command, Outcome, RunEvent};
use tandem::session::handle;
use tandem::session::trace::{Trace, TraceSteps};

use super::fields::FieldArgs;
use super::train_output::Output;
use super::{compare, say, signals};

/// How often signals are looked at while no event comes.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Flags of `tandem train`.
#[derive(Args)]
pub struct TrainArgs {
    /// Print one JSON event a line on stdout.
    #[arg(long)]
    json: bool,
    /// Write the spans of some steps as a trace that Perfetto opens.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Which steps, as 5-8; without it, the last three.
    #[arg(long, value_name = "STEPS", requires = "trace")]
    trace_steps: Option<TraceSteps>,
    #[command(flatten)]
    fields: FieldArgs,
}

/// Trains, and says how it went.
pub fn run(args: &TrainArgs) -> Result<()> {
    let config = args.fields.run_config()?;
    if let Some(path) = &args.trace {
        compare::check_folder(path)?;
    }
    let stop = signals::stop_flag()?;
    let mut run = handle::start(config, None)?;
    let mut output = Output::new(args.json, run.folder());
    let mut trace = Trace::new(args.trace_steps.clone());
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
                match event.event {
                    RunEvent::Started(info) => trace.begin(&info.name),
                    RunEvent::Step { report, .. } => trace.add(&report),
                    RunEvent::Finished { outcome: how, .. } => outcome = Some(how),
                    _ => {}
                }
            }
            None if ended => break,
            None => {}
        }
    }
    run.join();
    output.end();
    if let Some(path) = &args.trace {
        write_trace(&trace, path)?;
    }
    match outcome {
        Some(Outcome::Completed | Outcome::Stopped) => Ok(()),
        Some(Outcome::Failed(text)) => Err(anyhow!(text)),
        None => Err(anyhow!("the run ended without a word; {} holds what it wrote", run.folder().display())),
    }
}

/// Writes a trace, and says how much is in it.
pub fn write_trace(trace: &Trace, path: &Path) -> Result<()> {
    trace.write(path)?;
    say(&format!("{} steps traced in {}: open it at https://ui.perfetto.dev", trace.num_steps(), path.display()));
    Ok(())
}
