"""What batches hold: fields, mixtures, caps, gathered rows, and shards that fail while they are read."""

import shutil
import threading
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.core.errors import ConfigError, CorpusError, CorpusExhausted, TransformError
from penstock.data import Loader
from penstock.data.collate import FIELDS
from penstock.testing.corpora import numbered_corpus, write_corpus
from tests.loaders import WORKERS, Make, ids, penstock_threads, steps, take


def test_consecutive_batches_do_not_share_memory(make: Make) -> None:
    loader = make(num_workers=1, prefetch=3)
    held = list(islice(loader, 40))
    fresh = make()
    for step, batch in enumerate(held):
        expected = fresh.batch_at(step)
        assert all((batch[name] == expected[name]).all() for name in expected), step


def test_tensors_share_the_batchs_memory_and_keep_it(make: Make) -> None:
    loader = make(
        deliver="torch", fields=("input_ids", "labels", "cu_seqlens", "position_ids", "document_ids")
    )
    batch = next(iter(loader))
    expected = make().batch_at(0)
    assert {name: (t.dtype, tuple(t.shape)) for name, t in batch.items()} == {
        "sample_ids": (torch.int64, (4,)),
        "input_ids": (torch.int64, (4, 16)),
        "labels": (torch.int64, (4, 16)),
        "cu_seqlens": (torch.int32, (len(batch["cu_seqlens"]),)),
        "position_ids": (torch.int64, (4, 16)),
        "document_ids": (torch.int64, (4, 16)),
    }
    for step in range(1, 50):
        loader.batch_at(step)
    assert (batch["input_ids"].numpy() == expected["input_ids"]).all()


def test_only_the_requested_fields_are_delivered_and_always_the_sample_ids(make: Make) -> None:
    assert set(make(fields=()).batch_at(0)) == {"sample_ids"}
    assert set(make(fields=("labels",)).batch_at(0)) == {"sample_ids", "labels"}


@pytest.mark.parametrize("packing", ["best_fit", "concat"])
def test_gathered_rows_in_any_order_are_those_of_the_batches(make: Make, corpus: Path, packing: str) -> None:
    other = numbered_corpus(corpus.parent / "other", [9] * 50)
    loader = make(corpora={"web": corpus, "other": other}, packing=packing)
    rows = {}
    for step in range(40):
        batch = loader.batch_at(step)
        for sample, tokens, labels in zip(ids(batch), batch["input_ids"], batch["labels"], strict=True):
            rows[sample] = (tokens.tolist(), labels.tolist())
    wanted = np.array([(37 * i) % 160 for i in range(160)] + [5, 5, 0])
    gathered = loader.gather(wanted)
    assert ids(gathered) == wanted.tolist()
    found = zip(gathered["input_ids"].tolist(), gathered["labels"].tolist(), strict=True)
    assert list(found) == [rows[sample] for sample in wanted.tolist()]
    assert loader.step == 0


def test_a_mixture_of_16_and_32_bit_corpora_serves_both(make: Make, tmp_path: Path) -> None:
    narrow = write_corpus(tmp_path / "n", [[1, 2, 3, 4]] * 40, vocab_size=100)
    wide = write_corpus(tmp_path / "w", [[10**6, 10**6 + 1, 10**6 + 2, 10**6 + 3]] * 40, vocab_size=2**20)
    loader = make(corpora={"narrow": narrow, "wide": wide}, sequence_length=4, global_batch_size=8)
    for step in range(5):
        rows = loader.batch_at(step)["input_ids"].tolist()
        assert [1, 2, 3, 4] in rows
        assert [10**6, 10**6 + 1, 10**6 + 2, 10**6 + 3] in rows
        assert len(rows) == 8


