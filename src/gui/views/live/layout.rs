//! Where the tiles of Live lie: three columns in a window with room, two columns to scroll through in a small one.

use egui::{Rect, Vec2, pos2};

use super::switchboard;
use crate::gui::widgets::tile::TITLE_HEIGHT;
use crate::session::Optimization;

/// Below this width the tiles stand in two columns.
const WIDE: f32 = 1130.0;
/// Below this height tables take their compact form.
const ROOMY: f32 = 720.0;
/// Least height of the three columns.
const SHORTEST: f32 = 600.0;

/// The place of every tile, from the upper left corner of the area; a pixel of line parts them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Layout {
    /// Height of all.
    pub height: f32,
    /// Whether that is more than the area has.
    pub scrolls: bool,
    /// Whether tables are compact.
    pub compact: bool,
    /// Loss.
    pub loss: Rect,
    /// Step anatomy.
    pub anatomy: Rect,
    /// Streams.
    pub streams: Rect,
    /// Memory.
    pub memory: Rect,
    /// Log.
    pub log: Rect,
    /// Optimizations.
    pub optimizations: Rect,
    /// Predicted against measured.
    pub predicted: Rect,
    /// Packing metadata cache.
    pub cache: Rect,
}

impl Layout {
    /// The layout for an area of `size` with so many switches.
    pub fn of(size: Vec2, switches: usize) -> Self {
        if size.x >= WIDE { three_columns(size, switches) } else { two_columns(size) }
    }
}

fn cell(x: (f32, f32), y: (f32, f32)) -> Rect {
    Rect::from_min_max(pos2(x.0, y.0), pos2(x.1, y.1))
}

/// `parts` one after the other from 0 to `end`, a pixel between; the last takes the rest.
fn rows<const N: usize>(parts: [f32; N], end: f32) -> [(f32, f32); N] {
    let mut from = 0.0;
    let mut rows = parts.map(|part| {
        let row = (from, from + part.round());
        from = row.1 + 1.0;
        row
    });
    if let Some(last) = rows.last_mut() {
        last.1 = end;
    }
    rows
}

fn three_columns(size: Vec2, switches: usize) -> Layout {
    let height = size.y.max(SHORTEST);
    let compact = height < ROOMY;
    let right = size.x - if compact { 336.0 } else { 352.0 };
    let middle = ((right - 1.0) / 2.0).round();
    let (first, second, third) = ((0.0, middle), (middle + 1.0, right - 1.0), (right, size.x));
    let (upper, streams) = if compact { (238.0, 152.0) } else { (height * 0.374, height * 0.234) };
    let [upper, streams, lower] = rows([upper, streams, 0.0], height);
    let (row, around, predicted) =
        if compact { (switchboard::compact_row(switches), 10.0, 178.0) } else { (switchboard::ROW, 16.0, 206.0) };
    let optimizations = TITLE_HEIGHT + around + row * switches.max(Optimization::ALL.len()) as f32;
    let [optimizations, predicted, cache] = rows([optimizations, predicted, 0.0], height);
    Layout {
        height,
        scrolls: height > size.y,
        compact,
        loss: cell(first, upper),
        anatomy: cell(second, upper),
        streams: cell((0.0, right - 1.0), streams),
        memory: cell(first, lower),
        log: cell(second, lower),
        optimizations: cell(third, optimizations),
        predicted: cell(third, predicted),
        cache: cell(third, cache),
    }
}

fn two_columns(size: Vec2) -> Layout {
    const ROWS: [f32; 5] = [270.0, 170.0, 266.0, 260.0, 160.0];
    let height = size.y.max(ROWS.iter().sum::<f32>() + ROWS.len() as f32 - 1.0);
    let middle = (size.x / 2.0).round();
    let (first, second) = ((0.0, middle), (middle + 1.0, size.x));
    let [plots, streams, switches, memory, log] = rows(ROWS, height);
    Layout {
        height,
        scrolls: height > size.y,
        compact: true,
        loss: cell(first, plots),
        anatomy: cell(second, plots),
        streams: cell((0.0, size.x), streams),
        memory: cell(first, memory),
        log: cell((0.0, size.x), log),
        optimizations: cell(first, switches),
        predicted: cell(second, switches),
        cache: cell(second, memory),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use egui::vec2;

    fn tiles(l: &Layout) -> [Rect; 8] {
        [l.loss, l.anatomy, l.streams, l.memory, l.log, l.optimizations, l.predicted, l.cache]
    }

    #[test]
    fn tiles_fill_the_area_without_overlap() {
        for size in
            [vec2(1376.0, 796.0), vec2(1216.0, 616.0), vec2(960.0, 596.0), vec2(896.0, 496.0), vec2(2496.0, 1336.0)]
        {
            for switches in [0, 6, 7] {
                let layout = Layout::of(size, switches);
                let tiles = tiles(&layout);
                assert!(layout.height >= size.y);
                let whole = Rect::from_min_size(pos2(0.0, 0.0), vec2(size.x, layout.height));
                let mut area = 0.0;
                for (i, tile) in tiles.iter().enumerate() {
                    assert!(whole.contains_rect(*tile), "{tile:?} at {size:?}");
                    assert!(tile.width() >= 330.0 && tile.height() >= 140.0, "{tile:?} at {size:?}");
                    assert!(tiles[..i].iter().all(|other| !other.intersects(*tile)), "{tile:?} at {size:?}");
                    area += tile.area();
                }
                // What is left is lines of one pixel.
                assert!(whole.area() - area < 6.0 * (size.x + layout.height), "{size:?}");
            }
        }
    }

    #[test]
    fn the_window_of_the_design_has_no_scroll_bar() {
        for switches in [6, 7] {
            assert_eq!(Layout::of(vec2(1376.0, 796.0), switches).height, 796.0);
            let small = Layout::of(vec2(1216.0, 616.0), switches);
            assert!(small.height == 616.0 && small.compact);
        }
    }
}
