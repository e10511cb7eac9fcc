"""Write the generated pages of docs/reference and the list of decisions; `--check` only compares.

Commands are read from their parsers, recipe keys from the dataclasses of the recipe, the Python API from its
source text, routes from the server's OpenAPI document, metrics from their table. No torch is imported. Run as
`python -m tools.reference`.
"""

import argparse
import ast
import copy
import dataclasses
import importlib
import inspect
import json
import math
import os
import pkgutil
import re
import sys
import textwrap
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SOURCES = ROOT / "src"
DEFAULTS = "../src/penstock/obs/page/defaults.js"
"""The module of the page of a run that has the recipe's defaults."""
WRITTEN = "<!-- Written by tools/reference.py from the sources: `make format`. -->"

API: Mapping[str, tuple[str, str, Mapping[str, Sequence[str]]]] = {
    "python-engine": (
        "Python: the engine",
        "`from penstock import LLM, EngineConfig, Params, Sampling`, and what they take and return.",
        {
            "penstock.engine.llm": ("LLM",),
            "penstock.engine.config": ("EngineConfig",),
            "penstock.engine.sampling_params": ("Params", "Sampling"),
            "penstock.engine.outputs": ("RequestOutput", "CompletionOutput"),
            "penstock.engine.request": ("OutputDelta",),
            "penstock.engine.sampling.grammar_text": (
                "json_schema",
                "json_object",
                "regex",
                "choice",
                "lark",
            ),
        },
    ),
    "python-data": (
        "Python: the loader",
        "`from penstock.data import Corpus, Loader, open_corpus`, and what goes with them.",
        {
            "penstock.data.loader": ("Loader",),
            "penstock.data.corpus.open": ("open_corpus",),
            "penstock.data.corpus.corpus": ("Corpus",),
            "penstock.data.schedule.change_log": ("Change",),
            "penstock.data.torch_dataset": (),
            "penstock.data.transform": ("Sample", "Transform"),
            "penstock.data.transforms.drop_documents": (),
            "penstock.data.transforms.fill_in_the_middle": (),
        },
    ),
    "python-testing": (
        "Python: aids for tests",
        "`penstock.testing` is shipped, so that you can test what you build on Penstock.",
        {
            "penstock.testing.corpora": (),
            "penstock.testing.loaders": (),
            "penstock.testing.loader_adapters": (),
            "penstock.testing.ranks": (),
        },
    ),
}
"""Page -> title, first sentence, and the public names by module; none: all that the module defines."""

PRESET = "Name of a published shape ([presets](presets.md)); other keys of the section override its values."

COMMANDS = """\
# Commands

`penstock --version` prints the version, `--debug` after any command shows the traceback of an error, and
`--help` prints this reference.

"""
EXIT_CODES = """\
# Exit codes

Usually: {usual}; 130 interrupted by Ctrl-C.

{listed}
## Errors

Every error that a user can cause is a `penstock.core.errors.PenstockError`. Its message says what is wrong,
the value, and what to do.

{tree}"""
RECIPE = """\
# Recipe keys

A recipe is a TOML file. `penstock train RECIPE --set SECTION.KEY=VALUE` lays values over it, and `--dry-run`
prints what follows from it. An unknown key is an error. A key whose default is *needed* has none, but
`model.vocab_size` follows from the corpora, and `model.max_position_embeddings` from the longest row.

## Above all sections
"""
PRESETS_PAGE = """\
# Presets

`model.preset` in a recipe names one of these shapes; other keys of `[model]` change it, and a key set to
`"none"` takes away what the preset has. docs/explanation/models.md says how they are tested.

"""
MODELS_PAGE = """\
# Models that open

Folders of these families open as they were downloaded, for training, tuning, evaluation and serving, on any
number of ranks. A folder that also reads images opens as its language model. docs/explanation/models.md says
how they are computed and tested, docs/tutorials/add-a-family.md how one is added.

"""
REFUSED_PAGE = """\

## Models that do not open

Penstock refuses every other folder, and names what its model has and Penstock lacks, by the keys of its
`config.json`. These have no such key:

"""
SOURCES_OF_PRESETS = """\
## Where they were read

The values of these shapes were read in November 2026. The other presets are from memory; their numbers of
parameters equal the published ones.

"""
HTTP = """\
# HTTP routes

The routes of `penstock serve` and the bodies that they take. `/openapi.json` has the replies too, and `/docs`
is the same as a page. How it differs from OpenAI's API and vLLM's server: docs/how-to/move-from-vllm.md.
"""
METRICS_PAGE = """\
# Metrics

## Of a run

`metrics.jsonl` has one record for each step; metrics of a corpus are tables by name.

{run}
## Of a run, for Prometheus

`GET /metrics` at the port that `measure.metrics_port` of the recipe opens on rank 0. Each has the label
`run`, the name of the run's folder; metrics of a corpus have `corpus` too.

{training}
## Of a server

`GET /metrics`, in the text format of Prometheus.

{server}"""

