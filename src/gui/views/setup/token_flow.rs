//! The token flow: a pack as wrapped rows of tokens, trained ones coloured, with a rule between its records.
//!
//! Rows are laid out once a pack and width; only the visible ones are painted, so a pack of any length scrolls freely.

use std::ops::Range;

use egui::accesskit::Role;
use egui::{Align2, FontId, Rect, Response, Sense, Ui, Vec2, WidgetInfo, pos2, vec2};

use crate::gui::{fonts, theme::Theme};
use crate::session::preview::{PackView, TokenView};

/// Height of a row.
const ROW: f32 = 21.0;
/// Height of the box behind a token.
const BOX: f32 = 17.0;

/// Stands for a line break: Phosphor's arrow-elbow-down-left, as the text fonts have no `↵`.
const LINE_END: char = '\u{E044}';

/// How tokens are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Writing {
    /// Each token in its own box.
    #[default]
    Tokens,
    /// Token ids.
    Ids,
    /// Running text.
    Text,
}

/// One pack laid out for a width.
#[derive(Default)]
pub struct TokenFlow {
    key: Option<(u64, Writing, u32)>,
    rows: Vec<Row>,
}

enum Row {
    /// A rule with words, before a record.
    Rule(String),
    /// Tokens, or parts of tokens that are longer than a row.
    Tokens(Vec<Piece>),
}

struct Piece {
    document: usize,
    token: usize,
    text: String,
    x: f32,
    width: f32,
}

impl TokenFlow {
    /// Shows a pack in the space left. `version` changes when the pack does.
    pub fn ui(&mut self, ui: &mut Ui, pack: &PackView, version: u64, writing: Writing) {
        let font = fonts::mono();
        let width = ui.available_width() - ui.spacing().scroll.bar_width - 4.0;
        let key = (version, writing, width.to_bits());
        if self.key != Some(key) {
            self.key = Some(key);
            let mut glyph = |c: char| ui.ctx().fonts_mut(|fonts| fonts.glyph_width(&font, c));
            self.rows = lay_out(pack, writing, width.max(80.0), &mut glyph);
        }
        ui.spacing_mut().item_spacing.y = 0.0;
        egui::ScrollArea::vertical().id_salt(("token flow", version)).auto_shrink(false).show_rows(
            ui,
            ROW,
            self.rows.len(),
            |ui, visible| self.paint(ui, pack, visible, &font, writing),
        );
    }

    fn paint(&self, ui: &mut Ui, pack: &PackView, visible: Range<usize>, font: &FontId, writing: Writing) {
        let theme = Theme::of(ui);
        for row in &self.rows[visible] {
            let (rect, response) = ui.allocate_exact_size(vec2(ui.available_width(), ROW), Sense::hover());
            match row {
                Row::Rule(words) => paint_rule(ui, rect, words, theme),
                Row::Tokens(pieces) => {
                    for piece in pieces {
                        let token = &pack.documents[piece.document].tokens[piece.token];
                        paint_piece(ui, rect, piece, token, font, writing, theme);
                    }
                    hover(&response, rect, pieces, pack);
                }
            }
            response.widget_info(|| WidgetInfo::labeled(Role::Label, true, row.words()));
        }
    }
}

impl Row {
    fn words(&self) -> String {
        match self {
            Self::Rule(words) => words.clone(),
            Self::Tokens(pieces) => pieces.iter().map(|piece| piece.text.replace(LINE_END, "↵")).collect(),
        }
    }
}

fn paint_rule(ui: &Ui, rect: Rect, words: &str, theme: &Theme) {
    let painter = ui.painter();
    let y = painter.round_to_pixel_center(rect.center().y);
    let stroke = egui::Stroke::new(1.0, theme.line2);
    painter.hline(rect.left()..=rect.left() + 16.0, y, stroke);
    let text = painter.text(pos2(rect.left() + 24.0, y), Align2::LEFT_CENTER, words, fonts::small(), theme.t3);
    painter.hline(text.right() + 8.0..=rect.right(), y, stroke);
}

fn paint_piece(ui: &Ui, row: Rect, piece: &Piece, token: &TokenView, font: &FontId, writing: Writing, theme: &Theme) {
    let left = row.left() + piece.x;
    // One pixel between boxes keeps tokens apart; running text has none.
    let gap = if writing == Writing::Text { 0.0 } else { 1.0 };
    let size = vec2(piece.width - gap, BOX);
    let rect = Rect::from_min_size(pos2(left, row.center().y - BOX / 2.0), Vec2::max(size, vec2(1.0, 0.0)));
    let (fill, color) = match (token.trained, token.end) {
        (true, true) => (Some(theme.acc_fill), theme.on_acc),
        (true, false) => (Some(theme.acc_bg), theme.t1),
        (false, _) => (None, theme.t3),
    };
    if let Some(fill) = fill {
        ui.painter().rect_filled(rect, 2.0, fill);
    }
    ui.painter().text(pos2(left, row.center().y), Align2::LEFT_CENTER, &piece.text, font.clone(), color);
}

