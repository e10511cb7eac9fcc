"""Dropout, patterns of layers and frozen parameters equal peft + transformers, on every number of ranks.

As in test_adapter_training.py; each method has one model, and peft's dropout has a run's masks by hand.
"""

import pytest
import torch
from peft import PeftModel
from tests.peft_loop import folder_of, peft_loop
from tests.rank_batches import RankBatches
from tests.ranks.test_adapter_training import LOOKED_AT, SMALL, check, recipe_of, tuned
from tests.ranks.test_adapter_training import corpus as corpus
from transformers import AutoModelForCausalLM, LlamaConfig

from penstock.checkpoint.adapter_run import open_with_adapter
from penstock.checkpoint.open_model import open_model
from penstock.cli.main import main
from penstock.core.errors import ModelError
from penstock.engine.model_runner.lora import Adapters
from penstock.models.decoder.model import Decoder
from penstock.testing.ranks import on_ranks
from penstock.testing.training import records_of
from penstock.train.live_engine import fill_whole
from penstock.train.setup import open_state

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

LORA = {"method": "lora", "rank": 4, "alpha": 6.0}
METHODS = {
    "patterns": {
        **LORA,
        "layers": ("q_proj", "v_proj", "up_proj", "down_proj"),
        "layers_to_transform": (1,),
        "exclude_modules": ("down_proj",),
        "rank_pattern": {"v_proj": 2, r"layers\.1\.mlp\.up_proj": 3},
        "alpha_pattern": {"self_attn.q_proj": 3.0},
    },
    "regex": {**LORA, "layers": r"model\.layers\.0\.(self_attn|mlp)\.(q|v|down)_proj"},
    "frozen": {
        "method": "full",
        "freeze": ("embed_tokens", r"layers\.0", "mlp.gate_proj", "input_layernorm"),
    },
    "dropout": {**LORA, "dropout": 0.3},
    "saved": {
        **LORA,
        "layers": "attention",
        "modules_to_save": ("embed_tokens", "lm_head", "post_attention_layernorm", "gate_proj"),
    },
    "dora dropout": {**LORA, "method": "dora", "dropout": 0.3, "layers": ("query", "down")},
}
LAYOUTS = [
    ("patterns", 2, {"base_sharding": "sharded"}),
    ("patterns", 2, {"tensor": 2}),
    ("regex", 2, {}),
    ("frozen", 2, {}),
    ("frozen", 2, {"tensor": 2}),
    ("saved", 2, {"base_sharding": "sharded"}),
    ("saved", 2, {"tensor": 2}),
    ("saved", 2, {"pipeline": 2, "rows": 2}),
    ("dropout", 2, {"rows": 2}),
    ("dropout", 4, {"tensor": 2, "shard": 2}),
    ("dropout", 2, {"context": 2}),
    ("dropout", 2, {"pipeline": 2, "rows": 2}),
    ("dora dropout", 2, {"tensor": 2}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True)
    return folder_of(tmp_path_factory.mktemp("models") / "llama", config)


ALONE = {method: (method, 1, {}) for method in METHODS}
SHARED = {
    f"{method}, {ranks} ranks, {settings}": (method, ranks, settings) for method, ranks, settings in LAYOUTS
}


@pytest.fixture(scope="module")
def recipes(corpus, folder, tmp_path_factory):
    run = tmp_path_factory.mktemp("runs")
    return {
        name: recipe_of(corpus, folder, run / str(number), METHODS[method], **settings)
        for number, (name, (method, _, settings)) in enumerate((ALONE | SHARED).items())
    }


@pytest.fixture(scope="module")
def batches(recipes):
    """What each rank finds, by case."""
    ranks = {name: case[1] for name, case in (ALONE | SHARED).items()}
    return RankBatches(ranks, lambda name, world: tuned(recipes[name], world))


@pytest.fixture(scope="module")
def references(recipes, batches):
    """Return what peft computes for a method, from the first values of a run on one rank; each once."""
    found = {}

    def reference(method):
        if method not in found:
            ((first, records, gradients),) = batches.of(method)
            found[method] = records, gradients, peft_loop(recipes[method], first, gradients_of=LOOKED_AT)
        return found[method]

    return reference


@pytest.mark.parametrize("method", METHODS)
def test_one_process_computes_what_peft_does(references, method):
    check(*references(method))


@pytest.mark.parametrize("case", SHARED)
def test_every_layout_computes_what_peft_does(batches, references, case):
    results = batches.of(case)
    gradients = {name: g for _, _, found in results for name, g in found.items()}
    check(results[0][1], gradients, references(SHARED[case][0])[2])


def test_a_resumed_run_drops_what_the_whole_one_did_bit_for_bit(corpus, folder, references, tmp_path):
    recipe = recipe_of(corpus, folder, tmp_path / "run", METHODS["dropout"])
    losses = []
    for stop in (2, None):
        ((_, records, _),) = on_ranks(lambda world, s=stop: tuned(recipe, world, stop_at=s), ranks=1)
        losses += [record["loss"] for record in records if "loss" in record]
    assert losses == [record["loss"] for record in references("dropout")[0] if "loss" in record]


@pytest.mark.parametrize(("method", "ranks"), [("patterns", 2), ("saved", 2), ("frozen", 1)], ids=str)
def test_the_live_weights_are_those_of_the_checkpoint_merged(corpus, folder, tmp_path, method, ranks):
    recipe = recipe_of(corpus, folder, tmp_path / "run", METHODS[method], steps=2)

    def live(world):
        state = open_state(recipe, world)
        records_of(state, recipe, world)
        model = Decoder(recipe.model) if world.is_first else None
        fill_whole(model, state, recipe, world)
        return None if model is None else dict(model.named_parameters())

    found, *_ = on_ranks(live, ranks=ranks)
    merged, _ = open_model(tmp_path / "run")
    for name, parameter in merged.named_parameters():
        torch.testing.assert_close(found[name], parameter, rtol=1e-6, atol=1e-7)


def test_peft_opens_modules_that_were_trained_whole_and_an_engine_refuses_them_by_name(
    corpus, folder, tmp_path
):
    recipe = recipe_of(corpus, folder, tmp_path / "run", METHODS["saved"], steps=2)
    for _ in range(2):  # the second start resumes a run that has ended: nothing of the base is taken instead
        ((first, _, _),) = on_ranks(lambda world: tuned(recipe, world), ranks=1)
    merged, _ = open_model(tmp_path / "run")
    assert torch.equal(merged.get_parameter("embed.weight"), first["embed.weight"])
    out = tmp_path / "adapter"
    assert main(["export", str(tmp_path / "run"), "--out", str(out)]) == 0
    ids = torch.arange(40)[None]
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, out).eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, merged(ids), rtol=1e-4, atol=1e-5)
    again, _ = open_with_adapter(out, base=folder)
    for name, parameter in merged.named_parameters():
        torch.testing.assert_close(again.get_parameter(name), parameter, rtol=0, atol=0)
    model = Decoder(merged.config)
    with pytest.raises(ModelError, match=r"trained whole.*embed_tokens.*--merge --out DIR"):
        Adapters(model, model.config).add("tuned", out)
