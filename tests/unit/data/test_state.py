"""The loader's state: what it restores, and what it refuses with which words."""

import json
from copy import deepcopy
from random import Random
from typing import Any

import pytest

from penstock.core.errors import StateMismatch
from penstock.data.identity import check_identity
from penstock.data.state import Saved, decode, encode
from penstock.data.timeline import Skip, Timeline

TIMELINE = Timeline(
    batch=((0, 4), (5, 5)),
    length=((0, 16), (6, 32)),
    mix=((0, {"web": 3, "code": 1}, "recipe"), (4, {"web": 1, "code": 1}, "told")),
    skips=(Skip(10, 20, "spike"),),
    grown=((3, "web", 2),),
)
IDENTITY: dict[str, Any] = {"seed": 0, "packing": "best_fit", "split": ["train", 0.0], "longest": 32}
CORPORA = {"web": {"parts": 1, "T": 1000, "fingerprint": "aa"}, "code": {"parts": 1, "fingerprint": "bb"}}
ASKED = {"weights": None, "global_batch_size": 4, "sequence_length": 16}
SAVED = Saved(7, TIMELINE, ASKED, IDENTITY, CORPORA)
STATE = encode(SAVED)


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


def test_a_state_survives_json_even_with_sorted_keys() -> None:
    assert decode(json.loads(json.dumps(STATE))) == SAVED
    read = decode(json.loads(json.dumps(STATE, sort_keys=True)))
    assert [list(slots) for _, slots, _ in read.timeline.mix] == [["web", "code"]] * 2, "order lays them out"


def test_a_state_shares_nothing_with_the_loader_it_came_from() -> None:
    saved = deepcopy(SAVED)
    state = encode(saved)
    state["corpora"]["web"]["T"] = 0
    state["batch"][0][1] = 99
    state["mix"][0][1][0][1] = 99
    state["split"][1] = 0.5
    assert saved == SAVED


def test_a_state_holds_what_was_in_effect_and_nothing_that_is_only_planned() -> None:
    planned = (
        TIMELINE.with_batch_size(8, 99).with_length(9, 8).with_slots(8, {"web": 1, "code": 9}, "planned")
    )
    saved = Saved(7, planned.with_parts(8, "web", 3), ASKED, IDENTITY, CORPORA)
    assert encode(saved) == STATE
    same_again = TIMELINE.with_batch_size(7, 5).with_slots(6, {"web": 1, "code": 1}, "the same")
    assert encode(Saved(7, same_again, ASKED, IDENTITY, CORPORA)) == STATE


def told_often(changes: int, *, every: int = 100) -> Saved:
    """Return what a policy made of three corpora, in thousandths."""
    timeline, random = TIMELINE, Random(0)
    for change in range(1, changes):
        one = random.randrange(1, 600)
        slots = {"web": one, "wiki": 1000 - one - 333, "code": 333}
        timeline = timeline.with_slots(10 + every * change, slots, "online_data_mixing")
    corpora = {name: {**CORPORA["web"], "B": 2**20, "K": 16, "V": 64, "T": 10**13} for name in slots}
    return Saved(10**6, timeline, ASKED, IDENTITY, corpora)


@pytest.mark.parametrize("every", [100, 1234])
def test_two_hundred_mixtures_are_less_than_four_kilobytes(every: int) -> None:
    saved = told_often(200, every=every)
    text = json.dumps(encode(saved), sort_keys=True)
    assert len(text) < 4096
    assert decode(json.loads(text)) == saved
    order = [list(slots) for _, slots, _ in decode(json.loads(text)).timeline.mix]
    assert order[-1] == ["web", "wiki", "code"], "order lays them out"


def test_a_state_of_few_mixtures_is_as_it_was_and_one_of_many_says_a_version_of_its_own() -> None:
    few, many = encode(told_often(14)), encode(told_often(17))
    assert (few["v"], type(few["mix"])) == (2, list)
    assert (many["v"], type(many["mix"])) == (3, dict)
    listed = [
        [step, [list(p) for p in slots.items()], why] for step, slots, why in told_often(17).timeline.mix
    ]
    assert decode({**many, "v": 2, "mix": listed}) == told_often(17), "what was saved before is read"


