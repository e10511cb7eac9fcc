"""Asynchronous checkpoint saving: a copy in host memory, then a thread writes it during training.

    training  | step | wait for the save before, copy | step | step | step | ...
    thread                                            | write, flush | all ranks? index, rename |

Every rank writes its share (write_plan.py) to a file of its own. When all have, rank 0 writes the index,
which completes the checkpoint, and deletes old ones by the retention policy. The threads communicate over a
process group of their own, separate from the collectives of training. A rank that dies in between leaves
files without an index: the checkpoint before stays the newest.

The ranks exchange their boxes at the first save of a layout; later saves reuse the plan, so training waits
only for the copy. If a rank finds a number that is not finite in its copy, the checkpoint is abandoned and
the one before stays the newest.

A failed save, by a full disk for example, does not end a run that has days of training in memory: the run
continues with a warning, until `max_failures` in a row have failed, or until it ends.

One buffer, as large as the rank's share, is kept for the whole run, so its memory is allocated once
(staging.py).
"""

import zlib
from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from math import prod
from threading import Thread
from typing import Any

import torch.distributed as dist
from torch import Tensor

from penstock.checkpoint.find import saved_in, to_remove
from penstock.checkpoint.layout import CheckpointIndex, FileEntry, Meta, TensorEntry, encode, name_of, step_of
from penstock.checkpoint.shard_file import TensorPart, header_of, in_order, not_finite
from penstock.checkpoint.staging import StagingBuffer
from penstock.checkpoint.storage import CheckpointStorage
from penstock.checkpoint.tensors import DTYPES, held, spelled
from penstock.checkpoint.write_plan import Held, holders, share_of
from penstock.core import clock
from penstock.core.boxes import Box
from penstock.core.errors import CheckpointError, PeerLost, PenstockError
from penstock.core.log import EventLog
from penstock.devices import accelerator
from penstock.parallel.mesh import gather_values

log = EventLog(__name__)


_TIMEOUT = timedelta(hours=2)  # a rank may be this much faster than another's upload
_SHOWN_REASONS = 3  # number of failed ranks in a message
_IS_BUG = "Report this as a bug: a checkpoint of it would be wrong."
_LAST_WORDS_S = 30.0  # time for the thread to finish after the run has failed


@dataclass(frozen=True, slots=True)
class SaveFailure:
    """Failure of a save: reason and remedy."""

    reason: str
    fix: str = "Free space or choose another disk, then run the same command: "


