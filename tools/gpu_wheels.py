"""Collect the wheels that the GPU kit needs, to be carried to a machine with torch and without network.

    python tools/gpu_wheels.py --python 3.12 --out wheels             # for a machine with the common packages
    python tools/gpu_wheels.py --python 3.12 --out wheels --have list # `pip freeze` of the machine, or names
    python tools/gpu_wheels.py --python 3.12 --out wheels --all       # for a machine with torch alone

Wheels are of CPython on Linux x86-64, in the versions of constraints.txt, else the newest. The most important
packages come first, each with what it requires, until the limit is reached: a package for which there is no
room is tried in a smaller version if there is one, and is otherwise left out and named.
"""

import argparse
import email
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).parent.parent
LIMIT_MIB = 50
_MIB = 2**20
_PLATFORMS = [
    *(f"manylinux_2_{minor}_x86_64" for minor in range(39, 16, -1)),
    *("manylinux2014_x86_64", "manylinux_2_12_x86_64", "manylinux2010_x86_64", "manylinux_2_5_x86_64"),
    "manylinux1_x86_64",
]

OF_TORCH = frozenset({
    "filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "setuptools", "sympy", "torch",
    "triton", "typing-extensions",
})  # fmt: skip
"""What is where torch for CUDA is."""

COMMON = OF_TORCH | {
    "httpx", "hypothesis", "jaxtyping", "numpy", "peft", "pillow", "prometheus-client", "psutil", "pyarrow",
    "pytest", "regex", "rich", "safetensors", "tokenizers", "transformers", "uvloop", "xxhash",
}  # fmt: skip
"""What a machine that is rented for PyTorch was seen to have."""


@dataclass(frozen=True, slots=True)
class Need:
    """A package that the kit uses."""

    name: str
    use: str
    """What it is for."""
    smaller: tuple[str, ...] = ()
    """Versions to try where the one of constraints.txt has no room."""


NEEDS = (
    Need("numpy", "everything"),
    Need("jaxtyping", "everything but reading corpora"),
    Need("pytest", "equalities"),
    Need("safetensors", "Hugging Face folders, which transformers is compared on"),
    Need("tokenizers", "text; transformers"),
    Need("transformers", "greedy tokens and continuous batching to compare with"),
    Need("torchao", "float8 products to compare with"),
    Need("peft", "LoRA adapters to compare with"),
    Need("psutil", "peft"),
    Need("rich", "tables and progress bars on a terminal"),
    Need("llguidance", "grammars"),
    Need("fastapi", "the server"),
    Need("uvicorn", "the server"),
    Need("uvloop", "the server"),
    Need("httptools", "the server"),
    Need("prometheus-client", "the server"),
    Need("pybase64", "the server"),
    Need("obstore", "corpora and checkpoints in object stores"),
    Need("backports-zstd", "text packed by zstd"),
    Need("pyarrow", "Arrow and Parquet corpora", smaller=("18.1.0",)),
)
"""Most important first."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """One wheel that was fetched."""

    name: str
    version: str
    num_bytes: int
    requires: tuple[Requirement, ...] = ()
    """Of the Python version that was asked for."""
    path: Path = field(default=Path())


@dataclass(frozen=True, slots=True)
class Collected:
    """What is carried, and what is not."""

    wheels: tuple[Wheel, ...]
    left_out: tuple[tuple[Need, int], ...]
    """Needs for which there was no room, and the bytes of the smallest choice."""
    smaller: tuple[tuple[Need, int], ...]
    """Needs of which a smaller version was taken, and the bytes of the one that had no room."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all wheels."""
        return sum(wheel.num_bytes for wheel in self.wheels)


Fetch = Callable[[Requirement], Wheel]


