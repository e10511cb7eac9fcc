"""LoRA adapters as PEFT writes them, with random numbers, for networks that have no folder of their own."""

import json

import torch
from safetensors.torch import save_file


def save_lora(folder, model, *, rank, seed=0, only="", std=0.3, use_dora=False):
    """Write an adapter of all linear layers of a plain model's blocks whose names contain `only`."""
    stored, tensors = model.config.stored_rows, {}
    random = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if name.startswith("layers.") and weight.dim() == 2 and only in name:
            layer = f"base_model.model.{stored[name].tensor.removesuffix('.weight')}"
            outputs, inputs = stored[name].num_rows, weight.shape[1]  # of a fused matrix all rows
            tensors[f"{layer}.lora_A.weight"] = torch.randn(rank, inputs, generator=random) * std
            tensors[f"{layer}.lora_B.weight"] = torch.randn(outputs, rank, generator=random) * std
            if use_dora:
                tensors[f"{layer}.lora_magnitude_vector"] = 1.0 + torch.rand(outputs, generator=random)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank, "use_dora": use_dora})
    )
    return folder
