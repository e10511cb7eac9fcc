"""When a watchdog gives a rank up, on a clock of the test's own."""

from pathlib import Path

import pytest

from penstock.core import clock
from penstock.train.monitors.watchdog import Watchdog

HANG_S = 6.0


def given_up_at(monkeypatch: pytest.MonkeyPatch, folder: Path, *, steps_at: list[float]) -> float:
    """Return the moment at which a rank is given up that begins steps at these, and then hangs."""
    now, begun, ended = [0.0], 0, []
    monkeypatch.setattr(clock, "monotonic", lambda: now[0])
    watchdog = Watchdog(folder, rank=0, world_size=1, hang_s=HANG_S, end=lambda: ended.append(now[0]))

    def wait(seconds: float) -> bool:
        nonlocal begun
        until = now[0] + seconds
        for now[0] in steps_at[begun:]:
            if now[0] > until:
                break
            begun += 1
            watchdog.doing("step", step=begun)
        now[0] = until
        return False

    monkeypatch.setattr(watchdog._left, "wait", wait)
    watchdog._watch()
    return ended[0]


def test_a_first_step_has_four_times_as_long(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert given_up_at(monkeypatch, tmp_path, steps_at=[1.0]) == 1 + 4 * HANG_S


@pytest.mark.parametrize("last", [2, 5, 60])
def test_a_later_step_has_not_however_early_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, last: int
) -> None:
    steps_at = [float(second) for second in range(1, last + 1)]
    assert given_up_at(monkeypatch, tmp_path, steps_at=steps_at) == last + HANG_S
