"""What a run writes down: counts of whole steps, checksums that find one changed token."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from penstock.data import Loader
from penstock.data.types import checksums
from penstock.obs.meter import Rates
from penstock.obs.sinks.jsonl import JsonLines
from penstock.testing.corpora import write_corpus
from penstock.train.data_setup import train_loader
from penstock.train.label_mean import LabelMean
from penstock.train.record import MixtureLog, sample_log, step_record
from penstock.train.resolve.load import build_recipe
from penstock.train.state import TrainState
from penstock.train.step import StepResult

RATES = Rates(step_s=0.5, tokens_per_s=192.0, mfu=0.125, hfu=0.15, shares={"data_wait": 0.25, "forward": 0.5})


@pytest.fixture
def recipe(tmp_path: Path):  # type: ignore[no-untyped-def]
    corpora = {name: write_corpus(tmp_path / name, [[1] * 6] * 200, vocab_size=50) for name in ("a", "b")}
    model = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    data = {
        "corpora": {
            "a": {"path": str(corpora["a"]), "weight": 3},
            "b": {"path": str(corpora["b"]), "weight": 1},
        },
        "sequence_length": 16,
        "global_batch_size": 8,
        "num_workers": 0,
    }
    return build_recipe({"run": {"dir": "x", "steps": 9}, "model": model, "data": data})


def state_after(loader: Loader, steps: int) -> TrainState:
    batches = iter(loader)
    for _ in range(steps):
        next(batches)
    batches.close()
    model = nn.Linear(1, 1)
    return TrainState(
        model,
        torch.optim.AdamW(model.parameters()),
        loader,
        mesh=None,
        heldout=None,
        ethernet=None,
        objective=LabelMean(),
    )


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_record_counts_the_tokens_of_all_ranks(recipe, world_size: int) -> None:  # type: ignore[no-untyped-def]
    state = state_after(train_loader(recipe, rank=0, world_size=world_size), 3)
    result = StepResult(loss=2.5, grad_norm=0.75, stop=False, count=90.0)
    record = step_record(state, result, RATES, learning_rate=0.1)
    assert record.pop("memory_bytes") > 2**20
    assert record == {
        "step": 3,
        "tokens": 3 * 8 * 16,
        "loss": 2.5,
        "labels": 90,
        "grad_norm": 0.75,
        "learning_rate": 0.1,
        "step_s": 0.5,
        "tokens_per_s": 192.0,
        "data_wait_share": 0.25,
        "forward_share": 0.5,
        "mfu": 0.125,
        "hfu": 0.15,
    }
    json.dumps(record)


def test_the_mixture_log_says_what_was_asked_and_what_was_served_since(recipe) -> None:  # type: ignore[no-untyped-def]
    loader = train_loader(recipe, rank=0, world_size=1)
    log, batches = MixtureLog(loader), iter(loader)
    events = []
    for step in range(6):
        if step == 4:
            loader.set_weights({"a": 1, "b": 1}, reason="why not")
        log.begin_step()
        next(batches)
        record = log.record()
        events += log.events()
        if step == 3:
            assert record["corpus_tokens"] == {"a": 24 * 16, "b": 8 * 16}
            assert record["corpus_epochs"] == {"a": 0.32, "b": round(128 / 1200, 6)}
            assert record["corpus_weights"] == record["corpus_shares"] == {"a": 0.75, "b": 0.25}
    batches.close()
    assert record["corpus_tokens"] == {"a": 32 * 16, "b": 16 * 16}
    assert record["corpus_weights"] == record["corpus_shares"] == {"a": 0.5, "b": 0.5}
    (event,) = events
    assert (event["step"], event["weights"], event["reason"]) == (5, {"a": 0.5, "b": 0.5}, "why not")
    assert event["tokens"] == 4 * 8 * 16
    again = MixtureLog(loader)
    again.begin_step()
    assert again.events() == [], "the mixture goes on, it does not begin again"
    json.dumps(record)


def test_each_batch_is_logged_as_one_line_of_ids_and_checksums(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "samples" / "rank-00000.jsonl")
    log = sample_log(sink)
    batch = {"sample_ids": torch.tensor([4, 9]), "input_ids": torch.tensor([[1, 2], [3, 4]])}
    log(batch, 7)
    log(batch, 8)
    sink.close()
    lines = (tmp_path / "samples" / "rank-00000.jsonl").read_text().splitlines()
    sums = checksums(batch["input_ids"].numpy())
    assert [json.loads(line) for line in lines] == [
        {"step": step, "sample_ids": [4, 9], "crc32": sums} for step in (7, 8)
    ]


def test_without_a_sink_nothing_is_read_from_the_batch() -> None:
    sample_log(None)({}, 1)


def test_a_change_of_length_is_an_event_with_what_it_cut_anew(recipe) -> None:  # type: ignore[no-untyped-def]
    loader = train_loader(recipe, rank=0, world_size=1)
    log, batches, events = MixtureLog(loader), iter(loader), []
    for step in range(4):
        if step == 2:
            loader.set_sequence_length(11)
        log.begin_step()
        next(batches)
        events.append(log.events())
    batches.close()
    assert [len(found) for found in events] == [0, 0, 1, 0]
    event = events[2][0]
    assert (event["event"], event["step"], event["tokens"]) == ("sequence_length", 3, 2 * 8 * 16)
    assert (event["before"], event["after"]) == (16, 11)
    assert event["recut"]["a"] == {
        "rows": 92,
        "tokens": 1200 - 12 * 16,
        "padding": 92 * 11 - (1200 - 12 * 16),
    }
    assert log.record()["corpus_padding"] == {"a": 0, "b": 0}
