//! Every field of `run.toml` with the kind of its value: what parsing, overrides and suggestions go by.

/// What a field holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FieldKind {
    /// Free text.
    Text,
    /// A path; relative ones start at the file's folder.
    Path,
    /// A whole number, 0 or more.
    Integer,
    /// A number.
    Float,
    /// `true` or `false`.
    Bool,
    /// One of these words.
    Choice(&'static [&'static str]),
    /// A list of words; a single word stands for a list of one.
    TextList,
    /// A list of whole numbers.
    IntegerList,
}

impl FieldKind {
    /// The kind in words, as used in errors.
    pub fn describe(self) -> String {
        match self {
            Self::Text => "text in quotes".into(),
            Self::Path => "a path in quotes".into(),
            Self::Integer => "a whole number, 0 or more".into(),
            Self::Float => "a number".into(),
            Self::Bool => "true or false".into(),
            Self::Choice(words) => {
                let quoted: Vec<String> = words.iter().map(|w| format!("\"{w}\"")).collect();
                format!("one of {}", quoted.join(", "))
            }
            Self::TextList => "a list of words, such as [\"q_proj\", \"v_proj\"]".into(),
            Self::IntegerList => "a list of whole numbers, such as [0, 1]".into(),
        }
    }
}

/// One field of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Field {
    /// Its section (`method`), empty for fields above the first section.
    pub section: &'static str,
    /// Its name.
    pub name: &'static str,
    /// What it holds.
    pub kind: FieldKind,
}

impl Field {
    /// The field with its section: `method.r`.
    pub fn dotted(&self) -> String {
        if self.section.is_empty() { self.name.into() } else { format!("{}.{}", self.section, self.name) }
    }
}

const fn field(section: &'static str, name: &'static str, kind: FieldKind) -> Field {
    Field { section, name, kind }
}

const LAYOUTS: &[&str] = &["auto", "messages", "alpaca", "prompt_completion", "question_answer", "text", "mapping"];

const PLACEMENTS: &[&str] = &["auto", "device", "host"];

/// All fields in the order of the file.
pub const FIELDS: &[Field] = &[
    field("", "name", FieldKind::Text),
    field("", "seed", FieldKind::Integer),
    field("", "runs_dir", FieldKind::Path),
    field("model", "path", FieldKind::Path),
    field("model", "chat_template", FieldKind::Path),
    field("data", "path", FieldKind::Path),
    field("data", "layout", FieldKind::Choice(LAYOUTS)),
    field("data", "prompt", FieldKind::Text),
    field("data", "completion", FieldKind::Text),
    field("data", "system", FieldKind::Text),
    field("data", "train_on", FieldKind::Choice(&["assistant", "last_turn", "everything"])),
    field("data", "eval_fraction", FieldKind::Float),
    field("data", "eval_path", FieldKind::Path),
    field("data", "max_records", FieldKind::Integer),
    field("packing", "enabled", FieldKind::Bool),
    field("packing", "pack_len", FieldKind::Integer),
    field("packing", "overlong", FieldKind::Choice(&["truncate", "split", "drop"])),
    field("method", "kind", FieldKind::Choice(&["lora", "qlora", "full"])),
    field("method", "double_quant", FieldKind::Bool),
    field("method", "r", FieldKind::Integer),
    field("method", "lora_alpha", FieldKind::Float),
    field("method", "lora_dropout", FieldKind::Float),
    field("method", "use_rslora", FieldKind::Bool),
    field("method", "target_modules", FieldKind::TextList),
    field("method", "target_parameters", FieldKind::TextList),
    field("method", "layers_to_transform", FieldKind::IntegerList),
    field("method", "init_adapter", FieldKind::Path),
    field("optimizer", "lr", FieldKind::Float),
    field("optimizer", "beta1", FieldKind::Float),
    field("optimizer", "beta2", FieldKind::Float),
    field("optimizer", "eps", FieldKind::Float),
    field("optimizer", "weight_decay", FieldKind::Float),
    field("optimizer", "bits", FieldKind::Integer),
    field("optimizer", "max_grad_norm", FieldKind::Float),
    field("optimizer", "schedule", FieldKind::Choice(&["cosine", "linear", "constant"])),
    field("optimizer", "warmup_steps", FieldKind::Integer),
    field("train", "epochs", FieldKind::Float),
    field("train", "max_steps", FieldKind::Integer),
    field("train", "grad_accum_steps", FieldKind::Integer),
    field("train", "eval_every", FieldKind::Integer),
    field("train", "save_every", FieldKind::Integer),
    field("train", "activations", FieldKind::Choice(&["auto", "keep", "recompute", "offload"])),
    field("train", "attention", FieldKind::Choice(&["varlen", "masked"])),
    field("train", "cuda_graphs", FieldKind::Bool),
    field("train", "precision", FieldKind::Choice(&["f32", "bf16"])),
    field("train", "device", FieldKind::Choice(&["auto", "cpu", "cuda"])),
    field("train", "threads", FieldKind::Integer),
    field("train", "vram_limit_gib", FieldKind::Float),
    field("optimizations", "metadata_cache", FieldKind::Choice(&["auto", "on", "off"])),
    field("optimizations", "metadata_baseline", FieldKind::Choice(&["published", "fused"])),
    field("optimizations", "metadata_entries", FieldKind::Integer),
    field("optimizations", "grouped_routing", FieldKind::Choice(&["auto", "on", "off"])),
    field("optimizations", "routing_baseline", FieldKind::Choice(&["sorted", "per_expert"])),
    field("optimizations", "offload_buffers", FieldKind::Integer),
    field("optimizations", "offload_force", FieldKind::Bool),
    field("optimizations", "offload_headroom_mib", FieldKind::Integer),
    field("optimizations", "offload_pinned_gib", FieldKind::Float),
    field("memory", "embedding", FieldKind::Choice(PLACEMENTS)),
    field("memory", "optimizer_state", FieldKind::Choice(PLACEMENTS)),
    field("memory", "dequantized", FieldKind::Choice(&["auto", "scratch", "resident"])),
    field("memory", "middle", FieldKind::Choice(&["auto", "on", "off"])),
    field("memory", "qkv", FieldKind::Choice(&["auto", "on", "off"])),
    field("memory", "mlp_rows", FieldKind::Integer),
    field("memory", "pass_tokens", FieldKind::Integer),
];

