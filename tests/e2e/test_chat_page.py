"""The chat page in a real browser: it types, streams, stops, and asks nobody but its server."""

import json
import re
import time

import pytest
from playwright.sync_api import expect

from tests.browser import DEVICES, Pages, listening, needs_browser
from tests.serving import PATIENCE_S, make_model, serving

pytestmark = needs_browser

KEY = "a-key-for-the-page-1"
PATIENCE_MS = PATIENCE_S * 1000
EVENTS = "text/event-stream"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = make_model(tmp_path_factory.mktemp("page") / "tiny", context=16_384)
    with serving(folder, "--cache-gib", "0.05", PENSTOCK_API_KEY=KEY) as running:
        yield running


@pytest.fixture(scope="module")
def pages(browser):
    """Pages of a reader who has the key."""

    def make():
        page = browser.new_page(**DEVICES["desktop"])
        page.add_init_script(f"sessionStorage.setItem('key', '{KEY}')")
        return page

    return Pages(browser, "desktop", make)


@pytest.fixture
def page(pages, server):
    """A page that fails the test if it logs an error or asks another address."""
    opened, complaints, asked = pages.take(), [], set()
    listeners = {
        "console": lambda message: complaints.append(said(message)) if is_complaint(message) else None,
        "pageerror": lambda error: complaints.append(str(error)),
        "request": lambda request: asked.add(request.url.split("/")[2]),
    }
    with listening(opened, **listeners):
        opened.goto(server.url)
        expect(opened.get_by_label("Model")).to_have_value("tiny", timeout=PATIENCE_MS)
        yield opened
    pages.give_back()
    assert complaints == []
    assert asked == {server.url.removeprefix("http://")}


def said(message):
    return f"{message.text} ({message.location['url']})"


def is_complaint(message):
    expected = ("responded with a status of 400", "net::ERR_FAILED")
    return message.type == "error" and not any(words in message.text for words in expected)


def ask(page, text):
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")


def events(*chunks):
    """Return a stream of one answer's pieces."""
    return "".join(f"data: {json.dumps({'choices': [{'index': 0, **chunk}]})}\n\n" for chunk in chunks)


def finished(page, count):
    """Wait until so many answers are written; return the last turn."""
    expect(page.get_by_role("button", name="Send")).to_be_visible(timeout=PATIENCE_MS)
    expect(page.locator(".turn.assistant")).to_have_count(count)
    return page.locator(".turn.assistant").last


def test_an_answer_streams_and_says_how_fast(page):
    page.route("**/v1/chat/completions", without_end)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Longest answer, in tokens").fill("30")
    page.get_by_label("System prompt").fill("Be brief.")
    ask(page, "the <b>penstock</b>")
    turn = finished(page, 1)
    assert page.locator(".turn.user .text").inner_text() == "the <b>penstock</b>"  # text, never markup
    assert turn.locator(".text").inner_text().strip()
    expect(turn.locator(".note")).to_have_text(
        re.compile(r"^30 tokens · [\d.]+ tokens/s · first after .+ · cut")
    )
    ask(page, "and then?")
    finished(page, 2)
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".turn")).to_have_count(0)


def test_the_speed_of_an_answer_that_arrives_at_once_counts_the_wait(page):
    def later(route):
        time.sleep(0.5)
        end = {"delta": {"content": "c"}, "finish_reason": "stop"}
        route.fulfill(
            body=events({"delta": {"content": "a"}}, {"delta": {"content": "b"}}, end), content_type=EVENTS
        )

    page.route("**/v1/chat/completions", later)
    ask(page, "how fast?")
    note = finished(page, 1).locator(".note").inner_text()
    assert float(note.split(" tokens/s")[0]) < 3 / 0.5


def test_code_looks_like_code_and_markup_stays_text(page):
    answer = "Use `head` **now** <i>x</i>:\n```python\nprint(1)\n```\nDone."
    chunks = [{"delta": {"role": "assistant"}}, {"delta": {"content": answer}, "finish_reason": "stop"}]
    body = ": still here\n\n" + events(*chunks) + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type=EVENTS))
    ask(page, "how?")
    text = finished(page, 1).locator(".text")
    assert text.locator("pre").all_inner_texts() == ["print(1)\n"]
    assert [text.locator(tag).inner_text() for tag in ("code", "strong")] == ["head", "now"]
    assert text.locator("i").count() == 0
    assert "<i>x</i>" in text.inner_text()


