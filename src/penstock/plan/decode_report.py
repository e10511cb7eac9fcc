"""Generation on a cluster, in words and JSON: what each way to cut a model gives for several batches."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from penstock.core.errors import ConfigError
from penstock.core.units import mib
from penstock.models.llama.config import LlamaConfig
from penstock.plan.candidates import divisors
from penstock.plan.decode import DecodeJob, DecodePrediction, predict_decode
from penstock.plan.hardware import Cluster

_BATCHES = (1, 8, 32, 128)


class Way(NamedTuple):
    """One way to generate."""

    job: DecodeJob
    prediction: DecodePrediction


def ways(model: LlamaConfig, cluster: Cluster, *, context_tokens: int) -> list[Way]:
    """Return what fits: matrices cut over one to all devices of a machine, for batches of several sizes.

    Raises:
        ConfigError: nothing fits; as for the largest cut and the smallest batch.
    """
    found, refused = [], None
    for tensor in divisors(cluster.devices_per_node):
        for batch in _BATCHES:
            job = DecodeJob(model=model, tensor=tensor, batch=batch, context_tokens=context_tokens)
            try:
                found.append(Way(job, predict_decode(job, cluster)))
            except ConfigError as error:
                refused = refused if batch > 1 else error
    if not found and refused is not None:
        raise refused
    return found


def as_json(found: Sequence[Way]) -> list[dict[str, Any]]:
    """Return ways as JSON values, with units in their names."""
    return [
        {
            "tensor": way.job.tensor,
            "batch": way.job.batch,
            "context_tokens": way.job.context_tokens,
            **asdict(way.prediction),
        }
        for way in found
    ]


def as_lines(found: Sequence[Way]) -> Iterator[str]:
    """Yield a table for a person."""
    yield "  tensor  batch  ms/token  tokens/s  tokens/s/device  memory/device  waits most for"
    for way in found:
        job, one = way.job, way.prediction
        parts = {
            "memory": one.memory_s,
            "products": one.compute_s,
            "kernels": one.kernels_s,
            "collectives": one.collectives_s,
            "the host": one.host_s,
        }
        yield (
            f"  {job.tensor:>6}  {job.batch:>5}  {1000 * one.token_s:>8.1f}  {one.tokens_per_s:>8,.0f}  "
            f"{one.tokens_per_s / job.tensor:>15,.0f}  {mib(one.device_bytes):>13}  "
            f"{max(parts, key=lambda part: parts[part])}"
        )