/// Names other tools use, and the field that means the same here.
const OTHER_TOOLS: &[(&str, &str)] = &[
    ("learning_rate", "optimizer.lr"),
    ("adam_beta1", "optimizer.beta1"),
    ("adam_beta2", "optimizer.beta2"),
    ("adam_epsilon", "optimizer.eps"),
    ("lr_scheduler_type", "optimizer.schedule"),
    ("num_train_epochs", "train.epochs"),
    ("num_epochs", "train.epochs"),
    ("gradient_accumulation_steps", "train.grad_accum_steps"),
    ("gradient_checkpointing", "train.activations"),
    ("eval_steps", "train.eval_every"),
    ("save_steps", "train.save_every"),
    ("max_length", "packing.pack_len"),
    ("max_seq_length", "packing.pack_len"),
    ("sequence_len", "packing.pack_len"),
    ("sample_packing", "packing.enabled"),
    ("lora_r", "method.r"),
    ("rank", "method.r"),
    ("alpha", "method.lora_alpha"),
    ("lora_target_modules", "method.target_modules"),
    ("base_model", "model.path"),
    ("model_name_or_path", "model.path"),
    ("dataset", "data.path"),
    ("test_size", "data.eval_fraction"),
    ("val_set_size", "data.eval_fraction"),
];

/// Finds a field by section and name.
pub fn find(section: &str, name: &str) -> Option<&'static Field> {
    FIELDS.iter().find(|f| f.section == section && f.name == name)
}

/// The names of all sections, in the order of the file.
pub fn sections() -> Vec<&'static str> {
    let mut sections: Vec<&'static str> = FIELDS.iter().map(|f| f.section).filter(|s| !s.is_empty()).collect();
    sections.dedup();
    sections
}

