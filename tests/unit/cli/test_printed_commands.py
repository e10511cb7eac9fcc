"""Commands that documents and help texts print are read by the parser of their verb; none is carried out."""

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.launch.spec import environment_of, node_range, secrets_of

ROOT = Path(__file__).parents[3]
FENCED = re.compile(r"^```\w*\n(.*?)^```", re.DOTALL | re.MULTILINE)
EXAMPLES = re.compile(r"^examples?:\n((?:  .*\n)+)", re.MULTILINE)
GENERATED = ROOT / "docs/reference"  # of the help texts, which are read themselves
WRITTEN = [page for page in sorted((ROOT / "docs").rglob("*.md")) if GENERATED not in page.parents]
PAGES = [
    *((page, FENCED) for page in [ROOT / "README.md", *WRITTEN]),
    *((page, EXAMPLES) for page in sorted((ROOT / "src/penstock/cli").rglob("*.py"))),
]


def printed(text: str, blocks: re.Pattern[str]) -> Iterator[list[str]]:
    """Yield the words of each command in the blocks of a text, as a shell takes a line apart."""
    for block in blocks.findall(text.replace("\\\n", " ")):
        for line in re.findall(r"^.*\bpenstock .*", block, re.MULTILINE):
            lexer = shlex.shlex(line, posix=True, punctuation_chars=";|&>")
            lexer.whitespace_split = True
            words: list[str] = []
            for word in [*lexer, ";"]:
                if word[0] not in ";|&>":
                    words.append(word)
                    continue
                if words[:1] == ["penstock"]:
                    yield words[1:]
                words = []


COMMANDS = [
    pytest.param(words, id=f"{page.name}: {' '.join(words)}")
    for page, blocks in PAGES
    for words in printed(page.read_text(), blocks)
]


READ_LATER = {"nodes": node_range, "secret": secrets_of, "env": environment_of}
"""Options of `penstock launch` whose values are text for the parser."""


class Understood(Exception):
    """Raised instead of doing what a command says; its argument is what the parser returned."""


@pytest.mark.parametrize("words", COMMANDS)
def test_a_printed_command_is_understood(words, monkeypatch):
    parse = argparse.ArgumentParser.parse_args

    def and_no_further(self, *given):
        raise Understood(parse(self, *given))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", and_no_further)
    with pytest.raises(Understood) as understood:
        main(words)
    (options,) = understood.value.args
    for name, read in READ_LATER.items() if words[:1] == ["launch"] else ():
        if hasattr(options, name):
            read(getattr(options, name))


def test_commands_are_found():
    assert len(COMMANDS) > 80