def collect(
    needs: Iterable[Need], have: AbstractSet[str], *, limit_bytes: int, fetch: Fetch, pins: Mapping[str, str]
) -> Collected:
    """Choose wheels in the order of needs, each with what it requires, within the limit.

    Args:
        have: canonical names of packages that are there, with all that they require.
        fetch: returns the wheel of a requirement.
        pins: canonical name -> version.
    """
    chosen: dict[str, Wheel] = {}
    left_out, smaller = [], []
    for need in needs:
        if need.name in have or need.name in chosen:
            continue
        there = have | chosen.keys()
        sizes = []
        for version in (pins.get(need.name), *need.smaller):
            wanted = Requirement(f"{need.name}=={version}" if version else need.name)
            group = closure(wanted, there, fetch=fetch, pins=pins)
            sizes.append(sum(wheel.num_bytes for wheel in group))
            if sizes[-1] + sum(wheel.num_bytes for wheel in chosen.values()) <= limit_bytes:
                chosen |= {wheel.name: wheel for wheel in group}
                if len(sizes) > 1:
                    smaller.append((need, sizes[0]))
                break
        else:
            left_out.append((need, min(sizes)))
    return Collected(tuple(chosen.values()), tuple(left_out), tuple(smaller))


def closure(
    wanted: Requirement, there: AbstractSet[str], *, fetch: Fetch, pins: Mapping[str, str]
) -> list[Wheel]:
    """Return the wheel of a requirement and those of all that it requires and that is not there."""
    found: dict[str, Wheel] = {}
    waiting = [wanted]
    while waiting:
        one = waiting.pop()
        name = canonicalize_name(one.name)
        if name in there or name in found:
            continue
        pinned = one if one is wanted or name not in pins else Requirement(f"{name}=={pins[name]}")
        found[name] = fetch(pinned)
        waiting.extend(found[name].requires)
    return list(found.values())


def names_of(text: str) -> frozenset[str]:
    """Return the canonical names in a list of packages: `pip freeze`, or names with commas or spaces.

    >>> sorted(names_of("torch==2.11.0+cu130\\n# mine\\nJinja2 @ file:///x.whl\\n-e git+https://a#egg=b\\n"))
    ['jinja2', 'torch']
    >>> sorted(names_of("torch, numpy Typing_Extensions"))
    ['numpy', 'torch', 'typing-extensions']
    """
    found = set()
    for line in text.splitlines():
        plain = re.sub(r"#.*", "", line).strip()
        if plain.startswith("-"):
            continue
        is_one = re.search(r"[=<>!~@;]", plain)
        words = [re.split(r"[\s=<>!~@;\[]", plain, maxsplit=1)[0]] if is_one else re.split(r"[\s,]+", plain)
        found |= {canonicalize_name(word) for word in words if word}
    return frozenset(found)


def pins_of(text: str) -> dict[str, str]:
    """Return canonical name -> version of a constraints file."""
    pairs = (line.split("==") for line in text.splitlines() if "==" in line and not line.startswith("#"))
    return {canonicalize_name(name): version.strip() for name, version in pairs}


def requires_of(metadata: str, *, python: str) -> tuple[Requirement, ...]:
    """Return what a wheel's METADATA requires on Linux x86-64 and a Python version, extras aside."""
    environment = {str(key): str(value) for key, value in default_environment().items()} | {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "implementation_name": "cpython",
        "platform_machine": "x86_64",
        "platform_python_implementation": "CPython",
        "platform_system": "Linux",
        "sys_platform": "linux",
        "os_name": "posix",
        "extra": "",
    }
    stated = email.message_from_string(metadata).get_all("Requires-Dist") or []
    every = [Requirement(line) for line in stated]
    return tuple(one for one in every if one.marker is None or one.marker.evaluate(environment))


def fetch_with_pip(folder: Path, *, python: str) -> Fetch:
    """Return a fetch that downloads into a folder, each requirement once."""
    fetched: dict[str, Wheel] = {}

    def fetch(wanted: Requirement) -> Wheel:
        text = f"{wanted.name}{wanted.specifier}"
        if text not in fetched:
            target = folder / str(len(fetched))
            fetched[text] = _read(_download(text, target, python=python), python=python)
        return fetched[text]

    return fetch


