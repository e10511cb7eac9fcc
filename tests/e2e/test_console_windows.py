"""Windows of one browser over the console in Chromium: they share a stream, and none waits for another."""

import json
from urllib.parse import parse_qs

import pytest
from playwright.sync_api import expect

from penstock.console.access import ConsoleAccess
from penstock.console.app import build_app
from penstock.console.state import ConsoleState
from tests.browser import DEVICES, Pages, expect_last_step, needs_browser, turn
from tests.console_workers import served
from tests.launched import wait_until

pytestmark = needs_browser

NO_WORKER = "delete globalThis.SharedWorker"
BROKEN_WORKER = """
globalThis.SharedWorker = class extends EventTarget {
  constructor() {
    super();
    this.port = new MessageChannel().port1;
    setTimeout(() => this.dispatchEvent(new Event("error")));
  }
};
"""


class CountedConsole:
    """A console over a folder of runs that tells which streams are open."""

    def __init__(self, folder):
        self.folder = folder
        self.streams = []
        self.state = ConsoleState([folder], ConsoleAccess())
        self._app = build_app(self.state)

    async def counted(self, scope, receive, send):
        if scope["path"] != "/api/stream":
            await self._app(scope, receive, send)
            return
        query = scope["query_string"].decode()
        self.streams.append(query)
        try:
            await self._app(scope, receive, send)
        finally:
            self.streams.remove(query)

    def write(self, name, first, last):
        """Append steps to a run, which may be new."""
        (self.folder / name).mkdir(parents=True, exist_ok=True)
        records = [{"step": n, "loss": 9.0 - n / 1000, "tokens": 10 * n} for n in range(first, last + 1)]
        with (self.folder / name / "metrics.jsonl").open("a") as file:
            file.write("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def console(tmp_path):
    (tmp_path / "runs").mkdir()
    found = CountedConsole(tmp_path / "runs")
    with served(found.state, found.counted) as found.address:
        yield found


@pytest.fixture(scope="module")
def reader(browser):
    """Windows of one reader, whose browser opens six connections to a host."""
    return Pages(browser, "desktop", browser.new_context(**DEVICES["desktop"]).new_page)


@pytest.fixture
def windows(browser, reader, request):
    """Those of the reader; with a script (the parameter) that pages begin with, of another one."""
    script = getattr(request, "param", "")
    if not script:
        yield reader
        reader.give_back()
        return
    with browser.new_context(**DEVICES["desktop"]) as context:
        context.add_init_script(script)
        yield Pages(browser, "desktop", context.new_page)


def opened(windows, console, name=None):
    """Open the table, or a run's page, and wait until it is live."""
    page = windows.take()
    page.goto(console.address)
    expect(page.locator(".runs .name a").first).to_be_visible()
    if name is not None:
        page.get_by_role("link", name=name, exact=True).click()
        expect(page.get_by_role("heading", level=1)).to_have_text(name)
    expect(page.locator("#live")).to_have_text("live")
    return page


def expect_step(page, step):
    """Wait until the head of a run's page and its curve of the loss are at a step."""
    expect(page.locator(".figure", has_text="step").locator("dd").first).to_have_text(str(step))
    expect_last_step(page, step)


def row(page, name):
    return page.get_by_role("row").filter(has=page.get_by_role("link", name=name, exact=True))


def test_eight_windows_in_sight_show_the_newest_step_and_can_still_ask(windows, console):
    for name in ("one", "two"):
        console.write(name, 1, 3)
    tables, pages = [opened(windows, console)], []
    for number in range(6):  # each begins behind the step of the one before
        pages.append(opened(windows, console, ("one", "two")[number % 2]))
        console.write("one", 4 + number, 4 + number)
    tables.append(opened(windows, console))
    wait_until(lambda: len(console.streams) == 2, "a stream of runs, a stream of the table")
    console.write("one", 10, 12)
    console.write("two", 4, 5)
    for page, last in zip(pages, (12, 5) * 3, strict=True):
        expect_step(page, last)
    for page in tables:
        expect(row(page, "one").locator(".step")).to_have_text("12")
        expect(row(page, "two").locator(".step")).to_have_text("5")
    for page in pages:
        page.get_by_role("link", name="Recipe").click()
        expect(page.get_by_label("Search keys and values")).to_be_visible()
        expect(page.locator("#live")).to_have_text("live")
    assert sorted("runs=" in query for query in console.streams) == [False, True]


@pytest.mark.parametrize(
    "windows", ["", NO_WORKER, BROKEN_WORKER], ids=["shared", "none", "broken"], indirect=True
)
def test_windows_out_of_sight_let_go_and_show_what_they_missed(windows, console):
    console.write("run", 1, 3)
    table, pages = opened(windows, console), [opened(windows, console, "run") for _ in range(5)]
    for page in (table, *pages):
        turn(page, is_hidden=True)
    wait_until(lambda: not console.streams, "no stream is held")
    seventh = opened(windows, console)
    console.write("run", 4, 5)
    console.write("new", 1, 2)
    expect(seventh.get_by_role("link", name="new", exact=True)).to_be_visible()
    assert console.streams == [""], "hidden pages stay without a connection"
    turn(seventh, is_hidden=True)
    turn(table, is_hidden=False)
    expect(table.get_by_role("link", name="new", exact=True)).to_be_visible()
    turn(pages[0], is_hidden=False)
    expect_step(pages[0], 5)


def test_a_table_that_joins_the_stream_of_another_reads_what_changed_before(windows, console):
    console.write("run", 1, 3)
    first, second = opened(windows, console), opened(windows, console)
    turn(second, is_hidden=True)
    console.write("run", 4, 5)
    expect(row(first, "run").locator(".step")).to_have_text("5")
    turn(second, is_hidden=False)
    expect(row(second, "run").locator(".step")).to_have_text("5")
    assert console.streams == [""]


def test_a_window_that_joins_does_not_send_the_others_what_they_have(windows, console):
    console.write("run", 1, 3)
    first = opened(windows, console, "run")
    expect_step(first, 3)
    console.write("run", 4, 5)
    expect_step(first, 5)
    opened(windows, console, "run")
    wait_until(lambda: len(console.streams) == 1, "both have one stream")
    (query,) = console.streams
    assert query.count(".") == 5, f"both have one cursor: {query}"


def test_a_window_that_comes_back_follows_from_what_it_was_sent(windows, console):
    for name in ("one", "two"):
        console.write(name, 1, 3)
    page = opened(windows, console, "one")
    console.write("one", 4, 5)
    expect_step(page, 5)
    ids = [run["id"] for run in page.evaluate("fetch('api/runs').then((found) => found.json())")["runs"]]
    compared = windows.take()
    compared.goto(f"{console.address}#/compare?runs={','.join(ids)}")
    expect(compared.locator("#live")).to_have_text("live")
    console.write("one", 6, 7)
    for each in (page, compared):
        expect_last_step(each, 7)
        turn(each, is_hidden=True)
    wait_until(lambda: not console.streams, "no stream is held")
    for each, counts in ((page, {"7.0.0.0.0"}), (compared, {"7.0.0.0.0", "3.0.0.0.0"})):
        turn(each, is_hidden=False)
        wait_until(lambda: console.streams, "it follows again")
        (query,) = console.streams
        cursors = parse_qs(query)["since"][0].split(",")
        assert {cursor.partition(".")[2] for cursor in cursors} == counts
        turn(each, is_hidden=True)
        wait_until(lambda: not console.streams, "no stream is held")


@pytest.mark.parametrize("windows", ["", NO_WORKER], ids=["shared", "none"], indirect=True)
def test_a_page_that_is_left_lets_go_and_follows_again_if_it_comes_back(windows, console):
    console.write("run", 1, 3)
    page = opened(windows, console, "run")
    leave = "(kind) => dispatchEvent(new PageTransitionEvent(kind, { persisted: true }))"
    page.evaluate(leave, "pagehide")
    wait_until(lambda: not console.streams, "no stream is held")
    console.write("run", 4, 5)
    page.evaluate(leave, "pageshow")
    expect(page.locator("#live")).to_have_text("live")
    expect_step(page, 5)


LATE_WINDOW = """
async () => {
  const made = [];
  globalThis.EventSource = class extends EventTarget {
    constructor(url) {
      super();
      this.since = url.searchParams.get("since");
      made.push(this);
    }
    close() {}
    say(kind, data) {
      this.dispatchEvent(new MessageEvent(kind, { data: JSON.stringify(data) }));
    }
  };
  const { join } = await import("./page/stream.js"), pause = () => new Promise((go) => setTimeout(go, 50));
  const window = (since) => {
    const port = new EventTarget(), got = [];
    Object.assign(port, { start() {}, postMessage: (message) => got.push(message.data.x.step) });
    join(port);
    port.dispatchEvent(new MessageEvent("message", { data: { ids: ["run"], since: [since] } }));
    return got;
  };
  const first = window("nine");
  await pause();
  const late = window("five");  // and a record comes before its connection
  made[0].say("points", { run: "run", x: { step: 10 } });
  made[0].say("at", { run: "run", cursor: "ten" });
  await pause();
  made[1].say("points", { run: "run", x: { step: 6 } });
  return { since: made[1].since, first, late };
}
"""


def test_a_window_that_joins_as_a_record_comes_misses_none_before_it(windows, console):
    page = windows.take()
    page.goto(console.address)
    found = page.evaluate(LATE_WINDOW)
    assert found == {"since": "ten,five", "first": [10, 6], "late": [6]}
