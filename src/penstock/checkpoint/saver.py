"""Save while training goes on: training stands still for a copy in memory, a thread does the rest.

    training  | step | wait for the save before, copy | step | step | step | ...
    thread                                            | write, flush | all ranks? index, rename |

Every rank writes its share (shares.py) to a file of its own. When all have, rank 0 writes the index, by which
the checkpoint exists, and deletes what the rule no longer keeps. The threads agree over a process group of
their own, so that they do not meet the collectives of training. A rank that dies in between leaves files
without an index: the checkpoint before stays the newest.

A save that fails, by a full disk say, does not end a run that has days of training in memory: it goes on and
warns, until so many in a row have failed, or until it ends.
"""

import logging
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from penstock.checkpoint.find import saved_in
from penstock.checkpoint.layout import FileEntry, Meta, TensorEntry, encode, name_of, step_of
from penstock.checkpoint.place import Place
from penstock.checkpoint.retain import to_remove
from penstock.checkpoint.shard_file import Part, header_of, in_order
from penstock.checkpoint.shares import Held, holders, share_of
from penstock.checkpoint.stage import Stage
from penstock.checkpoint.tensors import held, spelled
from penstock.checkpoint.written import Written, index_of
from penstock.core import clock
from penstock.core.boxes import Box
from penstock.core.errors import CheckpointError, PeerLost, PenstockError
from penstock.core.units import mib

log = logging.getLogger(__name__)

T = TypeVar("T")

_TIMEOUT = timedelta(hours=2)  # a rank may be that much faster than another's upload
_LAST_WORDS_S = 30.0  # that a thread gets to end where the run has already failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """What is kept, and how long failures are borne."""

    newest: int = 2
    """Newest checkpoints kept."""
    every: int = 0
    """Those of every so many steps are kept for good; 0: none."""
    max_failures: int = 3
    """Saves that may fail in a row before the run stops."""


