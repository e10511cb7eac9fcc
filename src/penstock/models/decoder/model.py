"""Decoder: the network of every family.

One forward pass: embed the tokens, prepare positions and attention once, run the blocks, normalise, project.
The blocks are the units that `fully_shard`, recomputation and `torch.compile` wrap; embedding, last norm and
output matrix belong to the root. A tied output matrix is not a second parameter: the embedding is used again,
so there are no two copies to keep equal when sharding or saving.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar, cast

import torch
from jaxtyping import Float, Int, Int32, Int64
from torch import Tensor, nn

from penstock.core.log import EventLog
from penstock.models.decoder.config import DecoderConfig
from penstock.models.decoder.layer_kind import LayerKind
from penstock.nn.attention import Attend, GroupedQueryAttention, LayerCache, Rope
from penstock.nn.head import OutputHead
from penstock.nn.kernels.choose import choose_kernel
from penstock.nn.kernels.layout import AttentionLayout, starts_of
from penstock.nn.linear.lora import adapter_of
from penstock.nn.mlp import FeedForward
from penstock.nn.new_rows import rows_of
from penstock.nn.norm import RMSNorm
from penstock.nn.rope import query_scales, rope_tables
from penstock.nn.softcap import capped

log = EventLog(__name__)

_T = TypeVar("_T")

MicroBatches = tuple[Tensor, ...]
"""One tensor per micro-batch."""


class Cache(Protocol):
    """KV cache of earlier positions, bound to one forward pass."""

    @property
    def layers(self) -> Sequence[LayerCache]:
        """One per block with attention."""
        ...

    def attends(self, windows: Sequence[int | None]) -> Sequence[Attend]:
        """Return the attention of each of `layers` over its keys and values; `windows` as in
        AttentionLayout."""
        ...


class ChooseKernel(Protocol):
    """Selects the attention kernel of one forward pass."""

    def __call__(
        self,
        layout: AttentionLayout,
        *,
        device: torch.device,
        dtype: torch.dtype,
        head_dim: int,
        has_sinks: bool,
    ) -> Attend:
        """Return the kernel, bound to the layout."""
        ...


class Block(nn.Module):
    """Decoder block: attention, feed-forward or both, each with norms before, after or both, and a residual
    connection."""

    def __init__(self, config: DecoderConfig, kind: LayerKind) -> None:
        super().__init__()
        self.residual_multiplier = config.residual_multiplier
        norms, family = config.block_norms(kind), config.family

        def norm(name: str) -> RMSNorm | None:
            return norm_of(config) if name in norms else None

        self.attention_norm = norm("attention_norm")
        self.attention = (
            None
            if kind.attention is None
            else GroupedQueryAttention(
                config.hidden_size,
                config.num_attention_heads,
                num_key_value_heads=config.key_value_heads,
                head_dim=config.size_of_head,
                scale=config.attention_scale,
                softcap=config.attn_logit_softcapping,
                biases=config.attention_biases,
                qk_norm=family.qk_norm,
                norm_eps=config.rms_norm_eps,
                has_zero_centered_norms=family.has_zero_centered_norms,
                has_sinks=family.has_sinks,
            )
        )
        self.attention_out_norm = norm("attention_out_norm")
        self.mlp_norm = norm("mlp_norm")
        self.mlp = (
            None
            if kind.feed_forward is None
            else FeedForward(
                config.hidden_size,
                config.intermediate_size,
                bias=config.mlp_bias,
                activation=family.activation,
                is_gated=family.has_gate,
            )
        )
        self.mlp_out_norm = norm("mlp_out_norm")

    def forward(
        self,
        x: Float[Tensor, "batch seq hidden"],
        rope: Rope,
        attend: Attend | None,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "batch seq hidden"]:
        """Apply the block; `attend` is None if it has no attention."""
        if self.attention is not None:
            mixed = self.attention(_normed(self.attention_norm, x), rope, attend, cache)
            x = x + _scaled(_normed(self.attention_out_norm, mixed), self.residual_multiplier)
        if self.mlp is not None:
            inner = self.mlp(_normed(self.mlp_norm, x))
            x = x + _scaled(_normed(self.mlp_out_norm, inner), self.residual_multiplier)
        return x


class Decoder(nn.Module):
    """Causal language model."""

    config_class = DecoderConfig

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.choose: ChooseKernel = choose_kernel
        """Selects the attention kernel of each forward pass, unless a cache has its own."""
        self.rope_rules = tuple(dict.fromkeys(attention.rope for attention in config.attentions))
        """Rotary embeddings of the layers, each once."""
        self.rope_of = tuple(
            0 if kind.attention is None else self.rope_rules.index(kind.attention.rope)
            for kind in config.layers
        )
        """Index of each layer's rotary embedding in `rope_rules`; layers without attention ignore theirs."""
        self.longest_text = config.context
        """Tokens of the longest text, as `limit_texts` says."""
        self.embedding_multiplier = config.embedding_factor
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, kind) for kind in config.layers)
        self.norm = norm_of(config)
        self.unembed = (
            None
            if config.tie_word_embeddings
            else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        )

    def forward(
        self,
        input_ids: Int[Tensor, "batch seq"] | MicroBatches,
        *,
        position_ids: Int[Tensor, "batch seq"] | None = None,
        cu_seqlens: Int32[Tensor, "documents_plus_1"] | None = None,
        cache: Cache | None = None,
        finish: Callable[[Tensor, OutputHead], Tensor] | None = None,
        token_keys: Int64[Tensor, "batch seq"] | MicroBatches | None = None,
    ) -> Tensor:
        """Return logits [batch, seq, vocab] in the dtype of the weights.

        With tuples of `input_ids`, `position_ids` and `cu_seqlens`, one per micro-batch, see
        `hidden_of_each`.

        Args:
            position_ids: position within the document; None: counted from each document's start. Required
                with a cache.
            cu_seqlens: ends of documents over the flattened batch, from 0, including the end of each row.
                None: each row is one document.
            cache: holds earlier positions and receives those of `input_ids`; it knows the sequence of
                each token, so `cu_seqlens` is not used.
            finish: called as `finish(hidden, head)` with hidden [batch, seq, hidden]; its result is
                returned instead of logits. For losses that project in chunks: under `fully_shard` the
                output matrix is gathered only inside this call.
            token_keys: as in nn/linear/dropout.py, for blocks that take them; None: nothing is dropped.
        """
        if isinstance(input_ids, tuple):
            hidden = self.hidden_of_each(
                input_ids,
                cast(MicroBatches, position_ids),
                cast(Sequence[Tensor | None], cu_seqlens),
                token_keys=cast(MicroBatches | None, token_keys),
            )
        else:
            hidden = self.hidden(
                input_ids,
                position_ids=position_ids,
                cu_seqlens=cu_seqlens,
                cache=cache,
                token_keys=cast(Tensor | None, token_keys),
            )
        return self.head(hidden) if finish is None else finish(hidden, self.head)

    def hidden(
        self,
        input_ids: Int[Tensor, "batch seq"],
        *,
        position_ids: Int[Tensor, "batch seq"] | None = None,
        cu_seqlens: Int32[Tensor, "documents_plus_1"] | None = None,
        cache: Cache | None = None,
        token_keys: Int64[Tensor, "batch seq"] | None = None,
    ) -> Float[Tensor, "batch seq hidden"]:
        """Return the normalised hidden states; arguments as in `forward`."""
        batch, seq_len = (input_ids if position_ids is None else position_ids).shape
        layout = AttentionLayout(batch=batch, seq_len=seq_len, cu_seqlens=cu_seqlens)
        x = self.embedded(input_ids)
        ropes = self.ropes(
            _positions(layout, input_ids.device) if position_ids is None else position_ids,
            x.dtype,
            token_keys=token_keys,
        )
        windows = self.config.windows
        if cache is None:
            kernels = {window: self._attend(replace(layout, window=window), x) for window in set(windows)}
            attends: Sequence[Attend] = [kernels[window] for window in windows]
        else:
            attends = cache.attends(windows)
        caches = [None] * len(windows) if cache is None else cache.layers
        of_layers = self._in_layers(list(zip(attends, caches, strict=True)), (None, None))
        for block, rope, of_layer in zip(self.layers, self.rope_of, of_layers, strict=True):
            x = block(x, ropes[rope], *of_layer)
        out: Tensor = self.norm(x)
        return out

    def hidden_of_each(
        self,
        input_ids: MicroBatches,
        position_ids: MicroBatches,
        cu_seqlens: Sequence[Tensor | None],
        *,
        token_keys: MicroBatches | None = None,
    ) -> Float[Tensor, "batches seq hidden"]:
        """Return the normalised hidden states of several micro-batches, concatenated by rows.

        Each block processes all micro-batches before the next block does; it must accept tuples
        (parallel/ethernet/breadth_first.py). Everything else is computed for all rows at once.
        """
        rows = [len(ids) for ids in input_ids]
        embedded = self.embedded(torch.cat(input_ids))
        x = tuple(torch.split(embedded, rows))
        ropes = [
            self.ropes(positions, embedded.dtype, token_keys=keys)
            for positions, keys in zip(position_ids, token_keys or (None,) * len(rows), strict=True)
        ]
        layouts = [
            AttentionLayout(batch=len(positions), seq_len=positions.shape[1], cu_seqlens=ends)
            for positions, ends in zip(position_ids, cu_seqlens, strict=True)
        ]
        windows = self.config.windows
        attends = {
            window: tuple(self._attend(replace(layout, window=window), embedded) for layout in layouts)
            for window in set(windows)
        }
        of_layers = self._in_layers([attends[window] for window in windows], (None,) * len(rows))
        for block, rope, attend in zip(self.layers, self.rope_of, of_layers, strict=True):
            x = block(x, tuple(tables[rope] for tables in ropes), attend)
        out: Tensor = self.norm(torch.cat(x))
        return out

    def _in_layers(self, of_attentions: Sequence[_T], none: _T) -> list[_T]:
        """Return for each layer the next of `of_attentions`, or `none` if it has no attention."""
        rest = iter(of_attentions)
        return [none if kind.attention is None else next(rest) for kind in self.config.layers]

    def embedded(self, input_ids: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq hidden"]:
        """Return the embeddings, multiplied."""
        x = self.embed(input_ids)
        return _scaled(x, self.embedding_factor(x.dtype))

    def embedding_factor(self, dtype: torch.dtype) -> float:
        """Return the factor on embeddings of a dtype."""
        if not self.config.family.scales_embeddings:
            return self.embedding_multiplier
        return torch.tensor(self.embedding_multiplier, dtype=dtype).item()

    @property
    def head(self) -> OutputHead:
        """Output projection from normalised hidden states to logits; for use inside a forward pass."""
        matrix = self.embed if self.unembed is None else self.unembed
        scaling, softcap = self.config.logits_scaling, self.config.final_logit_softcapping
        return OutputHead(rows_of(matrix), scaling, adapter=adapter_of(matrix), softcap=softcap)

    def logits(self, hidden: Float[Tensor, "... hidden"]) -> Float[Tensor, "... vocab"]:
        """Return the logits of normalised hidden states, with the output layer of serving if it was
        replaced."""
        return capped(self.uncapped_logits(hidden), self.config.final_logit_softcapping)

    def uncapped_logits(self, hidden: Float[Tensor, "... hidden"]) -> Float[Tensor, "... vocab"]:
        """Return what `logits` caps, for adapters of the output matrix, which add to it."""
        if self.unembed is None:
            return replace(self.head, softcap=None)(hidden)
        logits: Tensor = self.unembed(hidden)
        return logits if self.config.logits_scaling == 1.0 else logits / self.config.logits_scaling

    def initial_std(self, name: str) -> float:
        """Return the standard deviation of a weight matrix at initialisation; see `nn.init`."""
        writes_residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
        num_sums = sum(len(kind.parts) for kind in self.config.layers)
        return 0.02 / math.sqrt(num_sums) if writes_residual else 0.02

    def limit_texts(self, longest: int) -> None:
        """Say how many tokens the longest text of a run or server has; at first it is the whole context.

        It chooses the divisors of longrope, for all texts. transformers chooses them in each forward pass:
        when an answer grows past the original context, the keys in its cache have other angles than the new.
        """
        self.longest_text = longest
        for scaling in {rule.scaling for rule in self.rope_rules}:
            if scaling is not None and scaling.rope_type == "longrope":
                original = scaling.original_max_position_embeddings
                assert original is not None, scaling
                log.info(
                    "longrope",
                    "Texts have up to {longest:,} tokens and the original context {original:,}: the "
                    "{divisors} divisors of longrope apply to all texts",
                    longest=longest,
                    original=original,
                    divisors="long" if longest > original else "short",
                )

    def ropes(
        self,
        positions: Int[Tensor, "batch seq"],
        dtype: torch.dtype,
        *,
        token_keys: Int64[Tensor, "batch seq"] | None = None,
    ) -> list[tuple[Tensor, ...]]:
        """Return `Rope` at these positions, and `token_keys`, for each of `rope_rules`."""
        keys = () if token_keys is None else (token_keys,)
        scaling = self.config.rope_scaling
        has_scales = scaling is not None and scaling.llama_4_scaling_beta is not None
        scales = (query_scales(positions, scaling, dtype),) if scaling is not None and has_scales else ()
        return [
            (
                *rope_tables(
                    positions,
                    head_dim=self.config.size_of_head,
                    rule=rule,
                    max_positions=self.config.max_position_embeddings,
                    longest_text=self.longest_text,
                    dtype=dtype,
                ),
                *scales,
                *keys,
            )
            for rule in self.rope_rules
        ]

    def _attend(self, layout: AttentionLayout, like: Tensor) -> Attend:
        has_softcap = self.config.attn_logit_softcapping is not None
        return self.choose(
            layout,
            device=like.device,
            dtype=like.dtype,
            head_dim=self.config.size_of_head,
            has_sinks=self.config.family.has_sinks,
            **({"has_softcap": True} if has_softcap else {}),
        )


def norm_of(config: DecoderConfig) -> RMSNorm:
    """Return a norm of hidden states."""
    return RMSNorm(
        config.hidden_size, eps=config.rms_norm_eps, is_zero_centered=config.family.has_zero_centered_norms
    )


def _normed(norm: nn.Module | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def _scaled(x: Tensor, multiplier: float) -> Tensor:
    return x if multiplier == 1.0 else x * multiplier  # skips Granite's factors for other families


def _positions(layout: AttentionLayout, device: torch.device) -> Tensor:
    if layout.cu_seqlens is None:
        return torch.arange(layout.seq_len, device=device)[None]
    index = torch.arange(layout.batch * layout.seq_len, device=device)
    start = starts_of(layout.cu_seqlens.to(device), index.numel())
    return (index - start).view(layout.batch, layout.seq_len)
