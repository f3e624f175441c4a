//! SentencePiece BPE tokenizers inside GGUF files (`tokenizer.ggml.model = llama`): Llama 1 and 2, Mistral 7B and kin.
//!
//! Pieces carry scores; the two neighbours whose union scores best are merged first. The same result comes from BPE with
//! merges in the order of the scores, which is how Transformers converts such models. The blank is written `▁`; a character
//! without a piece becomes its bytes.

use anyhow::{Context as _, anyhow, ensure};
use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::sequence::Sequence as Decoders;
use tokenizers::decoders::strip::Strip;
use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::normalizers::{Prepend, Replace, Sequence as Normalizers};

use crate::base::error::Result;

/// How SentencePiece writes a blank.
const BLANK: &str = "▁";
/// Values of `tokenizer.ggml.token_type` of pieces that text can become.
const NORMAL: i32 = 1;

/// The tokenizer of these pieces, without its special tokens. `unknown` is the piece for what has no bytes either;
/// `prefix` says whether a blank goes before a text.
pub fn build(
    tokens: &[&str],
    scores: &[f32],
    kinds: &[i32],
    unknown: &str,
    prefix: bool,
) -> Result<tokenizers::Tokenizer> {
    ensure!(scores.len() == tokens.len(), "{} scores for {} tokens", scores.len(), tokens.len());
    let failed = |e: tokenizers::Error| anyhow!("its parts do not fit together: {e}");
    let mut vocab = Vocab::default();
    for (id, token) in tokens.iter().enumerate() {
        vocab.entry((*token).to_owned()).or_insert(id as u32);
    }
    let merges = merges(tokens, scores, kinds, &vocab);
    ensure!(vocab.contains_key(unknown), "the unknown token {unknown:?} is not in the vocabulary");
    let model = BPE::builder()
        .vocab_and_merges(vocab, merges)
        .unk_token(unknown.to_owned())
        .fuse_unk(true)
        .byte_fallback(true)
        .build()
        .map_err(failed)?;
    let mut inner = tokenizers::Tokenizer::new(model);
    let replace = |from: &str, to: &str| Replace::new(from, to).map_err(failed).context("blanks");
    let mut normalizers = Vec::new();
    if prefix {
        normalizers.push(Prepend::new(BLANK.into()).into());
    }
    normalizers.push(replace(" ", BLANK)?.into());
    inner.with_normalizer(Some(Normalizers::new(normalizers))).map_err(failed)?;
    let mut decoders = vec![replace(BLANK, " ")?.into(), ByteFallback::new().into(), Fuse::new().into()];
    if prefix {
        decoders.push(Strip::new(' ', 1, 0).into());
    }
    inner.with_decoder(Some(Decoders::new(decoders)));
    Ok(inner)
}

/// Every way to make a piece from two others, best score first; then in the order of the vocabulary, first of the piece,
/// then of its parts.
fn merges(tokens: &[&str], scores: &[f32], kinds: &[i32], vocab: &Vocab) -> Merges {
    let piece = |text: &str| {
        let id = vocab.get(text).copied()?;
        kinds.get(id as usize).is_none_or(|kind| *kind == NORMAL).then_some(id)
    };
    let mut found: Vec<(f32, &str, &str)> = Vec::new();
    for (token, score) in tokens.iter().zip(scores).filter(|(token, _)| piece(token).is_some()) {
        let first = found.len();
        let splits = token.char_indices().skip(1).map(|(at, _)| token.split_at(at));
        let both = splits.filter(|(left, right)| piece(left).is_some() && piece(right).is_some());
        found.extend(both.map(|(left, right)| (*score, left, right)));
        found[first..].sort_by_key(|(_, left, right)| (piece(left), piece(right)));
    }
    found.sort_by(|a, b| b.0.total_cmp(&a.0));
    found.into_iter().map(|(_, left, right)| (left.to_owned(), right.to_owned())).collect()
}
