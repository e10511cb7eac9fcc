"""The decoder on its own: documents, caches of none, sharing, configs and recipes."""

import pytest
import torch

from penstock.core.config import build, dump
from penstock.core.errors import ConfigError, UsageError
from penstock.models import FAMILIES
from penstock.models.decoder.config import DecoderConfig
from penstock.models.decoder.model import Block, Decoder
from penstock.nn.init import init_weights
from penstock.nn.rope_scaling import RopeRule, RopeScaling

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
IDS = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(0))
ENDS = torch.tensor([0, 5, 16, 23, 32], dtype=torch.int32)


def built(**changes):
    with torch.device("meta"):
        model = Decoder(DecoderConfig(**{**SIZES, **changes}))
    model.to_empty(device="cpu")
    init_weights(model, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith(
                ("query_norm.weight", "key_norm.weight")
            ):  # a sharp softmax magnifies rounding
                parameter.mul_(5)  # so that what a token sees moves its logits by more than rounding
    return model


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model_type": "mistral", "sliding_window": 3},
        {"model_type": "qwen2", "sliding_window": 3, "max_window_layers": 1},
        {"model_type": "qwen3"},
    ],
    ids=["all", "window", "windowed-layer", "query-key-norm"],
)
def test_a_document_in_a_packed_row_has_the_logits_it_has_alone(changes):
    model = built(**changes)
    packed = model(IDS, cu_seqlens=ENDS)
    alone = model(IDS[:1, 5:])
    torch.testing.assert_close(packed[:1, 5:], alone, rtol=0, atol=1e-5)
    assert not torch.allclose(model(IDS)[:1, 5:], alone, atol=1e-2)


def test_positions_given_by_the_caller_equal_those_counted_from_the_documents():
    model = built()
    positions = torch.tensor([[*range(5), *range(11)], [*range(7), *range(9)]])
    assert torch.equal(model(IDS, cu_seqlens=ENDS, position_ids=positions), model(IDS, cu_seqlens=ENDS))


def test_gradients_of_packed_documents_are_those_of_the_documents_alone():
    model = built()
    model(IDS, cu_seqlens=ENDS).square().sum().backward()
    packed = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for row, start, stop in ((0, 0, 5), (0, 5, 16), (1, 0, 7), (1, 7, 16)):
        model(IDS[row : row + 1, start:stop]).square().sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(packed[name], p.grad, rtol=1e-3, atol=1e-3, msg=name)


def test_finish_receives_the_residual_stream_and_the_projection():
    model = built()
    chunked = model(
        IDS, finish=lambda hidden, head: torch.cat([head(part) for part in hidden.split(5, 1)], 1)
    )
    torch.testing.assert_close(chunked, model(IDS), rtol=0, atol=1e-5)


def test_a_tied_model_has_one_matrix_and_trains_it_from_both_ends():
    model = built(tie_word_embeddings=True)
    assert "unembed.weight" not in model.state_dict()
    model(IDS[:, :1]).sum().backward()
    assert (model.embed.weight.grad.abs().sum(1) > 0).all()  # rows never looked up learn as outputs


def test_nothing_has_to_be_rebuilt_after_construction_on_the_meta_device():
    assert not list(built().buffers())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True, "head_dim": 10},
        {"attention_bias": True, "mlp_bias": True},
        {"model_type": "qwen2"},
        {"model_type": "qwen3", "head_dim": 16, "attention_bias": True},
    ],
)
def test_num_parameters_is_what_the_model_has(changes):
    model = built(**changes)
    assert model.config.num_parameters == sum(p.numel() for p in model.parameters())
    assert model.config.parameter_shapes == {n: tuple(p.shape) for n, p in model.named_parameters()}


def test_training_flops_are_those_that_torch_counts():
    from torch.utils.flop_counter import FlopCounterMode

    model, seq_len = built(), 16
    with FlopCounterMode(display=False) as counter:
        model(IDS).sum().backward()
    # torch counts attention with the causal half too; the fused CPU kernel is not in its table, so
    # the matrices are compared, and attention is the rest by definition
    attention = 12 * 2 * 32 * seq_len
    expected = (model.config.flops_per_token(seq_len) - attention) * IDS.numel()
    counted = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "attention" not in str(op))
    norms = 6 * IDS.numel() * 32 * 5  # counted as parameters by the formula; elementwise for torch
    assert counted == expected - norms


@torch.no_grad()
def test_without_positions_earlier_tokens_count_in_any_order():
    swapped = IDS[:, [2, 1, 0, *range(3, 16)]]
    for bases, is_same in (((0.0,), True), ((10_000.0,), False)):
        model = built(model_type="smollm3", num_hidden_layers=1, layer_rope_theta=bases).double()
        difference = (model(swapped) - model(IDS))[:, 3:].abs().max()
        assert difference < 1e-12 if is_same else difference > 1e-2