# Markdown


def cell(text: str) -> str:
    """Return a text that may stand in a table: one line, marks of Markdown outside code escaped.

    >>> cell("a `x|y` <think> *\\n  b")
    'a `x\\\\|y` &lt;think&gt; \\\\* b'
    """
    parts = re.split(r"(`[^`]+`)", re.sub(r"\s+", " ", text.strip()))
    for index in range(0, len(parts), 2):
        parts[index] = re.sub(r"([*])", r"\\\1", parts[index].replace("<", "&lt;").replace(">", "&gt;"))
    return "".join(parts).replace("|", "\\|")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; no rows: nothing. Cells are Markdown already."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([f"| {' | '.join(head)} |", "|" + "---|" * len(head), *lines, ""]) if lines else ""


def code(text: str, language: str = "") -> str:
    """Return a block of code."""
    return f"```{language}\n{text.rstrip()}\n```\n"


def prose(docstring: str) -> str:
    """Return a docstring as Markdown: indented paragraphs and examples are code, sections are lists.

    >>> print(prose("Do it.\\n\\nArgs:\\n    x: one\\n        more.\\n\\nexample:\\n  do it"))
    Do it.
    <BLANKLINE>
    **Args**
    <BLANKLINE>
    - `x`: one more.
    <BLANKLINE>
    **Example**
    <BLANKLINE>
    ```
    do it
    ```
    <BLANKLINE>
    """
    found = [_paragraph(part) for part in re.split(r"\n\s*\n", inspect.cleandoc(docstring))]
    return re.sub(r"\n{3,}", "\n\n", "\n\n".join(found))


def _paragraph(text: str) -> str:
    head, _, rest = text.partition("\n")
    section = re.fullmatch(r"(Args|Raises|Returns|Yields):", head)
    if section:
        items = re.split(r"\n(?=\S)", inspect.cleandoc("\n" + rest))
        named = (re.match(r"([\w.*, ]+): (.*)", item, re.DOTALL) for item in items)
        lines = (
            f"- `{m[1]}`: {cell(m[2])}" if m else f"- {cell(i)}" for m, i in zip(named, items, strict=True)
        )
        return f"**{section[1]}**\n\n" + "\n".join(lines)
    if re.fullmatch(r"examples?:", head) and rest:
        return f"**{head[:-1].capitalize()}**\n\n{code(textwrap.dedent(rest))}"
    if text.startswith(">>> "):
        return code(text, "python")
    if all(line.startswith("  ") for line in text.splitlines()):
        return code(textwrap.dedent(text))
    if codes := re.fullmatch(r"exit codes: (.*)", text, re.DOTALL):
        return f"**Exit codes**: {cell(codes[1])}"
    if re.search(r"\n {2,}", text):  # a table of words, or a drawing
        first = re.match(r"(?:\S.*\n)+(?= )", text)
        lead = first[0] if first else ""
        return f"{lead}\n{code(textwrap.dedent(text[len(lead) :]))}"
    return text.replace("<", "&lt;")


def linked(text: str, page: str) -> str:
    """Return a page with the pages of docs/ that it names as links, outside code."""
    here = (DOCS / page).parent

    def link(match: re.Match[str]) -> str:
        name = match[0]
        there = ROOT / name if name.endswith(".md") else next(iter(ROOT.glob(f"{name}-*.md")), None)
        if there is None:
            return name
        return f"[{name}]({os.path.relpath(there, here)})"

    parts = re.split(r"(^```.*?^```$|`[^`\n]+`)", text, flags=re.DOTALL | re.MULTILINE)
    for index in range(0, len(parts), 2):
        parts[index] = re.sub(r"(?<![\w/])(?<!\]\()docs/(?:adr/\d{4}|[\w/-]+\.md)", link, parts[index])
    return "".join(parts)


# Commands


def command_page(verb: str, parser: argparse.ArgumentParser) -> str:
    """Return the page of a verb, its subcommands included."""
    subcommands = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    parts = [f"# penstock {verb}\n", command_text(parser)]
    for action in subcommands:
        for name, command in action.choices.items():
            parts += [f"## penstock {verb} {name}\n", command_text(command)]
    return "\n".join(parts)


