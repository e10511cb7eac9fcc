"""What a loader may be told in the middle of a run, and what it refuses."""

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from penstock.core.errors import ConfigError, CorpusChanged, CorpusExhausted, UsageError
from penstock.data import Loader
from penstock.data.feed import ahead
from penstock.testing.corpora import numbered_corpus, write_corpus
from tests.growing import grow
from tests.loaders import resumed, run, tokens

Make = Callable[..., Loader]


def test_another_corpus_cannot_come_back_under_a_removed_ones_name(mix: Make, tmp_path: Path) -> None:
    loader = run(mix(), 5)
    loader.remove_corpus("web")
    again = resumed(loader, mix("code"))
    other = numbered_corpus(tmp_path / "other", [5, 6])
    with pytest.raises(CorpusChanged, match="Corpus 'web' is not the one"):
        again.add_corpus("web", other, weights={"web": 1, "code": 1})
    assert list(again.corpora) == ["code"]


def test_a_corpus_whose_ids_the_type_does_not_hold_is_refused_when_it_is_added(tmp_path: Path) -> None:
    small = write_corpus(tmp_path / "small", [[1] * 90], vocab_size=100)
    large = numbered_corpus(tmp_path / "large", [5, 6])  # of 2^32 ids
    loader = Loader({"small": small}, sequence_length=8, global_batch_size=2, dtype="int32")
    state = loader.state_dict()
    with pytest.raises(ConfigError, match=r"Corpus 'large' may contain token ids up to 4,294,967,295"):
        loader.add_corpus("large", large, weights={"small": 1, "large": 1})
    assert loader.state_dict() == state
    assert list(loader.corpora) == ["small"]
    assert len(loader.batch_at(0)["input_ids"]) == 2


