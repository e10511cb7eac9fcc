"""Views of the console in Chromium that open, close and scroll: none shows what another was asked for."""

import json
import re
import shutil
from base64 import b64encode

import numpy as np
import pytest
from playwright.sync_api import expect

from tests.browser import DEVICES, PATIENCE_MS, Pages, leave, needs_browser
from tests.e2e.conftest import console
from tests.launched import wait_until

pytestmark = needs_browser
NUM_RUNS = 120
NUM_RECORDS = 5000


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """A console over many short runs, the first of which has records of three ranks."""
    runs = tmp_path_factory.mktemp("runs")
    for number in range(NUM_RUNS):
        folder = runs / f"run-{number:03d}"
        folder.mkdir()
        records = [{"step": step, "loss": 3.0, "tokens": 10 * step} for step in range(1, 4)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        (folder / "config.json").write_text('{"run": {"steps": 3}}')
    for name in ("yod-a-10", "yod-a-9", "yod-B-2", "yod-a_1", "yod-\u00e9", "z/yod-a-09b", "z/yod-0"):
        (runs / name).mkdir(parents=True)
        (runs / name / "metrics.jsonl").write_text(json.dumps({"step": len(name), "loss": 3.0}) + "\n")
    usual, slow = (b64encode(np.array([first, 2, 3], dtype="<f4").tobytes()).decode() for first in (1, 4))
    with (runs / "run-000" / "ranks.jsonl").open("w") as file:
        for step in range(1, NUM_RECORDS + 1):
            file.write(json.dumps({"step": step, "steps": 1, "own_s": usual if step % 4 else slow}) + "\n")
    with console(runs) as found:
        yield found
    shutil.rmtree(runs)


@pytest.fixture(scope="module")
def pages(browser):
    return Pages(browser, "desktop")


@pytest.fixture
def blank(pages):
    """A page that shows nothing yet."""
    yield pages.take()
    pages.give_back()


@pytest.fixture
def page(blank, address):
    """The table."""
    blank.goto(f"{address}#/?sort=name&down=0")
    expect(blank.locator(".runs .name a").first).to_have_text("run-000")
    return blank


def test_a_view_that_is_slow_to_open_does_not_replace_one_opened_after_it(page):
    held, run = [], page.locator(".runs .name a").first.get_attribute("href")
    page.route(re.compile(r"/api/runs/\w+$"), lambda route: held.append(route))
    page.evaluate(f"location.hash = '{run}'")
    expect(page.locator(".loading")).to_be_visible()
    page.evaluate("location.hash = '#/compare'")
    expect(page.get_by_role("heading", name="Compare")).to_be_visible()
    with page.expect_response(re.compile(r"/api/runs/\w+$")) as late:
        held[0].continue_()
    late.value.finished()
    page.evaluate("new Promise((done) => setTimeout(done, 300))")
    expect(page.get_by_role("heading", level=1)).to_have_text("Compare")
    expect(page.locator("#crumbs [aria-current]")).to_have_text("Compare")
    assert page.evaluate("document.querySelector('#live').textContent") == ""


def test_a_tab_that_is_slow_does_not_draw_into_the_next_one(page):
    held, run = [], page.locator(".runs .name a").first.get_attribute("href")
    page.route("**/answers", lambda route: held.append(route))
    page.goto(page.url.partition("#")[0] + f"{run}/answers")
    page.get_by_role("link", name="Recipe").click()
    expect(page.get_by_label("Search keys and values")).to_be_visible()
    with page.expect_response("**/answers") as late:
        held[0].continue_()
    late.value.finished()
    page.evaluate("new Promise((done) => setTimeout(done, 300))")
    expect(page.get_by_label("Search keys and values")).to_be_visible()
    expect(page.get_by_text("This run has no sample prompts")).to_have_count(0)


def test_a_timer_of_the_table_does_not_rewrite_the_address_of_another_view(page):
    run = page.locator(".runs .name a").first.get_attribute("href")
    page.evaluate(
        """(run) => {
          const field = document.querySelector('input[type=search]');
          field.value = 'run-0';
          field.dispatchEvent(new Event('input', { bubbles: true }));
          location.hash = run;
        }""",
        run,
    )
    expect(page.locator(".run-head h1")).to_have_text("run-000")
    page.evaluate("new Promise((done) => setTimeout(done, 1500))")
    assert page.evaluate("location.hash").startswith(run)


def test_rows_in_sight_stay_while_the_table_scrolls_and_others_come_in_order(page):
    numbers = "[...document.querySelectorAll('.space > .row')].map((row) => Number(row.ariaRowIndex))"

    def expect_rows(first):
        wait_until(
            lambda: (found := page.evaluate(numbers))[:1] == [first] and len(found) > 20, f"row {first}"
        )
        found = page.evaluate(numbers)
        assert found == list(range(first, first + len(found))), "in the order of the table, none missing"

    page.evaluate("document.querySelectorAll('.space > .row').forEach((row) => { row.old = true; })")
    page.evaluate("document.querySelector('.runs-scroll').scrollTop = 10 * 52")
    expect_rows(2 + 10 - 8)
    old = page.evaluate("[...document.querySelectorAll('.space > .row')].map((row) => Boolean(row.old))")
    assert old[0], "a row that stayed in sight was not made again"
    assert not old[-1]
    page.evaluate("document.querySelector('.runs-scroll').scrollTop = 0")
    expect_rows(2)
    page.get_by_label("Search names and recipes").fill("run-11")
    expect(page.locator(".runs .name a")).to_have_count(10)


def test_rows_that_did_not_change_stay_when_the_table_is_read_again_and_their_age_goes_on(browser, address):
    held = []
    with browser.new_page(**DEVICES["desktop"]) as page:
        page.set_default_timeout(PATIENCE_MS)
        page.add_init_script("delete globalThis.SharedWorker")  # whose stream a test cannot hold
        page.clock.install()
        page.route("**/api/stream*", lambda route: held.append(route))
        page.goto(f"{address}#/?sort=name&down=0")
        rows = "[...document.querySelectorAll('.space > .row')]"
        wait_until(
            lambda: page.evaluate(f"{rows}.length") > 20 and held, "the table, and its stream is asked for"
        )
        page.evaluate(f"{rows}.forEach((row) => {{ row.old = true; }})")
        with page.expect_response("**/api/runs"):
            held[0].continue_()
        page.clock.fast_forward("02:00:00")
        expect(page.locator(".space > .row .updated").first).to_have_text(re.compile("^2 h"))
        assert page.evaluate(f"{rows}.every((row) => row.old)"), "nothing of them has changed"


def test_chips_choose_the_states_that_are_shown(page):
    names, chips = page.locator(".runs .name a"), page.get_by_role("group", name="States shown")
    expect(chips.get_by_role("button")).to_have_text(["7 failed", f"{NUM_RUNS} finished"])
    chips.get_by_role("button", name="failed").click()
    expect(names).to_have_count(7)
    expect(page.get_by_text(f"7 of {NUM_RUNS + 7}")).to_be_visible()
    expect(page).to_have_url(re.compile("states=failed"))
    chips.get_by_role("button", name="finished").click()
    expect(page.get_by_text(f"{NUM_RUNS + 7} in all")).to_be_visible()
    for name in ("failed", "finished"):
        chips.get_by_role("button", name=name).click()
        expect(chips.get_by_role("button", name=name)).to_have_attribute("aria-pressed", "false")
    expect(names.first).to_have_text("run-000")
    expect(page).not_to_have_url(re.compile("states="))


def test_the_table_is_grouped_and_the_address_holds_the_group(page):
    groups = page.locator(".runs .row.group")
    page.get_by_label("Search names and recipes").fill("yod")
    expect(page.locator(".runs .name a")).to_have_count(7)
    page.get_by_label("Group").select_option("folder")
    expect(groups).to_have_count(2)
    expect(groups.first).to_have_text(re.compile("runs.*5$"))
    expect(groups.last).to_have_text(re.compile("/z2$"))
    expect(page).to_have_url(re.compile("group=folder"))
    page.get_by_label("Group").select_option("state")
    expect(groups).to_have_text(["failed7"])
    page.get_by_label("Group").select_option("")
    expect(groups).to_have_count(0)
    expect(page).not_to_have_url(re.compile("group="))


def test_runs_are_compared_at_the_same_money(blank, tmp_path):
    for name, hours in (("cheap", 1), ("dear", 2)):
        (tmp_path / name).mkdir()
        records = [{"step": step, "loss": 9 - step, "device_hours": hours * step} for step in range(1, 5)]
        (tmp_path / name / "metrics.jsonl").write_text(
            "".join(json.dumps(record) + "\n" for record in records)
        )
    with console(tmp_path, "--price", "2.5") as address:
        page = blank
        page.goto(address)
        for name in ("cheap", "dear"):
            page.get_by_role("checkbox", name=f"Compare {name}").check()
        page.get_by_role("link", name="Compare 2 runs").click()
        page.get_by_role("button", name="Same money").click()
        expect(page.locator("#loss .plot")).to_have_attribute("aria-label", re.compile("by money"))
        same = page.get_by_role("region", name="All of them at a cost of 10.00")
        expect(same.get_by_role("row", name=re.compile("^Loss"))).to_have_text(re.compile("57$"))
        expect(page).to_have_url(re.compile("x=money"))
        leave(page)


def test_a_comparison_has_the_records_of_the_step_that_curves_leave_out(blank, tmp_path):
    losses = [9 - step / 1000 + (step * 7919 % 13) / 100 for step in range(1, 6001)]
    for name, number in (("long", 6000), ("short", 4999)):
        (tmp_path / name).mkdir()
        records = [{"step": step, "loss": loss} for step, loss in enumerate(losses[:number], start=1)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    with console(tmp_path) as address:
        page = blank
        page.goto(address)
        for name in ("long", "short"):
            page.get_by_role("checkbox", name=f"Compare {name}").check()
        page.get_by_role("link", name="Compare 2 runs").click()
        same = page.get_by_role("region", name="All of them at step 4,999")
        said = f"{losses[4998]:.4g}"
        expect(same.get_by_role("row", name=re.compile("^Loss"))).to_have_text(
            re.compile(f"{said}\\s*{said}$")
        )
        leave(page)


def test_a_heat_map_says_how_many_records_share_a_column_and_its_means_are_of_records(page):
    run = page.locator(".runs .name a").first.get_attribute("href")
    page.evaluate(f"location.hash = '{run}/ranks'")
    said = page.locator(".ranks .toolbar")
    expect(said).to_contain_text(re.compile(r"3 ranks \u00d7 5,000 records; each column shows .* of \d+"))
    expect(page.locator(".ranks canvas[aria-label]")).to_have_attribute(
        "aria-label", re.compile("3 ranks down")
    )
    highest = page.get_by_role("region", name="Highest ranks").locator("tbody tr")
    expect(highest).to_have_text(
        [re.compile(f"^{rank}.*{mean}") for rank, mean in ((2, "3 s"), (1, "2 s"), (0, "1.75 s"))]
    )
    page.locator(".ranks canvas[aria-label]").press("ArrowDown")
    expect(page.locator(".readout")).to_contain_text("rank 1, step")


def test_smoothed_lines_and_stacks_are_drawn_from_the_means_of_all_records(page):
    drawn = page.evaluate(
        """async () => {
          const { Chart } = await import("./charts/charts.js"), x = [...Array(100).keys()];
          const layer = { name: "a", color: 0, x, y: x.map((i) => (i % 2 ? 9 : -9)), means: x.map(() => 1) };
          const data = (style, layers) => new Chart(document.body, {
            title: style, smoothing: 9, layers: layers.map((one) => ({ ...one, style })),
          }).uplot.data.slice(1).map(([first, second]) => [first, second]);
          const whole = { ...layer, means: undefined, y: x };  // no record is left out
          return [data("line", [layer]), data("area", [layer, layer]), data("line", [whole])];
        }"""
    )
    assert drawn[0] == [[-9, 9], [1, 1]], "the points, and their smoothed means"
    assert drawn[1] == [[1, 1], [2, 2]]
    assert drawn[2][0] == [0, 1]
