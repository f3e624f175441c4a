//! Previews and dumps of small datasets with a tiny model whose tokens are bytes.

use std::path::Path;

use super::*;
use crate::data::options::TrainOn;
use crate::session::support;

fn config(folder: &Path, rows: &str) -> RunConfig {
    let data = folder.join("data set.jsonl");
    std::fs::write(&data, rows).unwrap();
    let mut config = RunConfig::default();
    config.model.path = support::tiny_model(folder);
    config.data.path = data;
    config.data.eval_fraction = 0.0;
    config.packing.pack_len = 128;
    config
}

fn look(config: &RunConfig) -> Preview {
    preview(config, &|_, _, _| {}, &AtomicBool::new(false)).unwrap().unwrap()
}

fn row(prompt: &str, completion: &str) -> String {
    serde_json::json!({"prompt": prompt, "completion": completion}).to_string() + "\n"
}

/// The trained text of a pack, a bar after each document.
fn trained(pack: &PackView) -> String {
    let mut text = String::new();
    for document in &pack.documents {
        text.extend(document.tokens.iter().filter(|token| token.trained).map(|token| token.text.as_str()));
        text.push('|');
    }
    text
}

#[test]
fn counts_reasons_and_packs_agree_with_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let rows =
        row("q1", "größe 1") + "broken\n" + &row("q2", "two") + "{\"prompt\": \"q3\"}\n" + &row("q4", &"x".repeat(200));
    let preview = look(&config(folder.path(), &rows));
    assert_eq!((preview.num_rows, preview.num_train, preview.num_eval, preview.num_dropped()), (5, 3, 0, 2));
    assert_eq!(preview.layout, LayoutChoice::PromptCompletion);
    assert_eq!(preview.columns, ["prompt", "completion"]);
    let overlong = preview.reasons.iter().find(|reason| reason.text == "longer than 128 tokens, cut").unwrap();
    assert_eq!((overlong.count, overlong.rows[0].0, overlong.is_loss), (1, 5, true));
    let broken = preview.reasons.iter().find(|reason| reason.text == "not valid JSON").unwrap();
    assert_eq!((broken.count, broken.rows[0].0), (1, 2));
    assert_eq!(preview.histogram.bins.iter().sum::<usize>(), 3);

    let packs: Vec<PackView> = (0..preview.num_packs()).map(|i| preview.pack(i).unwrap()).collect();
    assert!(preview.pack(preview.num_packs()).is_none());
    let shown: String = packs.iter().map(trained).collect();
    assert!(shown.contains("größe 1<|im_end|>|") && shown.contains("two<|im_end|>|"), "{shown}");
    assert_eq!(packs.iter().map(|pack| pack.trained as u64).sum::<u64>(), preview.num_trained_tokens);
    assert_eq!(packs.iter().map(|pack| (pack.trained + pack.read_only) as u64).sum::<u64>(), preview.num_tokens);
    let end = packs.iter().flat_map(|pack| &pack.documents).flat_map(|document| &document.tokens);
    assert!(end.filter(|token| token.end && token.trained).count() == 2);
    assert!(preview.checks.iter().all(|check| check.failure.is_none()), "{:?}", preview.checks);
}

#[test]
fn tokens_of_white_space_are_trained_like_any_other() {
    let folder = tempfile::tempdir().unwrap();
    let preview = look(&config(folder.path(), &row("q", "def f():\n    return 1\n\n  x")));
    assert_eq!(trained(&preview.pack(0).unwrap()), "def f():\n    return 1\n\n  x<|im_end|>|");
}

#[test]
fn what_happens_to_long_documents_is_told_as_it_happens() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(folder.path(), &(row("a", &"x".repeat(300)) + &row("b", "short")));
    config.packing.overlong = Overlong::Drop;
    let preview = look(&config);
    assert_eq!((preview.num_train, preview.num_dropped()), (1, 1));
    assert_eq!(preview.reasons[0].text, "longer than 128 tokens, left out");
    config.packing.overlong = Overlong::Split;
    let preview = look(&config);
    assert_eq!((preview.num_train, preview.num_dropped()), (2, 0));
    assert!(!preview.reasons[0].is_loss);
}

#[test]
fn held_out_records_are_counted_and_not_shown_as_training() {
    let folder = tempfile::tempdir().unwrap();
    let rows: String = (0..20).map(|i| row(&format!("q{i}"), &format!("answer {i}"))).collect();
    let mut config = config(folder.path(), &rows);
    config.data.eval_fraction = 0.1;
    let preview = look(&config);
    assert_eq!((preview.num_train, preview.num_eval), (18, 2));
    let held_out = preview.reasons.last().unwrap();
    assert_eq!((held_out.text.as_str(), held_out.count, held_out.is_loss), ("held out for eval, 10 %", 2, false));
    let documents: usize = (0..preview.num_packs()).map(|i| preview.pack(i).unwrap().num_records()).sum();
    assert_eq!(documents, 18);
}

#[test]
fn a_dataset_without_a_usable_row_lists_what_was_looked_for() {
    let folder = tempfile::tempdir().unwrap();
    let config = config(folder.path(), "{\"headword\": \"a\", \"entry\": \"b\"}\n");
    let error = preview(&config, &|_, _, _| {}, &AtomicBool::new(false)).err().unwrap();
    let text = format!("{error:#}");
    assert!(text.contains("headword") && text.contains("entry"), "{text}");
}

#[test]
fn a_raised_stop_ends_it_without_a_result() {
    let folder = tempfile::tempdir().unwrap();
    let config = config(folder.path(), &row("a", "b"));
    assert!(preview(&config, &|_, _, _| {}, &AtomicBool::new(true)).unwrap().is_none());
}

#[test]
fn the_dump_holds_every_batch_of_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let rows: String = (0..40).map(|i| row(&format!("q{i}"), &format!("answer {i}"))).collect();
    let mut config = config(folder.path(), &rows);
    config.data.eval_fraction = 0.1;
    config.data.train_on = TrainOn::Everything;
    config.train.grad_accum_steps = 2;
    config.train.epochs = 2.0;
    let expected = look(&config);
    let mut out = Vec::new();
    let steps = dump(&config, &mut out, &|_, _, _| {}, &AtomicBool::new(false)).unwrap().unwrap();
    assert_eq!(steps, expected.total_steps);
    let lines: Vec<serde_json::Value> =
        std::str::from_utf8(&out).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let documents = |eval: bool| -> usize {
        let of_kind = lines.iter().filter(|line| line["eval"] == eval);
        of_kind.map(|line| line["cu_seqlens"].as_array().unwrap().len() - 1).sum()
    };
    assert_eq!((documents(true), documents(false)), (4, 2 * 36));
    let first = lines.iter().find(|line| line["step"] == 1).unwrap();
    let pack = expected.pack(0).unwrap();
    let shown: Vec<i32> = pack.documents.iter().flat_map(|document| &document.tokens).map(|token| token.id).collect();
    assert_eq!(first["input_ids"], serde_json::json!(shown));
}
