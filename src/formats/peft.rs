//! `adapter_config.json` of PEFT: what Tandem reads of it, what it refuses, and how it writes one.

use anyhow::{Context as _, bail, ensure};
use serde_json::{Map, Value};

use crate::base::error::Result;

/// The linear layers of a block, in the order of computation: what `all-linear` means for the supported families.
pub const PROJECTIONS: [&str; 7] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];

/// The weights of routed experts that can have adapters, in the order of computation: PEFT's `target_parameters`.
pub const EXPERT_PARAMETERS: [&str; 2] = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"];

/// Name of the configuration file in an adapter's folder.
pub const CONFIG_FILE: &str = "adapter_config.json";
/// Name of the weights file in an adapter's folder.
pub const WEIGHTS_FILE: &str = "adapter_model.safetensors";

/// Keys that change nothing about how a finished LoRA adapter acts, whatever they hold.
const NEUTRAL: [&str; 11] = [
    "auto_mapping",
    "corda_config",
    "eva_config",
    "inference_mode",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "peft_version",
    "revision",
    "runtime_config",
    "task_type",
];

/// Initializations (by the start of their name) that change the base's weights: the adapter fits only the changed base.
const CHANGES_BASE: [&str; 5] = ["pissa", "olora", "corda", "loftq", "lora_ga"];

/// A LoRA adapter's shape. Field names as in PEFT.
#[derive(Debug, Clone, PartialEq)]
pub struct AdapterConfig {
    /// Model the adapter was trained on, where the file says.
    pub base_model_name_or_path: Option<String>,
    /// Rank.
    pub r: usize,
    /// Scale numerator.
    pub lora_alpha: f64,
    /// Probability with which an input of the adapter was dropped in training.
    pub lora_dropout: f64,
    /// Scale by `lora_alpha / √r` instead of `lora_alpha / r`.
    pub use_rslora: bool,
    /// Members of [`PROJECTIONS`] that have an adapter, or the single word `all-linear`.
    pub target_modules: Vec<String>,
    /// Members of [`EXPERT_PARAMETERS`] that have adapters.
    pub target_parameters: Vec<String>,
    /// Blocks that have an adapter; empty means all.
    pub layers_to_transform: Vec<usize>,
}

impl AdapterConfig {
    /// What the adapter's output is multiplied by: `lora_alpha / r`, or `lora_alpha / √r` with rsLoRA.
    pub fn scale(&self) -> f64 {
        let r = self.r as f64;
        self.lora_alpha / if self.use_rslora { r.sqrt() } else { r }
    }

