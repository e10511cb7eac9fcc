"""Table of a run's mixture: what each corpus was asked for and served, and every change."""

from collections.abc import Iterator

from penstock.cli.data.describe import printable
from penstock.core.units import plural
from penstock.train.inspect.open_run import View

_SHOWN = 20


def table(view: View) -> Iterator[str]:
    """Yield a view as text lines."""
    state = "a job runs on it" if view["running"] else "no job runs on it"
    since = f"this mixture since step {view['since'] + 1:,}"
    yield f"step {view['step']:,} of {view['steps']:,}, {state}; {since}"
    yield ""
    width = max(6, *(len(name) for name in view["corpora"]))
    yield f"{'corpus':<{width}}  {'asked':>8}  {'served':>8}  {'tokens':>18}  {'epochs':>9}"
    for name, row in view["corpora"].items():
        served = "" if row["share"] is None else f"{row['share']:.4%}"
        counts = f"{row['tokens']:>18,}  {row['epochs']:>9.4f}"
        yield f"{name:<{width}}  {row['weight']:>8.4%}  {served:>8}  {counts}"
    yield ""
    past = [mix for mix in view["mixtures"] if mix["after_step"] <= view["step"]]
    planned = [mix for mix in view["mixtures"] if mix["after_step"] > view["step"]]
    yield from _mixtures("mixtures so far", past, latest=True)
    yield from _mixtures("planned", planned, latest=False)
    for skip in view["skips"]:
        count = plural(skip["stop"] - skip["start"], "sample")
        yield f"left out: {count} from sample {skip['start']:,} on{_because(skip['reason'])}"
    for found in view["answers"]:
        if not found["taken_up"]:
            yield f"request {found['number']}: {printable(found['said'])}"
    for number in view["waiting"]:
        yield f"request {number} is waiting for a job"


def _mixtures(title: str, mixtures: list[View], *, latest: bool) -> Iterator[str]:
    if not mixtures:
        return
    shown = mixtures[-_SHOWN:] if latest else mixtures[:_SHOWN]
    left = len(mixtures) - len(shown)
    yield f"{title}:{f' ({left:,} more: --json)' if left else ''}"
    for mix in shown:
        shares = ", ".join(f"{name} {share:.4g}" for name, share in mix["weights"].items())
        yield f"  from step {mix['after_step'] + 1:,}: {shares}{_because(mix['reason'])}"


def _because(reason: str) -> str:
    return f" ({printable(reason)})" if reason else ""
