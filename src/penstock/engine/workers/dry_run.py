"""Summary of an engine before it is opened, from a config and the device, without weights."""

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.core.units import si
from penstock.devices import accelerator
from penstock.engine.config import EngineConfig
from penstock.engine.model_runner.decode_graphs import are_wanted
from penstock.engine.model_runner.graph_plan import GraphPlan, plan_graphs
from penstock.engine.workers.model_shard import device_of
from penstock.models.decoder.config import DecoderConfig
from penstock.models.decoder.tensor_slices import TensorParallelRank


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedEngine:
    """An engine before it is opened."""

    device: str
    num_parameters: int
    config: EngineConfig
    context: int
    graphs: GraphPlan | None
    """None: steps are launched kernel by kernel."""

    def as_lines(self) -> Iterator[str]:
        """Yield lines for people."""
        yield f"{'parameters':<16}{si(self.num_parameters)}, {self.config.weights}"
        yield f"{'device':<16}{self.device}, {self.config.tensor_parallel} process(es)"
        yield f"{'context':<16}{self.context:,} tokens, {self.config.max_sequences:,} answers at most"
        if self.graphs is None:
            yield f"{'graphs':<16}none: for one process with NVIDIA's GPU and Triton, unless --compile off"
        else:
            yield from self.graphs.as_lines()

    def as_json(self) -> dict[str, object]:
        """Return JSON values."""
        return {
            "device": self.device,
            "parameters": self.num_parameters,
            "weights": self.config.weights,
            "tensor_parallel": self.config.tensor_parallel,
            "context": self.context,
            "max_sequences": self.config.max_sequences,
            "graphs": None if self.graphs is None else self.graphs.as_json(),
        }


def planned_engine(model: DecoderConfig, config: EngineConfig) -> PlannedEngine:
    """Return what an engine of a model would be.

    Raises:
        ConfigError: there is no such device.
    """
    device = device_of(config.device, TensorParallelRank(0, config.tensor_parallel))
    context = min(config.max_context or model.context, model.context)
    is_recorded = are_wanted(config.compile, device=device, ranks=config.tensor_parallel)
    return PlannedEngine(
        device=accelerator.name_of(device),
        num_parameters=model.num_parameters,
        config=config,
        context=context,
        graphs=plan_graphs(
            model, max_sequences=config.max_sequences, context=context, block_size=config.block_size
        )
        if is_recorded
        else None,
    )
