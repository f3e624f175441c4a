//! `tandem bench`: how fast this machine trains models of known shapes.

use std::io::{self, Write as _};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};

use clap::Args;
use tandem::base::error::Result;
use tandem::base::units;
use tandem::session::bench::{self, Bench, BenchOptions, BenchRow};
use tandem::session::bench_ops;
use tandem::session::bench_plan::PlanCheck;
use tandem::session::compare::{CompareEvent, CompareOptions, CompareReport, Variation};
use tandem::session::trace::{Trace, TraceSteps};
use tandem::session::{
    ActivationsChoice, AttentionPath, CacheCounts, Dequantized, DeviceChoice, Metadata, MetadataPolicy, MethodKind,
    OffloadPolicy, Optimization, Placement, Precision, Routing, Switches,
};
use tandem::tensor::Device;

use super::compare::{self, Lines};
use super::signals;
use super::train::write_trace;

/// Flags of `tandem bench`.
#[derive(Args)]
pub struct BenchArgs {
    /// Models, by name (llama-3.2-1b, llama-3.1-8b, qwen3-0.6b, qwen3-8b, qwen3-14b, qwen3-32b, qwen3-30b-a3b, gpt-oss-20b) or path of a config.json.
    #[arg(long, value_name = "NAME", value_delimiter = ',', default_value = "qwen3-0.6b")]
    model: Vec<String>,
    /// Tokens in one optimizer step.
    #[arg(long, default_value_t = 16_384)]
    tokens: usize,
    /// Tokens in one pack; several are measured one after another.
    #[arg(long, value_delimiter = ',', default_value = "8192")]
    pack: Vec<usize>,
    /// What blocks keep: recompute, keep, offload, or auto, the fastest that fits.
    #[arg(long, value_delimiter = ',', default_value = "recompute", value_parser = activations)]
    activations: Vec<ActivationsChoice>,
    /// How attention knows the documents of a pack: varlen, masked.
    #[arg(long, value_delimiter = ',', default_value = "varlen", value_parser = attention)]
    attention: Vec<AttentionPath>,
    /// Where layers get what they need to know of documents: cached, fused (built anew), published (built anew, operation by operation).
    #[arg(long, value_delimiter = ',', default_value = "cached", value_parser = metadata)]
    metadata: Vec<Metadata>,
    /// Most entries of the metadata cache; 0: one for each window.
    #[arg(long, default_value_t = 0)]
    metadata_entries: usize,
    /// Device buffers for offloaded activations: 1, 2; 0: two where memory allows.
    #[arg(long, value_delimiter = ',', default_value = "0", value_parser = clap::value_parser!(u8).range(0..=2))]
    buffers: Vec<u8>,
    /// How tokens get to routed experts: grouped (on the device alone), sorted, per-expert (the published baseline).
    #[arg(long, value_delimiter = ',', default_value = "grouped", value_parser = routing)]
    routing: Vec<Routing>,
    /// Whether passes are recorded as CUDA graphs on a GPU: on, off. Each size of pack is recorded at its second pass.
    #[arg(long, value_delimiter = ',', default_value = "on", value_parser = on_off)]
    graphs: Vec<bool>,
    /// Steps before measuring.
    #[arg(long, default_value_t = 3)]
    warmup: usize,
    /// Steps measured; the median is shown.
    #[arg(long, default_value_t = 10)]
    steps: usize,
    /// Rank of the adapters.
    #[arg(long, default_value_t = 16)]
    r: usize,
    /// What trains: lora, qlora (adapters on weights in NF4), full (all parameters).
    #[arg(long, value_delimiter = ',', default_value = "lora", value_parser = method)]
    method: Vec<MethodKind>,
    /// Where weights in 4 bits are dequantized to: scratch, resident.
    #[arg(long, value_delimiter = ',', default_value = "scratch", value_parser = dequantized)]
    dequantized: Vec<Dequantized>,
    /// Whether blocks that are computed again keep the residual stream between attention and MLP: on, off.
    #[arg(long, value_delimiter = ',', default_value = "off", value_parser = on_off)]
    middle: Vec<bool>,
    /// Whether they keep queries, keys and values as well: on, off.
    #[arg(long, value_delimiter = ',', default_value = "off", value_parser = on_off)]
    qkv: Vec<bool>,
    /// Bits of a value of the optimizer's moments: 32, 8.
    #[arg(long, value_delimiter = ',', default_value = "32", value_parser = bits)]
    bits: Vec<u32>,
    /// Where moments and the f32 values of what trains lie: device, host.
    #[arg(long, value_delimiter = ',', default_value = "device", value_parser = placement)]
    optimizer_state: Vec<Placement>,
    /// Where the table of token embeddings lies: device, host.
    #[arg(long, value_delimiter = ',', default_value = "device", value_parser = placement)]
    embedding: Vec<Placement>,
    /// Most tokens that the MLP takes at one time where its activations are not kept; 0: all of a pass.
    #[arg(long, value_delimiter = ',', default_value = "0")]
    mlp_rows: Vec<usize>,
    /// Most tokens of a pass into which the packs of a step are joined; 0: each has a pass of its own.
    #[arg(long, value_delimiter = ',', default_value = "0")]
    pass_tokens: Vec<usize>,
    /// Every pack is one document, instead of documents of about 512 tokens.
    #[arg(long)]
    one_document: bool,
    /// GiB of the GPU's memory to use at most, the driver's own part included; 0: all that is free.
    #[arg(long, value_name = "GIB", default_value_t = 0.0)]
    vram_gib: f64,
    /// Where to run: auto, cpu, cuda.
    #[arg(long, default_value = "auto", value_parser = device)]
    device: DeviceChoice,
    /// Single operations at the sizes of an 8B model, instead of steps.
    #[arg(long, conflicts_with_all = ["model", "tokens", "pack", "activations", "attention", "metadata", "metadata_entries", "buffers", "routing", "graphs", "mlp_rows", "pass_tokens", "warmup", "steps", "r", "method", "dequantized", "middle", "qkv", "bits", "optimizer_state", "embedding", "one_document"])]
    ops: bool,
    /// One JSON object a row.
    #[arg(long)]
    json: bool,
    /// Compare instead, each against its baseline, in pairs of blocks of --steps steps: cache, cache-fused, buffers, offload, keep, attention,
    /// routing, routing-sorted, graphs, all.
    #[arg(long, value_delimiter = ',', value_name = "WORDS", conflicts_with_all = ["ops", "warmup", "trace"])]
    vary: Vec<Variation>,
    /// Pairs of blocks of a comparison.
    #[arg(long, value_name = "N", default_value_t = 10, requires = "vary")]
    pairs: usize,
    /// Write comparisons as one HTML file that needs nothing else.
    #[arg(long, value_name = "FILE", requires = "vary")]
    html: Option<PathBuf>,
    /// Write the spans of some steps as a trace that Perfetto opens, a process a row.
    #[arg(long, value_name = "FILE", conflicts_with = "ops")]
    trace: Option<PathBuf>,
    /// Which steps of each row, as 5-8, those before measuring counted; without it, the last three.
    #[arg(long, value_name = "STEPS", requires = "trace")]
    trace_steps: Option<TraceSteps>,
}

