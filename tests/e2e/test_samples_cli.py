"""Samples while training, as a user sees them: in the log, in metrics.jsonl, in the report; and refusals."""

import json

import pytest

from penstock.obs.sinks.jsonl import read_records
from tests.in_process import run_cli
from tests.unit.obs.html_elements import inlined
from tests.warm import penstock

TEXT = "the penstock feeds the turbine and the turbine feeds the town "
RECIPE = """
compute = "float32"
[run]
dir = "@/run"
steps = 8
[model]
hidden_size = 16
intermediate_size = 16
num_hidden_layers = 1
num_attention_heads = 2
max_position_embeddings = 64
[data]
sequence_length = 32
global_batch_size = 4
num_workers = 0
holdout = 0.2
[data.corpora.a]
path = "@/a"
"""
SAMPLES = """
[samples]
every = 3
prompts = ["the penstock", [{role = "user", content = "What feeds the town?"}]]
heldout = 2
max_tokens = 8
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("samples")
    (folder / "text").mkdir()
    lines = [json.dumps({"text": f"{TEXT[n % 30 :]}{n}"}) for n in range(120)]
    (folder / "text" / "t.jsonl").write_text("\n".join(lines))
    done = penstock("data", "prepare", folder / "text", "--train-tokenizer", 300, "--out", folder / "a")
    assert done.returncode == 0, done.stderr
    (folder / "recipe.toml").write_text((RECIPE + SAMPLES).replace("@", str(folder)))
    return folder


@pytest.fixture(scope="module")
def run(folder):
    done = penstock("train", folder / "recipe.toml", "--processes", 2)
    assert done.returncode == 0, done.stderr
    return done


def test_prompts_are_answered_every_so_many_steps_and_at_the_end(folder, run):
    found = [r for r in read_records(folder / "run" / "metrics.jsonl") if r.get("event") == "samples"]
    assert [record["step"] for record in found] == [3, 6, 8]
    for record in found:
        prompts = [answer["prompt"] for answer in record["answers"]]
        assert prompts[:2] == ["the penstock", "What feeds the town?"]
        assert len(prompts) == 4
        assert ["reference" in answer for answer in record["answers"]] == [False, False, True, True]
        assert all(answer["finish"] in ("stop", "length") for answer in record["answers"])
    assert run.stderr.count(": 'the penstock' -> ") == 3


@pytest.mark.usefixtures("run")
def test_a_run_without_samples_has_the_same_losses(folder, tmp_path):
    quiet = ("--set", f"run.dir={tmp_path}", "--set", "samples.every=0", "--processes", 2)
    done = penstock("train", folder / "recipe.toml", *quiet)
    assert done.returncode == 0, done.stderr
    losses = [
        [r["loss"] for r in read_records(run_folder / "metrics.jsonl") if "loss" in r]
        for run_folder in (folder / "run", tmp_path)
    ]
    assert len(losses[0]) == 8
    assert losses[0] == losses[1]


@pytest.mark.usefixtures("run")
def test_the_report_has_the_samples(folder):
    done = run_cli("report", folder / "run")
    assert done.returncode == 0, done.stderr
    found = inlined((folder / "run" / "report.html").read_text())["runs"][0]["answers"]
    assert found["steps"] == [3, 6, 8]
    prompts = [prompt["prompt"] for prompt in found["prompts"]]
    assert prompts[:2] == ["the penstock", "What feeds the town?"]
    assert len(prompts) == 4
    assert [prompt["reference"] is not None for prompt in found["prompts"]] == [False, False, True, True]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["samples.prompts=[]", "samples.heldout=0"], "samples.every has nothing to answer"),
        (["samples.heldout=9"], "At most 10 are answered"),
        (['samples.prompts=[""]'], "samples.prompts[0] is empty"),
        (["samples.prompts=[3]"], "samples.prompts[0] must be"),
        (["samples.prompts=[{tools=[]}]"], "Missing"),
        (
            ["samples.prompts=[{messages=[{role='user'}], tool=[]}]"],
            "Unknown key samples.prompts[0].tool",
        ),
        (["data.holdout=0.0"], "samples.heldout needs held-out data"),
        ([f'samples.prompts=["{TEXT * 9}"]'], "the model's context is 64, the answer included"),
        (["validate.stop_after=2"], "validate.stop_after needs validations"),
    ],
)
def test_what_cannot_be_sampled_is_refused_with_the_remedy(folder, tmp_path, settings, words):
    options = [word for setting in (f"run.dir={tmp_path}/x", *settings) for word in ("--set", setting)]
    done = penstock("train", folder / "recipe.toml", *options)
    assert done.returncode == 2, done.stderr
    assert words in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
