"""torch.nn.attention.varlen_attn on NVIDIA GPUs: whether it is there, and one call for its releases.

Nothing waits for the device: the kernel reads the ends of sequences from device memory.

With attention sinks its backward pass is called by its internal name, because only that takes the log-sums.
"""

from functools import cache
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int32
from torch import Tensor

from penstock.nn.kernels.sinks import add_sinks, sink_gradients

if TYPE_CHECKING:
    import torch.nn.attention.varlen


_NEEDED = {"scale", "window_size"}  # torch 2.10 lacks them
_GROUPS, _PAGES, _LOG_SUMS = "enable_gqa", "block_table", "return_aux"  # missing in some that have those


def is_available(*, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """True if the kernel exists in this torch release and supports the device, dtype and head dim."""
    return (
        device.type == "cuda"
        and parameters() >= _NEEDED
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim % 8 == 0
        and head_dim <= 256
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def has_groups() -> bool:
    """True if grouped heads are a documented option; without it some releases take them, others do not."""
    return _GROUPS in parameters()


def has_pages() -> bool:
    """True if keys and values may lie in pages; which sizes of pages depends on the library below."""
    return _PAGES in parameters()


def has_log_sums() -> bool:
    """True if the log-sums of the softmax are returned on request, which attention sinks need."""
    return _LOG_SUMS in parameters()


@cache
def parameters() -> frozenset[str]:
    """Return the options of the kernel; empty before torch 2.10. The import takes a second."""
    try:
        import torch.nn.attention.varlen as varlen
    except ImportError:
        return frozenset()
    return frozenset(signature(varlen.varlen_attn).parameters)


def attend_varlen(
    q_thd: Tensor,
    k_skd: Tensor,
    v_skd: Tensor,
    q_ends: Int32[Tensor, "sequences_plus_1"],
    k_ends: Int32[Tensor, "sequences_plus_1"] | None,
    *,
    longest: tuple[int, int],
    window: int | None,
    scale: float,
    repeats: bool = False,
    sinks: Tensor | None = None,
    **pages: Any,  # Any: of the kernel
) -> Tensor:
    """Attend causally, the last query of a sequence to its last key; returns [t, h, d].

    Args:
        k_ends: None: keys and values lie in `pages`.
        longest: upper bounds on the queries and on the keys of a sequence.
        window: as in `AttentionLayout`.
        repeats: repeat key heads, one for each query head; False: the kernel takes grouped heads.
        sinks: [h], in a release that `has_log_sums`.
    """
    is_grouped = not repeats and q_thd.shape[1] != k_skd.shape[-2]
    options: dict[str, Any] = {_GROUPS: is_grouped} if has_groups() else {}
    if repeats:
        k_skd, v_skd = (t.repeat_interleave(q_thd.shape[1] // t.shape[1], dim=1) for t in (k_skd, v_skd))
    left = -1 if window is None else window - 1
    options |= {"scale": scale, "window_size": (left, 0)}
    if sinks is None:
        out = torch.nn.attention.varlen.varlen_attn(
            q_thd, k_skd, v_skd, q_ends, k_ends, longest[0], longest[1], **options, **pages
        )
        assert isinstance(out, Tensor), type(out)
        return out
    if k_ends is not q_ends:
        assert not q_thd.requires_grad, "training has as many keys as queries"
        given = q_thd, k_skd, v_skd, q_ends, k_ends, *longest
        return _with_sums(*given, sinks=sinks, **options, **pages)[0]
    found: Tensor = _WithSinks.apply(  # type: ignore[no-untyped-call]
        q_thd, k_skd, v_skd, sinks, q_ends, longest[0], left, scale, options.get(_GROUPS)
    )
    return found


def _with_sums(*given: Any, sinks: Tensor, **options: Any) -> tuple[Tensor, Tensor]:  # Any: of the kernel
    """Call the kernel with sinks; return the output and the grown log-sums, [h, t]."""
    varlen = torch.nn.attention.varlen
    aux = varlen.AuxRequest(lse=True)
    out, log_sums = varlen.varlen_attn(*given, return_aux=aux, **options)
    tokens, heads, _ = out.shape
    if log_sums.shape != (heads, tokens):  # its docstring says the reverse
        raise RuntimeError(f"varlen_attn returned log-sums {tuple(log_sums.shape)} of {tuple(out.shape)}")
    shrunk, grown = add_sinks(out.transpose(0, 1), log_sums, sinks[:, None])
    return shrunk.transpose(0, 1).contiguous(), grown


def _kernel_backward(*given: Any) -> tuple[Tensor, Tensor, Tensor]:  # Any: of the kernel
    """Return the gradients of queries, keys and values."""
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.torch_attn._varlen_attn_backward(*given)
    return found


class _WithSinks(torch.autograd.Function):
    """The kernel with sinks, for as many keys as queries.

    The compiler traces the function, so its arguments are plain and no tensor is given twice.
    """

    @staticmethod
    def forward(
        ctx: Any,  # Any: torch's
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor,
        ends: Tensor,
        longest: int,
        left: int,
        scale: float,
        is_grouped: bool | None,
    ) -> Tensor:
        groups = {} if is_grouped is None else {_GROUPS: is_grouped}
        out, grown = _with_sums(
            q, k, v, ends, ends, longest, longest, sinks=sinks, scale=scale, window_size=(left, 0), **groups
        )  # fmt: skip
        ctx.longest, ctx.left, ctx.scale = longest, left, scale
        ctx.save_for_backward(q, k, v, sinks, ends, out, grown)
        return out

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, ends, out, grown = ctx.saved_tensors
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
        found = _kernel_backward(
            upstream.contiguous(), q, k, v, out, grown, ends, ends, ctx.longest, ctx.longest,
            ctx.left == -1, no_dropout, ctx.scale, [ctx.left, 0],
        )  # fmt: skip
        each = sink_gradients(upstream.transpose(0, 1), out.transpose(0, 1), grown, sinks[:, None])
        return *found, each.sum(1).to(sinks.dtype), *[None] * 5
