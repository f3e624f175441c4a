//! CUDA kernels: compiled ahead of time without a GPU, and what a GPU machine needs to test them.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Result;
use crate::steps::{cargo, root, shell};
use crate::tasks;

/// The compiler and its headers, as pinned packages of the Python package index. 12.9 makes images that older drivers take.
const PACKAGES: [&str; 3] =
    ["nvidia-cuda-nvrtc-cu12==12.9.86", "nvidia-cuda-runtime-cu12==12.9.79", "nvidia-cuda-cccl-cu12==12.9.27"];

/// Compiles what changed in `kernels/` into `kernels/build/kernels.zip`, which the build embeds.
pub fn build() -> Result<()> {
    let toolchain = root().join("target/nvrtc");
    install(&toolchain)?;
    shell(Command::new("python3").arg(root().join("packaging/nvrtc.py")).arg(&toolchain).arg(root().join("kernels")))
}

fn install(toolchain: &Path) -> Result<()> {
    let marker = toolchain.join("packages.txt");
    let wanted = PACKAGES.join("\n");
    if std::fs::read_to_string(&marker).is_ok_and(|found| found == wanted) {
        return Ok(());
    }
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--disable-pip-version-check"]);
    pip.arg("--target").arg(toolchain).args(PACKAGES);
    shell(&mut pip).map_err(|why| format!("the CUDA compiler could not be installed with pip: {why}"))?;
    std::fs::write(&marker, wanted).map_err(|e| format!("{}: {e}", marker.display()))
}

/// Builds the `gpu` tests and `tandem` in release and puts them, stripped, into `.gpu-stage`: what a GPU machine without Rust needs.
pub fn stage() -> Result<()> {
    build()?;
    shell(cargo().args(["build", "--release", "--locked", "--bin", "tandem"]))?;
    let mut test = cargo();
    test.args(["test", "--release", "--locked", "--test", "gpu", "--no-run", "--message-format=json"]);
    let output = test.output().map_err(|e| format!("cargo does not start: {e}"))?;
    if !output.status.success() {
        return Err(format!("the gpu tests do not build:\n{}", String::from_utf8_lossy(&output.stderr)));
    }
    let messages = String::from_utf8_lossy(&output.stdout).into_owned();
    let executable = messages
        .lines()
        .filter(|line| line.contains("\"name\":\"gpu\""))
        .find_map(|line| line.split("\"executable\":\"").nth(1)?.split('"').next())
        .ok_or("cargo did not say where the gpu test binary is")?;
    let stage = root().join(".gpu-stage");
    std::fs::create_dir_all(&stage).map_err(|e| format!("{}: {e}", stage.display()))?;
    for (from, name) in [(PathBuf::from(executable), "gpu"), (tasks::tandem(), "tandem")] {
        let to = stage.join(name);
        std::fs::copy(&from, &to).map_err(|e| format!("{}: {e}", from.display()))?;
        shell(Command::new("strip").arg(&to))?;
        let bytes = std::fs::metadata(&to).map_err(|e| format!("{}: {e}", to.display()))?.len();
        println!("{}: {:.1} MiB", to.display(), bytes as f64 / f64::from(1 << 20));
    }
    Ok(())
}
