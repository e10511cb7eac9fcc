"""Model families by the name that `config.json` gives them: networks (torch) and configs (no torch)."""

from penstock.core.table import Table
from penstock.models.families import FAMILY

FAMILIES = Table("model family", dict.fromkeys(FAMILY, "penstock.models.llama.model:Llama"))

CONFIGS = Table("model family", dict.fromkeys(FAMILY, "penstock.models.llama.config:LlamaConfig"))
