"""The process that `loader_stress.py` kills: it streams, checks every token, changes weights, and saves.

What it saves is one file, written atomically: the loader's state, the ledger of what that state has
served, and which planned changes are done. So a kill loses some work, and never the account of it.
"""

import json
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from hashed_tokens import Ledger
from measuring import memory_kib

from penstock.core import clock
from penstock.core.files import write_json
from penstock.data import Loader


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One life of the streaming process."""

    folder: Path
    """Where `save.json` and `log.jsonl` are."""
    corpora: dict[str, str]
    """All corpora by name, numbered in this order; the last joins in mid-run."""
    expected: list[tuple[int, int, int]]
    """Per corpus, see Ledger."""
    target_tokens: int
    """Where the run ends."""
    plan: list[tuple[int, dict[str, float]]]
    """(from this many tokens on, weights by name): the mixture of the whole run; the first at 0."""
    length: int
    """Tokens per row."""
    batch: int
    """Rows per step over all ranks."""
    ranks: int
    """How many ranks this life computes, all in this process."""
    workers: int
    """Threads ahead, of every rank."""
    packing: str
    save_every: int
    """Tokens between saves."""
    seed: int = 0


def stream(job: Job):
    """Go on from the last save until the target; being killed is the usual way to end before."""
    path = job.folder / "save.json"
    saved = json.loads(path.read_text()) if path.exists() else {"loader": None, "ledger": None, "changes": 1}
    ledger, changes = Ledger(job.expected, saved["ledger"]), saved["changes"]
    loaders = _open(job, saved)
    samples, used = int(loaders[0].samples_of(loaders[0].step)[0]), clock.cpu_seconds()
    tokens = save_at = samples * job.length
    with ExitStack() as stack:
        log = stack.enter_context((job.folder / "log.jsonl").open("a"))
        ranks = [stack.enter_context(closing(iter(loader))) for loader in loaders]
        while tokens < job.target_tokens:
            batches = [next(rank) for rank in ranks]
            parts = [(batch["sample_ids"], batch["input_ids"]) for batch in batches]
            ledger.add(parts, first_sample=samples)
            samples += sum(len(ids) for ids, _ in parts)
            tokens = samples * job.length
            while changes < len(job.plan) and tokens >= job.plan[changes][0]:
                _change(loaders, job, changes)
                changes += 1
            if tokens >= save_at + job.save_every or tokens >= job.target_tokens:
                save_at = tokens
                state = loaders[0].state_dict()
                if any(loader.state_dict() != state for loader in loaders):
                    raise AssertionError("the ranks' states differ")
                write_json(
                    path, {"loader": state, "ledger": ledger.state(), "changes": changes, "tokens": tokens}
                )
                log.write(json.dumps(_log_line(job, tokens, state, cpu_s=clock.cpu_seconds() - used)) + "\n")
                log.flush()


def _open(job, saved):
    loaders = [
        Loader(
            {name: job.corpora[name] for name in job.plan[saved["changes"] - 1][1]},
            sequence_length=job.length,
            global_batch_size=job.batch,
            rank=rank,
            world_size=job.ranks,
            seed=job.seed,
            packing=job.packing,
            fields=("input_ids",),
            num_workers=job.workers,
            deliver="numpy",
        )
        for rank in range(job.ranks)
    ]
    if saved["loader"]:
        for loader in loaders:
            loader.load_state_dict(saved["loader"])
    return loaders


def _change(loaders, job, number):
    """Carry out one planned change on every rank, from the next step on."""
    weights = job.plan[number][1]
    for loader in loaders:
        new = [name for name in weights if name not in loader.corpora]
        if new:
            loader.add_corpus(new[0], job.corpora[new[0]], weights=weights)
        else:
            loader.set_weights(weights)


def _log_line(job, tokens, state, *, cpu_s):
    return {
        "tokens": tokens,
        "ranks": job.ranks,
        "cpu_s": round(cpu_s, 3),
        "anonymous_kib": memory_kib(),
        "state_bytes": len(json.dumps(state, separators=(",", ":"))),
    }
