"""explain and find: documents counted with the empty ones among them, padding, later epochs."""

from pathlib import Path

import numpy as np
import pytest

from penstock.data import Loader
from penstock.testing.corpora import numbered_corpus

LENGTHS = [0, 0, 5, 0, 3, 0, 0, 9, 0]


@pytest.fixture
def loader(tmp_path: Path) -> Loader:
    folder = numbered_corpus(tmp_path / "c", LENGTHS, documents_per_shard=4)
    return Loader({"c": folder}, sequence_length=4, global_batch_size=5, num_workers=0, deliver="numpy")


@pytest.mark.parametrize("epoch", [0, 1, 7])
def test_every_document_is_found_once_an_epoch_as_a_whole(loader: Loader, epoch: int) -> None:
    assert loader.samples_per_epoch == {"c": 5}
    for document, length in enumerate(LENGTHS):
        uses = loader.find("c", document, steps=range(epoch, epoch + 1))
        covered = sorted(at for use in uses for at in range(use.offset, use.offset + use.tokens))
        assert covered == list(range(length))
        assert {use.epoch for use in uses} <= {epoch}


def test_a_piece_names_its_shard_and_document_and_padding_names_none(loader: Loader) -> None:
    pieces = [piece for row in loader.explain(np.arange(5)) for piece in row]
    assert {(p.shard, p.document) for p in pieces if p.corpus} == {
        ("shard-00000.arrow", 2),
        ("shard-00001.arrow", 4),
        ("shard-00001.arrow", 7),
    }
    assert [(p.tokens, p.document, p.shard) for p in pieces if not p.corpus] == [(3, -1, "")]


def test_find_needs_nothing_of_skipped_samples_beyond_the_cap(tmp_path: Path) -> None:
    corpora = {name: numbered_corpus(tmp_path / name, LENGTHS) for name in ("c", "d")}
    plain = {"sequence_length": 4, "global_batch_size": 2, "num_workers": 0, "deliver": "numpy"}
    loader = Loader(corpora, epochs={"c": 1}, **plain)
    steps = range(loader.samples_per_epoch["c"])  # one row of each corpus a step: all that there is of c
    expected = loader.find("c", 7, steps=steps)
    after = int(loader.samples_of(steps.stop)[0])
    loader.skip(samples=range(after, after + 6))
    assert loader.find("c", 7, steps=steps) == expected
    assert sum(use.tokens for use in expected) == 9


def test_find_looks_through_a_change_of_length_where_pools_are_used_up(tmp_path: Path) -> None:
    folder = numbered_corpus(tmp_path / "c", [10] * 600)
    loader = Loader({"c": folder}, sequence_length=2, global_batch_size=512, num_workers=0, deliver="numpy")
    batches = iter(loader)
    next(batches), next(batches)
    batches.close()
    loader.set_sequence_length(5)
    for document in range(0, 600, 60):
        uses = loader.find("c", document, steps=range(4))
        assert sorted(
            at for use in uses if use.epoch == 0 for at in range(use.offset, use.offset + use.tokens)
        ) == (list(range(10)))
