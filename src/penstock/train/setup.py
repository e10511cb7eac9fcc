"""Setup: recipe to live objects in one visible order: loaders, model, shards, weights, optimizer, resume."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from penstock.checkpoint.find import SavedCheckpoint
from penstock.checkpoint.layout import NUMERICS
from penstock.checkpoint.load import load_into
from penstock.checkpoint.resume import agreed, resume
from penstock.checkpoint.start import StartWeights, find_start, text_folder
from penstock.checkpoint.storage import place_in
from penstock.checkpoint.tensors import training_tensors
from penstock.core import config as configs
from penstock.core.env import local_world_size, memory_bytes, num_gloo_interfaces
from penstock.core.errors import ConfigError
from penstock.core.files import TOKENIZER_FILE, write_atomic
from penstock.core.log import EventLog
from penstock.data import Loader
from penstock.data.corpus.columns import LEARNED
from penstock.data.corpus.spec import absolute
from penstock.devices import accelerator
from penstock.devices.kernel_table import AUTO, REFERENCE
from penstock.models import FAMILIES
from penstock.models.decoder.config import DecoderConfig
from penstock.nn.init import init_adapters, init_weights
from penstock.nn.kernels.choose import choose_kernel
from penstock.nn.linear.lora import is_of_adapter, rounded_by_block
from penstock.nn.new_rows import is_new_rows
from penstock.nn.unfilled import on_device, unfilled
from penstock.parallel.apply import ParallelModel, apply
from penstock.parallel.ethernet.unshared import Unshared
from penstock.parallel.layout import layout_of
from penstock.parallel.mesh import Mesh, World, broadcast, make_mesh
from penstock.text.companions import companions_of, with_end_ids
from penstock.text.tokenizer import Tokenizer
from penstock.train.adaptive import Adaptive
from penstock.train.data_setup import (
    check_data,
    checkpoints,
    continue_from,
    continue_from_newest,
    heldout_rows,
    tokenizers_of,
    train_loader,
    turn_ends,
    warn_of_packing,
    warn_of_templates,
)
from penstock.train.early_stop import EarlyStop
from penstock.train.guard import StepGuard
from penstock.train.kernels import choose_kernels
from penstock.train.label_mean import LabelMean
from penstock.train.objective import ObjectiveSetup
from penstock.train.optim.optimizer import Optimizer, build_optimizer
from penstock.train.optim.weight_storage import STORAGES
from penstock.train.planning.memory import keeps_base_whole, recompute_modes
from penstock.train.recipe.config import TrainConfig, on_machines
from penstock.train.recipe.planned_changes import check_rows
from penstock.train.starts import KeptRecipe, keep_recipe
from penstock.train.state import TrainState

if TYPE_CHECKING:
    from penstock.models.decoder.model import Decoder
    from penstock.parallel.ethernet.scheduler import Ethernet

log = EventLog(__name__)


def build_model(
    config: TrainConfig, world: World, mesh: Mesh, *, kernels: Mapping[str, str] | None = None
) -> tuple[nn.Module, ParallelModel]:
    """Build, shard and initialise the model; no rank ever holds more than its shards.

    With run.start_from the weights are left unfilled: see `start_weights`.

    Args:
        kernels: as in `choose_kernel`.

    Returns:
        The model, or this rank's pipeline stages, and how it was parallelised.
    """
    with unfilled():
        model: Decoder = FAMILIES[config.model.model_type](config.model)
    model.limit_texts(config.data.longest)
    if config.model.attn_logit_softcapping is not None:
        log.info(
            "capped_attention",
            "The model caps attention scores, which no fused kernel does: PyTorch computes attention "
            "step by step, on CPUs in up to twice the time of other models",
        )
    model.choose = partial(choose_kernel, kernels=kernels)  # not a module
    compute, stored = getattr(torch, config.compute), STORAGES[config.precision.weights].dtype
    model.to(stored if config.adapter is None else compute)  # frozen weights need no more precision
    spread = apply(
        model,
        mesh,
        config.parallel,
        compute_dtype=compute,
        linear=config.precision.linear,
        modes=recompute_modes(config, mesh.layout),
        compiled=config.compile,
        adapter=config.adapter,
        adapter_dtype=stored,
        frozen=frozenset() if config.tune is None else config.tune.frozen(config.model),
    )
    on_device(model, "cpu" if config.parallel.offload else world.device)
    if mesh.num_shards > 1 and config.ethernet.gather != config.compute:
        from penstock.parallel.ethernet.quantized_gather import encode_gathers

        encode_gathers(model, config.ethernet.gather)
    if not config.run.start_from:
        init_weights(model, seed=config.run.seed)
    init_adapters(model, seed=config.run.seed)
    return model, spread


def start_weights(
    config: TrainConfig, world: World, model: nn.Module, optimizer: Optimizer, *, always: bool = False
) -> None:
    """Fill the parameters, and their float32 copies, with the weights that the run starts from.

    Does nothing without run.start_from. If there is a checkpoint to resume from, only the frozen weights are
    read, which it does not have.

    Args:
        always: True to read all weights in any case; the checkpoint then replaces those that it has.

    Raises:
        ModelError, CheckpointError: they cannot be read, on any rank.
        ConfigError: they are not those of `run.start_hash`.
    """
    run = config.run
    if not run.start_from:
        return
    resumes = not always and broadcast(world, bool(checkpoints(config)) if world.is_first else None)
    if resumes and config.adapter is None:
        return
    wanted = {
        name: parameter
        for name, parameter in model.named_parameters()
        if not is_of_adapter(name) and not (resumes and parameter.requires_grad)
    }

    new_rows = {
        name: parameter for name, parameter in model.named_parameters() if is_new_rows(name) and not resumes
    }

    def load() -> None:
        from penstock.checkpoint.load_start import load_new_rows, load_start

        start = find_start(Path(run.start_from), step=run.start_step, ignored_keys=config.model.ignored_keys)
        if start.identity != run.start_hash:
            raise ConfigError(
                f"The start weights in {start} changed after the run began: their hash is {start.identity}",
                got=run.start_hash,
                fix="Restore them, or start a new run.",
            )
        load_start(start, wanted)
        load_new_rows(start, new_rows)
        for rounded in rounded_by_block(model):
            from penstock.parallel.adapters import fill_rounded, room_for

            rooms = {name: room_for(product, world.device) for name, product in rounded.items()}
            load_start(start, rooms)
            for name, product in rounded.items():
                fill_rounded(product, rooms.pop(name))
        load_start(start, _masters(optimizer, wanted))
        load_new_rows(start, _masters(optimizer, new_rows))
        if world.is_first and not resumes:
            _say_start(start, config.model)

    if (failure := agreed(load)) is not None:
        raise failure
    if config.adapter is not None:
        from penstock.parallel.adapters import measure_magnitudes

        measure_magnitudes(model, _masters(optimizer, dict(model.named_parameters())))


def _masters(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the float32 copies of parameters, by name, if there are any."""
    return {
        name: optimizer.state[parameter]["master"]
        for name, parameter in parameters.items()
        if "master" in optimizer.state.get(parameter, {})
    }


