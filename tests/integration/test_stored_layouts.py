"""Folders whose tensors are fused or in another order: adapters by PEFT, and rows of a rank."""

import json
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tests.examples import examples
from tests.integration.test_adapter_folders import (
    IDS,
    SMALL,
    close,
    exported,
    logits_of,
    recipe_of,
    tuned,
)
from tests.integration.test_adapter_folders import corpus as corpus
from tests.integration.test_adapters import step
from tests.peft_loop import folder_of
from tests.tiny_models import save_tiny_model
from transformers import AutoModelForCausalLM, GlmConfig, GraniteMoeHybridConfig, Phi3Config

from penstock.checkpoint import hf
from penstock.checkpoint.hf import load_pretrained, read_rows
from penstock.checkpoint.hf_folder import read_config
from penstock.core.errors import ConfigError, ModelError
from penstock.engine.model_runner.lora import Adapters
from penstock.models.decoder.config import DecoderConfig
from penstock.models.decoder.tensor_slices import TensorParallelRank, slice_of
from penstock.models.families import FAMILY
from penstock.nn.rope_scaling import read_rope
from penstock.testing.ranks import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

NO_SPECIAL = {"pad_token_id": None, "eos_token_id": 5}
BASES = {
    "phi3": Phi3Config(**SMALL, **NO_SPECIAL),
    "glm": GlmConfig(**SMALL, **NO_SPECIAL, head_dim=16),
    "granite4": GraniteMoeHybridConfig(
        **SMALL,
        num_local_experts=0,
        shared_intermediate_size=96,
        mamba_n_heads=1,
        layer_types=["attention"] * 2,
        attention_multiplier=0.1,
        position_embedding_type="rope",
    ),
}
TUNES = {
    "lora": {"method": "lora", "rank": 4, "alpha": 6.5},
    "some": {"method": "rslora", "rank": 3, "alpha": 3, "layers": ["query", "value", "up", "down"]},
    "ranks": {
        "method": "lora",
        "rank": 4,
        "alpha": 6,
        "rank_pattern": {"v_proj": 2},
        "alpha_pattern": {"q_proj": 3},
    },
    "dora": {"method": "dora", "rank": 3, "alpha": 6},
}


@pytest.fixture(params=BASES, scope="module")
def base(request, tmp_path_factory):
    return folder_of(tmp_path_factory.mktemp("models") / request.param, BASES[request.param])


@pytest.mark.parametrize("tune", TUNES)
def test_peft_computes_what_was_trained_on_fused_and_reordered_layers(base, corpus, tmp_path, tune):
    recipe = recipe_of(corpus, base, tmp_path / "run", TUNES[tune])
    ((logits, _),) = on_ranks(lambda world: tuned(recipe, world), ranks=1)
    ours = exported(recipe, tmp_path / "ours")
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert (logits_of(plain) - logits).abs().max() > 1e-3, "it learned something"
    theirs = PeftModel.from_pretrained(plain, ours).eval()
    close(logits_of(theirs), logits)
    theirs.save_pretrained(tmp_path / "theirs")
    model = load_pretrained(base, dtype=torch.float32)
    adapters = Adapters(model, model.config)
    adapters.add("theirs", tmp_path / "theirs")
    adapters.begin(step([adapters.indexes["theirs"]], [IDS.numel()]))
    close(logits_of(model), logits)
    merged = AutoModelForCausalLM.from_pretrained(
        exported(recipe, tmp_path / "merged", "--merge", "--dtype", "fp32")
    )
    close(logits_of(merged), logits)


def test_dora_of_a_part_of_a_fused_matrix_is_refused_before_training(tmp_path, corpus):
    base = folder_of(tmp_path / "phi3", BASES["phi3"])
    tune = {"method": "dora", "rank": 3, "alpha": 6, "layers": ["query", "down"]}
    with pytest.raises(ConfigError, match=r"query and key and value in one matrix.*Name query and key and"):
        recipe_of(corpus, base, tmp_path / "run", tune).tune.check_fit(read_config(base))


SIZES = {"vocab_size": 9, "num_hidden_layers": 1}


