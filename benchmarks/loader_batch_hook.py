"""How fast is the loader beside torch's own with its hook for whole batches?

    python benchmarks/loader_batch_hook.py --out benchmarks/results          # two minutes, a quiet machine

The peer is torchdata's StatefulDataLoader over a memory map of fixed windows with `__getitems__`, which torch
asks for a whole batch at once, in two forms: a loop that copies window by window, as one writes it first, and
one gather of all windows by numpy, the fastest form we know. It shuffles windows and packs nothing; its
labels are a shifted view, not masked where documents end. Ours shuffles and packs documents and masks the
labels. Both hand out int64 tensors. Figures are million tokens per CPU-second of the process, medians of
settings that take turns; ratios are to the peer with shuffled windows, in each form.
"""

import argparse
import tempfile
from functools import partial
from pathlib import Path

import corpora
from loader_throughput import FIELDS, load
from measuring import interleaved, median
from results_file import file_result
from throughput_peers import batch_hook, flat_tokens

from penstock.core.units import parse_count

FORMS = ("a copy a window", "one gather")
PACKINGS = ("concat", "best_fit")
TARGETS = {"": 1.2, ", labels": 1.0}
"""Of the peer's shuffled windows: the least that is aimed at."""


def works(folder, flat, tokens, *, rows, length, labels):
    """Return name -> work of one cell of the table."""
    found = {}
    for form in FORMS:
        for shuffle in (False, True):
            peer = batch_hook(flat, length, rows, form=form, shuffle=shuffle, labels=bool(labels))
            found[f"peer, {form}, {'shuffled' if shuffle else 'in order'}"] = partial(peer, tokens)
    for packing in PACKINGS:
        options = {"length": length, "rows": rows, "packing": packing, "fields": FIELDS[labels]}
        found[packing] = partial(load, folder, tokens, **options)
    return found


def measure(folder, *, arguments):
    """Return cell -> name -> rates."""
    lengths = corpora.lognormal_lengths(arguments.tokens)
    corpus = corpora.write(folder / "corpus", lengths, corpora.random_tokens("uint16"))
    flat = flat_tokens(corpora.warm(corpus), folder / "flat.bin")
    flat.max()
    found = {}
    for rows in arguments.rows:
        for length in arguments.lengths:
            for labels in FIELDS:
                cell = f"{rows} x {length}{labels}"
                print(cell)
                turns = works(corpus, flat, arguments.tokens, rows=rows, length=length, labels=labels)
                found[cell] = interleaved(turns, rounds=arguments.rounds)
    return found


def report(found):
    """Print the table; return cell -> ratios to each form of the peer, and whether the aim is met."""
    heads = ("loop", "gather", *PACKINGS)
    print(f"\n{'rows x length':18}", *(f"{head:>9}" for head in heads), " times the loop, times the gather")
    verdicts = {}
    for cell, rates in found.items():
        middle = {name: median(rate["per_cpu_s"]) / 1e6 for name, rate in rates.items()}
        peers = {form: middle[f"peer, {form}, shuffled"] for form in FORMS}
        aim = TARGETS[", labels" if cell.endswith("labels") else ""]
        times = {
            form: {packing: round(middle[packing] / peer, 2) for packing in PACKINGS}
            for form, peer in peers.items()
        }
        met = {form: min(ratios.values()) >= aim for form, ratios in times.items()}
        verdicts[cell] = {"times": times, "aim": aim, "met": met}
        figures = [*peers.values(), *(middle[packing] for packing in PACKINGS)]
        ratios = [" ".join(f"{ratio:.2f}" for ratio in times[form].values()) for form in FORMS]
        print(f"{cell:18}", *(f"{rate:9.0f}" for rate in figures), f"  {', '.join(ratios)} (aim {aim})")
    return verdicts


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens", type=parse_count, default=200_000_000, help="of the corpus, and read a turn"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="+", default=(64, 8))
    parser.add_argument("--lengths", type=int, nargs="+", default=(4096, 2048))
    parser.add_argument("--out", type=Path, help="folder to file the result in, as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), arguments=arguments)
    verdicts = report(found)
    if arguments.out:
        result = {"tokens": arguments.tokens, "verdicts": verdicts, "rates": found}
        file_result(arguments.out, "loader_batch_hook", result, packages=("torch", "torchdata"))


if __name__ == "__main__":
    main()
