//! The tasks themselves, each a short list of steps.

use std::path::PathBuf;
use std::process::{Command, ExitCode};

use crate::Result;
use crate::kernels;
use crate::needs::{self, TO_BUILD, TO_SHOW, TO_TEST};
use crate::setup;
use crate::steps::{Steps, cargo, root, shell};

/// `cargo xtask run`: everything from a bare machine to the open window.
pub fn run(arguments: &[String]) -> Result<ExitCode> {
    let opens_window = arguments.is_empty();
    if opens_window {
        setup::ensure(&[TO_BUILD, TO_SHOW])?;
        has_screen()?;
    } else {
        setup::ensure(&[TO_BUILD])?;
    }
    fetch_crates()?;
    if let Err(why) = kernels::build() {
        // The app trains on the CPU without them, and says what is missing.
        eprintln!("xtask: no GPU kernels in this build: {why}");
    }
    shell(cargo().args(["build", "--release", "--locked"]))?;
    if let Err(why) = fetch_starter() {
        // The window can fetch it too, and shows where it stands: go on, but do not hide it.
        eprintln!("xtask: the starter model is not here: {why}");
    }
    let status = Command::new(tandem()).args(arguments).status().map_err(|e| format!("tandem does not start: {e}"))?;
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    Ok(code.map_or(ExitCode::FAILURE, ExitCode::from))
}

/// `cargo xtask test`: everything CI checks, on a bare machine too.
pub fn test() -> Result<ExitCode> {
    let mut steps = Steps::default();
    // Without these two nothing else can work.
    let ready = steps.run("set up", || {
        setup::ensure(&[TO_BUILD, TO_SHOW, TO_TEST])?;
        setup::ensure_rust_components()
    }) && steps.run("download crates", fetch_crates);
    if !ready {
        return Ok(steps.finish());
    }
    steps.run("formatting", || shell(cargo().args(["fmt", "--all", "--check"])));
    // One profile for everything: the dependencies' build scripts and the C code of SQLite are compiled once.
    steps.run("clippy", || clippy(&["--release"]));
    steps.run("GPU kernels", kernels::build);
    let built =
        steps.run("build", || shell(cargo().args(["test", "--release", "--locked", "--workspace", "--no-run"])));
    if built {
        // Tests of the real model need it.
        steps.run("starter model", fetch_starter);
        steps.run("tests", || shell(cargo().args(["test", "--release", "--locked", "--workspace", "--no-fail-fast"])));
    } else {
        steps.not_run("tests", "the build failed");
    }
    deny(&mut steps);
    Ok(steps.finish())
}

/// `cargo xtask check`: what is quick enough for every commit; in the profile of the edit loop.
pub fn check() -> Result<ExitCode> {
    setup::ensure_rust_components()?;
    let mut steps = Steps::default();
    steps.run("formatting", || shell(cargo().args(["fmt", "--all", "--check"])));
    steps.run("clippy", || clippy(&[]));
    steps.run("architecture", || shell(cargo().args(["test", "--test", "architecture"])));
    Ok(steps.finish())
}

/// `cargo xtask golden [folder]`: the tests against reference values.
pub fn golden(arguments: &[String]) -> Result<ExitCode> {
    let mut test = cargo();
    test.args(["test", "--release", "--locked", "golden"]);
    match arguments {
        [] => {}
        [folder] => {
            let folder = std::path::absolute(folder).map_err(|e| format!("{folder}: {e}"))?;
            if !folder.is_dir() {
                return Err(format!("{} is not a folder", folder.display()));
            }
            test.env("TANDEM_GOLDEN", folder);
        }
        [_, second, ..] => return Err(format!("`cargo xtask golden` takes one folder, but got `{second}` too")),
    }
    starter()?;
    shell(&mut test)?;
    Ok(ExitCode::SUCCESS)
}

/// `cargo xtask starter`: the starter model, fetched and verified.
pub fn starter() -> Result<ExitCode> {
    setup::ensure(&[TO_BUILD])?;
    shell(cargo().args(["build", "--release", "--locked"]))?;
    fetch_starter()?;
    Ok(ExitCode::SUCCESS)
}

/// `cargo xtask setup`: what `run` and `test` need.
pub fn setup() -> Result<ExitCode> {
    setup::ensure(&[TO_BUILD, TO_SHOW, TO_TEST])?;
    setup::ensure_rust_components()?;
    println!("Everything that `cargo xtask run` and `cargo xtask test` need is here.");
    Ok(ExitCode::SUCCESS)
}

fn clippy(profile: &[&str]) -> Result<()> {
    shell(cargo().arg("clippy").args(profile).args([
        "--locked",
        "--workspace",
        "--all-targets",
        "--",
        "--deny",
        "warnings",
    ]))
}

/// Licences, banned crates, sources and known vulnerabilities, with cargo-deny.
fn deny(steps: &mut Steps) {
    const LICENCES: &str = "licences and sources";
    const ADVISORIES: &str = "advisories";
    if !needs::runs(&["cargo", "deny", "--version"]) {
        let why = "cargo-deny is not installed (`cargo install --locked cargo-deny`)";
        steps.not_run(LICENCES, why);
        steps.not_run(ADVISORIES, why);
        return;
    }
    let deny = || {
        let mut command = cargo();
        command.args(["deny", "--locked"]);
        command
    };
    steps.run(LICENCES, || shell(deny().args(["check", "licenses", "bans", "sources"])));
    // The database is a git repository on another server: whether it can be reached says nothing about this tree.
    match shell(deny().args(["fetch", "db"])) {
        Ok(()) => {
            steps.run(ADVISORIES, || shell(deny().args(["check", "--disable-fetch", "advisories"])));
        }
        Err(_) => steps.not_run(ADVISORIES, "the advisory database cannot be reached: check the network"),
    }
}

fn fetch_crates() -> Result<()> {
    let mut fetch = cargo();
    fetch.args(["fetch", "--locked"]);
    if let Some(host) = host() {
        fetch.args(["--target", &host]);
    }
    shell(&mut fetch).map_err(|e| {
        format!(
            "{e}. If it could not reach the registry, check the network (behind a proxy, set HTTPS_PROXY) and try again"
        )
    })
}

/// The target triple of this machine, so that crates of other systems are not downloaded.
fn host() -> Option<String> {
    let output = Command::new("rustc").arg("-vV").output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    text.lines().find_map(|line| line.strip_prefix("host: ")).map(str::to_owned)
}

fn fetch_starter() -> Result<()> {
    shell(Command::new(tandem()).args(["starter", "fetch"]))
}

/// The release build of the app.
pub(crate) fn tandem() -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), |t| root().join(t));
    target.join("release").join(format!("tandem{}", std::env::consts::EXE_SUFFIX))
}

/// Whether there is a screen to open a window on; asked before the long build.
fn has_screen() -> Result<()> {
    let set = |name| std::env::var_os(name).is_some_and(|v| !v.is_empty());
    if !cfg!(target_os = "linux") || set("DISPLAY") || set("WAYLAND_DISPLAY") {
        return Ok(());
    }
    Err("there is no screen here (neither DISPLAY nor WAYLAND_DISPLAY is set).\n\
         Start it from a desktop session, on a virtual screen (`Xvfb :9 & DISPLAY=:9 cargo xtask run`),\n\
         or train without a window: `cargo xtask run train assets/examples/starter.toml`"
        .to_owned())
}
