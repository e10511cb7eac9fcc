"""Preflight of a run: the doctor's command on each of its nodes, and the files that it leaves. Pure."""

from collections.abc import Mapping
from typing import Any

from penstock.launch.pod_networks import declared
from penstock.launch.spec import RunSpec

REPORT, REPORT_JSON, EXCLUDE = "doctor.txt", "doctor.json", "exclude.txt"
"""Files of the run's `launch` folder: the report as text and as JSON, and the hosts to leave out."""
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
        f"--json={folder}/{REPORT_JSON}",
    )


def reasons_of(report: Mapping[str, Any]) -> dict[str, str]:  # Any: JSON
    """Return why each node is to be left out, as one line, from the content of REPORT_JSON.

    >>> reasons_of({"outliers": [{"node": 2, "host": "n2", "card": "eth0", "why": "is slow"}]})
    {'n2': 'eth0 is slow'}
    """
    found: dict[str, list[str]] = {}
    for outlier in report["outliers"]:
        why = " ".join(f"{outlier['card']} {outlier['why']}".split())
        found.setdefault(outlier["host"] or str(outlier["node"]), []).append(why)
    return {node: ", ".join(why) for node, why in found.items()}
