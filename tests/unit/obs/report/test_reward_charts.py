"""Charts of rewards, of runs that have them."""

from penstock.obs.report.history import gather
from penstock.obs.report.line_charts import charts


def records(**of_step):
    for step in range(1, 5):
        yield {"step": step, "loss": 0.7 / step, **of_step}
    yield {"step": 4, "validation_loss": 0.5, **{f"validation_{name}": x for name, x in of_step.items()}}


def test_rewards_are_drawn_with_their_held_out_values():
    found = {
        chart.key: chart for chart in charts(gather(records(reward_margin=0.5, reward_accuracy=0.75)), {})
    }
    assert found["loss"].title == "Loss, nats per answer"
    assert [layer.name for layer in found["reward-margin"].layers] == ["each step", "validation"]
    assert "75%" in found["reward-accuracy"].description
    assert "held out" in found["reward-accuracy"].description
    assert "reward-chosen" not in found


def test_a_run_without_preferences_has_no_such_chart():
    found = {chart.key: chart for chart in charts(gather(records()), {})}
    assert not [key for key in found if key.startswith("reward")]
    assert found["loss"].title == "Loss, nats per token"
