//! Files that are either complete or not there: write beside the target, flush to disk, rename.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use anyhow::{Context as _, bail};

use super::error::Result;

/// Write the file `path` through `fill`. The file appears under its name only when everything is on disk; on any error
/// an older file of that name stays as it was.
///
/// # Errors
/// When the folder of `path` does not exist or cannot be written to, the disk is full, or `fill` fails.
pub fn write_atomic(path: &Path, fill: impl FnOnce(&mut dyn Write) -> Result<()>) -> Result<()> {
    let context = || format!("cannot write {}", path.display());
    let folder = match path.parent() {
        Some(p) if p.as_os_str().is_empty() => Path::new("."),
        Some(p) => p,
        None => bail!("{} is not the name of a file", path.display()),
    };
    let mut builder = tempfile::Builder::new();
    builder.prefix(".tandem-").suffix(".part");
    // A temporary file is private by default; the finished one gets the rights of any new file.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let mut temp = builder.tempfile_in(folder).with_context(context)?;
    let mut writer = BufWriter::with_capacity(1 << 20, temp.as_file_mut());
    fill(&mut writer).with_context(context)?;
    writer.flush().with_context(context)?;
    drop(writer);
    temp.as_file().sync_all().with_context(context)?;
    temp.persist(path).with_context(context)?;
    sync_folder(folder);
    Ok(())
}

/// Make the folder `path` through `fill`, which gets an empty folder to write into. It appears under its name only when
/// `fill` has succeeded; its missing parents are created. An empty folder of that name is replaced.
///
/// # Errors
/// When `path` is there and not an empty folder, its parent cannot be written to, or `fill` fails.
pub fn create_folder_atomic(path: &Path, fill: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let context = || format!("cannot create {}", path.display());
    if let Ok(mut entries) = std::fs::read_dir(path) {
        if entries.next().is_some() {
            bail!("{} is there already and not empty; choose another folder", path.display());
        }
        std::fs::remove_dir(path).with_context(context)?;
    } else if path.exists() {
        bail!("{} is there already and not a folder; choose another name", path.display());
    }
    let parent = match path.parent() {
        Some(p) if p.as_os_str().is_empty() => Path::new("."),
        Some(p) => p,
        None => bail!("{} is not the name of a folder", path.display()),
    };
    std::fs::create_dir_all(parent).with_context(context)?;
    let mut builder = tempfile::Builder::new();
    builder.prefix(".tandem-").suffix(".part");
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o777));
    let temp = builder.tempdir_in(parent).with_context(context)?;
    fill(temp.path())?;
    sync_folder(temp.path());
    std::fs::rename(temp.path(), path).with_context(context)?;
    // It has another name now: nothing is left to remove.
    let _ = temp.keep();
    sync_folder(parent);
    Ok(())
}

/// Ask the system to put a folder's own entries on disk, so that a rename survives a power cut. Where folders cannot be
/// flushed (Windows, some network file systems) the rename is still atomic, so a failure is not an error.
pub fn sync_folder(folder: &Path) {
    if let Ok(handle) = File::open(folder) {
        let _ = handle.sync_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_leaves_the_old_file_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.txt");
        write_atomic(&path, |w| Ok(w.write_all(b"old")?)).unwrap();
        let failed = write_atomic(&path, |w| {
            w.write_all(b"new")?;
            bail!("no more")
        });
        assert!(failed.is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn missing_folders_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let e = write_atomic(&dir.path().join("no/x.txt"), |_| Ok(())).unwrap_err();
        assert!(format!("{e:#}").contains("x.txt"));
    }

    #[test]
    fn folders_appear_complete_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deep/x");
        let failed = create_folder_atomic(&path, |f| {
            std::fs::write(f.join("a"), "1")?;
            bail!("no more")
        });
        assert!(failed.is_err());
        assert_eq!(std::fs::read_dir(dir.path().join("deep")).unwrap().count(), 0);
        std::fs::create_dir(&path).unwrap();
        create_folder_atomic(&path, |f| Ok(std::fs::write(f.join("a"), "1")?)).unwrap();
        assert_eq!(std::fs::read(path.join("a")).unwrap(), b"1");
        assert_eq!(std::fs::read_dir(dir.path().join("deep")).unwrap().count(), 1);
        let e = create_folder_atomic(&path, |_| Ok(())).unwrap_err();
        assert!(format!("{e:#}").contains("not empty"));
        assert_eq!(std::fs::read(path.join("a")).unwrap(), b"1");
    }

    #[cfg(unix)]
    #[test]
    fn others_may_read_what_the_umask_lets_them_read() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let (ours, plain) = (dir.path().join("a"), dir.path().join("b"));
        write_atomic(&ours, |_| Ok(())).unwrap();
        File::create(&plain).unwrap();
        let mode = |p: &Path| std::fs::metadata(p).unwrap().permissions().mode();
        assert_eq!(mode(&ours), mode(&plain));
    }
}
