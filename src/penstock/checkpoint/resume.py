"""Resume from the newest checkpoint that is sound on every rank, and report damaged newer ones."""

from collections.abc import Callable, Sequence

import torch.distributed as dist

from penstock.checkpoint.find import SavedCheckpoint
from penstock.core.errors import CheckpointDamaged, CheckpointError, PenstockError
from penstock.core.log import EventLog
from penstock.parallel.mesh import gather_values

log = EventLog(__name__)


def resume(
    candidates: Sequence[SavedCheckpoint], restore: Callable[[SavedCheckpoint], None]
) -> SavedCheckpoint | None:
    """Restore the state from the newest sound checkpoint; every rank must call it.

    Damaged checkpoints are set aside, so that they do not count as the newest again.

    Args:
        candidates: oldest first; the same on every rank.
        restore: restores this rank's state; a later call for another checkpoint overwrites it.

    Returns:
        The checkpoint resumed from; None if there are no candidates.

    Raises:
        CheckpointDamaged: none is sound. A run never starts over silently.
        PenstockError: one cannot be restored for another reason; older ones are not tried.
    """
    bad: list[SavedCheckpoint] = []
    for saved in reversed(candidates):
        failure = agreed(lambda saved=saved: restore(saved))  # type: ignore[misc]
        if failure is None:
            if bad:
                _set_aside(bad, instead=saved)
            return saved
        if not isinstance(failure, CheckpointDamaged) or saved is candidates[0]:
            raise failure
        if dist.get_rank() == 0:
            log.warning("checkpoint_damaged", "{failure}", failure=failure)
        bad.append(saved)
    return None


def agreed(work: Callable[[], None]) -> PenstockError | None:
    """Run a function on every rank; return the failure of any rank, this rank's own first; None if none."""
    failure: PenstockError | None = None
    try:
        work()
    except PenstockError as error:
        failure = error
    said = None if failure is None else [isinstance(failure, CheckpointDamaged), str(failure)]
    for each in gather_values(said):
        if failure is None and each is not None:
            failure = CheckpointDamaged(each[1]) if each[0] else CheckpointError(each[1])
    return failure


def _set_aside(bad: Sequence[SavedCheckpoint], *, instead: SavedCheckpoint) -> None:
    if dist.get_rank() != 0:
        return
    log.warning(
        "checkpoints_set_aside",
        "Resuming from {path} instead; set aside: {damaged}",
        path=instead,
        damaged=", ".join(saved.name for saved in bad),
    )
    for saved in bad:
        try:
            saved.place.set_aside(saved.name)
        except (OSError, PenstockError) as error:
            log.warning(
                "checkpoint_left",
                "{path} cannot be set aside, remove it: {error}",
                path=saved,
                error=error,
            )
