//! `tandem quantize`: a model folder with its linear layers in NF4, as bitsandbytes stores them.

use std::io::{self, Write as _};
use std::path::PathBuf;

use clap::Args;
use tandem::base::error::Result;
use tandem::base::units;
use tandem::export;
use tandem::formats::safetensors::Dtype;
use tandem::model::loading::Checkpoint;
use tandem::session::starter;

/// Flags of `tandem quantize`.
#[derive(Args)]
pub struct QuantizeArgs {
    /// Hugging Face folder of the model.
    model: PathBuf,
    /// New folder for the quantized model.
    folder: PathBuf,
    /// Type of what stays unquantized, and to which weights are rounded first: bf16, f16, f32.
    #[arg(long, default_value = "bf16", value_parser = dtype)]
    dtype: Dtype,
    /// Keep the scales of blocks in f32, 0.4 bits a weight more.
    #[arg(long)]
    single_quant: bool,
}

fn dtype(text: &str) -> std::result::Result<Dtype, String> {
    match text {
        "bf16" => Ok(Dtype::BF16),
        "f16" => Ok(Dtype::F16),
        "f32" => Ok(Dtype::F32),
        other => Err(format!("`{other}` is none of bf16, f16, f32")),
    }
}

/// Quantizes and says what became of it.
pub fn run(args: &QuantizeArgs) -> Result<()> {
    let checkpoint = Checkpoint::open(&starter::resolve_model(&args.model)?)?;
    let mut told = 0;
    let mut tell = |done: usize, total: usize| {
        let percent = 100 * done / total;
        if percent >= told + 10 {
            told = percent;
            // A closed stderr has nobody to tell.
            let _ = writeln!(io::stderr(), "{percent} % of {total} weights");
        }
    };
    let notes = export::nf4::save(&args.folder, &checkpoint, args.dtype, !args.single_quant, &mut tell)?;
    let saved = Checkpoint::open(&args.folder)?;
    let mut out = io::stdout().lock();
    writeln!(
        out,
        "{}: {} on disk, {} before",
        args.folder.display(),
        units::bytes(saved.bytes_on_disk()),
        units::bytes(checkpoint.bytes_on_disk())
    )?;
    for note in notes {
        writeln!(out, "note: {note}")?;
    }
    Ok(())
}
