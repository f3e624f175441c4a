//! The fields of the Set up screen as the user types them, and the run configuration they make.

use std::path::{Path, PathBuf};

use crate::base::units;
use crate::session::config::RunConfig;
use crate::session::{
    ActivationsChoice, AttentionPath, EXPERT_PARAMETERS, LayoutChoice, MetadataBaseline, MethodKind, Overlong,
    PlacementChoice, RoutingBaseline, ScheduleKind, Switch, TrainOn, expert_targets,
};

/// Projections that can get an adapter, with their short names on the screen.
pub const PROJECTIONS: [(&str, &str); 7] = [
    ("q_proj", "q"),
    ("k_proj", "k"),
    ("v_proj", "v"),
    ("o_proj", "o"),
    ("gate_proj", "gate"),
    ("up_proj", "up"),
    ("down_proj", "down"),
];

const ALL_LINEAR: &str = "all-linear";

/// What the length of a run is counted in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LengthUnit {
    /// Passes over the training data.
    Epochs,
    /// Optimizer steps.
    Steps,
}

/// What is done about metadata of packs: two fields of `run.toml`, of which the second counts where the first is off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CacheChoice {
    Auto,
    Kept,
    Rebuilt(MetadataBaseline),
}

/// What is done about tokens on their way to experts: two fields of `run.toml`, of which the second counts where the first is off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RoutingChoice {
    Auto,
    Grouped,
    Off(RoutingBaseline),
}

/// A field that holds something wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The field in `run.toml`: `method.r`.
    pub field: String,
    /// What would make it right.
    pub message: String,
}

/// The screen's fields. Numbers stay text until [`Form::config`], so that half-typed ones are not lost.
#[derive(Debug, Clone, PartialEq)]
pub struct Form {
    /// What the screen does not show, and what unreadable fields fall back to while they are shown as wrong.
    base: RunConfig,
    pub name: String,
    pub model: String,
    pub data: String,
    pub layout: LayoutChoice,
    pub prompt: String,
    pub completion: String,
    pub system: String,
    pub train_on: TrainOn,
    /// Percent of the records.
    pub held_out: String,
    pub overlong: Overlong,
    pub pack_len: String,
    pub kind: MethodKind,
    pub rank: String,
    pub alpha: String,
    pub dropout: String,
    /// One flag a projection, in the order of [`PROJECTIONS`].
    pub adapters: [bool; 7],
    /// One flag a weight of experts, in the order of [`EXPERT_PARAMETERS`].
    pub expert_adapters: [bool; 2],
    pub lr: String,
    pub warmup: String,
    pub schedule: ScheduleKind,
    pub optimizer_bits: u32,
    pub packs_per_step: String,
    pub length_unit: LengthUnit,
    pub length: String,
    pub eval_every: String,
    pub save_every: String,
    pub activations: ActivationsChoice,
    pub attention: AttentionPath,
    pub cuda_graphs: bool,
    pub cache: CacheChoice,
    pub routing: RoutingChoice,
    pub offload_buffers: usize,
    pub embedding: PlacementChoice,
    pub optimizer_state: PlacementChoice,
}

impl Default for Form {
    fn default() -> Self {
        Self::from_config(&RunConfig::default())
    }
}

impl Form {
    /// The form filled from a configuration; what it does not show is kept.
    pub fn from_config(config: &RunConfig) -> Self {
        let targets = &config.method.target_modules;
        let all = targets.iter().any(|target| target == ALL_LINEAR);
        let steps = config.train.max_steps > 0;
        Self {
            name: config.name.clone(),
            model: config.model.path.display().to_string(),
            data: config.data.path.display().to_string(),
            layout: config.data.layout,
            prompt: config.data.prompt.clone().unwrap_or_default(),
            completion: config.data.completion.clone().unwrap_or_default(),
            system: config.data.system.clone().unwrap_or_default(),
            train_on: config.data.train_on,
            held_out: number(config.data.eval_fraction * 100.0),
            overlong: config.packing.overlong,
            pack_len: units::count(config.packing.pack_len as u64),
            kind: config.method.kind,
            rank: units::count(config.method.r as u64),
            alpha: number(config.method.lora_alpha),
            dropout: number(config.method.lora_dropout),
            adapters: PROJECTIONS.map(|(name, _)| all || targets.iter().any(|target| target == name)),
            expert_adapters: expert_targets(&config.method.target_parameters).unwrap_or_default(),
            lr: number(config.optimizer.lr),
            warmup: units::count(config.optimizer.warmup_steps),
            schedule: config.optimizer.schedule,
            optimizer_bits: config.optimizer.bits,
            packs_per_step: units::count(config.train.grad_accum_steps as u64),
            length_unit: if steps { LengthUnit::Steps } else { LengthUnit::Epochs },
            length: if steps { units::count(config.train.max_steps) } else { number(config.train.epochs) },
            eval_every: units::count(config.train.eval_every),
            save_every: units::count(config.train.save_every),
            activations: config.train.activations,
            attention: config.train.attention,
            cuda_graphs: config.train.cuda_graphs,
            cache: match config.optimizations.metadata_cache {
                Switch::Auto => CacheChoice::Auto,
                Switch::On => CacheChoice::Kept,
                Switch::Off => CacheChoice::Rebuilt(config.optimizations.metadata_baseline),
            },
            routing: match config.optimizations.grouped_routing {
                Switch::Auto => RoutingChoice::Auto,
                Switch::On => RoutingChoice::Grouped,
                Switch::Off => RoutingChoice::Off(config.optimizations.routing_baseline),
            },
            offload_buffers: config.optimizations.offload_buffers,
            embedding: config.memory.embedding,
            optimizer_state: config.memory.optimizer_state,
            base: config.clone(),
        }
    }

