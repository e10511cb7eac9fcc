"""Train heads that guess tokens ahead, for a model that stays as it is.

PATH is a run, one of its checkpoints, or a Hugging Face folder. The heads learn on CORPUS, in the last
quarter of the steps on what the model itself writes after beginnings of its text. They are used with
`drafts`: answers do not change, they come sooner. How many guesses are accepted is measured on
documents that were held out, and printed.

Ctrl-C saves progress in FOLDER.partial; the same command continues from there.

example:
  penstock train-speculator runs/first --data corpus --out runs/first-heads --steps 2000
  penstock train-speculator ./Llama-3.2-1B --data wiki --out heads --steps 5000 --heads 4 --json
  penstock serve ./Llama-3.2-1B --drafts heads

exit codes: 0 done, 1 failed, 2 wrong usage, 75 stopped by SIGTERM, Ctrl-C or a closed
terminal after saving
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from penstock.cli.options import (
    ModelOptions,
    OutputOptions,
    add_fields,
    add_ignore_key,
    fields_of,
    ignored_keys,
    options_of,
)
from penstock.cli.progress import Display
from penstock.cli.streams import warn
from penstock.cli.training_job import end_early
from penstock.core.signals import StopFlag
from penstock.engine.config import EngineConfig
from penstock.launch.local import EXIT_STOPPED
from penstock.train.speculator.config import SpeculatorTraining

if TYPE_CHECKING:
    from penstock.train.speculator.measure import AcceptanceReport

_DEFAULT = SpeculatorTraining(steps=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculatorOptions:
    """Options of the training of heads that its configuration does not have."""

    data: Annotated[str, "CORPUS"]
    """Folder, address or FORMAT:PATH[,option=value]."""
    out: Annotated[Path, "FOLDER"]
    """Folder for the heads."""
    sequence_length: int | None = None
    """Tokens per row. None: the context, at most 512."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_fields(parser, ModelOptions)
    add_fields(parser, SpeculatorOptions, "data", "out")
    add_fields(parser, SpeculatorTraining, "steps", num_heads="--heads")
    add_fields(parser, SpeculatorTraining, "batch_size", "seed", "inner_dim", "learning_rate")
    add_fields(parser, SpeculatorOptions, "sequence_length")
    add_fields(parser, OutputOptions, more={"json": ", one object when done"})
    add_ignore_key(parser)


def run(arguments: argparse.Namespace) -> int:
    """Train; return the exit code."""
    flag = StopFlag().install(end_early)  # before torch is imported
    with flag.starting(end_early) as begin:
        accepted = _train(arguments, flag, begin)
    if accepted is None:
        return EXIT_STOPPED
    if options_of(arguments, OutputOptions).json:
        steps = fields_of(arguments, SpeculatorTraining)["steps"]
        out = options_of(arguments, SpeculatorOptions).out
        print(json.dumps({"out": str(out), "steps": steps, **asdict(accepted)}))
    else:
        print("\n".join(_as_text(accepted)))
    return 0


def _train(
    arguments: argparse.Namespace, flag: StopFlag, begin: Callable[[], None]
) -> "AcceptanceReport | None":
    from penstock.data.corpus.open import open_corpus
    from penstock.engine.assemble import build_engine
    from penstock.train.inspect.offline_eval import open_for_scoring
    from penstock.train.speculator.run import check, train_speculator
    from penstock.train.speculator.writer import writer

    path, options = options_of(arguments, ModelOptions).path, options_of(arguments, SpeculatorOptions)
    opened = open_for_scoring(path, compute="float32", ignored_keys=ignored_keys(arguments))
    base = opened.model.requires_grad_(False)
    made_with = open_corpus(options.data).manifest.tokenizer
    if opened.tokenizer is not None and made_with not in (None, opened.tokenizer.fingerprint):
        warn(
            f"{options.data}: its tokens were made with another tokenizer file than the model's; unless "
            "both cut text alike, the heads learn nothing."
        )
    training = _training(arguments, context=base.config.max_position_embeddings)
    check(base, options.out, training)
    engine = build_engine(path, replace(_engine_config(training), ignored_keys=ignored_keys(arguments)))
    try:
        with Display() as display:

            def show(step: int, _nats: list[float]) -> None:
                stage = {"text": "train on text", "own": "train on what the model writes"}
                tokens = training.tokens_before(step)
                display.show(stage[training.stage_of(step - 1)], step, training.steps, tokens=tokens)

            begin()
            return train_speculator(
                base,
                options.data,
                options.out,
                training,
                write=writer(engine, num_tokens=training.own_tokens),
                stop_requested=lambda: flag.requested_by is not None,
                on_step=show,
            )
    finally:
        engine.close()


def _training(arguments: argparse.Namespace, *, context: int) -> SpeculatorTraining:
    sequence_length = options_of(arguments, SpeculatorOptions).sequence_length
    if sequence_length is None:
        sequence_length = min(_DEFAULT.sequence_length, context)
    return SpeculatorTraining(
        **fields_of(arguments, SpeculatorTraining),
        sequence_length=sequence_length,
        prompt_tokens=min(_DEFAULT.prompt_tokens, context // 4),
        own_tokens=min(_DEFAULT.own_tokens, context // 2),
    )


def _engine_config(training: SpeculatorTraining) -> EngineConfig:
    """Return an engine for a batch of rows; its cache is as large as they need, so that training has room."""
    return EngineConfig(
        max_context=training.prompt_tokens + training.own_tokens, max_sequences=training.batch_size
    )


def _as_text(accepted: "AcceptanceReport") -> Iterator[str]:
    yield "head  on text  in decoding"
    for head, (text, decoding) in enumerate(zip(accepted.on_text, accepted.decoding, strict=True), start=1):
        yield f"{head:<4}  {text:>7.1%}  {decoding:>11.1%}"
    yield f"{accepted.tokens_per_step:.2f} tokens per step of greedy decoding, over {accepted.steps} steps"
