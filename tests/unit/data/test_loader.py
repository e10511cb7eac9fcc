"""The loader as a training loop sees it: states, iterators, caps, refusals (its laws are property tests)."""

import gc
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.core.errors import (
    ConfigError,
    CorpusChanged,
    CorpusError,
    CorpusExhausted,
    PenstockError,
    StateMismatch,
    UsageError,
)
from penstock.data import Loader
from penstock.testing.corpora import numbered_corpus, write_corpus

Make = Callable[..., Loader]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return numbered_corpus(tmp_path / "web", [1 + (7 * i) % 43 for i in range(60)], documents_per_shard=20)


@pytest.fixture
def make(corpus: Path) -> Make:
    """A function that makes a loader of that corpus; options over plain ones."""

    def made(**options: Any) -> Loader:
        plain = {"sequence_length": 16, "global_batch_size": 4, "num_workers": 0, "deliver": "numpy"}
        return Loader(options.pop("corpora", {"web": corpus}), **{**plain, **options})

    return made


def ids(batch: dict[str, Any]) -> list[int]:
    return batch["sample_ids"].tolist()  # type: ignore[no-any-return]


def take(loader: Loader, steps: int) -> list[list[int]]:
    """Take batches with an iterator of their own; return their sample ids."""
    batches = iter(loader)
    found = [ids(batch) for batch in islice(batches, steps)]
    batches.close()
    return found


def steps(first: int, past: int, *, size: int = 4) -> list[list[int]]:
    return [list(range(step * size, (step + 1) * size)) for step in range(first, past)]


WORKERS = pytest.mark.parametrize("num_workers", [0, 1, 2])


# Iteration and state


@WORKERS
def test_the_state_counts_batches_handed_out_and_not_those_prepared(make: Make, num_workers: int) -> None:
    loader = make(num_workers=num_workers, prefetch=5)
    batches = iter(loader)
    for step in range(1, 4):
        assert sorted(ids(next(batches))) == steps(step - 1, step)[0]
        state = loader.state_dict()
        assert (loader.step, state["step"], state["samples"]) == (step, step, 4 * step)
    batches.close()


@WORKERS
def test_a_state_loaded_in_the_middle_of_an_iteration_takes_effect_at_the_next_batch(
    make: Make, num_workers: int
) -> None:
    loader = make(num_workers=num_workers, prefetch=3)
    batches = iter(loader)
    found = [sorted(ids(next(batches))) for _ in range(5)]
    early = make()
    take(early, 2)
    loader.load_state_dict(early.state_dict())
    found += [sorted(ids(next(batches))) for _ in range(3)]
    batches.close()
    assert found == steps(0, 5) + steps(2, 5)


@WORKERS
def test_a_state_of_the_same_step_loaded_in_mid_iteration_changes_nothing(
    make: Make, num_workers: int
) -> None:
    loader = make(num_workers=num_workers)
    batches = iter(loader)
    found = []
    for _ in range(6):
        found.append(sorted(ids(next(batches))))
        loader.load_state_dict(loader.state_dict())
    batches.close()
    assert found == steps(0, 6)


def test_an_error_prepared_for_a_step_that_a_loaded_state_has_left_behind_is_not_raised(make: Make) -> None:
    loader = make(num_workers=1, prefetch=3, epochs={"web": 1}, global_batch_size=1)
    start, last = loader.state_dict(), loader.num_samples
    assert last is not None
    batches = iter(loader)
    for _ in range(last):
        next(batches)
    loader.load_state_dict(start)
    assert ids(next(batches)) == [0]
    batches.close()


@WORKERS
def test_two_iterators_share_one_count_and_neither_repeats_nor_loses_a_sample(
    make: Make, num_workers: int
) -> None:
    loader = make(num_workers=num_workers)
    one, two = iter(loader), iter(loader)
    found = [ids(next(batches)) for batches in (one, two, two, one, one, two, one)]
    assert [sorted(batch) for batch in found] == steps(0, 7)
    one.close()
    two.close()


@WORKERS
def test_a_new_iterator_continues(make: Make, num_workers: int) -> None:
    loader = make(num_workers=num_workers)
    found = [sorted(batch) for _ in range(3) for batch in take(loader, 2)]
    assert found == steps(0, 6)


def test_a_batch_can_be_read_again_without_moving_the_loader(make: Make) -> None:
    loader = make()
    served = next(iter(loader))
    again = loader.batch_at(0)
    assert all((served[name] == again[name]).all() for name in served)
    assert loader.step == 1


