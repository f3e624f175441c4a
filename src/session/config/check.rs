//! Ranges of the fields of `run.toml`, and the errors that name field, place and remedy.

use std::fmt;
use std::path::PathBuf;

use super::{FIELDS, RunConfig, fields};
use crate::data::options::LayoutChoice;
use crate::formats::peft::{PROJECTIONS, expert_targets};
use crate::train::config::{ActivationsChoice, DequantizedChoice, MethodKind, Switch};

/// Where a field's value came from.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Origin {
    /// A default, or a value set by the program.
    #[default]
    Unknown,
    /// A line of a file.
    File {
        /// The file.
        path: PathBuf,
        /// 1-based line.
        line: usize,
    },
    /// A file that does not set the field.
    Unset {
        /// The file.
        path: PathBuf,
    },
    /// A command line flag, as typed: `--r`.
    Flag(String),
}

/// One problem of a run configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError {
    /// The field it is about: `method.r`.
    pub field: String,
    /// Where its value came from.
    pub origin: Origin,
    /// What is wrong.
    pub problem: String,
    /// What would make it right.
    pub remedy: String,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.origin {
            Origin::Unknown => write!(f, "{}: {}", self.problem, self.remedy),
            Origin::Unset { path } => write!(f, "{}: {}: {}", path.display(), self.problem, self.remedy),
            Origin::File { path, line } => {
                write!(f, "{}: {} (line {line}): {}", path.display(), self.problem, self.remedy)
            }
            Origin::Flag(flag) => write!(f, "{flag}: {}: {}", self.problem, self.remedy),
        }
    }
}

/// All problems of a run configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigErrors(pub Vec<ConfigError>);

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, error) in self.0.iter().enumerate() {
            let newline = if i > 0 { "\n" } else { "" };
            write!(f, "{newline}{error}")?;
        }
        Ok(())
    }
}

impl std::error::Error for ConfigErrors {}

/// A field as errors name it: `` `r` in [method]``.
pub(super) fn in_words(dotted: &str) -> String {
    match dotted.split_once('.') {
        Some((section, name)) => format!("`{name}` in [{section}]"),
        None => format!("`{dotted}`"),
    }
}

/// The word for all projections.
const ALL_LINEAR: &str = "all-linear";
/// Longest pack: position ids and boundaries are 32-bit, and memory ends long before.
const MAX_PACK_LEN: usize = 1 << 20;
/// Fewest tokens of a tile of the MLP: with fewer a product does little with the weights that it reads.
const LEAST_MLP_ROWS: usize = 64;

/// Collects problems.
struct Checker(Vec<ConfigError>);

impl Checker {
    fn add(&mut self, field: &str, problem: impl Into<String>, remedy: impl Into<String>) {
        debug_assert!(FIELDS.iter().any(|f| f.dotted() == field), "no such field: {field}");
        self.0.push(ConfigError {
            field: field.into(),
            origin: Origin::Unknown,
            problem: problem.into(),
            remedy: remedy.into(),
        });
    }

    /// Reports the value of a field when it is not `ok`.
    fn value(&mut self, field: &str, value: impl fmt::Display, ok: bool, remedy: &str) {
        if !ok {
            self.add(field, format!("{} is {value}", in_words(field)), remedy);
        }
    }
}

/// Every problem of a configuration, without origins.
pub(super) fn problems(config: &RunConfig) -> Vec<ConfigError> {
    let mut check = Checker(Vec::new());
    check.value("seed", config.seed, i64::try_from(config.seed).is_ok(), "it must fit 63 bits");
    sources(config, &mut check);
    let len = config.packing.pack_len;
    let pack_len_ok = (8..=MAX_PACK_LEN).contains(&len);
    check.value("packing.pack_len", len, pack_len_ok, "it must be from 8 to 1048576; 1024 is usual");
    method(config, &mut check);
    optimizer(config, &mut check);
    train(config, &mut check);
    memory(config, &mut check);
    check.0
}