@pytest.mark.parametrize(
    ("told", "kind", "message"),
    [
        (lambda x: x.set_weights({"web": 1}), ConfigError, "'code' has no weight"),
        (
            lambda x: x.set_weights({"web": 1, "code": 1}, step=1),
            UsageError,
            "2 steps have already been served",
        ),
        (lambda x: x.add_corpus("web", "x", weights={}), ConfigError, "already has a corpus of this name"),
        (lambda x: x.remove_corpus("wbe"), ConfigError, r"no such corpus .*Did you mean 'web'"),
        (lambda x: x.remove_corpus("web", weights={"cod": 1}), ConfigError, "Did you mean 'code'"),
        (lambda x: x.extend_corpus("wbe"), ConfigError, "no such corpus"),
        (lambda x: x.extend_corpus("web", parts=2), ConfigError, "has only 1 parts"),
        (lambda x: x.set_sequence_length(1), ConfigError, "sequence_length must be at least 2"),
        (lambda x: x.set_global_batch_size(0), ConfigError, "global_batch_size must be at least 1"),
        (lambda x: x.skip(samples=range(7, 9)), UsageError, "Samples before 8 have already been served"),
        (lambda x: x.skip(steps=range(1, 3)), UsageError, "Samples before 8 have already been served"),
        (lambda x: x.skip(samples=range(20, 20)), UsageError, "at least one sample"),
        (lambda x: x.skip(samples=range(20, 30, 2)), UsageError, "at least one sample"),
        (lambda x: x.skip(steps=range(9, 9)), UsageError, "at least one step"),
        (lambda x: x.skip(), UsageError, "either samples or steps"),
        (lambda x: x.find("web", 20, steps=range(3)), UsageError, r"documents 0 to 19 \(got 20\)"),
        (lambda x: x.find("wbe", 0, steps=range(3)), ConfigError, "Did you mean 'web'"),
        (lambda x: x.find("web", 0, steps=range(0, 9, 3)), UsageError, "contiguous range"),
        (lambda x: x.batch_at(2**62), UsageError, "within 2.62 samples"),
        (lambda x: x.tokens_before(-1), UsageError, "step must be at least 0"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(
    mix: Make, told: Callable[[Loader], object], kind: type[Exception], message: str
) -> None:
    loader = run(mix(), 2)
    state = loader.state_dict()
    with pytest.raises(kind, match=message):
        told(loader)
    assert loader.state_dict() == state
    loader.batch_at(2)


def test_what_was_prepared_for_another_length_at_the_same_step_is_not_served(mix: Make) -> None:
    told = run(mix(), 3)
    for length in (16, 12, 24):
        told.set_sequence_length(length)
        told.batch_at(3)
    plain = run(mix(), 3)
    plain.set_sequence_length(24)
    assert tokens(told, range(8)) == tokens(plain, range(8))


def test_a_cap_counts_what_is_appended_and_what_is_cut_anew(mix: Make, corpora: dict[str, Path]) -> None:
    loader = mix("web", epochs={"web": 1}, global_batch_size=1)
    run(loader, 10)
    grow(corpora["web"], [25] * 4)
    loader.extend_corpus("web")
    loader.set_sequence_length(16)
    last = loader.num_samples
    assert last == 10 + -(-(600 - 80) // 16) + -(-100 // 16)
    served = [token for batch in tokens(loader, range(last)) for row in batch for token in row if token]
    assert sorted(served) == list(range(1, 701))
    with pytest.raises(CorpusExhausted):
        loader.batch_at(last)


def test_what_is_skipped_at_the_start_is_not_served_under_later_ids(mix: Make) -> None:
    loader, plain, ids = mix(), mix(), list(range(40))
    loader.skip(samples=range(20))
    assert loader.samples_of(0)[0] == 20
    for told in (loader, resumed(loader, mix())):
        assert (told.gather(ids)["input_ids"] == plain.gather(ids)["input_ids"]).all()
        assert told.explain(ids[:1])[0][0].epoch == 0


def test_a_corpus_smaller_than_a_row_is_a_padded_row_an_epoch_at_any_length(tmp_path: Path) -> None:
    corpus = numbered_corpus(tmp_path / "tiny", [3])
    loader = Loader({"c": corpus}, sequence_length=8, global_batch_size=1, num_workers=0, deliver="numpy")
    run(loader, 2)
    loader.set_sequence_length(5)
    assert loader.batch_at(1)["input_ids"].tolist() == [[1, 2, 3, 0, 0, 0, 0, 0]]
    assert loader.batch_at(2)["input_ids"].tolist() == [[1, 2, 3, 0, 0]]


def test_a_recorded_change_takes_few_bytes(mix: Make) -> None:
    loader = mix()
    sizes = [len(json.dumps(loader.state_dict()))]
    for number in range(10):
        run(loader, 1)
        loader.set_weights({"web": 1, "code": 2 + number % 2})
        sizes.append(len(json.dumps(loader.state_dict())))
    assert sizes[0] < 700
    assert max(np.diff(sizes)) < 80
    loader.set_weights(loader.weights)
    assert len(json.dumps(loader.state_dict())) == sizes[-1], "to be told the same again is no change"


@pytest.mark.parametrize(
    "tell",
    [
        lambda x, _: x.set_weights({"web": 1, "code": 20}),
        lambda x, corpora: x.add_corpus("math", corpora["math"], weights={"web": 1, "code": 1, "math": 20}),
        lambda x, _: x.remove_corpus("web"),
        lambda x, _: x.set_global_batch_size(12),
        lambda x, _: x.set_sequence_length(16),
        lambda x, _: x.skip(steps=range(2, 9)),
    ],
    ids=["weights", "add", "remove", "batch size", "length", "skip"],
)
def test_what_is_told_in_mid_iteration_holds_at_the_next_batch(
    mix: Make, corpora: dict[str, Path], tell: Callable[[Loader, dict[str, Path]], None]
) -> None:
    loader = mix(num_workers=1, prefetch=4)
    with closing(iter(loader)) as batches:
        next(batches), next(batches)
        before = loader.batch_at(2)["input_ids"].tolist()
        tell(loader, corpora)
        given = next(batches)["input_ids"].tolist()
    assert given != before
    assert [given] == tokens(loader, range(2, 3))


def test_batches_that_were_prepared_are_kept_where_there_is_nothing_new_to_take_up(
    mix: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []

    def noted(batch_at: Callable[[int], object], *, start: int, **options: int) -> Iterator[object]:
        begun.append(start)
        return ahead(batch_at, start=start, **options)

    monkeypatch.setattr("penstock.data.loader.ahead", noted)
    loader = mix("web")
    with closing(iter(loader)) as batches:
        next(batches)
        loader.extend_corpus("web")
        next(batches)
        assert begun == [0]
        loader.set_sequence_length(16)
        next(batches)
    assert begun == [0, 2]
