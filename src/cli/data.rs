//! `tandem data preview` and `tandem data dump`: what a run will train on, before it does.

use std::fmt::Write as _;
use std::io::{BufWriter, IsTerminal as _, Write};
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use anyhow::{Context as _, bail};
use clap::{Args, Subcommand};
use indicatif::{ProgressBar, ProgressStyle};
use tandem::base::error::Result;
use tandem::base::units;
use tandem::session::preview::{self, PackView, Preview};

use super::fields::FieldArgs;
use super::{say, signals};

/// Commands of `tandem data`.
#[derive(Subcommand)]
pub enum DataCommand {
    /// Show counts, reasons and the first packs, with the trained tokens marked.
    Preview(PreviewArgs),
    /// Write every micro-batch in training order as JSON lines: step, micro_batch, eval, input_ids, labels, cu_seqlens.
    Dump(DumpArgs),
}

/// Flags of `tandem data preview`.
#[derive(Args)]
pub struct PreviewArgs {
    #[command(flatten)]
    fields: FieldArgs,
    /// Packs to show.
    #[arg(long, value_name = "N", default_value_t = 1)]
    packs: usize,
}

/// Flags of `tandem data dump`.
#[derive(Args)]
pub struct DumpArgs {
    #[command(flatten)]
    fields: FieldArgs,
    /// File to write; without it, standard output.
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Runs one of them.
pub fn run(command: DataCommand) -> Result<()> {
    let stop = signals::stop_flag()?;
    match command {
        DataCommand::Preview(args) => show(args, &stop),
        DataCommand::Dump(args) => dump(args, &stop),
    }
}

fn show(mut args: PreviewArgs, stop: &AtomicBool) -> Result<()> {
    args.fields.accept_dataset()?;
    let config = args.fields.run_config()?;
    let bar = Bar::new();
    let preview = preview::preview(&config, &|stage, done, total| bar.report(stage, done, total), stop)?;
    drop(bar);
    let Some(preview) = preview else {
        say("stopped");
        return Ok(());
    };
    let color = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let mut text = summary(&preview);
    for index in 0..args.packs.min(preview.num_packs()) {
        if let Some(pack) = preview.pack(index) {
            text += &pack_text(index, preview.num_packs(), &pack, color);
        }
    }
    write_all(&mut std::io::stdout().lock(), text.as_bytes())
}

/// A reader that went away (`| head`) has seen what it wanted.
fn write_all(out: &mut dyn Write, bytes: &[u8]) -> Result<()> {
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error).context("cannot write the preview"),
        _ => Ok(()),
    }
}

fn summary(preview: &Preview) -> String {
    let count = |n: usize| units::count(n as u64);
    let mut text = format!("{}\n", preview.dataset.display());
    let mut line = |name: &str, value: String| {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "  {name:<22}{value}");
    };
    let layout = serde_json::to_value(preview.layout).ok();
    let layout = layout.as_ref().and_then(|layout| layout.as_str()).unwrap_or_default().to_owned();
    let columns = if preview.columns.is_empty() { String::new() } else { format!(" ({})", preview.columns.join(", ")) };
    line("layout", layout + &columns);
    line("rows", count(preview.num_rows));
    line("train", count(preview.num_train));
    line("held out", count(preview.num_eval));
    line("left out", count(preview.num_dropped()));
    let share = 100.0 * preview.num_trained_tokens as f64 / preview.num_tokens.max(1) as f64;
    line("tokens", format!("{}, {share:.1} % trained", units::count(preview.num_tokens)));
    line("longest document", format!("{} tokens", count(preview.histogram.longest)));
    line(
        "packs",
        format!(
            "{} of {} tokens, {:.1} % full",
            count(preview.num_packs()),
            count(preview.pack_len),
            preview.fill * 100.0
        ),
    );
    line("steps of the run", units::count(preview.total_steps));
    for reason in &preview.reasons {
        line(&count(reason.count), reason.text.clone());
        for (row, details) in &reason.rows {
            line("", format!("line {row}: {details}"));
        }
    }
    for check in &preview.checks {
        match &check.failure {
            None => line("ok", check.name.to_owned()),
            Some(failure) => line("warning", failure.clone()),
        }
    }
    text
}

/// A pack as text, its trained parts in ⟦ ⟧ (and in colour on a terminal).
fn pack_text(index: usize, packs: usize, pack: &PackView, color: bool) -> String {
    let mut text = format!(
        "\npack {} of {}: {} tokens trained ⟦ ⟧, {} read only, {} of the slots unused\n",
        units::count(index as u64 + 1),
        units::count(packs as u64),
        units::count(pack.trained as u64),
        units::count(pack.read_only as u64),
        units::count(pack.unused as u64)
    );
    let (open, close) = if color { ("\u{1b}[32m⟦", "⟧\u{1b}[0m") } else { ("⟦", "⟧") };
    let records = pack.num_records();
    for (i, document) in pack.documents.iter().filter(|document| !document.padding).enumerate() {
        text += &format!("── record {} of {records} ──\n", i + 1);
        let mut inside = false;
        for token in &document.tokens {
            if token.trained != inside {
                text += if token.trained { open } else { close };
                inside = token.trained;
            }
            // Control characters of a dataset must not reach the terminal.
            text.extend(token.text.chars().map(|c| if c.is_control() && !"\n\t".contains(c) { '\u{FFFD}' } else { c }));
        }
        if inside {
            text += close;
        }
        if !text.ends_with('\n') {
            text.push('\n');
        }
    }
    text
}

fn dump(mut args: DumpArgs, stop: &AtomicBool) -> Result<()> {
    args.fields.accept_dataset()?;
    let config = args.fields.run_config()?;
    let bar = Bar::new();
    let report = |stage: &str, done: u64, total: u64| bar.report(stage, done, total);
    let steps = match &args.output {
        Some(path) => {
            let mut steps = None;
            tandem::base::files::write_atomic(path, |out| {
                steps = preview::dump(&config, out, &report, stop)?;
                if steps.is_none() {
                    bail!("stopped; nothing was written");
                }
                Ok(())
            })?;
            steps
        }
        None => {
            let mut out = BufWriter::new(std::io::stdout().lock());
            let steps = preview::dump(&config, &mut out, &report, stop)?;
            out.flush().context("cannot write the dump")?;
            steps
        }
    };
    if steps.is_none() {
        bail!("stopped");
    }
    Ok(())
}

/// Progress on stderr; nothing is drawn when that is no terminal.
struct Bar(ProgressBar);

impl Bar {
    fn new() -> Self {
        let bar = ProgressBar::new(0);
        if let Ok(style) = ProgressStyle::with_template("{msg} {bar:30} {pos}/{len}") {
            bar.set_style(style);
        }
        Self(bar)
    }

    fn report(&self, stage: &str, done: u64, total: u64) {
        self.0.set_message(stage.to_owned());
        self.0.set_length(total);
        self.0.set_position(done);
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
