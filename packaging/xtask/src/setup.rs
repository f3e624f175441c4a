//! Installs what is missing with the system's package manager, or says which one command does.

use std::collections::BTreeSet;
use std::process::Command;

use crate::Result;
use crate::needs::{self, Need};

/// A package manager that this program can drive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Manager {
    Apt,
    Dnf,
    Pacman,
    Zypper,
}

impl Manager {
    const ALL: [Manager; 4] = [Manager::Apt, Manager::Dnf, Manager::Pacman, Manager::Zypper];

    fn program(self) -> &'static str {
        match self {
            Manager::Apt => "apt-get",
            Manager::Dnf => "dnf",
            Manager::Pacman => "pacman",
            Manager::Zypper => "zypper",
        }
    }

    fn package(self, need: &Need) -> &'static str {
        match self {
            Manager::Apt => need.apt,
            Manager::Dnf => need.dnf,
            Manager::Pacman => need.pacman,
            Manager::Zypper => need.zypper,
        }
    }

    /// The commands that install `packages`, in order, each as its words.
    fn commands(self, packages: &BTreeSet<&'static str>) -> Vec<Vec<&'static str>> {
        let mut commands = Vec::new();
        let mut install = match self {
            Manager::Apt => {
                commands.push(vec!["apt-get", "update"]);
                vec!["apt-get", "install", "--yes", "--no-install-recommends"]
            }
            Manager::Dnf => vec!["dnf", "install", "--assumeyes"],
            Manager::Pacman => vec!["pacman", "--sync", "--refresh", "--needed", "--noconfirm"],
            Manager::Zypper => vec!["zypper", "--non-interactive", "install"],
        };
        install.extend(packages);
        commands.push(install);
        commands
    }

    fn of_this_system() -> Option<Manager> {
        Manager::ALL.into_iter().find(|m| needs::runs(&[m.program(), "--version"]))
    }
}

/// Makes sure that everything in `lists` is there.
///
/// # Errors
/// When something is missing that cannot be installed from here; the message holds the one command to run.
pub fn ensure(lists: &[&[Need]]) -> Result<()> {
    if !cfg!(target_os = "linux") {
        println!(
            "Nothing to install: this system brings its own windows. Rust, a C compiler and Python 3 with pip are needed."
        );
        return Ok(());
    }
    let missing = missing(lists);
    if missing.is_empty() {
        return Ok(());
    }
    println!("Missing: {}", names(&missing));
    let Some(manager) = Manager::of_this_system() else {
        return Err(format!(
            "no known package manager (apt, dnf, pacman, zypper) to install what is missing.\n\
             Install these yourself, then run this again: {}",
            names(&missing)
        ));
    };
    let packages: BTreeSet<&'static str> = missing.iter().map(|n| manager.package(n)).collect();
    let commands = manager.commands(&packages);
    if !is_root() {
        return Err(format!(
            "some system packages are missing. Run this, then try again:\n\n    {}",
            as_one_line(&commands)
        ));
    }
    for words in &commands {
        println!("$ {}", words.join(" "));
        let (program, arguments) = words.split_first().ok_or("an empty command")?;
        let status = Command::new(program)
            .args(arguments)
            .env("DEBIAN_FRONTEND", "noninteractive")
            .status()
            .map_err(|e| format!("{program} does not start: {e}"))?;
        if !status.success() {
            return Err(format!(
                "`{}` failed ({status}). If it could not reach its servers, check the network and the system's package sources.\n\
                 Once that works, run this, then try again:\n\n    {}",
                words.join(" "),
                as_one_line(&commands)
            ));
        }
    }
    let still = self::missing(lists);
    if still.is_empty() {
        return Ok(());
    }
    Err(format!(
        "the packages were installed, but this is still missing: {}. Install it by hand and try again.",
        names(&still)
    ))
}

/// Makes sure that rustfmt and clippy are there; rustup's minimal profile leaves them out.
///
/// # Errors
/// When they are missing and rustup cannot add them.
pub fn ensure_rust_components() -> Result<()> {
    let has = |tool| needs::runs(&["cargo", tool, "--version"]);
    let missing: Vec<&str> =
        [("fmt", "rustfmt"), ("clippy", "clippy")].into_iter().filter(|(tool, _)| !has(tool)).map(|(_, c)| c).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let command = format!("rustup component add {}", missing.join(" "));
    println!("$ {command}");
    let added = Command::new("rustup").args(["component", "add"]).args(&missing).status();
    match added {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("`{command}` failed ({status}): check the network, then run it by hand")),
        Err(_) => Err(format!(
            "{} is missing, and there is no rustup to add it: install the package of your system that holds it",
            missing.join(" and ")
        )),
    }
}

fn missing<'a>(lists: &[&'a [Need]]) -> Vec<&'a Need> {
    lists.iter().flat_map(|list| list.iter()).filter(|need| !need.is_met()).collect()
}

fn names(needs: &[&Need]) -> String {
    let names: Vec<String> = needs
        .iter()
        .map(|n| match n.probe {
            needs::Probe::Library(file) => format!("{} ({file})", n.what),
            _ => n.what.to_owned(),
        })
        .collect();
    names.join(", ")
}

fn is_root() -> bool {
    Command::new("id").arg("-u").output().is_ok_and(|o| o.stdout.trim_ascii() == b"0")
}

/// The commands as one line for a user who is not root.
fn as_one_line(commands: &[Vec<&'static str>]) -> String {
    commands.iter().map(|words| format!("sudo {}", words.join(" "))).collect::<Vec<_>>().join(" && ")
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use super::*;
    use crate::needs::Probe;

    #[test]
    fn apt_installs_in_one_line() {
        let packages = BTreeSet::from(["xvfb", "libegl1"]);
        assert_eq!(
            as_one_line(&Manager::Apt.commands(&packages)),
            "sudo apt-get update && sudo apt-get install --yes --no-install-recommends libegl1 xvfb"
        );
    }

    #[test]
    fn a_missing_library_is_named_with_its_file() {
        let absent = [Need {
            what: "flight",
            probe: Probe::Library("libflight.so.7"),
            apt: "a",
            dnf: "d",
            pacman: "p",
            zypper: "z",
        }];
        let found = missing(&[&absent]);
        assert_eq!(names(&found), "flight (libflight.so.7)");
        assert_eq!(Manager::ALL.map(|m| m.package(found[0])), ["a", "d", "p", "z"]);
    }

    #[test]
    fn every_need_names_a_package_everywhere() {
        for need in [needs::TO_BUILD, needs::TO_SHOW, needs::TO_TEST].into_iter().flatten() {
            for manager in Manager::ALL {
                let package = manager.package(need);
                assert!(!package.is_empty() && !package.contains(' '), "{}: {package:?}", need.what);
            }
        }
    }

    #[test]
    fn a_command_that_fails_is_not_there() {
        assert!(needs::runs(&["true"]));
        assert!(!needs::runs(&["false"]));
        assert!(!needs::runs(&["no-such-program-here"]));
    }
}
