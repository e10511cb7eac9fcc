"""Many corpora located at once: the same places, caps and errors as one by one."""

import json
from pathlib import Path

import numpy as np
import pytest

from penstock.core.errors import CorpusExhausted
from penstock.data import Loader
from penstock.data.even_ways import EvenWays
from penstock.data.geometry import Geometry
from penstock.data.holdout import TokenSpace
from penstock.data.legs import Passes, Rest
from penstock.data.opening import open_corpus
from penstock.data.order import Cut, Order
from penstock.data.way import Plan, Way
from penstock.testing.corpora import numbered_corpus

PLAN = Plan(
    name="c", seed=0, sequence_length=4, longest=4, split="train", holdout=0.0, streamed=False, base_parts=1
)
SIZES = [
    (1, 1),
    (7, 1),
    (64, 1),
    (65, 1),
    (300, 1),
    (300, 3),
    (384, 3),
    (385, 3),
    (400, 3),
    (448, 4),
    (999, 5),
]


def way_of(num_tokens: int, lanes: int, *, first: int = 0, epochs: int | None = None) -> Way:
    corpus = open_corpus(f"synthetic:tokens={num_tokens},mean_document=5")
    space = TokenSpace(corpus, np.array([[0, num_tokens]]))
    geometry = Geometry(sequence_length=4, block_tokens=8, blocks_per_pool=4, lanes=lanes)
    order = Order(num_tokens, geometry, name="c", seed=0)
    return Way(PLAN, [Passes(space, order, first, epochs)], parts=1)


def test_places_are_those_of_each_way_by_itself() -> None:
    ways = [way_of(tokens, lanes, first=tokens % 3) for tokens, lanes in SIZES]
    even = EvenWays(len(ways))
    assert even.unknown(np.arange(len(ways))) == list(range(len(ways)))
    for index, way in enumerate(ways):
        even.learn(index, way, supply=None)
    assert even.unknown(np.arange(len(ways))) == []
    turns = np.tile(np.arange(600), len(ways))
    corpora = np.repeat(np.arange(len(ways)), 600)
    assert even.covers(corpora, turns).all()
    found = even.places(corpora, turns)
    for index, way in enumerate(ways):
        alone = way.legs[0].locate(np.arange(600))
        part = found.take(np.flatnonzero(corpora == index))
        for name in ("epoch", "pool", "lane", "row"):
            assert getattr(part, name).tolist() == getattr(alone, name).tolist(), (SIZES[index], name)


def test_only_an_endless_leg_of_full_rows_within_its_cap_is_covered() -> None:
    endless, ending = way_of(300, 3), way_of(300, 3, epochs=2)
    leg = endless.legs[0]
    changed = Way(PLAN, [Rest(leg.space, leg.order, 0, 0, [(Cut(4, 1),)] * 3), *endless.legs], parts=1)
    even = EvenWays(4)
    for index, way in enumerate((endless, ending, changed)):
        even.learn(index, way, supply=75 if index == 0 else None)
    corpora, turns = np.array([0, 0, 1, 2, 3]), np.array([74, 75, 0, 0, 0])
    assert even.covers(corpora, turns).tolist() == [True, False, False, False, False]


def served(corpora: dict[str, Path], packing: dict[str, str]) -> str:
    """Return what a loader serves of many corpora through changes, to the end of the first of them."""
    caps = dict.fromkeys(list(corpora)[3:], 2)
    loader = Loader(
        corpora,
        sequence_length=8,
        global_batch_size=32,
        epochs=caps,
        num_workers=0,
        deliver="numpy",
        **packing,
    )
    rows = []
    with pytest.raises(CorpusExhausted) as refused:  # noqa: PT012  the step at which it comes is part of it
        for batch in loader:
            rows.append([batch["sample_ids"].tolist(), batch["input_ids"].tolist()])
            if loader.step == 5:
                loader.set_sequence_length(12)
            if loader.step == 9:
                loader.set_weights({name: 1 + len(name) for name in corpora})
    return json.dumps([rows, loader.state_dict(), str(refused.value)])


@pytest.mark.parametrize("packing", [{"packing": "best_fit"}, {"packing": "whole", "overlong": "truncate"}])
def test_a_mixture_of_many_corpora_is_served_as_if_each_were_located_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: dict[str, str]
) -> None:
    corpora = {
        f"c{index}": numbered_corpus(
            tmp_path / f"c{index}", [1 + (index * i) % 23 for i in range(40 + 30 * index)]
        )
        for index in range(12)
    }
    together = served(corpora, packing)
    monkeypatch.setattr("penstock.data.course._FEW", 10**9)
    assert served(corpora, packing) == together
