//! The tokenizer of a model: from a Hugging Face folder or from the metadata of a GGUF file.

mod folder;
mod gguf;
mod pre_tokenizer;
mod sentencepiece;

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, anyhow, bail, ensure};

use super::chat_template::SpecialTokens;
use crate::base::error::Result;

/// Text to token ids and back. Cheap to clone; encoding from several threads at once is fine.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    inner: Arc<tokenizers::Tokenizer>,
    roles: Roles,
    vocab_size: usize,
    /// Put before a text encoded with special tokens, when the tokenizer's own post-processor does not.
    prefix: Option<u32>,
    /// Put after such a text.
    suffix: Option<u32>,
    chat_template: Option<String>,
}

/// The tokens with a role of their own.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Roles {
    bos: Option<u32>,
    /// The first is the tokenizer's own end of text; the others end a turn of a chat.
    eos: Vec<u32>,
    pad: Option<u32>,
    unk: Option<u32>,
}

/// Token ids with the bytes of the text each stands for.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Encoding {
    /// Token ids.
    pub ids: Vec<i32>,
    /// Byte range of each token in the text. Tokens that share a character have its whole range; tokens that stand for
    /// no text (a start token put before) have an empty one.
    pub offsets: Vec<Range<usize>>,
}

impl Tokenizer {
    /// Opens the tokenizer of a model: a Hugging Face folder (`tokenizer.json` and the files around it) or a GGUF file.
    ///
    /// # Errors
    /// When there is none, when it is of a kind that is not supported, or when its parts contradict each other.
    pub fn open(model_path: &Path) -> Result<Self> {
        if model_path.is_dir() {
            return folder::open(model_path);
        }
        let is_gguf = model_path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"));
        if is_gguf {
            return gguf::open(model_path);
        }
        if model_path.exists() {
            bail!("{} is neither a model folder nor a .gguf file", model_path.display());
        }
        bail!("{} does not exist", model_path.display());
    }

    fn new(
        inner: tokenizers::Tokenizer,
        roles: Roles,
        affixes: (Option<u32>, Option<u32>),
        chat_template: Option<String>,
    ) -> Result<Self> {
        let vocab_size = inner.get_vocab(true).into_values().max().map_or(0, |id| id as usize + 1);
        for id in [roles.bos, roles.pad, roles.unk].into_iter().flatten().chain(roles.eos.iter().copied()) {
            ensure!((id as usize) < vocab_size, "special token {id} is outside the vocabulary of {vocab_size} tokens");
        }
        let (prefix, suffix) = affixes;
        Ok(Self { inner: Arc::new(inner), roles, vocab_size, prefix, suffix, chat_template })
    }

    /// Token ids of `text`. Special tokens written in the text count as such. With `add_special_tokens` the tokens the
    /// model expects around any text (a start token) are added; a rendered chat template has its own.
    ///
    /// # Errors
    /// When the tokenizer refuses the text (a character outside a vocabulary without an unknown token).
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<i32>> {
        Ok(self.encode_with_offsets(text, add_special_tokens)?.ids)
    }

    /// As [`Self::encode`], with the place of each token in the text.
    ///
    /// # Errors
    /// As [`Self::encode`].
    pub fn encode_with_offsets(&self, text: &str, add_special_tokens: bool) -> Result<Encoding> {
        let encoded = self.inner.encode(text, add_special_tokens).map_err(|e| anyhow!("tokenizer: {e}"))?;
        let mut out = Encoding {
            ids: encoded.get_ids().iter().map(|id| *id as i32).collect(),
            offsets: encoded.get_offsets().iter().map(|(start, end)| *start..*end).collect(),
        };
        if add_special_tokens {
            if let Some(id) = self.prefix.map(|id| id as i32).filter(|id| out.ids.first() != Some(id)) {
                out.ids.insert(0, id);
                out.offsets.insert(0, 0..0);
            }
            if let Some(id) = self.suffix.map(|id| id as i32).filter(|id| out.ids.last() != Some(id)) {
                out.ids.push(id);
                out.offsets.push(text.len()..text.len());
            }
        }
        Ok(out)
    }

    /// The text of token ids. With `skip_special_tokens` special ones print nothing.
    ///
    /// # Errors
    /// When an id is negative.
    pub fn decode(&self, ids: &[i32], skip_special_tokens: bool) -> Result<String> {
        let ids = ids.iter().map(|id| u32::try_from(*id)).collect::<Result<Vec<_>, _>>().context("a token id")?;
        self.inner.decode(&ids, skip_special_tokens).map_err(|e| anyhow!("tokenizer: {e}"))
    }

    /// Tokens that end a text or a turn; generation stops at any of them. The first is the one appended to documents.
    pub fn eos_ids(&self) -> Vec<i32> {
        self.roles.eos.iter().map(|id| *id as i32).collect()
    }

    /// The start token.
    pub fn bos_id(&self) -> Option<i32> {
        self.roles.bos.map(|id| id as i32)
    }

    /// A token for padding. It never ends a text: a model whose configuration pads with its end token gets another one,
    /// the unknown token or the start token. Padding is never attended to nor trained, so any other token will do.
    pub fn pad_id(&self) -> i32 {
        let candidates = [self.roles.pad, self.roles.unk, self.roles.bos];
        let not_eos = |id: &u32| !self.roles.eos.contains(id);
        let any = || (0..self.vocab_size as u32).find(not_eos).unwrap_or(0);
        candidates.into_iter().flatten().find(not_eos).unwrap_or_else(any) as i32
    }

    /// One more than the largest token id.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Whether the token is a control token rather than text.
    pub fn is_special(&self, id: i32) -> bool {
        let token = u32::try_from(id).ok().and_then(|id| self.inner.id_to_token(id));
        token.is_some_and(|token| self.inner.get_added_vocabulary().is_special_token(&token))
    }

    /// The texts of all control tokens.
    pub fn special_texts(&self) -> impl Iterator<Item = &str> {
        let added = self.inner.get_added_vocabulary().get_added_tokens_decoder().values();
        added.filter(|token| token.special).map(|token| token.content.as_str())
    }

    /// How the vocabulary writes the token.
    pub fn token(&self, id: i32) -> Option<String> {
        u32::try_from(id).ok().and_then(|id| self.inner.id_to_token(id))
    }

    /// The id of a token written as in the vocabulary.
    pub fn token_id(&self, token: &str) -> Option<i32> {
        self.inner.token_to_id(token).map(|id| id as i32)
    }

    /// The chat template that came with the model.
    pub fn chat_template_source(&self) -> Option<&str> {
        self.chat_template.as_deref()
    }

    /// The special tokens as a chat template prints them.
    pub fn special_tokens(&self) -> SpecialTokens {
        let text = |id: Option<u32>| id.and_then(|id| self.inner.id_to_token(id));
        SpecialTokens {
            bos: text(self.roles.bos),
            eos: text(self.roles.eos.first().copied()),
            pad: text(self.roles.pad),
            unk: text(self.roles.unk),
        }
    }

    /// The tokenizer as Hugging Face's `tokenizer.json`.
    ///
    /// # Errors
    /// When it cannot be written as JSON.
    pub fn to_json(&self) -> Result<String> {
        self.inner.to_string(false).map_err(|e| anyhow!("tokenizer.json: {e}"))
    }
}

#[cfg(test)]
mod tests;
