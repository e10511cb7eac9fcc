"""Record what a few steps do: a trace of every operation, or of every allocation, in a file of each rank.

A window of steps opens before its first and closes after its last; in between nothing else is changed.
Traces are Chrome's JSON, gzipped, which Perfetto opens.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from penstock.core.errors import PenstockError
from penstock.obs.names import TRACES_FOLDER
from penstock.train.measure_config import MeasureConfig, steps_of

log = logging.getLogger(__name__)


class Windows(AbstractContextManager["Windows"]):
    """The windows of one run on one rank; leaving the context writes one that is still open.

    Args:
        folder: of the run.
    """

    def __init__(self, config: MeasureConfig, folder: Path, *, rank: int, device: torch.device) -> None:
        asked = {"trace": config.trace_steps, "memory": config.memory_steps}
        self._steps = {kind: steps_of(text, name=f"measure.{kind}_steps") for kind, text in asked.items()}
        self._folder, self._rank, self._device = folder / TRACES_FOLDER, rank, device
        self._open: dict[str, tuple[_Recording, int]] = {}
        self._last = 0

    def begin(self, step: int) -> None:
        """Open the windows that a step, counted from 1, is the first one of; also after a resume."""
        for kind, steps in self._steps.items():
            if step in steps and kind not in self._open:
                self._open[kind] = (_RECORDINGS[kind, self._device.type == "cuda"](self._device), step)

    def end(self, step: int) -> None:
        """Close the windows that a step is the last one of."""
        self._last = step
        for kind, steps in self._steps.items():
            if kind in self._open and step + 1 not in steps:
                self._write(kind)

    def _write(self, kind: str) -> None:
        recording, first = self._open.pop(kind)
        name = f"{kind}-steps-{first}-to-{self._last}-rank-{self._rank:05d}{recording.suffix}"
        recording.stop()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            recording.write(self._folder / name)
        except OSError as error:  # a run is worth more than a look at it
            log.warning("%s of steps %d to %d not written: %s", kind, first, self._last, error)
        else:
            log.info("wrote %s=%s", kind, self._folder / name)

    def __exit__(self, *_: object) -> None:
        for kind in list(self._open):
            self._write(kind)


class _Recording:
    """Operations, with their allocations if asked, until it is stopped."""

    suffix = ".json.gz"

    def __init__(self, device: torch.device, *, memory: bool = False) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._profile = profile(activities=activities, profile_memory=memory, record_shapes=memory)
        self._profile.start()

    def stop(self) -> None:
        self._profile.stop()

    def write(self, path: Path) -> None:
        # Kineto writes where it can and only logs where it cannot.
        self._profile.export_chrome_trace(str(path))
        if not path.is_file():
            raise PenstockError(f"The trace {path} was not written", fix="Look at the log before this.")


class _Snapshot(_Recording):
    """The history of a GPU's allocations."""

    suffix = ".pickle"  # the viewer's format; Penstock itself never reads it

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.memory._record_memory_history(device=device)

    def stop(self) -> None:
        pass

    def write(self, path: Path) -> None:
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
        torch.cuda.memory._record_memory_history(enabled=None, device=self._device)


_RECORDINGS: dict[tuple[str, bool], Callable[[torch.device], _Recording]] = {
    ("trace", False): _Recording,
    ("trace", True): _Recording,
    ("memory", False): lambda device: _Recording(device, memory=True),
    ("memory", True): _Snapshot,
}
