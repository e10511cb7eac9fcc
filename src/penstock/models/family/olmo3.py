"""OLMo 3 (Ai2, 2025): OLMo 2 with a window in three layers of four, and yarn in the others only."""

from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.core.errors import ModelError
from penstock.models.family.base import Raw
from penstock.models.family.olmo2 import FAMILY as OLMO_2
from penstock.models.family.rope_by_kind import check_rules, read_rules, rule_of_kind, write_rules
from penstock.models.family.windows import FULL, SLIDING, checked_kinds, read_layer_types, write_layer_types

if TYPE_CHECKING:
    from penstock.models.decoder.config import DecoderConfig

_BASES = {FULL: ("rope_theta", 500_000.0), SLIDING: ("", 500_000.0)}
"""transformers gives a base beside the rules to full layers alone."""


def _read(raw: Raw) -> Raw:
    layers = raw["num_hidden_layers"]
    usual = [(SLIDING, SLIDING, SLIDING, FULL)[i % 4] for i in range(layers)]
    kinds = (
        usual
        if raw["layer_types"] is None
        else checked_kinds(raw["layer_types"], layers, window=raw["sliding_window"])
    )
    found = read_rules(raw, kinds, bases=_BASES)
    if found["layer_rope_theta"] is not None:
        raise ModelError(
            "Layers with a window have another rope_theta than full layers, which no OLMo 3 has",
            got=sorted(set(found["layer_rope_theta"])),
            fix="Write rope_parameters with a rule for each kind of layers.",
        )
    return {**read_layer_types({**raw, "layer_types": kinds}, default=(FULL,)), **found}


def _write(config: "DecoderConfig") -> Raw:
    return {**write_layer_types(config), **write_rules(config)}


FAMILY = replace(
    OLMO_2,
    architecture="Olmo3ForCausalLM",
    own_keys=OLMO_2.own_keys | {"sliding_window", "layer_types"},
    settings=frozenset({"scaled_layers"}),
    defaults={**OLMO_2.defaults, "sliding_window": 4096, "layer_types": None},
    full_rope=lambda raw: rule_of_kind(raw, FULL, bases=_BASES),
    read=_read,
    write=_write,
    check=check_rules,
)
