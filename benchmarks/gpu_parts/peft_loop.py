"""Tuning by PEFT and transformers in a plain loop: what Penstock's tuning is held against.

LoRA in every linear layer of the blocks, attention by `scaled_dot_product_attention`, adapters in bfloat16
(PEFT's default of float32 is slower), transformers' loss, fused AdamW, clipped gradients, blocks compiled by
`torch.compile` if asked for. Rows lie on the device already, so it has no loader to wait for.
"""

from itertools import pairwise

import torch
from torch import nn

from penstock.core import clock


class PeftLoop:
    """Trains on rows of random tokens."""

    def __init__(self, recipe, world):
        import peft

        data, device, tune = recipe.data, world.device, recipe.tune
        settings = peft.LoraConfig(
            r=tune.rank, lora_alpha=tune.alpha, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        base = self._base(recipe.run.start_from, device)
        self._model = peft.get_peft_model(base, settings, autocast_adapter_dtype=False)
        if recipe.compile.enabled:
            for block in base.model.layers:
                block.compile()
        self._learned = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._adamw = torch.optim.AdamW(self._learned, lr=3e-4, weight_decay=0.1, fused=True)
        size = (data.global_batch_size, data.sequence_length)
        self._rows = torch.randint(0, recipe.model.vocab_size, size, device=device)

    def _base(self, folder, device):
        """Return the model of a folder in bfloat16; with random weights, which take no time to read."""
        import transformers

        config = transformers.AutoConfig.from_pretrained(folder)
        with device:
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, attn_implementation="sdpa"
            )
        model.config.use_cache = False
        return model

    @property
    def kept_bytes(self):
        """Bytes of weights, frozen ones too, and optimizer state."""
        states = (tensor for state in self._adamw.state.values() for tensor in state.values())
        return sum(tensor.nbytes for tensor in (*self._model.parameters(), *self._model.buffers(), *states))

    def turn(self, steps):
        """Train; return the seconds of each step, the first left out."""
        stamps = []
        for _ in range(steps + 1):
            loss = self._model(input_ids=self._rows, labels=self._rows).loss
            loss.backward()
            nn.utils.clip_grad_norm_(self._learned, 1.0)
            self._adamw.step()
            self._adamw.zero_grad()
            loss.item()
            stamps.append(clock.monotonic())
        return [then - first for first, then in pairwise(stamps)]


class FourBitPeftLoop(PeftLoop):
    """The same on a base in 4 bits, NF4 by bitsandbytes: of such peers the one with a wheel under 64 MB."""

    def _base(self, folder, device):
        import bitsandbytes  # noqa: F401 - else transformers says that it is missing after it read the weights
        import transformers

        rounded = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=rounded, dtype=torch.bfloat16, attn_implementation="sdpa",
            device_map={"": device},
        )  # fmt: skip
        model.config.use_cache = False
        return model