def command_text(parser: argparse.ArgumentParser) -> str:
    """Return how a command is called, what it does, and its arguments by group."""
    parts = [code(usage(parser)), prose(parser.description or ""), ""]
    for group in parser._action_groups:
        actions = [a for a in group._group_actions if shown(a)]
        if not actions:
            continue
        title = {"positional arguments": "Arguments", "options": "Options"}.get(
            group.title or "", group.title
        )
        heading = f"**{(title or 'Options').rstrip(':').capitalize()}**\n"
        parts += [heading, table(("", "meaning"), [(name_of(a), meaning_of(a, parser)) for a in actions])]
    if parser.epilog:
        parts += [prose(parser.epilog), ""]
    return "\n".join(parts)


def shown(action: argparse.Action) -> bool:
    """Return whether an argument is told: not --help, nor what is hidden, nor the list of subcommands."""
    hidden = isinstance(action, argparse._HelpAction | argparse._SubParsersAction)
    return not hidden and action.help is not argparse.SUPPRESS


def usage(parser: argparse.ArgumentParser) -> str:
    """Return the call of a command: what is needed, in order."""
    words = [parser.prog]
    has_options = False
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            words.append("COMMAND ...")
        elif not action.option_strings:
            words.append(placeholder(action))
        elif action.required:
            words.append(f"{action.option_strings[-1]} {placeholder(action)}".rstrip())
        else:
            has_options = has_options or shown(action)
    return " ".join([*words, *(["[options]"] if has_options else [])])


def placeholder(action: argparse.Action) -> str:
    """Return what stands for an argument's value in a call."""
    if action.nargs == 0:
        return ""
    name = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
    text = " ".join(name) if isinstance(name, tuple) else name
    return {"+": f"{text} [{text} ...]", "*": f"[{text} ...]", "?": f"[{text}]"}.get(str(action.nargs), text)


def name_of(action: argparse.Action) -> str:
    """Return an argument as it is typed, as a cell of a table."""
    if not action.option_strings:
        return f"`{placeholder(action)}`".replace("|", "\\|")
    typed = ", ".join(f"`{name}`" for name in action.option_strings)
    value = f" `{placeholder(action)}`" if placeholder(action) else ""
    return (typed + value).replace("|", "\\|")


def meaning_of(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    """Return what an argument means and its default, as a cell of a table."""
    text = (action.help or "") % {**vars(action), "prog": parser.prog}
    default = action.default
    if "default" in text or default in (None, False, True, [], "", argparse.SUPPRESS):
        return cell(text)
    value = " ".join(map(str, default)) if isinstance(default, list | tuple) else str(default)
    return f"{cell(text)}; default: `{value}`"


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each verb, as `penstock.cli.main` makes it."""
    from penstock.cli.main import VERBS

    found = {}
    for verb in VERBS:
        module = importlib.import_module(f"penstock.cli.{verb.replace('-', '_')}")
        found[verb] = argparse.ArgumentParser(prog=f"penstock {verb}", description=module.__doc__)
        module.add_arguments(found[verb])
    return found


def command_pages() -> dict[str, str]:
    """Return a page for each verb, the list of them, and the exit codes of all."""
    from penstock.cli.main import VERBS

    found = parsers()
    pages = {f"reference/commands/{verb}.md": command_page(verb, parser) for verb, parser in found.items()}
    rows = [(f"[`penstock {verb}`]({verb}.md)", cell(text)) for verb, text in VERBS.items()]
    pages["reference/commands/index.md"] = COMMANDS + table(("command", "what it does"), rows)
    pages["reference/exit-codes.md"] = exit_codes(found)
    return pages


def exit_codes(found: Mapping[str, argparse.ArgumentParser]) -> str:
    """Return the exit codes of all commands, and which error gives which."""
    main = importlib.import_module("penstock.cli.main")
    errors = importlib.import_module("penstock.core.errors")
    usual = re.search(r"exit codes: (.*)", main._EPILOG)
    rows = []
    for parser in found.values():
        inner = [
            c
            for a in parser._actions
            if isinstance(a, argparse._SubParsersAction)
            for c in a.choices.values()
        ]
        for command in inner or [parser]:
            text = f"{command.description}\n\n{command.epilog or ''}"
            said = re.search(r"exit codes: ((?:.+\n?)+)", text)
            assert said, f"the help of {command.prog} has no exit codes"
            rows.append((f"`{command.prog}`", cell(said[1])))
    tree = inspect.cleandoc(errors.__doc__ or "").partition("\n\n")[2]
    listed = table(("command", "exit codes"), rows)
    return EXIT_CODES.format(usual=usual[1] if usual else "", listed=listed, tree=code(tree))


# Recipe keys


def recipe_page() -> str:
    """Return every key of a recipe: type, default, meaning."""
    from penstock.train.recipe.config import TrainConfig

    hints = get_type_hints(TrainConfig)
    own = [f for f in dataclasses.fields(TrainConfig) if section_in(hints[f.name]) is None]
    parts = [
        RECIPE,
        keys_table(TrainConfig, [f.name for f in own]),
    ]
    for field in dataclasses.fields(TrainConfig):
        if (found := section_in(hints[field.name])) is not None:
            parts += section(found[1], field.name, level=2)
    return "\n".join(parts)


def recipe_defaults(cls: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the keys of a recipe and their defaults as the page of a run shows them; * is a corpus."""
    from penstock.core.toml import plain

    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        found, key = section_in(hints[field.name]), f"{prefix}{field.name}"
        factory, default = field.default_factory, field.default
        value = default if factory is dataclasses.MISSING else factory()
        if found is not None and found[0] == "[{}.NAME]":
            yield from recipe_defaults(found[1], f"{key}.*.")
        elif found is not None and found[0] == "[{}]":
            yield from recipe_defaults(found[1], f"{key}.")
        if value is None or isinstance(value, bool | int | float | str | tuple | list):
            yield key, plain(list(value) if isinstance(value, tuple) else value)


def defaults_module() -> str:
    """Return the defaults of all keys as a module of the page of a run."""
    from penstock.train.recipe.config import TrainConfig

    sections: dict[str, list[str]] = {}
    for key, value in recipe_defaults(TrainConfig):
        written = f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}"
        sections.setdefault(key.partition(".")[0] if "." in key else "", []).append(written)
    lines = "".join(f"  {', '.join(keys)},\n" for keys in sections.values())
    return f"// Defaults of recipe keys. {WRITTEN.strip('<>!- ')}\n\nexport const DEFAULTS = {{\n{lines}}};\n"


