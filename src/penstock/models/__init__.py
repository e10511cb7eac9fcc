"""Networks by the name that `config.json` gives their family; importing one imports torch."""

from penstock.core.table import Table
from penstock.models.families import FAMILY

FAMILIES = Table("model family", dict.fromkeys(FAMILY, "penstock.models.llama.model:Llama"))
