//! Whole runs through the `tandem` program on a tiny model.
#![allow(clippy::disallowed_methods, clippy::disallowed_macros)]

mod support;

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use serde_json::Value;
use tandem::export::adapter;
use tandem::session::config::RunConfig;
use tandem::session::event::{Outcome, RunEvent, TimedEvent};
use tandem::session::handle;
use tandem::session::run_view::{RunState, RunView};

/// A folder with a model, a dataset and a `run.toml`.
struct Place {
    folder: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        support::tiny_model(folder.path());
        support::dataset(folder.path(), 60);
        let text = "name = \"t\"\nruns_dir = \"runs\"\n[model]\npath = \"tiny módel\"\n[data]\npath = \"data set.jsonl\"\n\
            eval_fraction = 0.1\n[packing]\npack_len = 128\n[method]\nr = 4\nlora_alpha = 8\n[optimizer]\nlr = 0.02\n\
            [train]\nmax_steps = 12\neval_every = 6\nthreads = 1\ndevice = \"cpu\"\n";
        fs::write(folder.path().join("run.toml"), text).unwrap();
        Self { folder }
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tandem"));
        command.current_dir(self.path()).env("TANDEM_HOME", self.path().join("home")).args(args);
        command
    }

    fn tandem(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    /// Runs to the end with `--json` and gives the events.
    fn train(&self, flags: &[&str]) -> Vec<TimedEvent> {
        let output = self.tandem(&[&["train", "run.toml", "--json"], flags].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    fn error(&self, args: &[&str]) -> String {
        let output = self.tandem(args);
        assert_eq!(output.status.code(), Some(1), "{}\n{}", text(&output.stdout), text(&output.stderr));
        text(&output.stderr)
    }

    fn runs(&self) -> Vec<PathBuf> {
        let Ok(entries) = fs::read_dir(self.path().join("runs")) else { return Vec::new() };
        entries.map(|e| e.unwrap().path()).collect()
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn losses(events: &[TimedEvent]) -> Vec<f64> {
    let loss = |event: &TimedEvent| match &event.event {
        RunEvent::Step { report, .. } => Some(report.loss),
        _ => None,
    };
    events.iter().filter_map(loss).collect()
}

fn view(events: &[TimedEvent]) -> RunView {
    let mut view = RunView::default();
    for event in events {
        view.apply(event);
    }
    view
}

fn run_folder(events: &[TimedEvent]) -> PathBuf {
    view(events).info.unwrap().folder
}

#[test]
fn a_run_learns_and_leaves_a_complete_folder() {
    let place = Place::new();
    let events = place.train(&[]);
    let view = view(&events);
    assert_eq!(view.state, RunState::Finished { outcome: Outcome::Completed, steps: 12 });
    let losses = losses(&events);
    assert_eq!(losses.len(), 12);
    assert!(losses[11] < losses[0] - 0.5, "{losses:?}");
    let evaluated: Vec<u64> = view.evals.iter().map(|e| e.step).collect();
    assert_eq!(evaluated, [0, 6, 12]);
    assert!(view.evals[2].loss < view.evals[0].loss);
    assert_eq!(view.evals[0].num_documents, 6);

    let folder = run_folder(&events);
    assert_eq!(RunView::load(&folder).unwrap(), view);
    let adapter = adapter::load(&folder.join("adapter")).unwrap();
    assert_eq!((adapter.config.r, adapter.tensors.len()), (4, 2 * 7 * 2));
    let frozen = fs::read_to_string(folder.join("run.toml")).unwrap();
    assert!(frozen.contains("max_steps = 12"), "{frozen}");
    let list = place.tandem(&["runs", "--runs-dir", "runs"]);
    let list = text(&list.stdout);
    assert!(list.contains("completed") && list.contains("12/12"), "{list}");
}

#[test]
fn without_json_the_result_is_told_in_words() {
    let place = Place::new();
    let output = place.tandem(&["train", "run.toml", "--max-steps", "3"]);
    assert!(output.status.success());
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(out.starts_with("completed after 3 steps, loss ") && out.trim_end().ends_with("adapter"), "{out}");
    assert!(err.contains("step 3/3: loss ") && err.contains("tokens/s") && err.contains("ETA"), "{err}");
    assert!(err.contains("held-out loss"), "{err}");
}

#[test]
fn reruns_and_thread_counts_give_the_same_losses_to_the_bit() {
    let place = Place::new();
    let first = losses(&place.train(&[]));
    assert_eq!(losses(&place.train(&[])), first);
    assert_eq!(losses(&place.train(&["--threads", "2", "--activations", "keep"])), first);
    assert_ne!(losses(&place.train(&["--seed", "1"])), first);
    assert_eq!(place.runs().len(), 4, "every run has a folder of its own");
}

#[test]
fn a_frozen_run_runs_again_the_same() {
    let place = Place::new();
    let events = place.train(&["--lr", "0.01", "--set", "method.lora_alpha=16"]);
    let frozen = run_folder(&events).join("run.toml");
    let output = place.tandem(&["train", frozen.to_str().unwrap(), "--json"]);
    let again: Vec<TimedEvent> = text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(losses(&again), losses(&events));
}

#[test]
fn a_run_goes_on_from_an_adapter() {
    let place = Place::new();
    let first = place.train(&[]);
    let adapter = run_folder(&first).join("adapter");
    let init = format!("method.init_adapter={}", adapter.display());
    let second = place.train(&["--set", &init]);
    let (end, start) = (view(&first).evals[2].loss, view(&second).evals[0].loss);
    assert_eq!(start, end, "it starts where the first one ended");
    let message = place.error(&["train", "run.toml", "--set", &init, "--r", "8"]);
    assert!(message.contains("its rank is 4, the run's is 8: set r = 4"), "{message}");
}

#[test]
fn full_fine_tuning_leaves_a_model_that_trains_again() {
    let place = Place::new();
    let events = place.train(&["--set", "method.kind=full", "--lr", "0.003"]);
    let losses_seen = losses(&events);
    assert!(losses_seen[11] < losses_seen[0] - 0.3, "{losses_seen:?}");
    let model = run_folder(&events).join("model");
    let again = place.train(&["--model", model.to_str().unwrap(), "--max-steps", "1"]);
    assert!((view(&again).evals[0].loss - view(&events).evals[2].loss).abs() < 1e-6);
}

#[test]
fn saves_every_so_many_steps_when_asked() {
    let place = Place::new();
    let folder = run_folder(&place.train(&["--save-every", "5"]));
    for step in [5, 10] {
        adapter::load(&folder.join(format!("adapter-step-{step}"))).unwrap();
    }
    assert!(!folder.join("adapter-step-0").exists() && !folder.join("adapter-step-12").exists());
}

#[test]
fn padding_trains_on_the_same_documents() {
    let place = Place::new();
    let events = place.train(&["--set", "packing.enabled=false"]);
    let view = view(&events);
    assert!(view.steps.iter().all(|s| s.report.document_tokens <= s.report.total_tokens));
    assert!(view.steps.iter().any(|s| s.report.document_tokens < s.report.total_tokens));
}

#[test]
fn numbers_that_are_not_finite_end_the_run_and_keep_what_was_trained() {
    let place = Place::new();
    let message = place.error(&["train", "run.toml", "--lr", "1e30", "--set", "optimizer.schedule=constant"]);
    assert!(message.contains("error: step 2: ") && message.contains("lower the learning rate"), "{message}");
    let view = RunView::load(&place.runs()[0]).unwrap();
    assert_eq!(view.saved.len(), 1);
    assert_eq!(view.saved[0].step, 1);
    adapter::load(&view.saved[0].path).unwrap();
}

#[test]
fn the_preview_marks_what_is_trained() {
    let place = Place::new();
    for args in [&["run.toml"][..], &["data set.jsonl", "--model", "tiny módel", "--pack-len", "128"]] {
        let output = place.tandem(&[&["data", "preview", "--packs", "99"], args].concat());
        let shown = text(&output.stdout);
        assert!(output.status.success() && shown.contains("⟦no, never<|im_end|>⟧"), "{shown}{}", text(&output.stderr));
        assert!(!shown.contains("⟦question"), "{shown}");
    }
    let message = place.error(&["data", "preview", "data set.jsonl"]);
    assert!(message.contains("give the model it is for"), "{message}");
}

#[test]
fn the_dump_holds_the_batches_of_the_run_in_its_order() {
    let place = Place::new();
    let dump = place.tandem(&["data", "dump", "run.toml", "--grad-accum-steps", "2"]);
    let rows: Vec<Value> = text(&dump.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let tokens_of = |step: u64| -> u64 {
        let of_step = rows.iter().filter(|row| row["step"] == step);
        of_step.map(|row| row["input_ids"].as_array().unwrap().len() as u64).sum()
    };
    let events = place.train(&["--grad-accum-steps", "2"]);
    let view = view(&events);
    assert_eq!(view.steps.len(), 12);
    for step in &view.steps {
        assert_eq!(step.report.total_tokens, tokens_of(step.report.step));
    }
    let held_out = rows.iter().filter(|row| row["step"].is_null());
    let labels = held_out.flat_map(|row| row["labels"].as_array().unwrap()).filter(|label| **label != -100).count();
    assert_eq!(labels as u64, view.evals[0].num_label_tokens);
}

/// Starts an endless run, waits for its fourth step, sends it `signal`, and gives status, last lines and folder.
fn interrupted(place: &Place, signal: &str) -> (std::process::ExitStatus, String, PathBuf) {
    let mut child = place
        .command(&["train", "run.toml", "--json", "--max-steps", "1000000"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut folder = PathBuf::new();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    for line in lines.by_ref() {
        let event: Value = serde_json::from_str(&line.unwrap()).unwrap();
        if event["event"] == "started" {
            folder = event["folder"].as_str().unwrap().into();
        }
        if event["event"] == "step" && event["report"]["step"] == 4 {
            break;
        }
    }
    let sent = Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
    lines.for_each(drop);
    let output = child.wait_with_output().unwrap();
    (output.status, text(&output.stderr), folder)
}

#[test]
#[cfg(unix)]
fn signals_save_and_leave_with_success() {
    let place = Place::new();
    for signal in ["-INT", "-TERM", "-HUP"] {
        let (status, stderr, folder) = interrupted(&place, signal);
        assert!(status.success(), "{status} {stderr}");
        assert!(stderr.contains("stopped after "), "{stderr}");
        adapter::load(&folder.join("adapter")).unwrap();
        let view = RunView::load(&folder).unwrap();
        assert!(matches!(view.state, RunState::Finished { outcome: Outcome::Stopped, .. }), "{:?}", view.state);
        assert!(view.steps_done() >= 4);
    }
}

#[test]
fn a_reader_of_events_that_goes_away_does_not_end_the_run() {
    let place = Place::new();
    let mut child = place.command(&["train", "run.toml", "--json"]).stdout(Stdio::piped()).spawn().unwrap();
    let first = BufReader::new(child.stdout.take().unwrap()).lines().next().unwrap().unwrap();
    assert!(first.contains("\"event\""), "{first}");
    assert!(child.wait().unwrap().success());
    let view = RunView::load(&place.runs()[0]).unwrap();
    assert_eq!(view.state, RunState::Finished { outcome: Outcome::Completed, steps: 12 });
}

#[test]
fn a_stop_after_any_event_ends_the_run_as_stopped() {
    let place = Place::new();
    let text =
        fs::read_to_string(place.path().join("run.toml")).unwrap().replace("max_steps = 12", "max_steps = 1000000");
    fs::write(place.path().join("endless.toml"), text).unwrap();
    let config = RunConfig::load(&place.path().join("endless.toml")).unwrap();
    let mut steps = 0;
    for seen in 0.. {
        let mut run = handle::start(config.clone(), None).unwrap();
        for _ in 0..seen {
            run.next_event(Duration::from_secs(60)).expect("an endless run goes on talking");
        }
        run.send(tandem::session::event::Command::Stop);
        run.join();
        let view = RunView::load(run.folder()).unwrap();
        let RunState::Finished { outcome: Outcome::Stopped, steps: done } = view.state else {
            panic!("{:?}", view.state)
        };
        assert_eq!(view.saved.last().map(|s| s.step), (done > 0).then_some(done), "what was trained is saved");
        steps = done;
        if steps >= 3 {
            break;
        }
    }
    assert!(steps >= 3);
}

#[test]
#[cfg(unix)]
fn a_killed_run_is_shown_as_interrupted() {
    let place = Place::new();
    let (status, _, folder) = interrupted(&place, "-KILL");
    assert!(!status.success());
    let view = RunView::load(&folder).unwrap();
    assert_eq!(view.state, RunState::Interrupted);
    let list = text(&place.tandem(&["runs", "--runs-dir", "runs"]).stdout);
    assert!(list.contains("interrupted"), "{list}");
}

#[test]
fn slips_in_the_configuration_are_explained() {
    let place = Place::new();
    let path = place.path().join("slip.toml");
    fs::write(&path, "[model]\npath = \"tiny módel\"\n[data]\npath = \"data set.jsonl\"\n[method]\nlorra_alpha = 8\n")
        .unwrap();
    assert_eq!(
        place.error(&["train", "slip.toml"]),
        "error: slip.toml: unknown field `lorra_alpha` in [method] (line 6): did you mean `lora_alpha`?\n"
    );
    assert_eq!(
        place.error(&["train", "run.toml", "--r", "0"]),
        "error: --r: `r` in [method] is 0: it must be at least 1; 8, 16 or 32 are usual\n"
    );
    let message = place.error(&["train", "none.toml"]);
    assert!(message.contains("cannot read the run configuration none.toml"), "{message}");
    assert!(place.runs().is_empty(), "none of these made a folder");
    let usage = place.tandem(&["train", "--no-such-flag"]);
    assert_eq!(usage.status.code(), Some(2));
}

#[test]
fn a_missing_gpu_is_an_error_when_it_was_asked_for_and_a_note_otherwise() {
    let place = Place::new();
    let message = place.error(&["train", "run.toml", "--device", "cuda"]);
    assert!(message.contains("no cuda device: "), "{message}");
    let events = place.train(&["--device", "auto", "--max-steps", "1"]);
    assert!(view(&events).notes.iter().any(|n| n.text.contains("no cuda device: ")));
}

#[test]
fn an_estimate_says_what_a_run_takes_and_whether_it_fits() {
    let place = Place::new();
    let shape = ["estimate", "--model", "qwen3-0.6b", "--pack", "2048", "--vram-gib", "8"];
    let output = place.tandem(&shape);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let table = text(&output.stdout);
    for words in ["qwen3-0.6b", "one pack a step", "fits:", "because", "weights", "device memory in all", "8.00 GiB"] {
        assert!(table.contains(words), "{words}: {table}");
    }
    let output = place.tandem(&[&shape[..], &["--json", "--document", "512"]].concat());
    let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&plan["plan"]["work"]["tokens"], &plan["plan"]["work"]["longest"]), (&2048.into(), &512.into()));
    let need = &plan["plan"]["tried"][0]["need"];
    let parts = need["parts"].as_array().unwrap().iter().map(|part| part["bytes"].as_u64().unwrap());
    assert_eq!(parts.sum::<u64>(), need["peak_bytes"].as_u64().unwrap());
    let output =
        place.tandem(&["estimate", "--model", "qwen3-8b", "--method", "full", "--pack", "2048", "--vram-gib", "12"]);
    let table = text(&output.stdout);
    assert!(table.contains("does not fit") && table.contains("to make it fit"), "{table}");

    // A run's own data say how long its packs are.
    let run = ["estimate", "run.toml", "--device", "auto", "--vram-gib", "8"];
    let output = place.tandem(&[&run[..], &["--json"]].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
    let longest = plan["plan"]["work"]["longest"].as_u64().unwrap();
    assert!((2..128).contains(&longest), "{plan}");
    let error = place.error(&["estimate", "run.toml"]);
    assert!(error.contains("trains on the CPU"), "{error}");
    let error = place.error(&[&run[..], &["--document", "64"]].concat());
    assert!(error.contains("--document is for known shapes"), "{error}");
}

#[test]
fn bad_data_is_explained_before_training() {
    let place = Place::new();
    let path = place.path().join("bad.jsonl");
    let train = ["train", "run.toml", "--data", "bad.jsonl"];
    let message = place.error(&["train", "run.toml", "--data", "none.jsonl"]);
    assert!(message.contains("none.jsonl"), "{message}");

    fs::write(&path, "{\"foo\": \"a\", \"bar\": \"b\"}\n").unwrap();
    let message = place.error(&train);
    assert!(message.contains("foo") && message.contains("bar") && message.contains("prompt"), "{message}");

    fs::write(&path, "").unwrap();
    let message = place.error(&train);
    assert!(message.contains("bad.jsonl"), "{message}");

    // A broken row among good ones is counted and told with its line.
    let rows = fs::read_to_string(place.path().join("data set.jsonl")).unwrap();
    fs::write(&path, format!("{{\"prompt\": \"x\"\n{rows}")).unwrap();
    let events = place.train(&["--data", "bad.jsonl", "--max-steps", "1"]);
    let notes = view(&events).notes;
    assert!(notes.iter().any(|n| n.text.contains("bad.jsonl:1: ")), "{notes:?}");
}
