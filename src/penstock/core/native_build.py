"""Native builds: sources of the package as a library, shipped with an image or compiled on first use.

    shipped     a folder of root's, that nobody else can write to: one library for each baseline of CPUs
    compiled    the user's cache folder, for this CPU: this user's, and nobody else can write to it

A library's name has a hash of all that determines its content, so another source, compiler, CPU or torch has
another library and nothing is overwritten. A shipped one comes first: whoever put it there could as well have
changed the Python code, and a container has no compiler and perhaps no folder to write to.

    library_of          waits for the build, and says so: for short builds, and for `python -m PACKAGE.native`
    library_if_built    does not wait: a process of its own builds, and the next start finds the library

One process builds a library at a time. A failed build leaves a note beside the library, and no start tries it
again until something in the name changes. The command tries it again.
"""

import argparse
import fcntl
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, TYPE_CHECKING

from penstock.core import clock, env
from penstock.core.errors import PenstockError, UsageError, nearest
from penstock.core.log import EventLog

if TYPE_CHECKING:
    from penstock.core.native_compiler import Say

log = EventLog(__name__)

_VERSION_S = 20
_NICE = 10  # niceness of a build in the background


class NotBuilt(PenstockError):
    """Compiled code is not available on this machine; everything works without it."""


class BeingBuilt(NotBuilt):
    """Compiled code is being built by another process; the next start has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """Named set of CPU instructions, so that a library can be compiled ahead for machines unseen.

    One library that chooses at run time is no alternative: the kernels are templates over vector widths.
    """

    name: str
    flags: tuple[str, ...]
    """Compiler flags: what the library may use."""
    needs: frozenset[str]
    """Flags of /proc/cpuinfo that a CPU must have to load it."""


_V3 = frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"])
_V4 = _V3 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])
_BF16 = _V4 | frozenset(["avx512_vnni", "avx512_bf16"])
_AMX = _BF16 | frozenset(["amx_tile", "amx_bf16", "amx_int8"])
_V4_BF16 = ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16")

BASELINES = (
    Baseline(name="x86-64-v4-amx", flags=(*_V4_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"), needs=_AMX),
    Baseline(name="x86-64-v4-bf16", flags=_V4_BF16, needs=_BF16),
    Baseline(name="x86-64-v4", flags=("-march=x86-64-v4",), needs=_V4),
    Baseline(name="x86-64-v3", flags=("-march=x86-64-v3",), needs=_V3),
)
"""Best first. The second: Cooper Lake, Zen 4; the first: Sapphire Rapids. The last: Haswell, Zen."""


def baselines_of(features: str) -> list[Baseline]:
    """Return the baselines whose libraries a CPU can run, best first.

    Args:
        features: its line of /proc/cpuinfo.

    >>> [found.name for found in baselines_of("flags : fma avx avx2 bmi1 bmi2 f16c abm movbe sse2")]
    ['x86-64-v3']
    >>> baselines_of("Features : fp asimd")
    []
    """
    has = set(features.partition(":")[2].split())
    return [baseline for baseline in BASELINES if baseline.needs <= has]


def baselines_named(names: Sequence[str]) -> list[Baseline]:
    """Return baselines by name; all, if there are no names.

    Raises:
        UsageError: a name is not known.
    """
    known = {baseline.name: baseline for baseline in BASELINES}
    for name in names:
        if name not in known:
            raise UsageError("There is no such baseline", got=name, fix=nearest(name, list(known)))
    return [known[name] for name in names or known]


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
    """Name of its library among those of an image."""
    title: str
    """For messages, such as "the C++ operators"."""
    takes: str
    """How long a build takes, for messages."""
    module: str
    """Python module that builds it as a command."""
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


def _warn(text: str) -> None:
    log.warning("native_build", "{text}", text=text)


def library_of(unit: Unit, *, say: "Say" = _warn, try_again: bool = False) -> Path:
    """Return the library of a unit for this machine; compile it if necessary, or wait for who does.

    Args:
        say: shows what is waited for.
        try_again: also if the same build has failed before.

    Raises:
        NotBuilt: the compiler failed, now or before, or there is no safe folder to write to.
    """
    if shipped := _shipped(unit):
        return shipped
    target = _Target.of(unit)
    if not target.is_built(try_again=try_again):
        from penstock.core.native_compiler import LIMIT_S, TooSlow, wait_for

        with target.lock() as lock:
            began, what = clock.monotonic(), f"Another process compiles {unit.title}; waiting for it"
            try:
                wait_for(lambda: _has_locked(lock), what, say, began=began, limit_s=LIMIT_S)
            except TooSlow as error:
                raise NotBuilt(str(error), fix="End that process, or wait for it.") from None
            if not target.is_built(try_again=try_again):
                target.build(say)
    return target.library


def library_if_built(unit: Unit) -> Path:
    """Return the library of a unit for this machine; if it is not there, let another process build it.

    Raises:
        BeingBuilt: it is not there yet.
        NotBuilt: the compiler failed before, there is none, or there is no safe folder to write to.
    """
    if shipped := _shipped(unit):
        return shipped
    target = _Target.of(unit)
    if target.is_built():
        return target.library
    with target.lock() as lock:
        if not _has_locked(lock):
            raise BeingBuilt(f"Another process is building {unit.title}")
        if target.is_built():  # just now
            return target.library
        raise BeingBuilt(f"{unit.title} are being built by process {target.begin(lock)}: {unit.takes}")


@dataclass(frozen=True, slots=True)
class _Target:
    """A library of this machine, and what builds it."""

    unit: Unit
    compiler: str
    flags: Sequence[str]
    library: Path

    @classmethod
    def of(cls, unit: Unit) -> "_Target":
        """Return the library of a unit.

        Raises:
            NotBuilt: there is no compiler, or no safe folder to write to.
        """
        target = [flag for baseline in _chosen_baselines() for flag in baseline.flags] or ["-march=native"]
        compiler, flags = unit.find_compiler(), [*unit.flags, *target]
        library = _own_folder() / f"{_key(compiler, flags, unit)}.so"
        return cls(unit, compiler, [*flags, *unit.paths], library)

    def is_built(self, *, try_again: bool = False) -> bool:
        """True if the library is there.

        Raises:
            NotBuilt: its build has failed before.
        """
        if self.library.is_file():
            return True
        if self._failure.is_file() and not try_again:
            raise NotBuilt(
                f"{self.unit.title} did not compile on this machine",
                got=self._failure.read_text().strip(),
                fix=f"Set {self.unit.variable} to another compiler, or try again: "
                f"python -m {self.unit.module}.",
            )
        return False

    @contextmanager
    def lock(self) -> Iterator[IO[str]]:
        """Context manager: the file that who builds a library of this unit has locked.

        Raises:
            NotBuilt: the folder cannot be written to.
        """
        try:
            file = (self.library.parent / f"{self.unit.name}.lock").open("w")
        except OSError as error:
            raise _no_folder(error) from error
        with file:
            yield file

    def begin(self, lock: IO[str]) -> int:
        """Start a process that builds the library and outlives this one; return its id."""
        log_file = self.library.with_name(f"{self.unit.name}.log")
        words = [sys.executable, "-m", self.unit.module, "--locked", str(lock.fileno())]
        started = subprocess.run(
            ["/bin/sh", "-c", '"$@" >"$0" 2>&1 </dev/null & echo $!', str(log_file), *words],
            pass_fds=[lock.fileno()],
            start_new_session=True,
            stdout=subprocess.PIPE,
            check=True,
        )
        return int(started.stdout)

    def build(self, say: "Say") -> None:
        """Compile the library; the lock is held.

        Raises:
            NotBuilt: the compiler failed, or took too long.
        """
        for left in self.library.parent.glob(_building(self.unit, "*")):
            shutil.rmtree(left, ignore_errors=True)  # of a build that was killed
        self._failure.unlink(missing_ok=True)
        try:
            _compile(self.compiler, self.flags, self.unit, self.library, say)
        except NotBuilt as error:
            self._failure.write_text(f"{error}\n")
            raise

    @property
    def _failure(self) -> Path:
        return self.library.with_suffix(".failed")


def _has_locked(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _building(unit: Unit, number: str) -> str:
    return f"{unit.name}-building-{number}"


def build_ahead(unit: Unit, folder: Path, baseline: Baseline) -> Path:
    """Compile the library of a baseline into a folder that an image ships; return its path.

    Raises:
        NotBuilt: the compiler failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / _shipped_name(unit, baseline)
    _compile(unit.find_compiler(), [*unit.flags, *baseline.flags, *unit.paths], unit, library, _print)
    return library


