"""Ranks in Chromium: whose cell it is, records that come meanwhile, hangs, slow ranks, traces."""

import json
import re
import shutil
from base64 import b64encode
from dataclasses import asdict

import numpy as np
import pytest
from playwright.sync_api import expect

from penstock.core import clock
from tests.browser import DEVICES, Pages, check_is_usable, needs_browser, turn
from tests.e2e.conftest import console
from tests.launched import wait_until
from tests.unit.obs.test_hang_report import words

pytestmark = needs_browser
TRACE = "trace-steps-2-to-3-rank-00001.json.gz"
ON_ONE_DEVICE = pytest.mark.parametrize("pages", ["desktop"], indirect=True)
"""For tests of when the page asks, which takes them seconds: no size or colours change that."""
TABLE = re.compile(r"/ranks\?.*points=\d{2,}")


@pytest.fixture
def run(tmp_path):
    """A run of two ranks that was started again on other hosts."""
    folder = tmp_path / "runs" / "first"
    for name in ("hangs", "traces"):
        (folder / name).mkdir(parents=True)
    slow = {"event": "ranks", "step": 4, "slowest_rank": 1, "slowest_s": 3.0, "median_s": 1.5}
    append(folder / "metrics.jsonl", *({"step": step, "loss": 3.0} for step in range(1, 5)), slow)
    append(folder / "ranks.jsonl", places(0, "old"), own(1), own(2), places(2, "new"), own(3), own(4))
    for each in (words(0, 90), words(1, 88, call="read (disk.py:9)")):
        (folder / "hangs" / f"rank-{each.rank:05d}.json").write_text(json.dumps(asdict(each)))
    (folder / "traces" / TRACE).write_bytes(b"a trace")
    return folder


def append(path, *records):
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def places(step, host):
    return {"step": step, "ranks": 2, "hosts": [f"{host}-{n}" for n in (0, 1)], "devices": ["cpu", "cpu"]}


def own(step):
    packed = b64encode(np.array([step, 2 * step], dtype="<f4").tobytes()).decode()
    return {"step": step, "steps": 1, "own_s": packed, "blocked_s": packed}


@pytest.fixture(scope="module", params=DEVICES)
def pages(browser, request):
    return Pages(browser, request.param)


@pytest.fixture
def page(pages, run):
    """The run's ranks."""
    with console(run.parent) as address:
        found = pages.take()
        found.goto(address)
        href = found.locator(".runs .name a").get_attribute("href")
        found.goto(f"{address}{href}/ranks")
        yield found
        pages.give_back()


def test_a_cell_has_the_host_of_its_step_and_stays_while_records_come(page, run):
    extent, said, canvas = page.locator(".ranks .toolbar"), page.locator(".readout"), page.get_by_role("img")
    expect(extent).to_contain_text("2 ranks \u00d7 4 records")
    canvas.press("ArrowDown")
    expect(said).to_have_text("rank 1 on old-1, step 1: 2 s")
    canvas.press("Enter")
    expect(page.locator(".details")).to_contain_text("old-1")
    for _ in range(2):
        canvas.press("ArrowRight")
    expect(said).to_have_text("rank 1 on new-1, step 3: 6 s")
    expect(page.get_by_role("region", name="Highest ranks")).to_contain_text("old-1, new-1")
    append(run / "ranks.jsonl", own(5), own(6))
    append(run / "metrics.jsonl", {"step": 5, "loss": 2.0})
    expect(extent).to_contain_text("2 ranks \u00d7 6 records")
    expect(said).to_have_text("rank 1 on new-1, step 3: 6 s")
    canvas.press("ArrowRight")
    expect(said).to_have_text("rank 1 on new-1, step 4: 8 s")
    page.get_by_label("Metric").select_option("blocked_s")
    expect(page.get_by_role("heading", name="Highest blocked time")).to_be_visible()
    expect(said).to_have_text("rank 1 on new-1, step 4: 8 s")
    assert page.url.endswith("/ranks?metric=blocked_s")
    page.reload()
    expect(page.get_by_label("Metric")).to_have_value("blocked_s")


@ON_ONE_DEVICE
def test_a_table_that_comes_later_than_the_next_look_is_drawn(page, run):
    extent, held = page.locator(".ranks .toolbar"), []
    expect(extent).to_contain_text("4 records")  # else the first table would be of the page before the reload
    page.route(TABLE, lambda route: held.append((route, route.fetch())))
    page.reload()
    wait_until(lambda: page.evaluate("true") and held, "the table is asked for")
    append(run / "ranks.jsonl", own(5))
    append(run / "metrics.jsonl", {"step": 5, "loss": 2.0})
    expect(page.locator(".figure", has_text="step").locator("dd").first).to_have_text("5")
    page.wait_for_timeout(4000)  # looks are three seconds apart
    for number, text in enumerate(("4 records", "5 records")):
        wait_until(lambda number=number: page.evaluate("true") and len(held) > number, "a table is asked for")
        route, answer = held[number]
        route.fulfill(response=answer)
        expect(extent).to_contain_text(text)


@ON_ONE_DEVICE
def test_a_heat_map_that_was_out_of_sight_has_what_came_meanwhile(page, run):
    extent = page.locator(".ranks .toolbar")
    expect(extent).to_contain_text("4 records")
    append(run / "ranks.jsonl", own(5))
    append(run / "metrics.jsonl", {"step": 5, "loss": 2.0})
    expect(page.locator(".figure", has_text="step").locator("dd").first).to_have_text("5")
    turn(page, is_hidden=True)  # before it looked
    page.wait_for_timeout(3500)  # looks are three seconds apart
    turn(page, is_hidden=False)
    expect(extent).to_contain_text("5 records")


def test_hangs_slow_ranks_and_traces_are_there_with_what_they_hold(page, run):
    hang = page.locator("article", has_text="has begun 88 collectives")
    expect(hang).to_contain_text("Rank 1 on node-1 (pid 101)")
    calls = hang.get_by_role("region", name="MainThread of rank 1")
    expect(calls).to_be_hidden()
    hang.get_by_text("Calls of each rank").click()
    expect(calls).to_contain_text("read (disk.py:9)")
    slow = page.get_by_role("region", name="Ranks the others waited for")
    expect(slow.locator("tbody tr")).to_have_text(re.compile(r"1\s*1\s*2\.00\s*4"))
    with page.expect_download() as download:
        page.get_by_role("link", name=TRACE).click()
    assert download.value.suggested_filename == TRACE
    assert download.value.path().read_bytes() == b"a trace"
    check_is_usable(page)
    (run / "hangs" / "rank-00000.json").write_text("{")
    append(run / "metrics.jsonl", {"event": "start", "step": 4, "ranks": 2, "time": clock.utc_now()})
    expect(page.get_by_text("of another version are not in the diagnosis: rank-00000.json")).to_be_visible()
    for name in ("hangs", "traces"):
        shutil.rmtree(run / name)
    append(run / "metrics.jsonl", {"event": "start", "step": 4, "ranks": 2, "time": clock.utc_now()})
    expect(page.get_by_role("heading", name=re.compile("^(Hangs|Traces)$"))).to_have_count(0)
