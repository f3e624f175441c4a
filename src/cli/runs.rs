//! `tandem runs`: the runs on this machine, the newest first.

use std::io::{self, Write as _};
use std::path::PathBuf;

use clap::Args;
use tandem::base::error::Result;
use tandem::session::runs::{self, RunSummary};

use super::say;

/// Flags of `tandem runs`.
#[derive(Args)]
pub struct RunsArgs {
    /// Folder that holds the runs; left out: the user's runs folder.
    #[arg(long, value_name = "PATH")]
    runs_dir: Option<PathBuf>,
}

/// Prints the list.
pub fn run(args: &RunsArgs) -> Result<()> {
    let list = match &args.runs_dir {
        Some(folder) => runs::list_in(folder)?,
        None => runs::list()?,
    };
    let mut rows = vec![["BEGAN", "NAME", "STATUS", "STEPS", "LOSS", "HELD-OUT", "FOLDER"].map(str::to_owned)];
    rows.extend(list.runs.iter().map(row));
    let widths: [usize; 7] = std::array::from_fn(|i| rows.iter().map(|r| r[i].chars().count()).max().unwrap_or(0));
    let mut out = io::stdout().lock();
    for row in &rows {
        let cells: Vec<String> = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        writeln!(out, "{}", cells.join("  ").trim_end())?;
    }
    if list.runs.is_empty() {
        say("no runs yet; `tandem train run.toml` makes one");
    }
    for (folder, reason) in &list.skipped {
        say(&format!("skipped {}: {reason}", folder.display()));
    }
    Ok(())
}

fn row(run: &RunSummary) -> [String; 7] {
    let loss = |loss: Option<f64>| loss.map_or_else(|| "-".into(), |l| format!("{l:.4}"));
    let began = run.began_unix_ms.and_then(|ms| jiff::Timestamp::from_millisecond(ms).ok());
    [
        began.map_or_else(
            || "-".into(),
            |t| t.to_zoned(jiff::tz::TimeZone::system()).strftime("%Y-%m-%d %H:%M").to_string(),
        ),
        run.name.clone(),
        run.status.describe().into(),
        run.total_steps.map_or_else(|| "-".into(), |total| format!("{}/{total}", run.steps)),
        loss(run.last_loss),
        loss(run.last_eval_loss),
        run.folder.display().to_string(),
    ]
}
