"""Ministral 8B: Mistral with a window in some of the layers."""

from functools import partial

from penstock.models.family.base import Family
from penstock.models.family.mistral import FAMILY as MISTRAL
from penstock.models.family.windows import SLIDING, read_layer_types, write_layer_types

FAMILY = Family(
    architecture="MinistralForCausalLM",
    own_keys=MISTRAL.own_keys | {"layer_types"},
    defaults={**MISTRAL.defaults, "layer_types": None},
    read=partial(read_layer_types, default=(SLIDING,)),
    write=write_layer_types,
)
