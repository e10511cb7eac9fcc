"""Sampler: samples the next tokens of all rows of a step, with log-probabilities.

The random number of a token is a hash of (seed, answer, position), not the next value of a generator. So a
request's tokens do not depend on the batch or on preemption.

Constraints and changes of logits come first (grammar, `min_tokens`, `allowed_token_ids`, bad words, bias,
penalties), then the filters of `sampling.filters`. The sampler's state of an answer (token counts, grammar
matcher) is brought up to date from the answer's tokens when a row is sampled, so rejected drafts and
preemption need no call. Only the end of an answer does (`forget`).
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from penstock.core.rng import key_of, mix64
from penstock.engine.request import Request, TokenLogprob
from penstock.engine.sampling.filters import probabilities, sample, settings_tensor
from penstock.engine.sampling.penalties import Tallied, TokenCounts, needs_tally, penalise
from penstock.engine.sampling_params import GREEDY
from penstock.engine.scheduling.sequence import Sequence as Answer
from penstock.engine.scheduling.sequence import StepPlan

NOT_FINITE = "The model's logits are not finite. Use an earlier checkpoint of the run."
NOTHING_LEFT = "No token can be sampled: the request excludes all of them. Exclude fewer."


class Matcher(Protocol):
    """Grammar state of one answer."""

    def allowed(self, tokens: Sequence[int], drafts: Sequence[int]) -> np.ndarray | str:
        """Return the allowed next tokens, [vocab] bool, or why the grammar cannot be continued.

        Logits may have more columns, of tokens that the request does not have.

        Args:
            tokens: all tokens of the answer so far; those of the last call are a prefix.
            drafts: draft tokens after it.
        """
        ...


class MatcherSource(Protocol):
    """Creates matchers."""

    def matcher(self, request: Request) -> Matcher:
        """Return a new matcher at the start of a request's grammar."""
        ...


