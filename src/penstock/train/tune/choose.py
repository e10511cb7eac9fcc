"""The objective of a recipe, and the columns that it reads; chosen once, at set-up."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.data.corpus.corpus import Corpus
from penstock.nn.linear.adapter_config import AdapterConfig
from penstock.parallel.collectives import CollectiveGroup, group_of
from penstock.parallel.mesh import Mesh, World
from penstock.train.data_setup import FIELDS
from penstock.train.next_token import NextToken
from penstock.train.objective import Objective
from penstock.train.recipe.config import TrainConfig
from penstock.train.recipe.planned_changes import micro_batch_sizes, micro_rows
from penstock.train.recipe.tune_config import TuneConfig
from penstock.train.tune.corpus_pass import Pass
from penstock.train.tune.distillation import Distillation
from penstock.train.tune.kto import SingleAnswers
from penstock.train.tune.mismatches import mismatches_of
from penstock.train.tune.preference import PreferencePairs
from penstock.train.tune.preference_loss import PAIR_LOSSES
from penstock.train.tune.reference import all_there, reference_columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """An objective and what the loaders must deliver for it."""

    objective: Objective
    loader_options: dict[str, Any] = field(default_factory=dict)  # Any: arguments of Loader
    """Options of the training loader; empty: those of every run."""
    heldout_options: dict[str, Any] = field(default_factory=dict)
    """Options of the loader of held-out rows."""


def choose_objective(config: TrainConfig, corpora: Mapping[str, Corpus], scorer: Pass) -> Chosen:
    """Return the objective of a recipe; computes reference log-probabilities that are not there yet.

    Every rank must call it, with the starting weights in the model if `lacks_reference`.
    """
    tune = config.tune or TuneConfig()
    if tune.loss == "distillation":
        distillation = Distillation(tune.temperature)
        fields = (*FIELDS, *distillation.fields)
        return Chosen(
            objective=distillation, loader_options={"fields": fields, "columns": config.data.columns}
        )
    if not tune.is_preference:
        return Chosen(objective=NextToken())
    slices = slices_of(scorer.mesh)
    columns: dict[str, Any] = {}
    if tune.has_reference:
        columns = reference_columns(corpora, model_key(config), scorer, length=config.data.longest)
    objective: Objective
    if tune.loss == "kto":
        objective = SingleAnswers(
            tune.beta,
            tune.desirable_weight,
            tune.undesirable_weight,
            mismatches_of(corpora, model_key(config), scorer, length=config.data.longest, slices=slices),
            length=config.data.longest,
            slices=slices,
        )
    else:
        objective = PreferencePairs(
            PAIR_LOSSES[tune.loss],
            tune.beta,
            tune.margin,
            has_reference=tune.has_reference,
            slices=slices,
        )
    options = {"fields": (*FIELDS, *objective.fields), "columns": columns}
    return Chosen(objective=objective, loader_options=options, heldout_options=options)


def lacks_reference(config: TrainConfig, corpora: Mapping[str, Corpus], world: World) -> bool:
    """Return True if reference log-probabilities must be computed; every rank must call it."""
    tune = config.tune
    if tune is None or not tune.has_reference:
        return False
    length, key = config.data.longest, model_key(config)
    return not all_there(corpora, key, world, length=length, mismatched=tune.loss == "kto")


def _rounding(adapter: AdapterConfig) -> list[Any]:
    """Return what the frozen weights' rounding depends on, as JSON values."""
    some = [list(adapter.blocks), adapter.pattern, list(adapter.excluded)]
    return [adapter.base, *sorted(adapter.layers), *(some if any(some) else [])]


def model_key(config: TrainConfig) -> dict[str, Any]:
    """Return what the log-probabilities of the starting model depend on, as JSON values."""
    adapter = config.adapter
    rounded = [] if adapter is None or adapter.base == "compute" else _rounding(adapter)
    stored = config.precision.weights.partition("_")[0] if adapter is None else config.compute
    weights = stored if config.compute == "float32" else config.compute  # gathered in the dtype of `compute`
    return {
        "start": config.run.start_hash,
        "vocab_size": config.model.vocab_size,
        "compute": config.compute,
        "linear": config.precision.linear,
        "weights": weights,
        "rounded": rounded,
    }


def reference_rows(config: TrainConfig, mesh: Mesh) -> int:
    """Return the rows of a forward pass of the reference: those of a micro-batch of the first step."""
    local = config.data.global_batch_size // mesh.layout.num_data
    return micro_rows(local, micro_batch_sizes(config.data)(0))


def slices_of(mesh: Mesh | None) -> CollectiveGroup | None:
    """Return the ranks with the sequence slices of a row; None: rows are whole."""
    return None if mesh is None or mesh.layout.context == 1 else group_of(mesh.context)
