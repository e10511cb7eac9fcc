"""Options shared by several commands, subcommands of a verb, and ranges of steps.

Such a module has `EPILOG`, `add_arguments(parser)` and `run(arguments) -> int`.
"""

import argparse
import ast
import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, replace
from functools import cache, partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    Literal,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from penstock.cli.streams import utf8_text
from penstock.core.checks import MAX_SECONDS
from penstock.core.config import comma_separated, unquoted
from penstock.core.dtypes import choice_of
from penstock.core.errors import UsageError
from penstock.core.units import Count, count_text, parse_count
from penstock.engine.config import EngineConfig
from penstock.engine.sampling_params import Params, Sampling

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

OF_MODEL_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Fields of `Sampling` whose defaults are those of the model's generation_config.json, else the field's."""

MODEL_FIELDS = (
    *("device", "weights", "activations", "cache", "kernels", "max_context", "drafts", "num_drafts"),
)
"""Fields of `EngineConfig` that are options of every command that opens an engine."""

OF_MODEL: Final = argparse.SUPPRESS
"""Default of an option whose value is the model's unless it is given; `fields_of` then leaves it out."""

_Options = TypeVar("_Options", bound="DataclassInstance")
_OTHERWISE = re.compile(r"(.*?)[;.,]? ?\b(?:None|False|[Ee]mpty): (.*)")
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class Positional(str):
    """Name of a value that needs no option, as in `Annotated[Path, Positional("RUN")]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeOptions:
    """Options of a command about a recipe."""

    recipe: Annotated[Path, Positional("RECIPE")]
    """TOML file; see `penstock recipes`."""
    set: Annotated[tuple[str, ...], "SECTION.KEY=VALUE"] = ()
    """Override a recipe key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of a command about one run."""

    run: Annotated[Path, Positional("RUN")]
    """Folder of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusOptions:
    """Options of a command about one corpus."""

    corpus: Annotated[str, Positional("CORPUS")]
    """Folder, address, or FORMAT:PATH[,option=value,...]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Options of a command that opens a model."""

    path: Annotated[Path, Positional("PATH")]
    """Run, checkpoint or Hugging Face folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """Options of answers that are neither of sampling nor of the engine."""

    greedy: bool = False
    """Always the likeliest token."""
    adapter: Annotated[Path | None, "FOLDER"] = None
    """A LoRA adapter of this model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """Format of what a command prints."""

    json: bool = False
    """Print JSON."""


def add_fields(
    group: argparse._ActionsContainer,
    kind: type,
    *names: str,
    defaults: Mapping[str, object] | None = None,
    more: Mapping[str, str] | None = None,
    **options: str,
) -> None:
    """Declare options for fields of a dataclass; `fields_of` returns their values.

    A field says all of its option: name, type, choices and default. Its help is the first paragraph of the
    text below it, in which "None: x" or "Empty: x" tells the default of what has none, and "False: x"
    what `--no-NAME` does where True is the default. A tuple is an option that may be repeated. A float named
    `NAME_s` is the option `--NAME` and takes a time such as 90m; a `Count` takes 10M or 64MiB. A field
    without default is required. `Annotated[Path, "FILE"]` shows FILE as the value, "[FILE]" one that may be
    left out, for `-`.

    Args:
        names: fields whose options have their names; without any and without `options`, all.
        defaults: field -> default of its option, where that is not the field's.
        more: field -> end of its help, where a program knows it, such as a list of names.
        options: field -> name of its option, such as `num_heads="--heads"`.
    """
    types, texts = get_type_hints(kind, include_extras=True), field_texts(kind)
    known = {field.name: field.default for field in dataclasses.fields(kind)} | dict(defaults or {})
    for name in (*names, *options) or known:
        is_time = types[name] is float and name.endswith("_s")
        text = texts[name].rstrip(".") + (more or {}).get(name, "")
        settings = _argument(seconds if is_time else types[name], known[name], text)
        if isinstance(settings.get("metavar"), Positional):
            settings.pop("required", None)
            group.add_argument(f"{kind.__name__}.{name}", **settings)
            continue
        no = "no-" if settings.get("action") == "store_false" else ""
        option = options.get(
            name, f"--{no}{(name.removesuffix('_s') if is_time else name).replace('_', '-')}"
        )
        group.add_argument(option, dest=f"{kind.__name__}.{name}", **settings)


def seconds(text: str) -> float:
    """Read a time such as 90m, 24h or 2d.

    >>> seconds("90m"), seconds("2d"), seconds(".5"), seconds("1e+06")
    (5400.0, 172800.0, 0.5, 1000000.0)
    """
    match = re.fullmatch(r"((?:\d{1,12}(?:\.\d*)?|\.\d+)(?:e[+-]?\d\d?)?)\s*([smhd]?)", text.strip())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 90m, 24h or 2d")
    value = float(match[1]) * _SECONDS[match[2]]
    if value > MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"{text!r} is above ten years, the longest time")
    return value


