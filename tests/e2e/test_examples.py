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


EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
RUN = """
import gc, os, runpy, sys
import accelerate, scipy.optimize, torch._dynamo
from penstock import LLM
from penstock.data import Loader

gc.freeze()
corpus, folder, *paths = sys.argv[1:]
for path in paths:
    if not (child := os.fork()):
        said = os.open(f"{folder}/{os.path.basename(path)}", os.O_WRONLY | os.O_CREAT)
        os.dup2(said, 1)
        os.dup2(said, 2)
        sys.argv = [path, corpus]
        runpy.run_path(path, run_name="__main__")
        sys.exit()
    if not os.waitpid(child, 0)[1]:
        print(os.path.basename(path), flush=True)
"""
"""Runs each example in a process of its own, forked from one that has imported what they share."""


@pytest.fixture(scope="module")
def examples_run(readme_corpus, tmp_path_factory):
    """Names of the examples that ended well, and the folder of what each said."""
    folder = tmp_path_factory.mktemp("said")
    done = subprocess.run(
        [sys.executable, "-c", RUN, readme_corpus, folder, *EXAMPLES],
        capture_output=True,
        text=True,
        timeout=800,
        check=True,
    )
    return done.stdout.split(), folder


@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs_on_the_corpus_of_the_readme(path, examples_run):
    ended_well, folder = examples_run
    assert path.name in ended_well, (folder / path.name).read_text()


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("tiny*.toml")), ids=lambda path: path.name)
def test_a_recipe_for_any_machine_resolves_on_a_corpus(path, corpus):  # all others: test_recipes_cli.py
    settings = ("--set", f"data.corpora.docs.path={corpus}", "--set", "data.holdout=0.5")
    done = run_cli("train", path, *settings, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "parameters" in done.stdout
