"""LoRA adapters against PEFT: what it adds, in mixed steps, and what is refused."""

import copy
import json
import queue
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tests.forked_workers import forked_workers
from tests.tiny_models import CONFIGS, save_tiny_model
from transformers import AutoModelForCausalLM

from penstock.checkpoint.adapter_run import open_with_adapter
from penstock.checkpoint.hf import load_pretrained
from penstock.checkpoint.hf_folder import read_config
from penstock.checkpoint.peft import read_adapter
from penstock.checkpoint.peft import save_adapter as write_adapter
from penstock.core.errors import ModelError, UsageError
from penstock.engine.assemble import build_engine
from penstock.engine.background import EngineThread
from penstock.engine.config import EngineConfig
from penstock.engine.model_runner.adapted_linear import AdaptedLinear, Site
from penstock.engine.model_runner.batch import StepBatch
from penstock.engine.model_runner.lora import Adapters
from penstock.engine.request import Request
from penstock.engine.scheduling.groups import cache_groups
from penstock.models.decoder.tensor_slices import ALONE
from penstock.nn import native
from penstock.nn.linear.adapter_config import AdapterConfig
from penstock.nn.linear.packed import can_multiply
from penstock.train.recipe.tune_config import TuneConfig

__all__ = ["forked_workers"]

# of PEFT, which asks transformers in its old words
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

FUSED = ["qkv_proj", "gate_up_proj", "input_linear", "output_linear"]
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", *FUSED]
KINDS = {
    "every-layer": {"r": 3, "lora_alpha": 5, "target_modules": ALL},
    "patterns": {
        "r": 4,
        "lora_alpha": 6,
        "target_modules": ALL,
        "rank_pattern": {
            "(v|qkv)_proj": 7,
            r"layers\.0\.(mlp|shared_mlp)\.(up_proj|gate_up_proj|input_linear)": 1,
        },
        "alpha_pattern": {"self_attn.(q|qkv)_proj": 2},
    },
    "two-layers": {
        "r": 8,
        "lora_alpha": 4,
        "use_rslora": True,
        "target_modules": ["q_proj", "qkv_proj", "down_proj", "output_linear"],
    },
    "by-expression": {
        "r": 2,
        "lora_alpha": 2,
        "target_modules": r".*\.1\.(mlp|shared_mlp)\.(gate_proj|up_proj|gate_up_proj|input_linear)",
    },
    "dora": {"r": 4, "lora_alpha": 6, "use_dora": True, "target_modules": ALL},
    "dora-some": {
        "r": 6,
        "lora_alpha": 3,
        "use_dora": True,
        "target_modules": ["k_proj", "o_proj", "up_proj", *FUSED],
    },
}


OF_OUTPUT = {
    "output": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "lm_head"]},
    "output-alone": {"r": 3, "lora_alpha": 9, "target_modules": ["lm_head"]},
    "output-dora": {"r": 4, "lora_alpha": 2, "use_dora": True, "target_modules": ["v_proj", "lm_head"]},
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
    config = LoraConfig(**(KINDS | OF_OUTPUT)[kind], init_lora_weights=False)
    adapted = get_peft_model(copy.deepcopy(model), config).eval()
    for name, parameter in adapted.named_parameters():
        if "lora_magnitude_vector" in name:  # PEFT begins with the lengths of the rows, which changes nothing
            parameter.data *= torch.empty_like(parameter).uniform_(0.5, 2.0)
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
    return StepBatch(**rest, query_starts=starts, adapters=np.array(indexes, np.int32))


@torch.inference_mode()
def logits_of(model, ids=IDS, cu_seqlens=None):
    return model(ids[None], cu_seqlens=cu_seqlens)[0]


@pytest.fixture(scope="module")
def saved(base, tmp_path_factory):
    """Adapters of a base by kind: each one's folder, and the logits that PEFT gives for IDS."""
    where = tmp_path_factory.mktemp("saved")
    return {
        kind: (where / kind, save_adapter(base[1], where / kind, kind, seed=seed))
        for seed, kind in enumerate(KINDS)
    }


