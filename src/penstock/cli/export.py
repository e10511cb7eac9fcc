"""Export a checkpoint as a Hugging Face folder, for transformers and vLLM; an adapter as a folder of PEFT.

CHECKPOINT is a run (its newest checkpoint is used), one checkpoint, or a Hugging Face folder, which is
then written in another dtype. The run may be training: complete checkpoints never change. For a run that
tunes an adapter, the adapter is written, or its model with --merge, which also merges an adapter's folder.

example:
  penstock export runs/first --step 2000 --out exported
  penstock export runs/first --out exported --dtype float32
  penstock export runs/tuned --out adapter             # for `penstock serve BASE --adapter NAME=adapter`
  penstock export runs/tuned --merge --out merged
  python -c "from transformers import pipeline; print(pipeline('text-generation', 'exported')('Water'))"

exit codes: 0 done, 1 no model or a damaged one, or the folder cannot be written, 2 wrong usage
"""

import argparse
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from penstock.checkpoint.find import SavedCheckpoint, find
from penstock.checkpoint.hf_folder import ADAPTER_CONFIG, is_adapter, is_hugging_face
from penstock.checkpoint.layout import Meta
from penstock.checkpoint.start import find_start, text_folder
from penstock.cli.options import Positional, add_fields, add_ignore_key, ignored_keys, options_of
from penstock.cli.streams import warn
from penstock.core.errors import PenstockError, UsageError
from penstock.core.files import TOKENIZER_FILE
from penstock.core.units import mib, si


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Options of an export."""

    checkpoint: Annotated[Path, Positional("CHECKPOINT")]
    """Run, checkpoint or folder."""
    merge: bool = False
    """Write an adapter's model, not the adapter."""
    base: Annotated[Path | None, "DIR"] = None
    """Base of an adapter's folder, if it moved."""
    step: int | None = None
    """Checkpoint of a run. None: the newest."""
    out: Annotated[Path, "DIR"]
    """New folder; never overwritten."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of the written weights. None: bfloat16; of adapters, theirs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_fields(parser, ExportOptions)
    add_ignore_key(parser)


def run(arguments: argparse.Namespace) -> int:
    """Export; return the exit code."""
    options = options_of(arguments, ExportOptions)
    path = options.checkpoint
    saved = _adapter_checkpoint(path, step=options.step)
    has_adapter = saved is not None or is_adapter(path)
    _check(options, has_adapter=has_adapter, is_folder=saved is None)
    if saved is not None and not options.merge:
        return _export_adapter(saved, options)
    return _export_model(options, merges=has_adapter and saved is None, ignored=ignored_keys(arguments))


def _check(options: ExportOptions, *, has_adapter: bool, is_folder: bool) -> None:
    """Refuse options that do not belong to what is exported."""
    path = options.checkpoint
    if not path.is_dir():
        return  # which whoever opens it says
    if options.merge and not has_adapter:
        raise UsageError(
            "--merge is for adapters, and this is a model", got=str(path), fix="Leave --merge out."
        )
    if has_adapter and is_folder and not options.merge:
        raise UsageError(
            "This is an adapter's folder already", got=str(path), fix="Add --merge to write its model."
        )
    if options.base is not None and not (has_adapter and is_folder):
        raise UsageError("--base is for an adapter's folder", got=str(options.base), fix="Leave --base out.")
    if has_adapter and not options.merge and options.dtype is not None:
        raise UsageError(
            "An adapter is written in the dtype in which it was trained", got=f"--dtype {options.dtype}",
            fix="Leave --dtype out, or add --merge to write its model.",
        )  # fmt: skip


def _adapter_checkpoint(path: Path, *, step: int | None) -> SavedCheckpoint | None:
    """Return the checkpoint of a path if it is that of an adapter."""
    if not path.is_dir() or is_hugging_face(path) or (path / ADAPTER_CONFIG).is_file():
        return None
    saved = find(path, step=step)
    return None if saved.index().meta.adapter is None else saved


def _export_adapter(saved: SavedCheckpoint, options: ExportOptions) -> int:
    """Write the adapter of a checkpoint as a folder of PEFT; return the exit code."""
    from penstock.checkpoint.adapter_run import read_adapter_tensors
    from penstock.checkpoint.peft import save_adapter

    index = saved.index()
    meta, tensors = index.meta, read_adapter_tensors(saved, index)
    assert meta.adapter is not None, meta
    tokenizer_path = text_folder(options.checkpoint) / TOKENIZER_FILE
    files = {}
    if tokenizer_path.is_file():
        files = tokenizer_files(tokenizer_path, context=meta.model.max_position_embeddings)
    base = _base_of(meta)
    save_adapter(
        tensors,
        meta.adapter,
        meta.model,
        options.out,
        base=base,
        base_hash=meta.start_hash,
        extra_files=files,
    )
    numbers, size = sum(t.numel() for t in tensors.values()), _size(options.out)
    print(f"{options.out}: an adapter of {si(numbers)} parameters, {mib(size)}")
    weights = "" if meta.adapter.base == "compute" else f" --weights {meta.adapter.base}"
    if meta.adapter.new_rows:
        print(f"in PEFT, first resize its base: model.resize_token_embeddings({meta.model.vocab_size})")
    served = f"{shlex.quote(str(base))}{weights} --adapter {shlex.quote(f'NAME={options.out}')}"
    if meta.adapter.saved:
        run = shlex.quote(str(options.checkpoint))
        print(f"to serve its modules that were trained whole: penstock export {run} --merge --out DIR")
    else:
        print(f"serve it with its base: penstock serve {served}")
    return 0


def _base_of(meta: Meta) -> str:
    """Return the folder of an adapter's base: of a run the checkpoint, as the run may go on."""
    try:
        return str(
            find_start(Path(meta.start_from), step=meta.start_step, ignored_keys=meta.model.ignored_keys)
        )
    except PenstockError:  # it is gone; an adapter can be written all the same
        return meta.start_from


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _export_model(options: ExportOptions, *, merges: bool, ignored: tuple[str, ...]) -> int:
    """Write a model; return the exit code.

    Args:
        merges: CHECKPOINT is an adapter's folder.
        ignored: values of --ignore-key.
    """
    import torch  # here and below: not needed for --help

    from penstock.checkpoint.hf import save_pretrained
    from penstock.engine.model_runner.open import open_model
    from penstock.text.companions import end_ids
    from penstock.text.tokenizer import Tokenizer

    if merges:
        from penstock.checkpoint.adapter_run import open_with_adapter

        model, tokenizer_path = open_with_adapter(options.checkpoint, base=options.base, ignored_keys=ignored)
    else:
        model, tokenizer_path = open_model(options.checkpoint, step=options.step, ignored_keys=ignored)
    dtype = options.dtype or "bfloat16"
    files: dict[str, str] = {}
    eos_id: int | list[int] | None = None
    if tokenizer_path is None:
        warn(f"{options.checkpoint} has no tokenizer.json: the folder will have weights only.")
    else:
        files = tokenizer_files(tokenizer_path, context=model.config.max_position_embeddings)
        named = end_ids(files)
        eos_id = Tokenizer.load(tokenizer_path).eos_id if named is None else named
    save_pretrained(
        model.state_dict(),
        model.config,
        options.out,
        dtype=getattr(torch, dtype),
        eos_id=eos_id,
        extra_files=files,
    )
    size = _size(options.out)
    print(f"{options.out}: {si(model.config.num_parameters)} parameters in {dtype}, {mib(size)}")
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
