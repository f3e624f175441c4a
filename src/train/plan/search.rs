//! The search of a memory plan: ways to train in order of speed, the first that fits, and what would make a run fit that does not.

use super::{MemoryPlan, Need, Planner, Tried, Workload};
use crate::base::units;
use crate::train::config::{Activations, ActivationsChoice, MethodConfig, MethodKind};
use crate::train::switches::Switches;

/// Part of the device's memory that is left free: the driver takes some more while a run goes on, for kernels of the matrix library that are new.
const MARGIN_PART: u64 = 64;
/// Granularity in which shorter packs are tried.
const TOKENS_STEP: usize = 64;

/// One way to train.
struct Way {
    /// As a clause.
    what: &'static str,
    /// How a run file asks for it.
    setting: &'static str,
    /// What it changes.
    change: fn(&mut Switches),
}

/// The ways, the fastest first. Each says how it differs from what the configuration sets; what it sets itself is not touched ([`Planner::ways`]).
const WAYS: [Way; 4] = [
    Way {
        what: "blocks keep everything for the backward pass",
        setting: "activations = \"keep\" in [train]",
        change: |switches| switches.activations = Activations::Keep,
    },
    Way {
        what: "blocks keep their inputs, the rest is computed again",
        setting: "activations = \"recompute\" in [train]",
        change: |switches| switches.activations = Activations::Recompute,
    },
    Way {
        what: "inputs of blocks wait in host memory, with two buffers on the device",
        setting: "activations = \"offload\" in [train]",
        change: |switches| {
            switches.activations = Activations::Offload;
            switches.offload.buffers = 2;
        },
    },
    Way {
        what: "inputs of blocks wait in host memory, with one buffer on the device",
        setting: "activations = \"offload\" in [train] and offload_buffers = 1 in [optimizations]",
        change: |switches| {
            switches.activations = Activations::Offload;
            switches.offload.buffers = 1;
        },
    },
];

impl Planner {
    /// The plan: the first way that fits, with the reasons.
    pub fn plan(&self) -> MemoryPlan {
        let tried: Vec<Tried> = self.ways().into_iter().map(|way| self.try_way(&way, self.work)).collect();
        let found = tried.iter().position(|tried| tried.against.is_none());
        let least = || {
            let needs = tried.iter().enumerate().filter_map(|(i, tried)| Some((tried.need.as_ref()?.vram_bytes(), i)));
            needs.min().map_or(0, |(_, i)| i)
        };
        let chosen = found.unwrap_or_else(least);
        let why = self.why(&tried, found);
        let advice = if found.is_some() { Vec::new() } else { self.advice(&tried) };
        MemoryPlan {
            work: self.work,
            vram_bytes: self.machine.vram_bytes,
            before_is_measured: self.machine.before_is_measured,
            host_bytes: self.machine.host_bytes,
            tried,
            chosen,
            why,
            advice,
        }
    }

    /// One concrete change with which a run goes on that ran out of memory under `plan`: a leaner way, or shorter packs.
    pub fn way_out(&self, plan: &MemoryPlan) -> Option<String> {
        let leaner = |tried: &&Tried| {
            let is_leaner =
                tried.need.as_ref().zip(plan.need()).is_some_and(|(it, is)| it.vram_bytes() < is.vram_bytes());
            tried.against.is_none() && is_leaner
        };
        if let Some(tried) = plan.tried[plan.chosen + 1..].iter().find(leaner) {
            let need = tried.need.as_ref().map_or(0, Need::vram_bytes);
            return Some(format!("set {}: by the plan that takes {}", tried.setting, units::bytes(need)));
        }
        // By the plan this step fits, and it did not: a tenth shorter at least.
        let most = self.work.tokens * 9 / 10;
        let tokens = self.longest_that_fits(plan.choice().switches, most)?;
        Some(format!("set pack_len = {tokens} in [packing]: by the plan packs of that length fit"))
    }

    /// The ways that the configuration leaves open.
    fn ways(&self) -> Vec<Way> {
        let buffers = self.setup.switches.offload.buffers;
        let is_open = |way: &Way| {
            let mut switches = self.setup.switches;
            (way.change)(&mut switches);
            let allowed = self.activations.fixed().is_none_or(|fixed| fixed == switches.activations);
            allowed
                && (switches.activations != Activations::Offload || buffers == 0 || buffers == switches.offload.buffers)
        };
        WAYS.into_iter().filter(is_open).collect()
    }

    fn try_way(&self, way: &Way, work: Workload) -> Tried {
        let mut switches = self.setup.switches;
        (way.change)(&mut switches);
        let (need, against) = match self.need_for(switches, work) {
            Ok(need) => {
                let against = self.against(&need);
                (Some(need), against)
            }
            Err(error) => (None, Some(format!("{error:#}"))),
        };
        Tried { what: way.what.into(), setting: way.setting.into(), switches, need, against }
    }

