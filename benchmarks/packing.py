"""What do packing rules cost: documents split, padding, attention across documents, context lost?

    python benchmarks/packing.py --out benchmarks/results

Three rules on web-like (log-normal) and code-like (heavy-tailed) document lengths, pool by pool of 4,096
rows as the loader packs them. `whole` never splits a document and pads the gaps; of a longer one than a row
it serves the first tokens here (overlong="truncate").

    split      documents that fit in a row and yet were cut, of all that fit
    padding    positions that hold no token
    crossing   query-key pairs of plain causal attention over a row that join two documents: wasted work
               without a document mask
    context    of the tokens each position could see in its own document and row length, how many a cut hid
    left out   tokens that no row holds, of all
"""

import argparse
from pathlib import Path

import corpora
import drawing
import numpy as np
from results_file import file_result

from penstock.core.rng import shuffled
from penstock.data.packing import PACKERS, PADDING_RULES

LENGTHS = (1024, 2048, 4096, 8192, 32_768)
ROWS = 4096
POOLS = 2
RULES = ("concat", "best_fit", "whole")


def pool(make_lengths, sequence_length, *, seed):
    """Return the shuffled document lengths of one pool, which hold ROWS rows exactly."""
    lengths = make_lengths(ROWS * sequence_length, seed=seed)
    return lengths[shuffled(len(lengths), seed)]


def pack(rule, lengths, sequence_length):
    """Return the pieces of a pool under a rule."""
    if rule in PADDING_RULES:
        lengths = np.minimum(lengths, sequence_length)
    return PACKERS[rule](lengths, num_rows=ROWS, sequence_length=sequence_length)


def figures(lengths, pieces, sequence_length):
    """Return (split, padding, crossing, context lost, left out), each a share of its whole."""
    num_rows = len(pieces.row_ends)
    count = np.bincount(pieces.fragment, minlength=len(lengths))
    fits = lengths <= sequence_length
    positions = num_rows * sequence_length
    inside = float((pieces.length * (pieces.length + 1) // 2).sum())
    row = np.repeat(np.arange(num_rows), np.diff(pieces.row_ends, prepend=0))
    held = np.bincount(row, weights=pieces.length, minlength=num_rows)
    causal = float((held * (held + 1) / 2).sum())
    # Token number i of a document could see min(i, L - 1) before it; in a piece it sees those of the piece.
    short = np.minimum(lengths, sequence_length).astype(np.float64)
    possible = float((short * (short - 1) / 2 + (lengths - short) * (sequence_length - 1)).sum())
    seen = float((pieces.length.astype(np.float64) * (pieces.length - 1) / 2).sum())
    return {
        "split": float((count[fits] > 1).mean()),
        "padding": 1 - float(pieces.length.sum()) / positions,
        "crossing": 1 - inside / causal,
        "context_lost": 1 - seen / possible,
        "left_out": 1 - float(pieces.length.sum()) / float(lengths.sum()),
    }


def measure(lengths_of_rows, pools):
    """Return kind -> rule -> sequence length -> figures, the mean over pools."""
    kinds = {"log-normal": corpora.lognormal_lengths, "code-like": corpora.codelike_lengths}
    found = {}
    for kind, make_lengths in kinds.items():
        for rule in RULES:
            for length in lengths_of_rows:
                several = []
                for seed in range(pools):
                    lengths = pool(make_lengths, length, seed=seed)
                    several.append(figures(lengths, pack(rule, lengths, length), length))
                means = {name: float(np.mean([one[name] for one in several])) for name in several[0]}
                found.setdefault(kind, {}).setdefault(rule, {})[str(length)] = means
                shown = "  ".join(f"{name} {value:7.3%}" for name, value in means.items())
                print(f"{kind:11} {rule:9} {length:7,}  {shown}", flush=True)
    return found


def drawn(found):
    """Return one drawing per figure."""
    titles = {
        "split": "Documents that fit in a row and were split, %",
        "padding": "Padding, % of positions",
        "crossing": "Causal attention pairs that cross documents, %",
        "context_lost": "Context hidden by cuts, %",
        "left_out": "Tokens that no row holds, %",
    }
    drawings = {}
    for figure, title in titles.items():
        series = [
            drawing.Line(
                name=f"{rule}, {kind}",
                x=[float(length) for length in by_length],
                y=[100 * one[figure] for one in by_length.values()],
            )
            for kind, rules in found.items()
            for rule, by_length in rules.items()
        ]
        drawings[figure] = drawing.lines(
            title, series, x_label="sequence length", y_label="%", log_x=True, from_zero=True
        )
    return drawings


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--pools", type=int, default=POOLS, help="pools of 4,096 rows per figure")
    parser.add_argument("--out", type=Path, help="folder to file the result in, as JSON and SVG")
    arguments = parser.parse_args()
    found = measure(arguments.lengths, arguments.pools)
    if arguments.out:
        result = {"rows_per_pool": ROWS, "figures": found}
        file_result(arguments.out, "packing", result, drawings=drawn(found))


if __name__ == "__main__":
    main()
