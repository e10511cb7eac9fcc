"""Batch invariance: one kernel for a product or for attention, whatever else is in a step.

Libraries choose the kernel of a matrix product by its number of rows, and kernels add in different orders. So
in few bits a token may change with the number of tokens of its step, which depends on other requests.
`batch_invariant` of an engine has each product computed for ROWS tokens, padded or in parts, and each token
attended by the kernel of prompts. Then a token's numbers depend on the tokens before it alone.

On CPUs the C++ operators add in one order for any number of tokens, and nothing is replaced.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from penstock.core.errors import ConfigError
from penstock.engine.config import EngineConfig
from penstock.models.decoder.config import DecoderConfig
from penstock.nn import native
from penstock.nn.linear.packed import MergedLinear

ROWS = 64
"""Tokens of a product: a GPU reads a matrix once for as many in little more time than for one."""
_FEW_HEADS = 4
"""Query heads of a key-value head up to which codes of 8 bits are attended in another order for few tokens
(FEW_ROWS in nn/native/attention/task.h)."""


def check_batch_invariant(config: EngineConfig, model: DecoderConfig, device: torch.device) -> None:
    """Raise ConfigError if an engine's answers would depend on neighbours though it is to be
    batch-invariant."""
    if not config.batch_invariant:
        return
    if device.type == "cpu":
        if not native.is_available():
            raise _unsupported("the C++ operators on a CPU", got="none", fix="Install g++, or leave it out.")
        group = model.num_attention_heads // model.key_value_heads
        if config.cache == "int8" and group <= _FEW_HEADS:
            raise _unsupported(
                f"more than {_FEW_HEADS} query heads for each key-value head where cache=int8",
                got=group,
                fix="Leave cache out, or batch_invariant.",
            )
    elif config.adapters:
        raise _unsupported(
            "no adapters on a GPU", got=len(config.adapters), fix="Merge the adapter with PEFT."
        )
    elif config.tensor_parallel > 1:
        raise _unsupported(
            "one process on a GPU",
            got=config.tensor_parallel,
            fix="Leave tensor_parallel out, or batch_invariant.",
        )
    if config.compile == "on":
        raise _unsupported("uncompiled blocks", got="compile=on", fix="Leave compile out.")


def _unsupported(what: str, *, got: object, fix: str) -> ConfigError:
    return ConfigError(f"batch_invariant needs {what}", got=got, fix=fix)


class FixedRows(nn.Module):
    """A layer that is always called with ROWS tokens."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Float[Tensor, "... inputs"]) -> Float[Tensor, "... outputs"]:
        """Return the layer's outputs, [..., outputs]."""
        tokens = x.flatten(0, -2)
        whole = functional.pad(tokens, (0, 0, 0, -len(tokens) % ROWS))
        out = torch.cat([self.layer(part) for part in torch.split(whole, ROWS)])
        return out[: len(tokens)].view(*x.shape[:-1], -1)


def fix_rows(model: nn.Module) -> None:
    """Have all matrix products of a prepared model computed for ROWS tokens, in place."""
    for name, child in list(model.named_children()):
        if isinstance(child, MergedLinear) or not _is_product(child):
            fix_rows(child)
        else:
            setattr(model, name, FixedRows(child))


def _is_product(module: nn.Module) -> bool:
    return hasattr(module, "in_features") and hasattr(module, "out_features")