fn sources(config: &RunConfig, check: &mut Checker) {
    if config.model.path.as_os_str().is_empty() {
        let remedy =
            "set `path` in [model] to a Hugging Face model folder, a GGUF file or \"starter\", or give --model";
        check.add("model.path", "no model given", remedy);
    }
    let data = &config.data;
    if data.path.as_os_str().is_empty() {
        let remedy = "set `path` in [data] to a .jsonl or .txt file or \"starter\", or give --data";
        check.add("data.path", "no dataset given", remedy);
    }
    let mapping = data.layout == LayoutChoice::Mapping;
    for (field, text) in [("data.prompt", &data.prompt), ("data.completion", &data.completion)] {
        if mapping && text.as_deref().is_none_or(str::is_empty) {
            let remedy = "give it a text with {column} where a column's value goes";
            check.add(field, format!("layout \"mapping\" needs {}", in_words(field)), remedy);
        } else if !mapping && text.is_some() {
            let remedy = "set layout = \"mapping\", or remove it";
            check.add(field, format!("{} is used by layout \"mapping\" only", in_words(field)), remedy);
        }
    }
    let fraction = data.eval_fraction;
    let fraction_ok = (0.0..1.0).contains(&fraction);
    check.value("data.eval_fraction", fraction, fraction_ok, "it must be from 0 to below 1; 0.05 holds out one in 20");
}

fn method(config: &RunConfig, check: &mut Checker) {
    let method = &config.method;
    check.value("method.r", method.r, (1..=65_536).contains(&method.r), "it must be at least 1; 8, 16 or 32 are usual");
    let alpha = method.lora_alpha;
    check.value("method.lora_alpha", alpha, alpha.is_finite() && alpha > 0.0, "it must be above 0; 2·r is usual");
    let dropout = method.lora_dropout;
    check.value("method.lora_dropout", dropout, (0.0..1.0).contains(&dropout), "it must be from 0 to below 1");
    if method.kind == MethodKind::Full {
        if method.init_adapter.is_some() {
            let problem = "`init_adapter` in [method] starts from an adapter, and kind \"full\" trains none";
            check.add("method.init_adapter", problem, "set kind = \"lora\", or remove it");
        }
        return;
    }
    let targets = &method.target_modules;
    if let Err(why) = expert_targets(&method.target_parameters) {
        let problem = format!("in [method]: {why:#}");
        check.add("method.target_parameters", problem, "experts have the weights that are named there");
    } else if !method.target_parameters.is_empty() && dropout > 0.0 {
        let problem = "`lora_dropout` in [method] is above 0, and `target_parameters` names weights of experts";
        check.add("method.lora_dropout", problem, "adapters on experts take no dropout, as in PEFT: set it to 0");
    }
    if targets.is_empty() && method.target_parameters.is_empty() {
        let remedy = "use [\"all-linear\"], or name projections such as \"q_proj\"";
        check.add("method.target_modules", "`target_modules` in [method] is empty", remedy);
    }
    if targets.len() > 1 && targets.iter().any(|t| t == ALL_LINEAR) {
        let problem = "`target_modules` in [method] has \"all-linear\" beside other names";
        check.add("method.target_modules", problem, "\"all-linear\" stands alone, as it means every projection");
    }
    for target in targets.iter().filter(|t| *t != ALL_LINEAR && !PROJECTIONS.contains(&t.as_str())) {
        let remedy = match fields::closest(target, &PROJECTIONS) {
            Some(close) => format!("did you mean \"{close}\"?"),
            None => format!("use \"{ALL_LINEAR}\", or names among {}", PROJECTIONS.join(", ")),
        };
        let problem = format!("\"{target}\" in `target_modules` in [method] is not a projection");
        check.add("method.target_modules", problem, remedy);
    }
}

fn optimizer(config: &RunConfig, check: &mut Checker) {
    let o = &config.optimizer;
    check.value("optimizer.lr", o.lr, o.lr.is_finite() && o.lr > 0.0, "it must be above 0; 2e-4 is usual for LoRA");
    check.value(
        "optimizer.beta1",
        o.beta1,
        (0.0..1.0).contains(&o.beta1),
        "it must be from 0 to below 1; 0.9 is usual",
    );
    check.value(
        "optimizer.beta2",
        o.beta2,
        (0.0..1.0).contains(&o.beta2),
        "it must be from 0 to below 1; 0.999 is usual",
    );
    check.value("optimizer.eps", o.eps, o.eps.is_finite() && o.eps > 0.0, "it must be above 0; 1e-8 is usual");
    let decay_ok = o.weight_decay.is_finite() && o.weight_decay >= 0.0;
    check.value("optimizer.weight_decay", o.weight_decay, decay_ok, "it must be 0 or more");
    let bits_ok = matches!(o.bits, 8 | 32);
    check.value(
        "optimizer.bits",
        o.bits,
        bits_ok,
        "it must be 32 or 8; 8 takes a quarter of the memory for nearly the same steps",
    );
    let norm_ok = o.max_grad_norm.is_finite() && o.max_grad_norm >= 0.0;
    check.value("optimizer.max_grad_norm", o.max_grad_norm, norm_ok, "it must be 0 (no clipping) or more; 1 is usual");
    let max_steps = config.train.max_steps;
    if max_steps > 0 && o.warmup_steps > max_steps {
        let problem = format!(
            "`warmup_steps` in [optimizer] is {}, and the run has only {max_steps} steps (`max_steps` in [train])",
            o.warmup_steps
        );
        check.add("optimizer.warmup_steps", problem, "make it smaller, so that the learning rate reaches `lr`");
    }
}

