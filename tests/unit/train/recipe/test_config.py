"""Recipes: every value that is refused (the rest: tests/e2e)."""

from typing import Any

import pytest

from penstock.core import config
from penstock.core.errors import ConfigError, UsageError
from penstock.train.resolve.load import build_recipe


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {"schedule": "breadth_first"},
            r"which order micro-batches themselves \(got 'breadth_first'\)\. Leave",
        ),
        ({"keep_mib": 8.0}, r"keep_mib does not apply to pipelines: .* \(got 8\.0\)"),
    ],
)
def test_what_a_pipeline_does_itself_is_refused(raw: dict[str, Any], value: Any, message: str) -> None:
    raw["ethernet"] = value
    build_recipe(raw)
    raw["parallel"], raw["model"]["num_hidden_layers"] = {"pipeline": 2}, 2
    with pytest.raises(ConfigError, match=message):
        build_recipe(raw)


def test_weights_are_of_all_corpora_or_of_none(raw: dict[str, Any]) -> None:
    path = raw["data"]["corpora"]["c"]["path"]
    assert build_recipe(raw).data.weights is None
    raw["data"]["corpora"] = {"a": {"path": path, "weight": 0.5}, "b": {"path": path, "weight": 1}}
    assert build_recipe(raw).data.weights == {"a": 0.5, "b": 1.0}
    del raw["data"]["corpora"]["a"]["weight"]
    with pytest.raises(ConfigError, match=r"Some corpora have a weight and some have none\. Give all"):
        build_recipe(raw)


INF = float("inf")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("data.corpora={}", r"data\.corpora is empty\. Add \[data\.corpora\.NAME\]"),
        ("data.sequence_length=1", r"data\.sequence_length must be at least 2 \(got 1\)"),
        ("data.global_batch_size=0", r"data\.global_batch_size must be at least 1 \(got 0\)"),
        ("data.micro_batch_size=0", r"data\.micro_batch_size must be at least 1 \(got 0\)"),
        ("data.micro_batch_size=-2", r"data\.micro_batch_size must be at least 1 \(got -2\)"),
        ("data.num_workers=-1", r"data\.num_workers must be at least 0 \(got -1\)"),
        ("data.prefetch=-1", r"data\.prefetch must be at least 0 \(got -1\)"),
        ("optim.learning_rate=0", r"optim\.learning_rate must be a number above 0 \(got 0\.0\)"),
        ("optim.learning_rate=nan", r"optim\.learning_rate must be a finite number \(got nan\)"),
        ("optim.learning_rate=inf", r"optim\.learning_rate must be a finite number \(got inf\)"),
        ("optim.clip_norm=-1", r"optim\.clip_norm must be above 0; inf means no clipping \(got -1\.0\)"),
        ("optim.clip_norm=nan", r"optim\.clip_norm must be a number \(got nan\)"),
        ("optim.eps=0", r"optim\.eps must be a number above 0 \(got 0\.0\)"),
        ("optim.weight_decay=-0.1", r"optim\.weight_decay must be a number, zero or more \(got -0\.1\)"),
        ("optim.weight_decay=nan", r"optim\.weight_decay must be a finite number \(got nan\)"),
        ("optim.beta1=1", r"optim\.beta1 must be in \[0, 1\) \(got 1\.0\)"),
        ("optim.beta2=-0.1", r"optim\.beta2 must be in \[0, 1\) \(got -0\.1\)"),
        ("schedule.warmup_steps=-1", r"schedule\.warmup_steps must be at least 0 \(got -1\)"),
        ("schedule.decay_steps=-1", r"schedule\.decay_steps must be at least 0 \(got -1\)"),
        ("schedule.final_share=-0.1", r"schedule\.final_share must be between 0 and 1 \(got -0\.1\)"),
        ("schedule.final_share=1.5", r"schedule\.final_share must be between 0 and 1 \(got 1\.5\)"),
        ("evaluate.every=5", r"evaluate\.tasks and evaluate\.every need each other \(got '0 tasks, every 5"),
        ("evaluate.limit=0", r"evaluate\.limit must be at least 1 \(got 0\)"),
        ("validate.every=-1", r"validate\.every must be at least 0 \(got -1\)"),
        ("validate.samples=0", r"validate\.samples must be at least 1 \(got 0\)"),
        ("checkpoint.every=0", r"checkpoint\.every must be at least 1 \(got 0\)"),
        ("checkpoint.keep=0", r"checkpoint\.keep must be at least 1 \(got 0\)"),
        ("compute=float16", r"compute has no such choice \(got 'float16'\)\. Known: bfloat16, float32\."),
        ("model.hidden_size=-8", r"hidden_size must be positive \(got -8\)"),
        ("model=3", r"model must be a section \(got 3\)"),
        ("data=5", r"data must be a section \(got 5\)\. Write its keys under \[data\]"),
        ("run=5", r"run must be a section \(got 5\)"),
        ("data.corpora=5", r"data\.corpora must be a table of sections \(got 5\)"),
        ("run.dir=", r"run\.dir is empty \(got ''\)"),
        ("run.dir=123", r"run\.dir must be text \(got 123\)\. Write it in quotes"),
        ("run.steps=100000000000000000000", r"run\.steps must be from -2\*\*62 to 2\*\*62"),
        ("model.rope_theta=nan", r"model\.rope_theta must be a finite number \(got nan\)"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_key(
    raw: dict[str, Any], setting: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        build_recipe(config.override(raw, [setting]))


def test_a_layout_that_the_model_cannot_be_cut_by_is_refused_before_anything_starts(
    raw: dict[str, Any],
) -> None:
    raw["parallel"] = {"tensor": 4}
    with pytest.raises(ConfigError, match=r"does not divide model.num_attention_heads 2 \(got 4\)"):
        build_recipe(raw)


def test_a_gradient_that_is_never_clipped_is_a_choice(raw: dict[str, Any]) -> None:
    assert build_recipe(config.override(raw, ["optim.clip_norm=inf"])).optim.clip_norm == INF
