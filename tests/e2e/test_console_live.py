"""Pages of the console in Chromium while the files of their runs change: nobody reloads."""

import fcntl
import json
import shutil
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.sync_api import expect

from tests.browser import DEVICES, Pages, check_is_usable, expect_last_step, leave, needs_browser
from tests.e2e.conftest import console
from tests.launched import wait_until

pytestmark = needs_browser


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def address(runs):
    write(runs / "other", *steps(1, 3))
    with console(runs) as found:
        yield found


@pytest.fixture(scope="module")
def reader(browser):
    """Pages of one reader, whose browser opens six connections to a host."""
    return Pages(browser, "desktop", browser.new_context(**DEVICES["desktop"]).new_page)


@pytest.fixture
def pages(reader):
    yield reader
    reader.give_back()


@pytest.fixture(scope="module")
def own_streams(browser):
    def make():
        page = browser.new_page(**DEVICES["desktop"])
        page.add_init_script("delete globalThis.SharedWorker")
        return page

    return Pages(browser, "desktop", make)


@pytest.fixture
def page_of_its_own_stream(own_streams):
    """A page without a SharedWorker, whose stream a test can hold."""
    yield own_streams.take()
    own_streams.give_back()


def write(run, *records):
    """Append records to a run, which may be new."""
    run.mkdir(parents=True, exist_ok=True)
    with (run / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(record) + "\n" for record in records))


def steps(first, last, **values):
    return [{"step": n, "loss": 9.0 - n / 1000, "tokens": 10 * n, **values} for n in range(first, last + 1)]


def opened(pages, address, name=None):
    """Open the table, or a run's page, and wait until it is live."""
    page = pages.take()
    page.goto(address)
    expect(page.locator(".runs .name a").first).to_be_visible()
    if name is not None:
        page.get_by_role("link", name=name, exact=True).click()
        expect(page.get_by_role("heading", level=1)).to_have_text(name)
    expect(page.locator("#live")).to_have_text("live")
    return page


def address_of(address, name):
    """Return the address of a run's page, once the console has found the run."""

    def found():
        runs = httpx.get(f"{address}api/runs").json()["runs"]
        return [run["id"] for run in runs if run["name"] == name]

    return f"{address}#/run/{wait_until(found, name)[0]}"


def test_a_deleted_run_leaves_the_table_and_its_page_says_so(pages, address, runs):
    write(runs / "doomed", *steps(1, 3))
    table, page = opened(pages, address), opened(pages, address, "doomed")
    row = table.get_by_role("link", name="doomed", exact=True)
    expect(row).to_be_visible()
    table.get_by_role("checkbox", name="Compare doomed").check()
    expect(page.locator(".run-head .pill")).to_be_visible()
    shutil.rmtree(runs / "doomed")
    expect(page.locator(".run-head .notice")).to_contain_text("The folder of this run was deleted")
    expect(page.locator(".run-head .pill")).to_have_count(0)
    expect(page.locator("#loss canvas")).to_be_visible()
    expect(row).to_have_count(0)
    expect(table.get_by_text("Choose another to compare")).to_be_hidden()
    write(runs / "doomed", *steps(1, 4))  # a new run of its name
    expect(row).to_be_visible()
    expect(page.locator(".run-head .pill")).to_be_visible()
    expect(page.locator(".run-head .notice")).not_to_contain_text("gone")


def test_a_record_written_before_the_stream_begins_is_drawn(page_of_its_own_stream, address, runs):
    write(runs / "late-stream", *steps(1, 3))
    place = address_of(address, "late-stream")
    page, held = page_of_its_own_stream, []
    page.route("**/api/stream*", lambda route: held.append(route))
    page.goto(place)
    expect(page.locator("#loss canvas")).to_be_visible()
    write(runs / "late-stream", *steps(4, 5))
    held[0].continue_()
    expect(page.locator("#live")).to_have_text("live")
    expect_last_step(page, 5)


def test_a_row_that_changes_before_the_stream_begins_is_drawn(page_of_its_own_stream, address, runs):
    write(runs / "late-table", *steps(1, 3))
    address_of(address, "late-table")
    page, held = page_of_its_own_stream, []
    page.route("**/api/stream*", lambda route: held.append(route))
    page.goto(address)
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name="late-table", exact=True))
    expect(row.locator(".step")).to_have_text("3")
    wait_until(lambda: page.evaluate("true") and held, "the stream is asked for")
    write(runs / "late-table", *steps(4, 5))
    held[0].continue_()
    expect(row.locator(".step")).to_have_text("5")


