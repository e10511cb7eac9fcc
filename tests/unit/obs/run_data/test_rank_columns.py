"""Columns of ranks: read once, continued, read again where the file was rewritten, thinned to a picture."""

import json
from base64 import b64encode

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.obs.metric_names import RANK_METRICS, RANKS_FILE
from penstock.obs.report import ranks_of, render
from penstock.obs.run_data import rank_columns
from penstock.obs.run_data.rank_columns import RankColumns, RankPlaces
from penstock.obs.run_data.run_files import LocalFiles
from tests.run_records import reported
from tests.unit.obs.html_elements import inlined


@pytest.fixture
def opened(tmp_path):
    """Open the columns of a run's `own_s`."""
    return lambda: RankColumns(LocalFiles(tmp_path), "own_s")


def line(step, *values, before=None):
    packed = {"blocked_s": before, "own_s": values}
    fields = (f', "{name}": "{_packed(each)}"' for name, each in packed.items() if each is not None)
    return f'{{"step": {step}, "steps": 1{"".join(fields)}}}\n'


def _packed(values):
    return b64encode(np.array(values, dtype="<f4").tobytes()).decode()


def write(run, *lines):
    with (run / RANKS_FILE).open("a") as file:
        file.writelines(lines)


def table(columns, *, first=0, last=10**9, points=1000):
    columns.update()
    return columns.table(first=first, last=last, columns=points)


def test_a_later_look_reads_only_the_new_end_of_the_file(tmp_path, opened, monkeypatch):
    write(tmp_path, *(line(n, n, 2 * n) for n in range(1, 4)))
    columns = opened()
    assert table(columns).values.tolist() == [[1, 2, 3], [2, 4, 6]]
    decoded, decode = [], rank_columns._decoded
    monkeypatch.setattr(rank_columns, "_decoded", lambda text: decoded.append(text) or decode(text))
    write(tmp_path, line(4, 4, 8))
    assert table(columns).values.tolist() == table(columns).values.tolist() == [[1, 2, 3, 4], [2, 4, 6, 8]]
    assert len(decoded) == 1


def test_a_file_that_was_rewritten_is_read_from_its_start(tmp_path, opened):
    write(tmp_path, *(line(n, 1) for n in range(1, 9)))
    columns = opened()
    assert table(columns).steps[-1] == 8
    (tmp_path / RANKS_FILE).write_text(line(1, 5.0) + line(2, 6.0))
    assert table(columns).values.tolist() == [[5, 6]]


def test_the_largest_of_neighbours_is_kept_where_the_number_of_ranks_changes(tmp_path, opened):
    write(tmp_path, line(1, 1, 9), line(2, 3, 2, 7), line(3, 5), line(4, 2), line(5, 4, np.nan))
    found = table(opened(), points=2)
    assert (found.steps, found.num_records) == ([2, 5], 5)
    np.testing.assert_equal(found.values, [[3, 5], [9, np.nan], [7, np.nan]])
    np.testing.assert_allclose(found.means, [3, 5.5, 7])
    np.testing.assert_equal(table(opened(), first=3, last=4).values, [[5, 2]])
    assert table(opened(), first=9).steps == []


def started(step, *hosts):
    start = {"step": step, "ranks": len(hosts), "hosts": hosts, "devices": ["H100"] * len(hosts)}
    return json.dumps(start) + "\n"


def hosts_of(found):
    return {column: places.hosts for column, places in found.places.items()}


def test_each_step_has_the_hosts_of_its_own_start(tmp_path, opened):
    write(tmp_path, started(0, "a", "b"), line(1, 1, 9), line(2, 1, 9), line(3, 1, 9))
    write(tmp_path, started(3, "a", "b"), line(4, 1, 9), started(4, "c", "d"), line(5, 1, 2), line(6, 1, 2))
    columns = opened()
    assert hosts_of(table(columns)) == {0: ["a", "b"], 4: ["c", "d"]}
    thin = table(columns, points=2)
    assert (thin.steps, hosts_of(thin)) == ([4, 6], {0: ["a", "b"], 1: ["c", "d"]}), (
        "none has records of both"
    )
    assert thin.values.tolist() == [[1, 1], [9, 2]]
    assert hosts_of(table(columns, first=5)) == {0: ["c", "d"]}
    assert hosts_of(table(columns, last=4)) == {0: ["a", "b"]}


def test_of_very_many_starts_the_newest_are_known_and_no_older_step_gets_their_hosts(
    tmp_path, opened, monkeypatch
):
    monkeypatch.setattr(rank_columns, "_MAX_PLACES", 6)
    for number in range(5):
        write(tmp_path, started(number, f"a{number}", f"b{number}"), line(number + 1, 1, 2))
    found = table(opened())
    assert hosts_of(found) == {2: ["a2", "b2"], 3: ["a3", "b3"], 4: ["a4", "b4"]}
    assert len(found.steps) == 5


def test_a_table_has_a_bounded_number_of_values(tmp_path, opened):
    write(tmp_path, *(line(n, *range(4)) for n in range(1, 11)))
    columns = opened()
    columns.update()
    found = columns.table(columns=100, cells=12)
    assert (found.values.shape, found.num_records, found.steps[-1]) == ((4, 3), 10, 10)


