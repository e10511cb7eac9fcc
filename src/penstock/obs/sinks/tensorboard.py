"""Records as TensorBoard event files: a scalar a metric; tables by corpus as `metric/corpus`."""

from pathlib import Path
from types import TracebackType
from typing import Self

from penstock.core.errors import PenstockError
from penstock.obs.sinks import Record


def scalars(record: Record) -> dict[str, float]:
    """Return the numbers of a record by name.

    >>> scalars({"step": 3, "loss": 2.5, "corpus_tokens": {"web": 9}, "event": "mixture", "reason": "x"})
    {'loss': 2.5, 'corpus_tokens/web': 9}
    """
    found: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            found |= {f"{name}/{key}": part for key, part in scalars(value).items()}
        elif isinstance(value, int | float) and name != "step":
            found[name] = value
    return found


class TensorBoard:
    """A sink that writes event files; use as a context manager.

    A run that resumes says from which step on, and TensorBoard forgets what came after it.

    Args:
        folder: of the event files.
        done: steps taken before this process started.

    Raises:
        PenstockError: the package is not installed.
    """

    def __init__(self, folder: Path, *, done: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise PenstockError(
                "measure.tensorboard needs the package tensorboard, which is not installed",
                fix="pip install tensorboard, or set measure.tensorboard to false.",
            ) from None
        self._writer = SummaryWriter(str(folder), purge_step=done + 1)

    def __call__(self, record: Record) -> None:
        """Write one record."""
        if record.get("event") == "start":
            return
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record["step"])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._writer.close()
