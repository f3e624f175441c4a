//! The ways to train that a memory plan tries, in order of speed, and their words.

use super::Planner;
use crate::train::config::{
    Activations, Dequantized, DequantizedChoice, MemoryPolicy, MethodKind, Placement, PlacementChoice,
};
use crate::train::switches::Switches;

/// What blocks keep, the fastest first.
const KEPT: [fn(&mut Switches); 4] = [
    |switches| switches.activations = Activations::Keep,
    |switches| switches.activations = Activations::Recompute,
    |switches| {
        switches.activations = Activations::Offload;
        switches.offload.buffers = 2;
    },
    |switches| {
        switches.activations = Activations::Offload;
        switches.offload.buffers = 1;
    },
];

/// Where things lie, the fastest first; each is tried with all that blocks may keep before they keep less.
const PLACES: [fn(&mut MemoryPolicy); 3] = [
    |memory| memory.dequantized = Dequantized::Resident,
    |memory| memory.dequantized = Dequantized::Scratch,
    |memory| {
        memory.dequantized = Dequantized::Scratch;
        memory.embedding = Placement::Host;
    },
];

/// What costs more than keeping less: tried with everything that blocks may keep after all [`PLACES`].
const LAST_PLACES: [fn(&mut MemoryPolicy); 1] = [|memory| {
    memory.dequantized = Dequantized::Scratch;
    memory.embedding = Placement::Host;
    memory.optimizer_state = Placement::Host;
}];

impl Planner {
    /// The ways that the configuration leaves open.
    pub(super) fn ways(&self) -> Vec<Switches> {
        let every = |places: &'static [fn(&mut MemoryPolicy)]| {
            KEPT.iter().flat_map(move |kept| places.iter().map(move |place| (kept, place)))
        };
        let mut ways = Vec::new();
        for (kept, place) in every(&PLACES).chain(every(&LAST_PLACES)) {
            let mut switches = self.setup.switches;
            kept(&mut switches);
            place(&mut switches.memory);
            self.keep_what_is_set(&mut switches.memory);
            if self.leaves_open(&switches) && !ways.contains(&switches) {
                ways.push(switches);
            }
        }
        ways
    }

    /// Takes back what the configuration does not leave to Tandem, and what means nothing to the method.
    fn keep_what_is_set(&self, memory: &mut MemoryPolicy) {
        let set = self.setup.switches.memory;
        // A table that the head multiplies by, or that trains, is worked on all the time.
        let reads_rows = self.setup.method.kind.has_adapters() && !self.config.tie_word_embeddings;
        if self.memory.embedding != PlacementChoice::Auto || !reads_rows {
            memory.embedding = set.embedding;
        }
        if self.memory.optimizer_state != PlacementChoice::Auto {
            memory.optimizer_state = set.optimizer_state;
        }
        if self.memory.dequantized != DequantizedChoice::Auto || self.setup.method.kind != MethodKind::Qlora {
            memory.dequantized = set.dequantized;
        }
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
        let mut words = vec![kept];
        if self.setup.method.kind == MethodKind::Qlora {
            words.push(match switches.memory.dequantized {
                Dequantized::Resident => "weights in 4 bits are dequantized once",
                Dequantized::Scratch => "weights in 4 bits are dequantized for each block",
            });
        }
        let MemoryPolicy { embedding, optimizer_state, .. } = switches.memory;
        match (embedding, optimizer_state) {
            (Placement::Host, Placement::Host) => {
                words.push("the embedding's table and the optimizer's state lie in host memory");
            }
            (Placement::Host, Placement::Device) => words.push("the embedding's table lies in host memory"),
            (Placement::Device, Placement::Host) => words.push("the optimizer's state lies in host memory"),
            (Placement::Device, Placement::Device) => {}
        }
        words.join("; ")
    }

    /// How a run file asks for a way.
    pub(super) fn setting(&self, switches: &Switches) -> String {
        let mut settings = vec![match switches.activations {
            Activations::Keep => "activations = \"keep\" in [train]",
            Activations::Recompute => "activations = \"recompute\" in [train]",
            Activations::Offload => "activations = \"offload\" in [train]",
        }];
        if switches.activations == Activations::Offload && switches.offload.buffers == 1 {
            settings.push("offload_buffers = 1 in [optimizations]");
        }
        if self.setup.method.kind == MethodKind::Qlora {
            settings.push(match switches.memory.dequantized {
                Dequantized::Resident => "dequantized = \"resident\" in [memory]",
                Dequantized::Scratch => "dequantized = \"scratch\" in [memory]",
            });
        }
        if switches.memory.embedding == Placement::Host {
            settings.push("embedding = \"host\" in [memory]");
        }
        if switches.memory.optimizer_state == Placement::Host {
            settings.push("optimizer_state = \"host\" in [memory]");
        }
        match settings.split_last() {
            Some((last, [])) => (*last).to_owned(),
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
