"""The kind of each parameter, which its module states: matrix, vector or bias, and its initial value.

Initialisation, weight decay and Muon read the kind. A name or a number of dims does not tell it: the weight
of a norm may start at 0 or at 1, and a bias may have two dims.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from torch import nn


@dataclass(frozen=True, slots=True)
class ParameterKind:
    """Kind of a parameter."""

    name: Literal["matrix", "vector", "bias"]
    """matrix: multiplies its input; it decays, and Muon may update it. vector: scales each channel. bias: is
    added, or an attention sink. Vectors and biases do not decay."""
    initial: float | None
    """Initial value of every element; None: drawn from a normal distribution."""


MATRIX = ParameterKind("matrix", None)
BIAS = ParameterKind("bias", 0.0)
SCALE = ParameterKind("vector", 1.0)
ZERO_CENTERED_SCALE = ParameterKind("vector", 0.0)
"""A scale that is stored less 1."""


@runtime_checkable
class HasKinds(Protocol):
    """A module that states the kinds of its own parameters."""

    def kinds(self) -> Mapping[str, ParameterKind]:
        """Return the kind of each parameter of this module, without those of its submodules."""
        ...


_OF_LINEAR: Mapping[str, ParameterKind] = {
    "weight": MATRIX,
    "bias": BIAS,
    "lora_a": MATRIX,
    "lora_b": MATRIX,
    "magnitude": SCALE,
    "new_rows": MATRIX,
}
"""Parameters of linear layers and embeddings, those of adapters included."""


def parameter_kinds(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, ParameterKind]]:
    """Yield name, parameter and kind of each parameter of a model, in the order of `named_parameters`.

    Raises:
        TypeError: a module does not state the kind of one of its parameters.
    """
    seen: set[nn.Parameter] = set()
    for prefix, module in model.named_modules():
        known = _kinds_of(module)
        for name, parameter in module.named_parameters(prefix, recurse=False):
            if parameter in seen:
                continue
            seen.add(parameter)
            last = name.rpartition(".")[2]
            if last not in known:
                raise TypeError(f"{type(module).__name__} does not state the kind of its parameter {name}")
            yield name, parameter, known[last]


def _kinds_of(module: nn.Module) -> Mapping[str, ParameterKind]:
    if isinstance(module, HasKinds):
        return module.kinds()
    return _OF_LINEAR if isinstance(module, nn.Linear | nn.Embedding) else {}