fn routing(text: &str) -> std::result::Result<Routing, String> {
    match text {
        "grouped" => Ok(Routing::Grouped),
        "sorted" => Ok(Routing::Sorted),
        "per-expert" | "per_expert" => Ok(Routing::PerExpert),
        other => Err(format!("`{other}` is none of grouped, sorted, per-expert")),
    }
}

fn activations(text: &str) -> std::result::Result<ActivationsChoice, String> {
    match text {
        "auto" => Ok(ActivationsChoice::Auto),
        "recompute" => Ok(ActivationsChoice::Recompute),
        "keep" => Ok(ActivationsChoice::Keep),
        "offload" => Ok(ActivationsChoice::Offload),
        other => Err(format!("`{other}` is none of auto, recompute, keep, offload")),
    }
}

fn method(text: &str) -> std::result::Result<MethodKind, String> {
    match text {
        "lora" => Ok(MethodKind::Lora),
        "qlora" => Ok(MethodKind::Qlora),
        "full" => Ok(MethodKind::Full),
        other => Err(format!("`{other}` is none of lora, qlora, full")),
    }
}

fn bits(text: &str) -> std::result::Result<u32, String> {
    match text {
        "32" => Ok(32),
        "8" => Ok(8),
        other => Err(format!("`{other}` is neither 32 nor 8")),
    }
}

