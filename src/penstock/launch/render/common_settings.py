"""Settings that every engine gives the processes of a run, each with its reason."""

from penstock.core.network.settings import Setting
from penstock.launch.spec import MARGIN_S, RunSpec


def settings_of_run(spec: RunSpec) -> list[Setting]:
    """Return the settings of a run that do not depend on its engine."""
    nodes = spec.nodes
    count = f"{nodes.least} to {nodes.most} nodes" if nodes.is_elastic else f"{nodes.most} of them, always"
    found = [
        Setting(name="nodes", value=str(nodes), reason=count),
        Setting(name="processes", value=str(spec.processes), reason="of each node, one per device"),
        Setting(
            name="rendezvous",
            value="c10d" if nodes.is_elastic else "static",
            reason="nodes join and leave: torch elastic renumbers them"
            if nodes.is_elastic
            else "rank order is the engine's order of nodes, so neighbours stay neighbours",
        ),
        Setting(name="grace", value=f"{spec.grace_s:g} s", reason="from a request to stop until the kill"),
        Setting(
            name="guard.stop_within_s",
            value=f"{spec.save_within_s:g}",
            reason=f"the grace less a margin of {MARGIN_S:g} s, unless the recipe sets it",
        ),
        Setting(
            name="idle_starts",
            value=str(spec.idle_starts),
            reason="starts in a row without a new checkpoint, then exit code 76",
        ),
    ]
    found += [Setting(name=name, value=value, reason="--env") for name, value in spec.environment]
    found += [
        Setting(name=secret.name, value=f"({secret.source})", reason="by reference: no file holds the value")
        for secret in spec.secrets
    ]
    if spec.networks:
        reason = "each node checks that it has them, and derives NCCL's and gloo's variables there"
        found.append(Setting(name="networks", value=",".join(spec.networks), reason=reason))
    if nodes.is_elastic:
        found.append(
            Setting(
                name="TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
                value="1",
                reason="else an unchanged first node does not publish its address again, and a join "
                "ends all nodes after a minute",
            )
        )
    return found