def _say_start(start: StartWeights, model: DecoderConfig) -> None:
    log.info("started", "Started from the weights in {path} (hash {hash})", path=start, hash=start.identity)
    if model.vocab_size > start.model.vocab_size:
        log.info(
            "vocabulary_grew",
            "The corpora's tokenizer has tokens that the model lacks: its vocabulary grows from "
            "{rows_before:,} to {rows:,} rows. New rows are the mean of the old",
            rows_before=start.model.vocab_size,
            rows=model.vocab_size,
        )


def open_state(
    config: TrainConfig, world: World, *, stop_requested: Callable[[], bool] = lambda: False
) -> TrainState:
    """Build the training state, resumed from the newest intact checkpoint if there is one.

    Args:
        stop_requested: True once this rank was asked to stop.

    Raises:
        PassStopped: a rank was asked to stop while reference log-probabilities were computed.
    """
    config = on_machines(config, world_size=world.ranks.world_size, ranks_per_machine=local_world_size())
    layout = layout_of(config.parallel, world_size=world.ranks.world_size)
    whole = world.is_first and keeps_base_whole(config, layout, memory_bytes=_memory_bytes(world))
    whole = broadcast(world, whole)
    mesh = make_mesh(world, layout, islands=bool(config.outer.every), keeps_frozen_whole=whole)
    num_data = mesh.layout.num_data
    check_rows(config, world_size=num_data)
    deliver = "pinned" if accelerator.is_accelerator(world.device) else "torch"
    open_loader = partial(train_loader, config, rank=mesh.data_rank, world_size=num_data, deliver=deliver)
    loader = open_loader()
    continue_from_newest(config, loader)  # early: refuses an impossible resume before anything is built
    check_data(config, loader)
    kernels, resumed_kernels = choose_kernels(config, world, layout)
    model, spread = build_model(config, world, mesh, kernels=kernels.chosen)
    schedule = _schedule(config, mesh, spread)
    adaptive = Adaptive(config.data.adaptive, list(loader.corpora)) if config.data.is_adaptive else None
    optimizer = build_optimizer(model, config.optim, weights=config.precision.weights, seed=config.run.seed)
    if (tune := config.tune) is None:
        start_weights(config, world, model, optimizer)
        chosen = ObjectiveSetup(objective=LabelMean())
    else:
        from penstock.train.tune.choose import choose_objective, lacks_reference

        start_weights(
            config, world, model, optimizer, always=lacks_reference(config, tune, loader.corpora, world)
        )
        chosen = choose_objective(
            config, tune, loader.corpora, model=model, world=world, mesh=mesh, stop_requested=stop_requested
        )
    if chosen.loader_options:
        loader = open_loader(**chosen.loader_options)
        continue_from_newest(config, loader)
    heldout = heldout_rows(config, **chosen.heldout_options)
    state = TrainState(
        model,
        optimizer,
        loader,
        mesh,
        heldout,
        schedule,
        chosen.objective,
        spread.pipeline,
        adaptive=adaptive,
    )
    state.kernels, state.resumed_kernels = kernels, resumed_kernels
    if config.adapter is not None and config.adapter.dropout:
        state.dropout_seed = config.run.seed
    state.guard = StepGuard(config.guard)
    if config.validate.stop_after:
        state.early_stop = EarlyStop(
            stop_after=config.validate.stop_after, min_improvement=config.validate.min_improvement
        )
    if config.outer.every:
        from penstock.train.islands.outer_optimizer import Outer

        state.outer = Outer(config.outer, model, optimizer, mesh)
    restore(state, config, world)
    return state


