"""Whether the corpora of a recipe hold what its loss learns from; no torch."""

from collections.abc import Mapping

from penstock.core.errors import ConfigError
from penstock.data.corpus.columns import LEARNED, REJECTED, TEACHER_IDS, TEACHER_LOG_PROBS, read_index
from penstock.data.corpus.corpus import Corpus
from penstock.train.recipe.config import TrainConfig
from penstock.train.recipe.tune_config import TuneConfig


def check_corpora(config: TrainConfig, corpora: Mapping[str, Corpus]) -> None:
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
    if config.tune is not None and config.tune.loss == "distillation":
        _check_teacher(config, config.tune, corpora)


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
