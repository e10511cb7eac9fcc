"""Every rank's own time and waits reach rank 0's file, read back as the console reads them."""

from functools import partial

import numpy as np

from penstock.obs.meter import Rates
from penstock.obs.metric_names import RANKS_FILE
from penstock.obs.run_data.rank_columns import RankColumns
from penstock.obs.run_data.run_files import LocalFiles
from penstock.obs.sinks.jsonl import JsonLines, rewind
from penstock.testing.ranks import on_ranks
from penstock.train.monitors.rank_records import RankRecords


def table_of(run, metric, *, first, last, columns):
    """Return a table as the console has it."""
    opened = RankColumns(LocalFiles(run), metric)
    opened.update()
    return opened.table(first=first, last=last, columns=columns)


def play(world, *, folder, first, last):
    """Play steps of 1 s, in which a rank is blocked for a fifth of its number."""
    file = JsonLines(folder / RANKS_FILE) if world.is_first else None
    records = RankRecords(world, file, step=first)
    records.sent_bytes = 100 + world.ranks.rank
    for step in range(first + 1, last + 1):
        shares = {"communication": world.ranks.rank / 5, "data_wait": 0.1}
        records.add(Rates(step_s=1.0, tokens_per_s=1.0, mfu=0.0, hfu=0.0, shares=shares), step=step)
    if file is not None:
        file.close()


def test_all_ranks_are_recorded_as_often_as_it_costs_little(tmp_path):
    on_ranks(partial(play, folder=tmp_path, first=0, last=1100), ranks=3)  # at most 1,000 lie between two
    table = table_of(tmp_path, "own_s", first=0, last=1100, columns=2000)
    assert table.steps[:2] == [10, 20]
    assert len(table.steps) >= 3
    np.testing.assert_allclose(table.values[:, 0], [1.0, 0.8, 0.6], rtol=1e-6)
    assert (len(table.places[0].hosts), table.places.keys()) == (3, {0})
    assert table.places[0].hosts[0]
    sent = table_of(tmp_path, "sent_bytes", first=15, last=20, columns=100)
    assert (sent.steps, sent.values[:, 0].tolist()) == ([20], [100, 101, 102])


def test_a_resume_on_fewer_ranks_goes_on_in_the_same_file(tmp_path):
    on_ranks(partial(play, folder=tmp_path, first=0, last=20), ranks=3)
    rewind(tmp_path / RANKS_FILE, step=15)
    on_ranks(partial(play, folder=tmp_path, first=15, last=25), ranks=2)
    table = table_of(tmp_path, "blocked_s", first=0, last=99, columns=100)
    assert table.steps == [10, 25]
    np.testing.assert_allclose(table.values, [[0, 0], [0.2, 0.2], [0.4, np.nan]], atol=1e-6)
    assert [len(places.hosts) for _, places in sorted(table.places.items())] == [3, 2]
    one = table_of(tmp_path, "blocked_s", first=0, last=99, columns=1)
    assert one.steps == [10, 25], "no column has records of two starts on other ranks"
