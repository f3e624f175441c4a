//! From the text of a `run.toml` and command line overrides to a checked [`RunConfig`].

use std::collections::HashMap;
use std::path::Path;

use anyhow::{Context as _, anyhow};
use serde::Deserialize as _;
use toml::de::{DeTable, DeValue};

use super::check::{self, ConfigError, ConfigErrors, Origin};
use super::fields::{self, FieldKind};
use super::{RunConfig, STARTER};
use crate::base::error::Result;

/// One field replaced from the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Override {
    /// The flag as typed, for errors: `--r`, `--set method.r`.
    pub flag: String,
    /// The field: `method.r`.
    pub field: String,
    /// Its value as typed; lists may be written `a,b`.
    pub value: String,
}

/// The layers put on one another, with where each field came from.
#[derive(Default)]
struct Layers {
    table: toml::Table,
    origins: HashMap<String, Origin>,
    errors: Vec<ConfigError>,
}

/// Reads `text` (the content of `file`), applies the overrides, checks every field.
///
/// Paths of the file start at `folder`, those of overrides at the current folder.
pub(super) fn parse(text: &str, file: &Path, folder: &Path, overrides: &[Override]) -> Result<RunConfig> {
    let document = DeTable::parse(text).map_err(|e| {
        let line = e.span().map_or(1, |span| line_of(text, span.start));
        anyhow!("{}: not valid TOML (line {line}): {}", file.display(), e.message())
    })?;
    let mut layers = Layers::default();
    layers.add_file(document.get_ref(), text, file, folder)?;
    for change in overrides {
        layers.add_override(change)?;
    }
    if !layers.errors.is_empty() {
        return Err(ConfigErrors(layers.errors).into());
    }
    let config = RunConfig::deserialize(layers.table)
        .with_context(|| format!("{}: cannot be used as a run configuration", file.display()))?;
    if let Err(ConfigErrors(mut errors)) = config.validate() {
        for error in &mut errors {
            error.origin = layers.origins.get(&error.field).cloned().unwrap_or(match file.as_os_str().is_empty() {
                true => Origin::Unknown,
                false => Origin::Unset { path: file.to_owned() },
            });
        }
        return Err(ConfigErrors(errors).into());
    }
    Ok(config)
}

impl Layers {
    fn add_file(&mut self, document: &DeTable<'_>, text: &str, file: &Path, folder: &Path) -> Result<()> {
        for (key, value) in document {
            let origin = Origin::File { path: file.to_owned(), line: line_of(text, key.span().start) };
            let name: &str = key.get_ref();
            match value.get_ref() {
                DeValue::Table(section) if fields::sections().contains(&name) => {
                    for (field, value) in section {
                        let line = line_of(text, field.span().start);
                        let origin = Origin::File { path: file.to_owned(), line };
                        self.add_value(name, field.get_ref(), value.get_ref(), origin, folder)?;
                    }
                }
                DeValue::Table(_) => {
                    let sections = fields::sections();
                    let remedy = match fields::closest(name, &sections) {
                        Some(close) => format!("did you mean [{close}]?"),
                        None => format!("the sections are [{}]", sections.join("], [")),
                    };
                    self.error(name, origin, format!("unknown section [{name}]"), remedy);
                }
                value => self.add_value("", name, value, origin, folder)?,
            }
        }
        Ok(())
    }

    /// One `name = value` of the file.
    fn add_value(
        &mut self,
        section: &str,
        name: &str,
        value: &DeValue<'_>,
        origin: Origin,
        folder: &Path,
    ) -> Result<()> {
        let Some(field) = fields::find(section, name) else {
            let place = if section.is_empty() { String::new() } else { format!(" in [{section}]") };
            self.error(name, origin, format!("unknown field `{name}`{place}"), fields::suggest(section, name));
            return Ok(());
        };
        match convert(value, field.kind) {
            Some(value) => self.set(field, value, origin, folder)?,
            None => self.wrong_kind(field, &shown(value), origin),
        }
        Ok(())
    }

    fn add_override(&mut self, change: &Override) -> Result<()> {
        let origin = Origin::Flag(change.flag.clone());
        let (section, name) = change.field.rsplit_once('.').unwrap_or(("", &change.field));
        let Some(field) = fields::find(section, name) else {
            let problem = format!("unknown field `{}`", change.field);
            self.error(&change.field, origin, problem, fields::suggest(section, name));
            return Ok(());
        };
        match from_flag(&change.value, field.kind) {
            Some(value) => self.set(field, value, origin, Path::new(""))?,
            None => self.wrong_kind(field, &format!("\"{}\"", change.value), origin),
        }
        Ok(())
    }

