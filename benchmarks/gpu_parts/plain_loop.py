"""A Llama and a training step by hand, from PyTorch's own parts: what Penstock's step is held against.

Float32 weights under autocast, a bfloat16 residual stream, `scaled_dot_product_attention` over whole rows,
torch's RMSNorm and cross entropy, fused AdamW, clipped gradients, blocks compiled by `torch.compile` if asked
for. Rows lie on the device already, so it has no loader to wait for.
"""

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

from penstock.core import clock


class _Norm(nn.RMSNorm):
    """In the type of its input: a float32 weight beside it would keep torch from its fused kernel."""

    def forward(self, x):
        return functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class _Block(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.heads, self.kv_heads, self.size = (
            shape.num_attention_heads,
            shape.key_value_heads,
            shape.size_of_head,
        )
        hidden, wide = shape.hidden_size, shape.intermediate_size
        self.attention_norm = _Norm(hidden, eps=shape.rms_norm_eps)
        self.query_key_value = nn.Linear(hidden, (self.heads + 2 * self.kv_heads) * self.size, bias=False)
        self.output = nn.Linear(self.heads * self.size, hidden, bias=False)
        self.feed_forward_norm = _Norm(hidden, eps=shape.rms_norm_eps)
        self.gate_up = nn.Linear(hidden, 2 * wide, bias=False)
        self.down = nn.Linear(wide, hidden, bias=False)

    def forward(self, x, cos, sin):
        batch, length, _ = x.shape
        heads = (
            self.query_key_value(self.attention_norm(x)).view(batch, length, -1, self.size).transpose(1, 2)
        )
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        seen = functional.scaled_dot_product_attention(
            _rotated(q, cos, sin), _rotated(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        x = x + self.output(seen.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.feed_forward_norm(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)


def _rotated(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class PlainLlama(nn.Module):
    """A Llama of a DecoderConfig's shape."""

    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.num_hidden_layers))
        self.norm = _Norm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        if shape.tie_word_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, ids):
        """Return the logits [batch, length, vocabulary]."""
        half = self.shape.size_of_head // 2
        steps = torch.arange(half, device=ids.device, dtype=torch.float32) / half
        angles = torch.arange(ids.shape[1], device=ids.device)[:, None] * self.shape.rope_theta**-steps
        x, cos, sin = self.embedding(ids).to(torch.bfloat16), angles.cos(), angles.sin()
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


class PlainLoop:
    """Trains on rows of random tokens."""

    def __init__(self, recipe, world):
        shape, data, device = recipe.model, recipe.data, world.device
        with device:
            self._model = PlainLlama(shape)
        for parameter in self._model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)
        if recipe.compile.enabled:
            for block in self._model.blocks:
                block.compile(fullgraph=True)
        self._adamw = torch.optim.AdamW(
            self._model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        size = (data.global_batch_size, data.sequence_length + 1)
        self._rows = torch.randint(0, shape.vocab_size, size, device=device)
        self._device = device

    @property
    def kept_bytes(self):
        """Bytes of weights and optimizer state."""
        states = (tensor for state in self._adamw.state.values() for tensor in state.values())
        return sum(tensor.nbytes for tensor in (*self._model.parameters(), *states))

    def turn(self, steps):
        """Train; return the seconds of each step, the first left out."""
        ids, labels = self._rows[:, :-1], self._rows[:, 1:].flatten()
        stamps = []
        for _ in range(steps + 1):
            with torch.autocast(self._device.type, dtype=torch.bfloat16):
                loss = functional.cross_entropy(self._model(ids).flatten(0, 1), labels)
            loss.backward()
            nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            self._adamw.step()
            self._adamw.zero_grad()
            loss.item()
            stamps.append(clock.monotonic())
        return [then - first for first, then in pairwise(stamps)]
