"""The tensors of a training state, by name: weights and optimizer moments, sharded or whole."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

MODEL, OPTIMIZER = "model.", "optimizer."


def training_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return every tensor that a resumed run needs; the live ones, so loading into them is enough.

    The optimizer's hyperparameters are not among them: they come from the recipe.
    """
    if not optimizer.state:
        get_optimizer_state_dict(model, optimizer)  # makes the moments that the first step would make
    return {
        **{f"{MODEL}{name}": tensor for name, tensor in model.state_dict().items()},
        **dict(_moments(model, optimizer)),
    }


def _moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            if isinstance(value, Tensor):
                yield f"{OPTIMIZER}{name}.{key}", value
