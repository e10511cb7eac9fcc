"""LoRA adapters against PEFT: what it adds, in mixed steps, and what is refused."""

import copy
import json

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tests.tiny_models import CONFIGS, save_tiny_model

from penstock.checkpoint.hf import load_pretrained, read_config
from penstock.core.errors import ModelError, UsageError
from penstock.engine.adapter_file import read_adapter
from penstock.engine.adapters import Adapters
from penstock.engine.batch import Batch
from penstock.models.llama.slices import ALONE

# of PEFT, which asks transformers in its old words
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
KINDS = {
    "every-layer": {"r": 3, "lora_alpha": 5, "target_modules": ALL},
    "two-layers": {"r": 8, "lora_alpha": 4, "use_rslora": True, "target_modules": ["q_proj", "down_proj"]},
    "by-expression": {"r": 2, "lora_alpha": 2, "target_modules": r".*\.1\.mlp\.(gate|up)_proj"},
}


@pytest.fixture(params=CONFIGS, scope="module")
def base(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return folder, save_tiny_model(request.param, folder)


@pytest.fixture(scope="module")
def one_base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    return folder, save_tiny_model("llama", folder)


def save_adapter(model, folder, kind, *, seed):
    """Write a random adapter; return the logits it gives for IDS."""
    torch.manual_seed(seed)
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(**KINDS[kind], init_lora_weights=False)).eval()
    adapted.save_pretrained(folder)
    with torch.no_grad():
        return adapted(IDS[None]).logits[0]


IDS = torch.tensor([5, 9, 3, 101, 7, 44, 60, 201, 30])


def of_tokens(index):
    """Return a step of IDS with an adapter."""
    return step([index], [len(IDS)])


def step(indexes, sizes):
    """Return a step of shares with adapters, as far as `Adapters.begin` reads it."""
    rest = dict.fromkeys(
        ("token_ids", "positions", "slots", "lengths", "block_tables", "logit_rows"), np.zeros(0)
    )
    starts = np.cumsum([0, *sizes]).astype(np.int32)
    return Batch(**rest, query_starts=starts, adapters=np.array(indexes, np.int32))


@torch.inference_mode()
def logits_of(model, ids=IDS, cu_seqlens=None):
    return model(ids[None], cu_seqlens=cu_seqlens)[0]


def test_an_adapter_changes_what_peft_changes(base, tmp_path):
    folder, theirs = base
    with torch.no_grad():
        plain = theirs(IDS[None]).logits[0]
    model = load_pretrained(folder)
    adapters = Adapters(model, model.config)
    expected = {}
    for seed, kind in enumerate(KINDS):
        expected[kind] = save_adapter(theirs, tmp_path / kind, kind, seed=seed)
        adapters.add(kind, tmp_path / kind)
        assert (expected[kind] - plain).abs().max() > 0.01
    for kind, logits in expected.items():
        adapters.begin(of_tokens(adapters.indexes[kind]))
        torch.testing.assert_close(logits_of(model), logits, rtol=1e-4, atol=1e-4)
    adapters.begin(of_tokens(-1))
    torch.testing.assert_close(logits_of(model), plain, rtol=1e-4, atol=1e-4)


def test_a_step_of_several_adapters_and_none_gives_each_its_own(one_base, tmp_path):
    folder, theirs = one_base
    model = load_pretrained(folder)
    adapters = Adapters(model, model.config)
    for seed, kind in enumerate(KINDS):
        save_adapter(theirs, tmp_path / kind, kind, seed=seed)
        adapters.add(kind, tmp_path / kind)
    order = [-1, *adapters.indexes.values(), -1, 1]
    alone = []
    for index in order:
        adapters.begin(of_tokens(index))
        alone.append(logits_of(model))
    adapters.begin(step(order, [len(IDS)] * len(order)))
    ends = torch.arange(0, len(IDS) * len(order) + 1, len(IDS), dtype=torch.int32)
    mixed = logits_of(model, IDS.repeat(len(order)), ends)
    torch.testing.assert_close(mixed, torch.cat(alone), rtol=1e-5, atol=1e-5)


def test_a_removed_adapter_is_gone_and_the_others_stay(one_base, tmp_path):
    folder, theirs = one_base
    model = load_pretrained(folder)
    plain, adapters = logits_of(model), Adapters(model, model.config)
    expected = {}
    for seed, kind in enumerate(KINDS):
        expected[kind] = save_adapter(theirs, tmp_path / kind, kind, seed=seed)
        adapters.add(kind, tmp_path / kind)
    adapters.remove("every-layer")
    with pytest.raises(UsageError, match=r"no adapter of that name .*every-layer"):
        adapters.remove("every-layer")
    adapters.begin(of_tokens(adapters.indexes["two-layers"]))
    torch.testing.assert_close(logits_of(model), expected["two-layers"], rtol=1e-4, atol=1e-4)
    adapters.add("every-layer", tmp_path / "every-layer")
    assert adapters.indexes["every-layer"] == len(KINDS)  # an index is never given again
    for name in KINDS:
        adapters.remove(name)
    adapters.begin(of_tokens(0))
    assert torch.equal(logits_of(model), plain)


