//! Tiles: flat areas with a title bar, parted by one pixel of line colour.

use egui::{Align, Align2, Layout, Rect, Sense, Ui, UiBuilder, WidgetInfo, accesskit::Role, pos2, vec2};

use super::{rule, text};
use crate::gui::fonts;
use crate::gui::theme::Theme;

/// Height of a tile's title bar.
pub const TITLE_HEIGHT: f32 = 28.0;
/// Padding left and right inside a tile.
pub const PADDING: f32 = 12.0;

/// A tile with a title and, at the right of the title bar, a note or controls.
#[must_use = "show it"]
pub struct Tile<'a> {
    title: &'a str,
    pad: bool,
}

impl<'a> Tile<'a> {
    /// A tile with this title.
    pub fn new(title: &'a str) -> Self {
        Self { title, pad: true }
    }

    /// Whose body reaches to the edges, for a body that paints its own.
    pub fn flush(mut self) -> Self {
        self.pad = false;
        self
    }

    /// Draws the tile in `rect`. `controls` fills the title bar from the right; `body` gets what is below, with
    /// padding, clipped to the tile.
    pub fn show<R>(
        self,
        ui: &mut Ui,
        rect: Rect,
        controls: impl FnOnce(&mut Ui),
        body: impl FnOnce(&mut Ui) -> R,
    ) -> R {
        let theme = Theme::of(ui);
        ui.painter().rect_filled(rect, 0, theme.bg1);
        let bar = rect.with_max_y(rect.top() + TITLE_HEIGHT);
        let title_at = pos2(bar.left() + PADDING, bar.center().y);
        let title_rect = text(
            ui.painter(),
            title_at,
            Align2::LEFT_CENTER,
            self.title,
            fonts::semibold(12.0),
            theme.t1,
            bar.width() - 2.0 * PADDING,
        );
        let title = ui.interact(title_rect, ui.scope_id().with(("tile", self.title)), Sense::hover());
        title.widget_info(|| WidgetInfo::labeled(Role::Heading, true, self.title));
        rule(ui.painter(), bar.x_range(), bar.bottom() - 0.5, theme.line);

        let right = Rect::from_min_max(pos2(title_rect.right() + PADDING, bar.top()), bar.right_bottom())
            .with_max_x(bar.right() - PADDING);
        let builder = UiBuilder::new()
            .id_salt(("tile bar", self.title))
            .max_rect(right.with_max_y(bar.bottom() - 1.0))
            .layout(Layout::right_to_left(Align::Center));
        controls(&mut ui.new_child(builder));

        let inner = rect.with_min_y(bar.bottom());
        let area = if self.pad { inner.shrink2(vec2(PADDING, 8.0)) } else { inner };
        let mut child = ui.new_child(
            UiBuilder::new().id_salt(("tile body", self.title)).max_rect(area).layout(Layout::top_down(Align::Min)),
        );
        child.set_clip_rect(inner.intersect(ui.clip_rect()));
        body(&mut child)
    }
}
