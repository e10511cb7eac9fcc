"""What `make soak` runs, what it files, and what `make check` says of it."""

import json

import pytest
from tools import soak
from tools.soak import ROOT, TABLE, Part, check, parts_of, run

PARTS = parts_of(TABLE.read_text())


@pytest.fixture(autouse=True)
def few_plugins(monkeypatch):
    """Let the pytests that are started load what pyproject.toml needs, and not all that is installed."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "xdist.plugin,pytest_timeout")


def part(folder, text):
    (folder / "check_it.py").write_text(text)
    return Part(name="it", why="a test", tests=(str(folder / "check_it.py"),), sources=("Makefile",))


def test_every_file_that_make_test_leaves_out_is_of_a_part():
    left_out = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/**/check_*.py")}
    named = {word for one in PARTS for word in one.tests if word.endswith(".py")}
    assert left_out == {word for word in named if "/check_" in word}
    assert all((ROOT / word).exists() for word in named)


@pytest.mark.parametrize("one", PARTS, ids=lambda one: one.name)
def test_a_part_names_its_tests_among_its_sources(one):
    sources = one.digests()
    assert {word for word in one.tests if word.endswith(".py")} <= {*sources}


# Each starts a pytest, as `make soak` does.
def test_what_passed_is_filed_and_is_too_old_once_a_source_changes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(soak, "RESULTS", tmp_path / "results")
    one = part(tmp_path, "def test_passes(): pass\n")
    assert check([one]) == 1
    assert "make soak PART=it" in capsys.readouterr().err
    assert run(one)
    assert check([one]) == 0
    (path,) = (tmp_path / "results").glob("soak-it-*.json")
    result = json.loads(path.read_text())
    assert result["tests"] == 1
    path.write_text(json.dumps(result | {"sources": {"Makefile": "another"}}))
    assert check([one]) == 1


def test_what_failed_or_was_skipped_is_not_filed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(soak, "RESULTS", tmp_path / "results")
    text = "import pytest\ndef test_fails(): assert False\ndef test_skips(): pytest.skip('none')\n"
    assert not run(part(tmp_path, text))
    assert "these did not pass: test_fails, test_skips" in capsys.readouterr().out
    assert not (tmp_path / "results").exists()


def test_a_part_without_tests_is_not_filed(tmp_path, monkeypatch):
    monkeypatch.setattr(soak, "RESULTS", tmp_path / "results")
    assert not run(part(tmp_path, ""))
    assert not (tmp_path / "results").exists()
