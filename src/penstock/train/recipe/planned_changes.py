"""Planned changes of a recipe: [[data.schedule]] entries to steps, in closed form; imports no torch.

`at_tokens` becomes the first step that begins with as many tokens, by prefix sums over batch sizes and
lengths. A ramp of weights becomes at most 32 mixtures: the state keeps every mixture of a run, so they are
few, in whole thousandths.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from penstock.core.checks import check_divisible
from penstock.core.errors import ConfigError, nearest
from penstock.data.schedule.adaptive import thousandths
from penstock.data.schedule.change_log import Change
from penstock.parallel.layout import ParallelConfig, layout_of
from penstock.train.recipe.config import TrainConfig, on_machines
from penstock.train.recipe.data_config import ChangeConfig, DataConfig, token_count

RAMP_SEGMENTS = 32
"""Maximum mixtures of a ramp, the last one included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """An entry of data.schedule with its resolved step."""

    step: int
    """Steps taken before it applies."""
    tokens: int
    """Tokens trained on before it applies."""
    entry: ChangeConfig
    ramp_ends: int
    """Step from which the new weights apply in full; `step` without a ramp."""


def plan(data: DataConfig) -> list[Planned]:
    """Return the entries of data.schedule with their resolved steps.

    Raises:
        ConfigError: they are not in order, a ramp is cut off by the next weights, or weights do not name
            all corpora.
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
    """Return the changes of the plan, for the loader.

    Args:
        first: initial weights of the mixture.
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
    """Return the mixtures of a ramp: linear interpolation at the middle of each segment, then the new one.

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


@dataclass(frozen=True, slots=True)
class MicroBatchSizes:
    """Function from a step to the rows per forward pass; can be pickled."""

    firsts: tuple[int, ...]
    sizes: tuple[int | None, ...]
    """Value from each of `firsts` on; None: all rows of the rank at once."""

    def __call__(self, step: int) -> int | None:
        """Return the rows per forward pass of a step."""
        return self.sizes[bisect_right(self.firsts, step) - 1]


def micro_batch_sizes(data: DataConfig) -> MicroBatchSizes:
    """Return the rows per forward pass by step."""
    firsts, sizes = [0], [data.micro_batch_size]
    for planned in plan(data):
        if planned.entry.micro_batch_size is not None:
            firsts.append(planned.step)
            sizes.append(planned.entry.micro_batch_size)
    return MicroBatchSizes(tuple(firsts), tuple(sizes))


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
                f"A ramp of data.schedule lasts until step {early.ramp_ends:,}, and weights are set again at "
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
                f"Entry {number} of data.schedule has a weight for an unknown corpus",
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


def num_data_ranks(config: TrainConfig, *, world_size: int, ranks_per_machine: int) -> int:
    """Return over how many ranks the batch is divided, of a job on some machines.

    Raises:
        ConfigError: the layout does not fit.
    """
    numbers = on_machines(config, world_size=world_size, ranks_per_machine=ranks_per_machine).parallel
    return layout_of(numbers, world_size=world_size).num_data


def check_rows(config: TrainConfig, *, world_size: int) -> int:
    """Check every batch size of the recipe against the number of ranks; return the initial rows per pass.

    Raises:
        ConfigError: a batch does not divide over the ranks, or its rows into micro-batches.
    """
    data, parallel = config.data, config.parallel
    size, micro = data.global_batch_size, data.micro_batch_size
    check_divisible(size, world_size=world_size)
    first = micro_rows(size // world_size, micro, parallel=parallel)
    for planned in plan(data):
        size, micro = planned.entry.global_batch_size or size, planned.entry.micro_batch_size or micro
        check_divisible(size, world_size=world_size)
        micro_rows(size // world_size, micro, parallel=parallel)
    return first


def check_batch(config: TrainConfig, size: int, *, step: int, world_size: int) -> None:
    """Check a batch size that is set in mid-run against the ranks and the rows of a pass at a step.

    Raises:
        ConfigError: it does not divide over the ranks, or its rows into micro-batches.
    """
    check_divisible(size, world_size=world_size)
    micro_rows(size // world_size, micro_batch_sizes(config.data)(step), parallel=config.parallel)


def micro_rows(local: int, asked: int | None, *, parallel: ParallelConfig | None = None) -> int:
    """Return the rows of one forward pass on one rank.

    Args:
        local: rows of a step on one rank.
        asked: data.micro_batch_size; None: all rows at once.
        parallel: layout, whose pipeline needs at least one micro-batch per rank.

    Raises:
        ConfigError: it does not divide the rows, or leaves too few micro-batches.
    """
    rows = asked or local
    if local % rows:
        raise ConfigError(
            f"data.micro_batch_size {rows} does not divide a rank's {local} rows",
            fix="Choose a divisor, or leave it out; an entry of data.schedule may set another.",
        )
    if parallel is not None:
        _check_flow(local // rows, parallel)
    return rows


def _check_flow(num_parts: int, parallel: ParallelConfig) -> None:
    ranks = parallel.pipeline
    if num_parts < ranks or (parallel.stages_per_rank > 1 and num_parts % ranks):
        wanted = f"a multiple of {ranks}" if parallel.stages_per_rank > 1 else f"at least {ranks}"
        raise ConfigError(
            f"parallel.pipeline needs {wanted} micro-batches of a rank's rows",
            got=num_parts,
            fix="Adjust data.micro_batch_size or data.global_batch_size; several times as many are best.",
        )
