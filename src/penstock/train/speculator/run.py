"""Train speculator heads, with a state on disk from which an interrupted run resumes."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from penstock.checkpoint.hf import check_new
from penstock.checkpoint.speculator import save_speculator
from penstock.core.errors import CheckpointDamaged, StateMismatch, UsageError, damaged
from penstock.core.files import remove_tree, write_atomic
from penstock.core.packages import Package
from penstock.data import Loader
from penstock.models.decoder.model import Decoder
from penstock.models.speculator import Speculator, SpeculatorConfig
from penstock.train.optim.learning_rate import learning_rate
from penstock.train.optim.optimizer import build_optimizer
from penstock.train.recipe.config import ScheduleConfig
from penstock.train.recipe.optim_config import OptimConfig
from penstock.train.speculator.batches import FIELDS, Lessons, Write, losses
from penstock.train.speculator.config import SpeculatorTraining
from penstock.train.speculator.measure import AcceptanceReport, measure

if TYPE_CHECKING:
    import safetensors
    import safetensors.torch as safetensors_torch
else:
    safetensors = Package("safetensors", "Speculator heads")
    safetensors_torch = Package("safetensors.torch", "Speculator heads")


_SAVE_EVERY = 200
_MEASURED_ROWS = 32

OnStep = Callable[[int, list[float]], None]
"""(steps taken, loss of each head in nats)."""


def train_speculator(
    base: Decoder,
    corpus: str,
    out: Path,
    training: SpeculatorTraining,
    *,
    write: Write,
    stop_requested: Callable[[], bool] = lambda: False,
    on_step: OnStep = lambda _step, _nats: None,
) -> AcceptanceReport | None:
    """Train heads for a model and save them to a folder; return their acceptance, None if stopped.

    An unfinished run with the same settings is resumed.

    Args:
        base: in evaluation mode; frozen.
        write: continues prompts with the same model.
        stop_requested: called before every step; if True the state is saved and None returned.

    Raises:
        UsageError: the folder is not empty, or the rows do not fit the model.
            StateMismatch: there is an unfinished run with other settings.
            CorpusError: the corpus does not exist, or has token ids outside the vocabulary.
    """
    check(base, out, training)
    base.limit_texts(max(training.sequence_length, training.prompt_tokens + training.own_tokens))
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


def check(base: Decoder, out: Path, training: SpeculatorTraining) -> None:
    """Raise for settings that would fail later.

    Raises:
        UsageError: the folder is not empty, or the rows do not fit the model.
    """
    check_new(out)
    context = base.config.max_position_embeddings
    for name, length in (
        ("sequence_length", training.sequence_length),
        ("prompt_tokens and own_tokens", training.prompt_tokens + training.own_tokens),
    ):
        if length > context:
            raise UsageError(
                f"{name}: longer than the model's context of {context:,} tokens",
                got=length,
                fix="Choose a smaller number.",
            )


def new_speculator(base: Decoder, training: SpeculatorTraining) -> Speculator:
    """Return untrained heads for a model, on its device."""
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
    base: Decoder, speculator: Speculator, corpus: str, training: SpeculatorTraining, *, write: Write
) -> AcceptanceReport:
    """Measure heads on held-out documents; with `holdout` 0, on those trained on."""
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


_FILE = "state.safetensors"


def partial_folder(out: Path) -> Path:
    """Return the folder of an unfinished run."""
    return out.with_name(f"{out.name}.partial")


def save_state(
    out: Path,
    speculator: Speculator,
    optimizer: torch.optim.Optimizer,
    *,
    step: int,
    settings: Mapping[str, Any],
) -> None:
    """Save the state for `load_state`, atomically: the previous file stays until this one is complete."""
    folder = partial_folder(out)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in _tensors(speculator, optimizer)}
    metadata = {"step": str(step), "settings": json.dumps(settings, sort_keys=True)}
    write_atomic(folder / _FILE, safetensors_torch.save(tensors, metadata=metadata))


def load_state(
    out: Path, speculator: Speculator, optimizer: torch.optim.Optimizer, *, settings: Mapping[str, Any]
) -> int:
    """Load heads and optimizer state of an unfinished run in place; return its step, 0 without one.

    Raises:
        StateMismatch: the run has other settings.
        CheckpointDamaged: the file is damaged.
    """
    path = partial_folder(out) / _FILE
    if not path.is_file():
        return 0
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            _check(json.loads(metadata["settings"]), settings, out)
            with torch.no_grad():
                for name, tensor in _tensors(speculator, optimizer):
                    tensor.copy_(file.get_tensor(name))
            return int(metadata["step"])
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise CheckpointDamaged(damaged(path, error), fix=f"Remove {path.parent} and start again.") from error


def _check(stored: Mapping[str, Any], given: Mapping[str, Any], out: Path) -> None:
    for name in sorted({*stored, *given}):
        if stored.get(name) != given.get(name):
            raise StateMismatch(
                f"The unfinished run in {partial_folder(out)} has {name} {stored.get(name)!r}",
                got=given.get(name),
                fix=f"Give the same, choose another folder, or remove {partial_folder(out)}.",
            )


def _tensors(speculator: Speculator, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in speculator.named_parameters():
        yield name, parameter.detach()
        for key, value in optimizer.state[parameter].items():
            yield f"optimizer.{name}.{key}", value
