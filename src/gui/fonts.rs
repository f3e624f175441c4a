//! Fonts of the window: IBM Plex, Phosphor icons, and fallbacks for Hangul, kana, Han and emoji.
//!
//! Each weight is a family of its own, so bold is never faked. Plex's digits, `−` and `+` share one width, so columns
//! of figures line up. Licences: `assets/fonts/LICENSES.md`.

use std::sync::Arc;

use egui::{FontData, FontDefinitions, FontFamily, FontId};

const FILES: [(&str, &[u8]); 8] = [
    ("plex-regular", include_bytes!("../../assets/fonts/IBMPlexSans-Regular.ttf")),
    ("plex-medium", include_bytes!("../../assets/fonts/IBMPlexSans-Medium.ttf")),
    ("plex-semibold", include_bytes!("../../assets/fonts/IBMPlexSans-SemiBold.ttf")),
    ("plex-mono", include_bytes!("../../assets/fonts/IBMPlexMono-Regular.ttf")),
    ("phosphor", include_bytes!("../../assets/fonts/Phosphor-Regular.ttf")),
    ("phosphor-fill", include_bytes!("../../assets/fonts/Phosphor-Fill.ttf")),
    ("droid-fallback", include_bytes!("../../assets/fonts/DroidSansFallback.ttf")),
    ("noto-emoji", include_bytes!("../../assets/fonts/NotoEmoji-Regular.ttf")),
];

/// Fonts asked when a family's own has no glyph, in this order.
const FALLBACKS: [&str; 4] = ["plex-regular", "phosphor", "droid-fallback", "noto-emoji"];

const MEDIUM: &str = "medium";
const SEMIBOLD: &str = "semibold";
const ICONS: &str = "icons";
const ICONS_FILL: &str = "icons-fill";

/// All families with their fallbacks.
pub fn definitions() -> FontDefinitions {
    let mut fonts = FontDefinitions::empty();
    for (name, bytes) in FILES {
        fonts.font_data.insert(name.into(), Arc::new(FontData::from_static(bytes)));
    }
    for (family, first) in [
        (FontFamily::Proportional, "plex-regular"),
        (FontFamily::Monospace, "plex-mono"),
        (FontFamily::Name(MEDIUM.into()), "plex-medium"),
        (FontFamily::Name(SEMIBOLD.into()), "plex-semibold"),
        (FontFamily::Name(ICONS.into()), "phosphor"),
        (FontFamily::Name(ICONS_FILL.into()), "phosphor-fill"),
    ] {
        let rest = FALLBACKS.into_iter().filter(|&name| name != first);
        fonts.families.insert(family, std::iter::once(first).chain(rest).map(String::from).collect());
    }
    fonts
}

/// Plex Sans Regular.
pub fn regular(size: f32) -> FontId {
    FontId::new(size, FontFamily::Proportional)
}

/// Plex Sans Medium.
pub fn medium(size: f32) -> FontId {
    FontId::new(size, FontFamily::Name(MEDIUM.into()))
}

/// Plex Sans SemiBold.
pub fn semibold(size: f32) -> FontId {
    FontId::new(size, FontFamily::Name(SEMIBOLD.into()))
}

/// Prose and buttons: 13.
pub fn body() -> FontId {
    regular(13.0)
}

/// Tables, log, menus: 12.
pub fn table() -> FontId {
    regular(12.0)
}

/// Captions, axes, units, column heads: 11, the smallest size there is.
pub fn small() -> FontId {
    regular(11.0)
}

/// Figures of a header: 15.
pub fn stat() -> FontId {
    medium(15.0)
}

/// Tokens, paths, `run.toml`: 12.
pub fn mono() -> FontId {
    FontId::new(12.0, FontFamily::Monospace)
}

/// An icon in outline.
pub fn icon(size: f32) -> FontId {
    FontId::new(size, FontFamily::Name(ICONS.into()))
}

/// An icon, filled.
pub fn icon_fill(size: f32) -> FontId {
    FontId::new(size, FontFamily::Name(ICONS_FILL.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gui::icons;

    fn fonts() -> egui::epaint::text::Fonts {
        egui::epaint::text::Fonts::new(egui::epaint::TextOptions::default(), definitions())
    }

    #[test]
    fn every_script_has_glyphs_in_every_text_family() {
        let mut fonts = fonts();
        let mut fonts = fonts.with_pixels_per_point(1.0);
        let samples = [
            "The quick brown fox 0123456789",
            "Grüße, café, Łódź, naïve",
            "Быстрая лиса",
            "Αλφάβητο",
            "한국어 파인튜닝",
            "中文微调模型",
            "繁體中文",
            "日本語の学習データ カタカナ",
            "🙂🚀🔥🎉",
            "− × · Σ ² ° … ± Δ ≈ ≤ √ — “quoted”",
        ];
        for font in [regular(13.0), medium(13.0), semibold(13.0), mono()] {
            for sample in samples {
                let missing: String = sample.chars().filter(|&c| !fonts.has_glyph(&font, c)).collect();
                assert!(missing.is_empty(), "{font:?} has no glyph for {missing:?}");
            }
            assert!(!fonts.has_glyph(&font, '\u{E0FFF}'), "the test must be able to fail");
        }
    }

    #[test]
    fn every_icon_is_in_both_icon_fonts() {
        let mut fonts = fonts();
        let mut fonts = fonts.with_pixels_per_point(1.0);
        for icon_text in icons::ALL {
            assert!(fonts.has_glyphs(&icon(16.0), icon_text), "{icon_text:?}");
            assert!(fonts.has_glyphs(&icon_fill(16.0), icon_text), "{icon_text:?}");
        }
    }

    #[test]
    fn digits_and_signs_share_one_width() {
        let mut fonts = fonts();
        let mut fonts = fonts.with_pixels_per_point(1.0);
        for font in [regular(12.0), medium(15.0), semibold(12.0)] {
            let widths: Vec<f32> = "0123456789−+".chars().map(|c| fonts.glyph_width(&font, c)).collect();
            assert!(widths.iter().all(|w| (w - widths[0]).abs() < 1e-3), "{font:?}: {widths:?}");
        }
    }
}
