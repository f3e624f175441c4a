//! One training example: a record after its template and tokenizer. Stop 2 of the walk.

mod mask;

use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use anyhow::{Context as _, ensure};
use rayon::prelude::*;

use super::chat_template::ChatTemplate;
use super::dataset::Record;
use super::options::TrainOn;
use super::tokenizer::{Encoding, Tokenizer};
use crate::base::error::{BadRecord, Result};
use mask::Marked;

/// Label value of a position that is not trained (the convention of PyTorch's cross-entropy).
pub const IGNORE_INDEX: i32 = -100;

/// One document ready to be packed. Stop 2 of the walk.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Example {
    /// Token ids, i32 [tokens].
    pub input_ids: Vec<i32>,
    /// Targets, i32 [tokens], shifted: `labels[t]` is the token after `t`, or −100; the last one is always −100.
    pub labels: Vec<i32>,
}

/// One token as a preview shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenView {
    /// Its id.
    pub id: i32,
    /// Its text. A character that several tokens share is in the first one; the texts of the tokens that stand for text,
    /// one after another, are the whole text.
    pub text: String,
    /// Whether the model learns to write it.
    pub trained: bool,
    /// Whether it ends a text or a turn.
    pub is_end: bool,
    /// Whether it was added by the tokenizer or by [`ExampleBuilder`] and is not in the text.
    pub is_added: bool,
}

/// Turns records into examples: renders the chat template, tokenizes, decides which tokens train.
#[derive(Debug)]
pub struct ExampleBuilder {
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    train_on: TrainOn,
    eos_ids: Vec<i32>,
    /// The texts of `eos_ids`.
    eos_texts: Vec<String>,
}

/// Examples, and the records that gave none.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Built {
    /// In the order of the records.
    pub examples: Vec<Example>,
    /// With line and reason.
    pub rejected: Vec<BadRecord>,
}

/// Token ids with a flag each, and the text they stand for.
struct Tokens {
    text: String,
    encoding: Encoding,
    trained: Vec<bool>,
}

impl ExampleBuilder {
    /// A builder. Without a template conversations are refused and pairs are plain text.
    ///
    /// # Errors
    /// When the tokenizer names no token that ends a text: a model trained without one never stops.
    pub fn new(tokenizer: Tokenizer, template: Option<ChatTemplate>, train_on: TrainOn) -> Result<Self> {
        let eos_ids = tokenizer.eos_ids();
        ensure!(
            !eos_ids.is_empty(),
            "the tokenizer names no token that ends a text; set eos_token in tokenizer_config.json"
        );
        let eos_texts = eos_ids.iter().filter_map(|id| tokenizer.token(*id)).collect();
        Ok(Self { tokenizer, template, train_on, eos_ids, eos_texts })
    }

