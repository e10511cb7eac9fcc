"""Draw the next tokens of a step, all rows at once; logits are moved on the rows that ask for it.

The random number of a token is a hash of (seed, answer, position), never the next draw of a generator, so
a request's tokens are the same whatever shares its batch, and after a pre-emption.

What excludes tokens or moves their logits comes first (grammar, `min_tokens`, bias, penalties), then the
filters of `drawing.filters`. What a sampler knows of an answer, its tally and its place in a grammar, is
caught up from the answer's tokens when a row of it is drawn: tokens that were guessed and refused, or an
answer that was pre-empted, need no word to the sampler. It is told only when an answer has ended.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from penstock.core.rng import key_of, mix64
from penstock.engine.drawing.filters import choose, probabilities
from penstock.engine.drawing.logprobs import logprobs_of
from penstock.engine.drawing.penalties import Tallied, Tally, needs_tally, penalise
from penstock.engine.request import TokenLogprob
from penstock.engine.sampling import GREEDY
from penstock.engine.scheduling.sequence import Sequence as Answer
from penstock.engine.scheduling.step_plan import StepPlan

NOT_FINITE = "The model's logits are not finite. Use an earlier checkpoint of the run."
NOTHING_LEFT = "No token is left to draw: all are excluded. Exclude fewer."


class Matcher(Protocol):
    """One answer's place in its grammar."""

    def allowed(self, tokens: Sequence[int], drafts: Sequence[int]) -> np.ndarray | str:
        """Return [vocab] bool, which tokens may follow; or why the grammar cannot be followed on.

        Args:
            tokens: all of the answer so far; those of the last call begin it.
            drafts: guessed tokens after it.
        """
        ...


class Grammars(Protocol):
    """Where matchers come from."""

    def matcher(self, grammar: str) -> Matcher:
        """Return a new matcher at the beginning of a grammar."""
        ...


