//! Commands as named, timed steps with a summary at the end. No step is skipped without a line that says so.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use crate::Result;

/// How a step ended.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Outcome {
    Passed,
    Failed,
    /// Not run, and why.
    NotRun(String),
}

/// The steps of one task, in order.
#[derive(Debug, Default)]
pub struct Steps {
    done: Vec<(String, Outcome, Duration)>,
}

impl Steps {
    /// Runs a step; a failure is remembered, and the next steps can still run.
    pub fn run(&mut self, name: &str, work: impl FnOnce() -> Result<()>) -> bool {
        println!("\n── {name}");
        flush();
        let start = Instant::now();
        let outcome = match work() {
            Ok(()) => Outcome::Passed,
            Err(message) => {
                flush();
                eprintln!("\nxtask: {name}: {message}");
                Outcome::Failed
            }
        };
        let passed = outcome == Outcome::Passed;
        self.done.push((name.to_owned(), outcome, start.elapsed()));
        passed
    }

    /// Notes that a step did not run, and why.
    pub fn not_run(&mut self, name: &str, why: &str) {
        println!("\n── {name}: not run: {why}");
        self.done.push((name.to_owned(), Outcome::NotRun(why.to_owned()), Duration::ZERO));
    }

    /// Prints the summary; the exit code says whether everything that ran has passed.
    pub fn finish(self) -> ExitCode {
        print!("\n{}", self.summary());
        flush();
        if self.failed() { ExitCode::FAILURE } else { ExitCode::SUCCESS }
    }

    fn failed(&self) -> bool {
        self.done.iter().any(|(_, outcome, _)| *outcome == Outcome::Failed)
    }

    fn summary(&self) -> String {
        let width = self.done.iter().map(|(name, ..)| name.chars().count()).max().unwrap_or(0);
        let mut text = String::from("── summary\n");
        for (name, outcome, took) in &self.done {
            let line = match outcome {
                Outcome::Passed => format!("ok       {name:width$}  {:>7.1} s\n", took.as_secs_f64()),
                Outcome::Failed => format!("FAILED   {name:width$}  {:>7.1} s\n", took.as_secs_f64()),
                Outcome::NotRun(why) => format!("not run  {name:width$}  {why}\n"),
            };
            text.push_str(&line);
        }
        let total: Duration = self.done.iter().map(|(.., took)| *took).sum();
        let word = if self.failed() { "FAILED" } else { "passed" };
        text.push_str(&format!("{word} in {:.1} s\n", total.as_secs_f64()));
        text
    }
}

fn flush() {
    // A closed pipe is no reason to stop working.
    let _ = std::io::stdout().flush();
}

/// The folder of the workspace.
pub fn root() -> PathBuf {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    own.ancestors().nth(2).unwrap_or(own).to_path_buf()
}

/// The cargo that runs this program.
pub fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    command
}

/// Shows and runs a command, and waits for it.
///
/// # Errors
/// When it does not start or does not succeed.
pub fn shell(command: &mut Command) -> Result<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    let program = Path::new(&program).file_name().map_or(program.clone(), |n| n.to_string_lossy().into_owned());
    let words: Vec<String> =
        std::iter::once(program.clone()).chain(command.get_args().map(|a| a.to_string_lossy().into_owned())).collect();
    println!("$ {}", words.join(" "));
    flush();
    let status = command.status().map_err(|e| format!("{program} does not start: {e}"))?;
    if status.success() { Ok(()) } else { Err(format!("`{}` failed ({status})", words.join(" "))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_failure_fails_the_task_and_the_rest_still_runs() {
        let mut steps = Steps::default();
        assert!(steps.run("first", || Ok(())));
        assert!(!steps.run("second", || Err("broken".into())));
        assert!(steps.run("third", || Ok(())));
        steps.not_run("fourth", "no tool");
        let summary = steps.summary();
        assert!(steps.failed());
        assert!(summary.contains("ok       first"), "{summary}");
        assert!(summary.contains("FAILED   second"), "{summary}");
        assert!(summary.contains("not run  fourth  no tool"), "{summary}");
    }

    #[test]
    fn a_command_reports_its_status() {
        assert_eq!(shell(&mut Command::new("true")), Ok(()));
        assert!(shell(&mut Command::new("false")).is_err_and(|e| e.starts_with("`false` failed")));
        assert!(shell(&mut Command::new("no-such-program-here")).is_err_and(|e| e.contains("does not start")));
    }

    #[test]
    fn the_root_holds_the_workspace() {
        assert!(root().join("Cargo.lock").is_file());
        assert!(root().join("packaging/xtask").is_dir());
    }
}
