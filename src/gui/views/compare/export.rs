//! Reports as files: one HTML page that needs nothing else, or JSON.

use std::path::{Path, PathBuf};

use crate::base::error::Result;
use crate::base::files;
use crate::session::compare::{self, CompareReport};
use crate::session::runtime::{Task, Waker};

/// Asks for a file with the system's dialog and writes the reports into it. Without a result when the user closes the dialog.
pub fn ask_and_write(reports: Vec<CompareReport>, waker: Waker) -> Task<PathBuf> {
    Task::future(Some(waker), async move {
        let picked = rfd::AsyncFileDialog::new()
            .set_title("Export the comparison")
            .set_file_name("comparison.html")
            .add_filter("Web page", &["html"])
            .add_filter("JSON", &["json"])
            .save_file();
        let Some(file) = picked.await else { return Ok(None) };
        let path = file.path().to_owned();
        write(&path, &reports)?;
        Ok(Some(path))
    })
}

/// Writes the reports: as JSON where the name ends so, else as a page.
fn write(path: &Path, reports: &[CompareReport]) -> Result<()> {
    let as_json = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("json"));
    files::write_atomic(path, |out| {
        if as_json {
            serde_json::to_writer_pretty(out, reports)?;
        } else {
            out.write_all(compare::html(reports).as_bytes())?;
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_decides_the_format() {
        let folder = tempfile::tempdir().unwrap();
        let read = |name: &str| {
            let path = folder.path().join(name);
            write(&path, &[]).unwrap();
            std::fs::read_to_string(path).unwrap()
        };
        assert_eq!(read("a.JSON"), "[]");
        assert!(read("a.html").starts_with("<!doctype html>"));
        assert!(write(&folder.path().join("no such folder/a.html"), &[]).is_err());
    }
}
