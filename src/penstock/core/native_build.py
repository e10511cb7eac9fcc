"""Native builds: sources of the package as a library, shipped with an image or compiled on first use.

    shipped     a folder of root's, that nobody else can write to: one library for each baseline of CPUs
    compiled    the user's cache folder, for this CPU: this user's, and nobody else can write to it

A library's name has a hash of all that determines its content, so another source, compiler, CPU or torch has
another library and nothing is overwritten. A shipped one comes first: whoever put it there could as well have
changed the Python code, and a container has no compiler and perhaps no folder to write to.
"""

import argparse
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from penstock.core import env
from penstock.core.errors import PenstockError
from penstock.core.native_baselines import Baseline, baselines_named, baselines_of

log = logging.getLogger(__name__)

_TIMEOUT_S = 600.0
_VERSION_S = 20


class NotBuilt(PenstockError):
    """Compiled code is not available on this machine; everything works without it."""


def find_compiler(language: str, variable: str, names: Sequence[str]) -> str:
    """Return the path of a compiler: the one named by an environment variable, or the first one installed.

    Args:
        language: for messages, such as "C++".
        variable: such as "CXX".
        names: names to try if the variable is not set.

    Raises:
        NotBuilt: there is none.
    """
    tried = [named] if (named := env.compiler(variable)) else names
    for name in tried:
        if path := shutil.which(name):
            return path
    raise NotBuilt(
        f"There is no {language} compiler",
        got=", ".join(tried),
        fix=f"Install {names[0]}, or set {variable} to a compiler.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Translation units that become one library."""

    name: str
    """Of its library among those of an image."""
    texts: Sequence[str]
    """Texts of the translation units, which include the sources; they are compiled side by side."""
    suffix: str
    """Suffix of the units' files; it tells the compiler the language."""
    sources: Sequence[Path]
    """Files that it includes, all of one folder, which is an include path."""
    find_compiler: Callable[[], str]
    """Returns the path of the compiler, or raises NotBuilt."""
    variable: str
    """Environment variable that selects another compiler, for messages."""
    flags: Sequence[str]
    """Compiler flags of each unit, but for those of the CPU."""
    paths: Sequence[str] = ()
    """Flags with paths of this machine."""
    links: Sequence[str] = ()
    """Linker flags after the objects."""
    version: str = ""
    """Version of anything else that determines the content, such as headers of another package."""


def library_of(unit: Unit) -> Path:
    """Return the library of a translation unit for this machine, compiling it if necessary.

    Raises:
        NotBuilt: the compiler failed, or there is no safe folder to write to.
    """
    if shipped := _shipped(unit):
        return shipped
    target = [flag for baseline in _chosen_baselines() for flag in baseline.flags] or ["-march=native"]
    compiler, flags = unit.find_compiler(), [*unit.flags, *target, *unit.paths]
    library = _own_folder() / f"{_key(compiler, flags, unit)}.so"
    if not library.is_file():
        with (library.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # only one process of a machine compiles
            if not library.is_file():
                _compile(compiler, flags, unit, library)
    return library


def build_ahead(unit: Unit, folder: Path, baseline: Baseline) -> Path:
    """Compile the library of a baseline into a folder that an image ships; return its path.

    Raises:
        NotBuilt: the compiler failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / _shipped_name(unit, baseline)
    _compile(unit.find_compiler(), [*unit.flags, *baseline.flags, *unit.paths], unit, library)
    return library


def run_build(unit: Unit) -> None:
    """Run the command `python -m PACKAGE.native`: build the library for this machine, or for an image."""
    parser = argparse.ArgumentParser(description="Build a compiled library ahead of its first use.")
    parser.add_argument("--ship", type=Path, metavar="FOLDER", help="build for the baselines, into a folder")
    parser.add_argument("--baseline", action="append", default=[], metavar="NAME", help="default: all")
    arguments = parser.parse_args()
    try:
        if arguments.ship is None:
            sys.stdout.write(f"{library_of(unit)}\n")
        else:
            for baseline in baselines_named(arguments.baseline):
                sys.stdout.write(f"{build_ahead(unit, arguments.ship, baseline)}\n")
    except (PenstockError, OSError) as error:
        sys.exit(str(error))


def _chosen_baselines() -> list[Baseline]:
    """Return the baseline that the environment names instead of this CPU; empty if it names none."""
    name = env.native_baseline()
    return baselines_named([name]) if name else []


def _shipped_name(unit: Unit, baseline: Baseline) -> str:
    digest = hashlib.sha256()
    for part in (*unit.texts, *unit.flags, *baseline.flags, *unit.links, unit.version):
        digest.update(part.encode() + b"\0")
    _add_sources(digest, unit)
    return f"{unit.name}-{baseline.name}-{digest.hexdigest()[:32]}.so"


def _shipped(unit: Unit) -> Path | None:
    """Return the best library that an image has for this CPU; None if there is none, or it is not safe."""
    folder = env.library_folder()
    if not folder.is_dir():
        return None
    for baseline in _chosen_baselines() or baselines_of(env.cpu_features()):
        library = (folder / _shipped_name(unit, baseline)).resolve()
        if not library.is_file():
            continue
        if not (unsafe := [each for each in (library, *library.parents) if not _is_of_root_alone(each)]):
            return library
        log.warning(
            "a compiled library is not used path=%s reason='%s is not root's alone'", library, unsafe[0]
        )
    return None


def _is_of_root_alone(path: Path) -> bool:
    """Return True if nobody but root can change a file, or replace what stands in a folder."""
    found = path.stat()
    if stat.S_ISDIR(found.st_mode):
        return found.st_uid == 0 and not _others_write(path)
    return found.st_uid == 0 and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _own_folder() -> Path:
    folder = env.cache_folder() / "native"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.stat()
    except OSError as error:
        raise NotBuilt(
            "No folder for compiled code",
            got=error,
            fix="Set PENSTOCK_CACHE to a folder of yours.",
        ) from error
    if found.st_uid != os.getuid() or any(_others_write(one) for one in (folder, folder.parent)):
        raise NotBuilt(
            "The folder of compiled code is writable by others",
            got=folder,
            fix="Set PENSTOCK_CACHE to a folder that only you can write to.",
        )
    return folder


def _others_write(folder: Path) -> bool:
    """Return True if other users could create a file there or replace the folder."""
    mode = folder.stat().st_mode
    return bool(mode & (stat.S_IWGRP | stat.S_IWOTH)) and not mode & stat.S_ISVTX


def _key(compiler: str, flags: Sequence[str], unit: Unit) -> str:
    """Return the hash of everything that determines the compiled library."""
    try:
        version = subprocess.run(
            [compiler, "--version"], capture_output=True, timeout=_VERSION_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotBuilt(
            f"{compiler} does not print its version", got=error, fix="Set another compiler."
        ) from error
    digest = hashlib.sha256()
    parts = "\0".join([*flags, *unit.links, unit.version, *unit.texts]).encode()
    for part in (compiler.encode(), version.stdout, parts):
        digest.update(part + b"\0")
    digest.update(env.cpu_features().encode() or platform.processor().encode())
    _add_sources(digest, unit)
    return digest.hexdigest()[:32]


def _add_sources(digest: "hashlib._Hash", unit: Unit) -> None:
    for source in unit.sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes())


def _compile(compiler: str, flags: Sequence[str], unit: Unit, library: Path) -> None:
    """Compile the units side by side and link them; the final name appears when the library is complete."""
    with TemporaryDirectory(dir=library.parent) as folder:
        sources = [Path(folder) / f"{number}{unit.suffix}" for number in range(len(unit.texts))]
        objects = [source.with_suffix(".o") for source in sources]
        for source, text in zip(sources, unit.texts, strict=True):
            source.write_text(text)
        include = f"-I{unit.sources[0].parent}"
        commands = [
            [compiler, *flags, include, "-c", str(source), "-o", str(made)]
            for source, made in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(env.num_cores()) as pool:
            list(pool.map(lambda command: _run(command, unit), commands))
        made = Path(folder) / "all.so"
        _run([compiler, *flags, "-shared", *map(str, objects), "-o", str(made), *unit.links], unit)
        made.rename(library)


def _run(command: Sequence[str], unit: Unit) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotBuilt(
            "The compiler did not finish", got=error, fix=f"Set {unit.variable} to another."
        ) from error
    if done.returncode:
        raise NotBuilt(
            "The compiler failed",
            got=done.stderr.strip()[:2000] or f"status {done.returncode}",
            fix=f"Set {unit.variable} to another compiler.",
        )
