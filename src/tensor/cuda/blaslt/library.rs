//! Finding cuBLASLt: what the system's loader does not know is looked for in the folders where it usually lies.
//!
//! cudarc opens the library by its bare name. A library that was loaded from a folder before answers to that name too, so it is enough to load it
//! first and to keep it loaded.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use cudarc::cublaslt::sys;

/// Functions that are called. cudarc looks each up at its first use and panics when it is missing, so they are checked first.
const NEEDED: &[&str] = &[
    "cublasLtCreate",
    "cublasLtDestroy",
    "cublasLtGetVersion",
    "cublasLtMatmul",
    "cublasLtMatmulAlgoCheck",
    "cublasLtMatmulAlgoGetHeuristic",
    "cublasLtMatmulDescCreate",
    "cublasLtMatmulDescDestroy",
    "cublasLtMatmulDescSetAttribute",
    "cublasLtMatmulPreferenceCreate",
    "cublasLtMatmulPreferenceDestroy",
    "cublasLtMatmulPreferenceSetAttribute",
    "cublasLtMatrixLayoutCreate",
    "cublasLtMatrixLayoutDestroy",
];

/// The library's file by major version of CUDA, newest first.
const FILES: [(i32, &str); 2] = if cfg!(windows) {
    [(13, "cublasLt64_13.dll"), (12, "cublasLt64_12.dll")]
} else {
    [(13, "libcublasLt.so.13"), (12, "libcublasLt.so.12")]
};

/// A library that was loaded from a folder; it stays loaded as long as the process lives.
struct Loaded {
    path: PathBuf,
    _handle: libloading::Library,
}

/// Makes cudarc's calls of cuBLASLt safe. `driver_version` is the driver's (13000 for CUDA 13.0): newer libraries do not start on it.
/// The answer is found once per process. Returns the file that was loaded, `None` where the system's loader knew the library.
///
/// # Errors
/// Why there is no library, in words.
pub fn load(driver_version: i32) -> Result<Option<&'static Path>, String> {
    static ANSWER: OnceLock<Result<Option<Loaded>, String>> = OnceLock::new();
    let answer = ANSWER.get_or_init(|| {
        // SAFETY: only tries to open the library.
        let is_present = || unsafe { sys::is_culib_present() };
        let loaded = if is_present() { None } else { Some(load_from_folder(driver_version)?) };
        if let Some(loaded) = loaded.as_ref().filter(|_| !is_present()) {
            return Err(format!("{} was loaded, but does not answer to its name", loaded.path.display()));
        }
        // SAFETY: the library is present, so this does not panic.
        let library = unsafe { sys::culib() };
        // SAFETY: the symbols are only looked up, never called through this type.
        let has = |name: &&str| unsafe { library.get::<unsafe extern "C" fn()>(name.as_bytes()) }.is_ok();
        match NEEDED.iter().find(|name| !has(name)) {
            Some(name) => Err(format!("the cuBLASLt that was found is too old: it lacks {name}")),
            None => Ok(loaded),
        }
    });
    match answer {
        Ok(loaded) => Ok(loaded.as_ref().map(|loaded| loaded.path.as_path())),
        Err(reason) => Err(reason.clone()),
    }
}

fn load_from_folder(driver_version: i32) -> Result<Loaded, String> {
    let names: Vec<&str> =
        FILES.iter().filter(|(major, _)| *major <= driver_version / 1000).map(|(_, name)| *name).collect();
    let executable = std::env::current_exe().ok();
    let home = directories::BaseDirs::new().map(|dirs| dirs.home_dir().to_path_buf());
    let roots = roots(|name| std::env::var_os(name), executable.as_deref(), home.as_deref());
    let mut refused = None;
    for path in search(&roots, &names) {
        match open(&path) {
            Ok(handle) => return Ok(Loaded { path, _handle: handle }),
            Err(error) => refused = Some(format!("{} does not load: {error}", path.display())),
        }
    }
    Err(refused.unwrap_or_else(|| "cuBLASLt was not found".into()))
}

#[cfg(unix)]
fn open(path: &Path) -> Result<libloading::Library, libloading::Error> {
    use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
    // SAFETY: NVIDIA's library has no initialization that asks anything of the caller.
    unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }.map(Into::into)
}

#[cfg(not(unix))]
fn open(path: &Path) -> Result<libloading::Library, libloading::Error> {
    // SAFETY: NVIDIA's library has no initialization that asks anything of the caller.
    unsafe { libloading::Library::new(path) }
}

