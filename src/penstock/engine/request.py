"""Requests to the engine and the output deltas that it returns; no torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from penstock.engine.sampling_params import GREEDY, Sampling

Finish = Literal["stop", "length", "cancelled", "deadline", "refused", "error"]
"""Finish reason: stop token or text, max_tokens, the caller, its deadline, no token that it allows, or
an engine failure."""

Task = Literal["generate", "embed", "score"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt with its sampling settings; validated by the caller before it is queued."""

    prompt: tuple[int, ...]
    """Token ids, at least one."""
    max_tokens: int
    """Maximum tokens of each answer, 0 for other tasks; prompt and answer fit into the context."""
    sampling: Sampling = GREEDY
    """Sampling settings."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end an answer and are not part of it."""
    stop_texts: tuple[str, ...] = ()
    """Texts that end an answer and are not part of it."""
    shown_ids: frozenset[int] = frozenset()
    """Special tokens whose names appear in the text; other special tokens do not."""
    num_answers: int = 1
    """Answers sampled independently; they share the KV blocks of the prompt."""
    priority: int = 0
    """Smaller values are scheduled first."""
    client: str = ""
    """Client name for fair scheduling: clients of equal priority take turns, by tokens served."""
    adapter: str | None = None
    """Name of the LoRA adapter; None: the base model."""
    salt: str = ""
    """Prefix cache namespace: blocks are shared only between requests with the same salt."""
    grammar: str | None = None
    """Grammar that the answer must follow, written by `engine.sampling.grammar_text`; None: none."""
    deadline_s: float | None = None
    """Time at which the request is cancelled, in seconds of `core.clock.monotonic`; None: never."""
    num_prompt_logprobs: int | None = None
    """Return log-probabilities of the prompt tokens, with this many likeliest alternatives; None: do not."""
    task: Task = "generate"
    """"embed": no token is sampled; the output is one vector. "score": no token is sampled; the output is the
    log-probability of each of `continuations`."""
    continuations: tuple[tuple[int, ...], ...] = ()
    """For "score": token ids whose log-probability is wanted. The prompt ends with all but the last token of
    each; without any, the prompt's keys and values are computed for later requests with the same prefix.

    Logits are computed where a continuation is predicted and nowhere else, and the positions before come from
    the prefix cache. So texts with a common context, such as the choices of one question, cost it once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Log-probability of one token, before temperature and filters."""

    token: int
    logprob: float
    """Natural logarithm, at most 0."""
    rank: int
    """1 for the likeliest token."""
    top: Mapping[int, float]
    """The likeliest tokens and their log-probabilities, as many as requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuationScore:
    """How likely a model finds a continuation of its prompt."""

    logprob: float
    """Sum of the natural logarithms of its tokens' probabilities, before temperature and filters."""
    is_greedy: bool
    """True if each of its tokens is the likeliest one: greedy decoding would write it."""


@dataclass(slots=True, kw_only=True)  # not frozen: one per token, and freezing doubles its cost
class OutputDelta:
    """Output that one step added to one answer."""

    request_id: int
    answer: int = 0
    """Index of the answer within its request, from 0."""
    text: str = ""
    """New text; empty while a character or a stop text may be incomplete."""
    token_ids: tuple[int, ...] = ()
    """New tokens; several after accepted drafts, none if only held-back text is output."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per token, if requested."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """One per prompt token, None for the first; in one delta of each answer, if requested."""
    embedding: tuple[float, ...] | None = None
    """The vector, in the only delta of an "embed" task."""
    scores: tuple[ContinuationScore, ...] | None = None
    """One per continuation, in the only delta of a "score" task."""
    finish: Finish | None = None
    """Finish reason, set in the last delta."""
    stop_reason: int | str | None = None
    """In the last delta: the stop token or the stop text that ended the answer."""
    error: str | None = None
    """Error message if `finish` is "refused" or "error"."""
    num_cached: int = 0
    """In the last delta: prompt tokens taken from the prefix cache."""


OnDelta = Callable[[OutputDelta], None]
"""Called from the engine's thread; must not block."""