def test_a_state_can_be_changed_without_changing_the_loader(make: Make) -> None:
    loader = make()
    loader.state_dict()["corpora"]["web"]["T"] = 0
    loader.load_state_dict(make().state_dict())


def test_a_loader_continues_a_state_with_its_own_batch_size(make: Make) -> None:
    loader = make()
    take(loader, 3)
    larger = make(global_batch_size=6)
    larger.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert sorted(take(larger, 1)[0]) == list(range(12, 18))
    assert larger.state_dict()["batch"] == [[0, 4], [3, 6]]
    assert larger.samples_of(2).tolist() == list(range(8, 12))
    assert larger.samples_of(4).tolist() == list(range(18, 24))


def penstock_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("penstock")]


@pytest.mark.parametrize("leave", ["close", "drop"])
def test_leaving_an_iteration_ends_its_threads(make: Make, leave: str) -> None:
    batches: Iterator[Any] | None = iter(make(num_workers=2, prefetch=4))
    assert batches is not None
    next(batches)
    assert penstock_threads()
    if leave == "close":
        batches.close()  # type: ignore[attr-defined]
    batches = None
    gc.collect()
    assert not penstock_threads()


# Batches


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


# Caps


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


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence_length": 1}, r"sequence_length must be at least 2 \(got 1\)"),
        ({"global_batch_size": 0}, r"global_batch_size must be at least 1 \(got 0\)"),
        ({"num_workers": -1}, r"num_workers must be at least 0 \(got -1\)"),
        ({"prefetch": -1}, r"prefetch must be at least 0 \(got -1\)"),
        ({"world_size": 0}, r"number of ranks must be at least 1 \(got 0\)"),
        ({"world_size": 3}, "batch of 4 sequences does not divide over 3 ranks.*3 or 6"),
        ({"world_size": 2, "rank": 2}, r"rank must be in \[0, 2\) \(got 2\)"),
        ({"rank": -1}, r"rank must be in \[0, 1\) \(got -1\)"),
        (
            {"fields": ("tokens",)},
            r"no such field \(got 'tokens'\)\. Known: cu_seqlens, document_ids, input_ids",
        ),
        ({"fields": ("label",)}, r"no such field \(got 'label'\)\. Did you mean 'labels'\?"),
        ({"packing": "bestfit"}, r"Unknown packing rule \(got 'bestfit'\)\. Did you mean 'best_fit'\?"),
        (
            {"packing": "whole"},
            r"one longer than a row .*overlong unset.*'truncate' keeps their first tokens",
        ),
        (
            {"packing": "whole", "overlong": "cut"},
            r"overlong has no such choice \(got 'cut'\)\. Known: drop, t",
        ),
        ({"overlong": "drop"}, r"Packing 'best_fit' serves documents of any length.*got 'drop'.*Leave"),
        ({"deliver": "jax"}, r"deliver has no such choice \(got 'jax'\)\. Known: numpy, pinned, torch"),
        ({"corpora": {}}, "needs at least one corpus"),
        ({"weights": {"wbe": 1}}, r"weights names no corpus \(got 'wbe'\)\. Did you mean 'web'\?"),
        ({"weights": {}}, "Corpus 'web' has no weight.*0 leaves it out"),
        ({"weights": {"web": -1}}, r"Weight of corpus 'web' must be zero or more \(got -1\)"),
        ({"weights": {"web": 0}}, "weights sum to zero"),
        ({"epochs": {"wbe": 1}}, r"epochs names no corpus \(got 'wbe'\)\. Did you mean 'web'\?"),
        ({"epochs": {"web": 0}}, r"epochs of corpus 'web' must be at least 1 \(got 0\)"),
        ({"holdout": 0.6}, r"holdout must be a share between 0 and 0\.5 \(got 0\.6\)"),
        ({"split": "test"}, r"no such split \(got 'test'\)\. Known: heldout, train"),
        ({"split": "heldout"}, r"A holdout of 0\.0 leaves the heldout part of corpus 'web' empty"),
    ],
    ids=str,
)
def test_a_bad_argument_is_refused_with_its_value(make: Make, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make(**options)


def test_a_missing_corpus_is_refused(make: Make) -> None:
    with pytest.raises(CorpusError, match=r"Corpus nowhere does not exist\. Make it with"):
        make(corpora={"web": "nowhere"})


def test_a_negative_step_is_refused(make: Make) -> None:
    with pytest.raises(UsageError, match=r"step must be at least 0 \(got -1\)"):
        make().batch_at(-1)


@pytest.mark.parametrize("samples", [[], [3, -1]])
def test_gathering_nothing_or_a_negative_sample_is_refused(make: Make, samples: list[int]) -> None:
    with pytest.raises(UsageError, match=r"gather takes one sample or more|none of them negative"):
        make().gather(np.array(samples, dtype=np.int64))


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"seed": 1}, StateMismatch, "has seed = 0, this loader has 1"),
        ({"packing": "concat"}, StateMismatch, "has packing = 'best_fit', this loader has 'concat'"),
        (
            {"holdout": 0.3},
            StateMismatch,
            r"has split = \['train', 0\.0\], this loader has \['train', 0\.3\]",
        ),
    ],
    ids=str,
)
def test_a_state_of_other_settings_is_refused_and_the_loader_stays_where_it_was(
    make: Make, options: dict[str, Any], kind: type[PenstockError], message: str
) -> None:
    saved = make()
    take(saved, 2)
    loader = make(**options)
    with pytest.raises(kind, match=message):
        loader.load_state_dict(saved.state_dict())
    assert loader.step == 0


