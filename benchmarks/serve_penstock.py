"""Penstock's engine for the serving benchmark."""

from penstock.engine.assemble import build_engine
from penstock.engine.config import EngineConfig
from penstock.engine.request import Request


class Penstock:
    """Its defaults, but for prefixes, which no engine keeps here: each round has the same prompts."""

    weights = "stored"
    cache = "auto"

    def __init__(self, folder, _dtype):
        config = EngineConfig(
            prefix_caching=False,
            max_context=2048,
            cache_gib=2.0,
            weights=self.weights,
            cache=self.cache,
            device="cpu",
        )
        self._engine = build_engine(folder, config)
        self._index = {}

    @property
    def has_work(self):
        """Whether any request has not ended."""
        return self._engine.has_work

    def add(self, index, prompt, max_tokens):
        """Queue a request."""
        request = Request(prompt=tuple(prompt), max_tokens=max_tokens)
        self._index[self._engine.add(request)] = index

    def step(self):
        """Return the indices that got a token."""
        return [self._index[piece.request_id] for piece in self._engine.step() for _ in piece.token_ids]

    @property
    def scheduler_share(self):
        """Time in the scheduler, the batch's arrays included, as a share of all steps so far."""
        counts = self._engine.stats().counts
        parts = (counts.schedule_s, counts.run_s, counts.draw_s, counts.answer_s)
        return counts.schedule_s / max(sum(parts), 1e-9)

    def close(self):
        """End it."""
        self._engine.close()


class Int8(Penstock):
    """With 8-bit weights."""

    weights = "int8"


class Int8Cache(Int8):
    """With 8-bit weights, keys and values."""

    cache = "int8"
