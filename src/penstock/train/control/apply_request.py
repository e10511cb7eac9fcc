"""Apply a control request to the loader of a run: the same decisions on every rank; no torch.

Named corpora get the requested shares; the others keep their proportions in the rest. A change that would use
up a capped corpus before the end of the run is refused, as at the start.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.core.errors import ConfigError, PenstockError, UsageError, nearest
from penstock.core.units import plural
from penstock.data import Loader
from penstock.train.control.requests import ControlReply, ControlRequest
from penstock.train.control.resize_islands import check_islands
from penstock.train.data_setup import shortage
from penstock.train.recipe.config import TrainConfig
from penstock.train.recipe.planned_changes import check_batch, plan


def reweighed(weights: Mapping[str, float], shares: Mapping[str, float]) -> dict[str, float]:
    """Return a mixture in which some corpora have the given shares, of one.

    Raises:
        UsageError: unknown corpus, or no corpus is left to take the rest.

    >>> reweighed({"web": 0.5, "code": 0.3, "wiki": 0.2}, {"web": 0.6})
    {'web': 0.6, 'code': 0.24, 'wiki': 0.16}
    """
    for name in shares:
        if name not in weights:
            raise UsageError("The run has no such corpus", got=name, fix=nearest(name, list(weights)))
    rest = 1 - math.fsum(shares.values())
    others = math.fsum(weight for name, weight in weights.items() if name not in shares)
    if rest > 1e-9 and not others:
        raise UsageError(
            f"The shares sum to {1 - rest:.6g}, and no other corpus has a share to take the rest",
            fix="Let them sum to 1, or name another corpus.",
        )
    scale = max(rest, 0.0) / others if others else 0.0
    return {name: round(shares.get(name, weight * scale), 9) for name, weight in weights.items()}


def check_possible(loader: Loader, request: ControlRequest) -> None:
    """Refuse a request that no job continuing from this loader could apply.

    Raises:
        UsageError: it concerns steps already taken, or its shares leave a rest that no corpus can take.
    """
    if request.at_step is not None and request.at_step < loader.step:
        raise UsageError(
            f"{loader.step:,} steps are already done", got=request.at_step, fix="Name a later step."
        )
    if request.weights is not None:
        step = loader.step if request.at_step is None else request.at_step
        reweighed(in_force(loader, step), request.weights)
    if request.skip_steps is not None and request.skip_steps[0] <= loader.step:
        raise UsageError(
            f"{loader.step:,} steps are already done",
            got="{}:{}".format(*request.skip_steps),
            fix="To skip samples that were trained on, stop the run, remove the checkpoints after them, "
            "request the skip, and resume.",
        )


def take_up(
    loader: Loader, recipe: TrainConfig, request: ControlRequest, *, sizes: Sequence[int] = ()
) -> ControlReply:
    """Apply a request to the loader; return the reply, or why it was refused.

    Args:
        sizes: numbers of data-parallel ranks with which the run may go on, besides those of now.
    """
    before = loader.snapshot()
    accepted = ControlReply(
        number=request.number,
        taken_up=True,
        said="",
        step=loader.step,
        holds_from=loader.step,
        reason=request.reason,
        asked_by=request.asked_by,
    )
    try:
        check_possible(loader, request)
        if request.weights is not None:
            found = _weights(loader, recipe, request, accepted)
        elif request.skip_steps is not None:
            found = _skip(loader, recipe, request.skip_steps, accepted)
        elif request.islands is not None:
            check_islands(recipe, request.islands)
            islands = plural(request.islands, "island")
            said = f"continues with {islands} from its next checkpoint, after a full sync"
            found = replace(accepted, said=said, islands=request.islands)
        elif request.batch_size is not None:
            found = _batch_size(loader, recipe, request.batch_size, accepted, sizes=sizes)
        elif request.extend is not None:
            found = _extend(loader, request, accepted)
        else:
            then = ", and the job ends" if request.stop else ""
            said = f"a checkpoint is saved after step {loader.step:,}{then}"
            found = replace(accepted, said=said, checkpoint=request.checkpoint, stop=request.stop)
        apply(loader, found)
        if short := shortage(recipe, loader):
            loader.restore(before)
            raise UsageError(f"With it, {short}, and the run has {recipe.run.steps:,}")
        if recipe.run.epochs is not None and found.batch_size is not None:
            found = replace(found, said=f"{found.said}; {_kept_length(loader, recipe)}")
        return found
    except PenstockError as error:
        return refused(request, str(error), step=loader.step)


def _kept_length(loader: Loader, recipe: TrainConfig) -> str:
    """Say that a run whose length is in epochs keeps its steps, and what epochs they now make."""
    steps, epochs = recipe.run.steps, loader.epochs_by_corpus(recipe.run.steps)
    made = ", ".join(f"{epochs[name]:.3g} of {name}" for name in loader.corpora)
    return f"the run keeps its {plural(steps, 'step')}, which now make these epochs: {made}"


def refused(request: ControlRequest, why: str, *, step: int) -> ControlReply:
    """Return the reply to a request that is not applied."""
    said, who = f"refused: {why}", request.asked_by
    return ControlReply(number=request.number, taken_up=False, said=said, step=step, asked_by=who)


def apply(loader: Loader, found: ControlReply) -> None:
    """Apply a decision to the loader, for the first time or again after a resume."""
    if found.weights is not None:
        step = max(found.holds_from, loader.step)
        loader.set_weights(found.weights, reason=_reason(found), step=step)
    elif found.samples is not None:
        loader.skip(samples=range(*found.samples), reason=_reason(found))
    elif found.extend is not None:
        loader.extend_corpus(found.extend, parts=found.parts, step=max(found.holds_from, loader.step))
    elif found.batch_size is not None:
        loader.set_global_batch_size(found.batch_size, step=max(found.holds_from, loader.step))


def follow(loader: Loader, answers: Sequence[ControlReply]) -> list[ControlReply]:
    """Apply the decisions that are not in the loader's state; return those applied.

    A state includes all skips, extensions and batch sizes decided before it, and the weights up to its step.
    Islands, stops and checkpoints do not concern the loader: they have been done.
    """
    later = [
        found
        for found in answers
        if found.changes_loader and loader.step <= (found.holds_from if found.weights else found.step)
    ]
    for found in later:
        apply(loader, found)
    return later


def in_force(loader: Loader, step: int) -> dict[str, float]:
    """Return the planned mixture of a step."""
    return [weights for first, weights, _ in loader.mixtures if first <= step][-1]


def _weights(
    loader: Loader, recipe: TrainConfig, request: ControlRequest, accepted: ControlReply
) -> ControlReply:
    assert request.weights is not None
    if recipe.data.is_adaptive:
        raise UsageError(
            f"The mixture follows the losses ({recipe.data.adaptive.policy}), which would override it",
            fix="Resume the run with --set data.adaptive.policy=none first.",
        )
    step = loader.step if request.at_step is None else request.at_step
    if step >= recipe.run.steps:
        raise UsageError(
            f"The run ends after {recipe.run.steps:,} steps", got=step, fix="Name an earlier one."
        )
    weights = reweighed(in_force(loader, step), request.weights)
    until = min((first for first, _, _ in loader.mixtures if first > step), default=None)
    shown = ", ".join(f"{name} {weight:.4g}" for name, weight in weights.items())
    ends = "" if until is None else f", until other weights are planned after step {until:,}"
    said = f"from step {step + 1:,} on: {shown}{ends}"
    return replace(accepted, said=said, holds_from=step, until=until, weights=weights)


def _skip(
    loader: Loader, recipe: TrainConfig, steps: tuple[int, int], accepted: ControlReply
) -> ControlReply:
    first, past = steps
    if past > recipe.run.steps + 1:
        raise UsageError(
            f"The run ends after {recipe.run.steps:,} steps", got=f"{first}:{past}", fix="Name earlier ones."
        )
    samples = int(loader.samples_of(first - 1)[0]), int(loader.samples_of(past - 2)[-1]) + 1
    said = f"the samples of steps {first:,} to {past - 1:,} are skipped; later ones move up"
    return replace(accepted, said=said, holds_from=first - 1, samples=samples)


def _extend(loader: Loader, request: ControlRequest, accepted: ControlReply) -> ControlReply:
    name = request.extend
    if name not in loader.corpora:
        raise UsageError("The run has no such corpus", got=name, fix=nearest(str(name), list(loader.corpora)))
    parts, known = request.parts or 0, known_parts(loader, name)
    if parts <= known:
        raise UsageError(
            f"Corpus {name!r} has no parts beyond the {known} that the run uses",
            fix="Add one first: `penstock data append`.",
        )
    said = f"corpus {name!r} has {parts} parts from step {loader.step + 1:,} on, {known} before"
    return replace(accepted, said=said, extend=name, parts=parts)


def _batch_size(
    loader: Loader, recipe: TrainConfig, size: int, accepted: ControlReply, *, sizes: Sequence[int]
) -> ControlReply:
    if loader.step >= recipe.run.steps:
        raise UsageError(
            f"The run ends after {recipe.run.steps:,} steps, so no step is left to change",
            got=loader.step,
            fix=f"Raise {recipe.run.length_key} and start it again.",
        )
    check_batch(recipe, size, step=loader.step, world_size=loader.world_size)
    for num_data in sizes:
        try:
            check_batch(recipe, size, step=loader.step, world_size=num_data)
        except ConfigError as error:
            raise UsageError(
                f"The run could not continue on some of its allowed numbers of nodes: {error}"
            ) from None
    before = loader.global_batch_size
    later = [change.step for change in plan(recipe.data) if change.entry.global_batch_size]
    until = min((step for step in later if step > loader.step), default=None)
    ends = "" if until is None else f", until another is planned after step {until:,}"
    said = f"from step {loader.step + 1:,} on: {plural(size, 'row')} a step, {before:,} before{ends}"
    return replace(accepted, said=said, until=until, batch_size=size)


def known_parts(loader: Loader, name: str) -> int:
    """Return the number of parts of a corpus that a run uses."""
    state = loader.state_dict()
    grown: list[int] = [parts for _, of, parts in state["grown"] if of == name]
    base: int = state["corpora"][name]["parts"]
    return max([base, *grown])


def _reason(found: ControlReply) -> str:
    return f"request {found.number}{': ' if found.reason else ''}{found.reason}"
