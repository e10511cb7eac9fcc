"""Choice of a kernel for each operation: the run's record, a pinned file, the cache, or a measurement.

An operation that was not measured uses its first candidate, the default.
"""

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from penstock import __version__
from penstock.core import clock, config, env
from penstock.core.errors import ConfigError, PenstockError
from penstock.core.log import Event
from penstock.devices import accelerator
from penstock.devices.kernel_table import AUTO, REFERENCE, ChosenKernel, KernelTable, kept, kept_path
from penstock.devices.kernel_trial import Case, Operation, failure, measure

log = logging.getLogger(__name__)

FIRST_START_S = 5.0
"""No measurement begins after this time, in seconds. The next start measures the rest."""


def identity_of(device: torch.device) -> tuple[str, dict[str, str]]:
    """Return a device's name, and the versions of the libraries that compute on it."""
    versions = {"penstock": __version__, "torch": str(torch.__version__)}
    if not accelerator.is_accelerator(device):
        return accelerator.name_of(device), {**versions, "features": config.fingerprint(env.cpu_features())}
    with suppress(PackageNotFoundError):
        versions["triton"] = version("triton")
    cudnn: Any = torch.backends.cudnn  # has no types
    if cudnn.is_available():
        versions["cudnn"] = str(cudnn.version())
    return accelerator.name_of(device), versions


def choose(
    operations: Sequence[Operation[Any]],  # Any: each has cases of its own
    device: torch.device,
    *,
    setting: str = AUTO,
    recorded: KernelTable | None = None,
) -> KernelTable:
    """Return a row for each operation: as recorded, pinned, kept or measured now, or its first candidate.

    On CPUs nothing is measured (docs/adr/0087-kernels-by-measurement.md).

    Args:
        setting: AUTO, REFERENCE, or a file that holds a table.
        recorded: table of the run that is resumed, or None. Its choices are used again if it was chosen by
            the same setting; those that this device lacks are replaced, with a line in the log.

    Raises:
        UsageError, ConfigError: the file holds no table, or a kernel that this device lacks.
        PenstockError: as `measure`.
    """
    name, versions = identity_of(device)
    deadline_s = clock.monotonic() + FIRST_START_S
    again = recorded if recorded is not None and recorded.setting == setting else KernelTable()
    pinned = None if setting in (AUTO, REFERENCE) else KernelTable.read(Path(setting))
    is_measured = setting == AUTO and accelerator.is_accelerator(device)
    known = kept(name, versions) if is_measured else KernelTable()
    rows, new = {}, {}
    for operation in operations:
        row = again.of(operation.name)
        if row and (why := _why_rejected(operation, row, is_trusted=again.is_of(name, versions))):
            log.warning(
                Event(
                    "kernel_replaced",
                    "The recorded kernel {kernel} of {operation} is replaced: {reason}",
                    kernel=row.kernel,
                    operation=operation.name,
                    reason=why,
                )
            )
            row = None
        if pinned is not None:
            row = row or _pinned(operation, pinned, setting)
        elif row is None and (found := known.rows.get(operation.key)) and operation.candidate(found.kernel):
            row = found
        elif row is None and is_measured and len(operation.candidates) > 1 and clock.monotonic() < deadline_s:
            row = new[operation.key] = _measured_or_first(operation, device)
        rows[operation.key] = row or ChosenKernel(kernel=operation.candidates[0].name)
    keep(KernelTable(device=name, versions=versions, rows={key: row for key, row in new.items() if row.us}))
    return KernelTable(setting=setting, device=name, versions=versions, rows=rows)


def _why_rejected(operation: Operation[Case], row: ChosenKernel, *, is_trusted: bool = False) -> str:
    """Return why a device cannot use a kernel; empty: it can. A row of this device is not tested again."""
    candidate = operation.candidate(row.kernel)
    if candidate is None:
        return "this device has no such kernel"
    return "" if is_trusted else failure(operation, candidate)


def _pinned(operation: Operation[Case], pinned: KernelTable, file: str) -> ChosenKernel | None:
    row = pinned.rows.get(operation.key) or pinned.of(operation.name)
    if row is None:
        log.warning(
            Event(
                "kernel_unpinned",
                "{path} has no entry for {operation}: its first kernel is used",
                path=file,
                operation=operation.name,
            )
        )
    elif why := _why_rejected(operation, row):
        raise ConfigError(
            f"{file} pins {operation.name} to a kernel that this device lacks ({why})",
            got=row.kernel,
            fix="Measure this device by `penstock kernels --out FILE`; replicas need the same model of GPU.",
        )
    return row


def _measured_or_first(operation: Operation[Case], device: torch.device) -> ChosenKernel:
    try:
        row = measure(operation, device)
    except PenstockError:
        raise
    except Exception as error:  # such as a full device; the run itself may still fit
        log.warning(
            Event(
                "kernels_unmeasured",
                "The kernels of {operation} could not be measured, the first is used: {error}",
                operation=operation.name,
                error=str(error)[:200],
            )
        )
        return ChosenKernel(kernel=operation.candidates[0].name)
    log.info(Event("kernel_chosen", "{operation}: {kernel}", operation=operation.name, kernel=row))
    return row


def keep(found: KernelTable) -> None:
    """Add rows to the device's table in the cache. A cache that cannot be written is logged."""
    if not found.rows:
        return
    before = kept(found.device, found.versions)
    try:
        replace(before, rows={**before.rows, **found.rows}).write(kept_path(found.device, found.versions))
    except OSError as error:
        log.warning(
            Event("kernels_not_kept", "The choice of kernels could not be kept: {error}", error=error)
        )
