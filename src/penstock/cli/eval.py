"""Score a model: on tasks, as lm-eval does, or by its loss on text; or compare two results.

PATH is a run (its newest checkpoint is used), one checkpoint, or a Hugging Face folder.

With --tasks, lm-eval asks the questions and judges, and our engine answers in this process. A task is a
file, YAML or JSON, or the name of one that lm-eval ships; nothing is downloaded without --download. Results
are in lm-eval's format (--json, --out). Two files of results, PATH PATH, print their differences with
standard errors, paired by question if both were written with --log-samples.

Without --tasks, the model is scored on text: loss, perplexity and bits per byte, by corpus. A run is scored
on the held-out rows of its validation, with the same results. With --corpus, any model is scored on every row
of the given corpora, or on --rows of each. NAME=CORPUS with --holdout reads what a run with that name and
that data.holdout holds out. Bits per byte compares models with different tokenizers; loss and perplexity do
not. All three depend on the length of the rows, because the first tokens of a row have little context.

example:
  penstock eval runs/first --tasks ./mine.yaml
  penstock eval ./Llama-3.2-1B --tasks hellaswag,arc_easy --shots 5 --limit 200 --download
  penstock eval ./Qwen3-0.6B --tasks ./mine.yaml --chat-template --adapter runs/tuned-adapter
  penstock eval ./Llama-3.2-1B --tasks ./mine.yaml --log-samples --out base.json
  penstock eval ./Llama-3.2-1B --tasks ./mine.yaml --weights int8 --log-samples --out int8.json
  penstock eval base.json int8.json
  penstock eval runs/first
  penstock eval runs/first --corpus wiki --corpus code=corpora/python --json

exit codes: 0 done, 1 no model or corpus, a damaged one, or a task failed, 2 wrong usage, 130 interrupted
"""

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from penstock.cli.options import (
    Positional,
    add_fields,
    add_ignore_key,
    fields_of,
    ignored_keys,
    options_of,
)
from penstock.cli.progress import Display
from penstock.cli.streams import warn
from penstock.core.errors import UsageError
from penstock.core.files import write_atomic
from penstock.engine.config import EngineConfig
from penstock.evaluation.compare import cautions, differences, read_results
from penstock.evaluation.options import EvaluationOptions, TextEvalOptions
from penstock.evaluation.tables import differences_table, results_table
from penstock.train.score import Score, total

if TYPE_CHECKING:
    from penstock.train.data_setup import Heldout
    from penstock.train.inspect.offline_eval import OpenedModel

