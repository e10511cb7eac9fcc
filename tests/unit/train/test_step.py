"""Micro-batches and the guard on token ids (steps on several ranks: tests/ranks)."""

from pathlib import Path

import pytest
import torch

from penstock.core.errors import CorpusError
from penstock.data import Loader
from penstock.data.explain import DocumentSpan
from penstock.testing.corpora import numbered_corpus
from penstock.train.step import check_vocabulary, inputs_of, joined, micro_batches

CPU = torch.device("cpu")


def test_document_boundaries_are_cut_at_the_edges_of_micro_batches() -> None:
    """Two rows of five tokens each way; every row's end is a boundary."""
    batch = {
        "input_ids": torch.arange(20).view(4, 5),
        "labels": torch.arange(20).view(4, 5) + 1,
        "position_ids": torch.zeros(4, 5, dtype=torch.int64),
        "cu_seqlens": torch.tensor([0, 2, 5, 10, 11, 12, 15, 20], dtype=torch.int32),
    }
    one, two = micro_batches(batch, rows=2, device=CPU)
    assert one["cu_seqlens"].tolist() == [0, 2, 5, 10]
    assert two["cu_seqlens"].tolist() == [0, 1, 2, 5, 10]
    assert two["cu_seqlens"].dtype == torch.int32
    assert one["input_ids"].tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert two["labels"].tolist() == [[11, 12, 13, 14, 15], [16, 17, 18, 19, 20]]


@pytest.mark.parametrize(
    ("ends", "packed"),
    [
        ([0, 5, 10, 15, 20], [False, False]),
        ([0, 5, 10, 14, 15, 20], [False, True]),
        ([0, 1, 5, 10, 15, 20], [True, False]),
    ],
)
def test_rows_of_one_document_each_need_no_kernel_for_packed_documents(ends, packed) -> None:
    """The model then gets no ends; attention over rows is what they say. A row's padding is a document."""
    batch = {name: torch.arange(20).view(4, 5) for name in ("input_ids", "labels", "position_ids")}
    batch["cu_seqlens"] = torch.tensor(ends, dtype=torch.int32)
    parts = list(micro_batches(batch, rows=2, device=CPU))
    given = [inputs_of(part, lambda hidden, _: hidden)["cu_seqlens"] for part in parts]
    assert [end is not None for end in given] == packed
    both = inputs_of(joined(parts), lambda hidden, _: hidden)["cu_seqlens"]
    assert [end is not None for end in both] == packed


@pytest.mark.parametrize(("rows", "sizes"), [(1, [1] * 6), (2, [2, 2, 2]), (4, [4, 2]), (6, [6]), (9, [6])])
def test_micro_batches_together_are_the_batch(tmp_path: Path, rows: int, sizes: list[int]) -> None:
    corpus = numbered_corpus(tmp_path, [1 + (5 * i) % 23 for i in range(60)])
    fields = ("input_ids", "labels", "position_ids", "cu_seqlens", "document_ids")
    loader = Loader({"c": corpus}, sequence_length=16, global_batch_size=6, fields=fields, num_workers=0)
    batch = loader.batch_at(0)
    parts = list(micro_batches(batch, rows=rows, device=CPU))
    assert [len(part["input_ids"]) for part in parts] == sizes
    for name in ("input_ids", "labels", "position_ids"):
        assert torch.equal(torch.cat([part[name] for part in parts]), batch[name])
    for part in parts:  # positions restart exactly where documents do
        starts = torch.zeros(part["position_ids"].numel(), dtype=torch.bool)
        starts[part["cu_seqlens"][:-1].long()] = True
        assert torch.equal(part["position_ids"].flatten() == 0, starts)
        assert part["cu_seqlens"][-1] == part["input_ids"].numel()


def test_a_token_beyond_the_vocabulary_is_refused_with_its_id() -> None:
    low, high = torch.tensor([[1, 49], [48, 2]]), torch.tensor([[1, 49], [50, -100]])
    message = r"A batch holds token id 50, beyond the model's vocabulary of 50\. .*data verify"
    for batch in ({"input_ids": high, "labels": low}, {"input_ids": low, "labels": high}):
        check_vocabulary(batch, 51)
        with pytest.raises(CorpusError, match=message):
            check_vocabulary(batch, 50)


def test_the_document_with_a_token_beyond_the_vocabulary_is_named() -> None:
    """Here a label, in the second document of the second row."""
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    labels = torch.tensor([[2, 3, 4, 5], [6, -100, 8, 99]])
    spans = [
        DocumentSpan(corpus="c", epoch=0, shard=f"shard-{n}", document=n, offset=0, start=0, tokens=2)
        for n in (7, 8)
    ]
    asked = []

    def spans_of(row):
        asked.append(row)
        return spans

    message = "token id 99, beyond the model's vocabulary of 50, in document 8 of corpus 'c' .shard-8.[.]"
    with pytest.raises(CorpusError, match=message):
        check_vocabulary({"input_ids": ids, "labels": labels}, 50, spans_of=spans_of)
    assert asked == [1]