def test_each_layer_has_the_base_and_the_scaling_of_its_kind():
    linear = RopeScaling(rope_type="linear", factor=2.0)
    config = DecoderConfig(**SIZES, model_type="qwen3", sliding_window=4, max_window_layers=1)
    # no family has all of this; a config is checked when it is made only
    for name, value in {"scaled_layers": "full_attention", "layer_rope_theta": (1e6, 1e4)}.items():
        object.__setattr__(config, name, value)
    object.__setattr__(config, "rope_scaling", linear)
    assert tuple(attention.rope for attention in config.attentions) == (
        RopeRule(theta=1e6, scaling=linear, rotated=1.0),
        RopeRule(theta=1e4, scaling=None, rotated=1.0),
    )


def test_a_window_of_some_layers_is_counted_for_those():
    sizes = {**SIZES, "num_hidden_layers": 3, "model_type": "qwen3"}
    whole = DecoderConfig(**sizes)
    some = DecoderConfig(**sizes, sliding_window=10, max_window_layers=1)
    assert some.windows == (None, 10, 10)
    assert whole.flops_per_token(50) - some.flops_per_token(50) == 12 * 32 * 2 * (50 - 10)


@torch.no_grad()
def test_blocks_compile_once_for_batches_of_different_documents():
    torch.compiler.reset()
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    model, plain = built(), built()
    for index, block in enumerate(model.layers):
        model.layers[index] = torch.compile(block, backend=count, fullgraph=True)
    torch.testing.assert_close(model(IDS, cu_seqlens=ENDS), plain(IDS, cu_seqlens=ENDS))
    assert len(graphs) == 1
    for ends in ([0, 16, 32], [0, 1, 9, 16, 32], [0, 4, 16, 20, 24, 28, 32]):
        ends = torch.tensor(ends, dtype=torch.int32)
        torch.testing.assert_close(model(IDS, cu_seqlens=ends), plain(IDS, cu_seqlens=ends))
    assert len(graphs) == 1


def test_a_family_is_found_by_the_name_in_config_json():
    assert {FAMILIES[name] for name in FAMILIES} == {Decoder}
    assert isinstance(built().layers[0], Block)
    with pytest.raises(UsageError, match="Did you mean 'mistral'"):
        FAMILIES["mistrl"]


def test_a_recipe_builds_a_config_and_reads_its_own_dump():
    scaling = {
        "rope_type": "llama3",
        "factor": 8,
        "low_freq_factor": 1,
        "high_freq_factor": 4,
        "original_max_position_embeddings": 32,
    }
    config = build(DecoderConfig, {**SIZES, "rope_scaling": scaling})
    assert config.rope_scaling is not None
    assert build(DecoderConfig, dump(config)) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 30}, r"num_attention_heads must divide hidden_size 30 \(got 4\)"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must divide num_attention_heads 4"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"vocab_size": 0}, "vocab_size must be positive"),
        ({"sliding_window": 4}, "not supported by llama models.*Set model_type to cwm or exaone4"),
        ({"logits_scaling": 2.0}, "Set model_type to granite"),
        (
            {"model_type": "smollm3", "layer_rope_theta": (0.0,)},
            r"layer_rope_theta must have a number for each of the 2 layers \(got '1 numbers'\)",
        ),
        (
            {"model_type": "smollm3", "layer_rope_theta": (0.0, -1.0)},
            r"layer_rope_theta must have positive numbers, or 0 \(got -1",
        ),
        (
            {"model_type": "smollm3", "layer_rope_theta": (0.0, 500.0)},
            r"layer_rope_theta must be 0 or rope_theta 10000 in smollm3 models \(got \[500",
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "longrope",
                    "factor": 2.0,
                    "original_max_position_embeddings": 8,
                    "short_factor": [1.0] * 4,
                    "long_factor": [1.0] * 3,
                },
            },
            r"long_factor must have a number for each of the 4 frequencies \(got '3 numbers'",
        ),
        (
            {"layer_rope_theta": (0.0, 1e4)},
            "not supported by llama models.*Set model_type to exaone4 or gemma3_text",
        ),
        (
            {"model_type": "mixtral"},
            r"no such choice \(got 'mixtral'\). Known: arcee, cwm, ernie4_5, exaone4",
        ),
        ({"attention_bias": True, "model_type": "qwen2"}, "not supported by qwen2 models"),
        (
            {"model_type": "qwen3", "max_window_layers": 1},
            "max_window_layers needs sliding_window",
        ),
        (
            {"model_type": "qwen3", "sliding_window": 4, "max_window_layers": 3},
            r"from 0 to num_hidden_layers 2 \(got 3\)",
        ),
    ],
)
def test_a_shape_that_cannot_be_built_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        build(DecoderConfig, {**SIZES, **changes})


def test_a_misspelt_key_of_a_recipe_names_the_nearest():
    with pytest.raises(ConfigError, match="hidden_size"):
        build(DecoderConfig, {**SIZES, "hiden_size": 32})
