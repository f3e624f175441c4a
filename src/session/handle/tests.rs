//! Tests of the handle with bodies that need no engine.

use std::sync::Mutex;
use std::time::Instant;

use anyhow::bail;

use super::*;
use crate::session::run_view::{RunState, RunView};
use crate::session::runs;

fn config(runs: &Path) -> RunConfig {
    let mut config = RunConfig { name: "t".into(), runs_dir: Some(runs.to_owned()), ..RunConfig::default() };
    config.model.path = "/m".into();
    config.data.path = "/d.jsonl".into();
    config
}

fn preparing(done: u64) -> RunEvent {
    RunEvent::Preparing { stage: "waiting".into(), done, total: 0 }
}

fn wait_for_stop(context: &RunContext) -> Outcome {
    while !context.control.is_stopping() {
        std::thread::sleep(Duration::from_millis(1));
    }
    Outcome::Stopped
}

fn view_of(events: &[TimedEvent]) -> RunView {
    let mut view = RunView::default();
    for event in events {
        view.apply(event);
    }
    view
}

#[test]
fn live_events_and_the_folder_give_the_same_view() {
    let home = tempfile::tempdir().unwrap();
    let mut run = start_body(config(home.path()), None, |context| {
        context.sink.emit(preparing(1));
        context.sink.note(NoteLevel::Info, "a note");
        context.steps_done.store(3, Ordering::Relaxed);
        Ok(wait_for_stop(context))
    })
    .unwrap();
    let live = runs::list_in(home.path()).unwrap();
    assert_eq!(live.runs[0].status, runs::RunStatus::Live);
    run.send(Command::Stop);
    run.send(Command::Stop);
    run.join();
    assert!(run.is_finished());
    let events = run.drain(usize::MAX);
    assert_eq!(events.iter().filter(|e| e.event == RunEvent::Stopping).count(), 1);
    let view = view_of(&events);
    assert_eq!(view.state, RunState::Finished { outcome: Outcome::Stopped, steps: 3 });
    assert_eq!(RunView::load(run.folder()).unwrap(), view);
    let list = runs::list_in(home.path()).unwrap();
    assert_eq!(list.runs[0].status, runs::RunStatus::Ended(Outcome::Stopped));
    assert_eq!((list.runs[0].name.as_str(), list.runs[0].model.as_str()), ("t", "m"));
}

#[test]
fn errors_and_panics_end_the_run_in_words() {
    let home = tempfile::tempdir().unwrap();
    let mut failed = start_body(config(home.path()), None, |_| bail!("the data is gone")).unwrap();
    let mut panicked = start_body(config(home.path()), None, |_| panic!("index {} of {}", 3, 2)).unwrap();
    for (run, text) in [(&mut failed, "the data is gone"), (&mut panicked, "internal error: index 3 of 2")] {
        run.join();
        let view = RunView::load(run.folder()).unwrap();
        assert_eq!(view.state, RunState::Finished { outcome: Outcome::Failed(text.into()), steps: 0 });
        assert_eq!(view.notes[0].text, text);
    }
}

#[test]
fn a_view_that_does_not_drain_never_stops_the_run_and_is_told_what_it_missed() {
    let home = tempfile::tempdir().unwrap();
    let sent = VIEW_QUEUE as u64 + 100;
    let all_sent = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&all_sent);
    let mut run = start_body(config(home.path()), None, move |context| {
        for done in 0..sent {
            context.sink.emit(preparing(done));
        }
        flag.store(true, Ordering::Relaxed);
        Ok(wait_for_stop(context))
    })
    .unwrap();
    while !all_sent.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut events = run.drain(usize::MAX);
    run.send(Command::Stop);
    run.join();
    events.extend(run.drain(usize::MAX));
    let view = view_of(&events);
    assert!(view.state.is_over());
    let shown = events.iter().filter(|e| matches!(e.event, RunEvent::Preparing { .. })).count() as u64;
    let told: u64 =
        view.notes.iter().filter_map(|n| n.text.split_once(" events were not shown")?.0.parse::<u64>().ok()).sum();
    assert_eq!((shown, told), (VIEW_QUEUE as u64, 100));
}

#[test]
fn the_waker_comes_for_the_first_and_the_last_event_and_seldom_between() {
    let home = tempfile::tempdir().unwrap();
    let calls = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&calls);
    let waker: RunWaker = Box::new(move || seen.lock().unwrap().push(Instant::now()));
    let mut run = start_body(config(home.path()), Some(waker), |context| {
        for done in 0..50 {
            context.sink.emit(preparing(done));
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(Outcome::Completed)
    })
    .unwrap();
    run.join();
    let ended = Instant::now();
    while calls.lock().unwrap().last().is_none_or(|last| *last < ended) && ended.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(10));
    }
    let calls = calls.lock().unwrap();
    assert!(calls.last().unwrap() >= &ended, "woken after the end");
    assert!(calls.windows(2).all(|pair| pair[1] - pair[0] >= Duration::from_millis(99)), "{calls:?}");
}

#[test]
fn dropping_a_handle_stops_the_run() {
    let home = tempfile::tempdir().unwrap();
    let run = start_body(config(home.path()), None, |context| Ok(wait_for_stop(context))).unwrap();
    let folder = run.folder().to_owned();
    drop(run);
    let view = RunView::load(&folder).unwrap();
    assert_eq!(view.state, RunState::Finished { outcome: Outcome::Stopped, steps: 0 });
}

#[test]
fn an_invalid_configuration_makes_no_folder() {
    let home = tempfile::tempdir().unwrap();
    let mut config = config(home.path());
    config.method.r = 0;
    assert!(start_body(config, None, |_| Ok(Outcome::Completed)).is_err());
    assert!(home.path().read_dir().unwrap().next().is_none());
}

#[test]
fn the_list_skips_what_is_no_run_and_says_why() {
    let home = tempfile::tempdir().unwrap();
    std::fs::create_dir(home.path().join("photos")).unwrap();
    std::fs::write(home.path().join("file"), "x").unwrap();
    let broken = home.path().join("broken");
    std::fs::create_dir(&broken).unwrap();
    std::fs::write(broken.join("run.sqlite"), "no database, but longer than a header would be").unwrap();
    let list = runs::list_in(home.path()).unwrap();
    assert!(list.runs.is_empty());
    let names: Vec<&str> = list.skipped.iter().map(|(p, _)| p.file_name().unwrap().to_str().unwrap()).collect();
    assert_eq!(names, ["broken", "photos"]);
    assert!(list.skipped[1].1.contains("is not a run folder"), "{:?}", list.skipped);
    assert_eq!(runs::list_in(&home.path().join("none")).unwrap(), runs::RunList::default());
}
