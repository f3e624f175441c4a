//! Masks, labels and end tokens on small templates and a tokenizer of bytes.

use serde_json::{Value, json};

use super::*;
use crate::data::chat_template::SpecialTokens;
use crate::data::dataset::Content;
use crate::data::testing::{EOS, IM_END, byte_tokenizer, record};

const CHATML: &str = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
const MARKED: &str = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}\
    {% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}";
/// Writes thoughts only in the last turn, as Qwen3 does.
const THINKS_LAST: &str = "{% set last = namespace(user=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}\
    {% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and loop.index0 > last.user %}{{ '<think></think>' }}{% endif %}\
    {{ m.content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// Ends the whole text with an end token unless the assistant goes on, as Phi-3 does.
const ENDS_TEXT: &str = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}";
/// Opens the thoughts in the generation prompt, as DeepSeek-R1 does.
const PROMPTS_THOUGHTS: &str = "{% for m in messages %}{{ m.role if m.role != 'assistant' else '<|im_start|>' }}{{ m.content + '<|im_end|>' }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_start|>A<think>\n' }}{% endif %}";

fn builder(template: Option<&str>, train_on: TrainOn) -> ExampleBuilder {
    let template = template.map(|source| ChatTemplate::new(source, SpecialTokens::default()).unwrap());
    ExampleBuilder::new(byte_tokenizer(), template, train_on).unwrap()
}

fn pair(prompt: &str, completion: &str) -> Content {
    Content::Pair { system: None, prompt: prompt.into(), completion: completion.into(), separator: "\n" }
}

fn conversation(turns: &[(&str, &str)]) -> Content {
    let messages: Vec<Value> = turns.iter().map(|(role, content)| json!({"role": role, "content": content})).collect();
    Content::Conversation { messages, tools: None }
}

/// The trained text, each run of trained tokens in brackets.
fn trained(builder: &ExampleBuilder, content: &Content) -> String {
    let views = builder.explain(&record(content.clone())).unwrap();
    let mut out = String::new();
    let mut before = false;
    for view in &views {
        out.push_str(match (before, view.trained) {
            (false, true) => "[",
            (true, false) => "]",
            _ => "",
        });
        if view.trained {
            out.push_str(&view.text);
        }
        before = view.trained;
    }
    if before { out + "]" } else { out }
}

const TWO_TURNS: [(&str, &str); 5] =
    [("system", "S"), ("user", "U1"), ("assistant", "A1 é"), ("user", "U2"), ("assistant", "A2")];

#[test]
fn assistant_turns_train_with_their_end_token() {
    for template in [CHATML, MARKED, THINKS_LAST] {
        let all = trained(&builder(Some(template), TrainOn::Assistant), &conversation(&TWO_TURNS));
        let thoughts = if template == THINKS_LAST { "<think></think>" } else { "" };
        assert_eq!(all, format!("[A1 é<|im_end|>][{thoughts}A2<|im_end|>]"), "{template}");
        let last = trained(&builder(Some(template), TrainOn::LastTurn), &conversation(&TWO_TURNS));
        assert_eq!(last, format!("[{thoughts}A2<|im_end|>]"), "{template}");
    }
}

#[test]
fn templates_that_treat_the_last_turn_in_their_own_way() {
    let all = trained(&builder(Some(ENDS_TEXT), TrainOn::Assistant), &conversation(&TWO_TURNS));
    assert_eq!(all, "[A1 é<|im_end|>][A2<|im_end|>\n<|endoftext|>]");
    let last = trained(&builder(Some(ENDS_TEXT), TrainOn::LastTurn), &conversation(&TWO_TURNS[..4]));
    assert_eq!(last, "[A1 é<|im_end|>]");
    let all = trained(&builder(Some(PROMPTS_THOUGHTS), TrainOn::Assistant), &conversation(&TWO_TURNS));
    assert_eq!(all, "[A1 é<|im_end|>][A2<|im_end|>]");
}

#[test]
fn everything_trains_everything() {
    let all = trained(&builder(Some(CHATML), TrainOn::Everything), &conversation(&[("user", "U"), ("assistant", "A")]));
    assert_eq!(all, "[<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n]");
}

#[test]
fn labels_are_the_next_trained_token() {
    let example = builder(Some(CHATML), TrainOn::Assistant).build(&record(pair("U", "AB"))).unwrap();
    let end = example.input_ids.iter().rposition(|id| *id == IM_END).unwrap();
    let bytes = |c: char| c as i32;
    assert_eq!(example.input_ids[end - 3..], [bytes('\n'), bytes('A'), bytes('B'), IM_END, bytes('\n')]);
    assert_eq!(example.labels[end - 3..], [bytes('A'), bytes('B'), IM_END, -100, -100]);
    assert!(example.labels[..end - 3].iter().all(|label| *label == IGNORE_INDEX));
    assert_eq!(example.labels.len(), example.input_ids.len());
}