def test_a_corpus_of_weight_zero_is_left_out(make: Make, corpus: Path) -> None:
    other = write_corpus(corpus.parent / "other", [[50_000] * 9] * 50)
    loader = make(
        corpora={"web": corpus, "other": other}, weights={"web": 1, "other": 0}, epochs={"other": 1}
    )
    assert loader.samples_by_corpus(25) == {"web": 100, "other": 0}
    assert loader.num_samples is None, "the cap on a corpus that is left out ends nothing"
    assert all((loader.batch_at(step)["input_ids"] != 50_000).all() for step in range(25))


def test_without_weights_the_mixture_is_in_proportion_to_tokens(make: Make, tmp_path: Path) -> None:
    corpora = {name: write_corpus(tmp_path / name, [[1] * n]) for name, n in (("a", 3000), ("b", 1000))}
    assert make(corpora=corpora).samples_by_corpus(100) == {"a": 300, "b": 100}


@WORKERS
def test_a_capped_corpus_ends_the_iteration_at_the_step_that_would_need_more(
    make: Make, num_workers: int
) -> None:
    loader = make(epochs={"web": 2}, num_workers=num_workers)
    samples = loader.num_samples
    assert samples == 2 * loader.samples_per_epoch["web"]
    batches = iter(loader)
    for _ in range(samples // 4):
        next(batches)
    message = rf"Corpus 'web' has given all {samples} sequences of its 2 epochs\. .*raise its epochs"
    with pytest.raises(CorpusExhausted, match=message):
        next(batches)
    assert loader.step == samples // 4, "the step that failed does not count"
    assert not penstock_threads()


def test_the_samples_of_a_mixture_end_where_its_first_capped_corpus_does(make: Make, corpus: Path) -> None:
    other = numbered_corpus(corpus.parent / "other", [9] * 50)
    loader = make(
        corpora={"web": corpus, "other": other},
        weights={"web": 3, "other": 1},
        epochs={"web": 2, "other": 1},
        global_batch_size=1,
    )
    last = loader.num_samples
    assert last is not None
    loader.batch_at(last - 1)
    with pytest.raises(CorpusExhausted, match=r"Corpus '(web|other)' has given all"):
        loader.batch_at(last)
    drawn = loader.samples_by_corpus(last)
    full = {name: {"web": 2, "other": 1}[name] * per for name, per in loader.samples_per_epoch.items()}
    assert any(drawn[name] == full[name] for name in full)


def test_without_a_cap_a_loader_has_no_end(make: Make) -> None:
    loader = make()
    assert loader.num_samples is None
    assert len(ids(loader.batch_at(10**12))) == 4


@WORKERS
def test_a_shard_that_vanishes_is_an_error_of_the_step_that_needs_it_and_no_thread_is_left(
    make: Make, corpus: Path, num_workers: int
) -> None:
    loader = make(num_workers=num_workers)
    batches = iter(loader)
    (corpus / "shard-00001.arrow").unlink()
    with pytest.raises(CorpusError, match=r"shard-00001\.arrow is missing"):
        list(islice(batches, 100))
    assert loader.step < 100
    assert not penstock_threads()


def test_a_truncated_shard_is_an_error_and_a_restored_one_is_read_on(make: Make, corpus: Path) -> None:
    shard = corpus / "shard-00001.arrow"
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2])
    loader = make()
    with pytest.raises(CorpusError, match="truncated or altered"):
        next(iter(loader))
    shard.write_bytes(content)
    assert sorted(take(loader, 1)[0]) == steps(0, 1)[0]


def test_two_shards_of_unlike_sizes_that_were_swapped_are_an_error(make: Make, corpus: Path) -> None:
    one, two = corpus / "shard-00000.arrow", corpus / "shard-00002.arrow"
    one_content, two_content = one.read_bytes(), two.read_bytes()
    one.write_bytes(two_content)
    two.write_bytes(one_content)
    with pytest.raises(CorpusError, match=r"shard-0000[02]\.arrow (has|holds) "):
        list(islice(make(), 100))


def test_samples_may_be_a_plain_list_or_small_integers(make):
    loader = make()
    pieces = loader.explain(np.array([300, 7]))
    assert loader.explain([300, 7]) == loader.explain(np.array([300, 7], dtype=np.uint16)) == pieces


