//! Everything the user can command: one table for the menus, the palette and the keyboard.

use egui::{Context, Key, KeyboardShortcut, Modifiers};

use super::icons;

/// A command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Show the welcome screen.
    Home,
    /// Show the screen that sets up a run.
    SetUp,
    /// Show the run.
    Live,
    /// Show comparisons.
    Compare,
    /// Show the list of runs.
    Runs,
    /// Pick a `run.toml` and set it up.
    OpenRunFile,
    /// Start the starter run.
    StartStarter,
    /// Save what is trained so far and go on.
    SaveNow,
    /// Ask whether to stop the run.
    Stop,
    /// Put the path of the shown run's folder on the clipboard.
    CopyRunFolder,
    /// Next of system, dark, light.
    NextTheme,
    /// Follow the system.
    ThemeSystem,
    /// Dark.
    ThemeDark,
    /// Light.
    ThemeLight,
    /// Larger.
    ZoomIn,
    /// Smaller.
    ZoomOut,
    /// As large as the system says.
    ZoomReset,
    /// Open the palette.
    Palette,
    /// List the shortcuts.
    Shortcuts,
    /// Say what this program is.
    About,
    /// Close the window.
    Quit,
}

/// A menu of the menu bar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Menu {
    /// Files, and leaving.
    File,
    /// The run.
    Run,
    /// Screens, theme, zoom.
    View,
    /// Help.
    Help,
}

impl Menu {
    /// All menus from left to right.
    pub const ALL: [Self; 4] = [Self::File, Self::Run, Self::View, Self::Help];

    /// Its title.
    pub fn title(self) -> &'static str {
        match self {
            Self::File => "File",
            Self::Run => "Run",
            Self::View => "View",
            Self::Help => "Help",
        }
    }
}

/// One row of the table.
#[derive(Debug, Clone, Copy)]
pub struct Command {
    /// What it does.
    pub action: Action,
    /// The menu it is in.
    pub menu: Menu,
    /// Its name, the same everywhere.
    pub name: &'static str,
    /// Its icon.
    pub icon: &'static str,
    /// Its shortcut.
    pub shortcut: Option<KeyboardShortcut>,
    /// Whether egui itself acts on the shortcut.
    by_egui: bool,
}

const fn command(action: Action, menu: Menu, name: &'static str, icon: &'static str) -> Command {
    Command { action, menu, name, icon, shortcut: None, by_egui: false }
}

impl Command {
    const fn key(mut self, key: Key) -> Self {
        self.shortcut = Some(KeyboardShortcut::new(Modifiers::COMMAND, key));
        self
    }

    const fn bare_key(mut self, key: Key) -> Self {
        self.shortcut = Some(KeyboardShortcut::new(Modifiers::NONE, key));
        self
    }

    const fn handled_by_egui(mut self) -> Self {
        self.by_egui = true;
        self
    }
}

/// Every command, in the order of the menus.
pub const COMMANDS: &[Command] = &[
    command(Action::SetUp, Menu::File, "Set up a run", icons::PLUS_SQUARE).key(Key::N),
    command(Action::OpenRunFile, Menu::File, "Open run.toml…", icons::FOLDER_OPEN).key(Key::O),
    command(Action::Quit, Menu::File, "Quit", icons::X).key(Key::Q),
    command(Action::StartStarter, Menu::Run, "Start the starter run", icons::PLAY),
    command(Action::SaveNow, Menu::Run, "Save now", icons::FLOPPY_DISK).key(Key::S),
    command(Action::Stop, Menu::Run, "Stop…", icons::STOP).key(Key::Period),
    command(Action::CopyRunFolder, Menu::Run, "Copy the path of the run folder", icons::COPY),
    command(Action::Home, Menu::View, "Home", icons::HOUSE).key(Key::Num1),
    command(Action::Live, Menu::View, "Live", icons::PULSE).key(Key::Num2),
    command(Action::Compare, Menu::View, "Compare", icons::GIT_DIFF).key(Key::Num3),
    command(Action::Runs, Menu::View, "Runs", icons::ROWS).key(Key::Num4),
    command(Action::NextTheme, Menu::View, "Next theme", icons::CIRCLE_HALF).key(Key::T),
    command(Action::ThemeSystem, Menu::View, "Theme of the system", icons::CIRCLE_HALF),
    command(Action::ThemeDark, Menu::View, "Dark theme", icons::MOON),
    command(Action::ThemeLight, Menu::View, "Light theme", icons::SUN),
    command(Action::ZoomIn, Menu::View, "Zoom in", icons::PLUS).key(Key::Plus).handled_by_egui(),
    command(Action::ZoomOut, Menu::View, "Zoom out", icons::MINUS).key(Key::Minus).handled_by_egui(),
    command(Action::ZoomReset, Menu::View, "Reset zoom", icons::MAGNIFYING_GLASS).key(Key::Num0).handled_by_egui(),
    command(Action::Palette, Menu::Help, "Find a command", icons::MAGNIFYING_GLASS).key(Key::P),
    command(Action::Shortcuts, Menu::Help, "Keyboard shortcuts", icons::INFO).bare_key(Key::F1),
    command(Action::About, Menu::Help, "About Tandem", icons::INFO),
];

/// The row of an action.
pub fn find(action: Action) -> Option<&'static Command> {
    COMMANDS.iter().find(|command| command.action == action)
}

/// The shortcut of an action as this system writes it; empty when it has none.
pub fn shortcut_text(ctx: &Context, action: Action) -> String {
    find(action).and_then(|command| command.shortcut).map_or_else(String::new, |s| ctx.format_shortcut(&s))
}

/// Takes the shortcuts that were pressed.
pub fn pressed(ctx: &Context) -> Vec<Action> {
    ctx.input_mut(|input| {
        COMMANDS
            .iter()
            .filter(|command| !command.by_egui)
            .filter(|command| command.shortcut.is_some_and(|shortcut| input.consume_shortcut(&shortcut)))
            .map(|command| command.action)
            .collect()
    })
}

/// Rows whose name holds every word of `query`, best first: names that start with it before others.
pub fn search(query: &str) -> Vec<&'static Command> {
    let query = query.trim().to_lowercase();
    let words: Vec<&str> = query.split_whitespace().collect();
    let mut found: Vec<&Command> = COMMANDS
        .iter()
        .filter(|command| command.action != Action::Palette)
        .filter(|command| {
            let name = command.name.to_lowercase();
            words.iter().all(|word| name.contains(word))
        })
        .collect();
    found.sort_by_key(|command| !command.name.to_lowercase().starts_with(&query));
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_shortcuts_are_unique() {
        for (i, a) in COMMANDS.iter().enumerate() {
            for b in &COMMANDS[..i] {
                assert_ne!(a.name, b.name);
                assert_ne!(a.action, b.action);
                assert!(a.shortcut.is_none() || a.shortcut != b.shortcut, "{} and {}", a.name, b.name);
            }
        }
    }

    #[test]
    fn search_finds_words_in_any_order_and_puts_the_best_first() {
        assert_eq!(search("theme dark")[0].action, Action::ThemeDark);
        assert_eq!(search("zoom").len(), 3);
        assert_eq!(search("st")[0].action, Action::StartStarter);
        assert!(search("no such thing").is_empty());
        assert_eq!(search("").len(), COMMANDS.len() - 1);
    }
}
