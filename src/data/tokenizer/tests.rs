//! Small tokenizers written to disk in both formats.

use serde_json::json;

use super::*;
use crate::formats::gguf_write::GgufBuilder;

/// Bytes as the letters of byte-level BPE: enough of them for the texts below.
const LETTERS: [&str; 12] = ["a", "b", "c", "1", "2", "3", "Ġ", "Ċ", "Ã", "©", "!", "'"];
const CONTROL: i32 = 3;

fn vocabulary() -> (Vec<&'static str>, Vec<i32>) {
    let mut tokens = vec!["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>"];
    tokens.extend(LETTERS);
    tokens.extend(["ab", "abc", "12", "Ã©", "Ġab", "<tool>"]);
    let kinds = (0..tokens.len()).map(|i| if i < 4 { CONTROL } else { 1 }).collect::<Vec<_>>();
    let mut kinds = kinds;
    *kinds.last_mut().unwrap() = 4;
    (tokens, kinds)
}

fn gguf(pre: &str) -> GgufBuilder {
    let (tokens, kinds) = vocabulary();
    GgufBuilder::new()
        .string("tokenizer.ggml.model", "gpt2")
        .string("tokenizer.ggml.pre", pre)
        .strings("tokenizer.ggml.tokens", &tokens)
        .strings("tokenizer.ggml.merges", &["a b", "ab c", "1 2", "Ã ©", "Ġ ab"])
        .i32s("tokenizer.ggml.token_type", &kinds)
        .u32("tokenizer.ggml.bos_token_id", 1)
        .u32("tokenizer.ggml.eos_token_id", 0)
        .string("tokenizer.chat_template", "{{ messages }}")
}

fn open_gguf(writer: &GgufBuilder) -> Result<Tokenizer> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, writer.build()).unwrap();
    Tokenizer::open(&path)
}

fn tokens(tokenizer: &Tokenizer, text: &str) -> Vec<String> {
    tokenizer.encode(text, false).unwrap().into_iter().map(|id| tokenizer.token(id).unwrap()).collect()
}

#[test]
fn gguf_tokenizers_are_rebuilt() {
    let tokenizer = open_gguf(&gguf("gpt-2")).unwrap();
    assert_eq!(tokens(&tokenizer, "abc ab12é"), ["abc", "Ġab", "12", "Ã©"]);
    assert_eq!(tokens(&tokenizer, "ab<|im_end|>\n<tool>!"), ["ab", "<|im_end|>", "Ċ", "<tool>", "!"]);
    assert_eq!(
        tokenizer.decode(&tokenizer.encode("abc é<|im_end|>", false).unwrap(), false).unwrap(),
        "abc é<|im_end|>"
    );
    assert_eq!(tokenizer.decode(&tokenizer.encode("abc é<|im_end|>", false).unwrap(), true).unwrap(), "abc é");
    // The end of a turn counts as an end even though the file only names the end of text.
    assert_eq!((tokenizer.eos_ids(), tokenizer.bos_id()), (vec![0, 2], Some(1)));
    assert_eq!(tokenizer.vocab_size(), 22);
    assert_eq!(tokenizer.chat_template_source(), Some("{{ messages }}"));
    assert!(
        tokenizer.is_special(2) && !tokenizer.is_special(21) && !tokenizer.is_special(4) && !tokenizer.is_special(-1)
    );
}

#[test]
fn pre_tokenizers_differ_in_digits() {
    assert_eq!(tokens(&open_gguf(&gguf("smollm")).unwrap(), "12 ab"), ["1", "2", "Ġab"]);
    assert_eq!(tokens(&open_gguf(&gguf("qwen2")).unwrap(), "12 ab"), ["1", "2", "Ġab"]);
    assert_eq!(tokens(&open_gguf(&gguf("llama-bpe")).unwrap(), "12 ab"), ["12", "Ġab"]);
    // Composed first: e with an accent in two code points is the same text.
    assert_eq!(tokens(&open_gguf(&gguf("qwen2")).unwrap(), "e\u{301}"), ["Ã©"]);
    let error = format!("{:#}", open_gguf(&gguf("new-thing")).unwrap_err());
    assert!(error.contains("\"new-thing\"") && error.contains("model.gguf") && error.contains("smollm"), "{error}");
}

