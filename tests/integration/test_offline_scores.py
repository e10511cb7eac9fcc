"""Scores of a model on a corpus against transformers on the same rows."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, Qwen3Config

from penstock.core.errors import CorpusError, UsageError
from penstock.data.types import IGNORED_LABEL
from penstock.evaluation.options import TextEvalOptions
from penstock.testing.corpora import write_corpus
from penstock.text.tokenizer import Tokenizer, train_tokenizer
from penstock.train.inspect.offline_eval import (
    is_of_another_tokenizer,
    open_for_scoring,
    rows_of,
    scores_of,
)

TEXT = "the penstock feeds the turbine, for which it was made; " * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Hugging Face folder with a tokenizer."""
    path = tmp_path_factory.mktemp("model")
    train_tokenizer([TEXT] * 3, vocab_size=290).save(path / "tokenizer.json")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def corpus(folder, tmp_path_factory):
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    documents = [[*tokenizer.encode(TEXT[start:]), tokenizer.eos_id] for start in range(0, 120, 5)]
    return write_corpus(tmp_path_factory.mktemp("corpus"), documents, vocab_size=300)


@torch.no_grad()
def by_transformers(folder, heldout):
    """Return nats, labels and bytes, a document's piece at a time, as transformers alone sees it."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    nats, labels, size = 0.0, 0, 0
    for row in range(heldout.rows):
        batch = heldout.loader.gather(torch.tensor([row]).numpy())
        for start, stop in batch["cu_seqlens"].unfold(0, 2, 1).tolist():
            ids = batch["input_ids"][:, start:stop]
            inside = batch["labels"][0, start : stop - 1]
            is_label = inside != IGNORED_LABEL  # not where a row is padded
            assert torch.equal(inside[is_label], ids[0, 1:][is_label])
            logits = model(ids).logits[0]
            wanted = batch["labels"][0, start:stop]  # the last one is the next row's first token, or nothing
            nats += cross_entropy(logits, wanted, ignore_index=IGNORED_LABEL, reduction="sum").item()
            predicted = wanted[wanted != IGNORED_LABEL].tolist()
            labels += len(predicted)
            size += sum(len(tokenizer.decode([token]).encode()) for token in predicted)
    return nats, labels, size


def test_loss_and_bytes_are_those_of_transformers_on_the_same_rows(folder, corpus):
    """1e-5 nats a token, the bound of the logits."""
    opened = open_for_scoring(folder, compute="float32")
    heldout = rows_of("c", str(corpus), TextEvalOptions(sequence_length=48, rows=5), context=64)
    done = []
    scores = scores_of(opened, heldout, on_rows=done.append)
    nats, labels, size = by_transformers(folder, heldout)
    assert labels > 150
    assert done[-1] == heldout.rows
    assert (scores["c"].tokens, scores["c"].text_bytes) == (labels, size)
    assert scores["c"].loss == pytest.approx(nats / labels, abs=1e-5)
    assert scores["c"].loss > 1


def test_the_length_of_a_pass_does_not_move_a_score(folder, corpus, monkeypatch):
    opened = open_for_scoring(folder, compute="float32")
    heldout = rows_of("c", str(corpus), TextEvalOptions(sequence_length=16, rows=23), context=64)
    whole = scores_of(opened, heldout, on_rows=lambda _n: None)["c"]
    monkeypatch.setattr("penstock.train.inspect.offline_eval._PASS_TOKENS", 5 * 16)
    parts = scores_of(opened, heldout, on_rows=lambda _n: None)["c"]
    assert (whole.tokens, whole.text_bytes) == (parts.tokens, parts.text_bytes)
    assert whole.nats == pytest.approx(parts.nats, rel=1e-6)


def test_a_model_is_left_in_the_mode_it_was_in(folder, corpus):
    opened = open_for_scoring(folder, compute="float32")
    opened.model.train()
    heldout = rows_of("c", str(corpus), TextEvalOptions(rows=1), context=64)
    scores_of(opened, heldout, on_rows=lambda _n: None)
    assert opened.model.training


def test_tokens_beyond_the_vocabulary_are_refused(folder, tmp_path):
    opened = open_for_scoring(folder, compute="float32")
    wide = write_corpus(tmp_path / "wide", [[1, 2, 300]] * 50, vocab_size=400)
    message = r"token id 300, beyond the model's vocabulary of 300, in document \d+ of corpus 'w' \(shard-0"
    with pytest.raises(CorpusError, match=message):
        scores_of(opened, rows_of("w", str(wide), TextEvalOptions(), context=64), on_rows=lambda _n: None)


def test_rows_longer_than_the_context_are_refused(corpus):
    with pytest.raises(UsageError, match="Rows of 65 tokens are longer than the model's context of 64"):
        rows_of("c", str(corpus), TextEvalOptions(sequence_length=65), context=64)


def test_a_corpus_that_does_not_say_its_tokenizer_is_taken_on_trust(folder, corpus):
    opened = open_for_scoring(folder, compute="float32")
    assert not is_of_another_tokenizer(opened, rows_of("c", str(corpus), TextEvalOptions(), context=64))