    /// The projections that have an adapter, in the order of [`PROJECTIONS`].
    ///
    /// # Errors
    /// When `target_modules` is empty or names something else.
    pub fn projections(&self) -> Result<Vec<&'static str>> {
        if self.target_modules.is_empty() && !self.target_parameters.is_empty() {
            return Ok(Vec::new());
        }
        expand_targets(&self.target_modules)
    }

    /// Which of [`EXPERT_PARAMETERS`] have adapters.
    ///
    /// # Errors
    /// When `target_parameters` names something else.
    pub fn experts(&self) -> Result<[bool; 2]> {
        expert_targets(&self.target_parameters)
    }

    /// Whether block `layer` has adapters.
    pub fn has_layer(&self, layer: usize) -> bool {
        self.layers_to_transform.is_empty() || self.layers_to_transform.contains(&layer)
    }

    /// Read the text of an `adapter_config.json`.
    ///
    /// # Errors
    /// When it is not JSON, a value is wrong, or it asks for something Tandem does not do (another method than LoRA,
    /// DoRA, trained biases, targets by regular expression …): the message names the key.
    pub fn from_json(text: &str) -> Result<Self> {
        let value: Value = serde_json::from_str(text).context("it is not valid JSON")?;
        let object = value.as_object().context("it is JSON, but not an object")?;
        let get = |key: &str| object.get(key).filter(|v| !v.is_null());
        let kind = get("peft_type").and_then(Value::as_str).context("peft_type is missing")?;
        ensure!(kind == "LORA", "peft_type {kind:?} is not supported (LORA is)");
        if let Some(task) = get("task_type").filter(|t| t.as_str() != Some("CAUSAL_LM")) {
            bail!("task_type {task} is not supported (CAUSAL_LM is)");
        }
        for (key, value) in object {
            refuse_unknown(key, value)?;
        }
        let number = |key: &str| match get(key) {
            None => Ok(None),
            Some(v) => v.as_f64().map(Some).with_context(|| format!("{key} is {v}; expected a number")),
        };
        let r = get("r").context("r is missing")?;
        let config = Self {
            base_model_name_or_path: get("base_model_name_or_path").and_then(Value::as_str).map(str::to_owned),
            r: r.as_u64()
                .and_then(|r| usize::try_from(r).ok())
                .with_context(|| format!("r is {r}; expected a whole number"))?,
            lora_alpha: number("lora_alpha")?.context("lora_alpha is missing")?,
            lora_dropout: number("lora_dropout")?.unwrap_or(0.0),
            use_rslora: get("use_rslora").and_then(Value::as_bool).unwrap_or(false),
            target_modules: match get("target_parameters") {
                // PEFT writes an empty list where only parameters have adapters.
                Some(_) if get("target_modules").and_then(Value::as_array).is_none_or(Vec::is_empty) => Vec::new(),
                _ => targets(get("target_modules"))?,
            },
            target_parameters: parameters(get("target_parameters"))?,
            layers_to_transform: layers(get("layers_to_transform"))?,
        };
        config.check()?;
        Ok(config)
    }

    /// The text of an `adapter_config.json` that PEFT loads; `all-linear` is written out as a list.
    ///
    /// # Errors
    /// When a value is out of range or a target is not one of [`PROJECTIONS`].
    pub fn to_json(&self) -> Result<String> {
        self.check()?;
        let whole = self.lora_alpha.fract() == 0.0 && self.lora_alpha.abs() < 1e15;
        let lora_alpha = if whole { Value::from(self.lora_alpha as i64) } else { Value::from(self.lora_alpha) };
        let layers = if self.layers_to_transform.is_empty() {
            Value::Null
        } else {
            Value::from(self.layers_to_transform.clone())
        };
        let mut o = Map::new();
        let mut set = |key: &str, value: Value| o.insert(key.to_owned(), value);
        set("alpha_pattern", Value::Object(Map::new()));
        set("auto_mapping", Value::Null);
        set("base_model_name_or_path", self.base_model_name_or_path.clone().map_or(Value::Null, Value::from));
        set("bias", "none".into());
        set("fan_in_fan_out", false.into());
        set("inference_mode", true.into());
        set("init_lora_weights", true.into());
        set("layers_pattern", Value::Null);
        set("layers_to_transform", layers);
        set("lora_alpha", lora_alpha);
        set("lora_dropout", self.lora_dropout.into());
        set("modules_to_save", Value::Null);
        set("peft_type", "LORA".into());
        set("r", self.r.into());
        set("rank_pattern", Value::Object(Map::new()));
        set("revision", Value::Null);
        set("target_modules", self.projections()?.into());
        if !self.target_parameters.is_empty() {
            set("target_parameters", self.target_parameters.clone().into());
        }
        set("task_type", "CAUSAL_LM".into());
        set("use_dora", false.into());
        set("use_rslora", self.use_rslora.into());
        Ok(serde_json::to_string_pretty(&o)? + "\n")
    }

    fn check(&self) -> Result<()> {
        ensure!((1..=65_536).contains(&self.r), "r is {}; expected 1 to 65536", self.r);
        ensure!(self.lora_alpha.is_finite(), "lora_alpha is {}; expected a number", self.lora_alpha);
        ensure!((0.0..1.0).contains(&self.lora_dropout), "lora_dropout is {}; expected 0 ≤ p < 1", self.lora_dropout);
        let on_experts = self.experts()?.contains(&true);
        ensure!(
            !on_experts || self.lora_dropout == 0.0,
            "lora_dropout is {}; adapters on experts (target_parameters) take none",
            self.lora_dropout
        );
        self.projections().map(|_| ())
    }
}

/// Which of [`EXPERT_PARAMETERS`] a list means. PEFT matches ends of parameter names.
///
/// # Errors
/// When the list names something else.
pub fn expert_targets(targets: &[String]) -> Result<[bool; 2]> {
    let mut wanted = [false; 2];
    for target in targets {
        let is_end = |name: &&str| {
            name.ends_with(target.as_str()) && (target.starts_with("mlp.") || target.starts_with("experts."))
        };
        match EXPERT_PARAMETERS.iter().position(is_end) {
            Some(i) => wanted[i] = true,
            None => bail!("target_parameters: {target:?} is not supported; use {}", EXPERT_PARAMETERS.join(", ")),
        }
    }
    Ok(wanted)
}

