"""Specification of a server on Kubernetes: what the serving renderer renders, one frozen value."""

from dataclasses import dataclass

from penstock.core.errors import UsageError
from penstock.core.limits import Limit, check_limits, limited
from penstock.launch.pods.pod import PodSpec
from penstock.launch.spec import GRACE, MARGIN_S, NodeRange, Secret

LEAVE_S = 5.0
"""Seconds that a stopping pod still takes requests: proxies learn only then that it leaves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSpec:
    """A model to be served by replicas of one pod."""

    name: str
    model: str
    """Path of the model's folder in the pod."""
    python: str
    pod: PodSpec
    replicas: NodeRange
    """Number of pods: fixed, or from a least to a most, by the answers that wait."""
    options: tuple[str, ...] = ()
    """Options of `penstock serve`, handed through."""
    environment: tuple[tuple[str, str], ...] = ()
    secrets: tuple[Secret, ...] = ()
    devices: int = limited(Limit(least=1, option="processes"), 1)
    """Devices of a pod."""
    grace_s: float = limited(GRACE, 60.0)
    """Time from a request to stop until a pod is killed: open answers must end within."""
    startup_s: float = limited(Limit(least=1), 1800.0)
    """Longest time to load the model; a pod that needs longer is started again."""
    port: int = limited(Limit(least=1, most=65_535), 8000)
    """Port of the server."""
    waiting_per_pod: int = limited(Limit(least=1, option="waiting"), 4)
    """Queued answers per pod before another pod starts, with --nodes MIN:MAX."""
    is_kserve: bool = False
    """Deploy an InferenceService of KServe, instead of a Deployment with a Service."""

    def __post_init__(self) -> None:
        check_limits(self)
        if self.drain_s < 1:
            raise UsageError(
                f"The grace is too short: a pod takes requests for {LEAVE_S:g} s more, then ends its "
                f"answers, and exits within {MARGIN_S:g} s",
                got=f"{self.grace_s:g} s",
                fix=f"Give --grace {LEAVE_S + MARGIN_S + 10:g} or more.",
            )

    @property
    def drain_s(self) -> float:
        """Seconds for open answers to end."""
        return self.grace_s - LEAVE_S - MARGIN_S
