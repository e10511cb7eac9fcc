"""Export a checkpoint as a Hugging Face folder, for transformers and vLLM.

CHECKPOINT is a run (its newest checkpoint is used), one checkpoint, or a Hugging Face folder, which is
then written in another dtype. The run may be training: complete checkpoints never change.

example:
  penstock export runs/first --step 2000 --out exported
  penstock export runs/first --out exported --dtype bf16
  python -c "from transformers import pipeline; print(pipeline('text-generation', 'exported')('Water'))"

exit codes: 0 done, 1 no model or a damaged one, or the folder cannot be written, 2 wrong usage
"""

import argparse
import json
import sys
from pathlib import Path

from penstock.core.units import mib, si

_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
"""Value of --dtype -> name in torch."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="run, checkpoint or folder")
    parser.add_argument("--step", type=int, metavar="N", help="checkpoint of a run; default: the newest")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="new folder; never overwritten"
    )
    parser.add_argument(
        "--dtype", choices=_DTYPES, default="bf16", help="dtype of the written weights; default: %(default)s"
    )


def run(arguments: argparse.Namespace) -> int:
    """Export; return the exit code."""
    import torch  # here and below: not needed for --help

    from penstock.checkpoint.hf import save_pretrained
    from penstock.engine.model_runner.open import open_model
    from penstock.text.companions import end_ids
    from penstock.text.tokenizer import Tokenizer

    model, tokenizer_path = open_model(arguments.checkpoint, step=arguments.step)
    files: dict[str, str] = {}
    eos_id: int | list[int] | None = None
    if tokenizer_path is None:
        print(
            f"{arguments.checkpoint} has no tokenizer.json: the folder will have weights only",
            file=sys.stderr,
        )
    else:
        files = tokenizer_files(tokenizer_path, context=model.config.max_position_embeddings)
        named = end_ids(files)
        eos_id = Tokenizer.load(tokenizer_path).eos_id if named is None else named
    save_pretrained(
        model.state_dict(),
        model.config,
        arguments.out,
        dtype=getattr(torch, _DTYPES[arguments.dtype]),
        eos_id=eos_id,
        extra_files=files,
    )
    size = sum(file.stat().st_size for file in arguments.out.iterdir())
    print(f"{arguments.out}: {si(model.config.num_parameters)} parameters in {arguments.dtype}, {mib(size)}")
    return 0


def tokenizer_files(tokenizer_path: Path, *, context: int) -> dict[str, str]:
    """Return the tokenizer's files, by name, for `AutoTokenizer`.

    Existing files beside the tokenizer are copied. If there is no tokenizer_config.json, one is written that
    names the end token, so that generation stops where training documents end.

    Args:
        context: maximum tokens of the model.
    """
    from penstock.text.companions import companions_of
    from penstock.text.tokenizer import Tokenizer

    files = {"tokenizer.json": tokenizer_path.read_text(encoding="utf-8")}
    files |= companions_of([tokenizer_path.parent])
    if "tokenizer_config.json" not in files:
        tokenizer = Tokenizer.load(tokenizer_path)
        end = None if tokenizer.eos_id is None else tokenizer.decode([tokenizer.eos_id], special=True)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": context,
            "clean_up_tokenization_spaces": False,  # True would drop spaces before punctuation
            **({} if end is None else {"eos_token": end}),
        }
        files["tokenizer_config.json"] = json.dumps(config, indent=1) + "\n"
    return files
