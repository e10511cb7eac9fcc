"""What 8 and 4 bits cost a model that was trained for real: its perplexity on text it has not seen."""

import math
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.families import small_llama
from torch.nn.functional import cross_entropy

from penstock.engine.model_runner.kv_cache import PagedCache
from penstock.engine.model_runner.serving_layers import fuse, prepare
from penstock.models.decoder.model import Decoder
from penstock.nn.kernels.pages import PagedStep

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
    model, text = Decoder(config), source_code("argparse.py")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(150):
        starts = (torch.arange(16) * 6007 + step * 331) % (len(text) - LENGTH - 1)
        rows = text[starts[:, None] + torch.arange(LENGTH + 1)]
        cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval().requires_grad_(False)


@torch.inference_mode()
def perplexity(model, pages=None):
    """Of a model, whose keys and values are kept in that type."""
    text = source_code("optparse.py")
    rows = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)[:256]
    hidden = model.hidden(rows[:, :-1]) if pages is None else over_pages(model, rows[:, :-1], pages)
    logits = model.logits(hidden)
    return math.exp(cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()))


def over_pages(model, rows, dtype):
    """Return the hidden states of rows, each with a block of its own."""
    config, (num_rows, length) = model.config, rows.shape
    cache = PagedCache(
        config.num_hidden_layers,
        num_blocks=num_rows,
        block_size=length,
        kv_heads=config.key_value_heads,
        head_dim=config.size_of_head,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    step = PagedStep.from_arrays(
        slots=np.arange(rows.numel()),
        query_starts=np.arange(0, rows.numel() + 1, length, dtype=np.int32),
        lengths=np.full(num_rows, length, np.int32),
        block_tables=np.arange(num_rows, dtype=np.int32)[:, None],
        device=cache.device,
    )
    positions = torch.arange(length).repeat(num_rows)[None]
    return model.hidden(rows.reshape(1, -1), position_ids=positions, cache=cache.bound(step)).view(
        *rows.shape, -1
    )


@pytest.mark.parametrize(("weights", "most"), [("int8", 1.01), ("int4", 1.05)])
def test_fewer_bits_cost_little_perplexity(trained, weights, most):
    exact = perplexity(trained)
    assert exact < 12, "it has learned: bytes of source code drawn by their frequency have about 25"
    rounded = Decoder(trained.config).eval().requires_grad_(False)
    rounded.load_state_dict(trained.state_dict())
    fuse(rounded)
    prepare(rounded, weights)
    assert 1 / most < perplexity(rounded) / exact < most


def test_keys_and_values_of_8_bits_cost_little_perplexity(trained):
    exact = perplexity(trained)
    assert perplexity(trained, torch.float32) == pytest.approx(exact, rel=1e-4)
    rounded = perplexity(trained, torch.int8)
    assert rounded != exact
    assert 1 / 1.003 < rounded / exact < 1.003
