"""Losses that were computed stay with their rows: of the same tokens, and of the same weights."""

import pytest

from penstock.obs.run_data.step_rows import KnownLosses, RowLosses, note_of, shown_rows


def rows(*tokens, step=5):
    """Return some rows of a step, by the first token of each."""
    documents = [{"document": 3, "corpus": "web", "shard": "a", "offset": 0, "tokens": 4,
                  "texts": list("abcd"), "learned": [True, True, False, True]}]  # fmt: skip
    row = {"sample": 9, "corpus": "web", "epoch": 1, "documents": documents}
    found = [{**row, "row": index, "digest": str(token)}
             for index, token in enumerate(tokens)]  # fmt: skip
    return {"step": step, "num_rows": 9, "offset": 0, "steps_taken": 5, "rows": found}


def losses(*values):
    return [RowLosses(4, [[None, value, None, value + 1]]) for value in values]


def test_losses_are_those_of_the_row_s_tokens_in_the_same_records():
    known = KnownLosses()
    known.add(("run", 0), rows(7, 8), losses(1.0, 2.0))
    first, second = known.of(("run", 0), rows(7, 8))
    assert (first.losses[0][1], second.losses[0][1], first.checkpoint) == (1.0, 2.0, 4)
    assert known.of(("run", 0), rows(7, 9))[1] is None, "a request gave the step another row"
    assert known.of(("run", 1), rows(7, 8)) == [None, None], "after a rewind the weights are others"
    assert known.of(("other", 0), rows(7, 8)) == [None, None]
    assert known.of(("run", 0), rows(7, 8, step=6)) == [None, None]


def test_the_newest_losses_are_kept():
    known = KnownLosses(most=8)
    for token in (1, 2, 3):
        known.add(("run", 0), rows(token), losses(float(token)))
    kept = [known.of(("run", 0), rows(token))[0] is not None for token in (1, 2, 3)]
    assert kept == [False, True, True]


def test_text_is_in_stretches_and_with_losses_in_tokens():
    (plain, scored) = shown_rows(rows(7, 8), losses=[None, *losses(1.0)])["rows"]
    assert plain["documents"][0]["pieces"] == [("ab", True, None), ("c", False, None), ("d", True, None)]
    assert (plain["loss"], plain["checkpoint"]) == (None, None)
    pieces = [("a", True, None), ("b", True, 1.0), ("c", False, None), ("d", True, 2.0)]
    assert scored["documents"][0]["pieces"] == pieces
    assert (scored["loss"], scored["documents"][0]["loss"], scored["checkpoint"]) == (1.5, 1.5, 4)


@pytest.mark.parametrize(
    ("step", "recorded", "said"),
    [(5, 0, ""), (6, 5, "yet to come"), (6, 6, ""), (4, 6, "skipped (loss is NaN)")],
)
def test_what_a_reader_has_to_know_of_a_step(step, recorded, said):
    skip = {"step": 4, "time": None, "kind": "skip", "text": "loss is NaN"}
    note = note_of(rows(7, step=step), steps_recorded=recorded, events=[skip])
    assert said in note
    assert bool(said) == bool(note)
