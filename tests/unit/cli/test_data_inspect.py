"""`penstock data inspect`: an answer a line, by number, whatever the lines are."""

import json

from tests.in_process import run_cli
from tests.unit.train.inspect.test_recent_run import write_recipe

from penstock.testing.corpora import write_corpus


def answers_to(*questions):
    lines = [question if isinstance(question, str) else json.dumps(question) for question in questions]
    done = run_cli("data", "inspect", stdin="".join(line + "\n" for line in lines))
    assert (done.returncode, done.stderr) == (0, "")
    return {reply["id"]: reply for reply in map(json.loads, done.stdout.splitlines())}


def test_rows_have_the_text_of_each_token_and_which_are_learned(tmp_path):
    for name in ("web", "code"):
        write_corpus(tmp_path / name, [[1 + i % 9] * 20 for i in range(60)], vocab_size=10)
    (tmp_path / "run").mkdir()
    write_recipe(tmp_path / "run", steps=30)
    asked = {"ask": "rows", "run": str(tmp_path / "run"), "step": 3, "offset": 1, "limit": 2}
    found = answers_to({"id": 7, **asked}, {"id": 8, **asked, "step": 31}, {"id": 9, **asked, "offset": 4})
    rows = found[7]["answer"]
    assert (rows["step"], rows["steps"], rows["num_rows"], rows["tune_loss"]) == (3, 30, 4, None)
    assert [row["row"] for row in rows["rows"]] == [1, 2]
    for document in (part for row in rows["rows"] for part in row["documents"]):
        assert document["texts"] == [f"{token} " for token in document["ids"]]
        assert len(document["ids"]) == len(document["learned"]) == document["tokens"]
    assert (found[8]["status"], "steps 1 to 30" in found[8]["error"]) == (400, True)
    assert found[9]["answer"]["rows"] == []


def test_a_line_that_is_no_question_is_answered_and_the_next_one_too(tmp_path):
    found = answers_to(
        "{", "[]", {"id": 2, "ask": "checkpoints"}, {"id": 3, "ask": "requests", "run": str(tmp_path)}
    )
    assert found[3]["answer"] == {"requests": [], "running": False}
    assert {found[number]["status"] for number in (None, 2)} == {500}
