//! The search of a memory plan: the first way that fits, the reasons, and what would make a run fit that does not.

use super::ways::kept_in_words;
use super::{MemoryPlan, Need, Planner, Tried, Workload};
use crate::base::units;
use crate::train::config::{ActivationsChoice, MemoryConfig, MethodConfig, MethodKind};
use crate::train::switches::Switches;

/// Part of the device's memory that is left free: the driver takes some more while a run goes on, for kernels of the matrix library that are new.
const MARGIN_PART: u64 = 64;
/// Granularity in which shorter packs are tried.
const TOKENS_STEP: usize = 64;

impl Planner {
    /// The plan: the first way that fits, with the reasons.
    pub fn plan(&self) -> MemoryPlan {
        let tried: Vec<Tried> = self.ways().into_iter().map(|way| self.try_way(way)).collect();
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

    fn try_way(&self, switches: Switches) -> Tried {
        let (need, against) = match self.need(switches) {
            Ok(need) => {
                let against = self.against(&need);
                (Some(need), against)
            }
            Err(error) => (None, Some(format!("{error:#}"))),
        };
        Tried { what: self.in_words(&switches), setting: self.setting(&switches), switches, need, against }
    }

    /// The first way that fits, if one does.
    fn first_that_fits(&self) -> Option<Tried> {
        self.ways().into_iter().map(|way| self.try_way(way)).find(|tried| tried.against.is_none())
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
        let there = units::bytes(self.machine.vram_bytes);
        let passed = &tried[..found.unwrap_or(tried.len())];
        // Of ways that keep the same, the one that takes least speaks for all.
        let kept = |tried: &Tried| kept_in_words(&tried.switches);
        let is_found = |words: &str| found.is_some_and(|found| kept(&tried[found]) == words);
        let mut reasons = Vec::new();
        let mut told = Vec::new();
        for words in passed.iter().map(kept) {
            if told.contains(&words) {
                continue;
            }
            told.push(words);
            let same = || passed.iter().filter(|tried| kept(tried) == words);
            let least = same().filter_map(|tried| tried.need.as_ref()).map(Need::vram_bytes).min();
            let against = same().find_map(|tried| tried.against.as_deref()).unwrap_or("it cannot be done");
            reasons.push(match least.map(units::bytes) {
                Some(least) if is_found(words) => format!("faster ways of {words} would take {least} at least"),
                Some(least) => format!("{words} would take {least}"),
                None => format!("not {words}: {against}"),
            });
        }
        reasons.push(match found.and_then(|found| tried[found].need.as_ref()) {
            Some(need) => format!("this takes {} of {there}", units::bytes(need.vram_bytes())),
            None => format!("{there} may be used"),
        });
        reasons.join("; ")
    }

    /// Changes that make the run fit, each tried.
    fn advice(&self, tried: &[Tried]) -> Vec<String> {
        let mut advice = Vec::new();
        let there = self.machine.vram_bytes;
        // Ways that the configuration closed.
        let mut open = self.clone();
        (open.activations, open.memory) = (ActivationsChoice::Auto, Some(MemoryConfig::default()));
        open.setup.switches.offload.buffers = 0;
        if open.ways().len() > tried.len()
            && let Some(way) = open.first_that_fits()
        {
            advice.push(format!("set {}: {} are needed then", way.setting, vram(&way)));
        }
        let leanest = tried.iter().filter(|tried| tried.need.is_some()).min_by_key(|tried| vram_bytes(tried));
        if let Some(leanest) = leanest {
            let (needed, most) = (vram_bytes(leanest), self.work.tokens.saturating_sub(1));
            if let Some(tokens) = self.longest_that_fits(leanest.switches, most) {
                advice.push(format!("set pack_len = {tokens} in [packing], instead of {}", self.work.tokens));
            }
            advice.extend(self.other_method());
            let wanted = needed + needed.div_ceil(MARGIN_PART - 1);
            if wanted > there {
                advice.push(format!("a card with {} would do", units::bytes(wanted)));
            }
        }
        advice
    }

    /// The next method that takes less and fits: adapters, then adapters on weights in 4 bits.
    fn other_method(&self) -> Option<String> {
        let leaner: &[(MethodKind, &str)] = match self.setup.method.kind {
            MethodKind::Full => &[(MethodKind::Lora, "lora"), (MethodKind::Qlora, "qlora")],
            MethodKind::Lora => &[(MethodKind::Qlora, "qlora")],
            MethodKind::Qlora => &[],
        };
        leaner.iter().find_map(|&(kind, word)| {
            let mut other = self.clone();
            other.setup.method = MethodConfig { kind, init_adapter: None, ..self.setup.method.clone() };
            let fits = other.first_that_fits()?;
            Some(format!("set kind = \"{word}\" in [method]: {} are needed then", vram(&fits)))
        })
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
