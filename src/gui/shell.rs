//! The frame around the views: menu bar, rail, status bar, and the overlay while files are dragged over the window.

use std::path::{Path, PathBuf};

use egui::accesskit::Role;
use egui::{
    Align, Align2, Frame, Id, LayerId, Layout, Margin, Order, Panel, Rect, Sense, Shape, Stroke, StrokeKind, Ui,
    WidgetInfo, pos2, vec2,
};

use super::actions::{self, Action, COMMANDS, Menu};
use super::app::TandemApp;
use super::theme::Theme;
use super::views::{Request, Screen};
use super::widgets::{focus_ring, icon_button, rule};
use super::{figures, fonts, icons};

const RAIL: [(Screen, Action, &str, &str); 5] = [
    (Screen::Home, Action::Home, "Home", icons::HOUSE),
    (Screen::SetUp, Action::SetUp, "Set up", icons::PLUS_SQUARE),
    (Screen::Live, Action::Live, "Live", icons::PULSE),
    (Screen::Compare, Action::Compare, "Compare", icons::GIT_DIFF),
    (Screen::Runs, Action::Runs, "Runs", icons::ROWS),
];

impl TandemApp {
    /// The menu bar: menus, the way to the palette, the theme.
    pub(super) fn menu_bar(&mut self, ui: &mut Ui, requests: &mut Vec<Request>) {
        let theme = Theme::of(ui);
        let frame = Frame::NONE.fill(theme.bg0).inner_margin(Margin::symmetric(12, 0));
        Panel::top("menu bar").exact_size(28.0).frame(frame).show_separator_line(false).show(ui, |ui| {
            let bar = ui.max_rect().expand2(vec2(12.0, 0.0));
            ui.horizontal_centered(|ui| {
                super::widgets::label(ui, "Tandem", fonts::semibold(12.0), theme.t1);
                egui::MenuBar::new().ui(ui, |ui| {
                    ui.spacing_mut().item_spacing.x = 2.0;
                    ui.spacing_mut().button_padding.x = 7.0;
                    for menu in Menu::ALL {
                        let title = egui::RichText::new(menu.title()).font(fonts::table()).color(theme.t2);
                        ui.menu_button(title, |ui| self.menu(ui, menu, requests));
                    }
                });
            });
            let find = Rect::from_center_size(bar.center(), vec2(200.0, 24.0));
            if palette_button(ui, find) {
                requests.push(Request::Do(Action::Palette));
            }
            let right = bar.with_min_x(bar.right() - 40.0).with_max_x(bar.right() - 8.0);
            let builder = egui::UiBuilder::new().max_rect(right).layout(Layout::right_to_left(Align::Center));
            let icon = match ui.ctx().options(|options| options.theme_preference) {
                egui::ThemePreference::System => icons::CIRCLE_HALF,
                egui::ThemePreference::Dark => icons::MOON,
                egui::ThemePreference::Light => icons::SUN,
            };
            let next = icon_button(&mut ui.new_child(builder), icon, "Next theme");
            self.probe.rect("Next theme", &next);
            if next.clicked() {
                requests.push(Request::Do(Action::NextTheme));
            }
            rule(ui.painter(), bar.x_range(), bar.bottom() - 0.5, theme.line);
        });
    }

    fn menu(&self, ui: &mut Ui, menu: Menu, requests: &mut Vec<Request>) {
        ui.set_min_width(230.0);
        for command in COMMANDS.iter().filter(|command| command.menu == menu) {
            let reason = self.unavailable(command.action);
            let entry = egui::Button::new(egui::RichText::new(command.name).font(fonts::table()))
                .shortcut_text(actions::shortcut_text(ui.ctx(), command.action));
            let entry = ui.add_enabled(reason.is_none(), entry).on_disabled_hover_text(reason.unwrap_or_default());
            if entry.clicked() {
                requests.push(Request::Do(command.action));
                ui.close();
            }
        }
    }

