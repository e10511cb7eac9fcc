"""Drafts of n-grams and of heads for a real network: the same tokens."""

import pytest
from tests.tiny_models import SHAPE, save_tiny_model

from penstock.checkpoint.speculator import save_speculator
from penstock.core.errors import ConfigError, ModelError
from penstock.engine.assemble import build_engine
from penstock.engine.config import EngineConfig
from penstock.engine.request import Request
from penstock.engine.sampling_params import GREEDY, Sampling
from penstock.engine.speculation.open import HeadsDrafter
from penstock.models.speculator import Speculator, SpeculatorConfig

REQUESTS = [
    Request(prompt=(3, 5, 7, 3, 5), max_tokens=40),
    Request(prompt=tuple(range(60)), max_tokens=30, sampling=GREEDY),
    Request(prompt=(9,), max_tokens=25, sampling=Sampling(temperature=0.5, seed=3), num_answers=2),
    Request(prompt=(3, 5, 7, 3, 5, 7, 3, 5), max_tokens=30, sampling=Sampling(temperature=0.2, seed=1)),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model, and heads that know nothing."""
    root = tmp_path_factory.mktemp("drafts")
    save_tiny_model("mistral", root / "model")
    sizes = {"vocab_size": SHAPE["vocab_size"], "emb_dim": SHAPE["hidden_size"]}
    heads = Speculator(SpeculatorConfig(**sizes, inner_dim=16, n_predict=3))
    heads.initialise(seed=0)
    save_speculator(heads, root / "heads")
    other = Speculator(SpeculatorConfig(**{**sizes, "emb_dim": 48}, inner_dim=16, n_predict=3))
    save_speculator(other, root / "other-heads")
    return root


def answers(folder, drafts, *, requests=REQUESTS, **options):
    """The tokens of every answer, and what the engine counted."""
    config = EngineConfig(device="cpu", max_sequences=4, cache_gib=0.001, drafts=drafts, **options)
    engine = build_engine(folder / "model", config)
    told = {}
    ids = [engine.add(request) for request in requests]
    while engine.has_work:
        for piece in engine.step():
            told.setdefault((ids.index(piece.request_id), piece.answer), []).extend(piece.token_ids)
        engine.scheduler.check()
    counts = engine.stats().counts
    engine.close()
    return told, counts


@pytest.mark.parametrize("drafts", ["ngram", "heads"])
def test_answers_are_those_without_drafts(folders, drafts):
    expected, plain = answers(folders, "off")
    named = drafts if drafts == "ngram" else str(folders / drafts)
    told, counts = answers(folders, named, block_size=4, tokens_per_step=48, adapt_drafts=False)
    assert told == expected
    assert counts.drafts > 0
    assert plain.drafts == 0


def test_what_is_guessed_for_a_model_on_two_ranks_is_what_is_guessed_on_one(folders, monkeypatch):
    guesses, propose = [], HeadsDrafter.propose

    def heard(self, done, wanted):
        guesses.append(propose(self, done, wanted))
        return guesses[-1]

    monkeypatch.setattr(HeadsDrafter, "propose", heard)
    found = {}
    for ranks in (1, 2):
        options = {"tensor_parallel": ranks, "adapt_drafts": False, "requests": REQUESTS[:2]}
        told, counts = answers(folders, str(folders / "heads"), **options)
        found[ranks] = (told, counts.drafts, counts.drafts_accepted, guesses.copy())
        guesses.clear()
    assert found[1] == found[2]
    told, num_drafts, _, _ = found[2]
    assert told == answers(folders, "off", requests=REQUESTS[:2])[0]
    assert num_drafts > 0


def test_a_folder_that_does_not_fit_is_refused(folders, tmp_path):
    for drafts, error, words in (
        (str(tmp_path / "absent"), ConfigError, "off, ngram, or the folder"),
        (str(folders / "other-heads"), ModelError, r"needs emb_dim 32 \(got 48\)"),
        (str(folders / "model"), ConfigError, "off, ngram, or the folder of a speculator"),
        (str(tmp_path), ConfigError, "off, ngram, or the folder of a speculator"),
    ):
        with pytest.raises(error, match=words):
            answers(folders, drafts)
