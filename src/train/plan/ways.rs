//! The ways to train that a memory plan tries, in order of speed, and their words.

use super::{Planner, Workload};
use crate::base::units;
use crate::model::policy::KeptParts;
use crate::tensor::dtype::DType;
use crate::train::config::{
    Activations, AttentionPath, Dequantized, DequantizedChoice, MemoryPolicy, MethodKind, Placement, PlacementChoice,
    Switch,
};
use crate::train::switches::Switches;

/// What blocks keep, the fastest first.
const KEPT: [fn(&mut Switches); 8] = [
    |switches| kept(switches, Activations::Keep, NOTHING, None),
    |switches| kept(switches, Activations::Recompute, BOTH, None),
    |switches| kept(switches, Activations::Recompute, MIDDLE, None),
    |switches| kept(switches, Activations::Recompute, NOTHING, None),
    |switches| kept(switches, Activations::Offload, BOTH, Some(2)),
    |switches| kept(switches, Activations::Offload, MIDDLE, Some(2)),
    |switches| kept(switches, Activations::Offload, NOTHING, Some(2)),
    |switches| kept(switches, Activations::Offload, NOTHING, Some(1)),
];

/// What is kept beside inputs.
const NOTHING: KeptParts = KeptParts { middle: false, qkv: false };
const MIDDLE: KeptParts = KeptParts { middle: true, qkv: false };
const BOTH: KeptParts = KeptParts { middle: true, qkv: true };

fn kept(switches: &mut Switches, activations: Activations, beside: KeptParts, buffers: Option<usize>) {
    switches.activations = activations;
    (switches.memory.middle, switches.memory.qkv) = (beside.middle, beside.qkv);
    switches.offload.buffers = buffers.unwrap_or(switches.offload.buffers);
}

/// Where things lie, the fastest first; each is tried with all that blocks may keep before they keep less.
const PLACES: [fn(&mut MemoryPolicy); 3] = [
    |memory| memory.dequantized = Dequantized::Resident,
    |memory| memory.dequantized = Dequantized::Scratch,
    |memory| {
        memory.dequantized = Dequantized::Scratch;
        memory.embedding = Placement::Host;
    },
];

/// What costs more than keeping less: tried with everything that blocks may keep after all [`PLACES`]. With fewer rows at one time products run below
/// their rate; the optimizer's state goes over the bus twice a step.
const LAST_PLACES: [fn(&mut MemoryPolicy); 4] = [
    |memory| lean(memory, 4096, Placement::Device),
    |memory| lean(memory, 2048, Placement::Device),
    |memory| lean(memory, 2048, Placement::Host),
    |memory| lean(memory, 1024, Placement::Host),
];
/// Tokens of a pass that keep a GPU busy, and of one that nearly does: packs that are shorter are joined into such passes, where a step has several.
const BUSY_TOKENS: [usize; 2] = [8192, 4096];
/// Floating-point operations of a block's forward pass for each byte that leaves it, below which copies are not hidden: what an H200 does while its bus
/// carries a byte (650 TFLOP/s and 50 GB/s). Cards that compute less for what their bus carries hide more.
const HIDING_FLOP_A_BYTE: usize = 13_000;

fn lean(memory: &mut MemoryPolicy, mlp_rows: usize, optimizer_state: Placement) {
    memory.dequantized = Dequantized::Scratch;
    memory.embedding = Placement::Host;
    (memory.mlp_rows, memory.optimizer_state) = (mlp_rows, optimizer_state);
}

impl Planner {
    /// The ways that the configuration leaves open.
    pub(super) fn ways(&self) -> Vec<Switches> {
        let passes = self.passes();
        let mut every = Vec::new();
        for places in [&PLACES[..], &LAST_PLACES] {
            for kept in KEPT {
                for &pass_tokens in &passes {
                    every.extend(places.iter().map(|place| (kept, pass_tokens, *place)));
                }
            }
        }
        let mut ways = Vec::new();
        for (kept, pass_tokens, place) in every {
            let mut switches = self.setup.switches;
            kept(&mut switches);
            place(&mut switches.memory);
            switches.memory.pass_tokens = pass_tokens;
            self.keep_what_is_set(&mut switches.memory);
            if switches.activations == Activations::Keep {
                // Everything is.
                (switches.memory.middle, switches.memory.qkv) = (false, false);
            }
            if switches.activations == Activations::Keep
                || switches.memory.mlp_rows >= self.work.tokens.max(pass_tokens)
            {
                // All of them, then.
                switches.memory.mlp_rows = self.setup.switches.memory.mlp_rows;
            }
            if self.leaves_open(&switches) && self.hides(&switches) && !ways.contains(&switches) {
                ways.push(switches);
            }
        }
        ways
    }

