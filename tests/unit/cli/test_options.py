"""Options that are generated from the fields of a dataclass, and back."""

import argparse
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Annotated, Literal

import pytest

from penstock.cli.main import VERBS
from penstock.cli.options import (
    ModelOptions,
    Positional,
    add_answer_arguments,
    add_fields,
    fields_of,
    options_of,
    params_of,
    text_file,
)
from penstock.core.errors import UsageError
from penstock.core.units import Count
from penstock.engine.sampling_params import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One field of each kind."""

    num_steps: int
    """Steps in all."""
    rate: float = 1e-3
    """Learning rate, of which 10% are left in the end.

    This paragraph is for readers of the class."""
    cache: Literal["auto", "int8"] = "auto"
    """What keys and values are kept in."""
    context: int | None = None
    """Tokens at most; None: those of the model."""
    device: str | None = None
    """Where to compute; None: the first GPU."""
    reuse: bool = True
    """Keep blocks; False: forget them."""
    trust: bool = False
    """Names become tokens. False: they are text."""
    size: Count = 10
    """Bytes at most."""
    limit: Count | None = None
    """Rows at most; None: all."""
    wait_s: float = 60.0
    """Longest wait."""
    queue: str = ""
    """Name of a queue. Empty: the engine's own."""
    stops: tuple[str, ...] = ()
    """Texts that end an answer."""
    out: Annotated[str | None, "FILE"] = None
    """File to write."""
    headers: Annotated[tuple[str, ...], "A=B"] = ()
    """Header of an answer."""


def a_parser():
    parser = argparse.ArgumentParser(prog="test", add_help=False)
    add_fields(parser, Config, "rate", "cache", "context", "device", "reuse", "trust", stops="--stop")
    add_fields(parser, Config, "size", "limit", "wait_s", "queue", "out", "headers", num_steps="--steps")
    return parser


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", {}),
        ("--rate 0.5 --cache int8 --context 7", {"rate": 0.5, "cache": "int8", "context": 7}),
        ("--no-reuse --trust --device cpu", {"reuse": False, "trust": True, "device": "cpu"}),
        ("--stop a --stop b", {"stops": ("a", "b")}),
        ("--out a --headers x=1 --headers y=2", {"out": "a", "headers": ("x=1", "y=2")}),
        ("--size 64MiB --limit 10M --wait 2m", {"size": 2**26, "limit": 10**7, "wait_s": 120.0}),
    ],
)
def test_what_is_typed_are_the_fields(words, expected):
    arguments = a_parser().parse_args(["--steps", "3", *words.split()])
    assert Config(**fields_of(arguments, Config)) == Config(num_steps=3, **expected)


@pytest.mark.parametrize(
    "words", ["", "--steps x", "--steps 3 --cache int9", "--steps 3 --num-steps 4", "--steps 3 --reuse"]
)
def test_what_is_no_field_is_refused(words):
    with pytest.raises(SystemExit) as ended:
        a_parser().parse_args(words.split())
    assert ended.value.code == 2