@dataclass(frozen=True, slots=True)
class Row:
    """Prefix of one row of logits: an answer, and draft tokens after it."""

    answer: Answer
    drafts: tuple[int, ...] = ()

    @property
    def position(self) -> int:
        """Position of the sampled token, counted from the start of the prompt."""
        return len(self.answer.tokens) + len(self.drafts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """Settings and random numbers of a step's samples, known before its logits."""

    rows: Sequence[Row] = ()
    moved: frozenset[int] = frozenset()
    """Rows whose logits are changed before they are sampled."""
    settings: Float64[Tensor, "rows 5"] | None = None
    """From `filters.settings_tensor`, greedy for `moved` rows; None: all rows are greedy."""
    is_plain: bool = False
    """True if the step gives its sampled tokens alone, and the host changes none of them: a device that
    samples can keep them, and the host can read them later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerOutput:
    """Sampled tokens by row."""

    tokens: list[int]
    logprobs: Mapping[int, TokenLogprob] = field(default_factory=dict)
    """By row, if requested."""
    failed: Mapping[int, str] = field(default_factory=dict)
    """Row -> error of the model; its token is undefined and its answer cannot continue."""
    refused: Mapping[int, str] = field(default_factory=dict)
    """Row -> error caused by the request, which excludes too many tokens."""


def rows_of(plan: StepPlan) -> list[Row]:
    """Return the prefix of each row of a step's logits, in order."""
    return [
        Row(share.sequence, share.drafts[:n])
        for share in plan.shares
        if share.samples
        for n in range(len(share.drafts) + 1)
    ]


@dataclass(slots=True)
class _Known:
    """Sampler state of one answer."""

    key: int
    tally: TokenCounts | None
    matcher: Matcher | None
    moves: bool
    """True if its logits are changed at every token."""
    allowed: Tensor | None
    """Allowed tokens, [n] int64; None: all."""
    num_tallied: int = 0


class Sampler:
    """Samples tokens; keeps token counts and a grammar matcher for answers that need them.

    Args:
        grammars: creates the matchers of `Request.grammar`; None: no request has one.
    """

    def __init__(self, grammars: MatcherSource | None = None) -> None:
        self._grammars = grammars
        self._known: dict[int, _Known] = {}

    def prepare(self, rows: Sequence[Row]) -> Draws:
        """Return what `draw` will sample rows by."""
        moved = frozenset(i for i, row in enumerate(rows) if self._of(row.answer).moves or _may_not_end(row))
        has_logprobs = any(row.answer.request.sampling.num_logprobs is not None for row in rows)
        settings = self._settings(rows, likeliest=moved)
        return Draws(rows=rows, moved=moved, settings=settings, is_plain=not (moved or has_logprobs))

    def draw(
        self,
        logits: Float[Tensor, "rows vocab"],
        draws: Draws,
        drawn: Callable[[], list[int]] | None = None,
    ) -> SamplerOutput:
        """Sample one token per row; `logits` are not changed.

        Args:
            drawn: returns the tokens that `filters.draw` samples from `logits` by `draws.settings`, where the
                model's step has sampled them; None: they are sampled here.
        """
        rows = draws.rows
        tokens = drawn() if drawn is not None else sample(logits, draws.settings).tolist()
        failed = {i: NOT_FINITE for i, token in enumerate(tokens) if token < 0}
        refused: dict[int, str] = {}
        moved = sorted(i for i in draws.moved if i not in failed)
        if moved:
            chosen = [rows[i] for i in moved]
            part = logits[torch.tensor(moved, device=logits.device)].float()  # a copy
            refused = {moved[i]: reason for i, reason in self._shape(part, chosen).items()}
            for i, token in zip(moved, sample(part, self._settings(chosen)).tolist(), strict=True):
                tokens[i] = token
        logprobs = _logprobs(logits, rows, tokens, without=failed.keys() | refused.keys())
        return SamplerOutput(tokens=tokens, logprobs=logprobs, failed=failed, refused=refused)

    def probabilities(self, logits: Float[Tensor, "vocab"], row: Row) -> Float64[Tensor, "vocab"]:
        """Return the probabilities with which `draw` samples the token of a row."""
        scores = logits[None].float().clone()
        self._shape(scores, [row])
        return probabilities(scores[0], row.answer.request.sampling)

    def forget(self, answer_id: int) -> None:
        """Drop the state of a finished answer."""
        self._known.pop(answer_id, None)

    @property
    def num_known(self) -> int:
        """Number of answers with state."""
        return len(self._known)

    def _settings(
        self, rows: Sequence[Row], *, likeliest: Container[int] = ()
    ) -> Float64[Tensor, "rows 5"] | None:
        """Return each row's settings, greedy for rows in `likeliest`; None: all are greedy."""
        settings = [row.answer.request.sampling for row in rows]
        if likeliest:
            settings = [GREEDY if i in likeliest else sampling for i, sampling in enumerate(settings)]
        if all(sampling.temperature == 0 for sampling in settings):
            return None
        keys = [self._of(row.answer).key for row in rows]
        numbers = uniforms(keys, [row.position for row in rows])
        return settings_tensor(settings, numbers.tolist())

    def _of(self, answer: Answer) -> _Known:
        known = self._known.get(answer.id)
        if known is None:
            request, sampling = answer.request, answer.request.sampling
            tallies = needs_tally(sampling)
            known = self._known[answer.id] = _Known(
                key=key_of(sampling.seed, "sample", answer.answer),
                tally=TokenCounts(request.prompt) if tallies else None,
                matcher=None if request.grammar is None else self._matcher(request),
                moves=tallies
                or request.grammar is not None
                or sampling.allowed_token_ids is not None
                or bool(sampling.logit_bias or sampling.bad_words_ids),
                allowed=None
                if sampling.allowed_token_ids is None
                else torch.tensor(sampling.allowed_token_ids, dtype=torch.int64),
            )
        return known

    def _matcher(self, request: Request) -> Matcher:
        assert self._grammars is not None, "a request with a grammar, and no grammars"
        return self._grammars.matcher(request)

    def _shape(self, scores: Float[Tensor, "rows vocab"], rows: Sequence[Row]) -> dict[int, str]:
        """Exclude tokens and change logits in place; return the rows with no token left -> error."""
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
            scores[i] = 0  # finite, so that sampling does not fail
        return failed

    def _exclude(self, scores: Float[Tensor, "rows vocab"], rows: Sequence[Row]) -> dict[int, str]:
        """Exclude tokens that the grammar or the request does not allow, and stop tokens before
        `min_tokens`."""
        failed = {}
        for i, row in enumerate(rows):
            matcher = self._of(row.answer).matcher
            if matcher is not None:
                allowed = matcher.allowed(row.answer.tokens[row.answer.num_prompt :], row.drafts)
                if isinstance(allowed, str):
                    failed[i] = allowed
                    continue
                own = scores[i, : len(allowed)]
                own.masked_fill_(~torch.from_numpy(allowed).to(scores.device), -torch.inf)
            never = [*(end for end in _may_not_end(row) if 0 <= end < scores.shape[1]), *_bad_tokens(row)]
            scores[i, never] = -torch.inf
            only = self._of(row.answer).allowed
            if only is not None:
                only = only.to(scores.device)
                kept = scores[i, only]
                scores[i] = -torch.inf
                scores[i, only] = kept
        return failed

    def _tallied(self, row: Row) -> Tallied | None:
        known = self._of(row.answer)
        if known.tally is None:
            return None
        sampled = row.answer.tokens[row.answer.num_prompt :]
        known.tally.add(sampled[known.num_tallied :])
        known.num_tallied = len(sampled)
        known.tally.add(row.drafts)
        tallied = known.tally.tallied()
        known.tally.add(row.drafts, times=-1)
        return tallied


def uniforms(keys: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """Return a random number in [0, 1) for each (key, position), a multiple of 2**-53.

    >>> bool(uniforms([7], [1]) == uniforms([7], [1])), bool(uniforms([7], [1]) == uniforms([8], [1]))
    (True, False)
    """
    mixed = mix64(np.asarray(positions, dtype=np.uint64) ^ np.asarray(keys, dtype=np.uint64))
    return np.asarray((mixed >> np.uint64(11)) * 2.0**-53)


def _may_not_end(row: Row) -> frozenset[int]:
    """Return the stop tokens while the answer is shorter than `min_tokens`."""
    request = row.answer.request
    least = request.sampling.min_tokens
    return request.stop_ids if least and row.position - row.answer.num_prompt < least else frozenset()


def _bad_tokens(row: Row) -> list[int]:
    """Return the tokens that would complete one of `bad_words_ids`."""
    sequences = row.answer.request.sampling.bad_words_ids
    if not sequences:
        return []
    begin = max(row.answer.num_prompt, len(row.answer.tokens) - max(map(len, sequences)))
    before = (*row.answer.tokens[begin:], *row.drafts)
    return [last for *first, last in sequences if tuple(first) == before[len(before) - len(first) :]]


def _logprobs(
    logits: Tensor, rows: Sequence[Row], tokens: Sequence[int], *, without: Container[int]
) -> dict[int, TokenLogprob]:
    found: dict[int, TokenLogprob] = {}
    alike: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for i, row in enumerate(rows):
        sampling = row.answer.request.sampling
        if sampling.num_logprobs is not None and i not in without:
            alike.setdefault((sampling.num_logprobs, sampling.logprob_token_ids), []).append(i)
    for (number, others), asked in alike.items():
        part = logits[torch.tensor(asked, device=logits.device)]
        sampled = [tokens[i] for i in asked]
        found |= zip(asked, logprobs_of(part, sampled, num_top=number, others=others), strict=True)
    return found


def logprobs_of(
    logits: Float[Tensor, "rows vocab"], tokens: Sequence[int], *, num_top: int, others: Sequence[int] = ()
) -> list[TokenLogprob]:
    """Return the log-probability of one token per row, and of the `num_top` likeliest.

    Args:
        others: token ids to report instead of the likeliest.

    Computed in float32 for any dtype of logits. Equal logits share a rank; among the likeliest their order is
    undefined.
    """
    logits = logits.float()
    sampled = torch.tensor(tokens, dtype=torch.int64, device=logits.device)[:, None]
    total = logits.logsumexp(-1, keepdim=True)
    own = logits.gather(1, sampled)
    ranks = (logits > own).sum(-1) + 1
    if others:
        values, ids = logits[:, list(others)], [list(others)] * len(logits)
    else:
        best = logits.topk(min(num_top, logits.shape[1]))
        values, ids = best.values, best.indices.tolist()
    top = (values - total).clamp(max=0).tolist()
    return [
        TokenLogprob(token=token, logprob=logprob, rank=rank, top=dict(zip(named, likely, strict=True)))
        for token, (logprob,), rank, named, likely in zip(
            tokens, (own - total).clamp(max=0).tolist(), ranks.tolist(), ids, top, strict=True
        )
    ]
