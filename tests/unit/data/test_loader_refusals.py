"""What a loader refuses: arguments, states, steps and samples, each with its value and what to do."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import (
    ConfigError,
    CorpusChanged,
    CorpusError,
    PenstockError,
    StateMismatch,
    UsageError,
)
from penstock.data import Loader
from penstock.testing.corpora import numbered_corpus
from tests.loaders import Make, take


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
        ({"micro_batch_size": 0}, r"micro_batch_size must be at least 1 \(got 0\)"),
        ({"micro_batch_size": 3}, "micro_batch_size of 3 does not divide a rank's 4 rows"),
        ({"micro_batch_size": 4, "world_size": 2}, "micro_batch_size of 4 does not divide a rank's 2 rows"),
        (
            {"fields": ("tokens",)},
            r"no such field \(got 'tokens'\)\. Known: cu_seqlens, document_ids, input_ids",
        ),
        ({"fields": ("label",)}, r"no such field \(got 'label'\)\. Did you mean 'labels'\?"),
        ({"packing": "bestfit"}, r"Unknown packing rule \(got 'bestfit'\)\. Did you mean 'best_fit'\?"),
        (
            {"packing": "whole"},
            r"Corpus 'web' has \d+ documents longer than a row of .* the longest of \d+.*overlong unset.*"
            r"'truncate' to keep their first tokens",
        ),
        (
            {"packing": "whole", "overlong": "cut"},
            r"overlong has no such choice \(got 'cut'\)\. Known: drop, t",
        ),
        ({"overlong": "drop"}, r"Packing 'best_fit' serves documents of any length.*got 'drop'.*Leave"),
        ({"deliver": "jax"}, r"deliver has no such choice \(got 'jax'\)\. Known: numpy, pinned, torch"),
        ({"corpora": {}}, "needs at least one corpus"),
        ({"weights": {"wbe": 1}}, r"weights names an unknown corpus \(got 'wbe'\)\. Did you mean 'web'\?"),
        ({"weights": {}}, "Corpus 'web' has no weight.*0: it is not read"),
        ({"weights": {"web": -1}}, r"Weight of corpus 'web' must be zero or more \(got -1\)"),
        ({"weights": {"web": 0}}, "weights sum to zero"),
        ({"epochs": {"wbe": 1}}, r"epochs names an unknown corpus \(got 'wbe'\)\. Did you mean 'web'\?"),
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
    with pytest.raises(UsageError, match=r"gather needs at least one sample|integers in"):
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


def test_a_corpus_that_is_still_trained_on_and_not_named_is_refused(make: Make, corpus: Path) -> None:
    both = {"web": corpus, "other": numbered_corpus(corpus.parent / "other", [9] * 50)}
    saved = make(corpora=both).state_dict()
    with pytest.raises(
        StateMismatch, match=r"trains on corpus 'other', which this loader does not have\. Name"
    ):
        make().load_state_dict(saved)


def test_config_errors_are_wrong_usage() -> None:
    assert issubclass(ConfigError, UsageError), "so that the command exits with 2"


def test_a_past_step_whose_batch_does_not_divide_over_the_ranks_is_refused_not_cut(tmp_path):
    corpora = {"c": numbered_corpus(tmp_path, [9] * 40)}
    one = Loader(corpora, sequence_length=4, global_batch_size=4, num_workers=0)
    next(iter(one))
    three = Loader(corpora, sequence_length=4, global_batch_size=6, world_size=3, num_workers=0)
    with pytest.raises(
        ConfigError, match=r"batches of 4 sequences, which cannot be divided over 3 ranks\. Resume"
    ):
        three.load_state_dict(one.state_dict())
    three.load_state_dict(one.state_dict(), on_change="apply")
    assert len(three.batch_at(1)["sample_ids"]) == 2
    with pytest.raises(ConfigError, match="4 sequences does not divide over 3 ranks"):
        three.batch_at(0)


@pytest.mark.parametrize("samples", [[-1], [1.5], [[1]], 5, None, [2**63]], ids=str)
def test_what_is_no_list_of_samples_is_refused(make, samples):
    loader = make()
    for ask in (loader.gather, loader.explain, loader.corpora_of):
        with pytest.raises(UsageError, match="Samples must be a list of integers"):
            ask(samples)


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
        (lambda x: x.skip(samples=[1, 2]), "samples must be a contiguous range of at least one sample"),
        (lambda x: x.add_corpus(3, "c", weights={"web": 1}), "name of a corpus must be a non-empty"),
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
        ({"corpora": {3: "c"}}, "name of a corpus must be a non-empty string .got 3"),
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