    fn wrong_kind(&mut self, field: &fields::Field, value: &str, origin: Origin) {
        let dotted = field.dotted();
        let mut remedy = format!("it must be {}", field.kind.describe());
        if let FieldKind::Choice(words) = field.kind
            && let Some(close) = fields::closest(value.trim_matches('"'), words)
        {
            remedy = format!("did you mean \"{close}\"?");
        }
        self.error(&dotted, origin, format!("{} is {value}", check::in_words(&dotted)), remedy);
    }

    fn error(&mut self, field: &str, origin: Origin, problem: String, remedy: String) {
        self.errors.push(ConfigError { field: field.into(), origin, problem, remedy });
    }

    fn set(&mut self, field: &fields::Field, value: toml::Value, origin: Origin, folder: &Path) -> Result<()> {
        let value = match (field.kind, value) {
            (FieldKind::Path, toml::Value::String(path)) => toml::Value::String(absolute(&path, field, folder)?),
            (_, value) => value,
        };
        self.origins.insert(field.dotted(), origin);
        let table = if field.section.is_empty() {
            &mut self.table
        } else {
            let section = self.table.entry(field.section).or_insert_with(|| toml::Value::Table(toml::Table::new()));
            section.as_table_mut().with_context(|| format!("[{}] is not a section", field.section))?
        };
        table.insert(field.name.into(), value);
        Ok(())
    }
}

/// A path made absolute, from `folder` (or the current folder when that is empty); `starter` stays a word where it
/// means something, and so does an empty path.
fn absolute(path: &str, field: &fields::Field, folder: &Path) -> Result<String> {
    let starter = path == STARTER && field.name == "path";
    if path.is_empty() || starter {
        return Ok(path.into());
    }
    let from_home = path.strip_prefix("~/").and_then(|rest| std::env::home_dir().map(|home| home.join(rest)));
    let joined = from_home.unwrap_or_else(|| folder.join(path));
    let absolute = std::path::absolute(&joined).with_context(|| format!("cannot find the folder of {path}"))?;
    absolute.into_os_string().into_string().map_err(|path| {
        anyhow!("{} is not valid Unicode, which run.toml cannot hold; rename the folder", Path::new(&path).display())
    })
}

/// A value of the file as a field of this kind wants it; `None` when it is of another kind.
fn convert(value: &DeValue<'_>, kind: FieldKind) -> Option<toml::Value> {
    let value = match (kind, value) {
        (FieldKind::Text | FieldKind::Path, DeValue::String(s)) => toml::Value::String(s.to_string()),
        (FieldKind::Choice(words), DeValue::String(s)) if words.contains(&&**s) => toml::Value::String(s.to_string()),
        (FieldKind::Bool, DeValue::Boolean(b)) => toml::Value::Boolean(*b),
        (FieldKind::Integer, DeValue::Integer(i)) => {
            let number = i64::from_str_radix(i.as_str(), i.radix()).ok().filter(|n| *n >= 0)?;
            toml::Value::Integer(number)
        }
        (FieldKind::Float, DeValue::Float(f)) => toml::Value::Float(f.as_str().parse().ok()?),
        (FieldKind::Float, DeValue::Integer(i)) => {
            toml::Value::Float(i64::from_str_radix(i.as_str(), i.radix()).ok()? as f64)
        }
        (FieldKind::TextList, DeValue::String(s)) => toml::Value::Array(vec![toml::Value::String(s.to_string())]),
        (FieldKind::TextList, DeValue::Array(items)) => toml::Value::Array(
            items.iter().map(|item| convert(item.get_ref(), FieldKind::Text)).collect::<Option<Vec<_>>>()?,
        ),
        (FieldKind::IntegerList, DeValue::Array(items)) => toml::Value::Array(
            items.iter().map(|item| convert(item.get_ref(), FieldKind::Integer)).collect::<Option<Vec<_>>>()?,
        ),
        _ => return None,
    };
    Some(value)
}