def refused(base, tmp_path, *, settings=None, tensors=None):
    """Return the message with which an adapter is refused whose files were changed."""
    folder, theirs = base
    where = tmp_path / "adapter"
    save_adapter(theirs, where, "two-layers", seed=0)
    config = json.loads((where / "adapter_config.json").read_text())
    (where / "adapter_config.json").write_text(json.dumps({**config, **(settings or {})}))
    stored = load_file(where / "adapter_model.safetensors")
    save_file({**stored, **(tensors or {})}, where / "adapter_model.safetensors")
    with pytest.raises(ModelError) as error:
        read_adapter(where, read_config(folder), place=ALONE)
    return str(error.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"peft_type": "IA3"}, "only LoRA adapters are known (got 'IA3')"),
        ({"bias": "all"}, "bias is not understood (got 'all')"),
        ({"use_dora": True}, "use_dora is not understood (got True)"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is not understood (got ['lm_head'])"),
        ({"alpha_pattern": {"q_proj": 3}}, "alpha_pattern is not understood"),
        ({"of_the_future": 7}, "of_the_future is not understood (got 7)"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights changed the base weights (got 'pissa')"),
        ({"r": 0}, "r must be a whole number from 1 to 512 (got 0)"),
        ({"r": True}, "r must be a whole number"),
        ({"lora_alpha": "8"}, "lora_alpha must be a finite number (got '8')"),
        ({"lora_alpha": float("inf")}, "lora_alpha must be a finite number (got inf)"),
        ({"r": 4}, "has shapes {'A': (8, "),
    ],
)
def test_settings_that_are_not_understood_are_refused(one_base, tmp_path, settings, said):
    assert said in refused(one_base, tmp_path, settings=settings)


HEAD = "base_model.model.model.layers"


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("base_model.model.lm_head.lora_A.weight", (8, 32), "adapts no linear layer"),
        (f"{HEAD}.2.mlp.up_proj.lora_A.weight", (8, 32), "adapts no linear layer"),
        (f"{HEAD}.0.input_layernorm.lora_A.weight", (8, 32), "adapts no linear layer"),
        (f"{HEAD}.0.mlp.up_proj.weight", (8, 32), "adapts no linear layer"),
        (f"{HEAD}.0.mlp.up_proj.lora_A.weight", (8, 32), "what adapts layers.0.mlp.up has shapes"),
        (f"{HEAD}.0.mlp.down_proj.lora_A.weight", (8, 51), "what adapts layers.0.mlp.down has shapes"),
    ],
)
def test_tensors_that_do_not_belong_to_the_model_are_refused(one_base, tmp_path, name, shape, said):
    assert said in refused(one_base, tmp_path, tensors={name: torch.zeros(shape)})


def test_numbers_that_are_not_finite_are_refused(one_base, tmp_path):
    name = f"{HEAD}.1.mlp.down_proj.lora_B.weight"
    said = refused(one_base, tmp_path, tensors={name: torch.full((32, 8), float("nan"))})
    assert "layers.1.mlp.down has numbers that are not finite" in said


def test_pickles_damaged_files_and_other_folders_are_refused(one_base, tmp_path):
    config = read_config(one_base[0])
    with pytest.raises(ModelError, match=r"has no adapter_config\.json"):
        read_adapter(tmp_path, config)
    save_adapter(one_base[1], tmp_path / "a", "two-layers", seed=0)
    weights = tmp_path / "a" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ModelError, match="cannot be read"):
        read_adapter(tmp_path / "a", config)
    weights.rename(tmp_path / "a" / "adapter_model.bin")
    with pytest.raises(ModelError, match="Pickled weights are not opened"):
        read_adapter(tmp_path / "a", config)


def test_adapters_of_one_name_are_refused(one_base, tmp_path):
    folder, theirs = one_base
    model = load_pretrained(folder)
    save_adapter(theirs, tmp_path / "a", "two-layers", seed=0)
    adapters = Adapters(model, model.config)
    adapters.add("a", tmp_path / "a")
    with pytest.raises(UsageError, match="There is an adapter of that name"):
        adapters.add("a", tmp_path / "a")
