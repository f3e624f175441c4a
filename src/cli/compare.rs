//! `tandem compare`: optimizations on against off, on the model and the data of a run.toml. Also what `tandem bench --vary` shares with it.

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{anyhow, ensure};
use clap::Args;
use tandem::base::error::Result;
use tandem::base::files;
use tandem::session::compare::{self, CompareEvent, CompareOptions, CompareReport, Variation};

use super::fields::FieldArgs;
use super::{say, signals};

/// How often signals are looked at while no event comes.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Flags of `tandem compare`.
#[derive(Args)]
pub struct CompareArgs {
    /// What to vary, each a comparison of its own: cache, cache-fused, buffers, offload, keep, attention, routing, routing-sorted, graphs,
    /// all.
    #[arg(long, value_delimiter = ',', value_name = "WORDS", default_value = "all")]
    vary: Vec<Variation>,
    /// Pairs of blocks, run in the order A B B A.
    #[arg(long, value_name = "N", default_value_t = 10)]
    pairs: usize,
    /// Counted steps in a block; one more, its first, is run and not counted.
    #[arg(long, value_name = "N", default_value_t = 5)]
    steps: usize,
    /// Write the reports as one HTML file that needs nothing else.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Write the reports as a JSON list.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    #[command(flatten)]
    fields: FieldArgs,
}

/// Compares, prints each report, and writes the files.
pub fn run(args: &CompareArgs) -> Result<()> {
    let config = args.fields.run_config()?;
    for path in [&args.html, &args.json].into_iter().flatten() {
        check_folder(path)?;
    }
    let options = CompareOptions { vary: args.vary.clone(), pairs: args.pairs, steps_per_block: args.steps };
    let stop = signals::stop_flag()?;
    let comparison = compare::start(config, options, None)?;
    let (mut lines, mut reports, mut failed) = (Lines::default(), Vec::new(), None);
    loop {
        if stop.load(Ordering::Relaxed) {
            comparison.stop();
        }
        // Asked before the queue: an ended comparison adds nothing after it.
        let ended = comparison.is_finished();
        match comparison.next_event(LOOK_EVERY) {
            Some(CompareEvent::Finished { report }) => {
                print(&report)?;
                reports.push(*report);
            }
            Some(CompareEvent::Failed { text }) => failed = Some(text),
            Some(event) => lines.tell(&event),
            None if ended => break,
            None => {}
        }
    }
    // What was measured before a failure stays true.
    if !reports.is_empty() {
        if let Some(path) = &args.html {
            write_html(path, &reports)?;
        }
        if let Some(path) = &args.json {
            files::write_atomic(path, |out| Ok(serde_json::to_writer_pretty(out, &reports)?))?;
        }
    }
    match failed {
        Some(text) => Err(anyhow!(text)),
        None if reports.is_empty() => {
            say("stopped before the first pair was done");
            Ok(())
        }
        None => Ok(()),
    }
}

/// Sees, before anything is measured, that a file can be written in its folder.
pub fn check_folder(path: &Path) -> Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let is_there = folder.is_none_or(Path::is_dir);
    ensure!(is_there, "cannot write {}: there is no such folder", path.display());
    Ok(())
}

/// Writes the reports as one HTML file.
pub fn write_html(path: &Path, reports: &[CompareReport]) -> Result<()> {
    files::write_atomic(path, |out| Ok(out.write_all(compare::html(reports).as_bytes())?))
}

/// Prints a report.
pub fn print(report: &CompareReport) -> io::Result<()> {
    writeln!(io::stdout(), "{}", compare::text(report))
}

/// The progress of a comparison as lines on stderr.
#[derive(Default)]
pub struct Lines {
    stage: String,
}

impl Lines {
    /// Tells what is new.
    pub fn tell(&mut self, event: &CompareEvent) {
        match event {
            CompareEvent::Preparing { stage, .. } if *stage != self.stage => {
                say(stage);
                self.stage.clone_from(stage);
            }
            CompareEvent::Progress { variation, done, pairs, report: Some(report) } => {
                let so_far = match report.pair_differences.interval_ms {
                    Some([low, high]) => format!(" (95 % interval {low:+.2} to {high:+.2})"),
                    None => String::new(),
                };
                let mean = report.pair_differences.mean_ms;
                say(&format!("{}: pair {done} of {pairs}, A − B {mean:+.2} ms a step{so_far}", variation.word()));
            }
            CompareEvent::Progress { variation, pairs, report: None, .. } => {
                self.stage.clear();
                say(&format!("{}: {pairs} pairs", variation.word()));
            }
            CompareEvent::Note { text } => say(text),
            CompareEvent::Preparing { .. } | CompareEvent::Finished { .. } | CompareEvent::Failed { .. } => {}
        }
    }
}
