"""Of which type a model is whose folder stores its tensors in several.

Some writers keep norms, or the output matrix, in float32 beside matrices in bfloat16. A network computes in
one type: that of most of its numbers, which is also what `config.json` then says.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from penstock.core.errors import ModelError

COMPUTED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def type_of_most(
    folder: Path, tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]
) -> torch.dtype:
    """Return the type of most numbers.

    Args:
        tensors: or a rank's part of each.
        shapes: of the whole tensors, so that all ranks agree.

    Raises:
        ModelError: some are stored in a type that means nothing without a scale.
    """
    numbers = Counter[torch.dtype]()
    for name, tensor in tensors.items():
        if tensor.dtype not in COMPUTED:
            raise ModelError(
                f"{name} in {folder} is quantised, and nothing says how",
                got=str(tensor.dtype).removeprefix("torch."),
                fix="Use the model's bf16 or fp32 folder.",
            )
        numbers[tensor.dtype] += shapes[name].numel()
    return numbers.most_common(1)[0][0]