#[test]
fn every_known_pre_tokenizer_builds() {
    for name in ["default", "gpt-2", "smollm", "llama-bpe", "dbrx", "qwen2", "stablelm2", "tekken", "gpt-4o"] {
        let tokenizer = open_gguf(&gguf(name)).unwrap();
        let text = "abc ab\n\n 123 é!' a";
        assert_eq!(tokenizer.decode(&tokenizer.encode(text, false).unwrap(), false).unwrap(), text, "{name}");
    }
}

#[test]
fn start_and_end_tokens_are_added_when_the_file_says_so() {
    let tokenizer = open_gguf(&gguf("llama-bpe")).unwrap();
    assert_eq!(tokenizer.encode("ab", true).unwrap(), [1, 16]);
    assert_eq!(tokenizer.encode("<|im_start|>ab", true).unwrap(), [1, 16]);
    assert_eq!(tokenizer.encode("ab", false).unwrap(), [16]);
    let both = gguf("llama-bpe").bool("tokenizer.ggml.add_bos_token", false).bool("tokenizer.ggml.add_eos_token", true);
    let encoding = open_gguf(&both).unwrap().encode_with_offsets("é", true).unwrap();
    assert_eq!((encoding.ids, encoding.offsets), (vec![19, 0], vec![0..2, 2..2]));
}

#[test]
fn padding_never_ends_a_text() {
    assert_eq!(open_gguf(&gguf("gpt-2").u32("tokenizer.ggml.padding_token_id", 3)).unwrap().pad_id(), 3);
    // Padding with the end token, as many models are configured, becomes the unknown or the start token.
    let pad_is_eos = gguf("gpt-2").u32("tokenizer.ggml.padding_token_id", 0);
    assert_eq!(open_gguf(&pad_is_eos).unwrap().pad_id(), 1);
    assert_eq!(open_gguf(&pad_is_eos.u32("tokenizer.ggml.unknown_token_id", 3)).unwrap().pad_id(), 3);
}

#[test]
fn broken_gguf_tokenizers_are_named() {
    let error = |writer: &GgufBuilder| format!("{:#}", open_gguf(writer).unwrap_err());
    let base = || GgufBuilder::new().string("tokenizer.ggml.model", "gpt2").string("tokenizer.ggml.pre", "gpt-2");
    assert!(error(&GgufBuilder::new()).contains("no tokenizer.ggml.model"));
    assert!(error(&GgufBuilder::new().string("tokenizer.ggml.model", "t5")).contains("tokenizer.ggml.tokens"));
    let other = GgufBuilder::new().string("tokenizer.ggml.model", "t5").strings("tokenizer.ggml.tokens", &["a"]);
    assert!(error(&other).contains("\"t5\", which is not supported"));
    assert!(error(&base()).contains("tokenizer.ggml.tokens is missing"));
    let with = base().strings("tokenizer.ggml.tokens", &["a", "b"]);
    assert!(error(&with.clone().strings("tokenizer.ggml.merges", &["a b"])).contains("needs the token \"ab\""));
    assert!(error(&with.clone().strings("tokenizer.ggml.merges", &["ab"])).contains("two tokens"));
    let none: [&str; 0] = [];
    let with = with.strings("tokenizer.ggml.merges", &none);
    assert!(error(&with.clone().i32s("tokenizer.ggml.token_type", &[1])).contains("1 token types for 2 tokens"));
    assert!(error(&with.u32("tokenizer.ggml.eos_token_id", 9)).contains("outside the vocabulary"));
}

/// A Hugging Face folder with the same tokenizer.
fn write_folder(folder: &Path, files: &[(&str, serde_json::Value)]) {
    std::fs::write(folder.join("tokenizer.json"), open_gguf(&gguf("gpt-2")).unwrap().to_json().unwrap()).unwrap();
    for (name, value) in files {
        std::fs::write(folder.join(name), value.to_string()).unwrap();
    }
}

