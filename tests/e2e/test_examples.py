"""Examples and recipes do what they say."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.in_process import run_cli
from tests.warm import penstock

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def readme_corpus(tmp_path_factory):
    """The corpus that the README's own command makes of the documentation."""
    command = re.search(
        r"^penstock (data prepare docs/ .*--out corpus)$", (ROOT / "README.md").read_text(), re.M
    )
    assert command is not None
    folder = tmp_path_factory.mktemp("readme")
    (folder / "docs").symlink_to(ROOT / "docs")
    done = penstock(*shlex.split(command[1]), cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "corpus"


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_an_example_runs_on_the_corpus_of_the_readme(path, readme_corpus):
    done = subprocess.run(
        [sys.executable, str(path), str(readme_corpus)], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("tiny*.toml")), ids=lambda path: path.name)
def test_a_recipe_for_any_machine_resolves_on_a_corpus(path, corpus):  # all others: test_recipes_cli.py
    settings = ("--set", f"data.corpora.docs.path={corpus}", "--set", "data.holdout=0.5")
    done = run_cli("train", path, *settings, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "parameters" in done.stdout