_METAVARS: dict[Any, str] = {
    int: "N",
    float: "X",
    str: "TEXT",
    Path: "PATH",
    seconds: "TIME",
    parse_count: "N",
}  # Any: what reads a text


def _argument(kind: Any, default: object, text: str) -> dict[str, Any]:  # Any: a type; what argparse takes
    text = " ".join(text.split()).rstrip(".").replace("%", "%%")
    if not text[1:2].isupper():
        text = text[0].lower() + text[1:]
    match = _OTHERWISE.fullmatch(text) if kind is bool or not default else None
    text, otherwise = match.groups() if match else (text, "")
    if kind is bool:
        return {"action": f"store_{not default}".lower(), "help": otherwise if default else text}
    settings = _value_settings(kind)
    if get_origin(_plain(kind)) is tuple and isinstance(settings["metavar"], Positional):
        return {**settings, "nargs": "+" if default is MISSING else "*", "help": text}
    if get_origin(_plain(kind)) is tuple:
        text += "; may be repeated" + (f"; default: {otherwise}" if otherwise else "")
        return {**settings, "action": "append", "default": [], "help": text}
    if default is MISSING:
        return {**settings, "required": True, "help": text}
    unit = " s" if kind is seconds else ""
    shown = otherwise or (f"{default:g}{unit}" if isinstance(default, float) else default)
    if default == OF_MODEL:
        shown = "the model's"
    if kind == Count and isinstance(default, int):
        shown = count_text(default)
    if shown in ("", None):
        return {**settings, "default": default, "help": text}
    return {**settings, "default": default, "help": f"{text}; default: {shown}"}


def _plain(kind: Any) -> Any:  # Any: a type
    """Return a type without the name of its values in a help text."""
    return get_args(kind)[0] if get_origin(kind) is Annotated and kind != Count else kind


def _value_settings(kind: Any) -> dict[str, Any]:  # Any: a type; what argparse takes
    """Return how the value of an option is read, and how a help text names it."""
    if (plain := _plain(kind)) is not kind:
        name, settings = get_args(kind)[1], _value_settings(plain)
        if re.fullmatch(r"\[\w+]", name):
            return {**settings, "metavar": name[1:-1], "nargs": "?", "const": settings["type"]("-")}
        return {**settings, "metavar": name}
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        return {"choices": [*choices], "type": partial(choice_of, choices=choices)}
    members = [one for one in get_args(kind) if one is not NoneType]
    if members and kind != Count:
        return _value_settings(members[0])
    value_type = parse_count if kind == Count else kind
    return {"type": value_type, "metavar": _METAVARS[value_type]}


def fields_of(arguments: argparse.Namespace, kind: type) -> dict[str, Any]:  # Any: of the fields' types
    """Return the values of the options that `add_fields` declared for a dataclass, by field."""
    mark = f"{kind.__name__}."
    return {
        name.removeprefix(mark): tuple(value) if isinstance(value, list) else value
        for name, value in vars(arguments).items()
        if name.startswith(mark)
    }


def options_of(arguments: argparse.Namespace, kind: type[_Options]) -> _Options:
    """Return a dataclass of the values of its options; `add_fields` has declared one for each field.

    Raises:
        TypeError: a field has no option. Its default would pass for what the user chose.
        UsageError: the dataclass refuses a value.
    """
    given = fields_of(arguments, kind)
    if missing := {field.name for field in dataclasses.fields(kind)} - set(given):
        raise TypeError(f"{kind.__name__} has fields without options: {', '.join(sorted(missing))}")
    return kind(**given)


def field_texts(kind: type) -> dict[str, str]:
    """Return the first paragraph of the text below each field of a class that has one."""
    texts = {}
    for field_and_text in pairwise(_classes_of(kind.__module__)[kind.__name__].body):
        match field_and_text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                texts[name] = text.partition("\n\n")[0]
    return texts


@cache
def _classes_of(module: str) -> dict[str, ast.ClassDef]:
    """Return the classes of a module by name; it is parsed once, where `inspect` parses it for each class."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def text_file(path: Path, *, option: str, longest: int = 64 << 10) -> str:
    """Return the text of a small file that an option names.

    Raises:
        UsageError: it is longer, or not UTF-8.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        content = file.read(longest + 1)
    is_long = len(content) > longest  # it may be cut inside a character
    try:
        text = "" if is_long else content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"{option} names a file that is not UTF-8 text", got=str(path)) from None
    if is_long or "\0" in text:
        raise UsageError(f"{option} takes a text file of at most {longest:,} bytes", got=str(path))
    return text.replace("\r\n", "\n")


def step_range(text: str, *, option: str) -> range:
    """Read a range of steps, or one step.

    Raises:
        UsageError: it is none, or empty.

    >>> step_range("1200:1210", option="--steps"), step_range("7", option="--steps")
    (range(1200, 1210), range(7, 8))
    """
    match = re.fullmatch(r"(\d{1,18})(?::(\d{1,18}))?", text.strip())
    steps = range(0)
    if match:
        first = int(match[1])
        steps = range(first, int(match[2]) if match[2] else first + 1)
    if not steps or not steps[0]:
        raise UsageError(
            f"{option} takes FIRST:PAST, steps counted from 1, the last one left out",
            got=text,
            fix=f"Example: {option} 1200:1210.",
        )
    return steps


