"""Trial of kernels: an operation's candidates are tested against float64 and timed on a device.

    operation -> candidates, in a static order -> test -> time -> the fastest (kernel_table.py)

An operation knows its candidates and its cases (nn/kernels/trials.py, nn/linear/trials.py); nothing here
knows an operation.
"""

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from penstock.core import clock
from penstock.core.errors import PenstockError
from penstock.core.log import Event
from penstock.devices import accelerator
from penstock.devices.kernel_table import ChosenKernel, fastest

log = logging.getLogger(__name__)

Case = TypeVar("Case")
Call = Callable[[], Sequence[Tensor]]

_ROUNDS, _ROUND_S = 3, 0.02
_WRONG = "wrong by"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate(Generic[Case]):
    """A kernel that computes an operation."""

    name: str
    prepare: Callable[[Case], Call]
    """Returns the call that computes a case. Both may raise anything where the device lacks the kernel."""
    cost: str = ""
    """Cost besides time, such as compilation: it is measured only on purpose. Empty: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation(Generic[Case]):
    """A computation of a model that several kernels can do."""

    name: str
    """Without spaces."""
    shape: str
    """Sizes and dtype of the case that is timed."""
    candidates: Sequence[Candidate[Case]]
    """Candidates for this type of device, in the static order."""
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

    def candidate(self, name: str) -> Candidate[Case] | None:
        """Return a candidate by its name; None: this type of device has none of that name."""
        return next((one for one in self.candidates if one.name == name), None)


def failure(operation: Operation[Case], candidate: Candidate[Case]) -> str:
    """Return why a candidate does not compute an operation here; empty: its results are right."""
    try:
        with warnings.catch_warnings(action="ignore"):  # libraries say why they have no kernel
            return _wrong(operation, candidate)
    except Exception as error:  # libraries, compilers and drivers raise anything
        return _words_of(error)


def _wrong(operation: Operation[Case], candidate: Candidate[Case]) -> str:
    """Compute the trial; return by how much the result is wrong; empty: it is right."""
    case = operation.trial()
    call = candidate.prepare(case)
    found = call()
    errors = [
        float((ours.detach().double() - theirs.detach()).abs().max() / theirs.detach().abs().max())
        for ours, theirs in zip(found, operation.exact(case), strict=True)
    ]
    wrong = [error for error in errors if not error <= operation.near]  # nan is wrong too
    return f"{_WRONG} {max(wrong):.2g} of the largest value, allowed {operation.near:.2g}" if wrong else ""


def measure(operation: Operation[Case], device: torch.device, *, on_purpose: bool = False) -> ChosenKernel:
    """Test and time the candidates of an operation; those that fail are out, with a line in the log.

    Args:
        on_purpose: also those that have a cost.

    Raises:
        PenstockError: some compute, and none is right.
        RuntimeError: none computes.
    """
    case = operation.load()
    calls: dict[str, Callable[[], object]] = {}
    out: dict[str, str] = {}
    for one in operation.candidates:
        if one.cost and not on_purpose:
            continue
        why = failure(operation, one)
        try:
            if not why:
                calls[one.name] = _ready(operation, one.prepare(case), device)
        except Exception as error:  # the real size may not fit into the memory
            why = _words_of(error)
        if why:
            out[one.name] = why
            log.warning(
                Event(
                    "kernel_out",
                    "Kernel {kernel} of {operation} is out: {reason}",
                    kernel=one.name,
                    operation=operation.name,
                    reason=why,
                )
            )
    if not calls and any(why.startswith(_WRONG) for why in out.values()):
        raise PenstockError(
            f"No kernel computes {operation.name} right on this device: {out}",
            fix='Examine the device (penstock doctor --checks gpus). kernels = "reference" skips the test.',
        )
    if not calls:
        raise RuntimeError(f"No kernel of {operation.name} runs: {out}")
    us = _times(calls, device)
    return ChosenKernel(kernel=fastest(us), us=us, out=out)


def _ready(
    operation: Operation[Case], call: Callable[[], object], device: torch.device
) -> Callable[[], object]:
    call()
    is_graph = operation.is_replayed and accelerator.kind_of(device).has_graphs
    return accelerator.captured(call, device) if is_graph else call


def _words_of(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


def _times(calls: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Return the microseconds of calls: the best of rounds in which each has its turn."""
    best = {name: _seconds(call, 1, device) for name, call in calls.items()}
    repeats = {name: max(1, min(100, int(_ROUND_S / max(once, 1e-6)))) for name, once in best.items()}
    for _ in range(_ROUNDS):
        for name, call in calls.items():
            best[name] = min(best[name], _seconds(call, repeats[name], device))
    return {name: round(1e6 * seconds, 3) for name, seconds in best.items()}


def _seconds(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    accelerator.wait(device)
    start = clock.monotonic()
    for _ in range(repeats):
        call()
    accelerator.wait(device)
    return (clock.monotonic() - start) / repeats
