"""The optimizer: AdamW with weight decay on matrices only."""

import torch
from torch import nn

from penstock.train.config import OptimConfig


def adamw(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """Build AdamW over all parameters; norms and biases (one dimension) are not decayed."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
    )