def shares(texts: Sequence[str], *, option: str) -> dict[str, float]:
    """Read the shares of corpora: an option given once with commas, given several times, or both.

    A name with a comma is in quotes, as a key of TOML.

    Raises:
        UsageError: one is no share, or a corpus has two.

    >>> shares(["web=0.2,code=0.8"], option="--set") == shares(["web=0.2", "code=0.8"], option="--set")
    True
    >>> shares(['"a,b"=0.2,code=0.8'], option="--set")
    {'a,b': 0.2, 'code': 0.8}
    """
    found: dict[str, float] = {}
    for text in (item for each in texts for item in comma_separated(each)):
        key, _, value = text.rpartition("=")
        name = unquoted(key.strip())
        if name in found:
            raise UsageError(f"{option} gives corpus {name!r} two shares", got=text, fix="Give it one.")
        try:
            found[name] = float(value)
        except ValueError:
            fix = f"Example: {option} web=0.6,code=0.4. A name with a comma is in quotes: '\"a,b\"=0.6'."
            raise UsageError(f"{option} takes CORPUS=SHARE", got=text, fix=fix) from None
        if not name:
            raise UsageError(f"{option} takes CORPUS=SHARE", got=text, fix="Name the corpus.")
    return found


def add_subcommands(
    parser: argparse.ArgumentParser, verb: str, summaries: Mapping[str, str]
) -> list[argparse.ArgumentParser]:
    """Add the subcommands of a verb; return their parsers.

    Args:
        summaries: subcommand -> what it does.
    """
    found = []
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in summaries.items():
        module = import_module(f"penstock.cli.{verb}.{name}")
        command = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=module.EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        found.append(command)
    return found


def run_subcommand(verb: str, arguments: argparse.Namespace) -> int:
    """Run the subcommand that was chosen."""
    code: int = import_module(f"penstock.cli.{verb}.{arguments.command}").run(arguments)
    return code


_ADAPTER = "adapter"
"""Name of the one adapter that --adapter opens, in requests."""


def add_answer_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare how tokens are drawn, and by what engine."""
    add_fields(parser, Params, "max_tokens", stop_texts="--stop")
    drawn = parser.add_mutually_exclusive_group()
    of_model = dict.fromkeys(OF_MODEL_FIELDS, OF_MODEL)
    add_fields(drawn, Sampling, "temperature", defaults=of_model)
    add_fields(drawn, AnswerOptions, "greedy")
    add_fields(
        parser,
        Sampling,
        *("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        *("min_tokens", "seed"),
        defaults=of_model,
    )
    engine = parser.add_argument_group("engine")
    add_fields(engine, AnswerOptions, "adapter")
    add_fields(engine, EngineConfig, *MODEL_FIELDS)
    add_ignore_key(engine)


def add_ignore_key(group: argparse._ActionsContainer) -> None:
    """Declare --ignore-key, for all commands that open a Hugging Face folder."""
    add_fields(group, EngineConfig, ignored_keys="--ignore-key")


def add_recipe_settings(parser: argparse.ArgumentParser) -> None:
    """Declare --set and --ignore-key, for all commands that take a recipe."""
    add_fields(parser, RecipeOptions, "set")
    add_ignore_key(parser)


def ignored_keys(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return the values of --ignore-key."""
    keys: tuple[str, ...] = fields_of(arguments, EngineConfig)["ignored_keys"]
    return keys


def recipe_settings(arguments: argparse.Namespace) -> list[str]:
    """Return the values of --set, with those of --ignore-key as a setting of the recipe."""
    ignored = ignored_keys(arguments)
    settings = fields_of(arguments, RecipeOptions)["set"]
    return [*settings, *([f"model.ignored_keys={json.dumps(ignored)}"] if ignored else [])]


def params_of(arguments: argparse.Namespace, default: Sampling | None = None) -> Params:
    """Return the settings that `add_answer_arguments` declared of them.

    Args:
        default: sampling of the model, for options that are not given; None: it is not open yet.
    """
    sampling = replace(default or Sampling(), **fields_of(arguments, Sampling))
    params, options = Params(**fields_of(arguments, Params)), options_of(arguments, AnswerOptions)
    return replace(
        params,
        sampling=replace(sampling, temperature=0.0) if options.greedy else sampling,
        stop_texts=tuple(utf8_text(text, name="--stop") for text in params.stop_texts),
        adapter=None if options.adapter is None else _ADAPTER,
    )


def alone(arguments: argparse.Namespace) -> EngineConfig:
    """Return an engine for one person: room for one answer."""
    adapter = options_of(arguments, AnswerOptions).adapter
    adapters = {} if adapter is None else {_ADAPTER: adapter}
    return EngineConfig(max_sequences=1, adapters=adapters, **fields_of(arguments, EngineConfig))
