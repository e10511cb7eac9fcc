"""Rows of the table of runs: whatever is in a run's files, its row is there, and is JSON for a page."""

import json
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from penstock.obs.metric_names import METRICS_FILE, RECIPE_FILE
from penstock.obs.run_data.discover import RunFolders
from penstock.obs.run_data.run_row import Summaries
from tests.examples import examples

NUMBERS = st.one_of(
    *(
        st.integers(),
        st.just(10**400),
        st.floats(),
        st.booleans(),
        st.none(),
        st.text(max_size=3),
        st.just([]),
    )
)
RECORDS = st.fixed_dictionaries(
    {"step": st.one_of(st.integers(0, 9), NUMBERS)},
    optional={
        "event": st.sampled_from(["start", "early_stop", "samples", 1, None]),
        **dict.fromkeys(("loss", "step_s", "tokens", "device_hours", "ranks", "time", "mfu"), NUMBERS),
    },
)
LINES = st.lists(
    st.one_of(RECORDS.map(lambda record: json.dumps(record).encode()), st.binary(max_size=12)), max_size=12
)
RECIPES = st.one_of(
    st.binary(max_size=20),
    st.fixed_dictionaries(
        {},
        optional={
            "run": st.dictionaries(st.sampled_from(["steps", "device_hour_price"]), NUMBERS),
            "checkpoint": st.just({"dir": "/" + 300 * "x"}),  # a name that is too long for any folder
        },
    ).map(lambda recipe: json.dumps(recipe).encode()),
)


@given(lines=LINES, recipe=RECIPES, end=st.binary(max_size=5))
@examples(150)
def test_a_run_with_any_files_has_a_row_of_finite_numbers(
    lines: list[bytes], recipe: bytes, end: bytes
) -> None:
    with tempfile.TemporaryDirectory() as place:
        run = Path(place) / "run"
        run.mkdir()
        (run / METRICS_FILE).write_bytes(b"".join(line + b"\n" for line in lines) + end)
        (run / RECIPE_FILE).write_bytes(recipe)
        (found,) = RunFolders([run]).runs()
        row = Summaries(price=2.0).row(found)
        json.dumps(row, allow_nan=False)
        assert row["state"] in ("stopped", "failed", "finished")