fn placement(text: &str) -> std::result::Result<Placement, String> {
    match text {
        "device" => Ok(Placement::Device),
        "host" => Ok(Placement::Host),
        other => Err(format!("`{other}` is neither device nor host")),
    }
}

fn dequantized(text: &str) -> std::result::Result<Dequantized, String> {
    match text {
        "scratch" => Ok(Dequantized::Scratch),
        "resident" => Ok(Dequantized::Resident),
        other => Err(format!("`{other}` is neither scratch nor resident")),
    }
}

fn attention(text: &str) -> std::result::Result<AttentionPath, String> {
    match text {
        "varlen" => Ok(AttentionPath::Varlen),
        "masked" => Ok(AttentionPath::Masked),
        other => Err(format!("`{other}` is neither varlen nor masked")),
    }
}

fn metadata(text: &str) -> std::result::Result<Metadata, String> {
    match text {
        "cached" => Ok(Metadata::Cached),
        "fused" => Ok(Metadata::Fused),
        "published" => Ok(Metadata::Published),
        other => Err(format!("`{other}` is none of cached, fused, published")),
    }
}

fn on_off(text: &str) -> std::result::Result<bool, String> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        other => Err(format!("`{other}` is neither on nor off")),
    }
}

fn device(text: &str) -> std::result::Result<DeviceChoice, String> {
    match text {
        "auto" => Ok(DeviceChoice::Auto),
        "cpu" => Ok(DeviceChoice::Cpu),
        "cuda" => Ok(DeviceChoice::Cuda),
        other => Err(format!("`{other}` is none of auto, cpu, cuda")),
    }
}

impl BenchArgs {
    /// Every row asked for.
    fn options(&self) -> Vec<BenchOptions> {
        let mut all = Vec::new();
        for model in &self.model {
            let methods = self.method.iter().flat_map(|&method| self.bits.iter().map(move |&bits| (method, bits)));
            for (method, bits) in methods {
                for &pack in &self.pack {
                    all.extend(self.switches().into_iter().map(|(activations, switches)| BenchOptions {
                        model: model.clone(),
                        tokens: self.tokens,
                        pack,
                        warmup: self.warmup,
                        steps: self.steps,
                        switches,
                        activations,
                        r: self.r,
                        method,
                        bits,
                        one_document: self.one_document,
                    }));
                }
            }
        }
        all
    }

    /// Every combination of switches asked for.
    fn switches(&self) -> Vec<(ActivationsChoice, Switches)> {
        let asked = |&activations: &ActivationsChoice| {
            let fixed = activations.fixed().unwrap_or_default();
            (activations, Switches { activations: fixed, ..Switches::default() })
        };
        let mut all: Vec<_> = self.activations.iter().map(asked).collect();
        let mut vary = |values: usize, set: &dyn Fn(&mut Switches, usize)| {
            let each = |(activations, switches): (ActivationsChoice, Switches)| {
                (0..values).map(move |i| {
                    let mut switches = switches;
                    set(&mut switches, i);
                    (activations, switches)
                })
            };
            all = all.iter().copied().flat_map(each).collect();
        };
        vary(self.attention.len(), &|s, i| s.attention = self.attention[i]);
        let capacity = self.metadata_entries;
        vary(self.metadata.len(), &|s, i| s.metadata = MetadataPolicy { metadata: self.metadata[i], capacity });
        vary(self.buffers.len(), &|s, i| {
            s.offload = OffloadPolicy { buffers: self.buffers[i].into(), ..OffloadPolicy::default() };
        });
        vary(self.routing.len(), &|s, i| s.routing = self.routing[i]);
        vary(self.graphs.len(), &|s, i| s.cuda_graphs = self.graphs[i]);
        vary(self.dequantized.len(), &|s, i| s.memory.dequantized = self.dequantized[i]);
        vary(self.middle.len(), &|s, i| s.memory.middle = self.middle[i]);
        vary(self.qkv.len(), &|s, i| s.memory.qkv = self.qkv[i]);
        vary(self.optimizer_state.len(), &|s, i| s.memory.optimizer_state = self.optimizer_state[i]);
        vary(self.embedding.len(), &|s, i| s.memory.embedding = self.embedding[i]);
        vary(self.mlp_rows.len(), &|s, i| s.memory.mlp_rows = self.mlp_rows[i]);
        vary(self.pass_tokens.len(), &|s, i| s.memory.pass_tokens = self.pass_tokens[i]);
        all
    }
}

