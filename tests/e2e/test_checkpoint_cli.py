"""`penstock checkpoint` and export of any step, while a run trains and after it was damaged."""

import json
import subprocess

import pytest

from penstock.cli.main import main
from tests.warm import Command


@pytest.fixture
def said(capsys):
    """A function that runs a command in this process and returns its exit code and what it said."""

    def run(*words):
        code = main([str(word) for word in words])
        shown = capsys.readouterr()
        return code, shown.out, " ".join(shown.err.split())

    return run


def test_a_training_run_is_listed_verified_and_exported_at_any_step(recipe, tmp_path, said):
    run, settings = tmp_path / "run", ["--set", "checkpoint.every=5", "--set", "checkpoint.keep_every=5"]
    words = ["train", str(recipe), "--set", "run.steps=100000", *settings]
    with Command(*words, stderr=subprocess.PIPE, text=True) as job:
        try:
            for line in job.stderr:
                if "Saved step 10 " in line:
                    break
            exported, _, _ = said("export", run, "--step", 5, "--out", tmp_path / "exported")
            verified, sound, _ = said("checkpoint", "verify", run, "--step", 10)
            assert job.poll() is None, "it trains on"
        finally:
            job.terminate()
            job.communicate(timeout=120)
    assert (job.returncode, exported, verified) == (75, 0, 0)
    assert (tmp_path / "exported" / "config.json").is_file()
    assert sound.endswith("step-00000010 is sound.\n")

    code, out, _ = said("checkpoint", "list", run, "--json")
    listed = json.loads(out)
    assert code == 0
    assert [row["step"] for row in listed][:2] == [5, 10]
    _, out, _ = said("checkpoint", "list", run)
    shown = out.splitlines()
    assert len(shown) == len(listed)
    assert shown[0].startswith("step-00000005  20")
    assert "1 rank" in shown[0]

    (shard,) = (run / "checkpoints" / "step-00000005").glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    code, out, _ = said("checkpoint", "verify", run, "--json")
    assert code == 1
    assert [row["path"][-2:] for row in json.loads(out) if not row["sound"]] == ["05"]
    code, _, why = said("export", run, "--step", 5, "--out", tmp_path / "other")
    assert code == 1
    assert "were altered. Restore it, or remove that checkpoint" in why
    code, _, why = said("export", run, "--step", 3, "--out", tmp_path / "other")
    assert code == 1
    assert "has no complete checkpoint of step 3. It has step-" in why


def test_a_run_without_checkpoints_is_said_to_have_none(recipe, tmp_path, said):
    assert said("checkpoint", "list", recipe.parent)[0] == 1
    code, _, why = said("checkpoint", "verify", recipe.parent, "--step", 7)
    assert code == 1
    assert "has no complete checkpoint of step 7. See `penstock checkpoint list`" in why
    code, _, why = said("checkpoint", "list", tmp_path / "nowhere")
    assert code == 2
    assert "nowhere is not a folder" in why
