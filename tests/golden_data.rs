//! Golden tests of the data floor: chat templates and token ids against the reference values.
#![allow(clippy::disallowed_methods, clippy::disallowed_macros)]

use std::path::PathBuf;

use serde_json::Value;
use tandem::data::chat_template::{ChatTemplate, SpecialTokens};

/// The folder of reference values: `TANDEM_GOLDEN`, or `tests/golden`.
fn golden() -> PathBuf {
    std::env::var_os("TANDEM_GOLDEN")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden"), PathBuf::from)
}

/// Characters before byte `at`: the references count characters.
fn chars(text: &str, at: usize) -> usize {
    text[..at].chars().count()
}

#[test]
fn golden_chat_templates() {
    let folder = golden().join("chat_templates");
    let cases = std::fs::read_to_string(folder.join("cases.jsonl")).unwrap();
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
        let template = ChatTemplate::new(&source, tokens).unwrap().with_now(now);
        let tools = Some(&case["tools"]).filter(|tools| !tools.is_null());
        let rendered = template.render(
            case["messages"].as_array().unwrap(),
            tools,
            case["add_generation_prompt"].as_bool().unwrap(),
        );
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
