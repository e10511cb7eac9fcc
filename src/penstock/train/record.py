"""Records of a run: metrics of each step, mixture changes, and sample logs of each rank."""

from collections.abc import Callable
from dataclasses import asdict

from penstock.data import Loader
from penstock.data.types import checksums
from penstock.devices import accelerator
from penstock.obs.meter import Rates, peak_memory_bytes
from penstock.obs.sinks import Record
from penstock.obs.sinks.jsonl import JsonLines
from penstock.train.objective import DeviceBatch
from penstock.train.state import TrainState
from penstock.train.step import StepResult


def step_record(state: TrainState, result: StepResult, rates: Rates, *, learning_rate: float) -> Record:
    """Return the record of the last step; metric names are those of obs/metric_names.py."""
    device = accelerator.choose()
    is_away = accelerator.is_accelerator(device)
    memory = accelerator.peak_bytes(device) if is_away else peak_memory_bytes()
    return {
        "step": state.step,
        "tokens": state.loader.tokens_before(state.step),
        "loss": result.loss,
        "labels": round(result.count),
        "grad_norm": result.grad_norm,
        "learning_rate": learning_rate,
        "step_s": rates.step_s,
        "tokens_per_s": rates.tokens_per_s,
        **({} if rates.mfu is None else {"mfu": rates.mfu, "hfu": rates.hfu}),
        **{f"{phase}_share": share for phase, share in rates.shares.items()},
        "memory_bytes": memory,
        **({} if state.device_hours is None else state.device_hours.record()),
        **result.metrics,
    }


class MixtureLog:
    """Records the requested and the served mixture of each step, and its changes.

    Args:
        loader: at the step from which the run continues.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._weights: dict[str, float] = {}
        self._since, self._before = 0, dict.fromkeys(loader.corpora, 0)
        self._is_new = False
        if loader.step:  # resumed: the mixture began earlier
            self._since, held, _ = [held for held in loader.mixtures if held[0] < loader.step][-1]
            self._weights = {name: held.get(name, 0.0) for name in loader.corpora}
            self._before = loader.samples_by_corpus(self._since)

    def begin_step(self) -> None:
        """Read the mixture of the next step."""
        weights = self._loader.weights
        self._is_new = weights != self._weights
        if self._is_new:
            self._weights, self._since = weights, self._loader.step
            self._before = self._loader.samples_by_corpus(self._since)

    def record(self) -> Record:
        """Return the mixture's part of the last step's record."""
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
        """Return an event if the last step was the first with a new mixture or sequence length."""
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


def sample_log(sink: JsonLines | None) -> Callable[[DeviceBatch, int], None]:
    """Return a callback that logs each batch's sample ids and row checksums; does nothing without a sink."""

    def on_batch(batch: DeviceBatch, step: int) -> None:
        if sink is not None:
            ids = batch["sample_ids"].tolist()
            sink({"step": step, "sample_ids": ids, "crc32": checksums(batch["input_ids"].cpu().numpy())})

    return on_batch
