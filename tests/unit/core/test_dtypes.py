"""One spelling of dtypes: every option and recipe key that takes one reads the short names too."""

import argparse
import dataclasses
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import torch

from penstock.cli import eval as eval_command
from penstock.cli import export
from penstock.cli.data import teach
from penstock.cli.options import add_fields, fields_of
from penstock.core import config
from penstock.core.dtypes import choice_of, dtype_name
from penstock.core.errors import ConfigError
from penstock.data.formats.stored import dtype_option
from penstock.data.loader import check_dtype
from penstock.engine.config import EngineConfig
from penstock.train.recipe.config import PrecisionConfig, TrainConfig

SHORT = {
    "float32": ("fp32", "FP32", "torch.float32", "float"),
    "bfloat16": ("bf16", "BF16", "torch.bfloat16"),
}


def sections():
    """Yield (dotted key, section's class, field, its choices) of a recipe."""
    todo = [("", TrainConfig)]
    while todo:
        path, kind = todo.pop()
        for name, hint in get_type_hints(kind).items():
            parts = [hint, *get_args(hint)]
            todo += [(f"{path}{name}.", part) for part in parts if dataclasses.is_dataclass(part)]
            if get_origin(hint) is Literal:
                yield f"{path}{name}", kind, name, get_args(hint)


KEYS = [
    (key, kind, name, choice) for key, kind, name, all_ in sections() for choice in all_ if choice in SHORT
]


def test_the_keys_that_take_a_dtype_are_found():
    assert {key for key, *_ in KEYS} >= {"compute", "precision.weights", "ethernet.gather", "ethernet.reduce"}


@pytest.mark.parametrize(("key", "kind", "name", "choice"), KEYS)
def test_every_key_of_a_recipe_reads_the_usual_spellings(key, kind, name, choice):
    hint = get_type_hints(kind)[name]
    for text in SHORT[choice]:
        assert config._check(text, hint, where=key) == choice


def test_the_stored_form_of_a_longer_choice_is_read_too():
    hint = get_type_hints(PrecisionConfig)["weights"]
    assert config._check("bf16_stochastic", hint, where="precision.weights") == "bfloat16_stochastic"
    with pytest.raises(ConfigError, match=r"no such choice \(got 'fp16'\)"):
        config._check("fp16", hint, where="precision.weights")


@pytest.mark.parametrize(
    ("command", "option", "others"),
    [
        (export, "--dtype", ["RUN", "--out", "x"]),
        (eval_command, "--compute", ["RUN"]),
        (teach, "--compute", ["CORPUS", "--model", "x", "--out", "y"]),
    ],
)
def test_options_read_the_usual_spellings_and_show_one(command, option, others):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    for choice, texts in SHORT.items():
        for text in texts:
            read, _ = parser.parse_known_args([*others, option, text])
            (found,) = (value for name, value in vars(read).items() if name.endswith(f".{option[2:]}"))
            assert found == choice
    assert "bf16" not in parser.format_help()


@pytest.mark.parametrize("text", ["INT8", "torch.int8", "i8"])
def test_small_and_unsigned_integers_are_read_too(text):
    assert dtype_name(text) == "int8"
    assert (dtype_name("i16"), dtype_name("u64")) == ("int16", "uint64")


def test_messages_show_what_was_written(capsys):
    with pytest.raises(ConfigError, match="got 'fp16'"):
        config._check("fp16", Literal["bfloat16", "float32"], where="compute")
    parser = argparse.ArgumentParser()
    add_fields(parser, EngineConfig, "weights")
    with pytest.raises(SystemExit):
        parser.parse_args(["--weights", "fp64"])
    assert "invalid choice: 'fp64'" in capsys.readouterr().err


def test_a_choice_is_never_read_as_another():
    assert choice_of("half", ("half", "float16")) == "half"


def test_the_engine_reads_them_in_python_and_on_the_command_line():
    assert EngineConfig(weights="bf16").weights == "bfloat16"  # type: ignore[arg-type]
    parser = argparse.ArgumentParser()
    add_fields(parser, EngineConfig, "weights")
    assert fields_of(parser.parse_args(["--weights", "fp32"]), EngineConfig)["weights"] == "float32"


def test_files_of_token_ids_and_loaders_read_them():
    assert dtype_option({"dtype": "u16"}, default=None, name="x") == "uint16"
    assert check_dtype("torch.int32") == "int32"


def test_every_spelling_is_of_a_dtype_of_torch():
    from penstock.core.dtypes import _SHORT

    names = set(_SHORT.values()) - {"float8"}
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in names)
    assert all(dtype_name(name) == name for name in names)