def test_help_is_the_text_below_the_field(monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    assert a_parser().format_help().partition("options:\n")[2] == (
        "  --rate X             learning rate, of which 10% are left in the end; default: 0.001\n"
        "  --cache {auto,int8}  what keys and values are kept in; default: auto\n"
        "  --context N          tokens at most; default: those of the model\n"
        "  --device TEXT        where to compute; default: the first GPU\n"
        "  --no-reuse           forget them\n"
        "  --trust              names become tokens\n"
        "  --stop TEXT          texts that end an answer; may be repeated\n"
        "  --size N             bytes at most; default: 10\n"
        "  --limit N            rows at most; default: all\n"
        "  --wait TIME          longest wait; default: 60 s\n"
        "  --queue TEXT         name of a queue; default: the engine's own\n"
        "  --out FILE           file to write\n"
        "  --headers A=B        header of an answer; may be repeated\n"
        "  --steps N            steps in all\n"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Values that need no option, and one that may be left out."""

    folder: Annotated[Path, Positional("FOLDER")]
    """Folder of the files."""
    names: Annotated[tuple[str, ...], Positional("NAME")] = ()
    """Their names."""
    report: Annotated[Path | None, "[FILE]"] = None
    """Write a report."""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("a", Files(folder=Path("a"))),
        ("a b c", Files(folder=Path("a"), names=("b", "c"))),
        ("a --report", Files(folder=Path("a"), report=Path("-"))),
        ("a --report d", Files(folder=Path("a"), report=Path("d"))),
    ],
)
def test_a_positional_is_a_field_too(words, expected):
    parser = argparse.ArgumentParser()
    add_fields(parser, Files, more={"names": ": all of it"})
    assert options_of(parser.parse_args(words.split()), Files) == expected
    help_text = " ".join(parser.format_help().split())
    assert "FOLDER folder of the files" in help_text
    assert "NAME their names: all of it" in help_text
    assert "--report [FILE]" in help_text


def commands(parser):
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from commands(command)
            return
    yield parser


@pytest.mark.parametrize("verb", VERBS)
def test_a_default_in_a_help_text_is_what_its_option_takes(verb):
    parser = argparse.ArgumentParser()
    import_module(f"penstock.cli.{verb.replace('-', '_')}").add_arguments(parser)
    for command in commands(parser):
        for action in command._actions:
            text = (action.help or "").replace("%(default)s", str(action.default))
            _, has_default, shown = text.partition("; default: ")
            if has_default and action.type and action.default not in (None, "", [], argparse.SUPPRESS):
                assert action.type(shown) == action.default, action.option_strings


def test_a_field_without_an_option_does_not_pass_for_its_default():
    parser = argparse.ArgumentParser()
    add_fields(parser, Files, "folder", "report")
    arguments = parser.parse_args(["a"])
    with pytest.raises(TypeError, match="Files has fields without options: names"):
        options_of(arguments, Files)
    assert fields_of(arguments, Files) == {"folder": Path("a"), "report": None}


def test_a_positional_that_is_missing_is_named(capsys):
    parser = argparse.ArgumentParser()
    add_fields(parser, Files)
    with pytest.raises(SystemExit):
        parser.parse_args([])
    assert "required: FOLDER" in capsys.readouterr().err


def test_sampling_that_is_not_given_is_the_models():
    parser = argparse.ArgumentParser()
    add_fields(parser, ModelOptions)
    add_answer_arguments(parser)
    own = Sampling(temperature=0.6, top_k=20, repetition_penalty=1.1)
    assert params_of(parser.parse_args(["m"]), own).sampling == own
    given = parser.parse_args(["m", "--temperature", "0.2", "--seed", "3"])
    assert params_of(given, own).sampling == replace(own, temperature=0.2, seed=3)
    assert params_of(given).sampling == Sampling(temperature=0.2, seed=3)
    assert params_of(parser.parse_args(["m", "--greedy"]), own).sampling == replace(own, temperature=0.0)
    assert "default: the model's" in " ".join(parser.format_help().split())


def test_a_long_text_that_is_cut_inside_a_character_is_refused_for_its_length(tmp_path):
    (tmp_path / "a").write_text("é" * 5, encoding="utf-8")
    with pytest.raises(UsageError, match="takes a text file of at most 8 bytes"):
        text_file(tmp_path / "a", option="--setup", longest=8)
    assert text_file(tmp_path / "a", option="--setup", longest=10) == "ééééé"


@pytest.mark.parametrize("text", ["-1", "nan", "1e", "11e+08", "90 minutes"])
def test_a_time_that_is_none_or_too_long_is_wrong_usage(text, capsys):
    with pytest.raises(SystemExit):
        a_parser().parse_args(["--steps", "1", "--wait", text])
    assert "argument --wait: " in capsys.readouterr().err