def test_a_new_chat_forgets_the_answer_under_way(page):
    page.route("**/v1/chat/completions", without_end)
    ask(page, "the turbine")
    expect(page.locator(".turn.assistant .text")).not_to_be_empty(timeout=PATIENCE_MS)
    page.get_by_role("button", name="New chat").click()
    expect(page.get_by_role("button", name="Send")).to_be_visible(timeout=PATIENCE_MS)
    expect(page.get_by_label("Message")).to_have_value("")
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, "the penstock")
    page.get_by_role("button", name="Stop").click()
    assert asked.value.post_data_json["messages"] == [{"role": "user", "content": "the penstock"}]
    finished(page, 1)


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (
            lambda route: route.fulfill(body=events({"delta": {"content": "The pen"}}), content_type=EVENTS),
            "The connection ended before the answer did.",
        ),
        (lambda route: route.abort(), "The server cannot be reached, or went away."),
    ],
    ids=["cut", "gone"],
)
def test_an_answer_that_breaks_off_says_so_and_gives_the_question_back(page, reply, said):
    page.route("**/v1/chat/completions", reply)
    ask(page, "the turbine")
    turn = finished(page, 1)
    expect(turn.locator(".wrong")).to_have_text(said)
    expect(page.get_by_label("Message")).to_have_value("the turbine")
    assert turn.locator(".text").inner_text() in ("The pen", "")


def answering(*answers):
    """Answer each question with the next text."""
    left = iter(answers)

    def answer(route):
        said = {"delta": {"content": next(left)}, "finish_reason": "stop"}
        route.fulfill(body=events({"delta": {"role": "assistant"}}, said), content_type=EVENTS)

    return answer


def turns(page):
    return page.locator(".turn .text").all_inner_texts()


def test_a_conversation_outlives_a_reload_and_goes_on(page):
    page.route("**/v1/chat/completions", answering("A pipe of `steel`.", "Yes."))
    ask(page, "the <b>penstock</b>?")
    finished(page, 1)
    page.reload()
    expect(page.locator(".turn")).to_have_count(2, timeout=PATIENCE_MS)
    assert turns(page) == ["the <b>penstock</b>?", "A pipe of steel."]
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, "of steel?")
    finished(page, 2)
    assert [turn["content"] for turn in asked.value.post_data_json["messages"]] == [
        "the <b>penstock</b>?",
        "A pipe of `steel`.",
        "of steel?",
    ]
    page.get_by_role("button", name="New chat").click()
    page.reload()
    expect(page.get_by_label("Model")).to_have_value("tiny", timeout=PATIENCE_MS)
    expect(page.locator(".turn")).to_have_count(0)


def test_an_answer_keeps_its_models_name_after_a_reload(page):
    models = {"object": "list", "data": [{"id": "tiny"}, {"id": "an-adapter"}]}
    page.route("**/v1/models", lambda route: route.fulfill(json=models))
    page.route("**/v1/chat/completions", answering("One.", "Two."))
    page.reload()
    page.get_by_label("Model").select_option("an-adapter")
    ask(page, "first")
    finished(page, 1)
    page.get_by_label("Model").select_option("tiny")
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, "second")
    finished(page, 2)
    assert all(turn.keys() == {"role", "content"} for turn in asked.value.post_data_json["messages"])
    page.reload()
    expect(page.locator(".turn.assistant .who")).to_have_text(["an-adapter", "tiny"], timeout=PATIENCE_MS)


