//! The two arms of a comparison: how everything is switched in each, and in which fields of `run.toml` they differ.

use anyhow::ensure;

use super::report::{Arm, Setting, Variation};
use crate::base::error::Result;
use crate::tensor::Device;
use crate::train::config::{Activations, AttentionPath, Dequantized, Metadata, Placement, Routing};
use crate::train::report::Optimization;
use crate::train::switches::Switches;

/// Both arms of a variation around `base`, and what had to be changed in both of them, in words.
///
/// # Errors
/// When there is nothing to compare on this device.
pub(super) fn arms(variation: Variation, base: Switches, device: &Device) -> Result<([Arm; 2], Vec<String>)> {
    let on_gpu = matches!(device, Device::Cuda(_));
    ensure!(on_gpu || variation != Variation::Graphs, "CUDA graphs cannot be compared: there is no GPU in this run");
    let (mut a, mut b) = (base, base);
    match variation {
        Variation::Cache | Variation::CacheFused => {
            let off = if variation == Variation::Cache { Metadata::Published } else { Metadata::Fused };
            (a.metadata.metadata, b.metadata.metadata) = (Metadata::Cached, off);
        }
        Variation::Buffers => {
            (a.activations, b.activations) = (Activations::Offload, Activations::Offload);
            (a.offload.buffers, b.offload.buffers) = (2, 1);
        }
        Variation::Offload => (a.activations, b.activations) = (Activations::Offload, Activations::Recompute),
        Variation::Keep => (a.activations, b.activations) = (Activations::Keep, Activations::Recompute),
        Variation::Attention => (a.attention, b.attention) = (AttentionPath::Varlen, AttentionPath::Masked),
        Variation::Graphs => {
            (a.cuda_graphs, b.cuda_graphs) = (true, false);
            // Without the cache nothing can be recorded.
            (a.metadata.metadata, b.metadata.metadata) = (Metadata::Cached, Metadata::Cached);
        }
        Variation::All => {
            (a.metadata.metadata, b.metadata.metadata) = (Metadata::Cached, Metadata::Published);
            (a.attention, b.attention) = (AttentionPath::Varlen, AttentionPath::Masked);
            match base.activations {
                Activations::Offload => (a.offload.buffers, b.offload.buffers) = (2, 1),
                Activations::Keep => b.activations = Activations::Recompute,
                Activations::Recompute => {}
            }
        }
    }
    let mut notes = Vec::new();
    let reads_host = [&a, &b].iter().any(|arm| arm.metadata.metadata != Metadata::Cached);
    if reads_host && on_gpu && base.cuda_graphs {
        notes.push(
            "neither arm uses CUDA graphs: without the metadata cache the host acts within a pass, which cannot be \
             recorded, and the arms should differ in nothing else"
                .into(),
        );
    }
    if reads_host {
        (a.cuda_graphs, b.cuda_graphs) = (false, false);
    }
    let (on, off) = descriptions(variation);
    let arm = |label: &str, description: &str, switches| Arm {
        label: label.into(),
        description: description.into(),
        switches,
    };
    Ok(([arm("A on", on, a), arm("B off", off, b)], notes))
}

fn descriptions(variation: Variation) -> (&'static str, &'static str) {
    match variation {
        Variation::Cache => ("one build for each pack and window", "each layer builds anew, as published"),
        Variation::CacheFused => ("one build for each pack and window", "each layer builds anew, in few operations"),
        Variation::Buffers => ("two buffers: copies beside compute", "one buffer: copy, then compute, in turns"),
        Variation::Offload => ("inputs of blocks in host memory", "inputs of blocks on the device"),
        Variation::Keep => ("everything kept", "computed again in the backward pass"),
        Variation::Attention => ("only pairs that see each other", "a T×T mask, read for every pair"),
        Variation::Graphs => ("two launches a pass", "every kernel queued by the host"),
        Variation::All => ("everything on", "published baselines"),
    }
}

/// The optimizations that must be on in arm A, or there is nothing to compare.
pub(super) fn needed(variation: Variation, base: Switches) -> Vec<Optimization> {
    match variation {
        Variation::Cache | Variation::CacheFused => vec![Optimization::MetadataCache],
        Variation::Buffers => vec![Optimization::ActivationOffload, Optimization::DoubleBuffer],
        Variation::Offload => vec![Optimization::ActivationOffload],
        Variation::Keep => vec![Optimization::KeepActivations],
        Variation::Attention => vec![Optimization::VarlenAttention],
        Variation::Graphs => vec![Optimization::CudaGraphs],
        Variation::All => {
            let activations = match base.activations {
                Activations::Offload => Some(Optimization::DoubleBuffer),
                Activations::Keep => Some(Optimization::KeepActivations),
                Activations::Recompute => None,
            };
            let all = [Optimization::MetadataCache, Optimization::VarlenAttention];
            all.into_iter().chain(activations).collect()
        }
    }
}

