"""Imports that every command waits for: modules which only some runs use are loaded by those."""

import subprocess
import sys

import pytest

COMPILER = ("torch._dynamo", "torch._inductor", "sympy", "triton")
SHARING = ("torch.distributed.fsdp", "torch.distributed.pipelining", "torch.distributed.tensor")
ENGINE = ("penstock.engine", "jinja2", "tokenizers")
TABLES = ("pyarrow", "pandas", "transformers")


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("penstock.train.run", (*COMPILER, *SHARING, *ENGINE, *TABLES)),
        ("penstock.serve.app", (*COMPILER, *SHARING, *TABLES)),
        ("penstock.data.loader", ("torch", *TABLES)),
    ],
)
def test_a_module_loads_nothing_that_only_some_runs_use(module, heavy):
    code = f"import sys, {module}; sys.exit(', '.join(set(sys.modules) & set({heavy!r})) or None)"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"loaded {done.stderr}"


STEPS = f"""
import sys, torch
from penstock.models.decoder.config import DecoderConfig
from penstock.models.decoder.model import Decoder
from penstock.nn.init import init_weights
from penstock.nn.unfilled import on_device, unfilled
from penstock.train.optim.optimizer import build_optimizer
from penstock.train.recipe.optim_config import OptimConfig

with unfilled():
    model = Decoder(DecoderConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=8,
    ))
on_device(model)
init_weights(model, seed=0)
optimizer = build_optimizer(model, OptimConfig())
ends = torch.tensor([0, 5, 8], dtype=torch.int32)
model(torch.arange(8)[None], position_ids=torch.arange(8)[None], cu_seqlens=ends).square().mean().backward()
optimizer.step()
optimizer.zero_grad()
sys.exit(", ".join(set(sys.modules) & set({(*COMPILER, *SHARING)!r})) or None)
"""


def test_a_step_of_one_rank_loads_neither_the_compiler_nor_fsdp():
    done = subprocess.run([sys.executable, "-c", STEPS], check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"loaded {done.stderr}"
