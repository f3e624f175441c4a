//! The tokenizer inside a GGUF file, rebuilt: byte-level BPE from tokens, merges and pre-tokenizer, SentencePiece from scores.

use std::path::Path;

use anyhow::{Context as _, anyhow, bail, ensure};
use tokenizers::AddedToken;
use tokenizers::models::bpe::{BPE, Merges, Vocab};

use super::pre_tokenizer::{self, PreTokenizer};
use super::{Roles, Tokenizer, sentencepiece};
use crate::base::error::Result;
use crate::formats::gguf::GgufFile;

/// Values of `tokenizer.ggml.token_type`.
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;

/// Tokens that end a turn in the chat formats of known models. GGUF names at most one of them; a chat that stops at none
/// of them would go on speaking for the user.
const TURN_ENDS: [&str; 6] = ["<|im_end|>", "<|eot_id|>", "<|end|>", HARMONY[0], HARMONY[1], "<end_of_turn>"];
/// Those of gpt-oss's format, where `<|end|>` ends a message and the turn goes on: thoughts come before the answer.
const HARMONY: [&str; 2] = ["<|return|>", "<|call|>"];

/// Opens the tokenizer of the file.
pub fn open(path: &Path) -> Result<Tokenizer> {
    let file = GgufFile::open(path)?;
    build(&file).with_context(|| format!("the tokenizer of {}", path.display()))
}

fn build(file: &GgufFile) -> Result<Tokenizer> {
    let model = file.string("tokenizer.ggml.model")?.context("the file holds none (no tokenizer.ggml.model)")?;
    let tokens = file.strings("tokenizer.ggml.tokens")?.context("tokenizer.ggml.tokens is missing")?;
    let types = file.i32s("tokenizer.ggml.token_type")?.unwrap_or_default();
    ensure!(types.is_empty() || types.len() == tokens.len(), "{} token types for {} tokens", types.len(), tokens.len());
    let id = |name: &str| -> Result<Option<u32>> { file.u32(&format!("tokenizer.ggml.{name}_token_id")) };
    let (mut inner, adds_bos) = match model {
        "gpt2" => {
            let merges = file.strings("tokenizer.ggml.merges")?.context("tokenizer.ggml.merges is missing")?;
            let pre = pre_tokenizer::by_name(file.string("tokenizer.ggml.pre")?)?;
            (bpe(&tokens, &merges, &pre)?, pre.add_bos)
        }
        "llama" => {
            let scores = file.f32s("tokenizer.ggml.scores")?.context("tokenizer.ggml.scores is missing")?;
            let unknown = tokens.get(id("unknown")?.unwrap_or(0) as usize).context("the unknown token is missing")?;
            let prefix = file.bool("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
            (sentencepiece::build(&tokens, &scores, &types, unknown, prefix)?, true)
        }
        other => bail!("it is of the kind {other:?}, which is not supported; use the model's Hugging Face folder"),
    };
    add_tokens(&mut inner, &tokens, &types)?;

    let bos = id("bos")?;
    let eos = id("eos")?;
    let mut ends: Vec<u32> = Vec::new();
    let is_control = |id: &u32| types.get(*id as usize).is_none_or(|kind| *kind == CONTROL);
    let is_harmony = HARMONY.iter().all(|token| inner.token_to_id(token).is_some());
    let turn_ends = TURN_ENDS.iter().filter(|token| !is_harmony || **token != "<|end|>");
    let turn_ends = turn_ends.filter_map(|token| inner.token_to_id(token)).filter(is_control);
    for id in eos.into_iter().chain(id("eot")?).chain(id("eom")?).chain(turn_ends) {
        if !ends.contains(&id) {
            ends.push(id);
        }
    }
    let add_bos = file.bool("tokenizer.ggml.add_bos_token")?.unwrap_or(adds_bos);
    let add_eos = file.bool("tokenizer.ggml.add_eos_token")?.unwrap_or(false);
    let affixes = (bos.filter(|_| add_bos), eos.filter(|_| add_eos));
    let roles = Roles { bos, eos: ends, pad: id("padding")?, unk: id("unknown")? };
    let chat_template = file.string("tokenizer.chat_template")?.map(str::to_owned);
    Tokenizer::new(inner, roles, affixes, chat_template)
}

/// Byte-level BPE, without its special tokens.
fn bpe(tokens: &[&str], merges: &[&str], pre: &PreTokenizer) -> Result<tokenizers::Tokenizer> {
    let mut vocab = Vocab::default();
    for (id, token) in tokens.iter().enumerate() {
        // A token that occurs twice keeps its first id; the second can never be produced.
        vocab.entry((*token).to_owned()).or_insert(id as u32);
    }
    let mut pairs: Merges = Vec::with_capacity(merges.len());
    for merge in merges {
        // Byte-level tokens write the space as another letter, so the only space is between the two.
        let (left, right) = merge
            .split_once(' ')
            .with_context(|| format!("the merge {merge:?} is not two tokens with a space between"))?;
        // The model builder panics on a merge whose result is longer than any token.
        let result = format!("{left}{right}");
        for part in [left, right, &result] {
            ensure!(
                vocab.contains_key(part),
                "the merge {merge:?} needs the token {part:?}, which is not in the vocabulary"
            );
        }
        pairs.push((left.to_owned(), right.to_owned()));
    }
    let failed = |e: tokenizers::Error| anyhow!("its parts do not fit together: {e}");
    let model =
        BPE::builder().vocab_and_merges(vocab, pairs).ignore_merges(pre.ignore_merges).build().map_err(failed)?;
    let mut inner = tokenizers::Tokenizer::new(model);
    inner.with_normalizer(pre.normalizer()).map_err(failed)?;
    inner.with_pre_tokenizer(Some(pre.build()?));
    inner.with_decoder(Some(pre_tokenizer::bytes()));
    Ok(inner)
}

/// Makes control tokens and those the model's maker added be found in text.
fn add_tokens(inner: &mut tokenizers::Tokenizer, tokens: &[&str], types: &[i32]) -> Result<()> {
    let failed = |e: tokenizers::Error| anyhow!("its special tokens do not fit: {e}");
    let added = tokens.iter().zip(types).filter(|(_, kind)| matches!(**kind, CONTROL | USER_DEFINED));
    let (special, plain): (Vec<_>, Vec<_>) = added.partition(|(_, kind)| **kind == CONTROL);
    let token = |(token, kind): (&&str, &i32)| AddedToken::from(*token, *kind == CONTROL).normalized(false);
    inner.add_special_tokens(special.into_iter().map(token)).map_err(failed)?;
    inner.add_tokens(plain.into_iter().map(token)).map_err(failed)?;
    Ok(())
}