def test_an_adapter_changes_what_peft_changes(base, saved):
    folder, theirs = base
    with torch.no_grad():
        plain = theirs(IDS[None]).logits[0]
    model = load_pretrained(folder)
    adapters = Adapters(model, model.config)
    for kind, (where, logits) in saved.items():
        adapters.add(kind, where)
        assert (logits - plain).abs().max() > 0.01
    for kind, (_, logits) in saved.items():
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
    with pytest.raises(UsageError, match=r"nknown adapter .*every-layer"):
        adapters.remove("every-layer")
    adapters.begin(of_tokens(adapters.indexes["two-layers"]))
    torch.testing.assert_close(logits_of(model), expected["two-layers"], rtol=1e-4, atol=1e-4)
    adapters.add("every-layer", tmp_path / "every-layer")
    assert adapters.indexes["every-layer"] == len(KINDS)  # an index is never given again
    for name in KINDS:
        adapters.remove(name)
    adapters.begin(of_tokens(0))
    assert torch.equal(logits_of(model), plain)
    assert not [name for name, layer in model.named_modules() if isinstance(layer, AdaptedLinear)]


def test_factors_that_could_not_be_computed_for_want_of_memory_are_computed_later(
    one_base, tmp_path, monkeypatch
):
    folder, theirs = one_base
    model = load_pretrained(folder)
    expected, adapters = save_adapter(theirs, tmp_path / "a", "dora", seed=0), Adapters(model, model.config)
    adapters.add("a", tmp_path / "a")

    def fail(*_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Site, "squared_lengths", fail)
        with pytest.raises(MemoryError):
            adapters.begin(of_tokens(0))
    adapters.begin(of_tokens(0))
    torch.testing.assert_close(logits_of(model), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "whole"),
    [
        ("llama", ["embed_tokens", "lm_head", "norm"]),
        ("llama-tied", ["embed_tokens"]),
        ("llama", ["1.mlp"]),
        ("granite-swa", ["1.self_attn"]),
    ],
    ids=str,
)
def test_modules_that_peft_trained_whole_are_merged(tmp_path, family, whole):
    theirs = save_tiny_model(family, tmp_path / "base")
    config = LoraConfig(
        **{**KINDS["two-layers"], "target_modules": r".*\.0\..*q_proj"},
        init_lora_weights=False,
        modules_to_save=whole,
        ensure_weight_tying=family == "llama-tied",
    )
    adapted = get_peft_model(copy.deepcopy(theirs), config).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "modules_to_save" in name:
                parameter += torch.empty_like(parameter).uniform_(-0.1, 0.1)
        expected = adapted(IDS[None]).logits[0]
    adapted.save_pretrained(tmp_path / "adapter")
    merged, _ = open_with_adapter(tmp_path / "adapter", base=tmp_path / "base")
    torch.testing.assert_close(logits_of(merged), expected, rtol=1e-4, atol=1e-4)
    if family == "llama-tied":
        path = tmp_path / "adapter" / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "ensure_weight_tying": False}))
        with pytest.raises(ModelError, match=r"trains the embedding alone.*ensure_weight_tying=True"):
            open_with_adapter(tmp_path / "adapter", base=tmp_path / "base")


def test_peft_opens_a_tied_embedding_that_penstock_trained_whole(tmp_path):
    save_tiny_model("llama-tied", tmp_path / "base")
    model = read_config(tmp_path / "base")
    config = AdapterConfig(method="lora", rank=2, alpha=2.0, layers=("query",), saved=("embed",))
    torch.manual_seed(0)
    tensors = {"embed.weight": torch.randn(model.vocab_size, 32) / 5}
    for n in range(2):
        tensors[f"layers.{n}.attention.query.lora_a"] = torch.randn(2, 32) / 10
        tensors[f"layers.{n}.attention.query.lora_b"] = torch.randn(32, 2) / 10
    write_adapter(tensors, config, model, tmp_path / "adapter", base=str(tmp_path / "base"), base_hash="")
    merged, _ = open_with_adapter(tmp_path / "adapter", base=tmp_path / "base")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    with torch.no_grad():
        expected = PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()(IDS[None]).logits[0]
    torch.testing.assert_close(logits_of(merged), expected, rtol=1e-4, atol=1e-4)


