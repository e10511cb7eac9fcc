"""Traces and memory records of single steps, written by ranks that train, opened as Perfetto opens them."""

import gzip
import json
from functools import partial

import pytest
import torch

from penstock.obs.meter import StepMeter
from penstock.testing.corpora import write_corpus
from penstock.testing.ranks import on_ranks
from penstock.train.config import build_recipe
from penstock.train.loop import train
from penstock.train.measure_config import MeasureConfig
from penstock.train.setup import open_state
from penstock.train.tracing import Windows

STEPS = 5


def recipe_of(folder):
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(1, 50, (30,), generator=generator).tolist() for _ in range(60)]
    corpus = write_corpus(folder / "corpus", documents, vocab_size=50)
    model = dict.fromkeys(("hidden_size", "intermediate_size"), 16) | {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    return build_recipe(
        {
            "run": {"dir": str(folder / "run"), "steps": STEPS},
            "model": model,
            "data": {"corpora": {"c": {"path": str(corpus)}}, "sequence_length": 16, "global_batch_size": 2},
            "compute": "float32",
        }
    )


def trained(recipe, folder, config, world):
    state = open_state(recipe, world)
    with Windows(config, folder, rank=world.ranks.rank, device=world.device) as state.windows:
        train(
            state,
            recipe,
            world,
            meter=StepMeter(flops_per_token=lambda _: 1, peak_flops=1),
            stop_requested=lambda: False,
            sinks=[],
            on_batch=lambda *_: None,
        )


@pytest.fixture(scope="module")
def events(tmp_path_factory):
    """Events by the name of their file, of a run whose last window outlasts it."""
    folder = tmp_path_factory.mktemp("traced")
    recipe = recipe_of(folder)
    config = MeasureConfig(trace_steps="2:4", memory_steps="5:9")
    on_ranks(partial(trained, recipe, folder, config), ranks=2)
    return {
        path.name: json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        for path in (folder / "traces").iterdir()
    }


def test_every_rank_writes_the_steps_that_were_asked_for(events):
    assert sorted(events) == [
        f"{kind}-rank-0000{rank}.json.gz"
        for kind in ("memory-steps-5-to-5", "trace-steps-2-to-3")
        for rank in (0, 1)
    ]


def test_a_trace_holds_the_operations_of_its_steps_and_no_others(events):
    names = [event.get("name") for event in events["trace-steps-2-to-3-rank-00000.json.gz"]]
    assert names.count("Optimizer.step#AdamW.step") == 2
    assert any("gather" in str(name) for name in names)
    assert "[memory]" not in names


def test_a_memory_record_holds_allocations_with_the_bytes_in_use(events):
    found = [e for e in events["memory-steps-5-to-5-rank-00001.json.gz"] if e.get("name") == "[memory]"]
    assert found
    assert all("Total Allocated" in event["args"] for event in found)
