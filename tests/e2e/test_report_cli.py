"""`penstock report` as a user runs it: on a rescaled run, opened in a browser, and on wrong input."""

import csv
import json
import re
import shutil
from contextlib import contextmanager

import numpy as np
import pyarrow.parquet as parquet
import pytest
from playwright.sync_api import expect

from penstock.cli import main as command_line
from penstock.obs.sinks.jsonl import read_records
from penstock.testing.corpora import write_corpus
from tests.browser import DEVICES, Pages, check_is_usable, listening, needs_browser
from tests.e2e.conftest import console
from tests.in_process import run_cli
from tests.unit.obs.html_elements import inlined
from tests.warm import penstock

VIEWS = {
    "summary": "text=median tokens/s",
    "ranks": "text=Highest own step time",  # a heading may still be that of the view before
    "answers": "text=has no sample prompts",
    "recipe": "text=data.sequence_length",
}
"""View of a run -> what it shows; the rows of a report are in it only if a step is named."""
IS_DRAWN = """canvas => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return new Set(new Uint32Array(data.buffer)).size > 2;
}"""
RECIPE = """
compute = "float32"
[run]
dir = "@/run"
steps = 12
[model]
hidden_size = 16
intermediate_size = 16
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 1
[data]
sequence_length = 32
global_batch_size = 4
num_workers = 0
holdout = 0.2
[data.corpora.a]
path = "@/a"
[validate]
every = 4
samples = 4
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of twelve steps on one process and twelve more on two."""
    folder = tmp_path_factory.mktemp("report")
    random = np.random.default_rng(0)
    documents = [random.integers(1, 60, size=40).tolist() for _ in range(200)]
    write_corpus(folder / "a", documents, vocab_size=64)
    (folder / "recipe.toml").write_text(RECIPE.replace("@", str(folder)))
    for words in ((), ("--set", "run.steps=24", "--processes", 2)):
        done = penstock("train", folder / "recipe.toml", *words)
        assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.fixture(scope="module")
def page(run):
    done = run_cli("report", run)
    assert (done.returncode, done.stdout) == (0, f"{run / 'report.html'}\n"), done.stderr
    assert done.stderr == ""
    return run / "report.html"


@pytest.fixture(scope="module")
def pages(browser):
    """Pages of each device."""
    return {device: Pages(browser, device) for device in DEVICES}


@contextmanager
def opened(pages, file):
    """Yield a page of these; it must not complain, nor ask for anything but itself."""
    shown, complaints, asked = pages.take(), [], []
    listeners = {
        "console": lambda said: complaints.append(said.text) if said.type == "error" else None,
        "pageerror": lambda error: complaints.append(error.stack or str(error)),
        "request": lambda sent: asked.append(sent.url),
    }
    with listening(shown, **listeners):
        shown.goto(file.as_uri())
        yield shown
    pages.give_back()
    assert complaints == []
    assert {url for url in asked if not url.startswith("data:")} == {file.as_uri()}


def shown_curves(page):
    """Return the description of each drawn chart, which has the names and values of its curves, by id."""
    expect(page.locator("#loss canvas")).to_be_visible()
    return {
        figure.get_attribute("id"): figure.locator(".plot").get_attribute("aria-label")
        for figure in page.locator("figure.chart").all()
    }


def check_alike(report, console):
    """Check that two texts differ in their numbers only, and little: a report has seven digits of each."""
    number = r"\d+(?:\.\d+)?"
    assert re.sub(number, "#", report) == re.sub(number, "#", console)
    (own, its) = ([float(one) for one in re.findall(number, text)] for text in (report, console))
    assert own == pytest.approx(its, rel=2e-3)


def shown_text(page, view, shown):
    """Return the text of a view of the run."""
    page.locator(f".tabs a[href$='/{view}']").click()
    expect(page.locator(shown).first).to_be_visible()
    return page.locator(".page > .view").inner_text()


@needs_browser
@pytest.mark.parametrize("device", DEVICES)
def test_a_browser_draws_every_view_without_complaint_or_request(page, pages, device):
    with opened(pages[device], page) as shown:
        shown_curves(shown)
        for canvas in shown.locator("figure.chart canvas").all():
            assert canvas.evaluate(IS_DRAWN), "an empty canvas has one colour"
        check_is_usable(shown)
        for view, what in VIEWS.items():
            shown_text(shown, view, what)
            check_is_usable(shown)


