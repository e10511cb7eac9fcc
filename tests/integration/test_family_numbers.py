"""How near each family comes to a reference in float64: logits, gradients, bfloat16 and packed documents.

The reference is transformers' network in float64. Its own steps in float32 (norms, softmax, rotations)
are made float64 too, so that a difference is ours.
"""

import copy
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tests.integration.test_hf_parity import CONFIGS, IDS
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from penstock.checkpoint.hf import load_pretrained

DRAWN = torch.randn(*IDS.shape, 97, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
"""Gradient of a loss with respect to the logits."""


class Wide:
    """The module torch, in which float32 is float64."""

    float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@contextmanager
def wide_steps(model):
    """Let transformers' own modules of a model compute in float64 where they cast to float32."""
    as_float32 = torch.Tensor.float
    names = {type(module).__module__ for module in model.modules()}
    modules = [sys.modules[name] for name in names if name.startswith("transformers.models.")]
    with pytest.MonkeyPatch.context() as patched:
        for module in modules:
            patched.setattr(module, "torch", Wide())
        patched.setattr(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else as_float32(x))
        yield


@dataclass(frozen=True, kw_only=True)
class Reference:
    folder: Path
    logits: Tensor
    gradients: dict[str, Tensor]
    narrow: nn.Module


@pytest.fixture(params=CONFIGS, scope="module")
def reference(request, tmp_path_factory):
    config = CONFIGS[request.param]
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name or "sinks" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)  # they start equal and hide a mix-up
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    model.get_input_embeddings().padding_idx = None  # else the row of one token has no gradient
    wide = copy.deepcopy(model).double()
    embedding = wide.get_input_embeddings()
    if hasattr(embedding, "scalar_embed_scale"):
        embedding.embed_scale = torch.tensor(embedding.scalar_embed_scale, dtype=torch.float64)
    with wide_steps(wide):
        logits = wide(IDS).logits
        (logits * DRAWN).sum().backward()
    return Reference(
        folder=folder,
        logits=logits.detach(),
        gradients={name: parameter.grad for name, parameter in wide.named_parameters()},
        narrow=model,
    )


def relative(ours, theirs):
    return float((ours - theirs).abs().max() / theirs.abs().max())


@torch.no_grad()
def test_float32_logits_are_within_four_millionths(reference):
    assert relative(load_pretrained(reference.folder)(IDS), reference.narrow(IDS).logits) < 4e-6


def test_float64_logits_and_gradients_are_those_of_the_reference(reference):
    model = load_pretrained(reference.folder, dtype=torch.float64)
    logits = model(IDS)
    (logits * DRAWN).sum().backward()
    assert relative(logits.detach(), reference.logits) < 1e-9
    largest = max(float(gradient.abs().max()) for gradient in reference.gradients.values())
    for name, parameter in model.named_parameters():
        stored = model.config.stored_rows[name]
        theirs = reference.gradients[stored.tensor][list(stored.rows)]
        scale = max(float(theirs.abs().max()), 1e-6 * largest)  # one that is 0 but for rounding
        error = float((parameter.grad - theirs).abs().max()) / scale
        assert error < 1e-8, name


@torch.no_grad()
def test_bfloat16_strays_no_further_than_that_of_transformers(reference):
    ours = load_pretrained(reference.folder, dtype=torch.bfloat16)(IDS)
    theirs = copy.deepcopy(reference.narrow).bfloat16()(IDS).logits

    def error(logits):
        return float((logits.double() - reference.logits).pow(2).mean().sqrt())

    assert 0 < error(ours) < 1.5 * error(theirs)


@torch.no_grad()
def test_documents_in_a_row_are_those_documents_alone(reference):
    model = load_pretrained(reference.folder, dtype=torch.float64)
    lengths = [1, 17, 22]
    ends = torch.tensor([0, 1, 18, 40], dtype=torch.int32)
    packed = model(IDS[:1], cu_seqlens=ends)[0].split(lengths)
    pairs = [*zip(packed, IDS[0].split(lengths), strict=True)]
    if model.config.rope_scaling is not None and model.config.rope_scaling.rope_type == "dynamic":
        pairs = pairs[-1:]  # by definition the longest document of a pass sets the base for all
    for document, ids in pairs:
        assert relative(document, model(ids[None])[0]) < 1e-12