def test_a_comparison_says_which_of_its_runs_was_deleted(pages, address, runs):
    for name in ("kept", "lost"):
        write(runs / name, *steps(1, 3))
    ids = [address_of(address, name).rpartition("/")[2] for name in ("kept", "lost")]
    page = pages.take()
    page.goto(f"{address}#/compare?runs={','.join(ids)}")
    expect(page.locator("#loss canvas")).to_be_visible()
    shutil.rmtree(runs / "lost")
    expect(page.get_by_role("alert")).to_contain_text("lost: ")
    expect(page.locator("#loss canvas")).to_be_visible()


def test_a_record_sent_while_the_curves_are_on_their_way_is_drawn(pages, address, runs):
    write(runs / "late-curves", *steps(1, 3))
    place = address_of(address, "late-curves")
    page, held = pages.take(), []
    page.route("**/curves?*", lambda route: held.append((route, route.fetch())))
    page.goto(place)
    expect(page.locator("#live")).to_have_text("live")
    wait_until(lambda: page.evaluate("true") and held, "the curves are read")
    write(runs / "late-curves", *steps(4, 5))
    expect(page.locator(".figure", has_text="step").locator("dd").first).to_have_text("5")
    for route, answer in held:
        route.fulfill(response=answer)
    expect_last_step(page, 5)


def test_a_zoom_reads_out_every_step_that_a_long_curve_leaves_out(pages, address, runs):
    losses = [9 - step / 1000 + (step * 7919 % 13) / 100 for step in range(1, 6001)]
    write(runs / "long", *({"step": step, "loss": loss} for step, loss in enumerate(losses, start=1)))
    page = opened(pages, address, "long")
    plot, said = page.locator("#loss .plot"), page.locator("#loss [role=status]")
    plot.focus()
    page.keyboard.press("End")
    for _ in range(4):  # the last 375 steps
        page.keyboard.press("+")

    def read_out():
        page.keyboard.press("End")
        found = [said.inner_text()]
        for _ in range(3):
            page.keyboard.press("ArrowLeft")
            found.append(said.inner_text())
        return found

    raw = [f"step {step:,}: training {float(f'{losses[step - 1]:.4g}'):g}" for step in range(6000, 5996, -1)]
    wait_until(lambda: read_out() == raw, "every step is read out")


def test_the_charts_of_very_many_corpora_have_all_of_them(pages, address, runs):
    each = dict.fromkeys((f"corpus-{number:03d}" for number in range(120)), 1 / 120)
    write(runs / "many", *steps(1, 3, corpus_shares=each, corpus_epochs=each))
    write(runs / "many", {"step": 3, "validation_loss": 2.0, "corpus_validation_loss": each})
    page = opened(pages, address, "many")
    for chart in ("corpus-loss", "mixture", "epochs"):
        expect(page.locator(f"#{chart} .legend li")).to_have_count(120)
    write(runs / "many", *steps(4, 5, corpus_shares=each, corpus_epochs=each))
    expect_last_step(page, 5)


def test_what_has_the_focus_keeps_it_while_records_come(pages, address, runs):
    write(runs / "focused", *steps(1, 3, grad_norm=1.0))
    table = opened(pages, address)
    chip = table.get_by_role("group", name="States shown").get_by_role("button", name="failed")
    chip.focus()
    for is_pressed in ("true", "false"):
        table.keyboard.press("Space")
        expect(chip).to_have_attribute("aria-pressed", is_pressed)
        expect(chip).to_be_focused()
    page = opened(pages, address, "focused")
    compare = page.get_by_role("link", name="Compare")
    compare.focus()
    write(runs / "focused", *steps(4, 5, grad_norm=1.0))
    expect(page.locator(".figure", has_text="step").locator("dd").first).to_have_text("5")
    expect(compare).to_be_focused()
    row = table.get_by_role("row").filter(has=table.get_by_role("link", name="focused", exact=True))
    expect(row.locator(".step")).to_have_text("5")
    expect(chip).to_be_focused()
    charts = page.locator("summary", has_text="Charts")
    charts.click()
    box = page.get_by_role("checkbox", name="Gradient norm")
    box.focus()
    for number in (0, 1):
        page.keyboard.press("Space")
        expect(page.locator("#grad-norm")).to_have_count(number)
        expect(box).to_be_focused()
    page.keyboard.press("Escape")
    expect(box).to_be_hidden()
    expect(charts).to_be_focused()
    charts.click()
    expect(box).to_be_visible()
    page.get_by_role("heading", level=1).click()
    expect(box).to_be_hidden()


