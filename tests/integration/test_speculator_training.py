"""Heads trained for real, on a model trained for real: their drafts stand where those of new heads do not."""

import json
from dataclasses import replace

import pytest
import torch

from penstock.checkpoint.hf import save_pretrained
from penstock.checkpoint.speculator import load_speculator
from penstock.core.errors import CorpusError, StateMismatch, UsageError
from penstock.core.rng import key_of, shuffled
from penstock.engine.assemble import build_engine
from penstock.engine.config import EngineConfig
from penstock.engine.request import Request
from penstock.models.decoder.config import DecoderConfig
from penstock.models.decoder.model import Decoder
from penstock.testing.corpora import write_corpus
from penstock.train.speculator.config import SpeculatorTraining
from penstock.train.speculator.run import measured, new_speculator, train_speculator
from penstock.train.speculator.writer import writer

VOCAB = 48
TRAINING = SpeculatorTraining(
    steps=60,
    sequence_length=32,
    batch_size=4,
    prompt_tokens=4,
    own_tokens=16,
    learning_rate=1e-2,
    holdout=0.2,
)


def next_token(token):
    return int(shuffled(VOCAB, key_of(0, "next"))[token])


def documents():
    """Texts in which every token says which comes next, but for a few that are anything."""
    for number in range(60):
        draws = torch.Generator().manual_seed(number)
        tokens = [number % VOCAB]
        while len(tokens) < 40:
            surprise = torch.rand(1, generator=draws) < 0.1
            anything = int(torch.randint(VOCAB, (1,), generator=draws))
            tokens.append(anything if surprise else next_token(tokens[-1]))
        yield tokens


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return str(write_corpus(tmp_path_factory.mktemp("corpus") / "text", list(documents()), vocab_size=VOCAB))


@pytest.fixture(scope="module")
def base():
    """A model that has learned the corpus."""
    torch.manual_seed(0)
    config = DecoderConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    model = Decoder(config)
    rows = torch.tensor(list(documents()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(60):
        batch = rows[torch.arange(step * 16, step * 16 + 16) % len(rows)]
        logits = model(batch[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval().requires_grad_(False)


def plain_writer(base, *, num_tokens=TRAINING.own_tokens):
    """Continue prompts a token at a time, over all tokens each time."""

    @torch.no_grad()
    def write(prompts, seeds):
        ids = torch.tensor(prompts)
        for index in range(num_tokens):
            logits = base(ids)[:, -1]
            if seeds is None:
                new = logits.argmax(-1)
            else:
                draws = torch.Generator().manual_seed(seeds[0] + index)
                new = torch.multinomial(logits.softmax(-1), 1, generator=draws)[:, 0]
            ids = torch.cat([ids, new[:, None]], 1)
        return ids[:, len(prompts[0]) :].tolist()

    return write


def test_trained_heads_guess_what_new_ones_do_not(base, corpus, tmp_path):
    write = plain_writer(base)
    before = measured(base, new_speculator(base, TRAINING), corpus, TRAINING, write=write)
    weights = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    seen = []
    after = train_speculator(
        base,
        corpus,
        tmp_path / "heads",
        TRAINING,
        write=write,
        on_step=lambda step, nats: seen.append((step, nats)),
    )
    assert max(before.on_text) < 0.3
    assert min(after.on_text) > 0.6  # a tenth of the tokens cannot be known
    assert min(after.decoding) > 0.8
    assert before.tokens_per_step < 1.5 < 3 < after.tokens_per_step <= 4
    assert [step for step, _ in seen] == list(range(1, 61))
    assert seen[-1][1][0] < seen[0][1][0] / 2
    assert all(torch.equal(tensor, weights[name]) for name, tensor in base.state_dict().items())
    stored = json.loads((tmp_path / "heads" / "tuning.json").read_text())
    assert stored["accepted"]["tokens_per_step"] == after.tokens_per_step
    again = measured(base, load_speculator(tmp_path / "heads"), corpus, TRAINING, write=write)
    assert again == after
    assert not (tmp_path / "heads.partial").exists()


def test_trained_heads_save_the_steps_that_were_measured(base, corpus, tmp_path):
    save_pretrained(base.state_dict(), base.config, tmp_path / "model")
    engine = built(tmp_path / "model", "off")
    write = writer(engine, num_tokens=TRAINING.own_tokens)
    accepted = train_speculator(base, corpus, tmp_path / "heads", TRAINING, write=write)
    requests = [Request(prompt=(first,), max_tokens=40) for first in range(0, VOCAB, 4)]
    expected, _ = answered(engine, requests)
    told, counts = answered(built(tmp_path / "model", str(tmp_path / "heads")), requests)
    assert told == expected
    # one at a time: a step for the prompt, whose token is the first of the answer, then steps with drafts
    per_step = (counts.sampled - len(requests)) / (counts.steps - len(requests))
    assert per_step > 3
    assert abs(per_step - accepted.tokens_per_step) < 0.5  # other prompts, and answers that end within a step


def built(folder, drafts):
    config = EngineConfig(
        device="cpu", cache_gib=0.001, max_sequences=1, drafts=drafts, num_drafts=3, adapt_drafts=False
    )
    return build_engine(folder, config)


def answered(engine, requests):
    told = {engine.add(request): [] for request in requests}
    while engine.has_work:
        for piece in engine.step():
            told[piece.request_id] += piece.token_ids
    return list(told.values()), engine.stats().counts


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(base, corpus, tmp_path):
    training = replace(TRAINING, steps=8)
    write = plain_writer(base)
    train_speculator(base, corpus, tmp_path / "whole", training, write=write)
    stops = iter([False] * 5 + [True])
    assert (
        train_speculator(
            base, corpus, tmp_path / "heads", training, write=write, stop_requested=lambda: next(stops)
        )
        is None
    )
    assert not (tmp_path / "heads").exists()
    with pytest.raises(StateMismatch, match=r"has batch_size 4 \(got 2\)"):
        train_speculator(base, corpus, tmp_path / "heads", replace(training, batch_size=2), write=write)
    steps = []
    train_speculator(
        base, corpus, tmp_path / "heads", training, write=write, on_step=lambda step, _: steps.append(step)
    )
    assert steps == [6, 7, 8]
    whole, parts = (load_speculator(tmp_path / name).state_dict() for name in ("whole", "heads"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_what_does_not_fit_the_model_is_refused(base, corpus, tmp_path):
    write = plain_writer(base)
    with pytest.raises(UsageError, match=r"sequence_length: longer than the model's context of 64 tokens"):
        train_speculator(base, corpus, tmp_path / "x", replace(TRAINING, sequence_length=65), write=write)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note").touch()
    with pytest.raises(UsageError, match="already exists"):
        train_speculator(base, corpus, tmp_path / "full", TRAINING, write=write)
    other = write_corpus(tmp_path / "other", [[VOCAB, 1, 2] * 20] * 8)
    with pytest.raises(CorpusError, match="beyond the model's vocabulary of 48"):
        train_speculator(base, str(other), tmp_path / "x", replace(TRAINING, holdout=0), write=write)
