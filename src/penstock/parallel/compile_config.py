"""Whether and how blocks are compiled; imports no torch."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileConfig:
    """`torch.compile`, block by block: all blocks of a shape share one compiled program."""

    enabled: bool = False
    """Compile blocks at the first step, which then takes seconds to minutes; less if cached."""
    mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"
    """max-autotune: try several kernels for each product, GPUs only; longer at first."""
    cache: str = ""
    """Folder of compiled programs, shared by runs and ranks. Empty: `compiled` in Penstock's cache folder,
    unless TORCHINDUCTOR_CACHE_DIR is set."""


NOT_COMPILED = CompileConfig()
