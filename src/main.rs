//! The `tandem` program: the command line; without a command it opens the window.

mod cli;

fn main() -> std::process::ExitCode {
    cli::main()
}
