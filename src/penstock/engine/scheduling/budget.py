"""Token budget of a step: its size, and its distribution over sequences; numbers only.

A step with a prefill chunk makes every decoding sequence wait for its next token; without one, new requests
wait for their first token. Three cases:

- No sequence is decoding. Then a step takes many prompts at once, up to one second of work, because
  cancellations and better priorities wait for it. A single prompt is computed in chunks, so that the next
  request need not wait for all of it.
- Sequences are decoding. Then a step takes `target_s`, the target inter-token latency, or, if a step without
  prompts takes more than half of that, twice as long as such a step: prompts get at least half of the time,
  and their first tokens come after at most twice the time that they take alone.
- Requests queue up. A chunk is at least a 32nd of the queued tokens, however long that takes: with chunks of
  fixed length, load beyond their share of the time would wait for ever. So steps grow with the load to d / (1
  - share of prompts), where d is a step without prompts, and a request starts within some 32 steps.

The cost of a token is the time of the last steps with prompts divided by their tokens. A step has fixed
costs, so a smaller step costs more per token than estimated; the next estimate includes that, and step sizes
converge to the one that takes the intended time.
"""

from penstock.engine.scheduling.sequence import ScheduledTokens, Sequence


class StepBudget:
    """Remaining tokens of a step, and the positions given to each sequence.

    Args:
        budget: tokens of the step.
        chunk_tokens: tokens of a prefill chunk: a prompt that needs more than this, and more than the step,
            does not get all of the step. Also the limit of positions that are scored: their logits are large.
        share_tokens: limit of a prompt's positions; None: the step's.
    """

    def __init__(self, budget: int, *, chunk_tokens: int, share_tokens: int | None = None) -> None:
        self.left = budget
        self._share_tokens = budget if share_tokens is None else share_tokens
        self._long = max(budget, chunk_tokens)
        self._left_to_score = chunk_tokens
        self.runs: dict[Sequence, int] = {}

    def give(self, sequence: Sequence, num_tokens: int) -> None:
        """Give a sequence `num_tokens` more positions."""
        if num_tokens > 0:
            given = self.runs.get(sequence, 0)
            self.runs[sequence] = given + num_tokens
            self.left -= num_tokens
            self._left_to_score -= _num_scored(sequence, given, given + num_tokens)

    def take_back(self, sequence: Sequence) -> None:
        """Take back all positions of a sequence."""
        given = self.runs.pop(sequence, 0)
        self.left += given
        self._left_to_score += _num_scored(sequence, 0, given)

    def room(self, sequence: Sequence) -> int:
        """Return how many positions a prompt could get."""
        given = self.runs.get(sequence, 0)
        room = min(self.left, self._share_tokens - given)
        if not sequence.is_scored:
            return room
        begin = sequence.num_computed + given
        return min(room, max(0, sequence.scored.start - begin) + self._left_to_score)

    def give_chunk(self, sequence: Sequence, *, is_last: bool) -> None:
        """Give a prompt a chunk: at most half of the remaining tokens if it is long and others wait."""
        wanted = len(sequence.tokens) - sequence.num_computed
        room = self.room(sequence)
        most = room if is_last or wanted <= self._long else (room + 1) // 2
        self.give(sequence, min(wanted, most))

    def top_up(self) -> None:
        """Give the remaining tokens to prompts that need more."""
        for sequence, given in self.runs.items() if self.left else ():
            wanted = len(sequence.tokens) - sequence.num_computed - given
            self.give(sequence, min(wanted, self.room(sequence)))

    def shares(self) -> tuple[ScheduledTokens, ...]:
        """Return the shares, single tokens first."""
        items = sorted(self.runs.items(), key=lambda item: item[1] > 1)
        return tuple(_share(sequence, num_tokens) for sequence, num_tokens in items)


def _num_scored(sequence: Sequence, begin: int, end: int) -> int:
    """Return how many of a sequence's next positions, from `begin` to `end`, are scored."""
    if not sequence.is_scored:
        return 0
    first = max(sequence.num_computed + begin, sequence.scored.start)
    return max(0, sequence.num_computed + end - first)


def _share(sequence: Sequence, num_tokens: int) -> ScheduledTokens:
    num_drafts = max(0, sequence.num_computed + num_tokens - len(sequence.tokens))
    return ScheduledTokens(
        sequence=sequence,
        start=sequence.num_computed,
        num_tokens=num_tokens,
        reaches_end=sequence.num_computed + num_tokens >= len(sequence.tokens),
        drafts=sequence.drafts[:num_drafts],
    )


TOGETHER_S = 1.0
"""Time limit of a step while no sequence is decoding, in seconds."""
_QUEUE_STEPS = 32
_WARM_UP = 3
"""Steps that are not measured: first calls allocate and compile."""
_FORGET = 0.8
"""Decay of a measurement per later one: about the last five count."""


class StepSize:
    """Size of the next step, from the measured times of earlier ones.

    Args:
        target_s: target inter-token latency: time of a step while sequences are decoding.
        chunk_tokens: tokens of a prefill chunk: those of a step before any measurement, and of one that
            computes a single prompt.
        most: maximum tokens of any step.
    """

    def __init__(self, *, target_s: float, chunk_tokens: int, most: int) -> None:
        self._target_s = target_s
        self.chunk_tokens = min(chunk_tokens, most)
        self._most = most
        self._tokens = self._seconds = 0.0  # of steps with prompts
        self._plain_s = 0.0  # of a step without
        self._warm_up = _WARM_UP

    def record_step(self, seconds: float, *, num_tokens: int, with_prompts: bool) -> None:
        """Record the time of a computed step."""
        if self._warm_up:
            self._warm_up -= 1
        elif with_prompts:
            self._tokens = _FORGET * self._tokens + num_tokens
            self._seconds = _FORGET * self._seconds + seconds
        else:
            self._plain_s = seconds if not self._plain_s else _mean(self._plain_s, seconds)

    def tokens(self, *, decoding: int, num_prompts: int, queued: int) -> int:
        """Return the maximum tokens of the next step; with decoding and prompts, some of both fit.

        Args:
            decoding: tokens of decoding sequences, drafts included.
            num_prompts: sequences whose prompt is not complete, waiting ones included.
            queued: tokens of waiting sequences.

        >>> size = StepSize(target_s=0.05, chunk_tokens=512, most=4096)
        >>> for _ in range(1 + _WARM_UP):
        ...     size.record_step(0.1, num_tokens=500, with_prompts=True)
        >>> size.record_step(0.005, num_tokens=16, with_prompts=False)
        >>> size.tokens(decoding=16, num_prompts=1, queued=0)  # 50 ms at 0.2 ms a token
        250
        >>> size.tokens(decoding=200, num_prompts=1, queued=0)  # twice a step without
        400
        """
        if not num_prompts:
            return self._most
        token_s = self._seconds / self._tokens if self._tokens else 0.0
        if not decoding:
            together = TOGETHER_S if num_prompts > 1 else 0.0
            return min(self._most, max(self.chunk_tokens, self._within(together, token_s)))
        plain_s = max(self._plain_s, token_s * decoding)
        size = self._within(max(self._target_s, 2 * plain_s), token_s)
        return min(self._most, max(size, decoding + 1 + queued // _QUEUE_STEPS))

    def _within(self, seconds: float, token_s: float) -> int:
        return round(seconds / token_s) if token_s else self.chunk_tokens


def _mean(known: float, new: float) -> float:
    return _FORGET * known + (1 - _FORGET) * new
