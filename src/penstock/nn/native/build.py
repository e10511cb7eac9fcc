"""Build of the C++ operators of this folder as one library, on first use (see core/native_build.py).

The loops know pointers and sizes only. The slow ones are units of their own, which compile side by side.
All files that see tensors are one more unit, because torch's headers cost the compiler more than each of
those files. The library links no OpenMP: threads come from torch's own pool through its C interface
(`threads.h`), because two pools would compete for the cores.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from penstock.core import env
from penstock.core.native_build import NotBuilt, Unit, find_compiler, library_if_built, library_of

SOURCES = Path(__file__).parent
FLAGS = ("-std=c++20", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
LOOPS = ("attention/bfloat16.cpp", "attention/float.cpp", "product.cpp")
"""Units that include nothing of torch's."""
__all__ = ["NotBuilt", "built_library", "unit"]


def built_library() -> Path:
    """Return the path of this machine's library; another process builds it if it is missing.

    Raises:
        BeingBuilt: it is not there yet; with PENSTOCK_NATIVE=wait, this waits for it instead.
        NotBuilt: there is no compiler, it failed, or there is no safe folder to write to.
    """
    return library_of(unit()) if env.waits_for_operators() else library_if_built(unit())


def unit() -> Unit:
    """Return the translation units of all operators."""
    root = Path(torch.__file__).parent
    return Unit(
        name="operators",
        title="the C++ operators",
        takes="once a machine, for half a minute on two idle cores",
        module="penstock.nn.native",
        texts=[_unit_of(_sources_of_tensors()), *(_unit_of([source]) for source in LOOPS)],
        suffix=".cpp",
        sources=_sources(),
        find_compiler=_compiler,
        variable="CXX",
        flags=FLAGS,
        paths=[f"-I{root / 'include'}", f"-L{root / 'lib'}"],
        links=["-ltorch_cpu", "-lc10"],
        version=torch.__version__,
    )


def _unit_of(names: Sequence[str]) -> str:
    return "".join(f'#include "{name}"\n' for name in names)


def _sources_of_tensors() -> list[str]:
    names = [file.relative_to(SOURCES).as_posix() for file in _sources() if file.suffix == ".cpp"]
    return [name for name in names if name not in LOOPS]


def _compiler() -> str:
    return find_compiler("C++", "CXX", ["g++", "clang++", "c++"])


def _sources() -> list[Path]:
    """Return all files, those of this folder first: its path is the one that the compiler includes from."""
    found = (file for pattern in ("*.cpp", "*.h") for file in SOURCES.rglob(pattern))
    return sorted(found, key=lambda file: (len(file.parts), file.name))
