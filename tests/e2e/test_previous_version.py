"""Files of the version before: corpora, loader states and a run written by commit 0d03ec3 still open.

tests/golden/write_previous.py wrote tests/golden/previous with that commit's sources: two corpora (one of
them appended to), loader states with the rows that the loader served next, and a run of two ranks that was
stopped after 3 of 6 steps, with the log of its other 3 steps. Steps are compared as sets of rows: since then
the loader deals rows to ranks in another order (docs/adr/0046-deal-rows-evenly.md).
"""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from penstock.data import Loader
from tests.warm import penstock

PREVIOUS = Path(__file__).parents[1] / "golden" / "previous"
STATES = json.loads((PREVIOUS / "loader_states.json").read_text())


@pytest.fixture
def previous(tmp_path, monkeypatch):
    folder = shutil.copytree(PREVIOUS, tmp_path / "previous")
    monkeypatch.chdir(folder)
    return folder


def rows_of(batches):
    """Return the sample ids of one step and a hash of its tokens, whatever the order of its rows."""
    samples = np.concatenate([batch["sample_ids"] for batch in batches])
    tokens = np.concatenate([batch["input_ids"] for batch in batches])
    rows = sorted(zip(samples.tolist(), tokens.tolist(), strict=True))
    text = json.dumps([row for _, row in rows]).encode()
    return {"samples": [sample for sample, _ in rows], "tokens": hashlib.sha256(text).hexdigest()[:16]}


@pytest.mark.usefixtures("previous")
@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_loader_state_goes_on_with_the_rows_that_its_version_would_have_served(name, world_size):
    case = STATES[name]
    corpora = {corpus: corpus for corpus in case["corpora"]}
    loaders = [
        Loader(corpora, **case["options"], rank=rank, world_size=world_size, num_workers=0, deliver="numpy")
        for rank in range(world_size)
    ]
    for loader in loaders:
        loader.load_state_dict(case["state"])
    batches = [iter(loader) for loader in loaders]
    for expected in case["next"]:
        assert rows_of([next(one) for one in batches]) == expected


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_goes_on_with_the_losses_that_its_version_had(previous, processes):
    done = penstock("train", "recipe.toml", "--processes", processes)
    assert done.returncode == 0, done.stderr
    assert "numerics=changed before=1 now=2" in done.stderr
    records = [*map(json.loads, (previous / "run/metrics.jsonl").read_text().splitlines())]
    (change,) = [record for record in records if record.get("event") == "resume_change"]
    assert (change["step"], change["setting"], change["saved"]) == (3, "numerics", 1)

    def losses(path):
        records = map(json.loads, path.read_text().splitlines())
        return {record["step"]: record["loss"] for record in records if "loss" in record}

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