/// A flag's value as a field of this kind wants it; texts need no quotes and lists no brackets.
fn from_flag(text: &str, kind: FieldKind) -> Option<toml::Value> {
    let items =
        || text.trim_matches(['[', ']']).split(',').map(|item| item.trim().trim_matches('"')).filter(|i| !i.is_empty());
    let value = match kind {
        FieldKind::Text | FieldKind::Path => toml::Value::String(text.into()),
        FieldKind::Choice(words) => toml::Value::String(words.contains(&text).then(|| text.into())?),
        FieldKind::Bool => toml::Value::Boolean(text.parse().ok()?),
        FieldKind::Integer => toml::Value::Integer(text.parse().ok().filter(|n| *n >= 0)?),
        FieldKind::Float => toml::Value::Float(text.parse().ok()?),
        FieldKind::TextList => toml::Value::Array(items().map(|item| toml::Value::String(item.into())).collect()),
        FieldKind::IntegerList => {
            toml::Value::Array(items().map(|item| from_flag(item, FieldKind::Integer)).collect::<Option<Vec<_>>>()?)
        }
    };
    Some(value)
}

/// A value as errors show it.
fn shown(value: &DeValue<'_>) -> String {
    match value {
        DeValue::String(s) => format!("\"{s}\""),
        DeValue::Integer(i) => i.to_string(),
        DeValue::Float(f) => f.as_str().to_owned(),
        DeValue::Boolean(b) => b.to_string(),
        DeValue::Datetime(d) => d.to_string(),
        DeValue::Array(items) => {
            let items: Vec<String> = items.iter().map(|item| shown(item.get_ref())).collect();
            format!("[{}]", items.join(", "))
        }
        DeValue::Table(_) => "a section".into(),
    }
}