def section(cls: Any, name: str, *, level: int, heading: str = "") -> Iterator[str]:
    """Yield the heading, the text and the keys of a section, then the sections in it.

    Args:
        cls: its dataclass.
        name: its dotted name.
        heading: as it stands in TOML, if not [name].
    """
    hints = get_type_hints(cls)
    inner = [f.name for f in dataclasses.fields(cls) if section_in(hints[f.name]) is not None]
    yield f"{'#' * level} `{heading or f'[{name}]'}`\n"
    yield prose(cls.__doc__ or "") + "\n"
    extra = [("`preset`", "text", "absent", PRESET)] if name == "model" else []
    yield keys_table(cls, [f.name for f in dataclasses.fields(cls) if f.name not in inner], extra)
    for key in inner:
        found = section_in(hints[key])
        assert found is not None, key
        form, below = found
        yield from section(below, f"{name}.{key}", level=level + 1, heading=form.format(f"{name}.{key}"))


def section_in(hint: Any) -> tuple[str, Any] | None:
    """Return how a key's sections stand in TOML, and their dataclass; None for a value."""
    if dataclasses.is_dataclass(hint):
        return "[{}]", hint
    for form, below in zip(("[{}.NAME]", "[[{}]]", "[{}]"), (dict, tuple, Union), strict=True):
        origin = Union if get_origin(hint) is types.UnionType else get_origin(hint)
        kinds = [kind for kind in get_args(hint) if dataclasses.is_dataclass(kind)]
        if origin is below and kinds:
            return form, kinds[0]
    return None


def keys_table(cls: Any, names: Sequence[str], extra: Sequence[Sequence[str]] = ()) -> str:
    """Return the keys of a section; refuse one without a text.

    Raises:
        SystemExit: a field has no text under it.
    """
    texts, hints = field_texts(cls), get_type_hints(cls)
    rows = list(extra)
    for field in dataclasses.fields(cls):
        if field.name not in names:
            continue
        if field.name not in texts:
            raise SystemExit(f"{cls.__module__}: {cls.__name__}.{field.name} has no text under it: write one")
        row = (f"`{field.name}`", words_of(hints[field.name]), default_of(field), cell(texts[field.name]))
        rows.append(row)
    return table(("key", "type", "default", "meaning"), rows)


@cache
def tree_of(module: str) -> ast.Module:
    """Return the syntax tree of a module of ours."""
    path = SOURCES.joinpath(*module.split("."))
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def definition(module: str, name: str) -> ast.ClassDef | ast.FunctionDef | ast.Assign | None:
    """Return what defines a name at the top of a module."""
    for node in tree_of(module).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node
        if isinstance(node, ast.Assign) and name in [t.id for t in node.targets if isinstance(t, ast.Name)]:
            return node
    return None


def field_texts(cls: Any) -> dict[str, str]:
    """Return the texts under the fields of a class."""
    node = definition(cls.__module__, cls.__name__)
    assert isinstance(node, ast.ClassDef), cls
    return {name: text for name, _, text in fields_of(node) if text}


