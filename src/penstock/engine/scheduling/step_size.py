"""How many tokens a step may have while prompts wait, from what steps took lately; numbers only.

A step with a piece of a prompt keeps every answer in the making waiting for its next token; without any, who
asked waits for a first one. Who waits decides:

- Nobody is between two tokens. Then first tokens that come together cost nobody anything, and a step takes
  many prompts, as much as a second: cancels and better priorities wait for it. One prompt alone is computed
  in pieces, so that whoever comes next does not wait for all of it.
- Answers are in the making. Then a step lasts `between_s`, or, where one without prompts lasts more than
  half of that, twice as long as it: prompts have at least half of the time, and their first tokens come at
  the latest after twice what they take alone.
- Requests queue up. A piece is at least a 32nd of their tokens, however long that takes: with a piece of
  fixed length, whatever is offered beyond its share of the time would wait for ever. So steps are as much
  longer as the load asks for, d / (1 - share of prompts) where d is a step without, and a request is begun
  within some 32 steps.

What a token costs is what the last steps with prompts took, divided by their tokens. A step has costs that
no token adds to, so a smaller step than those is dearer by the token than it was thought; the next one
knows, and the sizes close in on the one that lasts as long as it should.
"""

TOGETHER_S = 1.0
"""What a step may last while nobody is between two tokens."""
_QUEUE_STEPS = 32
_WARM_UP = 3
"""Steps that are not measured: first calls allocate, and compile."""
_FORGET = 0.8
"""Weight of a measured step after one more of its kind: the last five count."""


class StepSize:
    """Told what steps took, it says how large the next may be.

    Args:
        between_s: what a step may last while answers are in the making.
        piece: tokens of a step before anything is known, and of one that computes a single prompt.
        most: tokens of any step.
    """

    def __init__(self, *, between_s: float, piece: int, most: int) -> None:
        self._between_s = between_s
        self.piece = min(piece, most)
        self._most = most
        self._tokens = self._seconds = 0.0  # of steps with prompts
        self._plain_s = 0.0  # of a step without
        self._warm_up = _WARM_UP

    def step_took(self, seconds: float, *, num_tokens: int, with_prompts: bool) -> None:
        """Count a computed step."""
        if self._warm_up:
            self._warm_up -= 1
        elif with_prompts:
            self._tokens = _FORGET * self._tokens + num_tokens
            self._seconds = _FORGET * self._seconds + seconds
        else:
            self._plain_s = seconds if not self._plain_s else _mean(self._plain_s, seconds)

    def tokens(self, *, decoding: int, num_prompts: int, queued: int) -> int:
        """Return how many tokens the next step may have; with answers and prompts, some of both.

        Args:
            decoding: tokens of answers in the making, drafts included.
            num_prompts: sequences with a prompt to compute, begun or not.
            queued: tokens of those not begun.

        >>> size = StepSize(between_s=0.05, piece=512, most=4096)
        >>> for _ in range(1 + _WARM_UP):
        ...     size.step_took(0.1, num_tokens=500, with_prompts=True)
        >>> size.step_took(0.005, num_tokens=16, with_prompts=False)
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
            return min(self._most, max(self.piece, self._within(together, token_s)))
        plain_s = max(self._plain_s, token_s * decoding)
        size = self._within(max(self._between_s, 2 * plain_s), token_s)
        return min(self._most, max(size, decoding + 1 + queued // _QUEUE_STEPS))

    def _within(self, seconds: float, token_s: float) -> int:
        return round(seconds / token_s) if token_s else self.piece


def _mean(known: float, new: float) -> float:
    return _FORGET * known + (1 - _FORGET) * new