@dataclass(frozen=True, slots=True)
class WritePlan:
    """Parts of a layout that this rank holds, and those of them that it writes."""

    held: list[Held]
    share: list[tuple[str, Box]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """Retention of checkpoints, and tolerance of failed saves."""

    newest: int = 2
    """Number of newest checkpoints kept."""
    every: int = 0
    """Checkpoints at multiples of this step are kept for good; 0: none."""
    max_failures: int = 3
    """Number of consecutive failed saves after which the run stops."""


@dataclass(frozen=True, slots=True)
class Written:
    """Result of a rank's write, for the index."""

    name: str
    file: FileEntry
    tensors: dict[str, TensorEntry]
    """Tensors whose first element it wrote."""


class Saver:
    """Saver of a run's checkpoints; one per rank, used as a context manager.

    Args:
        place: storage of the checkpoints.
        resumed_step: step of the checkpoint that the run continues from; 0: it starts.
        waiting: called about once a second while training waits for a save, as a sign of life.
    """

    def __init__(
        self,
        place: CheckpointStorage,
        keeping: RetentionPolicy,
        *,
        resumed_step: int = 0,
        waiting: Callable[[], None] = lambda: None,
    ) -> None:
        self._waiting = waiting
        self._place = place
        self._keeping = keeping
        self._stage = StagingBuffer()
        self._group: dist.ProcessGroup | None = None
        self._thread: Thread | None = None
        self._outcome: SaveFailure | BaseException | None = None
        self._plans: dict[Hashable, WritePlan] = {}
        self._failures = 0
        self._step = 0
        self._saved_step = resumed_step
        self.is_prepared = False
        self._layout: Hashable = ()  # of the save in progress
        self._blocked_s = self._told_s = self._began_s = 0.0

    def __enter__(self) -> "Saver":
        """Remove leftovers of a killed writer; every rank must call it."""
        self._began_s = clock.monotonic()
        self._group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        if dist.get_rank() == 0:
            try:
                for name in self._place.leftovers():
                    self._place.remove(name)
            except (OSError, PenstockError) as error:
                log.warning(
                    "leftovers_left", "Leftovers of a killed save cannot be removed: {error}", error=error
                )
        dist.barrier(self._group)
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        """Wait for the save in progress; after a failure of the run, only for a while."""
        if error is None:
            self.finish()
        elif self._thread is not None:
            if isinstance(error, PenstockError) and not isinstance(error, PeerLost):
                self._join()
            else:
                self._thread.join(_LAST_WORDS_S)
        if self.is_idle():  # else the thread still reads the copy
            self._stage.release()

    def prepare(self, tensors: Mapping[str, Tensor], *, layout: Hashable = ()) -> None:
        """Have a thread take the memory for saves of a layout, so that none waits; every rank must call it.

        Nothing is done for tensors of a CPU, whose first copy takes the memory as fast.

        Args:
            layout: as for `save`.
        """
        self.is_prepared = True
        devices = {tensor.device for tensor in tensors.values() if accelerator.is_accelerator(tensor.device)}
        if devices:
            self._layout = layout
            _, sources = self._share(tensors, layout)
            try:
                self._stage.reserve(sum(source.nbytes for source in sources), devices.pop())
            except CheckpointError as error:
                log.warning("saves_will_fail", "No checkpoint can be saved: {error}", error=error)

    def save(self, tensors: Mapping[str, Tensor], meta: Meta, *, layout: Hashable = ()) -> None:
        """Copy tensors and start to write them; every rank must call it.

        Args:
            layout: key of the tensors' layout, equal on all ranks; must differ if any rank holds other parts.

        Raises:
            CheckpointError: too many consecutive saves have failed; the message has the last reason. Or the
                ranks did not agree on the layout of this save or the last one.
        """
        began = clock.monotonic()
        self._wait(last=False)
        self._layout, self._step = layout, meta.step
        parts, sources = self._share(tensors, layout)
        data: memoryview | CheckpointError
        try:
            data = self._stage.copy(sources)
        except CheckpointError as error:  # the other ranks wait to hear of it
            data = error
        entries = {
            name: TensorEntry(dtype=part.dtype, shape=part.shape)
            for name, part in ((part.name, part) for part in parts)
            if not any(part.box.offsets)  # the rank that writes a tensor's first element reports it
        }
        self._thread = Thread(
            target=self._run, args=(meta, parts, data, entries), name="checkpoint", daemon=True
        )
        self._thread.start()
        self._blocked_s += clock.monotonic() - began

    def is_idle(self) -> bool:
        """True if no save is in progress on this rank."""
        return self._thread is None or not self._thread.is_alive()

    def finish(self) -> None:
        """Wait for the save in progress; every rank must call it.

        Raises:
            CheckpointError: it failed.
        """
        began = clock.monotonic()
        self._wait(last=True)
        self._blocked_s += clock.monotonic() - began

    def record(self) -> dict[str, float]:
        """Return the checkpoints' part of a step's record, by the names of obs/metric_names.py."""
        since, self._told_s = self._blocked_s - self._told_s, self._blocked_s
        share = self._blocked_s / max(clock.monotonic() - self._began_s, 1e-9)
        return {"checkpoint_s": since, "checkpoint_share": share, "checkpoint_step": self._saved_step}

    def _share(
        self, tensors: Mapping[str, Tensor], layout: Hashable
    ) -> tuple[list[TensorPart], list[Tensor]]:
        """Return this rank's share: the parts in the order of the file, and where their numbers are."""
        boxes = {name: held(name, tensor) for name, tensor in tensors.items()}
        ours = [Held(name, box, tensors[name].element_size()) for name, (box, _) in boxes.items()]
        if layout not in self._plans:
            self._plans[layout] = self._plan(ours)
        plan = self._plans[layout]
        if plan.held != ours:
            error = CheckpointError(
                f"Rank {dist.get_rank()} holds other tensors than at an earlier save of the same layout",
                got=layout,
                fix=_IS_BUG,
            )
            self._all(None, error)  # raises it on every rank: the others wait for this one
        parts = in_order([_part(name, box, tensors[name]) for name, box in plan.share])
        sources = [boxes[part.name][1][part.box.within(boxes[part.name][0])] for part in parts]
        return parts, sources

    def _plan(self, ours: list[Held]) -> WritePlan:
        """Exchange the boxes of all ranks and return this rank's share."""
        rank, keys_of_ranks = dist.get_rank(), self._all([each.key for each in ours])
        share = share_of(rank, dict(zip(ours, holders(keys_of_ranks[rank], keys_of_ranks), strict=True)))
        return WritePlan(ours, share)

    def _run(
        self,
        meta: Meta,
        parts: list[TensorPart],
        data: memoryview | CheckpointError,
        entries: dict[str, TensorEntry],
    ) -> None:
        """Write, agree, commit: the body of the thread."""
        began = clock.monotonic()
        try:
            if isinstance(data, CheckpointError):
                mine: Written | SaveFailure = SaveFailure(str(data).removesuffix("."), fix="After that, ")
            else:
                mine = self._write(name_of(meta.step), parts, data, entries)
            said = [_heard(each) for each in self._all(asdict(mine))]
            outcome = self._commit(meta, said) if dist.get_rank() == 0 else None
            first, *_ = self._all(asdict(outcome) if outcome else None)
            self._outcome = SaveFailure(**first) if first else None
        except Exception as error:  # a peer is gone; reported when training waits
            self._outcome = error
        if self._outcome is None:
            self._saved_step = meta.step
        if dist.get_rank() == 0 and self._outcome is None:
            size = sum(said_by.file.num_bytes for said_by in said if isinstance(said_by, Written))
            took, url = clock.monotonic() - began, self._place.url_of(name_of(meta.step))
            log.info(
                "saved",
                "Saved step {step:,} in {write_s:.1f} s ({size_bytes:bytes}): {path}",
                step=meta.step,
                write_s=took,
                size_bytes=size,
                path=url,
            )

    def _write(
        self, name: str, parts: list[TensorPart], data: memoryview, entries: dict[str, TensorEntry]
    ) -> Written | SaveFailure:
        """Write this rank's file; return its index entry, or the failure."""
        if wrong := not_finite(parts, data):
            others = f" and {len(wrong) - 1} more" if wrong[1:] else ""
            return SaveFailure(
                f"{wrong[0]}{others} on rank {dist.get_rank()} holds numbers that are not finite",
                fix="Lower optim.learning_rate or set compute to 'float32', then run again: ",
            )
        try:
            header = header_of(parts, data)
            file = f"rank-{dist.get_rank():05d}.safetensors"
            self._place.write(name, file, [memoryview(header), data])
        except Exception as error:  # any error must reach the other ranks
            log.debug("save_failed", "A save failed", exc_info=True)
            return SaveFailure(_reason(error))
        entry = FileEntry(
            num_bytes=len(header) + len(data), header_bytes=len(header), header_crc32=zlib.crc32(header)
        )
        return Written(file, entry, entries)

    def _commit(self, meta: Meta, said: list[Written | SaveFailure]) -> SaveFailure | None:
        """Complete the checkpoint, or remove it; return the failure."""
        name = name_of(meta.step)
        failed = [each for each in said if isinstance(each, SaveFailure)]
        try:
            if failed:
                self._place.abandon(name)
                reasons = sorted({each.reason for each in failed})
                left = f"; and {len(reasons) - _SHOWN_REASONS} more" if reasons[_SHOWN_REASONS:] else ""
                return SaveFailure("; ".join(reasons[:_SHOWN_REASONS]) + left, failed[0].fix)
            index = index_of(meta, [each for each in said if isinstance(each, Written)])
            self._place.commit(name, encode(index))
        except Exception as error:  # whatever it is, all ranks must agree that there is no checkpoint
            log.debug("save_failed", "A save failed", exc_info=True)
            return SaveFailure(_reason(error))
        self._retain(meta)
        return None

    def _retain(self, meta: Meta) -> None:
        """Delete old checkpoints by the retention policy; an error only warns."""
        try:
            steps = [step for saved in saved_in(self._place) if (step := step_of(saved.name)) is not None]
            keeping = self._keeping
            for step in to_remove(
                steps,
                written=meta.step,
                keep=keeping.newest,
                keep_every=keeping.every,
                best=meta.early_stop.get("best_step", 0),
            ):
                self._place.remove(name_of(step))
        except (OSError, PenstockError) as error:
            log.warning(
                "old_checkpoints_left", "Old checkpoints cannot be removed: {error}", error=_reason(error)
            )

    def _wait(self, *, last: bool) -> None:
        """Wait for the thread and handle its outcome, which is the same on all ranks."""
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
                f"Checkpoint {url} could not be written: {outcome.reason}",
                fix=f"{outcome.fix}it resumes from {self._newest()}.",
            )
        if dist.get_rank() == 0:
            log.warning(
                "unsaved",
                "Checkpoint {path} could not be written: {reason}; training continues, and the next "
                "save retries (failure {failures} of {max_failures})",
                path=url,
                reason=outcome.reason,
                failures=self._failures,
                max_failures=self._keeping.max_failures,
            )

    def _join(self) -> None:
        assert self._thread is not None
        while self._thread.is_alive():
            self._waiting()
            self._thread.join(1.0)  # repeatedly: a second Ctrl-C must be handled

    def _newest(self) -> str:
        try:
            found = saved_in(self._place)
        except (OSError, PenstockError):
            return "the newest complete one"
        return found[-1].name if found else "the start"

    def _all(self, value: Any, error: CheckpointError | None = None) -> list[Any]:  # Any: JSON values
        """Return the value of every rank, by rank; every rank must call it.

        Raises:
            CheckpointError: the ranks save different layouts, or one has an error.
        """
        found = gather_values([repr(self._layout), value, str(error) if error else None], self._group)
        for rank, (layout, _, failure) in enumerate(found):
            if failure is not None:
                raise CheckpointError(failure)  # of the first rank that has one, on all
            if layout != found[0][0]:
                raise CheckpointError(
                    f"Rank {rank} saves another layout than rank 0: {layout}, not {found[0][0]}", fix=_IS_BUG
                )
        return [each for _, each, _ in found]