_NAMED = re.compile(r"([\w.-]+)=(.+)")  # an address or FORMAT:PATH has a colon before any equals sign


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """Options of an evaluation that are neither of text nor how lm-eval judges."""

    path: Annotated[tuple[Path, ...], Positional("PATH")]
    """Run, checkpoint or Hugging Face folder; or two files of results to compare."""
    json: bool = False
    """Print JSON."""
    tasks: Annotated[tuple[str, ...], "TASK[,TASK]"] = ()
    """Files, or names, groups and patterns of lm-eval's tasks."""
    adapter: Annotated[str | None, "[NAME=]FOLDER"] = None
    """A LoRA adapter of this model, saved by PEFT."""
    out: Annotated[Path | None, "FILE"] = None
    """Write the results as JSON."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_fields(parser, EvalOptions, "path", "json")
    add_ignore_key(parser)
    add_fields(parser.add_argument_group("text"), TextEvalOptions)
    tasks = parser.add_argument_group("tasks")
    add_fields(tasks, EvalOptions, "tasks")
    add_fields(tasks, EvaluationOptions)
    add_fields(tasks, EvalOptions, "adapter", "out")
    add_fields(
        tasks, EngineConfig, "weights", "activations", "device", "max_context", max_sequences="--batch"
    )


def run(arguments: argparse.Namespace) -> int:
    """Evaluate; return the exit code."""
    options = options_of(arguments, EvalOptions)
    if len(options.path) == 2 and all(path.is_file() for path in options.path):
        return _compare(options)
    if len(options.path) != 1:
        raise UsageError(
            "One model is evaluated at a time, and two files of results are compared",
            got=[str(path) for path in options.path],
            fix="Give one PATH, or two files that --out wrote.",
        )
    (path,) = options.path
    if options.tasks:
        return _run_tasks(path, arguments, options)
    if given := _given_for_tasks(arguments, options):
        raise UsageError(f"{given} needs --tasks", fix="Name a task, or leave it out.")
    return _run_text(path, arguments, as_json=options.json)


def _compare(options: EvalOptions) -> int:
    first, second = map(read_results, options.path)
    found = differences(first, second)
    if options.json:
        print(
            json.dumps(
                [
                    {
                        "task": one.task,
                        "metric": one.metric,
                        "first": one.first,
                        "second": one.second,
                        "difference": one.delta,
                        "stderr": one.stderr,
                        "pairs": one.num_pairs,
                    }
                    for one in found
                ]
            )
        )
    else:
        print("\n".join(differences_table(found)))
    for caution in cautions(first, second):
        warn(f"Compare with care: {caution}.")
    return 0


def _given_for_tasks(arguments: argparse.Namespace, options: EvalOptions) -> str | None:
    """Return an option that was given and does nothing without --tasks."""
    given = _given_of(arguments, EvaluationOptions) or _given_of(arguments, EngineConfig)
    return given or ("--out" if options.out else "--adapter" if options.adapter else None)


def _given_of(
    arguments: argparse.Namespace, kind: type[EvaluationOptions | EngineConfig | TextEvalOptions]
) -> str | None:
    """Return an option of a dataclass that was given another value than its default."""
    defaults = kind()
    for name, value in fields_of(arguments, kind).items():
        if value != getattr(defaults, name) and name != "ignored_keys":
            return f"--{name.replace('_', '-').replace('max-sequences', 'batch')}"
    return None


def _run_tasks(path: Path, arguments: argparse.Namespace, given: EvalOptions) -> int:
    if option := _given_of(arguments, TextEvalOptions):
        raise UsageError(
            f"{option} is for an evaluation on text, not for --tasks",
            fix="Leave it out. --weights chooses the format of the weights for tasks."
            if option == "--compute"
            else "Run one evaluation, then the other.",
        )
    options = options_of(arguments, EvaluationOptions)
    if given.out is not None and not given.out.absolute().parent.is_dir():
        raise UsageError(f"{given.out.parent} is not a folder", fix="Create it, or correct --out.")
    names = [name.strip() for text in given.tasks for name in text.split(",") if name.strip()]
    adapter = _adapter_of(given.adapter)
    from penstock.evaluation.tasks import load_tasks

    with Display() as display:
        display.show("load lm-eval and its tasks", 0, None)
        tasks = load_tasks(names, options)
        display.show("open the model", 0, None)
        from penstock.engine.llm import LLM  # torch, which a refused task does without
        from penstock.evaluation.evaluate import evaluate

        config = EngineConfig(
            adapters={} if adapter is None else dict([adapter]),
            block_size=_BLOCK_SIZE,
            **fields_of(arguments, EngineConfig),
        )
        with LLM(path, config) as llm:
            display.show("write the prompts", 0, None)
            results = evaluate(
                llm,
                tasks,
                options,
                name=str(path),
                adapter=None if adapter is None else adapter[0],
                weights=config.weights,
                on_progress=display.show,
            )
    text = json.dumps(results, ensure_ascii=False, indent=None if given.json else 2)
    if given.out is not None:
        write_atomic(given.out, json.dumps(results, ensure_ascii=False, indent=2) + "\n")
    print(text if given.json else "\n".join(results_table(results)))
    if results["num_cut"]:
        warn(
            f"{results['num_cut']:,} requests were longer than the model's context of "
            f"{results['max_length']:,} tokens; their first tokens were cut off, as lm-eval does."
        )
    if results["num_without_system"]:
        warn(
            f"The chat template refused the system message of {results['num_without_system']:,} prompts; "
            "they were written without it, as lm-eval does."
        )
    return 0


_BLOCK_SIZE = 4
"""Tokens of a cache block, few: what choices share ends anywhere, and the rest of its block is computed for
each of them."""


def _adapter_of(given: str | None) -> tuple[str, Path] | None:
    """Return name and folder of an adapter.

    >>> _adapter_of("mine=runs/a"), _adapter_of("runs/a")
    (('mine', PosixPath('runs/a')), ('a', PosixPath('runs/a')))
    """
    if given is None:
        return None
    match = _NAMED.fullmatch(given)
    name, folder = match.groups() if match else (Path(given).name, given)
    return name, Path(folder)


def _run_text(path: Path, arguments: argparse.Namespace, *, as_json: bool) -> int:
    """Score on text."""
    from penstock.train.inspect.offline_eval import (
        is_of_another_tokenizer,
        open_for_scoring,
        recipe_of,
        scores_of,
    )

    recipe, wanted = recipe_of(path), options_of(arguments, TextEvalOptions)
    compute = wanted.compute or (recipe.compute if recipe else "float32")
    opened = open_for_scoring(path, compute=compute, ignored_keys=ignored_keys(arguments))
    scores: dict[str, Score] = {}
    rows = 0
    with Display() as display:
        for heldout in _texts(path, wanted, opened):
            names = ", ".join(heldout.loader.corpora)
            if is_of_another_tokenizer(opened, heldout):
                warn(
                    f"{names}: its tokens were made with another tokenizer file than the model's; "
                    "unless both split text alike, the scores are meaningless."
                )
            show = partial(display.show, f"score {names}", total=heldout.rows)
            scores |= scores_of(opened, heldout, on_rows=show)
            rows += heldout.rows
    if not total(scores).tokens:
        raise UsageError("These rows have no token to predict", got=rows, fix="Give more --rows.")
    if as_json:
        print(json.dumps(_as_json(path, scores, rows=rows)))
    else:
        print("\n".join(_as_text(scores)))
    return 0


def _texts(path: Path, wanted: TextEvalOptions, opened: "OpenedModel") -> Iterator["Heldout"]:
    from penstock.train.inspect.offline_eval import own_rows, rows_of

    if not wanted.corpus:
        if wanted.sequence_length is not None or wanted.holdout is not None:
            raise UsageError(
                "--sequence-length and --holdout need --corpus: without it they are those of the run",
                fix="Give --corpus, or leave them out.",
            )
        yield own_rows(path, rows=wanted.rows)
    for name, corpus in _named(wanted.corpus).items():
        yield rows_of(name, corpus, wanted, context=opened.model.config.max_position_embeddings)


def _named(corpora: Sequence[str]) -> dict[str, str]:
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
