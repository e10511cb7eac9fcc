"""Charts of rewards, of runs that have them."""

import pytest

from penstock.obs.report.run_charts import phase_chart, run_charts
from tests.run_records import gather


def records(**of_step):
    for step in range(1, 5):
        yield {"step": step, "loss": 0.7 / step, **of_step}
    yield {"step": 4, "validation_loss": 0.5, **{f"validation_{name}": x for name, x in of_step.items()}}


def charts(**of_step):
    """Return the charts that have points, by key."""
    found = run_charts(gather(records(**of_step)), {})
    return {chart.key: chart for chart in found if any(len(layer.x) for layer in chart.layers)}


def test_rewards_are_drawn_with_their_held_out_values():
    found = charts(reward_margin=0.5, reward_accuracy=0.75)
    assert found["loss"].title == "Loss, nats per answer"
    assert [layer.name for layer in found["reward-margin"].layers] == ["each step", "validation"]
    assert "75%" in found["reward-accuracy"].description
    assert "held out" in found["reward-accuracy"].description
    assert "reward-chosen" not in found


def test_a_run_without_preferences_has_no_such_chart():
    found = charts()
    assert not [key for key in found if key.startswith("reward")]
    assert found["loss"].title == "Loss, nats per token"


def test_the_time_of_a_step_is_drawn_as_means_of_stretches_that_end_at_the_last_step():
    shares = {"forward": 0.3, "backward": 0.4, "optimizer": 0.1, "communication": 0.15, "data_wait": 0.05}
    steps = [{"step": n, "loss": 1.0, **{f"{k}_share": v for k, v in shares.items()}} for n in range(1, 1001)]
    found = phase_chart(gather(steps))
    assert [layer.y[-1] for layer in found.layers] == pytest.approx([0.3, 0.4, 0.1, 0.15, 0.05])
    assert (found.layers[0].x[0], found.layers[0].x[-1], len(found.layers[0].x)) == (0, 1000, 101)
    assert "blocked on communication 15%" in found.description
    assert not phase_chart(gather(records())).layers
