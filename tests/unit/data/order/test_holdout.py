"""Held-out documents: the same ones whatever else a run changes (that the parts are disjoint: properties)."""

import re
from pathlib import Path

import numpy as np
import pytest

from penstock.core.errors import ConfigError
from penstock.data import Loader
from penstock.data.corpus.corpus import Corpus
from penstock.data.corpus.open import open_corpus
from penstock.data.order.holdout import part_of
from penstock.testing.corpora import numbered_corpus

LENGTHS = [1 + (37 * i) % 60 for i in range(600)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return open_corpus(numbered_corpus(tmp_path_factory.mktemp("c"), LENGTHS))


def heldout_tokens(corpus: Corpus, **options: object) -> set[int]:
    settings = {"sequence_length": 16, "seed": 0, "packing": "best_fit", "holdout": 0.1, **options}
    loader = Loader(
        {"c": Path(corpus.location)},
        split="heldout",
        global_batch_size=1,
        num_workers=0,
        deliver="numpy",
        **settings,
    )  # type: ignore[arg-type]
    rows = loader.gather(np.arange(loader.samples_per_epoch["c"]))["input_ids"]
    return set(rows.ravel().tolist()) - {0}


@pytest.mark.parametrize("options", [{"seed": 1}, {"sequence_length": 50}, {"packing": "concat"}], ids=str)
def test_runs_that_differ_in_other_settings_hold_out_the_same_documents(
    corpus: Corpus, options: dict[str, object]
) -> None:
    assert heldout_tokens(corpus, **options) == heldout_tokens(corpus)


def test_a_larger_share_holds_out_more_of_the_same(corpus: Corpus) -> None:
    few, more = heldout_tokens(corpus, holdout=0.05), heldout_tokens(corpus, holdout=0.3)
    assert few < more
    assert len(few) / sum(LENGTHS) == pytest.approx(0.05, abs=0.02)
    assert len(more) / sum(LENGTHS) == pytest.approx(0.3, abs=0.02)


def test_the_name_keys_the_choice(corpus: Corpus) -> None:
    def parts(name: str) -> list[tuple[int, int]]:
        space = part_of(corpus, name=name, split="heldout", holdout=0.1)
        found = space.fragments([(0, space.num_tokens)])
        return list(zip(found.starts.tolist(), found.lengths.tolist(), strict=True))

    assert parts("web") == parts("web")
    assert parts("web") != parts("code")


def test_without_a_holdout_the_training_part_is_the_corpus(corpus: Corpus) -> None:
    assert part_of(corpus, name="c", split="train", holdout=0.0).num_tokens == corpus.num_tokens


@pytest.mark.parametrize("share", [-0.1, 0.51, 1.0, float("nan")])
def test_a_share_out_of_range_is_refused(corpus: Corpus, share: float) -> None:
    with pytest.raises(ConfigError, match=rf"holdout must be a share between 0 and 0\.5 \(got {share}\)"):
        part_of(corpus, name="c", split="train", holdout=share)


def test_too_small_a_share_is_refused_with_one_that_holds_something_out(tmp_path: Path) -> None:
    small = open_corpus(numbered_corpus(tmp_path, [20] * 60))
    message = r"A holdout of 0\.02 leaves .* empty\. The corpus has 60 documents of 1,\d+ tokens"
    with pytest.raises(ConfigError, match=message) as refused:
        part_of(small, name="c", split="heldout", holdout=0.02)
    found = re.search(r"to (0\.\d\d) or more", str(refused.value))
    assert found
    assert part_of(small, name="c", split="heldout", holdout=float(found[1])).num_tokens
    with pytest.raises(ConfigError):
        part_of(small, name="c", split="heldout", holdout=float(found[1]) - 0.01)


def test_a_corpus_too_small_to_hold_any_out_is_refused_with_its_size(tmp_path: Path) -> None:
    small = open_corpus(numbered_corpus(tmp_path, [100, 100]))
    with pytest.raises(ConfigError, match=r"has 2 documents of \d+ tokens, too few to hold any out"):
        part_of(small, name="c", split="heldout", holdout=0.1)


def test_a_split_that_does_not_exist_is_refused(corpus: Corpus) -> None:
    with pytest.raises(ConfigError, match=r"no such split \(got 'heldot'\)\. Did you mean 'heldout'\?"):
        part_of(corpus, name="c", split="heldot", holdout=0.1)  # type: ignore[arg-type]