class Saver:
    """Saves the checkpoints of a run; one per rank, in a `with`.

    Args:
        place: where they go.
        waiting: called about once a second while training waits for a save, so that it is not taken for hung.
    """

    def __init__(self, place: Place, keeping: Keeping, *, waiting: Callable[[], None] = lambda: None) -> None:
        self._waiting = waiting
        self._place = place
        self._keeping = keeping
        self._stage = Stage()
        self._group: dist.ProcessGroup | None = None
        self._thread: Thread | None = None
        self._outcome: str | BaseException | None = None
        self._failures = 0
        self._step = 0
        self._blocked_s = self._told_s = self._began_s = 0.0

    def __enter__(self) -> "Saver":
        """Clear what a killed writer left; every rank must call it."""
        self._began_s = clock.monotonic()
        self._group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        if dist.get_rank() == 0:
            try:
                for name in self._place.leftovers():
                    self._place.remove(name)
            except (OSError, PenstockError) as error:
                log.warning("leftovers of a killed save cannot be removed: %s", error)
        dist.barrier(self._group)
        return self

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> None:
        """Wait for the save under way; after a failure of the run, for a while."""
        if error is None:
            self.finish()
        elif self._thread is not None:
            if isinstance(error, PenstockError) and not isinstance(error, PeerLost):
                self._join()
            else:
                self._thread.join(_LAST_WORDS_S)

    def save(self, tensors: Mapping[str, Tensor], meta: Meta) -> None:
        """Copy tensors and start to write them; every rank must call it.

        Raises:
            CheckpointError: too many saves in a row have failed; the message has the last reason.
        """
        began = clock.monotonic()
        self._wait(last=False)
        parts, data = self._copy(tensors)
        self._step = meta.step
        entries = {
            name: TensorEntry(dtype=part.dtype, shape=part.shape)
            for name, part in ((part.name, part) for part in parts)
            if not any(part.box.offsets)  # one rank writes a tensor's first element, and speaks for it
        }
        self._thread = Thread(
            target=self._run, args=(meta, parts, data, entries), name="checkpoint", daemon=True
        )
        self._thread.start()
        self._blocked_s += clock.monotonic() - began

    def is_idle(self) -> bool:
        """Whether no save is under way on this rank."""
        return self._thread is None or not self._thread.is_alive()

    def finish(self) -> None:
        """Wait for the save under way; every rank must call it.

        Raises:
            CheckpointError: it failed.
        """
        began = clock.monotonic()
        self._wait(last=True)
        self._blocked_s += clock.monotonic() - began

    def times(self) -> dict[str, float]:
        """Return how long training stood still for checkpoints, as obs/names.py calls it."""
        since, self._told_s = self._blocked_s - self._told_s, self._blocked_s
        share = self._blocked_s / max(clock.monotonic() - self._began_s, 1e-9)
        return {"checkpoint_s": since, "checkpoint_share": share}

    def _copy(self, tensors: Mapping[str, Tensor]) -> tuple[list[Part], memoryview]:
        """Copy this rank's share to memory that training does not touch."""
        boxes = {name: held(name, tensor) for name, tensor in tensors.items()}
        ours = [Held(name, box, tensors[name].element_size()) for name, (box, _) in boxes.items()]
        told = self._all([each.key for each in ours])
        mine = share_of(
            dist.get_rank(),
            dict(zip(ours, holders(told[dist.get_rank()], told), strict=True)),
        )
        parts = in_order([_part(name, box, tensors[name]) for name, box in mine])
        sources = [boxes[part.name][1][part.box.within(boxes[part.name][0])] for part in parts]
        return parts, self._stage.copy(sources)

    def _run(self, meta: Meta, parts: list[Part], data: memoryview, entries: dict[str, TensorEntry]) -> None:
        """Write, agree, commit: the work of the thread."""
        began = clock.monotonic()
        try:
            said = self._all(self._write(name_of(meta.step), parts, data, entries))
            outcome = self._commit(meta, said) if dist.get_rank() == 0 else None
            (self._outcome, *_) = self._all(outcome)
        except Exception as error:  # a peer is gone; said where training waits
            self._outcome = error
        if dist.get_rank() == 0 and self._outcome is None:
            size = sum(said_by.file.num_bytes for said_by in said if isinstance(said_by, Written))
            log.info(
                "checkpoint step=%d size=%s write_s=%.1f path=%s",
                meta.step,
                mib(size).replace(" ", ""),
                clock.monotonic() - began,
                self._place.url_of(name_of(meta.step)),
            )

    def _write(
        self, name: str, parts: list[Part], data: memoryview, entries: dict[str, TensorEntry]
    ) -> Written | str:
        """Write this rank's file; return what the index says of it, or what went wrong."""
        try:
            header = header_of(parts, data)
            file = f"rank-{dist.get_rank():05d}.safetensors"
            self._place.write(name, file, [memoryview(header), data])
        except Exception as error:  # whatever it is, the other ranks must hear of it
            log.debug("a save failed", exc_info=True)
            return _reason(error)
        entry = FileEntry(
            num_bytes=len(header) + len(data), header_bytes=len(header), header_crc32=zlib.crc32(header)
        )
        return Written(file, entry, entries)

    def _commit(self, meta: Meta, said: list[Written | str]) -> str | None:
        """Make the checkpoint exist, or clear it away; return what went wrong."""
        name = name_of(meta.step)
        failed = sorted({reason for reason in said if isinstance(reason, str)})
        try:
            if failed:
                self._place.abandon(name)
                return "; ".join(failed)
            index = index_of(meta, [each for each in said if isinstance(each, Written)])
            self._place.commit(name, encode(index))
        except Exception as error:
            log.debug("a save failed", exc_info=True)
            return _reason(error)
        self._retain(meta.step)
        return None

    def _retain(self, written: int) -> None:
        """Delete what the rule no longer keeps; a failure to is no failure of the save."""
        try:
            steps = [step for saved in saved_in(self._place) if (step := step_of(saved.name)) is not None]
            keeping = self._keeping
            for step in to_remove(steps, written=written, keep=keeping.newest, keep_every=keeping.every):
                self._place.remove(name_of(step))
        except (OSError, PenstockError) as error:
            log.warning("old checkpoints cannot be removed: %s", _reason(error))

    def _wait(self, *, last: bool) -> None:
        """Wait for the thread and take its outcome, which is the same on all ranks."""
        if self._thread is None:
            return
        self._join()
        self._thread = None
        outcome, self._outcome = self._outcome, None
        if isinstance(outcome, BaseException):
            raise outcome
        self._failures = self._failures + 1 if outcome else 0
        if not outcome:
            return
        url = self._place.url_of(name_of(self._step))
        if last or self._failures >= self._keeping.max_failures:
            raise CheckpointError(
                f"Checkpoint {url} could not be written: {outcome}",
                fix=f"Free space or choose another disk, then run the same command: "
                f"it resumes from {self._newest()}.",
            )
        if dist.get_rank() == 0:
            log.warning(
                "checkpoint %s could not be written: %s; training goes on, and the next save tries again "
                "(failures=%d of %d)",
                url, outcome, self._failures, self._keeping.max_failures,
            )  # fmt: skip

    def _join(self) -> None:
        assert self._thread is not None
        while self._thread.is_alive():
            self._waiting()
            self._thread.join(1.0)  # in turns: a second Ctrl-C must be heard

    def _newest(self) -> str:
        try:
            found = saved_in(self._place)
        except (OSError, PenstockError):
            return "the newest complete one"
        return found[-1].name if found else "the start"

    def _all(self, value: T) -> list[T]:
        """Return what every rank said, by rank; every rank must call it."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, value, group=self._group)
        return found


def _part(name: str, box: Box, tensor: Tensor) -> Part:
    return Part(name, tuple(tensor.shape), box, spelled(name, tensor), tensor.element_size())


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return str(error) or type(error).__name__
