import subprocess
import sys
from functools import cache

import pytest
from tools import reference

from penstock.cli.main import VERBS
from penstock.core import config
from penstock.train.resolve.load import build_recipe

pages = cache(reference.pages)


def keys_of(values, *, above=""):
    for key, value in values.items():
        yield from keys_of(value, above=f"{above}{key}.") if isinstance(value, dict) else [f"{above}{key}"]


def test_every_command_and_option_is_on_its_page():
    for verb, parser in reference.parsers().items():
        page = pages()[f"reference/commands/{verb}.md"]
        for option in (name for action in parser._actions for name in action.option_strings):
            assert option in ("-h", "--help") or f"`{option}`" in page, (verb, option)
    assert {name for name in pages() if "/commands/" in name} == {
        f"reference/commands/{name}.md" for name in [*VERBS, "index"]
    }


def test_every_key_of_a_recipe_is_on_the_page():
    page = pages()["reference/recipe.md"]
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    corpora = {"NAME": {"path": "synthetic:tokens=1000"}}
    data = {"corpora": corpora, "sequence_length": 8, "global_batch_size": 1}
    recipe = build_recipe({"run": {"dir": "runs/x", "steps": 1}, "model": sizes, "data": data})
    found = list(keys_of(config.dump(recipe)))
    assert len(found) > 100
    for key in found:
        section, _, name = key.rpartition(".")
        assert f"| `{name}` |" in page or f"`[{key}]`" in page or f"`[[{key}]]`" in page, key
        assert not section or f" `[{section}]`\n" in page, key


@pytest.mark.parametrize("name", ["LLM", "EngineConfig", "Params", "Sampling"])
def test_public_names_are_imported_from_where_users_do(name):
    assert f"`from penstock import {name}`" in pages()["reference/python-engine.md"]


def test_a_page_out_of_date_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(reference, "pages", lambda: {"reference/a.md": f"# A\n\n{reference.WRITTEN}\n"})
    monkeypatch.setattr(reference, "DOCS", tmp_path)
    (tmp_path / "old.md").write_text(f"# Old\n\n{reference.WRITTEN}\n")
    monkeypatch.setattr(sys, "argv", ["reference.py", "--check"])
    assert reference.main() == 1
    said = capsys.readouterr().out.splitlines()
    assert [line.removeprefix("docs/") for line in said] == [
        "reference/a.md is out of date: run `make format`",
        "old.md is out of date: run `make format`",
    ]
    monkeypatch.setattr(sys, "argv", ["reference.py"])
    assert reference.main() == 0
    assert [path.name for path in tmp_path.rglob("*.md")] == ["a.md"]


def test_no_torch_is_loaded():
    script = "import sys; from tools import reference; reference.pages(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=reference.ROOT).returncode == 0
