"""Tuning with adapters: the losses of peft and transformers in a plain loop on the CPU."""

import pytest
import torch

from penstock.nn.linear.lora import RoundedProduct
from penstock.parallel.mesh import join
from penstock.testing.corpora import write_corpus
from penstock.testing.training import records_of
from penstock.train.resolve.load import build_recipe
from penstock.train.setup import open_state

pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
from tests.peft_loop import PROJECTIONS, folder_of, peft_loop  # noqa: E402 - they import both

pytestmark = pytest.mark.filterwarnings("ignore")  # of PEFT and of the compiler, about themselves
VOCAB, STEPS = 211, 6
WAYS = {
    "lora": ({"method": "lora"}, {}, 2e-4),
    "lora, compiled": ({"method": "lora"}, {"compile": {"enabled": True}}, 2e-4),
    "lora, blocks recomputed": ({"method": "lora"}, {"recompute": {"policy": "full"}}, 2e-4),
    "dora": ({"method": "dora"}, {}, 2e-4),
    "int8": ({"method": "lora", "base": "int8"}, {}, 2e-2),
    "int4": ({"method": "lora", "base": "int4"}, {}, 2e-2),
    "int4, compiled": ({"method": "lora", "base": "int4"}, {"compile": {"enabled": True}}, 2e-2),
    "bfloat16, compiled": ({"method": "lora"}, {"compile": {"enabled": True}, "compute": "bfloat16"}, 2e-2),
}
"""[tune], the rest of the recipe, and how far a loss may be from the reference's, as a share: sums in another
order in float32, else roundings of activations."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Documents that count from somewhere on, which a model learns at once."""
    documents = [[(7 * n + i) % VOCAB for i in range(n % 90 + 5)] for n in range(300)]
    return write_corpus(tmp_path_factory.mktemp("corpus"), documents, vocab_size=VOCAB)


@pytest.fixture(scope="module")
def base(tmp_path_factory, is_tiny):
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128 if is_tiny else 384,
        intermediate_size=256 if is_tiny else 896,
        num_hidden_layers=2,
        num_attention_heads=6 if not is_tiny else 4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.1,
    )
    return folder_of(tmp_path_factory.mktemp("base"), config)


def whole(parameter):
    tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return tensor.detach().cpu().clone()


def rounded_base(base, where, kind):
    """Write a model whose adapted matrices have the values that 8 or 4 bits leave of them."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in PROJECTIONS.values():
            product = RoundedProduct(module.weight.detach(), kind)
            product.fill(module.weight.detach().clone())
            module.weight.data.copy_(product.matrix())
    model.save_pretrained(where)
    return where


@pytest.mark.parametrize("way", WAYS)
def test_losses_are_those_of_peft(way, corpus, base, device, is_tiny, tmp_path):
    tune, options, near = WAYS[way]
    if "compile" in options and device.type == "cpu":
        pytest.skip("Inductor takes a minute on a CPU")

    def recipe_of(folder, tune, **options):
        return build_recipe(
            {
                "run": {"dir": str(tmp_path / folder.name), "steps": STEPS, "start_from": str(folder)},
                "tune": {"rank": 4, "alpha": 8.0, **tune},
                "data": {
                    "corpora": {"c": {"path": str(corpus)}},
                    "sequence_length": 24 if is_tiny else 120,
                    "global_batch_size": 6,
                    "micro_batch_size": 6,
                },
                "optim": {"learning_rate": 1e-2, "clip_norm": 0.5},
                "schedule": {"rule": "constant"},
                "compute": "float32",
                **options,
            }
        )

    recipe = recipe_of(base, tune, **options)
    with join() as world:
        state = open_state(recipe, world)
        learned = [(name, p) for name, p in state.model.named_parameters() if p.requires_grad]
        first = {name: whole(parameter) for name, parameter in learned}
        found = [record["loss"] for record in records_of(state, recipe, world) if "loss" in record]
    kind = tune.get("base")
    folder = base if kind is None else rounded_base(base, tmp_path / "rounded", kind)
    plain = {name: value for name, value in tune.items() if name != "base"}
    expected, _ = peft_loop(recipe_of(folder, plain), first, gradients_of=1)
    assert expected[-1] < 0.95 * expected[0], "little is learned, and would prove little"
    assert found == pytest.approx(expected, rel=near)