def test_peft_opens_attention_with_sinks_that_penstock_trained_whole(tmp_path):
    theirs = save_tiny_model("granite-swa", tmp_path / "base")
    model = read_config(tmp_path / "base")
    tune = TuneConfig(method="lora", rank=2, layers=("up",), modules_to_save=("self_attn",))
    config = tune.adapter_of(model)
    torch.manual_seed(0)
    tensors = {
        name: torch.randn(shape) / 5 for name, shape in model.parameter_shapes.items() if config.trains(name)
    }
    assert "layers.1.attention.sinks" in tensors
    for n in range(2):
        outputs, inputs = model.linear_layers[f"layers.{n}.mlp.up"]
        tensors[f"layers.{n}.mlp.up.lora_a"] = torch.randn(2, inputs) / 10
        tensors[f"layers.{n}.mlp.up.lora_b"] = torch.randn(outputs, 2) / 10
    write_adapter(tensors, config, model, tmp_path / "adapter", base=str(tmp_path / "base"), base_hash="")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["modules_to_save"] == [
        "self_attn"
    ]
    merged, _ = open_with_adapter(tmp_path / "adapter", base=tmp_path / "base")
    with torch.no_grad():
        expected = PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()(IDS[None]).logits[0]
    torch.testing.assert_close(logits_of(merged), expected, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def sound(one_base, tmp_path_factory):
    """An adapter that nothing is wrong with."""
    folder = tmp_path_factory.mktemp("sound")
    save_adapter(one_base[1], folder, "two-layers", seed=0)
    return folder


def refused(base, sound, tmp_path, *, settings=None, tensors=None):
    """Return the message with which a copy of an adapter is refused whose files were changed."""
    folder, _ = base
    where = shutil.copytree(sound, tmp_path / "adapter")
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
        ({"peft_type": "IA3"}, "adapters must be LoRA (got 'IA3')"),
        ({"bias": "all"}, "bias is not supported (got 'all')"),
        ({"use_dora": True}, "'magnitude': (32,)}"),
        ({"modules_to_save": "lm_head"}, "modules_to_save must be a list of names (got 'lm_head')"),
        ({"alpha_pattern": {"q_proj": "3"}}, "alpha_pattern must be a finite number (got '3')"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern must be a whole number from 1 to 512 (got 0)"),
        ({"rank_pattern": {"(": 3}}, "rank_pattern must be a table of"),
        ({"alpha_pattern": {"([a-z_0-9.]+)+!": 3}}, "alpha_pattern must be a table of"),
        ({"rank_pattern": {"(a|a)*(a|a)*!": 3}}, "rank_pattern must be a table of"),
        ({"rank_pattern": {"q_proj": 3}}, "have shapes {'A': (8, "),
        ({"of_the_future": 7}, "of_the_future is not supported (got 7)"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights changed the base weights (got 'pissa')"),
        ({"r": 0}, "r must be a whole number from 1 to 512 (got 0)"),
        ({"r": True}, "r must be a whole number"),
        ({"lora_alpha": "8"}, "lora_alpha must be a finite number (got '8')"),
        ({"lora_alpha": float("inf")}, "lora_alpha must be a finite number (got inf)"),
        ({"lora_alpha": 10**400}, "lora_alpha must be a finite number (got 1000"),
        ({"r": 4}, "have shapes {'A': (8, "),
    ],
)
def test_settings_that_are_not_understood_are_refused(one_base, sound, tmp_path, settings, said):
    assert said in refused(one_base, sound, tmp_path, settings=settings)


HEAD = "base_model.model.model.layers"


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("base_model.model.lm_head.weight", (8, 32), "changes lm_head itself, and adapters change"),
        ("base_model.model.lm_head.base_layer.weight", (8, 32), "changes lm_head itself"),
        ("base_model.model.model.embed_tokens.weight", (8, 32), "changes embed_tokens itself"),
        ("base_model.model.lm_head.lora_A.weight", (8, 31), "the tensors of unembed have shapes"),
        ("base_model.model.model.layers.0.mlp.router.lora_A.weight", (8, 32), "adapts no linear layer"),
        (f"{HEAD}.2.mlp.up_proj.lora_A.weight", (8, 32), "adapts no linear layer"),
        (f"{HEAD}.0.input_layernorm.lora_A.weight", (8, 32), "adapts no linear layer"),
        (f"{HEAD}.0.input_layernorm.lora_magnitude_vector", (32,), "adapts no linear layer"),
        ("base_model.model.other.lora_magnitude_vector", (32,), "adapts no linear layer"),
        (f"{HEAD}.0.mlp.up_proj.weight", (8, 32), "adapts no linear layer"),
        (f"{HEAD}.0.mlp.up_proj.lora_A.weight", (8, 32), "the tensors of layers.0.mlp.up have shapes"),
        (f"{HEAD}.0.mlp.down_proj.lora_A.weight", (8, 51), "the tensors of layers.0.mlp.down have shapes"),
    ],
)
def test_tensors_that_do_not_belong_to_the_model_are_refused(one_base, sound, tmp_path, name, shape, said):
    assert said in refused(one_base, sound, tmp_path, tensors={name: torch.zeros(shape)})


