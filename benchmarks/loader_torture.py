"""What do loaders lose, repeat or refuse when a job is rescaled, re-weighted and killed?

    python benchmarks/loader_torture.py --out benchmarks/results

One ordeal for Penstock and every peer that is installed: documents of log-normal lengths with empty,
one-token and huge ones among them; 8 -> 12 -> 3 -> 96 ranks, 0 -> 4 workers and back, three re-weightings, a
corpus that joins, a SIGKILL at a random instant. Every token is its own identity. Of each corpus the first
as many tokens as it has are looked at: each should be there once. "no" is an operation a tool does not
have; it is then spared that operation. All ranks of a job run in one process, in turn; times are of one rank.
"""

import argparse
import json
import multiprocessing
import pickle
import random
import shutil
import statistics
import tempfile
from pathlib import Path

import corpora
import numpy as np
from results_file import file_result
from throughput_peers import PACKAGES
from torture_loaders import ADAPTERS, installed
from torture_play import Ordeal, Phase, play

from penstock.core import clock
from penstock.core.units import si

SHARES = {"web": 4, "code": 2, "wiki": 1, "books": 1}
LENGTH, ROWS = 256, 96
MAX_STEPS = 8
"""Times the steps of one epoch of everything: where a run that never ends is cut."""


def make_lengths(num_tokens, *, seed):
    """Return document lengths with every kind of trouble among them, which sum to `num_tokens`."""
    rng = np.random.default_rng(seed)
    lengths = corpora.lognormal_lengths(num_tokens * 3 // 4, median=120, seed=seed).tolist()
    lengths += [num_tokens // 8]
    lengths += [1] * min(500, num_tokens // 64)
    rng.shuffle(lengths)
    lengths += [num_tokens - sum(lengths)]
    for place in sorted(rng.integers(0, len(lengths), len(lengths) // 20).tolist(), reverse=True):
        lengths.insert(place, 0)
    return np.array([0, 0, *lengths, 0], dtype=np.int64)


def make_corpora(folder, num_tokens):
    """Write the corpora; return name -> (folder, first token id, document lengths)."""
    made, base = {}, 1
    for index, (name, share) in enumerate(SHARES.items()):
        lengths = make_lengths(num_tokens * share // sum(SHARES.values()), seed=index)
        start = base

        def tokens(low, high, start=start):
            return np.arange(start + low, start + high)

        corpora.write(
            folder / name, lengths, tokens, dtype="uint32", vocab_size=2**32, shard_tokens=num_tokens // 16
        )
        made[name] = (str(folder / name), base, lengths)
        base += int(lengths.sum())
    return made


def make_phases(steps):
    """Return the ordeal; `steps` is one epoch of everything."""
    part = max(2, steps // 8)
    return [
        Phase(ranks=8, workers=0, steps=part),
        Phase(ranks=12, workers=0, steps=part, weights={"web": 2, "code": 1, "wiki": 1}),
        Phase(ranks=3, workers=4, steps=part, weights={"web": 1, "code": 2, "wiki": 1}),
        Phase(
            ranks=96,
            workers=0,
            steps=MAX_STEPS * steps,
            weights={"web": 4, "code": 1, "wiki": 0.5, "books": 1.5},
        ),
    ]


def torture(name, folder, made, *, steps, kill_after, patience_s):
    """Play the ordeal with one loader and return its row of the scorecard."""
    folder.mkdir()
    first = {name: float(SHARES[name]) for name in list(SHARES)[:-1]}
    # Bounded, and ended early below as soon as every corpus was served: a peer may never end by itself.
    ordeal = Ordeal(
        loader=name,
        folder=folder,
        corpora={name: path for name, (path, _, _) in made.items()},
        first=first,
        phases=make_phases(steps),
        length=LENGTH,
        rows=ROWS,
    )
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=play, args=(ordeal,))
    child.start()
    killed = _wait_for(folder, child, steps=kill_after)
    if killed:
        child.kill()
        child.join()
        child = context.Process(target=play, args=(ordeal,))
        child.start()
    target = {name: int(lengths.sum()) for name, (_, _, lengths) in made.items()}
    deadline, finished = clock.monotonic() + patience_s, False
    while child.exitcode is None and not finished:
        child.join(0.5)
        finished = _all_served(folder, made, target, adds=ADAPTERS[name].adds)
        if child.exitcode is None and (finished or clock.monotonic() > deadline):
            child.kill()
            child.join()
            break
    return _row(name, folder, made, killed=killed, finished=finished or child.exitcode == 0)


def _wait_for(folder, child, *, steps):
    """Wait until some steps were served and something was saved; say whether the child still lives."""
    path, save = folder / "served.bin", folder / "save.pickle"
    while child.exitcode is None:
        if save.exists() and path.stat().st_size >= steps * ROWS * LENGTH * 4:
            return True
        child.join(0.001)
    return False


def _served(folder):
    path = folder / "served.bin"
    return (
        np.fromfile(path, dtype=np.uint32).astype(np.int64) if path.exists() else np.empty(0, dtype=np.int64)
    )


def _all_served(folder, made, target, *, adds):
    """Say whether every corpus has had its fill."""
    served = _served(folder)
    return all(
        np.count_nonzero((served >= base) & (served < base + target[name])) >= target[name]
        for name, (_, base, _) in made.items()
        if adds or name != list(SHARES)[-1]
    )


def _row(name, folder, made, *, killed, finished):
    adapter, save = ADAPTERS[name], pickle.loads((folder / "save.pickle").read_bytes())
    served = _served(folder)
    lost = repeated = documents_lost = documents_repeated = total = 0
    for corpus, (_, base, lengths) in made.items():
        if corpus == list(SHARES)[-1] and not adapter.adds:
            continue
        size = int(lengths.sum())
        mine = served[(served >= base) & (served < base + size)][:size] - base
        times = np.bincount(mine, minlength=size)
        total += size
        lost += int((times == 0).sum())
        repeated += int(np.maximum(times - 1, 0).sum())
        filled = lengths[lengths > 0]
        starts = np.cumsum(filled) - filled
        documents_lost += int((np.add.reduceat(times == 0, starts) > 0).sum())
        documents_repeated += int((np.add.reduceat(times > 1, starts) > 0).sum())
    figures = save.figures
    return {
        "tokens": total,
        "tokens_lost": lost,
        "tokens_repeated": repeated,
        "documents_hit_by_loss": documents_lost,
        "documents_hit_by_repeats": documents_repeated,
        "re_weighted": adapter.mixes,
        "corpus_added": adapter.adds,
        "killed": killed,
        "finished": finished,
        "errors": figures["errors"],
        "state_bytes_of_one_rank": max(figures["state_bytes"], default=0),
        "save_ms_of_one_rank": round(statistics.median(figures["save_ms"] or [0]), 2),
        "load_ms_of_one_rank": round(max(figures["load_ms"], default=0), 1),
    }


def scorecard(rows):
    """Return the table as Markdown."""
    head = (
        "| loader | tokens lost | tokens repeated | documents hit | re-weighted | corpus added | errors "
        "| state of a rank | save | load |\n|---|---|---|---|---|---|---|---|---|---|\n"
    )
    lines = []
    for name, row in rows.items():
        documents = row["documents_hit_by_loss"] + row["documents_hit_by_repeats"]
        cells = [
            name if row["finished"] else f"{name} (did not finish)",
            f"{row['tokens_lost']:,} ({row['tokens_lost'] / row['tokens']:.2%})",
            f"{row['tokens_repeated']:,} ({row['tokens_repeated'] / row['tokens']:.2%})",
            f"{documents:,}",
            "yes" if row["re_weighted"] else "no",
            "yes" if row["corpus_added"] else "no",
            str(len(row["errors"])),
            f"{si(row['state_bytes_of_one_rank'])}B",
            f"{row['save_ms_of_one_rank']:.1f} ms",
            f"{row['load_ms_of_one_rank']:.0f} ms",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return head + "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2_400_000, help="of all corpora together")
    parser.add_argument("--only", nargs="+", help="names of loaders")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds for one loader")
    parser.add_argument("--seed", type=int, default=0, help="of the instant of the kill")
    parser.add_argument("--out", type=Path, help="folder to file the result in, as JSON and Markdown")
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    rows = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        made = make_corpora(folder, arguments.tokens)
        steps = arguments.tokens // (ROWS * LENGTH)
        for name in installed():
            if arguments.only and name not in arguments.only:
                continue
            kill_after = chance.uniform(1, steps / 4)
            try:
                rows[name] = torture(
                    name,
                    folder / name,
                    made,
                    steps=steps,
                    kill_after=kill_after,
                    patience_s=arguments.patience,
                )
            except FileNotFoundError:
                print(f"{name}: ended before its first save; it is left out")
            for error in rows.get(name, {}).get("errors", ()):
                print(f"{name}: {error}")
            shutil.rmtree(folder / name, ignore_errors=True)
    print(scorecard(rows))
    if arguments.out:
        settings = {"tokens": arguments.tokens, "length": LENGTH, "rows": ROWS, "seed": arguments.seed}
        phases = [json.loads(json.dumps(_plain(phase))) for phase in make_phases(steps)]
        result = {"settings": settings, "phases": phases, "rows": rows}
        paths = file_result(arguments.out, "loader_torture", result, packages=PACKAGES)
        paths[0].with_suffix(".md").write_text(scorecard(rows) + "\n")


def _plain(phase):
    return {"ranks": phase.ranks, "workers": phase.workers, "steps": phase.steps, "weights": phase.weights}


if __name__ == "__main__":
    main()