#[test]
fn an_end_token_is_appended_where_the_template_writes_none() {
    let bare = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}";
    let content = conversation(&[("user", "U"), ("assistant", "A")]);
    let builder_ = builder(Some(bare), TrainOn::Assistant);
    assert_eq!(trained(&builder_, &content), "[A\n<|endoftext|>]");
    let views = builder_.explain(&record(content)).unwrap();
    let last = views.last().unwrap();
    assert!((last.id, last.is_end, last.is_added) == (EOS, true, true));
    // The template's own end token is enough.
    let example = builder(Some(CHATML), TrainOn::Assistant).build(&record(pair("U", "A"))).unwrap();
    assert!(!example.input_ids.contains(&EOS));
}

#[test]
fn without_a_template_pairs_and_texts_are_plain() {
    let plain = builder(None, TrainOn::Assistant);
    assert_eq!(trained(&plain, &pair("Q", "A")), "[A<|endoftext|>]");
    assert_eq!(trained(&builder(None, TrainOn::Everything), &pair("Q", "A")), "[Q\nA<|endoftext|>]");
    assert_eq!(trained(&plain, &Content::Text("T é".into())), "[T é<|endoftext|>]");
    assert_eq!(trained(&plain, &Content::Text("T<|endoftext|>".into())), "[T<|endoftext|>]");
    let ids = plain.build(&record(pair("Q", "A"))).unwrap().input_ids;
    assert_eq!(ids, [i32::from(b'Q'), i32::from(b'\n'), i32::from(b'A'), EOS]);
}

#[test]
fn records_that_cannot_train_are_refused_with_line_and_remedy() {
    let error = |builder: &ExampleBuilder, content: Content| builder.build(&record(content)).unwrap_err().to_string();
    let chat = builder(Some(CHATML), TrainOn::Assistant);
    let message = error(&chat, conversation(&[("user", "U")]));
    assert_eq!(message, "data.jsonl:7: there is no assistant turn to train on");
    let none = builder(None, TrainOn::Assistant);
    assert!(error(&none, conversation(&[("user", "U"), ("assistant", "A")])).contains("model.chat_template"));
    let system = Content::Pair { system: Some("S".into()), prompt: "Q".into(), completion: "A".into(), separator: "" };
    assert!(error(&none, system).contains("system message"));
    let strict = "{% if messages[0].role != 'user' %}{{ raise_exception('the user speaks first') }}{% endif %}";
    assert!(
        error(&builder(Some(strict), TrainOn::Assistant), conversation(&TWO_TURNS)).contains("the user speaks first")
    );
}

#[test]
fn a_mask_that_cannot_be_told_is_an_error() {
    let chat = |source: &str| builder(Some(source), TrainOn::Assistant).build(&record(conversation(&TWO_TURNS)));
    // The count of messages comes first, so no rendering is the beginning of another.
    let counted = format!("{{{{ messages | length }}}}{CHATML}");
    let message = chat(&counted).unwrap_err().reason;
    assert!(
        message.contains("message 3") && message.contains("generation") && message.contains("last_turn"),
        "{message}"
    );
    // A template whose generation prompt is not how it writes an assistant turn.
    let other = CHATML.replace("{{ '<|im_start|>assistant\n' }}", "{{ 'BOT:' }}");
    assert!(chat(&other).unwrap_err().reason.contains("generation prompt"));
    // Everything needs no mask.
    assert!(builder(Some(&counted), TrainOn::Everything).build(&record(conversation(&TWO_TURNS))).is_ok());
}

#[test]
fn previews_lose_no_character() {
    let content = pair("né 🙂 한국", "日本語 e\u{301}\n\t ok");
    let builder = builder(Some(CHATML), TrainOn::Assistant);
    let views = builder.explain(&record(content.clone())).unwrap();
    let text: String = views.iter().map(|view| view.text.as_str()).collect();
    assert_eq!(
        text,
        "<|im_start|>user\nné 🙂 한국<|im_end|>\n<|im_start|>assistant\n日本語 e\u{301}\n\t ok<|im_end|>\n"
    );
    let example = builder.build(&record(content)).unwrap();
    assert_eq!(views.iter().map(|view| view.id).collect::<Vec<_>>(), example.input_ids);
    for (t, label) in example.labels.iter().enumerate() {
        let expected = views.get(t + 1).filter(|next| next.trained).map_or(IGNORE_INDEX, |next| next.id);
        assert_eq!(*label, expected, "token {t}");
    }
}

#[test]
fn all_records_are_built_in_order_and_stop_is_heard() {
    let builder = builder(Some(CHATML), TrainOn::Assistant);
    let records: Vec<Record> = (0..500)
        .map(|i| record(if i % 100 == 99 { conversation(&[("user", "U")]) } else { pair("U", &format!("{i}")) }))
        .collect();
    let most = AtomicUsize::new(0);
    let progress = |done: usize| {
        most.fetch_max(done, Ordering::Relaxed);
    };
    let built = builder.build_all(&records, &progress, &AtomicBool::new(false)).unwrap();
    assert_eq!((built.examples.len(), built.rejected.len(), most.into_inner()), (495, 5, 500));
    assert_eq!(built.examples[0], builder.build(&records[0]).unwrap());
    assert_eq!(built.examples[494], builder.build(&records[498]).unwrap());
    assert!(builder.build_all(&records, &|_| (), &AtomicBool::new(true)).is_none());
}
