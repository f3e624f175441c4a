//! Kernel images embedded in the binary: one compressed archive that `cargo xtask kernels` makes, absent where it was not run.
//!
//! The archive is a zip file with `<source>.<target>` members (`rms_norm.sm_90a`, `rms_norm.compute_80`) and `kernels.json`
//! ({source: [kernel names]}). A cubin runs on its own major version from its minor version on; PTX runs on everything newer.

use std::collections::BTreeMap;
use std::io::{Cursor, Read as _};

use anyhow::{Context as _, bail};

use super::probe::DeviceFacts;
use crate::base::error::Result;

/// The archive, empty when the kernels were not built.
static ARCHIVE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/kernels.zip"));

/// Targets that are compiled, best first for a card that can run several.
const TARGETS: [(&str, u32, u32); 6] =
    [("sm_120", 12, 0), ("sm_100", 10, 0), ("sm_90a", 9, 0), ("sm_89", 8, 9), ("sm_86", 8, 6), ("sm_80", 8, 0)];

/// One kernel source compiled for one target.
pub struct Image {
    /// Kernel source.
    pub name: String,
    /// Target it was compiled for.
    pub target: &'static str,
    /// Cubin, or PTX with a final NUL.
    pub bytes: Vec<u8>,
    /// Kernels in it.
    pub kernels: Vec<String>,
}

/// Whether this build has kernels.
pub fn present() -> bool {
    !ARCHIVE.is_empty()
}

/// The images for a card.
///
/// # Errors
/// When this build has no kernels, or none for the card.
pub fn for_device(facts: &DeviceFacts) -> Result<Vec<Image>> {
    if !present() {
        bail!("GPU kernels are not in this build: `cargo xtask kernels` makes them, then build again");
    }
    let (major, minor) = facts.compute_capability;
    if (major, minor) < (8, 0) {
        bail!("{} has compute capability {major}.{minor}; Tandem needs 8.0 (RTX 30 series) or newer", facts.name);
    }
    let exact = TARGETS.iter().find(|(_, m, n)| *m == major && *n <= minor).map(|(name, ..)| *name);
    let target = if facts.laptop_tiles { "compute_80" } else { exact.unwrap_or("compute_80") };
    let mut archive =
        zip::ZipArchive::new(Cursor::new(ARCHIVE)).context("the embedded kernels are damaged: build again")?;
    let read = |archive: &mut zip::ZipArchive<Cursor<&[u8]>>, name: &str| -> Result<Vec<u8>> {
        let mut member =
            archive.by_name(name).with_context(|| format!("the embedded kernels lack {name}: build again"))?;
        let mut bytes = Vec::new();
        member.read_to_end(&mut bytes).with_context(|| format!("reading {name} from the embedded kernels"))?;
        Ok(bytes)
    };
    let index: BTreeMap<String, Vec<String>> = serde_json::from_slice(&read(&mut archive, "kernels.json")?)
        .context("the embedded kernels' index is damaged")?;
    index
        .into_iter()
        .map(|(name, kernels)| {
            let mut bytes = read(&mut archive, &format!("{name}.{target}"))?;
            if target.starts_with("compute") && bytes.last() != Some(&0) {
                bytes.push(0);
            }
            Ok(Image { name, target, bytes, kernels })
        })
        .collect()
}