@needs_browser
def test_a_report_has_the_charts_tables_and_numbers_of_the_console(run, page, pages):
    with console(run.parent) as address, opened(pages["desktop"], page) as shown:
        live = pages["desktop"].take()
        live.goto(address)
        live.get_by_role("link", name="run", exact=True).click()
        drawn = shown_curves(live)
        assert drawn.keys() >= {"loss", "phases", "speed", "waits", "rate", "grad-norm"}
        check_alike(str(shown_curves(shown)), str(drawn))
        last = read_records(run / "metrics.jsonl")[-1]
        validation = float(f"{last['validation_loss']:.4g}")
        assert re.search(f"validation from .* to {validation:g},", drawn["loss"])
        for place in (".run-head .figures", ".events"):
            assert shown.locator(place).inner_text() == live.locator(place).inner_text()
        for axis in ("Tokens", "Time"):
            for one in (shown, live):
                one.get_by_role("button", name=axis, exact=True).click()
                expect(one.locator("#loss .plot")).to_have_attribute(
                    "aria-label", re.compile(f"by {axis.lower()}")
                )
            check_alike(str(shown_curves(shown)), str(shown_curves(live)))
        for view, what in VIEWS.items():
            check_alike(*(shown_text(one, view, what) for one in (shown, live)))


@needs_browser
def test_the_policy_refuses_a_script_that_is_not_the_page_s_own(page, pages, tmp_path):
    # The check for complaints is worth something only if a refused script is one.
    changed = tmp_path / "changed.html"
    changed.write_text(page.read_text().replace("</body>", "<script>document.title = 'x'</script></body>"))
    with (
        pytest.raises(AssertionError, match="Content Security Policy"),
        opened(pages["desktop"], changed) as shown,
    ):
        assert shown.title() != "x"


@needs_browser
def test_pointing_at_a_chart_reads_out_its_values(page, pages):
    last = read_records(page.parent / "metrics.jsonl")[-1]
    with opened(pages["desktop"], page) as shown:
        plot = shown.locator("#loss .u-over")
        box = plot.bounding_box()
        shown.mouse.move(box["x"] + box["width"] - 1, box["y"] + 20)
        expect(shown.locator("#loss .read .head")).to_have_text("step 24")
        validation = float(f"{last['validation_loss']:.4g}")
        expect(shown.locator("#loss .read .line", has_text="validation")).to_contain_text(f"{validation:g}")
        shown.locator("#loss .plot").focus()
        shown.keyboard.press("Home")
        expect(shown.locator("#loss [role=status]")).to_have_text(re.compile("^step 1: training "))


@needs_browser
def test_without_scripts_the_page_has_its_figures_and_tables_as_text(page, browser):
    with (
        browser.new_context(java_script_enabled=False) as context,
        opened(Pages(browser, "desktop", context.new_page), page) as shown,
    ):
        expect(shown.get_by_text("final training loss: ")).to_be_visible()
        expect(shown.get_by_text("at step  ranks  time, UTC")).to_be_visible()
        expect(shown.locator("figure")).to_have_count(0)


def test_python_does_not_show(page):
    text = re.sub(r"<(script|style).*?</\1>", "", page.read_text(), flags=re.DOTALL)
    assert not re.search(r">[^<]*\b(None|True|False)\b", text)


def levels_of(page):
    return inlined(page.read_text())["runs"][0]["run"]["levels"]


def test_the_loss_of_a_run_on_one_corpus_is_held_against_its_unigram_entropy(page):
    ((name, entropy),) = levels_of(page)
    assert name == "unigram entropy"
    assert entropy == pytest.approx(np.log(59), abs=0.02)  # token ids are uniform in [1, 60)


def test_a_corpus_that_is_gone_costs_the_line_and_a_word(run, tmp_path, capsys):
    copy = tmp_path / "run"
    copy.mkdir()
    config = json.loads((run / "config.json").read_text())
    config["data"]["corpora"]["a"]["path"] = str(tmp_path / "gone")
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "metrics.jsonl").write_bytes((run / "metrics.jsonl").read_bytes())
    assert command_line.main(["report", str(copy)]) == 0
    assert "no line for the unigram entropy" in " ".join(capsys.readouterr().err.split())
    assert levels_of(copy / "report.html") == []