    /// The configuration the fields make, and every field that holds something wrong. With problems, the
    /// configuration is for showing only.
    pub fn config(&self) -> (RunConfig, Vec<Problem>) {
        let mut config = self.base.clone();
        let mut read = Reader(Vec::new());
        config.name = self.name.trim().to_owned();
        config.model.path = path_from(&self.model);
        config.data.path = path_from(&self.data);
        config.data.layout = self.layout;
        let mapping = self.layout == LayoutChoice::Mapping;
        let text = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        config.data.prompt = text(&self.prompt).filter(|_| mapping);
        config.data.completion = text(&self.completion).filter(|_| mapping);
        config.data.system = text(&self.system);
        config.data.train_on = self.train_on;
        let mut percent = config.data.eval_fraction * 100.0;
        read.float("data.eval_fraction", &self.held_out, &mut percent);
        config.data.eval_fraction = percent / 100.0;
        config.packing.overlong = self.overlong;
        read.integer("packing.pack_len", &self.pack_len, &mut config.packing.pack_len);
        config.method.kind = self.kind;
        if self.kind.has_adapters() {
            read.integer("method.r", &self.rank, &mut config.method.r);
            read.float("method.lora_alpha", &self.alpha, &mut config.method.lora_alpha);
            read.float("method.lora_dropout", &self.dropout, &mut config.method.lora_dropout);
            config.method.target_modules = self.targets();
            // A list that means the same stays as it was written.
            if expert_targets(&config.method.target_parameters).ok() != Some(self.expert_adapters) {
                config.method.target_parameters = self.expert_targets();
            }
        }
        read.float("optimizer.lr", &self.lr, &mut config.optimizer.lr);
        read.integer("optimizer.warmup_steps", &self.warmup, &mut config.optimizer.warmup_steps);
        config.optimizer.schedule = self.schedule;
        config.optimizer.bits = self.optimizer_bits;
        read.integer("train.grad_accum_steps", &self.packs_per_step, &mut config.train.grad_accum_steps);
        read.integer("train.eval_every", &self.eval_every, &mut config.train.eval_every);
        read.integer("train.save_every", &self.save_every, &mut config.train.save_every);
        config.train.activations = self.activations;
        config.train.attention = self.attention;
        config.train.cuda_graphs = self.cuda_graphs;
        let optimizations = &mut config.optimizations;
        optimizations.metadata_cache = match self.cache {
            CacheChoice::Auto => Switch::Auto,
            CacheChoice::Kept => Switch::On,
            CacheChoice::Rebuilt(baseline) => {
                optimizations.metadata_baseline = baseline;
                Switch::Off
            }
        };
        optimizations.grouped_routing = match self.routing {
            RoutingChoice::Auto => Switch::Auto,
            RoutingChoice::Grouped => Switch::On,
            RoutingChoice::Off(baseline) => {
                optimizations.routing_baseline = baseline;
                Switch::Off
            }
        };
        optimizations.offload_buffers = self.offload_buffers;
        config.memory.embedding = self.embedding;
        config.memory.optimizer_state = self.optimizer_state;
        match self.length_unit {
            LengthUnit::Epochs => {
                config.train.max_steps = 0;
                read.float("train.epochs", &self.length, &mut config.train.epochs);
            }
            LengthUnit::Steps => {
                read.integer("train.max_steps", &self.length, &mut config.train.max_steps);
                if config.train.max_steps == 0 && read.is_fine("train.max_steps") {
                    read.problem("train.max_steps", "it must be at least 1");
                }
            }
        }
        let mut problems = read.0;
        if let Err(errors) = config.validate() {
            for error in errors.0 {
                // A field that could not be read holds the old value here; that value's problem is not the user's.
                if !problems.iter().any(|problem| problem.field == error.field) {
                    let message = short_message(&error.field).map_or(error.remedy, str::to_owned);
                    problems.push(Problem { field: error.field, message });
                }
            }
        }
        (config, problems)
    }

