"""Model families by the name that `config.json` gives them: networks (torch) and configs (no torch)."""

from penstock.core.table import Table

FAMILIES = Table(
    "model family",
    {
        "llama": "penstock.models.llama.model:Llama",
        "granite": "penstock.models.llama.model:Llama",
        "mistral": "penstock.models.llama.model:Llama",
    },
)

CONFIGS = Table("model family", dict.fromkeys(FAMILIES, "penstock.models.llama.config:LlamaConfig"))
