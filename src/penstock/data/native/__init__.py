"""Compiled loops of the loader: C through ctypes, which lets other threads run meanwhile.

Built once per machine on first use (core/native_build.py). Without a compiler the plain reference versions
compute the same, more slowly: `collate` for rows, `packing` for pools.
"""

import ctypes
from functools import cache, partial
from pathlib import Path

from penstock.core.log import EventLog
from penstock.core.native_build import NotBuilt, Unit, find_compiler, library_of

log = EventLog(__name__)

SOURCES = Path(__file__).parent
FLAGS = ("-std=gnu11", "-O3", "-fPIC")
_INT, _POINTER = ctypes.c_int64, ctypes.c_void_p
_FUNCTIONS = {
    "penstock_count_spans": [_POINTER, _POINTER, _POINTER, _INT],
    "penstock_read_ahead": [_POINTER, _INT],
    "penstock_read_rows_ahead": [_POINTER, _POINTER, _POINTER, _INT],
    "penstock_find_ends": [_POINTER, _INT],
    "penstock_pack": [_POINTER, *[_INT] * 5, *[ctypes.c_uint64] * 2, _INT, *[_POINTER] * 3],
    "penstock_spans": [_POINTER, _INT, _INT, _POINTER, _INT, _POINTER],
    "penstock_bits": [_POINTER, _INT, _INT, _POINTER, _POINTER],
    "penstock_gather": [_POINTER, _POINTER, _POINTER, *[_INT] * 3, *[_POINTER] * 5],
}


def built_library() -> Path:
    """Return the compiled library of this machine, building it if necessary.

    Raises:
        NotBuilt: there is no compiler, it failed, or there is no safe folder to write to.
    """
    return library_of(unit())


def unit() -> Unit:
    """Return the translation unit of all loops."""
    sources = sorted(SOURCES.glob("*.c"))
    return Unit(
        name="loops",
        title="the loader's loops in C",
        takes="once a machine, for a second",
        module="penstock.data.native",
        texts=["".join(f'#include "{source.name}"\n' for source in sources)],
        suffix=".c",
        sources=sources,
        find_compiler=partial(find_compiler, "C", "CC", ["cc", "gcc", "clang"]),
        variable="CC",
        flags=FLAGS,
    )


@cache
def library() -> ctypes.CDLL | None:
    """Return the compiled functions, built if necessary; None, logged once, if they cannot be built."""
    try:
        loaded = ctypes.CDLL(str(built_library()))
    except (NotBuilt, OSError) as error:
        log.warning(
            "loader_functions_missing",
            "The compiled functions of the loader are not used, numpy makes batches instead, "
            "slower: {reason}",
            reason=error,
        )
        return None
    for name, arguments in _FUNCTIONS.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, _INT
    return loaded
