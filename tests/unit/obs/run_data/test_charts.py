"""The charts of a run: of what is recorded, each metric by its name."""

from penstock.obs.metric_names import BY_CORPUS, BY_TASK, METRICS
from penstock.obs.run_data.charts import _CHARTS, charts_of


def layers(*metrics):
    return {
        chart["id"]: [(layer["metric"], layer["label"], layer["style"]) for layer in chart["layers"]]
        for chart in charts_of(metrics)
    }


def test_every_chart_is_of_metrics_that_runs_record():
    charted = [layer.metric for _, layers in _CHARTS for layer in layers]
    for metric in charted:
        of = metric.partition("/")[0]
        assert of in METRICS
        assert metric.endswith("/") == (of in (*BY_CORPUS, *BY_TASK))
    ids = [options["id"] for options, _ in _CHARTS]
    assert len(ids) == len(set(ids))


def test_rewards_are_drawn_with_their_held_out_values():
    found = charts_of(["loss", "reward_margin", "reward_accuracy", "validation_reward_margin"])
    assert [chart["id"] for chart in found] == ["loss", "rewards", "accuracy"]
    assert found[0]["title"] == "Loss, nats per answer"
    assert [layer["label"] for layer in found[1]["layers"]] == ["margin", "margin, held out"]


def test_a_chart_without_a_metric_is_left_out_and_so_is_a_stack_of_one():
    assert layers("step", "loss", "corpus_shares/web") == {"loss": [("loss", "training", "line")]}


def test_members_of_a_table_are_layers_by_name():
    assert layers("corpus_shares/web", "corpus_shares/a/b") == {
        "mixture": [("corpus_shares/web", "web", "area"), ("corpus_shares/a/b", "a/b", "area")]
    }
