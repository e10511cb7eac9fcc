"""Build of the C++ operators of this folder as one library, on first use (see core/native_build.py).

All files are one translation unit: reading torch's headers costs more than compiling the kernels. It links
no OpenMP: threads come from torch's own pool through its C interface (`threads.h`), because two pools would
compete for the cores.
"""

from pathlib import Path

import torch

from penstock.core.native_build import NotBuilt, Unit, find_compiler, library_of

SOURCES = Path(__file__).parent
FLAGS = ("-std=c++20", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
__all__ = ["NotBuilt", "built_library", "unit"]


def built_library() -> Path:
    """Return the path of this machine's library; builds it if missing.

    Raises:
        NotBuilt: there is no compiler, it failed, or there is no safe folder to write to.
    """
    return library_of(unit())


def unit() -> Unit:
    """Return the translation unit of all operators."""
    root = Path(torch.__file__).parent
    return Unit(
        name="operators",
        texts=["".join(f'#include "{source.name}"\n' for source in _sources() if source.suffix == ".cpp")],
        suffix=".cpp",
        sources=_sources(),
        find_compiler=_compiler,
        variable="CXX",
        flags=FLAGS,
        paths=[f"-I{root / 'include'}", f"-L{root / 'lib'}"],
        links=["-ltorch_cpu", "-lc10"],
        version=torch.__version__,
    )


def _compiler() -> str:
    return find_compiler("C++", "CXX", ["g++", "clang++", "c++"])


def _sources() -> list[Path]:
    return sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")])
