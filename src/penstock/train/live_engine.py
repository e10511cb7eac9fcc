"""An engine over the weights of a running job, between two of its steps: for samples and evaluations.

    every rank: whose box is which (one small all-gather)
    tensor by tensor: its owners -> rank 0, in the run's compute dtype     (send, receive)
    rank 0: a plain model, filled; packed as for serving; answers          the others wait (signs_of_life)

Any layout works, because tensors meet as boxes, as in checkpoints: shards, tensor-parallel slices and
pipeline stages alike; of replicas, one sends. With `everywhere` rank 0 passes each tensor on, so that each
rank has an engine of its own for its share of the work.

Adapters are merged into their matrices there, as `penstock export --merge` does; a base of 8 or 4 bits is
gathered as the rounded matrices that it stands for.

Memory, on a rank with an engine: one copy of the model in the compute dtype, one tensor in flight, and the
keys and values of the sequences asked for; all of it is freed at the end. Bytes on the network: those of the
copy, into rank 0 (and to each rank with `everywhere`).

Training is not touched: tensors are only read, the engine's random numbers are hashes (no generator moves),
and the loader stands still. Losses with and without are equal, bit for bit (tests/ranks/test_live_engine.py).
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.checkpoint.adapter_run import adapters_of
from penstock.checkpoint.tensors import held
from penstock.core import clock, env
from penstock.core.boxes import Box
from penstock.core.errors import ModelError, PenstockError
from penstock.core.files import TOKENIZER_FILE
from penstock.core.units import mib
from penstock.devices import accelerator
from penstock.engine.assemble import engine_of
from penstock.engine.config import EngineConfig
from penstock.engine.llm import LLM
from penstock.models import FAMILIES
from penstock.models.decoder.config import DecoderConfig
from penstock.models.decoder.model import Decoder
from penstock.nn.linear.adapter_config import OUTPUT_MATRIX, AdapterConfig
from penstock.nn.linear.lora import adapter_shapes, is_of_adapter, rounded_by_block
from penstock.nn.new_rows import NEW_ROWS, put_new_rows
from penstock.nn.unfilled import on_device, unfilled
from penstock.parallel.mesh import World, broadcast
from penstock.parallel.slices import like
from penstock.train.recipe.config import TrainConfig
from penstock.train.state import TrainState

T = TypeVar("T")

_NO_BOX = -1
_MAX_DIMS = 2
_RENEWED_EVERY_S = 1.0


class LiveEngineFailed(PenstockError):
    """No engine could be built over the weights of a run; the message has the reason of the first rank."""


@contextmanager
def live_engine(
    state: TrainState,
    config: TrainConfig,
    world: World,
    *,
    max_sequences: int,
    max_context: int | None = None,
    everywhere: bool = False,
) -> Iterator[LLM | None]:
    """Context manager: an engine over the run's weights on rank 0; None on the others, which must enter too.

    It answers with the run's tokenizer and chat template. Ranks leave together: the others wait at its end.

    Args:
        max_sequences: answers computed at once; they bound the memory of keys and values.
        max_context: tokens of prompt and answer together; None: the model's context.
        everywhere: every rank has an engine.

    Raises:
        LiveEngineFailed: there is no memory for it, or no tokenizer, or the caller's block raised a
            PenstockError on a rank. It is raised on all ranks, and training can go on.
    """
    own = everywhere or world.is_first
    model, why = None, ""
    if own:
        model, why = _tried(
            lambda: _empty_model(config, world, copies=env.local_world_size() if everywhere else 1)
        )
    _agree(world, why)
    fill_whole(model, state, config, world, everywhere=everywhere)
    options = EngineConfig(
        max_sequences=max_sequences,
        max_context=max_context,
        prefix_caching=True,
        compile="off",
        kernels="reference",  # a measurement would hold training up
    )
    llm = None
    if own:
        assert model is not None
        filled = model
        llm, why = _tried(lambda: LLM.of(engine_of(filled, options, tokenizer_path=tokenizer_of(config))))
        del filled
    model = None
    try:
        _agree(world, why)
        try:
            yield llm
        except PenstockError as error:
            why = str(error)
    finally:
        if llm is not None:
            llm.close()
        llm = None
        gc.collect()
        if accelerator.is_accelerator(world.device):
            accelerator.free_cache()
    _agree(world, why)


@contextmanager
def signs_of_life(state: TrainState, world: World, what: str) -> Iterator[Callable[..., None]]:
    """Context manager: the first rank works and the others wait; its progress renews the watchdogs of all.

    It yields the function that the first rank calls as it gets ahead. Once a second it tells the others by a
    small sum, so that no collective waits for the whole work. Every rank must enter.
    """
    renewed = clock.monotonic()

    def progress(*_: object) -> None:
        nonlocal renewed
        if clock.monotonic() - renewed >= _RENEWED_EVERY_S:
            world.sum(True)
            state.watch.doing(what, step=state.step)
            renewed = clock.monotonic()

    state.watch.doing(what, step=state.step)
    try:
        yield progress
    finally:
        while world.sum(False)[0]:  # the first rank adds nothing once it is done
            state.watch.doing(what, step=state.step)


def tokenizer_of(config: TrainConfig) -> Path:
    """Return the tokenizer of a run, which its chat template stands beside.

    Raises:
        ModelError: its corpora name none.
    """
    path = Path(config.run.dir) / TOKENIZER_FILE
    if not path.is_file():
        raise ModelError(
            f"The run has no {TOKENIZER_FILE}: none of its corpora names one",
            fix="Copy tokenizer.json into the folder of a corpus, or leave [samples] and [evaluate] out.",
        )
    return path


@torch.no_grad()
def fill_whole(
    model: Decoder | None, state: TrainState, config: TrainConfig, world: World, *, everywhere: bool = False
) -> None:
    """Fill a plain model with a run's present weights, adapters merged; every rank must call it.

    Args:
        model: as in `gather_whole`.
    """
    with state.shown():
        gather_whole(PlainTensors(state.model), model, world, everywhere=everywhere)
        if config.adapter is not None:
            _merge_adapters(state.model, config.adapter, config.model, model, world, everywhere=everywhere)


def gather_whole(
    tensors: Mapping[str, Tensor], model: torch.nn.Module | None, world: World, *, everywhere: bool = False
) -> None:
    """Fill a plain model on rank 0 with the tensors of all ranks; every rank must call it.

    Args:
        tensors: this rank's, as DTensors or plain ones, by name; several ranks may hold the same box.
        model: on rank 0, or on all with `everywhere`; its dtype is that in which tensors are sent. Elsewhere
            None.
    """
    dtype_name = broadcast(world, str(next(model.parameters()).dtype) if model is not None else None)
    dtype = getattr(torch, dtype_name.removeprefix("torch."))
    rooms = None if model is None else model.state_dict()
    gather_tensors(tensors, rooms, world, dtype=dtype, everywhere=everywhere)


def gather_tensors(
    tensors: Mapping[str, Tensor],
    rooms: Mapping[str, Tensor] | None,
    world: World,
    *,
    dtype: torch.dtype,
    everywhere: bool = False,
) -> None:
    """Fill whole tensors on rank 0 with those of all ranks; every rank must call it.

    Args:
        tensors: as in `gather_whole`.
        rooms: tensors to fill, by name, of type `dtype`: on rank 0, or on all with `everywhere`.
    """
    names: list[str] = broadcast(world, sorted(rooms) if rooms is not None else None)
    rooms = rooms or {}
    boxes = _boxes_of_ranks(names, {name: held(name, tensors[name])[0] for name in tensors}, world)
    for index, name in enumerate(names):
        owners = _owners(boxes[:, index])
        mine = held(name, tensors[name]) if name in tensors else None
        if world.is_first:
            _receive(rooms[name], owners, mine, dtype, world)
        else:
            _send(owners, mine, dtype, world)
        if everywhere:
            whole = rooms[name].contiguous()
            dist.broadcast(whole, src=0)
            rooms[name].copy_(whole)


class PlainTensors(Mapping[str, Tensor]):
    """This rank's tensors of a model by name, without adapters; frozen matrices that were rounded are made
    again when they are asked for.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        stored = model.state_dict()
        self._stored = {name: tensor for name, tensor in stored.items() if not is_of_adapter(name)}
        self._rounded = {name: one for block in rounded_by_block(model) for name, one in block.items()}

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor."""
        if name not in self._rounded:
            tensor: Tensor = self._stored[name]
            return tensor
        product = self._rounded[name]
        return like(product.like, product.matrix(), tuple(product.like.shape))

    def __iter__(self) -> Iterator[str]:
        """Yield the names."""
        yield from self._stored
        yield from self._rounded

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self._stored) + len(self._rounded)


def _merge_adapters(
    trained: torch.nn.Module,
    adapter: AdapterConfig,
    config: DecoderConfig,
    model: Decoder | None,
    world: World,
    *,
    everywhere: bool,
) -> None:
    """Merge the adapters of all ranks into a plain model, on the ranks that have it."""
    own = {name: tensor for name, tensor in trained.state_dict().items() if is_of_adapter(name)}
    rooms = {
        f"{layer}.{part}": torch.empty(shape, device=world.device)
        for layer, (outputs, inputs) in config.linear_layers.items()
        if (of_layer := adapter.of(layer)) is not None
        for part, shape in adapter_shapes(of_layer, outputs, inputs).items()
    }
    if adapter.unembed:
        of_output = adapter.of(OUTPUT_MATRIX) or adapter
        shapes = adapter_shapes(of_output, config.vocab_size, config.hidden_size)
        rooms |= {
            f"{OUTPUT_MATRIX}.{part}": torch.empty(shape, device=world.device)
            for part, shape in shapes.items()
        }
    for matrix in ("embed",) if config.tie_word_embeddings else ("embed", "unembed"):
        if adapter.new_rows:
            shape = adapter.new_rows, config.hidden_size
            rooms[f"{matrix}.{NEW_ROWS}"] = torch.empty(shape, device=world.device)
    gather_tensors(own, None if model is None else rooms, world, dtype=torch.float32, everywhere=everywhere)
    if model is not None:
        for layer, each in adapters_of(rooms, adapter).items():
            weight = model.get_parameter(f"{layer}.weight")
            weight.copy_(each.change(weight))
        put_new_rows(model.state_dict(), rooms)


def _empty_model(config: TrainConfig, world: World, *, copies: int) -> Decoder:
    """Return a model without values in the compute dtype, on this rank's device.

    Raises:
        ModelError: the memory that is free now does not hold it.
    """
    with unfilled():
        model = FAMILIES[config.model.model_type](config.model)
    model = cast(Decoder, model).to(getattr(torch, config.compute)).requires_grad_(False)
    model.limit_texts(config.data.longest)
    needed = sum(parameter.nbytes for parameter in model.parameters())
    if accelerator.is_accelerator(world.device):
        accelerator.free_cache()
        free, _ = accelerator.free_and_total_bytes(world.device)
    else:
        free, needed = env.available_bytes(), needed * copies
    if needed > free:
        raise ModelError(
            f"A copy of the model's weights in {config.compute} takes {mib(needed)}, more than is free",
            got=mib(free),
            fix="Train on more ranks or with smaller rows; or leave [samples] and [evaluate] out.",
        )
    return on_device(model, world.device).eval()


def _boxes_of_ranks(names: Sequence[str], mine: Mapping[str, Box], world: World) -> Tensor:
    """Return the box of each tensor on each rank, [ranks, names, 2, dims] int64; -1: the rank has none."""
    own = torch.full((len(names), 2, _MAX_DIMS), _NO_BOX, dtype=torch.int64)
    for index, name in enumerate(names):
        if name in mine:
            offsets, sizes = mine[name]
            own[index, 0, : len(offsets)] = torch.tensor(offsets)
            own[index, 1, : len(sizes)] = torch.tensor(sizes)
    own = own.to(world.device)
    every = [torch.empty_like(own) for _ in range(world.ranks.world_size)]
    dist.all_gather(every, own)
    return torch.stack(every).cpu()


def _owners(boxes: Tensor) -> dict[Box, int]:
    """Return the distinct boxes of a tensor, [ranks, 2, dims], and the first rank that holds each."""
    found: dict[Box, int] = {}
    for rank, (offsets, sizes) in enumerate(boxes.tolist()):
        dims = sum(size != _NO_BOX for size in sizes)
        box = Box(tuple(offsets[:dims]), tuple(sizes[:dims]))
        if dims and box.num_elements:
            found.setdefault(box, rank)
    return found


def _send(
    owners: Mapping[Box, int], mine: tuple[Box, Tensor] | None, dtype: torch.dtype, world: World
) -> None:
    if mine is not None and owners.get(mine[0]) == world.ranks.rank:
        dist.send(mine[1].to(world.device, dtype).contiguous(), dst=0)


def _receive(
    room: Tensor,
    owners: Mapping[Box, int],
    mine: tuple[Box, Tensor] | None,
    dtype: torch.dtype,
    world: World,
) -> None:
    waiting: list[tuple[dist.Work, Tensor, Box]] = []
    whole = Box((0,) * room.dim(), tuple(room.shape))
    for box, rank in owners.items():
        if rank == 0:
            assert mine is not None
            room[box.within(whole)] = mine[1].to(room.device, dtype)
            continue
        part = torch.empty(box.sizes, dtype=dtype, device=world.device)
        work = dist.irecv(part, src=rank)
        assert work is not None, rank
        waiting.append((work, part, box))
    for work, part, box in waiting:
        work.wait()
        room[box.within(whole)] = part


def _tried(make: Callable[[], T]) -> tuple[T | None, str]:
    """Return a result, or the reason why there is none."""
    try:
        return make(), ""
    except (PenstockError, MemoryError, torch.OutOfMemoryError) as error:
        return None, str(error)


def _agree(world: World, why: str) -> None:
    """Raise on all ranks if one has a reason; every rank must call it."""
    (failed,) = world.sum(bool(why))
    if failed:
        first = broadcast(world, why)
        raise LiveEngineFailed(why or first or "Another rank failed")