/// Fields of `run.toml` in which two arms differ.
pub(super) fn settings([a, b]: [&Switches; 2]) -> Vec<Setting> {
    let pairs = fields(a).into_iter().zip(fields(b));
    let differ = pairs.filter(|((_, a), (_, b))| a != b);
    differ.map(|((field, a), (_, b))| Setting { field: field.into(), a, b }).collect()
}

/// Switches as fields of `run.toml` with their values as TOML.
fn fields(switches: &Switches) -> [(&'static str, String); 15] {
    let Switches { activations, attention, metadata, routing, offload, cuda_graphs, memory } = switches;
    let word = |word: &str| format!("\"{word}\"");
    let activations = match activations {
        Activations::Keep => "keep",
        Activations::Recompute => "recompute",
        Activations::Offload => "offload",
    };
    let attention = match attention {
        AttentionPath::Varlen => "varlen",
        AttentionPath::Masked => "masked",
    };
    let place = |placement| match placement {
        Placement::Device => "device",
        Placement::Host => "host",
    };
    let baseline = if metadata.metadata == Metadata::Fused { "fused" } else { "published" };
    let cache = if metadata.metadata == Metadata::Cached { "on" } else { "off" };
    [
        ("train.activations", word(activations)),
        ("train.attention", word(attention)),
        ("train.cuda_graphs", cuda_graphs.to_string()),
        ("optimizations.metadata_cache", word(cache)),
        ("optimizations.metadata_baseline", word(baseline)),
        ("optimizations.metadata_entries", metadata.capacity.to_string()),
        ("optimizations.grouped_routing", word(if *routing == Routing::Grouped { "on" } else { "off" })),
        ("optimizations.routing_baseline", word(if *routing == Routing::PerExpert { "per_expert" } else { "sorted" })),
        ("optimizations.offload_buffers", offload.buffers.to_string()),
        ("memory.mlp_rows", memory.mlp_rows.to_string()),
        ("memory.pass_tokens", memory.pass_tokens.to_string()),
        ("memory.embedding", word(place(memory.embedding))),
        ("memory.optimizer_state", word(place(memory.optimizer_state))),
        ("memory.middle", word(if memory.middle { "on" } else { "off" })),
        ("memory.dequantized", word(if memory.dequantized == Dequantized::Resident { "resident" } else { "scratch" })),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::cpu;

    fn both(variation: Variation, base: Switches) -> [Switches; 2] {
        arms(variation, base, &cpu(1)).unwrap().0.map(|arm| arm.switches)
    }

    #[test]
    fn arms_differ_in_what_is_varied_and_in_nothing_else() {
        let base = Switches { activations: Activations::Keep, ..Switches::default() };
        for (variation, fields) in [
            (Variation::Cache, &["optimizations.metadata_cache"][..]),
            (Variation::CacheFused, &["optimizations.metadata_cache", "optimizations.metadata_baseline"]),
            (Variation::Buffers, &["optimizations.offload_buffers"]),
            (Variation::Offload, &["train.activations"]),
            (Variation::Keep, &["train.activations"]),
            (Variation::Attention, &["train.attention"]),
            (Variation::All, &["train.activations", "train.attention", "optimizations.metadata_cache"]),
        ] {
            let [a, b] = both(variation, base);
            let found: Vec<String> = settings([&a, &b]).into_iter().map(|setting| setting.field).collect();
            assert_eq!(found, fields, "{variation:?}");
        }
        assert!(arms(Variation::Graphs, base, &cpu(1)).unwrap_err().to_string().contains("no GPU"));
    }

    #[test]
    fn an_arm_that_reads_the_host_takes_graphs_from_both() {
        for (variation, graphs) in
            [(Variation::Cache, false), (Variation::All, false), (Variation::Attention, true), (Variation::Keep, true)]
        {
            let arms = both(variation, Switches::default());
            assert_eq!(arms.map(|arm| arm.cuda_graphs), [graphs; 2], "{variation:?}");
        }
        let mut base = Switches::default();
        base.metadata.metadata = Metadata::Fused;
        assert_eq!(both(Variation::Attention, base).map(|arm| arm.cuda_graphs), [false; 2]);
    }

    #[test]
    fn all_takes_what_the_run_does_with_activations() {
        let with = |activations| both(Variation::All, Switches { activations, ..Switches::default() });
        let [a, b] = with(Activations::Offload);
        assert_eq!((a.activations, b.activations), (Activations::Offload, Activations::Offload));
        assert_eq!((a.offload.buffers, b.offload.buffers), (2, 1));
        let [a, b] = with(Activations::Recompute);
        assert_eq!((a.activations, b.activations), (Activations::Recompute, Activations::Recompute));
    }
}