def _heard(said: dict[str, Any]) -> Written | SaveFailure:  # Any: JSON values
    """Return what a rank told of its write."""
    if "reason" in said:
        return SaveFailure(**said)
    tensors = {
        name: TensorEntry(dtype=each["dtype"], shape=tuple(each["shape"]))
        for name, each in said["tensors"].items()
    }
    return Written(said["name"], FileEntry(**said["file"]), tensors)


def _part(name: str, box: Box, tensor: Tensor) -> TensorPart:
    return TensorPart(name, tuple(tensor.shape), box, spelled(name, tensor), tensor.element_size())


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return str(error) or type(error).__name__


def index_of(meta: Meta, written: list[Written]) -> CheckpointIndex:
    """Return the index for the files of all ranks.

    Raises:
        CheckpointError: they do not contain every tensor exactly once.
    """
    tensors = {name: entry for each in written for name, entry in each.tensors.items()}
    expected = sum(prod(entry.shape) * DTYPES[entry.dtype].itemsize for entry in tensors.values())
    found = sum(each.file.num_bytes - each.file.header_bytes for each in written)
    if found != expected:
        raise CheckpointError(
            f"The ranks wrote {found:,} bytes of tensors that have {expected:,}",
            fix="Report this as a bug: the saver does not support the layout of a tensor.",
        )
    files = {each.name: each.file for each in written}
    return CheckpointIndex(meta=meta, tensors=dict(sorted(tensors.items())), files=files)
