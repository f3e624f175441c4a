//! The two arms of a comparison: how everything is switched in each, and in which fields of `run.toml` they differ.

use anyhow::ensure;

use super::report::{Arm, Setting, Variation};
use crate::base::error::Result;
use crate::model::transformer::Transformer;
use crate::tensor::Device;
use crate::train::config::{Activations, AttentionPath, Dequantized, Metadata, Placement, Routing};
use crate::train::report::Optimization;
use crate::train::switches::Switches;

/// What a comparison is made on, as far as it decides what there is to compare.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ground {
    /// Whether it runs on a GPU.
    pub on_gpu: bool,
    /// Whether the model has routed experts.
    pub has_experts: bool,
}

impl Ground {
    /// What `model` stands on.
    pub(super) fn of(model: &Transformer) -> Self {
        Self { on_gpu: matches!(model.device(), Device::Cuda(_)), has_experts: model.routing().is_some() }
    }

    /// Why layers of an arm read the host within a pass, if they do: without what.
    fn reads_host(self, arm: &Switches) -> [Option<&'static str>; 2] {
        [
            (arm.metadata.metadata != Metadata::Cached).then_some("the metadata cache"),
            (self.has_experts && arm.routing != Routing::Grouped).then_some("grouped routing"),
        ]
    }

    /// Whether both arms add in the same order, so that they give the same bits. On a GPU a grouped product of all experts and a product for each of
    /// them are different kernels.
    pub(super) fn adds_alike(self, [a, b]: [&Switches; 2]) -> bool {
        let grouped = |arm: &Switches| arm.routing == Routing::Grouped;
        let products = !(self.on_gpu && self.has_experts) || grouped(a) == grouped(b);
        products && a.attention == b.attention
    }
}

/// Both arms of a variation around `base`, and what had to be changed in both of them, in words.
///
/// # Errors
/// When there is nothing to compare on this ground.
pub(super) fn arms(variation: Variation, base: Switches, ground: Ground) -> Result<([Arm; 2], Vec<String>)> {
    let Ground { on_gpu, has_experts } = ground;
    ensure!(on_gpu || variation != Variation::Graphs, "CUDA graphs cannot be compared: there is no GPU in this run");
    ensure!(
        has_experts || !variation.needs_experts(),
        "{} cannot be compared: this model is dense, it has no experts to route to",
        variation.name()
    );
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
        Variation::Routing => (a.routing, b.routing) = (Routing::Grouped, Routing::PerExpert),
        Variation::RoutingSorted => (a.routing, b.routing) = (Routing::Sorted, Routing::PerExpert),
        Variation::Graphs => {
            (a.cuda_graphs, b.cuda_graphs) = (true, false);
            // Without the cache and grouped routing nothing can be recorded.
            (a.metadata.metadata, b.metadata.metadata) = (Metadata::Cached, Metadata::Cached);
            (a.routing, b.routing) = (Routing::Grouped, Routing::Grouped);
        }
        Variation::All => {
            (a.metadata.metadata, b.metadata.metadata) = (Metadata::Cached, Metadata::Published);
            (a.attention, b.attention) = (AttentionPath::Varlen, AttentionPath::Masked);
            if has_experts {
                (a.routing, b.routing) = (Routing::Grouped, Routing::PerExpert);
            }
            match base.activations {
                Activations::Offload => (a.offload.buffers, b.offload.buffers) = (2, 1),
                Activations::Keep => b.activations = Activations::Recompute,
                Activations::Recompute => {}
            }
        }
    }
    let mut notes = Vec::new();
    let [of_a, of_b] = [&a, &b].map(|arm| ground.reads_host(arm));
    let without: Vec<&str> = of_a.into_iter().zip(of_b).filter_map(|(a, b)| a.or(b)).collect();
    if !without.is_empty() && on_gpu && base.cuda_graphs {
        notes.push(format!(
            "neither arm uses CUDA graphs: without {} the host acts within a pass, which cannot be recorded, and the arms \
             should differ in nothing else",
            without.join(" and ")
        ));
    }
    if !without.is_empty() {
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
        Variation::Routing => {
            ("counts stay on the device, one grouped product", "a search and a read an expert, as published")
        }
        Variation::RoutingSorted => {
            ("one sort and one read for all experts", "a search and a read an expert, as published")
        }
        Variation::Graphs => ("two launches a pass", "every kernel queued by the host"),
        Variation::All => ("everything on", "published baselines"),
    }
}

