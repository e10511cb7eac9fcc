"""The console in Chromium, on a phone and a desktop: views of real runs, and a mixture changed by hand."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from contextlib import ExitStack, suppress
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import expect

from penstock.console.access import ConsoleAccess
from penstock.console.app import build_app
from penstock.console.state import ConsoleState
from penstock.obs.sinks.jsonl import read_records
from penstock.train.control.requests import ControlReply, ControlRequest, answer, read_request, submit
from tests.browser import DEVICES, PATIENCE_MS, Pages, check_is_usable, leave, listening, needs_browser
from tests.console_workers import fork_workers, served
from tests.e2e.conftest import console
from tests.in_process import run_cli
from tests.launched import records_of, slowed, wait_until
from tests.warm import Command, penstock

pytestmark = needs_browser

RECIPE = """
compute = "float32"
[run]
dir = "@/runs/first"
steps = 12
log_samples = true
[model]
hidden_size = 16
intermediate_size = 16
num_hidden_layers = 1
num_attention_heads = 2
max_position_embeddings = 64
[data]
sequence_length = 32
global_batch_size = 4
num_workers = 0
holdout = 0.2
[data.corpora.web]
path = "@/web"
weight = 0.7
[data.corpora.code]
path = "@/code"
weight = 0.3
[validate]
every = 4
samples = 4
[samples]
every = 6
prompts = ["the penstock"]
max_tokens = 8
"""
MODEL_MS = 4 * PATIENCE_MS
"""For a checkpoint's process, an interpreter that imports torch."""
VIEWS = {
    "curves": "#loss canvas",
    "summary": "text=median tokens/s",
    "mixture": "text=by the end",
    "ranks": ".view > *",
    "rows": "article.card pre",
    "answers": "text=the penstock",
    "chat": "text=The first message opens",
    "recipe": "text=data.sequence_length",
}
"""View of a run -> what it shows."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two corpora, a run of 12 steps on one rank and 12 more on two, and a copy under a hostile name."""
    folder = tmp_path_factory.mktemp("console")
    tokenizer = ["--train-tokenizer", 300]
    for name in ("web", "code"):
        (folder / "text" / name).mkdir(parents=True)
        lines = [
            json.dumps({"text": f"the {name} feeds the turbine and the town {n} " * 4}) for n in range(120)
        ]
        (folder / "text" / name / "t.jsonl").write_text("\n".join(lines))
        done = penstock("data", "prepare", folder / "text" / name, *tokenizer, "--out", folder / name)
        assert done.returncode == 0, done.stderr
        tokenizer = ["--tokenizer", folder / "web" / "tokenizer.json"]
    (folder / "recipe.toml").write_text(RECIPE.replace("@", str(folder)))
    for words in ((), ("--set", "run.steps=24", "--processes", 2)):
        done = penstock("train", folder / "recipe.toml", *words)
        assert done.returncode == 0, done.stderr
    other = folder / "runs" / "<img src=x onerror=alert(1)>"
    shutil.copytree(folder / "runs" / "first", other)
    config = json.loads((other / "config.json").read_text())
    config["optim"]["learning_rate"] = 0.123
    (other / "config.json").write_text(json.dumps(config))
    records = read_records(other / "metrics.jsonl")
    kept = [record for record in records if record.get("step", 0) <= 20]
    kept.append({"event": "mixture", "step": 20, "weights": {"web": 0.25}, "reason": "by hand"})
    (other / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in kept))
    return folder


@pytest.fixture(scope="module")
def address(folder):
    with console(folder / "runs") as found:
        yield found


@pytest.fixture(scope="module")
def pages(browser):
    """Pages of each device."""
    return {device: Pages(browser, device) for device in DEVICES}


