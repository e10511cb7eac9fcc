"""ARCHITECTURE.md's reading paths are true: the files exist, and each is connected to one before it."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src/penstock"


def reading_paths():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    section = text.split("## Reading paths")[1].split("\n## ")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| ") and ".py`" in line]
    return {question.strip(): re.findall(r"`([^`]+)`", files) for question, files in rows}


def imported(path):
    """Return what a file imports of ours anywhere in it, as paths below src/penstock."""
    if path.suffix != ".py":
        return set()
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("penstock."):
            below = node.module.removeprefix("penstock.").replace(".", "/")
            found |= {f"{below}.py", *(f"{below}/{name.name}.py" for name in node.names)}
    return found


PATHS = reading_paths()


def test_paths_are_found_and_short():
    assert len(PATHS) >= 9
    assert all(3 <= len(files) <= 5 for files in PATHS.values())


@pytest.mark.parametrize("question", PATHS)
def test_each_file_of_a_path_is_connected_to_one_before_it(question):
    files = PATHS[question]
    assert not [name for name in files if not (SRC / name).is_file()]
    for index, name in enumerate(files[1:], start=1):
        if name.endswith(".h"):  # compiled into the operators that the file before it calls
            continue
        ours = imported(SRC / name)
        assert any(name in imported(SRC / other) or other in ours for other in files[:index]), name


UNPICKLES = (
    r"(gather|broadcast|scatter|send|recv)_object|pickle\.loads?\b|torch\.load\b|Unpickler|allow_pickle=True"
)


def test_nothing_of_a_peer_is_unpickled():
    """Who reaches a port of a run must not run code in it; aids for tests have their own pickles."""
    found = {
        str(path.relative_to(SRC)): line.strip()
        for path in SRC.rglob("*.py")
        for line in path.read_text().splitlines()
        if re.search(UNPICKLES, line) and "`" not in line and path.parent.name != "testing"
    }
    assert found == {}