def fields_of(node: ast.ClassDef) -> Iterator[tuple[str, ast.AnnAssign, str]]:
    """Yield the public fields of a class, and the text under each."""
    for here, after in zip(node.body, [*node.body[1:], ast.Pass()], strict=True):
        if not isinstance(here, ast.AnnAssign) or not isinstance(here.target, ast.Name):
            continue
        value = after.value if isinstance(after, ast.Expr) else None
        text = value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""
        if not here.target.id.startswith("_"):
            yield here.target.id, here, text


def words_of(hint: Any) -> str:
    """Return in words what a key may be, as a cell of a table.

    >>> words_of(int | None), words_of(Literal["a", 4]), words_of(dict[str, float])
    ('whole number', '`"a"`, `4`', 'table of numbers')
    >>> words_of(tuple[tuple[dict[str, Any], ...] | str, ...])
    'list of texts or lists of tables'
    """
    origin, args = get_origin(hint), [arg for arg in get_args(hint) if arg is not type(None)]
    if origin is Literal:
        return ", ".join(f'`"{arg}"`' if isinstance(arg, str) else f"`{arg}`" for arg in args)
    if origin in (Union, types.UnionType):
        *others, last = sorted(map(words_of, args), key=len)
        return f"{', '.join(others)} or {last}" if others else last
    if origin is dict:
        return "table" if args[1] is Any else f"table of {_plural(words_of(args[1]))}"
    if origin is tuple:
        return f"list of {_plural(words_of(args[0]))}"
    words = {int: "whole number", float: "number", bool: "true, false", str: "text"}
    return (
        "table" if dataclasses.is_dataclass(hint) else words.get(hint) or str(getattr(hint, "__name__", hint))
    )


def _plural(words: str) -> str:
    """Return kinds of values in the plural: of a text texts, of a list of texts lists of texts."""
    return re.sub(r"\b(text|number|table|list)\b", r"\1s", words)


def default_of(field: "dataclasses.Field[Any]") -> str:
    """Return the default of a key as TOML has it, as a cell of a table."""
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory() or None
    elif field.default is dataclasses.MISSING:
        return "*needed*"
    else:
        value = field.default
    if value is None:
        return "absent"
    text = {True: "true", False: "false"}.get(value, value) if isinstance(value, bool) else value
    return f'`"{text}"`' if isinstance(value, str) else f"`{text}`"


def corpora_page() -> str:
    """Return how a corpus is named, and the options of each format."""
    from penstock.data.corpus import spec
    from penstock.data.formats import FORMATS

    foreign = {name: row.options for name, row in FORMATS.items() if name != "arrow"}
    formats = {"any format": spec.COMMON_OPTIONS, **foreign, "text": spec.TEXT_OPTIONS}
    rows = [
        (
            f"`{name}`" if name in foreign or name == "text" else name,
            f"`{option}`" if option else "",
            cell(meaning),
        )
        for name, options in formats.items()
        for option, meaning in (options or {"": "no options"}).items()
    ]
    return f"# Corpus names\n\n{prose(spec.__doc__ or '')}\n\n{table(('format', 'option', 'meaning'), rows)}"


def presets_page() -> str:
    """Return the published shapes that a recipe may name."""
    from penstock.models.presets import PRESETS, SOURCES

    keys = {
        "hidden_size": "hidden",
        "intermediate_size": "feed-forward",
        "num_hidden_layers": "blocks",
        "num_attention_heads": "heads",
        "num_key_value_heads": "key-value heads",
        "vocab_size": "vocabulary",
        "max_position_embeddings": "context",
    }
    rows = [(f"`{name}`", *(f"{values.get(key, 0):,}" for key in keys)) for name, values in PRESETS.items()]
    sources = [(f"`{name}`", source) for name, source in SOURCES.items()]
    shapes, read_in = table(("preset", *keys.values()), rows), table(("preset", "read in"), sources)
    return f"{PRESETS_PAGE}{shapes}\n{SOURCES_OF_PRESETS}{read_in}"


def models_page() -> str:
    """Return the families of models that open, and those that only their name refuses."""
    from penstock.models.families import FAMILY
    from penstock.models.family.refused import MISSING_BY_TYPE
    from penstock.models.presets import PRESETS

    rows = []
    for model_type in FAMILY:
        about = importlib.import_module(f"penstock.models.family.{model_type}").__doc__ or ""
        models, _, difference = " ".join(about.partition("\n\n")[0].split()).rstrip(".").partition(": ")
        named = [
            f"`{name}`" for name, values in PRESETS.items() if values.get("model_type", "llama") == model_type
        ]
        limits = FAMILY[model_type].limits
        rows.append((f"`{model_type}`", models, difference or "-", limits or "-", ", ".join(named) or "-"))
    header = ("`model_type`", "models", "the network", "not", "presets")
    refused = [(f"`{name}`", ", ".join(lacks)) for name, lacks in sorted(MISSING_BY_TYPE.items())]
    return MODELS_PAGE + table(header, rows) + REFUSED_PAGE + table(("`model_type`", "lacks"), refused)


