//! Phosphor icons by name (code points of Phosphor 2.1; the same in the outline and the filled font).

/// `arrow-counter-clockwise`
pub const ARROW_COUNTER_CLOCKWISE: &str = "\u{E038}";
/// `arrow-elbow-down-left`
pub const ARROW_ELBOW_DOWN_LEFT: &str = "\u{E044}";
/// `arrow-square-out`
pub const ARROW_SQUARE_OUT: &str = "\u{E5DE}";
/// `arrows-clockwise`
pub const ARROWS_CLOCKWISE: &str = "\u{E094}";
/// `caret-down`
pub const CARET_DOWN: &str = "\u{E136}";
/// `caret-left`
pub const CARET_LEFT: &str = "\u{E138}";
/// `caret-right`
pub const CARET_RIGHT: &str = "\u{E13A}";
/// `caret-up`
pub const CARET_UP: &str = "\u{E13C}";
/// `check`
pub const CHECK: &str = "\u{E182}";
/// `check-circle`
pub const CHECK_CIRCLE: &str = "\u{E184}";
/// `circle-half`
pub const CIRCLE_HALF: &str = "\u{E18C}";
/// `clock`
pub const CLOCK: &str = "\u{E19A}";
/// `copy`
pub const COPY: &str = "\u{E1CA}";
/// `cpu`
pub const CPU: &str = "\u{E610}";
/// `diamond`
pub const DIAMOND: &str = "\u{E1EC}";
/// `dots-three`
pub const DOTS_THREE: &str = "\u{E1FE}";
/// `download-simple`
pub const DOWNLOAD_SIMPLE: &str = "\u{E20C}";
/// `export`
pub const EXPORT: &str = "\u{EAF0}";
/// `eye`
pub const EYE: &str = "\u{E220}";
/// `file-arrow-down`
pub const FILE_ARROW_DOWN: &str = "\u{E232}";
/// `file-plus`
pub const FILE_PLUS: &str = "\u{E236}";
/// `file-text`
pub const FILE_TEXT: &str = "\u{E23A}";
/// `floppy-disk`
pub const FLOPPY_DISK: &str = "\u{E248}";
/// `folder`
pub const FOLDER: &str = "\u{E24A}";
/// `folder-open`
pub const FOLDER_OPEN: &str = "\u{E256}";
/// `folder-plus`
pub const FOLDER_PLUS: &str = "\u{E258}";
/// `gear-six`
pub const GEAR_SIX: &str = "\u{E272}";
/// `git-diff`
pub const GIT_DIFF: &str = "\u{E27C}";
/// `graphics-card`
pub const GRAPHICS_CARD: &str = "\u{E612}";
/// `hard-drives`
pub const HARD_DRIVES: &str = "\u{E2A0}";
/// `house`
pub const HOUSE: &str = "\u{E2C2}";
/// `info`
pub const INFO: &str = "\u{E2CE}";
/// `magnifying-glass`
pub const MAGNIFYING_GLASS: &str = "\u{E30C}";
/// `memory`
pub const MEMORY: &str = "\u{E9C4}";
/// `minus`
pub const MINUS: &str = "\u{E32A}";
/// `moon`
pub const MOON: &str = "\u{E330}";
/// `mouse-simple`
pub const MOUSE_SIMPLE: &str = "\u{E644}";
/// `play`
pub const PLAY: &str = "\u{E3D0}";
/// `plus`
pub const PLUS: &str = "\u{E3D4}";
/// `plus-square`
pub const PLUS_SQUARE: &str = "\u{ED4A}";
/// `prohibit`
pub const PROHIBIT: &str = "\u{E3DE}";
/// `pulse`
pub const PULSE: &str = "\u{E000}";
/// `rows`
pub const ROWS: &str = "\u{E5A2}";
/// `seal-check`
pub const SEAL_CHECK: &str = "\u{E606}";
/// `sidebar-simple`
pub const SIDEBAR_SIMPLE: &str = "\u{EC24}";
/// `stop`
pub const STOP: &str = "\u{E46C}";
/// `sun`
pub const SUN: &str = "\u{E472}";
/// `toggle-right`
pub const TOGGLE_RIGHT: &str = "\u{E676}";
/// `trash`
pub const TRASH: &str = "\u{E4A6}";
/// `tray-arrow-down`
pub const TRAY_ARROW_DOWN: &str = "\u{E010}";
/// `warning`
pub const WARNING: &str = "\u{E4E0}";
/// `warning-circle`
pub const WARNING_CIRCLE: &str = "\u{E4E2}";
/// `x`
pub const X: &str = "\u{E4F6}";
/// `x-circle`
pub const X_CIRCLE: &str = "\u{E4F8}";

/// Every icon above, for the test that looks for their glyphs.
#[cfg(test)]
pub const ALL: &[&str] = &[
    ARROW_COUNTER_CLOCKWISE,
    ARROW_ELBOW_DOWN_LEFT,
    ARROW_SQUARE_OUT,
    ARROWS_CLOCKWISE,
    CARET_DOWN,
    CARET_LEFT,
    CARET_RIGHT,
    CARET_UP,
    CHECK,
    CHECK_CIRCLE,
    CIRCLE_HALF,
    CLOCK,
    COPY,
    CPU,
    DIAMOND,
    DOTS_THREE,
    DOWNLOAD_SIMPLE,
    EXPORT,
    EYE,
    FILE_ARROW_DOWN,
    FILE_PLUS,
    FILE_TEXT,
    FLOPPY_DISK,
    FOLDER,
    FOLDER_OPEN,
    FOLDER_PLUS,
    GEAR_SIX,
    GIT_DIFF,
    GRAPHICS_CARD,
    HARD_DRIVES,
    HOUSE,
    INFO,
    MAGNIFYING_GLASS,
    MEMORY,
    MINUS,
    MOON,
    MOUSE_SIMPLE,
    PLAY,
    PLUS,
    PLUS_SQUARE,
    PROHIBIT,
    PULSE,
    ROWS,
    SEAL_CHECK,
    SIDEBAR_SIMPLE,
    STOP,
    SUN,
    TOGGLE_RIGHT,
    TRASH,
    TRAY_ARROW_DOWN,
    WARNING,
    WARNING_CIRCLE,
    X,
    X_CIRCLE,
];
