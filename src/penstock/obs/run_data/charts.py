"""Charts of a run, in the order of its page: which metrics each draws, and how."""

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

Style = Literal["line", "dots", "area"]
Reply = dict[str, Any]  # Any: JSON values


class Layer(NamedTuple):
    """One metric of a chart, or all of a table by corpus or task if its name ends in a slash."""

    metric: str
    label: str = ""
    """Name in the legend; of a table, that of the corpus or task instead."""
    style: Style = "line"
    color: int | str = "--train"
    """One of eight colours, or the name of a CSS property; of a table, each member has the next colour."""


Chart = tuple[Reply, tuple[Layer, ...]]
"""Options of a chart, and its layers."""


def _chart(key: str, title: str, *layers: Layer, **options: Any) -> Chart:
    """Return a chart.

    Args:
        key: unique among the charts; letters and dashes.
        options: of the script's Chart. logFrom: ratio of the maximum to the median from which the axis is
            logarithmic at first, so that a spike hides nothing else; isExact: it is never smoothed.
    """
    return {"id": key, "title": title, **options}, layers


def _held_out(metric: str, label: str, color: int | str = "--held") -> Layer:
    return Layer(f"validation_{metric}", label, "dots", color)


_REWARDS = (("chosen", 2), ("rejected", 1), ("margin", 0))
_SHARE: Reply = {"unit": "share", "fromZero": True}

_CHARTS = (
    _chart(
        "loss",
        "Loss, nats per token",
        Layer("loss", "training"),
        _held_out("loss", "validation"),
        isWide=True,
        height=300,
        logFrom=100,
    ),
    _chart(
        "corpus-loss",
        "Held-out loss by corpus, nats per token",
        Layer("corpus_validation_loss/", style="dots"),
    ),
    _chart(
        "phases",
        "Where a step\u2019s time goes",
        Layer("forward_share", "forward", "area", 0),
        Layer("backward_share", "backward", "area", 4),
        Layer("optimizer_share", "optimizer", "area", 2),
        Layer("communication_share", "blocked on communication", "area", 1),
        Layer("data_wait_share", "waiting for data", "area", 3),
        unit="share",
    ),
    _chart("speed", "Tokens per second", Layer("tokens_per_s", "all ranks"), fromZero=True),
    _chart("mixture", "Mixture, share of samples", Layer("corpus_shares/", style="area"), unit="share"),
    _chart("bits", "Held-out text, bits per byte", _held_out("bits_per_byte", "validation")),
    _chart(
        "mfu", "Model FLOPs utilisation", Layer("mfu", "MFU", color=0), Layer("hfu", "HFU", color=2), **_SHARE
    ),
    _chart(
        "waits",
        "Data wait and exposed communication",
        Layer("data_wait_share", "data wait", color=3),
        Layer("communication_share", "exposed communication", color=1),
        **_SHARE,
    ),
    _chart(
        "rewards",
        "Rewards",
        *(Layer(f"reward_{name}", name, color=color) for name, color in _REWARDS),
        *(_held_out(f"reward_{name}", f"{name}, held out", color) for name, color in _REWARDS),
    ),
    _chart(
        "accuracy",
        "Accuracy of rewards",
        Layer("reward_accuracy", "training"),
        _held_out("reward_accuracy", "held out"),
        **_SHARE,
    ),
    _chart("tasks", "Tasks", Layer("task_scores/", style="dots")),
    _chart("grad-norm", "Gradient norm", Layer("grad_norm", "before clipping"), logFrom=20),
    _chart("rate", "Learning rate", Layer("learning_rate", "learning rate"), fromZero=True, isExact=True),
    _chart(
        "memory",
        "Peak memory",
        Layer("memory_bytes", "first process"),
        unit="bytes",
        isExact=True,
        fromZero=True,
    ),
    _chart("epochs", "Epochs by corpus", Layer("corpus_epochs/"), fromZero=True, isExact=True),
)
"""In the order of the page."""


def charts_of(metrics: Iterable[str]) -> list[Reply]:
    """Return the charts of some metrics as the page's script takes them.

    >>> [chart["id"] for chart in charts_of(["step", "loss", "corpus_shares/web", "forward_share"])]
    ['loss']
    """
    names = list(metrics)
    charts = []
    for options, layers in _CHARTS:
        found = [one for layer in layers for one in _members(layer, names)]
        is_loss_of_pairs = options["id"] == "loss" and "reward_accuracy" in names
        title = {"title": "Loss, nats per answer"} if is_loss_of_pairs else {}
        if len(found) > (layers[0].style == "area"):  # a stack of one says nothing
            charts.append({**options, **title, "layers": [layer._asdict() for layer in found]})
    return charts


def _members(layer: Layer, names: list[str]) -> list[Layer]:
    if not layer.metric.endswith("/"):
        return [layer] if layer.metric in names else []
    members = [name for name in names if name.startswith(layer.metric)]
    return [
        Layer(name, name.removeprefix(layer.metric), layer.style, color) for color, name in enumerate(members)
    ]
