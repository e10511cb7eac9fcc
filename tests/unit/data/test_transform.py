"""Transforms: what they are given, what they may return, whom an error blames."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import ConfigError, TransformError
from penstock.data import Loader
from penstock.data.transform import NEEDED_FIELDS, Generators, Sample, apply
from penstock.data.transforms import DropDocuments, FillInTheMiddle
from penstock.testing.corpora import numbered_corpus

FIELDS = ("input_ids", "labels", "cu_seqlens", "position_ids", "document_ids")
PRE, MID, SUF, EOS = 9001, 9002, 9003, 9004


@pytest.fixture
def loader(tmp_path: Path) -> Loader:
    corpus = numbered_corpus(tmp_path / "web", [1 + (7 * i) % 43 for i in range(60)])
    return Loader(
        {"web": corpus},
        sequence_length=32,
        global_batch_size=4,
        fields=FIELDS,
        deliver="numpy",
        num_workers=0,
    )


def batch_of(loader: Loader, samples: list[int]) -> dict[str, Any]:
    return {name: array.copy() for name, array in loader.gather(np.array(samples)).items()}


def rng_of(seed: int, sample_id: int) -> np.random.Generator:
    return Generators(seed).of(sample_id)


def noise(sample: Sample, rng: np.random.Generator) -> Sample:
    return replace(sample, input_ids=rng.integers(0, 1000, len(sample.input_ids)))


def sample_of(documents: list[list[int]]) -> Sample:
    tokens = np.concatenate(documents)
    labels = np.concatenate([[*document[1:], -100] for document in documents])
    return Sample(7, tokens, labels, np.cumsum([len(document) for document in documents]))


# apply


def test_what_does_nothing_changes_no_field(loader: Loader) -> None:
    plain = batch_of(loader, [3, 1, 20, 21])
    found = apply(batch_of(loader, [3, 1, 20, 21]), lambda s, _: s, seed=0, fields=FIELDS)
    assert list(found) == ["sample_ids", *FIELDS]
    for name, array in plain.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
        assert found[name].dtype == array.dtype


def test_a_transform_sees_each_row_with_its_documents(loader: Loader) -> None:
    seen: list[Sample] = []

    def look(sample: Sample, _rng: np.random.Generator) -> Sample:
        seen.append(sample)
        return sample

    batch = batch_of(loader, [5, 2])
    apply(batch, look, seed=0, fields=())
    assert [sample.sample_id for sample in seen] == [5, 2]
    for row, sample in enumerate(seen):
        np.testing.assert_array_equal(sample.input_ids, batch["input_ids"][row])
        np.testing.assert_array_equal(sample.labels, batch["labels"][row])
        spans = sample.documents()
        assert [span.stop for span in spans] == sample.document_ends.tolist()
        assert [batch["document_ids"][row, span].tolist() for span in spans] == [
            [i] * (span.stop - span.start) for i, span in enumerate(spans)
        ]


def test_the_draws_of_a_sample_depend_on_its_id_and_the_seed_alone(loader: Loader) -> None:
    together = apply(batch_of(loader, [0, 1, 2, 3]), noise, seed=5, fields=("input_ids",))["input_ids"]
    for place, sample in enumerate([0, 1, 2, 3]):
        alone = apply(batch_of(loader, [sample]), noise, seed=5, fields=("input_ids",))["input_ids"]
        np.testing.assert_array_equal(alone[0], together[place])
    other = apply(batch_of(loader, [0, 1, 2, 3]), noise, seed=6, fields=("input_ids",))["input_ids"]
    assert len(np.unique(np.concatenate((together, other)), axis=0)) == 8


def test_the_raw_stream_of_a_generator_is_fixed() -> None:
    assert rng_of(0, 1).bit_generator.random_raw(2).tolist() == [2245750765385838625, 6377076658737174972]


def test_a_generator_does_not_depend_on_what_was_drawn_before() -> None:
    generators = Generators(0)
    used = generators.of(4)
    used.random(3)
    used.integers(0, 9, size=1, dtype=np.int32)  # leaves half a word in the buffer
    again = generators.of(1)
    assert again.bit_generator.random_raw(2).tolist() == [2245750765385838625, 6377076658737174972]
    assert generators.of(2).integers(0, 2**31, 3, dtype=np.int32).tolist() == (
        rng_of(0, 2).integers(0, 2**31, 3, dtype=np.int32).tolist()
    )


def test_document_fields_follow_the_documents_that_a_transform_returns(loader: Loader) -> None:
    def one_document(sample: Sample, _rng: np.random.Generator) -> Sample:
        return replace(sample, document_ends=np.array([len(sample.input_ids)]))

    found = apply(batch_of(loader, [0, 1]), one_document, seed=0, fields=FIELDS)
    assert found["cu_seqlens"].tolist() == [0, 32, 64]
    assert found["position_ids"].tolist() == [list(range(32))] * 2
    assert found["document_ids"].tolist() == [[0] * 32] * 2


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"input_ids": np.arange(31)}, "returned 31 input_ids, the row has 32"),
        ({"labels": np.arange(40)}, "returned 40 labels, the row has 32"),
        ({"labels": [1] * 32}, "returned labels that are not a 1-d array of integers"),
        ({"input_ids": np.ones(32)}, "returned input_ids that are not a 1-d array of integers"),
        ({"input_ids": np.full(32, -1)}, "returned the token id -1"),
        ({"labels": np.full(32, -7)}, "returned the label -7"),
        ({"document_ends": np.array([4, 31])}, "returned document_ends that do not ascend to 32: [4, 31]"),
        ({"document_ends": np.array([8, 4, 32])}, "do not ascend to 32: [8, 4, 32]"),
        ({"document_ends": np.array([], dtype=int)}, "do not ascend to 32: []"),
        ({"sample_id": 4}, "returned the id 4"),
    ],
)
def test_a_sample_that_is_none_is_refused_by_name(
    loader: Loader, change: dict[str, Any], problem: str
) -> None:
    def bend(sample: Sample, _rng: np.random.Generator) -> Sample:
        return replace(sample, **change)

    with pytest.raises(TransformError) as caught:
        apply(batch_of(loader, [9]), bend, seed=0, fields=())
    assert "bend' of sample 9 returned " in str(caught.value)
    assert problem in str(caught.value)
    assert "Return a Sample of the same id and length" in str(caught.value)


def test_something_else_than_a_sample_is_refused(loader: Loader) -> None:
    with pytest.raises(TransformError, match="returned a NoneType, not a Sample"):
        apply(batch_of(loader, [9]), lambda *_: None, seed=0, fields=())  # type: ignore[arg-type,return-value]


def test_an_error_inside_a_transform_names_it_the_sample_and_the_cause(loader: Loader) -> None:
    def divides(sample: Sample, _rng: np.random.Generator) -> Sample:
        return replace(sample, labels=sample.input_ids // (2 - sample.sample_id))

    with (
        np.errstate(all="raise"),
        pytest.raises(TransformError, match=r"divides' of sample 2 failed with FloatingPointError") as caught,
    ):
        apply(batch_of(loader, [1, 2]), divides, seed=0, fields=())
    assert isinstance(caught.value.__cause__, FloatingPointError)


def test_writing_into_the_given_sample_is_refused(loader: Loader) -> None:
    def scribbles(sample: Sample, _rng: np.random.Generator) -> Sample:
        sample.labels[0] = -100
        return sample

    with pytest.raises(TransformError, match="read-only"):
        apply(batch_of(loader, [1]), scribbles, seed=0, fields=())


def test_fields_that_apply_needs_are_those_it_names(loader: Loader) -> None:
    batch = batch_of(loader, [1, 2])
    least = {name: batch[name] for name in ("sample_ids", *NEEDED_FIELDS)}
    found = apply(least, lambda s, _: s, seed=0, fields=FIELDS)
    np.testing.assert_array_equal(found["position_ids"], batch["position_ids"])
    np.testing.assert_array_equal(found["document_ids"], batch["document_ids"])


# Fill in the middle


def fim(**options: Any) -> FillInTheMiddle:
    return FillInTheMiddle(prefix_id=PRE, middle_id=MID, suffix_id=SUF, **{"rate": 1.0, **options})


def parts(document: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Prefix, middle and suffix of a PSM document, without sentinels."""
    suf, mid = document.index(SUF), document.index(MID)
    return document[1:suf], document[mid + 1 :], document[suf + 1 : mid]


