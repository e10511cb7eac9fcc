"""The loader's state: what it restores, and what it refuses with which words."""

import json
from collections.abc import Callable
from copy import deepcopy
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.config import fingerprint
from penstock.core.errors import StateMismatch
from penstock.data.schedule.change_log import ChangeLog, Skip
from penstock.data.state import SavedLoaderState, check_identity, decode, encode
from tests.examples import examples

CHANGE_LOG = ChangeLog(
    batch=((0, 4), (5, 5)),
    length=((0, 16), (6, 32)),
    mix=((0, {"web": 3, "code": 1}, "recipe"), (4, {"web": 1, "code": 1}, "told")),
    skips=(Skip(10, 20, "spike"),),
    grown=((3, "web", 2),),
)
IDENTITY: dict[str, Any] = {"seed": 0, "packing": "best_fit", "split": ["train", 0.0], "longest": 32}
CORPORA = {"web": {"parts": 1, "T": 1000, "fingerprint": "aa"}, "code": {"parts": 1, "fingerprint": "bb"}}
ASKED = {"weights": None, "global_batch_size": 4, "sequence_length": 16}
SAVED = SavedLoaderState(7, CHANGE_LOG, ASKED, IDENTITY, CORPORA)
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


def signed(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state with the checksum of its content."""
    content = {key: value for key, value in state.items() if key != "checksum"}
    return {**content, "checksum": fingerprint(content)}


def test_a_state_survives_json_even_with_sorted_keys() -> None:
    assert decode(json.loads(json.dumps(STATE))) == SAVED
    read = decode(json.loads(json.dumps(STATE, sort_keys=True)))
    assert [list(slots) for _, slots, _ in read.change_log.mix] == [["web", "code"]] * 2, (
        "order lays them out"
    )


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
        CHANGE_LOG.with_batch_size(8, 99).with_length(9, 8).with_slots(8, {"web": 1, "code": 9}, "planned")
    )
    saved = SavedLoaderState(7, planned.with_parts(8, "web", 3), ASKED, IDENTITY, CORPORA)
    assert encode(saved) == STATE
    same_again = CHANGE_LOG.with_batch_size(7, 5).with_slots(6, {"web": 1, "code": 1}, "the same")
    assert encode(SavedLoaderState(7, same_again, ASKED, IDENTITY, CORPORA)) == STATE


def told_often(changes: int, *, every: int = 100) -> SavedLoaderState:
    """Return what a policy made of three corpora, in thousandths."""
    change_log, random = CHANGE_LOG, Random(0)
    for change in range(1, changes):
        one = random.randrange(1, 600)
        slots = {"web": one, "wiki": 1000 - one - 333, "code": 333}
        change_log = change_log.with_slots(10 + every * change, slots, "online_data_mixing")
    corpora = {name: {**CORPORA["web"], "B": 2**20, "K": 16, "V": 64, "T": 10**13} for name in slots}
    return SavedLoaderState(10**6, change_log, ASKED, IDENTITY, corpora)


@pytest.mark.parametrize("every", [100, 1234])
def test_thirty_two_mixtures_are_less_than_four_kilobytes(every: int) -> None:
    saved = told_often(32, every=every)
    text = json.dumps(encode(saved), sort_keys=True)
    assert len(text) < 4096
    assert decode(json.loads(text)) == saved
    order = [list(slots) for _, slots, _ in decode(json.loads(text)).change_log.mix]
    assert order[-1] == ["web", "wiki", "code"], "order lays them out"


@pytest.mark.parametrize("version", [1, 3, 5, None, True, 4.0])
def test_a_state_of_another_version_is_refused(version: Any) -> None:
    with pytest.raises(
        StateMismatch, match=rf"another version \(got {version}\)\. This Penstock reads version 4"
    ):
        decode(changed(STATE, "v", to=version))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("seed", 1, r"has seed = 1, this loader has 0\. Resume with the settings of the saved run"),
        ("packing", "concat", "has packing = 'concat', this loader has 'best_fit'"),
        ("split", ["train", 0.1], r"has split = \['train', 0\.1\], this loader has \['train', 0\.0\]"),
        ("packing", None, "has packing = None"),
    ],
)
def test_a_state_of_another_run_is_refused_with_what_differs(key: str, value: Any, message: str) -> None:
    with pytest.raises(StateMismatch, match=message):
        check_identity(decode(signed(changed(STATE, key, to=value))), IDENTITY)


def test_a_planned_length_that_the_saved_run_did_not_know_is_no_other_run() -> None:
    check_identity(decode(STATE), {**IDENTITY, "longest": 64})


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths to everything inside a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [*([path] if path else []), *(p for key, each in inside for p in places(each, (*path, key)))]


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.integers(0, 40),
)
VALUES = st.one_of(
    SCALARS, st.lists(SCALARS, max_size=3), st.dictionaries(st.text(max_size=5), SCALARS, max_size=2)
)


def mutated(state: Any, draw: Callable[[Any], Any]) -> None:
    """Change a value, a type or a key somewhere inside, or drop or double an entry."""
    *above, last = draw(st.sampled_from(places(state)))
    node = state
    for key in above:
        node = node[key]
    how = draw(st.sampled_from(["value", "near", "drop", "double", "key"]))
    if how == "near" and type(node[last]) is int:
        node[last] += draw(st.sampled_from([-1, 1, 2**32]))
    elif how == "drop":
        del node[last]
    elif how == "double":
        node.insert(last, deepcopy(node[last])) if isinstance(node, list) else node.update(
            {f"{last}2": node[last]}
        )
    elif how == "key" and isinstance(node, dict):
        node[draw(st.text(max_size=5))] = node.pop(last)
    else:
        node[last] = draw(VALUES)


@pytest.mark.parametrize("saved", [SAVED, told_often(17)], ids=["few mixtures", "many"])
@given(st.data())
@examples(600)
def test_no_mutation_of_a_state_is_accepted(saved: SavedLoaderState, data: st.DataObject) -> None:
    state = json.loads(json.dumps(encode(saved)))
    for _ in range(data.draw(st.integers(1, 3))):
        mutated(state, data.draw)
    if json.dumps(state, sort_keys=True) == json.dumps(encode(saved), sort_keys=True):
        return  # it changed nothing
    with pytest.raises(StateMismatch, match=r"another version|is damaged: .* Restore it, or use another"):
        decode(state)


@pytest.mark.parametrize("state", [None, [], "{}"])
def test_what_is_no_state_is_refused_as_damaged(state: Any) -> None:
    with pytest.raises(StateMismatch, match="damaged: it is not a dict"):
        decode(state)