def _schedule(config: TrainConfig, mesh: Mesh, spread: ParallelModel) -> "Ethernet | Unshared":
    """Return the schedule of a step's gathers and reductions."""
    if not spread.shares:
        return Unshared(spread.stages, config.ethernet)
    from penstock.parallel.ethernet.scheduler import Ethernet

    return Ethernet(
        spread.stages,
        mesh,
        config.ethernet,
        compute_dtype=getattr(torch, config.compute),
        num_nics=num_gloo_interfaces(),
    )


def _memory_bytes(world: World) -> int:
    """Return the memory of this rank's device; of a machine's, its share."""
    if accelerator.is_accelerator(world.device):
        return accelerator.free_and_total_bytes(world.device)[1]
    return memory_bytes() // local_world_size()


def restore(state: TrainState, config: TrainConfig, world: World) -> None:
    """Restore the state from the newest intact checkpoint of the run, if there is one.

    Raises:
        CheckpointDamaged: there are checkpoints, and all are damaged.
    """

    def from_(saved: SavedCheckpoint) -> None:
        meta = continue_from(config, state.loader, saved)
        state.resumed_numerics = meta.numerics
        if state.adaptive is not None:
            state.adaptive.load_state_dict(meta.adaptive)
        if state.early_stop is not None:
            state.early_stop.load_state_dict(meta.early_stop)
        own = training_tensors(state.model, state.optimizer)
        if state.outer is not None or meta.outer:
            from penstock.train.islands.checkpoint import load_as_one, load_islands
            from penstock.train.islands.outer_optimizer import Outer
        if state.outer is not None:
            load_islands(saved, state.outer, own)
        elif meta.outer:
            load_as_one(saved, Outer(config.outer, state.model, state.optimizer, state.mesh), own)
        else:
            load_into(saved, own)

    names = broadcast(world, [saved.name for saved in checkpoints(config)] if world.is_first else None)
    place = place_in(Path(config.run.dir), config.checkpoint.dir)
    if saved := resume([SavedCheckpoint(place, name) for name in names], from_):
        log.info("resumed", "Resumed after step {step:,}, from {path}", step=state.step, path=saved)
        if world.is_first and state.resumed_numerics != NUMERICS:
            log.warning(
                "numerics_changed",
                "Another version of Penstock, which computes in another order (numerics {before}, now"
                " {now}), trained up to step {step:,}. From here on losses may differ in their last "
                "digits from what they would have been",
                before=state.resumed_numerics,
                now=NUMERICS,
                step=state.step,
            )


