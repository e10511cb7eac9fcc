"""The demo, in its short form, and what its models learn: `make soak PART=demo`."""

import re

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.unit.obs.html_elements import inlined
from tests.warm import penstock


@pytest.mark.timeout(1500)  # two minutes' work for two cores of their own; a busy machine gives it less
def test_the_demo_tells_the_whole_story_and_can_be_repeated(tmp_path):
    folder = tmp_path / "a demo"
    done = penstock("demo", "--quick", "--dir", folder, timeout=1400)
    assert done.returncode == 0, done.stderr
    assert "PASS: nothing lost, nothing repeated" in done.stdout
    assert "2 from step 0, 1 from step" in done.stdout
    assert done.stdout.count("$ kill -TERM") == 2
    summary = done.stdout[done.stdout.index("== Done in") :].splitlines()
    assert len(summary) <= 13, "twelve lines with what to try next"
    before, after = map(int, re.search(r"tuned +(\d+)% -> (\d+)% of \d+ new questions", done.stdout).groups())
    assert before <= 5
    assert after > 95
    call = 'How is the weather in Lomar? -> weather({"place": "Lomar"})'
    assert call in done.stdout
    evaluated = re.search(
        r"^questions +0 +\d+ +exact_match .* (\d\.\d+) +\d\.\d+$", done.stdout, re.MULTILINE
    )
    assert float(evaluated[1]) > 0.95
    tuned = inlined((folder / "tuned" / "tuned-run" / "report.html").read_text())
    assert tuned["runs"][0]["answers"]["prompts"]
    page = (folder / "report.html").read_text()
    assert "2 -> 1 rank" in page
    assert "unigram entropy" in page
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert model.config.vocab_size == len(tokenizer) == 2048
