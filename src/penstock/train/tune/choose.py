"""The objective of a recipe, and the columns that it reads; chosen once, at set-up."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.core.errors import ConfigError
from penstock.data.corpus.columns import LEARNED, REJECTED, read_index
from penstock.data.corpus.corpus import Corpus
from penstock.parallel.collectives import CollectiveGroup, group_of
from penstock.parallel.mesh import Mesh, World
from penstock.train.data_setup import FIELDS
from penstock.train.next_token import NextToken
from penstock.train.objective import Objective
from penstock.train.recipe.config import TrainConfig
from penstock.train.recipe.planned_changes import micro_batch_sizes, micro_rows
from penstock.train.tune.config import TuneConfig
from penstock.train.tune.corpus_pass import Pass
from penstock.train.tune.distillation import Distillation
from penstock.train.tune.kto import SingleAnswers
from penstock.train.tune.mismatches import mismatches_of
from penstock.train.tune.preference import PreferencePairs
from penstock.train.tune.preference_loss import PAIR_LOSSES
from penstock.train.tune.reference import all_there, reference_columns
from penstock.train.tune.teacher import TEACHER_IDS, TEACHER_LOG_PROBS


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """An objective and what the loaders must deliver for it."""

    objective: Objective
    loader_options: dict[str, Any] = field(default_factory=dict)  # Any: arguments of Loader
    """Of the training rows; empty: those of every run."""
    heldout_options: dict[str, Any] = field(default_factory=dict)
    """Of the held-out rows."""


def choose_objective(config: TrainConfig, corpora: Mapping[str, Corpus], scorer: Pass) -> Chosen:
    """Return the objective of a recipe; computes reference log-probabilities that are not there yet.

    Every rank must call it, with the starting weights in the model if `lacks_reference`.
    """
    tune = config.tune or TuneConfig()
    if tune.loss == "distillation":
        _check_teacher(config, tune, corpora)
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


def model_key(config: TrainConfig) -> dict[str, Any]:
    """Return what the log-probabilities of the starting model depend on, as JSON values."""
    adapter = config.adapter
    rounded = [] if adapter is None or adapter.base == "compute" else [adapter.base, *sorted(adapter.layers)]
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


def check_answers(config: TrainConfig, corpora: Mapping[str, Corpus]) -> None:
    """Refuse corpora that do not have what the loss learns from, or have what it must not learn.

    Raises:
        ConfigError: with the corpus.
    """
    loss = "next_token" if config.tune is None else config.tune.loss
    prefers = config.tune is not None and config.tune.is_preference
    for name, corpus in corpora.items():
        if corpus.manifest.count(LEARNED) == 0:
            raise ConfigError(
                f"Corpus {name!r} has no token that is learned, of {corpus.num_tokens:,}",
                got=corpus.location,
                fix="Prepare conversations with turns of the assistant that are learned (`penstock data "
                "describe CORPUS --rows 3` shows them), or leave the corpus out.",
            )
        if prefers and REJECTED not in corpus.columns:
            wanted = "answers that are wanted or not" if loss == "kto" else "pairs of answers"
            raise ConfigError(
                f"tune.loss {loss!r} learns from {wanted}, and corpus {name!r} does not say which answer is "
                "rejected",
                got=corpus.location,
                fix="Prepare it from preference data (`penstock data prepare --chat`), or leave tune.loss "
                "out.",
            )
        if prefers and _holds_pairs(corpus) != (loss != "kto"):
            found, wanted = (
                ("pairs", "'dpo', 'ipo' or 'simpo'") if loss == "kto" else ("single answers", "'kto'")
            )
            raise ConfigError(
                f"Corpus {name!r} has {found}, and tune.loss {loss!r} does not learn from them",
                got=corpus.location,
                fix=f"Set tune.loss to {wanted}, or prepare other data.",
            )
        if not prefers and (corpus.manifest.count(REJECTED) or 0):
            raise ConfigError(
                f"Corpus {name!r} has rejected answers, and tune.loss {loss!r} would learn them too",
                got=corpus.location,
                fix="Set tune.loss to 'dpo', 'ipo', 'simpo' or 'kto', or prepare the chosen answers only.",
            )


def _holds_pairs(corpus: Corpus) -> bool:
    """Return True if the first document is a pair: its bits `rejected` turn on inside of it."""
    start = corpus.next_document(0)
    first = corpus.fragments([(start, max(corpus.next_document(start + 1), start + 1))])
    (shard,), (inside,) = corpus.locate(first.starts[:1])
    bits = corpus.columns[REJECTED].values(int(shard), int(inside), int(inside + first.lengths[0]))
    return bool(bits.any() and not bits.all())


def _longest_document(corpus: Corpus) -> int:
    return int(corpus.fragments([(0, corpus.num_tokens)]).lengths.max())


def _check_teacher(config: TrainConfig, tune: TuneConfig, corpora: Mapping[str, Corpus]) -> None:
    """Refuse corpora without a teacher, or with one that does not fit.

    Raises:
        ConfigError: with the corpus.
    """
    for name in config.data.corpora:
        if name not in config.data.columns:
            raise ConfigError(
                f"tune.loss 'distillation' needs a teacher's tokens for corpus {name!r}",
                fix="Write them with `penstock data teach CORPUS --model TEACHER --out DIR`, and set "
                f'data.corpora.{name}.columns = "DIR".',
            )
        index = read_index(config.data.columns[name])
        made, where = index.made_with, config.data.columns[name]
        if not {TEACHER_IDS, TEACHER_LOG_PROBS} <= {entry.name for entry in index.columns}:
            raise ConfigError(
                f"data.corpora.{name}.columns holds no teacher's tokens",
                got=where,
                fix="Write them with `penstock data teach`.",
            )
        if made.get("vocab_size", 0) > config.model.vocab_size:
            raise ConfigError(
                f"The teacher of corpus {name!r} has {made['vocab_size']:,} token ids, and the model has "
                f"{config.model.vocab_size:,}",
                got=where,
                fix="Take a teacher with the model's tokenizer.",
            )
        seen, wanted = made.get("row_length", config.data.longest), config.data.longest
        if seen < wanted and (longest := _longest_document(corpora[name])) > seen:
            raise ConfigError(
                f"The teacher of corpus {name!r} read rows of {seen:,} tokens, and the model reads documents "
                f"of {min(longest, wanted):,}: of later tokens the teacher did not know the beginning",
                got=where,
                fix=f"Write its tokens again with `penstock data teach --sequence-length {wanted}`, or lower "
                "data.sequence_length.",
            )
        if made.get("temperature") != tune.temperature:
            raise ConfigError(
                f"tune.temperature is {tune.temperature:g}, and the teacher's tokens of corpus {name!r} were "
                f"written at {made.get('temperature')}",
                got=where,
                fix="Set tune.temperature to that, or write them again with `penstock data teach "
                f"--temperature {tune.temperature:g}`.",
            )