def _download(requirement: str, target: Path, *, python: str) -> Path:
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    words += ["--dest", str(target), "--implementation", "cp", "--python-version", python]
    words += ["--abi", f"cp{python.replace('.', '')}", "--disable-pip-version-check"]
    words += [word for platform in _PLATFORMS for word in ("--platform", platform)]
    done = subprocess.run([*words, requirement], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(
            f"There is no wheel of {requirement} for Python {python} on Linux x86-64, or no network:\n"
            f"{done.stderr.strip()}"
        )
    [path] = target.glob("*.whl")
    return path


def _read(path: Path, *, python: str) -> Wheel:
    name, version, _, _ = parse_wheel_filename(path.name)
    with zipfile.ZipFile(path) as file:
        [metadata] = [entry for entry in file.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", entry)]
        requires = requires_of(file.read(metadata).decode(), python=python)
    return Wheel(name, str(version), path.stat().st_size, requires, path)


def report(collected: Collected, *, out: Path, limit_bytes: int) -> str:
    """Return what was collected, what was not, and how it is installed."""
    width = max((len(wheel.name) for wheel in collected.wheels), default=0)
    rows = sorted(collected.wheels, key=lambda wheel: (-wheel.num_bytes, wheel.name))
    lines = [
        f"{wheel.name:<{width}}  {wheel.version:<12} {wheel.num_bytes / _MIB:6.2f} MiB" for wheel in rows
    ]
    total, limit = collected.num_bytes / _MIB, limit_bytes / _MIB
    lines.append(f"{len(rows)} wheels, {total:.2f} MiB of at most {limit:.0f}")
    lines += [
        f"smaller version of {need.name}: the one of constraints.txt takes {size / _MIB:.2f} MiB"
        for need, size in collected.smaller
    ]
    lines += [
        f"left out: {need.name}, {size / _MIB:.2f} MiB, for {need.use}" for need, size in collected.left_out
    ]
    if rows:
        lines += [
            "",
            "There:",
            f"  pip install --no-index --no-deps --target site-packages {out}/*.whl",
            '  export PYTHONPATH="$PWD/src:$PWD/site-packages"',
        ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Collect, copy, report; return 1 if something was left out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", default="3.12", help="version of CPython there")
    parser.add_argument("--out", type=Path, default=Path("wheels"), help="folder of the wheels; must be new")
    parser.add_argument("--limit-mib", type=float, default=LIMIT_MIB, help="of all wheels together")
    there = parser.add_mutually_exclusive_group()
    there.add_argument("--have", help="what is there: a file such as `pip freeze` writes, or names")
    there.add_argument("--all", action="store_true", help="there is torch, and what it requires, alone")
    options = parser.parse_args(argv)
    if not re.fullmatch(r"3\.\d+", options.python):
        parser.error(f"--python is a version such as 3.12 (got {options.python!r})")
    if options.out.exists():
        parser.error(f"{options.out} exists: remove it, or name another folder")
    have: AbstractSet[str] = OF_TORCH if options.all else COMMON
    if options.have is not None:
        file = Path(options.have)
        have = OF_TORCH | names_of(file.read_text() if file.is_file() else options.have)
    limit_bytes = int(options.limit_mib * _MIB)
    with tempfile.TemporaryDirectory() as folder:
        collected = collect(
            NEEDS,
            have,
            limit_bytes=limit_bytes,
            fetch=fetch_with_pip(Path(folder), python=options.python),
            pins=pins_of((ROOT / "constraints.txt").read_text()),
        )
        options.out.mkdir(parents=True)
        for wheel in collected.wheels:
            shutil.copy(wheel.path, options.out)
    print(report(collected, out=options.out, limit_bytes=limit_bytes))
    return 1 if collected.left_out else 0


if __name__ == "__main__":
    sys.exit(main())
