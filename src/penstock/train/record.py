"""What a run writes down: a record a step, and the samples each rank trained on."""

from collections.abc import Callable
from dataclasses import asdict

import torch

from penstock.data import Loader
from penstock.obs.meter import Rates, peak_memory_bytes
from penstock.obs.sinks import Record
from penstock.obs.sinks.jsonl import JsonLines
from penstock.train.checksums import checksums
from penstock.train.state import Batch, TrainState
from penstock.train.step import StepResult


def step_record(state: TrainState, result: StepResult, rates: Rates, *, learning_rate: float) -> Record:
    """Return the record of the step just taken; the names are those of obs/names.py."""
    memory = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else peak_memory_bytes()
    return {
        "step": state.step,
        "tokens": state.loader.tokens_before(state.step),
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "learning_rate": learning_rate,
        "step_s": rates.step_s,
        "tokens_per_s": rates.tokens_per_s,
        "mfu": rates.mfu,
        "hfu": rates.hfu,
        **{f"{phase}_share": share for phase, share in rates.shares.items()},
        "memory_bytes": memory,
    }


class MixtureLog:
    """Says of each step which mixture was asked for and what was served, and where it changes.

    Args:
        loader: at the step the run goes on from.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._weights: dict[str, float] = {}
        self._since, self._before = 0, dict.fromkeys(loader.corpora, 0)
        self._is_new = False
        if loader.step:  # the mixture goes on, it does not begin here
            self._since, held, _ = [held for held in loader.mixtures if held[0] < loader.step][-1]
            self._weights = {name: held.get(name, 0.0) for name in loader.corpora}
            self._before = loader.samples_by_corpus(self._since)

    def begin_step(self) -> None:
        """Look at the mixture of the next step."""
        weights = self._loader.weights
        self._is_new = weights != self._weights
        if self._is_new:
            self._weights, self._since = weights, self._loader.step
            self._before = self._loader.samples_by_corpus(self._since)

    def record(self) -> Record:
        """Return what belongs into the record of the step just taken."""
        loader = self._loader
        now = loader.samples_by_corpus(loader.step)
        served = {name: count - self._before.get(name, 0) for name, count in now.items()}
        total = max(sum(served.values()), 1)
        return {
            "corpus_tokens": loader.tokens_by_corpus(loader.step),
            "corpus_padding": loader.padding_by_corpus(loader.step),
            "corpus_epochs": {n: round(e, 6) for n, e in loader.epochs_by_corpus(loader.step).items()},
            "corpus_weights": {name: round(weight, 6) for name, weight in self._weights.items()},
            "corpus_shares": {name: round(count / total, 6) for name, count in served.items()},
        }

    def events(self) -> list[Record]:
        """Return an event where the step just taken is the first of another mixture or sequence length."""
        return [*self._changes_of_length(), *self._changes_of_mixture()]

    def _changes_of_length(self) -> list[Record]:
        first = self._loader.step - 1
        if self._loader.sequence_length_at(first) == self._loader.sequence_length_at(max(0, first - 1)):
            return []
        change = [change for change in self._loader.length_changes() if change.step == first][-1]
        return [
            {
                "event": "sequence_length",
                "step": first + 1,
                "tokens": self._loader.tokens_before(first),
                "before": change.before,
                "after": change.after,
                "recut": {name: asdict(recut) for name, recut in change.corpora.items()},
            }
        ]

    def _changes_of_mixture(self) -> list[Record]:
        if not (self._is_new and self._since):
            return []
        reason = [why for step, _, why in self._loader.mixtures if step <= self._since][-1]
        return [
            {
                "event": "mixture",
                "step": self._since + 1,
                "tokens": self._loader.tokens_before(self._since),
                "weights": {name: round(weight, 6) for name, weight in self._weights.items()},
                "reason": reason,
            }
        ]


def sample_log(sink: JsonLines | None) -> Callable[[Batch, int], None]:
    """Return what logs each batch's sample ids and row checksums; nothing where there is no sink."""

    def on_batch(batch: Batch, step: int) -> None:
        if sink is not None:
            ids = batch["sample_ids"].tolist()
            sink({"step": step, "sample_ids": ids, "crc32": checksums(batch["input_ids"].cpu().numpy())})

    return on_batch