# Python


def api_page(title: str, first: str, modules: Mapping[str, Sequence[str]]) -> str:
    """Return the page of public names."""
    parts = [f"# {title}\n\n{first}\n"]
    for module, names in modules.items():
        for name in names or public_names(module):
            node = definition(module, name)
            if node is None:
                raise SystemExit(f"tools/reference.py names {module}.{name}, which is not there: correct API")
            parts.append(f"## {name}\n")
            parts.append(f"`from {importable(module, name)} import {name}`\n")
            parts += class_text(node) if isinstance(node, ast.ClassDef) else function_text(node, module)
    return "\n".join(parts)


def importable(module: str, name: str) -> str:
    """Return the shortest module that a public name is imported from."""
    for shorter in ("penstock", "penstock.data", "penstock.data.transforms"):
        if module.startswith(shorter) and re.search(
            rf'"{name}"', ast.unparse(tree_of(shorter)).replace("'", '"')
        ):
            return shorter
    return module


def public_names(module: str) -> list[str]:
    """Return the classes and functions that a module defines and documents for others."""
    nodes = (n for n in tree_of(module).body if isinstance(n, ast.ClassDef | ast.FunctionDef))
    return [node.name for node in nodes if not node.name.startswith("_")]


def class_text(node: ast.ClassDef) -> Iterator[str]:
    """Yield a class: its call, its text, its fields, its public methods."""
    made = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
    if made is not None:
        yield code(signature(node.name, made), "python")
    yield prose(ast.get_docstring(node) or "") + "\n"
    rows = [
        (f"`{name}`", f"`{annotation(field.annotation)}`".replace("|", "\\|"), value_of(field), cell(text))
        for name, field, text in fields_of(node)
    ]
    yield table(("field", "type", "default", "meaning"), rows)
    for method in node.body:
        if not isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) or method.name.startswith("_"):
            continue
        marks = {ast.unparse(mark) for mark in method.decorator_list}
        if "override" in marks or any(mark.endswith(".setter") for mark in marks):
            continue
        is_property = bool(marks & {"property", "cached_property"})
        yield f"### {node.name}.{method.name}\n"
        if is_property:
            yield code(f"{method.name}: {annotation(method.returns or ast.Constant(None))}", "python")
        else:
            yield code(signature(method.name, method), "python")
        yield prose(ast.get_docstring(method) or "") + "\n"


def value_of(field: ast.AnnAssign) -> str:
    """Return the default of a field of a class, as a cell of a table."""
    if field.value is None:
        return "*needed*"
    text = ast.unparse(field.value)
    made = re.fullmatch(r"field\(default_factory=(\w+)\)", text)
    return "`{}`".format({"dict": "{}", "list": "[]", "tuple": "()"}.get(made[1], made[1]) if made else text)


def function_text(node: ast.FunctionDef | ast.Assign, module: str) -> Iterator[str]:
    """Yield a function, or a name that stands for a type."""
    if isinstance(node, ast.FunctionDef):
        yield code(signature(node.name, node), "python")
        yield prose(ast.get_docstring(node) or "") + "\n"
        return
    yield code(ast.unparse(node), "python")
    body = tree_of(module).body
    after = body[body.index(node) + 1]
    if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
        yield prose(str(after.value.value)) + "\n"


