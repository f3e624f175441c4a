//! Files as they come: layouts, encodings, bad rows, and the words of the errors.

use super::*;

fn open_with(name: &str, bytes: &[u8], options: &DatasetOptions) -> Result<Dataset> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    std::fs::write(&path, bytes).unwrap();
    Dataset::open(&path, options)
}

fn open(text: &str) -> Dataset {
    open_with("rows.jsonl", text.as_bytes(), &DatasetOptions::default()).unwrap()
}

fn error(name: &str, bytes: &[u8], options: &DatasetOptions) -> String {
    format!("{:#}", open_with(name, bytes, options).unwrap_err())
}

fn mapping(prompt: &str, completion: &str) -> DatasetOptions {
    DatasetOptions {
        layout: LayoutChoice::Mapping,
        prompt: Some(prompt.into()),
        completion: Some(completion.into()),
        ..DatasetOptions::default()
    }
}

fn turns(content: &Content) -> Vec<(String, String)> {
    match content {
        Content::Conversation { messages, .. } => messages
            .iter()
            .map(|m| (m["role"].as_str().unwrap().to_owned(), m["content"].as_str().unwrap_or("").to_owned()))
            .collect(),
        Content::Pair { prompt, completion, .. } => {
            vec![("user".into(), prompt.clone()), ("assistant".into(), completion.clone())]
        }
        Content::Text(text) => vec![("text".into(), text.clone())],
    }
}

fn owned(turns: &[(&str, &str)]) -> Vec<(String, String)> {
    turns.iter().map(|(r, c)| (r.to_string(), c.to_string())).collect()
}