/// What the writer of an unknown `name` in `section` probably meant, as a remedy: ``did you mean `lora_alpha`?``.
pub fn suggest(section: &str, name: &str) -> String {
    let lower = name.to_lowercase();
    let in_section: Vec<&'static str> = FIELDS.iter().filter(|f| f.section == section).map(|f| f.name).collect();
    if let Some(close) = closest(&lower, &in_section) {
        return format!("did you mean `{close}`?");
    }
    let elsewhere = FIELDS.iter().find(|f| f.name == lower).map(Field::dotted);
    let foreign = || OTHER_TOOLS.iter().find(|(other, _)| *other == lower).map(|(_, ours)| (*ours).to_owned());
    let all: Vec<&'static str> = FIELDS.iter().map(|f| f.name).collect();
    let close_elsewhere =
        || closest(&lower, &all).and_then(|close| FIELDS.iter().find(|f| f.name == close)).map(Field::dotted);
    if let Some(dotted) = elsewhere.or_else(foreign).or_else(close_elsewhere) {
        return match dotted.split_once('.') {
            Some((other, field)) if other == section => format!("did you mean `{field}`?"),
            Some((other, field)) => format!("did you mean `{field}` in [{other}]?"),
            None => format!("did you mean `{dotted}`, above the first section?"),
        };
    }
    let known: Vec<String> = in_section.iter().map(|f| format!("`{f}`")).collect();
    format!("it knows {}", known.join(", "))
}

/// The candidate closest to `word`, when it is close enough to be a slip.
pub fn closest(word: &str, candidates: &[&'static str]) -> Option<&'static str> {
    let extends = |long: &str, short: &str| short.len() >= 4 && long.starts_with(short);
    candidates
        .iter()
        .map(|c| (strsim::damerau_levenshtein(word, c), *c))
        .filter(|(distance, c)| *distance <= c.len() / 4 || extends(word, c) || extends(c, word))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, c)| c)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::config::RunConfig;

    /// Every field set, so that serialization names them all.
    fn everything() -> RunConfig {
        let mut config = RunConfig { runs_dir: Some("runs".into()), ..RunConfig::default() };
        config.model.chat_template = Some("t".into());
        config.data.prompt = Some("p".into());
        config.data.completion = Some("c".into());
        config.data.system = Some("s".into());
        config.data.eval_path = Some("e".into());
        config.method.init_adapter = Some("a".into());
        config
    }

    #[test]
    fn the_list_names_exactly_the_fields_of_the_structs() {
        let table = toml::Table::try_from(everything()).unwrap();
        let mut found = Vec::new();
        for (key, value) in &table {
            match value.as_table() {
                Some(section) => found.extend(section.keys().map(|name| format!("{key}.{name}"))),
                None => found.push(key.clone()),
            }
        }
        let mut listed: Vec<String> = FIELDS.iter().map(Field::dotted).collect();
        found.sort();
        listed.sort();
        assert_eq!(found, listed);
    }

    #[test]
    fn the_choices_are_exactly_the_words_the_structs_take() {
        for field in FIELDS {
            let FieldKind::Choice(words) = field.kind else { continue };
            for word in words {
                let text = format!("[{}]\n{} = \"{word}\"\n", field.section, field.name);
                toml::from_str::<RunConfig>(&text).unwrap();
            }
            let text = format!("[{}]\n{} = \"?\"\n", field.section, field.name);
            let message = toml::from_str::<RunConfig>(&text).unwrap_err().message().to_owned();
            let expected = message.split_once("expected").unwrap().1.matches('`').count() / 2;
            assert_eq!(expected, words.len(), "{}: {message}", field.dotted());
        }
    }

    #[test]
    fn suggestions_look_here_then_elsewhere_then_in_other_tools() {
        assert_eq!(suggest("method", "lorra_alpha"), "did you mean `lora_alpha`?");
        assert_eq!(suggest("train", "lr"), "did you mean `lr` in [optimizer]?");
        assert_eq!(suggest("train", "learning_rate"), "did you mean `lr` in [optimizer]?");
        assert_eq!(suggest("method", "rank"), "did you mean `r`?");
        assert_eq!(suggest("packing", "pack_length"), "did you mean `pack_len`?");
        assert_eq!(suggest("packing", "zzzzzzzz"), "it knows `enabled`, `pack_len`, `overlong`");
    }

    #[test]
    fn every_name_of_another_tool_leads_to_a_field() {
        for (other, ours) in OTHER_TOOLS {
            assert!(FIELDS.iter().any(|f| f.dotted() == *ours), "{other} leads to {ours}");
        }
    }
}
