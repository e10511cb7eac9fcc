"""Score a model on text: loss, perplexity and bits per byte, by corpus.

PATH is a run (its newest checkpoint is used), one checkpoint, or a Hugging Face folder. A run is scored on
the held-out rows of its validation, with the same results. With --corpus, any model is scored on every row
of the given corpora, or on --rows of each. NAME=CORPUS with --holdout reads what a run with that name and
that data.holdout holds out.

Bits per byte compares models with different tokenizers; loss and perplexity do not. All three depend on the
length of the rows, because the first tokens of a row have little context.

example:
  penstock eval runs/first
  penstock eval runs/first --corpus wiki --corpus code=corpora/python --json
  penstock eval ./Llama-3.2-1B --corpus wiki --sequence-length 2048 --rows 500
  penstock eval runs/first --corpus docs=corpus --holdout 0.02

exit codes: 0 done, 1 no model or corpus, or a damaged one, 2 wrong usage
"""

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.progress import Display
from penstock.cli.streams import complain
from penstock.core.errors import UsageError
from penstock.train.score import Score, total

if TYPE_CHECKING:
    from penstock.train.data_setup import Heldout
    from penstock.train.inspect.offline_eval import OpenedModel

_NAMED = re.compile(r"([\w.-]+)=(.+)")  # an address or FORMAT:PATH has a colon before any equals sign


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("path", type=Path, metavar="PATH", help="run, checkpoint or Hugging Face folder")
    parser.add_argument(
        "--corpus",
        action="append",
        default=[],
        metavar="[NAME=]CORPUS",
        help="folder, address or FORMAT:PATH[,option=value]; may be repeated",
    )
    parser.add_argument("--rows", type=int, metavar="N", help="at most N rows of each corpus; default: all")
    parser.add_argument(
        "--sequence-length", type=int, metavar="L", help="tokens per row; default: the context, at most 4096"
    )
    parser.add_argument(
        "--holdout", type=float, default=0.0, metavar="SHARE", help="only what this data.holdout holds out"
    )
    parser.add_argument(
        "--compute", choices=("float32", "bfloat16"), help="default: that of the run's recipe, else float32"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Score; return the exit code."""
    from penstock.train.inspect.offline_eval import (
        is_of_another_tokenizer,
        open_for_scoring,
        recipe_of,
        scores_of,
    )

    recipe = recipe_of(arguments.path)
    opened = open_for_scoring(
        arguments.path, compute=arguments.compute or (recipe.compute if recipe else "float32")
    )
    scores: dict[str, Score] = {}
    rows = 0
    with Display() as display:
        for heldout in _texts(arguments, opened):
            names = ", ".join(heldout.loader.corpora)
            if is_of_another_tokenizer(opened, heldout):
                complain(
                    f"{names}: its tokens were made with another tokenizer file than the model's; "
                    "unless both split text alike, the scores are meaningless."
                )
            show = partial(display.show, f"score {names}", total=heldout.rows)
            scores |= scores_of(opened, heldout, on_rows=show)
            rows += heldout.rows
    if not total(scores).tokens:
        raise UsageError("These rows have no token to predict", got=rows, fix="Give more --rows.")
    if arguments.json:
        print(json.dumps(_as_json(arguments.path, scores, rows=rows)))
    else:
        print("\n".join(_as_text(scores)))
    return 0


def _texts(arguments: argparse.Namespace, opened: "OpenedModel") -> Iterator["Heldout"]:
    from penstock.train.inspect.offline_eval import EvalRequest, own_rows, rows_of

    wanted = EvalRequest(
        sequence_length=arguments.sequence_length, rows=arguments.rows, holdout=arguments.holdout
    )
    if not arguments.corpus:
        if arguments.sequence_length or arguments.holdout:
            raise UsageError(
                "--sequence-length and --holdout need --corpus: without it they are those of the run",
                fix="Give --corpus, or leave them out.",
            )
        yield own_rows(arguments.path, rows=wanted.rows)
    for name, corpus in _named(arguments.corpus).items():
        yield rows_of(name, corpus, wanted, context=opened.model.config.max_position_embeddings)


def _named(corpora: list[str]) -> dict[str, str]:
    """Return the corpora by name: the given one, or the last part of the path.

    >>> _named(["data/wiki/", "code=megatron:/m/x_document", "synthetic:tokens=1e6"])
    {'wiki': 'data/wiki/', 'code': 'megatron:/m/x_document', 'synthetic:tokens=1e6': 'synthetic:tokens=1e6'}
    """
    found: dict[str, str] = {}
    for text in corpora:
        match = _NAMED.fullmatch(text)
        name, corpus = match.groups() if match else (text.rstrip("/").rpartition("/")[2], text)
        if name in found:
            raise UsageError("Two corpora have this name", got=name, fix="Name one with NAME=CORPUS.")
        found[name] = corpus
    return found


def _as_json(path: Path, scores: Mapping[str, Score], *, rows: int) -> dict[str, Any]:
    return {
        "model": str(path),
        "rows": rows,
        "corpora": {name: _values(score) for name, score in scores.items()},
        "all": _values(total(scores)),
    }


def _values(score: Score) -> dict[str, float | None]:
    return {
        "tokens": score.tokens,
        "bytes": score.text_bytes or None,
        "loss": score.loss,
        "perplexity": score.perplexity,
        "bits_per_byte": score.bits_per_byte,
    }


def _as_text(scores: Mapping[str, Score]) -> Iterator[str]:
    shown = {**scores, **({"all": total(scores)} if len(scores) > 1 else {})}
    width = max(map(len, [*shown, "corpus"]))
    yield f"{'corpus':<{width}}  {'tokens':>12}  {'nats/token':>10}  {'perplexity':>10}  {'bits/byte':>9}"
    for name, score in shown.items():
        bits = "-" if score.bits_per_byte is None else f"{score.bits_per_byte:.4f}"
        figures = f"{score.tokens:>12,}  {score.loss:>10.4f}  {score.perplexity:>10.2f}  {bits:>9}"
        yield f"{name:<{width}}  {figures}"
    if any(score.bits_per_byte is None for score in shown.values()):
        yield "-: the tokenizer is unknown, or does not give the length of its tokens"