@pytest.fixture
def opened(pages):
    """Return a function that opens an address; the page must not complain, nor ask anybody else."""
    complaints, asked = [], set()
    listeners = {
        "console": lambda said: complaints.append(said.text) if is_complaint(said) else None,
        "pageerror": lambda error: complaints.append(error.stack or str(error)),
        "request": lambda sent: asked.add(urlsplit(sent.url).netloc) if "://" in sent.url else None,
    }
    with ExitStack() as stack:

        def open_page(address, device="desktop"):
            page = pages[device].take()
            stack.enter_context(listening(page, **listeners))
            page.goto(address)
            return page

        yield open_page
    for each in pages.values():
        each.give_back()
    assert complaints == []
    assert len(asked - {""}) <= 1, asked  # a file has no host


def is_complaint(said):
    """Return whether the page failed; a refused request is a sentence on the page (400, 401, 404)."""
    return said.type == "error" and not re.search("status of 40[014]", said.text)


def open_run(page, name="first"):
    page.get_by_role("link", name=name, exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text(name)


@pytest.mark.parametrize("device", DEVICES)
def test_the_table_sorts_filters_searches_and_shows_names_as_text(address, opened, device):
    page = opened(address, device)
    names = page.locator(".runs .name a")
    expect(names).to_have_count(2)
    assert "<img src=x onerror=alert(1)>" in names.all_inner_texts()
    check_is_usable(page)
    page.get_by_role("searchbox").fill("0.123")
    expect(names).to_have_count(1)
    page.get_by_role("searchbox").fill("no such word")
    expect(page.get_by_text("No run matches.")).to_be_visible()
    page.get_by_role("searchbox").fill("")
    expect(names).to_have_count(2)
    if device == "desktop":
        turned = page.get_by_role("button", name="run", exact=True)
        turned.click()
    else:  # whose table has no header
        turned = page.get_by_role("button", name="Descending")
        page.get_by_label("Sort", exact=True).select_option("name")
        expect(turned).to_have_attribute("aria-pressed", "false")
    assert "sort=name" in page.url
    first, last = names.all_inner_texts()
    turned.click()
    expect(names.first).to_have_text(last)
    expect(names.last).to_have_text(first)
    check_is_usable(page)


@pytest.mark.parametrize("device", DEVICES)
def test_every_view_of_a_run_opens_is_accessible_and_fits(address, opened, folder, device):
    page = opened(address, device)
    open_run(page)
    for view, shown in VIEWS.items():
        page.locator(f".tabs a[href$='/{view}']").click()
        expect(page.locator(shown).first).to_be_visible()
        page.get_by_text("Take along").click()
        command = page.locator(".menu[open]").get_by_label("One HTML file")
        expect(command).to_have_value(f"penstock report {folder / 'runs' / 'first'}")
        page.keyboard.press("Escape")
        check_is_usable(page)
        page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
        expect(page.locator("header.bar")).to_be_in_viewport(ratio=1)


def test_curves_read_out_zoom_and_mark_the_rescale(address, opened, folder):
    page = opened(address)
    open_run(page)
    plot = page.locator("#loss .plot")
    expect(plot).to_have_attribute("aria-label", re.compile("training from .* validation from"))
    plot.focus()
    page.keyboard.press("End")
    loss = records_of(folder / "runs" / "first")[-1]["loss"]
    said = page.locator("#loss [role=status]")
    expect(said).to_have_text(re.compile(rf"step 24: training {float(f'{loss:.4g}'):g},"))
    page.keyboard.press("+")
    whole = page.locator("#loss").get_by_role("button", name="whole run")
    expect(whole).to_be_visible()
    expect(page.locator("#speed").get_by_role("button", name="whole run")).to_be_visible()  # one axis for all
    whole.click()
    expect(whole).to_be_hidden()
    expect(page.get_by_role("region", name="Events")).to_contain_text("1 -> 2 ranks")
    for axis in ("Tokens", "Time"):
        page.get_by_role("button", name=axis).click()
        expect(plot).to_have_attribute("aria-label", re.compile(f"by {axis.lower()}"))


def test_a_finger_zooms_a_curve_around_the_point_that_it_touched(address, opened):
    page = opened(address, "phone")
    open_run(page)
    over = page.locator("#loss .u-over")
    box = over.bounding_box()
    over.tap(position={"x": box["width"] * 0.25, "y": 40})
    for _ in range(2):
        page.locator("#loss").get_by_role("button", name="zoom in").tap()
    expect(page).to_have_url(re.compile("from=.*&to="))
    shown = {name: float(value) for name, value in re.findall("(from|to)=([0-9.]+)", page.url)}
    assert 3 < shown["from"] < 7 < shown["to"] < 10, "a quarter of the way from step 1 to 24 is 6.75"
    for _ in range(3):  # around the same place: from step 1 on, the rest is on the right
        page.locator("#loss").get_by_role("button", name="zoom out").tap()
    expect(page.locator("#loss").get_by_role("button", name="whole run")).to_be_hidden()


@pytest.mark.parametrize("device", DEVICES)
def test_a_point_of_a_curve_leads_to_its_text_in_two_clicks_and_tokens_are_coloured(
    address, opened, device, tmp_path
):
    page = opened(address, device)
    open_run(page)
    plot = page.locator("#loss .u-over")
    expect(plot).to_be_visible()
    plot.click(position={"x": 120, "y": 40})
    check_is_usable(page)
    page.locator("#loss").get_by_role("link", name="what it trained on").click()
    step = page.get_by_label("Step", exact=True).input_value()
    assert page.url.endswith(f"/rows?step={step}")
    command = page.locator("code", has_text="data replay").inner_text()
    replayed = penstock(*shlex.split(command)[1:], cwd=tmp_path)
    assert replayed.returncode == 0, replayed.stderr
    assert (tmp_path / f"step-{step}" / f"step-{int(step):08d}.npz").is_file()
    rows = page.locator("article.card")
    expect(rows).to_have_count(4)
    expect(rows.first.locator("pre").first).to_contain_text("feeds the turbine")
    rows.first.get_by_role("button", name="Loss of each token").click()
    expect(rows.first).to_contain_text("under the checkpoint of step", timeout=MODEL_MS)
    token = rows.first.locator("pre span[title^=loss]").first
    assert "rgba(216, 72, 92" in token.evaluate("one => getComputedStyle(one).backgroundColor")
    said = rows.first.locator(".document [role=status]").first
    token.click()
    expect(said).to_have_text(f"{json.dumps(token.inner_text())}: {token.get_attribute('title')}")
    page.keyboard.press("ArrowRight")
    after = token.locator("xpath=following-sibling::span[1]")
    expect(said).to_have_text(f"{json.dumps(after.inner_text())}: {after.get_attribute('title')}")
    check_is_usable(page)
    page.get_by_label("Step", exact=True).fill("25")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("The run has steps 1 to 24")


def check_on_every_device(page):
    """Check what is shown in the size and colours of each device: asking models again takes a minute."""
    for look in DEVICES.values():
        page.set_viewport_size(look["viewport"])
        page.emulate_media(color_scheme=look["color_scheme"])
        check_is_usable(page)


def test_a_checkpoint_is_asked_in_a_chat_and_several_side_by_side(folder, opened, monkeypatch):
    fork_workers(monkeypatch)  # the losses of tokens are asked of processes that the console starts
    state = ConsoleState([folder / "runs"], ConsoleAccess())
    with served(state, build_app(state)) as address:
        page = opened(address)
        open_run(page)
        page.get_by_role("link", name="Chat").click()
        page.get_by_label("Checkpoint").select_option("24")
        page.get_by_label("Tokens").fill("9")
        page.get_by_label("Message").fill("the web")
        page.keyboard.press("Enter")
        turns = page.locator(".turn")
        expect(turns).to_have_count(2)
        expect(page.get_by_role("button", name="Send")).to_be_enabled(timeout=MODEL_MS)
        expect(page.get_by_role("log")).to_contain_text("the web")
        expect(turns.last.locator(".text")).not_to_have_text("")
        said = turns.last.locator(".note")
        expect(said).to_contain_text(re.compile(r"^[1-9] tokens?"))  # it may end before
        check_on_every_device(page)
        page.get_by_role("button", name="Forget it").click()
        expect(turns).to_have_count(0)
        page.get_by_role("link", name="Answers").click()
        page.get_by_label("Prompts, one a line").fill("the web\nthe town")
        page.get_by_role("button", name="Ask them").click()
        expect(page.locator(".document .answer")).to_have_count(4, timeout=2 * MODEL_MS)
        check_on_every_device(page)
        leave(page)


def test_two_runs_are_compared_at_the_same_step_with_the_difference_of_their_recipes(address, opened):
    page = opened(address)
    boxes = page.get_by_role("checkbox")
    expect(boxes.nth(1)).to_be_visible()
    for box in boxes.all():
        box.check()
    page.get_by_role("link", name="Compare 2 runs").click()
    expect(page.get_by_role("region", name="All of them at step 20")).to_contain_text("Loss")
    differences = page.get_by_role("region", name="Where the recipes differ")
    expect(differences).to_contain_text("optim.learning_rate")
    expect(differences).to_contain_text("0.123")
    expect(differences).to_contain_text("from step 20 on: web 0.25: by hand")
    expect(page.locator("#loss canvas")).to_be_visible()
    page.get_by_role("button", name="Common range").click()
    expect(page).to_have_url(re.compile("from=1&to=20"))
    expect(page.locator("#loss").get_by_role("button", name="whole run")).to_be_visible()
    check_is_usable(page)
    page.get_by_role("button", name="Same tokens").click()
    expect(page.get_by_role("region", name="All of them at tokens")).to_be_visible()
    page.get_by_role("button", name="Leave out first").click()
    added = page.get_by_label("Run to add")
    added.select_option("first")
    expect(page.get_by_role("region", name="All of them at tokens")).to_have_count(0)
    page.get_by_role("button", name="Add").click()
    expect(page.get_by_role("region", name="All of them at tokens")).to_be_visible()


def test_a_recipe_shows_all_keys_or_those_that_differ_from_the_defaults(address, opened):
    page = opened(address)
    open_run(page)
    page.get_by_role("link", name="Recipe", exact=True).click()
    recipe = page.get_by_role("region", name="Recipe")
    for key in ("guard.max_skips", "data.corpora.web.epochs"):
        expect(recipe).to_contain_text(key)
    page.get_by_label("Only what differs from the defaults").check()
    for key in ("guard.max_skips", "data.corpora.web.epochs"):
        expect(recipe).not_to_contain_text(key)
    for key in ("data.sequence_length", "data.corpora.web.weight", "compute"):
        expect(recipe).to_contain_text(key)


def test_a_link_holds_the_axis_the_range_and_the_charts(address, opened):
    page = opened(address)
    open_run(page)
    page.locator(".toolbar summary", has_text="Charts").click()
    page.get_by_role("checkbox", name="Gradient norm").uncheck()
    expect(page.locator("#grad-norm")).to_have_count(0)
    page.get_by_role("button", name="Tokens", exact=True).click()
    plot = page.locator("#loss .plot")
    expect(plot).to_have_attribute("aria-label", re.compile("by tokens"))
    plot.focus()
    page.keyboard.press("End")
    page.keyboard.press("+")
    expect(page).to_have_url(re.compile("x=tokens&from=.*&charts=loss"))
    other = opened(page.url)
    expect(other.locator("#loss").get_by_role("button", name="whole run")).to_be_visible()
    expect(other.locator("#loss .plot")).to_have_attribute("aria-label", re.compile("by tokens"))
    expect(other.locator("#grad-norm")).to_have_count(0)
    expect(other).to_have_url(page.url)


def test_a_comparison_is_a_link_with_its_axis_and_range(address, opened, tmp_path):
    page = opened(address)
    boxes = page.get_by_role("checkbox")
    expect(boxes.nth(1)).to_be_visible()
    for box in boxes.all():
        box.check()
    page.get_by_role("link", name="Compare 2 runs").click()
    page.get_by_role("button", name="Same tokens").click()
    plot = page.locator("#loss .plot")
    expect(plot).to_have_attribute("aria-label", re.compile("by tokens"))
    plot.focus()
    page.keyboard.press("End")
    page.keyboard.press("+")
    expect(page).to_have_url(re.compile("compare.runs=.*x=tokens&from=.*&to="))
    other = opened(page.url)
    for key in ("loss", "tokens_per_s"):
        expect(other.locator(f"#{key}").get_by_role("button", name="whole run")).to_be_visible()
    other.get_by_text("Take along").click()
    command = other.get_by_label("Metrics of every step").input_value()
    written = run_cli(*shlex.split(command)[1:], cwd=tmp_path)
    assert (written.returncode, (tmp_path / "compared.csv").is_file()) == (0, True), written.stderr


def test_without_control_the_console_only_reads(address, opened):
    page = opened(address)
    open_run(page)
    page.get_by_role("link", name="Mixture and control").click()
    page.get_by_label("Share of code, percent").fill("50")
    page.keyboard.press("Tab")
    expect(page.get_by_text("--weights code=0.5")).to_be_visible()
    expect(page.get_by_role("button", name="Apply")).to_be_disabled()
    expect(page.get_by_text("Start it with --control")).to_be_visible()


@pytest.fixture(scope="module")
def ended(folder):
    """A run whose job has ended, after a request took the share of a corpus away."""
    run = folder / "ended" / "run"
    shutil.copytree(folder / "runs" / "first", run)
    config = json.loads((run / "config.json").read_text())
    config["run"]["steps"] = 100
    (run / "config.json").write_text(json.dumps(config))
    number = submit(run, ControlRequest(weights={"code": 0.0}))
    weights = {"web": 1.0, "code": 0.0}
    answer(run, ControlReply(number=number, taken_up=True, said="", step=24, holds_from=24, weights=weights))
    return run


@pytest.fixture
def control_page(ended, pages):
    """The page of that run that sends requests."""
    with console(ended.parent, "--control") as address:
        page = pages["desktop"].take()
        page.goto(address)
        open_run(page, "run")
        page.get_by_role("link", name="Mixture and control").click()
        yield page
        pages["desktop"].give_back()


def test_a_corpus_without_a_share_keeps_its_passes_to_the_end(control_page):
    of_code = control_page.locator(".corpus", has_text="code").locator("dd")
    expect(of_code.nth(0)).to_have_text(re.compile("[1-9]"))
    expect(of_code.nth(1)).to_have_text(f"{of_code.nth(0).inner_text()} passes")


def test_a_corpus_without_a_share_gets_its_share_again(control_page, ended):
    page = control_page
    page.get_by_role("button", name="Set the sliders as before it").click()
    expect(page.get_by_label("Share of code, percent")).to_have_value("30.0")
    expect(page.get_by_text("--weights web=0.7,code=0.3")).to_be_visible()
    page.get_by_role("button", name="Apply").click()
    page.get_by_role("dialog", name="run: Change the mixture?").get_by_role("button", name="Yes").click()
    expect(page.get_by_text(re.compile("Request .* is sent. No job runs"))).to_be_visible()
    newest = max(int(path.stem[-6:]) for path in (ended / "control").glob("request-*.json"))
    assert read_request(ended, newest).weights == {"web": pytest.approx(0.7), "code": pytest.approx(0.3)}


def test_a_question_ends_with_the_view_that_asked_it(control_page):
    page, sent = control_page, []
    with listening(page, request=lambda request: sent.append(request.method)):
        page.get_by_role("button", name="Stop").click()
        expect(page.get_by_role("dialog")).to_have_accessible_name("run: Stop after saving?")
        page.go_back()
        expect(page.locator("#loss canvas")).to_be_visible()
        expect(page.get_by_role("dialog")).to_have_count(0)
    assert "POST" not in sent


def test_a_request_without_a_reply_is_told_to_have_been_sent_perhaps(control_page):
    page, form = control_page, control_page.locator("form.action", has_text="Batch size")

    def lose_the_reply(route):
        route.fetch()
        route.abort()

    form.get_by_role("spinbutton").fill("6")
    form.get_by_role("button").click()
    page.route("**/requests", lose_the_reply)
    page.get_by_role("dialog").get_by_role("button", name="Yes").click()
    expect(form.get_by_role("status")).to_contain_text("The request may have been sent")


def test_a_slider_moved_on_a_phone_reaches_all_ranks_and_both_windows_follow_a_killed_run(folder, opened):
    run = folder / "live" / "run"
    words = ("--set", f"run.dir={run}", "--set", "samples.every=0", "--set", "checkpoint.every=20")
    words = (*words, "--set", "data.global_batch_size=6", "--set", "run.device_hour_price=3600")
    train = ["train", folder / "recipe.toml", *words]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    first = Command(*train, "--set", "run.steps=100000", "--processes", 2, start_new_session=True, **quiet)
    try:
        wait_until(lambda: len(records_of(run)) > 5, "the run has steps", alive=lambda: first.poll() is None)
        with ExitStack() as until_killed, console(folder / "live", "--control") as address:
            until_killed.enter_context(slowed(first.pid))
            page, phone = (opened(address, device) for device in ("desktop", "phone"))
            step, on_phone = (
                one.locator(".figure", has_text="step of").locator("dd") for one in (page, phone)
            )
            for one, shown in ((page, step), (phone, on_phone)):
                open_run(one, "run")
                before = shown.inner_text()
                expect(shown).not_to_have_text(before)  # nobody reloads the page
                one.get_by_role("link", name="Mixture and control").click()
            share, moved = (one.get_by_label("Share of code, percent") for one in (page, phone))
            expect(share).to_have_value("30.0")
            phone.get_by_role("slider", name=re.compile("code")).tap(position={"x": 1, "y": 8})
            expect(moved).to_have_value("0.0")
            phone.get_by_label("Reason").fill("more code")
            phone.get_by_role("button", name="Apply").tap()
            phone.get_by_role("dialog").get_by_role("button", name="Yes, send it").tap()
            expect(phone.get_by_text(re.compile("All ranks agreed: the change applies"))).to_be_visible()
            expect(moved).to_have_value("0.0")
            expect(share).to_have_value("0.0")  # the other window follows
            check_is_usable(phone)
            weight = {"web": 1, "code": 0}
            wait_until(lambda: records_of(run)[-1]["corpus_weights"] == weight, "the metrics show the shares")
            phone.get_by_role("button", name="Set the sliders as they were").tap()
            expect(moved).to_have_value("30.0")
            expect(phone.get_by_role("button", name="Apply")).to_be_focused()
            phone.keyboard.press("Enter")
            phone.get_by_role("dialog").get_by_role("button", name="Yes, send it").tap()
            weight = {"web": pytest.approx(0.7), "code": pytest.approx(0.3)}
            wait_until(lambda: records_of(run)[-1]["corpus_weights"] == weight, "they are as they were")
            expect(share).to_have_value("30.0")
            page.reload()
            expect(share).to_have_value("30.0")
            page.get_by_role("button", name="Set the sliders as before it").first.click()
            expect(share).to_have_value("0.0")
            tokens = page.locator(".corpus", has_text="code").locator("dd").nth(2)
            before = tokens.inner_text()
            expect(tokens).not_to_have_text(before)
            expect(share).to_have_value("0.0")
            for one in (page, phone):
                expect(one.get_by_role("region", name="Requests of this run")).to_contain_text("more code")
                one.get_by_role("link", name="Curves").click()
                expect(one.get_by_role("region", name="Events")).to_contain_text("more code")
                one.get_by_role("link", name="Ranks", exact=True).click()
                one.get_by_role("img").click()
                for shown in ("host", "device", "nic"):
                    expect(one.locator(".details dt", has_text=shown)).to_be_visible()
                one.get_by_role("link", name="Curves").click()
            wait_until(lambda: any((run / "checkpoints").glob("step-*")), "it can be resumed")
            until_killed.close()
            os.killpg(first.pid, signal.SIGKILL)
            first.wait(120)
            killed = records_of(run)[-1]
            done = killed["step"]
            second = penstock(*train, "--set", f"run.steps={done + 10}", "--processes", 3)
            assert second.returncode == 0, second.stderr
            for one, shown in ((page, step), (phone, on_phone)):
                expect(one.get_by_role("region", name="Events")).to_contain_text("2 -> 3 ranks")
                expect(one.locator(".run-head .pill")).to_have_text("finished")
                expect(shown).to_have_text(f"{done + 10:,}")
                expect(one.locator(".figure", has_text="cost").locator("dd")).not_to_have_text("\u2013")
                one.get_by_role("button", name="Money").click()
                expect(one.locator("#loss .plot")).to_have_attribute("aria-label", re.compile("by money"))
                check_is_usable(one)
            assert records_of(run)[-1]["device_hours"] > killed["device_hours"], "lost steps were paid for"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(first.pid, signal.SIGKILL)
        first.wait()


def test_each_form_sends_its_request_and_the_reply_stands_beside_it(folder, opened):
    run = folder / "forms" / "run"
    settings = (
        *(f"run.dir={run}", "run.steps=1000000", "samples.every=0", "validate.every=0"),
        *("parallel.shard=1", "parallel.replicate=-1", "outer.every=4", "outer.min_islands=1"),
        "checkpoint.every=4",
    )
    train = ["train", folder / "recipe.toml", "--processes", 2]
    train += [word for setting in settings for word in ("--set", setting)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    job = Command(*train, start_new_session=True, **quiet)
    try:
        wait_until(lambda: len(records_of(run)) > 5, "the run has steps", alive=lambda: job.poll() is None)
        with ExitStack() as until_stopped, console(folder / "forms", "--control") as address:
            until_stopped.enter_context(slowed(job.pid))
            page = opened(address)
            open_run(page, "run")
            page.get_by_role("link", name="Mixture and control").click()

            def form(title):
                return page.locator("form.action", has=page.get_by_role("heading", name=title, exact=True))

            def send(title, *numbers, then="Yes, send it"):
                for field, number in zip(form(title).get_by_role("spinbutton").all(), numbers, strict=True):
                    field.fill(str(number))
                form(title).get_by_role("button").click()
                page.get_by_role("dialog").get_by_role("button", name=then).click()
                expect(page.get_by_role("dialog")).to_have_count(0)
                return form(title).get_by_role("status")

            listed = page.get_by_role("region", name="Requests of this run")
            send("Stop after saving", then="Cancel")
            expect(page.get_by_text("None yet.")).to_be_visible()
            said = send("Save a checkpoint now")
            expect(said).to_contain_text("a checkpoint is saved after step")
            expect(said).to_be_in_viewport()
            expect(send("Batch size", 8)).to_contain_text("8 rows a step, 4 before")
            expect(send("Skip steps", 500_000, 500_009)).to_contain_text(
                "the samples of steps 500,000 to 500,009 are skipped"
            )
            expect(send("Islands", 1)).to_contain_text("continues with 1 island")
            expect(page.locator(".run-head")).to_contain_text("1 rank")
            expect(page.locator(".run-head .pill")).to_have_text("training")
            expect(send("Stop after saving")).to_contain_text("and the job ends")
            until_stopped.close()
            assert job.wait(120) == 75
            said = send("Batch size", 4)
            expect(said).to_contain_text("No job runs: the request applies when the run is started again")
            expect(listed.locator("tbody tr")).to_have_count(6)
            expect(listed.locator("tbody tr").first).to_contain_text("waiting for the next start")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()


@pytest.mark.parametrize("width", [320, 390])
def test_nothing_of_the_table_and_the_crumbs_is_cut_off_on_a_narrow_phone(opened, tmp_path, width):
    run = tmp_path / "a-name-that-is-longer-than-a-phone-is-wide-by-far"
    run.mkdir()
    record = {"step": 8152, "loss": 8.123, "tokens_per_s": 123_456.0}
    (run / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    (run / "config.json").write_text('{"run": {"steps": 200000}}')
    is_cut = "one => one.scrollWidth > one.clientWidth"
    with console(tmp_path) as address:
        page = opened(address, "phone")
        page.set_viewport_size({"width": width, "height": 700})
        expect(page.locator(".space .row .loss")).to_have_text("8.123")
        for column in ("step", "loss", "tokens_per_s", "updated", "state"):
            assert not page.locator(f".space .row .{column}").evaluate(is_cut), column
        check_is_usable(page)
        open_run(page, run.name)
        assert not page.locator("#crumbs a").evaluate(is_cut)
        check_is_usable(page)
        leave(page)


def test_a_mixture_and_a_batch_size_are_changed_on_a_phone(folder, opened):
    run = folder / "phone" / "run"
    shutil.copytree(folder / "runs" / "first", run)
    config = json.loads((run / "config.json").read_text())
    config["run"]["steps"] = 48  # else it has no steps left to change
    (run / "config.json").write_text(json.dumps(config))
    with console(folder / "phone", "--control") as address:
        page = opened(address, "phone")
        open_run(page, "run")
        page.get_by_role("link", name="Mixture and control").tap()
        slider = page.get_by_role("slider", name=re.compile("code"))
        box = slider.bounding_box()
        slider.tap(position={"x": box["width"] / 2, "y": box["height"] / 2})
        share = page.get_by_label("Share of code, percent")
        expect(share).to_have_value("50.0")
        page.get_by_role("button", name="Apply").tap()
        check_is_usable(page)
        page.get_by_role("dialog").get_by_role("button", name="Yes, send it").tap()
        expect(page.locator(".said-now").first).to_contain_text("No job runs")
        form = page.locator("form.action", has_text="Batch size")
        form.get_by_role("spinbutton").fill("8")
        form.get_by_role("button").tap()
        page.get_by_role("dialog").get_by_role("button", name="Yes, send it").tap()
        expect(form.get_by_role("status")).to_contain_text("No job runs")
        expect(page.get_by_role("region", name="Requests of this run").locator("tbody tr")).to_have_count(2)
        check_is_usable(page)
        share.fill("100")
        share.press("Tab")
        expect(share).to_have_value("100.0")
        assert not share.evaluate("one => one.scrollWidth > one.clientWidth"), "its longest number is cut off"
        leave(page)


def test_a_reader_signs_in_with_a_key_and_sees_the_view_of_the_link(folder, opened, tmp_path):
    (tmp_path / "keys").write_text("anna a-key-of-some-length\n")
    with console(folder / "runs", "--key-file", tmp_path / "keys") as address:
        page = opened(f"{address}#/?sort=name")
        page.get_by_label("Key").fill("another-key-of-a-length")
        page.get_by_role("button", name="Open").click()
        expect(page.get_by_role("alert")).to_have_text("This console does not know that key.")
        page.get_by_label("Key").fill("a-key-of-some-length")
        page.get_by_role("button", name="Open").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Runs")
        assert page.url.endswith("#/?sort=name")
        leave(page)


def test_a_link_to_a_group_that_is_not_there_shows_the_table_and_other_views_open(address, opened):
    page = opened(f"{address}#/?group=toString")
    expect(page.locator(".runs .name a")).to_have_count(2)
    page.evaluate("location.hash = '#/run/%'")
    expect(page.get_by_role("alert")).to_be_visible()
    page.wait_for_timeout(1500)  # the table of before would write its own address again
    assert page.evaluate("location.hash") == "#/run/%"
    page.get_by_role("link", name="Back to Runs").click()
    expect(page.locator(".runs .name a")).to_have_count(2)