def run_build(unit: Unit) -> None:
    """Run the command `python -m PACKAGE.native`: build the library for this machine, or for an image."""
    parser = argparse.ArgumentParser(description="Build a compiled library ahead of its first use.")
    parser.add_argument("--ship", type=Path, metavar="FOLDER", help="build for the baselines, into a folder")
    parser.add_argument("--baseline", action="append", default=[], metavar="NAME", help="default: all")
    parser.add_argument("--locked", type=int, help=argparse.SUPPRESS)  # by who began it: see `begin`
    arguments = parser.parse_args()
    try:
        if arguments.locked is not None:
            os.nice(_NICE)
            _Target.of(unit).build(_print)
        elif arguments.ship is None:
            sys.stdout.write(f"{library_of(unit, say=_print, try_again=True)}\n")
        else:
            for baseline in baselines_named(arguments.baseline):
                sys.stdout.write(f"{build_ahead(unit, arguments.ship, baseline)}\n")
    except (PenstockError, OSError) as error:
        sys.exit(str(error))


def _print(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


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
            "library_unsafe",
            "The compiled library {path} is not used: {unsafe} is not root's alone",
            path=library,
            unsafe=unsafe[0],
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
        raise _no_folder(error) from error
    if found.st_uid != os.getuid() or any(_others_write(one) for one in (folder, folder.parent)):
        raise NotBuilt(
            "The folder of compiled code is writable by others",
            got=folder,
            fix="Set PENSTOCK_CACHE to a folder that only you can write to.",
        )
    return folder


def _no_folder(error: OSError) -> NotBuilt:
    return NotBuilt("No folder for compiled code", got=error, fix="Set PENSTOCK_CACHE to a folder of yours.")


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


def _compile(compiler: str, flags: Sequence[str], unit: Unit, library: Path, say: "Say") -> None:
    """Compile the units side by side and link them; the final name appears when the library is complete."""
    from penstock.core.native_compiler import LIMIT_S, CompilerFailed, TooSlow, run_all

    began, what = clock.monotonic(), f"Compiling {unit.title}, {unit.takes}"
    with TemporaryDirectory(prefix=_building(unit, ""), dir=library.parent) as name:
        folder = Path(name)
        sources = [folder / f"{number}{unit.suffix}" for number in range(len(unit.texts))]
        objects = [source.with_suffix(".o") for source in sources]
        for source, text in zip(sources, unit.texts, strict=True):
            source.write_text(text)
        include, made = f"-I{unit.sources[0].parent}", folder / "all.so"
        units = [
            [compiler, *flags, include, "-c", str(source), "-o", str(made)]
            for source, made in zip(sources, objects, strict=True)
        ]
        link = [compiler, *flags, "-shared", *map(str, objects), "-o", str(made), *unit.links]
        try:
            for commands in (units, [link]):
                run_all(commands, folder, what, say, began=began, limit_s=LIMIT_S)
        except CompilerFailed as error:
            raise NotBuilt(
                "The compiler failed", got=error, fix=f"Set {unit.variable} to another compiler."
            ) from None
        except (OSError, TooSlow) as error:
            raise NotBuilt(
                "The compiler did not finish", got=error, fix=f"Set {unit.variable} to another."
            ) from error
        made.rename(library)
