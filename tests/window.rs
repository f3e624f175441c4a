//! The real window, on a virtual screen of its own, driven from outside with xdotool.
//!
//! What the window holds is read from the file that `TANDEM_WINDOW_LOG` names (see `gui::probe`). Linux only: other systems
//! have no virtual screen.
#![cfg(target_os = "linux")]
#![allow(clippy::disallowed_methods, clippy::disallowed_macros)]

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Ends a program when the test ends, also by a panic.
struct Guard(Child);

impl Drop for Guard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn is_here(tool: &str) -> bool {
    let found = Command::new("sh").args(["-c", &format!("command -v {tool}")]).stdout(Stdio::null()).status();
    found.is_ok_and(|status| status.success())
}

/// A test that cannot look must not pass.
fn require_tools() {
    let missing: Vec<&str> = ["Xvfb", "xdotool"].into_iter().filter(|tool| !is_here(tool)).collect();
    assert!(missing.is_empty(), "{} not found; `cargo xtask setup` installs it", missing.join(" and "));
}

/// Tandem's window on its own screen, with its own data folder.
struct Window {
    display: String,
    id: String,
    log: PathBuf,
    _app: Guard,
    _screen: Guard,
    home: tempfile::TempDir,
}

impl Window {
    fn open(prepare: impl FnOnce(&Path)) -> Self {
        let home = tempfile::tempdir().unwrap();
        prepare(home.path());
        let log = home.path().join("window.log");
        let mut screen = Command::new("Xvfb")
            .args(["-displayfd", "1", "-screen", "0", "1440x900x24", "-nolisten", "tcp"])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // Xvfb writes the number of the free display that it took.
        let mut number = String::new();
        let mut output = screen.stdout.take().unwrap();
        let screen = Guard(screen);
        let mut byte = [0];
        while output.read(&mut byte).unwrap() == 1 && byte[0] != b'\n' {
            number.push(char::from(byte[0]));
        }
        let display = format!(":{number}");
        let app = Command::new(env!("CARGO_BIN_EXE_tandem"))
            .env("DISPLAY", &display)
            .env_remove("WAYLAND_DISPLAY")
            .env("LIBGL_ALWAYS_SOFTWARE", "1")
            .env("XDG_RUNTIME_DIR", home.path())
            .env("TANDEM_HOME", home.path())
            .env("TANDEM_WINDOW_LOG", &log)
            .spawn()
            .unwrap();
        let mut window = Self { display, id: String::new(), log, _app: Guard(app), _screen: screen, home };
        window.wait_for("state screen home", 60);
        window.id = wait("the window", 20, || {
            let id = window.xdotool(&["search", "--onlyvisible", "--name", "^Tandem$"]);
            id.lines().next().map(str::to_owned)
        });
        // No window manager here gives the focus away.
        window.xdotool(&["windowfocus", &window.id]);
        window
    }

    fn xdotool(&self, args: &[&str]) -> String {
        let output = Command::new("xdotool").args(args).env("DISPLAY", &self.display).output().unwrap();
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }

    fn said(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    fn wait_for(&self, line: &str, seconds: u64) {
        wait(line, seconds, || self.said().lines().any(|l| l.starts_with(line)).then_some(()));
    }

    /// The last value of a piece of state.
    fn state(&self, key: &str) -> Option<String> {
        let start = format!("state {key} ");
        self.said().lines().rev().find_map(|line| line.strip_prefix(&start).map(str::to_owned))
    }

    /// Clicks a widget once it stays where it is: a dialog is placed in its second frame.
    fn click(&self, name: &str) {
        let start = format!("rect {name} ");
        let place = || self.said().lines().rev().find_map(|line| line.strip_prefix(&start).map(str::to_owned));
        let place = wait(name, 20, || {
            let before = place()?;
            std::thread::sleep(Duration::from_millis(250));
            place().filter(|now| *now == before)
        });
        let numbers: Vec<f32> = place.split(' ').filter_map(|n| n.parse().ok()).collect();
        let [x, y, width, height] = numbers[..] else { panic!("{name}: {place}") };
        let (x, y) = ((x + width / 2.0).round().to_string(), (y + height / 2.0).round().to_string());
        self.xdotool(&["mousemove", "--window", &self.id, &x, &y, "sleep", "0.1", "click", "1"]);
    }

    fn press(&self, keys: &str) {
        self.xdotool(&["key", keys]);
    }
}

fn wait<T>(what: &str, seconds: u64, mut found: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(value) = found() {
            return value;
        }
        assert!(began.elapsed() < Duration::from_secs(seconds), "timed out waiting for {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn the_window_opens_and_answers_to_mouse_and_keyboard() {
    require_tools();
    let window = Window::open(|_| {});
    window.click("Runs");
    window.wait_for("state screen runs", 20);
    window.press("ctrl+1");
    wait("home", 20, || (window.state("screen")? == "home").then_some(()));
    let dark = window.state("dark");
    // Two of the three choices differ from the first.
    window.click("Next theme");
    std::thread::sleep(Duration::from_millis(300));
    window.press("ctrl+t");
    wait("the other theme", 20, || window.said().lines().filter(|l| l.starts_with("state dark")).nth(1).map(|_| ()));
    assert!(dark.is_some());
    window.press("ctrl+q");
    wait("the settings to be written", 20, || window.home.path().join("window.ron").exists().then_some(()));
}

#[test]
fn one_click_trains_the_starter_model() {
    require_tools();
    let never = std::sync::atomic::AtomicBool::new(false);
    let model = tandem::session::starter::fetch_blocking(&mut |_, _, _| {}, &never).unwrap().unwrap();
    // Says that the file was checked, so that the window does not hash it again.
    let marker = PathBuf::from(format!("{}.checked", model.display()));
    let window = Window::open(|home| {
        let models = home.join("models");
        std::fs::create_dir_all(&models).unwrap();
        for path in [&model, &marker] {
            std::os::unix::fs::symlink(path, models.join(path.file_name().unwrap())).unwrap();
        }
    });
    window.click("starter");
    window.wait_for("state screen live", 30);
    window.wait_for("state run running", 120);
    // Our own code is not optimized in a debug build: one step takes minutes there.
    let (steps, patience) = if cfg!(debug_assertions) { (1, 1200) } else { (3, 300) };
    wait("the first steps", patience, || (window.state("steps")?.parse::<u64>().ok()? >= steps).then_some(()));
    let loss: f64 = window.state("loss").unwrap().parse().unwrap();
    assert!(loss > 0.5 && loss < 8.0, "loss {loss}");

    window.click("Stop");
    window.click("Stop and save");
    window.wait_for("state run stopping", 20);
    wait("the end of the run", 120, || (window.state("run")? == "stopped").then_some(()));
    let runs: Vec<PathBuf> =
        std::fs::read_dir(window.home.path().join("runs")).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(runs.len(), 1, "{runs:?}");
    let view = tandem::session::run_view::RunView::load(&runs[0]).unwrap();
    assert!(view.steps.len() as u64 >= steps);
    assert!(!view.saved.is_empty(), "the adapter is saved on stop");
}
