"""Choice of a kernel for each operation: tested against float64, timed, kept for the device and recorded.

    operation -> kernels, in a static order -> test -> time -> the fastest

An operation knows its kernels and its cases (nn/kernels/trials.py, nn/linear/trials.py); nothing here
knows an operation. The record of a run, a pinned file and the cache come before a measurement
(kernel_table.py). Where nothing was measured, the first kernel is the default.
"""

import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from penstock import __version__
from penstock.core import clock
from penstock.core.errors import ConfigError, PenstockError
from penstock.core.log import EventLog
from penstock.devices import accelerator
from penstock.devices.kernel_table import AUTO, REFERENCE, ChosenKernel, KernelTable, fastest, kept, kept_path

log = EventLog(__name__)

Case = TypeVar("Case")
T = TypeVar("T")
Call = Callable[[], Sequence[Tensor]]

FIRST_START_S = 5.0
"""No measurement begins after this time, in seconds. The next start measures the rest."""
_ROUNDS, _ROUND_S = 3, 0.02
_WRONG = "wrong by"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation(Generic[Case]):
    """A computation of a model that several kernels can do."""

    name: str
    """Without spaces."""
    shape: str
    """Sizes and dtype of the case that is timed."""
    kernels: Mapping[str, Callable[[Case], Call]]
    """Kernels of this type of device by name, in the static order. Each returns the call that computes a
    case. Both may raise anything where the device lacks the kernel."""
    costly: Collection[str] = ()
    """Kernels that cost more than time, such as compilation: they are measured only on purpose."""
    trial: Callable[[], Case]
    """Returns the case on which results are tested."""
    load: Callable[[], Case]
    """Returns the case that is timed."""
    exact: Callable[[Case], Sequence[Tensor]]
    """Returns the results of a case, computed in float64."""
    near: float
    """Largest error of a right result, as a share of its largest value."""
    is_replayed: bool = False
    """True if it is timed as a CUDA graph, without the host's time."""

    @property
    def key(self) -> str:
        """Key of the table's row."""
        return f"{self.name} {self.shape}"

    @property
    def first(self) -> str:
        """Name of the default, which computes where nothing was chosen."""
        return next(iter(self.kernels))


def failure(operation: Operation[Case], kernel: str) -> str:
    """Return why a kernel does not compute an operation here; empty: its results are right."""
    if kernel not in operation.kernels:
        return "it has no such kernel on this device"
    return _attempt(partial(_wrong, operation, operation.kernels[kernel]))


def _attempt(work: Callable[[], T]) -> T | str:
    """Return what work returns, or the words of what it raises."""
    try:
        with warnings.catch_warnings(action="ignore"):  # libraries say why they have no kernel
            return work()
    except Exception as error:  # libraries, compilers and drivers raise anything
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


def _wrong(operation: Operation[Case], prepare: Callable[[Case], Call]) -> str:
    """Compute the trial; return by how much the result is wrong; empty: it is right."""
    case = operation.trial()
    call = prepare(case)
    errors = [
        float((ours.detach().double() - exact.detach()).abs().max() / exact.detach().abs().max())
        for ours, exact in zip(call(), operation.exact(case), strict=True)
    ]
    wrong = [error for error in errors if not error <= operation.near]  # nan is wrong too
    return f"{_WRONG} {max(wrong):.2g} of the largest value, allowed {operation.near:.2g}" if wrong else ""


def measure(operation: Operation[Case], device: torch.device, *, on_purpose: bool = False) -> ChosenKernel:
    """Test and time the kernels of an operation; those that fail are left out, with a line in the log.

    Args:
        on_purpose: also those that are costly.

    Raises:
        PenstockError: some compute, and none is right.
        RuntimeError: none computes.
    """
    case = operation.load()
    calls: dict[str, Callable[[], object]] = {}
    out: dict[str, str] = {}
    for name, prepare in operation.kernels.items():
        if name in operation.costly and not on_purpose:
            continue
        ready = partial(_ready, operation, prepare, case, device)
        call: Callable[[], object] | str = failure(operation, name) or _attempt(ready)
        if isinstance(call, str):
            out[name] = call
            say_out(operation, name, call)
        else:
            calls[name] = call
    if not calls and any(why.startswith(_WRONG) for why in out.values()):
        raise PenstockError(
            f"No kernel computes {operation.name} correctly on this device: {out}",
            fix='Examine the device (penstock doctor --checks gpus). kernels = "reference" skips the test.',
        )
    if not calls:
        raise RuntimeError(f"no kernel runs: {out}")
    us = _times(calls, device)
    return ChosenKernel(kernel=fastest(us), us=us, out=out)


def say_out(operation: Operation[Case], kernel: str, reason: str) -> None:
    """Log that a kernel is not used."""
    log.warning(
        "kernel_out",
        "Kernel {kernel} of {operation} is not used: {reason}",
        kernel=kernel,
        operation=operation.name,
        reason=reason,
    )


def _ready(
    operation: Operation[Case], prepare: Callable[[Case], Call], case: Case, device: torch.device
) -> Callable[[], object]:
    """Return a call of the real size, which may not fit into the memory."""
    call = prepare(case)
    call()
    is_graph = operation.is_replayed and accelerator.kind_of(device).has_graphs
    return accelerator.captured(call, device) if is_graph else call


