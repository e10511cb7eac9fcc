"""One ordeal, played by a process that may be killed: phases of other ranks, workers and weights.

What is served goes into one file of tokens, step by step; a save is a pickle of (phase, step, tokens
served so far, states of all ranks), renamed into place. After a kill the file is cut at the save.
"""

import logging
import pickle
import resource
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from torture_loaders import ADAPTERS, state_bytes

from penstock.core import clock
from penstock.data import open_corpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Some steps under one set of conditions."""

    ranks: int
    workers: int
    steps: int
    weights: dict[str, float] | None = None
    """A new mixture at its start; None keeps the old one."""


@dataclass(slots=True, kw_only=True)
class Ordeal:
    """What is played, and on what."""

    loader: str
    """A name in ADAPTERS."""
    folder: Path
    corpora: dict[str, str]
    """All by name; token = 1 + its position in all of them, one after another."""
    first: dict[str, float]
    """Corpora and weights at the start."""
    phases: list[Phase]
    """The last goes on until every corpus was served, or the stream ends, or `steps` are over."""
    length: int
    rows: int
    """Global batch."""
    save_every: int = 4
    weights_so_far: dict[str, float] = field(default_factory=dict)

    def flat(self, *names):
        """Return the tokens of some corpora, or of those of the start, end to end in one memory map."""
        path = self.folder / f"{'-'.join(names) or 'first'}.bin"
        if not path.exists():
            with path.open("wb") as file:
                for name in names or self.first:
                    corpus = open_corpus(self.corpora[name])
                    np.asarray(corpus.tokens(0, corpus.num_tokens)).tofile(file)
        return np.memmap(path, dtype=np.uint32, mode="r")


@dataclass(slots=True)
class Save:
    """Where an ordeal is."""

    phase: int = 0
    step: int = 0
    """Steps done in the phase."""
    served: int = 0
    """Tokens in the file."""
    states: list | None = None
    weights: dict | None = None
    figures: dict = field(
        default_factory=lambda: {"save_ms": [], "load_ms": [], "state_bytes": [], "errors": []}
    )


def play(ordeal: Ordeal):
    """Play from the last save to the end."""
    _quieten()
    path, served = ordeal.folder / "save.pickle", ordeal.folder / "served.bin"
    save = pickle.loads(path.read_bytes()) if path.exists() else Save(weights=dict(ordeal.first))
    ordeal.weights_so_far = save.weights
    adapter = ADAPTERS[ordeal.loader](ordeal)
    if isinstance(getattr(adapter, "present", None), list):
        adapter.present = list(save.weights)
    with served.open("r+b" if served.exists() else "w+b") as file:
        file.truncate(4 * save.served)
        file.seek(0, 2)
        while save.phase < len(ordeal.phases):
            _phase(ordeal, adapter, save, file)
            save.phase, save.step = save.phase + 1, 0
            _write(path, save)
    (ordeal.folder / "done").touch()


def _quieten():
    """Raise the limit on open files, of which 96 ranks in one process need more; hide peers' warnings."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def _phase(ordeal, adapter, save, file):
    phase = ordeal.phases[save.phase]
    new = phase.weights if save.step == 0 and phase.weights else None
    if new and set(new) - set(save.weights) and not adapter.adds:
        new = None
    streams, batches = _open(ordeal, adapter, save, new if adapter.mixes else None)
    try:
        while save.step < phase.steps and batches:
            file.write(_in_order(batches).astype(np.uint32).tobytes())
            save.served += sum(tokens.size for tokens, _ in batches)
            save.step += 1
            if save.step % ordeal.save_every == 0 or save.step == phase.steps:
                file.flush()
                start = clock.monotonic()
                save.states = [stream.state() for stream in streams]
                save.figures["save_ms"].append((clock.monotonic() - start) * 1e3 / len(streams))
                save.figures["state_bytes"].append(max(map(state_bytes, save.states)))
                _write(ordeal.folder / "save.pickle", save)
            if save.step < phase.steps:
                batches = _next(streams)
    finally:
        for stream in streams:
            stream.close()


def _next(streams):
    """Return the batches of one step over all ranks; none where a rank has come to its end."""
    try:
        return [next(stream) for stream in streams]
    except StopIteration:
        return []


def _open(ordeal, adapter, save, weights):
    """Open under this phase's conditions, to the first batch.

    What a tool refuses is an error, and it is given an easier way: no workers, then no states.
    """
    phase = ordeal.phases[save.phase]
    easier = [(phase.workers, save.states)]
    if save.states:
        easier += [(0, save.states), (phase.workers, None)]
    for workers, states in easier:
        start = clock.monotonic()
        try:
            streams = adapter.open(phase.ranks, workers, states, weights)
            batches = _next(streams)  # many read their state only now
        except Exception as error:  # of any kind: it is what this table is about
            text = f"{phase.ranks} ranks, {workers} workers: {type(error).__name__}: {str(error)[:160]}"
            if text not in save.figures["errors"]:
                save.figures["errors"].append(text)
            last = error
            continue
        save.figures["load_ms"].append((clock.monotonic() - start) * 1e3 / phase.ranks)
        if weights:
            ordeal.weights_so_far = save.weights = weights
        return streams, batches
    raise last


def _in_order(batches):
    tokens = np.concatenate([tokens for tokens, _ in batches])
    if batches[0][1] is None:
        return tokens
    return tokens[np.argsort(np.concatenate([ids for _, ids in batches]))]


def _write(path, save):
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(pickle.dumps(save))
    temporary.rename(path)