    /// Tokens of passes into which packs may be joined, the fastest first; 0 leaves them apart.
    fn passes(&self) -> Vec<usize> {
        let Workload { tokens, batches, .. } = self.work;
        let joined = BUSY_TOKENS.map(|busy| busy.min(tokens * batches) / tokens.max(1) * tokens);
        match &self.memory {
            Some(asked) if asked.pass_tokens == 0 && self.can_join() => {
                let mut passes: Vec<usize> = joined.into_iter().filter(|joined| *joined > tokens).collect();
                passes.dedup();
                passes.push(0);
                passes
            }
            _ => vec![self.setup.switches.memory.pass_tokens],
        }
    }

    /// Whether packs may be joined: a mask grows with the square of a pass, dropout goes by the place in a pack, and an auxiliary loss is one of a pass.
    fn can_join(&self) -> bool {
        self.setup.switches.attention == AttentionPath::Varlen
            && self.setup.method.lora_dropout == 0.0
            && self.config.auxiliary_loss().is_none()
    }

    /// Whether there are weights in 4 bits below adapters: by the method, or experts that the file has so.
    fn has_weights_in_4_bits(&self) -> bool {
        match self.setup.method.kind {
            MethodKind::Qlora => true,
            MethodKind::Lora => self.config.moe.as_ref().is_some_and(|moe| moe.mxfp4),
            MethodKind::Full => false,
        }
    }

    /// Takes back what the configuration does not leave to Tandem, and what means nothing to the method.
    fn keep_what_is_set(&self, memory: &mut MemoryPolicy) {
        let set = self.setup.switches.memory;
        let Some(asked) = &self.memory else {
            *memory = set;
            return;
        };
        // A table that the head multiplies by, or that trains, is worked on all the time.
        let reads_rows = self.setup.method.kind.has_adapters() && !self.config.tie_word_embeddings;
        if asked.embedding != PlacementChoice::Auto || !reads_rows {
            memory.embedding = set.embedding;
        }
        if asked.optimizer_state != PlacementChoice::Auto {
            memory.optimizer_state = set.optimizer_state;
        }
        if asked.dequantized != DequantizedChoice::Auto || !self.has_weights_in_4_bits() {
            memory.dequantized = set.dequantized;
        }
        if asked.middle != Switch::Auto {
            memory.middle = set.middle;
        }
        if asked.qkv != Switch::Auto {
            memory.qkv = set.qkv;
        }
        if asked.mlp_rows != 0 {
            memory.mlp_rows = set.mlp_rows;
        }
    }

    /// Whether blocks keep something beside their input that the configuration does not ask for.
    pub(super) fn keeps_more_than_asked(&self, memory: &MemoryPolicy) -> bool {
        let Some(asked) = &self.memory else { return false };
        memory.middle && asked.middle == Switch::Auto || memory.qkv && asked.qkv == Switch::Auto
    }

    /// Whether what leaves a block beside its input, unless that was asked for, can leave while the block computes.
    fn hides(&self, switches: &Switches) -> bool {
        if switches.activations != Activations::Offload || !self.keeps_more_than_asked(&switches.memory) {
            return true;
        }
        let columns: usize = switches.memory.kept_parts().columns(&self.config).iter().sum();
        let weights = (0..self.config.num_hidden_layers).map(|layer| self.config.active_weights(layer)).min();
        // Of a token.
        let (flop, bytes) = (2 * weights.unwrap_or(0), columns * DType::Bf16.num_bytes());
        flop >= bytes * HIDING_FLOP_A_BYTE
    }

    fn leaves_open(&self, switches: &Switches) -> bool {
        let buffers = self.setup.switches.offload.buffers;
        let kept = self.activations.fixed().is_none_or(|fixed| fixed == switches.activations);
        kept && (switches.activations != Activations::Offload || buffers == 0 || buffers == switches.offload.buffers)
    }