/// Folders that may hold the library, best first: beside the executable, CUDA toolkits, Python's packages. A `*` in a part of a path stands for
/// anything.
fn roots(variable: impl Fn(&str) -> Option<OsString>, executable: Option<&Path>, home: Option<&Path>) -> Vec<PathBuf> {
    let variable = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let windows = cfg!(windows);
    let mut roots: Vec<PathBuf> = executable.and_then(Path::parent).map(Path::to_path_buf).into_iter().collect();

    let mut toolkits: Vec<PathBuf> = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(variable).collect();
    if !windows {
        toolkits.extend(["/usr/local/cuda", "/usr/local/cuda-*"].map(PathBuf::from));
    }
    let inside: &[&str] = if windows { &["bin/x64", "bin"] } else { &["lib64", "targets/*/lib"] };
    roots.extend(toolkits.iter().flat_map(|toolkit| inside.iter().map(|folder| toolkit.join(folder))));

    let mut packages = Vec::new();
    let per_environment = if windows { "Lib/site-packages" } else { "lib/python3*/site-packages" };
    for environment in ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(variable) {
        packages.push(environment.join(per_environment));
        // Conda has packages of its own beside Python's.
        roots.push(environment.join(if windows { "Library/bin" } else { "lib" }));
    }
    let pyenv = variable("PYENV_ROOT").or_else(|| home.map(|home| home.join(".pyenv")));
    if windows {
        packages.extend(variable("APPDATA").map(|folder| folder.join("Python/Python3*/site-packages")));
        packages
            .extend(variable("LOCALAPPDATA").map(|folder| folder.join("Programs/Python/Python3*/Lib/site-packages")));
    } else {
        packages.extend(home.map(|home| home.join(".local/lib/python3*/site-packages")));
        packages.extend(pyenv.map(|pyenv| pyenv.join("versions/*/lib/python3*/site-packages")));
        for prefix in ["/usr/local/lib", "/usr/lib", "/usr/lib64"] {
            packages.extend(["site", "dist"].map(|kind| PathBuf::from(format!("{prefix}/python3*/{kind}-packages"))));
        }
    }
    let inside: &[&str] = if windows {
        &["nvidia/cu13/bin/x86_64", "nvidia/cu13/bin", "nvidia/cublas/bin"]
    } else {
        &["nvidia/cu13/lib", "nvidia/cublas/lib"]
    };
    roots.extend(packages.iter().flat_map(|packages| inside.iter().map(|folder| packages.join(folder))));
    roots
}

/// Every file of one of the `names` in one of the folders `roots`, in their order; a folder's first name comes first.
fn search(roots: &[PathBuf], names: &[&str]) -> Vec<PathBuf> {
    let folders = roots.iter().flat_map(|root| expand(root));
    folders.flat_map(|folder| names.iter().map(move |name| folder.join(name))).filter(|path| path.is_file()).collect()
}

/// The folders that a path with `*` in its parts stands for, highest version first.
fn expand(pattern: &Path) -> Vec<PathBuf> {
    let mut found = vec![PathBuf::new()];
    for part in pattern.components() {
        let part = part.as_os_str();
        let Some((before, after)) = part.to_str().and_then(|part| part.split_once('*')) else {
            found.iter_mut().for_each(|path| path.push(part));
            continue;
        };
        found = found
            .iter()
            .flat_map(|folder| {
                let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
                let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
                let fits = |name: &String| {
                    name.len() >= before.len() + after.len() && name.starts_with(before) && name.ends_with(after)
                };
                let mut names: Vec<String> = names.filter(fits).collect();
                names.sort_by_cached_key(|name| std::cmp::Reverse((numbers(name), name.clone())));
                names.into_iter().map(|name| folder.join(name)).collect::<Vec<_>>()
            })
            .collect();
    }
    found
}

/// The numbers in a name, so that 3.11 comes after 3.9.
fn numbers(name: &str) -> Vec<u64> {
    name.split(|c: char| !c.is_ascii_digit()).filter_map(|digits| digits.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(folder: &Path, file: &str) -> PathBuf {
        let path = folder.join(file);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, "").unwrap();
        path
    }

    #[test]
    fn folders_are_searched_in_order_and_newer_versions_first() {
        let dir = tempfile::tempdir().unwrap();
        let names = ["lib.so.13", "lib.so.12"];
        let roots = ["first", "lib/python3*/packages", "absent", "last"].map(|root| dir.path().join(root));
        assert!(search(&roots, &names).is_empty());
        let last = touch(dir.path(), "last/lib.so.13");
        let old_python = touch(dir.path(), "lib/python3.9/packages/lib.so.12");
        let new_python = touch(dir.path(), "lib/python3.11/packages/lib.so.12");
        let newer = touch(dir.path(), "lib/python3.11/packages/lib.so.13");
        touch(dir.path(), "lib/ruby3.9/packages/lib.so.13");
        touch(dir.path(), "last/lib.so.11");
        // A folder of that name is not the library.
        std::fs::create_dir_all(dir.path().join("first/lib.so.13")).unwrap();
        assert_eq!(search(&roots, &names), [newer, new_python.clone(), old_python.clone(), last]);
        assert_eq!(search(&roots, &names[1..]), [new_python, old_python]);
    }

    #[test]
    fn the_usual_places_come_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let at = |folder: &str| dir.path().join(folder);
        let roots = roots(
            |name| match name {
                "CUDA_HOME" => Some(at("toolkit").into()),
                "VIRTUAL_ENV" => Some(at("environment").into()),
                "CUDA_PATH" => Some(OsString::new()),
                _ => None,
            },
            Some(&at("program/tandem")),
            Some(&at("user")),
        );
        assert!(roots.iter().all(|root| root.is_absolute()), "{roots:?}");
        let place = |part: &str| {
            let part: PathBuf = part.split('/').collect();
            roots.iter().position(|root| root.to_string_lossy().contains(&*part.to_string_lossy()))
        };
        let places = ["program", "toolkit", "environment/"].map(|part| place(part.trim_end_matches('/')));
        assert!(places.iter().all(Option::is_some) && places.is_sorted(), "{roots:?}");
        if cfg!(target_os = "linux") {
            let file = touch(dir.path(), "user/.local/lib/python3.12/site-packages/nvidia/cu13/lib/libcublasLt.so.13");
            let own: Vec<PathBuf> = roots.into_iter().filter(|root| root.starts_with(dir.path())).collect();
            assert_eq!(search(&own, &["libcublasLt.so.13"]), [file]);
        }
    }
}
