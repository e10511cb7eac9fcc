"""`penstock eval --tasks` as a user types it: results, a file of them, and the difference of two."""

import json

import pytest

from penstock.cli.main import main
from tests.made_tasks import own_cache, save_model, save_tasks


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model and tasks, with data sets that leave nothing in the user's cache."""
    folder = tmp_path_factory.mktemp("made")
    save_tasks(folder, questions=8)
    save_model(folder / "model")
    with own_cache(tmp_path_factory.mktemp("hf")):
        yield folder


def typed(capsys, *words):
    code = main(["eval", *map(str, words)])
    said = capsys.readouterr()
    return code, said.out, " ".join(said.err.split())


def test_results_are_shown_written_and_compared(made, tmp_path, capsys):
    words = (made / "model", "--tasks", f"{made}/made_choice.json,{made}/made_cloze.json")
    code, out, err = typed(capsys, *words, "--limit", 6, "--log-samples", "--out", tmp_path / "a.json")
    assert code == 0, err
    head, *rows = (line.split() for line in out.splitlines())
    assert head == ["task", "shots", "questions", "metric", "value", "stderr"]
    assert [row[:3] for row in rows] == [
        *[["made_choice", "0", "6"]] * 2,
        *[["made_cloze", "0", "6"]] * 2,
    ]
    told = json.loads((tmp_path / "a.json").read_text())
    assert told["results"]["made_choice"]["sample_len"] == 6
    assert (told["model_source"], told["model_name"]) == ("penstock", str(made / "model"))

    code, out, err = typed(capsys, *words, "--limit", 6, "--weights", "int8", "--json", "--log-samples")
    assert code == 0, err
    (tmp_path / "b.json").write_text(out)
    assert json.loads(out)["config"]["weights"] == "int8"
    code, out, err = typed(capsys, tmp_path / "a.json", tmp_path / "b.json")
    assert code == 0, err
    assert ["made_choice", "acc"] in [line.split()[:2] for line in out.splitlines()]
    assert "6 paired" in out
    code, out, err = typed(capsys, tmp_path / "a.json", tmp_path / "a.json", "--json")
    assert {one["difference"] for one in json.loads(out)} == {0}


def test_what_was_cut_is_said(made, tmp_path, capsys):
    folder = save_model(tmp_path / "short", context=48)
    code, _, err = typed(capsys, folder, "--tasks", made / "made_shots.json", "--limit", 3)
    assert code == 0, err
    assert (
        "requests were longer than the model's context of 48 tokens; their first tokens were cut off" in err
    )


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["MODEL", "--tasks", "helaswag"], 2, "Did you mean 'hellaswag'?"),
        (
            ["MODEL", "--tasks", "MADE/made_choice.json", "--corpus", "x"],
            2,
            "--corpus is for an evaluation on",
        ),
        (["MODEL", "--tasks", "MADE/made_choice.json", "--holdout", "0"], 2, "--holdout is for an"),
        (
            ["MODEL", "--tasks", "MADE/made_choice.json", "--compute", "bfloat16"],
            2,
            "--compute is for an evaluation on text, not for --tasks. Leave it out. --weights chooses",
        ),
        (["MODEL", "--limit", "3"], 2, "--limit needs --tasks"),
        (["MODEL", "--batch", "3"], 2, "--batch needs --tasks"),
        (["MODEL", "--out", "a.json"], 2, "--out needs --tasks"),
        (["MODEL", "--tasks", "MADE/made_choice.json", "--limit", "0"], 2, "limit must be"),
        (["MODEL", "--tasks", "MADE/made_choice.json", "--out", "no/such/a.json"], 2, "is not a folder"),
        (["MODEL", "MADE/made_choice.json"], 2, "One model is evaluated at a time"),
        (["MADE", "--tasks", "MADE/made_choice.json"], 1, ""),
        (["MADE/made_choice.json", "MADE/made_choice.json"], 1, "has no results of an evaluation"),
        (["MODEL", "--tasks", "MADE/made_choice.json", "--adapter", "MADE"], 1, "adapter"),
        (["MODEL", "--tasks", "MADE/made_choice.json", "--shots", "3", "--limit", "4"], 0, ""),
    ],
)
def test_wrong_usage_is_one_paragraph(words, code, message, made, capsys):
    found, _, err = typed(
        capsys, *(word.replace("MODEL", f"{made}/model").replace("MADE", str(made)) for word in words)
    )
    assert (found, message in err) == (code, True), err
    assert "Traceback" not in err


def test_a_model_without_a_tokenizer(made, tmp_path, capsys):
    folder = save_model(tmp_path / "mute")
    (folder / "tokenizer.json").unlink()
    code, _, err = typed(capsys, folder, "--tasks", made / "made_choice.json")
    assert (code, "has no tokenizer.json" in err) == (1, True), err