@pytest.mark.parametrize("packing", ["best_fit", "concat"])
def test_shards_of_one_corpus_may_differ_in_the_width_of_their_tokens(tmp_path, packing):
    data = Path(__file__).parents[2] / "data" / "datatrove"
    for width in ("uint16", "uint32"):
        shutil.copytree(data / width, tmp_path / width, ignore=shutil.ignore_patterns(".penstock"))
    loader = Loader({"c": tmp_path}, sequence_length=16, global_batch_size=4, num_workers=0, packing=packing)
    corpus = loader.corpora["c"]
    assert {corpus.shard(shard).tokens.dtype.name for shard in range(4)} == {"uint16", "uint32"}
    stored = np.concatenate([corpus.shard(shard).tokens[:] for shard in range(4)])
    rows = loader.samples_per_epoch["c"]
    served = loader.gather(np.arange(rows))["input_ids"].numpy().ravel()
    assert np.array_equal(np.sort(served[served != 0]), np.sort(stored[stored != 0]))


def test_token_ids_can_be_handed_out_in_32_bits(tmp_path):
    corpus = write_corpus(tmp_path / "c", [list(range(1, 90)), [7, 8, 9]], vocab_size=2**20)
    options = {"sequence_length": 16, "global_batch_size": 3, "fields": FIELDS, "deliver": "numpy"}
    wide = Loader({"c": corpus}, **options).batch_at(1)
    for transform in (None, lambda sample, _: sample):
        narrow = Loader({"c": corpus}, dtype="int32", transform=transform, **options).batch_at(1)
        assert {name: field.dtype for name, field in narrow.items() if name != "sample_ids"} == dict.fromkeys(
            FIELDS, np.dtype(np.int32)
        )
        assert all((narrow[name] == wide[name]).all() for name in wide)


def test_ids_beyond_32_bits_are_refused_where_those_are_asked_for(tmp_path):
    small, large = (write_corpus(tmp_path / str(n), [[1, 2, 3]], vocab_size=n) for n in (2**31, 2**32))
    options = {"sequence_length": 2, "global_batch_size": 1, "dtype": "int32", "num_workers": 0}
    loader = Loader({"small": small}, **options)
    with pytest.raises(ConfigError, match=r"'large' may contain token ids up to 4,294,967,295.*int64"):
        Loader({"small": small, "large": large}, **options)
    with pytest.raises(ConfigError, match="'large' may contain token ids"):
        loader.add_corpus("large", large, weights={"small": 1, "large": 1})
    assert list(loader.corpora) == ["small"]
    with pytest.raises(ConfigError, match=r"dtype has no such choice.*int8"):
        Loader({"small": small}, **{**options, "dtype": "int8"})


def test_local_files_are_read_without_a_thread_unless_one_is_asked_for(tmp_path):
    corpus = write_corpus(tmp_path / "c", [list(range(1, 90))])
    options = {"sequence_length": 16, "global_batch_size": 1}
    for more, threads in (({}, 0), ({"num_workers": 1}, 1), ({"transform": lambda sample, _: sample}, 1)):
        batches = iter(Loader({"c": corpus}, **options, **more))
        next(batches)
        names = [thread.name for thread in threading.enumerate()]
        assert sum(name.startswith("penstock-loader") for name in names) == threads
        batches.close()


def test_a_transform_whose_numbers_32_bits_do_not_hold_is_refused(tmp_path):
    corpus = write_corpus(tmp_path / "c", [list(range(1, 90))], vocab_size=2**20)
    options = {"sequence_length": 16, "global_batch_size": 3, "deliver": "numpy", "dtype": "int32"}

    def enlarge(sample, _):
        return replace(sample, labels=sample.labels + 2**31)

    with pytest.raises(TransformError, match=r"returned labels that does not fit int32.*dtype='int64'"):
        Loader({"c": corpus}, transform=enlarge, **options).batch_at(1)
