"""Builds the played driver with gcc: its C, and a stub for every other function of CUDA that torch's libraries import.

A newer torch that imports more functions gets more stubs; one that is built for another CUDA is refused by name.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

SOURCES = Path(__file__).parent
CUDA_MAJOR = "13"
_TOOLS = ("gcc", "nm", "readelf")
_OF_CUDA = re.compile(
    "(cuda|cublas|cudnn|cusparse|cufft|cuFile|curand|cusolver|cupti|nccl|nvrtc|nvshmem|cu[A-Z]|__cuda)"
)
_LIBRARY_OF_CUDA = re.compile(r"NEEDED.*\[(lib(?:cu|nv|nccl)[^]]*)\]")
_OF_THE_DRIVER = ("libcuda.so.1", "libnvidia-ml.so.1")


class BuildError(RuntimeError):
    """The driver cannot be built here."""


def missing_tools() -> list[str]:
    """The programs that building needs and that are not installed."""
    return [tool for tool in _TOOLS if shutil.which(tool) is None]


def build(torch_folder: Path, out: Path) -> Path:
    """Build the driver for a torch, unless it is there already.

    Args:
        torch_folder: the installed package `torch`.
        out: a folder for built drivers.

    Returns:
        The folder with the libraries, for LD_LIBRARY_PATH.

    Raises:
        BuildError: a program is missing or fails, or this torch was not built for CUDA 13.
    """
    folder = out / _digest(torch_folder)
    if folder.is_dir():
        return folder
    if missing := missing_tools():
        raise BuildError(
            f"the driver needs {', '.join(_TOOLS)}, and {', '.join(missing)} is missing: install binutils and gcc"
        )
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as work:
        built = Path(work, "built")
        built.mkdir()
        _build(torch_folder / "lib", Path(work), built)
        try:
            built.rename(folder)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise
    return folder


def _digest(torch_folder: Path) -> str:
    digest = hashlib.sha256((torch_folder / "version.py").read_bytes())
    for source in sorted([*SOURCES.glob("*.[ch]"), Path(__file__)]):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _build(torch_libraries: Path, work: Path, out: Path) -> None:
    libraries = sorted(torch_libraries.glob("*.so"))
    needed = {name for library in libraries for name in _LIBRARY_OF_CUDA.findall(_run("readelf", "-d", library))}
    if f"libcudart.so.{CUDA_MAJOR}" not in needed:
        raise BuildError(
            f"the torch in {torch_libraries.parent} needs {', '.join(sorted(needed)) or 'no library of CUDA'}, and the "
            f"driver plays CUDA {CUDA_MAJOR}: install torch's build for CUDA {CUDA_MAJOR}"
        )
    with ThreadPoolExecutor() as pool:
        objects = list(pool.map(partial(_compile, work=work), sorted(SOURCES.glob("*.c"))))
    written = {name for compiled in objects for name in _symbols("--defined-only", compiled)}
    imported = {name for library in libraries for name in _symbols("-D", "--undefined-only", library)}
    stubs = _stubs({name for name in imported if _OF_CUDA.match(name)} - written, work)
    _link(out / "libplayed.so", *objects, stubs, "-lpthread", "-ldl")
    for name in sorted(needed.union(_OF_THE_DRIVER)):
        _link(out / name, "-Wl,--no-as-needed", f"-L{out}", "-lplayed", "-Wl,-rpath,$ORIGIN", "-x", "c", os.devnull)
    (out / "libcuda.so").symlink_to("libcuda.so.1")


def _compile(source: Path, work: Path) -> Path:
    compiled = work / f"{source.stem}.o"
    _run("gcc", "-O2", "-g", "-fPIC", "-fno-strict-aliasing", "-Wall", "-std=gnu11", "-c", source, "-o", compiled)
    return compiled


def _stubs(names: set[str], work: Path) -> Path:
    """Functions that do nothing and succeed; what creates something gives a handle."""
    source, compiled = work / "stubs.s", work / "stubs.o"
    lines = []
    for name in sorted(names):
        target = "played_create" if "Create" in name and not name.startswith("cuda") else "played_ok"
        lines += [f".globl {name}", f".type {name},@function", f"{name}: jmp {target}@PLT"]
    lines += ['.section .note.GNU-stack,"",@progbits', ""]
    source.write_text("\n".join(lines))
    _run("gcc", "-c", source, "-o", compiled)
    return compiled


def _link(library: Path, *arguments: str | Path) -> None:
    _run("gcc", "-shared", "-o", library, f"-Wl,-soname,{library.name}", *arguments)


def _symbols(*arguments: str | Path) -> set[str]:
    names = (line.split()[-1] for line in _run("nm", *arguments).splitlines() if line.strip())
    return {name.split("@")[0] for name in names}


def _run(program: str, *arguments: str | Path) -> str:
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{program} {' '.join(map(str, arguments))} failed: {done.stderr.strip()}")
    return done.stdout