@pytest.mark.parametrize("model_type", FAMILY)
@given(
    heads=st.sampled_from([(1, 1), (2, 1), (6, 2), (4, 4)]),
    head_dim=st.sampled_from([8, 16, 24]),
    inner=st.integers(1, 40),
    part=st.sampled_from([0.5, 1.0]),
)
@examples(15)
def test_the_parameters_of_a_folder_are_all_rows_of_its_tensors_once(
    model_type, heads, head_dim, inner, part
):
    family = FAMILY[model_type]
    can_be_part = "partial_rotary_factor" in family.fields
    part = part if family.rotates_part else round(part)  # Granite 4.0 rotates whole heads, or none
    config = DecoderConfig(
        **SIZES,
        model_type=model_type,
        hidden_size=48,
        intermediate_size=inner,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=head_dim,
        partial_rotary_factor=part if can_be_part else 1.0,
        rope_scaling=read_rope({}, default=family.default_rope).scaling,
    )
    assert config.stored_rows.keys() == config.parameter_shapes.keys()
    covered = {}
    for name, stored in config.stored_rows.items():
        assert len(stored.rows) == config.parameter_shapes[name][0]
        rows, of = covered.setdefault(stored.tensor, ([], stored.num_rows))
        rows.extend(stored.rows)
        assert of == stored.num_rows
    assert all(sorted(rows) == [*range(of)] for rows, of in covered.values())


class Counting:
    """An open safetensors file that counts the rows that are read of each tensor."""

    def __init__(self, file, counts):
        self._file, self._counts = file, counts

    def get_tensor(self, name):
        whole = self._file.get_tensor(name)
        self._counts[name] = self._counts.get(name, 0) + len(whole)
        return whole

    def get_slice(self, name):
        outer, inner = self, self._file.get_slice(name)

        class Rows:
            def get_shape(self):
                return inner.get_shape()

            def __getitem__(self, which):
                rows = inner[which]
                outer._counts[name] = outer._counts.get(name, 0) + len(rows)
                return rows

        return Rows()


@pytest.mark.parametrize("family", ["llama", "phi3", "glm", "granite4"])
def test_a_rank_reads_no_more_than_the_rows_from_its_first_to_its_last(family, tmp_path, monkeypatch):
    save_tiny_model(family, tmp_path)
    config, opened = read_config(tmp_path), hf.open_weights
    for rank in range(2):
        counts, place = {}, TensorParallelRank(rank, 2)

        @contextmanager
        def counting(path, counts=counts):
            with opened(path) as file:
                yield Counting(file, counts)

        monkeypatch.setattr(hf, "open_weights", counting)
        load_pretrained(tmp_path, place=place)
        most = {}
        for name, stored in config.stored_rows.items():
            cut = slice_of(name, config, place)
            rows = stored.rows[cut[1].start : cut[1].stop] if cut and cut[0] == 0 else stored.rows
            most[stored.tensor] = most.get(stored.tensor, 0) + max(rows) - min(rows) + 1
        assert counts == most


def test_rows_in_any_order_and_columns_are_those_of_the_tensor(tmp_path):
    whole = torch.randn(7, 5)
    save_file({"w": whole}, tmp_path / "w.safetensors")
    with hf.open_weights(tmp_path / "w.safetensors") as file:
        assert torch.equal(read_rows(file, "w", (6, 2, 4)), whole[[6, 2, 4]])
        assert torch.equal(read_rows(file, "w", range(1, 6, 2), slice(1, 3)), whole[1:6:2, 1:3])
        assert torch.equal(read_rows(file, "w", range(2, 4)), whole[2:4])


def test_a_fused_tensor_whose_parts_do_not_add_up_is_named(tmp_path):
    save_tiny_model("phi3", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.self_attn.qkv_proj.weight"
    save_file({**tensors, name: tensors[name][:-1].clone()}, path, metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=rf"{name} in .* has shape \(63, 32\), but config.json makes it \(64, 32\)"
    ):
        load_pretrained(tmp_path)


def test_granite_4_with_mamba_layers_or_experts_is_refused_with_the_sizes_that_open(tmp_path):
    save_tiny_model("granite4", tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    for change in ({"layer_types": ["mamba", "attention"]}, {"num_local_experts": 4}):
        path.write_text(json.dumps({**raw, **change}))
        with pytest.raises(ModelError, match=r"Mamba layers or experts is not supported.*granite-4\.0-micro"):
            read_config(tmp_path)
