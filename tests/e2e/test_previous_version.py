"""Names on disk stay: corpora and a run written by commit 0d03ec3 still open, and the run goes on.

tests/golden/previous has two corpora (one of them appended to), and a run of two ranks that was stopped
after 3 of 6 steps, with the log of its other 3 steps. The loader's state has today's version.
"""

import json
import shutil
from pathlib import Path

import pytest

from penstock.obs.sinks.jsonl import read_records
from tests.warm import penstock

PREVIOUS = Path(__file__).parents[1] / "golden" / "previous"


@pytest.fixture
def previous(tmp_path, monkeypatch):
    folder = shutil.copytree(PREVIOUS, tmp_path / "previous")
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_goes_on_with_the_losses_that_its_version_had(previous, processes):
    done = penstock("train", "recipe.toml", "--processes", processes)
    assert done.returncode == 0, done.stderr
    assert "computes in another order (numerics 1, now 2)" in done.stderr
    records = read_records(previous / "run/metrics.jsonl")
    (change,) = [record for record in records if record.get("event") == "resume_change"]
    assert (change["step"], change["setting"], change["saved"]) == (3, "numerics", 1)

    def losses(path):
        return {record["step"]: record["loss"] for record in read_records(path) if "loss" in record}

    assert losses(previous / "run/metrics.jsonl") == pytest.approx(
        losses(previous / "metrics_to_6.jsonl"), rel=1e-5
    )
    audit = penstock("data", "audit", "run", "--json")
    assert (audit.returncode, json.loads(audit.stdout)["faults"]) == (0, [])


@pytest.mark.parametrize(
    "command",
    [
        "data verify river", "data verify dam", "data describe river --json", "checkpoint verify run",
        "generate run --prompt water --greedy --max-tokens 4", "eval run --corpus dam", "report run",
        "export run --out exported", "data append dam river.txt",
    ],
)  # fmt: skip
def test_commands_read_its_files(previous, command):
    (previous / "river.txt").write_text("the river flows to the dam\n")
    done = penstock(*command.split())
    assert done.returncode == 0, done.stderr