def test_numbers_that_are_not_finite_are_refused(one_base, sound, tmp_path):
    name = f"{HEAD}.1.mlp.down_proj.lora_B.weight"
    said = refused(one_base, sound, tmp_path, tensors={name: torch.full((32, 8), float("nan"))})
    assert "layers.1.mlp.down have non-finite values" in said


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int64])
def test_numbers_that_cannot_be_computed_with_are_refused(one_base, sound, tmp_path, dtype):
    name = f"{HEAD}.1.mlp.down_proj.lora_B.weight"
    said = refused(one_base, sound, tmp_path, tensors={name: torch.zeros(32, 8).to(dtype)})
    assert f"are neither float16, bfloat16 nor float32 (got '{str(dtype)[6:]}')" in said


def test_pickles_damaged_files_and_other_folders_are_refused(one_base, sound, tmp_path):
    config = read_config(one_base[0])
    with pytest.raises(ModelError, match=r"has no adapter_config\.json"):
        read_adapter(tmp_path, config)
    shutil.copytree(sound, tmp_path / "a")
    weights = tmp_path / "a" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ModelError, match="cannot be read"):
        read_adapter(tmp_path / "a", config)
    weights.rename(tmp_path / "a" / "adapter_model.bin")
    with pytest.raises(ModelError, match="Pickled weights are not opened"):
        read_adapter(tmp_path / "a", config)


def test_the_folder_that_peft_made_below_is_named(one_base, tmp_path):
    torch.manual_seed(0)
    model = get_peft_model(copy.deepcopy(one_base[1]), LoraConfig(**KINDS["two-layers"]), adapter_name="own")
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"has no adapter_config\.json\. Give .*/own\."):
        read_adapter(tmp_path, read_config(one_base[0]))
    assert read_adapter(tmp_path / "own", read_config(one_base[0]))
    with pytest.raises(ModelError, match=r"No such adapter folder .*Download it first"):
        read_adapter(tmp_path / "other", read_config(one_base[0]))


def test_a_setting_that_is_not_understood_is_found_before_the_model_is_read(one_base, sound, tmp_path):
    shutil.copytree(sound, tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    (tmp_path / "config.json").write_bytes((one_base[0] / "config.json").read_bytes())  # no weights there
    with pytest.raises(ModelError, match="adapters must be LoRA"):
        build_engine(tmp_path, settings(adapters={"a": tmp_path / "adapter"}))


def test_adapters_of_one_name_are_refused(one_base, sound):
    model = load_pretrained(one_base[0])
    adapters = Adapters(model, model.config)
    adapters.add("a", sound)
    with pytest.raises(UsageError, match="An adapter of that name exists"):
        adapters.add("a", sound)
    with pytest.raises(UsageError, match="name of an adapter is empty"):
        adapters.add("", sound)  # it would have changed every answer of the base


PROMPTS = [(5, 9, 3, 101, 7, 44), (60,), tuple(range(20, 60))]


def continued(model, prompt):
    """Return what transformers and PEFT answer."""
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16)
    return out[0, len(prompt) :].tolist()


def adapted(theirs, folder):
    return PeftModel.from_pretrained(copy.deepcopy(theirs), folder).eval()


def with_adapters(theirs, folder, kinds):
    """Write adapters; return their folders by kind, and the tokens of each (None: without) and prompt."""
    where = {kind: folder / kind for kind in kinds}
    expected = {(None, prompt): continued(theirs, prompt) for prompt in PROMPTS}
    for seed, (kind, path) in enumerate(where.items()):
        save_adapter(theirs, path, kind, seed=seed)
        model = adapted(theirs, path)
        expected |= {(kind, prompt): continued(model, prompt) for prompt in PROMPTS}
    assert len({tuple(tokens) for tokens in expected.values()}) > 9
    return where, expected


@pytest.fixture(scope="module")
def world(one_base, tmp_path_factory):
    """A base, its adapters, and what is expected of each for each prompt."""
    folder, theirs = one_base
    return folder, *with_adapters(theirs, tmp_path_factory.mktemp("adapters"), KINDS)