def test_a_question_is_edited_and_an_answer_tried_again(page):
    page.route("**/v1/chat/completions", answering("One.", "Two.", "Two again.", "Other."))
    ask(page, "first")
    finished(page, 1)
    ask(page, "second")
    finished(page, 2)
    page.locator(".turn.assistant").last.get_by_role("button", name="Retry").click()
    expect(page.locator(".turn.assistant .text").last).to_have_text("Two again.", timeout=PATIENCE_MS)
    assert turns(page) == ["first", "One.", "second", "Two again."]
    page.locator(".turn.user").first.get_by_role("button", name="Edit").click()
    expect(page.get_by_label("Message")).to_have_value("first")
    expect(page.locator(".turn")).to_have_count(0)
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, "another")
    finished(page, 1)
    assert asked.value.post_data_json["messages"] == [{"role": "user", "content": "another"}]
    assert turns(page) == ["another", "Other."]


def test_an_answer_that_failed_can_be_tried_again(page):
    page.route("**/v1/chat/completions", lambda route: route.abort())
    ask(page, "first")
    finished(page, 1)
    page.unroute("**/v1/chat/completions")
    page.route("**/v1/chat/completions", answering("One."))
    page.locator(".turn.assistant").get_by_role("button", name="Retry").click()
    expect(page.locator(".turn.assistant .text").last).to_have_text("One.", timeout=PATIENCE_MS)
    assert turns(page) == ["first", "One."]


def test_a_turn_is_copied_as_it_was_written(page, server):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=server.url)
    page.route("**/v1/chat/completions", answering("A **pipe**."))
    ask(page, "what?")
    finished(page, 1).get_by_role("button", name="Copy").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible(timeout=PATIENCE_MS)
    assert page.evaluate("navigator.clipboard.readText()") == "A **pipe**."


def test_the_api_is_a_page_that_asks_nobody_else(page, server):
    page.goto(f"{server.url}/docs")
    page.get_by_text("POST /v1/chat/completions").click()
    route = page.locator("details", has=page.get_by_text("POST /v1/chat/completions"))
    expect(route.get_by_text("Sample among these tokens only.")).to_be_visible()
    with server.http() as http:
        reply = http.get("/docs")
    assert (reply.status_code, "<script" in reply.text) == (200, False)
    for path in http_paths(server):
        assert path in reply.text


def http_paths(server):
    with server.http() as http:
        return http.get("/openapi.json", headers={"Authorization": f"Bearer {KEY}"}).json()["paths"]


def test_a_narrow_window_has_everything_in_it(page):
    page.set_viewport_size({"width": 390, "height": 800})
    for found in (page.get_by_label("Model"), *page.get_by_role("button").all()):
        box = found.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_stop_ends_an_answer_and_frees_its_blocks(page, server):
    page.route("**/v1/chat/completions", without_end)
    ask(page, "the turbine")
    expect(page.locator(".turn.assistant .text")).not_to_be_empty(timeout=PATIENCE_MS)
    page.get_by_role("button", name="Stop").click()
    turn = finished(page, 1)
    expect(turn.locator(".note")).to_have_text(re.compile("stopped$"))
    with server.http() as http:
        for _ in range(10_000):
            text = http.get("/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
            if "penstock_answers_running 0.0" in text:
                break
        assert "penstock_cache_blocks_used 0.0" in text


def without_end(route):
    """Let no end token end an answer: it is as long as it may be."""
    body = route.request.post_data_json | {"ignore_eos": True}
    route.continue_(post_data=body)


def test_without_a_key_the_page_asks_for_one(browser, server):
    with browser.new_page() as page:
        page.goto(server.url)
        expect(page.locator("#status")).to_contain_text("No API key", timeout=PATIENCE_MS)
        page.get_by_label("API key").fill(KEY)
        page.get_by_label("API key").press("Tab")
        expect(page.get_by_label("Model")).to_have_value("tiny", timeout=PATIENCE_MS)


def test_a_mistake_is_shown_and_the_question_kept(page):
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Longest answer, in tokens").fill("99999")
    ask(page, "the penstock")
    turn = finished(page, 1)
    expect(turn.locator(".wrong")).to_contain_text("maximum context length is 16384 tokens")
    expect(page.get_by_label("Message")).to_have_value("the penstock")


def test_the_page_may_load_nothing_from_elsewhere(server):
    with server.http() as http:
        reply = http.get("/")
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert not re.search(r"""(src|href)=["'](https?:)?//""", reply.text)