def write_identity(config: TrainConfig, loader: Loader) -> KeptRecipe:
    """Write the resolved recipe of this start and the tokenizer to the run's folder, after all checks.

    Paths in the recipe become absolute, so that the run can be inspected from any folder.
    """
    folder = Path(config.run.dir)
    recipe = configs.dump(config)
    recipe["run"]["dir"] = str(folder.resolve())
    if config.checkpoint.dir:
        recipe["checkpoint"]["dir"] = absolute(config.checkpoint.dir)
    if config.kernels not in (AUTO, REFERENCE):
        recipe["kernels"] = absolute(config.kernels)
    for corpus in recipe["data"]["corpora"].values():
        corpus["path"] = absolute(corpus["path"])
        if corpus["columns"]:
            corpus["columns"] = absolute(corpus["columns"])
    kept = keep_recipe(folder, json.loads(json.dumps(recipe)), step=loader.step)
    warn_of_templates(loader)
    warn_of_packing(config, loader)
    _keep_tokenizer(folder, loader, start_from=config.run.start_from)
    return kept


def _keep_tokenizer(folder: Path, loader: Loader, *, start_from: str) -> None:
    """Copy the tokenizer of the corpora, or of the start, and its companions to the run's folder.

    The tokens that end the turns of their conversations become end tokens of answers.
    """
    known = tokenizers_of(loader)  # corpora of other tools have none
    sources, tokenizer = [path.parent for path in known], next(iter(known), None)
    if start_from and (start := text_folder(Path(start_from))).is_dir():
        sources.append(start)
    if tokenizer is None:
        tokenizer = next((path for s in sources if (path := s / TOKENIZER_FILE).is_file()), None)
    if tokenizer is None:
        return
    write_atomic(folder / TOKENIZER_FILE, tokenizer.read_bytes())
    files = companions_of(sources)
    if chats := [corpus for corpus in loader.corpora.values() if LEARNED in corpus.columns]:
        loaded = Tokenizer.load(tokenizer)
        ends = {token for corpus in chats for token in turn_ends(corpus, loaded.control_ids)}
        files = with_end_ids(files, sorted(ends), own=loaded.eos_id)
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        write_atomic(folder / name, text)
