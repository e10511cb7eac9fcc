"""Distillation: a teacher's tokens are those of transformers, and a student learns them, on any layout."""

import dataclasses

import numpy as np
import pytest
import torch
from tests.peft_loop import folder_of
from tests.preferences import VOCAB, recipe_of
from transformers import AutoModelForCausalLM, LlamaConfig

from penstock.cli.main import main
from penstock.core.errors import ConfigError
from penstock.data.corpus.open import open_corpus
from penstock.testing.corpora import write_corpus
from penstock.testing.ranks import on_ranks
from penstock.testing.training import records_of
from penstock.train.setup import open_state

SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
K, TEMPERATURE, LENGTH = 5, 1.5, 24


def documents():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, VOCAB, (n % 40 + 1,), generator=generator).tolist() for n in range(120)]


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """A corpus, a teacher, a student, and the columns that `penstock data teach` wrote."""
    where = tmp_path_factory.mktemp("taught")
    corpus = write_corpus(where / "c", documents(), vocab_size=VOCAB)
    teacher = folder_of(where / "teacher", LlamaConfig(**SMALL))
    student = folder_of(where / "student", LlamaConfig(**SMALL | {"hidden_size": 16}))
    words = ("--model", teacher, "--out", where / "columns", "--top-k", K, "--temperature", TEMPERATURE)
    command = ["data", "teach", corpus, *words, "--sequence-length", LENGTH]
    assert main([str(word) for word in command]) == 0
    return corpus, teacher, student, where / "columns"


def test_the_teachers_tokens_and_log_probabilities_are_those_of_transformers(taught):
    """1e-4: float32 products in another order. Documents longer than a row are cut."""
    path, teacher, _, columns = taught
    corpus = open_corpus(path, columns=columns)
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32).eval()
    starts = np.cumsum([0, *map(len, documents())])
    for start, document in zip(starts[:40].tolist(), documents()[:40], strict=True):
        for first in range(0, len(document), LENGTH):
            piece = document[first : first + LENGTH]
            labelled = document[first + 1 : first + LENGTH + 1]
            with torch.no_grad():
                logits = model(torch.tensor([piece])).logits[0] / TEMPERATURE
            expected = logits.log_softmax(1)[: len(labelled)]
            at = start + first + 1
            found, ids = (
                torch.from_numpy(corpus.columns[name].values(0, at, at + len(labelled)).copy())
                for name in ("teacher_logprobs", "teacher_ids")
            )
            torch.testing.assert_close(found, expected.topk(K, 1).values, rtol=0, atol=1e-4)
            torch.testing.assert_close(expected.gather(1, ids.long()), found, rtol=0, atol=1e-4)


def recipe(taught, run, **options):
    corpus, _, student, columns = taught
    made = recipe_of(corpus, student, run, {"loss": "distillation", "temperature": TEMPERATURE}, **options)
    of = dataclasses.replace(made.data.corpora["c"], columns=str(columns))
    data = dataclasses.replace(made.data, corpora={"c": of}, packing="best_fit", overlong=None)
    return dataclasses.replace(made, data=data)


def trained(wanted, world):
    torch.set_num_threads(1)
    found = records_of(open_state(wanted, world), wanted, world)
    return [record["loss"] for record in found if "loss" in record]


@pytest.mark.parametrize(
    ("ranks", "options"), [(2, {"rows": 3}), (4, {"tensor": 2, "context": 2, "rows": 4})], ids=str
)
def test_a_student_learns_the_same_on_any_layout(taught, tmp_path, ranks, options):
    (alone,) = on_ranks(lambda world: trained(recipe(taught, tmp_path / "one", steps=6), world), ranks=1)
    assert alone[-1] < 0.9 * alone[0]
    many = on_ranks(lambda w: trained(recipe(taught, tmp_path / "many", steps=6, **options), w), ranks=ranks)
    for losses in many:
        assert losses == pytest.approx(alone, rel=1e-4)


def test_a_teacher_at_another_temperature_is_refused(taught, tmp_path):
    wanted = recipe(taught, tmp_path / "run")
    wanted = dataclasses.replace(wanted, tune=dataclasses.replace(wanted.tune, temperature=1.0))
    with pytest.raises(AssertionError, match=r"written at 1.5 .*--temperature 1") as raised:
        on_ranks(lambda world: trained(wanted, world), ranks=1)
    assert ConfigError.__name__ in str(raised.value)


def test_a_teacher_that_read_shorter_rows_is_refused_where_a_document_is_longer(taught, tmp_path):
    corpus, teacher, student, _ = taught
    columns = tmp_path / "columns"
    words = ("--model", teacher, "--out", columns, "--top-k", K, "--temperature", TEMPERATURE)
    assert main([str(w) for w in ("data", "teach", corpus, *words, "--sequence-length", LENGTH - 4)]) == 0
    wanted = recipe((corpus, teacher, student, columns), tmp_path / "run")
    with pytest.raises(AssertionError, match=r"read rows of 20 tokens, .* of 24: .*--sequence-length 24"):
        on_ranks(lambda world: trained(wanted, world), ranks=1)


def test_a_teacher_whose_matrix_is_padded_further_than_the_students_is_taken(taught, tmp_path):
    """Its padding is never among the most likely tokens, though it is likely."""
    corpus, _, student, _ = taught
    teacher = folder_of(tmp_path / "teacher", LlamaConfig(**SMALL | {"vocab_size": VOCAB + 16}))
    words = ("--model", teacher, "--out", tmp_path / "columns", "--top-k", K, "--temperature", TEMPERATURE)
    command = ["data", "teach", corpus, *words, "--sequence-length", LENGTH]
    assert main([str(word) for word in command]) == 0
    ids = open_corpus(corpus, columns=tmp_path / "columns").columns["teacher_ids"].values(0, 0, 400)
    assert ids.max() < VOCAB
    wanted = recipe((corpus, teacher, student, tmp_path / "columns"), tmp_path / "run", steps=6)
    (losses,) = on_ranks(lambda world: trained(wanted, world), ranks=1)
    assert losses[-1] < losses[0]


def test_a_corpus_without_a_teacher_is_refused_with_the_command(taught, tmp_path):
    corpus, _, student, _ = taught
    wanted = recipe_of(corpus, student, tmp_path / "run", {"loss": "distillation"}, holdout=0)
    with pytest.raises(AssertionError, match=r"penstock data teach CORPUS --model TEACHER --out DIR"):
        on_ranks(lambda world: trained(wanted, world), ranks=1)


def test_one_token_of_the_teacher_is_enough(taught, tmp_path):
    """Its column has no axis of k."""
    corpus, teacher, student, _ = taught
    words = ("--model", teacher, "--out", tmp_path / "one", "--top-k", 1, "--temperature", TEMPERATURE)
    command = ["data", "teach", corpus, *words, "--sequence-length", LENGTH]
    assert main([str(word) for word in command]) == 0
    wanted = recipe((corpus, teacher, student, tmp_path / "one"), tmp_path / "run", steps=6)
    (losses,) = on_ranks(lambda world: trained(wanted, world), ranks=1)
    assert losses[-1] < losses[0]
