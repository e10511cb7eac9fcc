"""Is every rank's work of a step equal, and what does it cost to make it so?

    PYTHONPATH=. python benchmarks/rank_balance.py --out benchmarks/results      # some minutes

Work is attention pairs: over the documents of a row, the sum of n (n + 1) / 2 for n tokens. Three ways to
deal the rows of a step to ranks, of the same samples:

    runs       sorted by corpus and lane, and cut into as many runs as there are ranks (as it was before)
    turns      sorted by corpus and dealt in turn: every corpus evenly, nothing known of the work
    dealt      what the loader does (assign.py): every corpus evenly, then rows are swapped

and `bound`, which no way can beat: of the j costliest rows some rank has at least j / ranks.

    balance    busiest rank / mean, mean and worst of the steps; rows that are not read by a rank of their
               lane (`away`); milliseconds to deal a step. Log-normal and code-like lengths, and two corpora,
               70% rows of short documents and 30% of long ones; rows of 4,096 tokens, 64 lanes, best_fit.
    packing    CPU-seconds of four loaders, one a rank, over the same steps of two local corpora, opening and
               packing included. `runs` packs a pool on the ranks that read it, `dealt` on each.
    bytes      fetched over tokens served by four ranks, from a web server, with a cache for each rank or one
               for all. Blocks of 64 KiB, the smallest that the loader makes, 3 documents a row.
    step       seconds of a step of four gloo ranks with document masks, two corpora: a Llama of 8 blocks
               whose work is mostly attention. One thread a rank; on fewer cores than ranks less is gained.
"""

import argparse
import itertools
import math
import os
import statistics
import sys
import tempfile
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the server of the tests

import corpora
import numpy as np
from results_file import file_result
from tests.integration.remote.faulty import serving

from penstock.core import clock
from penstock.core.rng import key_of, shuffled
from penstock.data import Loader
from penstock.data.packing import PACKERS
from penstock.data.reader import ChosenSamples, Shares, deal, homes_of, is_home
from penstock.testing.ranks import on_ranks
from penstock.testing.training import records_of
from penstock.train.resolve.load import build_recipe
from penstock.train.setup import open_state

LENGTH, LANES, POOL_ROWS = 4096, 64, 256
SHORT = partial(corpora.lognormal_lengths, median=150.0, sigma=0.6)
LONG = partial(corpora.lognormal_lengths, median=13_000.0, sigma=0.8)
CASES = {  # name -> (lengths, weight in tenths) of each corpus
    "log-normal": [(corpora.lognormal_lengths, 10)],
    "code-like": [(corpora.codelike_lengths, 10)],
    "70% short, 30% long": [(SHORT, 7), (LONG, 3)],
}
RANKS = 4
VOCABULARY = 256  # few, so that a step is attention and not logits


