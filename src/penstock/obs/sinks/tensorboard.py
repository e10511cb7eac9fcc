"""TensorBoard sink: one scalar per metric; tables by corpus as `metric/corpus`."""

from pathlib import Path
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
    """Sink that writes event files; use as a context manager.

    A resumed run records its first step, and TensorBoard drops later events of the earlier run.

    Args:
        folder: folder of the event files.
        done: steps before this process started.

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

    def __exit__(self, *_: object) -> None:
        self._writer.close()
