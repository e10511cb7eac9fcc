"""Choice of kernels: as a run recorded them, as a file pins them, as they are kept, or measured now.

Where nothing was measured, the first candidate of an operation computes.
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
from penstock.devices import accelerator
from penstock.devices.kernel_table import AUTO, REFERENCE, KernelTable, Row, kept, kept_path
from penstock.devices.kernel_trial import Case, Operation, failure, measure

log = logging.getLogger(__name__)

FIRST_START_S = 5.0
"""Seconds after which a start begins no further measurement; the next start goes on."""


def identity_of(device: torch.device) -> tuple[str, dict[str, str]]:
    """Return a device's name, and the versions of what computes on it."""
    found = {"penstock": __version__, "torch": str(torch.__version__)}
    if not accelerator.is_accelerator(device):
        return accelerator.name_of(device), {**found, "features": config.fingerprint(env.cpu_features())}
    with suppress(PackageNotFoundError):
        found["triton"] = version("triton")
    cudnn: Any = torch.backends.cudnn  # has no types
    if cudnn.is_available():
        found["cudnn"] = str(cudnn.version())
    return accelerator.name_of(device), found


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
    until = clock.monotonic() + FIRST_START_S
    again = recorded if recorded is not None and recorded.setting == setting else KernelTable()
    pinned = None if setting in (AUTO, REFERENCE) else KernelTable.read(Path(setting))
    is_measured = setting == AUTO and accelerator.is_accelerator(device)
    known = kept(name, versions) if is_measured else KernelTable()
    rows, new = {}, {}
    for operation in operations:
        row = again.of(operation.name)
        if row and (why := _refused(operation, row, is_trusted=again.is_of(name, versions))):
            log.warning("kernel=%s operation=%s recorded=replaced reason=%r", row.kernel, operation.name, why)
            row = None
        if pinned is not None:
            row = row or _pinned(operation, pinned, setting)
        elif row is None and (found := known.rows.get(operation.key)) and operation.candidate(found.kernel):
            row = found
        elif row is None and is_measured and len(operation.candidates) > 1 and clock.monotonic() < until:
            row = new[operation.key] = _measured_or_first(operation, device)
        rows[operation.key] = row or Row(kernel=operation.candidates[0].name)
    keep(KernelTable(device=name, versions=versions, rows={key: row for key, row in new.items() if row.us}))
    return KernelTable(setting=setting, device=name, versions=versions, rows=rows)


def _refused(operation: Operation[Case], row: Row, *, is_trusted: bool = False) -> str:
    """Return why a device cannot use a row; empty: it can. A row of the same device is trusted untested."""
    candidate = operation.candidate(row.kernel)
    if candidate is None:
        return "this device has no such kernel"
    return "" if is_trusted else failure(operation, candidate)


def _pinned(operation: Operation[Case], pinned: KernelTable, file: str) -> Row | None:
    row = pinned.rows.get(operation.key) or pinned.of(operation.name)
    if row is None:
        log.warning(
            "operation=%s kernels=%s has no row of it: its first kernel is used", operation.name, file
        )
    elif why := _refused(operation, row):
        raise ConfigError(
            f"{file} pins {operation.name} to a kernel that this device lacks ({why})",
            got=row.kernel,
            fix="Measure this device by `penstock kernels --out FILE`; replicas need devices of one kind.",
        )
    return row


def _measured_or_first(operation: Operation[Case], device: torch.device) -> Row:
    try:
        row = measure(operation, device)
    except PenstockError:
        raise
    except Exception as error:  # a full device, for instance: what runs anyway decides whether it has room
        log.warning("operation=%s measured=no reason=%r", operation.name, str(error)[:200])
        return Row(kernel=operation.candidates[0].name)
    log.info("operation=%s kernel=%s", operation.name, row, extra={"told": f"{operation.name}: {row}."})
    return row


def keep(found: KernelTable) -> None:
    """Add rows to the table that is kept of a device; a cache that cannot be written is a line in the log."""
    if not found.rows:
        return
    before = kept(found.device, found.versions)
    try:
        replace(before, rows={**before.rows, **found.rows}).write(kept_path(found.device, found.versions))
    except OSError as error:
        log.warning("kernels=not_kept reason=%r", str(error))