def test_a_state_of_another_corpus_under_the_same_name_is_refused_with_a_diff(
    make: Make, tmp_path: Path
) -> None:
    other = make(corpora={"web": numbered_corpus(tmp_path / "other", [5, 6])})
    message = r"Corpus 'web' is not .*: T was \d+, is 11; fingerprint was \w+, is \w+\. Restore the corpus"
    with pytest.raises(CorpusChanged, match=message):
        other.load_state_dict(make().state_dict())


def test_other_weights_and_lengths_of_a_resumed_loader_hold_from_there_on(make: Make, corpus: Path) -> None:
    both = {"web": corpus, "other": numbered_corpus(corpus.parent / "other", [9] * 50)}
    saved = make(corpora=both, weights={"web": 1, "other": 1})
    take(saved, 3)
    resumed = make(corpora=both, weights={"web": 3, "other": 1}, sequence_length=8)
    resumed.load_state_dict(saved.state_dict())
    assert resumed.weights == {"web": 0.75, "other": 0.25}
    assert resumed.batch_at(2)["input_ids"].shape == (4, 16)
    assert resumed.batch_at(3)["input_ids"].shape == (4, 8)
    assert resumed.samples_by_corpus(3) == {"web": 6, "other": 6}
    assert resumed.samples_by_corpus(7) == {"web": 6 + 12, "other": 6 + 4}
    assert resumed.tokens_by_corpus(7) == {"web": 6 * 16 + 12 * 8, "other": 6 * 16 + 4 * 8}


def test_a_corpus_that_is_still_trained_on_and_not_named_is_refused(make: Make, corpus: Path) -> None:
    both = {"web": corpus, "other": numbered_corpus(corpus.parent / "other", [9] * 50)}
    saved = make(corpora=both).state_dict()
    with pytest.raises(
        StateMismatch, match=r"trains on corpus 'other', which this loader does not have\. Name"
    ):
        make().load_state_dict(saved)


def test_a_corpus_that_was_moved_is_the_same_corpus(make: Make, corpus: Path) -> None:
    loader = make()
    take(loader, 2)
    moved = make(corpora={"web": corpus.rename(corpus.parent / "elsewhere")})
    moved.load_state_dict(loader.state_dict())
    assert sorted(take(moved, 1)[0]) == steps(2, 3)[0]


# Shards that fail while they are read


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


# Arguments that must not matter


@pytest.mark.parametrize("prefetch", [0, 1, 7])
@WORKERS
def test_workers_and_prefetching_change_nothing(make: Make, num_workers: int, prefetch: int) -> None:
    plain = make()
    loader = make(num_workers=num_workers, prefetch=prefetch)
    for step, batch in enumerate(islice(loader, 12)):
        expected = plain.batch_at(step)
        assert all((batch[name] == expected[name]).all() for name in expected)


def test_config_errors_are_wrong_usage() -> None:
    assert issubclass(ConfigError, UsageError), "so that the command exits with 2"


def test_a_past_step_whose_batch_does_not_divide_over_the_ranks_is_refused_not_cut(tmp_path):
    corpora = {"c": numbered_corpus(tmp_path, [9] * 40)}
    one = Loader(corpora, sequence_length=4, global_batch_size=4, num_workers=0)
    next(iter(one))
    three = Loader(corpora, sequence_length=4, global_batch_size=6, world_size=3, num_workers=0)
    three.load_state_dict(one.state_dict())
    assert len(three.batch_at(1)["sample_ids"]) == 2
    with pytest.raises(ConfigError, match="4 sequences does not divide over 3 ranks"):
        three.batch_at(0)


