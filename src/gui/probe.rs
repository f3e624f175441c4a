//! What the window tells a test that drives it from outside.
//!
//! With `TANDEM_WINDOW_LOG=FILE` in the environment the window appends lines to that file as things change:
//! `rect NAME X Y W H` (physical pixels in the window) and `state KEY VALUE`. Without it nothing is written.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write as _;

use anyhow::Context as _;
use egui::Response;

use crate::base::error::Result;

/// Name of the environment variable.
pub const ENV: &str = "TANDEM_WINDOW_LOG";

/// Writes what changed; does nothing when nobody listens.
#[derive(Debug, Default)]
pub struct Probe {
    file: Option<File>,
    known: BTreeMap<String, String>,
}

impl Probe {
    /// The probe that [`ENV`] asks for.
    ///
    /// # Errors
    /// When the file cannot be made.
    pub fn from_env() -> Result<Self> {
        let Some(path) = std::env::var_os(ENV).filter(|value| !value.is_empty()) else {
            return Ok(Self::default());
        };
        let file = File::create(&path).with_context(|| format!("{ENV}: cannot write {}", path.display()))?;
        Ok(Self { file: Some(file), known: BTreeMap::new() })
    }

    /// Says where a widget is.
    pub fn rect(&mut self, name: &str, response: &Response) {
        if self.file.is_none() {
            return;
        }
        let scale = response.ctx.pixels_per_point();
        let r = response.rect * scale;
        let place = format!("{:.0} {:.0} {:.0} {:.0}", r.left(), r.top(), r.width(), r.height());
        self.say("rect", name, place);
    }

    /// Says what a piece of state is.
    pub fn state(&mut self, key: &str, value: impl std::fmt::Display) {
        if self.file.is_some() {
            self.say("state", key, value.to_string());
        }
    }

    fn say(&mut self, kind: &str, name: &str, value: String) {
        let key = format!("{kind} {name}");
        if self.known.get(&key) == Some(&value) {
            return;
        }
        if let Some(file) = &mut self.file {
            if let Err(error) = writeln!(file, "{key} {value}") {
                tracing::warn!("{ENV}: {error}");
            }
            self.known.insert(key, value);
        }
    }
}
