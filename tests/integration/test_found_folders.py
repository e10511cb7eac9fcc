"""Folders as people have them: types mixed, files that disagree, tokens that the model never had."""

import json
import shutil

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tests.tiny_models import save_talker
from transformers import AutoModelForCausalLM

from penstock import LLM, EngineConfig, Params
from penstock.core.errors import ModelError
from penstock.engine.sampling.grammar_text import choice
from penstock.engine.sampling_params import GREEDY

CONFIG = EngineConfig(device="cpu", max_sequences=2, cache_gib=0.01)
PROMPT = list(range(1, 60))
TEN = Params(sampling=GREEDY, max_tokens=10, stop_ids=frozenset())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_talker(tmp_path_factory.mktemp("model"), context=64)


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "model")


def rewrite(folder, dtype_of):
    """Store each tensor in the type that a function of its name says."""
    path = folder / "model.safetensors"
    weights = {name: weight.to(dtype_of(name)) for name, weight in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})


def change(folder, file, **changes):
    path = folder / file
    kept = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**kept, **changes}))


def tokens(folder):
    with LLM(folder, CONFIG) as llm:
        return llm.generate(PROMPT[:50], TEN)[0].token_ids


@pytest.mark.parametrize("other", ["norm", "lm_head", "embed"])
def test_a_folder_of_two_types_is_opened_in_that_of_most(folder, other):
    rewrite(folder, lambda _: torch.bfloat16)
    expected = tokens(folder)
    rewrite(folder, lambda name: torch.float32 if other in name else torch.bfloat16)
    assert tokens(folder) == expected


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_weights_without_their_scales_are_refused(folder, dtype):
    rewrite(folder, lambda name: dtype if "proj" in name else torch.bfloat16)
    with pytest.raises(
        ModelError, match=r"proj.weight in .* is quantised, and nothing says how \(got '(I8|F8_E4M3)'"
    ):
        LLM(folder, CONFIG)


def test_yarn_that_was_added_to_a_folder_stretches_its_context_as_in_transformers(folder):
    assert "rope_parameters" in json.loads((folder / "config.json").read_text())
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    change(folder, "config.json", rope_scaling=yarn)
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor([PROMPT])
    expected = theirs.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40)
    with LLM(folder, CONFIG) as llm:
        assert llm.capacity.context == 256
        found = llm.generate(PROMPT, Params(sampling=GREEDY, max_tokens=40, stop_ids=frozenset()))[0]
    assert list(found.token_ids) == expected[0, len(PROMPT) :].tolist()


def test_the_end_token_that_only_the_tokenizers_config_names_ends_answers(folder):
    change(folder, "tokenizer_config.json", eos_token={"content": "the"})
    with LLM(folder, CONFIG) as llm:
        assert llm.text_processor.tokenizer.vocabulary()["the"] in llm.text_processor.stop_ids


def test_tokens_that_the_model_does_not_have_leave_grammars_to_the_others(folder):
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([f"<extra {n}>" for n in range(300)])  # beyond the 400 of the model
    tokenizer.save(str(folder / "tokenizer.json"))
    change(folder, "generation_config.json", eos_token_id=[99_999, [3]])
    with LLM(folder, CONFIG) as llm:
        asked = Params(grammar=choice(["<extra 299>", "<extra 298>"]), max_tokens=30)
        assert llm.generate("the", asked)[0].text in ("<extra 299>", "<extra 298>")
