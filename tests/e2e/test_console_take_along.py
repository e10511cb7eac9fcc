"""A run's page as one file in Chromium: its heat map and the rows in view, from disk, without a network."""

import json
import re
import shutil
from base64 import b64encode

import numpy as np
import pytest
from playwright.sync_api import expect

from penstock.testing.corpora import write_corpus
from penstock.text.tokenizer import train_tokenizer
from tests.browser import DEVICES, check_is_usable, needs_browser, page_of
from tests.e2e.conftest import console
from tests.in_process import run_cli
from tests.launched import wait_until
from tests.warm import penstock

EVIL = "</script><img src=x onerror=alert(1)>"
NAME = "<img src=x onerror=alert(1)>"
RECIPE = """
compute = "float32"
[run]
dir = "@/run"
steps = 6
[model]
hidden_size = 16
intermediate_size = 16
num_hidden_layers = 1
num_attention_heads = 2
max_position_embeddings = 64
vocab_size = 384
[data]
sequence_length = 48
global_batch_size = 8
num_workers = 0
[data.corpora.web]
path = "@/web"
[checkpoint]
every = 3
"""
IS_DRAWN = """canvas => {
  const { data } = canvas.getContext("2d").getImageData(60, 0, canvas.width - 60, canvas.height - 40);
  return new Set(new Uint32Array(data.buffer)).size > 2;
}"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on hostile text, under a hostile name, with records of three ranks on hosts of such names."""
    folder = tmp_path_factory.mktemp("along")
    tokenizer = train_tokenizer([f"the web {EVIL}"] * 3, vocab_size=300)
    texts = [[*tokenizer.encode(f"the web {EVIL} {n}"), tokenizer.eos_id] for n in range(60)]
    write_corpus(folder / "web", texts, vocab_size=384)
    (folder / "recipe.toml").write_text(RECIPE.replace("@", str(folder)))
    done = penstock("train", folder / "recipe.toml")
    assert done.returncode == 0, done.stderr
    run = folder / "runs" / NAME
    run.parent.mkdir()
    shutil.move(folder / "run", run)
    tokenizer.save(run / "tokenizer.json")
    lines = []
    for step in range(1, 7):
        if step in (1, 4):
            hosts = [f"{EVIL}-{rank}-from-{step}" for rank in range(3)]
            places = {"hosts": hosts, "devices": ["H100", "H100", "H200"], "nics": ["eth0", "eth1", "eth2"]}
            lines.append({"step": step - 1, "ranks": 3, **places})
        lines.append({"step": step, "steps": 1, "own_s": packed(1, 2, step), "blocked_s": packed(2, 1, 1)})
    (run / "ranks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def packed(*values):
    return b64encode(np.array(values, dtype="<f4").tobytes()).decode()


@pytest.fixture
def opened(browser):
    """Return a function that opens an address; the page must not complain; a file's asks for nothing else."""
    pages, complaints, asked = [], [], []

    def open_page(address, device="desktop"):
        is_file = address.startswith("file:")
        page = page_of(browser, device, complaints=complaints, offline=is_file)
        page.on("dialog", lambda dialog: complaints.append(dialog.message))
        if is_file:
            page.on("request", lambda sent: asked.append(sent.url) if sent.url != address else None)
        page.goto(address)
        pages.append(page)
        return page

    yield open_page
    for page in pages:
        page.close()
    assert complaints == []
    assert [url for url in asked if not url.startswith("data:")] == []


def taken(page, out):
    """Take the page of what is in view along; return the file's address."""
    page.get_by_text("Take along").click()
    with page.expect_download() as download:
        page.get_by_role("link", name=re.compile("^Page")).click()
    download.value.save_as(out)
    page.keyboard.press("Escape")
    return out.as_uri()


def open_view(page, name):
    page.locator(".runs .name a").click()
    page.get_by_role("link", name=name, exact=True).click()


@needs_browser
@pytest.mark.parametrize("device", DEVICES)
def test_a_page_taken_along_has_the_heat_map_and_the_rows_in_view(run, opened, device, tmp_path):
    with console(run.parent) as address:
        page = opened(address, device)
        open_view(page, "Rows")
        page.get_by_label("Step", exact=True).fill("4")
        page.get_by_role("button", name="Show its rows").click()
        page.get_by_role("button", name="Rows after").click()
        expect(page.get_by_text("Step 4: rows 4 to 7 of 8")).to_be_visible()
        assert page.url.endswith("/rows?step=4&row=4")
        page.reload()
        second = page.locator("article.card").nth(1)
        second.get_by_role("button", name="Loss of each token").click()
        expect(second).to_contain_text("under the checkpoint of step 3")
        scored = second.locator("pre").first.locator("span").nth(2).get_attribute("title")
        page.reload()
        expect(second).to_contain_text("under the checkpoint of step 3")  # what was computed stays
        file = taken(page, tmp_path / "taken.html")
    alone = opened(file, device)
    canvas, said = alone.locator(".ranks canvas[aria-label]"), alone.locator(".ranks .readout")
    expect(alone.locator(".ranks .toolbar")).to_contain_text("3 ranks \u00d7 6 records")
    assert canvas.evaluate(IS_DRAWN), "an empty canvas has one colour"
    box = canvas.bounding_box()
    canvas.click(position={"x": box["width"] - 5, "y": (box["height"] - 26) * 0.9})
    expect(said).to_have_text(f"rank 2 on {EVIL}-2-from-4, step 6: 6 s")
    details = alone.locator(".ranks .details .figure")
    expect(details).to_have_text(["rank2", f"host{EVIL}-2-from-4", "deviceH200", "niceth2"])
    expect(alone.get_by_role("region", name="Highest ranks").locator("tbody tr").first).to_contain_text(
        f"{EVIL}-2-from-1, {EVIL}-2-from-4"
    )
    for _ in range(3):
        canvas.press("ArrowLeft")
    expect(said).to_have_text(f"rank 2 on {EVIL}-2-from-1, step 3: 3 s")
    pixels = "canvas => canvas.toDataURL()"
    before = canvas.evaluate(pixels)
    alone.emulate_media(color_scheme="light" if DEVICES[device]["color_scheme"] == "dark" else "dark")
    wait_until(lambda: canvas.evaluate(pixels) != before, "its words have the scheme's colour")
    alone.get_by_label("Metric").select_option("blocked_s")
    expect(said).to_have_text(f"rank 2 on {EVIL}-2-from-1, step 3: 1 s")
    expect(alone.get_by_role("heading", name="Highest blocked time")).to_be_visible()
    rows = alone.locator("article.card")
    expect(alone.get_by_text("Step 4: rows 4 to 7 of 8")).to_be_visible()
    expect(rows).to_have_count(4)
    expect(rows.first.locator("pre").first).to_contain_text(EVIL)
    expect(rows.nth(0)).not_to_contain_text("under the checkpoint")
    expect(rows.nth(1)).to_contain_text("under the checkpoint of step 3")
    token = rows.nth(1).locator("pre").first.locator("span").nth(2)
    token.click()
    expect(rows.nth(1).locator("[role=status]").first).to_contain_text(scored)
    assert alone.locator("img").count() == 0
    check_is_usable(alone)


@needs_browser
def test_a_page_taken_along_from_ranks_shows_their_metric_and_says_how_to_get_rows(run, opened, tmp_path):
    with console(run.parent) as address:
        page = opened(address)
        open_view(page, "Ranks")
        page.get_by_label("Metric").select_option("blocked_s")
        expect(page.get_by_role("heading", name="Highest blocked time")).to_be_visible()
        file = taken(page, tmp_path / "taken.html")
    alone = opened(file)
    expect(alone.get_by_label("Metric")).to_have_value("blocked_s")
    expect(alone.get_by_label("Metric").locator("option")).to_have_count(2)
    section = alone.locator("section", has=alone.get_by_role("heading", name="Rows of a step"))
    expect(section).to_contain_text("is not in this file")
    expect(section.locator("code")).to_have_text("penstock report RUN --rows STEP")
    check_is_usable(alone)


def test_a_report_has_the_rows_that_it_is_asked_for(run, tmp_path):
    out = tmp_path / "report.html"
    done = run_cli("report", run, "--rows", 5, "--out", out)
    assert done.returncode == 0, done.stderr
    text = out.read_text()
    rows = json.loads(re.search(r'id="rows-data">(.*?)</script>', text)[1])
    assert (rows["step"], rows["num_rows"], len(rows["rows"])) == (5, 8, 4)
    assert EVIL in "".join(piece for piece, _, _ in rows["rows"][0]["documents"][0]["pieces"])
    assert EVIL not in text
    ranks = json.loads(re.search(r'id="ranks-data">(.*?)</script>', text)[1])
    assert ranks["shown"] == "own_s"
    assert [*ranks["tables"]] == ["own_s", "blocked_s"]
    refused = run_cli("report", run, "--rows", 99, "--out", tmp_path / "other.html")
    assert (refused.returncode, "steps 1 to 6" in refused.stderr) == (2, True)
    assert not (tmp_path / "other.html").exists()


def test_a_report_of_rows_without_their_corpus_says_what_to_do(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    recipe = json.loads((copy / "config.json").read_text())
    recipe["data"]["corpora"]["web"]["path"] = str(tmp_path / "elsewhere")
    (copy / "config.json").write_text(json.dumps(recipe))
    refused = run_cli("report", copy, "--rows", 2)
    said = " ".join(refused.stderr.split())
    assert (refused.returncode, (copy / "report.html").exists()) == (1, False)
    assert f"The rows of step 2 cannot be read: Corpus {tmp_path}/elsewhere does not exist" in said
    assert "Or leave out --rows" in said