    /// A builder with the model's own chat template, or with the one in the file `chat_template`.
    ///
    /// # Errors
    /// As [`Self::new`], and when the template cannot be read or is not one.
    pub fn for_model(tokenizer: Tokenizer, chat_template: Option<&Path>, train_on: TrainOn) -> Result<Self> {
        let tokens = tokenizer.special_tokens();
        let template = match chat_template {
            Some(path) => {
                let source =
                    std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
                Some(ChatTemplate::new(&source, tokens).with_context(|| path.display().to_string())?)
            }
            None => {
                let source = tokenizer.chat_template_source().map(str::to_owned);
                source.map(|source| ChatTemplate::new(&source, tokens)).transpose().context("the model's template")?
            }
        };
        Self::new(tokenizer, template, train_on)
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The chat template, if any.
    pub fn template(&self) -> Option<&ChatTemplate> {
        self.template.as_ref()
    }

    /// Builds the example of a record.
    ///
    /// # Errors
    /// When the template refuses the record, when it cannot be told which text the assistant wrote, or when nothing in
    /// it would train.
    pub fn build(&self, record: &Record) -> Result<Example, BadRecord> {
        let Tokens { encoding, trained, .. } = self.tokens(record)?;
        let input_ids = encoding.ids;
        let next = |t: usize| trained.get(t + 1).copied().unwrap_or(false).then(|| input_ids[t + 1]);
        let labels: Vec<i32> = (0..input_ids.len()).map(|t| next(t).unwrap_or(IGNORE_INDEX)).collect();
        if labels.iter().all(|label| *label == IGNORE_INDEX) {
            return Err(record.bad("nothing to train on: no token of an assistant turn is left"));
        }
        Ok(Example { input_ids, labels })
    }

    /// The tokens of a record with their text and whether they train, for a preview.
    ///
    /// # Errors
    /// As [`Self::build`].
    pub fn explain(&self, record: &Record) -> Result<Vec<TokenView>, BadRecord> {
        let Tokens { text, encoding, trained } = self.tokens(record)?;
        let mut shown = 0;
        let mut views = Vec::with_capacity(trained.len());
        for ((id, range), trained) in encoding.ids.into_iter().zip(encoding.offsets).zip(trained) {
            let is_added = range.is_empty();
            let own = if is_added {
                self.tokenizer.token(id).unwrap_or_default()
            } else {
                text[shown.min(range.end)..range.end].to_owned()
            };
            shown = shown.max(range.end);
            views.push(TokenView { id, text: own, trained, is_end: self.is_end(id), is_added });
        }
        Ok(views)
    }

    /// Builds the examples of all records on all cores. `progress` gets the number of records done, from any thread.
    /// `None` when `stop` was raised.
    pub fn build_all(&self, records: &[Record], progress: &(dyn Fn(usize) + Sync), stop: &AtomicBool) -> Option<Built> {
        let done = AtomicUsize::new(0);
        let results: Vec<Option<Result<Example, BadRecord>>> = records
            .par_iter()
            .map(|record| {
                if stop.load(Ordering::Relaxed) {
                    return None;
                }
                let example = self.build(record);
                progress(done.fetch_add(1, Ordering::Relaxed) + 1);
                Some(example)
            })
            .collect();
        let mut built = Built::default();
        for result in results {
            match result? {
                Ok(example) => built.examples.push(example),
                Err(bad) => built.rejected.push(bad),
            }
        }
        Some(built)
    }

    fn is_end(&self, id: i32) -> bool {
        self.eos_ids.contains(&id)
    }

    fn tokens(&self, record: &Record) -> Result<Tokens, BadRecord> {
        let Marked { text, trained, add_special_tokens, end_expected } = self.mark(record)?;
        let encoding =
            self.tokenizer.encode_with_offsets(&text, add_special_tokens).map_err(|e| record.bad(format!("{e:#}")))?;
        let trained = self.flags(&encoding, &trained);
        let mut tokens = Tokens { text, encoding, trained };
        if end_expected {
            self.ensure_end(&mut tokens);
        }
        Ok(tokens)
    }

    /// A token trains when all its text lies in a trained range, or when it ends a turn right after one.
    fn flags(&self, encoding: &Encoding, ranges: &[Range<usize>]) -> Vec<bool> {
        let mut flags = Vec::with_capacity(encoding.ids.len());
        let mut current = 0;
        for (id, offset) in encoding.ids.iter().zip(&encoding.offsets) {
            while ranges.get(current).is_some_and(|range| range.end < offset.end) {
                current += 1;
            }
            let inside = ranges.get(current).is_some_and(|range| range.start <= offset.start);
            // A template may close its block before the token that ends the turn.
            let ends_turn =
                current > 0 && ranges[current - 1].end == offset.start && !offset.is_empty() && self.is_end(*id);
            flags.push((inside && !offset.is_empty()) || ends_turn);
        }
        flags
    }

    /// Appends the end token when the document does not end with one already (white space after it aside).
    fn ensure_end(&self, tokens: &mut Tokens) {
        let ids = &tokens.encoding.ids;
        let is_blank = |t: usize| {
            let range = tokens.encoding.offsets[t].clone();
            !range.is_empty() && tokens.text[range].trim().is_empty()
        };
        let last = (0..ids.len()).rev().find(|t| !is_blank(*t));
        if let Some(last) = last.filter(|t| self.is_end(ids[*t]) || self.tokenizer.is_special(ids[*t])) {
            tokens.trained[last] = true;
            return;
        }
        let Some(eos) = self.eos_ids.first() else { return };
        tokens.encoding.ids.push(*eos);
        tokens.encoding.offsets.push(tokens.text.len()..tokens.text.len());
        tokens.trained.push(true);
    }
}

#[cfg(test)]
mod tests;