/// The optimizations that must be on in arm A, or there is nothing to compare.
pub(super) fn needed(variation: Variation, base: Switches, ground: Ground) -> Vec<Optimization> {
    match variation {
        Variation::Cache | Variation::CacheFused => vec![Optimization::MetadataCache],
        Variation::Buffers => vec![Optimization::ActivationOffload, Optimization::DoubleBuffer],
        Variation::Offload => vec![Optimization::ActivationOffload],
        Variation::Keep => vec![Optimization::KeepActivations],
        Variation::Attention => vec![Optimization::VarlenAttention],
        Variation::Routing => vec![Optimization::GroupedRouting],
        // Neither arm is grouped.
        Variation::RoutingSorted => Vec::new(),
        Variation::Graphs => vec![Optimization::CudaGraphs],
        Variation::All => {
            let activations = match base.activations {
                Activations::Offload => Some(Optimization::DoubleBuffer),
                Activations::Keep => Some(Optimization::KeepActivations),
                Activations::Recompute => None,
            };
            let all = [Optimization::MetadataCache, Optimization::VarlenAttention];
            let routing = ground.has_experts.then_some(Optimization::GroupedRouting);
            all.into_iter().chain(activations).chain(routing).collect()
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
fn fields(switches: &Switches) -> [(&'static str, String); 16] {
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
        ("memory.qkv", word(if memory.qkv { "on" } else { "off" })),
        ("memory.dequantized", word(if memory.dequantized == Dequantized::Resident { "resident" } else { "scratch" })),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    const DENSE: Ground = Ground { on_gpu: false, has_experts: false };
    const SPARSE: Ground = Ground { on_gpu: false, has_experts: true };

    fn both_on(ground: Ground, variation: Variation, base: Switches) -> [Switches; 2] {
        arms(variation, base, ground).unwrap().0.map(|arm| arm.switches)
    }

    fn both(variation: Variation, base: Switches) -> [Switches; 2] {
        both_on(DENSE, variation, base)
    }

    fn differing([a, b]: [Switches; 2]) -> Vec<String> {
        settings([&a, &b]).into_iter().map(|setting| setting.field).collect()
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
            assert_eq!(differing(both(variation, base)), fields, "{variation:?}");
        }
        assert!(arms(Variation::Graphs, base, DENSE).unwrap_err().to_string().contains("no GPU"));
    }

    #[test]
    fn routing_is_varied_where_there_are_experts() {
        let base = Switches::default();
        let routing = ["optimizations.grouped_routing", "optimizations.routing_baseline"];
        assert_eq!(differing(both_on(SPARSE, Variation::Routing, base)), routing);
        // Both are off, in one way and the other.
        assert_eq!(differing(both_on(SPARSE, Variation::RoutingSorted, base)), routing[1..]);
        let of = |variation| both_on(SPARSE, variation, base).map(|arm| arm.routing);
        assert_eq!(of(Variation::Routing), [Routing::Grouped, Routing::PerExpert]);
        assert_eq!(of(Variation::RoutingSorted), [Routing::Sorted, Routing::PerExpert]);
        assert_eq!(of(Variation::All), [Routing::Grouped, Routing::PerExpert]);
        assert_eq!(both(Variation::All, base).map(|arm| arm.routing), [Routing::Grouped; 2], "a dense model");
        assert!(needed(Variation::All, base, SPARSE).contains(&Optimization::GroupedRouting));
        assert!(!needed(Variation::All, base, DENSE).contains(&Optimization::GroupedRouting));
        for variation in [Variation::Routing, Variation::RoutingSorted] {
            let error = arms(variation, base, DENSE).unwrap_err().to_string();
            assert!(error.ends_with("this model is dense, it has no experts to route to"), "{error}");
        }
    }

    #[test]
    fn grouped_products_add_in_an_order_of_their_own_on_a_gpu() {
        let gpu = Ground { on_gpu: true, ..SPARSE };
        let alike = |ground: Ground, variation| {
            let [a, b] = both_on(ground, variation, Switches::default());
            ground.adds_alike([&a, &b])
        };
        assert!(alike(SPARSE, Variation::Routing) && !alike(gpu, Variation::Routing));
        assert!(alike(gpu, Variation::RoutingSorted), "the same products, reached in two ways");
        assert!(alike(gpu, Variation::Cache) && !alike(DENSE, Variation::Attention));
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
        for variation in [Variation::Routing, Variation::RoutingSorted] {
            let arms = both_on(SPARSE, variation, Switches::default());
            assert_eq!(arms.map(|arm| arm.cuda_graphs), [false; 2], "{variation:?}");
        }
        // How a dense model would route makes no difference to it.
        let base = Switches { routing: Routing::Sorted, ..Switches::default() };
        assert_eq!(both(Variation::Attention, base).map(|arm| arm.cuda_graphs), [true; 2]);
        assert_eq!(both_on(SPARSE, Variation::Attention, base).map(|arm| arm.cuda_graphs), [false; 2]);
        let gpu = Ground { on_gpu: true, ..SPARSE };
        let notes = |variation| arms(variation, Switches::default(), gpu).unwrap().1;
        assert!(notes(Variation::All)[0].contains("without the metadata cache and grouped routing the host acts"));
        assert!(notes(Variation::Routing)[0].contains("without grouped routing the host acts"));
        assert!(notes(Variation::Keep).is_empty());
        let graphs = both_on(gpu, Variation::Graphs, base);
        assert_eq!(
            graphs.map(|arm| (arm.cuda_graphs, arm.routing)),
            [(true, Routing::Grouped), (false, Routing::Grouped)]
        );
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
