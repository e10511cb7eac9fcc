"""Settings that every engine gives the processes of a run, each with its reason."""

from penstock.core.network.settings import Setting
from penstock.launch.spec import MARGIN_S, RunSpec


def settings_of_run(spec: RunSpec) -> list[Setting]:
    """Return the settings of a run that do not depend on its engine."""
    nodes = spec.nodes
    count = f"{nodes.least} to {nodes.most} nodes" if nodes.is_elastic else f"{nodes.most} of them, always"
    found = [
        Setting("nodes", str(nodes), count),
        Setting("processes", str(spec.processes), "of each node, one per device"),
        Setting(
            "rendezvous",
            "c10d" if nodes.is_elastic else "static",
            "nodes join and leave: torch elastic renumbers them"
            if nodes.is_elastic
            else "rank order is the engine's order of nodes, so neighbours stay neighbours",
        ),
        Setting("grace", f"{spec.grace_s:g} s", "from a request to stop until the kill"),
        Setting(
            "guard.stop_within_s",
            f"{spec.save_within_s:g}",
            f"the grace less a margin of {MARGIN_S:g} s, unless the recipe sets it",
        ),
        Setting(
            "idle_starts",
            str(spec.idle_starts),
            "starts in a row without a new checkpoint, then exit code 76",
        ),
    ]
    found += [Setting(name, value, "--env") for name, value in spec.environment]
    found += [
        Setting(secret.name, f"({secret.source})", "by reference: no file holds the value")
        for secret in spec.secrets
    ]
    if spec.networks:
        reason = "each node checks that it has them, and derives NCCL's and gloo's variables there"
        found.append(Setting("networks", ",".join(spec.networks), reason))
    if nodes.is_elastic:
        found.append(
            Setting(
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
                "1",
                "else an unchanged first node does not publish its address again, and a join "
                "ends all nodes after a minute",
            )
        )
    return found
