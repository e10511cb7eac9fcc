"""Adapters in layers that are sharded over tensor-parallel ranks.

    layer           W                  A                  B                  magnitude
    column (query)  rows               whole, summed      rows               rows
    row (output)    columns            columns            whole, summed      whole, summed

"Summed": each rank sees part of the work, so the gradients are summed over the ranks. The product with A is
thin, so nothing is sent for it in the forward pass: in row-parallel layers each rank adds its part of B A x
to its part of W x, before the sum that the layer makes in any case. DoRA's lengths of whole rows add one sum
of a number per output there. A matrix rounded to 8 bits is cut like W after it was rounded whole.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from penstock.core.boxes import whole
from penstock.nn.dtensor import detached_local, held_box, local
from penstock.nn.linear.adapter_config import OUTPUT_MATRIX, AdapterConfig
from penstock.nn.linear.dropout import Dropout
from penstock.nn.linear.lora import (
    Adapter,
    RoundedProduct,
    adapted_layers,
    adapter_shapes,
    add_adapter,
    factors,
    matrix_of,
    round_frozen,
    scaled_outputs,
    seen,
)
from penstock.nn.new_rows import add_new_rows
from penstock.parallel.collectives import CollectiveGroup, all_reduce, gather, scatter_sum, sum_gradient
from penstock.parallel.tensor import ColumnLinear, RowLinear, SharedHeadLinear
from penstock.parallel.vocab_parallel import SlicedOutputWithAdapter, add_sliced_new_rows


class _Adapted(nn.Linear):
    """Parameters of an adapter, beside those of a layer."""

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    magnitude: nn.Parameter | None
    scale: float


class LoraColumnLinear(ColumnLinear, _Adapted):
    """Column-parallel linear layer with an adapter."""

    group: CollectiveGroup

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer: this rank's outputs from whole inputs."""
        magnitude = None if self.magnitude is None else local(self.magnitude)
        a = sum_gradient(local(self.lora_a), group=self.group)
        adapter = Adapter(a, local(self.lora_b), self.scale, magnitude)
        weight = None if self.weight is None else local(self.weight)
        if magnitude is None:
            out = self.multiply(x, weight, None) + adapter.low_rank(seen(self, x))
        else:
            scales = factors(magnitude, adapter.squared_lengths(local(matrix_of(self))))
            out = scaled_outputs(self, x, weight, adapter, scales)
        return out if self.bias is None else out + local(self.bias)


class LoraSharedHeadLinear(LoraColumnLinear, SharedHeadLinear):
    """Column-parallel linear layer for a key-value head shared by several ranks, with an adapter."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        return gather(LoraColumnLinear.forward(self, x), dim=-1, group=self.sharing)


class LoraRowLinear(RowLinear, _Adapted):
    """Row-parallel linear layer with an adapter."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to [batch, seq, ...]; the result is [batch, seq / ranks, ...]."""
        b = sum_gradient(local(self.lora_b), group=self.group)
        adapter = Adapter(local(self.lora_a), b, self.scale)
        weight = None if self.weight is None else local(self.weight)
        if self.magnitude is None:
            out = self.multiply(x, weight) + adapter.low_rank(seen(self, x))
            out = scatter_sum(out, dim=1, group=self.group)
        else:
            magnitude = sum_gradient(local(self.magnitude), group=self.group)
            scales = factors(magnitude, self._squared_lengths(adapter))
            out = self._scaled(x, weight, adapter, scales)
        return out if self.bias is None else out + local(self.bias)

    def _scaled(self, x: Tensor, weight: Tensor | None, adapter: Adapter, scales: Tensor) -> Tensor:
        """Return the outputs with learned lengths; factors follow the sums, which they would be part of."""
        left = seen(self, x)
        if left is x:
            out = self.multiply(x, weight) + adapter.low_rank(x)
            return scatter_sum(out, dim=1, group=self.group) * scales
        plain = scatter_sum(self.multiply(x, weight), dim=1, group=self.group)
        of_left = scatter_sum(self.multiply(left, weight), dim=1, group=self.group)
        low_rank = scatter_sum(adapter.low_rank(left), dim=1, group=self.group)
        return plain + of_left * (scales - 1) + low_rank * scales

    def _squared_lengths(self, adapter: Adapter) -> Tensor:
        return all_reduce(adapter.squared_lengths(local(matrix_of(self))), "sum", self.group)


_WITH_ADAPTER: dict[type[nn.Linear], type[nn.Linear]] = {
    ColumnLinear: LoraColumnLinear,
    SharedHeadLinear: LoraSharedHeadLinear,
    RowLinear: LoraRowLinear,
    nn.Linear: SlicedOutputWithAdapter,
}


