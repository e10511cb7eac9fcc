"""Networks by the model_type of `config.json`; imported on use, because they import torch."""

from penstock.core.table import Table
from penstock.models.families import FAMILY

FAMILIES = Table("model family", dict.fromkeys(FAMILY, "penstock.models.decoder.model:Decoder"))
