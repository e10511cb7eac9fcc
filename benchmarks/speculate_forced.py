"""What do drafts give at a real size, as a function of how often they stand? A part of `speculate.py`.

Random weights answer nothing that could be guessed, so what is drawn is forced: a step is computed, drawn and
verified as always, then its tokens are replaced by those of an answer that is told before. A source of drafts
that knows the answer gets each token right with probability p. So the seconds are real, and how often drafts
stand is chosen. n-grams guess an answer that repeats its prompt, and one in which nothing comes again.
"""

import random
from itertools import pairwise
from pathlib import Path

from measuring import interleaved, median
from serve_models import write_folder

from penstock.engine.assemble import build_engine
from penstock.engine.config import EngineConfig
from penstock.engine.request import Request
from penstock.engine.sampling_params import Sampling
from penstock.engine.speculation.draft_length import DraftLength
from penstock.engine.speculation.ngram import NgramDrafter
from penstock.engine.speculation.speculation import Speculation, accepted_tokens

CHANCES = (0.0, 0.5, 0.7, 0.9, 1.0)
PACES = {"2 drafts": (2, False), "4 drafts": (4, False), "up to 4": (4, True)}
PROMPT = 64


class Told:
    """Draws like the token sampler it wraps, and gives the answers that it was told."""

    def __init__(self, token_sampler):
        self._token_sampler = token_sampler
        self.answers = []  # by seed of the request

    def prepare(self, plan):
        """Prepare as the token sampler does."""
        return self._token_sampler.prepare(plan)

    def draw(self, plan, output, draws):
        """Draw, and replace what was drawn."""
        found = self._token_sampler.draw(plan, output, draws)
        for share, drawn in zip(plan.shares, found, strict=True):
            if share.samples:
                drawn.tokens = tuple(
                    accepted_tokens(share.drafts, self.of(share.sequence, 1 + len(share.drafts)))
                )
        return found

    def of(self, sequence, number):
        """Return the next tokens of a sequence's answer; 0 beyond its end."""
        start = sequence.num_sampled
        found = self.answers[sequence.request.sampling.seed][start : start + number]
        return found + [0] * (number - len(found))

    def forget(self, sequence):
        """Drop what the token sampler keeps."""
        self._token_sampler.forget(sequence)


class Knowing:
    """Guesses the answer that is told, each token right with one probability."""

    def __init__(self, told, chance, vocabulary):
        self._told, self._chance, self._vocabulary = told, chance, vocabulary
        self._random = random.Random(0)

    def propose(self, done, wanted):
        """Return guesses."""
        return [
            tuple(map(self._maybe, self._told.of(share.sequence, number))) if number else ()
            for share, number in zip(done.plan.shares, wanted, strict=True)
        ]

    def _maybe(self, token):
        return token if self._random.random() < self._chance else (token + 1) % self._vocabulary

    def forget(self, sequence):
        """Nothing is kept."""


class Bench:
    """An engine over random weights, for so many requests at once."""

    def __init__(self, folder, *, number, tokens, temperature):
        config = EngineConfig(max_context=PROMPT + tokens, max_sequences=number, prefix_caching=False)
        self.engine = build_engine(folder, config)
        self.told = self.engine._token_sampler = Told(self.engine._token_sampler)
        self.vocabulary = self.engine.capacity.vocab_size
        text = random.Random(1)
        ids = range(3, self.vocabulary)
        self.asked = [
            Request(
                prompt=tuple(text.sample(ids, PROMPT)),
                max_tokens=tokens,
                sampling=Sampling(temperature=temperature, seed=seed),
            )
            for seed in range(number)
        ]
        self.fresh = [text.sample(ids, min(tokens, len(ids))) for _ in self.asked]
        self.copied = [list(one.prompt * (1 + tokens // PROMPT))[:tokens] for one in self.asked]

    def settings(self):
        """Return name -> (answers, what drafts)."""
        found = {"off": (self.fresh, None)}
        for name, (most, adapt) in PACES.items():
            for chance in CHANCES:
                drafting = Speculation(
                    Knowing(self.told, chance, self.vocabulary),
                    DraftLength(most=most, adapt=adapt),
                )
                found[f"{name}, p={chance}"] = (self.fresh, drafting)
        for name, answers in (("nothing repeats", self.fresh), ("the prompt again", self.copied)):
            found[f"ngram, {name}"] = (answers, Speculation(NgramDrafter(), DraftLength(most=4)))
        return found

    def work(self, answers, drafting):
        """Answer all requests; return the number of tokens."""
        self.told.answers, self.engine._drafting = answers, drafting
        for request in self.asked:
            self.engine.add(request)
        tokens = 0
        while self.engine.has_work:
            tokens += sum(len(piece.token_ids) for piece in self.engine.step())
        return tokens


def forced_rows(folder, model, *, requests, tokens, rounds):
    """Yield what was measured: rows of settings, and per number of drafts where it begins to pay."""
    write_folder(folder := Path(folder) / model, model, "bfloat16")
    for number in requests:
        for temperature in (0.0, 0.8):
            bench = Bench(folder, number=number, tokens=tokens, temperature=temperature)
            rows = {"requests": number, "temperature": temperature, **measured(bench, rounds=rounds)}
            bench.engine.close()
            print(rows, flush=True)
            yield rows


def measured(bench, *, rounds):
    """Return, per setting, how many times faster than without drafts; and where drafts break even."""
    work = {name: lambda one=one: bench.work(*one) for name, one in bench.settings().items()}
    rates = interleaved(work, rounds=rounds)
    per_s = {name: median(rate["per_s"]) for name, rate in rates.items()}
    times = {name: round(rate / per_s["off"], 2) for name, rate in per_s.items()}
    curves = {name: [times[f"{name}, p={chance}"] for chance in CHANCES] for name in PACES}
    return {
        "tokens_per_s": round(per_s["off"], 1),
        "times_off": times,
        "breaks_even_at_p": {name: break_even(curve) for name, curve in curves.items()},
    }


def break_even(times):
    """Return the chance, between those measured, from which drafts pay; None: none of them.

    >>> break_even([0.9, 1.1, 1.4, 2.0, 2.5])
    0.25
    """
    points = list(zip(CHANCES, times, strict=True))
    if times[0] >= 1:
        return 0.0
    for (low, slow), (high, fast) in pairwise(points):
        if slow < 1 <= fast:
            return round(low + (high - low) * (1 - slow) / (fast - slow), 2)
    return None
