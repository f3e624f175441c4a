//! Algorithms that were chosen by timing, kept in a file: equal runs on one machine take equal algorithms, and so give equal bits.
//!
//! An algorithm is 64 opaque bytes that NVIDIA lets programs store for the same version of the library. The file is JSON; one that is missing,
//! broken or of another format counts as empty.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::Case;
use crate::base::error::Result;
use crate::base::{files, paths};

/// The 64 bytes of an algorithm, as the library's eight words.
pub type Algorithm = [u64; 8];

/// Format of the file; others are ignored.
const FORMAT: u32 = 1;

/// What a choice holds for, beside its case.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Maker {
    /// Name of the card.
    pub card: String,
    /// Its compute capability, major and minor.
    pub compute_capability: (u32, u32),
    /// Version of the library, for example 130100.
    pub cublaslt: usize,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Entry {
    maker: Maker,
    case: Case,
    /// The algorithm's words as 128 hexadecimal digits.
    algorithm: String,
}

#[derive(Serialize, Deserialize)]
struct Document {
    format: u32,
    choices: Vec<Entry>,
}

/// The choices of one card and library, in their file.
#[derive(Debug)]
pub struct Choices {
    path: PathBuf,
    maker: Maker,
}

impl Choices {
    /// The choices in the user's cache folder.
    ///
    /// # Errors
    /// As [`paths::cache`].
    pub fn of_user(maker: Maker) -> Result<Self> {
        Ok(Self { path: paths::cache()?.join("cublaslt.json"), maker })
    }

    /// The algorithm that was kept for `case`.
    pub fn find(&self, case: &Case) -> Option<Algorithm> {
        self.in_entries(&self.read(), case)
    }

    /// Keeps `algorithm` for `case`, and returns what is kept: another process may have been first.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn keep(&self, case: &Case, algorithm: Algorithm) -> Result<Algorithm> {
        let mut entries = self.read();
        if let Some(kept) = self.in_entries(&entries, case) {
            return Ok(kept);
        }
        entries.push(Entry { maker: self.maker.clone(), case: *case, algorithm: encode(algorithm) });
        if let Some(folder) = self.path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        files::write_atomic(&self.path, |out| {
            Ok(serde_json::to_writer_pretty(out, &Document { format: FORMAT, choices: entries })?)
        })?;
        Ok(algorithm)
    }

    fn in_entries(&self, entries: &[Entry], case: &Case) -> Option<Algorithm> {
        let entry = entries.iter().find(|entry| entry.maker == self.maker && entry.case == *case)?;
        decode(&entry.algorithm)
    }

    fn read(&self) -> Vec<Entry> {
        std::fs::read_to_string(&self.path).map(|text| parse(&text)).unwrap_or_default()
    }
}

/// The entries of a file that can be used.
fn parse(text: &str) -> Vec<Entry> {
    match serde_json::from_str::<Document>(text) {
        Ok(Document { format: FORMAT, mut choices }) => {
            choices.retain(|entry| decode(&entry.algorithm).is_some());
            choices
        }
        _ => Vec::new(),
    }
}

fn encode(algorithm: Algorithm) -> String {
    algorithm.iter().map(|word| format!("{word:016x}")).collect()
}

