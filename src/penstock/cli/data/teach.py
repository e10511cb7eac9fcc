"""`penstock data teach`: write a teacher's most likely tokens for a corpus, for distillation.

The teacher reads the corpus once. Of each learned token its top k are kept with their log-probabilities: 8
bytes each, so 160 bytes per token for a top k of 20, and the corpus itself is not altered. A pass that was
interrupted continues when the command is run again.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from penstock.cli.options import CorpusOptions, add_fields, add_ignore_key, ignored_keys, options_of
from penstock.cli.progress import Display
from penstock.core.errors import ConfigError, UsageError

EPILOG = """\
Train with [tune] loss = "distillation", and columns = "DIR" in the corpus's [data.corpora.NAME].

example:
  penstock data teach chats --model ./Llama-3.1-8B-Instruct --out chats-taught
  penstock data teach chats --model runs/teacher --top-k 50 --temperature 2 --out chats-taught

exit codes: 0 done, 1 no model or corpus, or a damaged one, 2 wrong usage
"""

_LONGEST_ROW = 4096
_PASS_TOKENS = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class TeachOptions:
    """Options of a teacher's pass."""

    model: Annotated[Path, "TEACHER"]
    """Run, checkpoint or Hugging Face folder."""
    out: Annotated[Path, "DIR"]
    """New folder; must not exist."""
    top_k: Annotated[int, "K"] = 20
    """Most likely tokens to keep."""
    temperature: Annotated[float, "T"] = 1.0
    """Divisor of the teacher's logits; the same as tune.temperature."""
    sequence_length: Annotated[int | None, "L"] = None
    """Tokens that the teacher sees at once. None: its context, at most 4096."""
    compute: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the teacher's computation."""

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise UsageError("--temperature must be above 0", got=self.temperature)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_fields(parser, CorpusOptions)
    add_fields(parser, TeachOptions)
    add_ignore_key(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write the columns and print a summary."""
    options = options_of(arguments, TeachOptions)
    from penstock.checkpoint.start import find_start
    from penstock.data.corpus.open import open_corpus
    from penstock.train.inspect.offline_eval import open_for_scoring
    from penstock.train.tune.teacher import teach

    corpus = open_corpus(options_of(arguments, CorpusOptions).corpus)
    opened = open_for_scoring(options.model, compute=options.compute, ignored_keys=ignored_keys(arguments))
    context = opened.model.config.max_position_embeddings
    length = options.sequence_length
    if length is None:
        length = min(context, _LONGEST_ROW)
    if not 2 <= length <= context:
        raise UsageError(
            f"--sequence-length must be from 2 to the teacher's context of {context:,}", got=length
        )
    if corpus.manifest.vocab_size > opened.model.config.vocab_size:
        raise ConfigError(
            f"{corpus.location} has token ids up to {corpus.manifest.vocab_size - 1:,}, and the teacher's "
            f"vocabulary has {opened.model.config.vocab_size:,}",
            fix="Take a teacher with the tokenizer that the corpus was prepared with.",
        )
    tokenizer = opened.tokenizer
    known = corpus.manifest.tokenizer
    if tokenizer is not None and known is not None and tokenizer.fingerprint != known:
        raise ConfigError(
            f"{corpus.location} was prepared with another tokenizer than the teacher's",
            got=f"{known[:16]} and {tokenizer.fingerprint[:16]}",
            fix=f"Prepare it with --tokenizer {options.model}, or take a teacher with its tokenizer: this "
            "one reads other text in its token ids.",
        )
    with Display() as display:
        teach(
            corpus,
            opened.model,
            options.out,
            identity=find_start(options.model, ignored_keys=ignored_keys(arguments)).identity,
            k=options.top_k,
            temperature=options.temperature,
            length=length,
            rows=max(1, _PASS_TOKENS // length),
            device=opened.device,
            progress=lambda done, total: display.show("teach", done, total),
        )
    print(f"{options.out}: the {options.top_k} most likely tokens of {corpus.num_tokens:,} tokens.")
    return 0
