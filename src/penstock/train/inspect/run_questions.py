"""Questions about runs that need their recipes, corpora, checkpoints or jobs, and their answers; no torch.

    {"ask": "rows", "run": "/runs/first", "step": 1200, "offset": 0, "limit": 4}
    {"ask": "mixture", "run": "/runs/first", "step": 1200, "weights": {"web": 0.6}}

The console asks them of a process of its own (`penstock data inspect`): it reads files, and loads no trainer.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.checkpoint.find import find, saved_of
from penstock.checkpoint.layout import step_of
from penstock.core import config
from penstock.core.errors import PenstockError
from penstock.engine.scheduling.groups import cache_groups, rows_of
from penstock.train.control.apply_request import in_force, reweighed
from penstock.train.control.requests import (
    ControlReply,
    ControlRequest,
    answered,
    job_is_running,
    open_requests,
    read_answer,
    read_request,
    request_file,
)
from penstock.train.control.send import send
from penstock.train.inspect.open_run import OpenRun
from penstock.train.inspect.recent_run import RecentRun
from penstock.train.inspect.row_texts import rows_view

Answer = dict[str, Any]  # Any: JSON values
_MAX_LISTED = 200
_FLOAT32 = 4


class RunQuestions:
    """Answers questions about runs; several threads may ask."""

    def __init__(self) -> None:
        self._recent = RecentRun()
        self._answers: dict[str, Callable[..., Answer]] = {
            "rows": rows_view,
            "checkpoints": checkpoints,
            "model": model_size,
            "mixture": self._mixture,
            "requests": requests,
            "request": request,
        }

    def answer(self, question: Mapping[str, Any]) -> Answer:
        """Return the answer to a question: `ask` names it, `run` is a folder, the rest are its arguments.

        Raises:
            PenstockError: the run, its data or the question is not valid.
            OSError: a file cannot be read or written.
        """
        words = dict(question)
        ask, run = words.pop("ask"), Path(words.pop("run"))
        return self._answers[ask](run, **words)

    def close(self) -> None:
        """Forget the run that is open."""
        self._recent.close()

    def _mixture(self, folder: Path, *, step: int, weights: dict[str, float] | None = None) -> Answer:
        """Return the mixtures of a run, and how often each corpus will have been read by its end.

        Args:
            step: steps that the run has recorded.
            weights: shares from this step on; None: those in force.
        """
        shares = None if weights is None else ControlRequest(weights=weights).weights
        with self._recent.lent(folder) as opened:
            return _mixture_of(opened, step, shares)


def checkpoints(folder: Path) -> Answer:
    """Return the steps of the complete checkpoints of a run, in order.

    Raises:
        PenstockError: their location is unknown or cannot be read.
    """
    steps = {step for saved in saved_of(folder) if (step := step_of(saved.name)) is not None}
    return {"steps": sorted(steps)}


def model_size(folder: Path, *, step: int) -> Answer:
    """Return the bytes of a checkpoint's weights in float32 and of a token in the KV cache, and the context.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    meta = find(folder, step=step).index().meta
    copies = 1 if meta.adapter is None else 2  # the merged matrices are made beside the base
    model = meta.model
    heads = model.key_value_heads * model.size_of_head
    groups = cache_groups(model.windows, context=model.context)
    return {
        "weight_bytes": copies * _FLOAT32 * model.num_parameters,
        "token_bytes": 2 * _FLOAT32 * rows_of(groups) * len(groups) * heads,
        "context": model.context,
    }


def requests(folder: Path) -> Answer:
    """Return the newest requests of a run with their replies, newest last, and whether a job may reply."""
    running = job_is_running(folder)  # before its replies are read: one that ends may reply to the last
    numbers = {*open_requests(folder), *_answered(folder)}
    return {
        "requests": [_listed(folder, number) for number in sorted(numbers)[-_MAX_LISTED:]],
        "running": running,
    }


def request(folder: Path, *, asked: Mapping[str, Any], asked_by: str) -> Answer:
    """Send a request to the run's job; return its number and whether a job runs, or what was done instead.

    Args:
        asked: fields of `ControlRequest`.
        asked_by: who asks, for the run's record.

    Raises:
        NoJob: the request needs a running job.
        PenstockError: the request is not valid, or the job could not apply it.
    """
    sent = send(folder, config.build(ControlRequest, {**asked, "asked_by": asked_by}))
    return {"said": sent} if isinstance(sent, str) else {"number": sent, "running": job_is_running(folder)}


def _mixture_of(opened: OpenRun, step: int, shares: dict[str, float] | None) -> Answer:
    loader, steps = opened.loader, opened.steps
    step = max(step, loader.step)
    now = in_force(loader, min(step, max(steps - 1, 0)))
    weights, later = now, [first for first, _, _ in loader.mixtures if first > step]
    if shares is not None:
        weights = reweighed(now, shares)
        if step < steps:
            loader.set_weights(weights, step=step)
    tokens, epochs, by_end = (
        loader.tokens_by_corpus(step),
        loader.epochs_by_corpus(step),
        loader.epochs_by_corpus(max(steps, step)),
    )
    return {
        "corpora": [
            {
                "name": name,
                "weight": round(weights.get(name, 0.0), 6),
                "tokens": tokens[name],
                "tokens_in_corpus": _size(opened, name),
                "epochs": round(epochs[name], 6),
                "epochs_by_end": round(by_end[name], 6),
            }
            for name in tokens
        ],
        "step": step,
        "steps": steps,
        "tokens_left": loader.tokens_before(max(steps, step)) - loader.tokens_before(step),
        "next_change": min(later, default=None),
        "mixtures": [
            {"after_step": first, "weights": planned} for first, planned, _ in loader.mixtures[-_MAX_LISTED:]
        ],
    }


def _size(opened: OpenRun, name: str) -> int | None:
    corpus = opened.loader.corpora.get(name)
    return None if corpus is None else corpus.num_tokens


def _answered(folder: Path) -> set[int]:
    with suppress(OSError):
        return answered(folder)
    return set()


def _listed(folder: Path, number: int) -> Answer:
    asked, reply = None, None
    with suppress(PenstockError):
        asked = read_request(folder, number)
    with suppress(PenstockError):
        reply = read_answer(folder, number)
    try:
        stamp = request_file(folder, number).stat().st_mtime
        time = datetime.fromtimestamp(stamp, UTC).isoformat(timespec="seconds")
    except OSError:
        time = None
    kind, text = ("?", "a request that cannot be read") if asked is None else _told(asked)
    return {
        "number": number,
        "kind": kind,
        "text": text,
        "asked_by": asked.asked_by if asked is not None else "",
        "time": time,
        "reason": asked.reason if asked is not None else "",
        "reply": None if reply is None else _replied(reply),
    }


def _told(asked: ControlRequest) -> tuple[str, str]:
    if asked.weights is not None:
        return "mixture", ", ".join(f"{name} {share:.4g}" for name, share in asked.weights.items())
    if asked.skip_steps is not None:
        return "skip", f"steps {asked.skip_steps[0]} to {asked.skip_steps[1] - 1}"
    if asked.islands is not None:
        return "islands", f"{asked.islands} islands"
    if asked.batch_size is not None:
        return "batch", f"{asked.batch_size} rows a step"
    if asked.extend is not None:
        return "extend", f"new parts of {asked.extend}"
    return ("stop", "save and stop") if asked.stop else ("checkpoint", "save now")


def _replied(reply: ControlReply) -> Answer:
    return {
        "taken_up": reply.taken_up,
        "said": reply.said,
        "step": reply.step,
        "holds_from": reply.holds_from,
        "weights": reply.weights,
    }
