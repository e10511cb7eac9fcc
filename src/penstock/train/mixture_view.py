"""The mixture of a run for whoever looks: what it is, what came of it, what it was, what is planned."""

from dataclasses import asdict
from typing import Any

from penstock.train.open_run import OpenRun
from penstock.train.requests import answers, job_is_running, open_requests
from penstock.train.take_up import in_force

View = dict[str, Any]  # Any: JSON values


def mixture_view(opened: OpenRun) -> View:
    """Return the mixture now, its history and what waits, as JSON values.

    Its steps are steps taken before something holds.
    """
    loader, step = opened.loader, opened.steps_taken()
    weights = in_force(loader, min(step, max(opened.steps - 1, 0)))
    samples, tokens = loader.samples_by_corpus(step), loader.tokens_by_corpus(step)
    since = [first for first, _, _ in loader.mixtures if first <= step][-1]
    before = loader.samples_by_corpus(since)
    served = {name: samples[name] - before.get(name, 0) for name in samples}
    total, epochs = sum(served.values()), loader.epochs_by_corpus(step)
    skips = [{"start": s, "stop": past, "reason": why} for s, past, why in loader.state_dict()["skip"]]
    return {
        "step": step,
        "steps": opened.steps,
        "running": job_is_running(opened.folder),
        "since": since,
        "corpora": {
            name: {
                "weight": round(weights.get(name, 0.0), 6),
                "share": round(served[name] / total, 6) if total else None,
                "tokens": tokens[name],
                "epochs": round(epochs[name], 6),
            }
            for name in samples
        },
        "mixtures": [
            {"after_step": first, "weights": {n: round(w, 6) for n, w in mix.items()}, "reason": reason}
            for first, mix, reason in loader.mixtures
        ],
        "skips": skips,
        "answers": [asdict(found) for found in answers(opened.folder)],
        "waiting": open_requests(opened.folder),
    }
