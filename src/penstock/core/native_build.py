"""Native builds: compile sources of the package into a library in the user's cache folder, on first use.

The library's name is a hash of everything that determines its content, so another compiler, CPU or source
builds another one and nothing is overwritten. A loaded library was compiled here from the installed sources:
the folder must belong to this user and be writable by nobody else.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import stat
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from penstock.core import env
from penstock.core.errors import PenstockError

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


def library_of(
    unit: str,
    *,
    suffix: str,
    sources: Sequence[Path],
    compiler: str,
    variable: str,
    flags: Sequence[str],
    links: Sequence[str] = (),
    version: str = "",
) -> Path:
    """Return the library of one translation unit for this machine, compiling it if necessary.

    Args:
        unit: text of the unit, which includes the sources.
        suffix: suffix of the unit's file; it tells the compiler the language.
        sources: files that it includes, all of one folder.
        compiler: path of the compiler.
        variable: environment variable that selects another compiler, for messages.
        flags: compiler flags before the unit; the folder of the sources is an include path.
        links: linker flags after the unit.
        version: of anything else that determines the content, such as headers of another package.

    Raises:
        NotBuilt: the compiler failed, or there is no safe folder to write to.
    """
    library = _own_folder() / f"{_key(compiler, [*flags, *links, version, unit], sources)}.so"
    if not library.is_file():
        with (library.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # only one process of a machine compiles
            if not library.is_file():
                command = [compiler, *flags, f"-I{sources[0].parent}"]
                _compile(command, unit, suffix, links, library, variable=variable)
    return library


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


def _key(compiler: str, parts: Sequence[str], sources: Sequence[Path]) -> str:
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
    for part in (compiler.encode(), version.stdout, "\0".join(parts).encode()):
        digest.update(part + b"\0")
    digest.update(env.cpu_features().encode() or platform.processor().encode())
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:32]


def _compile(
    command: Sequence[str], unit: str, suffix: str, links: Sequence[str], library: Path, *, variable: str
) -> None:
    """Compile the library; its final name appears only when it is complete."""
    with TemporaryDirectory(dir=library.parent) as folder:
        source, made = Path(folder) / f"all{suffix}", Path(folder) / "all.so"
        source.write_text(unit)
        try:
            done = subprocess.run(
                [*command, str(source), "-o", str(made), *links],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotBuilt(
                "The compiler did not finish", got=error, fix=f"Set {variable} to another."
            ) from error
        if done.returncode:
            raise NotBuilt(
                "The compiler failed",
                got=done.stderr.strip()[:2000] or f"status {done.returncode}",
                fix=f"Set {variable} to another compiler.",
            )
        made.rename(library)
