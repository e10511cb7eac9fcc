"""The runner of an engine whose model lies on several ranks: tell the others, compute the own part."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Self

from penstock.engine.batch import Batch
from penstock.engine.batch_bytes import encode
from penstock.engine.config import EngineConfig
from penstock.engine.open import open_config
from penstock.engine.part import Part
from penstock.engine.ranks.processes import RankProcesses
from penstock.engine.runner import Output, Runner
from penstock.models.llama.slices import check_ranks


def start_others(path: Path, config: EngineConfig) -> RankProcesses:
    """Start the ranks from 1 on; each begins to open its part.

    Raises:
        UsageError: the model cannot be cut over so many.
    """
    check_ranks(open_config(path), config.tensor_parallel)
    job = {"path": str(path), "config": asdict(config)}
    return RankProcesses.start(dict.fromkeys(range(1, config.tensor_parallel), job))


class RankedRunner:
    """Computes steps with all ranks.

    Args:
        part: of the first rank.
        others: closed by this.
    """

    def __init__(self, part: Part, runner: Runner, others: RankProcesses) -> None:
        self._part = part
        self._runner = runner
        self._others = others

    @classmethod
    def join(cls, part: Part, others: RankProcesses, *, num_blocks: int, block_size: int) -> Self:
        """Let all ranks meet and make their pages; from then on a rank that ends is noticed.

        Raises:
            RunnerLost: one could not.
        """
        assert part.group is not None
        others.tell(num_blocks=num_blocks, block_size=block_size)
        part.group.join(others.meeting)
        runner = part.runner(num_blocks=num_blocks, block_size=block_size)
        others.answered()
        others.watch()
        return cls(part, runner, others)

    def run(self, batch: Batch) -> Output:
        """Compute one step.

        Raises:
            RunnerLost: a rank ended, or did not answer in time.
        """
        self.check()
        self._others.step(encode(batch))
        try:
            return self._runner.run(batch)
        except Exception as error:  # whatever it is, the ranks are no longer at the same place of one step
            raise self._lost(error) from error

    @property
    def adapters(self) -> Mapping[str, int]:
        """Name of each adapter -> what a batch calls it."""
        return self._runner.adapters

    def add_adapter(self, name: str, folder: Path) -> None:
        """Open an adapter on all ranks; errors as in `Adapters.add`."""
        self._runner.add_adapter(name, folder)  # what is wrong with it is found here
        self._others.tell(name=name, folder=str(folder))

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter on all ranks; errors as in `Adapters.remove`."""
        self._runner.remove_adapter(name)
        self._others.tell(name=name, folder=None)

    def check(self) -> None:
        """Raise why no step can be computed, if so."""
        if self._others.lost is not None:
            raise self._others.lost

    def on_lost(self, call: Callable[[], None]) -> None:
        """Set what is called, from another thread, when a rank ends that should not."""
        self._others.on_lost = call

    def close(self) -> None:
        """End the other ranks; once more does nothing."""
        self._part.close()
        self._others.close()

    def _lost(self, error: Exception) -> Exception:
        self._part.close()  # the others stop waiting for this rank
        return self._others.explain(error)
