//! What the app and its tests need from the system, how to tell whether it is there, and the packages that bring it.

use std::path::Path;
use std::process::{Command, Stdio};

/// How to tell whether something is there.
#[derive(Debug, Clone, Copy)]
pub enum Probe {
    /// A shared library that the loader finds under this name.
    Library(&'static str),
    /// A command that succeeds, as program and arguments.
    Command(&'static [&'static str]),
    /// A program on the PATH; for those that cannot even print their version without a screen.
    Program(&'static str),
    /// An OpenGL driver: Mesa's, or a vendor's own.
    OpenGlDriver,
}

/// One thing that is needed, with the package of each supported package manager that brings it.
#[derive(Debug)]
pub struct Need {
    /// What it is, for people.
    pub what: &'static str,
    /// How to find it.
    pub probe: Probe,
    /// Package on Debian and Ubuntu.
    pub apt: &'static str,
    /// Package on Fedora and its relatives.
    pub dnf: &'static str,
    /// Package on Arch Linux.
    pub pacman: &'static str,
    /// Package on openSUSE.
    pub zypper: &'static str,
}

const fn need(what: &'static str, probe: Probe, packages: [&'static str; 4]) -> Need {
    let [apt, dnf, pacman, zypper] = packages;
    Need { what, probe, apt, dnf, pacman, zypper }
}

use Probe::{Command as Runs, Library, OpenGlDriver, Program};

/// To compile, and to fetch the starter model.
pub const TO_BUILD: &[Need] = &[
    need("a C compiler", Runs(&["cc", "--version"]), ["gcc", "gcc", "gcc", "gcc"]),
    need(
        "the C library's headers",
        Runs(&["sh", "-c", "printf '#include <stdio.h>' | cc -E -"]),
        ["libc6-dev", "glibc-devel", "glibc", "glibc-devel"],
    ),
    need("Python 3", Runs(&["python3", "--version"]), ["python3", "python3", "python", "python3"]),
    need(
        "pip",
        Runs(&["python3", "-m", "pip", "--version"]),
        ["python3-pip", "python3-pip", "python-pip", "python3-pip"],
    ),
];

/// To open a window. None of these is linked: the program loads them when it starts.
pub const TO_SHOW: &[Need] = &[
    need("X11", Library("libX11.so.6"), ["libx11-6", "libX11", "libx11", "libX11-6"]),
    need("X11 over XCB", Library("libX11-xcb.so.1"), ["libx11-xcb1", "libX11-xcb", "libx11", "libX11-xcb1"]),
    need("X11 cursors", Library("libXcursor.so.1"), ["libxcursor1", "libXcursor", "libxcursor", "libXcursor1"]),
    need("X11 screens", Library("libXrandr.so.2"), ["libxrandr2", "libXrandr", "libxrandr", "libXrandr2"]),
    need("X11 input", Library("libXi.so.6"), ["libxi6", "libXi", "libxi", "libXi6"]),
    need(
        "keyboard maps",
        Library("libxkbcommon.so.0"),
        ["libxkbcommon0", "libxkbcommon", "libxkbcommon", "libxkbcommon0"],
    ),
    need(
        "keyboard maps for X11",
        Library("libxkbcommon-x11.so.0"),
        ["libxkbcommon-x11-0", "libxkbcommon-x11", "libxkbcommon-x11", "libxkbcommon-x11-0"],
    ),
    need(
        "Wayland",
        Library("libwayland-client.so.0"),
        ["libwayland-client0", "libwayland-client", "wayland", "libwayland-client0"],
    ),
    need(
        "Wayland windows for EGL",
        Library("libwayland-egl.so.1"),
        ["libwayland-egl1", "libwayland-egl", "wayland", "libwayland-egl1"],
    ),
    need("EGL", Library("libEGL.so.1"), ["libegl1", "libglvnd-egl", "libglvnd", "libglvnd"]),
    need("OpenGL", Library("libGL.so.1"), ["libgl1", "libglvnd-glx", "libglvnd", "libglvnd"]),
    need("an OpenGL driver", OpenGlDriver, ["libgl1-mesa-dri", "mesa-dri-drivers", "mesa", "Mesa-dri"]),
];

/// To test the window on a machine without a screen.
pub const TO_TEST: &[Need] = &[
    need(
        "a virtual screen",
        Program("Xvfb"),
        ["xvfb", "xorg-x11-server-Xvfb", "xorg-server-xvfb", "xorg-x11-server-Xvfb"],
    ),
    need("a keyboard and mouse for it", Program("xdotool"), ["xdotool", "xdotool", "xdotool", "xdotool"]),
];

impl Need {
    /// Whether it is there.
    pub fn is_met(&self) -> bool {
        match self.probe {
            Probe::Library(name) => loads(name),
            Probe::Command(words) => runs(words),
            Probe::Program(name) => on_path(name),
            Probe::OpenGlDriver => has_opengl_driver(),
        }
    }
}

/// Whether a command can be started and succeeds.
pub fn runs(words: &[&str]) -> bool {
    let Some((program, arguments)) = words.split_first() else { return false };
    Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

fn on_path(program: &str) -> bool {
    std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|folder| folder.join(program).is_file()))
}

/// Whether the dynamic loader finds a shared library: the very question the app asks when it starts.
#[cfg(target_os = "linux")]
fn loads(name: &str) -> bool {
    use std::ffi::{CString, c_char, c_int, c_void};
    unsafe extern "C" {
        fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
    }
    const RTLD_LAZY: c_int = 1;
    let Ok(name) = CString::new(name) else { return false };
    // SAFETY: `name` is a valid C string for the duration of the call; the libraries asked for are system libraries whose
    // initializers the app itself runs, and the handle is kept until the process ends.
    !unsafe { dlopen(name.as_ptr(), RTLD_LAZY) }.is_null()
}

#[cfg(not(target_os = "linux"))]
fn loads(_name: &str) -> bool {
    true
}

fn has_opengl_driver() -> bool {
    if ["libEGL_nvidia.so.0", "libGLX_nvidia.so.0"].iter().any(|vendor| loads(vendor)) {
        return true;
    }
    let own = std::env::var("LIBGL_DRIVERS_PATH").unwrap_or_default();
    let multiarch = format!("/usr/lib/{}-linux-gnu/dri", std::env::consts::ARCH);
    own.split(':').chain([multiarch.as_str(), "/usr/lib64/dri", "/usr/lib/dri"]).any(|folder| {
        Path::new(folder)
            .read_dir()
            .is_ok_and(|entries| entries.flatten().any(|e| e.file_name().to_string_lossy().ends_with("_dri.so")))
    })
}
