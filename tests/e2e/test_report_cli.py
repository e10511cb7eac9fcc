"""`penstock report` as a user runs it: on a rescaled run, opened in a browser, and on wrong input."""

import json
import re
import shutil
import subprocess
import sys
from html import unescape

import numpy as np
import pytest

from penstock.cli import main as command_line
from penstock.testing.corpora import write_corpus

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--virtual-time-budget=2000",
    "--dump-dom",
]
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


def penstock(*words):
    command = [sys.executable, "-m", "penstock", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


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
    done = penstock("report", run)
    assert (done.returncode, done.stdout) == (0, f"{run / 'report.html'}\n"), done.stderr
    assert done.stderr == ""
    return run / "report.html"


def open_in_browser(file, folder):
    """Return the page's elements after its script ran, and what the browser complained of."""
    if BROWSER is None:
        pytest.skip("NO BROWSER: the page was not opened; install chromium")
    done = subprocess.run(
        [BROWSER, *QUIET, f"--user-data-dir={folder}", file.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "</html>" in done.stdout, done.stderr
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_the_page_tells_the_rescale_and_the_loss(page):
    text = page.read_text()
    assert "1 → 2 processes" in text
    assert text.count('class="dot"') == 6
    assert 'class="outcome finished"' in text


def test_a_browser_runs_the_page_without_complaint_or_request(page, tmp_path):
    elements, complaints = open_in_browser(page, tmp_path)
    assert complaints == []
    assert elements.count('class="read"') == elements.count("<figure") == 6
    assert not re.search(r"https?://|ftp://|\bsrc=", elements)


def test_the_browser_would_have_complained_of_a_foreign_script(page, tmp_path):
    # The check above is worth something only if a refused script reaches the log.
    changed = tmp_path / "changed.html"
    changed.write_text(page.read_text().replace("</body>", "<script>document.title = 'x'</script></body>"))
    elements, complaints = open_in_browser(changed, tmp_path / "profile")
    assert len(complaints) == 1
    assert "Content Security Policy" in complaints[0]
    assert "<title>x" not in elements


def test_pointing_at_a_chart_reads_out_its_values(page, tmp_path):
    point = """<script>
      const plot = document.querySelector("#loss .plot"), box = plot.getBoundingClientRect();
      plot.dispatchEvent(new PointerEvent("pointermove", { clientX: box.right, clientY: box.top }));
    </script></body>"""
    changed = tmp_path / "changed.html"
    text = re.sub(r"<meta http-equiv[^>]*>", "", page.read_text())
    changed.write_text(text.replace("</body>", point))
    elements, complaints = open_in_browser(changed, tmp_path / "profile")
    assert complaints == []
    last = json.loads((page.parent / "metrics.jsonl").read_text().splitlines()[-1])
    assert "<b>step 24</b>" in elements
    assert f"validation <span>{last['validation_loss']:#.4g}</span>" in elements


USE = """<script>
  const loss = document.querySelector("#loss"), plot = loss.querySelector(".plot");
  const line = () => loss.querySelector("path.smooth").getAttribute("d");
  const labels = (kind) => [...loss.querySelectorAll(`text.${kind}:not(.name)`)].map((t) => t.textContent);
  const say = (name, value) => document.body.setAttribute("data-" + name, JSON.stringify(value));
  const box = plot.getBoundingClientRect();
  const mouse = (kind, part) => plot.dispatchEvent(new PointerEvent(kind, {
    clientX: box.left + part * box.width, clientY: box.top + 9, pointerType: "mouse", bubbles: true }));
  const [reset, log] = loss.querySelectorAll(".tools button"), smoothing = loss.querySelector("select");
  log.click();
  const plain = line();
  log.click();
  say("log", [plain !== line(), labels("y").length > 1]);
  mouse("pointerdown", 0.5); mouse("pointermove", 0.9); mouse("pointerup", 0.9);
  say("zoomed", labels("x").map(Number));
  say("reset", reset.hidden);
  smoothing.value = "9"; smoothing.dispatchEvent(new Event("change"));
  const smooth = line();
  smoothing.value = ""; smoothing.dispatchEvent(new Event("change"));
  say("smooth", smooth !== line());
  const before = line();
  reset.click();
  say("whole", [before !== line(), reset.hidden, labels("x").map(Number)]);
</script></body>"""


def test_a_chart_is_zoomed_smoothed_and_drawn_on_a_log_axis(page, tmp_path):
    changed = tmp_path / "changed.html"
    text = re.sub(r"<meta http-equiv[^>]*>", "", page.read_text())
    changed.write_text(text.replace("</body>", USE))
    elements, complaints = open_in_browser(changed, tmp_path / "profile")
    assert complaints == []
    body = re.search(r"<body([^>]*)>", elements)[1]
    said = {name: json.loads(unescape(text)) for name, text in re.findall(r'data-(\w+)="([^"]*)"', body)}
    assert said["log"] == [True, True]
    assert min(said["zoomed"]) >= 12, "half of 24 steps"
    assert max(said["zoomed"]) <= 22
    assert said["reset"] is False
    assert said["smooth"] is True
    assert said["whole"][:2] == [True, True]
    assert said["whole"][2][0] == 0


def test_axes_have_titles_and_python_does_not_show(page):
    text = page.read_text()
    assert len(re.findall(r'<text class="x name"[^>]*>(step|tokens)</text>', text)) == text.count("<figure")
    assert not re.search(
        r">[^<]*\b(None|True|False)\b", re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    )


def test_the_loss_of_a_run_on_one_corpus_is_held_against_its_unigram_entropy(page):
    found = re.search(r"unigram entropy ([\d.]+)</text>", page.read_text())
    assert float(found[1]) == pytest.approx(np.log(59), abs=0.02)  # token ids are uniform in [1, 60)


def test_a_corpus_that_is_gone_costs_the_line_and_a_word(run, tmp_path, capsys):
    copy = tmp_path / "run"
    copy.mkdir()
    config = json.loads((run / "config.json").read_text())
    config["data"]["corpora"]["a"]["path"] = str(tmp_path / "gone")
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "metrics.jsonl").write_bytes((run / "metrics.jsonl").read_bytes())
    assert command_line.main(["report", str(copy)]) == 0
    assert "no line for the unigram entropy" in " ".join(capsys.readouterr().err.split())
    assert 'class="level"' not in (copy / "report.html").read_text()


def test_out_and_references_are_honoured(run, tmp_path, capsys):
    out = tmp_path / "new" / "page.html"
    words = ["report", str(run), "--out", str(out), "--reference", "a = b=3.5"]
    assert command_line.main(words) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert "a = b 3.500" in out.read_text()
    assert "unigram entropy" not in out.read_text()


@pytest.mark.parametrize(
    ("metrics", "config", "code", "message"),
    [
        (None, "{}", 2, "holds no metrics.jsonl"),
        ("", None, 2, "holds no config.json"),
        ("", "{}", 1, "has not recorded a step yet"),
        ('{"step": 1, "loss": 2.0}\n', "[]", 2, "config.json must contain a JSON object"),
        ('{"step": 1, "loss": 2.0}\nx\n{}\n', "{}", 1, "metrics.jsonl is not a JSON object"),
        ('{"step": 1, "loss": "x"}\n', "{}", 1, "Record 1 of the metrics is broken: 'x' is not a number"),
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


@pytest.mark.parametrize("words", [["absent"], [".", "--reference", "3.5"], [".", "--reference", "a=nan"]])
def test_wrong_usage_is_named(words, capsys):
    assert command_line.main(["report", *words]) == 2
    shown = capsys.readouterr().err
    assert "absent is not a folder" in shown or "--reference takes NAME=LOSS" in shown


def test_help_has_a_worked_example(capsys):
    with pytest.raises(SystemExit, match="0"):
        command_line.main(["report", "--help"])
    assert "example:\n  penstock report " in capsys.readouterr().out


def test_two_runs_are_compared_on_a_page_that_a_browser_runs(run, tmp_path):
    other = tmp_path / "other" / "run"
    shutil.copytree(run, other)
    out = tmp_path / "compared.html"
    done = penstock("report", run, other, "--out", out)
    assert (done.returncode, done.stdout) == (0, f"{out}\n"), done.stderr
    elements, complaints = open_in_browser(out, tmp_path / "profile")
    assert complaints == []
    assert elements.count('class="read"') == elements.count("<figure") == 6
    assert f"{run.parent.name}/run" in elements
    assert "other/run" in elements


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
    done = penstock("report", *(word.format(run=run) for word in words))
    assert done.returncode == 2
    assert said in done.stderr