    /// A way as a clause.
    pub(super) fn in_words(&self, switches: &Switches) -> String {
        let kept = match (switches.activations, switches.offload.buffers) {
            (Activations::Keep, _) => "blocks keep everything for the backward pass",
            (Activations::Recompute, _) => "blocks keep their inputs, the rest is computed again",
            (Activations::Offload, 1) => "inputs of blocks wait in host memory, with one buffer on the device",
            (Activations::Offload, _) => "inputs of blocks wait in host memory, with two buffers on the device",
        };
        let mut words = vec![kept.to_owned()];
        let mut add = |text: &str| words.push(text.to_owned());
        match (switches.memory.middle, switches.memory.qkv) {
            (true, true) => add("they keep q, k and v and the residual stream between attention and MLP, too"),
            (true, false) => add("they keep the residual stream between attention and MLP, too"),
            (false, true) => add("they keep q, k and v, too"),
            (false, false) => {}
        }
        if self.has_weights_in_4_bits() {
            add(match switches.memory.dequantized {
                Dequantized::Resident => "weights in 4 bits are dequantized once",
                Dequantized::Scratch => "weights in 4 bits are dequantized for each block",
            });
        }
        let MemoryPolicy { embedding, optimizer_state, mlp_rows, pass_tokens, .. } = switches.memory;
        match (embedding, optimizer_state) {
            (Placement::Host, Placement::Host) => {
                add("the embedding's table and the optimizer's state lie in host memory");
            }
            (Placement::Host, Placement::Device) => add("the embedding's table lies in host memory"),
            (Placement::Device, Placement::Host) => add("the optimizer's state lies in host memory"),
            (Placement::Device, Placement::Device) => {}
        }
        if mlp_rows > 0 {
            add(&format!("the MLP takes {} tokens at one time", units::count(mlp_rows as u64)));
        }
        if pass_tokens > 0 && self.can_join() {
            add(&format!("packs are joined into passes of {} tokens", units::count(pass_tokens as u64)));
        }
        words.join("; ")
    }

    /// How a run file asks for a way.
    pub(super) fn setting(&self, switches: &Switches) -> String {
        let mut settings = vec![
            match switches.activations {
                Activations::Keep => "activations = \"keep\" in [train]",
                Activations::Recompute => "activations = \"recompute\" in [train]",
                Activations::Offload => "activations = \"offload\" in [train]",
            }
            .to_owned(),
        ];
        let mut add = |text: &str| settings.push(text.to_owned());
        if switches.activations == Activations::Offload && switches.offload.buffers == 1 {
            add("offload_buffers = 1 in [optimizations]");
        }
        if self.has_weights_in_4_bits() {
            add(match switches.memory.dequantized {
                Dequantized::Resident => "dequantized = \"resident\" in [memory]",
                Dequantized::Scratch => "dequantized = \"scratch\" in [memory]",
            });
        }
        if switches.memory.middle {
            add("middle = \"on\" in [memory]");
        }
        if switches.memory.qkv {
            add("qkv = \"on\" in [memory]");
        }
        if switches.memory.embedding == Placement::Host {
            add("embedding = \"host\" in [memory]");
        }
        if switches.memory.optimizer_state == Placement::Host {
            add("optimizer_state = \"host\" in [memory]");
        }
        let MemoryPolicy { mlp_rows, pass_tokens, .. } = switches.memory;
        for (name, value) in [("mlp_rows", mlp_rows), ("pass_tokens", pass_tokens)] {
            if value > 0 {
                add(&format!("{name} = {value} in [memory]"));
            }
        }
        match settings.split_last() {
            Some((last, [])) => last.clone(),
            Some((last, others)) => format!("{} and {last}", others.join(", ")),
            None => String::new(),
        }
    }
}

/// What blocks keep, as the subject of a sentence.
pub(super) fn kept_in_words(switches: &Switches) -> &'static str {
    match (switches.activations, switches.offload.buffers) {
        (Activations::Keep, _) => "keeping everything",
        (Activations::Recompute, _) => "computing again",
        (Activations::Offload, 1) => "offloading with one buffer",
        (Activations::Offload, _) => "offloading",
    }
}
