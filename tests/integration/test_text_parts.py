"""The language model of a folder that also reads images, and the refusal of every other kind of model."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.tiny_models import MINISTRAL3, SHAPE
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Ministral3Config,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    Qwen2Config,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from penstock.checkpoint.hf import load_pretrained, save_pretrained
from penstock.checkpoint.hf_folder import read_config
from penstock.core.errors import ModelError
from penstock.models.families import FAMILY
from penstock.models.family.config_json import config_of

SEEN = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
IDS = torch.randint(0, SHAPE["vocab_size"] - 1, (2, 20), generator=torch.Generator().manual_seed(0))


def mistral3(*, tied, text_says=None, kind=MistralConfig, **own):
    says = tied if text_says is None else text_says
    text = kind(**SHAPE, head_dim=16, sliding_window=None, tie_word_embeddings=says, **own)
    config = Mistral3Config(
        text_config=text.to_dict(),
        vision_config={"model_type": "pixtral", **SEEN, "head_dim": 8},
        tie_word_embeddings=tied,
        image_token_index=SHAPE["vocab_size"] - 1,
    )
    return Mistral3ForConditionalGeneration(config)


def llava():
    config = LlavaConfig(
        text_config=Qwen2Config(**SHAPE).to_dict(),
        vision_config={"model_type": "clip_vision_model", **SEEN, "projection_dim": 16},
        image_token_index=SHAPE["vocab_size"] - 1,
    )
    return LlavaForConditionalGeneration(config)


def idefics3():
    config = Idefics3Config(
        text_config=LlamaConfig(**SHAPE).to_dict(),
        vision_config=SEEN,
        image_token_id=SHAPE["vocab_size"] - 1,
        pad_token_id=0,
    )
    return Idefics3ForConditionalGeneration(config)


def gemma3():
    text = Gemma3TextConfig(**SHAPE, head_dim=16, sliding_window=7, query_pre_attn_scalar=24)
    config = Gemma3Config(
        text_config=text.to_dict(),
        vision_config={"model_type": "siglip_vision_model", **SEEN},
        image_token_index=SHAPE["vocab_size"] - 1,
        mm_tokens_per_image=4,
    )
    return Gemma3ForConditionalGeneration(config)


WHOLE = {
    "mistral3": lambda: mistral3(tied=False),
    "ministral3": lambda: mistral3(tied=True, kind=Ministral3Config, rope_parameters=MINISTRAL3),
    "mistral3-tied": lambda: mistral3(tied=True),
    "mistral3-tied-as-a-whole": lambda: mistral3(tied=True, text_says=False),
    "mistral3-tied-as-a-part": lambda: mistral3(tied=False, text_says=True),
    "llava": llava,
    "gemma3": gemma3,
    "idefics3": idefics3,
}


@pytest.fixture(params=WHOLE)
def whole(request, tmp_path):
    torch.manual_seed(0)
    model = WHOLE[request.param]().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        logits = model(IDS).logits
    model.save_pretrained(tmp_path / "whole")
    return tmp_path / "whole", logits


def test_the_language_model_of_a_folder_that_reads_images_computes_its_logits(whole, tmp_path, caplog):
    folder, logits = whole
    ours = load_pretrained(folder)
    with torch.no_grad():
        torch.testing.assert_close(ours(IDS), logits, rtol=0, atol=1e-5)
    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    assert f"is a {model_type} model: its language model ({ours.config.model_type}) is opened" in caplog.text
    save_pretrained(ours.state_dict(), ours.config, tmp_path / "alone")
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "alone")
    assert alone.config.model_type == ours.config.model_type
    with torch.no_grad():
        torch.testing.assert_close(alone(IDS).logits, logits, rtol=0, atol=1e-5)


SPELLINGS = [
    ("language_model.model.", "language_model.lm_head.weight"),
    ("model.language_model.", "lm_head.weight"),
    ("model.text_model.", "lm_head.weight"),
]
"""Beginnings of the language model's names, and its output matrix, as transformers 4 and 5 write them."""


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_names_are_read_as_each_version_of_transformers_writes_them(tmp_path, spelling):
    torch.manual_seed(0)
    model = mistral3(tied=False).eval()
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    written = load_file(path)
    assert {spelling[0] + "norm.weight" for spelling in SPELLINGS} & written.keys()
    tensors = {}
    for name, tensor in written.items():
        inner = next((name.removeprefix(old) for old, _ in SPELLINGS if name.startswith(old)), None)
        is_head = name.endswith("lm_head.weight")
        tensors[spelling[1] if is_head else f"{spelling[0]}{inner}" if inner else name] = tensor
    assert {f"{spelling[0]}norm.weight", spelling[1]} <= tensors.keys()
    save_file(tensors, path, metadata={"format": "pt"})
    with torch.no_grad():
        torch.testing.assert_close(load_pretrained(tmp_path)(IDS), model(IDS).logits, rtol=0, atol=1e-5)


def test_a_missing_tensor_of_the_language_model_is_named(tmp_path):
    mistral3(tied=False).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    (name,) = (name for name in tensors if name.endswith("layers.1.mlp.up_proj.weight"))
    del tensors[name]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        load_pretrained(tmp_path)


@pytest.mark.parametrize(("of_whole", "of_part"), [({"bits": 8}, None), ({}, {"bits": 8})])
def test_a_quantised_folder_is_refused_whichever_part_says_so(tmp_path, of_whole, of_part):
    mistral3(tied=False).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    raw["text_config"]["quantization_config"] = of_part
    path.write_text(json.dumps({**raw, "quantization_config": of_whole}))
    with pytest.raises(ModelError, match="Quantised"):
        read_config(tmp_path)


OF_OTHERS = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(FAMILY) - {"gemma3", "gemma4_assistant"})
"""The text part of gemma3 opens; gemma4_assistant has no default configuration."""
TEXT_OPENS = {"got_ocr2", "moss_transcribe_diarize"}
"""Their language models are a Qwen 2 and a Qwen 3."""


@pytest.mark.parametrize("model_type", OF_OTHERS)
def test_a_model_that_does_not_open_is_refused_with_what_is_missing(model_type):
    raw = CONFIG_MAPPING[model_type]().to_dict()
    if model_type in TEXT_OPENS:
        assert config_of(raw).model_type in FAMILY
        return
    with pytest.raises(ModelError, match=r"not supported: Penstock lacks .*Supported: arcee, cwm, "):
        config_of(raw)