@pytest.fixture(scope="module")
def of_families(tmp_path_factory):
    """A function that returns the base of a family and what `with_adapters` does; once for each family."""
    known = {}

    def of(family, kinds):
        if (family, kinds) not in known:
            folder = tmp_path_factory.mktemp(family)
            theirs = save_tiny_model(family, folder / "base")
            known[family, kinds] = folder / "base", *with_adapters(theirs, folder, kinds)
        return known[family, kinds]

    return of


def settings(**more):
    return EngineConfig(device="cpu", cache_gib=2**-8, **more)


def tokens_of(engine, asked):
    """Return what an engine answers to (adapter, prompt)s that run together."""
    found = {}
    for adapter, prompt in asked:
        found[engine.add(Request(prompt=prompt, max_tokens=16, adapter=adapter))] = []
    while engine.has_work:
        for piece in engine.step():
            found[piece.request_id] += piece.token_ids
    return list(found.values())


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("ranks", [1, 2])
def test_requests_of_all_adapters_together_get_the_tokens_of_peft(world, ranks):
    folder, where, expected = world
    engine = build_engine(folder, settings(adapters=where, tensor_parallel=ranks, tokens_per_step=32))
    try:
        for asked in (list(expected), list(reversed(expected))):  # the second time prompts are found computed
            assert tokens_of(engine, asked) == [expected[each] for each in asked]
        assert engine.stats().prefix_found
    finally:
        engine.close()


