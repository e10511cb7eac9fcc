"""Penstock: train and serve foundation models on ordinary machines joined by Ethernet."""

TYPE_CHECKING = False  # as in `typing`, which is not worth its import here
if TYPE_CHECKING:
    from penstock.engine.config import EngineConfig as EngineConfig
    from penstock.engine.llm import LLM as LLM
    from penstock.engine.sampling_params import Params as Params
    from penstock.engine.sampling_params import Sampling as Sampling

__version__ = "0.1.0"

_LAZY = {
    "LLM": "penstock.engine.llm",
    "EngineConfig": "penstock.engine.config",
    "Params": "penstock.engine.sampling_params",
    "Sampling": "penstock.engine.sampling_params",
}
"""Module of each public name; imported on first use, so that `import penstock` does not load torch."""


def __getattr__(name: str) -> type:
    if name not in _LAZY:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    from importlib import import_module

    from penstock.core.env import sleep_at_barriers

    sleep_at_barriers()
    found: type = getattr(import_module(_LAZY[name]), name)
    return found
