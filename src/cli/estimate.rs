//! `tandem estimate`: what a run will take, before it starts.

use std::io::{self, Write as _};
use std::sync::atomic::AtomicBool;

use anyhow::{anyhow, ensure};
use clap::Args;
use tandem::base::error::Result;
use tandem::base::units;
use tandem::session::estimate::{self, Estimate, MemoryPlan, Need, Tried, Workload};

use super::fields::FieldArgs;

/// Flags of `tandem estimate`. The model may be a known shape without weights (as of `tandem bench`); then no data is needed.
#[derive(Args)]
pub struct EstimateArgs {
    /// Print the plan as one JSON object.
    #[arg(long)]
    json: bool,
    /// Print every way that was tried, the fastest first, instead of the leanest of each kind.
    #[arg(long, conflicts_with = "json")]
    all: bool,
    /// Tokens of the longest document of a known shape's packs; without it a pack is one document.
    #[arg(long, value_name = "N")]
    document: Option<usize>,
    #[command(flatten)]
    fields: FieldArgs,
}

/// Plans and prints.
pub fn run(args: &EstimateArgs) -> Result<()> {
    let estimate = match args.fields.shape() {
        Some(shape) => estimate::of_shape(shape, &args.fields.run_config_of_shape()?, args.document)?,
        None => {
            ensure!(
                args.document.is_none(),
                "--document is for known shapes; the data of a run says how long its documents are"
            );
            let never = AtomicBool::new(false);
            estimate::of_run(&args.fields.run_config()?, &never)?.ok_or_else(|| anyhow!("nobody stops an estimate"))?
        }
    };
    let mut out = io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&estimate)?)?;
    } else {
        print(&mut out, &estimate, args.all)?;
    }
    Ok(())
}

fn print(out: &mut impl io::Write, estimate: &Estimate, all: bool) -> io::Result<()> {
    let Estimate { model, method, device, num_parameters, plan } = estimate;
    let Workload { tokens, longest, batches } = plan.work;
    let count = |n: usize| units::count(n as u64);
    writeln!(out, "{model} · {} parameters · {method} · {device}", units::count(*num_parameters))?;
    writeln!(
        out,
        "  largest pack {} tokens, longest document {}, {} a step",
        count(tokens),
        count(longest),
        if batches == 1 { "one pack".into() } else { format!("{} packs", count(batches)) }
    )?;
    let Tried { what, setting, .. } = plan.choice();
    let verdict = if plan.fits() { "fits" } else { "does not fit" };
    writeln!(out, "  {verdict}: {what} ({setting})")?;
    writeln!(out, "  because {}", plan.why)?;
    if let Some(need) = plan.need() {
        print_need(out, plan, need)?;
    }
    let others = if all { plan.tried.iter().collect() } else { plan.others() };
    for Tried { what, need, against, .. } in others {
        let takes = need.as_ref().map_or_else(|| "—".into(), |need| units::bytes(need.vram_bytes()));
        let against = against.as_ref().map_or_else(String::new, |against| format!(": {against}"));
        writeln!(out, "  {takes:>12}  if {what}{against}")?;
    }
    plan.advice.iter().try_for_each(|advice| writeln!(out, "  to make it fit: {advice}"))
}

fn print_need(out: &mut impl io::Write, plan: &MemoryPlan, need: &Need) -> io::Result<()> {
    let mut row = |name: &str, bytes: u64| writeln!(out, "  {:>12}  {name}", units::bytes(bytes));
    for part in need.parts.iter().filter(|part| part.bytes > 0) {
        row(part.category.name(), part.bytes)?;
    }
    row("gaps, and what is needed at other times", need.gap_bytes())?;
    let driver =
        if plan.before_is_measured { "in use before, by the driver and others" } else { "the driver (assumed)" };
    row(driver, need.before_bytes)?;
    row("kernels of the matrix library (assumed)", need.library_bytes)?;
    row("device memory in all", need.vram_bytes())?;
    row("may be used", plan.vram_bytes)?;
    for part in &need.host {
        row(&format!("host memory: {}", part.what), part.bytes)?;
    }
    row("host memory in all", need.host_bytes)?;
    row("page-locked of it", need.pinned_bytes)
}
