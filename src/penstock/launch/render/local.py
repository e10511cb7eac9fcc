"""Render a run for this machine: its launcher, and settings of processes that share the machine's cores."""

from penstock.core.network.settings import Setting
from penstock.launch.render.common_settings import settings_of_run
from penstock.launch.render.rendered import Rendered
from penstock.launch.spec import RunSpec


def render(spec: RunSpec, *, cores: int) -> Rendered:
    """Return what `penstock launch local` starts.

    Args:
        cores: CPU cores of this machine that processes may use.
    """
    command = (spec.python, "-m", "penstock", *spec.command)
    return Rendered(
        files={},
        commands=(command,) * spec.most_ranks,
        settings=(*settings_of_run(spec), *local_settings(spec, cores=cores)),
    )


def local_settings(spec: RunSpec, *, cores: int) -> list[Setting]:
    """Return the variables of processes of nodes that are played on one machine."""
    given = dict(spec.environment)
    found = []
    if "OMP_NUM_THREADS" not in given:
        share = max(1, cores // spec.most_ranks)
        reason = f"{cores} cores shared by up to {spec.most_ranks} processes"
        found.append(Setting("OMP_NUM_THREADS", str(share), reason))
    if "GLOO_SOCKET_IFNAME" not in given and not spec.networks:
        found.append(Setting("GLOO_SOCKET_IFNAME", "lo", "all nodes are this machine"))
    return found
