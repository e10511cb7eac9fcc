"""Time and memory of the CUDA graphs of decode steps, predicted before a model is loaded; no torch.

The bytes follow from shapes, but for cuBLAS's workspace. What the driver keeps of each graph is not in
them. The seconds are scaled, for each block and graph, from one measurement: an H200, 32 blocks, uncompiled.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.core.units import mib
from penstock.engine.scheduling.groups import cache_groups
from penstock.models.decoder.config import DecoderConfig

_PART_S = 1.7e-3
"""Seconds to record a part of a block in one graph: 1.98 s for 18 graphs of 32 blocks of two parts (serve 8b
bfloat16, graphs: opened; benchmarks/results/gpu-2026-11-28.json)."""
WORKSPACE_BYTES = 2**25
"""Workspace of cuBLAS, which torch allocates for the recording stream: 32 MiB on an H100."""
_ROW_BYTES = 3 * 8 + 8 + 5 * 8 + 4
"""Bytes of a sequence in the upload: ids and places, position, settings, length."""
_SPLIT, _MAX_PARTS = 256, 64  # of attention to single tokens: nn/kernels/paged_triton.py
_BINS = 2048  # of a radix select: sampling/draw_triton.py


def sizes_up_to(most: int) -> list[int]:
    """Return the powers of two below `most`, and it.

    >>> sizes_up_to(48)
    [1, 2, 4, 8, 16, 32, 48]
    """
    return [*(1 << n for n in range((most - 1).bit_length())), most]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPlan:
    """Graphs for each of some numbers of sequences: one that is greedy, and one that samples."""

    sizes: tuple[int, ...]
    """Numbers of sequences."""
    seconds: float
    """Time to record all of them."""
    step_bytes: int
    """Activations of the largest step: the memory pool that all graphs share."""
    fixed_bytes: int
    """Inputs, results, and cuBLAS's workspace."""

    @property
    def num_bytes(self) -> int:
        """Memory of all graphs."""
        return self.step_bytes + self.fixed_bytes

    def as_lines(self) -> Iterator[str]:
        """Yield lines for people."""
        sizes = ", ".join(map(str, self.sizes))
        yield f"CUDA graphs: 2 each for {sizes} sequences, greedy and sampled"
        yield f"  {mib(self.num_bytes)}: {mib(self.step_bytes)} activations of the largest step, " + (
            f"{mib(self.fixed_bytes)} inputs, results and workspace (predicted)"
        )
        yield f"  {self.seconds:.1f} s to record them at the start (predicted; compiling comes before)"

    def as_json(self) -> dict[str, object]:
        """Return JSON values, with units in their names."""
        return {
            "sizes": list(self.sizes),
            "num_graphs": 2 * len(self.sizes),
            "seconds": round(self.seconds, 2),
            "step_bytes": self.step_bytes,
            "fixed_bytes": self.fixed_bytes,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedGraphs:
    """Time and memory that recording the graphs of an engine took."""

    sizes: tuple[int, ...]
    """Numbers of sequences that have graphs."""
    seconds: float
    num_bytes: int
    """Memory of the device, the driver's records included."""


def plan_graphs(
    model: DecoderConfig, *, max_sequences: int, context: int, block_size: int, number_bytes: int = 2
) -> GraphPlan:
    """Return what the graphs of a model take.

    Args:
        context: of the engine, in tokens.
        number_bytes: of an activation.

    >>> small = DecoderConfig(vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    ...                     num_attention_heads=4, num_key_value_heads=2)
    >>> plan = plan_graphs(small, max_sequences=4, context=1024, block_size=16)
    >>> plan.sizes, round(plan.seconds, 3)
    ((1, 2, 4), 0.041)
    """
    sizes = tuple(sizes_up_to(max_sequences))
    return GraphPlan(
        sizes=sizes,
        seconds=2 * len(sizes) * sum(len(kind.parts) for kind in model.layers) * _PART_S,
        step_bytes=_step_bytes(model, max_sequences, context=context, number_bytes=number_bytes),
        fixed_bytes=fixed_bytes(
            model,
            max_sequences=max_sequences,
            max_blocks=-(-context // block_size),
            num_groups=len(cache_groups(model.windows, context=context)),
            number_bytes=number_bytes,
        ),
    )


def fixed_bytes(
    model: DecoderConfig, *, max_sequences: int, max_blocks: int, num_groups: int, number_bytes: int
) -> int:
    """Return the bytes of what graphs have beside the activations of a step."""
    of_group = 8 + 2 * 4 * max_blocks  # a slot, and a block table as uploaded and in its row
    inputs = max_sequences * (_ROW_BYTES + num_groups * of_group)
    results = max_sequences * (model.vocab_size + model.hidden_size) * number_bytes
    return inputs + results + WORKSPACE_BYTES


def _step_bytes(model: DecoderConfig, sequences: int, *, context: int, number_bytes: int) -> int:
    heads = model.num_attention_heads * model.size_of_head
    # queries, keys, values and their attention; gate, up and product
    sizes = {
        "attention": 3 * heads + 2 * model.key_value_heads * model.size_of_head,
        "mlp": (3 if model.family.has_gate else 2) * model.intermediate_size,
    }
    inner = max(sum(sizes[part] for part in kind.parts) for kind in model.layers)
    numbers = 3 * model.hidden_size + inner  # the residual stream, its norm and a sum
    parts = min(_MAX_PARTS, -(-context // _SPLIT))
    attended = parts * (heads + model.num_attention_heads) * 4
    return sequences * ((numbers + model.vocab_size) * number_bytes + attended + 8 * _BINS)
