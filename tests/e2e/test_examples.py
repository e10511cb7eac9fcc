"""Examples and recipes do what they say."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import penstock

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_an_example_runs_and_fits_on_a_screen(path, corpus):
    assert len(path.read_text().splitlines()) <= 60
    done = subprocess.run(
        [sys.executable, str(path), str(corpus)], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("tiny*.toml")), ids=lambda path: path.name)
def test_a_recipe_for_any_machine_resolves_on_a_corpus(path, corpus):  # all others: test_recipes_cli.py
    settings = ("--set", f"data.corpora.docs.path={corpus}", "--set", "data.holdout=0.5")
    done = penstock("train", path, *settings, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "parameters" in done.stdout
