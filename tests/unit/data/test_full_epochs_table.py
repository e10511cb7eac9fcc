"""Many corpora located at once: the same addresses, caps and errors as one by one."""

import json
from pathlib import Path

import numpy as np
import pytest

from penstock.core.errors import CorpusExhausted
from penstock.data import Loader
from penstock.data.corpus.open import open_corpus
from penstock.data.order.epochs import CorpusEpochs, FullEpochs, OrderConfig, RemainderEpoch
from penstock.data.order.holdout import TokenSpace
from penstock.data.order.permutation import Geometry
from penstock.data.order.row_order import Order, RepackPoint
from penstock.data.sample_index import FullEpochsTable
from penstock.testing.corpora import numbered_corpus

PLAN = OrderConfig(
    name="c",
    seed=0,
    sequence_length=4,
    longest=4,
    split="train",
    holdout=0.0,
    packing="concat",
    streamed=False,
    base_parts=1,
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


def epochs_of(num_tokens: int, lanes: int, *, first: int = 0, epochs: int | None = None) -> CorpusEpochs:
    corpus = open_corpus(f"synthetic:tokens={num_tokens},mean_document=5")
    space = TokenSpace(corpus, np.array([[0, num_tokens]]))
    geometry = Geometry(sequence_length=4, block_tokens=8, blocks_per_pool=4, lanes=lanes)
    order = Order(num_tokens, geometry, name="c", seed=0)
    return CorpusEpochs(PLAN, [FullEpochs(space, order, first, epochs)], parts=1)


def test_addresses_are_those_of_each_schedule_by_itself() -> None:
    epochs_of_each = [epochs_of(tokens, lanes, first=tokens % 3) for tokens, lanes in SIZES]
    table = FullEpochsTable(len(epochs_of_each))
    assert table.unknown(np.arange(len(epochs_of_each))) == list(range(len(epochs_of_each)))
    for index, epochs in enumerate(epochs_of_each):
        table.learn(index, epochs, supply=None)
    assert table.unknown(np.arange(len(epochs_of_each))) == []
    turns = np.tile(np.arange(600), len(epochs_of_each))
    corpora = np.repeat(np.arange(len(epochs_of_each)), 600)
    assert table.covers(corpora, turns).all()
    found = table.addresses(corpora, turns)
    for index, epochs in enumerate(epochs_of_each):
        alone = epochs.entries[0].locate(np.arange(600))
        part = found.take(np.flatnonzero(corpora == index))
        for name in ("epoch", "pool", "lane", "row"):
            assert getattr(part, name).tolist() == getattr(alone, name).tolist(), (SIZES[index], name)


def test_only_an_endless_entry_of_full_rows_within_its_cap_is_covered() -> None:
    endless, ending = epochs_of(300, 3), epochs_of(300, 3, epochs=2)
    entry = endless.entries[0]
    changed = CorpusEpochs(
        PLAN,
        [RemainderEpoch(entry.space, entry.order, 0, 0, [(RepackPoint(4, 1),)] * 3), *endless.entries],
        parts=1,
    )
    table = FullEpochsTable(4)
    for index, epochs in enumerate((endless, ending, changed)):
        table.learn(index, epochs, supply=75 if index == 0 else None)
    corpora, turns = np.array([0, 0, 1, 2, 3]), np.array([74, 75, 0, 0, 0])
    assert table.covers(corpora, turns).tolist() == [True, False, False, False, False]


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
    monkeypatch.setattr("penstock.data.sample_index._FEW", 10**9)
    assert served(corpora, packing) == together
