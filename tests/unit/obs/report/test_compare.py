"""Several runs on one page: what is drawn of each, where recipes differ, and nothing in a name is markup."""

import re

import pytest

from penstock.obs.report.compare import ComparedRun, render_comparison
from tests.run_records import gather
from tests.unit.obs.html_elements import Elements, charts_of, layers_of

RECIPE = {"run": {"dir": "a", "steps": 40}, "optim": {"learning_rate": 0.1}, "compute": "float32"}


def history(steps, *, start=7.0, seconds=1.0, sent=2**20):
    records = [
        {
            "step": step,
            "tokens": 100 * step,
            "loss": start - step / 100,
            "step_s": seconds,
            "tokens_per_s": 100 / seconds,
            "communication_share": 0.25,
            "corpus_tokens": {"web": 60 * step, "code": 40 * step},
        }
        for step in range(1, steps + 1)
    ]
    traffic = {"event": "traffic", "step": 2, "sent_bytes": {"shard": sent}, "network_axes": []}
    return gather([*records[:2], traffic, *records[2:]])


def comparison(*runs):
    return render_comparison([ComparedRun(*run) for run in runs])


@pytest.fixture(scope="module")
def page():
    slow = RECIPE | {"optim": {"learning_rate": 0.2}, "run": {"dir": "b", "steps": 40}}
    return comparison(("fast", history(40), RECIPE), ("slow", history(20, seconds=10.0, sent=2**21), slow))


def test_losses_are_drawn_by_step_by_tokens_and_by_time(page):
    by_step, by_tokens, by_time = (layers_of(page, f"loss{of}") for of in ("", "-by-tokens", "-by-time"))
    assert (by_step["fast"]["x"][-1], by_step["slow"]["x"][-1]) == (40, 20)
    assert (by_tokens["fast"]["x"][-1], by_tokens["slow"]["x"][-1]) == (4000, 2000)
    assert (by_time["fast"]["x"][-1], by_time["slow"]["x"][-1]) == (40, 200)
    axes = [charts_of(page)[key]["along"] for key in ("loss", "loss-by-tokens", "loss-by-time")]
    assert axes == ["step", "tokens", "time"]
    assert by_step["fast"]["means"][1]["name"] == "fast"
    assert by_step["fast"]["y"][-1] == 6.6


def test_speed_communication_and_mixtures_are_drawn_of_each(page):
    assert layers_of(page, "tokens-per-s")["slow"]["y"][-1] == 10
    assert layers_of(page, "communication-share")["fast"]["y"][-1] == 0.25
    assert charts_of(page)["communication-share"]["unit"] == "share"
    assert layers_of(page, "mixture-1")["web"]["y"][-1] == 0.6
    assert charts_of(page)["mixture-1"]["title"] == "Mixture of slow, share of tokens"


def test_tables_say_what_each_run_came_to_and_where_recipes_differ(page):
    text = " ".join(re.sub(r"<[^>]+>", " ", page).split())
    assert "state finished 20 of 40 steps so far" in text
    assert "sent in a step 1.0 MiB 2.0 MiB" in text
    assert "optim.learning_rate 0.1 0.2" in text
    assert "run.dir" not in text


def test_equal_recipes_are_said_to_be(page):
    assert "The recipes are the same" in comparison(("a", history(9), RECIPE), ("b", history(9), RECIPE))
    assert "The recipes are the same" not in page


def test_names_and_settings_cannot_become_markup():
    page = comparison(("<b>x", history(9), {"a": "<script>"}), ("y", history(9), {"a": "</table>"}))
    assert "<b>" not in page
    assert "&lt;script&gt;" in page
    tags = [tag for tag, _ in Elements(re.sub("<!doctype html>", "", page)).found]
    assert tags.count("table") == 2


def measured(steps, *, peak, ranks=1, threads=2, bits=(1.5, 1.25)):
    """Return a run with a start that knows its peak, MFU, and two validations."""
    start = {"event": "start", "step": 0, "ranks": ranks, "time": "2026-11-21T03:49:55+00:00"}
    start |= {"device": "cpu", "threads": threads} | ({} if peak is None else {"peak_flops": peak})
    records = [
        {"step": step, "tokens": 100 * step, "loss": 3.0, "step_s": 1.0, "mfu": 0.4}
        for step in range(1, steps + 1)
    ]
    checks = [
        {"step": step, "validation_loss": 2.5, "validation_bits_per_byte": each}
        for step, each in zip((steps // 2, steps), bits, strict=True)
    ]
    return gather([start, *records[: steps // 2], checks[0], *records[steps // 2 :], checks[1]])


def text_of(page):
    return " ".join(re.sub(r"<[^>]+>", " ", page).split())


@pytest.mark.parametrize(
    ("first", "second", "compared"),
    [
        ({"peak": 1e12}, {"peak": 1.05e12}, True),
        ({"peak": 1e12}, {"peak": 2e12, "ranks": 2}, True),  # twice the ranks, the same cores
        ({"peak": 1e12, "threads": 1, "ranks": 2}, {"peak": 1e12, "threads": 2, "ranks": 1}, True),
        ({"peak": 1e12}, {"peak": 2e12}, False),
        ({"peak": 1e12}, {"peak": None}, False),
    ],
)
def test_mfu_is_compared_where_it_is_a_share_of_the_same_peak(first, second, compared):
    text = text_of(comparison(("a", measured(20, **first), RECIPE), ("b", measured(20, **second), RECIPE)))
    assert ("median MFU 40% 40%" in text) is compared
    assert ("MFU is not compared" in text) is not compared


def test_runs_of_different_tokenizers_are_compared_in_bits_per_byte_only():
    runs = [ComparedRun(name, measured(20, peak=1e12), RECIPE, tokenizer=name) for name in "ab"]
    page = render_comparison(runs)
    assert "nats per token are not compared" in text_of(page)
    assert layers_of(page, "bits-per-byte")["a"]["y"] == [1.5, 1.25]
    assert not [key for key in charts_of(page) if key.startswith("loss")]
    assert "final training loss" not in text_of(page)
    assert "bits per byte 1.500 → 1.250 1.500 → 1.250" in text_of(page)
    same = render_comparison(
        [ComparedRun(name, measured(20, peak=1e12), RECIPE, tokenizer="t") for name in "ab"]
    )
    assert {"loss", "bits-per-byte"} <= charts_of(same).keys()


def test_without_tokenizers_the_sizes_of_vocabularies_tell_runs_apart():
    small, large = ({**RECIPE, "model": {"vocab_size": size}} for size in (400, 800))
    page = comparison(("a", measured(20, peak=1e12), small), ("b", measured(20, peak=1e12), large))
    assert "nats per token are not compared" in text_of(page)


def test_settings_are_written_as_a_recipe_has_them_not_as_python_does():
    one, other = RECIPE | {"run": {"log": True, "seed": None}}, RECIPE | {"run": {"log": False, "seed": 3}}
    page = comparison(("a", history(9), one), ("b", history(9), other))
    text = text_of(re.sub("<script.*?</script>", "", page, flags=re.DOTALL))
    assert "run.log true false" in text
    assert "run.seed \u2013 3" in text
    assert not re.search(r"\b(None|True|False)\b", text)
