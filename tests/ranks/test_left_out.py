"""The file that says what rewinds left out: kept, used as far as a loader needs it, refused when damaged."""

import numpy as np
import pytest

from penstock.core.errors import PenstockError
from penstock.obs.metric_names import LEFT_OUT_FILE
from penstock.testing.ranks import on_ranks
from penstock.train.rewind import SkippedRange, leave_out, note_rewind, read_left_out


class TenAStep:
    """A loader, as far as leaving out is concerned."""

    def __init__(self, step):
        self.step, self.skipped = step, []

    def samples_of(self, step):
        return np.arange(10 * step, 10 * step + 10)

    def skip(self, *, samples, reason):
        assert reason == "guard"
        self.skipped.append(samples)


def skipped(folder, *, at):
    """Return what loaders of two ranks that stand at a step are told to skip."""

    def of_rank(world):
        loader = TenAStep(at)
        leave_out(folder, loader, world)
        return loader.skipped

    first, second = on_ranks(of_rank, ranks=2)
    assert first == second
    return first


def test_a_rewind_leaves_out_from_the_checkpoint_on_and_again_at_every_start_before_its_end(tmp_path):
    note_rewind(tmp_path, to=7)
    assert read_left_out(tmp_path) == (SkippedRange(7, None),)
    assert skipped(tmp_path, at=4) == [range(40, 70)]
    assert read_left_out(tmp_path) == (SkippedRange(7, (40, 70)),)
    assert skipped(tmp_path, at=2) == [range(40, 70)], "an older checkpoint, because that one was damaged"
    assert skipped(tmp_path, at=7) == [], "its checkpoint knows"
    note_rewind(tmp_path, to=9)
    assert skipped(tmp_path, at=4) == [range(40, 70), range(40, 90)]


def test_a_run_that_starts_over_leaves_out_nothing(tmp_path):
    note_rewind(tmp_path, to=7)
    assert skipped(tmp_path, at=0) == []
    assert not (tmp_path / LEFT_OUT_FILE).exists()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "it is not valid JSON"),
        ("[]", "it must contain a JSON object"),
        ("{}", "Missing key rewinds"),
        ('{"rewinds": [{"to_step": 7, "samples": [1]}]}', r"rewinds\[0\].samples must be a list of 2"),
    ],
)
def test_a_damaged_file_is_refused_with_what_to_do(tmp_path, content, why):
    (tmp_path / LEFT_OUT_FILE).write_text(content)
    with pytest.raises(
        PenstockError,
        match=rf"The record of rewinds .*left-out.json is damaged: {why}.* Restore it, or remove it if",
    ):
        read_left_out(tmp_path)