fn parameters(value: Option<&Value>) -> Result<Vec<String>> {
    let Some(value) = value else { return Ok(Vec::new()) };
    let names: Option<Vec<String>> =
        value.as_array().and_then(|list| list.iter().map(|v| v.as_str().map(str::to_owned)).collect());
    let names = names.with_context(|| format!("target_parameters is {value}; expected a list of names"))?;
    let wanted = expert_targets(&names)?;
    let chosen =
        EXPERT_PARAMETERS.into_iter().zip(wanted).filter(|(_, wanted)| *wanted).map(|(name, _)| name.to_owned());
    Ok(chosen.collect())
}

/// The projections that a list of targets means, in the order of [`PROJECTIONS`]. PEFT matches ends of module names, so
/// `self_attn.q_proj` means `q_proj`.
///
/// # Errors
/// When the list is empty or names something that is not a linear layer of a block.
pub fn expand_targets(targets: &[String]) -> Result<Vec<&'static str>> {
    ensure!(!targets.is_empty(), "target_modules is empty; name at least one of {}", PROJECTIONS.join(", "));
    if targets == ["all-linear"] {
        return Ok(PROJECTIONS.to_vec());
    }
    let mut wanted = [false; PROJECTIONS.len()];
    for target in targets {
        let bare = target.strip_prefix("self_attn.").or(target.strip_prefix("mlp.")).unwrap_or(target);
        match PROJECTIONS.iter().position(|p| *p == bare) {
            Some(i) => wanted[i] = true,
            None => bail!("target_modules: {target:?} is not supported; use all-linear or {}", PROJECTIONS.join(", ")),
        }
    }
    Ok(PROJECTIONS.into_iter().zip(wanted).filter_map(|(p, w)| w.then_some(p)).collect())
}

fn targets(value: Option<&Value>) -> Result<Vec<String>> {
    match value {
        None => bail!("target_modules is missing"),
        Some(Value::String(s)) if s == "all-linear" || PROJECTIONS.contains(&s.as_str()) => Ok(vec![s.clone()]),
        Some(Value::String(s)) => {
            bail!("target_modules is the regular expression {s:?}, which is not supported; list the modules by name")
        }
        Some(list) => {
            let names: Option<Vec<String>> =
                list.as_array().and_then(|a| a.iter().map(|v| v.as_str().map(str::to_owned)).collect());
            let names = names.with_context(|| format!("target_modules is {list}; expected a list of names"))?;
            Ok(expand_targets(&names)?.into_iter().map(str::to_owned).collect())
        }
    }
}

fn layers(value: Option<&Value>) -> Result<Vec<usize>> {
    let Some(value) = value else { return Ok(Vec::new()) };
    let items = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
    items
        .iter()
        .map(|v| v.as_u64().and_then(|n| usize::try_from(n).ok()))
        .collect::<Option<Vec<usize>>>()
        .with_context(|| format!("layers_to_transform is {value}; expected block numbers"))
}

