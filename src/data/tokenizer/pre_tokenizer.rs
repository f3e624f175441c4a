//! The pre-tokenizers of byte-level BPE tokenizers, by the name GGUF files give them in `tokenizer.ggml.pre`.
//!
//! A pre-tokenizer cuts text into words before merges apply. GGUF stores only its name; the patterns are those of the
//! models' own `tokenizer.json`, the names those of llama.cpp's converter.

use anyhow::{anyhow, bail};
use tokenizers::normalizers::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{PreTokenizerWrapper, SplitDelimiterBehavior};

use crate::base::error::Result;

/// A pre-tokenizer with what belongs to it.
pub struct PreTokenizer {
    /// Patterns applied one after another, each cutting what the previous left.
    patterns: &'static [&'static str],
    /// A word that is a token as a whole is not merged from its bytes.
    pub ignore_merges: bool,
    /// Text is composed (Unicode NFC) first.
    pub nfc: bool,
    /// A start token goes before a text when the file does not say.
    pub add_bos: bool,
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const DIGIT: &str = r"\p{N}";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// What llama.cpp does with files whose converter did not know the tokenizer.
const UNNAMED: [&str; 4] = [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"];

/// The names known, for the error message.
const KNOWN: &str = "default, gpt-2, smollm, llama-bpe, qwen2, tekken, gpt-4o and their kin";

/// The pre-tokenizer of this name; no name means `default`.
///
/// # Errors
/// When the name is not known: guessing would give wrong tokens.
pub fn by_name(name: Option<&str>) -> Result<PreTokenizer> {
    let plain = |patterns| PreTokenizer { patterns, ignore_merges: false, nfc: false, add_bos: false };
    Ok(match name.unwrap_or("default") {
        "default" => plain(&UNNAMED),
        "gpt-2" | "gpt2" | "phi-2" | "olmo" | "mpt" | "jais" | "trillion" | "granite-docling" => plain(&[GPT2]),
        "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" | "exaone" | "minerva-7b" => {
            plain(&[DIGIT, GPT2])
        }
        "llama-bpe" | "llama3" | "llama-v3" | "falcon3" | "pixtral" | "lfm2" => {
            PreTokenizer { ignore_merges: true, add_bos: true, ..plain(&[LLAMA3]) }
        }
        "dbrx" | "smaug-bpe" | "glm4" | "chatglm-bpe" => plain(&[LLAMA3]),
        "qwen2" => PreTokenizer { nfc: true, ..plain(&[QWEN2]) },
        "deepseek-r1-qwen" | "stablelm2" | "megrez" => plain(&[QWEN2]),
        "tekken" => PreTokenizer { ignore_merges: true, add_bos: true, ..plain(&[TEKKEN]) },
        "gpt-4o" | "llama4" => PreTokenizer { ignore_merges: true, ..plain(&[GPT4O]) },
        other => bail!(
            "the pre-tokenizer {other:?} (tokenizer.ggml.pre) is not supported; known are {KNOWN}. Use the model's Hugging Face folder instead"
        ),
    })
}

impl PreTokenizer {
    /// The splits, then bytes as the letters byte-level BPE writes them with.
    pub fn build(&self) -> Result<PreTokenizerWrapper> {
        let mut steps: Vec<PreTokenizerWrapper> = Vec::new();
        for pattern in self.patterns {
            let pattern = SplitPattern::Regex((*pattern).to_owned());
            let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false);
            steps.push(split.map_err(|e| anyhow!("pre-tokenizer pattern: {e}"))?.into());
        }
        steps.push(bytes().into());
        Ok(Sequence::new(steps).into())
    }

    /// The normalizer, if any.
    pub fn normalizer(&self) -> Option<NFC> {
        self.nfc.then_some(NFC)
    }
}

/// Bytes as letters, nothing added, nothing trimmed from the offsets.
pub fn bytes() -> ByteLevel {
    ByteLevel::new(false, false, false)
}
