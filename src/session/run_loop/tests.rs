//! Runs on a tiny model whose reports come one step late, as on a GPU: what is told is what a run on the CPU tells, in the same order.

use std::path::Path;
use std::time::Duration;

use super::*;
use crate::session::config::RunConfig;
use crate::session::event::{Command, TimedEvent};
use crate::session::handle::{self, RunHandle};
use crate::session::run_view::{RunState, RunView};
use crate::session::support;

fn config(place: &Path, train: &str) -> RunConfig {
    support::tiny_model(place);
    support::dataset(place, 60);
    let text = format!(
        "name = \"t\"\nruns_dir = \"runs\"\n[model]\npath = \"tiny módel\"\n[data]\npath = \"data set.jsonl\"\n\
         eval_fraction = 0.1\n[packing]\npack_len = 128\n[method]\nr = 4\nlora_alpha = 8\n\
         [train]\nthreads = 1\ndevice = \"cpu\"\n{train}"
    );
    std::fs::write(place.join("run.toml"), text).unwrap();
    RunConfig::load(&place.join("run.toml")).unwrap()
}

fn start(config: &RunConfig, late: bool) -> RunHandle {
    let body = move |context: &RunContext| {
        let mut prepared = preparing::prepare(context)?.expect("nobody stops it");
        if late {
            prepared.trainer.report_late();
        }
        Training::new(context, prepared).run()
    };
    handle::start_body(config.clone(), None, body).unwrap()
}

/// What an event says, without times.
fn said(event: &TimedEvent) -> Option<String> {
    Some(match &event.event {
        RunEvent::Step { report, epoch, tokens_seen, eta_s, .. } => {
            let (step, loss, norm, lr) = (report.step, report.loss, report.grad_norm, report.lr);
            format!("step {step}: {loss} {norm} {lr}, epoch {epoch}, {tokens_seen} tokens, eta {}", eta_s.is_some())
        }
        RunEvent::Eval(report) => format!("eval {}: {}", report.step, report.loss),
        RunEvent::Saved { step, path } => format!("saved {step} {:?}", path.file_name().unwrap()),
        RunEvent::Note { level, text } => format!("{level:?}: {text}"),
        RunEvent::Finished { outcome, steps } => format!("finished {outcome:?} after {steps}"),
        _ => return None,
    })
}

fn run(config: &RunConfig, late: bool) -> Vec<String> {
    let mut run = start(config, late);
    run.join();
    run.drain(usize::MAX).iter().filter_map(said).collect()
}

#[test]
fn a_late_run_tells_the_same_in_the_same_order() {
    let place = tempfile::tempdir().unwrap();
    let config = config(place.path(), "max_steps = 10\neval_every = 3\nsave_every = 4\n[optimizer]\nlr = 0.02\n");
    let (late, prompt) = (run(&config, true), run(&config, false));
    assert_eq!(late, prompt);
    let of = |word: &str| late.iter().filter(|said| said.starts_with(word)).count();
    assert_eq!((of("step "), of("eval "), of("saved ")), (10, 5, 3), "{late:#?}");
    let place_of = |words: &str| late.iter().position(|said| said.starts_with(words)).unwrap();
    assert_eq!(place_of("eval 3:"), place_of("step 3:") + 1, "{late:#?}");
    assert_eq!(place_of("saved 4"), place_of("step 4:") + 1, "{late:#?}");
}

#[test]
fn a_late_step_that_is_not_finite_ends_the_run_as_a_prompt_one_does() {
    let place = tempfile::tempdir().unwrap();
    let config =
        config(place.path(), "max_steps = 10\neval_every = 0\n[optimizer]\nlr = 1e30\nschedule = \"constant\"\n");
    let (late, prompt) = (run(&config, true), run(&config, false));
    assert_eq!(late, prompt);
    assert!(
        late.iter().any(|said| said.starts_with("finished Failed(\"step 2: ") && said.ends_with("after 1")),
        "{late:#?}"
    );
    assert!(late.iter().any(|said| said.starts_with("saved 1")), "{late:#?}");
}

#[test]
fn a_stop_loses_no_report() {
    let place = tempfile::tempdir().unwrap();
    let config = config(place.path(), "max_steps = 1000000\neval_every = 0\n");
    for stop_after in 1..5 {
        let mut run = start(&config, true);
        let mut events = Vec::new();
        while !matches!(&events.last(), Some(TimedEvent { event: RunEvent::Step { report, .. }, .. }) if report.step == stop_after)
        {
            events.push(run.next_event(Duration::from_secs(60)).expect("an endless run goes on talking"));
        }
        run.send(Command::Stop);
        run.join();
        events.extend(run.drain(usize::MAX));
        let mut view = RunView::default();
        events.iter().for_each(|event| view.apply(event));
        let RunState::Finished { outcome: Outcome::Stopped, steps } = view.state else { panic!("{:?}", view.state) };
        let told: Vec<u64> = view.steps.iter().map(|point| point.report.step).collect();
        assert_eq!(told, (1..=steps).collect::<Vec<_>>());
        assert!(steps > stop_after, "the step behind the one that was told is not lost");
        assert_eq!(view.saved.last().map(|saved| saved.step), Some(steps));
    }
}