/// Measures and prints every combination asked for.
pub fn run(args: &BenchArgs) -> Result<()> {
    for path in [&args.html, &args.trace].into_iter().flatten() {
        compare::check_folder(path)?;
    }
    let device = bench::device(args.device, Precision::F32, units::gib(args.vram_gib))?;
    if args.ops {
        return print_ops(&mut io::stdout().lock(), &device, args.json);
    }
    let mut bench = Bench::new(device);
    if !args.vary.is_empty() {
        return compare_all(args, &mut bench);
    }
    let mut out = io::stdout().lock();
    let mut trace = Trace::new(args.trace_steps.clone());
    for options in args.options() {
        let row = bench.run(&options, args.trace.as_ref().map(|_| &mut trace))?;
        if args.json {
            writeln!(out, "{}", serde_json::to_string(&row)?)?;
        } else {
            print_row(&mut out, &row)?;
        }
        out.flush()?;
    }
    match &args.trace {
        Some(path) => write_trace(&trace, path),
        None => Ok(()),
    }
}

/// Makes the comparisons of `--vary` for every combination asked for, and prints each when it is done.
fn compare_all(args: &BenchArgs, bench: &mut Bench) -> Result<()> {
    let comparison = CompareOptions { vary: args.vary.clone(), pairs: args.pairs, steps_per_block: args.steps };
    let stop = signals::stop_flag()?;
    let told = Mutex::new((Lines::default(), Vec::new()));
    let tell = |event: CompareEvent| {
        let mut told = told.lock().unwrap_or_else(PoisonError::into_inner);
        if let CompareEvent::Finished { report } = event {
            // A closed stdout has nobody to tell.
            drop(if args.json { print_json(&report) } else { compare::print(&report) });
            told.1.push(*report);
        } else {
            told.0.tell(&event);
        }
    };
    let mut done = Ok(());
    for options in args.options() {
        done = bench.compare(&options, &comparison, &tell, &stop);
        if done.is_err() || stop.load(Ordering::Relaxed) {
            break;
        }
    }
    let (_, reports) = told.into_inner().unwrap_or_else(PoisonError::into_inner);
    if let Some(path) = args.html.as_ref().filter(|_| !reports.is_empty()) {
        // What was measured before a failure stays true.
        compare::write_html(path, &reports)?;
    }
    done
}

fn print_json(report: &CompareReport) -> io::Result<()> {
    writeln!(io::stdout(), "{}", serde_json::to_string(report)?)
}

fn print_ops(out: &mut impl io::Write, device: &Device, json: bool) -> Result<()> {
    let rows = bench_ops::run(device)?;
    if !json {
        writeln!(out, "{}", device.describe())?;
    }
    for row in rows {
        if json {
            writeln!(out, "{}", serde_json::to_string(&row)?)?;
            continue;
        }
        let rate = match (row.gb_per_sec, row.share_of_copy, row.tflops) {
            (Some(rate), Some(share), _) => format!("{rate:8.0} GB/s  {:4.0} % of a copy", 100.0 * share),
            (.., Some(rate)) => format!("{rate:8.*} TFLOP/s", if rate < 10.0 { 3 } else { 1 }),
            _ => String::new(),
        };
        writeln!(out, "  {:52} {:>9.3} ms  {rate}", row.name, row.ms)?;
    }
    Ok(())
}

