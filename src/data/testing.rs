//! A tokenizer for tests: one token a byte, and the special tokens of ChatML.

use std::path::PathBuf;

use super::dataset::{Content, Record};
use super::tokenizer::Tokenizer;
use crate::formats::gguf_write::GgufBuilder;

/// Ends a text.
pub const EOS: i32 = 256;
/// Ends a turn.
pub const IM_END: i32 = 258;

/// A tokenizer whose token `b` is the byte `b`.
pub fn byte_tokenizer() -> Tokenizer {
    // Byte-level BPE writes printable bytes as themselves and the others as letters from U+0100 on.
    let printable = |b: u32| matches!(b, 33..=126 | 161..=172 | 174..=255);
    let mut next = 256;
    let mut tokens: Vec<String> = (0..256)
        .map(|b| {
            let code = if printable(b) { b } else { next };
            next += u32::from(!printable(b));
            char::from_u32(code).unwrap().to_string()
        })
        .collect();
    tokens.extend(["<|endoftext|>", "<|im_start|>", "<|im_end|>"].map(String::from));
    let kinds: Vec<i32> = (0..tokens.len()).map(|i| if i < 256 { 1 } else { 3 }).collect();
    let none: [&str; 0] = [];
    let file = GgufBuilder::new()
        .string("tokenizer.ggml.model", "gpt2")
        .string("tokenizer.ggml.pre", "gpt-2")
        .strings("tokenizer.ggml.tokens", &tokens)
        .strings("tokenizer.ggml.merges", &none)
        .i32s("tokenizer.ggml.token_type", &kinds)
        .u32("tokenizer.ggml.eos_token_id", EOS as u32)
        .build();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bytes.gguf");
    std::fs::write(&path, file).unwrap();
    Tokenizer::open(&path).unwrap()
}

/// A record of line 7 of `data.jsonl`.
pub fn record(content: Content) -> Record {
    Record { path: PathBuf::from("data.jsonl").into(), line: 7, content }
}