    /// What speaks against a way that takes `need`.
    fn against(&self, need: &Need) -> Option<String> {
        let (needed, there) = (need.vram_bytes(), self.machine.vram_bytes);
        let usable = there - there / MARGIN_PART;
        if needed > usable {
            return Some(format!("{} would be needed, and {} may be used", units::bytes(needed), units::bytes(usable)));
        }
        let host = self.machine.host_bytes.filter(|host| need.host_bytes > *host)?;
        let needed = units::bytes(need.host_bytes);
        Some(format!("{needed} of host memory would be needed, and {} are free", units::bytes(host)))
    }

    fn why(&self, tried: &[Tried], found: Option<usize>) -> String {
        let passed = &tried[..found.unwrap_or(tried.len())];
        let against = passed.iter().map(|tried| match &tried.need {
            Some(need) => format!("{} would take {}", short(tried.switches), units::bytes(need.vram_bytes())),
            None => {
                format!("not {}: {}", short(tried.switches), tried.against.as_deref().unwrap_or("it cannot be done"))
            }
        });
        let mut reasons: Vec<String> = against.collect();
        let there = units::bytes(self.machine.vram_bytes);
        match found.and_then(|found| Some((&tried[found], tried[found].need.as_ref()?))) {
            Some((_, need)) if reasons.is_empty() => {
                format!("{} of {there} are needed", units::bytes(need.vram_bytes()))
            }
            Some((_, need)) => {
                reasons.push(format!("this takes {} of {there}", units::bytes(need.vram_bytes())));
                reasons.join("; ")
            }
            None => {
                reasons.push(format!("{there} may be used"));
                reasons.join("; ")
            }
        }
    }

    /// Changes that make the run fit, each tried.
    fn advice(&self, tried: &[Tried]) -> Vec<String> {
        let mut advice = Vec::new();
        let there = self.machine.vram_bytes;
        // Ways that the configuration closed.
        if self.activations != ActivationsChoice::Auto || self.setup.switches.offload.buffers != 0 {
            let mut open = self.clone();
            open.activations = ActivationsChoice::Auto;
            open.setup.switches.offload.buffers = 0;
            let way = open.ways().into_iter().map(|way| open.try_way(&way, self.work));
            if let Some(way) = way.into_iter().find(|tried| tried.against.is_none()) {
                advice.push(format!("set {}: {} are needed then", way.setting, vram(&way)));
            }
        }
        let leanest = tried.iter().filter(|tried| tried.need.is_some()).min_by_key(|tried| vram_bytes(tried));
        if let Some(leanest) = leanest {
            let (needed, most) = (vram_bytes(leanest), self.work.tokens - self.work.tokens / 16);
            if let Some(tokens) = self.longest_that_fits(leanest.switches, most) {
                advice.push(format!("set pack_len = {tokens} in [packing], instead of {}", self.work.tokens));
            }
            advice.extend(self.other_methods());
            let wanted = needed + needed.div_ceil(MARGIN_PART - 1);
            if wanted > there {
                advice.push(format!("a card with {} would do", units::bytes(wanted)));
            }
        }
        advice
    }

    /// Methods that take less, if they fit.
    fn other_methods(&self) -> Option<String> {
        if self.setup.method.kind != MethodKind::Full {
            return None;
        }
        let mut lora = self.clone();
        lora.setup.method = MethodConfig { kind: MethodKind::Lora, ..MethodConfig::default() };
        let fits = lora.ways().iter().map(|way| lora.try_way(way, self.work)).find(|tried| tried.against.is_none())?;
        Some(format!("set kind = \"lora\" in [method]: {} are needed then", vram(&fits)))
    }

    /// The greatest number of tokens in a pack, at most `most`, whose steps fit; documents are cut to it.
    fn longest_that_fits(&self, switches: Switches, most: usize) -> Option<usize> {
        let fits = |steps: usize| {
            let tokens = steps * TOKENS_STEP;
            let work = Workload { tokens, longest: self.work.longest.min(tokens), ..self.work };
            self.need_for(switches, work).is_ok_and(|need| self.against(&need).is_none())
        };
        let (mut fit, mut too_many) = (0, most / TOKENS_STEP + 1);
        while too_many - fit > 1 {
            let middle = usize::midpoint(fit, too_many);
            if fits(middle) { fit = middle } else { too_many = middle }
        }
        (fit > 0).then_some(fit * TOKENS_STEP)
    }
}

fn vram_bytes(tried: &Tried) -> u64 {
    tried.need.as_ref().map_or(u64::MAX, Need::vram_bytes)
}

fn vram(tried: &Tried) -> String {
    units::bytes(vram_bytes(tried))
}

/// A way in two words.
fn short(switches: Switches) -> &'static str {
    match (switches.activations, switches.offload.buffers) {
        (Activations::Keep, _) => "keeping everything",
        (Activations::Recompute, _) => "computing again",
        (Activations::Offload, 1) => "offloading with one buffer",
        (Activations::Offload, _) => "offloading",
    }
}