/// Refuse a key that asks for something Tandem does not do. Keys this version has never heard of are refused when they
/// hold anything but an "off" value or a plain number (numbers only tune features that another key turns on).
fn refuse_unknown(key: &str, value: &Value) -> Result<()> {
    let off = match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(a) => a.is_empty(),
        Value::Object(o) => o.is_empty(),
        _ => false,
    };
    if off || NEUTRAL.contains(&key) {
        return Ok(());
    }
    match key {
        "peft_type"
        | "base_model_name_or_path"
        | "r"
        | "lora_alpha"
        | "lora_dropout"
        | "use_rslora"
        | "target_modules"
        | "target_parameters"
        | "layers_to_transform" => Ok(()),
        "bias" if value == "none" => Ok(()),
        "bias" => bail!("bias {value} is not supported: adapters with trained biases cannot be loaded (\"none\" is)"),
        "layers_pattern" if value == "layers" || *value == Value::from(vec!["layers"]) => Ok(()),
        "init_lora_weights" => match value.as_str().filter(|s| CHANGES_BASE.iter().any(|c| s.starts_with(c))) {
            Some(s) => bail!(
                "init_lora_weights {s:?} is not supported: it changed the base model's weights; convert the adapter with PEFT's path_initial_model_for_weight_conversion"
            ),
            None => Ok(()),
        },
        _ if value.is_number() => Ok(()),
        _ => bail!("{key} is {value}, which Tandem does not do; only plain LoRA adapters can be loaded"),
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use serde_json::json;

    use super::*;

    fn golden(family: &str) -> String {
        let root = std::env::var_os("TANDEM_GOLDEN")
            .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden"), PathBuf::from);
        std::fs::read_to_string(root.join(family).join("adapter_after_6_steps").join(CONFIG_FILE)).unwrap()
    }

    fn edited(key: &str, value: Value) -> Result<AdapterConfig> {
        let mut v: Value = serde_json::from_str(&golden("llama")).unwrap();
        v[key] = value;
        AdapterConfig::from_json(&v.to_string())
    }

    #[test]
    fn golden_configs_are_read_and_written_back() {
        for family in ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gpt_oss"] {
            let c = AdapterConfig::from_json(&golden(family)).unwrap();
            assert_eq!((c.r, c.lora_alpha, c.lora_dropout, c.use_rslora), (4, 8.0, 0.0, false));
            // PEFT's own choice in a mixture are the attention's projections.
            let chosen = if ["qwen3_moe", "mixtral", "gpt_oss"].contains(&family) { 4 } else { 7 };
            assert_eq!(c.target_modules, PROJECTIONS[..chosen]);
            assert_eq!(c.scale(), 2.0);
            assert_eq!(AdapterConfig::from_json(&c.to_json().unwrap()).unwrap(), c);
            // What is written says the same as PEFT's file wherever both have a key, order of targets aside.
            let ours: Value = serde_json::from_str(&c.to_json().unwrap()).unwrap();
            let theirs: Value = serde_json::from_str(&golden(family)).unwrap();
            for (key, value) in ours.as_object().unwrap() {
                if key != "target_modules" {
                    assert_eq!(value, &theirs[key], "{key}");
                }
            }
        }
    }

    #[test]
    fn options_survive() {
        let c = AdapterConfig {
            base_model_name_or_path: Some("mo del/ü".into()),
            r: 8,
            lora_alpha: 12.5,
            lora_dropout: 0.1,
            use_rslora: true,
            target_modules: vec!["all-linear".into()],
            target_parameters: Vec::new(),
            layers_to_transform: vec![1, 2],
        };
        let text = c.to_json().unwrap();
        let back = AdapterConfig::from_json(&text).unwrap();
        assert_eq!(back.target_modules, PROJECTIONS);
        assert_eq!(back.projections().unwrap(), c.projections().unwrap());
        assert_eq!((back.lora_alpha, back.lora_dropout, back.use_rslora), (12.5, 0.1, true));
        assert!((back.scale() - 12.5 / 8f64.sqrt()).abs() < 1e-12);
        assert!(back.has_layer(2) && !back.has_layer(0));
        assert_eq!(back.base_model_name_or_path, c.base_model_name_or_path);
    }

    #[test]
    fn targets_in_all_their_spellings() {
        assert_eq!(edited("target_modules", json!("all-linear")).unwrap().projections().unwrap(), PROJECTIONS);
        let c = edited("target_modules", json!(["self_attn.v_proj", "q_proj"])).unwrap();
        assert_eq!(c.target_modules, ["q_proj", "v_proj"]);
        let e = format!("{:#}", edited("target_modules", json!(".*proj")).unwrap_err());
        assert!(e.contains("regular expression"), "{e}");
        let e = format!("{:#}", edited("target_modules", json!(["lm_head"])).unwrap_err());
        assert!(e.contains("\"lm_head\""), "{e}");
        assert!(edited("target_modules", json!([])).is_err());
        assert_eq!(edited("layers_to_transform", json!(1)).unwrap().layers_to_transform, [1]);
    }

    #[test]
    fn what_tandem_does_not_do_is_refused_by_key() {
        for (key, value) in [
            ("peft_type", json!("IA3")),
            ("task_type", json!("SEQ_CLS")),
            ("use_dora", json!(true)),
            ("bias", json!("lora_only")),
            ("fan_in_fan_out", json!(true)),
            ("modules_to_save", json!(["lm_head"])),
            ("rank_pattern", json!({"q_proj": 2})),
            ("alpha_pattern", json!({"q_proj": 2})),
            ("target_parameters", json!(["mlp.experts.up_proj"])),
            ("lora_bias", json!(true)),
            ("layer_replication", json!([[0, 2]])),
            ("exclude_modules", json!("q_proj")),
            ("init_lora_weights", json!("pissa_niter_4")),
            ("use_something_new", json!(true)),
            ("r", json!(0)),
            ("lora_dropout", json!(1.0)),
        ] {
            let e = format!("{:#}", edited(key, value).unwrap_err());
            assert!(e.contains(key), "{key}: {e}");
        }
        assert!(edited("init_lora_weights", json!("gaussian")).is_ok());
        assert!(edited("new_group_size", json!(16)).is_ok());
    }
}