@dataclass(frozen=True, slots=True)
class Row:
    """What one row of logits follows: an answer, and guessed tokens after it."""

    answer: Answer
    drafts: tuple[int, ...] = ()

    @property
    def position(self) -> int:
        """Where the token to be drawn goes, counted from the prompt's start."""
        return len(self.answer.tokens) + len(self.drafts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """What was drawn, row by row."""

    tokens: list[int]
    logprobs: Mapping[int, TokenLogprob] = field(default_factory=dict)
    """By row, where they were asked for."""
    failed: Mapping[int, str] = field(default_factory=dict)
    """Row -> why nothing can be drawn; its token means nothing and its answer cannot go on."""
    refused: Mapping[int, str] = field(default_factory=dict)
    """The same where it is the request's own doing, by what it excludes, and no fault of the model."""


def rows_of(plan: StepPlan) -> list[Row]:
    """Return what each row of a step's logits follows, in their order."""
    return [
        Row(share.sequence, share.drafts[:n])
        for share in plan.shares
        if share.samples
        for n in range(len(share.drafts) + 1)
    ]


@dataclass(slots=True)
class _Known:
    """What is kept of an answer between its tokens."""

    key: int
    tally: Tally | None
    matcher: Matcher | None
    moves: bool
    """Whether its logits are moved at every token."""
    num_tallied: int = 0


class Sampler:
    """Draws tokens; keeps a tally and a matcher for the answers that need them.

    Args:
        grammars: where the matchers of `Request.grammar` come from; None: no request has one.
    """

    def __init__(self, grammars: Grammars | None = None) -> None:
        self._grammars = grammars
        self._known: dict[int, _Known] = {}

    def draw(self, logits: Float[Tensor, "rows vocab"], rows: Sequence[Row]) -> Draws:
        """Draw one token per row; `logits` stay as they are."""
        moved = [i for i, row in enumerate(rows) if self._of(row.answer).moves or _may_not_end(row)]
        tokens = self._chosen(logits, rows, likeliest=set(moved))
        failed = {i: NOT_FINITE for i, token in enumerate(tokens) if token < 0}
        refused: dict[int, str] = {}
        moved = [i for i in moved if i not in failed]
        if moved:
            chosen = [rows[i] for i in moved]
            part = logits[torch.tensor(moved, device=logits.device)].float()  # a copy
            refused = {moved[i]: reason for i, reason in self._shape(part, chosen).items()}
            for i, token in zip(moved, self._chosen(part, chosen), strict=True):
                tokens[i] = token
        logprobs = _logprobs(logits, rows, tokens, without=failed.keys() | refused.keys())
        return Draws(tokens=tokens, logprobs=logprobs, failed=failed, refused=refused)

    def probabilities(self, logits: Float[Tensor, "vocab"], row: Row) -> Float64[Tensor, "vocab"]:
        """Return with which probability `draw` draws each token of a row."""
        scores = logits[None].float().clone()
        self._shape(scores, [row])
        return probabilities(scores[0], row.answer.request.sampling)

    def forget(self, answer_id: int) -> None:
        """Drop what is kept of an answer that has ended."""
        self._known.pop(answer_id, None)

    @property
    def num_known(self) -> int:
        """Answers of which something is kept."""
        return len(self._known)

    def _chosen(self, logits: Tensor, rows: Sequence[Row], *, likeliest: Container[int] = ()) -> list[int]:
        """Draw by each row's settings; the likeliest where that will do; -1 where nothing can be drawn."""
        settings = [row.answer.request.sampling for row in rows]
        if likeliest:
            settings = [GREEDY if i in likeliest else sampling for i, sampling in enumerate(settings)]
        if all(sampling.temperature == 0 for sampling in settings):
            return choose(logits, None).tolist()
        keys = [self._of(row.answer).key for row in rows]
        numbers = uniforms(keys, [row.position for row in rows])
        return choose(logits, settings, numbers.tolist()).tolist()

    def _of(self, answer: Answer) -> _Known:
        known = self._known.get(answer.id)
        if known is None:
            request, sampling = answer.request, answer.request.sampling
            tallies = needs_tally(sampling)
            known = self._known[answer.id] = _Known(
                key=key_of(sampling.seed, "sample", answer.answer),
                tally=Tally(request.prompt) if tallies else None,
                matcher=None if request.grammar is None else self._matcher(request.grammar),
                moves=tallies or request.grammar is not None or bool(sampling.logit_bias),
            )
        return known

    def _matcher(self, grammar: str) -> Matcher:
        assert self._grammars is not None, "a request with a grammar, and no grammars"
        return self._grammars.matcher(grammar)

    def _shape(self, scores: Float[Tensor, "rows vocab"], rows: Sequence[Row]) -> dict[int, str]:
        """Exclude tokens and move logits in place; return the rows in which no token is left, and why."""
        failed = self._exclude(scores, rows)
        for i, row in enumerate(rows):
            bias = row.answer.request.sampling.logit_bias
            if bias:
                where = torch.tensor(list(bias), device=scores.device)
                scores[i, where] += torch.tensor(list(bias.values()), device=scores.device)
        penalised = [
            (i, tallied, row.answer.request.sampling)
            for i, row in enumerate(rows)
            if (tallied := self._tallied(row)) is not None
        ]
        if penalised:
            penalise(scores, penalised)
        for i in (~scores.amax(-1).isfinite()).nonzero()[:, 0].tolist():
            failed[i] = NOTHING_LEFT
            scores[i] = 0  # anything that can be drawn
        return failed

    def _exclude(self, scores: Float[Tensor, "rows vocab"], rows: Sequence[Row]) -> dict[int, str]:
        """Exclude what a grammar does not allow, and ends before `min_tokens`."""
        failed = {}
        for i, row in enumerate(rows):
            matcher = self._of(row.answer).matcher
            if matcher is not None:
                allowed = matcher.allowed(row.answer.tokens[row.answer.num_prompt :], row.drafts)
                if isinstance(allowed, str):
                    failed[i] = allowed
                    continue
                scores[i].masked_fill_(~torch.from_numpy(allowed).to(scores.device), -torch.inf)
            scores[i, [end for end in _may_not_end(row) if 0 <= end < scores.shape[1]]] = -torch.inf
        return failed

    def _tallied(self, row: Row) -> Tallied | None:
        known = self._of(row.answer)
        if known.tally is None:
            return None
        drawn = row.answer.tokens[row.answer.num_prompt :]
        known.tally.add(drawn[known.num_tallied :])
        known.num_tallied = len(drawn)
        known.tally.add(row.drafts)
        tallied = known.tally.tallied()
        known.tally.add(row.drafts, times=-1)
        return tallied


def uniforms(keys: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """Return a number in [0, 1) for each pair, a multiple of 2**-53.

    >>> bool(uniforms([7], [1]) == uniforms([7], [1])), bool(uniforms([7], [1]) == uniforms([8], [1]))
    (True, False)
    """
    mixed = mix64(np.asarray(positions, dtype=np.uint64) ^ np.asarray(keys, dtype=np.uint64))
    return np.asarray((mixed >> np.uint64(11)) * 2.0**-53)


def _may_not_end(row: Row) -> frozenset[int]:
    """Return the tokens that would end the answer too early."""
    request = row.answer.request
    least = request.sampling.min_tokens
    return request.stop_ids if least and row.position - row.answer.num_prompt < least else frozenset()


def _logprobs(
    logits: Tensor, rows: Sequence[Row], tokens: Sequence[int], *, without: Container[int]
) -> dict[int, TokenLogprob]:
    found: dict[int, TokenLogprob] = {}
    by_number: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        number = row.answer.request.sampling.num_logprobs
        if number is not None and i not in without:
            by_number.setdefault(number, []).append(i)
    for number, asked in by_number.items():
        part = logits[torch.tensor(asked, device=logits.device)]
        found |= zip(asked, logprobs_of(part, [tokens[i] for i in asked], num_top=number), strict=True)
    return found
