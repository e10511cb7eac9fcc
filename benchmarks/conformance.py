"""Which loaders keep which promise? The conformance kit on Penstock's loader and two pipelines beside it.

    python benchmarks/conformance.py --out benchmarks/results

A documented comparison, not a test of anybody's: the pipelines are put together as their users do, on one
small corpus, each check as the kit has it (`penstock.testing.loaders`). What it prints and files for a
promise that is not kept is the kit's own message.
"""

import argparse
import pickle
import tempfile
import warnings
from pathlib import Path

import numpy as np
from conformance_peers import LENGTH, ChainAdapter, windows_loader
from results_file import file_result
from rich.console import Console
from rich.table import Table

from penstock.data import open_corpus
from penstock.testing.corpora import numbered_corpus
from penstock.testing.loader_adapters import PenstockAdapter, StatefulAdapter
from penstock.testing.loaders import (
    assert_bounded_state,
    assert_exactly_once,
    assert_rescalable,
    assert_resumable,
)

ROWS = 24  # global batch
DOCUMENTS = 3000


def adapters(folder):
    """Return a corpus of known tokens in a folder, served by name -> adapter, and all its tokens."""
    lengths = np.random.default_rng(0).lognormal(3.5, 1.0, DOCUMENTS).astype(int) + 1
    corpus = open_corpus(numbered_corpus(folder / "web", lengths.tolist()))
    tokens = np.asarray(corpus.tokens(0, corpus.num_tokens))
    flat = folder / "tokens.bin"
    tokens.astype(np.uint32).tofile(flat)
    return {
        "penstock": PenstockAdapter(
            {"web": folder / "web"}, sequence_length=LENGTH, global_batch_size=ROWS, packing="best_fit"
        ),
        "StatefulDataLoader over a memory map": StatefulAdapter(
            windows_loader(flat, ROWS), lambda batch: np.concatenate(batch)
        ),
        "chain of stateful iterators (fms-fsdp style)": ChainAdapter((tokens, np.cumsum(lengths)), ROWS),
    }, tokens


def checks(adapter, tokens):
    """Return promise -> a call that raises where it is not kept."""
    return {
        "every token once, 3 ranks": lambda: assert_exactly_once(adapter, tokens, world_size=3),
        "resumes, 2 ranks": lambda: assert_resumable(adapter, world_size=2, at=(0, 1, 20)),
        "rescales 4 -> 2 -> 8 -> 3": lambda: assert_rescalable(
            adapter, tokens, world_sizes=(4, 2, 8, 3), batches=9
        ),
        "state is bounded, 2 ranks": lambda: assert_bounded_state(adapter, world_size=2, batches=60),
    }


def outcome(check):
    """Return "kept", or what the kit says."""
    try:
        check()
    except AssertionError as error:
        return str(error)
    return "kept"


def state_bytes(adapter):
    """Return the size of one rank's state after a few batches."""
    opened = adapter.open(0, 2, 0)
    for _ in range(10):
        adapter.next(opened)
    size = len(pickle.dumps(adapter.save(opened)))
    adapter.close(opened)
    return size


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder to file the result in")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # torchdata 0.11 calls what torch 2.13 deprecates, in every loader
    with tempfile.TemporaryDirectory() as folder:
        loaders, tokens = adapters(Path(folder))
        result = {
            name: {
                **{promise: outcome(check) for promise, check in checks(adapter, tokens).items()},
                "state_bytes": state_bytes(adapter),
            }
            for name, adapter in loaders.items()
        }
    table = Table("", *result, title=f"{len(tokens):,} tokens, rows of {LENGTH}, global batch {ROWS}")
    for promise in next(iter(result.values())):
        table.add_row(promise, *(str(found[promise]) for found in result.values()))
    Console().print(table)
    if options.out:
        file_result(
            options.out,
            "conformance",
            {"tokens": len(tokens), "rows": ROWS, "length": LENGTH, "loaders": result},
            packages=("torch", "torchdata"),
        )


if __name__ == "__main__":
    main()