fn train(config: &RunConfig, check: &mut Checker) {
    let train = &config.train;
    if train.max_steps == 0 {
        let ok = train.epochs.is_finite() && train.epochs > 0.0;
        check.value("train.epochs", train.epochs, ok, "it must be above 0, or set max_steps");
    }
    check.value("train.grad_accum_steps", train.grad_accum_steps, train.grad_accum_steps >= 1, "it must be at least 1");
    check.value("train.threads", train.threads, train.threads <= 4096, "it must be at most 4096; 0 means one a core");
    let limit = train.vram_limit_gib;
    check.value("train.vram_limit_gib", limit, limit.is_finite() && limit >= 0.0, "it must be 0 (no limit) or more");
    let o = &config.optimizations;
    let remedy = "it must be 1, 2, or 0 (two where memory allows)";
    check.value("optimizations.offload_buffers", o.offload_buffers, o.offload_buffers <= 2, remedy);
    let remedy = "it must be at most 1048576 (one TiB); 512 is usual";
    check.value(
        "optimizations.offload_headroom_mib",
        o.offload_headroom_mib,
        o.offload_headroom_mib <= 1 << 20,
        remedy,
    );
    let pinned = o.offload_pinned_gib;
    let remedy = "it must be above 0, or 0 (half of what is available)";
    check.value("optimizations.offload_pinned_gib", pinned, pinned.is_finite() && pinned >= 0.0, remedy);
}

