"""What `penstock train` and a launched node refuse before torch is imported or anything is forked."""

import sys

import pytest
from tests.in_process import run_cli
from tests.unit.launch.test_spec import make_spec

from penstock.cli.training_job import work_of
from penstock.core.env import num_cores
from penstock.core.errors import UsageError
from penstock.launch import local
from penstock.models.decoder.config import DecoderConfig
from penstock.testing.corpora import write_corpus
from penstock.text.tokenizer import train_tokenizer

RECIPE = """\
run = {{ dir = "{run}", steps = 5 }}
model = {{ hidden_size = 64, intermediate_size = 160, num_hidden_layers = 2, num_attention_heads = 4 }}
data = {{ sequence_length = 16, global_batch_size = 8, corpora.c.path = "{corpus}" }}
"""
HUGE = ("--set", "model.hidden_size=32768", "--set", "model.num_hidden_layers=100")


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """A recipe on a machine without accelerators; nothing can be forked, and torch not imported."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(local, "_start", None)
    monkeypatch.setitem(sys.modules, "penstock.train.run", None)
    corpus = write_corpus(tmp_path / "c", [[1] * 6] * 200, vocab_size=32)
    (tmp_path / "r.toml").write_text(RECIPE.format(run=tmp_path / "run", corpus=corpus))
    return tmp_path / "r.toml"


def test_more_processes_than_the_cores_can_run_are_refused(recipe):
    done = run_cli("train", recipe, "--processes", 100_000)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("penstock: 100,000 processes on ")
    assert "Traceback" not in done.stderr


def test_a_model_that_cannot_fit_is_refused(recipe):
    done = run_cli("train", recipe, *HUGE)
    assert (done.returncode, done.stdout) == (2, "")
    assert "TiB of memory on this machine, for the process" in " ".join(done.stderr.split())
    assert not (recipe.parent / "run").exists()


def test_launched_processes_of_all_nodes_are_counted_together(recipe):
    done = run_cli(
        "launch", "local", recipe, "--nodes", 1000, "--processes", 4, "--set", "data.global_batch_size=4000"
    )
    assert (done.returncode, "penstock: 4,000 processes on " in done.stderr) == (2, True)
    done = run_cli("launch", "local", recipe, *HUGE)
    assert (done.returncode, "of memory on this machine" in " ".join(done.stderr.split())) == (2, True)


def test_a_dry_run_says_what_this_machine_would_refuse(recipe):
    done = run_cli("train", recipe, *HUGE, "--dry-run")
    assert done.returncode == 0
    assert "On this machine it would be refused: The run needs" in " ".join(done.stderr.split())
    assert "parameters" in done.stdout


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.hidden_size", 640_000_000_000),
        ("model.intermediate_size", 2**61),
        ("model.vocab_size", 2**40),
        ("model.num_attention_heads", 2**50),
        ("model.num_hidden_layers", 10**9),
        ("run.steps", 2**62),
        ("data.global_batch_size", 2**62),
        ("data.sequence_length", 2**40),
        ("data.prefetch", 2**30),
        ("data.num_workers", 10**6),
    ],
)
def test_sizes_have_ceilings(recipe, key, value):
    done = run_cli("train", recipe, "--set", f"{key}={value}", "--oversubscribe")
    assert done.returncode == 2
    assert f"{key.partition('.')[2]} can be at most" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_the_largest_model_below_the_ceilings_has_a_size_in_64_bits():
    largest = DecoderConfig(
        vocab_size=2**24,
        hidden_size=2**20,
        intermediate_size=2**23,
        num_hidden_layers=2000,
        num_attention_heads=2**10,
    )
    assert 16 * largest.num_parameters < 2**63


def test_a_vocabulary_that_no_memory_holds_is_refused_before_the_library_takes_it():
    with pytest.raises(UsageError, match="too large"):
        train_tokenizer(["a"], vocab_size=99_999_999_999)


def test_more_launched_processes_than_the_cores_of_a_node_carry_are_refused():
    most = local.PROCESSES_PER_CORE * num_cores()
    assert callable(work_of(make_spec(processes=most)))
    with pytest.raises(UsageError, match=rf"{most + 1:,} processes on .* --oversubscribe starts them"):
        work_of(make_spec(processes=most + 1))
    command = ("train", "recipe.toml", "--oversubscribe")
    assert callable(work_of(make_spec(processes=most + 1, command=command)))
