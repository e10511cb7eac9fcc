"""The heat map of a report: each name once, and no text that ends its script."""

import json
import re

import numpy as np

from penstock.obs.report import ranks as ranks_part
from penstock.obs.report.ranks import RankPlaces, RankTable, ReportedRanks, ranks_section

EVIL = "</script><img src=x onerror=alert(1)>"


def data_of(section):
    return json.loads(re.search(r'id="ranks-data">(.*?)</script>', section)[1])


def table(*places, ranks=2):
    columns = len(places)
    values = np.ones((ranks, columns), np.float32)
    where = {column: RankPlaces(column, *names) for column, names in enumerate(places)}
    return RankTable([*range(1, columns + 1)], values, np.array([1.0, np.nan]), columns, where)


def test_names_stand_once_and_cannot_end_the_script():
    place = ([EVIL, "b"], ["cpu", "cpu"], ["", "b"])
    section = ranks_section(ReportedRanks(tables={"own_s": table(place), "blocked_s": table(place)}))
    assert EVIL not in section
    found = data_of(section)
    assert found["names"] == [EVIL, "b", "cpu", ""]
    assert found["places"] == [{"hosts": [0, 1], "devices": [2, 2], "nics": [3, 1]}]
    assert [table["starts"] for table in found["tables"].values()] == [[[0, 0]]] * 2
    assert found["tables"]["own_s"]["means"] == [1.0, None]


def test_of_very_many_names_those_of_the_newest_starts_are_kept(monkeypatch):
    monkeypatch.setattr(ranks_part, "_MOST_NAME_CHARACTERS", 10)
    starts = [([f"{letter}{letter}1", f"{letter}{letter}2"], ["", ""], ["", ""]) for letter in "abc"]
    section = ranks_section(ReportedRanks(tables={"own_s": table(*starts)}))
    found = data_of(section)
    assert found["names"] == ["cc1", "cc2", ""]
    assert found["tables"]["own_s"]["starts"] == [[2, 0]], "no older step gets these hosts"
    assert "of the newest 1 of 3 starts" in section


def test_a_run_without_records_of_ranks_has_no_such_section():
    assert ranks_section(ReportedRanks()) == ""
