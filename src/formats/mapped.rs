//! Files mapped into memory for reading.

use std::fs::File;
use std::path::Path;

use anyhow::{Context as _, bail};
use memmap2::Mmap;

use crate::base::error::Result;

/// Map the file at `path` for reading.
///
/// The file must not be truncated by another program while it is mapped: reading a page that is gone ends the process.
/// Tandem itself only ever replaces model files by rename, which leaves an existing map intact.
///
/// # Errors
/// When `path` is not a regular file, cannot be read, or is empty.
pub fn open(path: &Path) -> Result<Mmap> {
    let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let meta = file.metadata().with_context(|| format!("cannot read {}", path.display()))?;
    if !meta.is_file() {
        bail!("{} is not a file", path.display());
    }
    if meta.len() == 0 {
        bail!("{} is empty: the download or copy did not finish; fetch it again", path.display());
    }
    // SAFETY: the map is read-only and private to this process; the documentation states what the file must not undergo.
    unsafe { Mmap::map(&file) }.with_context(|| format!("cannot map {} into memory", path.display()))
}