fn memory(config: &RunConfig, check: &mut Checker) {
    let rows = config.memory.mlp_rows;
    let remedy = format!("it must be from {LEAST_MLP_ROWS} to {MAX_PACK_LEN}, or 0 (Tandem chooses)");
    check.value("memory.mlp_rows", rows, rows == 0 || (LEAST_MLP_ROWS..=MAX_PACK_LEN).contains(&rows), &remedy);
    let (tokens, pack_len) = (config.memory.pass_tokens, config.packing.pack_len);
    let remedy = format!("it must be from pack_len ({pack_len}) to {MAX_PACK_LEN}, or 0 (Tandem chooses)");
    check.value("memory.pass_tokens", tokens, tokens == 0 || (pack_len..=MAX_PACK_LEN).contains(&tokens), &remedy);
    let remedy =
        "it joins the packs of a step, and grad_accum_steps = 1 in [train] makes one: it must be 0, or that more";
    check.value("memory.pass_tokens", tokens, tokens == 0 || config.train.grad_accum_steps > 1, remedy);
    let resident = config.memory.dequantized == DequantizedChoice::Resident;
    if resident && config.method.kind == MethodKind::Full {
        let problem =
            "`dequantized` in [memory] is about weights in 4 bits, and there are none with this kind of [method]";
        check.add("memory.dequantized", problem, "remove it: what trains is not kept in 4 bits");
    }
    for (name, switch) in [("middle", config.memory.middle), ("qkv", config.memory.qkv)] {
        if switch == Switch::On && config.train.activations == ActivationsChoice::Keep {
            let problem = format!(
                "`{name}` in [memory] is about blocks that are computed again, and activations = \"keep\" keeps everything"
            );
            check.add(&format!("memory.{name}"), &problem, "remove one of them");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::config::RunConfig;

    fn valid() -> RunConfig {
        let mut config = RunConfig::default();
        config.model.path = "m".into();
        config.data.path = "d".into();
        config
    }

    /// A change that makes one field wrong.
    type Change = fn(&mut RunConfig);

    #[test]
    fn each_range_is_checked_under_its_own_field() {
        valid().validate().unwrap();
        let changes: &[(&str, Change)] = &[
            ("seed", |c| c.seed = u64::MAX),
            ("model.path", |c| c.model.path = "".into()),
            ("data.path", |c| c.data.path = "".into()),
            ("data.prompt", |c| c.data.prompt = Some("x".into())),
            ("data.eval_fraction", |c| c.data.eval_fraction = 1.0),
            ("data.eval_fraction", |c| c.data.eval_fraction = f64::NAN),
            ("packing.pack_len", |c| c.packing.pack_len = 7),
            ("method.r", |c| c.method.r = 0),
            ("method.lora_alpha", |c| c.method.lora_alpha = 0.0),
            ("method.lora_dropout", |c| c.method.lora_dropout = 1.0),
            ("method.target_modules", |c| c.method.target_modules.clear()),
            ("method.target_modules", |c| c.method.target_modules = vec!["q_prj".into()]),
            ("method.target_modules", |c| c.method.target_modules.push("q_proj".into())),
            ("method.init_adapter", |c| {
                c.method.kind = MethodKind::Full;
                c.method.init_adapter = Some("a".into());
            }),
            ("optimizer.lr", |c| c.optimizer.lr = 0.0),
            ("optimizer.lr", |c| c.optimizer.lr = f64::INFINITY),
            ("optimizer.beta1", |c| c.optimizer.beta1 = 1.0),
            ("optimizer.beta2", |c| c.optimizer.beta2 = -0.1),
            ("optimizer.eps", |c| c.optimizer.eps = 0.0),
            ("optimizer.weight_decay", |c| c.optimizer.weight_decay = -1.0),
            ("optimizer.bits", |c| c.optimizer.bits = 16),
            ("optimizer.max_grad_norm", |c| c.optimizer.max_grad_norm = f64::NAN),
            ("optimizer.warmup_steps", |c| {
                c.train.max_steps = 5;
                c.optimizer.warmup_steps = 6;
            }),
            ("train.epochs", |c| c.train.epochs = 0.0),
            ("train.grad_accum_steps", |c| c.train.grad_accum_steps = 0),
            ("train.threads", |c| c.train.threads = 5000),
            ("train.vram_limit_gib", |c| c.train.vram_limit_gib = -1.0),
            ("optimizations.offload_buffers", |c| c.optimizations.offload_buffers = 3),
            ("optimizations.offload_headroom_mib", |c| c.optimizations.offload_headroom_mib = 1 << 40),
            ("optimizations.offload_pinned_gib", |c| c.optimizations.offload_pinned_gib = f64::NAN),
            ("memory.mlp_rows", |c| c.memory.mlp_rows = 63),
            ("memory.pass_tokens", |c| c.memory.pass_tokens = 1 << 16),
            ("memory.pass_tokens", |c| {
                c.train.grad_accum_steps = 4;
                c.memory.pass_tokens = c.packing.pack_len - 1;
            }),
            ("memory.dequantized", |c| {
                c.method.kind = MethodKind::Full;
                c.memory.dequantized = DequantizedChoice::Resident;
            }),
            ("memory.middle", |c| {
                c.memory.middle = Switch::On;
                c.train.activations = ActivationsChoice::Keep;
            }),
            ("memory.qkv", |c| {
                c.memory.qkv = Switch::On;
                c.train.activations = ActivationsChoice::Keep;
            }),
        ];
        for (field, change) in changes {
            let mut config = valid();
            change(&mut config);
            let fields: Vec<String> = config.validate().unwrap_err().0.into_iter().map(|e| e.field).collect();
            assert_eq!(fields, [*field]);
        }
    }

    #[test]
    fn a_mapping_needs_both_of_its_texts() {
        let mut config = valid();
        config.data.layout = LayoutChoice::Mapping;
        config.data.prompt = Some("{a}".into());
        let errors = config.validate().unwrap_err();
        assert!(errors.to_string().starts_with("layout \"mapping\" needs `completion` in [data]: give it"), "{errors}");
        config.data.completion = Some("{b}".into());
        config.validate().unwrap();
    }

    #[test]
    fn epochs_may_be_anything_when_the_steps_are_given() {
        let mut config = valid();
        config.train.epochs = 0.0;
        config.train.max_steps = 3;
        config.validate().unwrap();
    }
}
