"""Tensor-parallel runner of the first rank: sends each step to the others, then computes its own shard."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Self

from torch import Tensor

from penstock.engine.config import EngineConfig
from penstock.engine.model_runner.batch import StepBatch, encode
from penstock.engine.model_runner.interface import StepOutput
from penstock.engine.model_runner.open import open_config
from penstock.engine.model_runner.runner import Runner
from penstock.engine.workers.model_shard import ModelShard
from penstock.engine.workers.processes import RankProcesses
from penstock.models.decoder.tensor_slices import check_ranks


def start_others(path: Path, config: EngineConfig) -> RankProcesses:
    """Start the worker ranks (from 1 on); each begins to load its shard.

    Raises:
        UsageError: the model cannot be split over that many ranks.
    """
    check_ranks(open_config(path, ignored_keys=config.ignored_keys), config.tensor_parallel)
    job = {"path": str(path), "config": asdict(config)}
    return RankProcesses.start(dict.fromkeys(range(1, config.tensor_parallel), job))


class RankedRunner:
    """Computes steps with all ranks.

    Args:
        part: shard of the first rank.
        others: worker processes; closed by this object.
    """

    def __init__(self, part: ModelShard, runner: Runner, others: RankProcesses) -> None:
        self._part = part
        self._runner = runner
        self._others = others
        self.recorded = None  # steps of several ranks are no graphs

    @classmethod
    def join(cls, part: ModelShard, others: RankProcesses, *, num_blocks: int, block_size: int) -> Self:
        """Join all ranks and allocate their KV caches; from then on a dying rank is noticed.

        Raises:
            RunnerLost: a rank failed.
        """
        assert part.group is not None
        others.tell(num_blocks=num_blocks, block_size=block_size, kernels=dict(part.kernels))
        part.group.join(others.meeting)
        runner = part.runner(num_blocks=num_blocks, block_size=block_size)
        others.answered()
        others.watch()
        return cls(part, runner, others)

    def run(
        self,
        batch: StepBatch,
        settings: Tensor | None = None,  # noqa: ARG002
        *,
        samples: bool = False,  # noqa: ARG002
    ) -> StepOutput:
        """Compute one step; it samples nothing.

        Raises:
            RunnerLost: a rank died or did not answer in time.
        """
        self.check()
        self._others.step(encode(batch))
        try:
            return self._runner.run(batch)
        except Exception as error:  # after any error the ranks are out of step
            raise self._lost(error) from error

    @property
    def adapters(self) -> Mapping[str, int]:
        """Adapter name -> index in `StepBatch.adapters`."""
        return self._runner.adapters

    @property
    def num_new_tokens(self) -> Mapping[str, int]:
        """Adapter name -> tokens that it adds to the vocabulary."""
        return self._runner.num_new_tokens

    def add_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter on all ranks; raises as `Adapters.add` does."""
        self._runner.add_adapter(name, folder)  # first: finds errors before the others load it
        self._others.tell(name=name, folder=str(folder))

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter on all ranks; raises as `Adapters.remove` does."""
        self._runner.remove_adapter(name)
        self._others.tell(name=name, folder=None)

    def check(self) -> None:
        """Raise RunnerLost if no step can be computed."""
        if self._others.lost is not None:
            raise self._others.lost

    def on_lost(self, call: Callable[[], None]) -> None:
        """Set a callback for when a rank dies; it is called from another thread."""
        self._others.on_lost = call

    def close(self) -> None:
        """Stop the worker ranks. Idempotent."""
        self._part.close()
        self._others.close()

    def _lost(self, error: Exception) -> Exception:
        self._part.close()  # other ranks stop waiting for this one
        return self._others.explain(error)