/// 1-based line of a byte of `text`.
fn line_of(text: &str, byte: usize) -> usize {
    1 + text.bytes().take(byte).filter(|b| *b == b'\n').count()
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: &str = "[model]\npath = \"m\"\n[data]\npath = \"d.jsonl\"\n";

    fn parsed(text: &str, overrides: &[(&str, &str)]) -> Result<RunConfig> {
        let overrides: Vec<Override> = overrides
            .iter()
            .map(|(field, value)| Override {
                flag: format!("--set {field}"),
                field: (*field).into(),
                value: (*value).into(),
            })
            .collect();
        parse(text, Path::new("/cfg/run.toml"), Path::new("/cfg"), &overrides)
    }

    fn error(text: &str, overrides: &[(&str, &str)]) -> String {
        parsed(text, overrides).unwrap_err().to_string()
    }

    #[test]
    fn paths_start_at_the_folder_of_the_file_and_starter_stays_a_word() {
        let config =
            parsed("runs_dir = \"../runs\"\n[model]\npath = \"starter\"\n[data]\npath = \"über d.jsonl\"\n", &[])
                .unwrap();
        assert_eq!(config.model.path, Path::new("starter"));
        assert_eq!(config.data.path, Path::new("/cfg/über d.jsonl"));
        assert_eq!(config.runs_dir.unwrap(), Path::new("/cfg/../runs"));
    }

    #[test]
    fn a_slip_in_a_name_is_named_with_file_line_and_suggestion() {
        let text = format!("{BASE}[method]\nr = 4\nlorra_alpha = 8\n");
        assert_eq!(
            error(&text, &[]),
            "/cfg/run.toml: unknown field `lorra_alpha` in [method] (line 7): did you mean `lora_alpha`?"
        );
    }

    #[test]
    fn all_problems_come_at_once() {
        let text = format!("sed = 1\n{BASE}[methods]\nr = 4\n[train]\nepochs = \"many\"\nthreads = -1\n[data.x]\n");
        let expected = "/cfg/run.toml: unknown field `sed` (line 1): did you mean `seed`?\n\
             /cfg/run.toml: unknown section [methods] (line 6): did you mean [method]?\n\
             /cfg/run.toml: `epochs` in [train] is \"many\" (line 9): it must be a number\n\
             /cfg/run.toml: `threads` in [train] is -1 (line 10): it must be a whole number, 0 or more\n\
             /cfg/run.toml: unknown field `x` in [data] (line 11): it knows `path`, `layout`, `prompt`, `completion`, `system`, \
             `train_on`, `eval_fraction`, `eval_path`, `max_records`";
        let mut found: Vec<String> = error(&text, &[]).lines().map(str::to_owned).collect();
        let mut expected: Vec<String> = expected.lines().map(str::to_owned).collect();
        found.sort();
        expected.sort();
        assert_eq!(found, expected);
    }

    #[test]
    fn wrong_words_get_a_suggestion() {
        let text = format!("{BASE}[train]\ndevice = \"cud\"\n");
        assert_eq!(error(&text, &[]), "/cfg/run.toml: `device` in [train] is \"cud\" (line 6): did you mean \"cuda\"?");
        let text = format!("{BASE}[train]\ndevice = \"tpu\"\n");
        assert!(error(&text, &[]).ends_with("it must be one of \"auto\", \"cpu\", \"cuda\""));
    }

    #[test]
    fn values_out_of_range_name_their_line_or_their_flag() {
        let text = format!("{BASE}[method]\nr = 0\n");
        assert_eq!(
            error(&text, &[]),
            "/cfg/run.toml: `r` in [method] is 0 (line 6): it must be at least 1; 8, 16 or 32 are usual"
        );
        assert_eq!(
            error(BASE, &[("method.r", "0")]),
            "--set method.r: `r` in [method] is 0: it must be at least 1; 8, 16 or 32 are usual"
        );
        assert!(error("", &[]).starts_with("/cfg/run.toml: no model given: set `path` in [model]"));
    }

    #[test]
    fn overrides_replace_fields_of_every_kind() {
        let text = format!("{BASE}[method]\nr = 4\nuse_rslora = true\n");
        let config = parsed(
            &text,
            &[
                ("name", "7"),
                ("method.r", "8"),
                ("method.use_rslora", "false"),
                ("method.target_modules", "q_proj, v_proj"),
                ("method.layers_to_transform", "[0, 2]"),
                ("optimizer.lr", "1e-3"),
                ("train.activations", "keep"),
                ("train.attention", "masked"),
                ("train.cuda_graphs", "false"),
                ("data.path", "/abs/d.txt"),
            ],
        )
        .unwrap();
        assert_eq!((config.name.as_str(), config.method.r, config.method.use_rslora), ("7", 8, false));
        assert_eq!(config.method.target_modules, ["q_proj", "v_proj"]);
        assert_eq!(config.method.layers_to_transform, [0, 2]);
        assert_eq!(config.optimizer.lr, 1e-3);
        assert_eq!(config.train.activations, crate::train::config::ActivationsChoice::Keep);
        assert_eq!(config.train.attention, crate::train::config::AttentionPath::Masked);
        assert!(!config.train.cuda_graphs);
        assert_eq!(config.data.path, Path::new("/abs/d.txt"));
        assert_eq!(
            error(BASE, &[("method.lora_alpa", "8"), ("train.threads", "two")]),
            "--set method.lora_alpa: unknown field `method.lora_alpa`: did you mean `lora_alpha`?\n\
             --set train.threads: `threads` in [train] is \"two\": it must be a whole number, 0 or more"
        );
    }

    #[test]
    fn a_single_word_stands_for_a_list() {
        let config =
            parsed(&format!("{BASE}[method]\ntarget_modules = \"all-linear\"\nlora_alpha = 3\n"), &[]).unwrap();
        assert_eq!(config.method.target_modules, ["all-linear"]);
        assert_eq!(config.method.lora_alpha, 3.0);
    }

    #[test]
    fn broken_toml_names_its_line() {
        let message = error("seed = 1\n[model\n", &[]);
        assert!(message.starts_with("/cfg/run.toml: not valid TOML (line 2): "), "{message}");
    }

    #[test]
    fn the_frozen_copy_reads_back_the_same() {
        let text = format!("name = \"a b\"\n{BASE}system = \"Be \\\"brief\\\".\"\n[optimizer]\nlr = 0.00021\n");
        let config = parsed(&text, &[]).unwrap();
        let frozen = config.to_toml().unwrap();
        let again = parse(&frozen, Path::new("/elsewhere/run.toml"), Path::new("/elsewhere"), &[]).unwrap();
        assert_eq!(again, config);
    }

    #[test]
    fn the_examples_parse_and_the_commented_one_mentions_every_field() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/examples");
        let lora = RunConfig::load(&folder.join("lora.toml")).unwrap();
        let starter = RunConfig::load(&folder.join("starter.toml")).unwrap();
        assert_eq!(RunConfig { name: starter.name.clone(), ..lora }, starter);

        let text = std::fs::read_to_string(folder.join("lora.toml")).unwrap();
        let mut section = String::new();
        let mut mentioned = Vec::new();
        for line in text.lines() {
            if let Some(name) = line.strip_prefix('[').and_then(|l| l.strip_suffix(']')) {
                section = format!("{name}.");
            } else if let Some((name, _)) = line.trim_start_matches("# ").split_once(" = ")
                && !name.contains(' ')
            {
                mentioned.push(format!("{section}{name}"));
            }
        }
        let all: Vec<String> = fields::FIELDS.iter().map(fields::Field::dotted).collect();
        assert_eq!(mentioned, all);
    }
}
