//! `tandem compare`, `tandem bench --vary` and traces on a tiny model, on the CPU.
#![allow(clippy::disallowed_methods, clippy::disallowed_macros)]

mod support;

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use serde_json::Value;
use tandem::session::compare::{self, CompareEvent, CompareOptions, CompareReport, Variation, VerdictKind};
use tandem::session::config::RunConfig;

/// A folder with a model, a dataset and a `run.toml`.
fn place() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    support::tiny_model(folder.path());
    support::dataset(folder.path(), 60);
    let text = "name = \"t\"\nruns_dir = \"runs\"\n[model]\npath = \"tiny módel\"\n[data]\npath = \"data set.jsonl\"\n\
        [packing]\npack_len = 128\n[method]\nr = 4\nlora_alpha = 8\nlora_dropout = 0.1\n[optimizer]\nlr = 0.02\n\
        [train]\nmax_steps = 5\nthreads = 1\ndevice = \"cpu\"\nactivations = \"recompute\"\n";
    fs::write(folder.path().join("run.toml"), text).unwrap();
    folder
}

fn tandem(place: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tandem"));
    command.current_dir(place).env("TANDEM_HOME", place.join("home")).args(args).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn row_names(report: &CompareReport) -> Vec<&str> {
    report.rows.iter().map(|row| row.name.as_str()).collect()
}

#[test]
fn a_comparison_learns_the_same_in_both_arms_and_leaves_what_was_asked_for() {
    let place = place();
    let output = tandem(
        place.path(),
        &[
            "compare",
            "run.toml",
            "--vary",
            "cache,attention,keep",
            "--pairs",
            "2",
            "--steps",
            "6",
            "--html",
            "out.html",
            "--json",
            "out.json",
        ],
    );
    assert!(output.status.success(), "{}", text(&output.stderr));
    let json = fs::read(place.path().join("out.json")).unwrap();
    let reports: Vec<CompareReport> = serde_json::from_slice(&json).unwrap();
    assert_eq!(serde_json::to_value(&reports).unwrap(), serde_json::from_slice::<Value>(&json).unwrap());
    let [cache, attention, keep] = reports.as_slice() else { panic!("{} reports", reports.len()) };
    for report in &reports {
        assert_eq!((report.pairs, report.pairs_planned, report.steps_per_block), (2, 2, 6));
        assert_eq!((report.losses[0].len(), report.pair_differences.ms.len()), (7, 2), "a shorter run begins again");
        assert!(report.losses[0][5] < report.losses[0][0] - 0.2, "it trains: {:?}", report.losses[0]);
        assert_ne!(report.verdict.kind, VerdictKind::ResultsDiffer, "{}", report.verdict.detail);
        assert!(report.parity.repeats && report.parity.holds());
        assert!(report.memory.iter().all(|memory| memory.peak_bytes > 0));
        let rows = row_names(report);
        for name in ["Step", "Tokens/s", "Forward", "Backward", "Metadata", "Metadata builds", "Peak memory", "Loss"] {
            assert!(rows.contains(&name), "{name} of {rows:?}");
        }
        assert!(!rows.contains(&"Copy hidden"), "what nobody does is not shown");
    }
    for exact in [cache, keep] {
        assert!(exact.parity.bit_equal && exact.parity.must_be_bit_equal);
        assert_eq!((&exact.losses[0], &exact.grad_norms[0]), (&exact.losses[1], &exact.grad_norms[1]));
        assert_eq!(exact.parity.max_loss_difference, 0.0);
    }
    assert!(!attention.parity.must_be_bit_equal);
    // Two blocks, each in forward and recomputation, against one build a pack.
    let builds = cache.rows.iter().find(|row| row.name == "Metadata builds").unwrap();
    assert_eq!((builds.a, builds.b, builds.exact), (Some(1.0), Some(4.0), true));
    assert_eq!(cache.quantities.builds_avoided, Some(3.0));
    assert!(cache.predictions[0].predicted_ms.unwrap() < 0.0);
    assert_eq!(cache.settings.len(), 1);
    // To keep everything takes more memory than to compute it again.
    assert!(keep.memory[0].peak_bytes > keep.memory[1].peak_bytes, "{:?}", keep.memory);

    let shown = text(&output.stdout);
    let page = fs::read_to_string(place.path().join("out.html")).unwrap();
    for report in &reports {
        assert!(shown.contains(&report.verdict.sentence) && page.contains(&report.verdict.sentence));
    }
    assert!(!place.path().join("runs").exists(), "a comparison is no run");
}

#[test]
fn routing_is_compared_in_a_model_with_experts_and_refused_in_a_dense_one() {
    let place = place();
    let args = [
        "compare",
        "run.toml",
        "--vary",
        "routing,routing-sorted,all",
        "--pairs",
        "2",
        "--steps",
        "2",
        "--html",
        "out.html",
        "--json",
        "out.json",
    ];
    let refused = tandem(place.path(), &args);
    assert_eq!(refused.status.code(), Some(1));
    let message = text(&refused.stderr);
    assert!(message.contains("Grouped MoE routing cannot be compared: this model is dense"), "{message}");
    let model = support::tiny_sparse_model(place.path(), 2, &[]);
    let model = format!("model.path={}", model.display());
    let output = tandem(place.path(), &[&args[..], &["--set", &model]].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let json = fs::read(place.path().join("out.json")).unwrap();
    let reports: Vec<CompareReport> = serde_json::from_slice(&json).unwrap();
    let [grouped, sorted, all] = reports.as_slice() else { panic!("{} reports", reports.len()) };
    for report in [grouped, sorted] {
        assert!(report.parity.bit_equal && report.parity.must_be_bit_equal && report.parity.repeats);
        assert!(row_names(report).contains(&"Routing"), "{:?}", row_names(report));
        let prediction = &report.predictions[0];
        assert_eq!(prediction.formula, "−(routing of B − routing of A)");
        assert!(prediction.predicted_ms.is_some() && prediction.published.as_ref().unwrap().contains("gpt-oss"));
        assert!(report.arms.iter().all(|arm| !arm.switches.cuda_graphs), "an arm reads the host");
    }
    let fields: Vec<&str> = sorted.settings.iter().map(|setting| setting.field.as_str()).collect();
    assert_eq!(fields, ["optimizations.routing_baseline"]);
    assert!(all.settings.iter().any(|setting| setting.field == "optimizations.grouped_routing"));
    assert!(all.predictions.iter().any(|prediction| prediction.name == "Grouped MoE routing"));
    assert!(all.parity.holds());
    let page = fs::read_to_string(place.path().join("out.html")).unwrap();
    assert!(page.contains("class=\"phase-routing\"") && page.contains(".phase-routing {"));
}

#[test]
fn buffers_are_compared_where_offload_is_forced_and_refused_with_the_reason_where_not() {
    let place = place();
    let args =
        ["compare", "run.toml", "--vary", "buffers,offload", "--pairs", "1", "--steps", "2", "--json", "out.json"];
    let refused = tandem(place.path(), &args);
    assert_eq!(refused.status.code(), Some(1));
    let message = text(&refused.stderr);
    assert!(message.contains("cannot be compared here") && message.contains("tokens are below 512"), "{message}");
    let forced = tandem(place.path(), &[&args[..], &["--set", "optimizations.offload_force=true"]].concat());
    assert!(forced.status.success(), "{}", text(&forced.stderr));
    let json = fs::read(place.path().join("out.json")).unwrap();
    let reports: Vec<CompareReport> = serde_json::from_slice(&json).unwrap();
    for report in &reports {
        assert!(report.parity.bit_equal && report.parity.repeats, "{:?}", report.parity);
        assert!(row_names(report).contains(&"Copy hidden") && row_names(report).contains(&"Host memory of inputs"));
        assert_eq!(report.quantities.num_offloaded, Some(1), "of two blocks the last stays");
        assert_eq!(report.verdict.kind, VerdictKind::NoDifference, "one pair tells nothing");
    }
    let offload = reports.iter().find(|report| report.variation == Variation::Offload).unwrap();
    let copies = offload.rows.iter().find(|row| row.name == "Exposed copy").unwrap();
    assert!(copies.a.is_some() && copies.b.is_none() && copies.difference.is_none());
}

#[test]
fn what_cannot_be_varied_is_explained() {
    let place = place();
    let wrong = tandem(place.path(), &["compare", "run.toml", "--vary", "cache,cash"]);
    assert_eq!(wrong.status.code(), Some(2));
    let message = text(&wrong.stderr);
    let words = "cache, cache-fused, buffers, offload, keep, attention, routing, routing-sorted, graphs, all";
    assert!(message.contains("`cash` is none of") && message.contains(words), "{message}");
    for (args, why) in [
        (&["--vary", "cache,graphs"][..], "there is no GPU in this run"),
        (&["--vary", "cache", "--pairs", "0"], "at least one pair"),
        (&["--vary", "cache", "--html", "no/such.html"], "there is no such folder"),
    ] {
        let output = tandem(place.path(), &[&["compare", "run.toml"], args].concat());
        let message = text(&output.stderr);
        assert!(output.status.code() == Some(1) && message.contains(why), "{message}");
        assert!(output.stdout.is_empty(), "nothing is measured before it is known to be possible");
    }
}

#[test]
fn a_stopped_comparison_tells_the_pairs_that_were_done() {
    let place = place();
    let config = RunConfig::load(&place.path().join("run.toml")).unwrap();
    let options = CompareOptions { vary: vec![Variation::Cache, Variation::Keep], pairs: 100_000, steps_per_block: 1 };
    let comparison = compare::start(config, options, None).unwrap();
    let (mut partial, mut finished) = (0, Vec::new());
    loop {
        let ended = comparison.is_finished();
        match comparison.next_event(Duration::from_millis(20)) {
            Some(CompareEvent::Progress { done, pairs, report, .. }) => {
                assert_eq!(pairs, 100_000);
                assert_eq!(report.map_or(0, |report| report.pairs), done, "a report of what is done so far");
                partial = partial.max(done);
                if done >= 2 {
                    comparison.stop();
                }
            }
            Some(CompareEvent::Finished { report }) => finished.push(report),
            Some(CompareEvent::Failed { text }) => panic!("{text}"),
            None if ended => break,
            _ => {}
        }
    }
    let [report] = finished.as_slice() else { panic!("the second comparison has no pair to tell") };
    assert!(report.pairs >= partial && report.pairs < report.pairs_planned, "{} pairs", report.pairs);
    assert_eq!(report.pair_differences.ms.len(), report.pairs);
}

#[test]
fn a_benchmark_compares_on_random_weights_and_traces_its_steps() {
    let place = place();
    let config = place.path().join("tiny módel").join("config.json");
    let bench = ["bench", "--model", config.to_str().unwrap(), "--tokens", "64", "--pack", "32", "--device", "cpu"];
    let vary = ["--vary", "cache-fused,all", "--pairs", "2", "--steps", "1", "--json"];
    let output = tandem(place.path(), &[&bench[..], &vary].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let reports: Vec<CompareReport> =
        text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(
        reports.iter().map(|report| report.variation).collect::<Vec<_>>(),
        [Variation::CacheFused, Variation::All]
    );
    assert!(reports[0].parity.bit_equal && reports[1].parity.holds());
    assert_eq!(reports[1].settings.len(), 2, "{:?}", reports[1].settings);

    let trace = ["--steps", "2", "--warmup", "1", "--trace", "bench.json", "--activations", "recompute,keep"];
    let output = tandem(place.path(), &[&bench[..], &trace].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let processes: Vec<u64> =
        spans(&place.path().join("bench.json")).iter().map(|span| span["pid"].as_u64().unwrap()).collect();
    assert!(processes.contains(&1) && processes.contains(&2) && !processes.contains(&3), "one a row");
}

/// The spans of a trace.
fn spans(path: &Path) -> Vec<Value> {
    let trace: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    trace["traceEvents"].as_array().unwrap().iter().filter(|event| event["ph"] == "X").cloned().collect()
}

#[test]
fn a_run_leaves_a_trace_of_the_steps_asked_for() {
    let place = place();
    let train = ["train", "run.toml", "--trace", "out.json"];
    let offload = ["--trace-steps", "2-3", "--activations", "offload", "--set", "optimizations.offload_force=true"];
    let output = tandem(place.path(), &[&train[..], &offload].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("2 steps traced in out.json"));
    let traced = spans(&place.path().join("out.json"));
    let number = |span: &Value, field: &str| span[field].as_f64().unwrap();
    let steps: Vec<u64> = traced.iter().map(|span| span["args"]["step"].as_u64().unwrap()).collect();
    assert!(steps.is_sorted() && steps[0] == 2 && steps[steps.len() - 1] == 3, "{steps:?}");
    assert!(traced.iter().all(|span| number(span, "dur") >= 0.0 && number(span, "ts") >= 0.0));
    for lane in [1, 2, 3] {
        let lane: Vec<&Value> = traced.iter().filter(|span| span["tid"] == lane).collect();
        assert!(!lane.is_empty(), "compute and copies each way");
        for pair in lane.windows(2) {
            let end = number(pair[0], "ts") + number(pair[0], "dur");
            assert!(number(pair[1], "ts") > end - 1.0, "a lane does one thing at a time: {} {}", pair[0], pair[1]);
        }
    }
    let words = tandem(place.path(), &[&train[..], &["--trace-steps", "3-2"]].concat());
    assert_eq!(words.status.code(), Some(2));
    assert!(text(&words.stderr).contains("5-8"), "{}", text(&words.stderr));
}
