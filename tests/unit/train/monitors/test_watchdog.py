"""When a watchdog gives a rank up, on a clock of the test's own."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from penstock.core import clock
from penstock.train.monitors.watchdog import Watchdog
from tests.unit.obs.test_hang_report import words

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


@pytest.mark.parametrize(
    "left", ["{", "[]", '{"rank": 1}', '{"collectives": [], "rank": 1, "of": "another version"}']
)
def test_words_of_an_earlier_hang_that_cannot_be_read_hide_no_other(tmp_path: Path, left: str) -> None:
    watchdog = Watchdog(tmp_path, rank=0, world_size=3, hang_s=HANG_S)
    own, other = (words(rank, 5) for rank in (0, 2))
    watchdog._folder.mkdir(parents=True, exist_ok=True)
    (watchdog._folder / "rank-00001.json").write_text(left)
    (watchdog._folder / "rank-00002.json").write_text(json.dumps(asdict(other) | {"collectives": []}))
    assert watchdog._fresh(own) == [other]