def test_a_run_that_comes_after_a_search_is_listed_if_it_matches(pages, address, runs):
    write(runs / "sought-1", *steps(1, 3))
    page = opened(pages, address)
    names = page.locator(".runs .name a")
    page.get_by_role("searchbox").fill("sought")
    expect(names).to_have_text(["sought-1"])
    write(runs / "not-this-one", *steps(1, 3))
    write(runs / "sought-2", *steps(1, 3))
    expect(names).to_have_count(2)
    assert sorted(names.all_inner_texts()) == ["sought-1", "sought-2"]


def samples(step, answer):
    return {"event": "samples", "step": step, "answers": [{"prompt": "the penstock", "answer": answer}]}


def test_new_answers_and_a_new_spike_appear_in_an_open_page_and_what_was_chosen_stays(pages, address, runs):
    write(runs / "asked", *steps(1, 200), *(samples(step, f"answer {step}") for step in (50, 100, 150, 200)))
    page = opened(pages, address, "asked")
    page.get_by_role("link", name="Answers", exact=True).click()
    shown = page.locator(".answers .answer .said")
    expect(shown).to_have_text(["answer 50", "answer 150", "answer 200"])
    write(runs / "asked", *steps(201, 250), samples(250, "answer 250"))
    expect(shown).to_have_text(["answer 50", "answer 150", "answer 250"])
    page.get_by_role("button", name="step 100").click()
    write(
        runs / "asked",
        {"step": 251, "loss": 30.0, "tokens": 2510},
        *steps(252, 260),
        samples(260, "answer 260"),
    )
    expect(page.get_by_role("button", name="step 260")).to_be_visible()
    expect(shown).to_have_text(["answer 50", "answer 100", "answer 150", "answer 250"])
    page.get_by_role("link", name="Curves").click()
    events = page.get_by_role("region", name="Events")
    expect(events).to_contain_text("loss 30.000")
    write(runs / "asked", *steps(261, 270), {"step": 271, "loss": 31.0, "tokens": 2710})
    expect(events).to_contain_text("loss 31.000")


@pytest.mark.parametrize("device", DEVICES)
def test_a_run_that_trains_shows_its_cost_so_far_beside_the_time_left(pages, address, runs, device):
    run = runs / f"paid-{device}"
    write(run, *steps(1, 40, step_s=2.0, device_hours=3.0))
    (run / "config.json").write_text(json.dumps({"run": {"steps": 100, "device_hour_price": 2.5}}))
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        page = opened(pages, address, run.name)
        page.set_viewport_size(DEVICES[device]["viewport"])
        expect(page.locator(".run-head .pill")).to_have_text("training")
        expect(page.locator(".figure", has_text="time left").locator("dd")).to_have_text("2 min")
        expect(page.locator(".figure", has_text="cost").locator("dd")).to_have_text("7.5")
        expect(page.locator("#loss canvas")).to_be_visible()
        check_is_usable(page)


def test_pages_sign_in_again_after_the_console_was_started_again(pages, runs, tmp_path):
    (tmp_path / "keys").write_text("anna a-key-of-some-length\n")
    write(runs / "kept-open", *steps(1, 3))
    words = (runs, "--key-file", tmp_path / "keys")

    def sign_in(page):
        page.get_by_label("Key").fill("a-key-of-some-length")
        page.get_by_role("button", name="Open").click()

    with console(*words) as address:
        page = pages.take()
        page.goto(address)
        sign_in(page)
        windows = [opened(pages, address, "kept-open") for _ in range(2)]
        leave(page)
    with console(*words, port=urlsplit(address).port):
        for page in windows:
            expect(page.get_by_role("button", name="sign in again")).to_be_visible()
            check_is_usable(page)
        windows[0].get_by_role("button", name="sign in again").click()
        sign_in(windows[0])
        expect(windows[0].locator(".run-head h1")).to_have_text("kept-open")
        for page in windows:  # the other one without a click
            expect(page.locator("#live")).to_have_text("live")
            leave(page)