    /// The rail: the screens.
    pub(super) fn rail(&mut self, ui: &mut Ui, requests: &mut Vec<Request>) {
        let theme = Theme::of(ui);
        let frame = Frame::NONE.fill(theme.bg0);
        Panel::left("rail").exact_size(64.0).resizable(false).frame(frame).show_separator_line(false).show(ui, |ui| {
            let area = ui.max_rect();
            ui.spacing_mut().item_spacing.y = 4.0;
            ui.add_space(6.0);
            for (screen, action, name, icon) in RAIL {
                let response = ui
                    .add_enabled_ui(self.unavailable(action).is_none(), |ui| {
                        rail_item(ui, name, icon, self.screen == screen)
                    })
                    .inner;
                let keys = actions::shortcut_text(ui.ctx(), action);
                let response = response.on_hover_text(format!("{name} ({keys})"));
                let response = response.on_disabled_hover_text(self.unavailable(action).unwrap_or_default());
                self.probe.rect(name, &response);
                if response.clicked() {
                    requests.push(Request::Do(action));
                }
            }
            ui.painter().vline(
                ui.painter().round_to_pixel_center(area.right() - 0.5),
                area.y_range(),
                Stroke::new(1.0, theme.line),
            );
        });
    }

    /// The status bar: this machine, and what Tandem takes of it.
    pub(super) fn status_bar(&self, ui: &mut Ui) {
        let theme = Theme::of(ui);
        let frame = Frame::NONE.fill(theme.bg0).inner_margin(Margin::symmetric(12, 0));
        Panel::bottom("status bar").exact_size(24.0).frame(frame).show_separator_line(false).show(ui, |ui| {
            let bar = ui.max_rect().expand2(vec2(12.0, 0.0));
            rule(ui.painter(), bar.x_range(), bar.top() + 0.5, theme.line);
            ui.horizontal_centered(|ui| {
                ui.spacing_mut().item_spacing.x = 6.0;
                ui.label(egui::RichText::new(icons::CPU).font(fonts::icon(14.0)).color(theme.t3));
                ui.spacing_mut().item_spacing.x = 18.0;
                for item in self.status_items() {
                    super::widgets::label(ui, &item, fonts::small(), theme.t2);
                }
                ui.with_layout(Layout::right_to_left(Align::Center), |ui| {
                    let version = concat!("Tandem ", env!("CARGO_PKG_VERSION"));
                    super::widgets::label(ui, version, fonts::small(), theme.t3);
                });
            });
        });
    }

    fn status_items(&self) -> Vec<String> {
        let mut items = Vec::new();
        let run = self.shown_run().filter(|_| self.screen == Screen::Live);
        let machine = self.machine.as_ref();
        match (run.and_then(|run| run.view.info.as_ref()), machine) {
            (Some(info), _) => items.push(info.device.clone()),
            (None, Some(machine)) => {
                items.push(machine.cpu.clone().unwrap_or_else(|| "CPU".into()));
                items.push(format!("{} cores", machine.cores));
            }
            (None, None) => items.push("Looking at this machine".into()),
        }
        if let Some(ram) = machine.and_then(|machine| machine.ram) {
            let used = ram.total_bytes.saturating_sub(ram.free_bytes);
            items.push(format!("RAM {} of {} GiB", figures::gib(used), figures::gib(ram.total_bytes)));
        }
        let process = self.active.as_ref().filter(|run| run.is_active());
        if let Some(bytes) =
            process.and_then(|run| run.view.last_step()).and_then(|step| step.report.memory.process_bytes)
        {
            items.push(format!("Tandem {} GiB", figures::gib(bytes)));
        }
        if let Some(bytes) = machine.and_then(|machine| machine.disk_free_bytes) {
            items.push(format!("disk {} GiB free", figures::gib(bytes)));
        }
        items
    }