def test_out_and_references_are_honoured(run, tmp_path, capsys):
    out = tmp_path / "new" / "page.html"
    words = ["report", str(run), "--out", str(out), "--reference", "a = b=3.5"]
    assert command_line.main(words) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert levels_of(out) == [["a = b", 3.5]]


@pytest.mark.parametrize(
    ("metrics", "config", "code", "message"),
    [
        (None, "{}", 2, "holds no metrics.jsonl"),
        ("", None, 2, "holds no config.json"),
        ("", "{}", 1, "has not recorded a step yet"),
        ('{"step": 1, "loss": 2.0}\n', "[]", 2, "config.json must contain a JSON object"),
    ],
)
def test_a_missing_empty_or_broken_run_is_one_paragraph(tmp_path, capsys, metrics, config, code, message):
    for name, text in (("metrics.jsonl", metrics), ("config.json", config)):
        if text is not None:
            (tmp_path / name).write_text(text)
    assert command_line.main(["report", str(tmp_path)]) == code
    shown = capsys.readouterr()
    assert message in " ".join(shown.err.split())
    assert shown.out == ""
    assert not (tmp_path / "report.html").exists()


def test_lines_that_are_no_records_are_left_out_and_named(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\nx\n{}\n')
    (tmp_path / "config.json").write_text("{}")
    assert command_line.main(["report", str(tmp_path)]) == 0
    assert "2 lines that are no records are left out" in " ".join(capsys.readouterr().err.split())
    page = inlined((tmp_path / "report.html").read_text())
    assert page["runs"][0]["run"]["damaged_lines"] == 2


@pytest.mark.parametrize("words", [["absent"], [".", "--reference", "3.5"], [".", "--reference", "a=nan"]])
def test_wrong_usage_is_named(words, capsys):
    assert command_line.main(["report", *words]) == 2
    shown = capsys.readouterr().err
    assert "absent is not a folder" in shown or "--reference takes NAME=LOSS" in shown


def test_help_has_a_worked_example(capsys):
    with pytest.raises(SystemExit, match="0"):
        command_line.main(["report", "--help"])
    assert "example:\n  penstock report " in capsys.readouterr().out


@pytest.fixture(scope="module")
def compared(run, tmp_path_factory):
    """A second run, and the page of both."""
    folder = tmp_path_factory.mktemp("compared")
    other, out = folder / "other" / "run", folder / "compared.html"
    shutil.copytree(run, other)
    done = run_cli("report", run, other, "--out", out)
    assert (done.returncode, done.stdout) == (0, f"{out}\n"), done.stderr
    return other, out


@needs_browser
@pytest.mark.parametrize("device", DEVICES)
def test_two_runs_are_compared_on_a_page_that_a_browser_runs(run, compared, pages, device):
    with opened(pages[device], compared[1]) as shown:
        expect(shown.locator("#loss .legend")).to_contain_text(f"{run.parent.name}/run")
        expect(shown.locator("#loss .legend")).to_contain_text("other/run")
        expect(shown.get_by_role("region", name="Figures of the runs")).to_contain_text("final training loss")
        check_is_usable(shown)
        shown.get_by_role("link", name="other/run").click()
        expect(shown.locator("#grad-norm canvas")).to_be_visible()
        shown.get_by_role("link", name="Ranks").click()
        expect(shown.get_by_text("This file leaves out own_s, data_wait_s")).to_be_visible()
        shown.get_by_role("link", name="Compare").click()
        expect(shown.get_by_role("region", name="All of them at step 24")).to_contain_text("Loss")


@needs_browser
def test_a_comparison_has_the_charts_tables_and_numbers_of_the_console(run, compared, pages):
    other, out = compared
    with console(run, other) as address, opened(pages["desktop"], out) as shown:
        live = pages["desktop"].take()
        live.goto(address)
        expect(live.get_by_role("checkbox")).to_have_count(2)
        for box in live.get_by_role("checkbox").all():
            box.check()
        live.get_by_role("link", name="Compare 2 runs").click()
        texts = []
        for page in (shown, live):
            expect(page.get_by_role("region", name="All of them at step 24")).to_be_visible()
            tables = "\n".join(page.locator(".page td").all_inner_texts())
            texts.append(re.sub(r"\S*run from", "run from", f"{shown_curves(page)} {tables}"))  # their names
        check_alike(*texts)


@needs_browser
def test_losses_of_different_vocabularies_are_not_drawn_over_one_another(pages, tmp_path):
    for name, size in (("a", 64), ("b", 128)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(
            '{"step": 1, "loss": 2.0, "tokens_per_s": 9.0}\n{"step": 2, "loss": 1.5, "tokens_per_s": 8.0}\n'
        )
        (tmp_path / name / "config.json").write_text(json.dumps({"model": {"vocab_size": size}}))
    out = tmp_path / "both.html"
    done = run_cli("report", tmp_path / "a", tmp_path / "b", "--out", out)
    assert done.returncode == 0, done.stderr
    with opened(pages["desktop"], out) as shown:
        expect(shown.get_by_text("nats per token are not compared")).to_be_visible()
        expect(shown.locator("#tokens_per_s canvas")).to_be_visible()
        expect(shown.locator("#loss")).to_have_count(0)
        tables = shown.get_by_role("region", name=re.compile("Figures of the runs|All of them"))
        expect(tables).to_have_count(2)
        for table in tables.all():
            expect(table).not_to_contain_text(re.compile("loss", re.IGNORECASE))


@needs_browser
def test_the_rows_of_a_step_are_in_the_page_if_they_were_asked_for(run, pages, tmp_path):
    out = tmp_path / "rows.html"
    done = run_cli("report", run, "--rows", 5, "--out", out)
    assert done.returncode == 0, done.stderr
    with opened(pages["desktop"], out) as shown:
        shown.get_by_role("link", name="Rows").click()
        expect(shown.get_by_text("Step 5: rows 0 to 3 of 4")).to_be_visible()
        expect(shown.locator("article.card")).to_have_count(4)
        check_is_usable(shown)
        shown.get_by_label("Step", exact=True).fill("6")
        shown.keyboard.press("Enter")
        expect(shown.get_by_role("alert")).to_contain_text("penstock report RUN --rows 6")


def test_the_metrics_of_every_step_are_written_as_csv_and_as_parquet(run, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(run, other)
    for name, runs in (("x.csv", [run]), ("x.parquet", [run, other])):
        out = tmp_path / "new" / name
        words = ["report", *map(str, runs), "--out", str(out), "--metrics", "loss, validation_loss"]
        assert command_line.main(words) == 0
        assert capsys.readouterr().out == f"{out}\n"
    records = read_records(run / "metrics.jsonl")
    losses = [record["loss"] for record in records if "loss" in record]
    validations = {
        record["step"]: record["validation_loss"] for record in records if "validation_loss" in record
    }
    with (tmp_path / "new" / "x.csv").open() as file:
        rows = [*csv.DictReader(file)]
    assert [float(row["loss"]) for row in rows] == losses
    assert {
        int(row["step"]): float(row["validation_loss"]) for row in rows if row["validation_loss"]
    } == validations
    table = parquet.read_table(tmp_path / "new" / "x.parquet")
    assert table.column_names == ["run", "step", "loss", "validation_loss"]
    assert table["loss"].to_pylist() == losses * 2
    assert table["run"].to_pylist() == ["run"] * 24 + ["other"] * 24
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["x.csv", "x.parquet"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--out", "{out}.csv", "--metrics", "lss"], 2, "Did you mean 'loss'?"),
        (["--out", "{out}.csv", "--reference", "a=1"], 2, "--reference is for a page"),
        (["--out", "{out}.html", "--metrics", "loss"], 2, "--metrics is for CSV and Parquet files"),
    ],
)
def test_a_table_that_cannot_be_written_is_explained(run, tmp_path, capsys, words, code, said):
    (tmp_path / "out").mkdir()
    given = [word.format(out=tmp_path / "out" / "x") for word in words]
    assert command_line.main(["report", str(run), *given]) == code
    assert said in capsys.readouterr().err
    assert [*(tmp_path / "out").iterdir()] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{run}", "{run}", "--out", "x.html"], "given twice"),
        (["{run}", "{run}"], "Several runs need --out"),
        (["{run}", "{run}", "--out", "x.html", "--reference", "a=1"], "--reference is for one run"),
        (["{run}"] * 9 + ["--out", "x.html"], "9 runs are too many"),
    ],
)
def test_a_comparison_that_cannot_be_drawn_is_explained(run, words, said):
    done = run_cli("report", *(word.format(run=run) for word in words))
    assert done.returncode == 2
    assert said in done.stderr