@pytest.mark.parametrize(
    "words",
    [
        "",
        "0:1,1",
        "0/0/0:1",
        "0/0/0:1,1  :1,1",
        "0/0/0:1,1 1/9/0:1,1",
        "0/0/0:1,1 -1:1,1",
        "0/0/0:1,1 0:1,1",
        7,
    ],
)
def test_packed_mixtures_that_cannot_be_are_refused(words: Any) -> None:
    mix = {"orders": [["web", "code"]], "reasons": ["told"], "words": words}
    with pytest.raises(StateMismatch, match="The loader state is damaged: "):
        decode(changed(STATE, "mix", to=mix))


@pytest.mark.parametrize("version", [1, 4, None])
def test_a_state_of_another_version_is_refused(version: int | None) -> None:
    with pytest.raises(StateMismatch, match=rf"another version \(got {version}\)\. Known: 2 and 3\."):
        decode(changed(STATE, "v", to=version))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("seed", 1, r"has seed = 1, this loader has 0\. Resume with the settings of the saved run"),
        ("packing", "concat", "has packing = 'concat', this loader has 'best_fit'"),
        ("split", ["train", 0.1], r"has split = \['train', 0\.1\], this loader has \['train', 0\.0\]"),
        ("packing", None, "has packing = None"),
        ("longest", None, "damaged: longest must be"),
        ("longest", 1, "damaged: longest must be"),
        ("longest", "32", "damaged: longest must be"),
    ],
)
def test_a_state_of_another_run_is_refused_with_what_differs(key: str, value: Any, message: str) -> None:
    with pytest.raises(StateMismatch, match=message):
        check_identity(decode(changed(STATE, key, to=value)), IDENTITY)


def test_a_planned_length_that_the_saved_run_did_not_know_is_no_other_run() -> None:
    check_identity(decode(STATE), {**IDENTITY, "longest": 64})


DAMAGED: list[tuple[tuple[str, ...], Any]] = [
    (("step",), None),
    (("samples",), "many"),
    (("batch",), [[0]]),
    (("batch",), 3),
    (("step",), -4),
    (("step",), True),
    (("step",), 7.0),
    (("step",), 2**70),
    (("samples",), 31),
    (("samples",), 30.0),
    (("batch",), []),
    (("batch",), [[5, 8]]),
    (("batch",), [[0, 4], [5, 5], [5, 6]]),
    (("batch",), [[0, 4], [5, 0]]),
    (("batch",), [[0, "4"]]),
    (("batch",), [[False, 4]]),
    (("length",), None),
    (("length",), [[1, 16]]),
    (("mix",), []),
    (("mix",), [[0, {"web": 1}, "a table"]]),
    (("mix",), [[0, [["web", 0]], "none"]]),
    (("mix",), [[0, [["web", 1], ["web", 1]], "twice"]]),
    (("mix",), [[0, [["web", 2**18]], "too many"]]),
    (("mix",), [[0, [["web", 1]], None]]),
    (("mix",), [[0, [["wbe", 1]], "unknown"]]),
    (("skip",), [[20, 10, "back"]]),
    (("skip",), [[10, 20, "a"], [15, 30, "b"]]),
    (("skip",), [[10, 20]]),
    (("skip",), None),
    (("grown",), [[3, "wbe", 2]]),
    (("grown",), [[3, "web", 2], [1, "web", 3]]),
    (("grown",), [[3, "web"]]),
    (("asked",), None),
    (("corpora",), None),
    (("corpora",), ["web"]),
    (("corpora", "web"), "aa"),
    (("corpora", "web", "fingerprint"), None),
    (("corpora", "web", "parts"), None),
]


@pytest.mark.parametrize(("path", "value"), DAMAGED, ids=str)
def test_a_damaged_state_is_refused_as_damaged(path: tuple[str, ...], value: Any) -> None:
    with pytest.raises(StateMismatch, match=r"The loader state is damaged: .* \(got .*\)\. Use another"):
        decode(changed(STATE, *path, to=value))


@pytest.mark.parametrize("state", [None, [], "{}"])
def test_what_is_no_state_is_refused_as_damaged(state: Any) -> None:
    with pytest.raises(StateMismatch, match="damaged: it is not a dict"):
        decode(state)
