"""Preflight of a run: the doctor's command on each of its nodes, and the files that it leaves. Pure."""

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
