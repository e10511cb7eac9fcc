"""The demo, from the first command to the report, with too few and too short steps to learn anything.

check_demo.py runs it whole.
"""

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.cli import demo, demo_commands, demo_tuning
from tests.in_process import run_cli
from tests.unit.obs.html_elements import inlined
from tests.warm import Command

FEW_STEPS = {
    "recipe.toml": (
        *("run.steps=24", "schedule.warmup_steps=4", "schedule.decay_steps=8", "data.sequence_length=64"),
        *("validate.every=12", "validate.samples=12"),
    ),
    "demo_tuning.toml": (
        *("run.steps=8", "schedule.warmup_steps=2", "schedule.decay_steps=4", "data.global_batch_size=4"),
    ),
    "demo_tune.toml": ("run.steps=8", "schedule.warmup_steps=2", "data.global_batch_size=4"),
}


def open_command(argv, **options):
    words = argv[argv.index("penstock") + 1 :]
    fewer = [f"--set={setting}" for word in words for setting in FEW_STEPS.get(Path(word).name, ())]
    return Command(*words, *fewer, **options)


def run_command(argv, **options):
    assert not options.pop("check"), "the demo says itself what failed"
    with open_command(argv, **options) as process:
        out, _ = process.communicate()
    return subprocess.CompletedProcess(argv, process.returncode, out)


@pytest.fixture
def few_steps(monkeypatch):
    """The demo's commands are forked, train for few steps, and the tuned model calls no tool."""
    forking = SimpleNamespace(Popen=open_command, run=run_command, PIPE=-1, DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr(demo_commands, "subprocess", forking)
    monkeypatch.setattr(demo_tuning, "subprocess", forking)
    monkeypatch.setattr(demo_tuning, "_call_a_tool", lambda _: None)


@pytest.mark.usefixtures("few_steps")
def test_the_demo_goes_through_all_its_steps_and_says_that_nothing_was_learned(tmp_path):
    folder = tmp_path / "a demo"
    done = run_cli("demo", "--quick", "--dir", folder)
    assert "PASS: nothing lost, nothing repeated" in done.stdout, done.stderr
    assert "2 from step 0, 1 from step" in done.stdout
    assert done.stdout.count("$ kill -TERM") == 2
    assert done.returncode == 1
    assert "The validation loss is not well below the unigram entropy" in " ".join(done.stderr.split())
    tuned = inlined((folder / "tuned" / "tuned-run" / "report.html").read_text())
    assert tuned["runs"][0]["answers"]["prompts"]
    page = (folder / "report.html").read_text()
    assert "2 -> 1 rank" in page
    assert "unigram entropy" in page
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert model.config.vocab_size == len(tokenizer) == 2048


def test_a_demo_whose_tuning_taught_nothing_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "output", lambda *_: '{"unigram_entropy": 9.0}')
    records = [{"validation_loss": loss, "loss": loss, "tokens_per_s": 1.0} for loss in (9.0, 2.0)]
    monkeypatch.setattr(demo, "read_records", lambda _: records)
    tuned = demo_tuning.TunedModel(run=tmp_path, before=0.0, after=0.5, asked=10)
    with pytest.raises(demo.PenstockError, match=r"did not teach the questions.*0% -> 50%"):
        demo._summarise(tmp_path, tuned, seconds=1.0)


def test_the_demo_does_not_touch_a_folder_it_did_not_make(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    done = run_cli("demo", "--dir", tmp_path)
    assert done.returncode == 2
    assert "was not made by the demo" in " ".join(done.stderr.split())
    assert (tmp_path / "thesis.tex").exists()
