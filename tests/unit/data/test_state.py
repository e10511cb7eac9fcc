"""The loader's state: what it restores, and what it refuses with which words."""

import json
from copy import deepcopy
from typing import Any

import pytest

from penstock.core.errors import CorpusChanged, StateMismatch
from penstock.data.state import Progress, decode, encode

IDENTITY: dict[str, Any] = {
    "seed": 0,
    "L": 16,
    "packing": "best_fit",
    "split": ["train", 0.0],
    "mix": [[0, {"web": 3, "code": 1}]],
    "corpora": {
        "web": {"T": 1000, "B": 256, "K": 16, "V": 1, "fingerprint": "aa"},
        "code": {"T": 500, "B": 256, "K": 16, "V": 1, "fingerprint": "bb"},
    },
}
PROGRESS = Progress(7, 30, [(0, 4), (5, 5)])
STATE = encode(PROGRESS, IDENTITY)


def changed(state: dict[str, Any], *path: str, to: Any) -> dict[str, Any]:
    """Return a copy with the value at a path replaced, or removed where `to` is None."""
    copy = deepcopy(state)
    node = copy
    for key in path[:-1]:
        node = node[key]
    if to is None:
        del node[path[-1]]
    else:
        node[path[-1]] = to
    return copy


def test_a_state_survives_json() -> None:
    assert decode(json.loads(json.dumps(STATE)), IDENTITY) == PROGRESS


def test_a_state_shares_nothing_with_the_loader_it_came_from() -> None:
    identity = deepcopy(IDENTITY)
    state = encode(PROGRESS, identity)
    state["corpora"]["web"]["T"] = 0
    state["batch"][0][1] = 99
    assert identity == IDENTITY
    assert PROGRESS.batch == [(0, 4), (5, 5)]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("v",), 2, r"The loader state has another version \(got 2\)\. Known: 1\."),
        (("v",), None, r"another version \(got None\)"),
        (("seed",), 1, r"has seed = 1, this loader has 0\. Resume with the settings of the saved run"),
        (("L",), 32, "has L = 32, this loader has 16"),
        (("packing",), "concat", "has packing = 'concat', this loader has 'best_fit'"),
        (("split",), ["train", 0.1], r"has split = \['train', 0\.1\], this loader has \['train', 0\.0\]"),
        (("mix",), [[0, {"web": 1, "code": 1}]], "has mix = .*'web': 1.*, this loader has .*'web': 3"),
        (("packing",), None, "has packing = None"),
        (("corpora", "web"), None, "has corpora = "),
    ],
)
def test_a_state_of_another_run_is_refused_with_what_differs(
    path: tuple[str, ...], value: Any, message: str
) -> None:
    with pytest.raises(StateMismatch, match=message):
        decode(changed(STATE, *path, to=value), IDENTITY)


def test_another_corpus_under_the_same_name_is_refused_with_what_differs() -> None:
    state = changed(changed(STATE, "corpora", "web", "T", to=1200), "corpora", "web", "fingerprint", to="cc")
    message = "Corpus 'web' is not .*: T was 1200, is 1000; fingerprint was cc, is aa. Restore the corpus"
    with pytest.raises(CorpusChanged, match=message):
        decode(state, IDENTITY)


def test_a_corpus_whose_sizes_follow_from_another_setting_is_not_called_changed() -> None:
    """Another length or holdout makes other blocks and fewer tokens of the very same corpus."""
    state = changed(changed(STATE, "L", to=32), "corpora", "web", "B", to=512)
    with pytest.raises(StateMismatch, match="has L = 32"):
        decode(state, IDENTITY)
    state = changed(changed(STATE, "split", to=["train", 0.1]), "corpora", "web", "T", to=900)
    with pytest.raises(StateMismatch, match="has split = "):
        decode(state, IDENTITY)


@pytest.mark.parametrize(
    "state",
    [
        changed(STATE, "step", to=None),
        changed(STATE, "samples", to="many"),
        changed(STATE, "batch", to=[[0]]),
        changed(STATE, "batch", to=3),
        changed(STATE, "step", to=-4),
        changed(STATE, "step", to=True),
        changed(STATE, "step", to=7.0),
        changed(STATE, "step", to=2**70),
        changed(STATE, "samples", to=31),
        changed(STATE, "samples", to=30.0),
        changed(STATE, "batch", to=[]),
        changed(STATE, "batch", to=[[5, 8]]),
        changed(STATE, "batch", to=[[0, 4], [5, 5], [5, 6]]),
        changed(STATE, "batch", to=[[0, 4], [5, 0]]),
        changed(STATE, "batch", to=[[0, "4"]]),
        changed(STATE, "batch", to=[[False, 4]]),
        None,
        [],
        changed(STATE, "corpora", to=None),
        changed(STATE, "corpora", to=["web"]),
        changed(STATE, "corpora", "web", to="aa"),
        changed(STATE, "corpora", "web", "fingerprint", to=None),
    ],
    ids=str,
)
def test_a_damaged_state_is_refused_as_damaged(state: Any) -> None:
    with pytest.raises(StateMismatch, match=r"The loader state is damaged: .* \(got .*\)\. Use another"):
        decode(state, IDENTITY)


def test_samples_of_a_step_follow_from_all_batch_sizes_before_it() -> None:
    progress = Progress(7, 30, [(0, 4), (5, 5), (6, 10)])
    assert [progress.samples_at(step) for step in (0, 4, 5, 6, 7, 9)] == [
        (0, 4),
        (16, 4),
        (20, 5),
        (25, 10),
        (35, 10),
        (55, 10),
    ]
    assert progress.samples_at(10**13) == (25 + (10**13 - 6) * 10, 10)


@pytest.mark.parametrize(
    ("step", "batch", "size", "after"),
    [
        (0, [(0, 4)], 8, [(0, 8)]),
        (5, [(0, 4)], 8, [(0, 4), (5, 8)]),
        (5, [(0, 4)], 4, [(0, 4)]),
        (5, [(0, 4), (5, 8)], 4, [(0, 4)]),
        (5, [(0, 4), (5, 8)], 2, [(0, 4), (5, 2)]),
        (6, [(0, 4), (5, 8)], 4, [(0, 4), (5, 8), (6, 4)]),
    ],
)
def test_another_batch_size_holds_from_the_next_step_on(
    step: int, batch: list[tuple[int, int]], size: int, after: list[tuple[int, int]]
) -> None:
    progress = Progress(step, 0, batch).with_batch_size(size)
    assert (progress.step, progress.batch) == (step, after)