/// What was planned beside what was measured.
fn print_plan(out: &mut impl io::Write, plan: &PlanCheck) -> io::Result<()> {
    let driver = match (plan.vram_bytes, plan.deviation) {
        (Some(bytes), Some(deviation)) => {
            format!(
                "{} by the driver, {} planned ({:+.1} %)",
                units::bytes(bytes),
                units::bytes(plan.planned_vram_bytes),
                100.0 * deviation
            )
        }
        _ => format!("{} planned", units::bytes(plan.planned_vram_bytes)),
    };
    writeln!(
        out,
        "  memory: {driver}; {} in slabs, {} planned; {} at the peak, {} planned; {} were in use before",
        units::bytes(plan.slab_bytes),
        units::bytes(plan.planned_slab_bytes),
        units::bytes(plan.peak_bytes),
        units::bytes(plan.planned_peak_bytes),
        units::bytes(plan.before_bytes)
    )
}

fn print_row(out: &mut impl io::Write, row: &BenchRow) -> io::Result<()> {
    let ms = |ms: Option<f64>| ms.map_or_else(|| "—".to_owned(), |ms| format!("{ms:.2}"));
    let pack = units::count(row.pack as u64);
    let graphs = match row.recorded {
        None => "",
        Some(true) => " · graphs",
        Some(false) => " · no graphs",
    };
    let Switches { activations, attention, metadata, .. } = row.switches;
    writeln!(
        out,
        "{} · {:?} · {} bits · pack {pack} · {activations:?} · {attention:?} · metadata {:?}{graphs} · {}",
        row.model, row.method, row.bits, metadata.metadata, row.device
    )?;
    if let Some(why) = &row.unrecorded {
        writeln!(out, "  CUDA graphs are not used: {why}")?;
    }
    for choice in row.choices.iter().filter(|choice| !Optimization::ALL.contains(&choice.optimization)) {
        writeln!(out, "  {}", choice.describe())?;
    }
    writeln!(
        out,
        "  {} tokens/s · step {:.1} ms · peak {} · MFU {:.1} % ({:.1} of {:.0} TFLOP/s) · loss {:.3}",
        units::count(row.tokens_per_sec.round() as u64),
        row.step_ms,
        units::bytes(row.peak_bytes),
        100.0 * row.mfu,
        row.tflops,
        row.matmul_tflops,
        row.loss
    )?;
    if let Some(driver_bytes) = row.driver_bytes {
        writeln!(out, "  {} in use on the card, the driver's own part included", units::bytes(driver_bytes))?;
    }
    if let Some(pinned) = row.memory.pinned {
        writeln!(out, "  {} of host memory are page-locked", units::bytes(pinned.now))?;
    }
    if let Some(plan) = &row.plan {
        print_plan(out, plan)?;
    }
    if let (Some(launches), Some(syncs), Some(allocations)) = (row.launches, row.host_syncs, row.allocations) {
        writeln!(out, "  a step: {launches} launches, {syncs} host syncs, {allocations} allocations")?;
    }
    if let Some(cache) = &row.cache {
        let CacheCounts { lookups, hits, builds, built_bytes, .. } = cache.counts;
        let built = units::bytes(built_bytes);
        writeln!(
            out,
            "  metadata: {lookups} lookups, {hits} hits, {builds} builds of {built} in all, {} ms",
            ms(cache.metadata_ms)
        )?;
    }
    if let Some(moe) = &row.moe {
        let load = moe.describe().unwrap_or_else(|| "none got a token".into());
        writeln!(out, "  experts: {:?} routing, {} ms in both passes; {load}", moe.routing, ms(moe.routing_ms))?;
    }
    if let Some(copies) = &row.copies {
        writeln!(
            out,
            "  copies: {} buffers of {} for {} blocks; to host {:.2} ms, back {:.2} ms, {:.1} % hidden, {:.2} ms exposed",
            copies.buffers,
            units::bytes(copies.buffer_bytes),
            copies.blocks,
            copies.d2h_ms,
            copies.h2d_ms,
            100.0 * copies.overlap(),
            copies.exposed_ms()
        )?;
    }
    for time in &row.phases {
        let (name, times) = (time.phase.name(), [time.forward_ms, time.backward_ms, time.step_ms].map(ms));
        writeln!(out, "  {name:14} forward {:>9}  backward {:>9}  once {:>9}", times[0], times[1], times[2])?;
    }
    writeln!(out, "  {:14} {:.2} ms", "not attributed", row.not_attributed_ms)
}