def test_psm_is_prefix_suffix_middle_of_the_document_less_its_last_three_tokens() -> None:
    sample = sample_of([list(range(1, 21)), list(range(101, 131))])
    made = fim(spm_rate=0.0)(sample, rng_of(0, 7))
    for span, tokens in zip(sample.documents(), (range(1, 18), range(101, 128)), strict=True):
        document = made.input_ids[span].tolist()
        assert document[0] == PRE
        prefix, middle, suffix = parts(document)
        assert prefix + middle + suffix == list(tokens)


def test_spm_is_suffix_then_prefix_and_middle_in_one() -> None:
    sample = sample_of([list(range(1, 21))])
    document = fim(spm_rate=1.0)(sample, rng_of(0, 7)).input_ids.tolist()
    assert document[:2] == [PRE, SUF]
    mid = document.index(MID)
    assert document[mid + 1 :] + document[2:mid] == list(range(1, 18))


def test_the_end_token_stays_last_and_what_stood_before_it_is_dropped() -> None:
    sample = sample_of([[*range(1, 20), EOS]])
    for sample_id in range(20):
        document = fim(spm_rate=0.5, eos_id=EOS)(sample, rng_of(0, sample_id)).input_ids.tolist()
        assert document[-1] == EOS
        assert sorted(document) == [*range(1, 17), PRE, MID, SUF, EOS]


