"""What an engine would be, told before it is opened."""

import json

import pytest
import torch

from penstock.core.errors import ConfigError
from penstock.devices import accelerator
from penstock.engine.config import EngineConfig
from penstock.engine.model_runner import decode_graphs
from penstock.engine.model_runner.graph_plan import plan_graphs
from penstock.engine.workers import dry_run
from penstock.engine.workers.dry_run import planned_engine
from tests.families import small_llama

CONFIG = small_llama(vocab_size=1000, max_position_embeddings=4096)


def on_a_gpu(monkeypatch):
    monkeypatch.setattr(dry_run, "device_of", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(accelerator, "name_of", lambda _: "a GPU")
    monkeypatch.setattr(decode_graphs, "has_triton", lambda _: True)


def test_graphs_are_told_with_their_sizes_seconds_and_bytes(monkeypatch):
    on_a_gpu(monkeypatch)
    planned = planned_engine(CONFIG, EngineConfig(max_sequences=48, max_context=1024))
    text = "\n".join(planned.as_lines())
    assert "CUDA graphs: 2 each for 1, 2, 4, 8, 16, 32, 48 sequences" in text
    assert "1,024 tokens, 48 answers at most" in text
    told = json.loads(json.dumps(planned.as_json()))["graphs"]
    assert (told["sizes"], told["num_graphs"]) == ([1, 2, 4, 8, 16, 32, 48], 14)
    assert told["seconds"] > 0


@pytest.mark.parametrize("options", [{"compile": "off"}, {"tensor_parallel": 2}])
def test_steps_without_graphs_are_told(options, monkeypatch):
    on_a_gpu(monkeypatch)
    planned = planned_engine(CONFIG, EngineConfig(**options))
    assert planned.graphs is None
    assert "graphs          none" in "\n".join(planned.as_lines())


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="No such device"):
        planned_engine(CONFIG, EngineConfig(device="tpu"))


def test_the_memory_of_graphs_grows_with_sequences_context_and_vocabulary():
    few = plan_graphs(CONFIG, max_sequences=8, context=1024, block_size=16)
    assert plan_graphs(CONFIG, max_sequences=16, context=1024, block_size=16).num_bytes > few.num_bytes
    assert plan_graphs(CONFIG, max_sequences=8, context=4096, block_size=16).num_bytes > few.num_bytes
    wide = small_llama(vocab_size=2000, max_position_embeddings=4096)
    more = plan_graphs(wide, max_sequences=8, context=1024, block_size=16)
    # logits once as activations of the largest step, and once as results
    assert more.num_bytes - few.num_bytes == 2 * 8 * 1000 * 2