#[test]
fn folders_are_read_with_everything_around() {
    let folder = tempfile::tempdir().unwrap();
    let config = json!({"eos_token": {"content": "<|im_end|>"}, "bos_token": null, "chat_template": "from config"});
    write_folder(
        folder.path(),
        &[
            ("tokenizer_config.json", config),
            ("special_tokens_map.json", json!({"pad_token": "<pad>", "bos_token": "<|im_start|>"})),
            ("generation_config.json", json!({"eos_token_id": [2, 0]})),
        ],
    );
    let tokenizer = Tokenizer::open(folder.path()).unwrap();
    assert_eq!(tokens(&tokenizer, "abc ab<|im_end|>"), ["abc", "Ġab", "<|im_end|>"]);
    assert_eq!((tokenizer.eos_ids(), tokenizer.bos_id(), tokenizer.pad_id()), (vec![2, 0], Some(1), 3));
    assert_eq!(tokenizer.chat_template_source(), Some("from config"));
    let tokens = tokenizer.special_tokens();
    assert_eq!((tokens.eos.as_deref(), tokens.unk), (Some("<|im_end|>"), None));
    std::fs::write(folder.path().join("chat_template.jinja"), "from file").unwrap();
    assert_eq!(Tokenizer::open(folder.path()).unwrap().chat_template_source(), Some("from file"));
}

#[test]
fn named_chat_templates_need_a_default() {
    let folder = tempfile::tempdir().unwrap();
    let named = |names: &[&str]| {
        let list: Vec<_> = names.iter().map(|n| json!({"name": n, "template": format!("t-{n}")})).collect();
        write_folder(folder.path(), &[("tokenizer_config.json", json!({"chat_template": list}))]);
        Tokenizer::open(folder.path()).map(|t| t.chat_template_source().map(String::from))
    };
    assert_eq!(named(&["tool_use", "default"]).unwrap().as_deref(), Some("t-default"));
    assert_eq!(named(&["only"]).unwrap().as_deref(), Some("t-only"));
    assert!(named(&["a", "b"]).unwrap_err().to_string().contains("named a, b"));
}

#[test]
fn broken_folders_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let error = || format!("{:#}", Tokenizer::open(folder.path()).unwrap_err());
    assert!(error().contains("no tokenizer.json"));
    write_folder(folder.path(), &[("tokenizer_config.json", json!({"eos_token": "<nowhere>"}))]);
    assert!(error().contains("<nowhere>"));
    std::fs::write(folder.path().join("tokenizer_config.json"), "{").unwrap();
    assert!(error().contains("tokenizer_config.json is not valid JSON"));
    std::fs::write(folder.path().join("tokenizer.json"), "{}").unwrap();
    assert!(error().contains("tokenizer.json"));
    let model = json!({"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": ["a b"]});
    std::fs::write(folder.path().join("tokenizer.json"), json!({"version": "1.0", "model": model}).to_string())
        .unwrap();
    assert!(error().contains("is damaged"), "{}", error());
    assert!(Tokenizer::open(&folder.path().join("nothing")).unwrap_err().to_string().contains("does not exist"));
    assert!(Tokenizer::open(&folder.path().join("tokenizer.json")).unwrap_err().to_string().contains("neither"));
}

#[test]
fn tokens_that_share_a_character_have_its_whole_range() {
    let (tokens, kinds) = vocabulary();
    let split = GgufBuilder::new()
        .string("tokenizer.ggml.model", "gpt2")
        .string("tokenizer.ggml.pre", "gpt-2")
        .strings("tokenizer.ggml.tokens", &tokens)
        .strings("tokenizer.ggml.merges", &["a b"])
        .i32s("tokenizer.ggml.token_type", &kinds);
    let encoding = open_gguf(&split).unwrap().encode_with_offsets("abé!", false).unwrap();
    assert_eq!(encoding.offsets, [0..2, 2..4, 2..4, 4..5]);
}

#[test]
fn blanks_keep_their_place_in_the_text() {
    let folder = tempfile::tempdir().unwrap();
    let mut file: serde_json::Value =
        serde_json::from_str(&crate::data::testing::byte_tokenizer().to_json().unwrap()).unwrap();
    let trimming = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    for post_processor in [trimming.clone(), json!({"type": "Sequence", "processors": [trimming]})] {
        file["post_processor"] = post_processor;
        std::fs::write(folder.path().join("tokenizer.json"), file.to_string()).unwrap();
        std::fs::write(folder.path().join("tokenizer_config.json"), "{\"eos_token\": \"<|im_end|>\"}").unwrap();
        let tokenizer = Tokenizer::open(folder.path()).unwrap();
        assert_eq!(tokenizer.encode_with_offsets("a b", false).unwrap().offsets, [0..1, 1..2, 2..3]);
    }
}

