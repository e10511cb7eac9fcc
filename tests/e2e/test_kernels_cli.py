"""penstock kernels: what it measures on a CPU, what it writes, and what it refuses."""

import json

import pytest

from penstock.core.toml import toml_text
from penstock.testing.corpora import write_corpus
from tests.in_process import run_cli
from tests.tiny_models import save_talker


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe")
    corpus = write_corpus(folder / "corpus", [[1 + i % 49 for i in range(30)]] * 40, vocab_size=50)
    path = folder / "recipe.toml"
    raw = {
        "compute": "float32",
        "run": {"dir": str(folder / "run"), "steps": 2},
        "model": {
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
            "vocab_size": 50,
        },
        "data": {
            "corpora": {"c": {"path": str(corpus)}}, "sequence_length": 64, "global_batch_size": 2,
        },
    }  # fmt: skip
    path.write_text(toml_text(raw))
    return path


@pytest.fixture(scope="module")
def table(recipe):
    path = recipe.with_name("table.json")
    done = run_cli(
        "kernels", recipe, "--out", path, "--json", env={"PENSTOCK_CACHE": str(recipe.parent / "cache")}
    )
    assert done.returncode == 0, done.stderr
    assert "operations, about" in done.stderr
    assert "Measured in" in done.stderr
    assert json.loads(done.stdout) == json.loads(path.read_text())
    return path


def test_the_kernels_of_a_recipe_are_measured_and_written_and_on_a_cpu_not_kept(recipe, table):
    rows = json.loads(table.read_text())["rows"]
    assert [key.partition(" ")[0] for key in rows] == ["attention.rows", "attention.documents"]
    for row in rows.values():
        assert row["us"][row["kernel"]] <= 1.02 * min(row["us"].values())
    assert not (recipe.parent / "cache").exists()
    shown = run_cli("kernels", recipe, "--show", env={"PENSTOCK_CACHE": str(recipe.parent / "cache")})
    assert shown.stdout.count("not chosen yet on this device") == 2


def test_a_dry_run_shows_the_kernels(recipe, table):
    plain = run_cli("train", recipe, "--dry-run")
    assert plain.stdout.endswith("kernels:\n  all: the first of each list, on CPUs\n")
    pinned = run_cli("train", recipe, "--dry-run", "--json", "--set", f"kernels={table}")
    rows = json.loads(table.read_text())["rows"]
    shown = json.loads(pinned.stdout)["kernels"]
    assert [text.partition(" (")[0] for text in shown.values()] == [row["kernel"] for row in rows.values()]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["train", "--dry-run", "--set", "kernels=none.json"], "There is no table of kernels in none.json"),
        (["train", "--dry-run", "--set", "kernels=recipe.toml"], "recipe.toml holds no table of kernels"),
        (["kernels", "--out", "none/table.json"], "--out"),
        (["kernels", "--set", "data.sequence_length=0"], "sequence_length"),
    ],
    ids=["no file", "no table", "no folder", "recipe"],
)
def test_bad_input_is_refused_in_words(recipe, words, why):
    done = run_cli(words[0], "recipe.toml", *words[1:], cwd=recipe.parent)
    assert done.returncode == 2
    assert why in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_has_one_kernel_of_each_operation_on_a_cpu_and_a_server_takes_any_table(tmp_path, table):
    folder = save_talker(tmp_path / "model")
    done = run_cli("kernels", folder)
    assert done.returncode == 0, done.stderr
    assert "No operation of this model has several kernels here." in done.stdout
    for given, code in ((table, 0), ("reference", 0), (tmp_path / "none.json", 2)):
        done = run_cli("generate", folder, "--prompt", "a", "--max-tokens", "1", "--kernels", given)
        assert done.returncode == code, done.stderr