def _times(calls: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Return the microseconds of calls: the best of rounds in which each has its turn."""
    best = dict.fromkeys(calls, math.inf)
    for _ in range(1 + _ROUNDS):  # once each in the first round
        for name, call in calls.items():
            repeats = max(1, min(100, int(_ROUND_S / max(best[name], 1e-6))))
            accelerator.wait(device)
            start = clock.monotonic()
            for _ in range(repeats):
                call()
            accelerator.wait(device)
            best[name] = min(best[name], (clock.monotonic() - start) / repeats)
    return {name: round(1e6 * seconds, 3) for name, seconds in best.items()}


def identity_of(device: torch.device) -> tuple[str, dict[str, str]]:
    """Return a device's name, and the versions of the libraries that compute on it."""
    versions = {"penstock": __version__, "torch": str(torch.__version__)}
    if accelerator.is_accelerator(device):
        cudnn: Any = torch.backends.cudnn  # has no types
        versions["cudnn"] = str(cudnn.version())  # "None": there is none
        with suppress(PackageNotFoundError):
            versions["triton"] = version("triton")
    return accelerator.name_of(device), versions


def is_measured(setting: str, device: torch.device) -> bool:
    """Return whether kernels are chosen by measurement (docs/adr/0087-kernels-by-measurement.md)."""
    return setting == AUTO and accelerator.is_accelerator(device)


def stored(setting: str, device: torch.device) -> KernelTable:
    """Return the table that a setting reads: a pinned file, or what is kept for the device; or an empty one.

    Raises:
        UsageError, ConfigError: the file holds no table.
    """
    if setting not in (AUTO, REFERENCE):
        return KernelTable.read(Path(setting))
    return kept(*identity_of(device)) if is_measured(setting, device) else KernelTable()


def choose(
    operations: Sequence[Operation[Any]],  # Any: each has cases of its own
    device: torch.device,
    *,
    setting: str = AUTO,
    recorded: KernelTable = KernelTable(),  # noqa: B008  frozen
) -> KernelTable:
    """Return a row for each operation.

    Args:
        setting: AUTO, REFERENCE, or a file that holds a table.
        recorded: table of the run that is resumed. It counts if it was chosen by the same setting. A kernel
            that this device lacks is replaced, with a line in the log.

    Raises:
        UsageError, ConfigError: the file holds no table, or a kernel that cannot compute an operation here.
        PenstockError: as `measure`.
    """
    name, versions = identity_of(device)
    recorded, table = recorded.chosen_by(setting), stored(setting, device)
    is_same_device = recorded.is_of(name, versions)  # on which each was right
    choose_now: Callable[[Operation[Any]], ChosenKernel] = _first
    if is_measured(setting, device):
        deadline_s = clock.monotonic() + FIRST_START_S
        choose_now = partial(_kept_or_measured, table=table, device=device, deadline_s=deadline_s)
    elif setting != AUTO and setting != REFERENCE:
        choose_now = partial(_pinned, table=table, file=setting)
    rows = {}
    for operation in operations:
        row = recorded.row_for(operation.key)
        is_right = is_same_device and row is not None and row.kernel in operation.kernels
        if row and not is_right and (why := failure(operation, row.kernel)):
            say_out(operation, row.kernel, why)
            row = None
        rows[operation.key] = row or choose_now(operation)
    return KernelTable(setting=setting, device=name, versions=versions, rows=rows)


def _first(operation: Operation[Any], because: str = "") -> ChosenKernel:
    if because:
        log.warning(
            "first_kernel",
            "{operation}: the first kernel is used, because {reason}",
            operation=operation.name,
            reason=because,
        )
    return ChosenKernel(kernel=operation.first)


def _pinned(operation: Operation[Any], *, table: KernelTable, file: str) -> ChosenKernel:
    row = table.row_for(operation.key)
    if row is None:
        return _first(operation, f"{file} has no entry for it")
    if why := failure(operation, row.kernel):
        raise ConfigError(
            f"{file} pins {operation.name} of {operation.shape} to a kernel that cannot compute it ({why})",
            got=row.kernel,
            fix="Run `penstock kernels MODEL --out FILE` here: replicas need the same model and GPU.",
        )
    return row


def _kept_or_measured(
    operation: Operation[Any], *, table: KernelTable, device: torch.device, deadline_s: float
) -> ChosenKernel:
    row = table.rows.get(operation.key)
    if row and row.kernel in operation.kernels:
        return row
    if len(operation.kernels) == 1 or clock.monotonic() >= deadline_s:
        return _first(operation)
    try:
        row = measure(operation, device)
    except RuntimeError as error:  # such as a full device; the run itself may still fit
        return _first(operation, f"none could be measured: {str(error)[:200]}")
    log.info("kernel_chosen", "{operation}: {kernel}", operation=operation.name, kernel=row)
    keep(replace(table, rows={operation.key: row}))
    return row


def keep(found: KernelTable) -> None:
    """Add rows to the device's table in the cache. A cache that cannot be written is logged."""
    rows = {**kept(found.device, found.versions).rows, **found.rows}
    try:
        replace(found, rows=rows).write(kept_path(found.device, found.versions))
    except OSError as error:
        log.warning("kernels_not_kept", "The choice of kernels could not be kept: {error}", error=error)
