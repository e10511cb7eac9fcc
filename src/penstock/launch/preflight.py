"""Preflight of a run: the doctor's command on each of its nodes, and the files that it leaves. Pure."""

import re

from penstock.launch.pod_networks import declared
from penstock.launch.spec import RunSpec

REPORT, EXCLUDE, METRICS = "doctor.txt", "exclude.txt", "links.prom"
"""Files of the run's `launch` folder: the report, hosts to leave out, links as Prometheus text."""
EXIT_OUTLIERS = 3
"""Exit code of the doctor: all that is red is mended by leaving out the hosts of EXCLUDE."""
_SECONDS, _TIMEOUT_S = 20, 60


def command_of(spec: RunSpec) -> tuple[str, ...]:
    """Return the doctor's command after the interpreter: over the run's networks, or all that it finds."""
    pod, folder = spec.pod, f"{spec.run_dir}/launch"
    networks = (
        spec.networks if pod is None else [card.name for card in declared(pod.network_provider, pod.networks)]
    )
    return (
        *("-m", "penstock", "doctor", f"--seconds={_SECONDS}", f"--timeout={_TIMEOUT_S}"),
        f"--folder={spec.run_dir}",
        *(f"--network={name}" for name in networks),
        f"--exclude={folder}/{EXCLUDE}",
        f"--metrics={folder}/{METRICS}",
    )


_LABEL = r'"((?:[^"\\]|\\.)*)"'
_OUTLIER = re.compile(rf"^penstock_links_outlier\{{node={_LABEL},card={_LABEL},why={_LABEL}\}}", re.MULTILINE)


def reasons_of(metrics: str) -> dict[str, str]:
    """Return why each node is to be left out, as one line, from the text of METRICS.

    >>> reasons_of('penstock_links_outlier{node="n2",card="eth0",why="is slow"} 1')
    {'n2': 'eth0 is slow'}
    """
    found: dict[str, list[str]] = {}
    for labels in _OUTLIER.findall(metrics):
        node, card, why = (re.sub(r"\\(.)", _unescaped, text) for text in labels)
        found.setdefault(node, []).append(f"{card} {why}".strip())
    return {node: ", ".join(why) for node, why in found.items()}


def _unescaped(escaped: re.Match[str]) -> str:
    return " " if escaped[1] == "n" else escaped[1]
