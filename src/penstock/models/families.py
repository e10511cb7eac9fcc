"""Registry of model families by the model_type of `config.json`; no torch."""

from typing import Literal, get_args

from penstock.core.table import Table
from penstock.models.family.base import Family

ModelType = Literal[
    "arcee", "cwm", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "granite",
    "granite_swa", "granitemoehybrid", "helium", "hunyuan_v1_dense", "llama", "ministral", "ministral3",
    "mistral", "olmo2", "olmo3", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3", "vaultgemma",
]  # fmt: skip
"""Supported values of model_type; each is a file in models/family."""

FAMILY = Table(
    "model family", {name: f"penstock.models.family.{name}:FAMILY" for name in get_args(ModelType)}
)
"""model_type -> Family."""


def families_with(name: str) -> list[str]:
    """Return the families that have a field of NEUTRAL.

    >>> families_with("max_window_layers")
    ['qwen2', 'qwen3']
    """
    families: dict[str, Family] = {model_type: FAMILY[model_type] for model_type in FAMILY}
    return [model_type for model_type, family in families.items() if name in family.fields]


def supported_families() -> str:
    """Return the supported families as a sentence, for error messages."""
    return f"Supported: {', '.join(sorted(FAMILY))}."
