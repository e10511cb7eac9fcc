"""Plans of networks whose layers lack a part: each block counts as itself."""

from dataclasses import replace

import pytest
import torch
from tests.families import mixed

from penstock.devices.figures import DEVICES
from penstock.models.decoder.config import DecoderConfig
from penstock.models.decoder.model import Decoder
from penstock.nn.linear.adapter_config import AdapterConfig
from penstock.parallel.activation_checkpointing_plan import RecomputeConfig, multiplied_again, plan
from penstock.parallel.layout import RankLayout
from penstock.plan.block_costs import units_of
from penstock.plan.compute import FITTED, block_seconds
from penstock.plan.decode import DecodeJob, predict_decode
from penstock.plan.hardware import Cluster
from penstock.plan.job import TrainingStep
from penstock.plan.memory import BytesPerParameter, Rank, moments

SHAPE = DecoderConfig(
    vocab_size=4096,
    hidden_size=4096,
    intermediate_size=8192,
    num_attention_heads=32,
    num_key_value_heads=8,
    num_hidden_layers=8,
    model_type="qwen3",
)
MIXED = mixed(SHAPE, "mlp", "both", "attention", "both")
CLUSTER = Cluster(nodes=1, devices_per_node=8, device=DEVICES["H100-80GB"])
LORA = AdapterConfig(method="lora", rank=8, alpha=16.0, layers=("query", "down"))


def job(model=MIXED, **changes):
    fields = {"layout": RankLayout(shard=8), "sequence_length": 4096, "num_micro_batches": 2, **changes}
    return TrainingStep(model=model, **fields)


def test_a_block_of_both_parts_takes_as_long_as_one_of_each():
    mlp, both, attention, _ = (
        block_seconds(job(), CLUSTER.device, FITTED, kind) for kind in MIXED.layers[:4]
    )
    for whole, one, other in zip(both, attention, mlp, strict=True):
        assert whole == pytest.approx(one + other)
    units = units_of(job(), CLUSTER, FITTED)
    assert units[1].forward == pytest.approx(units[0].forward + units[2].forward)
    sent = [unit.transfers.gather.seconds for unit in units]
    assert sent[0] > sent[2], "a feed-forward has more parameters"
    assert sent[1] > sent[0]


def test_a_block_of_both_parts_keeps_as_much_as_one_of_each_whose_input_is_kept_once():
    mlp, both, attention, _ = (job().kept_by_mode(kind) for kind in MIXED.layers[:4])
    assert both["keep"] == attention["keep"] + mlp["keep"]
    assert both["operators"] == attention["operators"] + mlp["operators"] - both["full"]


@pytest.mark.parametrize("adapter", [None, LORA])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_the_ranks_of_a_pipeline_learn_what_the_network_learns(stages, adapter):
    staged = job(layout=RankLayout(pipeline=stages), adapter=adapter)
    ranks = [Rank.of(staged, BytesPerParameter(), place) for place in range(stages)]
    if adapter is None:
        assert sum(rank.in_blocks for rank in ranks) == MIXED.num_parameters - staged.outside
        assert staged.learned_of_rank == MIXED.num_parameters / stages
        return
    with torch.device("meta"):
        model = Decoder(MIXED)
    layers = [layer for name, layer in model.layers.named_modules() if name.endswith(("query", "down"))]
    assert len(layers) == 12
    numbers = sum(8 * (layer.in_features + layer.out_features) for layer in layers)
    assert sum(rank.learned for rank in ranks) == numbers
    assert staged.learned_of_rank == numbers / stages


def test_the_loss_has_what_each_block_keeps_and_a_rank_the_bytes_of_its_own_blocks():
    modes = ("full", "keep", "operators", "keep") * 2
    alone = job(layout=RankLayout(), modes=modes, compute="float32")
    rank = Rank.of(alone, BytesPerParameter(), 0)
    kept = [alone.kept_by_mode(kind)[mode] for kind, mode in zip(MIXED.layers, modes, strict=True)]
    found = {moment.moment: moment for moment in moments(alone, BytesPerParameter())}
    assert found["loss"].activations == sum(kept) + rank.around
    assert found["loss"].weights == 4 * MIXED.num_parameters


def test_a_budget_counts_each_block_and_products_computed_again_those_of_its_parameters():
    kept = [job().kept_by_mode(kind) for kind in MIXED.layers]
    least = sum(block["full"] for block in kept)
    budget = least + kept[7]["keep"] - kept[7]["full"]
    modes = plan(RecomputeConfig(policy="budget", budget=str(budget)), kept=kept)
    assert sum(block[mode] for block, mode in zip(kept, modes, strict=True)) <= budget
    assert modes != ["full"] * 8
    sizes = [MIXED.parameters_of([kind]) for kind in MIXED.layers]
    assert multiplied_again(["full", *["keep"] * 7], sizes) == sizes[0] / sum(sizes)


@pytest.mark.parametrize("compiled", [True, False])
def test_decoding_waits_for_the_kernels_and_sums_of_the_parts_that_are_there(compiled):
    whole, some = (
        predict_decode(DecodeJob(model=model, tensor=2, compiled=compiled, graphs=compiled), CLUSTER)
        for model in (SHAPE, MIXED)
    )
    assert some.collectives_s == pytest.approx(whole.collectives_s * 12 / 16)
    assert some.kernels_s == pytest.approx(whole.kernels_s * 12 / 16, rel=0.02)
    assert some.token_s < whole.token_s


def test_tensor_ranks_exchange_the_tokens_of_each_part_and_context_ranks_only_keys_and_values():
    for layout, without in ((RankLayout(tensor=2, shard=4), ()), (RankLayout(context=2, shard=4), (0, 4))):
        units = units_of(replace(job(), layout=layout), CLUSTER, FITTED)[:8]
        assert {index for index, unit in enumerate(units) if not unit.inline} == set(without)
    units = units_of(job(layout=RankLayout(tensor=2, shard=4)), CLUSTER, FITTED)
    assert units[0].inline == pytest.approx(units[1].inline / 2, rel=0.2)