    /// Turns the length to the unit that was just chosen. `steps` is what the run would take, where it is known.
    pub fn change_length_unit(&mut self, steps: Option<u64>) {
        self.length = match self.length_unit {
            LengthUnit::Epochs => number(if self.base.train.epochs > 0.0 { self.base.train.epochs } else { 1.0 }),
            LengthUnit::Steps => units::count(steps.unwrap_or(self.base.train.max_steps.max(60))),
        };
    }

    /// Reads rows as another configuration does.
    pub fn map_as(&mut self, other: &RunConfig) {
        self.layout = other.data.layout;
        self.prompt = other.data.prompt.clone().unwrap_or_default();
        self.completion = other.data.completion.clone().unwrap_or_default();
    }

    fn expert_targets(&self) -> Vec<String> {
        let chosen = EXPERT_PARAMETERS.iter().zip(self.expert_adapters).filter(|(_, on)| *on);
        chosen.map(|(name, _)| (*name).to_owned()).collect()
    }

    fn targets(&self) -> Vec<String> {
        if self.adapters == [true; 7] {
            return vec![ALL_LINEAR.to_owned()];
        }
        let chosen = PROJECTIONS.iter().zip(self.adapters).filter(|(_, on)| *on);
        chosen.map(|((name, _), _)| (*name).to_owned()).collect()
    }
}

/// What a newcomer reads where the remedy for a file does not fit a screen.
fn short_message(field: &str) -> Option<&'static str> {
    match field {
        "model.path" => Some("choose a model"),
        "data.path" => Some("choose a dataset"),
        "method.target_modules" => Some("choose at least one projection"),
        "data.eval_fraction" => Some("from 0 to below 100"),
        _ => None,
    }
}

/// A path as typed or pasted: quotes and blanks around it are dropped, `~` is the home folder.
pub fn path_from(text: &str) -> PathBuf {
    let text = text.trim();
    let text = [('"', '"'), ('\'', '\'')]
        .iter()
        .find_map(|(open, close)| text.strip_prefix(*open)?.strip_suffix(*close))
        .unwrap_or(text);
    match text.strip_prefix("~/").zip(directories::BaseDirs::new()) {
        Some((rest, dirs)) => dirs.home_dir().join(rest),
        None => PathBuf::from(text),
    }
}

/// What a path dropped on the window stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dropped {
    /// A run configuration.
    RunToml,
    /// A model folder or GGUF file.
    Model,
    /// A dataset.
    Data,
}

/// Tells by the name, and for folders by whether there is a `config.json`.
pub fn kind_of_dropped(path: &Path) -> Dropped {
    let extension = path.extension().map(|extension| extension.to_string_lossy().to_lowercase());
    match extension.as_deref() {
        Some("toml") => Dropped::RunToml,
        Some("gguf") => Dropped::Model,
        _ if path.is_dir() => Dropped::Model,
        _ => Dropped::Data,
    }
}

/// A number as a field shows it: `0.05`, `32`, `2e-4`.
pub fn number(value: f64) -> String {
    // Percentages such as 0.07 · 100 carry binary dust; nobody types 12 digits.
    let rounded: f64 = format!("{value:.10e}").parse().unwrap_or(value);
    if rounded != 0.0 && rounded.abs() < 1e-3 { format!("{rounded:e}") } else { rounded.to_string() }
}

struct Reader(Vec<Problem>);

impl Reader {
    fn problem(&mut self, field: &str, message: &str) {
        self.0.push(Problem { field: field.to_owned(), message: message.to_owned() });
    }

    fn is_fine(&self, field: &str) -> bool {
        !self.0.iter().any(|problem| problem.field == field)
    }

    fn float(&mut self, field: &str, text: &str, value: &mut f64) {
        match text.trim().parse::<f64>() {
            Ok(number) => *value = number,
            Err(_) => self.problem(field, "not a number, such as 0.05 or 2e-4"),
        }
    }