fn decode(text: &str) -> Option<Algorithm> {
    if text.len() != 128 || !text.bytes().all(|c| c.is_ascii_hexdigit()) {
        return None;
    }
    let mut words = [0; 8];
    for (i, word) in words.iter_mut().enumerate() {
        *word = u64::from_str_radix(text.get(i * 16..(i + 1) * 16)?, 16).ok()?;
    }
    Some(words)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::cuda::blaslt::{Form, Shape, tests::SHAPE};
    use crate::tensor::dtype::DType;

    const CASE: Case = Case { shape: SHAPE, alignment: 256 };
    const ALGORITHM: Algorithm = [0, 1, u64::MAX, 3, 0x0123_4567_89ab_cdef, 5, 6, 7];

    fn choices(folder: &std::path::Path) -> Choices {
        let maker = Maker { card: "NVIDIA H200".into(), compute_capability: (9, 0), cublaslt: 130_100 };
        Choices { path: folder.join("deep/cublaslt.json"), maker }
    }

    #[test]
    fn what_was_kept_is_found_again_and_stays() {
        let dir = tempfile::tempdir().unwrap();
        let ours = choices(dir.path());
        assert_eq!(ours.find(&CASE), None);
        assert_eq!(ours.keep(&CASE, ALGORITHM).unwrap(), ALGORITHM);
        let other = Case { shape: Shape { out: DType::F32, form: Form::Tn, ..SHAPE }, alignment: 64 };
        assert_eq!(ours.keep(&other, [9; 8]).unwrap(), [9; 8]);
        // The first one stays.
        assert_eq!(ours.keep(&CASE, [4; 8]).unwrap(), ALGORITHM);
        let again = choices(dir.path());
        assert_eq!((again.find(&CASE), again.find(&other)), (Some(ALGORITHM), Some([9; 8])));
    }

    #[test]
    fn every_part_of_the_key_counts() {
        let dir = tempfile::tempdir().unwrap();
        let ours = choices(dir.path());
        ours.keep(&CASE, ALGORITHM).unwrap();
        for change in [
            |s: &mut Shape| s.form = Form::Nn,
            |s: &mut Shape| s.m += 1,
            |s: &mut Shape| s.n += 1,
            |s: &mut Shape| s.k += 1,
            |s: &mut Shape| s.lda += 1,
            |s: &mut Shape| s.ldb += 1,
            |s: &mut Shape| s.ldc += 1,
            |s: &mut Shape| s.ld_source += 1,
            |s: &mut Shape| s.out = DType::F32,
        ] {
            let mut case = CASE;
            change(&mut case.shape);
            assert_eq!(ours.find(&case), None, "{case:?}");
        }
        assert_eq!(ours.find(&Case { alignment: 128, ..CASE }), None);
        for change in [
            |m: &mut Maker| m.card = "NVIDIA L4".into(),
            |m: &mut Maker| m.compute_capability = (9, 1),
            |m: &mut Maker| m.cublaslt += 1,
        ] {
            let mut foreign = choices(dir.path());
            change(&mut foreign.maker);
            assert_eq!(foreign.find(&CASE), None, "{foreign:?}");
            // Both live in one file.
            foreign.keep(&CASE, [8; 8]).unwrap();
            assert_eq!((foreign.find(&CASE), ours.find(&CASE)), (Some([8; 8]), Some(ALGORITHM)));
        }
    }

    #[test]
    fn broken_files_count_as_empty_and_are_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let ours = choices(dir.path());
        ours.keep(&CASE, ALGORITHM).unwrap();
        let good = std::fs::read_to_string(&ours.path).unwrap();
        for bad in [
            String::new(),
            "{".into(),
            "[1, 2]".into(),
            good[..good.len() / 2].into(),
            good.replace("\"format\": 1", "\"format\": 2"),
            good.replace(&encode(ALGORITHM), "00"),
            good.replace("0123456789abcdef", "0123456789abcdeg"),
            good.replace("0123456789abcdef", "+123456789abcdef"),
        ] {
            assert_ne!(bad, good);
            std::fs::write(&ours.path, &bad).unwrap();
            assert_eq!(ours.find(&CASE), None, "{bad}");
            assert_eq!(ours.keep(&CASE, ALGORITHM).unwrap(), ALGORITHM);
            assert_eq!(ours.find(&CASE), Some(ALGORITHM));
        }
        std::fs::write(&ours.path, [0xff, 0xfe]).unwrap();
        assert_eq!(ours.find(&CASE), None);
    }

    #[test]
    fn a_file_that_cannot_be_written_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("deep"), "a file where the folder should be").unwrap();
        assert!(choices(dir.path()).keep(&CASE, ALGORITHM).is_err());
    }
}
