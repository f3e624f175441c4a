"""Compiles kernels/*.cu with NVRTC for every target and packs the images into kernels/build/kernels.zip.

Needs neither a GPU nor a CUDA toolkit: the compiler and the headers come from the Python package index (`cargo xtask kernels` installs them).
What has not changed since the last call (source, headers, compiler) is taken from kernels/build/cache.

usage: nvrtc.py TOOLCHAIN_DIR KERNELS_DIR
"""

import concurrent.futures
import ctypes
import hashlib
import json
import pathlib
import re
import sys
import zipfile

TARGETS = ["compute_80", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"]
OPTIONS = ["-std=c++17", "-default-device", "--use_fast_math"]
INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
KERNEL = re.compile(r'extern\s+"C"\s+__global__\s+void\s+(?:TANDEM_\w+\s+)?(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\(')


def with_headers(kernels: pathlib.Path, text: str) -> str:
    """The text of a source followed by those of the project's headers that it includes, directly or through another."""
    texts, wanted, seen = [text], INCLUDE.findall(text), set()
    while wanted:
        name = wanted.pop(0)
        if name not in seen:
            seen.add(name)
            texts.append((kernels / name).read_text())
            wanted += INCLUDE.findall(texts[-1])
    return "".join(texts)


def main() -> None:
    toolchain, kernels = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    compiler = next((toolchain / "nvidia/cuda_nvrtc/lib").glob("libnvrtc.so.*"))
    includes = [kernels, toolchain / "nvidia/cuda_runtime/include", toolchain / "nvidia/cuda_cccl/include"]
    build = kernels / "build"
    cache = build / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    options = OPTIONS + [f"-I{path}" for path in includes]
    salt = hashlib.sha256((compiler.name + " ".join(OPTIONS)).encode()).hexdigest()
    library = ctypes.CDLL(str(compiler))
    jobs = [(source, target) for source in sorted(kernels.glob("*.cu")) for target in TARGETS]

    def image(job):
        source, target = job
        text = source.read_text()
        key = hashlib.sha256(f"{salt}{target}{with_headers(kernels, text)}".encode()).hexdigest()[:24]
        file = cache / f"{source.stem}.{target}.{key}"
        if not file.exists():
            for old in cache.glob(f"{source.stem}.{target}.*"):
                old.unlink()
            file.write_bytes(compile_one(library, source, text, target, options))
            print(f"compiled {source.name} for {target}: {file.stat().st_size} bytes", flush=True)
        return f"{source.stem}.{target}", file.read_bytes()

    # The compiler runs outside Python's lock, so threads use every core.
    with concurrent.futures.ThreadPoolExecutor() as pool:
        images = list(pool.map(image, jobs))
    index = {source.stem: KERNEL.findall(source.read_text()) for source in sorted(kernels.glob("*.cu"))}
    for stem, names in index.items():
        if not names:
            sys.exit(f"{stem}.cu holds no kernel (extern \"C\" __global__)")
    archive = build / "kernels.zip"
    temporary = build / "kernels.zip.new"
    with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as out:
        # Fixed dates: the same kernels give the same archive.
        for name, data in [("kernels.json", json.dumps(index).encode()), *images]:
            out.writestr(zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0)), data, zipfile.ZIP_DEFLATED, 9)
    if archive.exists() and archive.read_bytes() == temporary.read_bytes():
        temporary.unlink()
    else:
        temporary.replace(archive)
    print(f"{len(images)} images of {len(index)} sources, {archive.stat().st_size} bytes")


def compile_one(library, source, text, target, options) -> bytes:
    program = ctypes.c_void_p()
    check(library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), source.name.encode(), 0, None, None), "create")
    arguments = [f"-arch={target}", *options]
    array = (ctypes.c_char_p * len(arguments))(*[argument.encode() for argument in arguments])
    status = library.nvrtcCompileProgram(program, len(arguments), array)
    size = ctypes.c_size_t()
    if status:
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, log)
        raise SystemExit(f"{source} for {target}:\n{log.value.decode()}")
    kind = "CUBIN" if target.startswith("sm_") else "PTX"
    check(getattr(library, f"nvrtcGet{kind}Size")(program, ctypes.byref(size)), kind)
    image = ctypes.create_string_buffer(size.value)
    check(getattr(library, f"nvrtcGet{kind}")(program, image), kind)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return image.raw


def check(status: int, what: str) -> None:
    if status:
        sys.exit(f"NVRTC: {what} failed with status {status}")


if __name__ == "__main__":
    main()
