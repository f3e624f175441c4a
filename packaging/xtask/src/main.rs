//! Project tasks: `cargo xtask run` opens the app, `cargo xtask test` checks everything; both first set up what is missing.
//!
//! No dependencies: it must compile in a second on a bare machine, before anything else is there.

mod kernels;
mod needs;
mod setup;
mod steps;
mod tasks;

use std::process::ExitCode;

/// Errors here are for people: one text that says what happened and what to do.
type Result<T> = std::result::Result<T, String>;

const HELP: &str = "\
cargo xtask <task>

  run [arguments]   set up what is missing, build, fetch the starter model, open the window;
                    arguments go to tandem: `cargo xtask run train run.toml`
  test              set up what is missing, then formatting, clippy, every test, cargo-deny: what CI runs
  check             the quick part, for before a commit: formatting, clippy, the architecture tests
  golden [folder]   the tests against reference values (default: tests/golden)
  starter           fetch the starter model
  kernels           compile the CUDA kernels that changed; the next build embeds them (no GPU or CUDA toolkit needed)
  stage-gpu         build the gpu tests and tandem into .gpu-stage, to be run on a machine with a GPU
  setup             install what `run` and `test` need, and nothing else
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (task, rest) = match arguments.split_first() {
        Some((task, rest)) => (task.as_str(), rest),
        None => ("help", &[][..]),
    };
    let outcome = match task {
        "run" => tasks::run(rest),
        "test" => no_arguments(task, rest).and_then(|()| tasks::test()),
        "check" => no_arguments(task, rest).and_then(|()| tasks::check()),
        "golden" => tasks::golden(rest),
        "starter" => no_arguments(task, rest).and_then(|()| tasks::starter()),
        "kernels" => no_arguments(task, rest).and_then(|()| kernels::build()).map(|()| ExitCode::SUCCESS),
        "stage-gpu" => no_arguments(task, rest).and_then(|()| kernels::stage()).map(|()| ExitCode::SUCCESS),
        "setup" => no_arguments(task, rest).and_then(|()| tasks::setup()),
        "help" | "-h" | "--help" => {
            print!("{HELP}");
            Ok(ExitCode::SUCCESS)
        }
        other => Err(format!("there is no task `{other}`\n\n{HELP}")),
    };
    outcome.unwrap_or_else(|message| {
        eprintln!("\nxtask: {message}");
        ExitCode::FAILURE
    })
}

fn no_arguments(task: &str, rest: &[String]) -> Result<()> {
    match rest {
        [] => Ok(()),
        [first, ..] => Err(format!("`cargo xtask {task}` takes no arguments, but got `{first}`")),
    }
}