#[test]
fn every_layout_is_found_from_its_columns() {
    let question_answer = &owned(&[("user", "Q"), ("assistant", "A")]);
    for (row, layout, expected) in [
        (
            r#"{"messages":[{"role":"user","content":"Q"},{"role":"assistant","content":"A"}]}"#,
            LayoutChoice::Messages,
            question_answer,
        ),
        (
            r#"{"conversations":[{"from":"human","value":"Q"},{"from":"gpt","value":"A"}]}"#,
            LayoutChoice::Messages,
            question_answer,
        ),
        (r#"{"instruction":"Q","input":"","output":"A"}"#, LayoutChoice::Alpaca, question_answer),
        (
            r#"{"instruction":"Q","input":"more","output":"A"}"#,
            LayoutChoice::Alpaca,
            &owned(&[("user", "Q\n\nmore"), ("assistant", "A")]),
        ),
        (r#"{"prompt":"Q","completion":"A"}"#, LayoutChoice::PromptCompletion, question_answer),
        (r#"{"question":"Q","answer":"A","text":"both"}"#, LayoutChoice::QuestionAnswer, question_answer),
        (r#"{"text":"T","id":3}"#, LayoutChoice::Text, &owned(&[("text", "T")])),
    ] {
        let dataset = open(row);
        assert_eq!(dataset.layout, layout, "{row}");
        assert_eq!(&turns(&dataset.records[0].content), expected, "{row}");
    }
}

#[test]
fn the_layout_can_be_overridden() {
    let options = DatasetOptions { layout: LayoutChoice::Text, ..DatasetOptions::default() };
    let dataset = open_with("a.jsonl", br#"{"question":"Q","answer":"A","text":"both"}"#, &options).unwrap();
    assert_eq!(dataset.records[0].content, Content::Text("both".into()));
}

#[test]
fn bad_rows_are_counted_with_line_and_reason() {
    let dataset = open(concat!(
        "{\"prompt\":\"a\",\"completion\":\"b\"}\r\n",
        "\r\n",
        "{\"prompt\":\"a\",\"completion\":\r\n",
        "{\"prompt\":\"a\"}\r\n",
        "[1]\r\n",
        "{\"prompt\":\"a\",\"completion\":\"  \"}\r\n",
        "{\"prompt\":7,\"completion\":\"b\"}\r\n",
        "{\"prompt\":\"c\",\"completion\":\"d\"}",
    ));
    assert_eq!(dataset.records.iter().map(|r| r.line).collect::<Vec<_>>(), [1, 8]);
    let rejected: Vec<(usize, &str)> = dataset.rejected.iter().map(|b| (b.line, b.reason.as_str())).collect();
    assert_eq!(rejected.iter().map(|(l, _)| *l).collect::<Vec<_>>(), [3, 4, 5, 6, 7]);
    for ((_, reason), part) in
        rejected.iter().zip(["not valid JSON at column", "`completion` is missing", "object", "empty", "must be text"])
    {
        assert!(reason.contains(part), "{reason}");
    }
    assert!(dataset.rejected[0].to_string().contains("rows.jsonl:3: "));
}

#[test]
fn encodings_are_tolerated_or_named() {
    let row = "{\"text\":\"né 한국어 🙂\"}";
    let with_mark = [b"\xEF\xBB\xBF", row.as_bytes()].concat();
    let dataset = open_with("a.jsonl", &with_mark, &DatasetOptions::default()).unwrap();
    assert_eq!(dataset.records[0].content, Content::Text("né 한국어 🙂".into()));
    let utf16: Vec<u8> = row.encode_utf16().flat_map(u16::to_le_bytes).collect();
    let marked = [b"\xFF\xFE".as_slice(), &utf16].concat();
    let options = DatasetOptions::default();
    assert!(error("a.jsonl", &marked, &options).contains("UTF-16"));
    assert!(
        error(
            "a.jsonl",
            "{\"text\":\"plain\"}".encode_utf16().flat_map(u16::to_be_bytes).collect::<Vec<_>>().as_slice(),
            &options
        )
        .contains("UTF-16")
    );
    let latin1 = b"{\"text\":\"a\"}\n{\"text\":\"caf\xE9\"}";
    let message = error("a.jsonl", latin1, &options);
    assert!(message.contains("a.jsonl:2: byte 0xe9"), "{message}");
}

#[test]
fn no_usable_row_lists_what_was_found_and_looked_for() {
    let message = error("a.jsonl", br#"{"headword":"x","entry":"y"}"#, &DatasetOptions::default());
    for part in ["`headword`, `entry`", "`messages` or `conversations`", "`instruction` and `output`", "{entry}"] {
        assert!(message.contains(part), "{message}");
    }
    let message = error("a.jsonl", b"{\"prompt\":\"\",\"completion\":\"y\"}\n{", &DatasetOptions::default());
    assert!(message.contains("line 1: the prompt is empty") && message.contains("`prompt`"), "{message}");
    assert!(error("a.jsonl", b"\n\n", &DatasetOptions::default()).contains("empty"));
    assert!(error("a.jsonl", b"nonsense", &DatasetOptions::default()).contains("line 1: not valid JSON"));
}

#[test]
fn a_mapping_fills_columns() {
    let rows = b"{\"headword\":\"ACE\",\"entry\":\"One {card}.\",\"n\":3}\n{\"headword\":null,\"entry\":\"x\",\"n\":1}";
    let options = mapping("Define \"{headword}\" {{{n}}} in the manner of Ambrose Bierce.", "{entry}");
    let dataset = open_with("a.jsonl", rows, &options).unwrap();
    assert_eq!(dataset.layout, LayoutChoice::Mapping);
    assert_eq!(
        turns(&dataset.records[0].content),
        owned(&[("user", "Define \"ACE\" {3} in the manner of Ambrose Bierce."), ("assistant", "One {card}.")])
    );
    assert_eq!(dataset.rejected[0].reason, "column `headword` is null");
    // `auto` with templates is a mapping too.
    let auto = DatasetOptions { layout: LayoutChoice::Auto, ..options };
    assert_eq!(open_with("a.jsonl", rows, &auto).unwrap().layout, LayoutChoice::Mapping);
}

#[test]
fn mistakes_in_a_mapping_are_named() {
    let row = br#"{"headword":"x","entry":"y"}"#;
    let message = error("a.jsonl", row, &mapping("{word}", "{entry}"));
    assert!(message.contains("data.prompt names the column `word`") && message.contains("`headword`, `entry`"));
    assert!(error("a.jsonl", row, &mapping("{headword", "{entry}")).contains("never closed"));
    assert!(error("a.jsonl", row, &mapping("headword}", "{entry}")).contains("without `{`"));
    assert!(error("a.jsonl", row, &mapping("{headword}", "always")).contains("names no column"));
    let half = DatasetOptions { completion: None, ..mapping("{headword}", "") };
    assert!(error("a.jsonl", row, &half).contains("data.completion is missing"));
    let ignored = DatasetOptions { layout: LayoutChoice::Text, ..mapping("{headword}", "{entry}") };
    assert!(error("a.jsonl", row, &ignored).contains("belong to the layout \"mapping\""));
}

#[test]
fn plain_text_is_split_at_blank_lines() {
    let options = DatasetOptions { max_records: 2, ..DatasetOptions::default() };
    let dataset = open_with("a.txt", b"\r\none\r\ntwo\r\n\r\n  \r\nthree\n\nfour", &options).unwrap();
    assert_eq!(dataset.layout, LayoutChoice::Text);
    let found: Vec<_> = dataset.records.iter().map(|r| (r.line, r.content.clone())).collect();
    assert_eq!(found, [(2, Content::Text("one\ntwo".into())), (6, Content::Text("three".into()))]);
    let system = DatasetOptions { system: Some("s".into()), ..DatasetOptions::default() };
    assert!(error("a.txt", b"text", &system).contains("data.system"));
    assert!(error("a.txt", b" \n", &DatasetOptions::default()).contains("no text"));
    assert!(error("a.txt", b"text", &mapping("{a}", "{b}")).contains("plain text"));
}

#[test]
fn other_files_are_refused_with_a_remedy() {
    let options = DatasetOptions::default();
    assert!(error("a.csv", b"a,b", &options).contains("convert it to .jsonl"));
    assert!(error("a.json", b" [{\"text\":\"x\"}]", &options).contains("JSON array"));
    assert!(error("a.dat", b"text", &options).contains("name it .jsonl or .txt"));
    assert_eq!(open_with("a.dat", b"{\"text\":\"x\"}", &options).unwrap().records.len(), 1);
    let folder = tempfile::tempdir().unwrap();
    assert!(Dataset::open(folder.path(), &options).unwrap_err().to_string().contains("is a folder"));
    assert!(
        format!("{:#}", Dataset::open(&folder.path().join("x.jsonl"), &options).unwrap_err()).contains("cannot read")
    );
}

#[test]
fn system_messages_go_before_conversations_that_have_none() {
    let rows = concat!(
        r#"{"messages":[{"role":"system","content":"own"},{"role":"user","content":"Q"}]}"#,
        "\n",
        r#"{"messages":[{"role":"user","content":"Q"}]}"#,
        "\n",
        r#"{"messages":[{"role":"user","content":"Q"}],"system":"column"}"#
    );
    let options = DatasetOptions { system: Some("given".into()), ..DatasetOptions::default() };
    let dataset = open_with("a.jsonl", rows.as_bytes(), &options).unwrap();
    let firsts: Vec<_> = dataset.records.iter().map(|r| turns(&r.content)[0].1.clone()).collect();
    assert_eq!(firsts, ["own", "given", "column"]);
    let pair = open_with("a.jsonl", br#"{"prompt":"Q","completion":"A"}"#, &options).unwrap();
    assert!(matches!(&pair.records[0].content, Content::Pair { system: Some(s), .. } if s == "given"));
}

#[test]
fn turns_keep_what_templates_read_and_bad_turns_are_named() {
    let dataset = open(concat!(
        r#"{"messages":[{"role":"user","content":"Q"},{"role":"assistant","content":null,"tool_calls":[{"function":{"name":"f"}}],"thinking":"hm"}],"tools":"[{\"type\":\"function\"}]"}"#,
        "\n",
        r#"{"conversations":[{"from":"human","value":"Q"},{"from":"function_call","value":"{\"name\":\"f\",\"arguments\":{\"x\":1}}"},{"from":"observation","value":"R"}]}"#,
        "\n",
        r#"{"messages":[{"role":"user"}]}"#,
        "\n",
        r#"{"messages":[]}"#,
        "\n",
        r#"{"conversations":[{"from":"alien","value":"Q"}]}"#,
        "\n",
        r#"{"messages":[{"role":"user","content":[{"type":"image"}]}]}"#,
    ));
    let Content::Conversation { messages, tools } = &dataset.records[0].content else { panic!("a conversation") };
    assert_eq!(messages[1]["thinking"], "hm");
    assert_eq!(tools.as_ref().unwrap()[0]["type"], "function");
    let Content::Conversation { messages, .. } = &dataset.records[1].content else { panic!("a conversation") };
    assert_eq!(messages[1]["tool_calls"][0]["function"]["arguments"]["x"], 1);
    assert_eq!(messages[2]["role"], "tool");
    let reasons: Vec<_> = dataset.rejected.iter().map(|b| b.reason.as_str()).collect();
    for (reason, part) in reasons.iter().zip(["turn 1 of `messages`: has no `content`", "empty", "alien", "image"]) {
        assert!(reason.contains(part), "{reason}");
    }
    assert_eq!(reasons.len(), 4);
}

#[test]
fn alpaca_history_becomes_turns() {
    let dataset = open(r#"{"instruction":"Q2","input":"","output":"A2","history":[["Q1","A1"]],"system":"S"}"#);
    assert_eq!(
        turns(&dataset.records[0].content),
        owned(&[("system", "S"), ("user", "Q1"), ("assistant", "A1"), ("user", "Q2"), ("assistant", "A2")])
    );
}

#[test]
fn the_most_common_layout_wins() {
    let dataset =
        open("{\"text\":\"x\"}\n{\"prompt\":\"a\",\"completion\":\"b\"}\n{\"prompt\":\"c\",\"completion\":\"d\"}");
    assert_eq!(dataset.layout, LayoutChoice::PromptCompletion);
    assert_eq!(dataset.columns, ["text", "prompt", "completion"]);
    assert_eq!(dataset.rejected.len(), 1);
}

#[test]
fn max_records_counts_usable_rows() {
    let options = DatasetOptions { max_records: 2, ..DatasetOptions::default() };
    let rows = b"{\"text\":\"a\"}\n{\"text\":\"\"}\n{\"text\":\"b\"}\n{\"text\":\"c\"}\n{\"text\":\"\"}";
    let dataset = open_with("a.jsonl", rows, &options).unwrap();
    assert_eq!((dataset.records.len(), dataset.rejected.len()), (2, 1));
}

#[test]
fn the_split_is_fixed_by_its_seed_and_keeps_order() {
    let items: Vec<usize> = (0..1000).collect();
    let (train, eval) = split(items.clone(), 0.05, 7).unwrap();
    assert_eq!((train.len(), eval.len()), (950, 50));
    assert!(train.is_sorted() && eval.is_sorted());
    assert_eq!(split(items.clone(), 0.05, 7).unwrap().1, eval);
    assert_ne!(split(items.clone(), 0.05, 8).unwrap().1, eval);
    let mut all = [train, eval].concat();
    all.sort_unstable();
    assert_eq!(all, items);
    assert_eq!(split(items.clone(), 0.0, 7).unwrap().1, [0usize; 0]);
    assert_eq!(split(vec![1, 2], 0.01, 7).unwrap().1.len(), 1);
    assert_eq!(split(vec![1, 2], 0.99, 7).unwrap().0.len(), 1);
    assert_eq!(split(vec![1], 0.5, 7).unwrap(), (vec![1], vec![]));
    assert!(split(items, 1.0, 7).is_err());
}

#[test]
fn reading_ends_when_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("d.jsonl");
    std::fs::write(&path, "{\"text\": \"a\"}\n").unwrap();
    let stopped = |stop: bool| {
        let stop = std::sync::atomic::AtomicBool::new(stop);
        Dataset::open_unless_stopped(&path, &DatasetOptions::default(), &stop).unwrap().is_none()
    };
    assert!(stopped(true));
    assert!(!stopped(false));
}