/// Id, place and role of the token under the pointer.
fn hover(response: &Response, row: Rect, pieces: &[Piece], pack: &PackView) {
    let Some(pointer) = response.hover_pos() else { return };
    let x = pointer.x - row.left();
    let Some(piece) = pieces.iter().find(|piece| (piece.x..piece.x + piece.width).contains(&x)) else { return };
    let document = &pack.documents[piece.document];
    let token = &document.tokens[piece.token];
    let role = match (document.padding, token.trained, token.end) {
        (true, ..) => "padding",
        (_, true, true) => "end token, trained",
        (_, true, false) => "trained",
        (_, false, true) => "end token, read only",
        (_, false, false) => "read only",
    };
    response.clone().on_hover_ui_at_pointer(|ui| {
        ui.label(format!("{:?}", token.text));
        ui.weak(format!("id {} · position {} · {role}", token.id, piece.token));
    });
}

/// Wraps a pack into rows of `width`; `glyph` is the width of a character.
fn lay_out(pack: &PackView, writing: Writing, width: f32, glyph: &mut dyn FnMut(char) -> f32) -> Vec<Row> {
    let mut rows = Vec::new();
    let records = pack.num_records();
    let mut record = 0;
    for (document, view) in pack.documents.iter().enumerate() {
        if view.padding {
            rows.push(Row::Rule(format!("{} tokens of padding", view.tokens.len())));
            continue;
        }
        record += 1;
        if let Some(words) = rule(record, records, pack.unused) {
            rows.push(Row::Rule(words));
        }
        let mut line = Line { pieces: Vec::new(), x: 0.0 };
        for (token, view) in view.tokens.iter().enumerate() {
            let (text, breaks) = written(view, writing);
            line.push(&mut rows, (document, token), &text, width, glyph);
            if breaks {
                line.end(&mut rows);
            }
        }
        line.end(&mut rows);
    }
    rows
}

/// The words before a record; none before the only one.
fn rule(record: usize, records: usize, unused: usize) -> Option<String> {
    let mut words = match (record, records) {
        (1, _) => return None,
        (2, _) => format!("record 2 of {records} in this pack, positions restart at 0"),
        _ => format!("record {record} of {records} in this pack"),
    };
    if record == records && unused > 0 {
        words += &format!(", then {unused} unused slots");
    }
    Some(words)
}

/// What is written for a token, and whether a row ends after it.
fn written(token: &TokenView, writing: Writing) -> (String, bool) {
    if writing == Writing::Ids {
        return (format!("{} ", token.id), false);
    }
    let visible: String = token
        .text
        .chars()
        .map(|c| match c {
            '\n' => LINE_END,
            '\t' => '→',
            c if c.is_control() => '\u{FFFD}',
            c => c,
        })
        .collect();
    (visible, token.text.ends_with('\n'))
}

struct Line {
    pieces: Vec<Piece>,
    x: f32,
}

impl Line {
    fn push(
        &mut self,
        rows: &mut Vec<Row>,
        (document, token): (usize, usize),
        text: &str,
        width: f32,
        glyph: &mut dyn FnMut(char) -> f32,
    ) {
        let whole: f32 = text.chars().map(&mut *glyph).sum();
        if self.x > 0.0 && self.x + whole > width {
            self.end(rows);
        }
        let mut piece = Piece { document, token, text: String::new(), x: self.x, width: 0.0 };
        for c in text.chars() {
            let w = glyph(c);
            if !piece.text.is_empty() && piece.x + piece.width + w > width {
                self.pieces.push(piece);
                self.end(rows);
                piece = Piece { document, token, text: String::new(), x: 0.0, width: 0.0 };
            }
            piece.text.push(c);
            piece.width += w;
        }
        if !piece.text.is_empty() {
            self.x = piece.x + piece.width;
            self.pieces.push(piece);
        }
    }

    fn end(&mut self, rows: &mut Vec<Row>) {
        if !self.pieces.is_empty() {
            rows.push(Row::Tokens(std::mem::take(&mut self.pieces)));
        }
        self.x = 0.0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::preview::DocumentView;

    fn pack(documents: &[&[&str]]) -> PackView {
        let token = |text: &&str| TokenView { id: 7, text: (*text).into(), trained: false, end: false };
        let documents = documents
            .iter()
            .map(|tokens| DocumentView { tokens: tokens.iter().map(token).collect(), padding: false })
            .collect();
        PackView { documents, trained: 0, read_only: 0, unused: 3 }
    }

    fn words(pack: &PackView, writing: Writing, width: f32) -> Vec<String> {
        lay_out(pack, writing, width, &mut |_| 1.0).iter().map(Row::words).collect()
    }

    #[test]
    fn rows_break_at_newlines_between_tokens_and_inside_long_ones() {
        let pack = pack(&[&["ab", "\n", "cd", "efg", "0123456789"]]);
        assert_eq!(words(&pack, Writing::Tokens, 4.0), ["ab↵", "cd", "efg", "0123", "4567", "89"]);
    }

    #[test]
    fn records_are_parted_by_rules_that_count_them() {
        let pack = pack(&[&["a"], &["b"], &["c"]]);
        assert_eq!(
            words(&pack, Writing::Tokens, 40.0),
            [
                "a",
                "record 2 of 3 in this pack, positions restart at 0",
                "b",
                "record 3 of 3 in this pack, then 3 unused slots",
                "c"
            ]
        );
        assert_eq!(words(&pack, Writing::Ids, 40.0)[0], "7 ");
    }
}