/// `<unk>`, start, end, the 256 bytes, then pieces.
fn sentencepiece() -> GgufBuilder {
    let pieces: [(&str, f32); 12] = [
        ("▁", -9.0),
        ("a", -10.0),
        ("b", -11.0),
        ("c", -12.0),
        ("▁a", -3.0),
        ("ab", -1.0),
        ("bc", -2.0),
        ("▁ab", -4.0),
        ("abc", -5.0),
        ("▁▁", -6.0),
        ("é", -13.0),
        ("\n", -14.0),
    ];
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(String::from).to_vec();
    tokens.extend((0..256).map(|b| format!("<0x{b:02X}>")));
    tokens.extend(pieces.map(|(piece, _)| piece.to_owned()));
    let mut scores = vec![0.0; 259];
    scores.extend(pieces.map(|(_, score)| score));
    let mut kinds = vec![2, 3, 3];
    kinds.extend([6; 256]);
    kinds.extend([1; 12]);
    GgufBuilder::new()
        .string("tokenizer.ggml.model", "llama")
        .strings("tokenizer.ggml.tokens", &tokens)
        .f32s("tokenizer.ggml.scores", &scores)
        .i32s("tokenizer.ggml.token_type", &kinds)
        .u32("tokenizer.ggml.bos_token_id", 1)
        .u32("tokenizer.ggml.eos_token_id", 2)
}

#[test]
fn sentencepiece_merges_the_best_score_first() {
    let tokenizer = open_gguf(&sentencepiece()).unwrap();
    // `ab` (−1) beats `▁a` (−3); then `▁ab` (−4) beats `abc` (−5).
    assert_eq!(tokens(&tokenizer, "abc"), ["▁ab", "c"]);
    assert_eq!(tokens(&tokenizer, "bc a"), ["▁", "bc", "▁a"]);
    assert_eq!(tokens(&tokenizer, "a</s>b"), ["▁a", "</s>", "▁", "b"]);
    assert_eq!(tokens(&tokenizer, "é한"), ["▁", "é", "<0xED>", "<0x95>", "<0x9C>"]);
    assert_eq!(tokenizer.encode("a", true).unwrap(), [1, 263]);
    let text = "abc  é한\nb";
    let encoding = tokenizer.encode_with_offsets(text, false).unwrap();
    assert_eq!(tokenizer.decode(&encoding.ids, false).unwrap(), text);
    assert_eq!(encoding.offsets.last().unwrap().end, text.len());
    let no_prefix = open_gguf(&sentencepiece().bool("tokenizer.ggml.add_space_prefix", false)).unwrap();
    assert_eq!(tokens(&no_prefix, "abc"), ["abc"]);
    assert_eq!(no_prefix.decode(&no_prefix.encode(" abc", false).unwrap(), false).unwrap(), " abc");
}

#[test]
fn a_message_of_gpt_oss_ends_no_turn() {
    let (mut tokens, mut kinds) = vocabulary();
    let first = tokens.len() as i32;
    tokens.extend(["<|return|>", "<|end|>", "<|call|>"]);
    kinds.extend([CONTROL; 3]);
    let file = |tokens: &[&str], kinds: &[i32]| {
        let builder = GgufBuilder::new().string("tokenizer.ggml.model", "gpt2").string("tokenizer.ggml.pre", "gpt-4o");
        let builder = builder.strings("tokenizer.ggml.tokens", tokens).i32s("tokenizer.ggml.token_type", kinds);
        builder.strings::<&str>("tokenizer.ggml.merges", &[]).u32("tokenizer.ggml.eos_token_id", first.cast_unsigned())
    };
    let ends = |tokens: &[&str], kinds: &[i32]| open_gguf(&file(tokens, kinds)).unwrap().eos_ids().to_vec();
    let all = ends(&tokens, &kinds);
    assert!(all.contains(&first) && all.contains(&(first + 2)) && !all.contains(&(first + 1)), "{all:?}");
    // Phi's files have no calls: there it ends the turn.
    let last = tokens.len() - 1;
    assert!(ends(&tokens[..last], &kinds[..last]).contains(&(first + 1)));
}