def signature(name: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return a call with types and defaults, an argument a line where one line is too long.

    >>> signature("f", ast.parse("def f(self, x: int, *more, y=0, **rest) -> str: ...").body[0])
    'f(x: int, *more, y=0, **rest) -> str'
    """
    given = node.args
    plain = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(plain) - len(given.defaults)) + [*given.defaults]
    each = [argument(one, default) for one, default in zip(plain, defaults, strict=True)]
    each = [text for text in each if text not in ("self", "cls")]
    if given.vararg:
        each.append(f"*{argument(given.vararg)}")
    elif given.kwonlyargs:
        each.append("*")
    each += [argument(one, value) for one, value in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    each += [f"**{argument(given.kwarg)}"] if given.kwarg else []
    start = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    end = "" if node.returns is None or node.name == "__init__" else f" -> {annotation(node.returns)}"
    line = f"{start}{name}({', '.join(each)}){end}"
    lines = [f"{start}{name}(", *(f"    {one}," for one in each), f"){end}"]
    return line if len(line) <= 100 else "\n".join(lines)


def argument(given: ast.arg, default: ast.expr | None = None) -> str:
    """Return an argument with its type and default."""
    text = f"{given.arg}: {annotation(given.annotation)}" if given.annotation else given.arg
    if default is None:
        return text
    return f"{text}{' = ' if given.annotation else '='}{ast.unparse(default)}"


def annotation(node: ast.expr) -> str:
    """Return a type without the quotes of forward references.

    >>> annotation(ast.parse("Iterator['Loader'] | Literal['drop']", mode="eval").body)
    "Iterator[Loader] | Literal['drop']"
    """
    return ast.unparse(WithoutQuotes().visit(copy.deepcopy(node)))


class WithoutQuotes(ast.NodeTransformer):
    """Replaces quoted types with what they quote; the strings of Literal and of tensor shapes stay."""

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        """Leave a subscript that holds values, not types."""
        is_shape = isinstance(node.slice, ast.Tuple) and ast.unparse(node.slice.elts[0]) == "Tensor"
        if is_shape or ast.unparse(node.value) == "Literal":
            return node
        self.generic_visit(node)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        """Parse a quoted type."""
        return ast.parse(node.value, mode="eval").body if isinstance(node.value, str) else node


# HTTP


def http_page() -> str:
    """Return the routes of the server and the bodies that they take."""
    from fastapi import APIRouter, FastAPI

    import penstock.serve.routes as routes

    app = FastAPI(title="Penstock", version="0")
    for found in pkgutil.iter_modules(routes.__path__):
        module = importlib.import_module(f"{routes.__name__}.{found.name}")
        for router in (value for value in vars(module).values() if isinstance(value, APIRouter)):
            app.include_router(router)
    document = app.openapi()
    schemas = document["components"]["schemas"]
    parts = [HTTP]
    summary, bodies = [], []
    for path, operations in sorted(document["paths"].items()):
        for method, operation in operations.items():
            said = cell(operation.get("description") or operation.get("summary") or "")
            content = operation.get("requestBody", {}).get("content", {})
            names = [name for one in content.values() for name in referred(one.get("schema", {}))]
            bodies += names
            takes = ", ".join(f"[{name}](#{name.lower()})" for name in dict.fromkeys(names))
            codes = ", ".join(sorted(operation["responses"]))
            summary.append((f"`{method.upper()} {path}`", said, takes, codes))
    parts.append(table(("route", "what it does", "takes", "status"), summary))
    done: list[str] = []
    while bodies:
        name = bodies.pop(0)
        if name in done:
            continue
        done.append(name)
        schema = schemas[name]
        bodies += [other for one in schema.get("properties", {}).values() for other in referred(one)]
        bodies += [] if "properties" in schema else referred(schema)
        parts += [f"## {name}\n", prose(schema.get("description", "")) + "\n", body_table(schema)]
    return "\n".join(parts)


def body_table(schema: Mapping[str, Any]) -> str:
    """Return the keys of an object that a request holds; of other values what they may be."""
    if "properties" not in schema:
        return json_words(schema) + "\n"
    needed = schema.get("required", ())
    rows = []
    for key, one in schema["properties"].items():
        default = f"`{json.dumps(one['default'])}`" if one.get("default") is not None else ""
        default = "*needed*" if key in needed else default
        rows.append((f"`{key}`", json_words(one), default, cell(one.get("description", ""))))
    return table(("key", "type", "default", "meaning"), rows)


def referred(schema: Any) -> list[str]:
    """Return the names of the objects that a schema holds, in its order."""
    if isinstance(schema, list):
        return [name for one in schema for name in referred(one)]
    if not isinstance(schema, dict):
        return []
    own = [schema["$ref"].rpartition("/")[2]] if "$ref" in schema else []
    return own + [name for key, one in schema.items() if key != "discriminator" for name in referred(one)]


def json_words(schema: Mapping[str, Any]) -> str:
    """Return in words what a value may be, as a cell of a table.

    >>> json_words({"anyOf": [{"type": "array", "items": {"type": "integer", "minimum": 0}}]})
    'list of integer from 0'
    """
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f'`"{v}"`' if isinstance(v, str) else f"`{v}`" for v in values)
    if forms := [*schema.get("anyOf", ()), *schema.get("oneOf", ())]:
        kinds = dict.fromkeys(json_words(form) for form in forms if form.get("type") != "null")
        return " or ".join(kinds) or "null"
    if schema.get("type") == "array":
        return f"list of {json_words(schema.get('items', {}))}"
    kind = str(schema.get("type", "any JSON"))
    bounds = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "exclusiveMaximum": "below"}
    return " ".join(
        [kind, *(f"{word} {number(schema[key])}" for key, word in bounds.items() if key in schema)]
    )


def number(value: float) -> str:
    """Return a bound as a person writes it.

    >>> number(0.0), number(0.5), number(2.0**63)
    ('0', '0.5', '2^63')
    """
    power = math.log2(abs(value)) if value else 0.0
    if power > 30 and power == int(power):
        return f"{'-' if value < 0 else ''}2^{power:.0f}"
    return f"{value:g}"


# Metrics and decisions


def metrics_page() -> str:
    """Return the metrics of a run and those of a server."""
    from penstock.engine.stats import EngineCounters, Stats
    from penstock.obs.metric_names import BY_CORPUS, METRICS, SERVING, TRAINING, training_metric
    from penstock.serve.metrics import Metrics

    nothing = {field.name: 0 for field in dataclasses.fields(Stats) if field.name != "counts"}
    text = Metrics(lambda: Stats(**nothing, counts=EngineCounters())).text().decode()
    kinds = dict(re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE))
    rows = [(f"`{name}`", unit, cell(meaning)) for name, (unit, meaning) in METRICS.items()]
    served = []
    for name, (unit, meaning) in SERVING.items():
        full = name if name in kinds else f"{name}_total"
        labels = " by `route`, `status`" if name == "penstock_requests" else ""
        served.append((f"`{full}`", kinds[full] + labels, unit, cell(meaning)))
    by_corpus = {training_metric(name) for name in BY_CORPUS}
    counted = {
        name: f"{name}_total" for name in ("penstock_train_skipped_steps", "penstock_train_steps_not_finite")
    }
    watched = [
        (
            f"`{counted.get(name, name)}`",
            "counter" if name in counted else "gauge" + " by `corpus`" * (name in by_corpus),
            unit,
            cell(meaning),
        )
        for name, (unit, meaning) in TRAINING.items()
    ]
    run, training, server = (
        table(("metric", "unit", "meaning"), rows),
        table(("metric", "kind", "unit", "meaning"), watched),
        table(("metric", "kind", "unit", "meaning"), served),
    )
    return METRICS_PAGE.format(run=run, training=training, server=server)


def decisions_page() -> str:
    """Return the list of the pages of docs/adr."""
    rows = []
    for path in sorted((DOCS / "adr").glob("[0-9]*.md")):
        title = path.read_text().partition("\n")[0].removeprefix("# ")
        number, _, words = title.partition(". ")
        rows.append((number, f"[{words}]({path.name})"))
    return (
        "# Decisions\n\nOne page for each decision that someone may want to reverse: context, decision, "
        "consequences, what was rejected.\n\n" + table(("", "decision"), rows)
    )


def pages() -> dict[str, str]:
    """Return the text of each generated page by its path below docs/."""
    found = command_pages()
    found["reference/recipe.md"] = recipe_page()
    found["reference/corpora.md"] = corpora_page()
    found["reference/models.md"] = models_page()
    found["reference/presets.md"] = presets_page()
    for name, (title, first, modules) in API.items():
        found[f"reference/{name}.md"] = api_page(title, first, modules)
    found["reference/http.md"] = http_page()
    found["reference/metrics.md"] = metrics_page()
    found["adr/index.md"] = decisions_page()
    return {name: finished(name, text) for name, text in found.items()} | {DEFAULTS: defaults_module()}


def finished(name: str, text: str) -> str:
    """Return a page with its mark and links, without blank lines in a row."""
    title, _, rest = linked(text, name).partition("\n")
    return re.sub(r"\n{3,}", "\n\n", f"{title}\n\n{WRITTEN}\n{rest}").rstrip() + "\n"


def stale(found: Mapping[str, str]) -> list[Path]:
    """Return pages that were generated once and no longer are."""
    kept = {DOCS / name for name in found}
    return [path for path in DOCS.rglob("*.md") if path not in kept and WRITTEN in path.read_text()]


def main() -> int:
    """Write or compare the pages."""
    found = pages()
    old = stale(found)
    changed = [n for n, text in found.items() if not (DOCS / n).is_file() or (DOCS / n).read_text() != text]
    if "--check" in sys.argv:
        for name in [*changed, *(str(path.relative_to(DOCS)) for path in old)]:
            print(f"docs/{name} is out of date: run `make format`")
        return int(bool(changed or old))
    for path in old:
        path.unlink()
    for name in changed:
        (DOCS / name).parent.mkdir(parents=True, exist_ok=True)
        (DOCS / name).write_text(found[name])
    return 0


if __name__ == "__main__":
    sys.exit(main())