def test_an_adapter_for_whose_factors_there_is_no_memory_is_not_added(one_base, tmp_path, monkeypatch):
    folder, theirs = one_base
    save_adapter(theirs, tmp_path / "a", "dora", seed=0)
    engine = build_engine(folder, settings())

    def fail(*_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Site, "squared_lengths", fail)
        with pytest.raises(MemoryError):
            engine.add_adapter("a", tmp_path / "a")
    assert "a" not in engine.runner.adapters
    engine.add_adapter("a", tmp_path / "a")
    engine.remove_adapter("a")


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", ["llama", "granite", "gemma2"])  # the latter divide and cap logits
def test_adapters_of_the_output_matrix_get_the_tokens_of_peft(of_families, family, ranks):
    base, where, expected = of_families(family, (*OF_OUTPUT, "two-layers"))
    engine = build_engine(base, settings(adapters=where, tensor_parallel=ranks, tokens_per_step=32))
    try:
        assert tokens_of(engine, list(expected)) == list(expected.values())
        engine.remove_adapter("output")
        left = [each for each in expected if each[0] != "output"]
        assert tokens_of(engine, left) == [expected[each] for each in left]
    finally:
        engine.close()


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("path", ["whole steps", "modules", "two ranks"])
@pytest.mark.parametrize("family", ["gemma3", "exaone4", "smollm3"])
def test_adapters_of_models_with_windows_in_turn_get_the_tokens_of_peft(
    of_families, monkeypatch, family, path
):
    base, where, expected = of_families(family, ("every-layer", "patterns", "dora"))
    if path == "modules":
        monkeypatch.setattr(native, "is_available", lambda: False)
    ranks = 2 if path == "two ranks" else 1
    engine = build_engine(base, settings(adapters=where, tensor_parallel=ranks, tokens_per_step=32))
    assert len(cache_groups(read_config(base).windows, context=64)) == 2
    try:
        for asked in (list(expected), list(reversed(expected))):  # the second time prompts are found computed
            assert tokens_of(engine, asked) == [expected[each] for each in asked]
        assert engine.stats().prefix_found
    finally:
        engine.close()


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`")
def test_an_adapter_of_an_output_matrix_that_a_tied_model_lacks_is_refused(one_base, tmp_path):
    save_adapter(one_base[1], tmp_path / "adapter", "output", seed=0)
    save_tiny_model("llama-tied", tmp_path / "tied")
    with pytest.raises(ModelError, match=r"adapts no linear layer of this model \(got .*lm_head"):
        read_adapter(tmp_path / "adapter", read_config(tmp_path / "tied"), place=ALONE)


@pytest.mark.skipif(not can_multiply(torch.zeros(1)), reason="no such instructions, or no compiler")
def test_steps_of_one_call_leave_the_layers_as_they_are(world):
    folder, where, expected = world
    engine = build_engine(folder, settings(adapters=where))
    model = engine.runner.model
    assert tokens_of(engine, list(expected)) == list(expected.values())
    assert not [layer for layer in model.modules() if isinstance(layer, AdaptedLinear)]
    engine.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_adapters_come_and_go_while_an_engine_lives(world, ranks):
    folder, where, expected = world
    other, one = list(where)[:2]
    with EngineThread(build_engine(folder, settings(tensor_parallel=ranks))) as thread:

        def answer(adapter, prompt=PROMPTS[2]):
            heard = queue.SimpleQueue()
            thread.submit(Request(prompt=prompt, max_tokens=16, adapter=adapter), heard.put)
            tokens = []
            while (piece := heard.get(timeout=120)).finish is None:
                tokens += piece.token_ids
            return tokens + list(piece.token_ids)

        with pytest.raises(UsageError, match=r"Unknown adapter .*The engine has no adapters"):
            answer(one)
        thread.call(lambda engine: engine.add_adapter("mine", where[one]))
        assert answer("mine") == expected[one, PROMPTS[2]]
        assert answer(None) == expected[None, PROMPTS[2]]
        thread.call(lambda engine: engine.remove_adapter("mine"))
        with pytest.raises(UsageError, match="Unknown adapter"):
            answer("mine")
        thread.call(lambda engine: engine.add_adapter("mine", where[other]))  # no block of the first is found
        assert answer("mine") == expected[other, PROMPTS[2]]
        with pytest.raises(UsageError, match="An adapter of that name exists"):
            thread.call(lambda engine: engine.add_adapter("mine", where[one]))
        with pytest.raises(ModelError, match="has no adapter_config"):
            thread.call(lambda engine: engine.add_adapter("theirs", folder))
        assert answer("mine") == expected[other, PROMPTS[2]]


def test_an_adapter_in_use_is_not_removed(world):
    folder, where, _ = world
    engine = build_engine(folder, settings(adapters=where))
    name = next(iter(where))
    request_id = engine.add(Request(prompt=(3, 4), max_tokens=20, adapter=name))
    engine.step()
    with pytest.raises(UsageError, match=r"cannot be removed while requests use it \(got 1\)"):
        engine.remove_adapter(name)
    engine.cancel(request_id)
    engine.remove_adapter(name)
    assert engine.stats().used_blocks == 0
    engine.close()


@pytest.mark.parametrize("kind", [kind for kind in KINDS | OF_OUTPUT if "dora" in kind])
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`")
def test_dora_gives_the_logits_of_peft_merged_or_not(base, saved, tmp_path, kind):
    folder, theirs = base
    if kind == "output-dora" and theirs.config.tie_word_embeddings:
        pytest.skip("the output matrix is the embedding")
    where, expected = saved.get(kind) or (tmp_path, save_adapter(theirs, tmp_path, kind, seed=3))
    merged = adapted(theirs, where).merge_and_unload()
    engine = build_engine(folder, settings(adapters={"a": where}))
    found = logits_of_engine(engine, IDS, "a")
    engine.close()
    scale = expected.abs().max()
    assert (found - expected).abs().max() < 1e-5 * scale
    with torch.no_grad():
        assert (found - merged(IDS[None]).logits[0]).abs().max() < 1e-5 * scale
        assert (found - theirs(IDS[None]).logits[0]).abs().max() > 0.05 * scale


def logits_of_engine(engine, ids, adapter):
    """Return the logits of all tokens of a prompt."""
    seen, run = [], engine.runner.run

    def run_with_all_logits(batch, _settings, *, samples):  # noqa: ARG001
        seen.append(run(replace(batch, logit_rows=np.arange(len(ids)))))
        return seen[0]

    engine.runner.run = run_with_all_logits
    engine.add(Request(prompt=tuple(ids.tolist()), max_tokens=1, adapter=adapter))
    engine.step()
    return seen[0].logits


@pytest.mark.parametrize("weights", ["bfloat16", "int8", "int4"])
def test_an_adapter_fits_weights_of_any_kind(world, weights):
    folder, where, _ = world
    names = [None, *where]
    engine = build_engine(folder, settings(adapters={n: str(f) for n, f in where.items()}, weights=weights))
    together = tokens_of(engine, [(name, PROMPTS[0]) for name in names])
    assert len({tuple(tokens) for tokens in together}) == len(names)
    engine.close()