def add_adapters(
    model: nn.Module, config: AdapterConfig, mesh: DeviceMesh | None, *, dtype: torch.dtype
) -> None:
    """Freeze a model, and give the linear layers of its blocks adapters and its matrices new rows, in place.

    Args:
        model: on the meta device, with the modules of this rank's stages, sliced if at all.
        mesh: the axis over which matrices are sliced; None: they are not.
        dtype: dtype of the adapters' parameters.
    """
    model.requires_grad_(False)
    model.has_adapters = True  # type: ignore[assignment]  # not a module or tensor
    for name, module in model.get_submodule("layers").named_modules():
        if isinstance(module, nn.Linear) and (own := config.of(f"layers.{name}")) is not None:
            _adapt(module, own, mesh, dtype=dtype)
            if config.dropout:
                module.dropout = Dropout.of(config.dropout, f"layers.{name}", _first_input(module, mesh))  # type: ignore[assignment]
                module.token_keys = None  # type: ignore[assignment]  # not a module or tensor
    if config.base != "compute":
        for _, layer in adapted_layers(model):
            round_frozen(layer, config.base)
    if config.unembed and isinstance(model.unembed, nn.Linear):  # otherwise another stage has it
        _adapt(model.unembed, config.of(OUTPUT_MATRIX) or config, mesh, dtype=dtype)
    for name in config.saved:
        for module in _named(model, name):
            module.to(dtype).requires_grad_(True)
    if config.new_rows:
        _add_new_rows(model, config.new_rows, mesh, dtype=dtype)


def _named(model: nn.Module, name: str) -> list[nn.Module]:
    """Return the module of a name; none if another stage has it."""
    return [module for path, module in model.named_modules() if path == name]


def _first_input(layer: nn.Linear, mesh: DeviceMesh | None) -> int:
    """Return the number of this rank's first input of a layer."""
    if mesh is None or not isinstance(layer, RowLinear):
        return 0
    return layer.in_features // mesh.size() * mesh.get_local_rank()


def _adapt(layer: nn.Linear, config: AdapterConfig, mesh: DeviceMesh | None, *, dtype: torch.dtype) -> None:
    """Give a layer an adapter, in place; `mesh` is the axis over which its matrix is sliced."""
    if mesh is None:
        add_adapter(layer, config, dtype=dtype)
        return
    placements = _placements(layer)
    for part, shape in adapter_shapes(config, layer.out_features, layer.in_features).items():
        empty = torch.empty(shape, dtype=dtype, device="meta")
        placed = distribute_tensor(empty, mesh, [placements[part]], src_data_rank=None)
        layer.register_parameter(part, nn.Parameter(placed))
    if not config.has_magnitudes:
        layer.register_parameter("magnitude", None)
    layer.__class__ = _WITH_ADAPTER[type(layer)]
    layer.scale = config.scale  # type: ignore[assignment]  # not a module or tensor


def _add_new_rows(model: nn.Module, num_rows: int, mesh: DeviceMesh | None, *, dtype: torch.dtype) -> None:
    if mesh is not None:
        add_sliced_new_rows(model, num_rows, mesh, dtype=dtype)
        return
    for matrix in (model.embed, model.unembed):
        if isinstance(matrix, nn.Embedding | nn.Linear):  # otherwise another stage has it, or it is tied
            add_new_rows(matrix, num_rows, dtype=dtype)


def _placements(layer: nn.Module) -> dict[str, Placement]:
    if isinstance(layer, RowLinear):
        return {"lora_a": Shard(1), "lora_b": Replicate(), "magnitude": Replicate()}
    return {"lora_a": Replicate(), "lora_b": Shard(0), "magnitude": Shard(0)}


def room_for(product: RoundedProduct, device: torch.device) -> Tensor:
    """Return an empty tensor for the matrix that a product rounds, in float32: this rank's slice of it.

    Merging and serving round the numbers that are stored; those of `compute` would have other codes.
    If ranks have parts of rows that have one scale, it is the whole matrix: a scale is that of the whole row,
    so that the codes do not depend on the number of ranks.
    """
    like = product.like
    if _has_part_of_rows(product):
        return torch.empty(tuple(like.shape), dtype=torch.float32, device=device)
    return torch.empty_like(like, dtype=torch.float32, device=device)


def fill_rounded(product: RoundedProduct, matrix: Tensor) -> None:
    """Round this rank's slice of a matrix that is in the room for it."""
    if not _has_part_of_rows(product):
        product.fill(detached_local(matrix))
        return
    box = held_box(product.like)
    part = matrix[box.within(whole(matrix.shape))].contiguous()
    product.fill(part, largest=matrix.abs().amax(1))


def _has_part_of_rows(product: RoundedProduct) -> bool:
    return not product.is_int4 and held_box(product.like).sizes[1] < product.like.shape[1]


@torch.no_grad()
def measure_magnitudes(model: nn.Module, masters: Mapping[str, Tensor]) -> None:
    """Set the magnitudes of a model's adapters to the lengths of the rows of its frozen matrices (DoRA).

    Every rank calls it, with the matrices filled; of a matrix sharded by rows a rank measures its own.

    Args:
        masters: the optimizer's float32 copies of parameters, by name; they are set too.
    """
    for name, layer in adapted_layers(model):
        magnitude = getattr(layer, "magnitude", None)
        if magnitude is not None:
            squares = torch.linalg.vector_norm(local(matrix_of(layer)).float(), dim=1).square_()
            if isinstance(layer, RowLinear):
                squares = all_reduce(squares, "sum", layer.group)
            lengths = squares.sqrt_()
            local(magnitude).copy_(lengths)
            if (master := masters.get(f"{name}.magnitude")) is not None:
                local(master).copy_(lengths)
