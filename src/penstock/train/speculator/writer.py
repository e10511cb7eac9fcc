"""Text generation for speculator training: many prompts at once, by the engine."""

from collections.abc import Sequence

from penstock.core.errors import ModelError
from penstock.engine.engine import Engine
from penstock.engine.request import Request
from penstock.engine.sampling_params import GREEDY, Sampling
from penstock.train.speculator.batches import Write


def writer(engine: Engine, *, num_tokens: int) -> Write:
    """Return a function that continues prompts by `num_tokens` tokens, end tokens included.

    Args:
        engine: used by this function only.
    """

    def write(prompts: Sequence[Sequence[int]], seeds: Sequence[int] | None) -> list[list[int]]:
        samplings = (
            [GREEDY] * len(prompts)
            if seeds is None
            else [Sampling(temperature=1.0, top_p=1.0, seed=seed) for seed in seeds]
        )
        written: dict[int, list[int]] = {}
        for prompt, sampling in zip(prompts, samplings, strict=True):
            request = Request(prompt=tuple(prompt), max_tokens=num_tokens, sampling=sampling)
            written[engine.add(request)] = []
        while engine.has_work:
            for piece in engine.step():
                if piece.finish == "error":
                    raise ModelError(
                        f"The model failed to generate text: {piece.error}",
                        fix="Try `penstock generate` with this model.",
                    )
                written[piece.request_id].extend(piece.token_ids)
        return list(written.values())

    return write
