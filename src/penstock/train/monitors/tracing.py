"""Profiling of a few steps: a trace of operations or of memory allocations, one file per rank.

A window of steps opens before its first step and closes after its last. Traces are gzipped Chrome JSON, for
Perfetto.
"""

from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from penstock.core.errors import PenstockError
from penstock.core.log import EventLog
from penstock.devices import accelerator
from penstock.obs.metric_names import TRACES_FOLDER
from penstock.train.recipe.config import MeasureConfig, steps_of

log = EventLog(__name__)


class Windows(AbstractContextManager["Windows"]):
    """Profiling windows of one rank; leaving the context writes an open one.

    Args:
        folder: folder of the run.
    """

    def __init__(self, config: MeasureConfig, folder: Path, *, rank: int, device: torch.device) -> None:
        asked = {"trace": config.trace_steps, "memory": config.memory_steps}
        self._steps = {kind: steps_of(text, name=f"measure.{kind}_steps") for kind, text in asked.items()}
        self._folder, self._rank, self._device = folder / TRACES_FOLDER, rank, device
        self._open: dict[str, tuple[_Recording, int]] = {}
        self._last = 0

    def begin(self, step: int) -> None:
        """Open the windows that include a step, counted from 1; also after a resume."""
        for kind, steps in self._steps.items():
            if step in steps and kind not in self._open:
                self._open[kind] = (_recording(kind, self._device), step)

    def end(self, step: int) -> None:
        """Close the windows whose last step this is."""
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
        except OSError as error:  # a trace must not end the run
            log.warning(
                "trace_unwritten",
                "The {kind} of steps {first:,} to {last:,} was not written: {error}",
                kind=kind,
                first=first,
                last=self._last,
                error=error,
            )
        else:
            file = self._folder / name
            log.info(
                "trace",
                "Wrote the {kind} of steps {first:,} to {last:,}: {path}",
                kind=kind,
                first=first,
                last=self._last,
                path=file,
            )

    def __exit__(self, *_: object) -> None:
        for kind in list(self._open):
            self._write(kind)


class _Recording:
    """Profiler recording of operations, with memory allocations if requested."""

    suffix = ".json.gz"

    def __init__(self, device: torch.device, *, memory: bool = False) -> None:
        name = accelerator.kind_of(device).activity
        activities = [ProfilerActivity.CPU, *([getattr(ProfilerActivity, name)] if name else [])]
        self._profile = profile(activities=activities, profile_memory=memory, record_shapes=memory)
        self._profile.start()

    def stop(self) -> None:
        self._profile.stop()

    def write(self, path: Path) -> None:
        # Kineto only logs if it cannot write
        self._profile.export_chrome_trace(str(path))
        if not path.is_file():
            raise PenstockError(f"The trace {path} was not written", fix="Look at the log before this.")


class _Snapshot(_Recording):
    """History of a GPU's memory allocations."""

    suffix = ".pickle"  # the viewer's format; Penstock itself never reads it

    def __init__(self, device: torch.device) -> None:
        self._device = device
        accelerator.record_history(device)

    def stop(self) -> None:
        pass

    def write(self, path: Path) -> None:
        accelerator.write_history(self._device, str(path))
        accelerator.record_history(self._device, is_on=False)


def _recording(kind: str, device: torch.device) -> _Recording:
    if kind == "memory" and accelerator.kind_of(device).has_history:
        return _Snapshot(device)
    return _Recording(device, memory=kind == "memory")
