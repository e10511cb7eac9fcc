"""The samples in a report: before any curve, prompts down and steps across, nothing in them is markup."""

import re

import pytest

from penstock.obs.report.report import render
from tests.run_records import data_of, gather
from tests.unit.obs.html_elements import Elements


def step(number):
    return {"step": number, "tokens": 100 * number, "loss": 5.0, "labels": 30, "step_s": 0.1}


def samples(number, *answers, finish="stop"):
    listed = [{"prompt": p, "answer": a, "finish": finish} | more for p, a, more in answers]
    return {"event": "samples", "step": number, "answers": listed}


def page(records):
    return render(data_of(records), {"run": {"steps": 100}}, name="first")


def words(text):
    return " ".join(re.sub(r"<[^>]+>", " ", text).split())


def test_answers_stand_before_the_curves_by_prompt_and_step():
    said = [samples(0, ("Who?", "abc", {})), step(1), samples(1, ("Who?", "me", {"reference": "You."}))]
    text = page(said)
    assert text.index("What it answers") < text.index('id="charts"')
    assert "prompt before step 1 the document itself Who? abc me You." in words(text)
    assert "All 2 answers" not in text


def test_of_many_samples_the_table_has_four_and_the_list_below_it_all():
    records = [record for n in range(1, 10) for record in (step(n), samples(n, ("Who?", f"a{n}", {})))]
    text = words(page(records))
    assert "prompt step 1 step 4 step 6 step 9 Who? a1 a4 a6 a9" in text
    assert "All 9 answers to each Who? step 1 a1 step 2 a2" in text


def test_of_very_many_samples_some_are_kept_the_first_and_the_last_among_them():
    records = [record for n in range(1, 1001) for record in (step(n), samples(n, ("Who?", f"a{n}", {})))]
    found = gather(records).samples
    assert len(found) <= 256
    assert (found[0].step, found[-1].step) == (1, 1000)


def test_an_answer_cannot_become_markup_and_one_that_was_cut_says_so():
    evil = "<script>alert(1)</script>"
    text = page([step(1), samples(1, (evil, evil, {"reference": evil}), finish="length")])
    assert evil not in text
    assert text.count("&lt;script&gt;") == 3
    assert 'class="cut"' in text
    tags = [tag for tag, _ in Elements(re.sub("<!doctype html>", "", text)).found]
    assert tags.count("script") == 3, "the charts' numbers, the library, and the page's own"


def test_a_run_that_ended_early_is_finished_and_the_best_step_is_named():
    stop = {"event": "early_stop", "step": 2, "best_step": 1, "best_loss": 5.0, "waited": 3}
    assert "stopped early, best at step 1" in page([step(1), step(2), stop])
    assert "stopped early" not in page([step(1), step(2), stop, step(3)])


def test_learned_tokens_are_counted_where_not_all_are_learned():
    text = words(page([step(n) for n in range(1, 11)]))
    assert "learned tokens 300.0 30% of the tokens" in text
    all_learned = words(page([step(n) | {"labels": 99} for n in range(1, 11)]))
    assert text.count("learned tokens") == all_learned.count("learned tokens") + 1, "the glossary has it too"


@pytest.mark.parametrize(("loss", "title"), [("dpo", "pairs of answers"), ("kto", "answers")])
def test_pairs_are_not_counted_as_learned_tokens(loss, title):
    run = [step(n) | {"labels": 4, "reward_margin": 0.5, "reward_accuracy": 1.0} for n in range(1, 11)]
    text = words(render(data_of(run), {"run": {"steps": 10}, "tune": {"loss": loss}}, name="first"))
    assert f"{title} 40 4 a step" in text
