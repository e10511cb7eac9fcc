"""The objective of a recipe that tunes, and the columns that it reads; chosen once, at set-up."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from penstock.data.corpus.corpus import Corpus
from penstock.nn.linear.adapter_config import AdapterConfig
from penstock.parallel.collectives import group_of
from penstock.parallel.mesh import Mesh, World
from penstock.train.data_setup import FIELDS
from penstock.train.label_mean import LabelMean
from penstock.train.objective import ObjectiveSetup
from penstock.train.recipe.config import TrainConfig
from penstock.train.recipe.planned_changes import micro_batch_sizes, micro_rows
from penstock.train.recipe.tune_config import TuneConfig
from penstock.train.tune.corpus_pass import Pass
from penstock.train.tune.distillation import TEACHER_FIELDS, distilled
from penstock.train.tune.kto import Divergence, SingleAnswers
from penstock.train.tune.mismatches import mismatches_of
from penstock.train.tune.preference import PreferencePairs
from penstock.train.tune.preference_loss import PAIR_LOSSES
from penstock.train.tune.preference_objective import PreferenceObjective
from penstock.train.tune.reference import all_there, reference_columns


def choose_objective(
    config: TrainConfig,
    tune: TuneConfig,
    corpora: Mapping[str, Corpus],
    *,
    model: nn.Module,
    world: World,
    mesh: Mesh,
    stop_requested: Callable[[], bool],
) -> ObjectiveSetup:
    """Return the objective of a recipe; computes reference log-probabilities that are not there yet.

    Every rank must call it, with the starting weights in the model if `lacks_reference`.

    Args:
        tune: its [tune] section.
        stop_requested: True once this rank was asked to stop.

    Raises:
        PassStopped: a rank was asked to stop while reference log-probabilities were computed.
    """
    if tune.loss == "distillation":
        loss = partial(distilled, temperature=tune.temperature)
        options = {"fields": (*FIELDS, *TEACHER_FIELDS), "columns": config.data.columns}
        return ObjectiveSetup(objective=LabelMean(loss, TEACHER_FIELDS), loader_options=options)
    if not tune.is_preference:
        return ObjectiveSetup(objective=LabelMean())
    slices = None if mesh.layout.context == 1 else group_of(mesh.context)  # None: rows are whole
    local = config.data.global_batch_size // mesh.layout.num_data
    rows = micro_rows(local, micro_batch_sizes(config.data)(0))  # as in the first step
    scorer = Pass(model=model, world=world, mesh=mesh, rows=rows, stop_requested=stop_requested)
    columns: dict[str, Any] = {}
    if tune.has_reference:
        columns = reference_columns(corpora, model_key(config), scorer, length=config.data.longest)
    answers: PreferencePairs | SingleAnswers
    divergence = None
    if tune.loss == "kto":
        length = config.data.longest
        mismatches = mismatches_of(corpora, model_key(config), scorer, length=length, slices=slices)
        answers = SingleAnswers(tune.beta, tune.desirable_weight, tune.undesirable_weight, slices=slices)
        divergence = Divergence(mismatches=mismatches, length=length, slices=slices)
    else:
        answers = PreferencePairs(
            PAIR_LOSSES[tune.loss],
            tune.beta,
            tune.margin,
            has_reference=tune.has_reference,
            slices=slices,
        )
    objective = PreferenceObjective(answers, divergence)
    options = {"fields": (*FIELDS, *objective.fields), "columns": columns}
    return ObjectiveSetup(objective=objective, loader_options=options, heldout_options=options)


def lacks_reference(
    config: TrainConfig, tune: TuneConfig, corpora: Mapping[str, Corpus], world: World
) -> bool:
    """Return True if reference log-probabilities must be computed; every rank must call it."""
    if not tune.has_reference:
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
