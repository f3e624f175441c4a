//! The tokenizer of a Hugging Face folder: `tokenizer.json`, `tokenizer_config.json` and the files around them.

use std::path::Path;

use anyhow::{Context as _, anyhow, bail, ensure};
use serde_json::Value;
use tokenizers::PostProcessorWrapper;

use super::{Roles, Tokenizer};
use crate::base::error::Result;

/// Opens the tokenizer of the folder.
pub fn open(folder: &Path) -> Result<Tokenizer> {
    let file = folder.join("tokenizer.json");
    ensure!(
        file.is_file(),
        "{} has no tokenizer.json; save it there with Transformers: AutoTokenizer.from_pretrained(…).save_pretrained(…)",
        folder.display()
    );
    // The reader of the crate panics on merges that make a longer text than any token.
    let read = std::panic::catch_unwind(|| tokenizers::Tokenizer::from_file(&file));
    let read = read.map_err(|_| anyhow!("{} is damaged: its merges do not fit its vocabulary", file.display()))?;
    let mut inner = read.map_err(|e| anyhow!("{}: {e}", file.display()))?;
    // A saved limit or padding would cut or fill documents before packing sees them.
    inner.with_padding(None);
    inner.with_truncation(None).map_err(|e| anyhow!("{}: {e}", file.display()))?;
    let mut processor = inner.get_post_processor().cloned();
    if let Some(processor) = &mut processor {
        keep_blanks(processor);
    }
    inner.with_post_processor(processor);

    let config = json(folder, "tokenizer_config.json")?;
    let special = json(folder, "special_tokens_map.json")?;
    let role = |name: &str| -> Result<Option<u32>> {
        let Some(token) = content(&config[name]).or_else(|| content(&special[name])) else { return Ok(None) };
        let id = inner.token_to_id(token);
        let id =
            id.with_context(|| format!("{}: {name} is {token:?}, which is not in the vocabulary", folder.display()));
        id.map(Some)
    };
    let eos = role("eos_token")?;
    let roles = Roles { bos: role("bos_token")?, eos: Vec::new(), pad: role("pad_token")?, unk: role("unk_token")? };
    let mut ids: Vec<u32> = eos.into_iter().collect();
    for name in ["generation_config.json", "config.json"] {
        for id in ids_of(&json(folder, name)?["eos_token_id"]) {
            if !ids.contains(&id) {
                ids.push(id);
            }
        }
    }
    let chat_template = chat_template(folder, &config)?;
    Tokenizer::new(inner, Roles { eos: ids, ..roles }, (None, None), chat_template)
        .with_context(|| folder.display().to_string())
}

/// A JSON file of the folder; `null` when there is none.
fn json(folder: &Path, name: &str) -> Result<Value> {
    let path = folder.join(name);
    if !path.is_file() {
        return Ok(Value::Null);
    }
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_str(&text).with_context(|| format!("{} is not valid JSON", path.display()))
}

/// Makes every token stand for its whole text: with `trim_offsets` a token of blanks would stand for nothing, and a blank
/// inside an answer would look like a token that was added to it.
fn keep_blanks(processor: &mut PostProcessorWrapper) {
    match processor {
        PostProcessorWrapper::ByteLevel(byte_level) => byte_level.trim_offsets = false,
        PostProcessorWrapper::Roberta(roberta) => roberta.trim_offsets = false,
        PostProcessorWrapper::Sequence(sequence) => sequence.as_mut().iter_mut().for_each(keep_blanks),
        PostProcessorWrapper::Bert(_) | PostProcessorWrapper::Template(_) => {}
    }
}

/// A token written as text or as an object with its text in `content`.
fn content(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value["content"].as_str())
}

/// A token id, or a list of them.
fn ids_of(value: &Value) -> Vec<u32> {
    let one = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    match value {
        Value::Array(ids) => ids.iter().filter_map(one).collect(),
        id => one(id).into_iter().collect(),
    }
}

/// The chat template: a file of its own, or a field of the configuration, which may hold several with names.
fn chat_template(folder: &Path, config: &Value) -> Result<Option<String>> {
    let path = folder.join("chat_template.jinja");
    if path.is_file() {
        let source = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        return Ok(Some(source));
    }
    let own_file = json(folder, "chat_template.json")?;
    let value = if own_file.is_null() { &config["chat_template"] } else { &own_file["chat_template"] };
    let named = match value {
        Value::Null => return Ok(None),
        Value::String(source) => return Ok(Some(source.clone())),
        Value::Array(named) => named,
        _ => bail!("{}: chat_template is neither text nor a list", folder.display()),
    };
    let chosen = named.iter().find(|t| t["name"] == "default").or(if named.len() == 1 { named.first() } else { None });
    match chosen.and_then(|t| t["template"].as_str()) {
        Some(source) => Ok(Some(source.to_owned())),
        None => {
            let names: Vec<_> = named.iter().filter_map(|t| t["name"].as_str()).collect();
            bail!(
                "{} has chat templates named {}, none of them \"default\"; write the right one to chat_template.jinja in that folder",
                folder.display(),
                names.join(", ")
            )
        }
    }
}
