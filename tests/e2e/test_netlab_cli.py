"""`penstock netlab run` as a user types it."""

import json
import signal
import subprocess

import pytest

from penstock.cli.main import main
from penstock.netlab.hosts import why_not
from penstock.train.islands.schedule import bytes_per_step
from penstock.train.resolve.load import load_recipe
from tests.warm import Command, penstock

RECIPE = """
compute = "float32"
[run]
dir = "never"
steps = 40
[model]
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
[data]
sequence_length = 16
global_batch_size = 8
micro_batch_size = 2
[data.corpora.c]
path = "synthetic:tokens=1e6,vocab_size=128"
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


@pytest.mark.skipif(bool(why_not(latency_s=0.001)), reason=why_not(latency_s=0.001))
def test_a_recipe_is_tried_and_its_own_folder_left_alone(recipe, tmp_path):
    words = ["netlab", "run", recipe, "--hosts", 2, "--rate", "1gbit", "--latency", "0.1ms", "--steps", 3]
    done = penstock(*words, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert len(measured["losses"]) == 3
    assert len(measured["sent_bytes"]) == 2
    assert measured["busy"] == pytest.approx(measured["compute_s"] / measured["step_s"])
    assert "Step 3 of 3" in done.stderr
    assert "[c10d]" not in done.stderr, "torch's warnings of waits that were over soon"
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.toml"]


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_the_figures_are_said_with_the_network_they_are_of(recipe, tmp_path):
    done = penstock("netlab", "run", recipe, "--hosts", 2, "--nics", 2, "--steps", 2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert first == "hosts: 2, processes on each: 1, NICs: 2 of any rate, latency: 0ms"
    assert [line.split()[0] for line in rest] == ["step", "compute", "busy", "sent", "losses"]


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_islands_send_what_is_said_of_them(recipe, tmp_path):
    """Up to a tenth more: headers, and the few numbers of each step. They meet after steps 2 and 4 of 5."""
    settings = ["parallel.shard=1", "parallel.replicate=2", "outer.every=2", "outer.bits=4"]
    settings += ["model.hidden_size=128", "model.intermediate_size=384"]
    words = [word for setting in settings for word in ("--set", setting)]
    done = penstock("netlab", "run", recipe, "--hosts", 2, "--steps", 5, "--json", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    config = load_recipe(recipe, settings)
    expected = bytes_per_step(config.outer, parameters=config.model.num_parameters, islands=2)
    for sent in json.loads(done.stdout)["sent_bytes"]:
        assert expected < sent < 1.1 * expected


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_ctrl_c_ends_the_ranks_after_their_step_and_leaves_nothing(recipe, tmp_path):
    """The shell sends it to all processes of the terminal; here to the one that forwards it."""
    command = ["netlab", "run", recipe, "--hosts", 2, "--steps", 40000]
    long = ["--set", "run.steps=50000"]
    with Command(
        *command, *long, interpreter="Ctrl-C", stderr=subprocess.PIPE, text=True, cwd=tmp_path
    ) as lab:
        assert any("Step 1 of" in line for line in lab.stderr)  # the ranks of the run train
        lab.send_signal(signal.SIGINT)
        said = lab.stderr.read()
        assert lab.wait(timeout=120) == 130, said
    assert "Interrupted" in said
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.toml"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rate", "fast"], "Not a rate of a network (got 'fast')"),
        (["--latency", "1"], "Not a latency (got '1')"),
        (["--hosts", "0"], "hosts must be from 1 to 200 (got 0)"),
    ],
)
def test_a_network_that_cannot_be_is_refused(recipe, capsys, words, said):
    code = main(["netlab", "run", str(recipe), *words])
    assert code == 2
    assert said in " ".join(capsys.readouterr().err.split())
