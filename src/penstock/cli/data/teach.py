"""`penstock data teach`: write a teacher's most likely tokens for a corpus, for distillation.

The teacher reads the corpus once. Of each learned token its top k are kept with their log-probabilities: 8
bytes each, so 160 bytes per token for a top k of 20, and the corpus itself is not altered. A pass that was
interrupted continues when the command is run again.
"""

import argparse
from functools import partial
from pathlib import Path

from penstock.cli.options import add_ignore_key, ignored_keys
from penstock.cli.progress import Display
from penstock.core.dtypes import choice_of
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

_DTYPES = ("float32", "bfloat16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("corpus", metavar="CORPUS", help="folder, address, or FORMAT:PATH[,option=value,...]")
    add("--model", type=Path, required=True, metavar="TEACHER", help="run, checkpoint or Hugging Face folder")
    add("--out", type=Path, required=True, metavar="DIR", help="new folder; must not exist")
    add("--top-k", type=int, default=20, metavar="K", help="most likely tokens to keep (default 20)")
    add("--temperature", type=float, default=1.0, metavar="T",
        help="divisor of the teacher's logits; the same as tune.temperature (default 1)")  # fmt: skip
    add("--sequence-length", type=int, metavar="L",
        help="tokens that the teacher sees at once; default: its context, at most 4096")  # fmt: skip
    add(
        "--compute",
        type=partial(choice_of, choices=_DTYPES),
        choices=_DTYPES,
        default="float32",
        help="dtype of the teacher's computation; default: float32",
    )
    add_ignore_key(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write the columns and print a summary."""
    from penstock.checkpoint.start import find_start
    from penstock.data.corpus.open import open_corpus
    from penstock.train.inspect.offline_eval import open_for_scoring
    from penstock.train.tune.teacher import teach

    if not 0 < arguments.temperature < float("inf"):
        raise UsageError("--temperature must be above 0", got=arguments.temperature)
    corpus = open_corpus(arguments.corpus)
    opened = open_for_scoring(
        arguments.model, compute=arguments.compute, ignored_keys=ignored_keys(arguments)
    )
    context = opened.model.config.max_position_embeddings
    length = arguments.sequence_length or min(context, _LONGEST_ROW)
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
            fix=f"Prepare it with --tokenizer {arguments.model}, or take a teacher with its tokenizer: this "
            "one reads other text in its token ids.",
        )
    with Display() as display:
        teach(
            corpus,
            opened.model,
            arguments.out,
            identity=find_start(arguments.model, ignored_keys=ignored_keys(arguments)).identity,
            k=arguments.top_k,
            temperature=arguments.temperature,
            length=length,
            rows=max(1, _PASS_TOKENS // length),
            device=opened.device,
            progress=lambda done, total: display.show("teach", done, total),
        )
    print(f"{arguments.out}: the {arguments.top_k} most likely tokens of {corpus.num_tokens:,} tokens.")
    return 0
