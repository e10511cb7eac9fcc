"""Which checkpoints a run may delete: a rule over steps; pure."""

from collections.abc import Sequence


def to_remove(steps: Sequence[int], *, written: int, keep: int, keep_every: int) -> list[int]:
    """Return the steps whose checkpoints go, after one was written.

    Args:
        steps: of all complete checkpoints.
        written: step of the one just written, which stays whatever the others are.
        keep: newest ones that stay.
        keep_every: those of every so many steps stay too; 0: none do.

    >>> to_remove([100, 200, 300, 400, 500], written=500, keep=2, keep_every=200)
    [100, 300]
    """
    newest = set(sorted(steps)[-keep:]) | {written}
    return [
        step for step in sorted(steps) if step not in newest and not (keep_every and step % keep_every == 0)
    ]
