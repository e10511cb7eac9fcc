"""Output matrices that differ from config.json, and folders of models without one, against transformers."""

import json
import shutil
from contextlib import closing

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.tiny_models import SHAPE, save_tiny_model
from transformers import AutoModel, AutoModelForCausalLM

from penstock.checkpoint.hf import load_pretrained, save_pretrained
from penstock.checkpoint.hf_folder import read_config
from penstock.checkpoint.load_start import load_start
from penstock.checkpoint.start import find_start
from penstock.core.errors import ModelError, UsageError
from penstock.engine.assemble import build_engine
from penstock.engine.config import EngineConfig
from penstock.engine.model_runner.open import open_config
from penstock.engine.request import Request
from penstock.models.decoder.model import Decoder

IDS = torch.randint(0, SHAPE["vocab_size"], (2, 20), generator=torch.Generator().manual_seed(0))
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture
def tied(tmp_path):
    save_tiny_model("llama-tied", tmp_path / "hf")
    return tmp_path / "hf"


@pytest.fixture
def untied(tmp_path):
    save_tiny_model("llama", tmp_path / "hf")
    return tmp_path / "hf"


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors", metadata={"format": "pt"})


def without_prefix(tensors):
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != HEAD}


def check_logits(folder):
    """Compare the logits with those of transformers; as a start of training too."""
    start = find_start(folder)
    model = Decoder(start.model)
    load_start(start, dict(model.named_parameters()))
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder).eval()(IDS).logits
        torch.testing.assert_close(load_pretrained(folder)(IDS), expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(model(IDS), expected, rtol=0, atol=1e-5)
    assert expected.std() > 0.05


@pytest.mark.parametrize("changed", [slice(None), slice(-1, None)], ids=["all rows", "the last row"])
def test_a_stored_head_that_differs_from_a_tied_config_is_used_and_said(tied, tmp_path, caplog, changed):
    def add_head(tensors):
        head = tensors[EMBEDDING].clone()
        head[changed] += torch.randn_like(head[changed])
        return {**tensors, HEAD: head}

    rewrite(tied, add_head)
    check_logits(tied)
    assert not open_config(tied).tie_word_embeddings
    assert caplog.text.count("ties the output matrix to the embedding, but stores another") == 1
    save_pretrained(load_pretrained(tied).state_dict(), read_config(tied), tmp_path / "out")
    check_logits(tmp_path / "out")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_stored_head_equal_to_the_embedding_is_tied(tied, caplog, dtype):
    def add_head(tensors):
        embedding = tensors[EMBEDDING].bfloat16().to(tensors[EMBEDDING].dtype)  # exact in all dtypes
        return {**tensors, EMBEDDING: embedding, HEAD: embedding.to(dtype, copy=True)}

    rewrite(tied, add_head)
    assert read_config(tied).tie_word_embeddings
    check_logits(tied)
    assert not caplog.text


def test_a_stored_head_of_another_dtype_and_value_is_used(tied):
    rewrite(tied, lambda tensors: {**tensors, HEAD: tensors[EMBEDDING].half() * 2})
    assert not read_config(tied).tie_word_embeddings
    check_logits(tied)


def test_a_tied_model_of_which_only_the_head_is_stored_is_opened(tied):
    rewrite(tied, lambda tensors: {(HEAD if n == EMBEDDING else n): t for n, t in tensors.items()})
    check_logits(tied)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_tied_model_that_automodel_saved_is_opened(tied, tmp_path, sharded):
    size = "20KB" if sharded else "1GB"
    AutoModel.from_pretrained(tied).save_pretrained(tmp_path / "base", max_shard_size=size)
    assert (tmp_path / "base" / "model.safetensors.index.json").exists() == sharded
    check_logits(tmp_path / "base")


def test_a_head_beside_names_without_prefix_is_read(untied):
    rewrite(untied, lambda tensors: {**without_prefix(tensors), HEAD: tensors[HEAD]})
    check_logits(untied)


def test_a_different_head_beside_names_without_prefix_is_used(tied):
    rewrite(tied, lambda tensors: {**without_prefix(tensors), HEAD: tensors[EMBEDDING] * 2})
    assert not read_config(tied).tie_word_embeddings
    check_logits(tied)


@pytest.mark.parametrize("prefix", [True, False])
def test_an_untied_model_without_a_stored_head_is_refused_and_never_tied(untied, prefix):
    headless = lambda tensors: {n: t for n, t in tensors.items() if n != HEAD}  # noqa: E731
    rewrite(untied, headless if prefix else without_prefix)
    said = r"has no output matrix: config\.json does not tie .* set tie_word_embeddings to true"
    with pytest.raises(ModelError, match=said):
        load_pretrained(untied)
    start = find_start(untied)
    parameters = dict(Decoder(start.model).named_parameters())
    with pytest.raises(ModelError, match=said):
        load_start(start, parameters)


@pytest.mark.parametrize("weights", ["stored", "int8"])
def test_an_untied_model_without_a_head_gives_embeddings_and_refuses_to_generate(untied, tmp_path, weights):
    shutil.copytree(untied, tmp_path / "whole")
    rewrite(untied, without_prefix)
    config = EngineConfig(weights=weights, max_sequences=2, device="cpu")
    vectors = []
    for folder in (tmp_path / "whole", untied):
        with closing(build_engine(folder, config)) as engine:
            engine.add(Request(prompt=(1, 2, 3), max_tokens=0, task="embed"))
            vectors.append(next(delta.embedding for delta in engine.step() if delta.embedding))
    assert vectors[0] == vectors[1]
    with closing(build_engine(untied, config)) as engine:
        for refused in (
            Request(prompt=(1, 2), max_tokens=1),
            Request(prompt=(1, 2), max_tokens=0, task="score", continuations=((3,),)),
            Request(prompt=(1, 2), max_tokens=0, task="embed", num_prompt_logprobs=1),
        ):
            with pytest.raises(UsageError, match=r"no output matrix \(lm_head\.weight\).*cannot generate"):
                engine.add(refused)


def test_damaged_weights_beside_a_tied_config_are_named(tied):
    (tied / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ModelError, match="is damaged"):
        load_pretrained(tied)


def test_a_tied_config_without_weights_can_be_read(tmp_path):
    save_tiny_model("llama-tied", tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").unlink()
    assert read_config(tmp_path / "hf").tie_word_embeddings
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["tie_word_embeddings"]
