"""More layouts against the plain loop than test_parallel_layouts.py has: `make soak PART=layouts`."""

import pytest
from tests.ranks.test_parallel_layouts import (
    FAMILIES,
    LLAMA,
    PARTS,
    Case,
    assert_equal,
    batches_of,
    corpus,
    of_parts,
    plain,
    resume,
)

__all__ = ["corpus", "plain"]

LAYOUTS = [
    (2, {"tensor": 2}),
    (8, {"tensor": 2, "shard": 2, "replicate": 2}),
    (4, {"tensor": 2, "offload": True, "reshard_after_forward": False}),
    (4, {"context": 4, "context_rule": "ulysses"}),
    (4, {"context": 2, "tensor": 2}),
    (4, {"context": 2, "tensor": 2, "context_rule": "ulysses"}),
    (8, {"context": 2, "tensor": 2, "shard": 1, "replicate": 2}),
    (8, {"context": 2, "tensor": 2, "shard": 1, "replicate": 2, "context_rule": "ulysses"}),
    (4, {"pipeline": 2, "shard": 1, "replicate": 2, "rows": 2}),
    (4, {"pipeline": 2, "tensor": 2, "rows": 2}),
    (4, {"pipeline": 2, "context": 2, "rows": 4}),
    (8, {"pipeline": 2, "tensor": 2, "rows": 1, "reshard_after_forward": False}),
]
MODELS = [
    (8, {"num_key_value_heads": 1}, {"tensor": 4, "pipeline": 2, "rows": 2}),
    (
        8,
        FAMILIES["tied"] | {"num_hidden_layers": 4},
        {"pipeline": 2, "replicate": 2, "shard": 2, "reshard_after_forward": False, "rows": 1},
    ),
    (4, {"num_hidden_layers": 5}, {"pipeline": 2, "tensor": 2, "stages_per_rank": 2, "rows": 2}),
    *(
        (stretches, FAMILIES[family], {"context": stretches, "context_rule": rule})
        for family, stretches in (("mistral", 4), ("gemma2", 2))
        for rule in ("all_gather", "ulysses")
    ),
]


CASES: dict[str, Case] = {
    f"{ranks} ranks, {model}, {parallel}": (ranks, LLAMA | model, parallel)
    for ranks, model, parallel in [*((ranks, {}, parallel) for ranks, parallel in LAYOUTS), *MODELS]
}
MORE_OF_PARTS = of_parts(
    ("granite_swa", 4, {}),
    ("granite_swa", 4, {"tensor": 4}),
    ("granite_swa", 2, {"context": 2}),
    ("granite_swa", 4, {"context": 4, "context_rule": "ulysses"}),
    ("granite_swa", 2, {"pipeline": 2, "rows": 2}),
    ("gemma2", 4, {"tensor": 2}),
    ("gemma2", 4, {"context": 4}),
    ("gemma2", 4, {"pipeline": 4, "rows": 2}),
    ("gemma2", 8, {"pipeline": 2, "context": 2, "tensor": 2, "rows": 4}),
)


@pytest.fixture(scope="module")
def batches(corpus, tmp_path_factory):
    return batches_of(CASES | MORE_OF_PARTS, corpus, tmp_path_factory.mktemp("layouts"))


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_equal_those_of_the_plain_loop(batches, plain, case):
    assert_equal(batches.of(case), plain(CASES[case][1]))


@pytest.mark.parametrize("case", MORE_OF_PARTS)
def test_layers_of_different_kinds_learn_over_ranks_as_on_one(batches, plain, case):
    assert_equal(batches.of(case), plain(MORE_OF_PARTS[case][1], parts=PARTS))


def test_a_run_resumes_in_six_layouts(corpus, tmp_path, plain):
    layouts = [
        (2, 4, {"tensor": 4}),
        (4, 4, {"tensor": 2}),
        (6, 4, {"pipeline": 2, "rows": 2}),
        (8, 2, {"shard": 1, "replicate": 2}),
        (10, 2, {"pipeline": 2, "stages_per_rank": 2, "rows": 4}),
        (12, 1, {}),
    ]
    resume(corpus, tmp_path, plain, layouts)
