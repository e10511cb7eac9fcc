"""Compile the C++ operators of this folder into one library of the user's cache folder, on first use.

All files are one translation unit: reading torch's headers costs more than compiling the kernels. The
library's name is a hash of whatever decides its content, so a new torch, compiler, CPU or source
builds anew and nothing is ever overwritten. It links no OpenMP: threads come from torch's own pool
through its C interface (`threads.h`), because two pools would fight for the cores.

What is loaded was compiled here from the installed sources: the folder must belong to this user and be
writable by nobody else.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import stat
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from penstock.core import env
from penstock.core.errors import PenstockError

SOURCES = Path(__file__).parent
FLAGS = ("-std=c++20", "-O3", "-march=native", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math")
_TIMEOUT_S = 600.0


class NotBuilt(PenstockError):
    """The operators cannot be had on this machine; everything works without them."""


def built_library() -> Path:
    """Return the library of this machine, compiled now if it is not there.

    Raises:
        NotBuilt: there is no compiler, it failed, or there is no safe folder to write to.
    """
    compiler = _compiler()
    library = _own_folder() / f"{_key(compiler)}.so"
    if not library.is_file():
        with (library.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the processes of one machine compile once
            if not library.is_file():
                _compile(compiler, library)
    return library


def _compiler() -> str:
    names = [named] if (named := env.compiler()) else ["g++", "clang++", "c++"]
    for name in names:
        if path := shutil.which(name):
            return path
    raise NotBuilt(
        "There is no C++ compiler", got=", ".join(names), fix="Install g++, or set CXX to a compiler."
    )


def _own_folder() -> Path:
    folder = env.cache_folder() / "native"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.stat()
    except OSError as error:
        raise NotBuilt(
            "No folder to keep compiled operators in",
            got=error,
            fix="Set PENSTOCK_CACHE to a folder of yours.",
        ) from error
    if found.st_uid != os.getuid() or any(_others_write(one) for one in (folder, folder.parent)):
        raise NotBuilt(
            "Others may write to the folder of compiled operators",
            got=folder,
            fix="Set PENSTOCK_CACHE to a folder that only you can write to.",
        )
    return folder


def _others_write(folder: Path) -> bool:
    """Whether other users could put a file there, or another folder in its place."""
    mode = folder.stat().st_mode
    return bool(mode & (stat.S_IWGRP | stat.S_IWOTH)) and not mode & stat.S_ISVTX


def _key(compiler: str) -> str:
    """Name everything that decides what the compiler writes."""
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=_TIMEOUT_S, check=False)
    digest = hashlib.sha256()
    for part in (compiler.encode(), version.stdout, torch.__version__.encode(), " ".join(FLAGS).encode()):
        digest.update(part + b"\0")
    digest.update(env.cpu_features().encode() or platform.processor().encode())
    for source in _sources():
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:32]


def _sources() -> list[Path]:
    return sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")])


def _compile(compiler: str, library: Path) -> None:
    """Write the library under its final name only when it is whole."""
    root = Path(torch.__file__).parent
    command = [compiler, *FLAGS, f"-I{SOURCES}", f"-I{root / 'include'}", f"-L{root / 'lib'}"]
    with TemporaryDirectory(dir=library.parent) as folder:
        unit, made = Path(folder) / "all.cpp", Path(folder) / "all.so"
        unit.write_text("".join(f'#include "{s.name}"\n' for s in _sources() if s.suffix == ".cpp"))
        command += [str(unit), "-o", str(made), "-ltorch_cpu", "-lc10"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotBuilt("The C++ compiler did not end", got=error, fix="Set CXX to another.") from error
        if done.returncode:
            raise NotBuilt(
                "The C++ compiler failed",
                got=done.stderr.strip()[:2000] or f"status {done.returncode}",
                fix="Set CXX to another compiler.",
            )
        made.rename(library)
