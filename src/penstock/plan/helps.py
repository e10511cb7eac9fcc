"""What would make a plan faster: other machines, other settings; each by predicting the step again; pure."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from penstock.core.errors import ConfigError
from penstock.plan.hardware import Cluster
from penstock.plan.job import Job
from penstock.plan.predict import predict

_WORTH_SAYING = 0.01


class Help(NamedTuple):
    """One change and what it gives."""

    change: str
    gain: float
    """More tokens a second, as a share."""
    exact: bool
    """Whether the same numbers are trained; else fewer bits travel or are multiplied."""


def what_would_help(job: Job, cluster: Cluster) -> list[Help]:
    """Return what would make a job faster, the most helpful first; memory is not looked at."""
    now = predict(job, cluster).tokens_per_s_per_device
    found = []
    for change, other_job, other_cluster, exact in _changes(job, cluster):
        try:
            then = predict(other_job, other_cluster).tokens_per_s_per_device
        except ConfigError:  # not for these devices
            continue
        if then > (1 + _WORTH_SAYING) * now:
            found.append(Help(change, then / now - 1, exact))
    return sorted(found, key=lambda one: -one.gain)


def _changes(job: Job, cluster: Cluster) -> Iterator[tuple[str, Job, Cluster, bool]]:
    if cluster.nodes > 1:
        more = 2 * cluster.nics
        yield f"with {more} NICs a node", job, replace(cluster, nics=more), True
        faster = replace(cluster, nic_gbit_s=4 * cluster.nic_gbit_s, usable_gbit_s=4 * cluster.usable_gbit_s)
        yield f"with NICs of {faster.nic_gbit_s:g} Gbit/s", job, faster, True
        if cluster.transport == "tcp":
            yield "with RDMA instead of TCP", job, replace(cluster, transport="rdma", usable_gbit_s=0.0), True
    twice = replace(job, num_micro_batches=2 * job.num_micro_batches)
    yield "with a batch of twice as many rows", twice, cluster, False
    yield "with no activation computed again", replace(job, modes="keep"), cluster, True
    yield "with all parameters kept through a step", replace(job, keep_mib=math.inf), cluster, True
    if job.kernels != "compiled":
        yield "with compiled blocks", replace(job, kernels="compiled"), cluster, True
    if job.gather == "compute":
        yield "with weights gathered in int8", replace(job, gather="int8"), cluster, False
    if job.reduce == "float32":
        yield "with gradients reduced in int8", replace(job, reduce="int8"), cluster, False
    if job.linear == "compute" and cluster.device.float8_tflops:
        yield "with linear layers in float8", replace(job, linear="float8_rowwise"), cluster, False