def test_a_damaged_file_of_ranks_is_read_as_far_as_it_goes(tmp_path, opened):
    (tmp_path / RANKS_FILE).write_bytes(
        b'{"step": 1, "steps": 1, "own_s": "AACAPw=="}\n'
        b'{"step": 2, "steps": 1, "own_s": "AACA"}\n'
        b'{"step": 3, "steps": 1, "own_s": "<script>"}\n'
        b'{"step": 4, "steps": 1}\n\xff\n{"hosts": 3}\n[]\n'
        b'{"step": 5, "steps": 1, "own_s": "AAA'
    )
    found = table(opened(), last=9, points=9)
    assert (found.steps, found.values.tolist(), found.places) == ([1], [[1.0]], {})
    (tmp_path / RANKS_FILE).unlink()
    assert table(opened()).steps == []


WHOLE = st.builds(
    lambda step, values, before: (line(step, *values, before=before), (step, values)),
    st.integers(1, 2000),
    st.lists(st.integers(0, 9).map(float), min_size=1, max_size=4),
    st.lists(st.integers(0, 9).map(float), max_size=3),
)
DAMAGED = st.tuples(
    st.sampled_from(["\n", "[]\n", '{"step": 7, "steps": 1}\n', line(3, 1.0)[9:], line(3, 1.0)[:-4] + "\n"])
)


@example([(line(1000, 1.0), (1000, [1.0])), ("[]\n",), (line(1, 2.0), (1, [2.0]))])  # as long together
@given(st.lists(st.one_of(WHOLE, DAMAGED), min_size=1, max_size=40))
def test_lines_of_any_layout_between_one_another_are_each_read_as_alone(tmp_path_factory, lines):
    run = tmp_path_factory.mktemp("run")
    write(run, *(each[0] for each in lines))
    columns = RankColumns(LocalFiles(run), "own_s")
    columns.update()
    expected, read = [each[1] for each in lines if len(each) > 1], columns._read
    assert read.rows[: read.num_rows].tolist() == [[step, len(ranks)] for step, ranks in expected]
    assert read.values[: read.num_values].tolist() == [value for _, ranks in expected for value in ranks]


def test_a_damaged_row_makes_no_room_for_millions_of_ranks(tmp_path, opened):
    long = b64encode(bytes(4 << 20)).decode()
    lines = [f'{{"step": {n}, "steps": 1, "own_s": "AACAPw=="}}\n' for n in range(1, 2001)]
    lines[500] = f'{{"step": 501, "steps": 1, "own_s": "{long}"}}\n'
    (tmp_path / RANKS_FILE).write_text("".join(lines))
    found = table(opened(), points=100)
    assert (found.values.shape, found.steps[-1], found.values.min()) == ((1, 100), 2000, 1.0)


def test_a_rank_without_a_value_is_left_out_of_its_mean_and_of_its_column(tmp_path, opened):
    write(tmp_path, line(1, 1, 9), line(2, np.nan, 5), line(3, 3, np.nan), line(4, 8, 4))
    found = table(opened(), points=1)
    assert found.values.tolist() == [[8], [9]]
    assert found.means.tolist() == [4, 6]


class Recorded:
    """A metric of many ranks, as it was read."""

    def __init__(self, num_ranks, num_records):
        self._rows = np.array([[step, num_ranks] for step in range(1, num_records + 1)])
        self._values = np.random.default_rng(0).random(num_ranks * num_records, np.float32)
        names = [f"node-{rank // 8:04d}.cluster.example" for rank in range(num_ranks)]
        self._places = [RankPlaces(0, names, ["NVIDIA H100 80GB HBM3"] * num_ranks, ["eth0"] * num_ranks)]

    def table(self, *, columns, cells):
        return rank_columns._thinned(
            self._rows, self._values, self._places, first=0, last=9e9, columns=columns, cells=cells
        )


@pytest.mark.parametrize(
    ("num_ranks", "num_records", "columns"),
    [(1024, 10_000, (384, 64)), (8192, 300, (48,)), (65_536, 20, (6,)), (8, 300, (300, 300))],
)
def test_a_report_has_a_few_megabytes_of_ranks_whatever_the_run(num_ranks, num_records, columns):
    recorded = Recorded(num_ranks, num_records)
    tables, left_out = ranks_of(lambda _: recorded)
    page = render([reported([{"step": 1, "loss": 2.0}], {}, ranks=tables, ranks_left_out=left_out)])
    found = inlined(page)["runs"][0]["ranks"]
    assert len(json.dumps(found)) < 4_500_000
    assert found["shown"] == "own_s"
    shown = {name: len(table["steps"]) for name, table in found["tables"].items()}
    others = dict.fromkeys(RANK_METRICS, columns[1]) if len(columns) == 2 else {}
    assert shown == {**others, "own_s": columns[0]}
    said = "leaves out data_wait_s, blocked_s, memory_bytes, sent_bytes" in found["note"]
    assert said == (len(columns) == 1)