    /// What the window would do with dragged files; takes the dropped ones.
    pub(super) fn drop_overlay(&self, ui: &Ui, requests: &mut Vec<Request>) {
        let (hovered, dropped) = ui.input(|input| {
            let hovered: Vec<Option<PathBuf>> = input.raw.hovered_files.iter().map(|file| file.path.clone()).collect();
            let dropped: Vec<PathBuf> = input.raw.dropped_files.iter().map(|file| file.path().to_owned()).collect();
            (hovered, dropped)
        });
        for path in dropped {
            requests.push(Request::SetUp(path));
        }
        if hovered.is_empty() {
            return;
        }
        let theme = Theme::of(ui);
        let painter = ui.ctx().layer_painter(LayerId::new(Order::Foreground, Id::unique("drop")));
        let screen = ui.ctx().content_rect();
        painter.rect_filled(screen, 0, theme.bg0.gamma_multiply(0.88));
        dashed_frame(&painter, screen.shrink(24.0), theme.acc);
        painter.text(
            screen.center() - vec2(0.0, 34.0),
            Align2::CENTER_CENTER,
            icons::TRAY_ARROW_DOWN,
            fonts::icon(40.0),
            theme.acc,
        );
        painter.text(
            screen.center() + vec2(0.0, 10.0),
            Align2::CENTER_CENTER,
            "Drop to set up a run",
            fonts::semibold(18.0),
            theme.t1,
        );
        let names: Vec<String> = hovered.iter().flatten().take(3).map(|path| file_name(path)).collect();
        let names = names.join("  ·  ");
        painter.text(screen.center() + vec2(0.0, 36.0), Align2::CENTER_CENTER, names, fonts::body(), theme.t2);
    }
}

/// A dashed outline for a place to drop things.
pub fn dashed_frame(painter: &egui::Painter, rect: Rect, color: egui::Color32) {
    let corners = [rect.left_top(), rect.right_top(), rect.right_bottom(), rect.left_bottom(), rect.left_top()];
    painter.extend(Shape::dashed_line(&corners, Stroke::new(1.0, color), 5.0, 4.0));
}

fn file_name(path: &Path) -> String {
    path.file_name().map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into_owned())
}

fn palette_button(ui: &mut Ui, rect: Rect) -> bool {
    let theme = Theme::of(ui);
    let response = ui.interact(rect, ui.scope_id().with("palette"), Sense::click());
    response.widget_info(|| WidgetInfo::labeled(Role::Button, true, "Find a command"));
    let color = if response.hovered() { theme.t1 } else { theme.t3 };
    let painter = ui.painter();
    let words = painter.layout_no_wrap("Find a command".into(), fonts::table(), color);
    let keys = painter.layout_no_wrap(actions::shortcut_text(ui.ctx(), Action::Palette), fonts::small(), theme.t2);
    let y = rect.center().y;
    let left = rect.center().x - (20.0 + words.size().x + 9.0 + keys.size().x + 8.0) / 2.0;
    painter.text(pos2(left + 7.0, y), Align2::CENTER_CENTER, icons::MAGNIFYING_GLASS, fonts::icon(14.0), color);
    let chip_left = left + 20.0 + words.size().x + 9.0;
    painter.galley(pos2(left + 20.0, y - words.size().y / 2.0), words, color);
    let chip = Rect::from_min_size(pos2(chip_left, y - 9.0), vec2(keys.size().x + 8.0, 18.0));
    painter.rect_stroke(chip, 3, Stroke::new(1.0, theme.line2), StrokeKind::Inside);
    painter.galley(chip.center() - keys.size() / 2.0, keys, theme.t2);
    focus_ring(ui, &response, 4);
    response.clicked()
}

fn rail_item(ui: &mut Ui, name: &str, icon: &str, active: bool) -> egui::Response {
    let theme = Theme::of(ui);
    let (rect, response) = ui.allocate_exact_size(vec2(63.0, 48.0), Sense::click());
    let enabled = ui.is_enabled();
    response.widget_info(|| WidgetInfo::selected(Role::Tab, enabled, active, name));
    let painter = ui.painter();
    if active {
        painter.rect_filled(rect, 0, theme.bg2);
        painter.rect_filled(rect.with_max_x(rect.left() + 2.0), 0, theme.acc);
    } else if response.hovered() {
        painter.rect_filled(rect, 0, theme.bg3);
    }
    let (icon_color, color) = match (enabled, active) {
        (false, _) => (theme.tdis, theme.tdis),
        (true, true) => (theme.acc, theme.t1),
        (true, false) => (theme.t2, theme.t2),
    };
    let icon_font = if active { fonts::icon_fill(20.0) } else { fonts::icon(20.0) };
    painter.text(rect.center() - vec2(0.0, 9.0), Align2::CENTER_CENTER, icon, icon_font, icon_color);
    let font = if active { fonts::medium(11.0) } else { fonts::small() };
    painter.text(rect.center() + vec2(0.0, 12.0), Align2::CENTER_CENTER, name, font, color);
    focus_ring(ui, &response, 0);
    response
}
