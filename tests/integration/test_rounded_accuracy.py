"""What 8 and 4 bits cost a model that was trained for real: its perplexity on text it has not seen."""

import math
import sysconfig
from pathlib import Path

import pytest
import torch
from tests.families import small_llama
from torch.nn.functional import cross_entropy

from penstock.engine.fuse import fuse
from penstock.engine.weights import prepare
from penstock.models.llama.model import Llama

LENGTH = 64


def source_code(name):
    path = Path(sysconfig.get_paths()["stdlib"]) / name
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()


@pytest.fixture(scope="module")
def trained():
    """A model of bytes that has learned some of Python from one file."""
    torch.manual_seed(0)
    config = small_llama(
        vocab_size=256, hidden_size=64, intermediate_size=160, max_position_embeddings=LENGTH
    )
    model, text = Llama(config), source_code("argparse.py")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(150):
        starts = (torch.arange(16) * 6007 + step * 331) % (len(text) - LENGTH - 1)
        rows = text[starts[:, None] + torch.arange(LENGTH + 1)]
        cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval().requires_grad_(False)


@torch.inference_mode()
def perplexity(model):
    text = source_code("optparse.py")
    rows = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)[:256]
    logits = model.logits(model.hidden(rows[:, :-1]))
    return math.exp(cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()))


@pytest.mark.parametrize(("weights", "most"), [("int8", 1.01), ("int4", 1.05)])
def test_fewer_bits_cost_little_perplexity(trained, weights, most):
    exact = perplexity(trained)
    assert exact < 12, "it has learned: bytes of source code drawn by their frequency have about 25"
    rounded = Llama(trained.config).eval().requires_grad_(False)
    rounded.load_state_dict(trained.state_dict())
    fuse(rounded)
    prepare(rounded, weights)
    assert 1 / most < perplexity(rounded) / exact < most
