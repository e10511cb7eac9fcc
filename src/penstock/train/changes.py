"""The planned changes of a recipe in closed form: [[data.schedule]] entries to steps; imports no torch.

`at_tokens` becomes the first step that begins with as many tokens, by prefix sums over the batch sizes and
lengths in force. A ramp of weights becomes at most 32 mixtures that each hold for a while: the state
keeps every mixture of a run, so they are few and in whole thousandths.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from penstock.core.errors import ConfigError, nearest
from penstock.data.adaptive import thousandths
from penstock.data.schedule import Change
from penstock.train.data_config import ChangeConfig, DataConfig, token_count

RAMP_SEGMENTS = 32
"""Mixtures of a ramp, the last one included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """An entry of data.schedule with its place in the run."""

    step: int
    """Steps taken before it holds."""
    tokens: int
    """Tokens trained on before it holds."""
    entry: ChangeConfig
    ramp_ends: int
    """Step from which the new weights hold in full; `step` where there is no ramp."""


def plan(data: DataConfig) -> list[Planned]:
    """Return the entries of data.schedule with the steps they hold from.

    Raises:
        ConfigError: they do not follow one another, a ramp is cut off by the next weights, or weights do not
            name the corpora.
    """
    sizes = [(0, 0, data.global_batch_size, data.sequence_length)]  # step, tokens before it, rows, length
    found: list[Planned] = []
    for number, entry in enumerate(data.schedule, start=1):
        _check_names(entry, number, list(data.corpora))
        step = _step_of(entry, sizes[-1])
        if step < sizes[-1][0] or (found and step == found[-1].step):
            raise ConfigError(
                f"Entry {number} of data.schedule holds from step {step:,}, not later than the one before it "
                f"(from step {sizes[-1][0]:,})",
                fix="Order the entries, and write what changes at one step as one entry.",
            )
        start, tokens, rows, length = sizes[-1]
        tokens += (step - start) * rows * length
        sizes.append((step, tokens, entry.global_batch_size or rows, entry.sequence_length or length))
        found.append(Planned(step=step, tokens=tokens, entry=entry, ramp_ends=step))
    found = [replace(planned, ramp_ends=_ramp_end(planned, sizes)) for planned in found]
    _check_ramps(found)
    return found


def changes(data: DataConfig, first: Mapping[str, float]) -> list[Change]:
    """Return what the loader is told of the plan.

    Args:
        first: weights of the mixture that the run begins with.
    """
    before, told = thousandths(first), []
    for planned in plan(data):
        entry = planned.entry
        if entry.global_batch_size or entry.sequence_length:
            told.append(
                Change(
                    step=planned.step,
                    global_batch_size=entry.global_batch_size,
                    sequence_length=entry.sequence_length,
                )
            )
        if entry.weights is not None:
            told += ramp(before, entry.weights, steps=range(planned.step, planned.ramp_ends))
            before = thousandths(entry.weights)
    return told


def ramp(old: Mapping[str, float], new: Mapping[str, float], *, steps: range) -> list[Change]:
    """Return the mixtures of a ramp: each the straight line's at the middle of its steps, then the new one.

    >>> [(c.step, c.weights["a"]) for c in ramp({"a": 1, "b": 0}, {"a": 0, "b": 1}, steps=range(10, 12))]
    [(10, 0.75), (11, 0.25), (12, 0)]
    """
    pieces = min(RAMP_SEGMENTS - 1, len(steps))
    edges = [steps.start + len(steps) * piece // max(pieces, 1) for piece in range(pieces + 1)]
    old, target, told = thousandths(old), thousandths(new), []
    for start, stop in pairwise(edges):
        done = ((start + stop) / 2 - steps.start) / len(steps)
        weights = {name: (1 - done) * old.get(name, 0.0) + done * target[name] for name in new}
        told.append(Change(step=start, weights=thousandths(weights)))
    return [*told, Change(step=steps.stop if steps else steps.start, weights=dict(new))]


def micro_batch_sizes(data: DataConfig) -> Callable[[int], int | None]:
    """Return the function step -> rows per forward pass as the recipe asks for them."""
    firsts, sizes = [0], [data.micro_batch_size]
    for planned in plan(data):
        if planned.entry.micro_batch_size is not None:
            firsts.append(planned.step)
            sizes.append(planned.entry.micro_batch_size)
    return lambda step: sizes[bisect_right(firsts, step) - 1]


def _step_of(entry: ChangeConfig, sizes: tuple[int, int, int, int]) -> int:
    if entry.at_step is not None:
        return entry.at_step
    assert entry.at_tokens is not None
    step, tokens, rows, length = sizes
    return step - (tokens - token_count(entry.at_tokens)) // (rows * length)  # rounded up


def _ramp_end(planned: Planned, sizes: list[tuple[int, int, int, int]]) -> int:
    entry = planned.entry
    if entry.ramp_tokens is None:
        return planned.step + (entry.ramp_steps or 0)
    end = planned.tokens + token_count(entry.ramp_tokens)
    index = bisect_right(sizes, end, key=lambda size: size[1]) - 1
    step, tokens, rows, length = sizes[index]
    return step - (tokens - end) // (rows * length)


def _check_ramps(found: list[Planned]) -> None:
    mixtures = [planned for planned in found if planned.entry.weights is not None]
    for early, late in pairwise(mixtures):
        if late.step < early.ramp_ends:
            raise ConfigError(
                f"A ramp of data.schedule goes on to step {early.ramp_ends:,}, and weights are set again at "
                f"step {late.step:,}",
                fix="Shorten the ramp, or set them later.",
            )


def _check_names(entry: ChangeConfig, number: int, corpora: list[str]) -> None:
    weights = entry.weights
    if weights is None:
        return
    for name in weights:
        if name not in corpora:
            raise ConfigError(
                f"Entry {number} of data.schedule weighs a corpus the recipe does not have",
                got=name,
                fix=nearest(name, corpora),
            )
    for name in corpora:
        if name not in weights:
            raise ConfigError(
                f"Entry {number} of data.schedule gives corpus {name!r} no weight", fix="0 leaves it out."
            )
    if min(weights.values()) < 0 or not sum(weights.values()):
        raise ConfigError(
            f"Weights in entry {number} of data.schedule must be zero or more, and one above zero",
            got=weights,
        )
