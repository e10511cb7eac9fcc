"""`penstock recipes` as a user types it."""

import json
import re
import shlex
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.testing.corpora import write_corpus
from penstock.train.resolve.load import recipe_names
from tests.warm import penstock

SHORT = [
    word
    for change in ("run.steps=2", "model.hidden_size=64", "validate.samples=8")
    for word in ("--set", change)
]


def said(capsys, *words):
    code = main(["recipes", *map(str, words)])
    out = capsys.readouterr()
    return code, out.out, " ".join(out.err.split())


def test_every_recipe_is_listed_with_its_size(capsys):
    code, out, _ = said(capsys, "list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:]] == recipe_names()
    assert "llama3-70b           70.6G" in out
    _, out, _ = said(capsys, "list", "--json")
    assert {row["name"]: row["parameters"] for row in json.loads(out)}["granite-7b"] == 6_738_415_616


def test_a_recipe_is_shown_as_it_lies_in_the_repository(capsys):
    code, out, _ = said(capsys, "show", "llama3-8b")
    assert code == 0
    assert out == Path("recipes/llama3-8b.toml").read_text()
    code, _, err = said(capsys, "show", "llama3-8")
    assert (code, "Did you mean 'llama3-8b'" in err) == (2, True)


def test_every_shipped_recipe_builds_on_the_meta_device(capsys):
    code, out, err = said(capsys, "check", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert list(found) == recipe_names()
    assert found["llama3-70b"]["parameters"] == 70_553_706_496
    assert found["llama3-70b"]["devices"][0]["devices"] == 64


def test_learned_tokens_are_shown_of_conversations_that_are_here(capsys, tmp_path):
    bits = {"learned": [[False, True, True, False]] * 5}
    write_corpus(tmp_path / "chats", [[1, 2, 3, 4]] * 5, vocab_size=100, columns=bits)
    mine = tmp_path / "mine.toml"
    mine.write_text(
        Path("recipes/tiny.toml").read_text() + f'[data.corpora.chats]\npath = "{tmp_path / "chats"}"\n'
    )
    code, out, err = said(capsys, "check", mine, "--devices", 1)
    assert code == 0, err
    assert "  learned of chats: 10 of 20 tokens (50.0%)\n" in out


def test_a_recipe_of_ones_own_is_checked_with_settings_over_it(capsys, tmp_path):
    mine = tmp_path / "mine.toml"
    mine.write_text(Path("recipes/tiny.toml").read_text())
    code, out, _ = said(capsys, "check", mine, "--devices", 4, "--set", "model.vocab_size=1000")
    assert code == 0
    assert "shard 4" in out
    assert "vocab_size follows" not in out
    code, _, err = said(capsys, "check", mine, "--devices", 5)
    assert code == 2
    assert "mine.toml: A global batch of 12 sequences does not divide over 5 ranks" in err, err


def test_the_first_commands_of_the_readme_work_as_printed(tmp_path):
    for name in ("docs", "recipes"):
        (tmp_path / name).symlink_to(Path(name).resolve())
    printed = re.findall(r"^penstock (.*)", Path("README.md").read_text(), re.MULTILINE)
    for command, more in zip(printed[:3], [(), SHORT, ("--max-tokens", "3")], strict=True):
        done = penstock(*shlex.split(command, comments=True), *more, cwd=tmp_path)
        assert done.returncode == 0, (command, done.stderr)
    assert printed[3].startswith("serve runs/first"), "tests of the server try the rest"


@pytest.mark.parametrize("words", [[], ["check", "absent.toml"], ["paint"]])
def test_wrong_usage_exits_with_2(capsys, words):
    try:
        code, *_ = said(capsys, *words)
    except SystemExit as left:
        code = left.code
    assert code == 2