    fn integer<T: TryFrom<u64>>(&mut self, field: &str, text: &str, value: &mut T) {
        let digits: String = text.chars().filter(|c| !matches!(c, ',' | '_' | ' ')).collect();
        match digits.parse::<u64>().ok().and_then(|number| T::try_from(number).ok()) {
            Some(number) => *value = number,
            None => self.problem(field, "not a whole number"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled() -> Form {
        Form { model: "/m".into(), data: "/d.jsonl".into(), ..Form::default() }
    }

    fn fields(form: &Form) -> Vec<String> {
        form.config().1.into_iter().map(|problem| problem.field).collect()
    }

    #[test]
    fn a_configuration_survives_the_form() {
        let mut config = RunConfig { name: "n".into(), seed: 7, ..RunConfig::default() };
        config.model.path = "/modelle/größe".into();
        config.data.path = "/d.jsonl".into();
        config.data.layout = LayoutChoice::Mapping;
        config.data.prompt = Some("{a}".into());
        config.data.completion = Some("{b}".into());
        config.data.eval_fraction = 0.07;
        config.method.target_modules = vec!["q_proj".into(), "down_proj".into()];
        config.optimizer.lr = 2e-4;
        config.optimizer.weight_decay = 0.01;
        config.train.max_steps = 1200;
        config.train.eval_every = 0;
        config.train.save_every = 1500;
        config.train.activations = ActivationsChoice::Offload;
        config.train.attention = AttentionPath::Masked;
        config.train.cuda_graphs = false;
        config.optimizations.metadata_cache = Switch::Off;
        config.optimizations.metadata_baseline = MetadataBaseline::Fused;
        config.optimizations.offload_buffers = 1;
        config.optimizations.offload_headroom_mib = 77;
        config.optimizations.grouped_routing = Switch::Off;
        config.optimizations.routing_baseline = RoutingBaseline::PerExpert;
        config.method.target_parameters = vec!["experts.down_proj".into()];
        let (back, problems) = Form::from_config(&config).config();
        assert_eq!(problems, []);
        assert_eq!(back.data.eval_fraction, 0.07);
        assert_eq!(back, config);
    }

    #[test]
    fn adapters_on_experts_are_named_as_peft_names_them() {
        let form = Form { adapters: [false; 7], expert_adapters: [true, false], ..filled() };
        let (config, problems) = form.config();
        assert_eq!(problems, [], "experts alone are enough");
        assert_eq!(config.method.target_parameters, ["mlp.experts.gate_up_proj"]);
        assert_eq!(config.method.target_modules, Vec::<String>::new());
        let form = Form { dropout: "0.1".into(), ..form };
        assert_eq!(fields(&form), ["method.lora_dropout"]);
        assert_eq!(fields(&Form { expert_adapters: [false; 2], ..form }), ["method.target_modules"]);
    }

    #[test]
    fn numbers_read_as_people_write_them() {
        assert_eq!(number(2e-4), "2e-4");
        assert_eq!(number(0.07 * 100.0), "7");
        assert_eq!(number(32.0), "32");
        let form = Form { pack_len: "2,048".into(), lr: " 1.5e-4 ".into(), ..filled() };
        let (config, problems) = form.config();
        assert_eq!(problems, []);
        assert_eq!((config.packing.pack_len, config.optimizer.lr), (2048, 1.5e-4));
    }

    #[test]
    fn each_wrong_field_is_named_once() {
        assert_eq!(fields(&Form::default()), ["model.path", "data.path"]);
        assert_eq!(fields(&Form { rank: "zwölf".into(), ..filled() }), ["method.r"]);
        assert_eq!(fields(&Form { rank: "0".into(), ..filled() }), ["method.r"]);
        assert_eq!(fields(&Form { lr: String::new(), ..filled() }), ["optimizer.lr"]);
        assert_eq!(fields(&Form { adapters: [false; 7], ..filled() }), ["method.target_modules"]);
        assert_eq!(fields(&Form { held_out: "100".into(), ..filled() }), ["data.eval_fraction"]);
        let steps = Form { length_unit: LengthUnit::Steps, length: "0".into(), ..filled() };
        assert!(fields(&steps).contains(&"train.max_steps".to_owned()));
        let mapping = Form { layout: LayoutChoice::Mapping, ..filled() };
        assert_eq!(fields(&mapping), ["data.prompt", "data.completion"]);
    }

    #[test]
    fn adapter_fields_do_not_matter_in_full_fine_tuning() {
        let form = Form { kind: MethodKind::Full, rank: "?".into(), adapters: [false; 7], ..filled() };
        assert_eq!(fields(&form), Vec::<String>::new());
    }

    #[test]
    fn mapping_texts_wait_while_another_layout_is_chosen() {
        let form = Form { prompt: "{a}".into(), completion: "{b}".into(), ..filled() };
        let (config, problems) = form.config();
        assert_eq!(problems, []);
        assert_eq!((config.data.prompt, config.data.completion), (None, None));
    }

    #[test]
    fn pasted_paths_lose_their_quotes() {
        assert_eq!(path_from(" \"/a b/c.jsonl\" "), Path::new("/a b/c.jsonl"));
        assert_eq!(path_from("'/a'"), Path::new("/a"));
        assert_eq!(kind_of_dropped(Path::new("/x/Run.TOML")), Dropped::RunToml);
        assert_eq!(kind_of_dropped(Path::new("/x/m.gguf")), Dropped::Model);
        assert_eq!(kind_of_dropped(Path::new("/x/d.txt")), Dropped::Data);
    }
}
