"""Rotary embeddings: what scores depend on, and what configurations are refused."""

import pytest
import torch

from penstock.core.config import build
from penstock.core.errors import ConfigError, ModelError
from penstock.nn.rope import rope_tables, rotate
from penstock.nn.rope_scaling import RopeRule, RopeScaling, read_rope, write_rope


def tables(positions, *, dtype=torch.float64, scaling=None, max_positions=64):
    return rope_tables(
        torch.as_tensor(positions)[None],
        head_dim=8,
        rule=RopeRule(theta=10_000.0, scaling=scaling, rotated=1.0),
        max_positions=max_positions,
        longest_text=max_positions,
        dtype=dtype,
    )


def test_scores_depend_on_the_distance_of_positions_only():
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)
    scores = [
        (rotate(q, *tables([i])) * rotate(k, *tables([j]))).sum() for i, j in ((3, 1), (13, 11), (42, 40))
    ]
    torch.testing.assert_close(scores[1], scores[0], rtol=0, atol=1e-5)  # angles are float32
    torch.testing.assert_close(scores[2], scores[0], rtol=0, atol=1e-5)


def test_a_token_is_rotated_by_its_own_position_in_each_head():
    x = torch.randn(1, 3, 2, 8, dtype=torch.float64)
    alone = [rotate(x[:, [n], [head]][:, None], *tables([n])) for n in range(3) for head in range(2)]
    together = rotate(x, *tables(range(3)))
    assert torch.equal(together.flatten(0, 2), torch.cat(alone).flatten(0, 2))


def test_position_zero_is_left_alone():
    x = torch.randn(1, 2, 1, 8, dtype=torch.float64)
    assert torch.equal(rotate(x, *tables([0])), x)


def test_angles_of_far_positions_are_exact_in_bfloat16():
    exact, rounded = tables([4095]), tables([4095], dtype=torch.bfloat16)
    assert torch.equal(exact[0].to(torch.bfloat16), rounded[0])


def test_the_dynamic_rule_changes_nothing_within_the_context():
    dynamic = RopeScaling(rope_type="dynamic", factor=4.0)
    inside, outside = list(range(64)), list(range(65))
    assert torch.equal(tables(inside, scaling=dynamic)[1], tables(inside)[1])
    assert not torch.equal(tables(outside, scaling=dynamic)[1], tables(outside)[1])


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"rope_type": "linear", "factor": 0.5}, "factor must be at least 1"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3.0}, "beta_fast has no meaning for linear"),
        ({"rope_type": "yarn", "factor": 2.0}, "original_max_position_embeddings is needed by yarn"),
        (
            {
                "rope_type": "longrope",
                "factor": 2.0,
                "original_max_position_embeddings": 8,
                "short_factor": [1.0],
                "long_factor": [0.0],
            },
            "long_factor must have positive numbers",
        ),
        ({"rope_type": "longrope", "factor": 2.0}, "is needed by longrope"),
        ({"rope_type": "cubic", "factor": 2.0}, "no such choice"),
    ],
)
def test_a_recipe_with_a_meaningless_scaling_is_refused(raw, message):
    with pytest.raises(ConfigError, match=message):
        build(RopeScaling, raw)


def test_an_unknown_field_in_a_model_folder_is_refused():
    with pytest.raises(ModelError, match="short_factor"):
        read_rope({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "short_factor": [1.0]}})


@pytest.mark.parametrize(
    "scaling", [None, RopeScaling(rope_type="yarn", factor=2.0, original_max_position_embeddings=8)]
)
@pytest.mark.parametrize("rotated", [None, 0.5])
def test_what_is_written_is_read_back(scaling, rotated):
    rule = RopeRule(theta=500_000.0, scaling=scaling, rotated=rotated or 1.0)
    assert read_rope(write_rope(rule.theta, scaling, rotated=rotated)) == rule


def test_what_a_family_assumes_holds_where_nothing_is_said():
    default = {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0, "partial_rotary_factor": 0.5}
    linear = RopeScaling(rope_type="linear", factor=2.0)
    assert read_rope({}, default=default) == RopeRule(theta=7.0, scaling=linear, rotated=0.5)
    given = {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}
    assert read_rope(given, default=default) == RopeRule(theta=7.0, scaling=None, rotated=0.25)
    assert read_rope({"rope_theta": 9.0}, default={"rope_theta": 7.0}).theta == 9.0
