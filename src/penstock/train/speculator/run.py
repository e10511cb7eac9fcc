"""Train heads from the first step to the last, or as far as one is let; what is left continues later."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from torch.nn.utils import clip_grad_norm_

from penstock.checkpoint.speculator import save_speculator
from penstock.core.errors import UsageError
from penstock.core.files import remove_tree
from penstock.data import Loader
from penstock.models.llama.model import Llama
from penstock.models.speculator import Speculator, SpeculatorConfig
from penstock.train.config import ScheduleConfig
from penstock.train.optim.config import OptimConfig
from penstock.train.optim.optimizer import build_optimizer
from penstock.train.schedule import learning_rate
from penstock.train.speculator.config import SpeculatorTraining
from penstock.train.speculator.lessons import FIELDS, Lessons, Write
from penstock.train.speculator.loss import losses
from penstock.train.speculator.measure import Acceptance, measure
from penstock.train.speculator.state import load_state, partial_folder, save_state

_SAVE_EVERY = 200
_MEASURED_ROWS = 32

OnStep = Callable[[int, list[float]], None]
"""(steps taken, nats of each head)."""


def train_speculator(
    base: Llama,
    corpus: str,
    out: Path,
    training: SpeculatorTraining,
    *,
    write: Write,
    stop_requested: Callable[[], bool] = lambda: False,
    on_step: OnStep = lambda _step, _nats: None,
) -> Acceptance | None:
    """Train heads for a model and write them to a folder; return how often their drafts stand.

    An unfinished run of the same settings is continued.

    Args:
        base: in evaluation mode; its weights are not changed.
        write: continues prompts with the same model.
        stop_requested: read before every step; then what is done is kept and None returned.

    Raises:
        UsageError: the folder is not empty, or the rows do not fit the model.
        StateMismatch: there is an unfinished run of other settings.
        CorpusError: there is no corpus, or it has tokens that the model does not know.
    """
    check(base, out, training)
    speculator = new_speculator(base, training)
    optimizer = build_optimizer(
        speculator, OptimConfig(learning_rate=training.learning_rate), seed=training.seed
    )
    settings = {"corpus": corpus, **asdict(training)}
    step = load_state(out, speculator, optimizer, settings=settings)
    lessons = Lessons(base, _rows(corpus, training, split="train"), write, training)
    while step < training.steps:
        if stop_requested():
            save_state(out, speculator, optimizer, step=step, settings=settings)
            return None
        _set_rate(optimizer, step, training)
        each = losses(speculator, lessons.of_step(step))
        each.sum().backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(speculator.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        on_step(step, each.tolist())
        if step % _SAVE_EVERY == 0:
            save_state(out, speculator, optimizer, step=step, settings=settings)
    accepted = measured(base, speculator, corpus, training, write=write)
    report = {"trained": settings, "accepted": asdict(accepted)}
    save_speculator(speculator, out, extra_files={"tuning.json": json.dumps(report, indent=1) + "\n"})
    remove_tree(partial_folder(out))
    return accepted


def check(base: Llama, out: Path, training: SpeculatorTraining) -> None:
    """Refuse what would fail after the first step.

    Raises:
        UsageError: the folder is not empty, or the rows do not fit the model.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} already exists and is not empty", fix="Choose another folder.")
    context = base.config.max_position_embeddings
    for name, length in (
        ("sequence_length", training.sequence_length),
        ("prompt_tokens and own_tokens", training.prompt_tokens + training.own_tokens),
    ):
        if length > context:
            raise UsageError(
                f"{name} are beyond the model's context of {context:,} tokens", got=length, fix="Lower them."
            )


def new_speculator(base: Llama, training: SpeculatorTraining) -> Speculator:
    """Return heads for a model, untrained, where the model is."""
    config = SpeculatorConfig(
        vocab_size=base.config.vocab_size,
        emb_dim=base.config.hidden_size,
        inner_dim=training.inner_dim or base.config.hidden_size,
        n_predict=training.num_heads,
    )
    speculator = Speculator(config)
    speculator.initialise(seed=training.seed)
    return speculator.to(next(base.parameters()).device)


def measured(
    base: Llama, speculator: Speculator, corpus: str, training: SpeculatorTraining, *, write: Write
) -> Acceptance:
    """Measure heads on documents that were not trained on; with `holdout` 0, on those that were."""
    loader = _rows(corpus, training, split="heldout" if training.holdout else "train")
    lessons = Lessons(base, loader, write, training)
    steps = range(-(-_MEASURED_ROWS // training.batch_size))
    return measure(
        speculator,
        text=(lessons.of_text(step) for step in steps),
        own=(lessons.of_own(step, sampled=False) for step in steps),
    )


def _rows(corpus: str, training: SpeculatorTraining, *, split: str) -> Loader:
    return Loader(
        {"text": corpus},
        sequence_length=training.sequence_length,
        global_batch_size=training.batch_size,
        seed=training.seed,
        split="heldout" if split == "heldout" else "train",
        holdout=training.holdout,
        fields=FIELDS,
        num_workers=0,
    )


def _set_rate(optimizer: torch.optim.Optimizer, step: int, training: SpeculatorTraining) -> None:
    rate = learning_rate(
        step,
        peak=training.learning_rate,
        steps=training.steps,
        schedule=ScheduleConfig(warmup_steps=training.steps // 10),
    )
    for group in optimizer.param_groups:
        group["lr"] = rate
