"""Apply a control request to the loader of a run: the same decisions on every rank; no torch.

Named corpora get the requested shares; the others keep their proportions in the rest. A change that would use
up a capped corpus before the end of the run is refused, as at the start.
"""

import math
from collections.abc import Mapping, Sequence

from penstock.core.errors import PenstockError, UsageError, nearest
from penstock.core.units import plural
from penstock.data import Loader
from penstock.train.control.requests import ControlReply, ControlRequest
from penstock.train.control.resize_islands import check_islands
from penstock.train.data_setup import shortage
from penstock.train.recipe.config import TrainConfig


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


def take_up(loader: Loader, recipe: TrainConfig, request: ControlRequest) -> ControlReply:
    """Apply a request to the loader; return the reply, or why it was refused."""
    before = loader.snapshot()
    try:
        check_possible(loader, request)
        if request.weights is not None:
            found = _weights(loader, recipe, request)
        elif request.skip_steps is not None:
            found = _skip(loader, recipe, request)
        elif request.islands is not None:
            found = _islands(loader, recipe, request.islands, number=request.number)
        else:
            found = _extend(loader, request)
        apply(loader, found)
        if short := shortage(recipe, loader):
            loader.restore(before)
            raise UsageError(f"With it, {short}, and the run has {recipe.run.steps:,}")
        return found
    except PenstockError as error:
        return ControlReply(number=request.number, taken_up=False, said=f"refused: {error}", step=loader.step)


def apply(loader: Loader, found: ControlReply) -> None:
    """Apply a decision to the loader, for the first time or again after a resume."""
    if found.weights is not None:
        step = max(found.holds_from, loader.step)
        loader.set_weights(found.weights, reason=_reason(found), step=step)
    elif found.samples is not None:
        loader.skip(samples=range(*found.samples), reason=_reason(found))
    elif found.extend is not None:
        loader.extend_corpus(found.extend, parts=found.parts, step=max(found.holds_from, loader.step))


def follow(loader: Loader, answers: Sequence[ControlReply]) -> list[ControlReply]:
    """Apply the decisions that are not in the loader's state; return those applied.

    A state includes all skips and extensions decided before it, and the weights up to its step. The number of
    islands does not concern the loader: the job has restarted with it.
    """
    later = [
        found
        for found in answers
        if found.taken_up
        and found.islands is None
        and loader.step <= (found.holds_from if found.weights else found.step)
    ]
    for found in later:
        apply(loader, found)
    return later


def in_force(loader: Loader, step: int) -> dict[str, float]:
    """Return the planned mixture of a step."""
    return [weights for first, weights, _ in loader.mixtures if first <= step][-1]


def _weights(loader: Loader, recipe: TrainConfig, request: ControlRequest) -> ControlReply:
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
    return ControlReply(
        number=request.number,
        taken_up=True,
        said=f"from step {step + 1:,} on: {shown}{ends}",
        step=loader.step,
        holds_from=step,
        until=until,
        weights=weights,
        reason=request.reason,
    )


def _skip(loader: Loader, recipe: TrainConfig, request: ControlRequest) -> ControlReply:
    assert request.skip_steps is not None
    first, past = request.skip_steps
    if past > recipe.run.steps + 1:
        raise UsageError(f"The run ends after {recipe.run.steps:,} steps", got=f"{first}:{past}")
    samples = int(loader.samples_of(first - 1)[0]), int(loader.samples_of(past - 2)[-1]) + 1
    return ControlReply(
        number=request.number,
        taken_up=True,
        said=f"the samples of steps {first:,} to {past - 1:,} are skipped; later ones move up",
        step=loader.step,
        holds_from=first - 1,
        samples=samples,
        reason=request.reason,
    )


def _extend(loader: Loader, request: ControlRequest) -> ControlReply:
    name = request.extend
    if name not in loader.corpora:
        raise UsageError("The run has no such corpus", got=name, fix=nearest(str(name), list(loader.corpora)))
    parts, known = request.parts or 0, known_parts(loader, name)
    if parts <= known:
        raise UsageError(f"Corpus {name!r} has no parts beyond the {known} that the run uses")
    return ControlReply(
        number=request.number,
        taken_up=True,
        said=f"corpus {name!r} has {parts} parts from step {loader.step + 1:,} on, {known} before",
        step=loader.step,
        holds_from=loader.step,
        extend=name,
        parts=parts,
        reason=request.reason,
    )


def _islands(loader: Loader, recipe: TrainConfig, islands: int, *, number: int) -> ControlReply:
    check_islands(recipe, islands)
    return ControlReply(
        number=number,
        taken_up=True,
        said=f"continues with {plural(islands, 'island')} from its next checkpoint, after a full sync",
        step=loader.step,
        holds_from=loader.step,
        islands=islands,
    )


def known_parts(loader: Loader, name: str) -> int:
    """Return the number of parts of a corpus that a run uses."""
    state = loader.state_dict()
    grown: list[int] = [parts for _, of, parts in state["grown"] if of == name]
    base: int = state["corpora"][name]["parts"]
    return max([base, *grown])


def _reason(found: ControlReply) -> str:
    return f"request {found.number}{': ' if found.reason else ''}{found.reason}"