def pairs_of(lengths, *, seed):
    """Return the attention pairs of the rows of a pool."""
    found = lengths(POOL_ROWS * LENGTH, seed=seed)
    found = found[shuffled(len(found), key_of(seed, "documents"))]
    pieces = PACKERS["best_fit"](found, num_rows=POOL_ROWS, sequence_length=LENGTH)
    sums = np.cumsum(pieces.length * (pieces.length + 1) // 2)[pieces.row_ends - 1]
    return np.diff(sums, prepend=0)[shuffled(POOL_ROWS, key_of(seed, "rows"))]


def steps_of(case, tables, *, rows, steps):
    """Yield the corpora, lanes and pairs of the rows of each step, corpora by their weight."""
    taken = [0] * len(case)
    for step in range(steps):
        parts = []
        for index, (_, tenths) in enumerate(case):
            # Rounded as a sum, so that the counts of all corpora are those of the step.
            before = sum(tenths for _, tenths in case[:index])
            ends = [(step + 1) * rows * part // 10 for part in (before, before + tenths)]
            turns = np.arange(taken[index], ends[1] - ends[0])
            taken[index] = ends[1] - ends[0]
            lanes = turns % LANES
            parts.append(
                (np.full(len(turns), index), lanes, tables[index][lanes, turns // LANES % POOL_ROWS])
            )
        yield [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]


def bound(costs, ranks):
    """Return what the busiest rank has over the mean at least, whoever deals."""
    local, ascending = len(costs) // ranks, np.sort(costs)
    sums = np.concatenate(([0], np.cumsum(ascending)))
    least = costs.sum() / ranks
    for top in range(1, len(costs) + 1):
        many = math.ceil(top / ranks)  # of the costliest `top`, the cheapest so many, and the cheapest others
        first = len(costs) - top
        fill = min(local - many, first)
        least = max(least, sums[first + many] - sums[first] + sums[fill])
    return least * ranks / costs.sum()


def balance(*, all_ranks, all_rows, steps):
    """Return the figures of each case, number of ranks and rows a rank."""
    found = []
    for name, case in CASES.items():
        tables = [
            np.stack([pairs_of(lengths, seed=1000 * index + lane) for lane in range(LANES)])
            for index, (lengths, _) in enumerate(case)
        ]
        for ranks, local in itertools.product(all_ranks, all_rows):
            figures = {key: [] for key in ("runs", "turns", "dealt", "bound", "away", "ms")}
            for whose, lanes, costs in steps_of(case, tables, rows=ranks * local, steps=steps):
                num_lanes = np.full(len(lanes), LANES)
                began = clock.monotonic()
                homes = homes_of(whose, lanes, num_lanes, world_size=ranks)
                rank = deal(whose, homes, costs, world_size=ranks)
                figures["ms"].append(1000 * (clock.monotonic() - began))
                order = np.lexsort((lanes, whose))
                turns, runs = np.empty_like(rank), np.empty_like(rank)
                runs[order], turns[order] = np.arange(len(order)) // local, np.arange(len(order)) % ranks
                for key, each in (("runs", runs), ("turns", turns), ("dealt", rank)):
                    loads = np.bincount(each, weights=costs)
                    figures[key].append(float(loads.max() / loads.mean()))
                figures["bound"].append(bound(costs, ranks))
                of = [
                    is_home(
                        whose[rank == r], lanes[rank == r], num_lanes[rank == r], rank=r, world_size=ranks
                    )
                    for r in range(ranks)
                ]
                figures["away"].append(1 - float(np.mean(np.concatenate(of))))
            row = {"lengths": name, "ranks": ranks, "rows_a_rank": local}
            for key in ("runs", "turns", "dealt", "bound"):
                row[key] = round(statistics.mean(figures[key]), 3)
            row["dealt_worst"], row["bound_worst"] = (
                round(max(figures[key]), 3) for key in ("dealt", "bound")
            )
            row["away"] = round(statistics.mean(figures["away"]), 3)
            row["ms"] = round(statistics.median(figures["ms"]), 2)
            found.append(row)
            print(*(f"{key} {value}" for key, value in row.items()), sep="  ", flush=True)
    return found


def in_runs(shares, step, *, rank, world_size, micro_rows=None):  # noqa: ARG001
    """Deal a step as runs, in place of Shares.of."""
    index = step - shares.steps.start
    local = len(shares.corpus[index]) // world_size
    mine = np.arange(rank * local, (rank + 1) * local)  # they are sorted so
    arrays = (array[index, mine] for array in (shares.samples, shares.corpus, shares.addresses))
    return ChosenSamples(*arrays, shares.phase, None, shares.spans.step(index, mine))


def dealing(way):
    """Return a context in which loaders deal their steps so."""
    return patch.object(Shares, "of", in_runs) if way == "runs" else nullcontext()


def two_corpora(folder, num_tokens):
    """Write the two corpora; return their folders by name."""
    parts = {"short": (SHORT, 0.7), "long": (LONG, 0.3)}
    return {
        name: corpora.write(
            folder / name,
            lengths(int(share * num_tokens), seed=index),
            lambda start, stop: np.random.default_rng(start).integers(1, VOCABULARY, stop - start),
            vocab_size=VOCABULARY,
        )
        for index, (name, (lengths, share)) in enumerate(parts.items())
    }


def packing(folders, *, rounds, steps):
    """Return CPU-seconds of four loaders by way, and how often more `dealt` takes: ways take turns."""
    spent = {"runs": [], "dealt": []}
    for _, way in itertools.product(range(rounds), spent):
        with dealing(way):
            began = clock.cpu_seconds()
            for rank in range(RANKS):
                loader = Loader(
                    folders,
                    weights={"short": 7, "long": 3},
                    sequence_length=LENGTH,
                    global_batch_size=64,
                    rank=rank,
                    world_size=RANKS,
                    num_workers=0,
                    deliver="numpy",
                )
                for step in range(steps):
                    loader.batch_at(step)
            spent[way].append(clock.cpu_seconds() - began)
    found = {way: round(statistics.median(times), 3) for way, times in spent.items()}
    return {"steps": steps, "cpu_s": found, "times": round(found["dealt"] / found["runs"], 2)}


def fetched(work, *, num_tokens, all_rows):
    """Return the bytes that four ranks fetch, over those of the tokens they serve."""
    lengths = corpora.lognormal_lengths(num_tokens)
    folder = corpora.write(
        work / "far", lengths, corpora.random_tokens(np.uint16), shard_tokens=num_tokens // 4
    )
    os.environ["PENSTOCK_CACHE_BYTES"] = "8GiB"
    found = []
    for rows, shared, way in itertools.product(all_rows, (False, True), ("runs", "dealt")):
        with serving(folder) as server, dealing(way):  # an address of its own: nothing is here already
            for rank in range(RANKS):
                os.environ["PENSTOCK_CACHE"] = str(work / f"{rows}-{way}-{shared}-{0 if shared else rank}")
                loader = Loader(
                    {"web": server.url},
                    sequence_length=2048,
                    global_batch_size=rows,
                    rank=rank,
                    world_size=RANKS,
                    epochs={"web": 1},
                    fields=("input_ids", "labels"),
                    num_workers=0,
                    deliver="numpy",
                )
                for step in range(num_tokens // 2048 // rows):
                    loader.batch_at(step)
            while server.traffic.in_flight:
                clock.sleep(0.001)
            found.append(
                {
                    "rows": rows,
                    "caches": "one" if shared else "one a rank",
                    "way": way,
                    "fetched": round(server.traffic.body_bytes / (2 * num_tokens), 3),
                    "requests": len(server.traffic.requests),
                }
            )
            print(found[-1], flush=True)
    return found


def step_times(folders, work, *, rounds, steps, rows, hidden):
    """Return the median seconds of a step of four ranks by way, ways taking turns."""
    found = {"runs": [], "dealt": []}
    for number, way in itertools.product(range(rounds), found):
        recipe = build_recipe(
            {
                "run": {"dir": str(work / f"run-{number}-{way}"), "steps": steps},
                "model": {
                    "hidden_size": hidden,
                    "intermediate_size": hidden,
                    "num_hidden_layers": 8,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 4,
                    "vocab_size": VOCABULARY,
                },
                "data": {
                    "corpora": {
                        "short": {"path": str(folders["short"]), "weight": 7},
                        "long": {"path": str(folders["long"]), "weight": 3},
                    },
                    "sequence_length": LENGTH,
                    "global_batch_size": rows * RANKS,
                    "micro_batch_size": rows // 2,
                },
                "checkpoint": {"every": steps},
                "parallel": {"replicate": RANKS, "shard": 1},
                "compute": "float32",
            }
        )
        with dealing(way):
            records, *_ = on_ranks(
                lambda world, recipe=recipe: records_of(open_state(recipe, world), recipe, world), ranks=RANKS
            )
        found[way] += [record["step_s"] for record in records if "step_s" in record][1:]
    median = {way: round(statistics.median(times), 3) for way, times in found.items()}
    return {
        "cores": len(os.sched_getaffinity(0)),
        "step_s": median,
        "runs_over_dealt": round(median["runs"] / median["dealt"], 2),
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64, 96])
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64 * 16 * 16 * 2048, help="of each corpus that is read")
    parser.add_argument("--train-steps", type=int, default=4)
    parser.add_argument("--train-rows", type=int, default=10, help="of a rank and step")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--only", nargs="+", choices=("balance", "packing", "bytes", "step"))
    parser.add_argument("--out", type=Path, help="folder to file the result in, as JSON")
    given = parser.parse_args()
    result = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        folders = two_corpora(work, 2 * given.tokens)
        parts = {
            "balance": partial(balance, all_ranks=given.ranks, all_rows=given.rows, steps=given.steps),
            "packing": partial(
                packing, folders, rounds=given.rounds, steps=min(100, given.tokens // LENGTH // 64)
            ),
            "bytes": partial(fetched, work, num_tokens=given.tokens, all_rows=(64, 32, 16)),
            "step": partial(
                step_times,
                folders,
                work,
                rounds=given.rounds,
                steps=given.train_steps,
                rows=given.train_rows,
                hidden=given.hidden,
            ),
        }
        for name, measure in parts.items():
            if given.only is None or name in given.only:
                result[name] = measure()
                print(name, result[name] if isinstance(result[name], dict) else "", flush=True)
    if given.out:
        file_result(given.out, "rank_balance", result, packages=("torch", "obstore", "pyarrow"))


if __name__ == "__main__":
    main()
