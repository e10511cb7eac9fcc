"""Counts of a region of a program that runs under the null GPU.

    with Region() as seen:
        seen.begin_step()
        step()
    seen.totals, seen.kernels, seen.waits, seen.early_waits

Only in a process that preloads the null GPU (`environment.variables`).
"""

import ctypes
import subprocess
import sys
from collections import Counter
from types import FrameType, TracebackType
from typing import Self

NAMES = (
    "launches", "graph_launches", "launches_in_graphs", "graphs_recorded", "waits", "queries",
    "uploads", "upload_bytes", "pinned_uploads", "downloads", "download_bytes", "copies", "copy_bytes",
    "fills", "fill_bytes", "largest_pinned", "largest_pinned_by_main",
)  # fmt: skip
"""Of `struct totals` in device/counters.c."""
_OWN = ("/penstock/", "/gpu_parts/")
_ON_WAIT = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
_EACH = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_long, ctypes.c_long)


class Region:
    """What the device was asked to do between two moments; one region at a time.

    Attributes:
        totals: name of NAMES -> count or bytes. `launches` are those outside graphs.
        kernels: name of a kernel -> launches outside graphs.
        captured: name of a kernel -> launches recorded into graphs.
        waits: `call at file:line` -> how often the host waited there.
        early_waits: waits between `begin_step` and the next launch of a graph: while the device has no next
            step.
    """

    totals: dict[str, int]
    kernels: Counter[str]
    captured: Counter[str]

    def __init__(self) -> None:
        self.waits: Counter[str] = Counter()
        self.early_waits = 0
        self._graphs_before = -1
        self._library = ctypes.CDLL(None)
        self._hook = _ON_WAIT(self._note)  # kept as long as it may be called

    def __enter__(self) -> Self:
        self._library.null_gpu_reset()
        self._library.null_gpu_on_wait(self._hook)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._library.null_gpu_on_wait(None)
        found = (ctypes.c_long * len(NAMES))()
        self._library.null_gpu_totals(found)
        self.totals = dict(zip(NAMES, found, strict=True))
        rows: list[tuple[str, int, int]] = []
        each = _EACH(lambda name, *counts: rows.append((name.decode(), *counts)))
        self._library.null_gpu_kernels(each)
        self.kernels, self.captured = Counter(), Counter()
        for name, (_, launched, captured) in zip(_demangled([row[0] for row in rows]), rows, strict=True):
            self.kernels[name] += launched
            self.captured[name] += captured

    def begin_step(self) -> None:
        """Count waits before the next launch of a graph from now on."""
        self._graphs_before = self.so_far("graph_launches")

    @staticmethod
    def so_far(name: str) -> int:
        """Return a count of NAMES since the region began."""
        found = (ctypes.c_long * len(NAMES))()
        ctypes.CDLL(None).null_gpu_totals(found)
        return found[NAMES.index(name)]

    def _note(self, call: bytes) -> None:
        self.waits[f"{call.decode()} at {_place(sys._getframe(1))}"] += 1
        self.early_waits += self.so_far("graph_launches") == self._graphs_before


def _place(frame: FrameType | None) -> str:
    """Return `folder/file:line` of the innermost frame that is ours; of the innermost if none is."""
    found, at = frame, frame
    while at is not None:
        if any(part in at.f_code.co_filename for part in _OWN):
            found = at
            break
        at = at.f_back
    if found is None:
        return "a thread without Python"
    return f"{'/'.join(found.f_code.co_filename.split('/')[-3:])}:{found.f_lineno}"


def _demangled(names: list[str]) -> list[str]:
    if not names:
        return []
    said = subprocess.run(
        ["c++filt", "-i"], input="\n".join(names), capture_output=True, text=True, check=True
    )
    return said.stdout.rstrip("\n").split("\n")
