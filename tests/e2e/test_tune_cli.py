"""`penstock tune` as a user types it: which recipes it takes, and what each refusal says to do."""

import pytest

from penstock.cli.main import main

RECIPE = """
[run]
dir = "{dir}"
steps = 1
{start}
[data]
sequence_length = 16
global_batch_size = 1
[data.corpora.text]
path = "synthetic:words"
{tune}
"""


@pytest.mark.parametrize(
    ("verb", "start", "tune", "words"),
    [
        ("train", 'start_from = "base"', "[tune]", "Type `penstock tune` with the same recipe"),
        ("tune", 'start_from = "base"', "", 'Write [tune] and, below it, method = "full" or "lora"'),
        ("tune", "", "[tune]", "Set run.start_from to a Hugging Face folder or a run"),
    ],
)
def test_a_recipe_of_the_other_command_is_refused_with_the_remedy(verb, start, tune, words, tmp_path, capsys):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(dir=tmp_path / "run", start=start, tune=tune))
    assert main([verb, str(recipe)]) == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


def test_the_old_form_of_the_command_names_the_new_one(capsys):
    assert main(["tune", "runs/first", "--speculator", "--data", "c", "--out", "o", "--steps", "1"]) == 2
    assert "Type `penstock train-speculator PATH" in " ".join(capsys.readouterr().err.split())