@pytest.mark.parametrize("samples", [[-1], [1.5], [[1]], 5, None, [2**63]], ids=str)
def test_what_is_no_list_of_samples_is_refused(make, samples):
    loader = make()
    for ask in (loader.gather, loader.explain, loader.corpora_of):
        with pytest.raises(UsageError, match="Samples must be a list of whole numbers"):
            ask(samples)


def test_samples_may_be_a_plain_list_or_small_integers(make):
    loader = make()
    pieces = loader.explain(np.array([300, 7]))
    assert loader.explain([300, 7]) == loader.explain(np.array([300, 7], dtype=np.uint16)) == pieces


@pytest.mark.parametrize("step", [1.5, "1", None])
def test_a_step_that_is_no_whole_number_is_refused(make, step):
    loader = make()
    for ask in (loader.batch_at, loader.samples_of, loader.tokens_before, loader.samples_by_corpus):
        with pytest.raises(UsageError, match="step must be a whole number"):
            ask(step)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.set_weights({"web": 1}, reason=3), "reason must be text .got 3"),
        (lambda x: x.skip(samples=range(1, 2), reason=None), "reason must be text .got None"),
        (lambda x: x.skip(samples=range(1, 2**62)), "samples must be below 2.62"),
        (lambda x: x.skip(samples=[1, 2]), "samples must be a range of one sample or more"),
        (lambda x: x.add_corpus(3, "c", weights={"web": 1}), "name of a corpus must be a text"),
        (lambda x: x.extend_corpus("web", parts="2"), "parts must be a whole number .got '2'"),
    ],
)
def test_a_change_that_no_state_could_hold_is_refused(make, change, message):
    loader = make()
    before = loader.state_dict()
    with pytest.raises(UsageError, match=message):
        change(loader)
    assert loader.state_dict() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"corpora": "c1"}, "corpora must map names to folders .got 'c1'"),
        ({"corpora": ["c1"]}, "corpora must map names to folders"),
        ({"sequence_length": 64.0}, "sequence_length must be a whole number .got 64.0"),
        ({"fields": "labels"}, "fields must be a list of names .got 'labels'"),
        ({"fields": None}, "fields must be a list of names .got None"),
        ({"rank": "0"}, "rank must be a whole number .got '0'"),
        ({"world_size": None}, "world_size must be a whole number .got None"),
        ({"holdout": "0.1"}, "holdout must be a number .got '0.1'"),
        ({"weights": 1}, "weights must map names of corpora to numbers .got 1"),
        ({"weights": {"c": "1"}}, "Weight of corpus 'c' must be a number .got '1'"),
        ({"epochs": 2}, "epochs must map names of corpora to numbers .got 2"),
        ({"epochs": {"c": 1.5}}, "epochs of corpus 'c' must be a whole number .got 1.5"),
        ({"corpora": {3: "c"}}, "name of a corpus must be a text that is not empty .got 3"),
        ({"schedule": [{"step": 3}]}, "schedule must be a list of changes"),
        ({"split": None}, "no such split .got None"),
    ],
    ids=str,
)
def test_an_argument_of_a_wrong_kind_is_named(tmp_path, change, message):
    corpora = {"c": numbered_corpus(tmp_path, [9] * 40)}
    arguments = {"corpora": corpora, "sequence_length": 4, "global_batch_size": 4, **change}
    with pytest.raises(ConfigError, match=message):
        Loader(arguments.pop("corpora"), **arguments)


def test_numpy_integers_are_plain_ones_in_the_state(tmp_path):
    corpora = {"c": numbered_corpus(tmp_path, [9] * 40)}
    sizes = {"sequence_length": np.int64(4), "global_batch_size": np.int32(4), "seed": np.int64(3)}
    assert json.loads(json.dumps(Loader(corpora, **sizes).state_dict()))["length"] == [[0, 4]]


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


@pytest.mark.parametrize(
    ("option", "value", "most"),
    [
        ("prefetch", 2**40, "1,024"),
        ("num_workers", 2000, "1,024"),
        ("sequence_length", 2**40, "1,073,741,824"),
    ],
)
def test_an_argument_that_no_memory_could_hold_is_refused(
    make: Make, option: str, value: int, most: str
) -> None:
    with pytest.raises(ConfigError, match=rf"{option} can be at most {most} \(got {value}\)"):
        make(**{option: value})


def test_a_state_of_a_length_that_no_memory_could_hold_is_refused(make: Make) -> None:
    state = make().state_dict()
    with pytest.raises(StateMismatch, match="a length can be at most"):
        make().load_state_dict({**state, "length": [[0, 2**40]]})
    with pytest.raises(StateMismatch, match="longest must be a sequence length"):
        make().load_state_dict({**state, "longest": 2**61})
