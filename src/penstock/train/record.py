"""What a run writes down: a record a step, and the samples each rank trained on."""

import zlib
from collections.abc import Callable
from dataclasses import asdict

import torch

from penstock.obs.meter import Rates, peak_memory_bytes
from penstock.obs.sinks import Record
from penstock.obs.sinks.jsonl import JsonLines
from penstock.train.state import Batch, TrainState
from penstock.train.step import StepResult


def step_record(state: TrainState, result: StepResult, rates: Rates, *, learning_rate: float) -> Record:
    """Return the record of the step just taken; the names are those of obs/names.py."""
    memory = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else peak_memory_bytes()
    return {
        "step": state.step,
        "tokens": state.loader.tokens_before(state.step),
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "learning_rate": learning_rate,
        **asdict(rates),
        "memory_bytes": memory,
        "corpus_tokens": state.loader.tokens_by_corpus(state.step),
    }


def checksums(input_ids: torch.Tensor) -> list[int]:
    """Return the CRC-32 of each row of tokens [rows, length] int64, in the order of the rows."""
    return [zlib.crc32(row.numpy().tobytes()) for row in input_ids.cpu()]


def sample_log(sink: JsonLines | None) -> Callable[[Batch, int], None]:
    """Return what logs each batch's sample ids and row checksums; nothing where there is no sink."""

    def on_batch(batch: Batch, step: int) -> None:
        if sink is not None:
            ids = batch["sample_ids"].tolist()
            sink({"step": step, "sample_ids": ids, "crc32": checksums(batch["input_ids"])})

    return on_batch
