"""What a caller asks of the engine, and the pieces of an answer it gets; no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from penstock.engine.sampling import GREEDY, Sampling

Finish = Literal["stop", "length", "cancelled", "deadline", "refused", "error"]
"""Why an answer ended: an end token or text, no more room, the caller, its time, a demand that turned out
impossible to follow, or a fault of ours."""

Task = Literal["generate", "embed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt and how its answers are made; checked by whoever opens it to users, before it is queued."""

    prompt: tuple[int, ...]
    """Token ids, at least one."""
    max_tokens: int
    """Tokens of each answer at most, 0 for "embed"; prompt and answer fit the model's context."""
    sampling: Sampling = GREEDY
    """How tokens are drawn."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end an answer and are no part of it."""
    stop_texts: tuple[str, ...] = ()
    """Texts that end an answer and are no part of it."""
    num_answers: int = 1
    """Answers drawn independently; they share the blocks of the prompt."""
    priority: int = 0
    """Smaller goes first."""
    client: str = ""
    """Among equal priorities clients take turns, by tokens they were served."""
    adapter: str | None = None
    """Name of the adapter added to the base weights; None: the base alone."""
    salt: str = ""
    """What is computed of the prompt is found only by requests with the same."""
    grammar: str | None = None
    """What the answer must follow, as `engine.structured` writes it; None: anything."""
    deadline_s: float | None = None
    """When to give up, in seconds of `core.clock.monotonic`; None: never."""
    num_prompt_logprobs: int | None = None
    """Also say how likely the prompt's tokens were, beside so many likeliest; None: do not."""
    task: Task = "generate"
    """"embed": no token is drawn; the answer is one vector."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """How likely one token was, before temperature and filters."""

    token: int
    logprob: float
    """Natural logarithm, at most 0."""
    rank: int
    """1 for the likeliest token."""
    top: Mapping[int, float]
    """The likeliest tokens and their log-probabilities, as many as were asked for."""


@dataclass(slots=True, kw_only=True)  # not frozen: one is made per token, and freezing doubles its price
class Piece:
    """What one step added to one answer."""

    request_id: int
    answer: int = 0
    """Which of the request's answers, from 0."""
    text: str = ""
    """May be empty while a character or a stop text is incomplete."""
    token_ids: tuple[int, ...] = ()
    """Several after accepted drafts; none in a last piece that only brings what was held back."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per token where they were asked for."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """One per token of the prompt, None for its first; in one piece of an answer, where asked for."""
    embedding: tuple[float, ...] | None = None
    """In the one piece of an "embed" task."""
    finish: Finish | None = None
    """Set in the last piece."""
    error: str | None = None
    """What failed, where `finish` is "refused" or "error"."""
    num_cached: int = 0
    """In the last piece: tokens of the prompt that were found computed."""