def test_labels_are_the_next_token_of_the_new_order_inside_each_document() -> None:
    sample = sample_of([list(range(1, 21)), list(range(101, 131))])
    sample.labels[19] = 21  # the first goes on in another row: what follows is no longer its successor
    made = fim()(sample, rng_of(0, 7))
    for span in sample.documents():
        assert made.labels[span].tolist() == [*made.input_ids[span].tolist()[1:], -100]


def test_documents_not_trained_on_or_too_short_stay_as_they_are() -> None:
    sample = sample_of([[1, 2, 3], [4], list(range(10, 30)), list(range(50, 60))])
    sample.labels[4:24] = -100
    made = fim()(sample, rng_of(0, 7))
    np.testing.assert_array_equal(made.input_ids[:24], sample.input_ids[:24])
    np.testing.assert_array_equal(made.labels[:24], sample.labels[:24])
    assert made.input_ids[24] == PRE


def test_about_the_given_share_of_documents_is_rearranged() -> None:
    sample = sample_of([list(range(1, 11)) for _ in range(400)])
    made = fim(rate=0.7, spm_rate=0.25)(sample, rng_of(0, 7)).input_ids.reshape(400, 10)
    assert 0.6 < (made[:, 0] == PRE).mean() < 0.8
    rearranged = made[made[:, 0] == PRE]
    psm_too = sum(row[1] == SUF and SUF not in row[2:] for row in rearranged.tolist())
    assert psm_too < len(rearranged) * 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 1.5}, r"FillInTheMiddle.rate must be in \[0, 1\] \(got 1.5\)"),
        ({"spm_rate": -1}, r"FillInTheMiddle.spm_rate must be in"),
        ({"eos_id": PRE}, "needs distinct token ids"),
    ],
)
def test_settings_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fim(**options)


# Dropped documents


def test_rejected_documents_keep_their_tokens_and_lose_their_labels() -> None:
    sample = sample_of([[1, 2, 3], [9, 8], [4, 5, 6, 7]])
    made = DropDocuments(lambda tokens: bool(tokens[0] == 9))(sample, rng_of(0, 7))
    assert made.input_ids.tolist() == sample.input_ids.tolist()
    assert made.labels.tolist() == [2, 3, -100, -100, -100, 5, 6, 7, -100]
    assert DropDocuments(lambda _: False)(sample, rng_of(0, 7)) is sample


def test_a_predicate_that_is_no_function_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be a function of a document's tokens"):
        DropDocuments("bad words")  # type: ignore[arg-type]
