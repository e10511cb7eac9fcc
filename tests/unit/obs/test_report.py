"""A report: it stands alone, nothing of a run can become markup, and its size is bounded."""

import base64
import hashlib
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from penstock.obs import report
from penstock.obs.report import ranks_of, render
from penstock.obs.run_data.rank_columns import RankPlaces, RankTable
from tests.run_records import reported
from tests.unit.obs.html_elements import Elements, curve, inlined

EVIL = '</script><img src=x onerror="alert(1)">$name'
RECIPE = {"run": {"steps": 40}, "optim": {"learning_rate": 0.1}}


def records(steps, *, seconds=1.0, ranks=(1,)):
    for step in range(1, steps + 1):
        if (step - 1) % max(1, steps // len(ranks)) == 0:
            rank = ranks[(step - 1) * len(ranks) // steps]
            yield {"event": "start", "step": step - 1, "ranks": rank, "time": "2026-11-21T03:49:55+00:00"}
        yield {
            "step": step,
            "tokens": 100 * step,
            "loss": 7 - step / 100 + (step * 7919 % 13) / 100,
            "step_s": seconds,
            "tokens_per_s": 100 / seconds,
            "grad_norm": 1.0,
            "corpus_shares": {f"corpus {n}": 0.1 for n in range(3)},
        }


def page(*runs, **others):
    return render(runs or [reported(records(40), RECIPE, **others)])


def elements(text):
    return Elements(text.replace("<!doctype html>", "")).found


def test_the_page_is_well_formed_and_needs_nothing_from_outside():
    found = elements(page())
    assert {a.get("src") or a["href"] for _, a in found if "src" in a or "href" in a} == {
        "data:,",
        "#main",
        "#/",
    }
    assert re.findall(r"https?://\S+|@import|url\(", re.sub("Profiled steps.*", "", page())) == [
        "https://github.com/leeoniya/uPlot"
    ], "a comment"


def test_the_policy_of_the_page_lets_its_own_scripts_and_styles_run_and_no_others():
    text = page()
    inside = re.findall(r'<(?:script|style)(?: type="module")?>(.*?)</(?:script|style)>', text, re.DOTALL)
    style, *scripts = (
        f"'sha256-{base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()}'" for part in inside
    )
    policy = re.search('http-equiv="Content-Security-Policy" content="([^"]+)"', text)[1]
    assert policy == (
        f"default-src 'none'; script-src {' '.join(scripts)}; style-src {style}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    assert len(scripts) == 2


def test_the_page_carries_the_licence_of_the_library_in_it():
    assert "Copyright (c) 2022 Leon Sorokin" in page()


def test_names_from_files_cannot_become_markup():
    run = [
        {"event": "start", "step": 0, "ranks": 1, "time": EVIL},
        {"step": 1, "tokens": 8, "loss": 3.0, "corpus_tokens": {EVIL: 1, "b": 2}},
        {"event": "samples", "step": 1, "answers": [{"prompt": EVIL, "answer": EVIL, "reference": EVIL}]},
    ]
    recipe = {"run": {"dir": EVIL}, "model": {"model_type": EVIL}, EVIL: {EVIL: EVIL}}
    text = page(reported(run, recipe, name=EVIL, references={EVIL: 6.0}))
    tags = [tag for tag, _ in elements(text)]
    assert "img" not in tags
    assert tags.count("script") == 3
    (found,) = inlined(text)["runs"]
    assert (found["run"]["name"], found["run"]["levels"]) == (EVIL, [[EVIL, 6.0]])
    assert found["answers"]["prompts"][0]["reference"] == EVIL


def test_curves_are_the_values_of_the_records_on_every_axis():
    text = page(reported(records(4, seconds=2.0), RECIPE, price=0.0))
    steps, losses = curve(text, "loss")
    assert steps == (1, 2, 3, 4)
    assert losses == pytest.approx([row["loss"] for row in records(4) if "loss" in row], rel=1e-5)
    assert curve(text, "loss", "tokens")[0] == (100, 200, 300, 400)
    assert curve(text, "loss", "time")[0] == (2, 4, 6, 8)
    with pytest.raises(KeyError):
        curve(text, "loss", "money")


def test_each_run_of_a_comparison_has_the_records_at_which_another_ends():
    long, short = (reported(records(steps), RECIPE, name=name) for steps, name in ((6000, "a"), (4999, "b")))
    text = page(long, short)
    at = dict(zip(*curve(text, "loss"), strict=True))
    assert at[4999] == pytest.approx(long.data.column("loss")[4998])
    assert [run["run"]["name"] for run in inlined(text)["runs"]] == ["a", "b"]


@pytest.mark.parametrize("steps", [30_000, 60_000])
def test_the_page_does_not_grow_with_the_run(steps):
    assert len(page(reported(records(steps, ranks=(1, 2) * 200), RECIPE))) < 500_000


def test_a_run_of_thousands_of_corpora_has_a_page_of_a_few_megabytes():
    names = [f"corpus {n}" for n in range(2000)]
    run = [
        {
            "step": n,
            "loss": 3.0,
            "corpus_shares": {name: 0.5 if name == "corpus 7" else 1e-4 for name in names},
            "corpus_epochs": dict.fromkeys(names, n / 3),
        }
        for n in range(1, 31)
    ]
    text = page(reported(run, RECIPE))
    assert len(text) < 3_000_000
    (mixture,) = [chart for chart in inlined(text)["runs"][0]["run"]["charts"] if chart["id"] == "mixture"]
    assert len(mixture["layers"]) == 40
    assert mixture["layers"][0]["label"] == "corpus 7", "the largest share"
    assert mixture["title"] == "Mixture, share of samples: the highest 40 of 2,000"


def table(*places, ranks=2):
    columns = len(places)
    where = {column: RankPlaces(column, *names) for column, names in enumerate(places)}
    means = np.array([1.0, np.nan])
    return RankTable([*range(1, columns + 1)], np.ones((ranks, columns), np.float32), means, columns, where)


def test_names_of_hosts_and_devices_stand_once():
    place = table((["a", "b"], ["cpu", "cpu"], ["", "b"]))
    found = inlined(page(ranks={"own_s": place, "blocked_s": place}))["runs"][0]["ranks"]
    assert found["names"] == ["a", "b", "cpu", ""]
    assert found["places"] == [{"hosts": [0, 1], "devices": [2, 2], "nics": [3, 1]}]
    assert [each["starts"] for each in found["tables"].values()] == [[[0, 0]]] * 2
    assert found["tables"]["own_s"]["means"] == [1, None]


def test_of_very_many_names_those_of_the_newest_starts_are_kept(monkeypatch):
    monkeypatch.setattr(report, "_MAX_NAME_CHARACTERS", 10)
    starts = [([f"{letter}{letter}1", f"{letter}{letter}2"], ["", ""], ["", ""]) for letter in "abc"]
    found = inlined(page(ranks={"own_s": table(*starts)}))["runs"][0]["ranks"]
    assert found["names"] == ["cc1", "cc2", ""]
    assert found["tables"]["own_s"]["starts"] == [[2, 0]], "no older step gets these hosts"
    assert "newest 1 of 3 starts" in found["note"]


def test_a_run_of_one_rank_is_not_said_to_lack_metrics_of_ranks():
    nothing = SimpleNamespace(table=lambda **_: RankTable())
    assert ranks_of(lambda _: nothing, has_others=False) == ({}, [])


def test_drawing_a_page_imports_no_torch():
    code = "import sys, penstock.cli.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
