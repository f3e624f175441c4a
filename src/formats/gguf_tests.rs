//! Tests of the GGUF reader: what it reads back, and what it says about files that are not right.

use std::io::Write as _;

use proptest::prelude::*;

use super::super::gguf_write::GgufBuilder;
use super::*;

fn sample() -> GgufBuilder {
    GgufBuilder::new()
        .string("general.architecture", "llama")
        .u32("llama.block_count", 2)
        .f32("llama.rope.freq_base", 10_000.0)
        .bool("tokenizer.ggml.add_bos_token", true)
        .strings("tokenizer.ggml.tokens", &["a", "", "é"])
        .i32s("tokenizer.ggml.token_type", &[1, 3, -1])
        .f32s("scores", &[0.5, -2.0])
        .tensor_f32("token_embd.weight", &[3, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
        .tensor("blk.0.attn_q.weight", GgmlType(8), &[1, 32], &[0; 34])
        .tensor("k", GgmlType(12), &[1, 256], &[0; 144])
}

fn open(bytes: &[u8]) -> Result<GgufFile> {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(bytes).unwrap();
    GgufFile::open(file.path())
}

/// The whole error chain of a file that must be refused.
fn refusal(bytes: &[u8]) -> String {
    format!("{:#}", open(bytes).unwrap_err())
}

#[test]
fn reads_back_what_was_written() {
    let f = open(&sample().build()).unwrap();
    assert_eq!(f.version(), 3);
    assert_eq!(f.string("general.architecture").unwrap(), Some("llama"));
    assert_eq!(f.u32("llama.block_count").unwrap(), Some(2));
    assert_eq!(f.f32("llama.rope.freq_base").unwrap(), Some(10_000.0));
    assert_eq!(f.bool("tokenizer.ggml.add_bos_token").unwrap(), Some(true));
    assert_eq!(f.strings("tokenizer.ggml.tokens").unwrap().unwrap(), ["a", "", "é"]);
    assert_eq!(f.i32s("tokenizer.ggml.token_type").unwrap().unwrap(), [1, 3, -1]);
    assert_eq!(f.f32s("scores").unwrap().unwrap(), [0.5, -2.0]);
    assert_eq!(f.u32("absent").unwrap(), None);
    assert_eq!(f.strings("absent").unwrap(), None);
    let t = f.tensor("token_embd.weight").unwrap();
    assert_eq!(t.shape, [3, 2]);
    assert_eq!(t.kind.name(), "F32");
    assert_eq!(f.to_f32("token_embd.weight").unwrap(), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    assert_eq!(f.to_f32("blk.0.attn_q.weight").unwrap(), [0.0; 32]);
}

#[test]
fn wrong_types_name_key_and_type() {
    let f = open(&sample().build()).unwrap();
    let e = format!("{:#}", f.u32("general.architecture").unwrap_err());
    assert!(e.contains("general.architecture") && e.contains("text"), "{e}");
    assert!(f.string("llama.block_count").is_err());
    assert!(f.strings("scores").is_err());
    let e = format!("{:#}", f.u32s("tokenizer.ggml.token_type").unwrap_err());
    assert!(e.contains("out of range"), "{e}");
}

#[test]
fn kinds_that_cannot_be_converted_are_named_with_a_remedy() {
    let f = open(&sample().build()).unwrap();
    let e = format!("{:#}", f.to_f32("k").unwrap_err());
    assert!(e.contains("tensor k ") && e.contains("Q4_K") && e.contains("Hugging Face folder"), "{e}");
    let e = refusal(&GgufBuilder::new().tensor("x", GgmlType(77), &[1], &[0]).build());
    assert!(e.contains("element type 77"), "{e}");
}

#[test]
fn not_a_gguf_file() {
    assert!(refusal(b"PK\x03\x04 and so on").contains("not a GGUF file"));
    assert!(refusal(b"").contains("empty"));
    let mut bytes = sample().build();
    bytes[4..8].copy_from_slice(&3u32.to_be_bytes());
    assert!(refusal(&bytes).contains("big-endian"));
    bytes[4..8].copy_from_slice(&1u32.to_le_bytes());
    assert!(refusal(&bytes).contains("version 1"));
}

#[test]
fn truncation_says_how_much_is_missing() {
    let bytes = sample().build();
    let e = refusal(&bytes[..bytes.len() - 10]);
    assert!(e.contains("tensor k ") && e.contains("10 B missing"), "{e}");
    assert!(refusal(&bytes[..100]).contains("truncated or damaged"));
}

#[test]
fn absurd_counts_allocate_nothing() {
    let mut bytes = sample().build();
    bytes[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
    assert!(refusal(&bytes).contains("more than its"));
    let mut bytes = GgufBuilder::new().strings::<&str>("x", &[]).build();
    let at = 24 + 8 + 1 + 4 + 4;
    bytes[at..at + 8].copy_from_slice(&u64::MAX.to_le_bytes());
    assert!(refusal(&bytes).contains("metadata x"));
}

#[test]
fn overlaps_and_bad_alignment_are_refused() {
    let build = |second: u64| {
        let mut b = GgufBuilder::new().tensor_f32("a", &[16], &[0.0; 16]).tensor_f32("b", &[16], &[0.0; 16]).build();
        // The second entry's offset: header, first entry of 33 bytes, then name, dimensions and type of the second.
        let at = 24 + 33 + 25;
        assert_eq!(b[at..at + 8], 64u64.to_le_bytes());
        b[at..at + 8].copy_from_slice(&second.to_le_bytes());
        b
    };
    assert!(open(&build(64)).is_ok());
    assert!(refusal(&build(32)).contains("a and b overlap"));
    assert!(refusal(&build(65)).contains("not a multiple of 32"));
    assert!(refusal(&build(u64::MAX - 31)).contains("beyond any possible file"));
    let bad = GgufBuilder::new().u32("general.alignment", 7).build();
    assert!(refusal(&bad).contains("general.alignment"));
}

proptest! {
    #[test]
    fn damaged_files_never_panic(at in 0usize..2000, byte: u8, cut in 0usize..2000) {
        let mut bytes = sample().build();
        let n = bytes.len();
        bytes[at % n] = byte;
        bytes.truncate(n - cut % n);
        if let Ok(f) = open(&bytes) {
            for t in f.tensors() {
                let _ = f.to_f32(&t.name);
            }
            for key in f.keys() {
                let _ = (f.strings(key), f.u32s(key), f.f32s(key), f.i32s(key), f.u32(key), f.f64(key));
            }
        }
    }
}
