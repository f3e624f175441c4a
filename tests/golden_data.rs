//! Golden tests of the data floor: chat templates and token ids against the reference values.
#![allow(clippy::disallowed_methods, clippy::disallowed_macros)]

use std::path::{Path, PathBuf};

use serde_json::Value;
use tandem::data::chat_template::{ChatTemplate, SpecialTokens};
use tandem::data::dataset::{Content, Record};
use tandem::data::example::ExampleBuilder;
use tandem::data::options::TrainOn;
use tandem::data::tokenizer::Tokenizer;
use tandem::formats::safetensors::SafetensorsFile;

/// The folder of reference values: `TANDEM_GOLDEN`, or `tests/golden`.
fn golden() -> PathBuf {
    match std::env::var_os("TANDEM_GOLDEN").filter(|v| !v.is_empty()) {
        Some(folder) => PathBuf::from(folder),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden"),
    }
}

/// A reference file: from the golden folder, or, where that has none, from the repository's own.
fn golden_file(name: &str) -> PathBuf {
    let path = golden().join(name);
    if path.exists() { path } else { Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name) }
}

/// SmolLM2's tokenizer, from the starter model; fetched when it is not there.
fn smollm2() -> Tokenizer {
    let never = std::sync::atomic::AtomicBool::new(false);
    let path = tandem::session::starter::fetch_blocking(&mut |_, _, _| {}, &never).unwrap().unwrap();
    Tokenizer::open(&path).unwrap()
}

fn texts_and_reference() -> (Vec<String>, SafetensorsFile) {
    let file = SafetensorsFile::open(&golden_file("smollm2.safetensors")).unwrap();
    let texts = serde_json::from_str(&file.metadata()["texts"]).unwrap();
    (texts, file)
}

/// Characters before byte `at`: the references count characters.
fn chars(text: &str, at: usize) -> usize {
    text[..at].chars().count()
}

#[test]
fn golden_chat_templates() {
    let cases_file = golden_file("chat_templates/cases.jsonl");
    let folder = cases_file.parent().unwrap();
    let cases = std::fs::read_to_string(&cases_file).unwrap();
    let now = jiff::civil::date(2026, 7, 26).at(12, 0, 0, 0);
    let (mut failures, mut num_cases) = (Vec::new(), 0);
    for line in cases.lines().filter(|l| !l.trim().is_empty()) {
        let case: Value = serde_json::from_str(line).unwrap();
        num_cases += 1;
        let name = format!(
            "{} {} add_generation_prompt={}",
            case["template"], case["conversation"], case["add_generation_prompt"]
        );
        let text = |key: &str| case[key].as_str().map(String::from);
        let tokens = SpecialTokens {
            bos: text("bos_token"),
            eos: text("eos_token"),
            pad: Some("<pad>".into()),
            unk: text("unk_token"),
        };
        let source = std::fs::read_to_string(folder.join(case["template"].as_str().unwrap())).unwrap();
        let template = ChatTemplate::new(&source, tokens).map(|template| template.with_now(now));
        let tools = Some(&case["tools"]).filter(|tools| !tools.is_null());
        let messages = case["messages"].as_array().unwrap();
        let add_generation_prompt = case["add_generation_prompt"].as_bool().unwrap();
        let rendered = template.and_then(|template| template.render(messages, tools, add_generation_prompt));
        match (rendered, case["rendered"].as_str()) {
            (Err(_), None) => {}
            (Ok(rendered), None) => {
                failures.push(format!("{name}: the reference errs ({}), rendered {:?}", case["error"], rendered.text));
            }
            (Err(e), Some(_)) => failures.push(format!("{name}: {e:#}")),
            (Ok(rendered), Some(expected)) if rendered.text != expected => {
                failures.push(format!("{name}:\n  expected {expected:?}\n  rendered {:?}", rendered.text));
            }
            (Ok(rendered), Some(_)) => {
                let spans: Vec<Value> = rendered
                    .assistant_spans
                    .iter()
                    .map(|s| vec![chars(&rendered.text, s.start), chars(&rendered.text, s.end)].into())
                    .collect();
                let expected = case["assistant_spans"].as_array().cloned().unwrap_or_default();
                if spans != expected {
                    failures.push(format!("{name}: spans {spans:?}, expected {expected:?}"));
                }
            }
        }
    }
    assert!(num_cases > 0, "no cases in {}", folder.display());
    assert!(failures.is_empty(), "{} of {num_cases} cases differ:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn golden_smollm2_token_ids() {
    let tokenizer = smollm2();
    let (texts, reference) = texts_and_reference();
    let ids: Vec<i32> = texts.iter().flat_map(|text| tokenizer.encode(text, false).unwrap()).collect();
    assert_eq!(ids, reference.to_i32("input_ids").unwrap());
    let cases = std::fs::read_to_string(golden_file("smollm2_tokens.json")).unwrap();
    let cases: Vec<Value> = serde_json::from_str(&cases).unwrap();
    assert!(!cases.is_empty());
    for case in cases {
        let text = case["text"].as_str().unwrap();
        let expected: Vec<i32> = serde_json::from_value(case["ids"].clone()).unwrap();
        let encoding = tokenizer.encode_with_offsets(text, false).unwrap();
        assert_eq!(encoding.ids, expected, "{text:?}");
        assert_eq!(tokenizer.decode(&expected, false).unwrap(), text);
        // The offsets cover the text without holes, character by character.
        let mut end = 0;
        for offset in &encoding.offsets {
            assert!(offset.start <= end && offset.end >= end, "{text:?}: {:?}", encoding.offsets);
            end = offset.end;
        }
        assert_eq!(end, text.len());
    }
}

/// The labels of the reference: prompt and answer as one ChatML text, the answer and its end token trained.
#[test]
fn golden_smollm2_labels() {
    let chatml = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}\
        {% if not loop.last %}{{ '\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '\n<|im_start|>assistant\n' }}{% endif %}";
    let template = ChatTemplate::new(chatml, SpecialTokens::default()).unwrap();
    let builder = ExampleBuilder::new(smollm2(), Some(template), TrainOn::Assistant).unwrap();
    let (texts, reference) = texts_and_reference();
    let mut labels = Vec::new();
    for text in &texts {
        let (user, assistant) = text.split_once("<|im_end|>\n<|im_start|>assistant\n").unwrap();
        let prompt = user.strip_prefix("<|im_start|>user\n").unwrap().to_owned();
        let completion = assistant.strip_suffix("<|im_end|>").unwrap().to_owned();
        let content = Content::Pair { system: None, prompt, completion, separator: "" };
        let record = Record { path: Path::new("smollm2.safetensors").into(), line: 1, content };
        labels.extend(builder.build(&record).unwrap().labels);
    }
    assert_eq!(labels, reference.to_i32("labels").unwrap());
}
